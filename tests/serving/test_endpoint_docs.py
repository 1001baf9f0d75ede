"""The examples of docs/endpoints.md work as the page says, against the real server."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "endpoints.md").read_text(encoding="utf-8")
BASE = "http://127.0.0.1:8000"
BLOCKS = re.findall(r"```(python|sh)\n(.*?)```", PAGE, flags=re.S)
ASKING = [block for kind, block in BLOCKS if kind == "python" and "/v1/events" not in block]
LISTENING = [block for kind, block in BLOCKS if kind == "python" and "/v1/events" in block]
CURLS = [block for kind, block in BLOCKS if kind == "sh" and "# {" in block]


def test_the_page_has_the_examples() -> None:
    assert (len(ASKING), len(LISTENING), len(CURLS)) == (2, 1, 1)


def test_python_examples(smollm2_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    for code in ASKING:
        code = code.replace(BASE, smollm2_url).replace("smollm2-135m", "smollm2")
        code = code.replace("max_tokens=50", "max_tokens=4")
        code = code.replace('"Name a river.").', '"Name a river.", max_output_tokens=4).')
        exec(compile(code, "docs/endpoints.md", "exec"), {})
        assert len(capsys.readouterr().out.strip()) > 3


def test_the_example_that_listens(smollm2_url: str) -> None:
    code = LISTENING[0].replace(BASE, smollm2_url)
    listener = subprocess.Popen(
        [sys.executable, "-u", "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    timer = threading.Timer(60, listener.kill)
    timer.start()
    try:
        assert listener.stdout is not None
        assert listener.stdout.readline() == "0 running\n"
        httpx.post(
            f"{smollm2_url}/v1/completions", json={"prompt": "a", "max_tokens": 3}, timeout=60
        )
        lines = [listener.stdout.readline() for _ in range(2)]
        assert any(line.endswith(" events\n") for line in lines), lines
    finally:
        timer.cancel()
        listener.kill()
        listener.communicate()


def test_curl_examples(smollm2_url: str) -> None:
    """The answers shown are the real ones, except for the context that this server was given."""
    commands = CURLS[0].strip().split("\n")
    for command, answer in zip(commands[::2], commands[1::2], strict=True):
        words = shlex.split(command)
        url = words[1].replace(BASE, smollm2_url)
        content = words[words.index("-d") + 1]
        told = httpx.post(url, content=content, headers={"content-type": "application/json"})
        shown = answer.removeprefix("# ").replace('"max_model_len":8192', '"max_model_len":1024')
        assert told.text == shown
