"""Tools of a chat: parsing, prompts, enforcement, and calls from text."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from tools_harness import HERMES_TWO, F, G, chat

from termgen.api.chat import ChatRequest, ChatStream, chat_response
from termgen.client import ChatPrompt, TokenDelta
from termgen.errors import RequestError
from termgen.vocabulary.request import FinishReason
from termgen.vocabulary.tool_format import ToolFormat, ToolStyle


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


def test_results_join_their_calls_where_the_template_wants_them_there() -> None:
    calls = [
        {"id": "1", "function": {"name": "f", "arguments": '{"x": 1}'}},
        {"id": "2", "function": {"name": "g.h", "arguments": "{}"}},
    ]
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "content": '{"b": [true]}', "tool_call_id": "2"},
        {"role": "tool", "content": "[2]", "tool_call_id": "1"},
        {"role": "assistant", "content": "Two."},
    ]
    joining = ToolFormat(knows_tools=True, joins_results=True)
    prompt = chat(joining, messages=messages, tools=[F, G]).job.prompt
    assert isinstance(prompt, ChatPrompt) and prompt.template_kwargs == {"tools": [F, G]}
    user, assistant, last = prompt.messages
    assert user == messages[0] and last == messages[4]
    assert assistant["tool_responses"] == [
        {"name": "g.h", "response": {"b": [True]}},
        {"name": "f", "response": "[2]"},
    ]
    assert [call["function"]["name"] for call in assistant["tool_calls"]] == ["f", "g.h"]
    plain = chat(ToolFormat(knows_tools=True), messages=messages, tools=[F, G]).job.prompt
    assert isinstance(plain, ChatPrompt) and len(plain.messages) == 5


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
        (
            {"tools": [F], "tool_choice": {"type": "custom", "function": {"name": "f"}}},
            "tool_choice",
        ),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [F], "parallel_tool_calls": 1}, "parallel_tool_calls"),
        ({"tools": [F], "structured_outputs": {"regex": "a"}}, "structured_outputs"),
    ],
)
def test_what_is_wrong_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        chat(**fields)
    assert caught.value.param == param


def allowed(mode: str, *tools: Any) -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": list(tools)}}


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def test_allowed_tools_are_those_that_the_model_is_shown() -> None:
    hosted = {"type": "web_search"}
    given = [F, G, hosted]
    some = chat(tools=given, tool_choice=allowed("auto", named("g.h"), hosted))
    assert [f.name for f in some.tools.functions] == ["g.h"] and some.tools.choice == "auto"
    assert some.tools.shown == (G,) and some.tools.parallel
    must = chat(tools=given, tool_choice=allowed("required", named("g.h"), named("f")))
    assert [f.name for f in must.tools.functions] == ["f", "g.h"] and must.tools.must_call
    assert grammar_of(must) == grammar_of(chat(tools=given, tool_choice="required"))


@pytest.mark.parametrize(
    ("choice", "param"),
    [
        (allowed("auto", named("z")), "tool_choice"),
        (allowed("auto", {"type": "web_search"}), "tool_choice"),
        (allowed("none", named("f")), "tool_choice.allowed_tools.mode"),
        (allowed("auto"), "tool_choice.allowed_tools.tools"),
        (allowed("auto", named("f"), {"type": "function"}), "tool_choice.allowed_tools.tools[1]"),
        ({"type": "allowed_tools"}, "tool_choice.allowed_tools"),
    ],
)
def test_allowed_tools_that_cannot_be_met_are_errors(choice: Any, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        chat(tools=[F], tool_choice=choice)
    assert caught.value.param == param


FORMS: list[dict[str, Any]] = [
    {"response_format": {"type": "json_object"}},
    {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}}},
    {"structured_outputs": {"regex": "a+"}},
    {"guided_choice": ["a", "b"]},
]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "f"}}], ids=str
)
def test_a_call_that_must_come_is_all_of_the_answer(form: dict[str, Any], choice: Any) -> None:
    asked = {"tools": [F, G], "tool_choice": choice}
    request = chat(**asked, **form)
    assert grammar_of(request) == grammar_of(chat(**asked))
    assert request.not_used == tuple(form) and request.tools.is_formed
    # Where text may come, the form holds for it; where calls may not come, for all of it.
    text = {"response_format": {"type": "json_object"}}
    assert chat(tools=[F], **text).not_used == ()
    free = chat(tools=[F], tool_choice="none", **form)
    assert free.not_used == () and free.job.params.structured_outputs is not None
    assert free.job.params.structured_outputs.param == next(iter(form))


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


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_a_call_that_a_stop_string_cut_off_is_none_to_be_made(choice: str) -> None:
    one = '<tool_call>\n{"name": "f", "arguments": {"x":1}}\n</tool_call>'
    for text, reason in ((one[:45], "stop"), (one + one[:45], "stop"), (one[:-3], "tool_calls")):
        request = chat(tools=[F], tool_choice=choice, stop=["x"])
        last = replace(delta(text, FinishReason.STOP), stop_reason="x")
        (whole,) = chat_response(request, [last])["choices"]
        assert whole["message"]["tool_calls"] and whole["stop_reason"] == "x"
        chunk = ChatStream(request).feed(0, last)[-1]["choices"][0]
        assert whole["finish_reason"] == chunk["finish_reason"] == reason
