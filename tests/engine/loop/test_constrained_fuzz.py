"""The random traffic of `test_async_fuzz` with grammars, whose masks are sometimes late or slow.

Rerun one seed with `-k "seed-3008"`; TERMGEN_FUZZ_SCHEDULES=5000 runs more of them.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from constrained_harness import ConstrainedDriver, FakeGrammar, FakeMatcher, make_late
from core_harness import Bearer
from test_async_fuzz import NUM_SCHEDULES, SCHEDULES_PER_TEST, Schedule

from termgen.errors import CorruptedLogitsError, RequestError
from termgen.vocabulary.request import FinishReason
from termgen.vocabulary.token_mask import GrammarState, IntArray

NUM_CONSTRAINED = NUM_SCHEDULES // 2
FIRST = 3000
NUM_UNRELIABLE = NUM_SCHEDULES // 6
FIRST_UNRELIABLE = 9000


class ConstrainedSchedule(Schedule):
    """Three of five requests have a grammar."""

    driver: ConstrainedDriver

    def make_driver(self) -> ConstrainedDriver:
        # A recurrent device has no late masks, which most schedules are about.
        if self.setting["depth"] not in (2, 5):
            self.setting["state_places"] = 0
        most = int(np.random.default_rng([self.seed, 11]).choice([0, 2, 5, 16, 16]))
        if self.setting["state_places"]:
            most = min(most, int(self.setting["num_drafts"]))
        self.setting["most_forced"] = most
        driver = ConstrainedDriver(**self.setting)
        on_time, seed = float(self.rng.choice([0.5, 0.9, 1.0])), int(self.rng.integers(1000))
        if driver.executor.waits_for_masks:
            make_late(driver.core, seed, on_time)
        return driver

    def submit(self, name: str, prompt: list[int], **params: Any) -> Bearer:
        if self.rng.random() < 0.4 or "pooling" in params:
            return super().submit(name, prompt, **params)
        length, modulus = int(self.rng.integers(1, 20)), int(self.rng.integers(1, 9))
        grammar = FakeGrammar(length, modulus=modulus, forced=self.draw_forced(length))
        return self.driver.constrain(name, prompt, grammar, **params)

    def draw_forced(self, length: int) -> list[int]:
        """Runs of forced tokens in the answer, of any lengths."""
        rng = np.random.default_rng([self.seed, 12, len(self.driver.bearers)])
        kinds = rng.random(length) < rng.choice([0.0, 0.2, 0.5, 1.0])
        runs = np.repeat(kinds, rng.integers(1, 8, length))[:length]
        return np.flatnonzero(runs).tolist()

    def is_complete(self, bearer: Bearer) -> bool:
        grammar = bearer.request.grammar
        return isinstance(grammar, FakeGrammar) and len(bearer.tokens) >= grammar.length

    def check_computed(self, bearer: Bearer) -> None:
        """Rows with a grammar compute more: one token for each late mask, and one behind a last
        token that only the grammar knows to be the last."""
        if bearer.request.grammar is None:
            super().check_computed(bearer)


@pytest.mark.parametrize(
    "first",
    range(FIRST, FIRST + NUM_CONSTRAINED, SCHEDULES_PER_TEST),
    ids=lambda seed: f"seed-{seed}",
)
def test_random_schedules_with_grammars_give_what_each_request_gives_alone(first: int) -> None:
    seen: Counter[str] = Counter()
    for seed in range(first, first + SCHEDULES_PER_TEST):
        schedule = ConstrainedSchedule(seed)
        print(f"seed={seed} {schedule.setting}")  # pytest shows it when the test fails
        schedule.run()
        schedule.check()
        seen["late"] += schedule.driver.scheduler.stats.num_late_masks
        seen["forced"] += schedule.driver.device.num_forced
        seen["constrained"] += sum(b.request.grammar is not None for b in schedule.driver.bearers)
    assert seen["late"] + seen["forced"] > 0 and seen["constrained"] > 10


class Unreliable(FakeGrammar):
    """Some masks count as slow, whatever their time; one that cannot be filled ends the request."""

    def __init__(self, length: int, *, modulus: int, pace: int, num_masks: int) -> None:
        """pace: one mask in so many is slow. num_masks: their number."""
        super().__init__(length, modulus=modulus)
        self.pace = pace
        self.num_masks = num_masks

    def start(self, *, ends_at_eos: bool) -> UnreliableMatcher:
        return UnreliableMatcher(self)


class UnreliableMatcher(FakeMatcher):
    def __init__(self, grammar: Unreliable) -> None:
        super().__init__(grammar)
        self.grammar = grammar

    def fill(self, bits: IntArray) -> None:
        if len(self.tokens) >= self.grammar.num_masks:
            raise RequestError("the grammar is too complex")
        super().fill(bits)


class UnreliableState(GrammarState):
    """Counts slow masks as its grammar prescribes."""

    def note_time(self, *, is_slow: bool) -> None:
        matcher = self._matcher  # none where the request ended before
        if isinstance(matcher, UnreliableMatcher):
            is_slow = len(matcher.tokens) % matcher.grammar.pace == 0
        super().note_time(is_slow=is_slow)


class UnreliableSchedule(ConstrainedSchedule):
    """Seven of ten requests have an unreliable grammar."""

    def submit(self, name: str, prompt: list[int], **params: Any) -> Bearer:
        rng = self.rng
        if rng.random() < 0.3 or "pooling" in params:
            return self.driver.submit(name, prompt, **params)
        grammar = Unreliable(
            int(rng.integers(1, 20)),
            modulus=int(rng.integers(1, 9)),
            pace=int(rng.choice([1, 3, 50])),
            num_masks=int(rng.choice([0, 1, 4, 99, 99])),
        )
        grammar.forced = frozenset(self.draw_forced(grammar.length))
        return self.driver.constrain(name, prompt, grammar, **params)

    def check_output(self, bearer: Bearer) -> None:
        grammar, failed_steps = bearer.request.grammar, self.driver.executor.fail_steps
        if isinstance(grammar, Unreliable) and bearer.reason is FinishReason.ERROR:
            assert bearer.tokens == self.driver.reference(bearer)[: len(bearer.tokens)]
            assert bearer.ending is not None
            is_corrupt = isinstance(bearer.ending.error, CorruptedLogitsError)
            # Forced tokens before the mask that cannot be filled do not come either.
            num_tokens, most = len(bearer.tokens), grammar.num_masks
            is_due = num_tokens <= most if grammar.forced else num_tokens == most
            assert is_corrupt or failed_steps or is_due
        else:
            super().check_output(bearer)
            if isinstance(grammar, Unreliable) and not grammar.forced:
                assert len(bearer.tokens) <= grammar.num_masks


@pytest.mark.parametrize(
    "first",
    range(FIRST_UNRELIABLE, FIRST_UNRELIABLE + NUM_UNRELIABLE, SCHEDULES_PER_TEST),
    ids=lambda seed: f"seed-{seed}",
)
def test_so_they_do_beside_slow_masks_and_grammars_that_fail(
    first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("termgen.vocabulary.request.GrammarState", UnreliableState)
    endings: Counter[object] = Counter()
    for seed in range(first, first + SCHEDULES_PER_TEST):
        schedule = UnreliableSchedule(seed)
        print(f"seed={seed} {schedule.setting}")
        schedule.run()
        schedule.check()
        endings.update(bearer.reason for bearer in schedule.driver.bearers)
    assert endings[FinishReason.ERROR] > 10 and endings[FinishReason.STOP] > 10
