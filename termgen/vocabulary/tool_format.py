"""The syntax of a model's tool calls, for front ends. Vocabulary."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
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


class NewParser(Protocol):
    """Factory of response parsers."""

    def __call__(
        self, prompt_ids: Sequence[int], tools: Sequence[Mapping[str, Any]] = ()
    ) -> ResponseParser:
        """prompt_ids: a prompt that may begin the answer, e.g. with `<think>`. tools: as templates
        get them; their schemas say what arguments without quotes stand for."""


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
    new_parser: NewParser | None = None
    """Set if it is declared how the model's responses are parsed; `style` is then that of forced
    calls."""
    template_variables: tuple[str, ...] | None = None
    """Names that every chat template of the model reads; None if unknown."""
    joins_results: bool = False
    """The chat template takes the results of calls as `tool_responses` of the message with the
    calls, not as messages of a role of their own."""
