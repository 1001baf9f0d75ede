"""Traces of panics stay off standard error; all else is written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from termgen.system.native_stderr import STDERR, without_panic_traces

TRACE = (
    b"\nthread '<unnamed>' (12) panicked at src/lib.rs:5:26:\nno entry found\n"
    b"stack backtrace:\n   0: begin\n             at /rustc/x\n   1: core::panic\n"
    b"note: Some details are omitted.\n"
)


@pytest.mark.parametrize("trace", [TRACE, TRACE.split(b"stack", 1)[0], b""])
def test_what_else_is_written_comes_in_order(
    capfd: pytest.CaptureFixture[str], trace: bytes
) -> None:
    def log() -> None:
        os.write(STDERR, b"of another thread\n")

    with pytest.raises(ValueError), without_panic_traces():
        os.write(STDERR, b"before\n")
        thread = threading.Thread(target=log)
        thread.start()
        thread.join()
        os.write(STDERR, trace + b"after\n")
        assert capfd.readouterr().err == ""
        raise ValueError
    assert capfd.readouterr().err == "before\nof another thread\nafter\n"
    os.write(STDERR, b"and on\n")
    assert capfd.readouterr().err == "and on\n"


@pytest.mark.parametrize(
    "damage",
    [
        {
            "post_processor": {
                "type": "TemplateProcessing",
                "single": [{"SpecialToken": {"id": "[X]", "type_id": 0}}],
                "pair": [],
                "special_tokens": {},
            }
        },
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
    ],
    ids=["in-use", "while-read"],
)
def test_a_tokenizer_that_panics_is_refused_without_a_trace(
    tiny_llama_dir: Path, tmp_path: Path, damage: dict[str, object]
) -> None:
    for file in tiny_llama_dir.glob("*.json"):
        (tmp_path / file.name).write_text(file.read_text())
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **damage}))
    program = (
        "import sys; from pathlib import Path\n"
        "from termgen.engine.text.tokenizer import load_tokenizer\n"
        "from termgen.errors import CorruptFileError\n"
        "try: load_tokenizer(Path(sys.argv[1]))\n"
        "except CorruptFileError as error: print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert "tokenizer" in done.stdout and done.stdout.count("\n") == 1
    assert "panicked" not in done.stderr and "backtrace" not in done.stderr


def test_a_closed_standard_error_is_left_closed() -> None:
    program = (
        "import os; os.close(2)\n"
        "from termgen.system.native_stderr import without_panic_traces\n"
        "with without_panic_traces(): pass\n"
        "print('ended')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "ended\n"
