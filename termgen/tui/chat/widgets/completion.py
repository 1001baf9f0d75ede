"""The completion list above the prompt: commands, their arguments, files."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.cells import cell_len
from textual import events, work
from textual.message import Message

from termgen.tui.chat.state import commands
from termgen.tui.chat.state.attachments import as_mention, completions, files_below, open_mention
from termgen.tui.paint.canvas import Canvas
from termgen.tui.paint.sanitize import clean_line
from termgen.tui.paint.spans import Row, Span, cut, fit

MAX_ROWS = 8
MAX_LABEL_CELLS = 44
FILE_COMMANDS = frozenset(("attach", "import", "schema"))
"""Commands whose argument is a file path."""

Arguments = Callable[[], Sequence[tuple[str, str]]]
"""A command's possible arguments: values and their meanings."""


@dataclass(frozen=True, slots=True)
class Choice:
    text: str
    """Replaces the last `replaces` characters before the cursor."""
    replaces: int
    label: str
    help: str = ""
    takes_enter: bool = False
    """Enter accepts the choice as tab does, because the text so far cannot be sent."""


class Completion(Canvas):
    """Hidden while nothing is being completed. The prompt drives it; it never takes the focus."""

    class Taken(Message):
        """A row was clicked."""

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(self._paint, id=id)
        self.arguments: Mapping[str, Arguments] = {}
        """Possible arguments by command name."""
        self.before = ""
        """The text before the cursor, which is being completed."""
        self._paths: list[str] | None = None
        """Files below the working folder, listed when the completion list opened."""
        self._is_finding = False
        self._found: list[Choice] = []
        self._selected = 0
        self._is_moved = False
        """The selection was moved by hand, so enter accepts it."""
        self.display = False

    @property
    def is_open(self) -> bool:
        return bool(self._found)

    @property
    def selected(self) -> Choice:
        return self._found[self._selected]

    @property
    def takes_enter(self) -> bool:
        return self.is_open and (self._is_moved or self.selected.takes_enter)

    def look(self, before: str, *, is_whole: bool) -> None:
        """List the completions of the text before the cursor. `is_whole`: nothing follows the
        cursor."""
        self.before = before
        found = self._of_command(before) if is_whole and before.startswith("/") else None
        if found is None:
            mention = open_mention(before)
            found = self._of_mention(before, mention) if mention is not None else []
        if not found and not self._is_finding:
            self.close()
        else:
            self._show(found)

    def _of_command(self, before: str) -> list[Choice] | None:
        """None unless a command is being written."""
        name, blank, argument = before[1:].partition(" ")
        if not blank:
            return [
                Choice(
                    f"/{command.name}" + (" " if command.argument else ""),
                    len(before),
                    f"/{command.name} {command.argument}".rstrip(),
                    command.help,
                    takes_enter=before != f"/{command.name}",
                )
                for command in commands.matching(before)
            ]
        if name in FILE_COMMANDS and not argument.startswith("{"):
            paths = self._completed_paths(argument.strip('"'))
            return [Choice(path, len(argument), path) for path in paths]
        values = self.arguments[name]() if name in self.arguments else ()
        wanted = argument.casefold()
        fitting = [value for value in values if wanted in value[0].casefold()]
        fitting.sort(key=lambda value: not value[0].casefold().startswith(wanted))
        if [value for value, _ in fitting] == [argument]:
            return []  # already complete
        return [Choice(value, len(argument), value, what) for value, what in fitting]

    def _of_mention(self, before: str, partial: str) -> list[Choice]:
        quoted = before[: len(before) - len(partial)].endswith('"')
        written = len(partial) + 1 + quoted
        return [
            Choice(f"@{path}" if path.endswith("/") else as_mention(path) + " ", written, path)
            for path in self._completed_paths(partial)
        ]

    def _completed_paths(self, partial: str) -> list[str]:
        if self._paths is None:
            if not self._is_finding:
                self._is_finding = True
                self._find_paths()
            return []
        found = completions(partial, self._paths)
        return [] if found == [partial] else found  # already complete

    @work(exclusive=True)
    async def _find_paths(self) -> None:
        """Scan in a thread: a disk may be slow."""
        try:
            self._paths = await asyncio.to_thread(files_below, Path())
        finally:
            self._is_finding = False
        self.look(self.before, is_whole=self.before.startswith("/"))

    def _show(self, found: list[Choice]) -> None:
        if found != self._found:
            self._found, self._selected, self._is_moved = found, 0, False
        self.display = bool(found)
        self.styles.height = min(MAX_ROWS, len(found))
        self.repaint()

    def move(self, by: int) -> None:
        self._selected = (self._selected + by) % len(self._found)
        self._is_moved = True
        self.repaint()

    def close(self) -> None:
        self._paths, self._found, self._is_moved, self._is_finding = None, [], False, False
        self.workers.cancel_node(self)
        self.display = False

    @property
    def _top(self) -> int:
        """The first visible row: in a long list the selected one is in the middle."""
        last = max(0, len(self._found) - MAX_ROWS)
        return max(0, min(self._selected - MAX_ROWS // 2, last))

    def on_click(self, event: events.Click) -> None:
        row = self._top + event.y
        if row < len(self._found):
            self._selected = row
            self.post_message(self.Taken())

    def _paint(self, width: int, _height: int) -> Sequence[Row]:
        top = self._top
        labels = [cut(clean_line(choice.label), MAX_LABEL_CELLS) for choice in self._found]
        has_help = any(choice.help for choice in self._found)
        column = max((cell_len(label) for label in labels), default=0) + 2 if has_help else 0
        rows: list[Row] = []
        for index in range(top, min(top + MAX_ROWS, len(self._found))):
            choice, chosen = self._found[index], index == self._selected
            label = labels[index] if has_help else cut(clean_line(choice.label), width - 22)
            blanks = " " * max(2, column - cell_len(label))
            spans: list[Span] = [
                ("▸ ", "accent") if chosen else ("  ", "text"),
                (label + blanks, "accent" if chosen else "text"),
                (clean_line(choice.help), "muted"),
            ]
            place = f" {index + 1}/{len(self._found)}" if len(self._found) > MAX_ROWS else ""
            hint = f"  tab takes it{place}" if chosen else ""
            spans = [*fit(spans, max(1, width - len(hint))), (hint, "faint")]
            rows.append(tuple(spans))
        return rows
