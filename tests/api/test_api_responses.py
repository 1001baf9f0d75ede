"""/v1/responses without a server: bodies in, chat news out."""

from __future__ import annotations

from typing import Any

import pytest
from bridge_harness import CALLS, CONTEXT, ask, play, prompt_of
from llguidance import LLMatcher

from termgen.api.chat_bridge import EndNews, News, TextNews
from termgen.api.responses import answer as responses
from termgen.api.responses import body as responses_body
from termgen.errors import RequestError
from termgen.vocabulary.tool_format import ToolFormat


def test_items_become_a_chat() -> None:
    asked = ask(
        instructions="Be brief.",
        input=[
            {"role": "user", "content": [{"type": "input_text", "text": "weather?"}]},
            {"type": "reasoning", "id": "rs_0", "summary": [], "encrypted_content": "x"},
            {
                "type": "reasoning",
                "id": "rs_1",
                "summary": [],
                "content": [{"type": "reasoning_text", "text": "rain?"}],
            },
            {
                "type": "message",
                "role": "assistant",
                "id": "msg_1",
                "content": [{"type": "output_text", "text": "I look.", "annotations": []}],
            },
            {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": ""},
            {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "and when?"}]},
            {"type": "function_call", "call_id": "c2", "name": "time", "arguments": '{"a": 1}'},
            {"type": "function_call_output", "call_id": "c1", "output": "rain"},
            {"type": "function_call_output", "call_id": "c2", "output": "noon"},
        ],
        max_output_tokens=5,
        store=False,
        include=["reasoning.encrypted_content"],
        metadata={"a": "b"},
    )
    told = [dict(m) for m in prompt_of(asked.chat).messages]
    assert [m["role"] for m in told] == ["system", "user", "assistant", "tool", "tool"]
    assert [c["id"] for c in told[2]["tool_calls"]] == ["c1", "c2"]
    assert [c["function"]["arguments"] for c in told[2]["tool_calls"]] == [{}, {"a": 1}]
    assert told[2]["reasoning_content"] == "rain?\nand when?"
    assert told[2]["content"] == "I look." and told[4]["content"] == "noon"
    assert asked.chat.job.params.max_tokens == 5
    assert asked.echo["metadata"] == {"a": "b"} and asked.echo["instructions"] == "Be brief."


def test_tools_of_responses_are_strict_unless_they_say_otherwise() -> None:
    schema = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
    given = [
        {"type": "function", "name": "a", "parameters": schema},
        {"type": "function", "name": "b", "parameters": schema, "strict": None},
        {"type": "function", "name": "c", "parameters": schema, "strict": False},
    ]
    asked = ask(tools=given)
    assert [f.strict for f in asked.chat.tools.functions] == [True, True, False]
    assert [tool["strict"] for tool in asked.echo["tools"]] == [True, True, False]
    assert asked.chat.job.params.structured_outputs is not None, "and that is enforced"
    assert ask(tools=given[2:]).chat.job.params.structured_outputs is None
    assert given[0].keys() == {"type", "name", "parameters"}, "what was asked stays what it was"
    # An unenforceable schema is refused only if enforcement was requested.
    list_of_sets = {"type": "array", "uniqueItems": True}
    odd = {"type": "object", "properties": {"x": list_of_sets}, "required": ["x"]}
    for strict, is_refused in ((None, False), (True, True)):
        tool = {"type": "function", "name": "a", "parameters": odd, "strict": strict}
        wanted = ask(tools=[tool]).chat.job.params.structured_outputs
        assert wanted is not None and wanted.grammar is not None
        fault = LLMatcher.validate_grammar(LLMatcher.grammar_from_lark(wanted.grammar))
        assert bool(fault) == is_refused, fault
    # A model whose own parser reads its calls: nothing can be enforced, so nothing is promised.
    declared = ToolFormat(knows_tools=True, new_parser=lambda *_: None)  # type: ignore[arg-type, return-value]
    context = {**CONTEXT, "tool_format": declared}
    asked = responses_body.parse_responses({"input": "hi", "tools": given[:1]}, **context)
    assert not asked.echo["tools"][0]["strict"] and not asked.chat.tools.functions[0].strict


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"type": "reasoning"}]}, "input"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input"),
        (
            {"input": [{"role": "user", "content": [{"type": "hologram"}]}]},
            "input[0].content[0].type",
        ),
        (
            {"input": [{"type": "reasoning", "content": [{"type": "x"}]}]},
            "input[0].content[0].type",
        ),
        ({"store": True}, "store"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"background": True}, "background"),
        ({"include": ["message.output_text.logprobs"]}, "include"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"top_p": 7}, "top_p"),
        ({"truncation": "auto"}, "truncation"),
        ({"tools": [{"type": "hammer"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
        ({"tools": [{"type": "function", "name": "f", "parameters": 5}]}, "tools[0].parameters"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.name"),
        ({"text": {"format": "json"}}, "text.format"),
        ({"instructions": 5}, "instructions"),
    ],
)
def test_what_responses_refuses(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        ask(**fields)
    assert caught.value.param == param, caught.value


def test_a_stream_of_text_and_calls_has_openais_order(monkeypatch: pytest.MonkeyPatch) -> None:
    events = play(responses.ResponseStream(ask(stream=True)), CALLS, monkeypatch)
    assert [e["type"].removeprefix("response.") for e in events] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]
    assert [e["sequence_number"] for e in events] == list(range(len(events)))
    indexes = [e["output_index"] for e in events if "output_index" in e]
    assert indexes == [0] * 7 + [1] * 5 + [2] * 4
    final = events[-1]["response"]
    assert [item["type"] for item in final["output"]] == ["message"] + ["function_call"] * 2
    assert final["output"][0]["content"][0]["text"] == "I will look."
    assert final["output"][1]["arguments"] == '{"city": "Köln"}'
    assert final["output"] == [
        e["item"] for e in events if e["type"] == "response.output_item.done"
    ]
    assert {item["status"] for item in final["output"]} == {"completed"}
    assert final["usage"]["input_tokens_details"]["cached_tokens"] == 16
    assert final["usage"]["total_tokens"] == 27


def test_a_cut_answer_is_incomplete_and_a_failure_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    cut: list[News] = [TextNews("a"), EndNews("length", None)]
    last = play(responses.ResponseStream(ask(stream=True)), cut, monkeypatch)[-1]
    assert last["type"] == "response.incomplete"
    assert last["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
    assert last["response"]["output"][0]["status"] == "incomplete"
    stream = responses.ResponseStream(ask(stream=True))
    begun = stream.feed(0, TextNews("a"))  # type: ignore[arg-type]
    (failed,) = stream.failure(RequestError("gone", code="aborted"))
    assert failed["sequence_number"] == len(begun)
    assert failed["response"]["status"] == "failed"
    assert failed["response"]["error"] == {"code": "aborted", "message": "gone"}
