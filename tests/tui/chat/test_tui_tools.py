"""Tools in the chat: approval, folds, rounds, what is sent and kept."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from chat_harness import SIZE, sent_messages, shown
from fake_engine import FakeEngine, Script
from fake_script import GenerateCall
from textual.pilot import Pilot
from textual.widgets import Static
from tool_samples import KNOWS_TOOLS, ListedTools, box_of, hermes, make_tool
from tui_harness import FrozenApp, TimedEngine, ask, chat_engine, pieces, ready, wait_until

from termgen.errors import RequestError
from termgen.tools.calls import CANCELLED_WORDS, DENIED_WORDS, MAX_ROUNDS, CallState
from termgen.tools.toolbox import Tool, Toolbox
from termgen.tui.chat import approval_panel
from termgen.tui.chat.approval_panel import ApprovalPanel
from termgen.tui.chat.chat_screen import ChatScreen
from termgen.tui.chat.saved.chat_records import (
    as_json,
    as_markdown,
    conversation_of,
    from_json,
    session_record,
    turn_record,
)
from termgen.tui.chat.saved.chat_store import ChatStore, Resume
from termgen.tui.chat.state.answer_branch import Branch
from termgen.tui.chat.state.conversation import AnswerState
from termgen.vocabulary.request import FinishReason
from termgen.vocabulary.tool_format import ToolFormat, ToolStyle

CALL = hermes("s_echo", '{"text": "hi"}')


def calling(*answers: str, call: str = CALL) -> Callable[[GenerateCall], Script]:
    """A model that calls a tool, then gives these answers, one after the other."""
    texts = [call, *answers]
    return lambda _: Script(pieces=pieces(texts.pop(0) if len(texts) > 1 else texts[0]))


def engine_of(script: Callable[[GenerateCall], Script] | Script) -> TimedEngine:
    return chat_engine(script, tool_format=KNOWS_TOOLS)


def app_of(engine: FakeEngine, *tools: Tool, box: Toolbox | None = None, **options: Any) -> Any:
    return FrozenApp(engine, toolbox=box or box_of(*tools), **options)


@pytest.fixture(autouse=True)
def _no_haste(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(approval_panel, "QUIET_S", 0.0)


async def asked(app: FrozenApp, pilot: Pilot[Any]) -> ApprovalPanel:
    await wait_until(pilot, lambda: isinstance(app.screen, ApprovalPanel))
    await pilot.pause()
    panel = app.screen
    assert isinstance(panel, ApprovalPanel)
    return panel


@asynccontextmanager
async def asked_app(app: FrozenApp) -> AsyncIterator[Pilot[Any]]:
    """A question was asked, and its first call waits for approval."""
    async with app.run_test(size=SIZE) as pilot:
        await ready(app, pilot)
        await ask(app, pilot, "q", wait=False)
        await asked(app, pilot)
        yield pilot


async def answered(app: FrozenApp, pilot: Pilot[Any]) -> None:
    await wait_until(
        pilot, lambda: isinstance(app.screen, ChatScreen) and not app.chat.is_streaming
    )
    await pilot.pause()


def calls_of(app: FrozenApp) -> list[tuple[str, str]]:
    turn = app.chat.conversation.turns[-1]
    return [(call.state.value, call.result) for one in turn.rounds for call in one.calls]


async def test_a_call_is_approved_run_shown_and_sent() -> None:
    engine = engine_of(calling("It says hi."))
    app = app_of(engine)
    async with app.run_test(size=SIZE) as pilot:
        await ready(app, pilot)
        await ask(app, pilot, "what does it say", wait=False)
        panel = await asked(app, pilot)
        words = "\n".join(str(each.render()) for each in panel.query(Static))
        assert "s_echo" in words and "says it again" in words and '"text": "hi"' in words
        assert "? waits for your word" in app.get_screen_stack("chat")[0].transcript.plain_text
        await pilot.press("y")
        await answered(app, pilot)
        assert calls_of(app) == [("done", "echo hi")]
        text = shown(app)
        assert '▸ s_echo {"text": "hi"}' in text and "✓ " in text and "It says hi." in text
        assert "echo hi" not in text and "<tool_call>" not in text
        await pilot.press("ctrl+t")
        assert "│ echo hi" in shown(app) and '│   "text": "hi"' in shown(app)
        await pilot.press("ctrl+t")
        assert "echo hi" not in shown(app)
        assert app.chat.conversation.turns[-1].answer == "It says hi."
    second = sent_messages(engine)
    assert [m["role"] for m in second] == ["user", "assistant", "tool"]
    assert second[1]["tool_calls"][0]["function"]["name"] == "s_echo"
    assert second[2]["content"] == "echo hi"
    assert engine.calls[0].prompt.template_kwargs["tools"][0]["function"]["name"] == "s_echo"
    assert engine.calls[0].params.structured_outputs is not None, "arguments are enforced"


async def test_tool_turns_are_part_of_what_is_sent_next() -> None:
    engine = engine_of(calling("Hi.", "Yes."))
    app = app_of(engine)
    async with asked_app(app) as pilot:
        await pilot.press("y")
        await answered(app, pilot)
        await ask(app, pilot, "two")
        roles = [m["role"] for m in sent_messages(engine)]
        assert roles == ["user", "assistant", "tool", "assistant", "user"]
        app.chat.conversation.check_integrity()


async def test_always_asks_no_more_for_this_tool() -> None:
    other = hermes("s_other", '{"text": "x"}')
    texts = [CALL, CALL, other, "end"]
    engine = engine_of(lambda _: Script(pieces=pieces(texts.pop(0))))
    app = app_of(engine, make_tool(), make_tool("other"))
    async with asked_app(app) as pilot:
        await pilot.press("a")
        await wait_until(pilot, lambda: len(engine.calls) == 3)
        panel = await asked(app, pilot)
        assert "s_other" in str(panel.query_one("#approval-name", Static).render())
        await pilot.press("n")
        await answered(app, pilot)
        assert [state for state, _ in calls_of(app)] == ["done", "done", "denied"]
    assert sent_messages(engine)[-1]["content"] == DENIED_WORDS


async def test_deny_runs_nothing_and_the_model_answers() -> None:
    ran: list[object] = []

    async def spy(arguments: dict[str, Any]) -> str:
        ran.append(arguments)
        return ""

    engine = engine_of(calling("As you like."))
    app = app_of(engine, make_tool(call=spy))
    async with asked_app(app) as pilot:
        await pilot.press("n")
        await answered(app, pilot)
        assert not ran and calls_of(app) == [("denied", DENIED_WORDS)]
        assert "■ denied" in shown(app) and "As you like." in shown(app)


@pytest.mark.parametrize("key", ["escape", "ctrl+c"])
async def test_stopping_while_asked(key: str) -> None:
    engine = engine_of(calling("never"))
    app = app_of(engine)
    async with asked_app(app) as pilot:
        await pilot.press(key)
        await answered(app, pilot)
        assert calls_of(app) == [("cancelled", CANCELLED_WORDS)]
        turn = app.chat.conversation.turns[-1]
        assert turn.state is AnswerState.STOPPED and len(engine.calls) == 1
        await ask(app, pilot, "and now")
        roles = [m["role"] for m in sent_messages(engine)]
        assert roles == ["user", "assistant", "tool", "user"]


async def test_stopping_while_a_tool_runs() -> None:
    ended = asyncio.Event()

    async def hang(_: dict[str, Any]) -> str:
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()
        return ""

    engine = engine_of(calling("never"))
    app = app_of(engine, make_tool(call=hang))
    async with asked_app(app) as pilot:
        await pilot.press("y")
        await wait_until(pilot, lambda: "running" in app.chat.transcript.plain_text)
        await pilot.press("escape")
        await asyncio.wait_for(ended.wait(), 5)
        await answered(app, pilot)
        assert "■ stopped" in shown(app) and len(engine.calls) == 1


async def test_stopping_while_a_call_is_written() -> None:
    engine = engine_of(lambda _: Script(pieces=pieces(CALL), hold_after=len(pieces(CALL)) - 6))
    app = app_of(engine)
    async with app.run_test(size=SIZE) as pilot:
        await ready(app, pilot)
        await ask(app, pilot, "q", wait=False)
        await wait_until(pilot, lambda: "s_echo" in app.chat.transcript.plain_text)
        await pilot.press("escape")
        await answered(app, pilot)
        assert calls_of(app) == [("cancelled", CANCELLED_WORDS)]
        assert "s_echo" in shown(app)


async def test_a_call_that_is_cut_off_is_not_run() -> None:
    engine = engine_of(Script(pieces=pieces(CALL)[:-3], finish_reason=FinishReason.LENGTH))
    app = app_of(engine)
    async with app.run_test(size=SIZE) as pilot:
        await ready(app, pilot)
        await ask(app, pilot, "q")
        assert isinstance(app.screen, ChatScreen) and len(engine.calls) == 1
        assert [state for state, _ in calls_of(app)] == ["failed"]


async def test_a_model_that_calls_for_ever() -> None:
    def script(call: GenerateCall) -> Script:
        may_call = "tools" in call.prompt.template_kwargs
        return Script(pieces=pieces(CALL if may_call else "Enough."))

    engine = engine_of(script)
    app = app_of(engine)
    async with asked_app(app) as pilot:
        await pilot.press("a")
        await answered(app, pilot)
        assert len(engine.calls) == MAX_ROUNDS + 1
        assert len(calls_of(app)) == MAX_ROUNDS and "Enough." in shown(app)
        assert f"called tools {MAX_ROUNDS} times" in shown(app)


async def test_hostile_results_are_shown_as_text() -> None:
    async def hostile(_: dict[str, Any]) -> str:
        return "\x1b]0;title\x07\x1b[2J\u202eevil\x9b31m\ud800" + "z" * 1_000_000

    engine = engine_of(calling("ok"))
    app = app_of(engine, make_tool(call=hostile))
    async with asked_app(app) as pilot:
        await pilot.press("y")
        await answered(app, pilot)
        await pilot.press("ctrl+t")
        await wait_until(pilot, lambda: "... 980k more" in shown(app))
        assert not any(char in shown(app) for char in "\x1b\x07\x9b\u202e\ud800")
        assert "␛]0;title" in shown(app)
    result = sent_messages(engine)[-1]["content"]
    assert result.startswith("\\x1b]0;title\\x07\\x1b[2J") and len(result) < 16_100


async def test_a_call_is_opened_by_a_click() -> None:
    engine = engine_of(calling("ok"))
    app = app_of(engine)
    async with asked_app(app) as pilot:
        await pilot.press("y")
        await answered(app, pilot)
        transcript = app.chat.transcript
        line = shown(app).split("\n").index(next(x for x in shown(app).split("\n") if "▸" in x))
        at = (transcript.margin + 4, line - transcript.scroll_offset.y)
        await pilot.click(transcript, offset=at)
        await wait_until(pilot, lambda: "│ echo hi" in shown(app))
        await pilot.click(transcript, offset=at)
        await wait_until(pilot, lambda: "│ echo hi" not in shown(app))


async def test_keys_typed_in_haste_go_into_the_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(approval_panel, "QUIET_S", 60.0)
    engine = engine_of(calling("ok"))
    app = app_of(engine)
    async with app.run_test(size=SIZE) as pilot:
        await ready(app, pilot)
        await ask(app, pilot, "q", wait=False)
        panel = await asked(app, pilot)
        await pilot.press("y", "a", "n")
        chat = app.get_screen_stack("chat")[0]
        assert app.screen is panel and chat.prompt.text == "yan"
        monkeypatch.setattr(approval_panel, "QUIET_S", 0.0)
        await pilot.press("y")
        await answered(app, pilot)
        assert app.chat.prompt.text == "yan" and calls_of(app) == [("done", "echo hi")]


async def test_it_asks_only_over_the_chat() -> None:
    engine = engine_of(lambda _: Script(pieces=pieces(CALL), hold_after=3))
    app = app_of(engine)
    async with app.run_test(size=SIZE) as pilot:
        await ready(app, pilot)
        await ask(app, pilot, "q", wait=False)
        await pilot.press("f3")
        over = app.screen
        engine.release.set()
        await pilot.pause(0.3)
        assert app.screen is over
        await pilot.press("escape")
        await asked(app, pilot)
        await pilot.press("f1")
        await pilot.pause()
        app.get_screen_stack("chat")[0].dialogue.stop_answer()
        await pilot.press("escape")
        await answered(app, pilot)
        assert calls_of(app) == [("cancelled", CANCELLED_WORDS)]


async def test_a_template_without_tools_says_so_once() -> None:
    engine = chat_engine(Script(pieces=("ok",)), tool_format=ToolFormat())
    app = app_of(engine)
    async with app.run_test(size=SIZE) as pilot:
        await ready(app, pilot)
        await ask(app, pilot, "one")
        await ask(app, pilot, "two")
        assert shown(app).count("knows no tools") == 1
        assert shown(app).index("knows no tools") < shown(app).index("one")
        assert "tools" not in engine.calls[0].prompt.template_kwargs


async def test_a_server_that_takes_no_tools_is_asked_without() -> None:
    def script(call: GenerateCall) -> Script:
        if "tools" in call.prompt.template_kwargs:
            return Script(raises=RequestError("m1 does not support tools"))
        return Script(pieces=("plain",))

    engine = chat_engine(script, reads_calls=True)
    app = app_of(engine)
    async with app.run_test(size=SIZE) as pilot:
        await ready(app, pilot)
        await ask(app, pilot, "one")
        await ask(app, pilot, "two")
        assert shown(app).count("takes no tools and answers without them") == 1
        assert app.chat.conversation.turns[-1].answer == "plain" and len(engine.calls) == 3


async def test_schemas_that_make_no_grammar_are_not_enforced() -> None:
    def script(call: GenerateCall) -> Script:
        if call.params.structured_outputs is not None:
            return Script(raises=RequestError("tools: too large", param="tools"))
        return Script(pieces=("free",))

    engine = engine_of(script)
    app = app_of(engine)
    async with app.run_test(size=SIZE) as pilot:
        await ready(app, pilot)
        await ask(app, pilot, "one")
        assert "free" in shown(app)
        assert "tools" in engine.calls[-1].prompt.template_kwargs


@pytest.mark.parametrize("style", [ToolStyle.HERMES, ToolStyle.LLAMA])
async def test_a_model_that_is_refused_its_tools_is_asked_again_once(style: ToolStyle) -> None:
    engine = chat_engine(
        lambda _: Script(raises=RequestError("tools: never", param="tools")),
        tool_format=ToolFormat(style, knows_tools=True),
    )
    app = app_of(engine)
    async with app.run_test(size=SIZE) as pilot:
        await ready(app, pilot)
        await ask(app, pilot, "one")
        assert len(engine.calls) == 2 and "tools: never" in shown(app)
        assert app.chat.prompt.text == "one"


async def test_a_server_of_ours_enforces_schemas_if_it_can() -> None:
    def script(call: GenerateCall) -> Script:
        tools = call.prompt.template_kwargs["tools"]
        if any(tool["function"].get("strict") for tool in tools):
            return Script(raises=RequestError("no grammar", param="tools"))
        return Script(pieces=("free",))

    engine = chat_engine(script, reads_calls=True, holds_calls=True)
    app = app_of(engine)
    async with app.run_test(size=SIZE) as pilot:
        await ready(app, pilot)
        await ask(app, pilot, "one")
        await ask(app, pilot, "two")
        assert len(engine.calls) == 3 and "takes no tools" not in shown(app)


async def test_a_form_leaves_the_tools_out() -> None:
    engine = engine_of(Script(pieces=("a",)))
    app = app_of(engine)
    async with app.run_test(size=SIZE) as pilot:
        await ready(app, pilot)
        await ask(app, pilot, "/choice a|b", wait=False)
        await ask(app, pilot, "q")
        assert "tools" not in engine.calls[-1].prompt.template_kwargs
        assert engine.calls[-1].params.structured_outputs.choice == ("a", "b")


async def test_tool_turns_are_kept_and_shown_again(tmp_path: Path) -> None:
    big = "x" * 50_000 + "the end"

    async def large(_: dict[str, Any]) -> str:
        return big

    path = tmp_path / "chats.sqlite3"
    engine = engine_of(calling("Seen."))
    app = app_of(engine, make_tool(call=large), chats=ChatStore(path))
    async with app.run_test(size=SIZE) as pilot:
        await ready(app, pilot)
        await ask(app, pilot, "look", wait=False)
        await asked(app, pilot)
        await pilot.press("y")
        await answered(app, pilot)
        session = app.chat.conversation.session_id
        context = app.chat.conversation.context_tokens
    again = engine_of(Script(pieces=("More.",)))
    app = app_of(again, chats=ChatStore(path), resume=Resume(session, {}))
    async with app.run_test(size=SIZE) as pilot:
        await ready(app, pilot)
        await wait_until(pilot, lambda: bool(app.chat.conversation.turns))
        assert calls_of(app) == [("done", big)], "all of the result"
        assert "▸ s_echo" in shown(app) and "Seen." in shown(app)
        assert app.chat.conversation.context_tokens == context
        await ask(app, pilot, "go on")
        roles = [m["role"] for m in sent_messages(again)]
        assert roles == ["user", "assistant", "tool", "assistant", "user"]
        assert sent_messages(again)[2]["content"].endswith("more")


async def test_an_export_has_the_calls() -> None:
    engine = engine_of(calling("ok"))
    app = app_of(engine)
    async with asked_app(app) as pilot:
        await pilot.press("y")
        await answered(app, pilot)
        chat, params = app.chat.conversation, app.chat.settings.params
        record = session_record(chat, params, own=params)
        turns = [turn_record(chat, turn) for turn in chat.turns]
        _, read = from_json(as_json(record, turns))
        assert [dict(turn.figures) for turn in read] == [dict(turn.figures) for turn in turns]
        restored = conversation_of(record, read).turns[0].rounds[0].calls[0]
        assert (restored.state, restored.result) == (CallState.DONE, "echo hi")
        text = as_markdown(record, chat)
        assert "<summary>Called s_echo</summary>" in text and "    echo hi" in text


async def test_retry_calls_anew() -> None:
    texts = [CALL, "one", CALL, "two"]
    engine = engine_of(lambda _: Script(pieces=pieces(texts.pop(0))))
    app = app_of(engine)
    async with asked_app(app) as pilot:
        await pilot.press("a")
        await answered(app, pilot)
        await pilot.press("alt+r")
        await wait_until(pilot, lambda: len(engine.calls) == 4)
        await answered(app, pilot)
        assert [m["role"] for m in sent_messages(engine, 2)] == ["user"]
        first, second = app.chat.conversation.turns[-1].siblings
        assert first.rounds[0].calls[0] is not second.rounds[0].calls[0]


async def test_a_branch_of_an_answer_keeps_the_calls_before_it() -> None:
    engine = engine_of(calling("It says hi.", "branched"))
    app = app_of(engine)
    async with asked_app(app) as pilot:
        await pilot.press("y")
        await answered(app, pilot)
        chat = app.chat
        (turn,) = chat.conversation.turns
        written = chat.dialogue.tokens.get(turn.turn_id)
        assert written is not None and len(written.answer_ids) == len(pieces("It says hi."))
        branch = Branch(tuple(written.prompt_ids), (73,), 116, is_partial=False, is_whole=True)
        chat.dialogue.ask(turn.question, (), beside=turn, branch=branch)
        await answered(app, pilot)
        (branched,) = chat.conversation.turns
        assert branched is not turn and branched.rounds == turn.rounds
        assert shown(app).count("▸ s_echo") == 1 and "branched" in shown(app)
        await ask(app, pilot, "next")
        roles = [m["role"] for m in sent_messages(engine)]
        assert roles == ["user", "assistant", "tool", "assistant", "user"]


async def test_figures_count_all_rounds() -> None:
    engine = engine_of(calling("It says hi."))
    app = app_of(engine)
    async with asked_app(app) as pilot:
        engine.now_s += 1000.0
        await pilot.press("y")
        await answered(app, pilot)
        stats = app.chat.conversation.turns[-1].stats
        assert stats.output_tokens == len(pieces(CALL)) + len(pieces("It says hi."))
        assert stats.context_tokens == stats.prompt_tokens + len(pieces("It says hi."))
        assert stats.decode_rate is not None and stats.decode_rate > 10, "tools' time left out"


async def test_thoughts_of_each_round_have_their_own_figures() -> None:
    thought = "<think>Hm, yes.</think>"
    engine = engine_of(calling(thought + "ok", call=thought + CALL))
    app = app_of(engine)
    async with asked_app(app) as pilot:
        await pilot.press("y")
        await answered(app, pilot)
        turn = app.chat.conversation.turns[-1]
        first, second = turn.rounds[0].thought, turn.thought
        assert first.text == second.text == "Hm, yes."
        assert first.num_tokens == second.num_tokens > 2
        assert 0 <= second.seconds - first.seconds < 0.1
        assert shown(app).count("thought for") == 2


async def test_mcp_lists_and_restarts() -> None:
    provider = ListedTools("s", [make_tool()])
    app = app_of(engine_of(Script()), box=Toolbox([provider]))
    async with app.run_test(size=SIZE) as pilot:
        await ready(app, pilot)
        await ask(app, pilot, "/mcp", wait=False)
        await wait_until(pilot, lambda: "s: ready" in shown(app))
        assert "s_echo" in shown(app)
        await ask(app, pilot, "/mcp restart s", wait=False)
        await wait_until(pilot, lambda: provider.events == ["start", "refresh", "restart"])
        await ask(app, pilot, "/mcp restart t", wait=False)
        await pilot.press("alt+m")
        await wait_until(pilot, lambda: shown(app).count("s: ready") == 3)
    assert provider.events == ["start", "refresh", "restart", "refresh", "close"]


async def test_without_tools_mcp_says_how_to_get_some() -> None:
    app = FrozenApp(chat_engine(Script()))
    async with app.run_test(size=SIZE) as pilot:
        await ready(app, pilot)
        await ask(app, pilot, "/mcp", wait=False)
        await wait_until(pilot, lambda: "--tools files" in shown(app))


async def test_keys_echo_while_tools_run() -> None:
    async def busy(_: dict[str, Any]) -> str:
        await asyncio.sleep(0.5)
        return "x" * 1_000_000

    engine = engine_of(calling("ok"))
    app = app_of(engine, make_tool(call=busy))
    async with asked_app(app) as pilot:
        await pilot.press("y")
        worst, last = 0.0, time.perf_counter()
        while not isinstance(app.screen, ChatScreen) or app.chat.is_streaming:
            await asyncio.sleep(0.001)
            now = time.perf_counter()
            worst, last = max(worst, now - last), now
        assert worst < 0.25, f"the loop stood still for {worst:.3f} s"
