"""Metrics of the engine's steps, of its device and of its start."""

from __future__ import annotations

import random
from typing import Any

import pytest
from fake_engine import (
    FakeEngine,
    make_model_info,
    make_snapshot,
    make_step_record,
)
from metrics_harness import samples, value
from prometheus_client import CollectorRegistry, Histogram, generate_latest
from server_harness import app_client

from termgen.serving.metrics import STEP_BUCKETS, STEP_TOKEN_BUCKETS, ServerMetrics
from termgen.vocabulary.startup_phases import StartupPhase


async def test_steps_are_timed_by_phase() -> None:
    engine = FakeEngine()
    async with app_client(engine) as client:
        for step_id in range(3):
            engine.bus.publish(make_step_record(step_id=step_id, host_us=700.0))
        text = (await client.get("/metrics")).text
    assert value(text, "engine_step_seconds_count", phase="device") == 3
    assert value(text, "engine_step_seconds_sum", phase="host") == pytest.approx(0.0021)
    assert value(text, "host_overhead_seconds_sum") == pytest.approx(0.0021)
    assert value(text, "host_overhead_seconds_count") == 3
    assert value(text, "engine_step_seconds_sum", phase="device") == pytest.approx(0.012)
    assert value(text, "engine_step_seconds_sum", phase="schedule") == pytest.approx(0.0003)
    assert value(text, "engine_step_seconds_sum", phase="apply") == pytest.approx(0.0006)
    assert value(text, "engine_step_seconds_sum", phase="total") == pytest.approx(0.0135)


def test_steps_added_together_count_as_the_library_counts_each() -> None:
    seed = random.randrange(10**6)
    print("seed", seed)
    rng = random.Random(seed)
    metrics, registry = ServerMetrics("fake/model-1"), CollectorRegistry()
    options: dict[str, Any] = {"buckets": STEP_BUCKETS, "registry": registry}
    phases = Histogram("termgen_engine_step_seconds", "", ["model", "phase"], **options)
    options["buckets"] = STEP_TOKEN_BUCKETS
    sizes = Histogram("termgen_iteration_tokens_total", "", ["model"], **options)
    edges = [*STEP_BUCKETS, 0.0, 9.0]
    for _ in range(3):
        steps = []
        for _ in range(rng.randint(1, 40)):
            wait_s, device_s = rng.choice(edges), rng.choice([*edges, rng.random()])
            began_ns, rows = 10**18 + rng.randrange(10**9), rng.choice((1, 2, 3, 20_000))
            ended_ns = began_ns + round(device_s * 1e9)
            steps.append(
                make_step_record(
                    wait_us=wait_s * 1e6,
                    started_ns=began_ns,
                    ended_ns=ended_ns,
                    num_decode_rows=rows,
                )
            )
            phases.labels("fake/model-1", "wait").observe(wait_s * 1e6 / 1e6)
            phases.labels("fake/model-1", "device").observe((ended_ns - began_ns) / 1e9)
            sizes.labels("fake/model-1").observe(rows)
        metrics.on_events(steps)
    told = samples(metrics.render().decode())
    wanted = samples(generate_latest(registry).decode())
    assert len(wanted) > 60
    for key, number in wanted.items():
        if not key[0].endswith("_created"):
            assert told[key] == pytest.approx(number), key


async def test_steps_are_counted_by_graph_and_reason() -> None:
    engine = FakeEngine()
    async with app_client(engine) as client:
        for padding in (0, 3):
            record = make_step_record(
                graph_mode="FULL", num_decode_rows=5, num_padded_tokens=padding
            )
            engine.bus.publish(record)
        record = make_step_record(num_prefill_rows=1, num_prefill_tokens=40, num_decode_rows=2)
        engine.bus.publish(record._replace(graph_reason="a prompt is being computed"))
        engine.bus.publish(record._replace(graph_mode="PIECEWISE", num_padded_tokens=6))
        text = (await client.get("/metrics")).text
    assert value(text, "engine_steps_total", graph_mode="FULL", reason="") == 2
    why = "a prompt is being computed"
    assert value(text, "engine_steps_total", graph_mode="NONE", reason=why) == 1
    assert value(text, "engine_steps_total", graph_mode="PIECEWISE", reason="") == 1
    assert value(text, "engine_step_tokens_total") == 5 + 5 + 42 + 42
    assert value(text, "engine_padded_tokens_total") == 3 + 6


async def test_launches_are_counted_by_queue_depth_beside_wasted_tokens_and_late_masks() -> None:
    engine = FakeEngine()
    async with app_client(engine) as client:
        for depth in (0, 1, 1, 7):
            record = make_step_record(queue_depth=depth, launch_us=50.0, publish_us=20.0)
            engine.bus.publish(record)
        totals = {"num_wasted_tokens": 5, "num_late_masks": 3, "num_forced_tokens": 6}
        totals |= {"num_draft_tokens": 9, "num_accepted_tokens": 4, "num_drafts": 5}
        totals |= {"drafted_per_pos": (5, 4), "accepted_per_pos": (3, 1)}
        engine.bus.publish(make_step_record(queue_depth=7, **totals))
        text = (await client.get("/metrics")).text
    assert value(text, "engine_launches_total", queue_depth="0") == 1
    assert value(text, "engine_launches_total", queue_depth="1") == 2
    assert value(text, "engine_launches_total", queue_depth="7") == 2
    assert value(text, "engine_step_seconds_sum", phase="launch") == pytest.approx(0.0002)
    assert value(text, "engine_wasted_tokens_total") == 5
    assert value(text, "engine_late_masks_total") == 3
    assert value(text, "engine_forced_tokens_total") == 6
    assert value(text, "spec_decode_num_draft_tokens_total") == 9
    assert value(text, "spec_decode_num_accepted_tokens_total") == 4
    assert value(text, "spec_decode_num_drafts_total") == 5
    for position, (drafted, accepted) in enumerate(((5, 3), (4, 1))):
        at = {"position": str(position)}
        assert value(text, "spec_decode_num_draft_tokens_per_pos_total", **at) == drafted
        assert value(text, "spec_decode_num_accepted_tokens_per_pos_total", **at) == accepted
    assert value(text, "engine_telling_seconds_total") == pytest.approx(80e-6)


async def test_the_device_is_busy_or_idle_and_the_loop_works_or_waits() -> None:
    engine = FakeEngine(model=make_model_info(run_ahead_ms=20.0))
    async with app_client(engine) as client:
        for idle_us in (0.0, 30.0, 10.0):
            engine.bus.publish(
                make_step_record(
                    idle_us=idle_us, host_us=150.0, wait_us=3900.0, covered_us=12_500.0
                )
            )
        text = (await client.get("/metrics")).text
    assert value(text, "engine_device_seconds_total", state="busy") == pytest.approx(0.012)
    assert value(text, "engine_device_seconds_total", state="idle") == pytest.approx(40e-6)
    assert value(text, "engine_step_seconds_sum", phase="host") == pytest.approx(450e-6)
    assert value(text, "engine_step_seconds_sum", phase="wait") == pytest.approx(0.0117)
    assert value(text, "engine_run_ahead_seconds") == pytest.approx(0.02)
    assert value(text, "engine_covered_pause_seconds") == pytest.approx(0.0125)


async def test_start_up_graphs_and_late_compilations_are_shown() -> None:
    engine = FakeEngine(
        model=make_model_info(startup=(StartupPhase("weights", 1.5), StartupPhase("kernels", 3.0)))
    )
    engine.scripted_snapshot = make_snapshot(num_graphs_recorded=20, num_graphs=68)
    async with app_client(engine) as client:
        engine.bus.publish(make_step_record())
        text = (await client.get("/metrics")).text
        assert value(text, "late_compiles_total") == 0
        engine.bus.publish(make_step_record(num_late_compiles=2))
        text = (await client.get("/metrics")).text
    assert value(text, "late_compiles_total") == 2
    assert value(text, "startup_seconds", phase="weights") == 1.5
    assert value(text, "startup_seconds", phase="kernels") == 3.0
    assert value(text, "cuda_graphs", state="recorded") == 20
    assert value(text, "cuda_graphs", state="waiting") == 48
