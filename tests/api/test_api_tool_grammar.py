"""The texts that the grammars of tool calls allow, checked by llguidance itself, byte by byte."""

from __future__ import annotations

from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer
from tools_harness import KNOWS, F, G, chat

from termgen.api.chat import ChatStream, chat_response
from termgen.client import TokenDelta
from termgen.vocabulary.request import FinishReason
from termgen.vocabulary.tool_format import ToolFormat, ToolStyle

STRICT = {**F, "function": {**F["function"], "strict": True}}
"""Requires an integer `x`."""
GOOD = '<tool_call>\n{"name": "f", "arguments": {"x":1}}\n</tool_call>'
OTHER = '<tool_call>\n{"name": "g.h", "arguments": {}}\n</tool_call>'
WRONG = '<tool_call>\n{"name": "f", "arguments": {"y":1}}\n</tool_call>'


def may_be_written(text: str, tool_format: ToolFormat = KNOWS, **fields: object) -> bool:
    """True if the grammar accepts `text` as a whole answer."""
    wanted = chat(tool_format, **fields).job.params.structured_outputs
    assert wanted is not None and wanted.grammar is not None
    matcher = LLMatcher(LLTokenizer("byte"), wanted.grammar)
    assert not matcher.get_error()
    # The vocabulary is the bytes; ids above them are special tokens.
    given = list(text.encode())
    return bool(matcher.validate_tokens(given) == len(given)) and (
        bool(matcher.consume_tokens(given)) and bool(matcher.is_accepting())
    )


@pytest.mark.parametrize("parallel", [True, False])
def test_where_calls_may_come_text_is_free_and_a_strict_call_is_not(parallel: bool) -> None:
    fields = {"tools": [STRICT], "parallel_tool_calls": parallel}
    for text in ("Hello, <b>you</b> 👋\n", "<tool_call", GOOD, "Let me see. " + GOOD):
        assert may_be_written(text, **fields), text
    for text in (WRONG, "So: " + WRONG, OTHER, "<tool_call>none"):
        assert not may_be_written(text, **fields), text
    assert may_be_written(GOOD + "\n" + GOOD, **fields) == parallel


def test_one_call_at_most_needs_no_strict_function() -> None:
    fields = {"tools": [F, G], "parallel_tool_calls": False}
    assert may_be_written(WRONG, **fields) and may_be_written("text", **fields)
    assert not may_be_written(WRONG + OTHER, **fields)


def test_calls_that_must_come_come_alone() -> None:
    fields = {"tools": [F, G], "tool_choice": "required"}
    g = '<tool_call>\n{"name": "g.h", "arguments": {}}\n</tool_call>'
    assert may_be_written(GOOD, **fields) and may_be_written(g, **fields)
    assert may_be_written(GOOD + "\n" + g, **fields)
    assert not may_be_written(GOOD + "\n" + g, **fields, parallel_tool_calls=False)
    for text in ("", "Hi " + GOOD, WRONG, GOOD + " done"):
        assert not may_be_written(text, **fields), text
    named = {**fields, "tool_choice": {"type": "function", "function": {"name": "g.h"}}}
    assert may_be_written(g, **named) and not may_be_written(GOOD, **named)


def test_json_or_calls() -> None:
    fields = {"tools": [F], "response_format": {"type": "json_object"}}
    assert may_be_written('{"a":1}', **fields) and may_be_written(GOOD, **fields)
    for text in ("text", "[1]", '{"a":1}' + GOOD, OTHER):
        assert not may_be_written(text, **fields), text


PLAIN = ToolFormat(knows_tools=True, style=ToolStyle.LLAMA)
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
FORMS = [
    {"type": "json_object"},
    {"type": "json_schema", "json_schema": {"schema": PERSON}},
]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form["type"])
@pytest.mark.parametrize(
    ("text", "is_call"),
    [
        ('{"name": "f", "parameters": {"x":1}}', True),
        ('{"name": "g.h", "parameters": {}}', True),
        ('{"name": "Bob", "age": 5}', False),
    ],
)
def test_json_or_calls_where_a_call_is_plain_json(text: str, is_call: bool, form: Any) -> None:
    fields: dict[str, Any] = {"tools": [STRICT, G], "response_format": form}
    assert may_be_written(text, PLAIN, **fields)
    for other in ("text", "[1]", text + text, '{"age": "x"'):
        assert not may_be_written(other, PLAIN, **fields), other
    if form["type"] == "json_schema":
        assert not may_be_written('{"name": "f", "parameters": {"y": 1}}', PLAIN, **fields)
    request = chat(PLAIN, **fields)
    delta = TokenDelta(
        request_id="r",
        index=0,
        text=text,
        token_ids=(),
        logprobs=None,
        finish_reason=FinishReason.STOP,
        stop_reason=None,
        num_prompt_tokens=1,
        num_cached_tokens=0,
        num_output_tokens=1,
    )
    message = chat_response(request, [delta])["choices"][0]["message"]
    assert bool(message.get("tool_calls")) == is_call
    assert message["content"] == (None if is_call else text)
    streamed = "".join(
        choice["delta"].get("content") or ""
        for chunk in ChatStream(request).feed(0, delta)
        for choice in chunk["choices"]
    )
    assert streamed == ("" if is_call else text)
