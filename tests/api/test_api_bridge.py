"""/v1/messages without a server: bodies in, chat news out. Then random bodies, for both bridges."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import pytest
from bridge_harness import CALLS, HI, ask, messages, play, prompt_of
from hypothesis import given, settings
from hypothesis import strategies as st

from termgen.api import anthropic
from termgen.api.chat_bridge import CallNews, EndNews, News, TextNews, _news_of
from termgen.errors import RequestError


def test_chunks_are_taken_apart() -> None:
    """Deltas as OpenAI's clients get them: the call's name first, its arguments in pieces."""
    function = {"name": "weather", "arguments": ""}
    first = {"index": 0, "id": "call_a", "type": "function", "function": function}
    more = {"index": 0, "function": {"arguments": '{"a'}}
    deltas = [{"role": "assistant", "content": ""}, {"content": "x"}, {"tool_calls": [first, more]}]
    news = [n for d in deltas for n in _news_of({"delta": d, "finish_reason": None})]
    news += _news_of({"delta": {}, "finish_reason": "stop", "stop_reason": "END"})
    assert news == [
        TextNews("x"),
        CallNews(0, "call_a", "weather", ""),
        CallNews(0, None, "", '{"a'),
        EndNews("stop", "END"),
    ]


# -- Anthropic -----------------------------------------------------------------------------


def test_a_conversation_with_tools_becomes_a_chat() -> None:
    asked = messages(
        system=[{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        messages=[
            {"role": "user", "content": "weather?"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "x"},
                    {"type": "text", "text": "I look."},
                    {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Köln"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "t1", "content": "rain"},
                    {
                        "type": "tool_result",
                        "tool_use_id": "t2",
                        "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
                    },
                    {"type": "text", "text": "and tomorrow?"},
                ],
            },
        ],
        stop_sequences=["END"],
        top_k=5,
        temperature=0.3,
    )
    params, prompt = asked.chat.job.params, prompt_of(asked.chat)
    assert (params.max_tokens, params.top_k, params.temperature) == (9, 5, 0.3)
    assert params.stop == ("END",) or list(params.stop) == ["END"]
    told = [dict(m) for m in prompt.messages]
    assert [m["role"] for m in told] == ["system", "user", "assistant", "tool", "tool", "user"]
    assert told[0]["content"] == "Be brief." and told[2]["content"] == "I look."
    assert told[2]["tool_calls"][0]["function"] == {
        "name": "weather",
        "arguments": {"city": "Köln"},
    }
    assert told[2]["reasoning_content"] == "hm"
    assert (told[3]["tool_call_id"], told[3]["content"]) == ("t1", "rain")
    assert told[4]["content"] == "a\nb" and told[5]["content"] == "and tomorrow?"
    assert prompt.add_generation_prompt and not prompt.continue_final_message


def test_words_put_into_the_assistants_mouth_go_on() -> None:
    prompt = prompt_of(messages(messages=[*HI, {"role": "assistant", "content": "Sure,"}]).chat)
    assert prompt.continue_final_message and not prompt.add_generation_prompt


def test_a_stamp_does_not_spoil_the_prefix_cache() -> None:
    def system(stamp: str) -> Any:
        head = f"x-anthropic-billing-header: cc_version=2.1; cch={stamp}; cc_entrypoint=cli"
        blocks = [{"type": "text", "text": head}, {"type": "text", "text": "cch=kept"}]
        return prompt_of(messages(system=blocks).chat).messages[0]["content"]

    assert system("a1b2") == system("ffff") and system("a1b2").endswith("\ncch=kept")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "hologram", "source": {}}]}]},
            "messages[0].content[0].type",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "messages[0].content[0].text",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]},
            "messages[0].content[0].tool_use_id",
        ),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "a"}]}]},
            "messages[0].content[0].input",
        ),
        ({"system": [{"type": "image"}]}, "system[0].type"),
        ({"system": [{"type": "text", "text": 5}]}, "system[0].text"),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "x"}]}
                        ],
                    }
                ]
            },
            "messages[0].content[0].content[0].type",
        ),
        ({"stop_sequences": "END"}, "stop_sequences"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"temperature": 5}, "temperature"),
        ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "often"}}, "thinking.type"),
        ({"thinking": True}, "thinking"),
        ({"output_config": {"effort": "huge"}}, "output_config.effort"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"speed": "fast"}, "speed"),
        ({"context_management": {"edits": [{"type": "clear_tool_uses"}]}}, "context_management"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type"),
        ({"tools": [{"type": "hammer_20250124", "name": "hammer"}]}, "tools[0].type"),
        ({"tools": "x"}, "tools"),
        ({"tools": [{"name": "", "input_schema": {}}]}, "tools[0].name"),
        ({"tools": [{"name": "f", "input_schema": 5}]}, "tools[0].input_schema"),
        ({"tool_choice": {"type": "maybe"}}, "tool_choice.type"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
    ],
)
def test_what_messages_refuses(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        messages(**fields)
    assert caught.value.param == param, caught.value


def test_unknown_fields_are_named() -> None:
    asked = messages(
        metadata={"user_id": "u"},
        thinking={"type": "adaptive"},
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        output_config={"effort": "low"},
        new=1,
    )
    assert asked.ignored == ("new",)
    assert prompt_of(asked.chat).template_kwargs == {"reasoning_effort": "low"}


def test_a_stream_of_text_and_calls_has_anthropics_order(monkeypatch: pytest.MonkeyPatch) -> None:
    events = play(anthropic.MessageStream(messages(stream=True)), CALLS, monkeypatch)
    assert [e["type"] for e in events] == [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_delta",
        "content_block_stop",
        "content_block_start",
        "content_block_delta",
        "content_block_delta",
        "content_block_stop",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    start = events[0]["message"]
    assert start["content"] == [] and start["stop_reason"] is None
    assert start["id"].startswith("msg_")
    assert [e["index"] for e in events if "index" in e] == [0] * 4 + [1] * 4 + [2] * 3
    assert events[5]["content_block"] == {
        "type": "tool_use",
        "id": "call_a",
        "name": "weather",
        "input": {},
    }
    pieces = [e["delta"]["partial_json"] for e in events[6:8]]
    assert json.loads("".join(pieces)) == {"city": "Köln"}
    assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert events[-2]["usage"] == {
        "input_tokens": 4,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 16,
        "output_tokens": 7,
    }


@pytest.mark.parametrize(
    ("reason", "told"), [("stop", "tool_use"), ("tool_calls", "tool_use"), ("length", "max_tokens")]
)
def test_what_ends_with_a_call(reason: str, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    news: list[News] = [CallNews(0, "call_a", "weather", "{}"), EndNews(reason, None)]
    events = play(anthropic.MessageStream(messages(stream=True)), news, monkeypatch)
    assert events[-2]["delta"]["stop_reason"] == told


def test_a_call_that_a_stop_sequence_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    news: list[News] = [CallNews(0, "call_a", "weather", '{"ci'), EndNews("stop", "ty")]
    events = play(anthropic.MessageStream(messages(stream=True)), news, monkeypatch)
    assert events[-2]["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": "ty"}


def test_an_answer_without_text_still_has_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    events = play(
        anthropic.MessageStream(messages(stream=True)), [EndNews("length", None)], monkeypatch
    )
    assert [e["type"] for e in events] == [
        "message_start",
        "content_block_start",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert events[-2]["delta"]["stop_reason"] == "max_tokens"


# -- anything at all -----------------------------------------------------------------------

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 2**70) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
KINDS = ["text", "tool_use", "tool_result", "thinking", "image", "message", "function_call"]
KINDS += ["function_call_output", "input_text", "output_text", "function", "custom", "json_schema"]
KEYS = ["type", "role", "content", "text", "id", "name", "input", "arguments", "call_id", "output"]
KEYS += ["tool_use_id", "format", "schema", "effort", "input_schema", "parameters"]
PIECES = st.fixed_dictionaries(
    {},
    optional={
        "type": st.sampled_from(KINDS) | JSON,
        "role": st.sampled_from(["user", "assistant", "system", "tool"]) | JSON,
        **{key: JSON | st.lists(JSON, max_size=2) for key in KEYS[2:]},
    },
)
VALUES = JSON | PIECES | st.lists(PIECES, max_size=3)
MESSAGES_FIELDS = ["messages", "system", "tools", "tool_choice", "output_config", "thinking"]
MESSAGES_FIELDS += ["stop_sequences", "max_tokens", "top_k", "temperature", "context_management"]
RESPONSES_FIELDS = ["input", "instructions", "tools", "tool_choice", "text", "reasoning", "include"]
RESPONSES_FIELDS += ["max_output_tokens", "temperature", "metadata", "store", "truncation"]


@given(st.dictionaries(st.sampled_from(MESSAGES_FIELDS), VALUES, max_size=4))
@settings(max_examples=80, deadline=None)
def test_messages_refuse_nothing_but_by_name(fields: dict[str, Any]) -> None:
    with suppress(RequestError):
        messages(**fields)


@given(st.dictionaries(st.sampled_from(RESPONSES_FIELDS), VALUES, max_size=4))
@settings(max_examples=80, deadline=None)
def test_responses_refuse_nothing_but_by_name(fields: dict[str, Any]) -> None:
    with suppress(RequestError):
        ask(**fields)
