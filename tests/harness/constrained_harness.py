"""Grammars without a grammar engine, and the scripted device that samples under their masks.

`FakeGrammar` allows a token by a rule over the tokens before it and ends after a fixed number. The
device reads nothing but the masks of steps, so a mask that is late, lost, or another row's shows as
a wrong token.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Collection, Sequence
from itertools import repeat
from typing import Any, NamedTuple

import numpy as np
from core_harness import Bearer, CoreDriver
from scripted_device import VOCAB, ScriptedDevice, next_token

from termgen.engine.loop.core import EngineCore
from termgen.engine.schedule.slot_table import SlotTable
from termgen.vocabulary.request import GenerationRequest, TurnEnds
from termgen.vocabulary.sampling_params import SamplingParams
from termgen.vocabulary.step import CORRUPT_TOKEN, StepPlan
from termgen.vocabulary.token_mask import (
    WITHHELD,
    IntArray,
    TokenMatcher,
    faults_of,
)


class FakeGrammar:
    """A `TokenGrammar` over `vocab` tokens."""

    is_slow = False
    check = None

    def __init__(
        self,
        length: int,
        *,
        vocab: int = VOCAB,
        modulus: int = 3,
        forced: Collection[int] = (),
    ) -> None:
        """forced: indices, in the answer, of tokens that have no alternative."""
        self.length = length
        self.vocab = vocab
        self.modulus = modulus
        self.forced = frozenset(forced)
        self.may_fill = threading.Event()
        self.may_fill.set()

    def allowed(self, tokens: Sequence[int]) -> list[int]:
        """Tokens that may follow these tokens of the answer."""
        if len(tokens) in self.forced:
            return [(7 * sum(tokens) + len(tokens)) % self.vocab]
        first = (sum(tokens) + len(tokens)) % self.modulus  # differs at each position
        return list(range(first, self.vocab, self.modulus))

    def start(self, *, ends_at_eos: bool) -> FakeMatcher:
        return FakeMatcher(self)


def fill_each(
    matchers: Sequence[TokenMatcher], bits: IntArray, *, in_this_thread: bool = True
) -> list[BaseException | None]:
    """`TokenMatcher.fill_all` for matchers without a batched version."""
    return faults_of(lambda matcher, mask: matcher.fill(mask), matchers, bits)


class FakeMatcher:
    def __init__(self, grammar: FakeGrammar) -> None:
        self._grammar = grammar
        self.num_words = -(-grammar.vocab // 32)
        self.tokens: list[int] = []
        self.is_broken = False

    def accept(self, token_id: int) -> bool:
        self.is_broken |= self.is_ended or token_id not in self._grammar.allowed(self.tokens)
        self.tokens.append(token_id)
        return not self.is_broken

    @property
    def is_ended(self) -> bool:
        return len(self.tokens) >= self._grammar.length

    fill_all = staticmethod(fill_each)

    def take_forced(self, most: int) -> list[int]:
        tokens: list[int] = []
        while len(tokens) < most and not self.is_ended and len(self.tokens) in self._grammar.forced:
            tokens += self._grammar.allowed(self.tokens)
            assert self.accept(tokens[-1])
        return tokens

    def fill(self, bits: IntArray) -> None:
        assert self._grammar.may_fill.wait(20)
        bits[:] = 0
        for token in self._grammar.allowed(self.tokens):
            bits.view(np.uint32)[token // 32] |= np.uint32(1 << token % 32)


def choose(tokens: np.ndarray, allowed: Sequence[int]) -> int:
    """The scripted model's choice after these tokens among the allowed ones."""
    return allowed[next_token(tokens) % len(allowed)]


class Posted(NamedTuple):
    position: int
    mask: IntArray
    forced: tuple[int, ...] = ()

    def covers(self, first: int, last: int) -> bool:
        return 0 <= self.position <= first and last <= self.position + len(self.forced)

    def allowed(self, position: int) -> list[int]:
        if position < self.position + len(self.forced):
            return [self.forced[position - self.position]]
        return np.flatnonzero(np.unpackbits(self.mask.view(np.uint8), bitorder="little")).tolist()


class MaskedDevice(ScriptedDevice):
    """Samples under the masks posted for the positions of its rows, for which it waits."""

    patience_s = 10.0
    """A busy machine changes no step; tests of late masks are less patient."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._posted: dict[int, Posted] = {}
        """The newest of each slot."""
        self._masks: dict[int, Posted] = {}
        """Those that the rows of a step sample under, by slot."""
        self.num_forced = 0
        """Drafts that a grammar has forced."""
        self._news = threading.Condition()

    def post_masks(
        self,
        slots: IntArray,
        positions: IntArray,
        bits: IntArray,
        forced: Sequence[Sequence[int]] | None = None,
    ) -> None:
        rows = zip(slots.tolist(), positions.tolist(), bits, forced or repeat(()), strict=False)
        with self._news:
            for slot, position, mask, tokens in rows:
                assert mask.any(), "a row under this mask has no token to sample"
                assert len(tokens) <= self.most_forced
                self._posted[slot] = Posted(position, mask.copy(), tuple(tokens))
            self._news.notify_all()

    def withhold_masks(self, slots: IntArray) -> None:
        with self._news:
            for slot in slots.tolist():
                self._posted[slot] = Posted(WITHHELD, np.zeros(0, np.int32))
            self._news.notify_all()

    def _cut(self, plan: StepPlan) -> StepPlan:
        """Forced tokens are the drafts of rows with a grammar: as many as are posted for places
        behind the row's own."""
        plan = super()._cut(plan)
        most = plan.num_draft_tokens.copy()
        for i in np.flatnonzero(most).tolist():
            slot = int(plan.slots[i])
            row, length = self.rows[slot], int(self.num_tokens[slot])
            if row is None or not row.has_grammar:
                continue
            with self._news:
                posted = self._posted[slot]
            first = length - posted.position
            tokens = posted.forced[first:] if posted.position >= 0 <= first else ()
            tokens = tokens[: int(most[i])]
            most[i] = len(tokens)
            self.num_forced += len(tokens)
            self.token_ids[slot, length : length + len(tokens)] = tokens
        return plan if (most == plan.num_draft_tokens).all() else plan.with_drafts(most)

    def _mask(self, slot: int, first: int, last: int) -> Posted | None:
        """What is posted for a row's tokens from `first` to `last`; None if it is late."""

        def is_there() -> bool:
            posted = self._posted.get(slot)
            return posted is not None and (posted.covers(first, last) or posted.position < 0)

        with self._news:
            if not self._news.wait_for(is_there, self.patience_s):
                return None
            posted = self._posted[slot]
        return posted if posted.covers(first, last) else None

    def _sample(self, slot: int, num_drafts: int) -> list[int | None]:
        row, length = self.rows[slot], int(self.num_tokens[slot])
        assert row is not None
        self._masks.pop(slot, None)
        if row.has_grammar and not self.finished[slot] and self.num_computed[slot] >= length:
            posted = self._mask(slot, length, length + num_drafts)
            if posted is None:
                self.num_computed[slot] -= 1 + num_drafts
                return [None]
            self._masks[slot] = posted
        return super()._sample(slot, num_drafts)

    def _guess(self, slot: int) -> None:
        row = self.rows[slot]
        if row is not None and not row.has_grammar:
            super()._guess(slot)

    def _draw(self, slot: int) -> int:
        length = int(self.num_tokens[slot])
        token, posted, row = super()._draw(slot), self._masks.get(slot), self.rows[slot]
        assert row is not None
        if posted is None or token == CORRUPT_TOKEN:
            return token
        allowed = posted.allowed(length)
        token = int(allowed[token % len(allowed)])
        if length < row.max_total_tokens:
            self.token_ids[slot, length] = token
        if self.stops:
            minimum = row.num_prompt_tokens + row.params.min_tokens
            is_stop = token in row.stop_token_ids and length + 1 > minimum
            self.finished[slot] = is_stop or length + 1 >= row.max_total_tokens
        return token


class ConstrainedDriver(CoreDriver):
    """A core driver whose requests may have a grammar."""

    def __init__(self, **settings: object) -> None:
        super().__init__(**settings)  # type: ignore[arg-type]
        # A busy machine changes no plan; tests of late masks are less patient.
        self.scheduler.constraints.patience_s = self.scheduler.constraints.idle_patience_s = 10.0
        old = self.executor.device
        self.device = self.executor.device = MaskedDevice(
            num_blocks=len(old.kv_tokens) // old.block_size,
            num_drafts=old.num_drafts,
            block_size=old.block_size,
            max_num_seqs=len(old.rows),
            max_model_len=old.token_ids.shape[1],
            stops=old.stops,
            windows=old.windows,
            state_places=old.state_places,
        )
        self.device.most_forced = self.scheduler.config.most_forced

    def constrain(
        self,
        name: str,
        prompt: Sequence[int],
        grammar: FakeGrammar,
        *,
        bad: tuple[tuple[int, ...], ...] = (),
        priority: int = 0,
        salt: str | None = None,
        turn_ends: TurnEnds | None = None,
        **params: object,
    ) -> Bearer:
        """bad: a token that the device should leave out, and does not."""
        request = GenerationRequest(
            request_id=name,
            prompt_token_ids=tuple(prompt),
            params=SamplingParams(**params),  # type: ignore[arg-type]
            grammar=grammar,
            bad_token_ids=bad,
            priority=priority,
            cache_salt=salt,
            turn_ends=turn_ends or TurnEnds(),
        )
        bearer = self._by_name[name] = Bearer(request)
        self.bearers.append(bearer)
        self.core.submit(request, len(self.bearers))
        return bearer

    def reference(self, bearer: Bearer) -> list[int]:
        grammar, params = bearer.request.grammar, bearer.request.params
        if not isinstance(grammar, FakeGrammar):
            return super().reference(bearer)
        prompt, answer = list(bearer.request.prompt_token_ids), list[int]()
        most = min(self.max_model_len - len(prompt), params.max_tokens or self.max_model_len)
        stops = {*params.stop_token_ids} | (set() if params.ignore_eos else {self.eos})
        while len(answer) < min(most, grammar.length):
            known = np.asarray(prompt + answer)
            answer.append(choose(known, grammar.allowed(answer)))
            if answer[-1] in stops and len(answer) > params.min_tokens:
                break
        return answer


def make_late(core: EngineCore, seed: int, on_time: float) -> None:
    """Let this share of the masks that threads post come in time. Others come when a step has ended
    without them; the scheduler counts those."""
    constraints, executor = core.scheduler.constraints, core.executor
    post, withhold, note_late = executor.post_masks, executor.withhold_masks, constraints.note_late
    lock = threading.Lock()
    deferred: dict[int, tuple[IntArray, IntArray, IntArray, list[Sequence[int]]]] = {}

    def post_some(
        slots: IntArray,
        positions: IntArray,
        bits: IntArray,
        forced: Sequence[Sequence[int]] | None = None,
    ) -> None:
        by_thread = threading.current_thread().name.startswith("termgen-")
        for i, place in enumerate(zip(slots.tolist(), positions.tolist(), strict=True)):
            tokens = [forced[i] if forced else ()]
            one = slots[i : i + 1], positions[i : i + 1], bits[i : i + 1].copy(), tokens
            luck = zlib.crc32(repr((seed, place)).encode()) / 2**32
            with lock:
                if by_thread and luck > on_time:
                    deferred[place[0]] = one
                    withhold(one[0])
                else:
                    deferred.pop(place[0], None)
                    post(*one)

    def withhold_all(slots: IntArray) -> None:
        with lock:
            for slot in slots.tolist():
                deferred.pop(slot, None)
            withhold(slots)

    def note_and_post(table: SlotTable, slots: IntArray) -> None:
        note_late(table, slots)
        with lock:
            for slot in slots.tolist():
                if slot in deferred:
                    post(*deferred.pop(slot))

    executor.post_masks = post_some  # type: ignore[method-assign]
    executor.withhold_masks = withhold_all  # type: ignore[method-assign]
    constraints.note_late = note_and_post  # type: ignore[method-assign]
