"""`termgen bench sweep`: a series of load tests, up to the knee.

The load is doubled until a step fails; with latency limits the knee is then narrowed down. A step
that cannot be measured ends the sweep; the steps before it are still reported. `serve` runs a step.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from termgen.bench import plots, report
from termgen.bench.load import Stopped
from termgen.bench.options import ServeOptions, SweepOptions
from termgen.bench.serve import ServeRun
from termgen.errors import EngineError
from termgen.vocabulary.durations import took

REQUESTS_PER_CLIENT = 4
SECONDS = 10.0
SEED_STEP = 7919
"""Steps use different prompts: one must not find those of another in the prefix cache."""

RunStep = Callable[[ServeOptions, int], Awaitable[ServeRun]]
"""(options, seed) -> result."""


@dataclass(frozen=True, slots=True)
class Step:
    load: float
    run: ServeRun
    is_kept: bool
    """The server kept the latency limits, or its throughput rose enough."""

    @property
    def good_share(self) -> float:
        return self.run.result.num_good / len(self.run.result.errors)

    def figure(self, metric: str, percentile: float) -> float:
        """A percentile in milliseconds."""
        return float(np.percentile(self.run.result.values_ms(metric) or [0.0], percentile))

    def as_json(self) -> dict[str, Any]:
        figures = self.run.result.as_json()
        arrays = ("input_lens", "output_lens", "start_times", "ttfts", "e2els")
        for name in (*arrays, "output_tokens_by_second", "running_by_second"):
            del figures[name]
        return {
            "load": self.load,
            "is_kept": self.is_kept,
            "good_share": self.good_share,
            **figures,
            "warnings": self.run.warnings(),
        }


@dataclass(frozen=True, slots=True)
class Failure:
    """A load that could not be measured: no request succeeded, or the step was stopped."""

    load: float
    error: str


@dataclass(frozen=True, slots=True)
class SweepResult:
    options: SweepOptions
    steps: tuple[Step, ...]
    """Sorted by load; at least one."""
    failure: Failure | None
    """The step that ended the sweep early."""

    @property
    def knee(self) -> Step | None:
        """The highest load before the first failing one; None if the first step failed."""
        found = None
        for step in self.steps:
            if not step.is_kept:
                break
            found = step
        return found

    @property
    def is_open(self) -> bool:
        """True if no step failed up to `--sweep-to`: the knee is higher."""
        return self.failure is None and all(step.is_kept for step in self.steps)


async def run_sweep(
    options: SweepOptions,
    run_step: RunStep,
    *,
    seed: int,
    on_step: Callable[[Step], object] | None = None,
) -> SweepResult:
    """Run steps up to the knee; `on_step` gets each measured one. Raises `EngineError` if the first
    step cannot be measured."""
    steps: list[Step] = []
    failures: list[Failure] = []

    async def keeps_at(load: float) -> bool:
        try:
            run = await run_step(step_options(options, load), seed + SEED_STEP * len(steps))
        except EngineError as error:
            if not steps:
                raise
            failures.append(Failure(load, str(error)))
            return False
        if run.result.num_cut_off:
            if not steps:
                raise Stopped("the sweep was stopped in its first step")
            failures.append(Failure(load, "the step was stopped before its end"))
            return False
        steps.append(Step(load, run, keeps(options, run, needed_throughput(options, load, steps))))
        if on_step is not None:
            on_step(steps[-1])
        return steps[-1].is_kept

    load, last_kept = options.sweep_from, 0.0
    while (is_kept := await keeps_at(load)) and load < options.sweep_to:
        last_kept, load = load, min(load * 2, options.sweep_to)
    if options.goodput and not is_kept:
        low, high = last_kept, load
        for _ in range(options.sweep_refine):
            middle = _middle(options, low, high)
            if middle is None or failures:
                break
            if await keeps_at(middle):
                low = middle
            else:
                high = middle
    by_load = tuple(sorted(steps, key=lambda s: s.load))
    return SweepResult(options, by_load, failures[0] if failures else None)


def step_options(options: SweepOptions, load: float) -> ServeOptions:
    """The load test of one step."""
    values = {f.name: getattr(options, f.name) for f in dataclasses.fields(ServeOptions)}
    if options.sweep_over == "concurrency":
        clients = round(load)
        values["max_concurrency"] = clients
        values["request_rate"] = math.inf
        values["num_prompts"] = max(options.num_prompts, REQUESTS_PER_CLIENT * clients)
    else:
        values["request_rate"] = load
        values["num_prompts"] = max(options.num_prompts, math.ceil(load * SECONDS))
    return ServeOptions(**values)


def needed_throughput(options: SweepOptions, load: float, before: Sequence[Step]) -> float:
    """Throughput that a step must reach when there are no latency limits: the best so far plus
    `sweep_gain` per doubling. The last step may raise the load by less than a doubling."""
    best: float = max((s.run.result.as_json()["output_throughput"] for s in before), default=0.0)
    doublings = math.log2(load / before[-1].load) if before else 0.0
    return best * math.pow(1 + options.sweep_gain / 100, doublings)


def keeps(options: SweepOptions, run: ServeRun, needed: float) -> bool:
    if options.goodput:
        share = run.result.num_good / len(run.result.errors)
        return share * 100 >= options.sweep_attainment
    if any(run.result.errors):
        return False
    throughput: float = run.result.as_json()["output_throughput"]
    return throughput >= needed


def _middle(options: SweepOptions, low: float, high: float) -> float | None:
    middle = (low + high) / 2
    if options.sweep_over == "concurrency":
        middle = float(int(middle))
    else:
        middle = float(f"{middle:.3g}")
    return middle if low < middle < high else None


def document(result: SweepResult, run: ServeRun, engine_flags: list[str] | None) -> dict[str, Any]:
    """The JSON object. `run`: any of the steps, as they share the server."""
    knee = result.knee
    return {
        "date": time.strftime("%Y%m%d-%H%M%S"),
        "bench": "sweep",
        "label": result.options.label,
        "model_id": run.model.model_id,
        "knee": None if knee is None else knee.load,
        "knee_is_beyond": result.is_open,
        "levels": [step.as_json() for step in result.steps],
        "failure": None if result.failure is None else dataclasses.asdict(result.failure),
        "url": run.url,
        "options": dataclasses.asdict(result.options),
        "engine_flags": engine_flags,
        "machine": report.machine(),
        "versions": report.versions(),
        "git_sha": report.git_sha(),
    }


def summary(result: SweepResult) -> str:
    heading = ["termgen bench sweep", "-" * 19, verdict(result)]
    parts = (heading, steps_table(result), curve(result))
    return "\n\n".join("\n".join(lines) for lines in parts)


def steps_table(result: SweepResult) -> list[str]:
    title = {"concurrency": "clients", "rate": "asked/s"}[result.options.sweep_over]
    names = [title, "requests/s", "tokens/s", "TTFT p50", "TTFT p99", "TPOT p50", "TPOT p99"]
    good = f"{'good':>8}" if result.options.goodput else ""
    lines = ["".join(f"{n:>12}" for n in names) + good]
    for step in result.steps:
        figures = step.run.result.as_json()
        cells = [
            f"{step.load:g}",
            f"{figures['request_throughput']:.2f}",
            f"{figures['output_throughput']:.1f}",
            *(took(step.figure(m, p)) for m in ("ttft", "tpot") for p in (50, 99)),
        ]
        good = f"{step.good_share:>8.0%}" if result.options.goodput else ""
        mark = "  <- knee" if step is result.knee else ""
        lines.append("".join(f"{c:>12}" for c in cells) + good + mark)
    return lines


def verdict(result: SweepResult) -> str:
    options, knee = result.options, result.knee
    limit = (
        f"{options.sweep_attainment:g}% of requests within {' '.join(options.goodput)}"
        if options.goodput
        else f"a doubled load adding {options.sweep_gain:g}% of throughput"
    )
    end = ", and no step was too much: raise --sweep-to" if result.is_open else ""
    if result.failure is not None:
        end = f"; at {result.failure.load:g} nothing could be measured: {result.failure.error}"
    if knee is None:
        return f"no knee: {load_words(options, result.steps[0].load)} is too much ({limit}){end}"
    return f"knee: {load_words(options, knee.load)} ({limit}){end}"


def load_words(options: SweepOptions, load: float) -> str:
    unit = {"concurrency": "clients", "rate": "requests/s"}[options.sweep_over]
    return "1 client" if unit == "clients" and load == 1 else f"{load:g} {unit}"


def judged_percentile(options: SweepOptions) -> float:
    """Percentile of the TTFT that a plot shows: with a limit for it the one that must be within,
    so that a point above the line is a step that failed."""
    return options.sweep_attainment if "ttft" in options.slo_ms() else 99


def curve(result: SweepResult) -> list[str]:
    percentile = judged_percentile(result.options)
    points = [
        (s.load, s.figure("ttft", percentile), "●" if s.is_kept else "○") for s in result.steps
    ]
    return plots.scatter(
        points,
        title=f"TTFT p{percentile:g} (● kept, ○ too much)",
        x_title={"concurrency": "clients", "rate": "requests/s"}[result.options.sweep_over],
        limit=result.options.slo_ms().get("ttft"),
    )
