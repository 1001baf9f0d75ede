"""Bodies of Ollama's endpoints, as its clients send them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from msgspec import Meta, Struct

from termgen.api.chat import CHAT
from termgen.api.chat_bridge import CHAT_WORDS
from termgen.api.fields import (
    Check,
    Endpoint,
    Instead,
    declared,
    is_empty,
    never,
    one_of,
    resolve_model,
    wanted,
    wrong_type,
)
from termgen.api.ollama.options import NAMES, OptionFields
from termgen.api.sampling import HARMLESS, NumLogprobs
from termgen.errors import RequestError

LATEST = ":latest"
"""The tag that a name without one has."""

LEVELS = ("low", "medium", "high", "max")
"""Levels of `think`."""

_NUMBER = r"([0-9]{1,20}(\.[0-9]{0,20})?|\.[0-9]{1,20})"
_DURATION = re.compile(rf"[-+]?({_NUMBER}|({_NUMBER}(ns|us|µs|ms|s|m|h)){{1,8}})")
"""Go's durations, such as 1h30m, and plain seconds."""
_DIGIT = re.compile(r"[1-9]")

_IN_CHATS = dict.fromkeys(("messages", "tools"), Instead("/api/chat"))
_IN_PROMPTS = {
    **dict.fromkeys(("prompt", "suffix", "raw"), Instead("/api/generate")),
    "images": Instead("images of a message"),
}
_TOP: dict[str, Check] = {
    **{name: CHAT_WORDS.get(name, never) for name in (*CHAT.fields, *CHAT_WORDS)},
    **{theirs: Instead(f"options.{theirs}", never) for theirs in declared(OptionFields)},
    **{name: Instead(f"options.{theirs}", never) for name, theirs in NAMES.items()},
    "response_format": Instead("format", never),
    "reasoning_effort": Instead("think", never),
    "tool_choice": one_of("auto"),
    "parallel_tool_calls": one_of(True),
    "template": is_empty,  # a program in Go's language of templates
    "context": Instead("/api/chat, whose messages are the whole conversation"),
    "truncate": one_of(False),  # a prompt that does not fit is an error
    "shift": one_of(False),  # an answer ends with the context
    "_debug_render_only": is_empty,
    **dict.fromkeys(("width", "height", "steps"), is_empty),
}
"""Fields that would change an answer: words of other APIs, and what only Ollama can do."""

OptionsObject = Annotated[dict[str, Any] | None, wanted("an object")]
Format = Annotated[
    dict[str, Any] | str | None,
    wanted("`json` or a JSON schema"),
    Meta(description="form of the answer: `json`, or a schema"),
]
KeepAlive = Annotated[
    float | str | None,
    wanted("a number of seconds, or a duration such as 5m"),
    Meta(description="the model stays loaded in any case"),
]


class AnswerFields(Struct, frozen=True, kw_only=True):
    """Fields of both endpoints that generate."""

    model: Annotated[str, Meta(description="a served name, with or without `:latest`")]
    stream: Annotated[bool, Meta(description="one line of JSON for each piece")] = True
    format: Format = None
    options: OptionsObject = None
    think: Annotated[
        bool | str | None,
        wanted(f"true, false, {', '.join(LEVELS[:-1])} or {LEVELS[-1]}"),
        Meta(description="whether a model that can think does so before it answers"),
    ] = None
    keep_alive: KeepAlive = None
    logprobs: bool = False
    top_logprobs: NumLogprobs | None = None


class ChatFields(AnswerFields, frozen=True, kw_only=True):
    """The body of /api/chat."""

    messages: Annotated[
        list[Any],
        wanted("a list of messages"),
        Meta(description="the conversation; without one the model is only loaded"),
    ] = []
    tools: Annotated[list[Any], wanted("a list of tools")] = []


class GenerateFields(AnswerFields, frozen=True, kw_only=True):
    """The body of /api/generate."""

    prompt: Annotated[str, Meta(description="without one the model is only loaded")] = ""
    suffix: Annotated[str, Meta(description="text after the answer")] = ""
    system: str = ""
    raw: Annotated[bool, Meta(description="take the prompt without a chat template")] = False
    images: Annotated[list[Any], wanted("a list of images in base64")] = []


class EmbedFields(Struct, frozen=True, kw_only=True):
    """The body of /api/embed, and of the older /api/embeddings."""

    model: str
    input: Annotated[str | list[str], wanted("a string or a list of strings")] = ""
    prompt: str = ""
    truncate: bool | None = None
    dimensions: int | None = None
    keep_alive: KeepAlive = None
    options: OptionsObject = None


class ShowFields(Struct, frozen=True):
    """The body of /api/show."""

    model: str | None = None
    name: str | None = None
    """The older name of `model`."""
    verbose: bool = False


class PullFields(Struct, frozen=True):
    """The body of /api/pull."""

    model: str | None = None
    name: str | None = None
    stream: bool = True


def _body(kind: type[AnswerFields], refused: Mapping[str, Check]) -> Endpoint:
    own = declared(kind)
    others = {name: check for name, check in refused.items() if name not in own}
    return Endpoint((kind,), harmless=HARMLESS, refused=others)


CHAT_BODY = _body(ChatFields, _TOP | _IN_PROMPTS)
GENERATE_BODY = _body(GenerateFields, _TOP | _IN_CHATS)
EMBED = Endpoint((EmbedFields,))
SHOW = Endpoint(
    (ShowFields,),
    harmless=frozenset({"options"}),
    refused=dict.fromkeys(("system", "template"), is_empty),
)
PULL = Endpoint(
    (PullFields,),
    harmless=frozenset({"insecure"}),
    refused=dict.fromkeys(("username", "password"), is_empty),
)


def with_tag(name: str) -> str:
    """The name as Ollama lists it."""
    return name if ":" in name.rpartition("/")[2] else name + LATEST


def served_name(value: object, names: Sequence[str]) -> str:
    """The served name that a client means, which may leave out a tag `latest`, or add it."""
    if value is None or value == "":
        raise RequestError("model is required", param="model")
    if not isinstance(value, str):
        return resolve_model(value, names)
    for name in names:
        if value in (name, with_tag(name)):
            return name
    raise RequestError(
        f"model '{value[:200]}' not found", param="model", code="model_not_found", status=404
    )


def asked_name(data: Mapping[str, Any]) -> object:
    """The model of a body that has it under its older name too."""
    return data.get("model") or data.get("name")


def asks_to_unload(value: float | str | None) -> bool:
    """True for a `keep_alive` of no time. Raises RequestError for one that is no duration."""
    if isinstance(value, str):
        if not _DURATION.fullmatch(value):
            raise wrong_type("keep_alive", "a number of seconds, or a duration such as 5m", value)
        return not _DIGIT.search(value)
    return value == 0


def lasts_for_ever(value: float | str) -> bool:
    """True for a `keep_alive` that asks for what happens here anyway."""
    return value.startswith("-") if isinstance(value, str) else value < 0
