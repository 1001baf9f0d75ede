"""Links of answers by key: listed with their addresses, opened and copied."""

from __future__ import annotations

from typing import Any

import pytest
from fake_engine import Script
from textual.pilot import Pilot
from textual.widgets import OptionList
from tui_harness import FrozenApp, ask, chat_engine, pieces, ready, wait_until

from termgen.tui.chat.chat_screen import ChatScreen
from termgen.tui.chat.links_panel import Link, LinksPanel, links_of
from termgen.tui.chat.widgets.prompt import Prompt

SIZE = (80, 24)
ANSWER = """See [the *manual*](https://example.org/m?a=1), https://a.example/x. and

| a | b |
|---|---|
| [again](https://example.org/m?a=1) | [bank](https://evil.example) |

```
https://code.example
```
"""


def test_links_are_found_as_they_are_shown() -> None:
    assert links_of(ANSWER) == [
        Link("the manual", "https://example.org/m?a=1"),
        Link("https://a.example/x", "https://a.example/x"),
        Link("bank", "https://evil.example"),
    ]
    assert links_of("[x](javascript:alert(1)) [y](http://u@h.example)") == []
    assert links_of("x " * 900 + "https://a.example/" + "y" * 400)[0].address.endswith("y" * 400)


async def listed(app: FrozenApp, pilot: Pilot[Any]) -> list[str]:
    await pilot.press("alt+o")
    await wait_until(pilot, lambda: isinstance(app.screen, LinksPanel))
    links = app.screen.query_one(OptionList)
    return [str(links.get_option_at_index(i).prompt) for i in range(links.option_count)]


def said(app: FrozenApp) -> list[str]:
    """The notices on the screen; each stays for some seconds."""
    return [note.message for note in app._notifications]


async def test_links_are_listed_opened_and_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr(
        "termgen.tui.chat.answer_tools.open_in_browser", lambda url: not opened.append(url)
    )
    answers = {"one": ANSWER, "two": "http://two.example", "none": "No link."}
    engine = chat_engine(
        lambda call: Script(pieces=pieces(answers[call.prompt.messages[-1]["content"]]))
    )
    app = FrozenApp(engine)
    async with app.run_test(size=SIZE) as pilot:
        await ready(app, pilot)
        await pilot.press("alt+o")
        await wait_until(pilot, lambda: "no answer has a link" in said(app))
        for question in answers:
            await ask(app, pilot, question)
        assert await listed(app, pilot) == ["http://two.example"], "of the last that has any"
        await pilot.press("escape")
        await wait_until(pilot, lambda: isinstance(app.screen, ChatScreen))
        await pilot.press("alt+up", "alt+o")
        assert isinstance(app.screen, ChatScreen), "the marked answer has none"
        await wait_until(pilot, lambda: "this answer has no link" in said(app))
        await pilot.press("alt+up", "alt+up")
        assert (await listed(app, pilot))[-1] == "bank  https://evil.example"
        await pilot.press("down", "enter")
        await wait_until(pilot, lambda: opened == ["https://a.example/x"])
        assert isinstance(app.screen, ChatScreen)
        await ask(app, pilot, "/links", wait=False)
        await wait_until(pilot, lambda: isinstance(app.screen, LinksPanel))
        await pilot.press("up", "y")
        await wait_until(pilot, lambda: app.clipboard == "https://evil.example")
        await listed(app, pilot)
        await pilot.click(OptionList, offset=(3, 0))
        await wait_until(pilot, lambda: opened[1:] == ["https://example.org/m?a=1"])
        await wait_until(pilot, lambda: isinstance(app.focused, Prompt))
