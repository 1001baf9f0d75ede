"""Records the first quarter of an hour with termgen: a chat, its tools, the dashboard, a bench.

    python docs/make_recording.py                 # docs/images/first-steps.cast and .svg
    python docs/make_recording.py --svg-only      # the .svg again, from the .cast

Keys are typed into a real terminal, where the real program runs with the default model; the
screens are what it wrote. Only time is changed, as `SHORTENED` says, and the recording's own home
folder is `~`. The .cast is asciinema's format, version 2. Needs the packages of the extra `test`.
"""

from __future__ import annotations

import argparse
import codecs
import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import sys
import termios
import time
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from recording_svg import Cell, Frame, Shown, Style, animated_svg

FOLDER = Path(__file__).parent / "images"
NAME = "first-steps"
COLUMNS, ROWS = 100, 34
TITLE = "termgen: a chat, its tools, the dashboard, a bench"
SHORTENED = "waiting and answers are shortened; figures on the screen are the real ones"
KEY_S = 0.045
"""Between two keys that are typed."""
LONGEST_S = 3.0
"""Nothing stands still for longer."""
PER_SECOND = 4.0
"""Frames of the moving picture."""
LAST_S = 4.0
"""The last frame stays before it begins anew."""
QUESTION = "Why does bread rise? Answer in one sentence."
STORY = "Write twenty tips for growing tomatoes, as a numbered list."
BENCH = "termgen bench serve --num-prompts 8 --random-input-len 64 --random-output-len 24"
FILES = {
    "notes.md": "# Garden\n\nSow the beans after the ice saints.\n",
    "plants.csv": "plant,row\nbean,1\npea,2\n",
}
UNKNOWN = re.compile(
    r"\x1b\[[<=>][0-9;?]*[a-zA-Z]|\x1b\[\?[0-9;]*[ups]|\x1b\[[0-9;?]*\$[a-z]"
    r"|\x1b[P_^].*?\x1b\\|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b\[[0-9;]* q",
    re.DOTALL,
)
"""Questions to the terminal, its keyboard and its title, which the emulator has no answer to."""
UNFINISHED = re.compile(r"\x1b(?:\[[0-9;?<=>$ ]*|[P_^\]][^\x07\x1b]*\x1b?)?$")
OTHER_SCREEN = re.compile(r"(\x1b\[\?1049[hl]|\x1b\[\?2026[hl])")
COLOURS = {
    **{"black": "#2b303b", "red": "#ff6b6b", "green": "#8bd48b", "brown": "#e8b65a"},
    **{"blue": "#6aa9f4", "magenta": "#c39af2", "cyan": "#6ed3d3", "white": "#d7dae0"},
}
SECRETS = re.compile(
    r"/(?:root|home|tmp|opt|usr|var|work|Users)/|sk-[A-Za-z0-9]{8}|hf_[A-Za-z0-9]{8}"
)
"""Paths of a machine, and keys: a recording with one of them is refused."""


class Event(NamedTuple):
    """Something that the terminal was sent, and when."""

    seconds: float
    text: str


class Squeeze(NamedTuple):
    """A stretch of time that shall last `length` seconds, where it took longer."""

    begin: float
    end: float
    length: float


# -- time --------------------------------------------------------------------------------------


def squeezed(events: Sequence[Event], squeezes: Sequence[Squeeze]) -> list[Event]:
    """The events with stretches shortened, and no pause above `LONGEST_S`. Squeezes do not
    overlap."""
    found: list[Event] = []
    before = now = 0.0
    for event in events:
        now += min(LONGEST_S, _mapped(event.seconds, squeezes) - _mapped(before, squeezes))
        before = event.seconds
        found.append(Event(round(now, 3), event.text))
    return found


def _mapped(seconds: float, squeezes: Sequence[Squeeze]) -> float:
    saved = 0.0
    for begin, end, length in squeezes:
        too_long = max(0.0, end - begin - length)
        if seconds > begin and too_long:
            saved += too_long * min(1.0, (seconds - begin) / (end - begin))
    return seconds - saved


# -- the recording's file ----------------------------------------------------------------------


def write_cast(path: Path, events: Sequence[Event]) -> None:
    head = {
        "version": 2,
        "width": COLUMNS,
        "height": ROWS,
        "title": f"{TITLE} ({SHORTENED})",
        "env": {"TERM": "xterm-256color"},
    }
    lines = [json.dumps(head)]
    lines += [json.dumps([e.seconds, "o", e.text], ensure_ascii=False) for e in events]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def read_cast(path: Path) -> list[Event]:
    _, *lines = path.read_text(encoding="utf-8").splitlines()
    return [Event(at, text) for at, kind, text in map(json.loads, lines) if kind == "o"]


def without_folder(events: Sequence[Event], folder: Path) -> list[Event]:
    """The home folder of the recording as `~`, with blanks so that all else stays where it is."""
    home = str(folder)
    return [
        event._replace(
            text=re.sub(
                re.escape(home) + r"[\w/]*",
                lambda path: path[0].replace(home, "~").ljust(len(path[0])),
                event.text,
            )
        )
        for event in events
    ]


def check_clean(text: str, host: str = "") -> None:
    """Raises ValueError for a path of a machine, its name, or a key."""
    found = SECRETS.search(text) or (host and re.search(rf"\b{re.escape(host)}\b", text))
    if found:
        around = text[max(0, found.start() - 40) : found.end() + 40]
        raise ValueError(f"{found[0]!r} is on the screen: {around!r}")


def words_of(shown: Sequence[Shown]) -> str:
    """All that can be read, each row once."""
    rows = {row: None for one in shown for row in one.frame}
    return "\n".join("".join(cell.text for cell in row) for row in rows)


# -- the screen --------------------------------------------------------------------------------


class Screen:
    """What a terminal shows after all that it was sent."""

    def __init__(self) -> None:
        import pyte

        self._pyte = pyte
        self._screen = pyte.Screen(COLUMNS, ROWS)
        self._stream = pyte.Stream(self._screen)
        self._shell: Any = None
        """The screen of the shell, while a program has one of its own."""
        self._rest = ""
        self.is_whole = True
        """False in the middle of what a program draws at once."""

    def feed(self, text: str) -> None:
        text = self._rest + text
        unfinished = UNFINISHED.search(text)
        self._rest = unfinished[0] if unfinished is not None else ""
        text = UNKNOWN.sub("", text[: len(text) - len(self._rest)])
        for part in OTHER_SCREEN.split(text):
            if part.startswith("\x1b[?2026"):
                self.is_whole = part.endswith("l")
            elif part == "\x1b[?1049h":
                self._shell = deepcopy(self._screen)
                self._screen.erase_in_display(2)
                self._screen.cursor_position()
            elif part == "\x1b[?1049l" and self._shell is not None:
                self._screen, self._shell = self._shell, None
                self._stream = self._pyte.Stream(self._screen)
            else:
                self._stream.feed(part)

    @property
    def text(self) -> str:
        return "\n".join(self._screen.display)

    @property
    def frame(self) -> Frame:
        cursor = self._screen.cursor
        rows = []
        for y in range(ROWS):
            line = self._screen.buffer[y]
            row = [Cell(line[x].data, _style(line[x])) for x in range(COLUMNS)]
            if y == cursor.y and not cursor.hidden and cursor.x < COLUMNS:
                row[cursor.x] = Cell(row[cursor.x].text or " ", Style("#10131a", "#d7dae0"))
            rows.append(tuple(row))
        return tuple(rows)


def _style(char: Any) -> Style:
    colour, background = _colour(char.fg), _colour(char.bg)
    if char.reverse:
        colour, background = background or "#10131a", colour or "#d7dae0"
    return Style(colour, background, char.bold, char.italics, char.underscore)


def _colour(name: str) -> str | None:
    if name == "default":
        return None
    plain = name.removeprefix("bright")
    return COLOURS.get(plain) or f"#{name}"


def frames_of(events: Sequence[Event]) -> Iterator[Shown]:
    """The screen some times a second, each picture once as long as nothing changes."""
    screen, shown, since = Screen(), None, 0.0
    due = 0.0
    for event, following in zip(events, [*events[1:], None], strict=True):
        screen.feed(event.text)
        is_last = following is None
        if following is not None and (following.seconds < due or not screen.is_whole):
            continue
        if following is not None and following.seconds - event.seconds < 0.02:
            continue  # more of the same picture is on its way
        frame = screen.frame
        if frame == shown and not is_last:
            continue
        if shown is not None:
            yield Shown(shown, event.seconds - since)
        shown, since = frame, event.seconds
        due = event.seconds + 1 / PER_SECOND
    if shown is not None:
        yield Shown(shown, LAST_S)


# -- the terminal ------------------------------------------------------------------------------


class Terminal:
    """A shell in a new terminal, in a folder of its own; what it writes is kept with its time."""

    def __init__(self, folder: Path) -> None:
        cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
        work, programs = folder / "garden", folder / "bin"
        for made in (work, programs):
            made.mkdir()
        for name, text in FILES.items():
            (work / name).write_text(text)
        program = programs / "termgen"
        program.write_text(f'#!/bin/sh\nexec {sys.executable} -m termgen "$@"\n')
        program.chmod(0o755)
        kept = {name: os.environ[name] for name in ("PYTHONPATH", "LANG") if name in os.environ}
        environment = {
            **kept,
            "HOME": str(folder),
            "XDG_CACHE_HOME": cache,
            "PATH": f"{programs}:/usr/bin:/bin",
            "TERM": "xterm-256color",
            "COLORTERM": "truecolor",
            "LC_ALL": "C.UTF-8",
            "PS1": "$ ",
            "HISTFILE": "/dev/null",
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        self._pid, self._fd = pty.fork()
        if self._pid == 0:
            os.chdir(work)
            os.execve("/bin/bash", ["bash", "--norc", "--noprofile", "-i"], environment)
        size = struct.pack("HHHH", ROWS, COLUMNS, 0, 0)
        fcntl.ioctl(self._fd, termios.TIOCSWINSZ, size)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._began = time.monotonic()
        self._screen = Screen()
        self.events: list[Event] = []
        self.squeezes: list[Squeeze] = []

    @property
    def now(self) -> float:
        return time.monotonic() - self._began

    @property
    def text(self) -> str:
        return self._screen.text

    def watch(self, seconds: float) -> None:
        """Let time go by."""
        until = self.now + seconds
        while (left := until - self.now) > 0:
            self._read(left)

    def type(self, text: str) -> None:
        for key in text:
            os.write(self._fd, key.encode())
            self.watch(KEY_S)

    def press(self, keys: str, seconds: float = 1.0) -> None:
        os.write(self._fd, keys.encode())
        self.watch(seconds)

    def wait(
        self, is_there: Callable[[str], bool], *, shown_s: float, timeout_s: float = 120.0
    ) -> None:
        """Wait for what the screen shows; in the recording this takes `shown_s` at most. Raises
        TimeoutError."""
        begin = self.now
        while not is_there(self.text):
            self._read(0.2)
            if self.now - begin > timeout_s:
                raise TimeoutError(f"not shown after {timeout_s:g} s:\n{self.text}")
        self.squeezes.append(Squeeze(begin, self.now, shown_s))

    def _read(self, seconds: float) -> None:
        ready, _, _ = select.select([self._fd], [], [], seconds)
        if ready:
            text = self._decoder.decode(os.read(self._fd, 65_536))
            self.events.append(Event(self.now, text))
            self._screen.feed(text)

    def close(self) -> None:
        os.kill(self._pid, signal.SIGHUP)
        os.close(self._fd)
        os.waitpid(self._pid, 0)


def play(terminal: Terminal) -> None:
    """The scenes."""
    ENTER, F2, QUIT, MCP, ESCAPE = "\r", "\x1bOQ", "\x11", "\x1bm", "\x1b"
    terminal.wait(lambda text: "$" in text, shown_s=1.0)
    terminal.type("termgen chat --tools files")
    terminal.press(ENTER, 0.2)
    terminal.wait(lambda text: "Ask anything" in text, shown_s=3.0)
    terminal.watch(1.5)
    terminal.type(QUESTION)
    terminal.press(ENTER, 0.5)
    terminal.wait(lambda text: text.count("TTFT") > 1, shown_s=6.0)
    terminal.watch(2.0)
    terminal.press(MCP, 3.0)  # the tools, and that this model does not know how to call one
    terminal.press(ESCAPE, 1.0)
    terminal.type(STORY)
    terminal.press(ENTER, 1.0)
    terminal.press(F2, 3.0)
    terminal.press("t", 2.5)
    terminal.press("k", 2.5)
    terminal.press(F2, 1.5)
    terminal.press(ESCAPE, 1.5)  # ends the answer, where it has not ended by itself
    terminal.press(QUIT, 0.2)
    terminal.wait(lambda text: text.rstrip().endswith("$"), shown_s=1.0)
    terminal.type(BENCH)
    terminal.press(ENTER, 0.2)
    terminal.wait(lambda text: text.rstrip().endswith("$") and "measured" in text, shown_s=6.0)
    terminal.watch(0.5)


def record() -> list[Event]:
    with TemporaryDirectory() as folder:
        terminal = Terminal(Path(folder))
        try:
            play(terminal)
        finally:
            terminal.close()
        return squeezed(without_folder(terminal.events, Path(folder)), terminal.squeezes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--svg-only", action="store_true", help="make the .svg from the .cast")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where the files go")
    options = parser.parse_args()
    cast, svg = (options.folder / f"{NAME}{end}" for end in (".cast", ".svg"))
    events = read_cast(cast) if options.svg_only else record()
    shown = list(frames_of(events))
    for text in (words_of(shown), "".join(event.text for event in events)):
        check_clean(text, os.uname().nodename)
    if not options.svg_only:
        write_cast(cast, events)
    svg.write_text(animated_svg(shown, title=TITLE, still=len(shown) // 2), encoding="utf-8")
    print(f"{cast}: {cast.stat().st_size:,} bytes; {svg}: {svg.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
