"""A decode step planned in a few operations is the step that the scheduler plans row by row."""

from __future__ import annotations

import numpy as np
import pytest
from constrained_harness import FakeGrammar
from scheduler_harness import make_request, make_scheduler
from scripted_device import next_token

from termgen.engine import mask_filler
from termgen.engine.scheduler import Scheduler
from termgen.engine.step import StepPlan, StepResult
from termgen.engine.token_mask import GrammarState


def assert_same_plan(one: StepPlan, two: StepPlan) -> None:
    for name in StepPlan._fields:
        a, b = getattr(one, name), getattr(two, name)
        if isinstance(a, np.ndarray):
            assert a.dtype == b.dtype and a.tolist() == b.tolist(), name
        elif name == "added":
            assert [(row.slot, row.epoch) for row in a] == [(row.slot, row.epoch) for row in b]
        elif name == "masks":
            assert (a is None) == (b is None)
            assert a is None or a.rows.tolist() == b.rows.tolist()
            assert a is None or a.bits.tolist() == b.bits.tolist()
        else:
            assert a == b, name


def assert_same_state(one: Scheduler, two: Scheduler) -> None:
    a, b = one.slots, two.slots
    assert a.facts.tolist() == b.facts.tolist()
    assert a.last_step.tolist() == b.last_step.tolist() and a.running.tolist() == b.running.tolist()
    assert one.kv.num_registered.tolist() == two.kv.num_registered.tolist()
    assert one.kv.block_table.tolist() == two.kv.block_table.tolist()
    assert one.stats == two.stats
    assert one.kv.pool.num_cached == two.kv.pool.num_cached


def result_of(plan: StepPlan, samples: np.ndarray) -> StepResult:
    """A token that depends on its place for each row that is to sample one."""
    places = zip(plan.slots.tolist(), (plan.num_computed + plan.num_tokens).tolist(), strict=True)
    tokens = np.asarray([next_token(np.asarray(place)) for place in places], np.int32)
    if plan.masks is not None:
        for row, bits in zip(plan.masks.rows.tolist(), plan.masks.bits, strict=True):
            allowed = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little"))
            tokens[row] = allowed[tokens[row] % len(allowed)]
    return StepResult(
        plan.step_id, samples.astype(np.int32), tokens[samples], None, started_ns=0, ended_ns=0
    )


@pytest.mark.parametrize("seed", range(12))
def test_both_ways_of_planning_agree_at_every_step(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned, _ = compare(seed, monkeypatch)
    assert any(planned) and not all(planned)


def test_they_agree_beside_rows_under_a_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    beside = [compare(seed, monkeypatch, grammars=0.3)[1] for seed in range(20, 32)]
    assert sum(beside) > 50, "the quick way is hardly tried"


def compare(
    seed: int, monkeypatch: pytest.MonkeyPatch, *, grammars: float = 0.0
) -> tuple[list[bool], int]:
    """Whether each step was planned the quick way, and how many of those beside a row under a
    grammar. grammars: the share of requests that have one. Their masks miss no step here."""
    rng = np.random.default_rng(seed)
    settings = {
        "num_blocks": int(rng.choice([24, 60, 300])),
        "block_size": int(rng.choice([1, 4, 16])),
        "max_num_seqs": int(rng.integers(1, 8)),
        "max_num_batched_tokens": int(rng.choice([8, 100])),
        "caching": bool(rng.random() < 0.7),
    }
    print(f"seed {seed} {settings}")
    quick, slow = make_scheduler(**settings), make_scheduler(**settings)
    monkeypatch.setattr(mask_filler, "SLOW_S", 1000.0)
    for scheduler in (quick, slow):
        scheduler.constraints.patience_s = scheduler.constraints.idle_patience_s = 10.0
    num_beside = 0
    real, planned = quick._decode_step.plan, []

    def counted(step_id: int, released: tuple[int, ...]) -> StepPlan | None:
        plan = real(step_id, released)
        planned.append(plan is not None)
        nonlocal num_beside
        num_beside += plan is not None and quick.slots.num_constrained > 0
        return plan

    monkeypatch.setattr(quick._decode_step, "plan", counted)
    monkeypatch.setattr(slow._decode_step, "plan", lambda step_id, released: None)
    in_flight: list[tuple[StepPlan, StepPlan, StepResult]] = []
    for turn in range(150):
        if rng.random() < 0.3 and len(quick.requests) < 12:
            room = min(100, quick.kv.capacity_tokens)
            prompt = rng.integers(0, 40, int(rng.integers(1, max(2, room // 3)))).tolist()
            stops = tuple(rng.choice(40, int(rng.choice([0, 1, 12])), replace=False).tolist())
            wanted = {
                "max_tokens": int(rng.integers(1, max(2, room // 3))),
                "stop": stops,
                "logprobs": 1 if rng.random() < 0.1 else None,
                "temperature": float(rng.choice([0.0, 1.0])),
            }
            length = int(rng.integers(1, 20)) if rng.random() < grammars else 0
            for scheduler in (quick, slow):
                request = make_request(f"r{turn}", prompt, **wanted)
                if length:
                    request.grammar = GrammarState(FakeGrammar(length), ends_at_eos=True)
                scheduler.add_request(request)
        before = quick.slots.num_pending.copy()
        plans = quick.schedule(), slow.schedule()
        assert (plans[0] is None) == (plans[1] is None)
        if plans[0] is not None and plans[1] is not None:
            assert_same_plan(plans[0], plans[1])
            before[[row.slot for row in plans[0].added]] = 0
            samples = (quick.slots.num_pending > before)[plans[0].slots]
            in_flight.append((*plans, result_of(plans[0], samples)))
        if in_flight and (plans[0] is None or rng.random() < 0.8):
            ours, theirs, result = in_flight.pop(0)
            applied = quick.apply(ours, result), slow.apply(theirs, result)
            assert applied[0].token_ids.tolist() == applied[1].token_ids.tolist()
            assert applied[0].rows.tolist() == applied[1].rows.tolist()
            assert applied[0].finished == applied[1].finished
        assert_same_state(quick, slow)
        quick.check_integrity()
    return planned, num_beside
