"""The conversation in a chat's body: its messages, how they become a prompt, hints about thinking.

Clients send hints (how much effort, whether to think at all, for how many tokens) to every model.
They become variables of the chat template where it reads such ones; elsewhere they are accepted and
named in the answer's header as not used. Content in parts and the arguments of calls are read here
for every endpoint that is a chat.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, get_args

from msgspec import Meta, Struct

from termgen.api.errors import unsupported
from termgen.api.fields import (
    FORM,
    PROMPT,
    check_depth,
    is_int,
    parse_json,
    read,
    wanted,
    wrong_type,
)
from termgen.api.tools import MAX_TOOLS, Tools, parse_tools, show_tools
from termgen.client import MAX_CHAT_TEMPLATE_CHARS, ChatPrompt
from termgen.errors import RequestError
from termgen.vocabulary.sampling.row import VLLM
from termgen.vocabulary.structured_outputs import is_longer
from termgen.vocabulary.tool_format import ToolFormat

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

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max", "ultra"]
EFFORTS: tuple[str, ...] = get_args(Effort)
MAX_BUDGET = 2**31 - 1
Budget = Annotated[int, Meta(ge=0, le=MAX_BUDGET)]

VARIABLES = {
    "effort": ("reasoning_effort",),
    "thinks": ("enable_thinking", "thinking"),
    "budget": ("thinking_budget",),
}
"""The template variables of each kind of hint."""

HINT_VARIABLES = frozenset(name for names in VARIABLES.values() for name in names)

_EFFORT = f"{', '.join(EFFORTS[:-1])} or {EFFORTS[-1]}"
_EFFORT_WORDS = ", ".join(f"`{word}`" for word in EFFORTS)
_HINT = "A hint: what the template does not read is named in `x-termgen-not-used`"

TEXT_PARTS: Mapping[str, str] = {"text": "text"}

NOT_TEXT: Mapping[str, str] = {
    **dict.fromkeys(("image", "image_url", "input_image", "computer_screenshot"), "image"),
    **dict.fromkeys(("document", "file", "input_file"), "document"),
    **dict.fromkeys(("audio", "input_audio"), "audio"),
    **dict.fromkeys(("video", "video_url", "input_video"), "video"),
    "browser_state": "state of a browser",
    "encrypted_content": "encrypted text",
    "tool_reference": "reference to a tool",
}
"""Words for parts that no model here can read, by type."""

DATA_FIELDS = {"image_url": False, "url": False, "data": True, "file_data": True}
"""Fields with the bytes of a part -> may they be there without the head of a `data:` URL?"""

MEGABYTE = 10**6

INVALID_JSON = "INVALID_JSON"
"""Key for text that is not a JSON object; the name is that of Anthropic's documentation."""


class TemplateFields(Struct, frozen=True):
    """Fields that every endpoint that is a chat takes as they are."""

    chat_template_kwargs: Annotated[
        dict[str, Any] | None,
        PROMPT(
            "variables of the chat template; one that it does not read is refused, unless it is "
            "a hint about thinking",
            f"an object of at most {MAX_TEMPLATE_KWARGS_BYTES} bytes",
            origin=VLLM,
        ),
    ] = None
    chat_template: Annotated[
        str | None,
        PROMPT(
            "used instead of the model's; refused unless the server has "
            "`--trust-request-chat-template`",
            f"a Jinja template of at most {MAX_CHAT_TEMPLATE_CHARS} characters",
            "the model's own",
            VLLM,
        ),
    ] = None
    enable_thinking: Annotated[
        bool | None,
        PROMPT(
            f"the template variable of this name, and `thinking`. {_HINT}",
            default="the template's own",
            origin="Qwen",
        ),
    ] = None
    think: Annotated[
        bool | Effort | None,
        wanted(f"true, false, {_EFFORT}"),
        PROMPT(
            f"`enable_thinking` or `reasoning_effort` in Ollama's words. {_HINT}",
            f"true, false, {_EFFORT_WORDS}",
            "the template's own",
            "Ollama",
        ),
    ] = None
    thinking_budget: Annotated[
        Budget | None,
        PROMPT(f"the template variable of this name. {_HINT}", "a number of tokens", origin="Qwen"),
    ] = None


class ReasoningFields(Struct, frozen=True):
    effort: Annotated[Effort | None, wanted(_EFFORT)] = None
    enabled: bool | None = None
    max_tokens: Budget | None = None


class Conversation(TemplateFields, frozen=True, kw_only=True):
    """Fields of a chat that make its prompt."""

    messages: Annotated[
        list[Any],
        wanted("a list of messages"),
        PROMPT(
            "the conversation. Roles `system`, `developer` (the same), `user`, `assistant`, "
            "`tool`; content is a string or a list of `text` parts; `name`, `tool_calls`, "
            "`tool_call_id` and `reasoning_content` (or `reasoning`) go to the template",
            "a list of messages",
        ),
    ]
    add_generation_prompt: Annotated[
        bool | None,
        PROMPT("end the prompt with the beginning of an answer", default="on", origin=VLLM),
    ] = None
    continue_final_message: Annotated[
        bool,
        PROMPT(
            "go on with the last message, which must be the assistant's; excludes "
            "`add_generation_prompt`, which is then off",
            origin=VLLM,
        ),
    ] = False
    reasoning_effort: Annotated[
        Effort | None,
        wanted(_EFFORT),
        PROMPT(
            "the template variable of this name; `none` also sets `enable_thinking` to false. "
            f"{_HINT}",
            _EFFORT_WORDS,
        ),
    ] = None
    reasoning: Annotated[
        ReasoningFields | None,
        PROMPT(
            f"effort, whether to think, and for how many tokens. {_HINT}",
            "an object with `effort`, `enabled` or `max_tokens`",
            origin="OpenRouter",
        ),
    ] = None
    thinking: Annotated[
        bool | dict[str, Any] | None,
        wanted("an object with a type"),
        PROMPT(
            f"the template variables `enable_thinking`, `thinking` and `thinking_budget`. {_HINT}",
            "true, false, or an object: `type` is `enabled`, `disabled` or `adaptive`, "
            "`budget_tokens` a number",
            "the template's own",
            "Anthropic",
        ),
    ] = None
    tools: Annotated[
        list[Any],
        FORM(
            "what the model may call; see [tool calls](structured-outputs.md#tool-calls)",
            f"up to {MAX_TOOLS} functions",
        ),
    ] = []
    tool_choice: Annotated[
        Any,
        Meta(extra_json_schema={"type": ["string", "object"]}),
        FORM(
            "whether it must; calls that must come are enforced",
            "`none`, `auto`, `required`, a function, or `allowed_tools`",
            "auto",
        ),
    ] = None
    parallel_tool_calls: Annotated[bool, FORM("whether several calls may come at once")] = True


def parse_prompt(
    body: Conversation,
    tool_format: ToolFormat,
    *,
    strict_tools: bool,
    trusts_template: bool,
    refuses_images: bool,
) -> tuple[ChatPrompt, Tools, tuple[str, ...]]:
    """The messages and how to render them, the tools, and the names of fields without effect.

    refuses_images: a part of a user's message that the model cannot read is an error.
    """
    chat_template = body.chat_template
    if chat_template is not None and not trusts_template:
        raise unsupported(
            "chat_template",
            "chat_template is taken only by servers with --trust-request-chat-template",
        )
    if chat_template is not None:  # then that template decides who shows the tools
        tool_format = replace(tool_format, knows_tools="tools" in chat_template)
    tools = parse_tools(
        body.tools,
        body.tool_choice,
        tool_format,
        parallel=body.parallel_tool_calls,
        strict=strict_tools,
    )
    if not body.messages:
        raise RequestError("messages must not be empty", param="messages")
    if len(body.messages) > MAX_MESSAGES:
        raise RequestError(f"at most {MAX_MESSAGES} messages are allowed", param="messages")
    replaced = replaced_parts(refuses_images=refuses_images)
    unread: list[str] = []
    messages = tuple(
        _parse_message(message, f"messages[{i}]", replaced, unread)
        for i, message in enumerate(body.messages)
    )
    continues = body.continue_final_message
    generates = body.add_generation_prompt
    generates = not continues if generates is None else generates
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
    shown, variables = show_tools(messages, tools, tool_format)
    reads = reader_of(tool_format, chat_template)
    kwargs, not_used = parse_hints(body, _template_kwargs(body.chat_template_kwargs), reads)
    prompt = ChatPrompt(
        messages=shown,
        add_generation_prompt=generates,
        continue_final_message=continues,
        template_kwargs={**kwargs, **variables},
        chat_template=chat_template,
    )
    return prompt, tools, (*not_used, *tools.left_out, *dict.fromkeys(unread))


def _template_kwargs(value: dict[str, Any] | None) -> dict[str, Any]:
    if not value:
        return {}
    kwargs = dict(value)
    for name in kwargs:
        if name in RESERVED_TEMPLATE_KWARGS:
            raise RequestError(
                f"chat_template_kwargs may not set {name!r}", param="chat_template_kwargs"
            )
    is_long = is_longer(kwargs, MAX_TEMPLATE_KWARGS_BYTES)  # then nothing else looks at all of it
    if not is_long:
        check_depth("chat_template_kwargs", kwargs)
    if is_long or len(json.dumps(kwargs)) > MAX_TEMPLATE_KWARGS_BYTES:
        raise RequestError(
            f"chat_template_kwargs may have at most {MAX_TEMPLATE_KWARGS_BYTES} bytes of JSON",
            param="chat_template_kwargs",
        )
    return kwargs


class _MessageFields(Struct, frozen=True):
    """A message of any role."""

    role: str | None = None
    content: Any = None
    tool_calls: Any = None
    name: str | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    """The newer name of `reasoning_content`."""


def _parse_message(
    value: Any, where: str, replaced: Set[str], not_used: list[str]
) -> dict[str, Any]:
    """replaced: types of parts of a user's message that a line replaces."""
    if not isinstance(value, dict):
        raise wrong_type(where, "an object", value)
    message = read(_MessageFields, value, where + ".")
    role = "system" if message.role == "developer" else message.role
    if role not in ROLES:
        raise wrong_type(f"{where}.role", "system, developer, user, assistant or tool", role)
    tool_calls = _parse_calls(message.tool_calls, where) if role == "assistant" else []
    given, content = message.content, None
    if role == "tool":
        content = result_text(given, f"{where}.content", not_used=not_used)
    elif given is not None or role != "assistant":
        lines = replaced if role == "user" else frozenset()
        content = "\n".join(texts_of(given, f"{where}.content", replaced=lines, not_used=not_used))
    elif not tool_calls:  # an answer without a word, as it comes back
        content = ""
    parsed: dict[str, Any] = {"role": role, "content": content}
    if tool_calls:
        parsed["tool_calls"] = tool_calls
    if message.name is not None:
        parsed["name"] = message.name
    if message.tool_call_id is not None:
        parsed["tool_call_id"] = message.tool_call_id
    reasoning = message.reasoning_content
    reasoning = message.reasoning if reasoning is None else reasoning
    if reasoning is not None:
        parsed["reasoning_content"] = reasoning
    return parsed


def _parse_calls(value: Any, where: str) -> list[dict[str, Any]]:
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
        given = function.get("arguments")
        arguments = arguments_of({} if given is None else given, f"{at}.function.arguments")
        parsed = {"name": function["name"], "arguments": arguments}
        calls.append({"id": call.get("id"), "type": "function", "function": parsed})
    return calls


# -- hints about thinking ------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Wish:
    field: str
    kind: str
    """A key of `VARIABLES`."""
    value: Any


def reader_of(tool_format: ToolFormat, chat_template: str | None) -> Callable[[str], bool]:
    """A test for variables that the template reads. chat_template: the request's own, if any."""
    if chat_template is not None:
        return lambda name: re.search(rf"\b{name}\b", chat_template) is not None
    known = tool_format.template_variables
    return lambda name: known is None or name in known


def parse_hints(
    body: Conversation, kwargs: dict[str, Any], reads: Callable[[str], bool]
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The template's variables, and the names of fields that have no effect.

    kwargs: `chat_template_kwargs`, which win; hints among them that the template does not read are
    left out.
    """
    unread = [name for name in kwargs if name in HINT_VARIABLES and not reads(name)]
    variables = {name: value for name, value in kwargs.items() if name not in unread}
    not_used = [f"chat_template_kwargs.{name}" for name in unread]
    for wish in _wishes(body):
        names = [name for name in VARIABLES[wish.kind] if reads(name)]
        for name in names:
            variables.setdefault(name, wish.value)
        used = bool(names)
        if wish.kind == "effort" and wish.value == "none":
            for name in filter(reads, VARIABLES["thinks"]):
                variables.setdefault(name, False)
                used = True
        if not used:
            not_used.append(wish.field)
    return variables, tuple(not_used)


def _wishes(body: Conversation) -> list[_Wish]:
    wishes = []
    if body.reasoning_effort is not None:
        wishes.append(_Wish("reasoning_effort", "effort", body.reasoning_effort))
    reasoning = body.reasoning
    if reasoning is not None:
        if reasoning.effort is not None:
            wishes.append(_Wish("reasoning.effort", "effort", reasoning.effort))
        if reasoning.enabled is not None:
            wishes.append(_Wish("reasoning.enabled", "thinks", reasoning.enabled))
        if reasoning.max_tokens is not None:
            wishes.append(_Wish("reasoning.max_tokens", "budget", reasoning.max_tokens))
    if body.enable_thinking is not None:
        wishes.append(_Wish("enable_thinking", "thinks", body.enable_thinking))
    wishes += _thinking(body.thinking)
    if body.thinking_budget is not None:
        wishes.append(_Wish("thinking_budget", "budget", body.thinking_budget))
    if body.think is not None:
        kind = "thinks" if isinstance(body.think, bool) else "effort"
        wishes.append(_Wish("think", kind, body.think))
    return wishes


def _thinking(value: bool | dict[str, Any] | None) -> list[_Wish]:
    """The hints of Anthropic's object, or of true and false."""
    if value is None:
        return []
    if isinstance(value, bool):
        return [_Wish("thinking", "thinks", value)]
    kind, budget = value.get("type"), value.get("budget_tokens")
    if kind not in ("enabled", "disabled", "adaptive", "auto"):
        raise wrong_type("thinking.type", "enabled, disabled or adaptive", kind)
    wishes = []
    if kind in ("enabled", "disabled"):
        wishes.append(_Wish("thinking", "thinks", kind == "enabled"))
    if budget is not None:
        if not is_int(budget) or not 1 <= budget <= MAX_BUDGET:
            raise wrong_type("thinking.budget_tokens", f"an integer, 1 to {MAX_BUDGET}", budget)
        wishes.append(_Wish("thinking.budget_tokens", "budget", budget))
    return wishes


# -- parts of content, arguments of calls --------------------------------------------------


def parts_of(value: Any, where: str, wanted: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The path and the object of each part in a list. wanted: words of the error for other
    values."""
    if not isinstance(value, list):
        raise wrong_type(where, wanted, value)
    for i, part in enumerate(value):
        at = f"{where}[{i}]"
        if not isinstance(part, dict):
            raise wrong_type(at, "an object", part)
        yield at, part


def replaced_parts(*, refuses_images: bool) -> Set[str]:
    """Types of parts of a user's message that a line replaces."""
    return frozenset() if refuses_images else NOT_TEXT.keys()


def result_text(
    value: Any,
    where: str,
    keys: Mapping[str, str] = TEXT_PARTS,
    not_used: list[str] | None = None,
) -> str:
    """The text of a tool's result. A line replaces a part that is not text: the tool has run
    already, and a refusal would end the agent's work."""
    if value is None:
        return ""
    return "\n".join(texts_of(value, where, keys, NOT_TEXT.keys(), not_used))


def texts_of(
    value: Any,
    where: str,
    keys: Mapping[str, str] = TEXT_PARTS,
    replaced: Set[str] = frozenset(),
    not_used: list[str] | None = None,
) -> list[str]:
    """The texts of a string or a list of parts. keys: the field with the text, by type of part.
    replaced: types of parts that a line replaces, whose names are added to not_used."""
    if isinstance(value, str):
        return [value]
    texts = []
    for at, part in parts_of(value, where, "a string or a list of text parts"):
        kind = part.get("type")
        key = keys.get(kind) if isinstance(kind, str) else None
        if key is None and isinstance(kind, str) and kind in replaced:
            texts.append(line_for(part, kind))
            if not_used is not None:
                not_used.append(f"{where.partition('[')[0]}.{kind}")
            continue
        if key is None:
            raise unsupported_part(kind, at)
        if not isinstance(part.get(key), str):
            raise wrong_type(f"{at}.{key}", "a string", part.get(key))
        texts.append(part[key])
    return texts


def line_for(part: Mapping[str, Any], kind: str) -> str:
    """The line that takes the place of a part, one of `NOT_TEXT`."""
    facts = [NOT_TEXT[kind], _data_size(part), "not read by this model"]
    return f"[{', '.join(filter(None, facts))}]"


def _data_size(part: Mapping[str, Any]) -> str | None:
    """The size of the bytes in a part, which come as base64; None for an address or an id."""
    for holder in (part, *part.values()):
        for name, is_plain in DATA_FIELDS.items() if isinstance(holder, dict) else ():
            data = holder.get(name)
            if not isinstance(data, str):
                continue
            is_url = data.startswith("data:")
            if is_url or is_plain:
                num_bytes = len(data.partition(",")[2] if is_url else data) * 3 // 4
                return _in_words(num_bytes) if num_bytes else None
    return None


def _in_words(num_bytes: int) -> str:
    if num_bytes < MEGABYTE:
        return f"{max(1, round(num_bytes / 1e3))} KB"
    return f"{num_bytes / MEGABYTE:.1f} MB"


def unsupported_part(kind: Any, at: str) -> RequestError:
    return unsupported(
        f"{at}.type", f"{at}: parts of type {str(kind)[:40]!r} are not supported here"
    )


def arguments_of(value: Any, where: str) -> dict[str, Any]:
    """Arguments of a call in the history: an object, or any text.

    Templates want an object. Text that is not one, such as arguments that were cut off, becomes the
    one value of an object, so that the model sees what it wrote.
    """
    if isinstance(value, str):
        try:
            parsed = parse_json((value or "{}").encode(), where)
            check_depth(where, parsed)
        except RequestError:
            return {INVALID_JSON: value}
        return parsed
    if not isinstance(value, dict):
        raise wrong_type(where, "a JSON object", value)
    try:
        check_depth(where, value)
    except RequestError:
        with contextlib.suppress(RecursionError):
            return {INVALID_JSON: json.dumps(value)}
        raise
    return value
