"""Programs in the environment of clients that cannot be installed beside the others, see the
README: `.venv-clients`, or that of CLIENTS_PYTHON.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

CLIENTS_PYTHON = Path(__file__).parents[2] / ".venv-clients" / "bin" / "python"


def printed_by_others(program: str, *arguments: str) -> Any:
    """The last line, JSON, of a program that needs clients incompatible with the others."""
    python = os.environ.get("CLIENTS_PYTHON")
    if python is None:
        if not CLIENTS_PYTHON.exists():
            pytest.skip("needs .venv-clients with tests/other_clients.txt; see the README")
        python = str(CLIENTS_PYTHON)
    environment = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True", "PYTHONPATH": ""}
    asked = subprocess.run(
        [python, "-c", program, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment,
    )
    assert asked.returncode == 0, asked.stderr
    return json.loads(asked.stdout.splitlines()[-1])
