"""Coding agents' extra fields: hints about thinking, hosted tools, unusual histories."""

from __future__ import annotations

import json
from typing import Any

import pytest
from bridge_harness import HI, play, prompt_of
from tools_harness import F, chat

from termgen.api import anthropic
from termgen.api.anthropic import _input_of
from termgen.api.chat import parse_chat
from termgen.api.chat_bridge import CallNews, EndNews, News, TextNews, turns_of
from termgen.api.completions import parse_completion
from termgen.api.responses import answer as responses
from termgen.api.responses import body as responses_body
from termgen.errors import RequestError
from termgen.vocabulary.tool_format import ToolFormat

NOTHING = ToolFormat(knows_tools=True, template_variables=("messages",))
QWEN = ToolFormat(knows_tools=True, template_variables=("messages", "enable_thinking"))
EFFORT = ToolFormat(knows_tools=True, template_variables=("reasoning_effort",))


def messages(tool_format: ToolFormat = NOTHING, **fields: Any) -> anthropic.MessagesRequest:
    body = {"max_tokens": 9, "messages": HI, **fields}
    return anthropic.parse_messages(body, model="m", defaults={}, tool_format=tool_format)


def ask(tool_format: ToolFormat = NOTHING, **fields: Any) -> responses_body.ResponsesRequest:
    body = {"input": "hi", **fields}
    return responses_body.parse_responses(body, model="m", defaults={}, tool_format=tool_format)


# -- wishes --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tool_format", "fields", "variables", "not_used"),
    [
        (NOTHING, {"reasoning_effort": "low"}, {}, ("reasoning_effort",)),
        (EFFORT, {"reasoning_effort": "low"}, {"reasoning_effort": "low"}, ()),
        (QWEN, {"reasoning_effort": "low"}, {}, ("reasoning_effort",)),
        (QWEN, {"reasoning_effort": "none"}, {"enable_thinking": False}, ()),
        (QWEN, {"enable_thinking": True}, {"enable_thinking": True}, ()),
        (QWEN, {"think": False}, {"enable_thinking": False}, ()),
        (EFFORT, {"think": "high"}, {"reasoning_effort": "high"}, ()),
        (QWEN, {"thinking": {"type": "disabled"}}, {"enable_thinking": False}, ()),
        (QWEN, {"thinking": {"type": "adaptive"}}, {}, ()),
        (NOTHING, {"thinking_budget": 5}, {}, ("thinking_budget",)),
        (
            NOTHING,
            {"reasoning": {"effort": "high", "enabled": True, "max_tokens": 9}},
            {},
            ("reasoning.effort", "reasoning.enabled", "reasoning.max_tokens"),
        ),
        (
            NOTHING,
            {"chat_template_kwargs": {"enable_thinking": False}},
            {},
            ("chat_template_kwargs.enable_thinking",),
        ),
        (
            QWEN,
            {"chat_template_kwargs": {"enable_thinking": False}, "enable_thinking": True},
            {"enable_thinking": False},
            (),
        ),
        (NOTHING, {"chat_template_kwargs": {"misspelt": 1}}, {"misspelt": 1}, ()),
    ],
)
def test_wishes_become_variables_that_the_template_reads(
    tool_format: ToolFormat,
    fields: dict[str, Any],
    variables: dict[str, Any],
    not_used: tuple[str, ...],
) -> None:
    request = chat(tool_format, **fields)
    assert prompt_of(request).template_kwargs == variables
    assert request.not_used == not_used and request.ignored == ()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"reasoning_effort": "much"}, "reasoning_effort"),
        ({"reasoning_effort": 5}, "reasoning_effort"),
        ({"reasoning": "high"}, "reasoning"),
        ({"reasoning": {"effort": "much"}}, "reasoning.effort"),
        ({"reasoning": {"enabled": "yes"}}, "reasoning.enabled"),
        ({"enable_thinking": "yes"}, "enable_thinking"),
        ({"thinking": {"type": "often"}}, "thinking.type"),
        ({"thinking": {"type": "enabled", "budget_tokens": -1}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": True}}, "thinking.budget_tokens"),
        ({"thinking_budget": -1}, "thinking_budget"),
        ({"think": "much"}, "think"),
    ],
)
def test_a_wish_that_no_client_means_is_an_error(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        chat(NOTHING, **fields)
    assert caught.value.param == param


def test_wishes_in_the_words_of_each_endpoint() -> None:
    thinking = {"type": "enabled", "budget_tokens": 31999}
    asked = messages(thinking=thinking, output_config={"effort": "max"})
    names = ("output_config.effort", "thinking", "thinking.budget_tokens")
    assert tuple(sorted(asked.chat.not_used)) == names
    assert messages(QWEN, thinking=thinking).chat.not_used == ("thinking.budget_tokens",)
    hidden = messages(thinking={"type": "disabled"})
    assert hidden.chat.not_used == () and not hidden.shows_thoughts
    told = ask(reasoning={"effort": "high", "summary": "auto"}, text={"verbosity": "low"})
    names = ("reasoning.effort", "reasoning.summary", "text.verbosity")
    assert tuple(sorted(told.chat.not_used)) == names and told.ignored == ()
    with pytest.raises(RequestError) as caught:
        ask(text={"verbosity": "loud"})
    assert caught.value.param == "text.verbosity"


def test_a_request_that_brings_a_template_is_judged_by_that() -> None:
    own = {"chat_template": "{{ messages }}{{ reasoning_effort }}"}
    fields = {"messages": HI, **own, "reasoning_effort": "low", "enable_thinking": True}
    context: dict[str, Any] = {"model": "m", "defaults": {}, "tool_format": QWEN}
    request = parse_chat(fields, trusts_template=True, **context)
    assert prompt_of(request).template_kwargs == {"reasoning_effort": "low"}
    assert request.not_used == ("enable_thinking",)


# -- tools of others -----------------------------------------------------------------------

HOSTED = [
    *("web_search", "web_search_preview", "web_search_preview_2025_03_11", "file_search"),
    *("code_interpreter", "computer_use_preview", "computer-preview", "image_generation"),
    *("local_shell", "mcp", "tool_search"),
]


@pytest.mark.parametrize("kind", HOSTED)
def test_hosted_tools_are_left_out_and_named(kind: str) -> None:
    tools = [{"type": kind}, {"type": "function", "name": "f", "parameters": {}}]
    asked = ask(tools=tools)
    assert [f.name for f in asked.chat.tools.functions] == ["f"]
    assert asked.chat.not_used == (f"tools.{kind}",)
    assert ask(tools=[{"type": kind}]).chat.not_used == (f"tools.{kind}",)
    for choice in ({"type": kind}, "required"):
        with pytest.raises(RequestError, match=kind) as caught:
            ask(tools=[{"type": kind}], tool_choice=choice)
        assert caught.value.param == "tool_choice"
    assert chat(tools=[{"type": kind}, F]).not_used == (f"tools.{kind}",)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("web_search_20250305", "web_search"),
        ("bash_20250124", "bash"),
        ("text_editor_20250728", "str_replace_based_edit_tool"),
        ("code_execution_20250522", "code_execution"),
        ("memory_20250818", "memory"),
        ("mcp_toolset", "mcp"),
    ],
)
def test_anthropics_own_tools_are_left_out_and_named(kind: str, name: str) -> None:
    tools = [{"type": kind, "name": name}, {"name": "f", "input_schema": {"type": "object"}}]
    asked = messages(tools=tools)
    assert [f.name for f in asked.chat.tools.functions] == ["f"]
    assert asked.chat.not_used == (f"tools.{kind}",)
    with pytest.raises(RequestError, match=kind) as caught:
        messages(tools=tools, tool_choice={"type": "tool", "name": name})
    assert caught.value.param == "tool_choice.name"


def test_the_place_of_a_bad_tool_is_told_whatever_comes_before() -> None:
    bad = {"type": "function", "name": "a b"}
    space = {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "x"}, bad]}
    with pytest.raises(RequestError) as caught:
        ask(tools=[{"type": "web_search"}, {"type": "function", "name": "y"}, space])
    assert caught.value.param == "tools[2].tools[1].name"
    with pytest.raises(RequestError) as caught:
        chat(tools=[{"type": "web_search"}, {"type": "function", "function": {"name": "a b"}}])
    assert caught.value.param == "tools[1].function.name"


SPACE = {
    "type": "namespace",
    "name": "agents",
    "tools": [{"type": "function", "name": "close", "parameters": {"type": "object"}}],
}
PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edits files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "x"'},
}


def test_a_namespace_becomes_functions_and_calls_find_back(monkeypatch: Any) -> None:
    choice = {"type": "function", "name": "close", "namespace": "agents"}
    asked = ask(tools=[SPACE], stream=True, tool_choice=choice)
    assert [f.name for f in asked.chat.tools.functions] == ["agents__close"]
    news: list[News] = [CallNews(0, "c", "agents__close", "{}"), EndNews("tool_calls", None)]
    done = play(responses.ResponseStream(asked), news, monkeypatch)[-1]["response"]["output"][0]
    assert (done["type"], done["name"], done["namespace"]) == ("function_call", "close", "agents")
    result = {"type": "function_call_output", "call_id": "c", "output": "ok"}
    again = ask(input=[*HI, done, result], tools=[SPACE])
    (call,) = prompt_of(again.chat).messages[1]["tool_calls"]
    assert call["function"] == {"name": "agents__close", "arguments": {}}


def test_a_custom_tool_is_a_function_with_one_text(monkeypatch: Any) -> None:
    asked = ask(tools=[PATCH], stream=True)
    (shown,) = asked.chat.tools.shown
    assert shown["function"]["parameters"]["required"] == ["input"]
    assert 'start: "x"' in shown["function"]["description"]
    assert asked.chat.not_used == ("tools.custom.format",)
    text = '*** Begin\n"ü"'
    pieces = json.dumps({"input": text})
    news: list[News] = [
        CallNews(0, "c", "apply_patch", ""),
        CallNews(0, None, "", pieces[:5]),
        CallNews(0, None, "", pieces[5:]),
        EndNews("tool_calls", None),
    ]
    events = play(responses.ResponseStream(asked), news, monkeypatch)
    kinds = [e["type"].removeprefix("response.") for e in events]
    assert kinds[2:6] == [
        "output_item.added",
        "custom_tool_call_input.delta",
        "custom_tool_call_input.done",
        "output_item.done",
    ]
    assert events[4]["input"] == text
    done = events[-1]["response"]["output"][0]
    assert (done["type"], done["name"], done["input"]) == ("custom_tool_call", "apply_patch", text)
    result = {"type": "custom_tool_call_output", "call_id": "c", "output": "ok"}
    turns = prompt_of(ask(input=[*HI, done, result], tools=[PATCH]).chat).messages
    assert turns[1]["tool_calls"][0]["function"]["arguments"] == {"input": text}
    assert turns[2]["content"] == "ok"


# -- histories that come back --------------------------------------------------------------

ODD = ["not json", '{"x": 1', "[1]", '"x"', "5", "null", '{"x": NaN}', '{"x": 1e999}', "[" * 9999]
ODD += ['{"x": 4e888269132}', '{"x": "\\ud800"}', '{"a":' * 50 + "1" + "}" * 50, "9" * 5000]


@pytest.mark.parametrize("arguments", ODD)
def test_any_text_is_taken_for_arguments(arguments: str) -> None:
    wanted = {"INVALID_JSON": arguments}
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    said: dict[str, Any] = {"role": "assistant", "content": None, "tool_calls": [call]}
    told = prompt_of(chat(messages=[*HI, said, {"role": "tool", "content": None}])).messages
    assert told[1]["tool_calls"][0]["function"]["arguments"] == wanted
    assert told[2]["content"] == ""
    item = {"type": "function_call", "call_id": "c", "name": "f", "arguments": arguments}
    told = prompt_of(ask(input=[*HI, item]).chat).messages
    assert told[1]["tool_calls"][0]["function"]["arguments"] == wanted
    use = {"type": "tool_use", "id": "c", "name": "f", "input": arguments}
    told = prompt_of(
        messages(messages=[*HI, {"role": "assistant", "content": [use]}]).chat
    ).messages
    assert told[1]["tool_calls"][0]["function"]["arguments"] == wanted
    assert isinstance(_input_of(arguments), dict), "what a message says can be sent back"
    json.dumps(_input_of(arguments), allow_nan=False)


def test_no_arguments_are_an_empty_object() -> None:
    for arguments in ("", "{}", None, {}):
        call = {"function": {"name": "f", "arguments": arguments}}
        told = prompt_of(chat(messages=[*HI, {"role": "assistant", "tool_calls": [call]}])).messages
        assert told[1]["tool_calls"][0]["function"]["arguments"] == {}


def test_an_answer_without_a_word_comes_back() -> None:
    for content in ("", None, []):
        said = {"role": "assistant", "content": content}
        assert prompt_of(chat(messages=[*HI, said, *HI])).messages[1]["content"] == ""
        if content is not None:
            assert len(prompt_of(messages(messages=[*HI, said, *HI]).chat).messages) == 3
        assert len(prompt_of(ask(input=[*HI, said, *HI]).chat).messages) == 3


def test_a_tools_error_is_told() -> None:
    result = {"type": "tool_result", "tool_use_id": "c", "content": "no file", "is_error": True}
    prompt = prompt_of(messages(messages=[*HI, {"role": "user", "content": [result]}]).chat)
    assert prompt.messages[-1]["content"] == "Error: no file"


def test_turns_are_those_that_templates_take() -> None:
    calls = [{"id": "a"}], [{"id": "b"}]
    turns = turns_of(
        [
            {"role": "developer", "content": "be"},
            {"role": "system", "content": "brief"},
            {"role": "user", "content": "one"},
            {"role": "system", "content": "later"},
            {"role": "user", "content": [{"type": "text", "text": "two"}]},
            {"role": "assistant", "content": "well", "tool_calls": calls[0]},
            {"role": "assistant", "content": None, "tool_calls": calls[1]},
            {"role": "tool", "content": "1"},
            {"role": "tool", "content": "2"},
        ]
    )
    assert [t["role"] for t in turns] == ["system", "user", "assistant", "tool", "tool"]
    assert turns[0]["content"] == "be\n\nbrief"
    assert turns[1]["content"] == "one\n\n<system>\nlater\n</system>\n\ntwo"
    assert turns[2]["content"] == "well" and turns[2]["tool_calls"] == [{"id": "a"}, {"id": "b"}]


def test_items_of_tools_that_others_ran_are_left_out() -> None:
    asked = ask(input=[*HI, {"type": "web_search_call", "id": "ws_1", "status": "completed"}])
    assert asked.chat.not_used == ("input.web_search_call",)
    assert len(prompt_of(asked.chat).messages) == 1


def test_a_text_before_a_call_is_one_turn(monkeypatch: Any) -> None:
    asked = ask(tools=[SPACE], stream=True)
    news: list[News] = [
        TextNews("Look."),
        CallNews(0, "c", "agents__close", "{}"),
        EndNews("tool_calls", None),
    ]
    output = play(responses.ResponseStream(asked), news, monkeypatch)[-1]["response"]["output"]
    turns = prompt_of(ask(input=[*HI, *output], tools=[SPACE]).chat).messages
    assert [t["role"] for t in turns] == ["user", "assistant"]
    assert turns[1]["content"] == "Look." and len(turns[1]["tool_calls"]) == 1


# -- other servers' words ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "word"),
    [
        ("grammar", 'root ::= "a"', "structured_outputs.grammar"),
        ("json_schema", {"type": "object"}, "response_format"),
        ("format", "json", "response_format"),
        ("format", {"type": "object"}, "response_format"),
        ("repeat_penalty", 1.2, "repetition_penalty"),
        ("n_predict", 5, "max_tokens"),
        ("num_predict", 5, "max_tokens"),
        ("options", {"temperature": 0}, "top of the body"),
        ("regex", "a+", "structured_outputs.regex"),
        ("ebnf", 'root ::= "a"', "structured_outputs.grammar"),
        ("max_new_tokens", 5, "max_tokens"),
        ("stop_sequences", ["x"], "stop"),
        ("mirostat", 2, "mirostat"),
        ("typical_p", 0.5, "typical_p"),
        ("rep_pen", 1.1, "repetition_penalty"),
        ("rep_pen_range", 512, "repetition_penalty"),
        ("freq_pen", 0.3, "frequency_penalty"),
        ("stop_sequence", ["x"], "stop"),
        ("stop_strings", "x", "stop"),
        ("ban_eos_token", True, "ignore_eos"),
        ("custom_token_bans", "1,2", "logit_bias"),
        ("banned_tokens", ["x"], "bad_words"),
        ("sampler_seed", 7, "seed"),
        ("sampler_order", [6, 0], "temperature"),
        ("dynatemp_low", 0.5, "dynatemp_low"),
        ("dynatemp_exponent", 2, "dynatemp_exponent"),
        ("dynamic_temperature", True, "dynamic_temperature"),
        ("mirostat_mode", 2, "mirostat_mode"),
        ("cfg_scale", 1.5, "cfg_scale"),
        ("nsigma", 1.5, "nsigma"),
        ("random_seed", 7, "seed"),
        ("response_prefix", "Sure", "response_prefix"),
    ],
)
def test_words_of_other_servers_are_errors_that_name_ours(name: str, value: Any, word: str) -> None:
    here = responses_body.NAMES.get(word, word)
    for parse, told in (
        (lambda: chat(**{name: value}), word),
        (lambda: parse_completion({"prompt": "x", name: value}, model="m", defaults={}), word),
        (lambda: ask(**{name: value}), here),
    ):
        with pytest.raises(RequestError, match=told) as caught:
            parse()
        assert (caught.value.param, caught.value.code) == (name, "unsupported_parameter")


def test_words_of_other_servers_that_ask_for_nothing_are_taken() -> None:
    fields = {"grammar": "", "format": "", "repeat_penalty": 1.0, "mirostat": 0, "options": {}}
    assert chat(**fields, n_predict=-1, do_sample=True, json_schema=None).ignored == ()
    webui = {
        **{"rep_pen": 1, "rep_pen_range": 0, "dynamic_temperature": False, "dynatemp_low": 1},
        **{"dynatemp_high": 1, "dynatemp_exponent": 1, "custom_token_bans": "", "skew": 0},
        **{"ban_eos_token": False, "mirostat_mode": 0, "sampler_seed": -1, "cfg_scale": 1},
        **{"stop_sequence": [], "sampler_priority": [], "typical": 1, "nsigma": 0},
    }
    assert chat(**webui).ignored == ()


def test_a_system_field_of_a_chat_is_told_its_place() -> None:
    for name in ("system", "instructions"):
        with pytest.raises(RequestError, match="role system"):
            chat(**{name: "Be brief."})
