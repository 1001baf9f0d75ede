"""The list of themes. Moving through it shows each at once; escape brings back the one before.

Letters filter it.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text
from textual import events, on
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Vertical
from textual.screen import ModalScreen
from textual.theme import BUILTIN_THEMES, Theme
from textual.widgets import Input, OptionList
from textual.widgets.option_list import Option

from termgen.tui.keys.keymap import KeyedApp, brief_key_of
from termgen.tui.paint.canvas import Canvas
from termgen.tui.paint.palette import Glyphs, Palette
from termgen.tui.paint.spans import Row


class ThemeChooser(ModalScreen[None]):
    VERTICAL_BREAKPOINTS = [(0, "-tiny"), (14, "-roomy")]
    BINDINGS = [
        Binding(
            "escape", "back", "Back", id="themes.back", tooltip="Close, with the colours as before"
        ),
    ]

    def __init__(self) -> None:
        super().__init__()
        self._before = ""

    def compose(self) -> ComposeResult:
        with Vertical(id="theme-box") as box:
            box.border_title = "theme"
            box.border_subtitle = f"⏎ keeps  {brief_key_of(self, 'themes.back')} goes back"
            words = Input(placeholder="type to filter", id="theme-filter", compact=True)
            words.can_focus = False  # the keys are the list's
            yield words
            yield OptionList(*map(_option, theme_names(self.app.available_themes)), id="themes")
            yield Canvas(self._paint_sample, id="theme-sample")

    def on_mount(self) -> None:
        self._before = self.app.theme
        self.app.theme_changed_signal.subscribe(self, self._follow_theme)
        self._apply_palette()
        names = theme_names(self.app.available_themes)
        options = self.query_one(OptionList)
        options.highlighted = names.index(self._before)
        options.focus()

    def on_key(self, event: events.Key) -> None:
        """Type into the filter; the list keeps the focus."""
        words = self.query_one(Input)
        if event.key in self.active_bindings:  # a letter, if the user's settings bind one
            return
        if event.is_printable and event.character:
            words.insert_text_at_cursor(event.character)
        elif event.key == "backspace":
            words.action_delete_left()
        else:
            return
        event.stop()

    @on(Input.Changed)
    def _filter(self, event: Input.Changed) -> None:
        """Show the themes with every word; the present one stays marked if it is among them."""
        wanted = event.value.casefold().split()
        names = theme_names(self.app.available_themes)
        names = [name for name in names if all(word in name.casefold() for word in wanted)]
        options = self.query_one(OptionList)
        options.clear_options()
        options.add_options(map(_option, names))
        if names:
            options.highlighted = names.index(self.app.theme) if self.app.theme in names else 0

    @on(OptionList.OptionHighlighted)
    def _preview(self, event: OptionList.OptionHighlighted) -> None:
        if event.option.id in self.app.available_themes:
            self.app.theme = event.option.id

    @on(OptionList.OptionSelected)
    def _keep(self, event: OptionList.OptionSelected) -> None:
        if event.option.id != self._before:
            assert isinstance(self.app, KeyedApp)
            self.app.keep_theme()
        self.dismiss()

    def action_back(self) -> None:
        if self.query_one(Input).value:
            self.query_one(Input).value = ""
            return
        self.app.theme = self._before
        self.dismiss()

    def _follow_theme(self, _theme: Theme) -> None:
        self._apply_palette()

    def _apply_palette(self) -> None:
        palette = Palette.of(self.app)
        self._glyphs = palette.glyphs
        self.query_one(Canvas).set_palette(palette)

    def _paint_sample(self, _width: int, _height: int) -> Sequence[Row]:
        return sample_rows(self._glyphs)


def theme_names(available: dict[str, Theme]) -> list[str]:
    """termgen's and the user's own, then those that come with Textual."""
    return sorted(available, key=lambda name: (name in BUILTIN_THEMES, name))


def _option(name: str) -> Option:
    return Option(Text(name), id=name)


def sample_rows(glyphs: Glyphs) -> list[Row]:
    """The roles that matter most, side by side."""
    free, cached, active, shared = glyphs.kv
    return [
        (
            (f"{glyphs.prefill} prefill ", "prefill"),
            (f"{glyphs.decode} decode ", "decode"),
            (f"{glyphs.padding} pad", "padding"),
        ),
        (
            (active * 3, "kv-active"),
            (active * 3, "kv-active-alt"),
            (shared * 3, "kv-shared"),
            (cached * 3, "kv-cached"),
            (free * 3, "kv-free"),
            (" muted ", "muted"),
            ("faint", "faint"),
        ),
        (("✓ good ", "good"), ("! warn ", "warn"), ("✗ bad", "bad")),
    ]
