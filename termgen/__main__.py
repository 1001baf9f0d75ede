"""`python -m termgen` is the `termgen` command."""

from __future__ import annotations

import sys

from termgen.cli import main

sys.exit(main())
