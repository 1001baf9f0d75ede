"""The conversation in a chat's body: its messages, and how they become a prompt."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from termgen.api.errors import unsupported
from termgen.api.fields import Fields, check_depth, wrong_type
from termgen.api.hints import parse_hints, reader_of
from termgen.api.parts import result_text, texts_of
from termgen.api.tools import Tools, parse_calls, show_tools
from termgen.client import ChatPrompt
from termgen.errors import RequestError
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


def parse_template(body: Fields, *, is_trusted: bool) -> str | None:
    """The chat template that a request brings instead of the model's."""
    source = body.string("chat_template")
    if source is not None and not is_trusted:
        raise unsupported(
            "chat_template",
            "chat_template is taken only by servers with --trust-request-chat-template",
        )
    return source


def format_for(tool_format: ToolFormat, chat_template: str | None) -> ToolFormat:
    """How calls are written where a request brings its template: that decides who shows tools."""
    if chat_template is None:
        return tool_format
    return replace(tool_format, knows_tools="tools" in chat_template)


def parse_prompt(
    body: Fields,
    tools: Tools = Tools(),  # noqa: B008 frozen
    tool_format: ToolFormat = ToolFormat(knows_tools=True),  # noqa: B008 frozen
    chat_template: str | None = None,
) -> tuple[ChatPrompt, tuple[str, ...]]:
    """The messages and how to render them; wishes that the template does not read."""
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
    shown, variables = show_tools(messages, tools, tool_format)
    reads = reader_of(tool_format, chat_template)
    kwargs, not_used = parse_hints(body, _template_kwargs(body), reads)
    prompt = ChatPrompt(
        messages=shown,
        add_generation_prompt=generates,
        continue_final_message=continues,
        template_kwargs={**kwargs, **variables},
        chat_template=chat_template,
    )
    return prompt, not_used


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
    is_long = is_longer(kwargs, MAX_TEMPLATE_KWARGS_BYTES)  # then nothing else looks at all of it
    if not is_long:
        check_depth("chat_template_kwargs", kwargs)
    if is_long or len(json.dumps(kwargs)) > MAX_TEMPLATE_KWARGS_BYTES:
        raise RequestError(
            f"chat_template_kwargs may have at most {MAX_TEMPLATE_KWARGS_BYTES} bytes of JSON",
            param="chat_template_kwargs",
        )
    return kwargs


def _parse_message(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise wrong_type(where, "an object", value)
    message = Fields(value, where + ".")
    role = message.string("role")
    role = "system" if role == "developer" else role
    if role not in ROLES:
        raise wrong_type(f"{where}.role", "system, developer, user, assistant or tool", role)
    tool_calls = parse_calls(message.take("tool_calls"), where) if role == "assistant" else []
    given, content = message.take("content"), None
    if role == "tool":
        content = result_text(given, f"{where}.content")
    elif given is not None or role != "assistant":
        content = "\n".join(texts_of(given, f"{where}.content"))
    elif not tool_calls:  # an answer without a word, as it comes back
        content = ""
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
