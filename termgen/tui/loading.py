"""The loading screen. The engine reports from any thread; the screen looks ten times a second.

Before a chat it has the prompt already. It stays below the screens that take its place, and does
nothing there but hand on what reaches it late.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from textual import events, on
from textual.app import ComposeResult
from textual.content import Content
from textual.events import ScreenResume, ScreenSuspend
from textual.timer import Timer

from termgen.tui.chat.chat_keys import COMMAND_KEYS, KEYS, TOOL_KEYS
from termgen.tui.chat.state import commands
from termgen.tui.chat.state.attachments import Attachment, pasted_file
from termgen.tui.chat.state.conversation import PromptHistory
from termgen.tui.chat.state.doubts import Doubts
from termgen.tui.chat.widgets.chat_rows import attachment_words
from termgen.tui.chat.widgets.messages import LargePaste, PromptEdited, PromptSubmitted, QueueWanted
from termgen.tui.chat.widgets.prompt_area import PromptArea, Waiting
from termgen.tui.keys.keymap import Keymap, brief_key_of, key_of
from termgen.tui.paint.canvas import Canvas
from termgen.tui.paint.canvas_screen import ThemedScreen
from termgen.tui.paint.formatting import percent
from termgen.tui.paint.sanitize import clean_line
from termgen.tui.paint.series import bar
from termgen.tui.paint.spans import Row, cut, row_width

BLOCK_WIDTH = 46
_NAME_WIDTH = 20

POLL_S = 0.1


def loading_rows(
    phases: Sequence[tuple[str, float]], elapsed_s: float, width: int, height: int, *, quit_key: str
) -> list[Row]:
    """`phases` in the order they began, with the share done; the last is the current one."""
    rows: list[Row] = [(("▍", "accent"), ("termgen", "accent/b")), ()]
    if not phases:
        rows.append((("● ", "accent"), ("starting", "text")))
    for index, (name, share) in enumerate(phases):
        rows.append(phase_row(name, share, last=index == len(phases) - 1))
    rows += [(), ((f"{elapsed_s:.1f} s", "muted"), (f"   {quit_key} quits", "faint"))]
    block = min(BLOCK_WIDTH, width)
    left = " " * max(0, (width - block) // 2)
    above: list[Row] = [()] * max(0, (height - len(rows)) // 2 - 1)
    return [*above, *(((left, "text"), *row) if row_width(row) else () for row in rows)]


def phase_row(name: str, share: float, *, last: bool) -> Row:
    label = cut(clean_line(name), _NAME_WIDTH).ljust(_NAME_WIDTH)
    if not last or share >= 1:
        return (("✓ ", "good"), (label, "muted"))
    room = BLOCK_WIDTH - _NAME_WIDTH - 2 - 5
    return (
        ("● ", "accent"),
        (label, "text"),
        *bar(share, room, role="accent"),
        (percent(share).rjust(5), "muted"),
    )


class StartupProgress:
    """Phases of the start. `report` may be called by any thread, the rest by the screen."""

    def __init__(self) -> None:
        self._reports: deque[tuple[str, float]] = deque()
        self._phases: dict[str, float] = {}

    def report(self, phase: str, share: float) -> None:
        self._reports.append((phase, share))

    def phases(self) -> list[tuple[str, float]]:
        """Every phase so far in the order they began, with the share done."""
        while self._reports:
            phase, share = self._reports.popleft()
            self._phases[phase] = min(1.0, max(0.0, share))
        return list(self._phases.items())


class Heir(Protocol):
    """The chat that follows."""

    def inherit(
        self,
        text: str,
        waiting: Sequence[Waiting],
        pasted: Sequence[Attachment],
        history: PromptHistory,
    ) -> None: ...


class LoadingScreen(ThemedScreen):
    """The loading screen; if a chat follows, with a prompt whose text goes there."""

    AUTO_FOCUS = "Prompt"

    def __init__(
        self,
        progress: StartupProgress,
        *,
        before_chat: bool = False,
        keymap: Keymap | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__()
        bindings = (keymap or Keymap()).applied([*KEYS, *TOOL_KEYS, *COMMAND_KEYS])
        self._chat_keys = {key: each for each in bindings for key in each.key.split(",")}
        self._progress = progress
        self._clock = clock
        self._started_s = clock()
        self._poll: Timer | None = None
        self.area: PromptArea | None = None
        if before_chat:
            self.area = PromptArea(until="when the model is loaded", id="prompt-area")
        self.pasted: list[Attachment] = []
        """Pastes too long for the prompt, to go with the next message."""
        self._heir: Heir | None = None
        self._doubts = Doubts()

    def compose(self) -> ComposeResult:
        yield Canvas(self._paint, id="loading")
        if self.area is not None:
            yield self.area

    def on_mount(self) -> None:
        self._canvas = self.query_one("#loading", Canvas)
        self._poll = self.set_interval(POLL_S, self._canvas.repaint)

    @property
    def unsent(self) -> list[str]:
        """Everything typed that is in no chat yet."""
        if self.area is None:
            return []
        return [*self.area.unsent, *(file.text for file in self.pasted)]

    def put_draft_away(self) -> bool:
        """The draft goes into the history; False without one."""
        return self.area is not None and self.area.prompt.put_away()

    def hand_over(self, heir: Heir) -> None:
        """The chat is there. What is on its way here goes to it, too."""
        self._heir = heir
        self._bequeath()

    def _bequeath(self) -> None:
        area, heir = self.area, self._heir
        if area is None or heir is None:
            return
        waiting, area.waiting = area.waiting, []
        pasted, self.pasted = self.pasted, []
        text, area.prompt.text = area.prompt.text, ""
        heir.inherit(text, waiting, pasted, area.prompt.prompts)

    @on(PromptEdited)
    def _edited(self, message: PromptEdited) -> None:
        if self._heir is not None:
            if message.text:
                self._bequeath()
            return
        assert self.area is not None
        send, newline = (brief_key_of(self, f"prompt.{name}") for name in ("send", "newline"))
        words = f"{send} sends it when the model is loaded  {newline} new line"
        self.area.prompt.border_subtitle = Content(cut(words, max(8, self.size.width - 6)))

    @on(PromptSubmitted)
    def _submitted(self, message: PromptSubmitted) -> None:
        assert self.area is not None
        area, text = self.area, message.text
        parsed = commands.parse(text)
        now = {"help": "app.help", "theme": "app.change_theme", "quit": "app.quit"}
        if parsed is not None and parsed[0].name in now and not parsed[1]:
            area.prompt.accept(text)
            self.call_later(self.app.run_action, now[parsed[0].name])
        elif parsed is not None:
            area.prompt.give_back(text)
            self._say_later(f"/{parsed[0].name}")
        elif doubt := self._doubts.about(text):
            area.prompt.give_back(text)
            words = f"{doubt}; {brief_key_of(self, 'prompt.send')} queues it as it is"
            self.notify(words, severity="warning", markup=False)
        else:
            area.prompt.accept(text)
            area.put(Waiting(text, tuple(self.pasted)))
            self._show_pasted([])
            if self._heir is not None:
                self._bequeath()

    @on(QueueWanted)
    def _change_waiting(self, message: QueueWanted) -> None:
        if message.what == "take back":
            assert self.area is not None
            self.area.take_back()

    @on(LargePaste)
    def _pasted(self, message: LargePaste) -> None:
        file = pasted_file(message.text, (file.name for file in self.pasted))
        self._show_pasted([*self.pasted, file])
        if self._heir is not None:
            self._bequeath()

    def _show_pasted(self, pasted: list[Attachment]) -> None:
        assert self.area is not None
        self.pasted = pasted
        words = "  ".join(attachment_words(file.name, file.num_bytes) for file in pasted)
        self.area.prompt.border_title = Content(words) if words else None

    def _say_later(self, what: str) -> None:
        self.notify(f"{what}: once the model is loaded", severity="warning")

    def on_key(self, event: events.Key) -> None:
        """Keys of the chat say why they do nothing yet. Letters belong to the prompt."""
        if self.area is None:
            return
        binding = self._chat_keys.get(event.key)
        if event.is_printable and event.character:
            event.stop()
            self.area.prompt.type(event.character)
        elif binding is not None and binding.id == "chat.take_back":
            self.area.take_back()
        elif binding is not None and binding.id != "chat.stop":
            self._say_later(binding.description)

    @on(ScreenSuspend)
    def _stop_looking(self) -> None:
        if self._poll is not None:
            self._poll.pause()

    @on(ScreenResume)
    def _look_again(self) -> None:
        if self._poll is not None:
            self._poll.resume()

    def _paint(self, width: int, height: int) -> Sequence[Row]:
        elapsed, quit_key = self._clock() - self._started_s, key_of(self, "app.quit")
        return loading_rows(self._progress.phases(), elapsed, width, height, quit_key=quit_key)
