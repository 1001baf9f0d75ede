"""The help screen: every key and command, read from the bindings themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.geometry import Size
from textual.screen import ModalScreen
from textual.theme import Theme

from termgen.tui.chat.state.commands import SlashCommand
from termgen.tui.keys.keymap import brief_key_of, key_names
from termgen.tui.paint.canvas import Canvas
from termgen.tui.paint.palette import Palette
from termgen.tui.paint.spans import Row, wrap

HelpSection = tuple[str, Sequence[BindingType]]

_KEY_WIDTH = 20


def help_rows(
    sections: Iterable[HelpSection], commands: Sequence[SlashCommand], width: int
) -> list[Row]:
    rows: list[Row] = []
    for title, bindings in sections:
        if rows:
            rows.append(())
        rows.append(((title, "heading/b"),))
        for binding in bindings:
            if isinstance(binding, Binding) and binding.description:
                rows += _entry(key_names(binding), binding.tooltip or binding.description, width)
    rows += [(), (("Commands", "heading/b"),)] if commands else []
    for command in commands:
        rows += _entry(f"/{command.name} {command.argument}".strip(), command.help, width)
    return rows


def _entry(key: str, text: str, width: int) -> list[Row]:
    lines = wrap([(text, "text")], max(10, width - _KEY_WIDTH - 2))
    rows: list[Row] = [((" " * (_KEY_WIDTH + 2), "text"), *line) for line in lines]
    if len(key) >= _KEY_WIDTH:
        return [(("  " + key, "accent"),), *rows]
    rows[0] = (("  " + key.ljust(_KEY_WIDTH), "accent"), *lines[0])
    return rows


class HelpText(Canvas):
    """A canvas as high as its text; the box around it scrolls."""

    def __init__(self, rows: Callable[[int], Sequence[Row]]) -> None:
        super().__init__(lambda width, _height: rows(width), id="help")
        self._text_rows = rows

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        return len(self._text_rows(width))


class HelpScreen(ModalScreen[None]):
    BINDINGS = [
        Binding("escape,f1,q", "dismiss", "Close", id="help.close", tooltip="Close the help"),
    ]

    def __init__(
        self, sections: Sequence[HelpSection], commands: Sequence[SlashCommand] = ()
    ) -> None:
        super().__init__()
        self._rows = partial(help_rows, sections, commands)

    def compose(self) -> ComposeResult:
        with VerticalScroll(id="help-box") as box:
            box.border_title = "help"
            box.border_subtitle = f"{brief_key_of(self, 'help.close')} closes"
            yield HelpText(self._rows)

    def on_mount(self) -> None:
        self.app.theme_changed_signal.subscribe(self, self._follow_theme)
        self._apply_palette()

    def _follow_theme(self, _theme: Theme) -> None:
        self._apply_palette()

    def _apply_palette(self) -> None:
        palette = Palette.of(self.app)
        self.query_one(HelpText).set_palette(palette)
