"""The benches over a scripted engine: requests, counts and files."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_engine import FakeEngine, GenerateCall, Script, make_model_info

from termgen.bench import report
from termgen.bench.offline import (
    LatencyResult,
    ThroughputResult,
    check_fits,
    equal_requests,
    job256,
    run_latency,
    run_throughput,
    throughput_requests,
)
from termgen.bench.options import LatencyOptions, ThroughputOptions
from termgen.config import EngineConfig
from termgen.errors import ConfigError, EngineError


def endless(call: GenerateCall) -> Script:
    """A script of exactly `max_tokens` tokens."""
    assert call.params.max_tokens is not None
    return Script(pieces=("x",) * call.params.max_tokens)


def test_workloads_are_seeded() -> None:
    one = equal_requests(3, 5, 7, vocab_size=100, seed=1)
    assert one == equal_requests(3, 5, 7, vocab_size=100, seed=1)
    assert one != equal_requests(3, 5, 7, vocab_size=100, seed=2)
    assert [len(r.prompt_token_ids) for r in one] == [5, 5, 5]
    assert {r.output_len for r in one} == {7}
    assert len({r.prompt_token_ids for r in one}) == 3
    assert all(0 <= t < 100 for r in one for t in r.prompt_token_ids)


def test_job256_is_what_it_says() -> None:
    job = job256(vocab_size=1000, seed=0)
    assert job == job256(vocab_size=1000, seed=0)
    assert len(job) == 256
    inputs, outputs = [len(r.prompt_token_ids) for r in job], [r.output_len for r in job]
    for lengths in (inputs, outputs):
        assert 100 <= min(lengths) < 120 and 1000 < max(lengths) <= 1024
        assert 500 < sum(lengths) / 256 < 625
    assert inputs != outputs


async def test_latency_runs_every_batch_to_its_full_length() -> None:
    engine = FakeEngine(script=endless)
    options = LatencyOptions(
        input_len=6, output_len=5, batch_size=3, num_iters_warmup=2, num_iters=4
    )
    result = await run_latency(engine, options, seed=0, show_progress=False)
    assert len(engine.calls) == 3 * (2 + 4)
    for call in engine.calls:
        assert len(list(call.prompt)) == 6
        assert call.params.max_tokens == 5 and call.params.ignore_eos and call.params.is_greedy
    assert len(result.latencies) == 4 and min(result.latencies) > 0
    figures = result.as_json()
    assert set(figures["percentiles"]) == {"10", "25", "50", "75", "90", "99"}
    assert figures["avg_latency"] == pytest.approx(sum(result.latencies) / 4)
    assert figures["tokens_per_second"] == pytest.approx(3 * 5 / figures["avg_latency"])


def test_latency_arithmetic() -> None:
    options = LatencyOptions(batch_size=2, output_len=11, num_iters=2)
    result = LatencyResult(options, (1.0, 3.0), (0.5, 1.5))
    assert result.avg_latency == 2.0 and result.avg_ttft == 1.0
    assert result.tokens_per_second == pytest.approx(22 / 2)
    assert result.decode_tokens_per_second == pytest.approx(20 / 1)
    assert result.as_json()["percentiles"]["50"] == pytest.approx(2.0)
    single = LatencyResult(LatencyOptions(output_len=1), (1.0,), (1.0,))
    assert single.decode_tokens_per_second is None
    assert ("output tokens/s, decode only", "-") in single.rows()


async def test_throughput_counts_what_it_ran() -> None:
    engine = FakeEngine(script=endless)
    options = ThroughputOptions(num_prompts=7, input_len=4, output_len=3)
    result = await run_throughput(engine, options, seed=0, show_progress=False)
    assert len(engine.calls) == 7 + 1, "one warm-up"
    assert result.num_requests == 7
    assert (result.num_prompt_tokens, result.num_output_tokens) == (28, 21)
    figures = result.as_json()
    assert figures["total_num_tokens"] == 49
    assert figures["tokens_per_second"] == pytest.approx(49 / figures["elapsed_time"])
    assert figures["output_tokens_per_second"] == pytest.approx(21 / figures["elapsed_time"])
    assert figures["requests_per_second"] == pytest.approx(7 / figures["elapsed_time"])


def guessing(engine: FakeEngine) -> FakeEngine:
    """Each request had 8 guesses, of which 2 stayed."""
    generate = engine.generate

    async def with_drafts(*args: Any, **options: Any) -> Any:
        async for delta in generate(*args, **options):
            yield replace(delta, num_draft_tokens=8, num_accepted_tokens=2)

    engine.generate = with_drafts  # type: ignore[method-assign]
    return engine


async def test_guessed_tokens_of_the_measured_requests() -> None:
    engine = guessing(FakeEngine(script=endless, model=make_model_info(num_drafts=4)))
    options = ThroughputOptions(num_prompts=7, input_len=4, output_len=6)
    result = await run_throughput(engine, options, seed=0, show_progress=False)
    assert result.drafts == (56, 14), "without the warm-up"
    assert result.as_json()["drafts"] == {"kept_share": 0.25, "tokens_per_step": 1.5}
    rows = dict(result.rows())
    assert rows["guessed tokens kept"] == "25.0% of 56"
    assert rows["tokens a step"] == "1.50 for each request in it"
    few = LatencyOptions(input_len=6, output_len=6, batch_size=3, num_iters_warmup=2, num_iters=4)
    latency = await run_latency(engine, few, seed=0, show_progress=False)
    assert latency.drafts == (3 * 4 * 8, 3 * 4 * 2)
    assert latency.as_json()["drafts"] == {"kept_share": 0.25, "tokens_per_step": 1.5}
    assert dict(latency.rows())["tokens a step"] == "1.50 for each request in it"


async def test_an_engine_without_a_guess() -> None:
    options = ThroughputOptions(num_prompts=2, input_len=4, output_len=3)
    engine = FakeEngine(script=endless, model=make_model_info(num_drafts=4))
    result = await run_throughput(engine, options, seed=0, show_progress=False)
    assert result.as_json()["drafts"] == {"tokens_per_step": 1.0}
    assert dict(result.rows())["guessed tokens kept"] == "none was guessed"
    off = await run_throughput(FakeEngine(script=endless), options, seed=0, show_progress=False)
    assert off.as_json()["drafts"] is None and "tokens a step" not in dict(off.rows())


async def test_throughput_of_the_job() -> None:
    engine = FakeEngine(script=endless)
    result = await run_throughput(
        engine, ThroughputOptions(dataset_name="job256"), seed=0, show_progress=False
    )
    job = job256(vocab_size=engine.model.vocab_size, seed=0)
    submitted = Counter(tuple(call.prompt) for call in engine.calls[1:])
    assert submitted == Counter(r.prompt_token_ids for r in job)
    assert result.num_output_tokens == sum(r.output_len for r in job)


def test_lengths_vary_around_those_asked_for() -> None:
    options = ThroughputOptions(
        num_prompts=300, input_len=20, output_len=10, random_range_ratio=0.5
    )
    made = throughput_requests(options, vocab_size=100, seed=1)
    assert made == throughput_requests(options, vocab_size=100, seed=1) and len(made) == 300
    assert {len(r.prompt_token_ids) for r in made} == set(range(10, 31))
    assert {r.output_len for r in made} == set(range(5, 16))


async def test_a_short_answer_is_an_error_not_a_figure() -> None:
    engine = FakeEngine(script=Script(pieces=("x",) * 3))
    options = ThroughputOptions(num_prompts=2, input_len=4, output_len=9)
    with pytest.raises(EngineError, match="made 3 tokens instead of"):
        await run_throughput(engine, options, seed=0, show_progress=False)


async def test_a_failing_request_stops_the_bench() -> None:
    def script(call: GenerateCall) -> Script:
        fails = call.request_id == "fake-3"
        return Script(pieces=("x",) * 9, fail_after=2 if fails else None, delay_s=0.01)

    engine = FakeEngine(script=script)
    options = LatencyOptions(output_len=9, batch_size=6, num_iters=1, num_iters_warmup=0)
    with pytest.raises(EngineError, match="the step failed"):
        await run_latency(engine, options, seed=0, show_progress=False)
    assert not engine.live, "the other requests of the batch are cancelled"


async def test_a_shape_beyond_the_context_is_refused_first() -> None:
    engine = FakeEngine(script=endless, model=make_model_info(max_model_len=100))
    options = LatencyOptions(input_len=60, output_len=41)
    with pytest.raises(ConfigError, match="up to 101 tokens, but the model's context holds 100"):
        await run_latency(engine, options, seed=0, show_progress=False)
    assert not engine.calls
    check_fits(equal_requests(1, 60, 40, vocab_size=9, seed=0), max_model_len=100)


@pytest.mark.parametrize("name", ["num_prompts", "input_len", "output_len"])
def test_the_job_cannot_be_bent(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} cannot be changed"):
        ThroughputOptions(dataset_name="job256", **{name: 5})


def test_document_has_vllms_keys_and_the_circumstances(tmp_path: Path) -> None:
    model = make_model_info()
    config = EngineConfig(load_format="dummy")
    latency = LatencyOptions(num_iters=1)
    throughput = ThroughputOptions()
    results = (
        ("latency", latency, LatencyResult(latency, (1.0,), (0.1,))),
        ("throughput", throughput, ThroughputResult(throughput, 2.0, 10, 30, 50)),
    )
    keys = {
        "latency": {"avg_latency", "latencies", "percentiles"},
        "throughput": {
            "elapsed_time",
            "num_requests",
            "total_num_tokens",
            "requests_per_second",
            "tokens_per_second",
        },
    }
    for name, options, result in results:
        path = tmp_path / f"{name}.json"
        document = report.document(name, model, result, config=config, options=options)
        report.write(str(path), document)
        read = json.loads(path.read_text())
        assert keys[name] <= read.keys()
        assert read["engine_config"]["load_format"] == "dummy"
        assert read["machine"]["cores"] >= 1 and read["machine"]["memory_bytes"] > 0
        assert read["versions"]["torch"] and read["model"]["id"] == model.model_id
        assert "ignore_eos" in read["note"]
        text = report.summary(name, model, result)
        assert model.model_id in text and "ignore_eos" in text
        assert all(value in text for _, value in result.rows())
    assert list(tmp_path.glob("*.part")) == []


def test_an_unwritable_file_is_found_before_measuring(tmp_path: Path) -> None:
    report.check_writable(None)
    report.check_writable(str(tmp_path / "new.json"))
    for path in (tmp_path / "none" / "x.json", tmp_path):
        with pytest.raises(ConfigError, match="cannot be written"):
            report.check_writable(str(path))


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    with pytest.raises(ConfigError, match="cannot be written"):
        report.write(str(tmp_path / "taken"), {})
    assert [p.name for p in tmp_path.iterdir()] == ["taken"]
