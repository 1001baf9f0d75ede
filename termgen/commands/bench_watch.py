"""`termgen bench serve --watch` and `termgen bench sweep --watch`: a bench with a live screen.

The bench is a task beside the app, and its load generator a child process: the screen only reads
progress reports and delays neither. Results are written before the report is shown; the report is
printed again on the plain terminal.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from termgen.bench import live, serve_report, sweep
from termgen.bench.live import LiveRun
from termgen.bench.load import Stopped, StopSwitch
from termgen.bench.options import ServeOptions, SweepOptions
from termgen.bench.serve import ServeRun
from termgen.commands.bench_run import (
    Connection,
    Subject,
    connected,
    save_serve,
    save_sweep,
    say,
    step_title,
    tell_serve,
    tell_sweep,
)
from termgen.commands.exit_codes import INTERRUPTED, OK
from termgen.commands.remote_command import read_key
from termgen.config import UIConfig
from termgen.errors import EngineError
from termgen.system.remembered import Remembered
from termgen.tui.bench.bench_view import BenchView, Plane, Section, Series, Spread, Target, TimesRow
from termgen.tui.bench_app import BenchApp
from termgen.tui.feeds.attach import RemoteFeed
from termgen.tui.feeds.feed import StreamFeed
from termgen.tui.paint.formatting import percent, rate, took

SPREAD_PARTS = 20
SHORT = {"ttft": "TTFT", "itl": "ITL", "tpot": "TPOT", "e2el": "e2e"}
SHARES = (0.5, 0.9, 0.99)


@dataclass(frozen=True, slots=True)
class Outcome:
    report: tuple[Section, ...]
    tell: Callable[[], None]
    """Prints the report on the plain terminal."""
    is_whole: bool
    """False if the bench was stopped early."""


Measure = Callable[["BenchWatch", Connection], Awaitable[Outcome]]


class BenchWatch:
    """One bench and its progress so far; `view` is what the screen draws."""

    def __init__(self, options: ServeOptions, subject: Subject, *, hz: float) -> None:
        self.options = options
        self.subject = subject
        self.switch = StopSwitch()
        self.outcome: Outcome | None = None
        self.task: asyncio.Task[None] | None = None
        self._hz = hz
        self._connection: Connection | None = None
        self._phase = "connecting" if subject.url is not None else "starting a server"
        self._live = LiveRun(options, options.num_prompts)
        self._step = ""
        self._steps: list[sweep.Step] = []
        self._exact: tuple[TimesRow, ...] = ()

    def begin(self, stack: contextlib.AsyncExitStack, measure: Measure) -> asyncio.Task[None]:
        """Start the bench. Its server runs until `stack` ends, so the engine can be inspected
        after the run."""
        self.task = asyncio.create_task(self._run(stack, measure))
        return self.task

    async def _run(self, stack: contextlib.AsyncExitStack, measure: Measure) -> None:
        server = connected(self.subject, self.options, self._hear, self._hear_phase)
        self._connection = await stack.enter_async_context(server)
        self.outcome = await measure(self, self._connection)

    def _hear(self, line: str) -> None:
        self._phase = line

    def _hear_phase(self, phase: str, share: float) -> None:
        self._phase = f"the server: {phase} {share:.0%}" if share else f"the server: {phase}"

    def begin_step(self, options: ServeOptions, title: str = "") -> None:
        self._live = LiveRun(options, options.num_prompts)
        self._step, self._phase = title, "warming up"

    def take(self, report: dict[str, Any]) -> None:
        """The load generator's `on_progress`."""
        self._live.take(report)
        self._phase = "measuring"

    def end_step(self, step: sweep.Step) -> None:
        self._steps.append(step)

    def end_run(self, run: ServeRun) -> None:
        """Replace the live times by the exact ones of the report."""
        self._exact = tuple(_exact_row(run, name) for name in live.METRICS)

    def stop(self) -> None:
        """End the bench and keep its results so far; before the server answers, cancel it."""
        self.switch.turn_on()
        if self._connection is None and self.task is not None:
            self.task.cancel()

    async def open_feed(self) -> StreamFeed:
        if self._connection is None:
            raise EngineError("the server does not answer yet")
        key = self._connection.admin_key or read_key(None)
        return await RemoteFeed.connect(self._connection.url, hz=self._hz, key=key)

    def view(self) -> BenchView:
        now = self._live
        return BenchView(
            subject=self._subject(),
            load=_load_words(self.options, self.subject.seed),
            phase=self._phase_words(),
            step=self._step,
            num_done=now.num_done,
            num_requests=now.num_requests,
            left_s=now.left_s,
            elapsed_s=now.at_s,
            targets=tuple(_targets(now, self.options)),
            times=self._exact or tuple(_times_row(now, name) for name in live.METRICS),
            rates=tuple(_rates(now)),
            series=_series(now),
            spread=_spread(now),
            plane=self._plane(),
            report=self.outcome.report if self.outcome is not None else (),
        )

    def _phase_words(self) -> str:
        if self.outcome is not None:
            return "done" if self.outcome.is_whole else "stopped"
        return "stopping" if self.switch.is_on else self._phase

    def _subject(self) -> str:
        if self._connection is None:
            return self.subject.url or ""
        model = self._connection.bench.model
        return f"{model.model_id} at {self._connection.url.partition('://')[2]}"

    def _plane(self) -> Plane | None:
        options = self.options
        if not isinstance(options, SweepOptions):
            return None
        x_title = {"concurrency": "clients", "rate": "requests/s"}[options.sweep_over]
        percentile = sweep.judged_percentile(options)
        points = [(s.load, s.figure("ttft", percentile), s.is_kept) for s in self._steps]
        limit = options.slo_ms().get("ttft")
        return Plane(f"TTFT p{percentile:g}", x_title, tuple(sorted(points)), limit)


def watch_serve(options: ServeOptions, subject: Subject, ui: UIConfig) -> int:
    return _show(BenchWatch(options, subject, hz=ui.dashboard_hz), ui, measure_serve)


def watch_sweep(options: SweepOptions, subject: Subject, ui: UIConfig) -> int:
    return _show(BenchWatch(options, subject, hz=ui.dashboard_hz), ui, measure_sweep)


def _show(
    watch: BenchWatch,
    ui: UIConfig,
    measure: Measure,
) -> int:
    BenchApp.check_settings(ui)
    return asyncio.run(_show_and_measure(watch, ui, measure))


async def _show_and_measure(
    watch: BenchWatch,
    ui: UIConfig,
    measure: Measure,
) -> int:
    async with contextlib.AsyncExitStack() as stack:

        def begin() -> None:
            watch.begin(stack, measure).add_done_callback(leave_without_report)

        def leave_without_report(_task: asyncio.Task[None]) -> None:
            if watch.outcome is None:
                app.exit()

        app = BenchApp(
            watch.view,
            begin=begin,
            stop=watch.stop,
            open_feed=watch.open_feed,
            ui=ui,
            remembered=Remembered.of_user(),
        )
        await app.run_async()
        if watch.task is None:  # the screen could not be opened and has printed the reason
            return app.return_code or OK
        if not watch.task.done():
            watch.stop()
            await asyncio.wait({watch.task})
        if watch.task.cancelled():
            say("stopped before anything was measured")
            return INTERRUPTED
        try:
            watch.task.result()
        except Stopped as stopped:
            say(str(stopped))
            return INTERRUPTED
    assert watch.outcome is not None
    watch.outcome.tell()
    return app.return_code or OK


async def watched_run(
    watch: BenchWatch, server: Connection, options: ServeOptions, seed: int
) -> ServeRun:
    """Measure, with the CPU share of this thread, which draws the screen and reads progress."""
    began, drawn = time.perf_counter(), time.thread_time()
    run = await server.bench.run(options, seed=seed, on_progress=watch.take, stop=watch.switch)
    share = (time.thread_time() - drawn) / (time.perf_counter() - began)
    return dataclasses.replace(run, screen_share=share)


async def measure_serve(watch: BenchWatch, server: Connection) -> Outcome:
    options, subject = watch.options, watch.subject
    watch.begin_step(options)
    run = await watched_run(watch, server, options, subject.seed)
    watch.end_run(run)
    files = save_serve(run, subject)
    facts = serve_report.rows_of(run)
    width = max(len(name) for name, _ in facts) + 2
    sections = [
        _section("files", files),
        _section("load test", [f"{name:<{width}}{value}" for name, value in facts]),
        _section("times", serve_report.times_table(run)),
        *(_section(*part) for part in serve_report.distributions(run)),
        *(_section(*part) for part in serve_report.over_time(run)),
    ]
    if warnings := run.warnings():
        sections.insert(1, _section("warnings", warnings))

    def tell() -> None:
        tell_serve(run)
        _say_all(files)

    return Outcome(tuple(sections), tell, not run.result.num_cut_off)


async def measure_sweep(watch: BenchWatch, server: Connection) -> Outcome:
    options, subject = watch.options, watch.subject
    assert isinstance(options, SweepOptions)

    async def run_step(step: ServeOptions, seed: int) -> ServeRun:
        watch.begin_step(step, step_title(options, step))
        return await watched_run(watch, server, step, seed)

    result = await sweep.run_sweep(options, run_step, seed=subject.seed, on_step=watch.end_step)
    files = save_sweep(result, subject)
    warnings = [f"at {s.load:g}: {w}" for s in result.steps for w in s.run.warnings()]
    sections = [
        _section("files", files),
        _section(sweep.verdict(result), sweep.curve(result)),
        _section("steps", sweep.steps_table(result)),
    ]
    if warnings:
        sections.append(_section("warnings", warnings))
    if result.knee is not None:
        parts = serve_report.distributions(result.knee.run)
        sections += [_section(f"at the knee: {title}", lines) for title, lines in parts]

    def tell() -> None:
        tell_sweep(result)
        _say_all(files)

    return Outcome(tuple(sections), tell, not watch.switch.is_on)


def _say_all(lines: Sequence[str]) -> None:
    for line in lines:
        say(line)


def _section(title: str, lines: Sequence[str]) -> Section:
    return Section(title, tuple(lines))


def _load_words(options: ServeOptions, seed: int) -> str:
    words = f"{options.dataset_name} ×{options.num_prompts}"
    if isinstance(options, SweepOptions):
        words = f"sweep · {options.dataset_name}"
    return f"{words} · seed {seed}"


def _targets(now: LiveRun, whole: ServeOptions) -> list[Target]:
    """Targets for the request rate and for the latencies."""
    options, found = now.options, []
    if options.has_rate:
        sent = (now.num_done + now.num_running) / now.at_s if now.at_s else 0.0
        found.append(Target("rate", f"{options.request_rate:g}/s", f"{rate(sent)}/s"))
    seats = options.max_concurrency
    if seats is not None:
        found.append(Target("at once", f"at most {seats}", str(now.num_running)))
    elif not options.has_rate:
        is_trace = options.dataset_name == "trace" and options.request_rate is None
        words = "as in the trace" if is_trace else "all"
        found.append(Target("at once", words, str(now.num_running)))
    needed = whole.sweep_attainment / 100 if isinstance(whole, SweepOptions) else None
    for name, limit in options.slo_ms().items():
        share = now.kept_share(name)
        is_kept = None if needed is None or share is None else share >= needed
        asked = f"≤ {took(limit)}"
        found.append(Target(SHORT[name], asked, f"{percent(share)} of answers", is_kept))
    return found


def _times_row(now: LiveRun, metric: str) -> TimesRow:
    times = now.times[metric]
    return TimesRow(SHORT[metric], _ms(times.mean), *(_ms(times.quantile(s)) for s in SHARES))


def _exact_row(run: ServeRun, metric: str) -> TimesRow:
    return TimesRow(SHORT[metric], *run.result.summary_ms(metric, [s * 100 for s in SHARES]))


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3


def _rates(now: LiveRun) -> list[tuple[str, str]]:
    found = [
        ("output tok/s", rate(now.tokens_per_s)),
        ("requests/s", f"{now.requests_per_s:.2f}"),
        ("errors", str(now.num_failed)),
    ]
    if now.good_share is not None:
        good = now.num_good / now.at_s if now.at_s else 0.0
        found.append(("goodput", f"{percent(now.good_share)} of requests, {good:.2f}/s"))
    return found


def _series(now: LiveRun) -> tuple[Series, ...]:
    if not now.moments:
        return ()
    tokens, answers = now.token_rates(), now.answer_rates()
    running = tuple(float(m.running) for m in now.moments)
    return (
        Series("in flight", running, str(now.num_running), "decode"),
        Series("output tok/s", tuple(tokens), rate(tokens[-1]), "prefill"),
        Series("answers/s", tuple(answers), rate(answers[-1]), "latency"),
    )


def _spread(now: LiveRun) -> Spread:
    low, high, counts = now.times["ttft"].spread(SPREAD_PARTS)
    return Spread("time to first token", low * 1e3, high * 1e3, tuple(counts))
