"""Prometheus metrics of one served model. Everything runs on the event loop; nothing is global.

Fed from three sides: `request_metrics` sees every delta of a request as it arrives, `on_events`
gets the engine's step records, `on_snapshot` its present state. Names mirror vLLM's
with the prefix `termgen_`, so that dashboards port by search and replace. The only label beside
closed sets is `model`: never a user, a key or a request id.
"""

from __future__ import annotations

import collections
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample
from prometheus_client.utils import floatToGoString

from termgen.serving.request_metrics import ModelMetrics, RequestMetrics
from termgen.vocabulary.device.gpu_reading import GpuReading
from termgen.vocabulary.events import EngineEvent, EngineSnapshot, StateView, StepRecord
from termgen.vocabulary.grammar_times import BOUNDS_S, GrammarTotals
from termgen.vocabulary.memory_ledger import MemoryLedger
from termgen.vocabulary.startup_phases import StartupPhase

STEP_BUCKETS = (
    *(0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02),
    *(0.03, 0.05, 0.1, 0.2, 0.5, 1.0, 2.5),
)
STEP_TOKEN_BUCKETS = tuple(float(2**i) for i in range(15))  # 1 .. 16384
PHASES = ("schedule", "launch", "wait", "apply", "host", "device", "total")

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")
"""vLLM's words, by sleep level."""
WAITING_REASONS = ("capacity", "deferred")
"""vLLM's words: capacity, where no room is free; deferred, where the engine is paused."""

SAME_NAMES = frozenset(
    {
        *("num_requests_running", "num_requests_waiting", "num_requests_waiting_by_reason"),
        "kv_cache_usage_perc",
        *("prefix_cache_queries", "prefix_cache_hits", "num_preemptions"),
        "corrupted_requests",
        *("prompt_tokens", "prompt_tokens_cached", "prompt_tokens_by_source"),
        *("generation_tokens", "request_success", "iteration_tokens_total"),
        *("time_to_first_token_seconds", "inter_token_latency_seconds"),
        *("e2e_request_latency_seconds", "request_time_per_output_token_seconds"),
        *("request_queue_time_seconds", "request_inference_time_seconds"),
        *("request_prefill_time_seconds", "request_decode_time_seconds"),
        *("request_prompt_tokens", "request_generation_tokens"),
        "request_max_num_generation_tokens",
        *("request_prefill_kv_computed_tokens", "request_params_n", "request_params_max_tokens"),
        *("cache_config_info", "engine_sleep_state"),
        *("spec_decode_num_drafts", "spec_decode_num_draft_tokens"),
        *("spec_decode_num_accepted_tokens", "spec_decode_num_accepted_tokens_per_pos"),
    }
)
"""`termgen_NAME` is `vllm:NAME`."""


class _Histogram:
    """Counts of values by bucket, and their sum."""

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
    """Histograms and counters of the engine's steps, summed a second's worth at a time.

    A busy engine lands a thousand steps a second, and observing each of them by itself takes as
    long as some thirty steps, while the engine waits for its turn. So steps are added up by whole
    columns.
    """

    def __init__(self, model: str) -> None:
        self._model = model
        self._phases = {phase: _Histogram(STEP_BUCKETS) for phase in PHASES}
        self._step_sizes = _Histogram(STEP_TOKEN_BUCKETS)
        self._by_graph: collections.Counter[tuple[str, ...]] = collections.Counter()
        self._by_depth: collections.Counter[int] = collections.Counter()
        self._busy_s = self._idle_s = self._told_s = 0.0
        self._tokens = self._padded = 0

    def add(self, steps: Sequence[StepRecord]) -> None:
        """Add one step or more."""
        columns = dict(zip(StepRecord._fields, zip(*steps, strict=True), strict=True))

        def of(name: str) -> npt.NDArray[np.float64]:
            return np.array(columns[name], np.float64)

        def between(begin: str, end: str) -> npt.NDArray[np.float64]:
            """Seconds, from differences of whole nanoseconds, which are too large for a float."""
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
            "Time that the engine's thread took to publish its steps",
            [],
            {(): self._told_s},
        )
        yield self._counter(
            "engine_step_tokens", "Tokens that steps computed", [], {(): self._tokens}
        )
        yield self._counter(
            "engine_padded_tokens",
            "Padding that steps computed to fit a recorded graph, in tokens",
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


# -- the server ----------------------------------------------------------------------------


@dataclass(slots=True)
class _SinceStart:
    """Counts of the engine, as it last reported them."""

    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    num_preemptions: int = 0
    states: StateView | None = None
    num_late_compiles: int = 0
    num_corrupted: int = 0
    num_wasted_tokens: int = 0
    num_late_masks: int = 0
    num_forced_tokens: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_drafts: int = 0
    drafted_per_pos: tuple[int, ...] = ()
    accepted_per_pos: tuple[int, ...] = ()
    num_dropped: int = 0


class _SinceStartCollector(Collector):
    """Exposes `_SinceStart` as counters: they are sums already."""

    def __init__(self, counts: _SinceStart, model: str) -> None:
        self._counts = counts
        self._model = model

    def collect(self) -> Iterator[Metric]:
        counts = self._counts
        for name, help_text, value in (
            (
                "prefix_cache_queries",
                "Prompt tokens looked up in the prefix cache",
                counts.prefix_query_tokens,
            ),
            (
                "prefix_cache_hits",
                "Prompt tokens found in the prefix cache",
                counts.prefix_hit_tokens,
            ),
            ("num_preemptions", "Requests preempted", counts.num_preemptions),
            (
                "corrupted_requests",
                "Requests ended because their logits were not finite numbers; anything but 0 is a "
                "fault of the model or of its type",
                counts.num_corrupted,
            ),
            (
                "late_compiles",
                "Kernels compiled while requests ran; anything but 0 is a fault",
                counts.num_late_compiles,
            ),
            (
                "engine_wasted_tokens",
                "Tokens that steps computed in vain: the request's end was not known yet, or its "
                "mask was late",
                counts.num_wasted_tokens,
            ),
            (
                "engine_late_masks",
                "Tokens of constrained answers that a step did not sample, as their masks were "
                "late; a later step does",
                counts.num_late_masks,
            ),
            (
                "engine_forced_tokens",
                "Tokens that the form of an answer left no choice of, computed in one step with "
                "the token before",
                counts.num_forced_tokens,
            ),
            (
                "spec_decode_num_drafts",
                "Times that a step computed guessed tokens of a request",
                counts.num_drafts,
            ),
            (
                "spec_decode_num_draft_tokens",
                "Guessed tokens that steps computed",
                counts.num_draft_tokens,
            ),
            (
                "spec_decode_num_accepted_tokens",
                "Guessed tokens that the model drew as well: each saves a step of its request",
                counts.num_accepted_tokens,
            ),
            (
                "event_stream_dropped",
                "Engine events lost to slowness: by listeners of /v1/events, or by these counts",
                counts.num_dropped,
            ),
        ):
            yield self._counter(name, help_text, value)
        yield from self._by_position(counts)
        if (states := counts.states) is not None:
            what = "copies of recurrent layers' states as prefixes"
            yield self._counter("state_copies_made", f"Made {what}", states.num_made)
            yield self._counter(
                "state_copies_used", f"Requests that started from {what}", states.num_used
            )
            yield self._counter("state_copies_evicted", f"Evicted {what}", states.num_evicted)

    def _by_position(self, counts: _SinceStart) -> Iterator[Metric]:
        """Positions are counted from 0, as in vLLM."""
        for name, help_text, values in (
            ("draft", "Guessed tokens that steps computed", counts.drafted_per_pos),
            ("accepted", "Guessed tokens that the model drew as well", counts.accepted_per_pos),
        ):
            family = CounterMetricFamily(
                f"termgen_spec_decode_num_{name}_tokens_per_pos",
                f"{help_text}, by position behind a request's newest token",
                labels=["model", "position"],
            )
            for position, value in enumerate(values):
                family.add_metric([self._model, str(position)], value)
            yield family

    def _counter(self, name: str, help_text: str, value: int) -> Metric:
        family = CounterMetricFamily(f"termgen_{name}", help_text, labels=["model"])
        family.add_metric([self._model], value)
        return family


class ServerMetrics(ModelMetrics):
    """All metrics of one server and one model."""

    def __init__(self, model: str, *, vllm_names: bool = False) -> None:
        super().__init__(CollectorRegistry(), model)
        self._shown = [self._registry]
        if vllm_names:
            again = CollectorRegistry()
            again.register(VLLMNames(self._registry))
            self._shown.append(again)
        self._since_start = _SinceStart()
        self._registry.register(_SinceStartCollector(self._since_start, model))

        self.num_running = self._gauge("num_requests_running", "Requests in the batch")
        self.num_waiting = self._gauge("num_requests_waiting", "Requests in the queue")
        self._waiting_by_reason = self._gauge(
            "num_requests_waiting_by_reason",
            "Requests in the queue, by what they wait for: capacity, or deferred by a pause",
            "reason",
        )
        self._is_paused = False
        self.paused = self._gauge("engine_paused", "1 while the engine is paused, else 0")
        self._sleep = self._gauge(
            "engine_sleep_state",
            "1 for the state the engine is in: awake, or asleep at level 1 or 2",
            "sleep_state",
        )
        self.on_sleep_level(0)
        self.run_ahead = self._gauge(
            "engine_run_ahead_seconds", "Most work that is queued while no client waits"
        )
        self._covered = self._gauge(
            "engine_covered_pause_seconds",
            "Longest recent pause of the process, which queued steps cover; 0: none to cover",
        )
        self.kv_usage = self._gauge("kv_cache_usage_perc", "Used share of the KV cache, 0 to 1")
        self._kv_blocks = self._gauge("kv_blocks", "KV blocks by state", "state")
        self._memory = self._gauge(
            "memory_bytes",
            "The device's memory when the engine was ready, by what it is taken by",
            "kind",
        )
        self._graphs = self._gauge(
            "cuda_graphs",
            "CUDA graphs recorded, and those still to be recorded in idle moments",
            "state",
        )
        self._startup = self._gauge(
            "startup_seconds", "Time that the engine's start took, by phase", "phase"
        )
        self._add_counts(model)

    def _add_counts(self, model: str) -> None:
        """Add the metrics that count from the start."""
        self._disconnects = self._counter(
            "client_disconnects", "Clients that left before their answer was complete", "stage"
        )
        self._rejected = self._counter(
            "rejected",
            "Requests turned away before the engine saw them, by the code of the error",
            "reason",
        )
        self.ignored_fields = self._counter("ignored_fields", "Unknown request fields ignored")
        self.heartbeat = self._gauge(
            "engine_heartbeat_timestamp_seconds",
            "When the engine last finished a step or answered, as Unix time",
        )
        self._cache_config = self._gauge(
            "cache_config_info",
            "Always 1; the labels have the size of the KV cache",
            "block_size",
            "num_gpu_blocks",
        )
        self.requests = RequestMetrics(self._registry, model)
        self._steps = StepMetrics(model)
        self._registry.register(self._steps)
        self._gpu = GpuMetrics(model)
        self._registry.register(self._gpu)

    def disconnected(self, stage: str) -> None:
        """`stage`: `queue`, `prefill` or `decode`."""
        self._disconnects.labels(self._model, stage).inc()

    def rejected(self, reason: str) -> None:
        """`reason`: a code of `termgen.api.errors` or of admission."""
        self._rejected.labels(self._model, reason).inc()

    def on_events(self, events: Iterable[EngineEvent], *, num_dropped: int = 0) -> None:
        """Count what the engine published since the last call."""
        self._since_start.num_dropped = num_dropped
        steps = [event for event in events if isinstance(event, StepRecord)]
        if steps:
            self._steps.add(steps)
            newest = steps[-1]
            self._since_start.num_late_compiles = newest.num_late_compiles
            self._since_start.num_corrupted = newest.num_corrupted
            self._since_start.num_wasted_tokens = newest.num_wasted_tokens
            self._since_start.num_late_masks = newest.num_late_masks
            self._since_start.num_forced_tokens = newest.num_forced_tokens
            self._since_start.num_draft_tokens = newest.num_draft_tokens
            self._since_start.num_accepted_tokens = newest.num_accepted_tokens
            self._since_start.num_drafts = newest.num_drafts
            self._since_start.drafted_per_pos = newest.drafted_per_pos
            self._since_start.accepted_per_pos = newest.accepted_per_pos
            self._covered.set(newest.covered_us / 1e6)
            self._on_state(newest)
            self._on_heartbeat(newest.applied_ns)

    def on_grammars(self, totals: Callable[[], GrammarTotals]) -> None:
        """Register the metrics of grammars, once."""
        self._registry.register(GrammarMetrics(self._model, totals))

    def on_memory(self, ledger: MemoryLedger) -> None:
        """Set the memory by kind, once: an engine takes its memory while it starts."""
        for kind, nbytes in ledger.parts().items():
            self._memory.labels(self._model, kind).set(nbytes)

    def on_startup(self, phases: Iterable[StartupPhase]) -> None:
        for phase in phases:
            self._startup.labels(self._model, phase.name).set(phase.seconds)

    def on_gpu(self, reading: GpuReading | None) -> None:
        self._gpu.reading = reading

    def on_cache(self, *, block_size: int, num_blocks: int) -> None:
        labels = (self._model, str(block_size), str(num_blocks))
        self._cache_config.labels(*labels).set(1)

    def on_snapshot(self, snapshot: EngineSnapshot) -> None:
        self._is_paused = snapshot.paused
        self._since_start.states = snapshot.states
        self._on_state(snapshot)
        self._on_heartbeat(max(snapshot.time_ns, snapshot.last_progress_ns))
        self.paused.set(snapshot.paused)
        recorded = snapshot.num_graphs_recorded
        self._graphs.labels(self._model, "recorded").set(recorded)
        self._graphs.labels(self._model, "waiting").set(snapshot.num_graphs - recorded)

    def on_sleep_level(self, level: int) -> None:
        for i, state in enumerate(SLEEP_STATES):
            self._sleep.labels(self._model, state).set(i == level)

    def _on_heartbeat(self, time_ns: int) -> None:
        self.heartbeat.set(time.time() - (time.perf_counter_ns() - time_ns) / 1e9)

    def _on_state(self, state: StepRecord | EngineSnapshot) -> None:
        self.num_running.set(state.num_running)
        self.num_waiting.set(state.num_waiting)
        for reason in WAITING_REASONS:
            is_it = self._is_paused == (reason == "deferred")
            self._waiting_by_reason.labels(self._model, reason).set(is_it * state.num_waiting)
        blocks = {
            "used": state.num_used_blocks,
            "cached": state.num_cached_blocks,
            "free": state.num_free_blocks,
        }
        for name, count in blocks.items():
            self._kv_blocks.labels(self._model, name).set(count)
        total = sum(blocks.values())
        self.kv_usage.set(state.num_used_blocks / total if total else 0.0)
        self._since_start.prefix_query_tokens = state.prefix_query_tokens
        self._since_start.prefix_hit_tokens = state.prefix_hit_tokens
        self._since_start.num_preemptions = state.num_preemptions

    def render(self) -> bytes:
        """All metrics as Prometheus text."""
        return b"".join(generate_latest(registry) for registry in self._shown)


# Metrics of compiling grammars, read from the engine when the metrics are collected.


class GrammarMetrics(Collector):
    def __init__(self, model: str, totals: Callable[[], GrammarTotals]) -> None:
        self._model = model
        self._totals = totals

    def collect(self) -> Iterator[Metric]:
        totals = self._totals()
        times = HistogramMetricFamily(
            "termgen_grammar_compile_seconds",
            "Compiling what answers must look like; what is cached is not compiled again",
            labels=["model"],
        )
        names = [*map(floatToGoString, BOUNDS_S), "+Inf"]
        buckets = list(zip(names, accumulate(totals.counts), strict=True))
        times.add_metric([self._model], buckets, totals.seconds)
        yield times
        failures = CounterMetricFamily(
            "termgen_grammar_compile_failures",
            "Grammars that did not compile, by the code of the error",
            labels=["model", "reason"],
        )
        for reason, count in sorted(totals.failures.items()):
            failures.add_metric([self._model, reason], count)
        yield failures


class GpuMetrics(Collector):
    """Power and energy of the GPU, where the driver reports them."""

    def __init__(self, model: str) -> None:
        self._model = model
        self.reading: GpuReading | None = None

    def collect(self) -> Iterator[Metric]:
        reading = self.reading
        if reading is None:
            return
        drawn = "Power that the whole GPU draws, all processes together"
        for name, help_text, watts in (
            ("power_watts", drawn, reading.power_w),
            ("power_limit_watts", "Power that the GPU's driver allows it", reading.power_limit_w),
        ):
            if watts is not None:
                gauge = GaugeMetricFamily(f"termgen_gpu_{name}", help_text, labels=["model"])
                gauge.add_metric([self._model], watts)
                yield gauge
        if reading.energy_j is not None:
            counter = CounterMetricFamily(
                "termgen_gpu_energy_joules",
                "Energy that the whole GPU has used since its driver was loaded",
                labels=["model"],
            )
            counter.add_metric([self._model], reading.energy_j)
            yield counter


# The metrics under vLLM's names, for routers and dashboards made for those: only metrics that such
# programs read, and that mean the same here. Values are read from our own metrics on collection.


OURS, THEIRS = "termgen_", "vllm:"


class VLLMNames(Collector):
    """A registry's metrics under vLLM's names; registered in another registry."""

    def __init__(self, source: CollectorRegistry) -> None:
        self._source = source

    def collect(self) -> Iterator[Metric]:
        for family in self._source.collect():
            name = family.name.removeprefix(OURS)
            if name not in SAME_NAMES:
                continue
            renamed = Metric(THEIRS + name, family.documentation, family.type)
            renamed.samples = [_renamed(sample) for sample in family.samples]
            yield renamed


def _renamed(sample: Sample) -> Sample:
    labels = {k: v for k, v in sample.labels.items() if k != "model"}
    labels = {"model_name": sample.labels["model"], "engine": "0", **labels}
    return sample._replace(name=THEIRS + sample.name.removeprefix(OURS), labels=labels)
