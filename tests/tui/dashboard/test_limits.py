"""What limits now: each cause from the figures that show it, and none without."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from fake_engine import make_memory_ledger, make_snapshot
from tui_harness import MS, NOW_NS, SECOND, request_view, step

from termgen.tui.dashboard.pages.overview import limit_spans, numbers_lines
from termgen.tui.dashboard.state.limits import Limit, limit_of, why_slow_start
from termgen.tui.dashboard.state.store import DashboardStore, DashboardView, HostReading
from termgen.tui.paint.spans import row_text
from termgen.vocabulary.engine_history import EngineHistory
from termgen.vocabulary.events import RequestEvent, RequestEventKind, StepRecord
from termgen.vocabulary.memory_ledger import GIB, HostExperts, WeightReads
from termgen.vocabulary.time_spread import LongTimes, Spread

MEMORY = make_memory_ledger(weights_bytes=15 * GIB, kv_cache_bytes=40 * GIB)


def run(
    *kinds: dict[str, Any],
    count: int = 40,
    gap_ms: int = 40,
    snapshot: dict[str, Any] | None = None,
) -> DashboardView:
    """The view after steps of these kinds in turns."""
    store = DashboardStore(started_ns=NOW_NS - 60 * SECOND)
    store.set_snapshot(
        make_snapshot(
            time_ns=NOW_NS - 10 * SECOND,
            max_num_seqs=8,
            max_num_batched_tokens=2048,
            **snapshot or {},
        )
    )
    records: list[StepRecord] = []
    for i in range(count):
        fields = {"num_running": 8, "num_decode_rows": 8, "num_sampled_tokens": 8}
        end = NOW_NS - (count - i) * gap_ms * MS
        records.append(step(i, end_ns=end, **{**fields, **kinds[i % len(kinds)]}))
    store.apply(records)
    return store.view(NOW_NS)


def cause(view: DashboardView) -> str | None:
    limit = limit_of(view, MEMORY)
    if limit is not None:
        assert len(limit.cause) <= 9, "the room among the numbers at 80 columns"
        assert limit.brief and limit.words and len(limit.brief) <= 24
        on_a_line = f"limited by {limit.cause}: {limit.figures or limit.words}"
        assert len(on_a_line) <= 66, "the room beside the tabs at 140 columns"
    return limit and limit.cause


def test_decodes_read_the_weights_and_what_is_cached() -> None:
    limit = limit_of(run({}), MEMORY)
    assert limit is not None and limit.cause == "decodes"
    assert limit.words == (
        "a step of 8 requests takes 20.0 ms, for 15.0 GiB of weights and 2.5 GiB of keys and"
        " values: 942 GB/s"
    )
    unknown = limit_of(run({}), None)
    assert unknown is not None and unknown.words == "a step of 8 requests takes 20.0 ms"
    split = limit_of(run({}), replace(MEMORY, host_experts=HostExperts(48, 256, GIB)))
    assert split is not None and split.words == (
        "a step of 8 requests takes 20.0 ms; the CPU computes 208 of 256 experts of each layer"
    )


def test_a_memory_that_is_busy() -> None:
    """The experts of a mixture count as far as tokens go to them."""
    reads = WeightReads(
        always_bytes=2 * GIB, experts_bytes=13 * GIB, experts_share=1 / 16, bytes_per_s=700e9
    )
    memory = replace(MEMORY, reads=reads)
    limit = limit_of(run({}), memory)
    assert limit is not None and (limit.cause, limit.brief) == ("memory", "memory 75%")
    assert limit.words == (
        "a step of 8 requests takes 20.0 ms, for 7.2 GiB of weights and 2.5 GiB of keys and"
        " values: 525 GB/s, 75% of what the memory can do"
    )
    assert reads.of_step(1) == pytest.approx((2 + 13 / 16) * GIB)
    fast = replace(memory, reads=replace(reads, bytes_per_s=4.8e12))
    limit = limit_of(run({}), fast)
    assert limit is not None and limit.cause == "decodes" and ", 11% of what" in limit.words
    slow = replace(memory, reads=replace(reads, bytes_per_s=100e9))
    limit = limit_of(run({}), slow)
    assert limit is not None and limit.cause == "decodes" and "%" not in limit.words
    only_mixed = run({"num_prefill_tokens": 10, "num_prefill_rows": 1, "num_decode_rows": 50})
    limit = limit_of(only_mixed, memory)
    assert limit is not None and limit.cause != "memory", "what such steps read is not known"


def test_clients_that_take_no_output() -> None:
    def with_unread(number: int) -> str | None:
        requests = [request_view(f"r{i}", "decode", is_unread=i < number) for i in range(4)]
        return cause(run({}, snapshot={"requests": tuple(requests), "num_running": 4}))

    assert [with_unread(number) for number in (0, 1, 2, 4)] == [
        "decodes",
        "decodes",
        "clients",
        "clients",
    ]
    limit = limit_of(
        run({}, snapshot={"requests": (request_view("r", "decode", is_unread=True),)}), MEMORY
    )
    assert limit is not None
    assert limit.words == "the clients of 1 of 1 running request take no output"


def test_waits_for_masks_are_not_the_hosts() -> None:
    waiting = {"idle_us": 20_000.0, "mask_us": 18_000.0}
    limit = limit_of(run(waiting), MEMORY)
    assert limit is not None and limit.cause == "grammars"
    assert limit.words == "the engine waits for masks 45% of the time"
    assert cause(run({"idle_us": 20_000.0, "mask_us": 1000.0})) == "host"


def test_prompts_are_what_steps_take_beyond_decodes() -> None:
    chunk = {"num_prefill_tokens": 1900, "num_prefill_rows": 1, "ms": 90.0}
    view = run({}, chunk, gap_ms=100)
    limit = limit_of(view, MEMORY)
    assert limit is not None and limit.cause == "prompts"
    # Two steps take 110 ms, 70 of them beyond the 20 of a decode.
    assert limit.brief == "prompts 64%"
    assert limit.words == ("prompts take 64% of the device's time, 1.9k of 2.0k tokens a step")
    assert cause(run({}, {}, {}, {**chunk, "ms": 40.0})) == "decodes"
    nothing_else = {**chunk, "num_decode_rows": 0}
    assert cause(run(nothing_else)) == "prompts"


def test_a_host_that_the_device_waits_for() -> None:
    slow = {"idle_us": 12_000.0, "schedule_us": 7000.0, "launch_us": 900.0, "apply_us": 3000.0}
    limit = limit_of(run(slow), MEMORY)
    assert limit is not None and limit.cause == "host" and limit.brief == "host 38%"
    assert limit.words == (
        "the device waits for the host 38% of the time;"
        " a step takes it 7.00 ms to plan, 0.90 ms to launch, 3.00 ms to apply"
    )
    assert cause(run({"idle_us": 3000.0})) == "decodes"


@pytest.mark.parametrize(
    ("reason", "expected"),
    [
        ("all places taken", "places"),
        ("not enough free KV blocks", "KV blocks"),
        ("the mask of its grammar takes long", "grammars"),
        ("token budget spent", "decodes"),
        ("next step", "decodes"),
    ],
)
def test_a_queue_comes_first_if_it_stays(reason: str, expected: str) -> None:
    waiting = {"num_waiting": 12, "idle_us": 0.0}
    view = run(waiting, snapshot={"waiting_reason": reason})
    assert cause(view) == expected
    emptied = run({}, {}, {}, waiting, snapshot={"waiting_reason": reason})
    assert emptied.num_waiting == 12 and cause(emptied) == "decodes"


def test_late_masks_are_those_of_the_window() -> None:
    def counted(before: int, per_step: int) -> DashboardView:
        steps = [{"num_late_masks": before + per_step * i} for i in range(40)]
        return run(*steps)

    limit = limit_of(counted(0, 2), MEMORY)
    assert limit is not None and limit.cause == "grammars"
    assert limit.words == "late masks, for 20% of the tokens"
    assert cause(counted(9000, 0)) == "decodes"


def test_sampling_on_a_cpu() -> None:
    assert cause(run({"model_us": 9000.0, "sample_us": 11_000.0})) == "sampling"
    assert cause(run({"model_us": 15_000.0, "sample_us": 5000.0})) == "decodes"


def test_nothing_limits_what_does_not_run() -> None:
    assert cause(run({"num_running": 0})) is None
    assert cause(DashboardStore(started_ns=0).view(NOW_NS)) is None
    assert cause(run({}, snapshot={"paused": True})) is None


def test_old_steps_do_not_count_but_the_last_one_may_be_long() -> None:
    slow = {"idle_us": 90_000.0}
    steps = [*[slow] * 10, *[{}] * 50]  # the slow ones ended before the window
    assert cause(run(*steps, count=60)) == "decodes"
    store = DashboardStore(started_ns=0)
    store.apply([step(1, end_ns=NOW_NS - 5 * SECOND, ms=900.0, num_prefill_tokens=512)])
    assert cause(store.view(NOW_NS)) == "prompts"


def test_a_queue_explains_a_slow_start() -> None:
    queue = Spread(1.0, 5700.0, 6000.0)
    view = replace(run({}), ttft=Spread(1.0, 6100.0, 7000.0), queue=queue, queued=LongTimes(4, 12))
    words = "TTFT is up to 6.10 s because 4 of 12 requests waited, up to 5.70 s"
    assert why_slow_start(view) == words
    for p95 in (2000.0, None):
        assert why_slow_start(replace(view, queue=queue._replace(p95=p95))) == ""
    short = replace(view, ttft=Spread(1.0, 150.0, 160.0), queue=Spread(1.0, 140.0, 150.0))
    assert why_slow_start(short) == ""


@pytest.mark.parametrize("window_s", [None, 3600])
def test_requests_that_waited_are_counted(window_s: int | None) -> None:
    """Eight had a slot at once, and four after five seconds."""
    history = EngineHistory()
    store = DashboardStore(started_ns=0, history=history)
    kinds, begin = RequestEventKind, NOW_NS - 20 * SECOND
    events = []
    for number in range(12):
        wait_ns = (number % 3 == 0) * 5 * SECOND
        for kind, after in ((kinds.QUEUED, 0), (kinds.SCHEDULED, 1), (kinds.FIRST_TOKEN, 2)):
            at_ns = begin + after * SECOND // 50 + (wait_ns if after else 0)
            events.append(RequestEvent(at_ns, f"r{number}", kind, 12, 0, 0))
    events.sort(key=lambda event: event.time_ns)
    store.apply(events)
    history.add(events)
    view = store.view(NOW_NS, window_s=window_s)
    assert view.queued == LongTimes(4, 12)
    assert "because 4 of 12 requests waited, up to " in why_slow_start(view)


def test_the_line_takes_the_longest_form_that_fits() -> None:
    limit = Limit("host", "host 38%", "the device waits for it", "it waits")
    texts = [
        "".join(text for text, _ in limit_spans(limit, "slow start", room))
        for room in (80, 42, 32, 20, 15, 10, 9)
    ]
    assert texts == [
        "limited by host: the device waits for it; slow start",
        "limited by host: the device waits for it",
        "limited by host: it waits",
        "limited by host 38%",
        "limit host 38%",
        "limit host",
        "",
    ]
    assert limit_spans(None, "slow start", 80) == []


def test_small_screens_have_the_name_among_the_numbers() -> None:
    reading = HostReading(1.9, 680 * 2**20)
    view = replace(run({}), on_cpu=True, num_cores=2, host=(reading,))
    limit = limit_of(view, MEMORY)
    assert limit is not None
    line = row_text(numbers_lines(view, 80, 3, limit=limit)[1])
    assert "limit decodes  cores 1.9/2  mem 0.66 GiB" in line and len(line) <= 80
    wide = row_text(numbers_lines(view, 99, 3, limit=limit)[1])
    assert "limited by decodes, 20.0 ms a step" in wide
    assert "limit" not in row_text(numbers_lines(view, 80, 3)[1])
