"""What a client is shown: tool calls as they go on, and a chat that is loaded again."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from acp.helpers import (
    embedded_text_resource,
    resource_block,
    start_tool_call,
    text_block,
    tool_content,
    update_agent_message_text,
    update_agent_thought_text,
    update_tool_call,
    update_user_message,
    update_user_message_text,
)
from acp.schema import ToolCallLocation, ToolCallStatus, ToolCallUpdate, ToolKind

from termgen.tools import files
from termgen.tools.calls import CallState, ToolCall, arguments_of
from termgen.tools.text import escaped, for_model, shortened
from termgen.tui.chat.saved.chat_records import plain_text
from termgen.tui.chat.state.attachments import Attachment
from termgen.tui.chat.state.conversation import Conversation, Turn

MAX_TITLE_CHARS = 120
MAX_SHOWN_CHARS = 100_000
"""Characters of one call's arguments, or of its result."""
STATUS: dict[CallState, ToolCallStatus] = {
    CallState.WRITTEN: "pending",
    CallState.ASKED: "pending",
    CallState.RUNNING: "in_progress",
    CallState.DONE: "completed",
    CallState.FAILED: "failed",
    CallState.DENIED: "failed",
    CallState.CANCELLED: "failed",
}
KINDS: dict[str, ToolKind] = {
    f"{files.NAME}_list": "read",
    f"{files.NAME}_read": "read",
    f"{files.NAME}_search": "search",
}
"""Kinds of the built-in tools; what another does is not known."""


class ShownCalls:
    """The calls that the client was shown, each with the state that it was shown in."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._shown: dict[str, CallState] = {}

    def news(self, turn: Turn) -> Iterator[Any]:
        """Updates for the calls of a turn that have changed, or are new."""
        for call in (call for one in turn.rounds for call in one.calls):
            before = self._shown.get(call.call_id)
            self._shown[call.call_id] = call.state
            if before is None:
                yield start_tool_call(call.call_id, **self._about(call), **_result_of(call))
            elif STATUS[before] != STATUS[call.state]:
                yield update_tool_call(call.call_id, **_result_of(call))

    def question(self, call: ToolCall) -> ToolCallUpdate:
        """The call as the user is asked about it."""
        content: list[Any] = [tool_content(text_block(f"```json\n{_arguments(call)}\n```"))]
        return ToolCallUpdate(
            tool_call_id=call.call_id, status="pending", content=content, **self._about(call)
        )

    def _about(self, call: ToolCall) -> dict[str, Any]:
        line = " ".join(escaped(plain_text(f"{call.name} {call.arguments}")).split())
        about: dict[str, Any] = {
            "title": shortened(line, MAX_TITLE_CHARS),
            "kind": KINDS.get(call.name, "other"),
            "raw_input": _raw(call),
        }
        path = (arguments_of(call.arguments) or {}).get("path")
        if call.name in KINDS and isinstance(path, str) and "\0" not in path:
            about["locations"] = [ToolCallLocation(path=str(self._folder / plain_text(path)))]
        return about


def _result_of(call: ToolCall) -> dict[str, Any]:
    if not call.state.is_over:
        return {"status": STATUS[call.state]}
    words = for_model(plain_text(call.result), MAX_SHOWN_CHARS)
    return {"status": STATUS[call.state], "content": [tool_content(text_block(words))]}


def _arguments(call: ToolCall) -> str:
    """The arguments with indents, if they are JSON."""
    arguments = arguments_of(call.arguments)
    text = call.arguments if arguments is None else json.dumps(arguments, indent=2)
    return shortened(escaped(plain_text(text)), MAX_SHOWN_CHARS)


def _raw(call: ToolCall) -> Any:
    """The arguments as JSON, or as the text that they are where they cannot be sent as that."""
    arguments = arguments_of(call.arguments)
    try:
        json.dumps(arguments, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        arguments = None
    return plain_text(call.arguments) if arguments is None else arguments


def replay(conversation: Conversation, folder: Path) -> Iterator[Any]:
    """The chat as it was said, turn after turn."""
    shown = ShownCalls(folder)
    for turn in conversation.turns:
        for file in turn.attachments:
            yield update_user_message(_file_block(file, folder))
        yield update_user_message_text(plain_text(turn.question))
        calls = {update.tool_call_id: update for update in shown.news(turn)}
        for one in turn.rounds:
            yield from _said(one.thought.text, one.said)
            yield from (calls[call.call_id] for call in one.calls)
        yield from _said(turn.thought.text, turn.answer)


def _said(thought: str, text: str) -> Iterator[Any]:
    if thought:
        yield update_agent_thought_text(plain_text(thought))
    if text:
        yield update_agent_message_text(plain_text(text))


def _file_block(file: Attachment, folder: Path) -> Any:
    # names of files that were attached elsewhere, such as a paste, are no paths of this folder
    uri = (folder / file.name).as_uri() if "\0" not in file.name else file.name
    return resource_block(embedded_text_resource(uri, plain_text(file.text)))
