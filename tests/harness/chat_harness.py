"""Contents of the chat screen, and the requests it has sent."""

from __future__ import annotations

from typing import Any

from fake_engine import FakeEngine
from tui_harness import FrozenApp

from termgen.client import ChatPrompt

SIZE = (100, 30)


def sent(engine: FakeEngine, index: int = -1) -> list[tuple[str, str]]:
    prompt = engine.calls[index].prompt
    assert isinstance(prompt, ChatPrompt)
    return [(m["role"], m["content"]) for m in prompt.messages]


def sent_messages(engine: FakeEngine, index: int = -1) -> list[dict[str, Any]]:
    prompt = engine.calls[index].prompt
    assert isinstance(prompt, ChatPrompt)
    return [dict(message) for message in prompt.messages]


def shown(app: FrozenApp) -> str:
    return app.chat.transcript.plain_text
