"""From a body of /api/chat or /api/generate to a chat, or to a prompt without a template."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from termgen.api.chat import ChatRequest
from termgen.api.chat_bridge import parse_as_chat
from termgen.api.chat_prompt import HINT_VARIABLES, VARIABLES, reader_of
from termgen.api.errors import unsupported
from termgen.api.fields import Endpoint, Served, read, wrong_type
from termgen.api.job import Job, ResponseOptions
from termgen.api.ollama.body import (
    CHAT_BODY,
    GENERATE_BODY,
    LEVELS,
    AnswerFields,
    ChatFields,
    GenerateFields,
    asks_to_unload,
    lasts_for_ever,
)
from termgen.api.ollama.messages import chat_messages, image_parts
from termgen.api.ollama.options import NAMES as OPTION_NAMES
from termgen.api.ollama.options import Options, parse_options
from termgen.api.tools import Tools
from termgen.client import FillPrompt
from termgen.errors import RequestError
from termgen.vocabulary.tool_format import ToolFormat

NAMES = {
    **{name: f"options.{theirs}" for name, theirs in OPTION_NAMES.items()},
    "function": "function",
    "reasoning_effort": "think",
    "enable_thinking": "think",
    "response_format": "format",
    "response_format.json_schema.schema": "format",
    "truncate_prompt_tokens": "truncate",
}
"""Names of a chat's fields on these endpoints."""

GENERATE_NAMES = {**NAMES, "messages": "prompt"}

NO_CONVERSATION = [{"role": "user", "content": ""}]
"""Stands for the messages of a request that only loads the model."""


@dataclass(frozen=True, slots=True)
class OllamaRequest:
    chat: ChatRequest
    """Its job has another prompt where no template is used."""
    model: str
    """The name that the client used."""
    ignored: tuple[str, ...]
    not_used: tuple[str, ...]
    is_chat: bool = True
    only_loads: bool = False
    """There is nothing to answer: the client wants the model to be loaded."""
    shows_thoughts: bool = True
    shows_top: bool = False
    """Log-probabilities have alternatives."""

    @property
    def jobs(self) -> tuple[Job, ...]:
        return () if self.only_loads else self.chat.jobs

    @property
    def options(self) -> ResponseOptions:
        return self.chat.options


def parse_chat(served: Served, data: Mapping[str, Any]) -> OllamaRequest:
    """Check a body of /api/chat. Raises RequestError."""
    body = read(ChatFields, data)
    messages = chat_messages(body.messages, refuses_images=served.refuses_images)
    chat: dict[str, Any] = {"messages": messages or NO_CONVERSATION, "tools": body.tools}
    if messages and messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1]:
        chat |= {"continue_final_message": True, "add_generation_prompt": False}
    asked = _parse(served, data, body, CHAT_BODY, chat, NAMES, only_loads=not messages)
    return replace(asked, is_chat=True)


def parse_generate(served: Served, data: Mapping[str, Any]) -> OllamaRequest:
    """Check a body of /api/generate. Raises RequestError."""
    body = read(GenerateFields, data)
    is_plain = body.raw or bool(body.suffix) or not served.has_chat_template
    if is_plain:
        _check_plain(body)
    parts = image_parts(body.images, "images", refuses_images=served.refuses_images)
    content = [*parts, {"type": "text", "text": body.prompt}] if parts else body.prompt
    messages = [{"role": "system", "content": body.system}] if body.system else []
    chat = {"messages": [*messages, {"role": "user", "content": content}]}
    only_loads = not (body.prompt or body.suffix)
    asked = _parse(served, data, body, GENERATE_BODY, chat, GENERATE_NAMES, only_loads=only_loads)
    if is_plain:
        prompt = FillPrompt(body.prompt, body.suffix) if body.suffix else body.prompt
        job = replace(asked.chat.job, prompt=prompt)
        asked = replace(asked, chat=replace(asked.chat, job=job, tools=Tools()))
    return replace(asked, is_chat=False)


def _check_plain(body: GenerateFields) -> None:
    """Refuse what needs a chat template."""
    reason = "this model has no chat template"
    if body.raw or body.suffix:
        reason = "a prompt with raw or suffix has no chat template"
    for name in ("system", "images", "think"):
        if getattr(body, name):
            raise unsupported(name, f"{name} has no place in this prompt: {reason}")


def _parse(
    served: Served,
    data: Mapping[str, Any],
    body: AnswerFields,
    endpoint: Endpoint,
    chat: dict[str, Any],
    names: Mapping[str, str],
    *,
    only_loads: bool,
) -> OllamaRequest:
    """The request for a chat whose prompt is set. endpoint: the declaration of the body."""
    ignored = endpoint.unknown(data)
    options = parse_options(
        body.options or {}, defaults=served.defaults, max_model_len=served.max_model_len
    )
    _check_unloading(body, only_loads=only_loads)
    chat |= {
        **options.chat,
        "stream": body.stream,
        "logprobs": body.logprobs,
        "top_logprobs": body.top_logprobs,
        "response_format": _response_format(body.format),
        **_thinking(body.think, served.tool_format, body.model),
    }
    context = {**served.answering, **served.conversing}
    request = parse_as_chat(chat, id_prefix="ollama-", names=names, **context)
    return OllamaRequest(
        chat=request,
        model=body.model,
        ignored=(*ignored, *options.ignored),
        not_used=_not_used(body, request, options),
        only_loads=only_loads,
        shows_thoughts=body.think is not False,
        shows_top=bool(body.top_logprobs),
    )


def _not_used(body: AnswerFields, request: ChatRequest, options: Options) -> tuple[str, ...]:
    names = [*request.not_used, *options.not_used]
    if body.think is False:  # thoughts that the template asks for anyway are left out
        names = [name for name in names if name != "think"]
    if body.keep_alive is not None and not lasts_for_ever(body.keep_alive):
        names.append("keep_alive")
    return tuple(dict.fromkeys(names))


def _check_unloading(body: AnswerFields, *, only_loads: bool) -> None:
    if asks_to_unload(body.keep_alive) and only_loads:
        raise unsupported(
            "keep_alive",
            "keep_alive: this server keeps its model loaded until it stops; an administrator can "
            "free the memory with POST /sleep",
        )


def _response_format(given: dict[str, Any] | str | None) -> dict[str, Any] | None:
    if given is None or given == "":
        return None
    if given == "json":
        return {"type": "json_object"}
    if isinstance(given, str):
        raise wrong_type("format", "`json` or a JSON schema", given)
    return {"type": "json_schema", "json_schema": {"name": "format", "schema": given}}


# -- thinking ------------------------------------------------------------------------------


def can_think(tool_format: ToolFormat) -> bool:
    """True for models whose template reads a variable about thinking, or whose files declare how
    thoughts are recognised."""
    reads = reader_of(tool_format, None)
    return tool_format.new_parser is not None or any(map(reads, HINT_VARIABLES))


def _thinking(think: bool | str | None, tool_format: ToolFormat, model: str) -> dict[str, Any]:
    """The hint as the model's template reads it: some templates know levels only, others only
    whether to think."""
    if think is None:
        return {}
    if isinstance(think, str) and think not in LEVELS:
        words = ", ".join(LEVELS[:-1])
        raise wrong_type("think", f"true, false, {words} or {LEVELS[-1]}", think)
    if think is not False and not can_think(tool_format):
        raise RequestError(
            f'"{model[:200]}" does not support thinking', param="think", code="no_thinking"
        )
    reads = reader_of(tool_format, None)
    has_levels = any(map(reads, VARIABLES["effort"]))
    has_switch = any(map(reads, VARIABLES["thinks"]))
    if think is True and has_levels and not has_switch:
        return {"think": "medium"}
    if isinstance(think, str) and has_switch and not has_levels:
        return {"think": True}
    return {"think": think}
