"""What the context holds, and the choice of what is done when it is full."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from textual import on, work
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Vertical
from textual.content import Content
from textual.screen import ModalScreen
from textual.theme import Theme
from textual.widgets import OptionList
from textual.widgets.option_list import Option

from termgen.errors import TermgenError
from termgen.tui.chat.state.context_meter import Meter, meter_words
from termgen.tui.chat.state.context_policy import POLICY_WORDS, ContextPolicy
from termgen.tui.keys.keymap import brief_key_of
from termgen.tui.paint.canvas import Canvas
from termgen.tui.paint.formatting import count
from termgen.tui.paint.palette import Palette
from termgen.tui.paint.sanitize import clean_line
from termgen.tui.paint.series import bar
from termgen.tui.paint.spans import Row, wrap

POLICIES = tuple(ContextPolicy)
NAME_WIDTH, COUNT_WIDTH, BAR_WIDTH = 14, 10, 30


class ContextPanel(ModalScreen[ContextPolicy | None]):
    BINDINGS = [
        Binding("enter", "take", "Choose", id="context.choose", tooltip="Do this when it is full"),
        Binding("up,k", "move(-1)", "Above", id="context.up", tooltip="To the choice above"),
        Binding("down,j", "move(1)", "Below", id="context.down", tooltip="To the choice below"),
        Binding("escape,q", "dismiss", "Close", id="context.close", tooltip="Back to the chat"),
    ]

    def __init__(self, read: Callable[[], Awaitable[Meter]], policy: ContextPolicy) -> None:
        """read: counts the tokens of the context."""
        super().__init__()
        self._read = read
        self._policy = policy
        self._rows: Callable[[int], Sequence[Row]] = lambda _width: [(("counting", "muted"),)]

    def compose(self) -> ComposeResult:
        with Vertical(id="context", classes="panel") as box:
            box.border_title = "context"
            words = (f"{brief_key_of(self, f'context.{n}')} {n}" for n in ("choose", "close"))
            box.border_subtitle = " · ".join(words)
            yield Canvas(lambda width, _height: self._rows(width), id="context-meter")
            choices = OptionList(*map(self._option, POLICIES), compact=True, markup=False)
            choices.can_focus = False  # the keys are this screen's
            yield choices

    def _option(self, policy: ContextPolicy) -> Option:
        sign = "●" if policy is self._policy else " "
        return Option(Content(f"{sign} {policy.value:<11}{POLICY_WORDS[policy]}"))

    def on_mount(self) -> None:
        self.app.theme_changed_signal.subscribe(self, self._follow_theme)
        self._follow_theme()
        self.query_one(OptionList).highlighted = POLICIES.index(self._policy)
        self._count()

    def _follow_theme(self, _theme: Theme | None = None) -> None:
        self.query_one(Canvas).set_palette(Palette.of(self.app))

    @work(exclusive=True)
    async def _count(self) -> None:
        try:
            meter = await self._read()
        except TermgenError as error:
            words = clean_line(str(error))
            self._rows = lambda width: wrap([(words, "bad")], width)
        else:
            self._rows = lambda width: meter_rows(meter, width)
        for canvas in self.query(Canvas):
            canvas.repaint()

    def action_move(self, by: int) -> None:
        choices = self.query_one(OptionList)
        choices.highlighted = ((choices.highlighted or 0) + by) % len(POLICIES)

    def action_take(self) -> None:
        self.dismiss(POLICIES[self.query_one(OptionList).highlighted or 0])

    @on(OptionList.OptionSelected)
    def _clicked(self, event: OptionList.OptionSelected) -> None:
        self.dismiss(POLICIES[event.option_index])


def meter_rows(meter: Meter, width: int) -> list[Row]:
    """Each part of the context with its tokens and its share, and what leaving turns out costs."""
    rows = [_part(name, tokens, meter.limit, width) for name, tokens in meter.parts]
    words = (row for line in meter_words(meter) for row in wrap([(line, "muted")], width))
    return [*rows, (), *words]


def _part(name: str, tokens: int, limit: int, width: int) -> Row:
    row: Row = ((name.ljust(NAME_WIDTH), "muted"), (f"{tokens:,}".rjust(COUNT_WIDTH), "text"))
    room = min(BAR_WIDTH, width - NAME_WIDTH - COUNT_WIDTH - 2)
    if not limit or room < 4:
        return row
    role = "good" if name == "free" else "accent"
    return (*row, ("  ", "text"), *bar(tokens / limit, room, role=role))


def short_meter(meter: Meter) -> str:
    """For the status line: `sys 40 files 1.2k chat 700 free 284`."""
    parts = (
        ("sys", meter.system),
        ("sum", meter.summary),
        ("tools", meter.tools),
        ("files", meter.files),
        ("chat", meter.history),
    )
    words = [f"{name} {count(tokens)}" for name, tokens in parts if tokens]
    return " ".join([*words, f"free {count(meter.free)}"])
