"""Screens under test never animate."""

from __future__ import annotations

import os

os.environ["TEXTUAL_ANIMATIONS"] = "none"  # read when textual is imported
os.environ.pop("NO_COLOR", None)
