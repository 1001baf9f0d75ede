"""Whole commands as users start them: `serve` over a socket, `chat` in a pseudo-terminal."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import shlex
import signal
import socket
import sqlite3
import struct
import subprocess
import sys
import termios
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from termgen.system.remembered import Remembered

ENGINE = ("--device", "cpu", "--dtype", "float32", "--threads", "1", "--max-model-len", "256")
LIMIT_S = 60.0


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """The environment without the user's settings."""
    (tmp_path / "empty.toml").write_text("")
    # Another terminal's size is removed too: it would override the test's.
    others = ("COLUMNS", "LINES")
    kept = {k: v for k, v in os.environ.items() if not k.startswith("TERMGEN_") and k not in others}
    return kept | {
        "TERMGEN_CONFIG": str(tmp_path / "empty.toml"),
        "TERMGEN_CHAT_DB": str(tmp_path / "chats.sqlite3"),
        "OMP_NUM_THREADS": "1",
        "TERM": "xterm-256color",
        "PYTHONFAULTHANDLER": "1",
    }


def command(*argv: str) -> list[str]:
    return [sys.executable, "-m", "termgen", *argv]


@contextmanager
def serving(folder: Path, environment: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    argv = command("serve", "--model", str(folder), "--port", "0", "--api-key", "k", *ENGINE)
    with subprocess.Popen(argv, stderr=subprocess.PIPE, text=True, env=environment) as child:
        try:
            yield child
        finally:
            child.kill()


def read_until(child: subprocess.Popen[str], words: str) -> str:
    assert child.stderr is not None
    lines = []
    for line in child.stderr:
        lines.append(line)
        if words in line:
            return line
    raise AssertionError("".join(lines))


def test_serve_answers_and_ends_on_sigterm(
    tiny_llama_dir: Path, environment: dict[str, str]
) -> None:
    with serving(tiny_llama_dir, environment) as child:
        assert "weights " in read_until(child, " memory: ")
        read_until(child, "reading the vocabulary")
        url = re.search(r"http://127\.0\.0\.1:\d+", read_until(child, "serves at"))
        assert url is not None
        body = {"prompt": [5, 6, 7], "max_tokens": 4, "temperature": 0, "ignore_eos": True}
        request = urllib.request.Request(
            url[0] + "/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json", "Authorization": "Bearer k"},
        )
        with urllib.request.urlopen(request, timeout=LIMIT_S) as response:
            assert json.load(response)["usage"]["completion_tokens"] == 4
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(url[0] + "/v1/models", timeout=LIMIT_S)
        child.send_signal(signal.SIGTERM)
        assert child.wait(timeout=LIMIT_S) == 0
        assert child.stderr is not None and "Traceback" not in child.stderr.read()


def test_serve_stopped_while_loading_ends_cleanly(
    tiny_llama_dir: Path, environment: dict[str, str]
) -> None:
    with serving(tiny_llama_dir, environment) as child:
        read_until(child, "loading")
        child.send_signal(signal.SIGINT)
        assert child.wait(timeout=LIMIT_S) == 0
        assert child.stderr is not None
        rest = child.stderr.read()
        assert "Traceback" not in rest and "terminate called" not in rest and "Abort" not in rest


def test_a_port_in_use_is_one_line(tiny_llama_dir: Path, environment: dict[str, str]) -> None:
    with serving(tiny_llama_dir, environment) as child:
        url = re.search(r":(\d+)$", read_until(child, "serves at").strip())
        assert url is not None
        argv = command("serve", "--model", str(tiny_llama_dir), "--port", url[1], *ENGINE)
        second = subprocess.run(argv, capture_output=True, text=True, env=environment)
        assert second.returncode == 2
        assert f"termgen: error: cannot listen on 127.0.0.1:{url[1]}" in second.stderr
        assert "Traceback" not in second.stderr


class Terminal:
    """A program with a pseudo-terminal of 100 x 30 as its controlling terminal."""

    def __init__(self, argv: list[str], environment: dict[str, str]) -> None:
        main, side = pty.openpty()
        fcntl.ioctl(side, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
        self.child = subprocess.Popen(
            argv,
            stdin=side,
            stdout=side,
            stderr=side,
            env=environment,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(side)
        self._main: int | None = main
        self.shown = ""

    def wait_for(self, is_there: Callable[[str], object]) -> None:
        end = time.monotonic() + LIMIT_S
        while not is_there(self.shown):
            assert time.monotonic() < end, self.shown[-2000:]
            self._read(0.5)

    @property
    def plain(self) -> str:
        """The text without colours and cursor moves, which may separate letters drawn at two
        times."""
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.shown)

    def send(self, keys: str) -> None:
        assert self._main is not None
        os.write(self._main, keys.encode())

    def wait(self) -> int:
        end = time.monotonic() + LIMIT_S
        while self.child.poll() is None:  # keep reading, or the program blocks on its output
            assert time.monotonic() < end, self.shown[-2000:]
            self._read(0.2)
        self._read(0.2)
        return self.child.returncode

    def vanish(self) -> None:
        """Close the terminal, as closing its window does."""
        if self._main is not None:
            os.close(self._main)
        self._main = None

    def close(self) -> None:
        self.child.kill()
        self.child.wait()
        self.vanish()

    def _read(self, timeout_s: float) -> None:
        if self._main is None:
            time.sleep(timeout_s)
        elif select.select([self._main], [], [], timeout_s)[0]:
            try:
                self.shown += os.read(self._main, 65536).decode(errors="replace")
            except OSError:  # the program has closed its side
                time.sleep(timeout_s)


@pytest.fixture
def terminal(environment: dict[str, str]) -> Iterator[Callable[..., Terminal]]:
    opened = []

    def start(*argv: str) -> Terminal:
        opened.append(Terminal(command(*argv), environment))
        return opened[-1]

    yield start
    for each in opened:
        each.close()


def test_chat_opens_answers_and_quits(
    terminal: Callable[..., Terminal], tiny_llama_dir: Path
) -> None:
    flags = ("--temperature", "0", "--max-tokens", "8")
    screen = terminal("chat", "--model", str(tiny_llama_dir), *flags, *ENGINE)
    screen.wait_for(lambda shown: "Ask anything" in shown)
    screen.send("Hello, model\r")
    screen.wait_for(lambda shown: "TTFT" in shown)
    screen.send("\x11")  # ctrl+q
    assert screen.wait() == 0
    assert "\x1b[?1049l" in screen.shown, "the terminal's own screen is back"
    assert "Traceback" not in screen.shown


def test_a_chat_that_was_killed_goes_on(
    terminal: Callable[..., Terminal], tiny_llama_dir: Path, environment: dict[str, str]
) -> None:
    def is_saved(_shown: str) -> bool:
        with closing(sqlite3.connect(environment["TERMGEN_CHAT_DB"])) as database:
            return database.execute("SELECT state FROM turns").fetchall() == [("done",)]

    flags = ("--model", str(tiny_llama_dir), "--max-tokens", "8", *ENGINE)
    screen = terminal("chat", *flags)
    screen.wait_for(lambda shown: "Ask anything" in shown)
    screen.send("Hello, model\r")
    screen.wait_for(is_saved)
    screen.child.kill()
    screen = terminal("chat", "--continue", *flags)
    screen.wait_for(lambda shown: "Hello," in shown and "TTFT" in shown)
    screen.send("\x11")  # ctrl+q
    assert screen.wait() == 0
    screen = terminal("chat", "--session", "something else", *flags)
    assert screen.wait() == 2
    assert "no chat is called 'something else'" in screen.shown


def choose_model(environment: dict[str, str], model: Path) -> None:
    """Leave a choice as the model picker of an earlier run would."""
    state = Path(environment["TERMGEN_CONFIG"]).parent / "state"
    environment["XDG_STATE_HOME"] = str(state)
    Remembered(state / "termgen" / "choices.json").write({"model": str(model)})


def test_a_chat_starts_with_the_model_chosen_last(
    terminal: Callable[..., Terminal], tiny_llama_dir: Path, environment: dict[str, str]
) -> None:
    choose_model(environment, tiny_llama_dir)
    screen = terminal("chat", "--max-tokens", "8", *ENGINE)
    screen.wait_for(lambda shown: "Ask anything" in shown)
    screen.send("Hello, model\r")
    screen.wait_for(lambda shown: "TTFT" in shown)
    screen.send("\x11")  # ctrl+q
    assert screen.wait() == 0
    line = screen.shown.split("resume: ")[1].split("\r\n")[0]
    words = shlex.split(line)
    assert words[:4] == ["termgen", "chat", "--model", str(tiny_llama_dir)]
    screen = terminal(*words[1:], *ENGINE)
    screen.wait_for(lambda shown: "Hello," in shown and "TTFT" in shown)
    screen.send("\x11")
    assert screen.wait() == 0


def test_a_model_chosen_last_that_does_not_start_is_named(
    terminal: Callable[..., Terminal], tmp_path: Path, environment: dict[str, str]
) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["MambaForCausalLM"]}')
    (tmp_path / "model.safetensors").write_bytes(b"")
    choose_model(environment, tmp_path)
    screen = terminal("chat", *ENGINE)
    assert screen.wait() == 2
    last = " ".join(screen.shown.split("\x1b[?1049l")[-1].split())
    assert "did not start: " in last and "it is the model chosen last, and --model takes" in last
    assert "Traceback" not in screen.shown


def test_a_bench_is_watched_stopped_and_reported(
    terminal: Callable[..., Terminal], tiny_llama_dir: Path, tmp_path: Path
) -> None:
    """The bench has its own server and shows that engine; ctrl+c ends it in the middle; the report
    and the files follow."""
    load = ("--num-prompts", "900", "--request-rate", "8", "--num-warmups", "1")
    lengths = ("--random-input-len", "8", "--random-output-len", "4")
    files = ("--result-dir", str(tmp_path), "--save-result")
    engine = ("--model", str(tiny_llama_dir), *ENGINE)
    screen = terminal("bench", "serve", "--watch", *load, *lengths, *files, *engine)
    screen.wait_for(lambda _: "measuring" in screen.plain and "answers/s" in screen.plain)
    screen.send("2")
    screen.wait_for(lambda _: "KV blocks" in screen.plain)
    screen.send("1")
    time.sleep(1.0)  # a few answers more
    screen.send("\x03")
    screen.wait_for(lambda _: "report written to" in screen.plain)
    screen.send("q")
    assert screen.wait() == 0
    after = screen.shown.rpartition("\x1b[?1049l")[2]
    assert "termgen bench serve" in after and "stopped early: " in after, after
    assert "Traceback" not in screen.shown
    (result,), (page,) = tmp_path.glob("*.json"), tmp_path.glob("*.html")
    read = json.loads(result.read_text())
    assert read["completed"] > 0 and read["failed"] == 0
    assert read["completed"] + read["cut_off"] == 900
    assert read["total_output_tokens"] == 4 * read["completed"]
    assert "<svg" in page.read_text() and page.stem == result.stem


def test_serve_with_its_dashboard(terminal: Callable[..., Terminal], tiny_llama_dir: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    flags = ("--dashboard", "--model", str(tiny_llama_dir), "--port", port)
    screen = terminal("serve", *flags, *ENGINE)
    screen.wait_for(lambda _shown: "KV blocks" in screen.plain)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=LIMIT_S) as answer:
        assert json.load(answer)["data"][0]["max_model_len"] == 256
    os.kill(screen.child.pid, signal.SIGTERM)
    assert screen.wait() == 0
    assert "Traceback" not in screen.shown


def test_a_model_that_cannot_load_is_one_line_after_the_screen(
    terminal: Callable[..., Terminal], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["MambaForCausalLM"]}')
    screen = terminal("chat", "--model", str(tmp_path), *ENGINE)
    assert screen.wait() == 2
    last = screen.shown.split("\x1b[?1049l")[-1]
    assert "termgen: error:" in last and "Traceback" not in screen.shown


def test_an_unknown_theme_is_one_line_and_no_screen(terminal: Callable[..., Terminal]) -> None:
    for argv in (("chat",), ("serve", "--dashboard", "--port", "0")):
        screen = terminal(*argv, "--theme", "nope")
        assert screen.wait() == 2
        assert screen.shown.startswith("termgen: error: theme must be one of termgen-")
        assert screen.shown.count("\n") == 1
