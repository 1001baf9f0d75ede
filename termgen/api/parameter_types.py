"""What a description of a field of a request consists of; `parameters` has the descriptions."""

from __future__ import annotations

from dataclasses import dataclass

CHAT = "chat"
COMPLETIONS = "completions"
BOTH = (CHAT, COMPLETIONS)


@dataclass(frozen=True, slots=True)
class Parameter:
    """One field. The texts are Markdown, each of one line."""

    name: str
    values: str
    meaning: str
    default: str = "off"
    endpoints: tuple[str, ...] = BOTH
    origin: str = "OpenAI"
    """Whose field it is: OpenAI's, or vLLM's, which clients send in `extra_body`, or our own."""


@dataclass(frozen=True, slots=True)
class Group:
    title: str
    parameters: tuple[Parameter, ...]
