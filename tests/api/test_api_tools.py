"""Tools of a chat: what is parsed, shown and enforced, and how text becomes calls."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from termgen.api.chat import ChatRequest, ChatStream, chat_response, parse_chat
from termgen.api.tool_calls import (
    CallArguments,
    CallStart,
    Content,
    Part,
    Reasoning,
    StyleParser,
    message_fields,
    new_parser,
)
from termgen.client import ChatPrompt, TokenDelta
from termgen.engine.request import FinishReason
from termgen.engine.tool_format import ToolFormat, ToolStyle
from termgen.errors import RequestError

SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
F: dict[str, Any] = {
    "type": "function",
    "function": {"name": "f", "description": "does f", "parameters": SCHEMA},
}
G: dict[str, Any] = {"type": "function", "function": {"name": "g.h"}}
NAMES = frozenset({"f", "g.h"})
KNOWS = ToolFormat(knows_tools=True)


def chat(tool_format: ToolFormat = KNOWS, **fields: Any) -> ChatRequest:
    body = {"messages": [{"role": "user", "content": "hi"}], **fields}
    return parse_chat(body, model="m", defaults={}, tool_format=tool_format)


def grammar_of(request: ChatRequest) -> str | None:
    wanted = request.job.params.structured_outputs
    return None if wanted is None else wanted.grammar


# -- requests ------------------------------------------------------------------------------


def test_tools_reach_the_template_and_free_calls_are_not_constrained() -> None:
    request = chat(tools=[F, G])
    assert isinstance(request.job.prompt, ChatPrompt)
    assert request.job.prompt.template_kwargs == {"tools": [F, G]}
    assert request.tools.choice == "auto" and grammar_of(request) is None
    assert not request.ignored


def test_without_a_choice_to_call_tools_are_left_out() -> None:
    for fields in ({"tools": [F], "tool_choice": "none"}, {"tools": []}, {"tool_choice": "auto"}):
        request = chat(**fields)
        assert isinstance(request.job.prompt, ChatPrompt)
        assert not request.job.prompt.template_kwargs and not request.tools.may_call


def test_calls_that_must_come_are_enforced() -> None:
    required = grammar_of(chat(tools=[F, G], tool_choice="required"))
    assert required is not None and "call_1" in required and ")*" in required
    one = grammar_of(chat(tools=[F, G], tool_choice="required", parallel_tool_calls=False))
    assert one is not None and "call_1" in one and ")*" not in one
    named = chat(tools=[F, G], tool_choice={"type": "function", "function": {"name": "g.h"}})
    grammar = grammar_of(named)
    assert grammar is not None and "g.h" in grammar and "call_1" not in grammar
    assert isinstance(named.job.prompt, ChatPrompt)
    assert named.job.prompt.template_kwargs == {"tools": [G]}


def test_strict_functions_and_one_call_at_most_are_enforced_within_free_text() -> None:
    strict = {**F, "function": {**F["function"], "strict": True}}
    grammar = grammar_of(chat(tools=[strict, G]))
    assert grammar is not None and "text" in grammar and '"integer"' in grammar
    single = grammar_of(chat(tools=[F], parallel_tool_calls=False))
    assert single is not None and '"integer"' not in single
    both = grammar_of(chat(tools=[F], response_format={"type": "json_object"}))
    assert both is not None and "answer" in both


def test_special_tokens_of_a_style_stay_in_the_text_and_are_named_by_id() -> None:
    mistral = ToolFormat(ToolStyle.MISTRAL, True, {"[TOOL_CALLS]": 5})
    request = chat(mistral, tools=[F], tool_choice="required")
    assert not request.job.params.skip_special_tokens
    assert "<[5]>" in str(grammar_of(request))
    assert chat(mistral).job.params.skip_special_tokens


def test_a_template_that_knows_no_tools_gets_them_as_text() -> None:
    call = {"id": "1", "function": {"name": "f", "arguments": '{"x": 1}'}}
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "Well.", "tool_calls": [call]},
        {"role": "tool", "content": "2", "tool_call_id": "1"},
    ]
    prompt = chat(ToolFormat(), messages=messages, tools=[F]).job.prompt
    assert isinstance(prompt, ChatPrompt) and not prompt.template_kwargs
    system, user, assistant, result = prompt.messages
    assert json.dumps(F) in system["content"] and "<tool_call>" in system["content"]
    assert user == messages[0]
    text = 'Well.\n<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
    assert assistant == {"role": "assistant", "content": text}
    assert result == {"role": "user", "content": "<tool_response>\n2\n</tool_response>"}
    messages.insert(0, {"role": "system", "content": "Be brief."})
    prompt = chat(ToolFormat(), messages=messages, tools=[F]).job.prompt
    assert isinstance(prompt, ChatPrompt) and len(prompt.messages) == 4
    assert prompt.messages[0]["content"].startswith("Be brief.\n\nYou may call")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": {}}, "tools"),
        ({"tools": [1]}, "tools[0]"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "web"}]}, "tools[0].type"),
        ({"tools": [{"function": {"name": ""}}]}, "tools[0].function.name"),
        ({"tools": [{"function": {"name": 'a"b'}}]}, "tools[0].function.name"),
        ({"tools": [{"function": {"name": "f", "parameters": 5}}]}, "tools[0].function.parameters"),
        (
            {"tools": [{"function": {"name": "f", "parameters": {"enum": [0] * 5001}}}]},
            "tools[0].function.parameters",
        ),
        ({"tools": [{"function": {"name": "f", "strict": 1}}]}, "tools[0].function.strict"),
        ({"tools": [F, F]}, "tools"),
        ({"tools": [F] * 129}, "tools"),
        ({"tools": [F], "tool_choice": "any"}, "tool_choice"),
        ({"tools": [F], "tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tools": [F], "tool_choice": {"function": {"name": "z"}}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [F], "parallel_tool_calls": 1}, "parallel_tool_calls"),
        (
            {"tools": [F], "tool_choice": "required", "response_format": {"type": "json_object"}},
            "response_format",
        ),
        ({"tools": [F], "structured_outputs": {"regex": "a"}}, "structured_outputs"),
    ],
)
def test_what_is_wrong_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        chat(**fields)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("fields", "kind", "value"),
    [
        ({"response_format": {"type": "json_object"}}, "json_object", True),
        ({"response_format": {"type": "json_object", "schema": {}}}, "json", "{}"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"a": 1}}}},
            "json",
            '{"a":1}',
        ),
        ({"structured_outputs": {"regex": "a+", "json": None}}, "regex", "a+"),
        ({"structured_outputs": {"choice": ["a", "b"]}}, "choice", ("a", "b")),
        ({"structured_outputs": {"grammar": "start: A"}}, "grammar", "start: A"),
        ({"structured_outputs": {"json": '{"a": 1}'}}, "json", '{"a":1}'),
        ({"guided_json": {"a": 1}}, "json", '{"a":1}'),
        ({"guided_regex": "a"}, "regex", "a"),
        ({"guided_choice": ["a"]}, "choice", ("a",)),
        ({"guided_grammar": "start: A"}, "grammar", "start: A"),
    ],
)
def test_what_clients_send_for_structured_outputs(
    fields: dict[str, Any], kind: str, value: object
) -> None:
    wanted = chat(**fields).job.params.structured_outputs
    assert wanted is not None and (wanted.kind, wanted.value) == (kind, value)
    assert wanted.param == next(iter(fields))


@pytest.mark.parametrize("fields", [{"response_format": {"type": "text"}}, {}])
def test_any_text(fields: dict[str, Any]) -> None:
    assert chat(**fields).job.params.structured_outputs is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format.json_schema.schema",
        ),
        ({"structured_outputs": 5}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
        ({"guided_choice": "ab"}, "guided_choice"),
        ({"guided_regex": "a", "guided_json": {}}, "guided_regex"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
    ],
)
def test_bad_structured_outputs_are_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        chat(**fields)
    assert caught.value.param == param


# -- text to calls -------------------------------------------------------------------------

HERMES_TWO = (
    'Let me see.\n<tool_call>\n{"name": "f", "arguments": {"x": "a}\\"{"}}\n</tool_call>\n'
    '<tool_call>{"arguments": {"y": [1, {"z": null}]}, "name": "g.h"}</tool_call>\n Done. '
)
TWO_CALLS = [("f", '{"x": "a}\\"{"}'), ("g.h", '{"y": [1, {"z": null}]}')]
CASES: list[tuple[ToolStyle, str, str | None, list[tuple[str, str]]]] = [
    (ToolStyle.HERMES, HERMES_TWO, "Let me see.\n Done.", TWO_CALLS),
    (ToolStyle.HERMES, "Only <text> and </tool_call>  ", "Only <text> and </tool_call>  ", []),
    (ToolStyle.HERMES, "a <tool_call", "a <tool_call", []),
    (ToolStyle.HERMES, "a <tool_call>", "a <tool_call>", []),
    (ToolStyle.HERMES, "<tool_call>no json</tool_call>", "<tool_call>no json</tool_call>", []),
    (
        ToolStyle.HERMES,
        '<tool_call>{"name": 5}</tool_call>',
        '<tool_call>{"name": 5}</tool_call>',
        [],
    ),
    (ToolStyle.HERMES, '<tool_call>{"name": "f"}</tool_call>', None, [("f", "{}")]),
    (ToolStyle.HERMES, '<tool_call>{"name":"f","arguments":null}', None, [("f", "{}")]),
    (
        ToolStyle.HERMES,
        '<tool_call>{"name":"f","arguments":"{\\"x\\":1}"}',
        None,
        [("f", '{"x":1}')],
    ),
    (ToolStyle.HERMES, '<tool_call>{"name":"f","id": 7 ,"arguments":{"x":', None, [("f", '{"x":')]),
    (ToolStyle.HERMES, '<tool_call>{"name":"unknown","arguments":{}}', None, [("unknown", "{}")]),
    (ToolStyle.LLAMA, ' {"name": "f", "parameters": {"x": 1}}', None, [("f", '{"x": 1}')]),
    (
        ToolStyle.LLAMA,
        '<|python_tag|>{"name": "f", "parameters": {}}; {"name": "g.h", "parameters": {}}',
        None,
        [("f", "{}"), ("g.h", "{}")],
    ),
    (ToolStyle.LLAMA, 'Text {"name": "f"}', 'Text {"name": "f"}', []),
    (ToolStyle.LLAMA, '{"name": "Bob", "age": 5}', '{"name": "Bob", "age": 5}', []),
    (ToolStyle.LLAMA, '{"answer": [1]}', '{"answer": [1]}', []),
    (ToolStyle.LLAMA, "  ", "  ", []),
    (
        ToolStyle.MISTRAL,
        'Hm.[TOOL_CALLS] [{"name": "f", "arguments": {"x": 1}}, {"name": "g.h", "arguments": {}}]',
        "Hm.",
        [("f", '{"x": 1}'), ("g.h", "{}")],
    ),
    (ToolStyle.MISTRAL, "[TOOL_CALLS] []", "[TOOL_CALLS] []", []),
    (
        ToolStyle.MISTRAL_ARGS,
        '[TOOL_CALLS]f[ARGS]{"x": 1}[TOOL_CALLS]g.h[CALL_ID]abc[ARGS]{}',
        None,
        [("f", '{"x": 1}'), ("g.h", "{}")],
    ),
    (ToolStyle.MISTRAL_ARGS, "[TOOL_CALLS]f", "[TOOL_CALLS]f", []),
]


def added_up(parts: list[Part]) -> tuple[str | None, list[tuple[str, str]]]:
    content, calls = "", list[tuple[str, str]]()
    for part in parts:
        match part:
            case Content(text):
                content += text
            case CallStart(index, name):
                assert index == len(calls)
                calls.append((name, ""))
            case CallArguments(index, text):
                assert index == len(calls) - 1 and text
                calls[index] = (calls[index][0], calls[index][1] + text)
            case Reasoning():
                raise AssertionError
    return content or (None if calls else ""), calls


@pytest.mark.parametrize(("style", "text", "content", "calls"), CASES)
def test_a_text_is_taken_apart_however_it_is_cut(
    style: ToolStyle, text: str, content: str | None, calls: list[tuple[str, str]]
) -> None:
    rng = random.Random(5)
    for most in (10_000, 1, 2, 3, 7, 7, 7):
        parser = StyleParser(style, NAMES)
        parts: list[Part] = []
        rest = text
        while rest:
            size = rng.randint(1, most)
            parts += parser.feed(rest[:size])
            rest = rest[size:]
        parts += parser.finish()
        assert added_up(parts) == (content, calls), most
        assert parser.num_calls == len(calls)


def test_arguments_go_out_as_they_come_and_plain_text_is_not_held_back() -> None:
    parser = StyleParser(ToolStyle.HERMES, NAMES)
    assert parser.feed("Hello") == [Content("Hello")]
    assert parser.feed(" <b") == [Content(" <b")]
    assert parser.feed('<tool_call>{"name": "f", "argu') == [CallStart(0, "f")]
    assert parser.feed('ments": {"x"') == [CallArguments(0, '{"x"')]
    assert parser.feed(": 1}") == [CallArguments(0, ": 1}")]
    assert parser.feed("}</tool_call>") == parser.finish() == []


def test_a_parser_that_the_model_declares() -> None:
    pytest.importorskip("transformers.utils.chat_parsing")
    from transformers.utils.chat_parsing import ResponseParser

    template = {
        "start_anchor": "<assistant>",
        "fields": {
            "reasoning_content": {"open": "<think>", "close": "</think>"},
            "tool_calls": {
                "open_pattern": r"<call:(?P<name>\w+)>",
                "close": "</call>",
                "repeats": True,
                "content": "json",
                "transform": {
                    "type": "function",
                    "function": {"name": "{name}", "arguments": "{content}"},
                },
            },
            "content": {},
        },
    }
    declared = ToolFormat(new_parser=lambda _: ResponseParser(template, prefix=""))
    tools = chat(declared, tools=[F]).tools
    assert tools.needs_special_tokens
    text = '<think>Hm.</think>So: <call:f>{"x": [1, "é"]}</call><call:g>{}</call>'
    fields = message_fields(new_parser(tools), text)
    assert (fields["content"], fields["reasoning_content"]) == ("So: ", "Hm.")
    calls = [c["function"] for c in fields["tool_calls"]]
    assert calls == [
        {"name": "f", "arguments": '{"x": [1, "é"]}'},
        {"name": "g", "arguments": "{}"},
    ]
    parser = new_parser(tools)
    parts = [part for char in text for part in parser.feed(char)] + parser.finish()
    arguments = [part.text for part in parts if isinstance(part, CallArguments)]
    assert arguments == [call["arguments"] for call in calls]
    # Calls that must come are written in a style that a grammar can enforce.
    forced = chat(declared, tools=[F], tool_choice="required").tools
    assert isinstance(new_parser(forced), StyleParser)


# -- answers -------------------------------------------------------------------------------


def delta(text: str, finish_reason: FinishReason | None = None, index: int = 0) -> TokenDelta:
    return TokenDelta(
        request_id="r",
        index=index,
        text=text,
        token_ids=(7,),
        logprobs=None,
        finish_reason=finish_reason,
        stop_reason=None,
        num_prompt_tokens=3,
        num_cached_tokens=0,
        num_output_tokens=1,
    )


def test_a_stream_says_what_the_whole_answer_says() -> None:
    request = chat(tools=[F, G], stream=True, n=2, stream_options={"include_usage": True})
    stream = ChatStream(request)
    texts = (HERMES_TWO, "No call.")
    chunks: list[dict[str, Any]] = []
    for index, text in enumerate(texts):
        for char in text:
            chunks += stream.feed(index, delta(char, index=index))
        chunks += stream.feed(index, delta("", FinishReason.STOP, index))
    whole = chat_response(request, [delta(t, FinishReason.STOP, i) for i, t in enumerate(texts)])
    for index, choice in enumerate(whole["choices"]):
        mine = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        content = "".join(c["delta"].get("content") or "" for c in mine)
        assert content == (choice["message"]["content"] or "")
        assert [c["finish_reason"] for c in mine if c["finish_reason"]] == [choice["finish_reason"]]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""}
        calls: list[dict[str, Any]] = []
        for call in (call for c in mine for call in c["delta"].get("tool_calls", ())):
            if call["index"] == len(calls):
                assert set(call) == {"index", "id", "type", "function"}
                assert call["type"] == "function" and call["function"]["arguments"] == ""
                calls.append(call["function"])
            else:
                assert set(call) == {"index", "function"} and set(call["function"]) == {"arguments"}
                calls[call["index"]]["arguments"] += call["function"]["arguments"]
        assert calls == [c["function"] for c in choice["message"].get("tool_calls", ())]
    assert [c["finish_reason"] for c in whole["choices"]] == ["tool_calls", "stop"]
    ids = [c["id"] for c in whole["choices"][0]["message"]["tool_calls"]]
    assert len(set(ids)) == 2 and all(i.startswith("call_") for i in ids)


def test_the_finish_reason_of_a_named_or_cut_off_call() -> None:
    named = chat(tools=[F], tool_choice={"type": "function", "function": {"name": "f"}})
    text = '<tool_call>\n{"name": "f", "arguments": {"x":1}}\n</tool_call>'
    (choice,) = chat_response(named, [delta(text, FinishReason.STOP)])["choices"]
    assert choice["finish_reason"] == "stop" and choice["message"]["content"] is None
    (choice,) = chat_response(chat(tools=[F]), [delta(text[:-15], FinishReason.LENGTH)])["choices"]
    assert choice["finish_reason"] == "length" and choice["message"]["tool_calls"]
