"""`generate`'s arguments -> a request body. Pure.

Parameters of OpenAI's API go to every server. Those that only vLLM and termgen have go to these;
for other servers they are refused with an error that names the field, as most servers ignore
unknown fields silently.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from termgen.client import ChatPrompt, FillPrompt, Message, Prompt
from termgen.errors import RequestError
from termgen.vocabulary.sampling.row import OPENAI, VLLM
from termgen.vocabulary.sampling_params import COLUMNS, TABLE, SamplingParams

CHAT_PATH = "/v1/chat/completions"
TEXT_PATH = "/v1/completions"

DEFAULTS = SamplingParams()

PLAIN = (
    *("n", "seed", "max_tokens"),
    *(n for n, row in COLUMNS.items() if row.origin == OPENAI and not row.may_be_recommended),
)
"""Parameters of OpenAI's API that are sent as they are, and only if they ask for something."""
EXTRAS = tuple(
    name
    for name, row in TABLE.items()
    if row.origin != OPENAI and name not in ("prompt_logprobs", "structured_outputs")
)
"""Parameters that OpenAI's API lacks. The two left out have rules of their own."""


class Dialect(enum.Enum):
    """The kind of server, which decides the fields it knows beyond OpenAI's API."""

    TERMGEN = "termgen"
    VLLM = "vllm"
    LLAMA_CPP = "llamacpp"
    OPENAI = "openai"

    @property
    def knows_all(self) -> bool:
        return self in (Dialect.TERMGEN, Dialect.VLLM)


def dialect_of(owner: str) -> Dialect:
    """The dialect for a model's `owned_by`; an unknown owner is treated as OpenAI."""
    return next((dialect for dialect in Dialect if dialect.value == owner), Dialect.OPENAI)


def unsent_params(dialect: Dialect) -> tuple[str, ...]:
    """Sampling parameters that `build_call` refuses for this dialect."""
    return tuple(name for name in EXTRAS if name_in(dialect, name) is None)


def name_in(dialect: Dialect, name: str) -> str | None:
    """A parameter's name in requests to such a server; None if it has no such parameter."""
    row = TABLE[name]
    if dialect is Dialect.TERMGEN or row.origin == OPENAI:
        return name
    if dialect is Dialect.LLAMA_CPP:
        return row.llama_cpp
    return name if dialect is Dialect.VLLM and row.origin == VLLM else None


@dataclass(frozen=True, slots=True)
class Call:
    """One POST."""

    path: str
    body: dict[str, Any]

    @property
    def is_chat(self) -> bool:
        return self.path == CHAT_PATH


def build_call(
    prompt: Prompt,
    params: SamplingParams,
    *,
    model: str,
    dialect: Dialect,
    priority: int = 0,
    cache_salt: str | None = None,
    given: Collection[str] | None = None,
) -> Call:
    """Build the request. Raises `RequestError` naming a field that the server does not know.

    given: parameters that the user set; the server's own defaults apply to the others. None: all.
    """
    is_chat = isinstance(prompt, ChatPrompt)
    body: dict[str, Any] = {
        "model": model,
        "stream": True,
        "stream_options": {"include_usage": True},
        **prompt_fields(prompt, dialect),
        **_openai_fields(params, is_chat=is_chat),
        **_extra_fields(params, dialect),
        **_format_fields(params, dialect),
    }
    if given is not None:
        for name in COLUMNS.keys() - set(given):
            body.pop(name, None)
    if priority:
        _need(dialect, "priority")
        body["priority"] = priority
    if cache_salt is not None:
        _need(dialect, "cache_salt")
        body["cache_salt"] = cache_salt
    if dialect.knows_all:
        body["stream_options"]["continuous_usage_stats"] = True
        body["return_token_ids"] = True
    if dialect is Dialect.TERMGEN:
        body["include_timings"] = True
    return Call(CHAT_PATH if is_chat else TEXT_PATH, body)


def prompt_fields(prompt: Prompt, dialect: Dialect) -> dict[str, Any]:
    """The body's fields for the prompt."""
    if isinstance(prompt, FillPrompt):
        return {"prompt": prompt.prefix, "suffix": prompt.suffix}
    if not isinstance(prompt, ChatPrompt):
        return {"prompt": prompt if isinstance(prompt, str) else list(prompt)}
    fields: dict[str, Any] = {"messages": [_message(message) for message in prompt.messages]}
    if not prompt.add_generation_prompt:
        _need(dialect, "add_generation_prompt")
        fields["add_generation_prompt"] = False
    if prompt.continue_final_message:
        _need(dialect, "continue_final_message")
        fields["continue_final_message"] = True
    variables = dict(prompt.template_kwargs)
    if tools := variables.pop("tools", None):
        fields["tools"] = list(tools)
    if variables:
        _need(dialect, "chat_template_kwargs")
        fields["chat_template_kwargs"] = variables
    if prompt.chat_template is not None:
        _need(dialect, "chat_template")
        fields["chat_template"] = prompt.chat_template
    return fields


def _message(message: Message) -> dict[str, Any]:
    """A message as servers take it: the arguments of calls are text there."""
    sent = dict(message)
    if sent.get("tool_calls"):
        sent["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": _text_of(call["function"])}}
            for call in sent["tool_calls"]
        ]
    return sent


def _text_of(function: Mapping[str, Any]) -> str:
    arguments = function.get("arguments", {})
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _openai_fields(params: SamplingParams, *, is_chat: bool) -> dict[str, Any]:
    fields: dict[str, Any] = {"temperature": params.temperature, "top_p": params.top_p}
    for name in PLAIN:
        if getattr(params, name) != getattr(DEFAULTS, name):
            fields[name] = getattr(params, name)
    if params.stop:
        fields["stop"] = list(params.stop)
    if params.bias_pairs:
        fields["logit_bias"] = {str(token_id): bias for token_id, bias in params.bias_pairs}
    if params.prompt_logprobs is not None:
        raise RequestError(
            "prompt_logprobs cannot be streamed by a server", param="prompt_logprobs"
        )
    if params.logprobs is not None:
        if not is_chat:
            raise RequestError("logprobs of a server come with chats only", param="logprobs")
        fields |= {"logprobs": True, "top_logprobs": params.logprobs}
    return fields


def _extra_fields(params: SamplingParams, dialect: Dialect) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if dialect.knows_all:  # sent even if neutral: the model may have its own defaults
        fields = {name: getattr(params, name) for name in COLUMNS if name_in(dialect, name)}
    for name in EXTRAS:
        value = getattr(params, name)
        if value == getattr(DEFAULTS, name):
            continue
        sent_as = name_in(dialect, name)
        if sent_as is None:
            raise _unknown(dialect, name)
        fields[sent_as] = list(value) if isinstance(value, tuple) else value
    return fields


def _format_fields(params: SamplingParams, dialect: Dialect) -> dict[str, Any]:
    """The body's fields for structured outputs; OpenAI's API has one for JSON only."""
    wanted = params.structured_outputs
    if wanted is None:
        return {}
    if wanted.json_object:
        return {"response_format": {"type": "json_object"}}
    if wanted.json is not None:
        assert isinstance(wanted.json, str), "kept as text"
        schema: Mapping[str, Any] = json.loads(wanted.json)
        wrapper = {"name": "answer", "schema": schema, "strict": True}
        return {"response_format": {"type": "json_schema", "json_schema": wrapper}}
    _need(dialect, "structured_outputs")
    value = wanted.value
    shown = list(value) if isinstance(value, tuple) else value
    return {"structured_outputs": {wanted.kind: shown}}


def _need(dialect: Dialect, name: str) -> None:
    if not dialect.knows_all:
        raise _unknown(dialect, name)


def _unknown(dialect: Dialect, name: str) -> RequestError:
    why = "OpenAI's API, and this server is neither termgen nor vLLM"
    if dialect is Dialect.VLLM:
        why = "vLLM's API"
    return RequestError(
        f"{name} is not part of {why}: leave it out", param=name, code="unsupported_parameter"
    )
