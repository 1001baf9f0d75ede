"""The bar of keys changes its widgets where they are, and shows what a new bar would."""

from __future__ import annotations

from collections.abc import Sequence

from textual.app import App, ComposeResult
from textual.binding import Binding
from textual.pilot import Pilot
from textual.widgets._footer import FooterKey

from termgen.tui.keys.key_bar import KeyBar

State = tuple[str, Sequence[tuple[str, str]]]
STATES: list[State] = [
    ("", [("send", "Send"), ("stop", "Stop"), ("quit", "Quit")]),
    ("", [("send", "Queue"), ("quit", "Quit")]),
    ("", [("send", "Queue"), ("quit", "Quit")]),
    ("", [("quit", "Quit"), ("stop", "Stop it at once"), ("send", "Send")]),
    ("", [("quit", "Quit"), ("unbound", "None")]),
    ("", []),
    ("browse", [("send", "Open"), ("quit", "Quit")]),
    ("browse", [("quit", "Quit")]),
    ("", [("stop", "Stop"), ("send", "Send")]),
]


class BarApp(App[None]):
    BINDINGS = [
        Binding("enter", "send", "Send", id="send"),
        Binding("ctrl+x", "stop", "Stop", id="stop", tooltip="end the answer"),
        Binding("ctrl+q", "quit", "Quit", id="quit", tooltip="end the program"),
    ]

    def __init__(self, state: State) -> None:
        super().__init__()
        self.state = state

    def compose(self) -> ComposeResult:
        yield KeyBar(lambda: self.state)

    def action_send(self) -> None:
        self.state = ("", [("quit", "Sent")])
        self.screen.refresh_bindings()

    @property
    def keys(self) -> list[FooterKey]:
        return list(self.query(FooterKey))

    @property
    def shown(self) -> tuple[str, list[object]]:
        """The lowest row, and the tooltips."""
        row = self.screen._compositor.render_strips()[-1].text
        return row, [key.tooltip for key in self.keys]


async def show(app: BarApp, pilot: Pilot[None], state: State) -> None:
    app.state = state
    app.screen.refresh_bindings()
    await pilot.pause()


async def test_it_shows_what_a_new_bar_would() -> None:
    app = BarApp(STATES[0])
    async with app.run_test(size=(60, 4)) as pilot:
        for state in STATES[1:]:
            await show(app, pilot, state)
            fresh = BarApp(state)
            async with fresh.run_test(size=(60, 4)) as other:
                await other.pause()
                assert app.shown == fresh.shown, state
        assert app.shown[0].rstrip() == " ^x Stop  ⏎ Send"


async def test_widgets_stay_in_their_places() -> None:
    app = BarApp(STATES[0])
    async with app.run_test(size=(60, 4)) as pilot:
        await pilot.pause()
        before = app.keys
        await show(app, pilot, STATES[1])
        assert app.keys == before[:2]
        await show(app, pilot, STATES[3])
        assert app.keys[:2] == before[:2] and len(app.keys) == 3


async def test_a_click_presses_the_key_that_is_shown() -> None:
    app = BarApp(STATES[0])
    async with app.run_test(size=(60, 4)) as pilot:
        await show(app, pilot, STATES[3])
        await pilot.click(app.keys[2])
        await pilot.pause()
        assert [key.description for key in app.keys] == ["Sent"]
