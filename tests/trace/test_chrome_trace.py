"""Traces of engines, read back by a reader of its own."""

from __future__ import annotations

import io
import random
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import pytest
from fake_engine import make_step_record
from trace_reader import Trace

from termgen.trace.chrome_trace import TracePart, kind_of, write_trace
from termgen.vocabulary.events import EngineEvent, RequestEvent, RequestEventKind, StepRecord

MS = 1_000_000
KINDS = RequestEventKind


def step(number: int, begin: int, end: int, **facts: object) -> StepRecord:
    """A step of a GPU, planned a millisecond before it begins; times in microseconds."""
    return make_step_record(
        step_id=number,
        planned_ns=(begin - 1000) * 1000,
        submitted_ns=(begin - 800) * 1000,
        launch_us=300.0,
        started_ns=begin * 1000,
        ended_ns=end * 1000,
        landed_ns=(end + 50) * 1000,
        applied_ns=(end + 250) * 1000,
        **facts,
    )


def event(kind: RequestEventKind, at_us: int, name: str = "a", **facts: object) -> RequestEvent:
    plain = RequestEvent(at_us * 1000, name, kind, 12, 0, 0)
    return plain._replace(**facts)


def written(tmp_path: Path, *parts: TracePart) -> Trace:
    path = tmp_path / "trace.json.gz"
    with path.open("wb") as out:
        totals = write_trace(out, parts, about={"termgen": "1"})
    trace = Trace(path)
    assert totals.num_events == len(trace.events)
    return trace


def of(tmp_path: Path, events: Sequence[EngineEvent], **facts: bool) -> Trace:
    return written(tmp_path, TracePart("engine", lambda: events, **facts))


def test_a_step_is_on_every_track_with_its_times(tmp_path: Path) -> None:
    facts = {"num_decode_rows": 3, "num_padded_tokens": 1, "graph_mode": "FULL"}
    trace = of(tmp_path, [step(7, 5000, 9000, **facts)])
    assert dict(trace.durations_ns) == {
        ("host", "schedule"): 200_000,
        ("host", "launch"): 300_000,
        ("device", "decode"): 4_000_000,
        ("results", "results"): 50_000,
        ("host", "apply"): 200_000,
    }
    assert trace.processes == {1: "engine"} and trace.about == {"termgen": "1"}
    (device,) = (slices for key, slices in trace.slices.items() if trace.tracks[key] == "device")
    begin, _, shown = device[0]
    assert begin == 1_000_000, "since the first event, which is the plan"
    assert shown["args"] == {"step": 7, "decode_rows": 3, "prompt_tokens": 0, "graph": "FULL"}
    assert list(trace.arrows) == [7]
    assert trace.counters["tokens"] == [(begin, {"decode": 3, "prompts": 0, "padding": 1})]


def test_steps_that_overlap_are_on_tracks_of_their_own(tmp_path: Path) -> None:
    steps = [step(1, 5000, 9000), step(2, 8000, 12_000), step(3, 9000, 10_000)]
    trace = of(tmp_path, steps)
    assert {"device", "device 2"} <= set(trace.tracks.values())
    assert trace.durations_ns["device", "decode"] == 9_000_000


def test_a_host_that_plans_ahead_has_one_track(tmp_path: Path) -> None:
    """The next step is planned and launched before the one that runs is applied."""
    trace = of(tmp_path, [step(i, 5000 * i, 5000 * i + 4900) for i in range(1, 50)])
    assert sorted(trace.tracks.values()) == ["device", "host", "results"]
    host = sorted(s for key, s in trace.slices.items() if trace.tracks[key] == "host")
    names = [event["name"] for _, _, event in sorted(host[0], key=lambda one: one[:2])]
    assert names[:5] == ["schedule", "launch", "schedule", "launch", "apply"]


def test_slices_of_any_order_are_on_tracks_that_hold_them(tmp_path: Path) -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    rng = random.Random(seed)
    begins = [rng.randrange(2000, 400_000) for _ in range(300)]
    steps = [step(i, begin, begin + rng.randrange(5000)) for i, begin in enumerate(begins)]
    trace = of(tmp_path, steps)  # the reader checks that slices nest
    for slices in trace.slices.values():
        ordered = sorted((begin, end) for begin, end, _ in slices)
        assert all(one[1] <= other[0] for one, other in pairwise(ordered))
    assert sum(map(len, trace.slices.values())) == 300 * 5


def test_counters_are_told_when_they_change(tmp_path: Path) -> None:
    steps = [step(i, 5000 * i, 5000 * i + 900, num_decode_rows=2 + (i > 3)) for i in range(1, 6)]
    trace = of(tmp_path, steps)
    assert [counts["decode"] for _, counts in trace.counters["rows"]] == [2, 3]
    assert len(trace.counters["blocks"]) == len(trace.counters["requests"]) == 1


def test_a_request_is_followed_through_all_it_does(tmp_path: Path) -> None:
    trace = of(
        tmp_path,
        [
            event(KINDS.QUEUED, 100),
            event(KINDS.SCHEDULED, 300, num_cached_tokens=8, detail="all of it"),
            event(KINDS.FIRST_TOKEN, 900),
            event(KINDS.PREEMPTED, 1000, detail="out of KV blocks"),
            event(KINDS.SCHEDULED, 1400),
            event(KINDS.FINISHED, 2000, detail="stop", num_output_tokens=9),
        ],
    )
    assert trace.spans["a"] == [
        ("queued", 0, 200_000),
        ("prefill", 200_000, 800_000),
        ("decode", 800_000, 900_000),
        ("preempted", 900_000, 1_300_000),
        ("decode", 1_300_000, 1_900_000),
        ("a", 0, 1_900_000),
    ]
    begun = {e["name"]: e["args"] for e in trace.events if e["ph"] == "b" and "args" in e}
    assert begun["prefill"] == {"detail": "all of it", "cached_tokens": 8}
    assert trace.events[-1]["args"] == {"reason": "stop", "output_tokens": 9}


def test_requests_may_begin_before_it_and_end_after_it(tmp_path: Path) -> None:
    trace = of(
        tmp_path,
        [
            event(KINDS.FIRST_TOKEN, 500, "early"),
            event(KINDS.QUEUED, 600, "late"),
            step(1, 5000, 9000),
            event(KINDS.FINISHED, 9100, "early"),
            event(KINDS.FINISHED, 9200, "unseen"),
        ],
    )
    assert [name for name, _, _ in trace.spans["early"]] == ["decode", "early"]
    (queued, *_), (whole, *_) = trace.spans["late"]
    assert (queued, whole) == ("queued", "late")
    assert [name for name, _, _ in trace.spans["unseen"]] == ["unseen"]


def test_a_time_that_runs_back_makes_no_negative_span(tmp_path: Path) -> None:
    events = [event(KINDS.QUEUED, 500), event(KINDS.SCHEDULED, 400), event(KINDS.FINISHED, 450)]
    trace = of(tmp_path, events)
    assert all(begin <= end for _, begin, end in trace.spans["a"])


def test_a_cpu_shows_the_parts_of_its_steps(tmp_path: Path) -> None:
    facts = {"input_us": 100.0, "model_us": 3500.0, "sample_us": 900.0}
    trace = of(tmp_path, [step(1, 5000, 9000, **facts)], on_cpu=True)
    parts = {name: ns for (track, name), ns in trace.durations_ns.items() if track == "steps"}
    assert parts == {"decode": 4 * MS, "input": MS // 10, "model": 7 * MS // 2, "sample": 400_000}
    assert not trace.arrows and ("host", "launch") not in trace.durations_ns


def test_two_engines_are_two_processes_on_one_time_line(tmp_path: Path) -> None:
    first = TracePart("one", lambda: [step(1, 5000, 6000)], offset_ns=10**15)
    second = TracePart("two", lambda: [step(1, 2000, 2500)], offset_ns=10**15 + 50 * MS)
    trace = written(tmp_path, first, second)
    assert trace.processes == {1: "one", 2: "two"}
    begins = [min(begin for begin, *_ in trace.slices[pid, 1]) for pid in (1, 2)]
    assert begins == [0, 47 * MS]


def test_hostile_names_stay_text(tmp_path: Path) -> None:
    name = 'x"},\n{"ph":"X" \u2028 \x00 \ud800'
    trace = of(tmp_path, [event(KINDS.QUEUED, 1, name), event(KINDS.FINISHED, 2, name)])
    assert [shown for shown, *_ in trace.spans[name]] == ["queued", name]


def test_nothing_at_all_is_a_file_too(tmp_path: Path) -> None:
    assert of(tmp_path, []).slices == {}


@pytest.mark.parametrize(
    ("decode", "prompts", "kind"), [(2, 0, "decode"), (0, 1, "prefill"), (2, 1, "mixed")]
)
def test_steps_are_named_by_what_they_compute(decode: int, prompts: int, kind: str) -> None:
    assert kind_of(make_step_record(num_decode_rows=decode, num_prefill_rows=prompts)) == kind


def test_a_real_engine_gives_the_sums_of_its_records(
    tiny_model_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    from mixed_load import run_mixed_load

    from termgen.config import EngineConfig
    from termgen.engine.loop.engine import SyncEngine

    engine = SyncEngine(
        EngineConfig(
            model=str(tiny_model_dir("llama")),
            device="cpu",
            threads=1,
            max_num_seqs=6,
            num_gpu_blocks_override=24,
            max_model_len=128,
            skip_tokenizer_init=True,
            async_scheduling=True,
        )
    )
    ring = engine.core.bus.subscribe(10_000)
    seed = 5
    print("seed", seed)
    outputs, steps = run_mixed_load(
        engine, seed, num_requests=14, longest_prompt=60, most_tokens=20
    )
    events = ring.drain()
    engine.shutdown()
    assert ring.num_dropped == 0
    trace = of(tmp_path, events, on_cpu=True)
    busy = Counter[str]()
    for record in steps:
        busy[kind_of(record)] += record.ended_ns - record.started_ns
    kinds = ("decode", "prefill", "mixed")
    assert {k: trace.durations_ns["steps", k] for k in kinds if busy[k]} == dict(busy)
    assert trace.durations_ns["host", "apply"] == sum(r.applied_ns - r.landed_ns for r in steps)
    assert trace.spans.keys() == outputs.keys()
    ends = {e["id"]: e["args"] for e in trace.events if e["ph"] == "e" and "args" in e}
    for request_id, tokens in outputs.items():
        assert ends[request_id]["output_tokens"] == len(tokens)


def test_a_hundred_thousand_events_are_two_megabytes_at_most() -> None:
    events: list[EngineEvent] = []
    for number in range(1, 11_000):
        begin = 5000 * number + number * 7919 % 613
        rows = {"num_decode_rows": 1 + number % 37, "num_used_blocks": number * 31 % 977}
        if number % 9 == 0:
            name = f"chatcmpl-{number * 2654435761 % 2**64:016x}"
            rows |= {
                "num_prefill_rows": 1,
                "num_prefill_tokens": number % 511,
                "prefill_ids": (name,),
            }
            events.append(event(KINDS.QUEUED, begin - 2000, name))
            events.append(event(KINDS.SCHEDULED, begin - 1000, name))
            events.append(event(KINDS.FINISHED, begin + 90_000, name))
        events.append(step(number, begin, begin + 4000 + number * 104729 % 911, **rows))
    out = io.BytesIO()
    totals = write_trace(out, [TracePart("engine", lambda: events)])
    assert totals.num_events > 100_000
    assert len(out.getvalue()) < 2_000_000 * totals.num_events / 100_000
