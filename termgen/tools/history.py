"""Calls and results of a conversation as strict chat templates take them.

Most templates take any order of roles. Those of Llama refuse two calls in one message, those of
Mistral a user's message right after a result, and those without tools two messages of the user in
a row. Such conversations come about when an answer is stopped, or the model is changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from termgen.vocabulary.tool_format import ToolFormat, ToolStyle

NO_ANSWER = "(The answer was stopped here.)"
"""Stands for an answer that never came."""
_ALTERNATE = (ToolStyle.MISTRAL, ToolStyle.MISTRAL_ARGS)

Messages = Sequence[dict[str, Any]]


def before_template(messages: Messages, tool_format: ToolFormat) -> list[dict[str, Any]]:
    """The messages for a template that knows tools."""
    if tool_format.style is ToolStyle.LLAMA:
        return _one_by_one(messages)
    return _with_answers(messages) if tool_format.style in _ALTERNATE else list(messages)


def merged_users(messages: Messages) -> list[dict[str, Any]]:
    """The messages for a template without tools, whose results are texts of the user."""
    merged: list[dict[str, Any]] = []
    for message in messages:
        last = merged[-1] if merged else {}
        if message["role"] == "user" == last.get("role"):
            merged[-1] = {**last, "content": f"{last['content']}\n\n{message['content']}"}
        else:
            merged.append(message)
    return merged


def _one_by_one(messages: Messages) -> list[dict[str, Any]]:
    """Each call in a message of its own, followed by its result."""
    results = {m.get("tool_call_id"): m for m in messages if m["role"] == "tool"}
    found: list[dict[str, Any]] = []
    for message in messages:
        calls = message.get("tool_calls") or ()
        if len(calls) < 2:
            if message["role"] != "tool" or message not in found:
                found.append(message)
            continue
        for number, call in enumerate(calls):
            content = message["content"] if number == 0 else ""
            found.append({**message, "content": content, "tool_calls": [call]})
            result = results.get(call["id"])
            if result is not None:
                found.append(result)
    return found


def _with_answers(messages: Messages) -> list[dict[str, Any]]:
    """An answer between a result and the user's next message."""
    found: list[dict[str, Any]] = []
    for message in messages:
        if found and found[-1]["role"] == "tool" and message["role"] == "user":
            found.append({"role": "assistant", "content": NO_ANSWER})
        found.append(message)
    return found
