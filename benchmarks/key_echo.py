"""Time from a key to its letter on a terminal of 100 x 30, in `termgen chat`.

    python benchmarks/key_echo.py [--model smollm2-135m] [--starts 5] [--keys 40]

The whole program runs in a pseudo-terminal, and an emulator reads what it draws: a key is echoed
when the screen shows it. first is the first key after the first frame of each start, while the
model loads; the others are typed into the prompt of an idle chat, and while SmolLM2 writes an
answer on the cores that the screen draws on.
"""

from __future__ import annotations

import codecs
import fcntl
import os
import pty
import random
import select
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pyte
from machine import machine_facts, parser_of, percentiles, print_rows, write_report

from termgen.library.catalog import DEFAULT_MODEL

COLUMNS, LINES = 100, 30
LIMIT_S = 120.0
REST_S = 0.06
"""Between an echo and the next key, as of someone who types fast."""
FIRST_FRAME = "Ask anything"
STORY = "Tell me a very long story about a river."
ALPHABET = "αβγδεζηθκλμνξπρστφχψω"
"""Letters that no text of the screen has."""
CTRL_Q, CTRL_U, ESC = "\x11", "\x15", "\x1b"


class EchoTerminal:
    """A program in a pseudo-terminal, and what it shows."""

    def __init__(self, argv: Sequence[str], environment: Mapping[str, str]) -> None:
        self._main, side = pty.openpty()
        fcntl.ioctl(side, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
        self.child = subprocess.Popen(
            argv, stdin=side, stdout=side, stderr=side, env=environment, start_new_session=True
        )
        os.close(side)
        self._screen = pyte.Screen(COLUMNS, LINES)
        self._stream = pyte.Stream(self._screen)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    @property
    def text(self) -> str:
        return "\n".join(self._screen.display)

    def send(self, keys: str) -> None:
        os.write(self._main, keys.encode())

    def wait_for(self, is_there: Callable[[str], object]) -> float:
        """The time at which the screen shows it."""
        end = time.monotonic() + LIMIT_S
        while not is_there(self.text):
            assert time.monotonic() < end, self.text
            self.read(0.5)
        return time.perf_counter()

    def read(self, timeout_s: float) -> None:
        """Take what is drawn within a time, if anything is."""
        if select.select([self._main], [], [], timeout_s)[0]:
            self._stream.feed(self._decoder.decode(os.read(self._main, 65536)))

    def rest(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            self.read(left)

    def echoes_ms(self, letters: str) -> list[float]:
        """Type them one by one, and clear the line; the time until each is on the screen."""
        found = []
        for number in range(1, len(letters) + 1):
            sent = time.perf_counter()
            self.send(letters[number - 1])
            typed = letters[:number]
            found.append((self.wait_for(lambda text: typed in text) - sent) * 1e3)  # noqa: B023
            self.rest(REST_S)
        self.send(CTRL_U)
        self.wait_for(lambda text: letters not in text)
        return found

    def close(self) -> None:
        if self.child.poll() is None:
            os.killpg(self.child.pid, signal.SIGKILL)
        self.child.wait()
        os.close(self._main)


@contextmanager
def chat(*flags: str, environment: Mapping[str, str]) -> Iterator[EchoTerminal]:
    """`termgen chat`, from its first frame on."""
    terminal = EchoTerminal([sys.executable, "-m", "termgen", "chat", *flags], environment)
    try:
        terminal.wait_for(lambda text: FIRST_FRAME in text)
        yield terminal
    finally:
        terminal.close()


def letters_of(number: int) -> str:
    return "".join(random.choices(ALPHABET, k=number))


def environment_in(folder: Path) -> dict[str, str]:
    """The environment without the user's settings and chats."""
    kept = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    (folder / "empty.toml").write_text("")
    files = {"TERMGEN_CONFIG": "empty.toml", "TERMGEN_CHAT_DB": "chats.sqlite3"}
    return kept | {k: str(folder / v) for k, v in files.items()} | {"TERM": "xterm-256color"}


def measure(model: str, num_starts: int, num_keys: int) -> dict[str, list[float]]:
    with tempfile.TemporaryDirectory() as folder:
        environment = environment_in(Path(folder))
        flags = ("--model", model, "--max-tokens", "900")
        first = []
        for _ in range(num_starts - 1):
            with chat(*flags, environment=environment) as terminal:
                first += terminal.echoes_ms(letters_of(1))
        with chat(*flags, environment=environment) as terminal:
            first += terminal.echoes_ms(letters_of(1))
            found = {"first": first}
            terminal.wait_for(lambda text: "model is loaded" not in text)
            terminal.rest(2.0)
            found["idle"] = terminal.echoes_ms(letters_of(num_keys))
            terminal.send(f"{STORY}\r")
            terminal.rest(1.5)
            found["while an answer is written"] = terminal.echoes_ms(letters_of(num_keys))
            terminal.send(ESC)
            terminal.send(CTRL_Q)
            return found


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--starts", type=int, default=5)
    parser.add_argument("--keys", type=int, default=40)
    args = parser.parse_args()
    facts = machine_facts()
    found = measure(args.model, args.starts, args.keys)
    print_rows({"keys": name, **percentiles(values)} for name, values in found.items())
    write_report(args, found, facts)


if __name__ == "__main__":
    main()
