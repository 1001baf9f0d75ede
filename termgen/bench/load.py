"""The load generator: a separate process that sends requests when they are due and times them.

Run as `python -m termgen.bench.load`: it reads a `LoadPlan` as JSON from standard input and prints
progress as JSON lines, the last with all measurements. It imports neither the engine nor numpy, so
that it starts quickly and no other thread delays it. It also measures itself: how late it sends,
how late its event loop wakes, its CPU share. SIGTERM ends the run early; answers that are complete
by then are still reported.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from termgen.bench.progress_lines import AnswerWatch
from termgen.bench.stream_client import Answer, Connector, Target
from termgen.errors import EngineError

REPORT_S = 0.25
TICK_S = 0.01
"""Interval at which the event loop's wake-up delay is sampled."""
LEAD_S = 0.05
"""Delay before the first request, so that preparing the run is not part of it."""

LINE_LIMIT = 2**31
"""Bytes per line; the last line holds every time of the run."""


@dataclass(frozen=True, slots=True)
class LoadPlan:
    target: Target
    bodies: tuple[dict[str, Any], ...]
    due_s: tuple[float, ...]
    """[num_bodies] seconds after the start, ascending."""
    max_concurrency: int | None
    timeout_s: float
    keeps_texts: bool = False
    is_watched: bool = False
    """Include times in the progress reports."""

    def as_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> LoadPlan:
        values = json.loads(text)
        target = values.pop("target")
        target["headers"] = tuple((name, value) for name, value in target["headers"])
        return cls(target=Target(**target), **values)


@dataclass(slots=True)
class _Run:
    plan: LoadPlan
    connector: Connector
    began: float
    answers: list[dict[str, Any]]
    """[num_bodies]; empty for a request that has no answer yet."""
    watch: AnswerWatch | None
    lateness: list[float] = field(default_factory=list)
    lags: list[float] = field(default_factory=list)
    num_running: int = 0
    num_done: int = 0
    num_failed: int = 0
    num_chunks: int = 0


async def run_load(plan: LoadPlan, stop: asyncio.Event | None = None) -> dict[str, Any]:
    """Send all requests, wait for the answers, return the measurements. `stop` ends the run early;
    requests without an answer by then are empty in `answers`."""
    encoded = [json.dumps(body).encode() for body in plan.bodies]
    connector = await Connector.find(plan.target)
    watch = AnswerWatch() if plan.is_watched else None
    answers: list[dict[str, Any]] = [{} for _ in plan.bodies]
    run = _Run(plan, connector, time.perf_counter() + LEAD_S, answers, watch)
    cpu, wall = time.process_time(), time.perf_counter()
    helpers = [asyncio.create_task(_watch(run)), asyncio.create_task(_report(run))]
    sending = asyncio.create_task(_send(run, encoded))
    helpers.append(asyncio.create_task(_cancel_at(stop or asyncio.Event(), sending)))
    try:
        await sending
    except asyncio.CancelledError:
        if stop is None or not stop.is_set():
            raise
    for helper in helpers:
        helper.cancel()
    await _report_progress(run)
    return {
        "answers": run.answers,
        "lateness_s": run.lateness,
        "lag_s": run.lags,
        "cpu_share": (time.process_time() - cpu) / max(1e-9, time.perf_counter() - wall),
    }


async def _send(run: _Run, encoded: list[bytes]) -> None:
    seats = asyncio.Semaphore(run.plan.max_concurrency or len(encoded))
    async with asyncio.TaskGroup() as group:
        for index, (body, due) in enumerate(zip(encoded, run.plan.due_s, strict=True)):
            wait = run.began + due - time.perf_counter()
            # sleep even when late, so that the loop reads what has arrived
            await asyncio.sleep(max(0.0, wait))
            if due > 0:
                run.lateness.append(time.perf_counter() - run.began - due)
            group.create_task(_one(run, index, body, seats))


async def _cancel_at(stop: asyncio.Event, sending: asyncio.Task[None]) -> None:
    await stop.wait()
    sending.cancel()


async def _one(run: _Run, index: int, body: bytes, seats: asyncio.Semaphore) -> None:
    answer = Answer()
    async with seats:
        run.num_running += 1
        if run.watch is not None:
            run.watch.begin(index, answer)
        await run.connector.ask(body, timeout_s=run.plan.timeout_s, answer=answer)
        run.num_running -= 1
    run.num_done += 1
    run.num_failed += answer.error is not None
    run.num_chunks += answer.num_chunks
    if run.watch is not None:
        run.watch.end(index)
    run.answers[index] = _as_json(answer, run.began, keeps_text=run.plan.keeps_texts)


def _as_json(answer: Answer, began: float, *, keeps_text: bool) -> dict[str, Any]:
    # A stream may have no chunk with text (special tokens only): its first chunk is then its start.
    first = answer.first or answer.last
    return {
        "start_s": answer.began - began,
        "ttft_s": first - answer.began if first else 0.0,
        "latency_s": answer.last - answer.began if answer.last else 0.0,
        "gaps_s": answer.gaps,
        "num_chunks": answer.num_chunks,
        "num_prompt_tokens": answer.num_prompt_tokens,
        "num_output_tokens": answer.num_output_tokens,
        "num_cached_tokens": answer.num_cached_tokens,
        "text": "".join(answer.texts) if keeps_text else None,
        "error": answer.error,
    }


async def _watch(run: _Run) -> None:
    while True:
        due = time.perf_counter() + TICK_S
        await asyncio.sleep(TICK_S)
        run.lags.append(max(0.0, time.perf_counter() - due))


async def _report(run: _Run) -> None:
    while True:
        await asyncio.sleep(REPORT_S)
        await _report_progress(run)


async def _report_progress(run: _Run) -> None:
    progress: dict[str, Any] = {
        "done": run.num_done,
        "failed": run.num_failed,
        "running": run.num_running,
        "chunks": run.num_chunks,
    }
    if run.watch is not None:
        progress["at_s"] = time.perf_counter() - run.began
        progress |= await run.watch.take()
    _print_json(progress)


def _print_json(value: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def _allow_connections() -> None:
    """Raise the limit of open files, usually 1,024: each connection needs one."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


async def _run_until_signal(plan: LoadPlan) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    measured = await run_load(plan, stop)
    _print_json({"result": measured})  # inside the loop: outside it SIGTERM would kill the process


def main() -> None:
    _allow_connections()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process ends this one
    plan = LoadPlan.from_json(sys.stdin.readline())
    gc.freeze()
    with contextlib.suppress(BrokenPipeError):
        asyncio.run(_run_until_signal(plan))
        return
    os._exit(1)


OnProgress = Callable[[dict[str, Any]], object]


class Stopped(EngineError):
    """The run was stopped before anything was measured."""


class StopSwitch:
    """Ends runs early; answers that are complete by then are kept."""

    def __init__(self) -> None:
        self.is_on = False

    def turn_on(self) -> None:
        self.is_on = True


async def run_in_process(
    plan: LoadPlan, on_progress: OnProgress | None = None, *, stop: StopSwitch | None = None
) -> dict[str, Any]:
    """Run `run_load` in a child process, which is killed if this is cancelled."""
    if stop is not None and stop.is_on:
        raise Stopped("the run was stopped before it began")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "termgen.bench.load"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=LINE_LIMIT,
    )
    assert process.stdin is not None and process.stdout is not None
    is_stopped = False
    try:
        with contextlib.suppress(ConnectionError):  # it has ended; its exit code is reported below
            process.stdin.write(plan.as_json().encode() + b"\n")
            await process.stdin.drain()
        process.stdin.close()
        async for line in process.stdout:
            progress: dict[str, Any] = json.loads(line)
            if "result" in progress:
                result: dict[str, Any] = progress["result"]
                return result
            if on_progress is not None:
                on_progress(progress)
            if stop is not None and stop.is_on and not is_stopped:
                process.terminate()  # its signal handler is set by the first report
                is_stopped = True
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
    raise EngineError(f"the load generator ended early, with code {process.returncode}")


if __name__ == "__main__":
    main()
