"""`run_server` as a process: loading, signals, exit codes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from server_harness import chat_body, read_events

SCRIPT = """
import asyncio, sys
from fake_engine import FakeEngine, Script
from termgen.config import ServerConfig
from termgen.errors import ModelError
from termgen.server import run_server

mode = sys.argv[1]

async def start(on_progress):
    on_progress("reading weights", 0.5)
    if mode == "fails":
        raise ModelError("no weights")
    if mode == "loads":
        await asyncio.sleep(600)
    return FakeEngine(script=Script(pieces=["x"] * 3, delay_s=1.0 if mode == "slow" else 0))

async def stop():
    print("engine stopped", flush=True)

try:
    code = run_server(start, stop, ServerConfig(port=int(sys.argv[2]), drain_timeout=20))
except ModelError as error:
    print(f"error: {error}", flush=True)
    code = 2
sys.exit(code)
"""


@contextmanager
def running(mode: str, tmp_path: Path) -> Generator[tuple[subprocess.Popen[str], str], None, None]:
    """The process and its URL, read from its log."""
    script = tmp_path / "serve.py"
    script.write_text(SCRIPT)
    here = Path(__file__).parents[1] / "harness"
    path = os.pathsep.join((str(here), str(here.parents[1])))
    process = subprocess.Popen(
        [sys.executable, str(script), mode, str(_free_port())],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    try:
        yield process, f"http://127.0.0.1:{process.args[3]}"  # type: ignore[index]
    finally:
        process.kill()
        process.wait()


def _free_port() -> int:
    import socket

    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def wait_for(url: str, status: int) -> httpx.Response:
    for _ in range(400):
        try:
            response = httpx.get(f"{url}/health")
        except httpx.ConnectError:
            response = None
        if response is not None and response.status_code == status:
            return response
        time.sleep(0.05)
    raise AssertionError(f"{url} never answered {status}")


def ended(process: subprocess.Popen[str]) -> str:
    output, _ = process.communicate(timeout=20)
    assert "Traceback" not in output, output
    return output


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_cleanly(number: signal.Signals, tmp_path: Path) -> None:
    with running("ok", tmp_path) as (process, url):
        wait_for(url, 200)
        answer = httpx.post(f"{url}/v1/chat/completions", json=chat_body())
        assert answer.json()["choices"][0]["message"]["content"] == "xxx"
        process.send_signal(number)
        output = ended(process)
        assert process.returncode == 0
    assert "reading weights" in output
    assert f"serves at {url}" in output
    assert '"POST /v1/chat/completions" 200' in output
    assert output.rstrip().endswith("engine stopped")


def test_running_requests_finish_before_it_ends(tmp_path: Path) -> None:
    with running("slow", tmp_path) as (process, url):
        wait_for(url, 200)
        body = chat_body(stream=True)
        with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=20) as response:
            chunks = response.iter_bytes()
            received = next(chunks)
            process.send_signal(signal.SIGTERM)
            received += b"".join(chunks)
        assert read_events(received)[-1]["choices"][0]["finish_reason"] == "stop"
        ended(process)
        assert process.returncode == 0


def test_a_second_signal_does_not_wait(tmp_path: Path) -> None:
    with running("slow", tmp_path) as (process, url):
        wait_for(url, 200)
        body = chat_body(stream=True)
        with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=20) as response:
            chunks = response.iter_bytes()
            received = next(chunks)
            process.send_signal(signal.SIGTERM)
            for _ in range(100):
                if httpx.get(f"{url}/ready").json() == {"status": "draining"}:
                    break
                time.sleep(0.01)
            process.send_signal(signal.SIGTERM)
            received += b"".join(chunks)
        assert read_events(received)[-1]["error"]["code"] == "draining"
        output = ended(process)
        assert process.returncode == 0
    assert output.rstrip().endswith("engine stopped")


def test_a_signal_while_loading(tmp_path: Path) -> None:
    with running("loads", tmp_path) as (process, url):
        told = wait_for(url, 503).json()
        assert told == {"status": "loading", "phase": "reading weights", "progress": 0.5}
        process.send_signal(signal.SIGINT)
        output = ended(process)
        assert process.returncode == 0
    assert output.rstrip().endswith("engine stopped")


def test_a_model_that_does_not_load_is_the_callers_error(tmp_path: Path) -> None:
    with running("fails", tmp_path) as (process, _):
        output = ended(process)
        assert process.returncode == 2
    assert output.rstrip().endswith("error: no weights")
    assert "engine stopped" in output
