"""Drafts are made where they pay: few for rows that they seldom fit, none where steps are dear."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from termgen.engine.device.drafting.payoff import PRIOR, DraftPayoff

MS = 1_000_000


def payoff(times: dict[int, float], rows: dict[int, tuple[int, int]] | None = None) -> DraftPayoff:
    """times: milliseconds by tokens; rows: (right, checked) by slot, as often as it takes."""
    made = DraftPayoff(8)
    for _ in range(40):
        for num_tokens, ms in times.items():
            made.note_step(num_tokens, int(ms * MS))
        for slot, (right, drafts) in (rows or {}).items():
            made.note_row(slot, drafts, right)
    return made


def choose(made: DraftPayoff, found: list[int], num_rows: int | None = None) -> list[int]:
    slots, kinds = np.arange(len(found), dtype=np.int32), np.zeros(len(found), np.int64)
    num_rows = len(found) if num_rows is None else num_rows
    counts = made.choose(slots, np.asarray(found), kinds, num_rows)
    assert len(counts) == len(found) and (counts <= found).all() and (counts >= 0).all()
    return counts.tolist()


FLAT = {1: 10.0, 2: 10.6, 5: 12.0, 9: 14.0}
STEEP = {1: 10.0, 2: 20.0, 5: 50.0, 9: 90.0}


def test_right_drafts_pay_where_a_token_more_costs_little() -> None:
    assert choose(payoff(FLAT, {0: (8, 8)}), [8]) == [8]
    assert choose(payoff(FLAT, {0: (0, 8)}), [8]) == [0]


def test_nothing_pays_where_every_token_costs_a_step() -> None:
    assert choose(payoff(STEEP, {0: (8, 8)}), [8]) == [0]


def test_rows_that_they_fit_get_more_than_others() -> None:
    counts = choose(
        payoff({3: 11.0, 6: 12.5, 12: 15.5}, {0: (4, 4), 1: (0, 4), 2: (1, 4)}), [6] * 3
    )
    assert counts[0] == 6 and counts[1] == 0 <= counts[2] < 6


def test_kinds_of_drafts_are_told_apart() -> None:
    made = DraftPayoff(2, num_kinds=2)
    for _ in range(40):
        for num_tokens, ms in FLAT.items():
            made.note_step(num_tokens, int(ms * MS))
        made.note_row(0, 4, 4, kind=1)
        made.note_row(0, 4, 0, kind=0)
    slots, found = np.asarray([0], np.int32), np.asarray([4])
    for kind, expected in ((0, 0), (1, 4)):
        assert made.choose(slots, found, np.asarray([kind]), 1).tolist() == [expected]


def test_a_new_request_begins_with_the_prior() -> None:
    made = payoff(FLAT, {0: (0, 8)})
    assert choose(made, [4]) == [0]
    made.begin(0)
    assert made.share_right(np.asarray([0]), np.asarray([0]))[0] == PRIOR
    assert choose(made, [4])[0] > 0


def test_a_row_without_drafts_is_tried_again_after_a_while() -> None:
    made = payoff(FLAT)
    tried: list[int] = []
    for step in range(2000):
        (count,) = choose(made, [8])
        made.note_row(0, count, 0)  # never right
        if count:
            tried.append(step)
    steps = np.diff(tried[12:])
    assert len(steps) > 100 and steps.min() >= 5, "useless drafts are rare, but come"


SMALL_MODEL = {1: 16.8, 2: 24.4, 3: 28.8, 5: 30.3, 7: 34.3, 9: 38.0}
"""Measured: SmolLM2-135M on two cores."""


@pytest.mark.parametrize("times", [SMALL_MODEL, FLAT])
def test_useless_drafts_cost_two_percent_at_most(times: dict[int, float]) -> None:
    """In a long answer."""
    made, spent_ms, num_steps = payoff({1: times[1]}), 0.0, 3000
    for _ in range(num_steps):
        (count,) = choose(made, [8])
        ms = float(np.interp(1 + count, list(times), list(times.values())))
        made.note_step(1 + count, int(ms * MS))
        made.note_row(0, count, 0)
        spent_ms += ms
    assert spent_ms < 1.02 * num_steps * times[1]


def test_a_first_step_that_compiles_and_a_busy_machine_are_forgotten() -> None:
    made = payoff({1: 10.0}, {0: (8, 8)})
    assert choose(made, [4]) == [4]
    made.note_step(5, 900 * MS)
    assert choose(made, [4]) == [4], "the first of its size says nothing"
    made.note_step(5, 900 * MS)
    assert choose(made, [4]) == [0]
    for _ in range(600):
        made.note_step(1, 10 * MS)
    assert choose(made, [4]) == [4]
    for _ in range(10):
        made.note_step(5, 12 * MS)
    assert made.times(np.asarray([5]))[0] == pytest.approx(12 * MS)


def test_the_choice_is_the_best_of_all() -> None:
    """Beside every combination of counts, for random times and rows."""
    seed = random.randrange(10**6)
    print("seed", seed)
    rng = random.Random(seed)
    for _ in range(60):
        num_rows = rng.randint(1, 3)
        ms, times = rng.uniform(1, 5), {}
        for num_tokens in range(num_rows, num_rows + 13):
            times[num_tokens] = ms
            ms += rng.uniform(0, 1.5)
        rows = {slot: (rng.randint(0, 4), 4) for slot in range(num_rows)}
        made = payoff(times, rows)
        found = [rng.randint(0, 4) for _ in range(num_rows)]
        chances = made.share_right(np.arange(num_rows), np.zeros(num_rows, np.int64))

        def rate(
            counts: tuple[int, ...], chances: np.ndarray = chances, times: dict = times
        ) -> float:
            tokens = sum(
                1 + sum(p**i for i in range(1, n + 1)) for p, n in zip(chances, counts, strict=True)
            )
            return tokens / times[len(counts) + sum(counts)]

        best = max(rate(c) for c in itertools.product(*(range(n + 1) for n in found)))
        assert rate(tuple(choose(made, found))) == pytest.approx(best, rel=1e-9)


def test_sizes_that_were_not_seen_are_estimated_from_those_that_were() -> None:
    made = payoff({4: 10.0, 8: 14.0})
    assert made.times(np.arange(4, 9)).tolist() == pytest.approx(
        [10 * MS, 11 * MS, 12 * MS, 13 * MS, 14 * MS]
    )
    below, beyond = made.times(np.asarray([3, 9]))
    assert below < 10 * MS and beyond > 14 * MS
    assert (np.diff(DraftPayoff(1).times(np.arange(1, 7))) > 0).all()


def test_rows_are_noted_together_as_one_by_one() -> None:
    rng = np.random.default_rng(3)
    alone, together = DraftPayoff(6), DraftPayoff(6)
    for _ in range(20):
        slots = rng.permutation(6)[: rng.integers(1, 7)].astype(np.int32)
        drafts = rng.integers(0, 4, len(slots)).astype(np.int32)
        right = rng.integers(0, drafts + 1).astype(np.int32)
        for slot, number, kept in zip(slots, drafts, right, strict=True):
            alone.note_row(int(slot), int(number), int(kept))
        together.note_rows(slots, drafts, right)
    every, kinds = np.arange(6, dtype=np.int32), np.zeros(6, np.int64)
    shares = together.share_right(every, kinds)
    assert shares.tolist() == pytest.approx(alone.share_right(every, kinds).tolist())
    assert len(set(shares.tolist())) > 1
