"""Parts of messages that are not text, and blocks of tools that another server ran."""

from __future__ import annotations

import base64
import typing
from typing import Any

import pytest
from anthropic.types.beta import beta_content_block_param
from bridge_harness import CONTEXT, HI, prompt_of

from termgen.api.anthropic import parse_messages
from termgen.api.chat import parse_chat
from termgen.api.models import parse_tokenize
from termgen.api.responses.body import parse_responses
from termgen.errors import RequestError

PNG = base64.b64encode(b"x" * 12_100).decode()
LARGE = base64.b64encode(b"x" * 3_400_000).decode()
CHAT: list[tuple[dict[str, Any], str]] = [
    (
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PNG}"}},
        "[image, 12 KB, not read by this model]",
    ),
    (
        {"type": "image_url", "image_url": f"data:image/png;base64,{LARGE}"},
        "[image, 3.4 MB, not read by this model]",
    ),
    (
        {"type": "image_url", "image_url": {"url": "https://host/a.png"}},
        "[image, not read by this model]",
    ),
    ({"type": "image_url"}, "[image, not read by this model]"),
    (
        {"type": "file", "file": {"filename": "a.pdf", "file_data": "AAAA"}},
        "[document, 1 KB, not read by this model]",
    ),
    (
        {"type": "input_audio", "input_audio": {"data": PNG, "format": "wav"}},
        "[audio, 12 KB, not read by this model]",
    ),
]
RESPONSES: list[tuple[dict[str, Any], str]] = [
    (
        {"type": "input_image", "image_url": f"data:image/png;base64,{PNG}", "detail": "auto"},
        "[image, 12 KB, not read by this model]",
    ),
    ({"type": "input_image", "file_id": "f"}, "[image, not read by this model]"),
    ({"type": "input_file", "file_data": PNG}, "[document, 12 KB, not read by this model]"),
]
MESSAGES: list[tuple[dict[str, Any], str]] = [
    (
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PNG}},
        "[image, 12 KB, not read by this model]",
    ),
    ({"type": "image", "source": {"type": "url", "url": "https://host"}}, "[image, not read by"),
    (
        {"type": "document", "source": {"type": "base64", "data": PNG}},
        "[document, 12 KB, not read by this model]",
    ),
]
TEXT = {"type": "text", "text": "Look:"}


def chat_of(parts: list[Any], role: str = "user", **options: Any) -> Any:
    body = {"messages": [*HI, {"role": role, "content": parts, "tool_call_id": "c"}]}
    return parse_chat(body, **CONTEXT, **options)


def message_of(parts: list[Any], role: str = "user", **options: Any) -> Any:
    content = [{"type": "tool_result", "tool_use_id": "c", "content": parts}]
    turn = {"role": "user", "content": content if role == "tool" else parts}
    middle = {"role": "assistant", "content": "yes"}
    body = {"max_tokens": 9, "messages": [*HI, middle, turn]}
    return parse_messages(body, **CONTEXT, **options).chat


def response_of(parts: list[Any], role: str = "user", **options: Any) -> Any:
    item: dict[str, Any] = {"role": role, "content": parts}
    if role == "tool":
        item = {"type": "function_call_output", "call_id": "c", "output": parts}
    middle = {"role": "assistant", "content": "yes"}
    return parse_responses({"input": [*HI, middle, item]}, **CONTEXT, **options).chat


CASES = [
    *((chat_of, part, line, "messages") for part, line in CHAT),
    *((message_of, part, line, "messages") for part, line in MESSAGES),
    *((response_of, part, line, "input") for part, line in RESPONSES),
]


@pytest.mark.parametrize("role", ["user", "tool"])
@pytest.mark.parametrize(("ask", "part", "line", "field"), CASES)
def test_a_line_takes_the_place_of_what_is_not_text(
    ask: Any, part: dict[str, Any], line: str, field: str, role: str
) -> None:
    text = {**TEXT, "type": "input_text"} if ask is response_of else TEXT
    request = ask([text, part, part], role)
    first, second, third = prompt_of(request).messages[-1]["content"].split("\n")
    assert first == "Look:" and second.startswith(line) and second == third
    assert request.not_used == (f"{field}.{part['type']}",)


@pytest.mark.parametrize(("ask", "part", "line", "field"), CASES)
def test_a_server_may_refuse_it_in_messages(
    ask: Any, part: dict[str, Any], line: str, field: str
) -> None:
    with pytest.raises(RequestError, match=part["type"]) as caught:
        ask([part], refuses_images=True)
    assert (caught.value.param or "").startswith(f"{field}["), caught.value.param
    assert line in prompt_of(ask([part], "tool", refuses_images=True)).messages[-1]["content"]


def test_instructions_and_answers_hold_text_only() -> None:
    for role in ("assistant", "system"):
        with pytest.raises(RequestError):
            chat_of([CHAT[0][0]], role)
    with pytest.raises(RequestError):
        response_of([RESPONSES[0][0]], "assistant")


def test_tokenize_counts_the_line() -> None:
    body = {"messages": [{"role": "user", "content": [CHAT[0][0]]}]}
    asked = parse_tokenize(body, CONTEXT["tool_format"])
    assert asked.not_used == ("messages.image_url",)
    with pytest.raises(RequestError):
        parse_tokenize(body, CONTEXT["tool_format"], refuses_images=True)


def test_documents_of_plain_text_are_read() -> None:
    parts = [
        {"type": "document", "title": "T", "source": {"type": "text", "data": "one"}},
        {"type": "document", "source": {"type": "content", "content": [TEXT]}},
        {"type": "search_result", "title": "S", "source": "https://s", "content": [TEXT, TEXT]},
    ]
    for role in ("user", "tool"):
        request = message_of(parts, role)
        assert request.not_used == ()
        shown = prompt_of(request).messages[-1]["content"]
        assert shown == "T\none\nLook:\nS\nhttps://s\nLook:\nLook:"


# -- blocks of other servers ---------------------------------------------------------------

LEFT_OUT: list[dict[str, Any]] = [
    {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "x"}},
    {"type": "web_search_tool_result", "tool_use_id": "s", "content": []},
    {"type": "web_fetch_tool_result", "tool_use_id": "s", "content": {}},
    {"type": "code_execution_tool_result", "tool_use_id": "s", "content": {}},
    {"type": "bash_code_execution_tool_result", "tool_use_id": "s", "content": {}},
    {"type": "text_editor_code_execution_tool_result", "tool_use_id": "s", "content": {}},
    {"type": "tool_search_tool_result", "tool_use_id": "s", "content": {}},
    {"type": "advisor_tool_result", "tool_use_id": "s", "content": {}},
    {"type": "mcp_tool_listing", "mcp_server_name": "m", "tools": []},
    {"type": "container_upload", "file_id": "f"},
    {"type": "tool_addition", "tool": {}},
    {"type": "tool_removal", "tool": {}},
    {"type": "fallback", "from": {}, "to": {}},
    {"type": "compaction", "content": None},
]
READ = {
    *("text", "image", "document", "search_result", "thinking", "redacted_thinking", "tool_use"),
    *("tool_result", "mcp_tool_use", "mcp_tool_result"),
}


def answered(*blocks: Any) -> Any:
    turns = [*HI, {"role": "assistant", "content": list(blocks)}, *HI]
    return parse_messages({"max_tokens": 9, "messages": turns}, **CONTEXT).chat


def test_every_kind_of_block_has_a_case() -> None:
    kinds = set()
    for block in typing.get_args(beta_content_block_param.BetaContentBlockParam):
        if hasattr(block, "__required_keys__"):
            kinds |= set(typing.get_args(typing.get_type_hints(block)["type"]))
    assert {"server_tool_use", "mcp_tool_use", "fallback"} < kinds
    assert kinds - READ - {block["type"] for block in LEFT_OUT} == set()


@pytest.mark.parametrize("block", LEFT_OUT, ids=lambda block: block["type"])
def test_blocks_that_only_another_server_reads_are_left_out_and_named(
    block: dict[str, Any],
) -> None:
    request = answered({"type": "text", "text": "I look."}, block, TEXT)
    assert prompt_of(request).messages[1] == {"role": "assistant", "content": "I look.\nLook:"}
    assert request.not_used == (f"messages.{block['type']}",)


def test_an_mcp_call_stands_before_its_result() -> None:
    use = {"type": "mcp_tool_use", "id": "m", "name": "find", "server_name": "docs", "input": {}}
    result = {"type": "mcp_tool_result", "tool_use_id": "m", "content": [TEXT], "is_error": True}
    request = answered({"type": "text", "text": "I look."}, use, result, TEXT)
    shown = [dict(message) for message in prompt_of(request).messages]
    assert [m["role"] for m in shown] == ["user", "assistant", "tool", "assistant", "user"]
    (call,) = shown[1]["tool_calls"]
    assert call["function"] == {"name": "docs__find", "arguments": {}}
    assert shown[2]["tool_call_id"] == call["id"] and shown[2]["content"] == "Error: Look:"
    assert shown[1]["content"] == "I look." and shown[3]["content"] == "Look:"
    with pytest.raises(RequestError) as caught:
        answered({**use, "server_name": None})
    assert caught.value.param == "messages[1].content[0].server_name"


def test_a_summary_of_an_earlier_conversation_is_shown() -> None:
    request = answered({"type": "compaction", "content": "So far."}, TEXT)
    assert prompt_of(request).messages[1]["content"] == "So far.\nLook:"
    assert request.not_used == ()
