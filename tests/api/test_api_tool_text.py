"""Parsing a model's text into content and calls, however it is split."""

from __future__ import annotations

import random

import pytest
from tools_harness import HERMES_TWO, NAMES, F, chat

from termgen.api.tool_calls import (
    CallArguments,
    CallStart,
    Content,
    Part,
    Reasoning,
    StyleParser,
    message_fields,
)
from termgen.api.tools import new_parser
from termgen.vocabulary.tool_format import ToolFormat, ToolStyle

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
    declared = ToolFormat(new_parser=lambda *_: ResponseParser(template, prefix=""))
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
    # Required calls, and calls beside JSON of a given form, are written in a style that a grammar
    # can enforce.
    in_style = '<tool_call>\n{"name": "f", "arguments": {"x":1}}\n</tool_call>'
    for wish in ({"tool_choice": "required"}, {"response_format": {"type": "json_object"}}):
        formed = chat(declared, tools=[F], **wish).tools
        assert not formed.needs_prompt
        fields = message_fields(new_parser(formed), in_style)
        assert [c["function"]["arguments"] for c in fields["tool_calls"]] == ['{"x":1}']
        assert message_fields(new_parser(formed), '{"a":1}') == {"content": '{"a":1}'}
