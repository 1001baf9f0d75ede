"""The engine starts on a CPU where packages of the fast paths are not installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys
for name in sys.argv[2:]:
    sys.modules[name] = None
from termgen.config import EngineConfig
from termgen.engine.loop.engine import SyncEngine
settings = {"device": "cpu", "skip_tokenizer_init": True}
SyncEngine(EngineConfig(model=sys.argv[1], **settings)).shutdown()
"""


@pytest.mark.parametrize("missing", [["triton"], ["llvmlite"], ["triton", "llvmlite"]])
def test_an_engine_starts(missing: list[str], tiny_llama_dir: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, str(tiny_llama_dir), *missing]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
