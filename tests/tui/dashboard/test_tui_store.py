"""DashboardStore: events and snapshots in, view state out."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from fake_engine import make_snapshot, make_step_record
from tui_harness import (
    MS,
    NOW_NS,
    SECOND,
    busy_snapshot,
    request_events,
    request_view,
    step,
    steps,
)

from termgen.tui.dashboard.state.log import Level, LogBook
from termgen.tui.dashboard.state.past import as_of
from termgen.tui.dashboard.state.request_history import RequestHistory
from termgen.tui.dashboard.state.store import (
    BUCKET_NS,
    HISTORY_BUCKETS,
    STEP_HISTORY,
    DashboardStore,
    mode_letter,
    mode_shares,
    padding_share,
    step_ms,
    windowed,
)
from termgen.vocabulary.events import EngineEvent, RequestEvent, RequestEventKind
from termgen.vocabulary.request_tracks import TRACKED_REQUESTS
from termgen.vocabulary.step_figures import MAX_STEP_BUCKETS
from termgen.vocabulary.time_spread import percentile


def make_store() -> DashboardStore:
    return DashboardStore(started_ns=NOW_NS - 65 * SECOND)


def test_an_empty_store_has_a_view() -> None:
    view = make_store().view(NOW_NS)
    assert view.uptime_s == 65
    assert view.is_idle
    assert view.kv_usage == 0
    assert view.step == view.gap == view.ttft == view.queue == (None, None, None)
    assert view.prefix_hit_rate is None
    assert view.requests == ()
    assert len(view.series.decode) == HISTORY_BUCKETS


def test_rates_are_those_of_the_last_full_second() -> None:
    store = make_store()
    ends = [NOW_NS - 950 * MS + i * 100 * MS for i in range(10)]
    store.apply(
        step(i, end_ns=end, ms=10, num_sampled_tokens=3, num_prefill_tokens=50)
        for i, end in enumerate(ends)
    )
    view = store.view(NOW_NS)
    assert view.decode_rate == pytest.approx(30)
    assert view.prefill_rate == pytest.approx(500)
    assert store.view(NOW_NS + 3 * SECOND).decode_rate == 0


def test_the_tokens_of_a_long_step_are_spread_over_its_time() -> None:
    store = make_store()
    end = (NOW_NS // BUCKET_NS) * BUCKET_NS - 1
    store.apply([step(1, end_ns=end, ms=999, num_sampled_tokens=1, num_prefill_tokens=400)])
    shown = store.view(NOW_NS).series.prefill[-5:]
    assert [round(v) for v in shown] == [0, 400, 400, 400, 400]
    assert store.view(NOW_NS).series.step_ms[-1] == pytest.approx(999)


def test_step_percentiles_forget_old_steps() -> None:
    store = make_store()
    store.apply([step(0, end_ns=NOW_NS - 60 * SECOND, ms=900)])
    store.apply(step(i, end_ns=NOW_NS - i * 50 * MS, ms=10 + i) for i in range(1, 100))
    view = store.view(NOW_NS)
    assert view.step == pytest.approx((60, 104, 108), rel=0.02)


def test_counters_come_from_the_newer_of_step_and_snapshot() -> None:
    store = make_store()
    store.set_snapshot(busy_snapshot(NOW_NS))
    store.apply([step(5, end_ns=NOW_NS - SECOND, num_running=9, num_used_blocks=1)])
    assert store.view(NOW_NS).num_running == 4
    store.apply([step(6, end_ns=NOW_NS + SECOND, num_running=7, num_used_blocks=300)])
    view = store.view(NOW_NS + 2 * SECOND)
    assert (view.num_running, view.num_used_blocks) == (7, 300)


def test_kv_usage_and_hit_rate() -> None:
    store = make_store()
    store.set_snapshot(busy_snapshot())
    view = store.view(NOW_NS)
    assert view.num_blocks == 600
    assert view.kv_usage == pytest.approx(215 / 600)
    assert view.prefix_hit_rate == pytest.approx(0.634)
    assert (view.max_num_seqs, view.max_num_batched_tokens) == (8, 256)


def test_time_to_first_token_comes_from_request_events() -> None:
    store = make_store()
    store.apply(request_events())
    view = store.view(NOW_NS)
    assert view.ttft == pytest.approx((200, 200, 200), rel=0.01)


def test_a_request_whose_arrival_was_not_seen_has_no_time_to_first_token() -> None:
    kinds, store = RequestEventKind, make_store()
    for i, kind in enumerate((kinds.SCHEDULED, kinds.FIRST_TOKEN)):
        store.apply([RequestEvent(NOW_NS - SECOND, f"old-{i}", kind, 9, 0, 0)])
        store.apply([RequestEvent(NOW_NS, f"old-{i}", kinds.FIRST_TOKEN, 9, 1, 0)])
    assert store.view(NOW_NS).ttft.p50 is None
    store.apply([RequestEvent(NOW_NS - 300 * MS, "new", kinds.QUEUED, 9, 0, 0)])
    store.apply([RequestEvent(NOW_NS, "new", kinds.FIRST_TOKEN, 9, 1, 0)])
    view = store.view(NOW_NS)
    assert view.ttft.p50 == view.ttft.p99 == pytest.approx(300, rel=0.01)


def test_requests_live_then_finished() -> None:
    store = make_store()
    store.apply(request_events())
    store.set_snapshot(busy_snapshot())
    rows = store.view(NOW_NS).requests
    assert [row.state for row in rows] == [
        "decode",
        "decode",
        "decode",
        "prefill",
        "waiting",
        "waiting",
        "abort",
        "length",
        "stop",
    ]
    first = rows[0]
    assert (first.prompt, first.cached, first.output, first.blocks) == (1800, 1024, 105, 119)
    assert first.rate == pytest.approx(104 / 3.8)
    assert rows[2].rate is None  # its first token was not seen
    done = rows[-1]
    assert done.finished and done.rate == pytest.approx(40)
    assert done.age_s == pytest.approx(27.9)


def test_a_request_that_finished_after_the_snapshot_is_not_shown_twice() -> None:
    store = make_store()
    store.set_snapshot(busy_snapshot())
    event = RequestEvent(NOW_NS, "cmpl-77", RequestEventKind.FINISHED, 100, 4, 0, "stop")
    store.apply([event])
    ids = [row.request_id for row in store.view(NOW_NS).requests]
    assert ids.count("cmpl-77") == 1
    assert store.view(NOW_NS).requests[-1].state == "stop"


def test_a_finished_request_keeps_its_preemptions() -> None:
    store = make_store()
    store.set_snapshot(
        make_snapshot(requests=(request_view("r", "decode", num_preemptions=3),), num_running=1)
    )
    store.apply([RequestEvent(NOW_NS, "r", RequestEventKind.FINISHED, 9, 4, 0, "length")])
    assert store.view(NOW_NS).requests[-1].preemptions == 3


def test_ages_go_on_between_snapshots() -> None:
    store = make_store()
    store.set_snapshot(busy_snapshot(NOW_NS))
    assert store.view(NOW_NS + SECOND).requests[0].age_s == pytest.approx(5.2)


def test_memory_stays_bounded() -> None:
    store = make_store()
    kinds = RequestEventKind
    for i in range(0, 3 * TRACKED_REQUESTS, 8):
        for j in range(i, i + 8):
            store.apply([RequestEvent(NOW_NS + j, f"r{j}", kinds.QUEUED, 1, 0, 0)])
        store.apply([step(j, end_ns=NOW_NS + j * BUCKET_NS) for j in range(i, i + 8)])
    assert len(store._tracks._live) <= TRACKED_REQUESTS
    assert len(store.view(NOW_NS).steps) == STEP_HISTORY


def mixed_events(seed: int) -> list[EngineEvent]:
    """Steps with and without prompts, short and long, late ones too, and requests between them."""
    rng, kinds, events = random.Random(seed), list(RequestEventKind), list[EngineEvent]()
    end = NOW_NS - 150 * SECOND
    for i in range(400):
        end += rng.choice((5, 5, 5, 300, 2000)) * MS
        names = tuple(f"r{rng.randrange(4)}" for _ in range(rng.choice((0, 0, 0, 1))))
        record = step(
            i,
            end_ns=end - rng.choice((0, 0, 400)) * MS,
            ms=rng.choice((1, 5, 700, 12_000)),
            num_sampled_tokens=rng.randrange(9),
            num_prefill_tokens=7 * len(names),
            prefill_ids=names,
            prefill_tokens=(7,) * len(names),
            graph_mode=rng.choice(("FULL", "PIECEWISE", "NONE")),
            graph_reason=rng.choice(("", "", "too long")),
            num_late_compiles=i // 300,
        )
        events.append(record)
        if not rng.randrange(4):
            kind = rng.choice(kinds)
            events.append(RequestEvent(end, f"r{rng.randrange(6)}", kind, 9, i, 0, "why"))
    return events


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_events_come_to_the_same_together_and_one_by_one(seed: int) -> None:
    print("seed", seed)
    events, together, single = mixed_events(seed), make_store(), make_store()
    for i in range(0, len(events), 90):
        together.apply(events[i : i + 90])
    for event in events:
        single.apply([event])
    now = events[-1].time_ns if isinstance(events[-1], RequestEvent) else events[-1].ended_ns
    one, other = together.view(now), single.view(now)
    for name, series in one.series._asdict().items():
        assert series == pytest.approx(getattr(other.series, name)), name
    assert any(one.series.decode) and any(one.series.gap_ms) and any(one.series.graph_share)
    for name in ("step", "gap", "ttft", "queue", "steps", "requests", "graphs"):
        assert getattr(one, name) == getattr(other, name)
    assert list(together.history) == list(single.history)
    lines = (store.log.matching(Level.DEBUG, "", 10**18) for store in (together, single))
    assert next(lines) == next(lines)


def test_tokens_and_times_fall_into_the_stretch_of_time_of_their_step() -> None:
    events = [e for e in mixed_events(4) if not isinstance(e, RequestEvent)]
    store, decode, longest = make_store(), Counter[int](), Counter[int]()
    store.apply(events)
    for record in events:
        last = record.ended_ns // BUCKET_NS
        buckets = range(max(record.started_ns // BUCKET_NS, last - MAX_STEP_BUCKETS), last + 1)
        for bucket in buckets:
            decode[bucket] += record.num_sampled_tokens / len(buckets)
        longest[last] = max(longest[last], step_ms(record))
    newest = events[-1].ended_ns // BUCKET_NS
    shown = range(newest - HISTORY_BUCKETS + 1, newest + 1)
    view = store.view((newest + 1) * BUCKET_NS)
    assert view.series.decode == pytest.approx([4 * decode[bucket] for bucket in shown])
    assert view.series.step_ms == pytest.approx([longest[bucket] for bucket in shown])


def test_a_step_that_only_decodes_is_looked_at_by_nobody_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store, looked_at = make_store(), list[int]()
    store.apply([step(0, end_ns=NOW_NS, prefill_ids=("r",), prefill_tokens=(9,))])
    for book in (RequestHistory, LogBook):
        monkeypatch.setattr(book, "add_step", lambda self, s: looked_at.append(s.step_id))
    store.history._in_prefill.clear()
    store.apply([step(i, end_ns=NOW_NS + i * MS) for i in range(1, 250)])
    assert looked_at == []
    store.apply([step(250, end_ns=NOW_NS, prefill_ids=("r",), prefill_tokens=(9,))])
    store.apply([step(251, end_ns=NOW_NS, ms=1500.0)])
    assert looked_at == [250, 251]


def test_helpers() -> None:
    records = steps(90)
    assert sum(mode_shares(records).values()) == pytest.approx(1)
    assert set(mode_shares(records)) == {"F", "P", "N"}
    assert mode_shares([]) == {}
    assert 0 < padding_share(records) < 0.2
    assert padding_share([]) == 0
    assert mode_letter("PIECEWISE") == "P"
    assert mode_letter("") == "N"
    assert percentile([], 50) is None
    assert percentile([1.0, 3.0], 50) == 2.0
    assert step_ms(make_step_record(started_ns=5 * MS, ended_ns=9 * MS)) == 4


def test_a_window_shows_its_seconds_in_any_number_of_points() -> None:
    values = tuple(float(i) for i in range(480))  # two minutes of quarter seconds
    assert windowed(values, None, 10) == list(values[-10:])
    assert windowed(values, 30, 10) == [371.0 + 12 * i for i in range(10)]
    assert windowed(values, 30, 240) == [360.0 + i // 2 for i in range(240)]
    assert list(windowed(values, 120, 480)) == list(values)
    peak = [0.0] * 480
    peak[400] = 7.0
    assert max(windowed(peak, 120, 13)) == 7.0
    assert max(windowed(peak, 19, 13)) == 0.0


def test_step_times_are_those_of_the_window() -> None:
    store = DashboardStore(started_ns=NOW_NS - 200 * SECOND)
    store.apply([step(1, end_ns=NOW_NS - 50 * SECOND, ms=90.0), step(2, end_ns=NOW_NS, ms=10.0)])
    assert store.view(NOW_NS).step.p99 == pytest.approx(10.0, rel=0.01)
    assert store.view(NOW_NS, window_s=60).step.p99 == pytest.approx(90.0, rel=0.01)


def test_the_times_of_a_fast_engine_go_back_as_far_as_those_of_a_slow_one() -> None:
    """There are more steps than the store keeps individually."""
    store, number = DashboardStore(started_ns=NOW_NS - 60 * SECOND), 5 * STEP_HISTORY
    store.apply(step(i, end_ns=NOW_NS - (number - i) * 4 * MS, ms=2.0) for i in range(number))
    late = [step(number + i, end_ns=NOW_NS - MS, ms=50.0) for i in range(number // 25)]
    store.apply(late)
    view = store.view(NOW_NS)
    assert view.step == pytest.approx((2.0, 2.0, 50.0), rel=0.01)


def test_times_between_tokens_are_those_of_every_request() -> None:
    """Each row that decodes waited since the step before, whatever that step did; an unreported
    step counts for no request."""
    store, end, expected = make_store(), NOW_NS - 20 * SECOND, list[float]()
    rng = random.Random(5)
    for i in range(200):
        gap_ms, rows = rng.choice((8, 8, 8, 90)), rng.choice((1, 3, 40))
        lost = i == 100
        end += gap_ms * MS
        name = 1000 + i + (i > 100)
        if not lost:
            store.apply([step(name, end_ns=end, ms=5.0, num_decode_rows=rows)])
        if 0 < i and i not in (100, 101):
            expected += [gap_ms] * rows
    expected.sort()
    ranks = (expected[-(-len(expected) * q // 100) - 1] for q in (50, 95, 99))
    view = store.view(end)
    assert view.gap == pytest.approx(tuple(ranks), rel=0.01)
    assert max(view.series.gap_ms) >= 90


def test_waits_of_requests_are_told_by_their_events() -> None:
    store, kinds = make_store(), RequestEventKind
    for i in range(100):
        queued, name = NOW_NS - 10 * SECOND + i * MS, f"r{i}"
        store.apply(
            [
                RequestEvent(queued, name, kinds.QUEUED, 9, 0, 0),
                RequestEvent(queued + i * MS, name, kinds.SCHEDULED, 9, 0, 0),
                RequestEvent(queued + (100 + 2 * i) * MS, name, kinds.FIRST_TOKEN, 9, 1, 0),
                RequestEvent(queued + SECOND, name, kinds.PREEMPTED, 9, 1, 0),
                RequestEvent(queued + 3 * SECOND, name, kinds.SCHEDULED, 9, 1, 0),
            ]
        )
    view = store.view(NOW_NS)
    assert view.queue == pytest.approx((49, 94, 98), rel=0.01)
    assert view.ttft == pytest.approx((198, 288, 296), rel=0.01)
    assert max(view.series.queue_ms) == 99 and max(view.series.ttft_ms) == 298
    assert store.view(NOW_NS + 100 * SECOND).ttft.p50 is not None
    assert store.view(NOW_NS + 100 * SECOND, window_s=30).ttft.p50 is None


def test_how_things_stood_has_series_that_end_at_the_numbers() -> None:
    store, at = make_store(), (NOW_NS // BUCKET_NS) * BUCKET_NS
    facts = (
        # running, waiting, used, free, looked up, found, mode
        (2, 0, 10, 90, 0, 0, "FULL"),
        (3, 1, 50, 50, 100, 25, "FULL"),
        (8, 5, 80, 20, 100, 25, "NONE"),
    )
    for i, (running, waiting, used, free, asked, found, mode) in enumerate(facts):
        counts = dict(
            num_running=running,
            num_waiting=waiting,
            num_used_blocks=used,
            num_cached_blocks=0,
            num_free_blocks=free,
            prefix_query_tokens=asked,
            prefix_hit_tokens=found,
        )
        end = at - (8 - 2 * i) * BUCKET_NS + 10 * MS
        store.apply([step(i, end_ns=end, ms=5.0, graph_mode=mode, **counts)])
    view = store.view(at)
    series = view.series
    assert series.running[-9:].tolist() == [0, 2, 2, 3, 3, 8, 8, 8, 8]
    assert series.waiting[-9:].tolist() == [0, 0, 0, 1, 1, 5, 5, 5, 5]
    assert series.kv_share[-9:] == pytest.approx((0, 0.1, 0.1, 0.5, 0.5, 0.8, 0.8, 0.8, 0.8))
    assert series.hit_share[-9:].tolist() == [0, 0, 0, 0.25, 0.25, 0.25, 0.25, 0.25, 0.25]
    assert series.graph_share[-9:].tolist() == [0, 1, 1, 1, 1, 0, 0, 0, 0]
    assert view.graphs.share_recorded == pytest.approx(2 / 3)
    assert (view.num_running, view.kv_usage) == (series.running[-1], series.kv_share[-1])
    kept = store.kept()
    before = as_of(view, 1, kept, store.history)
    assert (before.num_running, before.num_waiting, before.kv_usage) == (3, 1, 0.5)
    assert as_of(view, 99, kept, store.history).num_running == 2
