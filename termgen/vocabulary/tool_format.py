"""How a model writes tool calls, as far as front ends must know it. Vocabulary."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol


class ToolStyle(enum.StrEnum):
    """How a call looks in the model's text."""

    HERMES = "hermes"
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, one for each call."""
    LLAMA = "llama"
    """`{"name": ..., "parameters": {...}}` as the whole answer."""
    MISTRAL = "mistral"
    """`[TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]` as the end of the answer."""
    MISTRAL_ARGS = "mistral_args"
    """`[TOOL_CALLS]name[ARGS]{...}`, one for each call, as newer Mistral templates have it."""


class ResponseParser(Protocol):
    """What transformers' parser of responses offers: events of regions of the text."""

    def feed(self, text: str) -> list[dict[str, Any]]: ...

    def finalize(self) -> tuple[dict[str, Any], list[dict[str, Any]]]: ...


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """What is known of one model's tool calls."""

    style: ToolStyle = ToolStyle.HERMES
    """Format of the model's own calls, or, where its template knows no tools, of those its prompt
    describes."""
    knows_tools: bool = False
    """The chat template shows tools to the model."""
    special_tokens: Mapping[str, int] = field(default_factory=dict)
    """Ids of those words of the style that are special tokens, which text usually leaves out."""
    new_parser: Callable[[Sequence[int]], ResponseParser] | None = None
    """Where the model declares how its responses are parsed; the style is that of forced calls.
    Takes the token ids of the prompt, which may have begun the answer: with `<think>`, say."""
    template_variables: tuple[str, ...] | None = None
    """Names that every chat template of the model reads; None where that is not known."""
