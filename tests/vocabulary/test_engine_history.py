"""The coarse history: what it counts, that it goes on elsewhere, and that its memory is bounded."""

from __future__ import annotations

import dataclasses
import pickle
import random
from typing import Any

import numpy as np
import pytest
from fake_engine import make_step_record

from termgen.vocabulary.engine_history import KEPT, WIDTH_NS, EngineHistory, HistoryState
from termgen.vocabulary.events import EngineEvent, RequestEvent, RequestEventKind, StepRecord
from termgen.vocabulary.step_figures import COLUMNS, TTFT_MS
from termgen.vocabulary.telemetry import Frame, decode, encode
from termgen.vocabulary.time_spread import TimeSpread

MS, SECOND = 1_000_000, 1_000_000_000
START = 1000 * WIDTH_NS
MOST_BYTES = 2 * 2**20
BASE = make_step_record(num_decode_rows=4, num_sampled_tokens=4, num_prefill_tokens=2)


def steps(first: int, count: int, *, every_ns: int, **overrides: Any) -> list[StepRecord]:
    base = BASE._replace(**overrides)
    return [
        base._replace(
            step_id=i,
            started_ns=START + i * every_ns,
            ended_ns=START + (i + 1) * every_ns - MS,
            landed_ns=START + (i + 1) * every_ns,
            applied_ns=START + (i + 1) * every_ns,
        )
        for i in range(first, first + count)
    ]


def request(name: str, at_ns: int, wait_ns: int) -> list[RequestEvent]:
    kinds = RequestEventKind
    return [
        RequestEvent(at_ns, name, kinds.QUEUED, 5, 0, 0),
        RequestEvent(at_ns + wait_ns // 2, name, kinds.SCHEDULED, 5, 0, 0),
        RequestEvent(at_ns + wait_ns, name, kinds.FIRST_TOKEN, 5, 1, 0),
        RequestEvent(at_ns + wait_ns, name, kinds.FINISHED, 5, 1, 0, "stop"),
    ]


def same(one: HistoryState, other: HistoryState) -> bool:
    np.testing.assert_allclose(one.series, other.series, rtol=1e-9)
    np.testing.assert_array_equal(one.counts, other.counts)
    return (one.since_ns, one.end_ns) == (other.since_ns, other.end_ns)


def over_the_wire(state: HistoryState) -> HistoryState:
    message = decode(encode(state, "s-1"))
    assert isinstance(message, HistoryState)
    return message


def test_ten_seconds_are_one_point() -> None:
    history = EngineHistory()
    history.add(steps(0, 1000, every_ns=20 * MS, num_running=3))  # 20 s
    history.add(steps(1000, 1, every_ns=20 * MS, num_running=9, num_preemptions=2))
    history.add(steps(1001, 499, every_ns=20 * MS, num_running=5, num_preemptions=2))
    for i in range(10):
        history.add(request(f"r{i}", START + SECOND, (i + 1) * 100 * MS))
    now = START + 3 * WIDTH_NS
    series = history.figures.series(now, 4)
    assert series.decode.tolist() == pytest.approx([0, 200, 200, 200])
    assert series.prefill.tolist() == pytest.approx([0, 100, 100, 100])
    assert series.running.tolist() == [0, 3, 3, 9], "the highest of each stretch"
    assert series.preempted.tolist() == [0, 0, 0, 2]
    assert series.ttft_ms.tolist() == [0, 1000, 0, 0]
    idle = history.figures.series(now + 2 * WIDTH_NS, 3)
    assert idle.running.tolist() == [9, 5, 5], "as it was last"
    spread = history.figures.waits[TTFT_MS].spread(now, 3600)
    assert spread.p50 == pytest.approx(500, rel=0.05)
    assert spread.p99 == pytest.approx(1000, rel=0.05)
    assert history.figures.gaps.spread(now, 3600).p50 == pytest.approx(20, rel=0.05)
    assert history.figures.waits[TTFT_MS].spread(now, 20).p50 is None, "before the last 20 s"
    assert history.since_ns == START + 20 * MS


@pytest.mark.parametrize("num_sent", [1, 20, 50])
def test_another_goes_on_where_it_was(num_sent: int) -> None:
    """A dashboard that is opened late has the figures of one that was there from the start, the
    gap after the last step it was sent included."""
    seed = random.randrange(10**6)
    print("seed", seed)
    rng = random.Random(seed)
    events: list[EngineEvent] = []
    for i, record in enumerate(steps(0, 3000, every_ns=27 * MS)):
        events.append(record._replace(num_waiting=rng.randrange(9)))
        if rng.random() < 0.05:
            events += request(f"r{i}", record.applied_ns, rng.randrange(SECOND))
    cut = rng.randrange(100, len(events))
    while not isinstance(events[cut], StepRecord) or not isinstance(events[cut - 1], StepRecord):
        cut -= 1  # a request without its begin has no times, and the last step is sent
    server, late = EngineHistory(), EngineHistory()
    for begin in range(0, cut, 100):
        server.add(events[begin : min(cut, begin + 100)])
    late.add(events[cut - min(cut, num_sent) : cut])  # the events that are sent first
    late.restore(over_the_wire(server.state()))
    assert same(late.state(), server.state())
    server.add(events[cut:])
    late.add(events[cut:])
    assert same(late.state(), server.state())


def test_an_hour_is_kept_and_no_more() -> None:
    history = EngineHistory()
    history.add(steps(0, 2 * KEPT, every_ns=WIDTH_NS))
    now = START + 2 * KEPT * WIDTH_NS
    known = history.figures.series(now, 2 * KEPT).decode
    assert np.count_nonzero(known[KEPT:]) == KEPT
    assert np.count_nonzero(known[:KEPT]) == 0


def test_a_million_events_take_no_more_memory_than_none() -> None:
    """Ten thousand requests that never end, and steps of a millisecond for a quarter of an hour."""
    history = EngineHistory()
    before = len(pickle.dumps(history))
    for part in range(100):
        count = 9_900
        history.add(steps(part * count, count, every_ns=MS))
        at = START + part * count * MS
        history.add(
            RequestEvent(at, f"{part}-{i}", RequestEventKind.QUEUED, 1, 0, 0) for i in range(100)
        )
    assert len(pickle.dumps(history)) - before < MOST_BYTES / 2
    assert len(pickle.dumps(history)) < MOST_BYTES
    sums = history.figures.series(START + 990 * SECOND, 99)
    assert sums.decode.sum() * 10 == pytest.approx(4 * 990_000, rel=1e-6)
    assert len(bytes(encode(history.state(), "s-1"))) < 2**20


def test_a_history_of_another_form_is_skipped() -> None:
    state = EngineHistory().state()
    assert same(over_the_wire(state), state)
    others = (
        dataclasses.replace(state, width_ns=1),
        dataclasses.replace(state, columns=(*COLUMNS[1:], "more")),
        dataclasses.replace(state, series=state.series[:, 1:]),
        dataclasses.replace(state, counts=state.counts[..., 1:]),
        dataclasses.replace(state, growth=1.5),
    )
    assert [decode(encode(other, "s-1")) for other in others] == [None] * len(others)
    assert decode(Frame("history-2", "s-1", b"{}")) is None


def test_numbers_that_no_engine_has_are_not_drawn() -> None:
    state = EngineHistory().state()
    series, counts = state.series.copy(), state.counts.copy()
    series[0, :3] = np.inf, -5.0, np.nan
    counts[:] = -7
    history = EngineHistory()
    history.restore(over_the_wire(dataclasses.replace(state, series=series, counts=counts)))
    shown = history.figures.series(state.end_ns, KEPT)
    assert all(np.isfinite(values).all() and (values >= 0).all() for values in shown)
    assert history.figures.gaps.spread(state.end_ns, 3600).p50 is None


def test_histograms_of_any_width_agree_with_the_values() -> None:
    seed = random.randrange(10**6)
    print("seed", seed)
    values = np.random.default_rng(seed).lognormal(3, 1, 5000)
    at = np.full(len(values), START, np.int64)
    for growth in (1.02, 1.1):
        spread = TimeSpread(3, width_ns=WIDTH_NS, growth=growth)
        spread.add(at, values)
        found = spread.spread(START, 10)
        for q, value in zip((50, 95, 99), found, strict=True):
            assert value == pytest.approx(np.percentile(values, q), rel=growth - 1)
