"""The chat as data: prompts, figures, history, commands."""

from __future__ import annotations

import random
from types import MappingProxyType

import pytest
from fake_engine import make_model_info

from termgen.client import RequestTimings, TokenDelta
from termgen.config import UIConfig
from termgen.tui.chat.state import commands
from termgen.tui.chat.state.conversation import (
    AnswerState,
    AnswerStats,
    Conversation,
    PromptHistory,
    Turn,
    sampling_params,
)
from termgen.tui.chat.widgets.chat_rows import ChatStatus, answer_footer, empty_rows, status_row
from termgen.tui.paint.spans import row_text, row_width
from termgen.vocabulary.request import FinishReason


def delta(output: int, *, finish: FinishReason | None = None, ttft_ms: int = 0) -> TokenDelta:
    timings = RequestTimings(1, 2, 1 + ttft_ms * 1_000_000, 3) if ttft_ms else None
    return TokenDelta(
        request_id="r",
        index=0,
        text="x",
        token_ids=(1,),
        logprobs=None,
        finish_reason=finish,
        stop_reason=None,
        num_prompt_tokens=40,
        num_cached_tokens=16,
        num_output_tokens=output,
        timings=timings,
    )


def stats_after(count: int, *, every_s: float = 0.05) -> AnswerStats:
    stats = AnswerStats(sent_s=10.0)
    for i in range(count):
        stats.update(delta(i + 1), 10.5 + i * every_s)
    return stats


def test_prompt_holds_everything_said() -> None:
    talk = Conversation(system_prompt="be brief")
    first = talk.ask("one?", now_s=0)
    first.answer = "1"
    talk.ask("two?", now_s=1)
    assert talk.title == "one?"
    assert [(m["role"], m["content"]) for m in talk.prompt().messages] == [
        ("system", "be brief"),
        ("user", "one?"),
        ("assistant", "1"),
        ("user", "two?"),
    ]
    assert talk.last_answer == "1"
    talk.remove(talk.turns[-1])
    assert len(talk.turns) == 1
    talk.remove(first)
    assert talk.last_answer is None and talk.context_tokens == 0
    assert talk.title == ""


def test_answers_and_edits_stand_beside_each_other() -> None:
    talk = Conversation()
    first = talk.ask("one", now_s=0)
    first.answer = "1"
    follow = talk.ask("and?", now_s=1)
    again = talk.ask("one", now_s=2, beside=first)
    edited = talk.ask("uno", now_s=3, beside=again)
    assert talk.turns == [edited] and list(edited.siblings) == [first, again, edited]
    assert edited.is_edited and not again.is_edited and edited.place == 2
    assert talk.switch(edited, 1) is None and talk.turns == [edited]
    assert talk.switch(edited, -2) is first and talk.turns == [first, follow]
    later = talk.ask("two", now_s=4)
    assert talk.turns == [first, follow, later]
    talk.check_integrity()


def test_removing_a_turn_brings_back_what_it_replaced() -> None:
    talk = Conversation()
    first = talk.ask("one", now_s=0)
    second = talk.ask("one", now_s=1, beside=first)
    talk.switch(second, -1)
    third = talk.ask("one", now_s=2, beside=first)
    talk.remove(third)
    assert talk.turns == [first]
    talk.switch(first, 1)
    talk.remove(first)
    assert talk.turns == [second]
    talk.remove(second)
    assert talk.turns == []
    talk.check_integrity()


def test_any_history_of_a_tree_sends_its_path() -> None:
    """Compare with a model that keeps whole paths, in the order of their creation."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    for _ in range(20):
        talk = Conversation(system_prompt=rng.choice([None, "be brief"]))
        for step in range(60):
            turns = talk.turns
            turn = rng.choice(turns) if turns else None
            above = turns[: turns.index(turn)] if turn else []
            action = rng.choice(("ask", "again", "edit", "switch", "remove"))
            if turn is None or action == "ask":
                made = talk.ask(f"q{step}", now_s=step)
                assert talk.turns == [*turns, made]
                made.answer = f"a{step}" if rng.random() < 0.9 else ""
            elif action in ("again", "edit"):
                question = turn.question if action == "again" else f"q{step}"
                made = talk.ask(question, now_s=step, beside=turn)
                assert talk.turns == [*above, made]
                made.answer = f"a{step}"
            elif action == "switch":
                chosen = talk.switch(turn, rng.choice((-1, 1)))
                assert talk.turns[len(above)] is (chosen or turn)
            else:
                talk.remove(turn)
                assert turn not in talk.turns and talk.turns[: len(above)] == above
            talk.check_integrity()
            given = [m["content"] for m in talk.prompt().messages if m["role"] != "system"]
            said = [text for words in given for text in words.split("\n\n")]  # joined if unanswered
            assert said == [t for turn in talk.turns for t in (turn.question, turn.answer) if t]


def test_stats_measure_the_answer() -> None:
    stats = stats_after(11)
    assert stats.ttft_s == pytest.approx(0.5)
    assert stats.decode_rate == pytest.approx(20)
    assert stats.live_rate(11.0) == pytest.approx(20)
    assert stats.context_tokens == 51
    stats.update(delta(12, finish=FinishReason.STOP, ttft_ms=140), 11.1)
    assert stats.ttft_s == pytest.approx(0.14)
    assert stats.finish_reason is FinishReason.STOP


def test_the_live_rate_follows_the_last_seconds() -> None:
    stats = stats_after(100, every_s=0.01)
    start = stats.ended_s
    for i in range(30):
        stats.update(delta(101 + i), start + 0.1 * (i + 1))
    assert stats.live_rate(stats.ended_s) == pytest.approx(10, rel=0.1)
    assert stats.decode_rate == pytest.approx(129 / 3.99, rel=0.02)


def test_footer_tells_tokens_speed_and_cache() -> None:
    turn = Turn("q", "a", AnswerState.DONE, stats_after(11))
    assert row_text(answer_footer(turn, 90)) == (
        "11 tok · 20.0 tok/s · TTFT 500 ms · 16 of 40 prompt tok cached"
    )
    assert row_text(answer_footer(turn, 30)) == "11 tok · 20.0 tok/s"
    turn.state = AnswerState.STOPPED
    assert row_text(answer_footer(turn, 90)).startswith("■ stopped · 11 tok")
    turn.state, turn.stats.finish_reason = AnswerState.DONE, FinishReason.LENGTH
    assert row_text(answer_footer(turn, 90)).startswith("■ length limit")
    assert row_text(answer_footer(Turn("q"), 90)) == "0 tok"


@pytest.mark.parametrize("width", [30, 60, 80, 100, 140])
def test_status_line_fits_and_keeps_the_context(width: int) -> None:
    status = ChatStatus(stats_after(11), True, 1800, 0.7, 11.0, behind=True)
    shown = row_text(status_row(make_model_info(max_model_len=2048), status, width))
    assert row_width(((shown, ""),)) == width
    assert "ctx" in shown and "1.8k/2.0k" in shown
    if width >= 100:
        assert "20.0 tok/s" in shown and "TTFT 500 ms" in shown and "↓ more below" in shown


@pytest.mark.parametrize(
    ("width", "words"), [(70, "· JSON schema +2 "), (140, "seed 7  top_p 0.5 ")]
)
def test_status_line_keeps_what_was_set(width: int, words: str) -> None:
    changes = ("JSON schema", "seed 7", "top_p 0.5")
    status = ChatStatus(stats_after(11), False, 1800, 0.7, 11.0, changes=changes)
    shown = row_text(status_row(make_model_info(max_model_len=2048), status, width))
    assert row_width(((shown, ""),)) == width
    assert words in shown and "1.8k/2.0k" in shown and "T 0.7" not in shown


def test_the_empty_chat_teaches() -> None:
    shown = "\n".join(row_text(row) for row in empty_rows(make_model_info(), str.upper, 76, 18))
    for expected in ("fake/model-1", "is ready", "PROMPT.SEND", "/system", "APP.HELP", "every key"):
        assert expected in shown


@pytest.mark.parametrize("size", [(36, 5), (36, 12), (20, 3), (76, 8), (76, 18), (8, 1)])
def test_the_empty_chat_fits_small_terminals(size: tuple[int, int]) -> None:
    rows = empty_rows(make_model_info(), str.lower, *size)
    assert len(rows) <= size[1] and all(row_width(row) <= size[0] for row in rows)
    shown = "\n".join(row_text(row) for row in rows)
    assert "fake/mo" in shown
    if size[1] >= 3:
        assert "Ask anything." in shown and "send" in shown
    if size == (36, 12):
        assert "new line" in shown and "…" not in shown.split("\n")[3]


def test_sampling_prefers_the_user_then_the_model() -> None:
    ours = sampling_params({}, UIConfig())
    assert (ours.temperature, ours.top_p) == (0.7, 0.95)
    model = MappingProxyType({"temperature": 0.2, "top_k": 40, "eos_token_id": 2, "top_p": None})
    theirs = sampling_params(model, UIConfig())
    assert (theirs.temperature, theirs.top_k, theirs.top_p) == (0.2, 40, 1.0)
    chosen = sampling_params(model, UIConfig(temperature=0.0, top_p=0.5, max_tokens=9))
    assert (chosen.temperature, chosen.top_p, chosen.max_tokens) == (0.0, 0.5, 9)


def test_history_walks_back_and_keeps_the_draft() -> None:
    history = PromptHistory(limit=3)
    assert history.older("draft") is None
    for text in ("a", "b", "b", "c", "d"):
        history.add(text)
    assert [history.older("draft") for _ in range(4)] == ["d", "c", "b", None]
    assert [history.newer() for _ in range(4)] == ["c", "d", "draft", None]


def test_commands_are_told_from_messages() -> None:
    found = commands.parse("/system be brief ")
    assert found is not None and (found[0].name, found[1]) == ("system", "be brief")
    assert commands.parse("/etc/passwd is a file") is None
    assert commands.parse("clear") is None
    assert commands.parse("/clear\nmore") is None
    names = ["clear", "copy", "code", "choice", "compact", "context"]
    assert [c.name for c in commands.matching("/c")] == names
    assert commands.matching("/clear now") == []
