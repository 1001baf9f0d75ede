"""The command line in the test's process or in a child process, without the user's settings."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from termgen.commands import cli

ENGINE = ["--device", "cpu", "--dtype", "float32", "--max-model-len", "256", "--threads", "1"]


@contextmanager
def nobodys_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Neither the user's config file nor variables reach the test, and the SIGTERM handler that
    `main` sets does not outlive it."""
    for name in os.environ:
        if name.startswith("TERMGEN_") and name != "TERMGEN_CACHE":
            monkeypatch.delenv(name)
    empty = tmp_path / "empty.toml"
    empty.write_text("")
    monkeypatch.setenv("TERMGEN_CONFIG", str(empty))
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    code = cli.main(argv)
    out, err = capsys.readouterr()
    return code, out, err


def one_line_error(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    code, out, err = run(capsys, *argv)
    assert (code, out) == (2, "")
    assert err.startswith("termgen: error: ") and err.endswith("\n") and err.count("\n") == 1
    return err


def process(*argv: str, **kwargs: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "termgen", *argv],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        **kwargs,
    )
