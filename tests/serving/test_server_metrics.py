"""/metrics: valid Prometheus text with the right counts."""

from __future__ import annotations

import asyncio
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_engine import (
    FakeEngine,
    Script,
    make_memory_ledger,
    make_model_info,
    make_snapshot,
    make_step_record,
)
from fake_nvml import FakeNvml
from metrics_harness import samples, value
from prometheus_client.parser import text_string_to_metric_families
from server_harness import app_client, chat_body, eventually

from termgen.errors import EngineDeadError, RequestError
from termgen.serving.metrics import ServerMetrics
from termgen.vocabulary.device.gpu_reading import GpuReading
from termgen.vocabulary.events import EngineSnapshot, StateView
from termgen.vocabulary.grammar_times import GrammarTimes


async def test_requests_are_counted_and_timed() -> None:
    engine = FakeEngine(script=Script(num_cached_tokens=4))
    async with app_client(engine) as client:
        await client.post("/v1/chat/completions", json=chat_body(n=2))
        await client.post("/v1/chat/completions", json=chat_body(stream=True, max_tokens=3))
        await client.post("/v1/completions", json={"prompt": ["a", "b"], "max_tokens": 1})
        response = await client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    text = response.text
    prompt = len("user: hi\nassistant: ")
    assert value(text, "prompt_tokens_total") == 2 * prompt + 2, "once per prompt, not per choice"
    assert value(text, "prompt_tokens_cached_total") == 16
    assert value(text, "generation_tokens_total") == 22 + 3 + 2
    assert value(text, "request_success_total", finished_reason="stop") == 2
    assert value(text, "request_success_total", finished_reason="length") == 3
    assert value(text, "time_to_first_token_seconds_count") == 5
    assert value(text, "e2e_request_latency_seconds_count") == 5
    assert value(text, "request_queue_time_seconds_count") == 5
    assert value(text, "inter_token_latency_seconds_count") == 20 + 2
    assert value(text, "request_time_per_output_token_seconds_count") == 3
    assert value(text, "request_generation_tokens_sum") == 27


async def test_prompts_without_completions_are_requests_too() -> None:
    engine = FakeEngine(script=Script(num_cached_tokens=1))
    async with app_client(engine) as client:
        echo = {"prompt": "abcd", "echo": True, "max_tokens": 0}
        await client.post("/v1/completions", json={**echo, "n": 2})
        assert engine.calls == []
        await client.post("/v1/completions", json={**echo, "logprobs": 1, "stream": True})
        assert len(engine.calls) == 1
        text = (await client.get("/metrics")).text
    assert value(text, "prompt_tokens_total") == 4 + 4
    assert value(text, "prompt_tokens_by_source_total", source="local_compute") == 3
    assert value(text, "prompt_tokens_by_source_total", source="local_cache_hit") == 1
    assert value(text, "generation_tokens_total") == 0
    assert value(text, "request_success_total", finished_reason="length") == 2 + 1
    assert value(text, "request_generation_tokens_count") == 3
    assert value(text, "request_generation_tokens_sum") == 0
    assert value(text, "request_params_n_sum") == 3
    assert value(text, "request_params_max_tokens_count") == 2
    assert value(text, "request_params_max_tokens_sum") == 0
    assert value(text, "e2e_request_latency_seconds_count") == 1, "of what the engine did"


async def test_what_compiling_grammars_took() -> None:
    engine = FakeEngine()
    async with app_client(engine) as client:
        text = (await client.get("/metrics")).text
        assert value(text, "grammar_compile_seconds_count") == 0
        assert "termgen_grammar_compile_failures_total{" not in text
        times = GrammarTimes()

        for _ in range(3):
            times.add(0.5)
        for _ in range(2):
            times.add(0.2, RequestError("a bad one", code="invalid_schema"))
        times.add(0.1, TypeError())
        engine.scripted_grammars = replace(times.totals(), seconds=1.5)
        text = (await client.get("/metrics")).text
    assert value(text, "grammar_compile_seconds_count") == 6
    assert value(text, "grammar_compile_seconds_sum") == 1.5
    assert value(text, "grammar_compile_seconds_bucket", le="10.0") == 6
    assert value(text, "grammar_compile_failures_total", reason="invalid_schema") == 2
    assert value(text, "grammar_compile_failures_total", reason="internal_error") == 1


async def test_what_the_memory_is_taken_by() -> None:
    ledger = make_memory_ledger(weights_bytes=3 * 2**30, free_bytes=2**30)
    engine = FakeEngine(model=make_model_info(memory=ledger))
    async with app_client(engine) as client:
        text = (await client.get("/metrics")).text
    kinds = {
        dict(labels)["kind"]: int(size)
        for (name, labels), size in samples(text).items()
        if name == "termgen_memory_bytes"
    }
    assert kinds == ledger.parts()
    assert kinds["weights"] == 3 * 2**30
    assert kinds["free_below_limit"] + kinds["free_above_limit"] == 2**30
    async with app_client(FakeEngine()) as client:
        assert "termgen_memory_bytes{" not in (await client.get("/metrics")).text


async def test_the_engines_state_is_read_when_asked_for() -> None:
    engine = FakeEngine()
    engine.scripted_snapshot = make_snapshot(
        num_running=3,
        num_waiting=2,
        num_used_blocks=30,
        num_cached_blocks=10,
        num_free_blocks=20,
        prefix_query_tokens=100,
        prefix_hit_tokens=40,
        num_preemptions=5,
    )
    async with app_client(engine) as client:
        text = (await client.get("/metrics")).text
        assert "termgen_state_copies" not in text, "there are no recurrent layers"
        states = StateView(8, 2, num_copies=6, num_made=9, num_used=4, num_evicted=3)
        engine.scripted_snapshot = replace(engine.scripted_snapshot, states=states)
        later = (await client.get("/metrics")).text
    for name, number in (("made", 9), ("used", 4), ("evicted", 3)):
        assert value(later, f"state_copies_{name}_total") == number
    assert value(text, "num_requests_running") == 3
    assert value(text, "num_requests_waiting") == 2
    assert value(text, "kv_cache_usage_perc") == 0.5
    assert value(text, "kv_blocks", state="used") == 30
    assert value(text, "kv_blocks", state="cached") == 10
    assert value(text, "kv_blocks", state="free") == 20
    assert value(text, "prefix_cache_queries_total") == 100
    assert value(text, "prefix_cache_hits_total") == 40
    assert value(text, "num_preemptions_total") == 5


async def test_lost_events_are_counted() -> None:
    engine = FakeEngine()
    async with app_client(engine) as client:
        for step_id in range(16_384 + 7):
            engine.bus.publish(make_step_record(step_id=step_id))
        text = (await client.get("/metrics")).text
    assert value(text, "event_stream_dropped_total") == 7


async def test_a_dead_engine_still_has_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine()

    async def snapshot() -> EngineSnapshot:
        raise EngineDeadError("gone")

    monkeypatch.setattr(engine, "snapshot", snapshot)
    async with app_client(engine) as client:
        engine.bus.publish(make_step_record(num_running=2))
        response = await client.get("/metrics")
    assert response.status_code == 200
    assert value(response.text, "num_requests_running") == 2


async def test_an_engine_that_stands_still_does_not_hold_up_metrics(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = FakeEngine()

    async def snapshot() -> Any:
        await asyncio.Event().wait()

    monkeypatch.setattr(engine, "snapshot", snapshot)
    monkeypatch.setattr("termgen.serving.state.SNAPSHOT_TIMEOUT_S", 0.05)
    async with app_client(engine) as client:
        assert (await client.get("/metrics")).status_code == 200


async def test_failures_and_aborts_have_their_reason() -> None:
    engine = FakeEngine(script=Script(fail_after=1))
    async with app_client(engine) as client:
        await client.post("/v1/completions", json={"prompt": "x"})
    engine._script = Script(hold_after=1)
    async with app_client(engine) as client:
        asking = asyncio.create_task(client.post("/v1/completions", json={"prompt": "x"}))
        await eventually(lambda: bool(engine.live))
        await engine.abort(engine.live[0])
        await asking
        text = (await client.get("/metrics")).text
    assert value(text, "request_success_total", finished_reason="abort") == 1


def test_a_pause_is_told() -> None:
    metrics = ServerMetrics("fake/model-1")
    for paused in (True, False):
        metrics.on_snapshot(make_snapshot(paused=paused))
        assert value(metrics.render().decode(), "engine_paused") == paused


def test_what_requests_wait_for_is_told() -> None:
    metrics = ServerMetrics("fake/model-1", vllm_names=True)
    for paused, counts in ((False, (3, 0)), (True, (0, 3)), (False, (3, 0))):
        metrics.on_snapshot(make_snapshot(num_waiting=3, paused=paused))
        text = metrics.render().decode()
        for reason, count in zip(("capacity", "deferred"), counts, strict=True):
            assert value(text, "num_requests_waiting_by_reason", reason=reason) == count
            labels = {"model_name": "fake/model-1", "engine": "0", "reason": reason}
            name = "vllm:num_requests_waiting_by_reason"
            assert samples(text)[name, frozenset(labels.items())] == count


def test_drafts_are_counted_under_the_names_of_vllm_too() -> None:
    metrics = ServerMetrics("fake/model-1", vllm_names=True)
    totals = {"num_drafts": 5, "num_draft_tokens": 9, "num_accepted_tokens": 4}
    by_place = {"drafted_per_pos": (5, 4), "accepted_per_pos": (3, 1)}
    metrics.on_events([make_step_record(**totals, **by_place)])
    found = samples(metrics.render().decode())
    labels = {"model_name": "fake/model-1", "engine": "0"}
    for name, total in totals.items():
        assert found[f"vllm:spec_decode_{name}_total", frozenset(labels.items())] == total
    for position, count in enumerate((3, 1)):
        at = frozenset({**labels, "position": str(position)}.items())
        assert found["vllm:spec_decode_num_accepted_tokens_per_pos_total", at] == count


async def test_the_longest_completion_of_a_request_is_counted_once() -> None:
    engine = FakeEngine()
    async with app_client(engine, metrics_compat="vllm") as client:
        await client.post("/v1/chat/completions", json=chat_body(n=3, max_tokens=4))
        await client.post("/v1/completions", json={"prompt": ["a", "b"], "max_tokens": 2})
        text = (await client.get("/metrics")).text
    assert value(text, "request_max_num_generation_tokens_count") == 1 + 2
    assert value(text, "request_max_num_generation_tokens_sum") == 4 + 2 + 2
    assert value(text, "request_generation_tokens_count") == 3 + 2
    assert "vllm:request_max_num_generation_tokens_count{" in text


async def test_a_sleep_is_told() -> None:
    engine = FakeEngine()
    async with app_client(engine, metrics_compat="vllm") as client:
        for level, state in ((0, "awake"), (1, "weights_offloaded"), (2, "discard_all")):
            engine.sleep_level = level
            text = (await client.get("/metrics")).text
            for name in ("awake", "weights_offloaded", "discard_all"):
                told = value(text, "engine_sleep_state", sleep_state=name)
                assert told == (name == state)
            assert 'vllm:engine_sleep_state{engine="0",model_name="fake/model-1",' in text


def test_every_metric_is_described() -> None:
    metrics = ServerMetrics("m")
    metrics.on_grammars(GrammarTimes().totals)
    metrics.on_snapshot(make_snapshot(states=StateView(1, 1, 0, 0, 0, 0)))
    metrics.on_gpu(GpuReading(power_w=684.5, power_limit_w=685.0, energy_j=5000.0))
    page = (Path(__file__).resolve().parents[2] / "docs" / "server.md").read_text(encoding="utf-8")
    shown = set()
    for family in text_string_to_metric_families(metrics.render().decode()):
        name = family.name.removeprefix("termgen_")
        if not name.endswith("_created"):
            shown.add(name + "_total" if family.type == "counter" else name)
    table = page.partition("| metric | |")[2].partition("\n\n")[0]
    described = set(re.findall(r"`([a-z0-9_]+)(?:\{[a-z_,]+\})?`", table))
    words = {"schedule", "launch", "wait", "apply", "host", "busy", "idle"}
    words |= {"queue", "prefill", "decode", "capacity", "deferred", "invalid_schema", "no_process"}
    words |= {"nvml"}
    assert shown == described - words


def test_labels_are_closed_sets() -> None:
    """No user, key or request id can make new series."""
    metrics = ServerMetrics("m")
    metrics.requests.finished("stop")
    metrics.disconnected("decode")
    metrics.on_snapshot(make_snapshot())
    for family in text_string_to_metric_families(metrics.render().decode()):
        for sample in family.samples:
            assert sample.labels.keys() <= {
                "model",
                "le",
                "state",
                "sleep_state",
                "phase",
                "stage",
                "finished_reason",
                "reason",
            }


async def test_power_and_energy_of_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    async with app_client(FakeEngine(model=make_model_info(device="cuda:1"))) as client:
        text = (await client.get("/metrics")).text
        assert value(text, "gpu_power_watts") == 684.5
        assert value(text, "gpu_power_limit_watts") == 685.0
        first = value(text, "gpu_energy_joules_total")
        assert first >= 5000.0
        text = (await client.get("/metrics")).text
        assert value(text, "gpu_energy_joules_total") > first
        nvml.unsupported = {"energy", "limit"}
        text = (await client.get("/metrics")).text
        assert value(text, "gpu_power_watts") == 684.5
        assert "energy_joules" not in text and "limit_watts" not in text


async def test_without_a_gpu_there_is_no_power(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    async with app_client(FakeEngine()) as client:
        assert "gpu_" not in (await client.get("/metrics")).text.replace("num_gpu_blocks", "")
    assert not nvml.reads
