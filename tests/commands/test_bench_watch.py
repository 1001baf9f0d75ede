"""A watched bench: interim figures against final ones, and runs ended early."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from bench_runs import make_run
from fake_engine import FakeEngine, GenerateCall, Script
from server_harness import serving

from termgen.bench import sweep
from termgen.bench.live import METRICS, LiveRun
from termgen.bench.load import Stopped, StopSwitch
from termgen.bench.options import ServeOptions, SweepOptions
from termgen.bench.progress_lines import GAPS_AT_ONCE, AnswerWatch, LiveTimes
from termgen.bench.serve import ServeBench, ServeRun
from termgen.bench.server_api import ServerApi
from termgen.bench.stream_client import Answer
from termgen.commands.cli import main

TOKENS = 12


def test_percentiles_of_ranges_are_within_a_percent() -> None:
    seed = random.randrange(2**32)
    values = np.random.default_rng(seed).lognormal(-4, 1.5, size=5000)
    times, told = LiveTimes(), LiveTimes()
    for part in np.array_split(values, 7):
        for value in part:
            times.add(float(value))
        told.merge(times.take())
    assert times.number == 0 and told.number == 5000 and told.mean is not None, seed
    assert told.mean == pytest.approx(values.mean())
    for share in (0.0, 0.5, 0.9, 0.99, 1.0):
        exact = np.quantile(values, share, method="lower")
        assert told.quantile(share) == pytest.approx(exact, rel=0.006), (seed, share)
    low, high, counts = told.spread(10)
    assert low < high and sum(counts) == 5000
    assert LiveTimes().quantile(0.5) is None and LiveTimes().spread(3) == (0.0, 0.0, [0, 0, 0])


async def test_each_time_is_told_once_and_those_of_failures_are_no_answers() -> None:
    watch, total = AnswerWatch(), LiveTimes()
    long, broken = Answer(began=1.0), Answer(began=1.0)
    watch.begin(0, long)
    watch.begin(1, broken)
    first = await watch.take()
    assert first["finished"] == [] and first["first"] == [[], 0.0]
    long.first, long.gaps = 1.5, [0.01] * (GAPS_AT_ONCE + 5)
    total.merge((await watch.take())["gaps"])
    assert total.number == GAPS_AT_ONCE + 5
    long.gaps.append(0.02)
    long.last, long.num_chunks, long.num_output_tokens = 4.0, 263, 500
    broken.error = "broke"
    watch.end(0)
    watch.end(1)
    told = await watch.take()
    total.merge(told["gaps"])
    assert total.number == GAPS_AT_ONCE + 6 and told["first"] == [[], 0.0], "told before"
    assert told["finished"] == [[0.5, 3.0, 263, 500]]
    assert (await watch.take())["finished"] == []


def paced(call: GenerateCall) -> Script:
    index = call.params.seed or 0
    return Script(pieces=("ab ",) * TOKENS, first_delay_s=0.02 * (1 + index % 3), delay_s=0.01)


async def watched(
    url: str, on_told: Callable[[LiveRun], object], *, stop: StopSwitch | None = None, **flags: Any
) -> tuple[ServeRun, LiveRun]:
    shape: dict[str, Any] = {"num_prompts": 24, "random_input_len": 9, "random_output_len": TOKENS}
    shape |= {"base_url": url, "ready_check_timeout_sec": 0.0, "num_warmups": 1, "watch": True}
    options = ServeOptions(**(shape | flags))
    now = LiveRun(options, options.num_prompts)

    def take(told: dict[str, Any]) -> None:
        now.take(told)
        on_told(now)

    async with ServerApi(url, api_key=None) as api:
        bench = await ServeBench.connect(api, options, asked_model=None, report=print)
        return await bench.run(options, seed=0, on_progress=take, stop=stop), now


async def test_figures_so_far_end_as_those_of_the_report() -> None:
    seen: list[tuple[int, int]] = []
    async with serving(FakeEngine(script=paced)) as server:
        run, now = await watched(
            server.url,
            lambda now: seen.append((now.num_done, now.num_running)),
            max_concurrency=4,
            goodput=("ttft:60000", "e2el:0.001"),
        )
    result = run.result
    assert seen[-1] == (24, 0) and any(0 < done < 24 and running == 4 for done, running in seen)
    for name in METRICS:
        values = np.array(result.values_ms(name)) / 1e3
        assert now.times[name].number == len(values)
        assert now.times[name].mean == pytest.approx(values.mean(), rel=1e-6)
        exact = np.quantile(values, 0.9, method="lower")
        assert now.times[name].quantile(0.9) == pytest.approx(exact, rel=0.006)
    assert now.num_tokens == result.num_output_tokens == 24 * TOKENS
    assert now.good_share == 0.0 and now.kept_share("ttft") == 1.0 and now.left_s == 0.0
    assert len(now.token_rates()) == len(now.answer_rates()) == len(seen)


async def test_a_stopped_run_keeps_what_was_answered() -> None:
    switch, engine = StopSwitch(), FakeEngine(script=paced)
    async with serving(engine) as server:
        run, _ = await watched(
            server.url,
            lambda now: switch.turn_on() if now.num_done >= 3 else None,
            stop=switch,
            num_prompts=900,
            max_concurrency=2,
        )
    result = run.result
    assert 3 <= len(result.times) < 900 and not any(result.errors)
    assert result.num_cut_off == 900 - len(result.times)
    assert result.num_output_tokens == TOKENS * len(result.times)
    assert result.as_json()["cut_off"] == result.num_cut_off
    said = run.warnings()
    assert any("stopped early" in w for w in said) and not any("counted" in w for w in said)


async def test_a_run_stopped_before_the_first_answer_says_so() -> None:
    switch = StopSwitch()
    held = FakeEngine(script=Script(hold_after=1))
    async with serving(held) as server:
        with pytest.raises(Stopped, match="before the first answer"):
            await watched(server.url, lambda _: switch.turn_on(), stop=switch, num_warmups=0)
        with pytest.raises(Stopped, match="before it began"):
            await watched(server.url, lambda _: None, stop=switch)


@pytest.mark.parametrize("goodput", [(), ("ttft:500",)])
async def test_a_sweep_that_is_stopped_keeps_its_whole_steps(goodput: tuple[str, ...]) -> None:
    def server(stop_at: int) -> Any:
        async def run_step(step: ServeOptions, seed: int) -> ServeRun:
            load = step.max_concurrency or 0
            return make_run(
                step,
                first_s=[0.1] * step.num_prompts,
                apart_s=1 / load,
                num_cut_off=5 if load >= stop_at else 0,
            )

        return run_step

    told: list[sweep.Step] = []
    options = SweepOptions(goodput=goodput)
    result = await sweep.run_sweep(options, server(8), seed=1, on_step=told.append)
    assert [s.load for s in result.steps] == [s.load for s in told] == [1, 2, 4]
    assert result.knee is result.steps[-1] and not result.is_open
    assert "at 8 nothing could be measured: the step was stopped" in sweep.verdict(result)
    with pytest.raises(Stopped):
        await sweep.run_sweep(options, server(1), seed=1)


@pytest.mark.parametrize("kind", ["serve", "sweep"])
def test_without_a_terminal_it_is_refused(capsys: pytest.CaptureFixture[str], kind: str) -> None:
    assert main(["bench", kind, "--base-url", "http://127.0.0.1:9", "--watch"]) == 2
    err = capsys.readouterr().err
    assert f"`termgen bench {kind} --watch` needs a terminal; leave --watch out" in err
    assert err.count("\n") == 1
    assert main(["bench", kind, "--watch", "--disable-tqdm"]) == 2
