"""The tokens of an answer: the lens's display, its keys, and the request of a branch."""

from __future__ import annotations

import math
import random
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from fake_engine import Script, render
from rich.cells import cell_len
from test_tui_chat import SIZE, shown
from textual.pilot import Pilot
from tui_harness import MODEL, FrozenApp, TimedEngine, ask, ready, wait_until

from termgen.client import ChatPrompt, Prompt, TokenDelta, TokenLogprob
from termgen.errors import ContextLengthError, RequestError
from termgen.remote.wire import Dialect, build_call
from termgen.tui.chat.chat_screen import ChatScreen
from termgen.tui.chat.lens_rows import LensView, TokenText, lens_rows
from termgen.tui.chat.state.answer_tokens import AnswerTokens
from termgen.tui.chat.state.token_scores import TokenScores, num_drawn
from termgen.tui.chat.token_lens import LensScreen
from termgen.tui.chat.widgets.prompt import Prompt as PromptField
from termgen.tui.paint.canvas import Canvas
from termgen.tui.paint.spans import row_text, row_width
from termgen.vocabulary.request import FinishReason
from termgen.vocabulary.sampling_params import SamplingParams

END = 999
"""The token that ends an answer."""
WORDS = ("The", " step", " time", " is", " bounded", "\n", "今日", "\x1b[2J", "🤝", ".")
SHARES = {" bounded": (0.04, (" short", " long")), ".": (0.3, ("!",))}
"""Probability of these tokens, and likelier alternatives; every other word is nearly certain."""
OTHERS = (" short", " long", "!", " later")


class ScoredEngine(TimedEngine):
    """Knows its words by id, with their probabilities. A prompt is bytes, then words."""

    def __init__(self, words: Sequence[str] = WORDS, **options: Any) -> None:
        super().__init__(script=Script(pieces=words), model=MODEL, **options)
        self.words = {300 + i: word for i, word in enumerate(dict.fromkeys((*words, *OTHERS)))}
        self.ids = {word: token_id for token_id, word in self.words.items()}
        self.refusal: Exception | None = None

    def data(self, token_id: int) -> bytes:
        if token_id == END:
            return b"<|end|>"
        return self.words[token_id].encode() if token_id in self.words else bytes([token_id])

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        return b"".join(map(self.data, token_ids)).decode(errors="replace")

    async def generate(
        self, prompt: Prompt, params: SamplingParams, **options: Any
    ) -> AsyncGenerator[TokenDelta, None]:
        async for delta in super().generate(prompt, params, **options):
            if params.prompt_logprobs is not None:
                if self.refusal is not None:
                    raise self.refusal
                ids = render(prompt)
                yield _news(delta, ids, tuple(map(self._entry, ids)), FinishReason.LENGTH)
                return
            if params.allowed_token_ids is not None:
                ends = params.allowed_token_ids == (END,)
                yield _news(delta, None, None, FinishReason.STOP if ends else FinishReason.LENGTH)
                return
            yield _as_ids(delta, self.ids)

    def _entry(self, token_id: int) -> TokenLogprob:
        word = self.words.get(token_id, "")
        share, likelier = SHARES.get(word, (0.97, ()))
        known = {self.ids[other]: 0.5 - 0.2 * i for i, other in enumerate(likelier)}
        known |= {token_id: share, END: 0.01, self.ids[" later"]: 0.005}
        top = sorted(known.items(), key=lambda each: -each[1])
        return TokenLogprob(
            token_id,
            word,
            self.data(token_id),
            math.log(share),
            1 + [i for i, _ in top].index(token_id),
            tuple((i, "", self.data(i), math.log(p)) for i, p in top),
        )


def _news(
    delta: TokenDelta,
    ids: Sequence[int] | None,
    entries: tuple[TokenLogprob, ...] | None,
    reason: FinishReason,
) -> TokenDelta:
    known = None if ids is None else tuple(ids)
    return TokenDelta(
        delta.request_id, 0, "", (), None, reason, None, 1, 0, 1, known, prompt_logprobs=entries
    )


def _as_ids(delta: TokenDelta, ids: dict[str, int]) -> TokenDelta:
    return replace(delta, token_ids=(ids[delta.text],) if delta.token_ids else ())


def lens_text(app: FrozenApp) -> str:
    assert isinstance(app.screen, LensScreen)
    return app.screen.query_one(Canvas).text


async def open_lens(app: FrozenApp, pilot: Pilot[Any]) -> None:
    await pilot.press("alt+l")
    await wait_until(pilot, lambda: isinstance(app.screen, LensScreen))
    await wait_until(pilot, lambda: "reading the answer" not in lens_text(app))
    await pilot.pause()


def rows(app: FrozenApp) -> list[str]:
    return lens_text(app).split("\n")


@pytest.mark.parametrize("size", [(80, 24), (120, 40)], ids=str)
async def test_it_shows_the_tokens_and_what_else_was_likely(size: tuple[int, int]) -> None:
    engine = ScoredEngine()
    app = FrozenApp(engine)
    async with app.run_test(size=size) as pilot:
        await ready(app, pilot)
        await ask(app, pilot, "q0")
        assert all(call.params.logprobs is None for call in engine.calls)
        await open_lens(app, pilot)
        text = lens_text(app)
        # it begins at the first surprise; nothing reaches the terminal as a control byte
        assert 'token 5 of 10 " bounded"' in text and "p 4.0%" in text and "rank 3" in text
        assert "The step time is bounded↵" in text and "今日␛[2J🤝." in text and "\x1b" not in text
        names = [line for line in rows(app) if '"' in line][1:]
        assert [name.split('"')[1] for name in names] == [
            " short",
            " long",
            " bounded",
            *OTHER_ROWS,
        ]
        assert "50.0%" in names[0] and "30.0%" in names[1] and names[2].startswith("▸●")
        lens = app.screen.query_one("#lens")
        assert (lens.size.height > 20) == (size[0] == 80), "a panel only where there is room"
        await pilot.press("right")
        assert "token 6 of 10" in lens_text(app) and '"↵"' in lens_text(app)
        await pilot.press("shift+right", "end")
        assert "token 10 of 10" in lens_text(app)
        await pilot.press("shift+left")
        assert "token 5 of 10" in lens_text(app)
        await pilot.press("home", "left")
        assert "token 1 of 10" in lens_text(app) and "p 97.0%" in lens_text(app)
        await pilot.press("escape")
        assert isinstance(app.screen, ChatScreen)


OTHER_ROWS = ["<|end|>", " later"]


async def look(pilot: Pilot[Any]) -> None:
    app = pilot.app
    assert isinstance(app, FrozenApp)
    await ready(app, pilot)
    for prompt in app.screen.query(PromptField):
        prompt.cursor_blink = False
    await ask(app, pilot, "Why does chunked prefill help?")
    await open_lens(app, pilot)


@pytest.mark.parametrize("size", [(80, 24), (120, 40)], ids=str)
def test_picture(snap_compare: Callable[..., bool], size: tuple[int, int]) -> None:
    assert snap_compare(FrozenApp(ScoredEngine()), terminal_size=size, run_before=look)


async def test_a_click_goes_to_a_token() -> None:
    app = FrozenApp(ScoredEngine())
    async with app.run_test(size=(80, 24)) as pilot:
        await ready(app, pilot)
        await ask(app, pilot, "q0")
        await open_lens(app, pilot)
        line = next(i for i, row in enumerate(rows(app)) if row.startswith("The step"))
        await pilot.click(Canvas, offset=(5, line))
        assert 'token 2 of 10 " step"' in lens_text(app)


async def test_a_branch_keeps_what_stood_before_and_goes_on() -> None:
    engine = ScoredEngine()
    app = FrozenApp(engine)
    async with app.run_test(size=SIZE) as pilot:
        await ready(app, pilot)
        await ask(app, pilot, "q0")
        prompt_ids = render(engine.calls[0].prompt)
        await open_lens(app, pilot)
        await pilot.press("enter")  # the sampled token
        assert isinstance(app.screen, LensScreen)
        engine._script = Script(pieces=(" later", "!"))
        await pilot.press("up", "b")
        await wait_until(pilot, lambda: isinstance(app.screen, ChatScreen))
        await wait_until(pilot, lambda: not app.chat.is_streaming)
        kept = [engine.ids[word] for word in WORDS[:4]]
        assert engine.calls[-1].prompt == [*prompt_ids, *kept, engine.ids[" long"]]
        assert "The step time is long later!" in shown(app)
        assert "‹2/2›  branched" in shown(app)
        assert "The step time is long later!" == app.chat.conversation.turns[0].answer
        # a branch has tokens of its own to look at
        await open_lens(app, pilot)
        await pilot.press("end", "left", "left")
        assert 'token 5 of 7 " long"' in lens_text(app)
        await pilot.press("escape", "alt+left")
        assert "The step time is bounded" in shown(app) and "‹1/2›" in shown(app)


async def test_the_end_can_be_put_anywhere() -> None:
    engine = ScoredEngine()
    app = FrozenApp(engine)
    async with app.run_test(size=SIZE) as pilot:
        await ready(app, pilot)
        await ask(app, pilot, "q0")
        await open_lens(app, pilot)
        await pilot.press("down", "enter")
        await wait_until(pilot, lambda: isinstance(app.screen, ChatScreen))
        await wait_until(pilot, lambda: not app.chat.is_streaming)
        assert app.chat.conversation.turns[0].answer == "The step time is"
        assert engine.calls[-1].params.allowed_token_ids == (END,), "nothing was asked after it"


async def test_an_answer_of_before_is_looked_at_by_its_text() -> None:
    engine = ScoredEngine()
    app = FrozenApp(engine)
    async with app.run_test(size=SIZE) as pilot:
        await ready(app, pilot)
        await ask(app, pilot, "q0")
        await ask(app, pilot, "q1")
        app.chat.dialogue.tokens.clear()
        await pilot.press("alt+up", "alt+up")
        await open_lens(app, pilot)
        assert f"token 1 of {len(''.join(WORDS).encode()) + 1}" in lens_text(app)
        assert "The step time" in lens_text(app) and "今日" in lens_text(app)
        # in the middle of a character: the next token makes it whole
        await pilot.press("right")
        for _ in range(len(b"The step time is bounded\n") - 1):
            await pilot.press("right")
        assert "<E4>" in lens_text(app)


@pytest.mark.parametrize("by_text", [False, True])
async def test_a_server_elsewhere_cannot(by_text: bool) -> None:
    messages = [{"role": "user", "content": "q0"}, {"role": "assistant", "content": "a"}]
    going_on = ChatPrompt(messages, add_generation_prompt=False, continue_final_message=True)
    asked = going_on if by_text else [1, 2]
    params = SamplingParams(prompt_logprobs=3)
    with pytest.raises(RequestError) as refused:  # as a client of a remote server refuses it
        build_call(asked, params, model="m", dialect=Dialect.OPENAI)
    engine = ScoredEngine()
    engine.refusal = refused.value
    app = FrozenApp(engine)
    async with app.run_test(size=SIZE) as pilot:
        await ready(app, pilot)
        await ask(app, pilot, "q0")
        await open_lens(app, pilot)
        assert "a server elsewhere cannot tell" in lens_text(app)
        await pilot.press("right", "enter", "down", "pagedown", "shift+left", "escape")
        assert isinstance(app.screen, ChatScreen)


async def test_a_branch_that_is_refused_leaves_nothing() -> None:
    engine = ScoredEngine()
    app = FrozenApp(engine)
    async with app.run_test(size=SIZE) as pilot:
        await ready(app, pilot)
        await ask(app, pilot, "q0")
        await open_lens(app, pilot)
        engine._script = Script(raises=ContextLengthError("too long"))
        await pilot.press("up", "enter")
        await wait_until(pilot, lambda: isinstance(app.screen, ChatScreen))
        await wait_until(pilot, lambda: "✗ The context is full" in shown(app))
        assert "‹" not in shown(app) and "is bounded" in shown(app)


async def test_the_command_needs_an_answer() -> None:
    app = FrozenApp(ScoredEngine())
    async with app.run_test(size=SIZE, notifications=True) as pilot:
        await ready(app, pilot)
        app.chat.prompt.insert("/tokens")
        await pilot.press("enter")
        await pilot.pause()
        assert any("no answer" in note.message for note in app._notifications)
        await ask(app, pilot, "q0")
        app.chat.prompt.insert("/tokens")
        await pilot.press("enter")
        await wait_until(pilot, lambda: isinstance(app.screen, LensScreen))


def scores_of(words: Sequence[str], share: float = 0.9) -> TokenScores:
    logprob = math.log(share)
    entries = [
        TokenLogprob(i, w, w.encode(), logprob, 1, ((i, w, w.encode(), logprob),))
        for i, w in enumerate(words)
    ]
    return TokenScores(range(len(words)), 0, entries)


def test_a_frame_costs_what_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    words = [
        rng.choice((" word", "今日は", "\n", "\n\n", "🤝", "x" * 70, "", " a"))
        for _ in range(10_000)
    ]
    scores, width, height = scores_of(words), 40, 24
    text = TokenText(scores.pieces, width)
    asked: list[int] = []
    surprise = TokenScores.surprise
    monkeypatch.setattr(
        TokenScores, "surprise", lambda self, i: asked.append(i) or surprise(self, i)
    )
    view = LensView(scores, SamplingParams(), 100)
    empty = [i for i, word in enumerate(words) if not word]
    for cursor in [0, 9_999, *rng.sample(empty, 50), *(rng.randrange(10_000) for _ in range(50))]:
        view.move(cursor)
        asked.clear()
        frame = lens_rows(view, text, width, height)
        assert len(frame) == height and cursor in asked
        assert len(asked) < 2 * width * height / 2
        assert all(row_width(row) <= width for row in frame)
    seen = "".join(shown for i in range(len(text)) for _, shown in text.row(i))
    assert seen.replace("↵", "\n") == "".join(words)
    assert all(
        sum(cell_len(s) for _, s in text.row(i) if s != "↵") <= width - 2 for i in range(len(text))
    )
    assert all(text.row(text.row_of(i))[-1][0] >= i for i in range(0, 10_000, 97))


def test_surprise_shows_without_colour() -> None:
    entries = [
        TokenLogprob(i, w, w.encode(), math.log(p), 1, ())
        for i, (w, p) in enumerate(zip("abcd", (0.9, 0.3, 0.1, 0.01), strict=True))
    ]
    view = LensView(TokenScores(range(4), 0, entries), SamplingParams(), 100)
    row = lens_rows(view, TokenText("abcd", 40), 40, 12)[1]
    flags = [role.partition("/")[2] for _, role in row]
    assert row_text(row) == "abcd" and flags == ["r", "i", "u", "bu"]
    assert all(a != b for a, b in pairwise(flags))


def test_where_sampling_cuts() -> None:
    """All tokens are given, so the whole distribution decides."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    for _ in range(300):
        raw = sorted((rng.expovariate(0.5) for _ in range(8)), reverse=True)
        shares = [each / sum(raw) for each in raw]
        temperature = rng.choice((0.5, 1.0, 1.7))
        top_p, top_k, min_p = rng.choice((1.0, 0.6)), rng.choice((0, 3)), rng.choice((0.0, 0.2))
        params = SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p)
        heated = [share ** (1 / temperature) for share in shares]
        left = [h for h in heated if h >= min_p * heated[0]][: top_k or None]
        num = next(n for n in range(1, 9) if sum(left[:n]) >= top_p * sum(left) - 1e-12)
        found = num_drawn([math.log(share) for share in shares], params, 8)
        assert (found[0] if found else 8) == num, (shares, params)
    assert num_drawn([-0.5, -2.0], SamplingParams(temperature=0.0), 8) == (1, "temperature 0")
    assert num_drawn([math.log(0.1)] * 3, SamplingParams(top_p=0.5), 50) is None


def test_the_book_forgets_the_oldest() -> None:
    book = AnswerTokens(max_ids=10)
    for name in "abc":
        first = TokenDelta(name, 0, "", (1,), None, None, None, 4, 0, 1, (7, 8, 9))
        book.take(name, first)
        book.take(name, TokenDelta(name, 0, "", (2,), None, None, None, 4, 0, 2))
    assert book.get("a") is None
    written = book.get("c")
    assert written is not None and written.prompt_ids == (7, 8, 9) and written.answer_ids == [1, 2]
    book.take("d", TokenDelta("d", 0, "", (1,), None, None, None, 4, 0, 1))
    assert book.get("d") is None, "without its prompt an answer is no use"
