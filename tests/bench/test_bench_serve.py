"""The load test against a scripted engine on a socket: counts, times, errors, files."""

from __future__ import annotations

import json
import re
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from bench_proxy import Proxy, Seen
from fake_engine import FakeEngine, GenerateCall, Script, make_model_info
from server_harness import serving

from termgen.bench import serve_report
from termgen.bench.load import LoadPlan, run_in_process
from termgen.bench.options import ServeOptions
from termgen.bench.serve import ServeBench, ServeRun, document
from termgen.bench.serve_result import make_result
from termgen.bench.server_api import ServedModel, ServerApi, choose_model, read_counts
from termgen.bench.stream_client import Target
from termgen.errors import ConfigError, EngineError

FIRST_S, GAP_S, TOKENS = 0.25, 0.04, 16


def paced(call: GenerateCall) -> Script:
    assert call.params.max_tokens is not None
    return Script(pieces=("ab ",) * call.params.max_tokens, first_delay_s=FIRST_S, delay_s=GAP_S)


def at_once(call: GenerateCall) -> Script:
    assert call.params.max_tokens is not None
    return Script(pieces=("ab ",) * call.params.max_tokens)


async def measure(url: str, *, seed: int = 0, key: str | None = None, **flags: Any) -> ServeRun:
    options = ServeOptions(**{"base_url": url, "ready_check_timeout_sec": 0.0, **flags})
    async with ServerApi(url, api_key=key) as api:
        bench = await ServeBench.connect(api, options, asked_model=None, report=print)
        return await bench.run(options, seed=seed)


SHAPE: dict[str, Any] = {"num_prompts": 6, "random_input_len": 9, "random_output_len": TOKENS}


async def test_figures_agree_with_the_server_and_with_a_second_client() -> None:
    """Tokens and request counts agree exactly. Times agree within 2% with those seen by a relay
    between client and server, in one of three runs, since other processes may delay either."""
    engine = FakeEngine(script=paced)
    off: list[float] = []
    async with serving(engine) as server, Proxy(server.url) as proxy:
        for attempt in range(3):
            proxy.seen.clear()
            run = await measure(proxy.url, seed=attempt, num_warmups=0, request_rate=30.0, **SHAPE)
            _check_counts(run, proxy.seen)
            off = _differences(run, proxy.seen)
            if max(off) < 0.02:
                break
    assert max(off) < 0.02, off


def _check_counts(run: ServeRun, seen: list[Seen]) -> None:
    result = run.result
    assert result.errors == ("",) * 6 and result.is_counted
    assert result.num_output_tokens == 6 * TOKENS == sum(s.num_tokens for s in seen)
    assert result.num_input_tokens == 6 * 9 == sum(s.num_prompt_tokens for s in seen)
    assert run.server is not None
    assert run.server["generation_tokens"] == 6 * TOKENS
    assert run.server["prompt_tokens"] == 6 * 9
    assert run.server["requests"] == 6
    assert not [w for w in run.warnings() if "counted" in w]
    # the server's clock starts later and stops sooner than the client's, but not by much
    theirs = run.server["request_seconds"] / 6
    ours = statistics.mean(t.latency_s for t in result.times)
    assert 0 <= ours - theirs < 0.25 * ours


def _differences(run: ServeRun, seen: list[Seen]) -> list[float]:
    """Differences in mean TTFT, mean ITL and mean latency, as shares of the second client's
    means."""
    first = statistics.mean(s.texts[0] - s.asked for s in seen)
    gaps = statistics.mean(b - a for s in seen for a, b in zip(s.texts, s.texts[1:], strict=False))
    whole = statistics.mean(s.texts[-1] - s.asked for s in seen)
    assert first > FIRST_S * 0.9 and gaps > GAP_S * 0.9
    found = run.result.statistics()
    pairs = (("ttft", first), ("itl", gaps), ("e2el", whole))
    return [abs(found[f"mean_{name}_ms"] / 1e3 / value - 1) for name, value in pairs]


async def test_every_request_agrees_with_the_servers_own_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The requests run one after the other, so that the log has them in the bench's order."""
    caplog.set_level("INFO")
    shape = SHAPE | {
        "random_range_ratio": 0.6,
        "max_concurrency": 1,
        "num_warmups": 0,
        "num_prompts": 4,
    }
    async with serving(FakeEngine(script=paced), log_requests=True) as server:
        run = await measure(server.url, **shape)
    line = re.compile(
        r"/v1/completions: (\d+) prompt tokens .* (\d+) tokens, .*"
        r"first token ([\d.]+) ms, all ([\d.]+) ms"
    )
    logged = [found for r in caplog.records if (found := line.search(r.getMessage()))]
    times = run.result.times
    assert len(logged) == len(times) == 4
    assert len({t.num_output_tokens for t in times}) > 1, "or the order would not be seen"
    for found, ours in zip(logged, times, strict=True):
        assert int(found[1]) == ours.num_input_tokens
        assert int(found[2]) == ours.num_output_tokens
    # the server's clocks start later and stop sooner, so its times are slightly shorter
    for group, values in ((3, [t.ttft_s for t in times]), (4, [t.latency_s for t in times])):
        theirs, ours_ms = sum(float(found[group]) for found in logged), sum(values) * 1e3
        rounding_ms = 0.05 * len(logged)  # the log has tenths
        assert -rounding_ms <= ours_ms - theirs < 0.25 * ours_ms


async def test_requests_are_what_the_dataset_says() -> None:
    engine = FakeEngine(script=at_once)
    async with serving(engine) as server:
        run = await measure(server.url, num_warmups=2, max_concurrency=1, **SHAPE)
    assert len(engine.calls) == 2 + 6
    for call in engine.calls:
        assert len(list(call.prompt)) == 9 and call.params.ignore_eos and call.params.is_greedy
    assert run.can_tokenize and run.model.owner == "termgen"
    prompts = [tuple(call.prompt) for call in engine.calls]
    assert len(set(prompts)) == 8, "warm-up prompts are others than those that count"
    assert max(run.result.running_by_second()) == 1, "one at a time, however many in a second"
    assert sum(run.result.output_tokens_by_second()) == pytest.approx(6 * TOKENS, abs=0.1)


async def test_chats_and_extra_fields() -> None:
    # this tokenizer makes a token of each byte
    engine = FakeEngine(script=at_once, model=make_model_info(max_model_len=100_000))
    async with serving(engine) as server:
        run = await measure(
            server.url,
            backend="openai-chat",
            dataset_name="synthetic-chat",
            num_prompts=5,
            num_warmups=0,
            extra_body='{"max_completion_tokens": 3, "seed": 7}',
            save_detailed=True,
        )
    assert run.result.num_output_tokens == 15 and run.result.texts == ("ab ab ab ",) * 5
    assert all(call.params.seed == 7 for call in engine.calls)
    detailed = run.result.as_json()
    assert [len(gaps) for gaps in detailed["itls"]] == [2] * 5
    assert detailed["generated_texts"] == ["ab ab ab "] * 5


async def test_the_document_has_vllms_keys(tmp_path: Path) -> None:
    async with serving(FakeEngine(script=at_once)) as server:
        run = await measure(server.url, goodput=("ttft:60000", "e2el:0.000001"), **SHAPE)
    read = json.loads(json.dumps(document(run, None)))
    assert read.keys() >= {
        *("date", "backend", "model_id", "tokenizer_id", "num_prompts", "request_rate"),
        *("burstiness", "max_concurrency", "duration", "completed", "failed"),
        *("total_input_tokens", "total_output_tokens", "request_throughput"),
        *("request_goodput", "output_throughput", "total_token_throughput"),
        *("mean_ttft_ms", "median_ttft_ms", "std_ttft_ms", "p99_ttft_ms", "p99_itl_ms"),
        *("mean_tpot_ms", "p50_e2el_ms", "max_output_tokens_per_s", "max_concurrent_requests"),
        *("input_lens", "output_lens", "ttfts", "start_times", "errors", "machine", "seed"),
    }
    assert read["request_rate"] == "inf" and read["completed"] == 6
    assert read["request_goodput"] == 0.0 and read["good_requests"] == 0
    assert read["output_throughput"] == pytest.approx(6 * TOKENS / read["duration"])
    text = serve_report.summary(run)
    for words in ("6, 0", "54, 96", "time to first token (ttft)", "0.0% of requests", "p99"):
        assert words in text, words


async def test_a_failing_request_is_counted_and_named() -> None:
    def script(call: GenerateCall) -> Script:
        fails = call.request_id == "fake-3" or len(engine.calls) == 4
        return Script(pieces=("x ",) * TOKENS, fail_after=2 if fails else None)

    engine = FakeEngine(script=script)
    async with serving(engine) as server:
        run = await measure(server.url, num_warmups=0, max_concurrency=1, **SHAPE)
    assert len(run.result.times) == 5
    assert sum(bool(e) for e in run.result.errors) == 1
    assert "failed requests: 1, the first with: " in " ".join(run.warnings())
    assert "the step failed" in " ".join(run.warnings())


async def test_what_the_server_refuses_ends_the_bench() -> None:
    async with serving(FakeEngine(script=at_once)) as server:
        with pytest.raises(EngineError, match="a warm-up request failed: status 400: .*temp"):
            await measure(server.url, extra_body='{"temperature": -1}', **SHAPE)
        with pytest.raises(EngineError, match="no request succeeded of 6, .*status 404"):
            await measure(server.url, endpoint="/v1/nothing", num_warmups=0, **SHAPE)
    model = make_model_info(max_model_len=20)
    async with serving(FakeEngine(script=at_once, model=model)) as server:
        with pytest.raises(ConfigError, match="the server's context holds 20"):
            await measure(server.url, **SHAPE)


async def test_no_server_and_no_key_are_said() -> None:
    with pytest.raises(ConfigError, match=r"base_url: http://127.0.0.1:9 does not answer"):
        await measure("http://127.0.0.1:9")
    async with serving(FakeEngine(script=at_once), api_key=("secret",)) as server:
        with pytest.raises(ConfigError, match="status 401; put its key into OPENAI_API_KEY"):
            await measure(server.url)
        run = await measure(server.url, key="secret", **SHAPE)
    assert run.result.num_output_tokens == 6 * TOKENS


def test_a_model_the_server_has_not_is_named() -> None:
    models = [{"id": "one"}, {"id": "two", "max_model_len": 5, "owned_by": "me"}]
    assert choose_model(models, None).model_id == "one"
    assert choose_model(models, "two").max_model_len == 5
    with pytest.raises(ConfigError, match="has no 'three', only one, two"):
        choose_model(models, "three")


def test_counts_are_summed_over_labels_of_either_server() -> None:
    ours = 'termgen_prompt_tokens_total{model="a"} 3.0\ntermgen_request_success_total{r="b"} 2\n'
    ours += 'termgen_request_success_total{r="c"} 5\n# HELP x\n'
    assert read_counts(ours) == {"prompt_tokens": 3.0, "requests": 7.0}
    assert read_counts('vllm:generation_tokens_total{m="x, y"} 4.5') == {"generation_tokens": 4.5}
    assert read_counts("<html>no</html>") is None
    tax = 'termgen_engine_telling_seconds_total{m="a"} 0.5\n'
    tax += 'termgen_engine_device_seconds_total{s="busy"} 40\n'
    tax += 'termgen_engine_device_seconds_total{s="idle"} 10\n'
    assert read_counts(tax) == {"telling_seconds": 0.5, "working_seconds": 50.0}


def test_drafts_of_either_server_are_in_report_and_file() -> None:
    text = 'X_total{m="a"} 160\nYspec_decode_num_draft_tokens_total 200\n'
    text += "Yspec_decode_num_accepted_tokens_total 120\n"
    text += 'Yspec_decode_num_accepted_tokens_per_pos_total{position="0"} 90\n'
    for prefix in ("termgen_", "vllm:"):
        counts = read_counts(
            text.replace("X_total", f"{prefix}generation_tokens_total").replace("Y", prefix)
        )
        wanted = {"generation_tokens": 160.0, "draft_tokens": 200.0, "accepted_tokens": 120.0}
        assert counts == wanted
        run = ServeRun(
            make_result(ServeOptions(num_prompts=1), measured(answer(0.0, 0.1, [0.1])), [4]),
            ServedModel("m", "termgen", 99),
            "http://x",
            0,
            True,
            counts,
        )
        facts = dict(serve_report.rows_of(run))
        assert facts["guessed tokens kept"] == "60.0% of 200"
        assert facts["tokens a step"] == "4.00 for each request in it"
        assert document(run, None)["drafts"] == {"kept_share": 0.6, "tokens_per_step": 4.0}
    for server in (None, {"generation_tokens": 9.0}, {**wanted, "draft_tokens": 0.0}):
        bare = replace(run, server=server)
        facts = dict(serve_report.rows_of(bare))
        assert not {"guessed tokens kept", "tokens a step"} & facts.keys()
        assert document(bare, None)["drafts"] is None


def test_what_watching_cost_is_in_report_and_file() -> None:
    run = ServeRun(
        make_result(ServeOptions(num_prompts=1), measured(answer(0.0, 0.1, [0.1])), [4]),
        ServedModel("m", "termgen", 99),
        "http://x",
        0,
        True,
        {"telling_seconds": 0.5, "working_seconds": 50.0},
    )
    facts = dict(serve_report.rows_of(run))
    assert facts["observer"] == "1% of the engine's time to tell of its steps"
    run = replace(run, screen_share=0.034)
    assert dict(serve_report.rows_of(run))["observer"].endswith(", 3.4% of a core to draw")
    assert document(run, None)["observer"] == {"engine_share": 0.01, "screen_share": 0.034}
    assert "observer" not in dict(
        serve_report.rows_of(replace(run, server=None, screen_share=None))
    )


def answer(start: float, first: float, gaps: list[float], **changes: Any) -> dict[str, Any]:
    return {
        "start_s": start,
        "ttft_s": first,
        "latency_s": first + sum(gaps),
        "gaps_s": gaps,
        "num_chunks": len(gaps) + 1,
        "num_prompt_tokens": 4,
        "num_output_tokens": len(gaps) + 1,
        "num_cached_tokens": None,
        "text": None,
        "error": None,
        **changes,
    }


def measured(*answers: dict[str, Any], lag_s: float = 0.0, cpu: float = 0.1) -> dict[str, Any]:
    return {"answers": answers, "lateness_s": [], "lag_s": [lag_s], "cpu_share": cpu}


def test_the_arithmetic() -> None:
    options = ServeOptions(goodput=("ttft:250", "tpot:150"), metric_percentiles="50,100")
    result = make_result(
        options,
        measured(
            answer(0.0, 0.1, [0.1, 0.3]),
            answer(1.0, 0.2, [0.1, 0.1]),
            answer(1.5, 0.3, []),
            answer(0.0, 0.0, [], error="broke"),
        ),
        [9, 9, 9, 9],
    )
    assert result.duration_s == pytest.approx(1.8) and len(result.times) == 3
    assert result.values_ms("tpot") == pytest.approx([200.0, 100.0])
    assert result.values_ms("itl") == pytest.approx([100.0, 300.0, 100.0, 100.0])
    assert result.num_good == 1, "one has a slow TPOT, one a slow TTFT, one failed"
    figures = result.as_json()
    assert figures["mean_ttft_ms"] == pytest.approx(200) and figures["failed"] == 1
    assert figures["p100_itl_ms"] == pytest.approx(300)
    assert figures["request_goodput"] == pytest.approx(1 / 1.8)
    assert figures["total_token_throughput"] == pytest.approx((12 + 7) / 1.8)
    assert result.running_by_second() == [1, 1]
    assert result.output_tokens_by_second() == [3.0, 4.0]


def test_requests_under_way_are_those_of_one_time() -> None:
    def peaks(*spans: tuple[float, float]) -> list[int]:
        answers = [answer(start, end - start, []) for start, end in spans]
        result = make_result(ServeOptions(), measured(*answers), [9] * len(answers))
        assert result.as_json()["max_concurrent_requests"] == max(result.running_by_second())
        return result.running_by_second()

    one_by_one = [(i / 8, (i + 1) / 8) for i in range(16)]
    assert peaks(*one_by_one) == [1, 1]
    assert peaks((0.2, 3.5), (0.5, 0.6), (2.1, 2.5), (2.4, 2.6), (2.55, 2.9)) == [2, 1, 3, 1]
    assert peaks((0.0, 5.0), (4.5, 4.75)) == [1, 1, 1, 1, 2]


def test_several_tokens_in_a_chunk_are_all_counted() -> None:
    one = answer(0.0, 0.1, [0.2], num_output_tokens=8, num_cached_tokens=3)
    result = make_result(ServeOptions(), measured(one), [9])
    assert result.num_output_tokens == 8 and result.times[0].num_chunks == 2
    assert result.values_ms("tpot") == pytest.approx([200 / 7])
    assert result.output_tokens_by_second() == [8.0]


def test_doubts_are_said() -> None:
    silent = answer(0.0, 0.1, [0.2], num_prompt_tokens=None, num_output_tokens=None)
    result = make_result(ServeOptions(), measured(silent, lag_s=0.05, cpu=0.97), [9])
    assert result.num_input_tokens == 9 and result.num_output_tokens == 2
    said = " ".join(result.warnings())
    for words in ("woke up up to 50 ms late", "97% of a core", "chunks were counted as tokens"):
        assert words in said
    calm = make_result(ServeOptions(), measured(answer(0.0, 0.1, [0.2])), [9])
    assert calm.warnings() == []


async def test_a_load_generator_that_ends_at_once_is_an_error_of_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error is not a broken pipe of the bench's own, whatever it still had to send."""
    program = tmp_path / "ends"
    program.write_text("#!/bin/sh\nexit 9\n")
    program.chmod(0o755)
    monkeypatch.setattr("termgen.bench.load.sys.executable", str(program))
    bodies = ({"prompt": "x" * 2**22},)
    plan = LoadPlan(Target("127.0.0.1", 1, "/"), bodies, (0.0,), max_concurrency=None, timeout_s=1)
    with pytest.raises(EngineError, match="ended early, with code 9"):
        await run_in_process(plan)


def test_the_columns_of_the_times_are_straight() -> None:
    result = make_result(ServeOptions(num_prompts=1), measured(answer(0.0, 0.1, [0.1])), [4])
    run = ServeRun(result, ServedModel("m", "termgen", 99), "http://x", 0, True, None)
    lines = serve_report.times_table(run)
    assert len(lines) == 5 and len({len(line) for line in lines}) == 1, lines
