"""The fast plan of a decode step equals the plan that the scheduler makes row by row."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from constrained_harness import FakeGrammar
from scheduler_harness import make_request, make_scheduler
from scripted_device import next_token

from termgen.engine.grammar import mask_filler
from termgen.engine.schedule.constraints import grammar_of
from termgen.engine.schedule.invariants import check_scheduler
from termgen.engine.schedule.scheduler import Scheduler
from termgen.vocabulary.step import StepPlan, StepResult
from termgen.vocabulary.token_mask import GrammarState


def assert_same_plan(one: StepPlan, two: StepPlan) -> None:
    for name in StepPlan._fields:
        a, b = getattr(one, name), getattr(two, name)
        if isinstance(a, np.ndarray):
            assert a.dtype == b.dtype and a.tolist() == b.tolist(), name
        elif name == "added":
            assert [(row.slot, row.epoch) for row in a] == [(row.slot, row.epoch) for row in b]
        else:
            assert a == b, name


def assert_same_state(one: Scheduler, two: Scheduler) -> None:
    a, b = one.slots, two.slots
    assert a.facts.tolist() == b.facts.tolist()
    assert a.last_step.tolist() == b.last_step.tolist() and a.running.tolist() == b.running.tolist()
    assert one.kv.num_registered.tolist() == two.kv.num_registered.tolist()
    assert one.kv.block_tables.tolist() == two.kv.block_tables.tolist()
    assert one.stats == two.stats
    assert one.kv.pool.num_cached == two.kv.pool.num_cached


def accepted(
    plan: StepPlan, samples: np.ndarray, scheduler: Scheduler, rng: np.random.Generator
) -> StepResult:
    """The result of a step with drafts: any number of them stays, up to the end of the request."""
    table, kept = scheduler.slots, []
    for row, (slot, num_drafts) in enumerate(zip(plan.slots, plan.num_draft_tokens, strict=True)):
        tokens: list[int] = []
        if samples[row] and table.epoch[slot] == plan.epochs[row]:
            request, length = table.request_at(int(slot)), int(table.num_tokens[slot])
            for place in range(length, length + 1 + int(rng.integers(0, num_drafts + 1))):
                tokens.append(next_token(np.asarray([slot, place])))
                if tokens[-1] in request.stop_token_ids or place + 1 == request.max_total_tokens:
                    break
        kept.append(tokens)
    flat = np.asarray([token for tokens in kept for token in tokens], np.int32)
    counts = np.asarray([len(tokens) for tokens in kept], np.int32)
    return StepResult(plan.step_id, counts, flat, None, started_ns=0, ended_ns=0)


def result_of(
    plan: StepPlan, samples: np.ndarray, scheduler: Scheduler, late: np.ndarray
) -> StepResult:
    """Each row that samples gets a token that depends on its position, and on its mask. late: rows
    whose masks do not come in time."""
    places = zip(plan.slots.tolist(), (plan.num_computed + plan.num_tokens).tolist(), strict=True)
    tokens = np.asarray([next_token(np.asarray(place)) for place in places], np.int32)
    table = scheduler.slots
    for row in () if plan.constrained is None else plan.constrained.tolist():
        slot = int(plan.slots[row])
        if table.epoch[slot] != plan.epochs[row]:
            continue
        grammar = grammar_of(table.request_at(slot))
        allowed = np.flatnonzero(np.unpackbits(grammar.mask.view(np.uint8), bitorder="little"))
        tokens[row] = allowed[tokens[row] % len(allowed)]
        samples[row] &= not late[row]
    return StepResult(
        plan.step_id, samples.astype(np.int32), tokens[samples], None, started_ns=0, ended_ns=0
    )


@pytest.mark.parametrize("seed", range(12))
def test_both_ways_of_planning_agree_at_every_step(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned, _ = compare(seed, monkeypatch)
    assert any(planned) and not all(planned)


@pytest.mark.parametrize("num_drafts", [1, 5])
def test_they_agree_on_drafts(num_drafts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    planned = [compare(seed, monkeypatch, num_drafts=num_drafts)[0] for seed in range(40, 46)]
    assert all(any(ways) and not all(ways) for ways in planned)


def test_they_agree_beside_rows_under_a_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    beside = [compare(seed, monkeypatch, grammars=0.3)[1] for seed in range(20, 32)]
    assert sum(beside) > 50, "the quick way is hardly tried"


@dataclass(eq=False)
class InFlight:
    plans: tuple[StepPlan, StepPlan]
    samples: np.ndarray
    """The rows that sample."""
    late: np.ndarray
    """The rows whose masks are late, if they need one."""


class Pair:
    """Two schedulers that get the same calls."""

    def __init__(self, quick: Scheduler, slow: Scheduler, rng: np.random.Generator) -> None:
        self.quick, self.slow, self.rng = quick, slow, rng
        self.in_flight: list[InFlight] = []

    def schedule(self) -> bool:
        before = self.quick.slots.num_pending.copy()
        ours, theirs = self.quick.schedule(), self.slow.schedule()
        assert (ours is None) == (theirs is None)
        if ours is None or theirs is None:
            return False
        assert_same_plan(ours, theirs)
        before[[row.slot for row in ours.added]] = 0
        samples = (self.quick.slots.num_pending > before)[ours.slots]
        is_late = (before[ours.slots] > 0) & (self.rng.random(ours.num_rows) < 0.1)
        self.in_flight.append(InFlight((ours, theirs), samples, is_late))
        return True

    def land(self) -> None:
        step = self.in_flight.pop(0)
        for scheduler in (self.quick, self.slow):
            states = [request.grammar for request in scheduler.requests.values()]
            scheduler.constraints._filler.wait(filter(None, states), 10.0)
        if self.quick.config.num_speculative_tokens:
            result = accepted(step.plans[0], step.samples, self.quick, self.rng)
        else:
            result = result_of(step.plans[0], step.samples, self.quick, step.late)
        one = self.quick.apply(step.plans[0], result)
        two = self.slow.apply(step.plans[1], result)
        assert one.token_ids.tolist() == two.token_ids.tolist()
        assert one.samples.tolist() == two.samples.tolist()
        assert one.finished == two.finished


def compare(
    seed: int, monkeypatch: pytest.MonkeyPatch, *, grammars: float = 0.0, num_drafts: int = 0
) -> tuple[list[bool], int]:
    """Compare both plans of each step. Returns for each whether the fast path planned it, and how
    many of those had a row under a grammar. grammars: the share of requests that have one. No mask
    counts as slow here."""
    rng = np.random.default_rng(seed)
    settings = {
        "num_blocks": int(rng.choice([24, 60, 300])),
        "block_size": int(rng.choice([1, 4, 16])),
        "max_num_seqs": int(rng.integers(1, 8)),
        "max_num_batched_tokens": int(rng.choice([8, 100])),
        "caching": bool(rng.random() < 0.7),
        "num_drafts": num_drafts,
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
    pair = Pair(quick, slow, rng)
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
        was_planned = pair.schedule()
        if pair.in_flight and (not was_planned or rng.random() < 0.8):
            pair.land()
        assert_same_state(quick, slow)
        check_scheduler(quick)
    return planned, num_beside
