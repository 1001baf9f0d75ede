"""Calls from the model's text to their results, and the rounds of a question."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest
from tool_samples import ListedTools, Words, box_of, make_tool, runner_of

from termgen.client import CallPiece
from termgen.tools.calls import (
    CANCELLED_WORDS,
    DENIED_WORDS,
    MAX_CALLS,
    Approval,
    CallState,
    ToolCall,
    arguments_of,
    run_rounds,
    take_pieces,
)
from termgen.tools.text import amount, escaped, for_model, result_chars, shortened
from termgen.tools.toolbox import Toolbox, ToolError


def call(text: str = "hi", *, name: str = "s_echo") -> ToolCall:
    return ToolCall(name, json.dumps({"text": text}))


async def run(tool: Any, *calls: ToolCall, words: Words | None = None) -> Words:
    words = words or Words()
    await runner_of(box_of(tool), words).run(calls)
    return words


async def test_an_approved_call_gives_its_result() -> None:
    one = call()
    words = await run(make_tool(), one)
    assert (one.state, one.result) == (CallState.DONE, "echo hi")
    assert words.asked == ["s_echo"]
    asked, answer = one.messages()
    assert asked["function"] == {"name": "s_echo", "arguments": {"text": "hi"}}
    assert answer["content"] == "echo hi" and answer["tool_call_id"] == asked["id"]
    assert len(asked["id"]) == 9 and asked["id"].isalnum()


async def test_always_is_for_this_tool_only() -> None:
    box = box_of(make_tool(), make_tool("other"))
    words = Words(Approval.ALWAYS)
    runner = runner_of(box, words)
    await runner.run([call(), call("2"), call(name="s_other")])
    await runner.run([call("3"), call(name="s_other")])
    assert words.asked == ["s_echo", "s_other", "s_other"]


async def test_a_tool_that_has_changed_is_asked_about_again() -> None:
    provider = ListedTools("s", [make_tool()])
    words = Words(Approval.ALWAYS)
    runner = runner_of(Toolbox([provider]), words)
    await runner.run([call()])
    provider.tools = [make_tool()]
    await runner.run([call()])
    assert len(words.asked) == 1, "the same, listed anew"
    provider.tools = [make_tool(description="deletes everything")]
    await runner.run([call()])
    assert len(words.asked) == 2


async def test_a_denied_call_is_not_run_and_the_model_reads_it() -> None:
    ran: list[object] = []

    async def spy(arguments: dict[str, Any]) -> str:
        ran.append(arguments)
        return "done"

    denied, other = call("1"), call("2")
    await run(make_tool(call=spy), denied, other, words=Words(Approval.DENY))
    assert ran == [{"text": "2"}]
    assert denied.state is CallState.DENIED
    assert denied.messages()[1]["content"] == DENIED_WORDS


@pytest.mark.parametrize(
    "text", ["{", "[1]", '"x"', "NaN", '{"text": ' + "[" * 100_000, "\x1b[31m", "{}}"]
)
async def test_arguments_that_are_no_object_are_answered_not_run(text: str) -> None:
    one = ToolCall("s_echo", text)
    words = await run(make_tool(), one)
    assert one.state is CallState.FAILED and words.asked == []
    asked, answer = one.messages()
    assert asked["function"]["arguments"] == {}
    assert answer["content"].startswith("Error: the arguments are not a JSON object")
    assert "\x1b" not in answer["content"] and len(answer["content"]) < 400


async def test_no_arguments_are_an_empty_object() -> None:
    assert arguments_of(" ") == {}


async def test_an_unknown_tool_is_answered() -> None:
    one = call(name="s_nothing\x1b")
    words = await run(make_tool(), one)
    assert one.state is CallState.FAILED and words.asked == []
    assert "there is no tool 's_nothing" in one.result and "\x1b" not in one.result


async def test_a_tool_that_hangs_costs_its_call_only() -> None:
    async def hang(arguments: dict[str, Any]) -> str:
        if arguments["text"] == "hang":
            await asyncio.sleep(60)
        return "ok"

    one, two = call("hang"), call("quick")
    started = time.monotonic()
    await run(make_tool(call=hang, timeout_s=0.1), one, two)
    assert time.monotonic() - started < 5
    assert one.state is CallState.FAILED and "0.1 s" in one.result
    assert two.state is CallState.DONE


@pytest.mark.parametrize(
    ("error", "words"),
    [(ToolError("no such file"), "no such file"), (KeyError("x"), "KeyError: 'x'")],
)
async def test_a_tool_that_fails_tells_the_model(error: Exception, words: str) -> None:
    async def fail(_: dict[str, Any]) -> str:
        raise error

    one = call()
    await run(make_tool(call=fail), one)
    assert one.state is CallState.FAILED and words in one.messages()[1]["content"]


async def test_cancelling_ends_every_call() -> None:
    ended: list[str] = []

    async def hang(arguments: dict[str, Any]) -> str:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(arguments["text"])
        return ""

    calls = [call("1"), call("2")]
    task = asyncio.create_task(runner_of(box_of(make_tool(call=hang)), Words()).run(calls))
    while [each.state for each in calls] != [CallState.RUNNING] * 2:
        await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert sorted(ended) == ["1", "2"]
    assert {each.state for each in calls} == {CallState.CANCELLED}
    assert calls[0].messages()[1]["content"] == CANCELLED_WORDS


async def test_calls_run_at_the_same_time() -> None:
    both = asyncio.Barrier(2)

    async def meet(_: dict[str, Any]) -> str:
        await both.wait()
        return "met"

    calls = [call("1"), call("2")]
    await asyncio.wait_for(run(make_tool(call=meet), *calls), 5)
    assert [each.result for each in calls] == ["met", "met"]


async def test_more_calls_than_a_round_may_have_are_refused() -> None:
    calls = [call(str(i)) for i in range(MAX_CALLS + 2)]
    await run(make_tool(), *calls)
    states = [each.state for each in calls]
    assert states == [CallState.DONE] * MAX_CALLS + [CallState.FAILED] * 2


def test_pieces_become_calls() -> None:
    calls: list[ToolCall] = []
    take_pieces(calls, [CallPiece(0, "a", '{"x'), CallPiece(0, "", '": 1}'), CallPiece(1, "b")])
    take_pieces(calls, [CallPiece(7, "", "lost")])
    assert [(each.name, each.arguments) for each in calls] == [("a", '{"x": 1}'), ("b", "")]


async def test_a_model_that_calls_for_ever_is_stopped_by_the_limit() -> None:
    offers: list[bool] = []
    ran = 0

    async def ask(may_call: bool) -> list[ToolCall]:
        offers.append(may_call)
        return [call()]

    async def count(_calls: object) -> None:
        nonlocal ran
        ran += 1

    assert not await run_rounds(ask, count, max_rounds=3)
    assert offers == [True, True, True, False] and ran == 3


async def test_rounds_end_with_the_answer_without_calls() -> None:
    answers = [[call()], []]

    async def ask(_: bool) -> list[ToolCall]:
        return answers.pop(0)

    async def nothing(_: object) -> None: ...

    assert await run_rounds(ask, nothing)
    assert answers == []


def test_a_large_result_is_cut_for_the_model() -> None:
    one = ToolCall("t", "{}", CallState.DONE, "\x1b]52;c;x\x07" + "y" * 976_000)
    content = one.messages()[1]["content"]
    assert content.startswith("\\x1b]52;c;x\\x07yy") and content.endswith("... 960k more")
    assert len(one.result) > 976_000, "all of it is kept"
    assert len(one.messages(1000)[1]["content"]) < 1100


def test_texts() -> None:
    assert escaped("a\r\nb\tc\x00\x9b\ud800") == "a\nb\tc\\x00\\x9b\\ud800"
    assert shortened("abcdef", 2) == "ab... 4 more"
    assert [amount(n) for n in (999, 1000, 960_400, 2_100_000)] == ["999", "1k", "960k", "2.1M"]
    assert for_model("x") == "x"
    assert [result_chars(n) for n in (0, 100, 4096, 100_000)] == [16_000, 500, 4096, 16_000]
