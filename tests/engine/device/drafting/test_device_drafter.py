"""The number of drafts that a host chooses without seeing any."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from termgen.engine.device.drafting.on_device import DeviceDrafter
from termgen.vocabulary.request import IntArray
from termgen.vocabulary.step import SamplingNeeds, StepPlan, StepResult

_NONE = np.zeros(0, np.int32)
NO_STATE: Any = None
LOOKUP: Any = SimpleNamespace(is_lookup=True)
MODEL: Any = SimpleNamespace(is_lookup=False)
SLOTS = np.arange(4, dtype=np.int32)


def plan_of(drafts: IntArray) -> StepPlan:
    return StepPlan(
        step_id=0,
        slots=SLOTS,
        epochs=SLOTS * 0,
        num_tokens=1 + drafts,
        num_draft_tokens=drafts,
        num_computed=SLOTS * 0,
        num_decode_rows=len(SLOTS),
        released_slots=(),
        added=(),
        block_slots=_NONE,
        block_positions=_NONE,
        block_ids=_NONE,
        sampling=SamplingNeeds(),
        num_drafts=int(drafts.sum()),
    )


def run(drafter: DeviceDrafter, steps: int, chance: float, more_ns: int) -> list[int]:
    """Drafts of each row in every step. Each is right with that chance, and a token more takes
    `more_ns` where the first ones take 1000."""
    rng = np.random.default_rng(5)
    chosen = []
    for _ in range(steps):
        places = drafter.places(plan_of(SLOTS * 0 + 4), NO_STATE, drafter.lengths)
        assert len(set(places.tolist())) == 1
        chosen.append(int(places[0]))
        plan = plan_of(places)
        right = rng.random((len(SLOTS), 1 + chosen[-1])) < chance
        right[:, -1] = False
        kept = 1 + np.cumprod(right, axis=1).sum(axis=1)
        took = 1000 + more_ns * (plan.total_tokens - len(SLOTS))
        result = StepResult(
            step_id=0,
            num_sampled=kept.astype(np.int32),
            token_ids=_NONE,
            logprobs=None,
            started_ns=0,
            ended_ns=took,
            graph_mode="FULL",
        )
        drafter.landed(plan, result)
    return chosen


@pytest.mark.parametrize(
    ("chance", "more_ns", "expected"),
    [(0.9, 10, 4), (0.0, 10, 0), (0.9, 1000, 0), (0.6, 60, 2)],
)
def test_what_pays_is_chosen(chance: float, more_ns: int, expected: int) -> None:
    drafter = DeviceDrafter(LOOKUP, 4, num_slots=4)
    assert list(drafter.lengths) == [2, 4]
    chosen = run(drafter, 400, chance, more_ns)[200:]
    assert max(set(chosen), key=chosen.count) == expected
    if not expected:  # another try costs little
        assert sum(k > 0 for k in chosen) <= 0.2 * len(chosen)


@pytest.mark.parametrize("more_ns", [1, 2, 4])
def test_useless_drafts_that_cost_little_are_rarely_made(more_ns: int) -> None:
    """What drafts are believed to give at least is about what these cost."""
    drafter = DeviceDrafter(LOOKUP, 4, num_slots=4)
    chosen = run(drafter, 3000, 0.0, more_ns)[200:]
    lost = sum(more_ns * len(SLOTS) * k for k in chosen) / (1000 * len(chosen))
    assert lost <= 0.005


@pytest.mark.parametrize("chance", [0.9, 0.0])
def test_drafts_that_take_time_are_made_one_step_ahead(chance: float) -> None:
    """A step before others with drafts makes the first ones, and no other without drafts does."""
    drafter = DeviceDrafter(MODEL, 4, num_slots=4)
    made = []

    def note(plan: StepPlan, result: StepResult) -> None:
        made.append(not drafter.is_idle)
        landed(plan, result)

    landed, drafter.landed = drafter.landed, note  # type: ignore[method-assign]
    chosen = run(drafter, 400, chance, 10)
    assert made[0] or not chosen[0]
    for before, now in itertools.pairwise(zip(made, chosen, strict=True)):
        assert before[0] or not now[1], "no drafts were made for it"
    assert all(is_made for is_made, k in zip(made, chosen, strict=True) if k)
    of_none = [is_made for is_made, k in zip(made, chosen, strict=True) if not k]
    assert (sum(of_none) > 0.1 * len(of_none)) == (chance > 0) or len(of_none) < 20
    assert max(set(chosen[200:]), key=chosen[200:].count) == (4 if chance else 0)


def test_what_takes_time_is_tried_less_often() -> None:
    tries = {}
    for model in (LOOKUP, MODEL):
        chosen = run(DeviceDrafter(model, 4, num_slots=4), 3000, 0.0, 100)[200:]
        tries[model.is_lookup] = sum(k > 0 for k in chosen)
    assert 0 < tries[False] < 0.5 * tries[True]


def test_only_what_the_step_can_have_is_chosen() -> None:
    drafter = DeviceDrafter(LOOKUP, 4, num_slots=4)
    plan = plan_of(SLOTS * 0 + 4)
    run(drafter, 100, 0.9, 10)
    assert drafter.places(plan, NO_STATE, [2, 4]).tolist() == [4] * 4
    assert drafter.places(plan, NO_STATE, [2]).tolist() == [0] * 4, "until it chooses again"
    assert drafter.places(plan_of(SLOTS * 0), NO_STATE, []).tolist() == [0] * 4


def test_a_step_that_failed_is_forgotten_when_a_later_one_lands() -> None:
    drafter = DeviceDrafter(MODEL, 4, num_slots=4)
    drafter._ahead = {3, 5, 8}
    result = StepResult(6, SLOTS * 0 + 1, _NONE, None, started_ns=0, ended_ns=1000)
    prompts = plan_of(SLOTS * 0)._replace(step_id=6, num_decode_rows=0)
    drafter.landed(prompts, result)
    assert drafter._ahead == {8}
