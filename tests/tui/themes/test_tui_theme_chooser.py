"""Choosing a theme with a preview, and editing the current one."""

from __future__ import annotations

from pathlib import Path

import pytest
from textual.widgets import OptionList
from tui_harness import FrozenApp, ask, chat_engine, ready, shipped_themes, wait_until

from termgen.tui import app as app_module
from termgen.tui.chat.chat_screen import ChatScreen
from termgen.tui.paint.canvas import Canvas
from termgen.tui.themes.theme_chooser import ThemeChooser, theme_names

SIZE = (100, 30)


def background(app: FrozenApp) -> str:
    """The colour drawn behind the status line of the page."""
    strip = app.screen_stack[0 if len(app.screen_stack) == 1 else -2].query_one("#status", Canvas)
    style = next(iter(strip._strips[0])).style
    assert style is not None and style.bgcolor is not None and style.bgcolor.triplet is not None
    return style.bgcolor.triplet.hex


async def test_moving_through_the_list_shows_each_and_escape_goes_back() -> None:
    app = FrozenApp(chat_engine())
    async with app.run_test(size=SIZE) as pilot:
        await ready(app, pilot)
        assert background(app) == "#11141b"
        await pilot.press("f9")
        assert isinstance(app.screen, ThemeChooser)
        names = theme_names(app.available_themes)
        assert names[:2] == ["termgen-16", "termgen-abyss"] and names.index("nord") > names.index(
            "termgen-riso"
        )
        options = app.screen.query_one(OptionList)
        assert options.highlighted == names.index("termgen-dark"), "begins at the one that is on"
        await pilot.press("down")
        await wait_until(pilot, lambda: background(app) == "#fbfaf7")
        assert app.theme == "termgen-light"
        await pilot.press("escape")
        await wait_until(pilot, lambda: isinstance(app.screen, ChatScreen))
        await wait_until(pilot, lambda: background(app) == "#11141b")
        assert app.theme == "termgen-dark"


async def test_enter_and_a_click_keep_a_theme() -> None:
    app = FrozenApp(chat_engine())
    async with app.run_test(size=SIZE, notifications=True) as pilot:
        await ready(app, pilot)
        await ask(app, pilot, "/theme", wait=False)
        await wait_until(pilot, lambda: isinstance(app.screen, ThemeChooser))
        await pilot.press("home", "down", "enter")
        await wait_until(pilot, lambda: isinstance(app.screen, ChatScreen))
        assert app.theme == "termgen-abyss"
        assert any('theme = "termgen-abyss"' in note.message for note in app._notifications)
        await pilot.press("f9")
        await pilot.click("#themes", offset=(2, 2))
        await wait_until(pilot, lambda: isinstance(app.screen, ChatScreen))
        assert app.theme == theme_names(app.available_themes)[2]


@pytest.mark.parametrize("size", [(80, 24), (40, 10)])
async def test_the_list_fits_small_terminals(size: tuple[int, int]) -> None:
    app = FrozenApp(chat_engine())
    async with app.run_test(size=size) as pilot:
        await ready(app, pilot)
        await pilot.press("f9", "end")
        await pilot.pause()
        options = app.screen.query_one(OptionList)
        assert options.region.height >= 3 and app.screen.region.contains_region(options.region)
        sample = app.screen.query_one("#theme-sample", Canvas)
        assert sample.display == (size == (80, 24))
        if sample.display:
            assert "prefill" in sample.text and not sample.region.overlaps(options.region)


async def test_what_is_wrong_with_a_file_stays_on_while_a_model_loads(tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_text("name = 3\n")
    app = FrozenApp(chat_engine(), theme_folders=(shipped_themes(), tmp_path))
    async with app.run_test() as pilot:
        await ready(app, pilot)
        [note] = [note for note in app._notifications if "bad.toml" in note.message]
        assert note.message == "theme not loaded: bad.toml: `name` is missing"
        assert note.timeout > 2 * app.NOTIFICATION_TIMEOUT


async def test_a_theme_follows_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app_module, "THEME_POLL_S", 0.01)
    path = tmp_path / "mine.toml"

    def save(color: str) -> None:
        head = 'name = "mine"\n[colors]\nprimary = "#fff"\nforeground = "#fff"\n'
        path.write_text(f"{head}background = {color}\n")

    save('"#010203"')
    app = FrozenApp(chat_engine(), theme_folders=(shipped_themes(), tmp_path))
    async with app.run_test(size=SIZE, notifications=True) as pilot:
        await ready(app, pilot)
        await ask(app, pilot, "/theme mine")
        await wait_until(pilot, lambda: background(app) == "#010203")
        save('"#0a0b0c"')
        await wait_until(pilot, lambda: background(app) == "#0a0b0c")
        save('"#0g0b0c"')
        await wait_until(
            pilot, lambda: "mine.toml: [colors] background" in str(list(app._notifications))
        )
        save("#0a")
        await wait_until(pilot, lambda: "at line 5, column" in str(list(app._notifications)))
        assert app.theme == "mine" and background(app) == "#0a0b0c", "the last good one stays"


async def test_letters_filter_the_themes() -> None:
    app = FrozenApp(chat_engine())
    async with app.run_test(size=SIZE) as pilot:
        await ready(app, pilot)
        await pilot.press("f9", *"nor")
        options = app.screen.query_one(OptionList)
        await wait_until(pilot, lambda: app.theme == "nord")
        names = [option.id or "" for option in options.options]
        assert names and all("nor" in name for name in names) and app.focused is options
        await pilot.press("x")
        await wait_until(pilot, lambda: options.option_count == 0)
        await pilot.press("enter", "backspace", "backspace", "backspace", "backspace")
        await wait_until(pilot, lambda: options.option_count == len(app.available_themes))
        assert options.highlighted_option is not None
        assert options.highlighted_option.id == "nord", "which is shown"
        await pilot.press(*"abyss", "escape")
        assert isinstance(app.screen, ThemeChooser), "first the filter goes"
        await pilot.press("escape")
        await wait_until(pilot, lambda: isinstance(app.screen, ChatScreen))
        assert app.theme == "termgen-dark"
