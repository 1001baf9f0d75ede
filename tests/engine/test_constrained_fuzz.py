"""The random traffic of `test_async_fuzz` with grammars, whose masks are late at times.

Rerun one seed with `-k "seed-3008"`; TERMGEN_FUZZ_SCHEDULES=5000 runs more of them.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from constrained_harness import ConstrainedDriver, FakeGrammar, make_late
from core_harness import Bearer
from test_async_fuzz import NUM_SCHEDULES, SCHEDULES_PER_TEST, Schedule

NUM_CONSTRAINED = NUM_SCHEDULES // 2
FIRST = 3000


class ConstrainedSchedule(Schedule):
    """Three of five requests have a grammar."""

    driver: ConstrainedDriver

    def make_driver(self) -> ConstrainedDriver:
        driver = ConstrainedDriver(**self.setting)
        on_time = float(self.rng.choice([0.5, 0.9, 1.0]))
        self.num_late = make_late(driver.scheduler, self.rng, on_time)
        return driver

    def submit(self, name: str, prompt: list[int], **params: Any) -> Bearer:
        if self.rng.random() < 0.4:
            return super().submit(name, prompt, **params)
        length, modulus = int(self.rng.integers(1, 20)), int(self.rng.integers(1, 9))
        return self.driver.constrain(name, prompt, FakeGrammar(length, modulus=modulus), **params)

    def is_complete(self, bearer: Bearer) -> bool:
        grammar = bearer.request.grammar
        return isinstance(grammar, FakeGrammar) and len(bearer.tokens) >= grammar.length

    def check_computed(self, bearer: Bearer) -> None:
        """Of rows with a grammar more is computed: for each late mask once more, and behind a last
        token that only the grammar knows for the last."""
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
        seen["late"] += sum(schedule.num_late)
        seen["constrained"] += sum(b.request.grammar is not None for b in schedule.driver.bearers)
    assert seen["late"] > 0 and seen["constrained"] > 10
