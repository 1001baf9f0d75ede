"""Tools with a server elsewhere: what it is sent, and the calls that it streams."""

from __future__ import annotations

import json
from typing import Any

import pytest
from foreign_server import chunk, done, event, foreign_server
from remote_harness import connected

from termgen.client import CallPiece, ChatPrompt, TokenDelta, merge_deltas
from termgen.errors import EngineError
from termgen.vocabulary.sampling_params import SamplingParams

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALLED = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"x": "é"}}}
    ],
}
RESULT = {"role": "tool", "tool_call_id": "1", "name": "f", "content": "r"}
PROMPT = ChatPrompt(
    [{"role": "user", "content": "q"}, CALLED, RESULT], template_kwargs={"tools": [TOOL]}
)


def called(*calls: dict[str, Any]) -> bytes:
    return event({"choices": [{"index": 0, "delta": {"tool_calls": list(calls)}}]})


def end(reason: str = "tool_calls") -> bytes:
    return event({"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]})


async def answer(*frames: bytes) -> tuple[list[TokenDelta], dict[str, Any]]:
    async with foreign_server(*frames) as server, connected(server.url) as client:
        assert client.model.reads_calls
        deltas = [delta async for delta in client.generate(PROMPT, SamplingParams())]
        return deltas, server.bodies[0]


async def test_tools_calls_and_results_are_sent_as_openai_wants_them() -> None:
    _, body = await answer(chunk("ok", finish="stop"), done())
    assert body["tools"] == [TOOL] and "chat_template_kwargs" not in body
    function = body["messages"][1]["tool_calls"][0]["function"]
    assert json.loads(function["arguments"]) == {"x": "é"}
    assert body["messages"][2] == RESULT
    assert isinstance(CALLED["tool_calls"][0]["function"]["arguments"], dict), "a copy is changed"


async def test_calls_arrive_piece_by_piece() -> None:
    start = {"index": 0, "id": "a", "function": {"name": "f", "arguments": ""}}
    deltas, _ = await answer(
        chunk("Let me see."),
        called(start),
        called({"index": 0, "function": {"arguments": '{"x"'}}),
        called(
            {"index": 0, "function": {"arguments": ": 1}"}},
            {"index": 1, "function": {"name": "g", "arguments": "{}"}},
        ),
        end(),
        done(),
    )
    whole = merge_deltas(deltas)
    assert whole.text == "Let me see." and whole.finish_reason == "stop"
    assert whole.calls == (
        CallPiece(0, "f"),
        CallPiece(0, "", '{"x"'),
        CallPiece(0, "", ": 1}"),
        CallPiece(1, "g", "{}"),
    )


async def test_whole_calls_may_have_no_index() -> None:
    one = {"function": {"name": "f", "arguments": "{}"}}
    deltas, _ = await answer(called(one, one), end(), done())
    assert merge_deltas(deltas).calls == (CallPiece(0, "f", "{}"), CallPiece(1, "f", "{}"))


@pytest.mark.parametrize(
    "calls",
    [
        [{"index": 0, "function": {"arguments": "{}"}}],
        [{"index": i, "function": {"name": "f"}} for i in range(300)],
        [{"index": 0, "function": {"name": ["f"]}}],
        [{"index": 0, "function": {"name": "f", "arguments": {"x": 1}}}],
        ["f"],
        3,
    ],
)
async def test_calls_of_no_shape_are_an_error(calls: Any) -> None:
    frame = event({"choices": [{"index": 0, "delta": {"tool_calls": calls}}]})
    with pytest.raises(EngineError, match="no event of a chat"):
        await answer(frame, end(), done())
