"""One question to two models, side by side: both answers stream, and one may be kept.

In a narrow terminal one answer is above the other.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass

from textual import on, work
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Container, Vertical
from textual.content import Content
from textual.screen import ModalScreen
from textual.theme import Theme

from termgen.client import ModelInfo
from termgen.errors import EngineError, TermgenError
from termgen.tui.chat.state.conversation import AnswerState, Turn
from termgen.tui.chat.state.thoughts import AnswerNews
from termgen.tui.chat.widgets.entries import AnswerEntry, NoticeEntry
from termgen.tui.chat.widgets.messages import EntryClicked
from termgen.tui.chat.widgets.transcript import Transcript
from termgen.tui.keys.key_bar import KeyBar
from termgen.tui.keys.keymap import KeyOf
from termgen.tui.paint.canvas import Canvas
from termgen.tui.paint.canvas_screen import ThemedScreen
from termgen.tui.paint.palette import Palette
from termgen.tui.paint.sanitize import clean_line
from termgen.tui.paint.spans import Row, cut
from termgen.vocabulary.request import FinishReason

FLUSH_HZ = 15.0
STOP_GRACE_S = 0.7
"""Seconds after the last answer's end: esc is taken as meant for it until then."""


@dataclass(frozen=True)
class Side:
    """A model, its answer, and the way to read it. `read` is called once."""

    turn: Turn
    model: ModelInfo
    read: Callable[[], AsyncGenerator[AnswerNews, None]]


class Column(Vertical):
    """A model's answer, which is drawn as it grows."""

    def __init__(self, side: Side, keys: KeyOf, *, clock: Callable[[], float]) -> None:
        super().__init__(classes="side")
        self.turn = side.turn
        self.read = side.read
        self.sheet = Transcript()
        self.border_title = Content(clean_line(side.model.model_id))
        self._entry = AnswerEntry(side.turn, side.model, keys, clock=clock)
        self._clock = clock

    def compose(self) -> ComposeResult:
        yield self.sheet

    def on_mount(self) -> None:
        self.sheet.add(self._entry)

    @property
    def is_streaming(self) -> bool:
        return self.turn.state is AnswerState.STREAMING

    def take(self, news: AnswerNews) -> None:
        self.turn.take(news, self._clock())
        self._entry.feed(news.pieces[1])

    def draw(self) -> None:
        self.sheet.update(self._entry)

    def end(self, state: AnswerState, fault: str = "") -> None:
        if self.is_streaming:
            self.turn.end(state)
            self._entry.close()
            self.draw()
            if fault:
                self.sheet.add(NoticeEntry(fault, role="bad", sign="✗"))


class BesideScreen(ModalScreen[Turn | None]):
    """Gives back the turn whose answer is to be kept."""

    BINDINGS = [
        Binding(
            "escape", "stop", "Stop", id="beside.stop", tooltip="Stop both answers; then close"
        ),
        Binding(
            "enter",
            "keep",
            "Keep",
            id="beside.keep",
            tooltip="Keep the marked answer in the chat, and close",
        ),
        Binding(
            "left,right,tab",
            "other",
            "Other answer",
            id="beside.other",
            tooltip="Mark the other answer",
        ),
        Binding("up", "scroll_by(-1)", "Up", show=False, id="beside.up", tooltip="A line up"),
        Binding(
            "down", "scroll_by(1)", "Down", show=False, id="beside.down", tooltip="A line down"
        ),
        Binding(
            "pageup",
            "scroll_by(-10)",
            "Lines up",
            show=False,
            id="beside.page_up",
            tooltip="Ten lines up",
        ),
        Binding(
            "pagedown",
            "scroll_by(10)",
            "Lines down",
            show=False,
            id="beside.page_down",
            tooltip="Ten lines down",
        ),
    ]
    HORIZONTAL_BREAKPOINTS = ThemedScreen.HORIZONTAL_BREAKPOINTS
    VERTICAL_BREAKPOINTS = ThemedScreen.VERTICAL_BREAKPOINTS

    def __init__(
        self, sides: Sequence[Side], keys: KeyOf, *, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        super().__init__()
        self._question = clean_line(" ".join(sides[0].turn.question.split()))
        self.columns = [Column(side, keys, clock=clock) for side in sides]
        self._at = 0
        """The marked one."""
        self._ended_s = float("-inf")

    def compose(self) -> ComposeResult:
        yield Canvas(self._paint_question, id="beside-question")
        with Container(id="beside"):
            yield from self.columns
        yield KeyBar(self._keys_now)

    def on_mount(self) -> None:
        self.app.theme_changed_signal.subscribe(self, self._follow_theme)
        self._follow_theme()
        self._mark(0)
        self.set_interval(1 / FLUSH_HZ, self._flush)
        for column in self.columns:
            self._stream(column)

    def _follow_theme(self, _theme: Theme | None = None) -> None:
        palette = Palette.of(self.app)
        self.query_one(Canvas).set_palette(palette)
        for column in self.columns:
            column.sheet.set_palette(palette)

    @work(group="beside")
    async def _stream(self, column: Column) -> None:
        try:
            async with contextlib.aclosing(column.read()) as stream:
                async for news in stream:
                    column.take(news)
                    if news.delta.finish_reason is FinishReason.ERROR:
                        raise news.delta.error or EngineError("the engine failed this request")
        except TermgenError as error:
            column.end(AnswerState.FAILED, str(error))
        else:
            aborted = column.turn.stats.finish_reason is FinishReason.ABORT
            column.end(AnswerState.STOPPED if aborted else AnswerState.DONE)
        self._ended()

    def _flush(self) -> None:
        for column in self.columns:
            if column.is_streaming:
                column.draw()

    @property
    def is_streaming(self) -> bool:
        return any(column.is_streaming for column in self.columns)

    def _ended(self) -> None:
        if not self.is_streaming:
            self._ended_s = time.monotonic()
        self.refresh_bindings()

    def _mark(self, at: int) -> None:
        self._at = at
        for index, column in enumerate(self.columns):
            column.set_class(index == at, "-marked")

    def _keys_now(self) -> tuple[str, list[tuple[str, str]]]:
        stop = "Stop both" if self.is_streaming else "Close"
        keys = [
            ("beside.keep", "Keep this answer"),
            ("beside.other", "Other"),
            ("beside.stop", stop),
        ]
        return "", keys

    def action_stop(self) -> None:
        """Stop both answers; close when none is written. Just after the end of the last one nothing
        happens: the key was meant for it."""
        if self.is_streaming:
            self.workers.cancel_group(self, "beside")
            for column in self.columns:
                column.end(AnswerState.STOPPED)
            self._ended()
        elif time.monotonic() - self._ended_s > STOP_GRACE_S:
            self.dismiss(None)

    def action_keep(self) -> None:
        turn = self.columns[self._at].turn
        if turn.state is AnswerState.STREAMING:
            self.notify("this answer is still being written", severity="warning")
        elif turn.is_bare:
            self.notify("there is no answer to keep here", severity="warning")
        else:
            self.dismiss(turn)

    def action_other(self) -> None:
        self._mark((self._at + 1) % len(self.columns))

    def action_scroll_by(self, lines: int) -> None:
        self.columns[self._at].sheet.scroll_relative(y=lines, animate=False)

    @on(EntryClicked)
    def _clicked(self, message: EntryClicked) -> None:
        for index, column in enumerate(self.columns):
            if message.entry in column.sheet.entries:
                self._mark(index)

    def _paint_question(self, width: int, _height: int) -> Sequence[Row]:
        words = cut(self._question, max(1, width - 8))
        return [(("  ", "text"), ("you  ", "user/b"), (words, "text"))]
