"""The parts of `gpu_async.py` that measure the engine's loop alone, without a reader.

One engine serves every cell: `core.run_ahead` is set anew for each, so that one step at a time, two
in flight and as many as the host's pauses need alternate on the same recordings and the same
memory. Each cell decodes requests of its own, with prompts of equal length.
"""

from __future__ import annotations

import ctypes
import gc
import json
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from gpu_decode import request

from termgen.config import EngineConfig
from termgen.engine.loop.control import RunAhead
from termgen.engine.loop.core import EngineCore
from termgen.engine.loop.startup import build_engine
from termgen.vocabulary.events import StepRecord

WARM_STEPS = 48
"""Enough for clocks and the measured step time to settle."""
HOLD_US, HOLD_EVERY_S = 20_000, 0.1
NUM_PROFILED = 28


@dataclass(frozen=True, slots=True)
class Sizes:
    """The batch of a cell."""

    batches: tuple[int, ...]
    host_batches: tuple[int, ...]
    prompt: int
    seconds: float
    """Time of a cell, given the step time measured in warm-up."""
    most_steps: int
    rounds: int
    job_requests: int
    job_tokens: tuple[int, int]
    vocab: int


@contextmanager
def engine_core(config: EngineConfig) -> Iterator[EngineCore]:
    parts = build_engine(config, on_delivery=lambda news: None, on_progress=None)
    try:
        yield parts.core
    finally:
        parts.core.drain()
        parts.core.executor.shutdown()


def depth(name: str, ms: float) -> RunAhead:
    """The policy for `sync`, two steps, or run ahead."""
    return {"sync": RunAhead(1, 0.0), "two": RunAhead(2, 0.0), "ahead": RunAhead(2, ms)}[name]


def submit(core: EngineCore, name: int, prompt: int, output: int, vocab: int) -> None:
    core.submit(request(name, prompt, output, vocab), time.perf_counter_ns())


class Decode:
    """A batch of requests that decodes until the block is left."""

    def __init__(self, core: EngineCore, batch: int, sizes: Sizes, policy: RunAhead) -> None:
        self._core, self._batch, self._sizes = core, batch, sizes
        self._ring = core.bus.subscribe(100_000)
        core.run_ahead = policy
        self.step_s = 0.0

    def __enter__(self) -> Decode:
        gc.collect()
        gc.disable()  # as the engine's thread does while it is busy
        sizes = self._sizes
        for index in range(self._batch):
            room = sizes.most_steps + 256 + self._batch
            submit(self._core, index, sizes.prompt, room, sizes.vocab)
        warm: list[StepRecord] = []
        while len(warm) < WARM_STEPS:
            self._core.step()
            for record in self._records():
                warm = [*warm, record] if self._is_full(record) else []
        last = warm[WARM_STEPS // 2 :]
        self.step_s = (last[-1].landed_ns - last[0].landed_ns) / 1e9 / (len(last) - 1)
        return self

    def run(self, num_steps: int | None = None) -> list[StepRecord]:
        """Records of `num_steps` steps, or of as many as fit into the time of a cell."""
        if num_steps is None:
            num_steps = int(self._sizes.seconds / max(self.step_s, 1e-6))
            num_steps = min(self._sizes.most_steps, max(32, num_steps))
        for _ in range(num_steps):
            self._core.step()
        records = self._records()
        assert all(map(self._is_full, records)), "a row ended while it was timed"
        return records

    def _records(self) -> list[StepRecord]:
        return [e for e in self._ring.drain() if isinstance(e, StepRecord)]

    def _is_full(self, record: StepRecord) -> bool:
        return record.num_decode_rows == self._batch and not record.num_prefill_rows

    def __exit__(self, *exc: object) -> None:
        gc.enable()
        self._core.bus.unsubscribe(self._ring)
        for index in range(self._batch):
            self._core.abort(f"{index}")
        drain(self._core)


def drain(core: EngineCore) -> None:
    while core.has_work:
        core.step()


def steps_per_s(records: Sequence[StepRecord]) -> float:
    return (len(records) - 1) / (records[-1].landed_ns - records[0].landed_ns) * 1e9


def gaps_us(records: Sequence[StepRecord]) -> list[float]:
    """Times from the end of a step on the device to the start of the next."""
    return [(two.started_ns - one.ended_ns) / 1e3 for one, two in pairwise(records)]


def idle_share(records: Sequence[StepRecord]) -> float:
    span_us = (records[-1].ended_ns - records[0].started_ns) / 1e3
    return sum(max(0.0, gap) for gap in gaps_us(records)) / span_us


def idle(core: EngineCore, sizes: Sizes, ms: float, *, can_profile: bool) -> dict[str, Any]:
    cells = []
    for batch in sizes.batches:
        with Decode(core, batch, sizes, depth("ahead", ms)) as decode:
            records = decode.run()
            gaps = gaps_us(records)
            cell = {
                "batch": batch,
                "step_ms": statistics.mean((r.ended_ns - r.started_ns) / 1e6 for r in records),
                "idle_share": idle_share(records),
                "gap_us": statistics.mean(gaps),
                "gap_p99_us": float(np.percentile(gaps, 99)),
                "queue_depth": statistics.median(r.queue_depth for r in records),
            }
        cells.append(cell)
    found = {"decode": cells, "job": job(core, sizes, depth("ahead", ms))}
    for cell in cells if can_profile else ():
        with Decode(core, cell["batch"], sizes, depth("ahead", ms)) as decode:
            cell |= profiled_gaps(partial(decode.run, NUM_PROFILED))
    return found


def job(core: EngineCore, sizes: Sizes, policy: RunAhead) -> dict[str, Any]:
    """The requests of `gpu_decode.py`'s job, all at once; the second of two runs."""
    core.run_ahead = policy
    rng = random.Random(0)
    lengths = [
        (rng.randint(*sizes.job_tokens), rng.randint(*sizes.job_tokens))
        for _ in range(sizes.job_requests)
    ]
    records: list[StepRecord] = []
    for _ in range(2):
        ring = core.bus.subscribe(100_000)
        for index, (prompt, output) in enumerate(lengths):
            submit(core, index, prompt, output, sizes.vocab)
        drain(core)
        records = [e for e in ring.drain() if isinstance(e, StepRecord)]
        core.bus.unsubscribe(ring)
    seconds = (records[-1].landed_ns - records[0].planned_ns) / 1e9
    return {
        "tokens_per_s": sum(output for _, output in lengths) / seconds,
        "steps": len(records),
        "idle_share": idle_share(records),
    }


def profiled_gaps(work: Callable[[], object]) -> dict[str, float]:
    """The same gaps as torch's profiler sees them: no kernel and no copy runs.

    The kernels of one replay have one correlation id; a gap is what lies between two replays.
    """
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as trace:
        work()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "trace.json")
        trace.export_chrome_trace(str(file))
        events = json.loads(file.read_text())["traceEvents"]
    kinds = ("kernel", "gpu_memcpy", "gpu_memset")
    found = sorted((e for e in events if e.get("cat") in kinds), key=lambda e: float(e["ts"]))
    return gaps_between_replays(found, skip=4)


def gaps_between_replays(events: Sequence[dict[str, Any]], *, skip: int = 0) -> dict[str, float]:
    """events: the device's, by start; `ts` and `dur` in microseconds. skip: replays to ignore at
    the beginning, because nothing is launched while a profiler starts."""
    spans = [(float(e["ts"]), float(e["ts"]) + float(e["dur"])) for e in events]
    replays: dict[int | None, list[tuple[float, float]]] = {}
    for event, span in zip(events, spans, strict=True):
        replays.setdefault(event.get("args", {}).get("correlation"), []).append(span)
    replays.pop(None, None)
    whole = [
        (min(found)[0], max(end for _, end in found))
        for found in replays.values()
        if len(found) > 8
    ]
    steps = sorted(whole)[skip:]
    if len(steps) < 3:
        return {"profiled_gap_us": float("nan"), "profiled_idle_share": float("nan")}
    idles = []
    for (_, clear), (next_begin, _) in pairwise(steps):
        gap = 0.0
        for begin, end in spans:
            if end > clear and begin < next_begin:
                gap += max(0.0, begin - clear)
                clear = max(clear, end)
        idles.append(gap + max(0.0, next_begin - clear))
    span_us = steps[-1][1] - steps[0][0]
    return {"profiled_gap_us": statistics.mean(idles), "profiled_idle_share": sum(idles) / span_us}


def host(core: EngineCore, sizes: Sizes, ms: float) -> dict[str, Any]:
    """Time of the loop per step, and the line through it.

    Cells alternate, and the quickest run of each counts: other processes can only add to it, and on
    a shared machine they double it for seconds.
    """
    found: dict[int, list[float]] = {batch: [] for batch in sizes.host_batches}
    for _ in range(sizes.rounds):
        for batch, runs in found.items():
            with Decode(core, batch, sizes, depth("ahead", ms)) as decode:
                records = decode.run()
            runs.append(statistics.mean(r.host_us for r in records))
    cells = [
        {"batch": b, "us": min(runs), "median_us": statistics.median(runs), "most_us": max(runs)}
        for b, runs in found.items()
    ]
    slope, start = np.polyfit([cell["batch"] for cell in cells], [cell["us"] for cell in cells], 1)
    return {"cells": cells, "a_us": float(start), "b_us": float(slope)}


def compare(
    core: EngineCore, sizes: Sizes, ms: float, *, names: Sequence[str], holds: bool = False
) -> list[dict[str, Any]]:
    """Tokens per second of each policy, alternating; medians. With `holds`, quiet and disturbed."""
    cells = []
    for batch in sizes.batches:
        found: dict[str, list[float]] = {}
        for _ in range(sizes.rounds):
            for name in names:
                for is_held in (False, True) if holds else (False,):
                    with Decode(core, batch, sizes, depth(name, ms)) as decode:
                        with holding_the_gil() if is_held else nullcontext():
                            rate = batch * steps_per_s(decode.run())
                    found.setdefault(f"{name} held" if is_held else name, []).append(rate)
        medians = {name: statistics.median(rates) for name, rates in found.items()}
        cells.append({"batch": batch, "tokens_per_s": medians})
    return cells


@contextmanager
def holding_the_gil() -> Iterator[None]:
    """A thread that keeps every other one out for 20 ms, ten times a second."""
    sleep = ctypes.PyDLL(None).usleep  # unlike CDLL, PyDLL keeps the GIL
    is_over = threading.Event()

    def hold() -> None:
        while not is_over.wait(HOLD_EVERY_S - HOLD_US / 1e6):
            sleep(HOLD_US)

    thread = threading.Thread(target=hold, name="holder")
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
