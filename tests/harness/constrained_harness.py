"""Grammars without a grammar engine, and the scripted device that samples under their masks.

`FakeGrammar` allows a token by a rule over the tokens before it and ends after a fixed number. The
device reads nothing but the masks of steps, so a mask that is late, lost, or another row's shows as
a wrong token.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
from core_harness import Bearer, CoreDriver
from scripted_device import VOCAB, ScriptedDevice, next_token

from termgen.engine.schedule.scheduler import Scheduler
from termgen.engine.schedule.slot_table import SlotTable
from termgen.vocabulary.request import GenerationRequest, Request
from termgen.vocabulary.sampling_params import SamplingParams
from termgen.vocabulary.step import CORRUPT_TOKEN, StepPlan, StepResult
from termgen.vocabulary.token_mask import IntArray, RowMasks, TokenMatcher, faults_of


class FakeGrammar:
    """A `TokenGrammar` over `vocab` tokens."""

    is_slow = False

    def __init__(self, length: int, *, vocab: int = VOCAB, modulus: int = 3) -> None:
        self.length = length
        self.vocab = vocab
        self.modulus = modulus
        self.may_fill = threading.Event()
        self.may_fill.set()

    def allowed(self, tokens: Sequence[int]) -> list[int]:
        """Tokens that may follow these tokens of the answer."""
        first = (sum(tokens) + len(tokens)) % self.modulus  # differs at each position
        return list(range(first, self.vocab, self.modulus))

    def start(self, *, ends_at_eos: bool) -> FakeMatcher:
        return FakeMatcher(self)


def fill_each(matchers: Sequence[TokenMatcher], bits: IntArray) -> list[BaseException | None]:
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

    def fill(self, bits: IntArray) -> None:
        assert self._grammar.may_fill.wait(20)
        bits[:] = 0
        for token in self._grammar.allowed(self.tokens):
            bits.view(np.uint32)[token // 32] |= np.uint32(1 << token % 32)


def choose(tokens: np.ndarray, allowed: Sequence[int]) -> int:
    """The scripted model's choice after these tokens among the allowed ones."""
    return allowed[next_token(tokens) % len(allowed)]


class MaskedDevice(ScriptedDevice):
    """Samples under the masks of the step it runs."""

    _allowed: dict[int, list[int]] = {}

    def execute(
        self, plan: StepPlan, *, fails: bool = False, masks: RowMasks | None = None
    ) -> StepResult:
        self._allowed = {}
        if masks is not None:
            slots = plan.slots[masks.rows].tolist()
            for slot, bits in zip(slots, masks.bits, strict=True):
                flags = np.unpackbits(bits.view(np.uint8), bitorder="little")
                self._allowed[slot] = np.flatnonzero(flags).tolist()
        return super().execute(plan, fails=fails, masks=masks)

    def _sample(self, slot: int) -> int | None:
        row, length = self.rows[slot], int(self.num_tokens[slot])
        token = super()._sample(slot)
        if token == CORRUPT_TOKEN:
            return token
        if token is None or row is None or not row.has_grammar:
            assert token is None or slot not in self._allowed
            return token
        token = self._allowed[slot][token % len(self._allowed[slot])]
        if length < row.max_total_tokens:
            self.token_ids[slot, length] = token
        if self.stops:  # without its mask, the row repeated the token before
            minimum = row.num_prompt_tokens + row.params.min_tokens
            is_stop = token in row.stop_token_ids and length + 1 > minimum
            self.finished[slot] = is_stop or length + 1 >= row.max_total_tokens
        return token


def names_ahead(scheduler: Scheduler) -> set[str]:
    """Requests with a token in flight: their masks can be late from the next step on."""
    table = scheduler.slots
    slots = table.running[table.num_pending[table.running] > 0].tolist()
    return {table.request_at(slot).request_id for slot in slots}


class ConstrainedDriver(CoreDriver):
    """A core driver whose requests may have a grammar."""

    def __init__(self, **settings: object) -> None:
        super().__init__(**settings)  # type: ignore[arg-type]
        # A busy machine changes no plan; tests of late masks are less patient.
        self.scheduler.constraints.patience_s = self.scheduler.constraints.idle_patience_s = 10.0
        old = self.executor.device
        self.executor.device = MaskedDevice(
            num_blocks=len(old.kv_tokens) // old.block_size,
            block_size=old.block_size,
            max_num_seqs=len(old.rows),
            max_model_len=old.token_ids.shape[1],
            stops=old.stops,
        )

    def constrain(
        self,
        name: str,
        prompt: Sequence[int],
        grammar: FakeGrammar,
        *,
        bad: tuple[tuple[int, ...], ...] = (),
        priority: int = 0,
        salt: str | None = None,
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


def make_late(scheduler: Scheduler, rng: np.random.Generator, on_time: float) -> list[int]:
    """Deliver this share of the masks that a step waits for. Returns a list with a one for each
    late mask."""
    constraints, num_late = scheduler.constraints, list[int]()
    has_mask, masks_for = constraints._has_mask, constraints.masks_for
    schedule = scheduler.schedule
    is_sampling, ahead = False, set[str]()

    def noting_who_is_ahead(now_ns: int = 0) -> StepPlan | None:
        nonlocal ahead
        ahead = names_ahead(scheduler)
        return schedule(now_ns)

    def unreliable(request: Request) -> bool:
        if not has_mask(request):
            return False
        may_be_late = is_sampling and request.request_id in ahead
        if may_be_late and rng.random() > on_time:
            num_late.append(1)  # rows that have ended count as late but need no mask
            return False
        return True

    def noting(table: SlotTable, plan: StepPlan, *, runs_until_s: float = 0.0) -> RowMasks | None:
        nonlocal is_sampling
        is_sampling = True
        masks = masks_for(table, plan, runs_until_s=runs_until_s)
        is_sampling = False
        return masks

    scheduler.schedule = noting_who_is_ahead  # type: ignore[method-assign]
    constraints._has_mask = unreliable  # type: ignore[method-assign]
    constraints.masks_for = noting  # type: ignore[method-assign]
    return num_late
