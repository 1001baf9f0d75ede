"""The syntax of a model's tool calls, for front ends. Vocabulary."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol


class ToolStyle(enum.StrEnum):
    """Syntax of a call in the model's text."""

    HERMES = "hermes"
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, one per call."""
    LLAMA = "llama"
    """`{"name": ..., "parameters": {...}}` as the whole answer."""
    MISTRAL = "mistral"
    """`[TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]` as the end of the answer."""
    MISTRAL_ARGS = "mistral_args"
    """`[TOOL_CALLS]name[ARGS]{...}`, one per call, as in newer Mistral templates."""


class ResponseParser(Protocol):
    """Interface of transformers' response parser: events of regions of the text."""

    def feed(self, text: str) -> list[dict[str, Any]]: ...

    def finalize(self) -> tuple[dict[str, Any], list[dict[str, Any]]]: ...


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """Tool-call syntax of one model."""

    style: ToolStyle = ToolStyle.HERMES
    """Style of the model's calls; if its template does not support tools, the style described in
    the prompt."""
    knows_tools: bool = False
    """The chat template shows tools to the model."""
    special_tokens: Mapping[str, int] = field(default_factory=dict)
    """Ids of the style's markers that are special tokens, which text usually omits."""
    new_parser: Callable[[Sequence[int]], ResponseParser] | None = None
    """Factory of the parser, if the model declares how its responses are parsed; `style` is then
    that of forced calls. Takes the prompt's token ids, as a prompt may begin the answer, e.g. with
    `<think>`."""
    template_variables: tuple[str, ...] | None = None
    """Names that every chat template of the model reads; None if unknown."""
