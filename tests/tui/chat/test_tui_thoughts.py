"""Thoughts separated from answers, however the text is cut."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from fake_engine import FakeEngine, Script, make_model_info

from termgen.client import ChatPrompt, TokenDelta
from termgen.tui.chat.state.conversation import Turn
from termgen.tui.chat.state.thoughts import AnswerNews, ThinkReader, Thought, read_answer
from termgen.tui.chat.widgets.entries import ThoughtRows
from termgen.tui.paint.spans import row_text
from termgen.vocabulary.sampling_params import SamplingParams
from termgen.vocabulary.structured_outputs import StructuredOutputsParams
from termgen.vocabulary.tool_format import ToolFormat

ASKED = ChatPrompt([{"role": "user", "content": "why"}])


def read(reader: ThinkReader, pieces: Sequence[str]) -> tuple[str, str]:
    told = [*map(reader.feed, pieces), reader.finish()]
    return "".join(t for t, _ in told), "".join(a for _, a in told)


@pytest.mark.parametrize(
    ("text", "is_open", "expected"),
    [
        ("<think>\nHm.\n</think>\n\nYes.\n", False, ("\nHm.", "Yes.\n")),
        ("Hm.</think>Yes.", True, ("Hm.", "Yes.")),
        ("Hm. a < b </thin", True, ("Hm. a < b </thin", "")),
        ("<think>\n\n</think>\n\nYes", False, ("", "Yes")),
        ("  plain <think>no</think>", False, ("", "  plain <think>no</think>")),
        ("<thin", False, ("", "<thin")),
        ("<think>a</think>b</think>c", False, ("a", "b</think>c")),
        ("", False, ("", "")),
    ],
)
def test_marks_are_found_however_the_text_is_cut(
    text: str, is_open: bool, expected: tuple[str, str]
) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    for cuts in [len(text) + 1, 1, *(rng.randrange(1, 8) for _ in range(10))]:
        pieces = [text[i : i + cuts] for i in range(0, len(text), cuts)]
        assert read(ThinkReader(is_open=is_open), pieces) == expected, cuts


class OpensThoughts(FakeEngine):
    """Its prompts end like those of models whose template opens the thoughts."""

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        return await super().detokenize(token_ids) + "<think>\n"


async def news_of(engine: FakeEngine, params: SamplingParams | None = None) -> list[AnswerNews]:
    answer = read_answer(engine, ASKED, params or SamplingParams(), request_id="r")
    return [news async for news in answer]


def joined(news: list[AnswerNews]) -> tuple[str, str]:
    return "".join(n.pieces[0] for n in news), "".join(n.pieces[1] for n in news)


async def test_a_prompt_may_have_opened_the_thoughts() -> None:
    script = Script(pieces=("Hm", "m.", "</thi", "nk>", "\n", "Yes"))
    assert joined(await news_of(OpensThoughts(script=script))) == ("Hmm.", "Yes")
    assert joined(await news_of(FakeEngine(script=script))) == ("", "Hmm.</think>\nYes")


async def test_an_enforced_form_has_no_thoughts() -> None:
    engine = OpensThoughts(script=Script(pieces=('{"a"', ": 1}")))
    params = SamplingParams(structured_outputs=StructuredOutputsParams(json={"type": "object"}))
    assert joined(await news_of(engine, params)) == ("", '{"a": 1}')


async def test_what_the_model_declares_comes_first() -> None:
    pytest.importorskip("transformers.utils.chat_parsing")
    from transformers.utils.chat_parsing import ResponseParser

    template = {
        "start_anchor": "<assistant>",
        "fields": {"reasoning_content": {"open": "<r>", "close": "</r>"}, "content": {}},
    }
    declared = ToolFormat(new_parser=lambda *_: ResponseParser(template, prefix=""))
    model = make_model_info(tool_format=declared)
    engine = FakeEngine(script=Script(pieces=("<r>H", "m.</", "r>Yes")), model=model)
    assert joined(await news_of(engine)) == ("Hm.", "Yes")
    assert not engine.calls[0].params.skip_special_tokens


async def test_closing_it_aborts_the_request() -> None:
    engine = FakeEngine(script=Script(hold_after=1))
    answer = read_answer(engine, ASKED, SamplingParams(), request_id="r")
    await anext(answer)
    await answer.aclose()
    assert engine.aborted == ["r"]


def delta(output: int) -> TokenDelta:
    return TokenDelta(
        request_id="r",
        index=0,
        text="",
        token_ids=(1,),
        logprobs=None,
        finish_reason=None,
        stop_reason=None,
        num_prompt_tokens=4,
        num_cached_tokens=0,
        num_output_tokens=output,
    )


def test_thoughts_have_their_own_figures_and_are_no_content() -> None:
    turn = Turn("why")
    for count, pieces in enumerate([("\n", ""), ("Hm", ""), (".", ""), ("", "Yes"), ("", ".")], 1):
        turn.take(AnswerNews(delta(count), pieces), 10.0 + count)
    thought = turn.thought
    assert (thought.text, thought.num_tokens, thought.seconds) == ("Hm.", 3, 2.0)
    assert thought.is_over and turn.answer == "Yes."
    assert turn.messages() == [
        {"role": "user", "content": "why"},
        {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm."},
    ]


def test_thoughts_fold_when_the_answer_begins_unless_the_user_chose() -> None:
    thought = Thought()
    rows = ThoughtRows(thought, fold_key="ctrl+t")
    assert rows(40) == []
    thought.take(("one two three\n\x1bfour", ""), num_tokens=1366, seconds=1.84)
    assert [row_text(row).split("  ")[0].rstrip() for row in rows(40)] == [
        "▾ thinking 1.8 s · 1.4k tok",
        "│ one two three",
        "│ ␛four",
    ]
    assert row_text(rows(40)[0]).endswith("ctrl+t")
    thought.take((" five", ""), num_tokens=1367, seconds=1.9)
    assert [row_text(row) for row in rows(10)][1:] == ["│ one two", "│ three", "│ ␛four", "│ five"]
    thought.take(("", "So"), num_tokens=1368, seconds=2.0)
    assert [row_text(row)[:27] for row in rows(40)] == ["▸ thought for 1.9 s · 1.4k "]
    rows.toggle()
    assert len(rows(40)) == 3
    chosen = ThoughtRows(open_thought := Thought(text="a"), fold_key="ctrl+t")
    chosen.toggle()
    assert len(chosen(40)) == 1
    open_thought.is_over = True
    assert len(chosen(40)) == 1
