"""/v1/chat/completions: a body to one `Job`, deltas to chunks, deltas to a whole response."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from termgen.api.errors import unsupported
from termgen.api.fields import (
    Check,
    Fields,
    check_depth,
    is_empty,
    never,
    one_of,
    parse_json,
    wrong_type,
)
from termgen.api.job import (
    Job,
    ResponseOptions,
    Tally,
    parse_cache_salt,
    parse_options,
    parse_priority,
)
from termgen.api.logprobs import chat_logprobs_object, prompt_logprobs_list
from termgen.api.sampling import (
    HARMLESS,
    MAX_INT,
    REFUSED,
    chat_logprobs,
    parse_prompt_logprobs,
    parse_sampling,
)
from termgen.api.sse import TextTemplate
from termgen.client import ChatPrompt, TokenDelta, TokenLogprob
from termgen.errors import RequestError

ROLES = ("system", "user", "assistant", "tool")
MAX_MESSAGES = 4096
MAX_TEMPLATE_KWARGS_BYTES = 4096
RESERVED_TEMPLATE_KWARGS = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "documents",
        "messages",
        "padding",
        "return_dict",
        "return_tensors",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    }
)

CHAT_HARMLESS = HARMLESS | {"parallel_tool_calls"}
CHAT_REFUSED: dict[str, Check] = {
    **REFUSED,
    "tools": is_empty,
    "tool_choice": one_of("none"),
    "functions": is_empty,
    "function_call": one_of("none"),
    "audio": never,
    "modalities": one_of(["text"]),
    "prediction": never,
    "web_search_options": never,
    "documents": is_empty,
    "echo": is_empty,
    "add_special_tokens": is_empty,
    "mm_processor_kwargs": is_empty,
}


@dataclass(frozen=True, slots=True)
class ChatRequest:
    job: Job
    options: ResponseOptions
    ignored: tuple[str, ...]


def parse_chat(
    data: Mapping[str, Any],
    *,
    model: str,
    defaults: Mapping[str, Any],
    force_include_usage: bool = False,
) -> ChatRequest:
    """Check a body. `model` is the resolved served name, `defaults` the model's own sampling."""
    body = Fields(data)
    body.take("model")  # resolved by the caller
    options = parse_options(
        body, id_prefix="chatcmpl", model=model, force_include_usage=force_include_usage
    )
    old = body.integer("max_tokens", low=1, high=MAX_INT)
    new = body.integer("max_completion_tokens", low=1, high=MAX_INT)
    params = parse_sampling(
        body,
        max_tokens=old if new is None else new,
        logprobs=chat_logprobs(body),
        prompt_logprobs=parse_prompt_logprobs(body, stream=options.stream),
        defaults=defaults,
    )
    job = Job(
        prompt=parse_prompt(body),
        params=params,
        request_id=options.id,
        priority=parse_priority(body),
        cache_salt=parse_cache_salt(body),
    )
    return ChatRequest(job, options, body.finish(harmless=CHAT_HARMLESS, refused=CHAT_REFUSED))


def parse_prompt(body: Fields) -> ChatPrompt:
    """The messages and how to render them."""
    value = body.take("messages")
    if not isinstance(value, list):
        raise wrong_type("messages", "a list of messages", value)
    if not value:
        raise RequestError("messages must not be empty", param="messages")
    if len(value) > MAX_MESSAGES:
        raise RequestError(f"at most {MAX_MESSAGES} messages are allowed", param="messages")
    messages = tuple(_parse_message(m, f"messages[{i}]") for i, m in enumerate(value))
    continues = body.boolean("continue_final_message")
    generates = body.boolean("add_generation_prompt", not continues)
    if continues and generates:
        raise RequestError(
            "continue_final_message and add_generation_prompt exclude each other",
            param="continue_final_message",
        )
    if continues and messages[-1]["role"] != "assistant":
        raise RequestError(
            "continue_final_message needs an assistant message at the end",
            param="continue_final_message",
        )
    return ChatPrompt(
        messages=messages,
        add_generation_prompt=generates,
        continue_final_message=continues,
        template_kwargs=_template_kwargs(body),
    )


def _template_kwargs(body: Fields) -> dict[str, Any]:
    value = body.take("chat_template_kwargs")
    if value is not None and not isinstance(value, dict):
        raise wrong_type("chat_template_kwargs", "an object", value)
    kwargs: dict[str, Any] = dict(value or {})
    for name in kwargs:
        if name in RESERVED_TEMPLATE_KWARGS:
            raise RequestError(
                f"chat_template_kwargs may not set {name!r}", param="chat_template_kwargs"
            )
    check_depth("chat_template_kwargs", kwargs)
    if len(json.dumps(kwargs)) > MAX_TEMPLATE_KWARGS_BYTES:
        raise RequestError(
            f"chat_template_kwargs may have at most {MAX_TEMPLATE_KWARGS_BYTES} bytes of JSON",
            param="chat_template_kwargs",
        )
    effort = body.string("reasoning_effort")
    if effort is not None:
        kwargs.setdefault("reasoning_effort", effort)
    return kwargs


def _parse_message(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise wrong_type(where, "an object", value)
    message = Fields(value, where + ".")
    role = message.string("role")
    role = "system" if role == "developer" else role
    if role not in ROLES:
        raise wrong_type(f"{where}.role", "system, developer, user, assistant or tool", role)
    tool_calls = _tool_calls(message.take("tool_calls"), where) if role == "assistant" else []
    content = _content(message.take("content"), f"{where}.content")
    if content is None and not tool_calls:
        raise wrong_type(f"{where}.content", "a string or a list of text parts", content)
    parsed: dict[str, Any] = {"role": role, "content": content}
    if tool_calls:
        parsed["tool_calls"] = tool_calls
    for name in ("name", "tool_call_id", "reasoning_content"):
        text = message.string(name)
        if text is not None:
            parsed[name] = text
    reasoning = message.string("reasoning")  # the newer name of the same thing
    if reasoning is not None:
        parsed.setdefault("reasoning_content", reasoning)
    return parsed


def _content(value: Any, where: str) -> str | None:
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise wrong_type(where, "a string or a list of text parts", value)
    texts = []
    for i, part in enumerate(value):
        if not isinstance(part, dict):
            raise wrong_type(f"{where}[{i}]", "an object", part)
        kind = part.get("type")
        if kind != "text":
            raise unsupported(
                f"{where}[{i}].type", f"{where}[{i}]: parts of type {kind!r:.40} are not supported"
            )
        if not isinstance(part.get("text"), str):
            raise wrong_type(f"{where}[{i}].text", "a string", part.get("text"))
        texts.append(part["text"])
    return "\n".join(texts)


def _tool_calls(value: Any, where: str) -> list[dict[str, Any]]:
    """Calls in the history. Templates want `arguments` as an object, clients send it as text."""
    if value is None:
        return []
    if not isinstance(value, list):
        raise wrong_type(f"{where}.tool_calls", "a list", value)
    calls = []
    for i, call in enumerate(value):
        at = f"{where}.tool_calls[{i}]"
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise wrong_type(at, "an object with function.name", call)
        arguments = function.get("arguments") or "{}"
        if isinstance(arguments, str):
            arguments = parse_json(arguments.encode(), f"{at}.function.arguments")
        if not isinstance(arguments, dict):
            raise wrong_type(f"{at}.function.arguments", "a JSON object", arguments)
        check_depth(f"{at}.function.arguments", arguments)
        parsed = {"name": function["name"], "arguments": arguments}
        calls.append({"id": call.get("id"), "type": "function", "function": parsed})
    return calls


class _Choice:
    """What one streamed choice still owes: logprobs and ids of tokens whose text is held back."""

    __slots__ = ("logprobs", "started", "template", "token_ids")

    def __init__(self) -> None:
        self.started = False
        self.template: TextTemplate | None = None
        self.logprobs: list[TokenLogprob] = []
        self.token_ids: list[int] = []


class ChatStream:
    """Deltas to `chat.completion.chunk` objects. One per HTTP request."""

    def __init__(self, request: ChatRequest) -> None:
        self._options = request.options
        self._wants_logprobs = request.job.params.logprobs is not None
        o = request.options
        self._is_plain = not (self._wants_logprobs or o.return_token_ids or o.continuous_usage)
        self._tally = Tally(request.job.params.n)
        self._choices = [_Choice() for _ in range(request.job.params.n)]
        self._num_open = request.job.params.n
        self._prompt_token_ids: tuple[int, ...] | None = None
        """Until a chunk has carried them."""

    def feed(self, index: int, delta: TokenDelta) -> list[dict[str, Any]]:
        """Chunks for one delta. None while its text is held back."""
        choice = self._choices[index]
        self._tally.add(index, delta)
        choice.logprobs.extend(delta.logprobs or ())
        if self._options.return_token_ids:
            choice.token_ids.extend(delta.token_ids)
            self._prompt_token_ids = delta.prompt_token_ids or self._prompt_token_ids
        wants_news = bool(delta.text) or self._options.return_token_ids
        if not wants_news and delta.finish_reason is None:
            return []
        chunks = []
        if not choice.started:
            choice.started = True
            chunks.append(self._role_chunk(index))
        if delta.text or choice.logprobs or choice.token_ids:
            chunks.append(self._content_chunk(index, delta.text))
        if delta.finish_reason is not None:
            chunks.append(self._finish_chunk(index, delta))
        return chunks

    def frame(self, index: int, delta: TokenDelta) -> bytes | None:
        """What `feed` would say, encoded, for a delta in the middle that is only text."""
        choice = self._choices[index]
        if not self._is_plain or not choice.started or delta.finish_reason is not None:
            return None
        self._tally.add(index, delta)
        if not delta.text:
            return b""
        if choice.template is None:
            choice.template = TextTemplate(lambda text: self._content_chunk(index, text))
        return choice.template.frame(delta.text)

    def end(self) -> list[dict[str, Any]]:
        """What follows the last choice: the usage chunk, when it was asked for."""
        if not self._options.include_usage:
            return []
        chunk = {**self._head(), "choices": [], "usage": self._tally.usage()}
        if self._options.include_timings:
            chunk["termgen"] = self._tally.timings()
        return [chunk]

    def _head(self) -> dict[str, Any]:
        o = self._options
        return {
            "id": o.id,
            "object": "chat.completion.chunk",
            "created": o.created,
            "model": o.model,
        }

    def _chunk(
        self, index: int, delta: dict[str, Any], finish_reason: str | None = None
    ) -> dict[str, Any]:
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": None,
            "finish_reason": finish_reason,
        }
        chunk = {**self._head(), "choices": [choice]}
        if self._options.include_usage:
            chunk["usage"] = self._tally.usage() if self._options.continuous_usage else None
        return chunk

    def _role_chunk(self, index: int) -> dict[str, Any]:
        chunk = self._chunk(index, {"role": "assistant", "content": ""})
        if self._prompt_token_ids is not None:
            chunk["prompt_token_ids"] = self._prompt_token_ids
            self._prompt_token_ids = None
        return chunk

    def _content_chunk(self, index: int, text: str) -> dict[str, Any]:
        choice, chunk = self._choices[index], self._chunk(index, {"content": text})
        if self._wants_logprobs:
            chunk["choices"][0]["logprobs"] = chat_logprobs_object(
                choice.logprobs, tokens_as_ids=self._options.tokens_as_ids
            )
        if self._options.return_token_ids:
            chunk["choices"][0]["token_ids"] = choice.token_ids
        choice.logprobs, choice.token_ids = [], []
        return chunk

    def _finish_chunk(self, index: int, delta: TokenDelta) -> dict[str, Any]:
        chunk = self._chunk(index, {}, str(delta.finish_reason))
        chunk["choices"][0]["stop_reason"] = delta.stop_reason
        self._num_open -= 1
        o = self._options
        if o.include_timings and not o.include_usage and self._num_open == 0:
            chunk["termgen"] = self._tally.timings()
        return chunk


def chat_response(request: ChatRequest, answers: list[TokenDelta]) -> dict[str, Any]:
    """The whole response. `answers[i]` is choice i as one merged delta."""
    o, params = request.options, request.job.params
    tally = Tally(params.n)
    choices = []
    for index, answer in enumerate(answers):
        tally.add(index, answer)
        choice: dict[str, Any] = {
            "index": index,
            "message": {"role": "assistant", "content": answer.text, "refusal": None},
            "logprobs": None,
            "finish_reason": answer.finish_reason,
            "stop_reason": answer.stop_reason,
        }
        if params.logprobs is not None:
            choice["logprobs"] = chat_logprobs_object(
                answer.logprobs or (), tokens_as_ids=o.tokens_as_ids
            )
        if o.return_token_ids:
            choice["token_ids"] = answer.token_ids
        choices.append(choice)
    response: dict[str, Any] = {
        "id": o.id,
        "object": "chat.completion",
        "created": o.created,
        "model": o.model,
        "choices": choices,
        "usage": tally.usage(),
    }
    if o.return_token_ids:
        response["prompt_token_ids"] = answers[0].prompt_token_ids
    if params.prompt_logprobs is not None:
        response["prompt_logprobs"] = prompt_logprobs_list(answers[0].prompt_logprobs or ())
    if o.include_timings:
        response["termgen"] = tally.timings()
    return response
