"""Prometheus metrics of the engine's steps, summed a second's worth at a time.

A busy engine lands a thousand steps a second, and observing each of them by itself takes as long as
some thirty steps, while the engine waits for its turn. So steps are added up by whole columns.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

import numpy as np
import numpy.typing as npt
from prometheus_client.metrics_core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from termgen.vocabulary.events import StepRecord

STEP_BUCKETS = (
    *(0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02),
    *(0.03, 0.05, 0.1, 0.2, 0.5, 1.0, 2.5),
)
STEP_TOKEN_BUCKETS = tuple(float(2**i) for i in range(15))  # 1 .. 16384
PHASES = ("schedule", "launch", "wait", "apply", "host", "device", "total")


class _Histogram:
    """How many values fell into each bucket, and their sum."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = np.array(bounds)
        self._names = [*map(floatToGoString, bounds), "+Inf"]
        self._counts = np.zeros(len(self._names), np.int64)
        self._sum = 0.0

    def add(self, values: npt.NDArray[np.float64]) -> None:
        places = np.searchsorted(self._bounds, values)  # a bound belongs to the bucket it ends
        self._counts += np.bincount(places, minlength=len(self._counts))
        self._sum += float(values.sum())

    def add_to(self, family: HistogramMetricFamily, labels: Sequence[str]) -> None:
        buckets = zip(self._names, accumulate(self._counts.tolist()), strict=True)
        family.add_metric(labels, list(buckets), self._sum)


class StepMetrics(Collector):
    """Of one model."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._phases = {phase: _Histogram(STEP_BUCKETS) for phase in PHASES}
        self._step_sizes = _Histogram(STEP_TOKEN_BUCKETS)
        self._by_graph: Counter[tuple[str, ...]] = Counter()
        self._by_depth: Counter[int] = Counter()
        self._busy_s = self._idle_s = self._told_s = 0.0
        self._tokens = self._padded = 0

    def add(self, steps: Sequence[StepRecord]) -> None:
        """At least one."""
        columns = dict(zip(StepRecord._fields, zip(*steps, strict=True), strict=True))

        def of(name: str) -> npt.NDArray[np.float64]:
            return np.array(columns[name], np.float64)

        def between(begin: str, end: str) -> npt.NDArray[np.float64]:
            """Seconds; of whole nanoseconds, which are too large for a float."""
            ns = np.array(columns[end], np.int64) - np.array(columns[begin], np.int64)
            seconds: npt.NDArray[np.float64] = np.maximum(ns, 0) / 1e9
            return seconds

        device_s = between("started_ns", "ended_ns")
        for phase in ("schedule", "launch", "wait", "apply", "host"):
            self._phases[phase].add(of(f"{phase}_us") / 1e6)
        self._phases["device"].add(device_s)
        self._phases["total"].add(between("planned_ns", "applied_ns"))
        sizes = of("num_decode_rows") + of("num_prefill_tokens")
        self._step_sizes.add(sizes)
        self._tokens += int(sizes.sum())
        self._padded += sum(columns["num_padded_tokens"])
        self._busy_s += float(device_s.sum())
        self._idle_s += float(of("idle_us").sum()) / 1e6
        self._told_s += float(of("publish_us").sum()) / 1e6
        self._by_graph.update(zip(columns["graph_mode"], columns["graph_reason"], strict=True))
        self._by_depth.update(columns["queue_depth"])

    def collect(self) -> Iterator[Metric]:
        times = HistogramMetricFamily(
            "termgen_engine_step_seconds",
            "Time of an engine step by phase",
            labels=["model", "phase"],
        )
        for phase, histogram in self._phases.items():
            histogram.add_to(times, [self._model, phase])
        yield times
        host = HistogramMetricFamily(
            "termgen_host_overhead_seconds",
            "Time of the engine's loop from one landing to the next, less what it waited",
            labels=["model"],
        )
        self._phases["host"].add_to(host, [self._model])
        yield host
        sizes = HistogramMetricFamily(
            "termgen_iteration_tokens_total", "Tokens that one step computed", labels=["model"]
        )
        self._step_sizes.add_to(sizes, [self._model])
        yield sizes
        yield self._counter(
            "engine_steps",
            "Engine steps by CUDA graph mode: FULL, PIECEWISE or NONE, and why it was no more",
            ["graph_mode", "reason"],
            self._by_graph,
        )
        yield self._counter(
            "engine_launches",
            "Engine steps by how many were in flight when they were launched",
            ["queue_depth"],
            {(str(depth),): count for depth, count in self._by_depth.items()},
        )
        yield self._counter(
            "engine_device_seconds",
            "Time while there was work, by what the device did: busy with a step, or idle",
            ["state"],
            {("busy",): self._busy_s, ("idle",): self._idle_s},
        )
        yield self._counter(
            "engine_telling_seconds",
            "Time of the engine's thread that telling of its steps took",
            [],
            {(): self._told_s},
        )
        yield self._counter(
            "engine_step_tokens", "Tokens that steps computed", [], {(): self._tokens}
        )
        yield self._counter(
            "engine_padded_tokens",
            "Tokens that steps computed for nobody, to fit a recording",
            [],
            {(): self._padded},
        )

    def _counter(
        self, name: str, help_text: str, labels: list[str], values: Mapping[tuple[str, ...], float]
    ) -> CounterMetricFamily:
        family = CounterMetricFamily(f"termgen_{name}", help_text, labels=["model", *labels])
        for label_values, value in values.items():
            family.add_metric([self._model, *label_values], value)
        return family
