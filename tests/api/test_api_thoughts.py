"""A model's reasoning, recognised as its files declare, at every endpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from termgen.api.anthropic import MessageStream, message_response, parse_messages
from termgen.api.chat import ChatStream, chat_response, parse_chat
from termgen.api.responses.answer import ResponseStream, response_object
from termgen.api.responses.body import parse_responses
from termgen.api.tools import new_parser
from termgen.client import TokenDelta, merge_deltas
from termgen.vocabulary.request import FinishReason
from termgen.vocabulary.tool_format import ToolFormat

pytest.importorskip("transformers.utils.chat_parsing")
from transformers.utils.chat_parsing import ResponseParser

THINK = {"reasoning_content": {"open": "<think>", "close": "</think>"}}
CALLS = {
    "open_pattern": r"<call:(?P<name>\w+)>",
    "close": "</call>",
    "repeats": True,
    "content": "json",
    "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
}
TEMPLATE = {
    "start_anchor": "<assistant>",
    "fields": {**THINK, "tool_calls": CALLS, "content": {}},
}
SPELLED_OUT = {
    "start_anchor": "<assistant>",
    "fields": {**THINK, "content": {"open": "<say>", "close": "</say>"}},
}
HI = [{"role": "user", "content": "hi"}]
TEXT = "<think>A river. The Rhïne?</think>The Rhine."
SCHEMA = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}


def context(template: dict[str, Any] = TEMPLATE) -> dict[str, Any]:
    declared = ToolFormat(
        knows_tools=True, new_parser=lambda *_: ResponseParser(template, prefix="")
    )
    return {"model": "m", "defaults": {}, "tool_format": declared}


def deltas(pieces: Sequence[str]) -> list[TokenDelta]:
    """One token each; the last one ends the answer."""
    return [
        TokenDelta(
            request_id="r",
            index=0,
            text=text,
            token_ids=(i,),
            logprobs=None,
            finish_reason=FinishReason.STOP if i == len(pieces) - 1 else None,
            stop_reason=None,
            num_prompt_tokens=3,
            num_cached_tokens=1,
            num_output_tokens=i + 1,
        )
        for i, text in enumerate(pieces)
    ]


@dataclass
class Told:
    whole: dict[str, Any]
    events: list[dict[str, Any]]


def tell(stream: Any, text: str, whole: Any) -> Told:
    """An answer streamed by characters, through the fast path if there is one, and as a whole."""
    events: list[dict[str, Any]] = []
    for delta in deltas([*text, ""]):
        assert stream.frame(0, delta) is None, "there is more to it than text"
        events += stream.feed(0, delta)
    (answer,) = deltas([text])
    return Told(whole(answer), [*events, *stream.end()])


def chat(text: str, template: dict[str, Any] = TEMPLATE, **fields: Any) -> Told:
    request = parse_chat({"messages": HI, "stream": True, **fields}, **context(template))
    assert not request.job.params.skip_special_tokens, "they may tell thoughts from text"
    return tell(ChatStream(request), text, lambda answer: chat_response(request, [answer]))


def said(told: Told, name: str) -> str:
    """The text of all chunks of a chat."""
    choices = [choice for event in told.events for choice in event["choices"]]
    return "".join(choice["delta"].get(name) or "" for choice in choices)


@pytest.mark.parametrize("fields", [{}, {"tools": []}, {"tool_choice": "none"}])
def test_a_chat_without_tools_tells_thoughts_from_text(fields: dict[str, Any]) -> None:
    told = chat(TEXT, **fields)
    message = told.whole["choices"][0]["message"]
    assert message["content"] == said(told, "content") == "The Rhine."
    assert message["reasoning_content"] == said(told, "reasoning_content")
    assert message["reasoning_content"] == "A river. The Rhïne?"


def test_calls_that_nobody_asked_for_are_content() -> None:
    told = chat('Now: <call:f>{"x": 1}</call>')
    message = told.whole["choices"][0]["message"]
    assert "tool_calls" not in message and said(told, "tool_calls") == ""
    assert message["content"] == said(told, "content")
    assert message["content"].startswith("Now: {") and '"x": 1' in message["content"]
    assert told.whole["choices"][0]["finish_reason"] == "stop"


def test_text_outside_of_all_that_is_declared_is_not_lost() -> None:
    for text in ("Plain.", "Plain <b>."):
        told = chat(text, SPELLED_OUT)
        assert told.whole["choices"][0]["message"]["content"] == said(told, "content") == text
    told = chat("<think>x</think> <say>Hi.</say>", SPELLED_OUT)
    assert said(told, "content") == "Hi."
    assert new_parser(parse_chat({"messages": HI}, **context()).tools).finish() == []


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": SCHEMA},
        {
            "messages": [*HI, {"role": "assistant", "content": "Well,"}],
            "continue_final_message": True,
        },
    ],
)
def test_text_whose_form_the_client_gives_is_content(fields: dict[str, Any]) -> None:
    request = parse_chat({"messages": HI, **fields}, **context())
    (answer,) = deltas(['{"a": "<think>"}'])
    message = chat_response(request, [answer])["choices"][0]["message"]
    assert message["content"] == '{"a": "<think>"}' and "reasoning_content" not in message


def test_a_message_has_thinking_blocks() -> None:
    body = {"max_tokens": 9, "messages": HI, "stream": True}
    asked = parse_messages(body, **context())
    told = tell(MessageStream(asked), TEXT, lambda answer: message_response(asked, [answer]))
    thought, text = told.whole["content"]
    assert thought == {"type": "thinking", "thinking": "A river. The Rhïne?", "signature": ""}
    assert text == {"type": "text", "text": "The Rhine."}
    starts = [e["content_block"]["type"] for e in told.events if e["type"] == "content_block_start"]
    assert starts == ["thinking", "text"]
    pieces = [e["delta"] for e in told.events if e["type"] == "content_block_delta"]
    assert "".join(p.get("thinking", "") for p in pieces) == thought["thinking"]
    assert "".join(p.get("text", "") for p in pieces) == text["text"]
    stops = [e["index"] for e in told.events if e["type"] == "content_block_stop"]
    assert stops == [0, 1] and told.events[-1] == {"type": "message_stop"}


def test_a_message_without_thinking_leaves_thoughts_out() -> None:
    body = {"max_tokens": 9, "messages": HI, "stream": True, "thinking": {"type": "disabled"}}
    asked = parse_messages(body, **context())
    told = tell(MessageStream(asked), TEXT, lambda answer: message_response(asked, [answer]))
    assert told.whole["content"] == [{"type": "text", "text": "The Rhine."}]
    assert "thinking" not in str(told.events)
    assert told.events[-2]["usage"]["output_tokens"] == len(TEXT) + 1, "they are counted"


def test_a_response_has_reasoning_items() -> None:
    asked = parse_responses({"input": "hi", "stream": True}, **context())
    told = tell(ResponseStream(asked), TEXT, lambda answer: response_object(asked, [answer]))
    final = told.events[-1]["response"]
    for output in (told.whole["output"], final["output"]):
        reasoning, message = output
        assert reasoning["type"] == "reasoning" and reasoning["summary"] == []
        assert reasoning["content"] == [{"type": "reasoning_text", "text": "A river. The Rhïne?"}]
        assert message["content"][0]["text"] == "The Rhine."
    kinds = list(dict.fromkeys(e["type"].removeprefix("response.") for e in told.events))
    assert kinds == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "reasoning_text.delta",
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
        "output_text.delta",
        "output_text.done",
        "completed",
    ]
    assert [e["sequence_number"] for e in told.events] == list(range(len(told.events)))
    thought = [e["delta"] for e in told.events if e["type"] == "response.reasoning_text.delta"]
    assert "".join(thought) == "A river. The Rhïne?"
    # The returned message is part of the next request, unchanged.
    again = [*HI, *final["output"], {"role": "user", "content": "and?"}]
    prompt = parse_responses({"input": again}, **context()).chat.job.prompt
    assert prompt.messages[1]["reasoning_content"] == "A river. The Rhïne?"  # type: ignore[union-attr]
    assert prompt.messages[1]["content"] == "The Rhine."  # type: ignore[union-attr]


# -- thoughts that the prompt has opened -------------------------------------------------------

OPENED = "<user>hi<assistant><think>\n"
NOT_OPENED = "<user><think>?<assistant>"


def opening(prompts: list[Sequence[int]]) -> dict[str, Any]:
    """A parser whose prefix is the prompt as characters; `prompts` collects the prompts it gets."""

    def new(prompt_ids: Sequence[int], tools: Any = ()) -> ResponseParser:
        prompts.append(prompt_ids)
        return ResponseParser(TEMPLATE, prefix="".join(map(chr, prompt_ids)))

    return {**context(), "tool_format": ToolFormat(knows_tools=True, new_parser=new)}


def prompted(pieces: Sequence[str], prompt: str, index: int = 0) -> list[TokenDelta]:
    first, *rest = (replace(delta, index=index) for delta in deltas(pieces))
    ids = tuple(map(ord, prompt)) if index == 0 else None
    return [replace(first, prompt_token_ids=ids), *rest]


@pytest.mark.parametrize(("prompt", "thinks"), [(OPENED, True), (NOT_OPENED, False)])
@pytest.mark.parametrize("cut", [1, 3, 1000])
def test_thoughts_may_begin_in_the_prompt(prompt: str, thinks: bool, cut: int) -> None:
    text = "A river?</think>The Rhine." if thinks else "The Rhine."
    pieces = [text[i : i + cut] for i in range(0, len(text), cut)]
    told: list[Sequence[int]] = []
    request = parse_chat({"messages": HI, "stream": True}, **opening(told))
    stream = ChatStream(request)
    events = [e for delta in prompted([*pieces, ""], prompt) for e in stream.feed(0, delta)]
    message = chat_response(request, prompted([text], prompt))["choices"][0]["message"]
    assert said(Told({}, events), "content") == message["content"] == "The Rhine."
    expected = "A river?" if thinks else ""
    assert said(Told({}, events), "reasoning_content") == expected
    assert message.get("reasoning_content", "") == expected
    assert told == [tuple(map(ord, prompt))] * 2


def test_all_answers_to_one_prompt_know_how_it_ended() -> None:
    told: list[Sequence[int]] = []
    request = parse_chat({"messages": HI, "stream": True, "n": 2}, **opening(told))
    stream = ChatStream(request)
    ours = prompted(["Hm.</think>", "Yes"], OPENED)
    others = prompted(["So?</think>", "No"], OPENED, index=1)
    assert stream.feed(1, others[0]) == [], "only the first answer brings the prompt"
    events = stream.feed(0, ours[0]) + stream.feed(1, others[1]) + stream.feed(0, ours[1])
    for index, (thought, text) in enumerate([("Hm.", "Yes"), ("So?", "No")]):
        mine = [{"choices": [c for c in e["choices"] if c["index"] == index]} for e in events]
        assert said(Told({}, mine), "reasoning_content") == thought
        assert said(Told({}, mine), "content") == text
    whole = chat_response(request, [merge_deltas(ours), merge_deltas(others)])
    messages = [choice["message"] for choice in whole["choices"]]
    assert [m["reasoning_content"] for m in messages] == ["Hm.", "So?"]
    assert [m["content"] for m in messages] == ["Yes", "No"]


def test_thoughts_that_the_prompt_opened_reach_every_endpoint() -> None:
    pieces = ["A river?</think>", "The Rhine."]
    asked = parse_messages({"max_tokens": 9, "messages": HI, "stream": True}, **opening([]))
    (whole,) = [merge_deltas(prompted(pieces, OPENED))]
    thought, text = message_response(asked, [whole])["content"]
    assert (thought["thinking"], text["text"]) == ("A river?", "The Rhine.")
    stream = MessageStream(asked)
    events = [e for delta in prompted(pieces, OPENED) for e in stream.feed(0, delta)]
    starts = [e["content_block"]["type"] for e in events if e["type"] == "content_block_start"]
    assert starts == ["thinking", "text"]
    wanted = parse_responses({"input": "hi", "stream": True}, **opening([]))
    reasoning, message = response_object(wanted, [whole])["output"]
    assert reasoning["content"][0]["text"] == "A river?"
    assert message["content"][0]["text"] == "The Rhine."


def test_a_prompt_that_begins_no_answer_opens_no_thoughts() -> None:
    told: list[Sequence[int]] = []
    fields = {"messages": HI, "add_generation_prompt": False}
    request = parse_chat(fields, **opening(told))
    chat_response(request, prompted(["Yes"], OPENED))
    assert told == [()]


def test_a_call_that_cannot_be_read_is_content() -> None:
    text = "Now: <call:f>{oops</call> Sorry."
    told = chat(text)
    message = told.whole["choices"][0]["message"]
    assert "Sorry." in message["content"] and "Sorry." in said(told, "content")
