"""Prometheus metrics of requests: token counts, durations, outcomes; and reports of single
requests.

`RequestMeter` sees every delta of one engine request. Metrics that change with every token are
plain numbers, read when the metrics are collected; those of a whole request are
prometheus_client's. A report, for the log or a trace, has counts and times, never text.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.metrics_core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from termgen.api.job import Job
from termgen.client import RequestTimings, TokenDelta

logger = logging.getLogger("termgen.server.requests")

# the first 16 are OpenTelemetry's, the whole list is vLLM's
TTFT_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
# small models decode at 1 to 5 ms: the usual 10 ms start would hide them
TOKEN_BUCKETS = (
    *(0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.05, 0.075),
    *(0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5),
)
LATENCY_BUCKETS = tuple(0.01 * 2**i for i in range(14))  # 0.01 .. 81.92
SIZE_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000)
N_BUCKETS = (1, 2, 5, 10, 20, 50, 100)


class TokenMetrics(Collector):
    """Metrics that change with every token; without locks, since one thread uses them."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._counts = [0] * (len(TOKEN_BUCKETS) + 1)
        self._sum = 0.0
        self.num_tokens = 0

    def between(self, seconds: float) -> None:
        self._counts[bisect_left(TOKEN_BUCKETS, seconds)] += 1
        self._sum += seconds

    def collect(self) -> Iterator[Metric]:
        tokens = CounterMetricFamily(
            "termgen_generation_tokens", "Tokens generated", labels=["model"]
        )
        tokens.add_metric([self._model], self.num_tokens)
        yield tokens
        gaps = HistogramMetricFamily(
            "termgen_inter_token_latency_seconds", "Between two tokens", labels=["model"]
        )
        names = [*map(floatToGoString, TOKEN_BUCKETS), "+Inf"]
        buckets = list(zip(names, accumulate(self._counts), strict=True))
        gaps.add_metric([self._model], buckets, self._sum)
        yield gaps


class ModelMetrics:
    """Makes metrics whose first label is the model's name."""

    def __init__(self, registry: CollectorRegistry, model: str) -> None:
        self._registry = registry
        self._model = model

    def _gauge(self, name: str, help_text: str, *labels: str) -> Gauge:
        """A gauge of this model; one with further labels is not bound to the model yet."""
        gauge = Gauge(f"termgen_{name}", help_text, ["model", *labels], registry=self._registry)
        return gauge if labels else gauge.labels(self._model)

    def _counter(self, name: str, help_text: str, *labels: str) -> Counter:
        names = ["model", *labels]
        counter = Counter(f"termgen_{name}", help_text, names, registry=self._registry)
        return counter if labels else counter.labels(self._model)

    def _histogram(self, name: str, help_text: str, buckets: Sequence[float]) -> Histogram:
        histogram = Histogram(
            f"termgen_{name}", help_text, ["model"], buckets=buckets, registry=self._registry
        )
        return histogram.labels(self._model)


class RequestMetrics(ModelMetrics):
    """Metrics of all requests of one server."""

    def __init__(self, registry: CollectorRegistry, model: str) -> None:
        super().__init__(registry, model)
        self.tokens = TokenMetrics(model)
        registry.register(self.tokens)
        self._success = self._counter(
            "request_success", "Completions that ended, by reason", "finished_reason"
        )
        self._by_source = self._counter(
            "prompt_tokens_by_source",
            "Prompt tokens of requests begun, by where their keys and values came from",
            "source",
        )
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of requests begun")
        self.cached_tokens = self._counter(
            "prompt_tokens_cached", "Prompt tokens that came from the prefix cache"
        )
        self._add_times()
        self._add_sizes()

    def _add_times(self) -> None:
        add = self._histogram
        self.ttft = add("time_to_first_token_seconds", "Arrival to first token", TTFT_BUCKETS)
        self.tpot = add(
            "request_time_per_output_token_seconds",
            "Mean time per token after the first, per completion",
            TOKEN_BUCKETS,
        )
        self.e2e = add("e2e_request_latency_seconds", "Arrival to last token", LATENCY_BUCKETS)
        self.queue_time = add("request_queue_time_seconds", "Time in the queue", LATENCY_BUCKETS)
        self.inference_time = add(
            "request_inference_time_seconds", "First scheduled to last token", LATENCY_BUCKETS
        )
        self.prefill_time = add(
            "request_prefill_time_seconds", "First scheduled to first token", LATENCY_BUCKETS
        )
        self.decode_time = add(
            "request_decode_time_seconds", "First token to last token", LATENCY_BUCKETS
        )

    def _add_sizes(self) -> None:
        add = self._histogram
        self.prompt_size = add("request_prompt_tokens", "Prompt tokens", SIZE_BUCKETS)
        self.computed_size = add(
            "request_prefill_kv_computed_tokens",
            "Prompt tokens that had to be computed",
            SIZE_BUCKETS,
        )
        self.output_size = add("request_generation_tokens", "Tokens generated", SIZE_BUCKETS)
        self.longest_size = add(
            "request_max_num_generation_tokens",
            "Tokens of the longest completion of a request",
            SIZE_BUCKETS,
        )
        self.params_n = add("request_params_n", "Completions asked for", N_BUCKETS)
        self.params_max_tokens = add(
            "request_params_max_tokens", "Tokens asked for, where a limit was set", SIZE_BUCKETS
        )

    def begun(self, job: Job) -> None:
        self.params_n.observe(job.params.n)
        if job.max_tokens is not None:
            self.params_max_tokens.observe(job.max_tokens)

    def on_prompt(self, num_tokens: int, num_cached: int, *, is_computed: bool) -> None:
        num_computed = max(0, num_tokens - num_cached) if is_computed else 0
        self.prompt_tokens.inc(num_tokens)
        self.cached_tokens.inc(num_cached)
        self._by_source.labels(self._model, "local_cache_hit").inc(num_cached)
        self._by_source.labels(self._model, "local_compute").inc(num_computed)
        self.prompt_size.observe(num_tokens)
        self.computed_size.observe(num_computed)

    def finished(self, reason: str) -> None:
        self._success.labels(self._model, reason).inc()

    def on_timings(self, timings: RequestTimings, num_tokens: int) -> None:
        self.e2e.observe(timings.e2e_s)
        if not timings.first_scheduled_ns:
            return
        self.queue_time.observe(timings.queue_s)
        self.inference_time.observe(_seconds(timings.first_scheduled_ns, timings.finished_ns))
        if not timings.first_token_ns:
            return
        self.ttft.observe(timings.ttft_s)
        decode_s = _seconds(timings.first_token_ns, timings.finished_ns)
        self.prefill_time.observe(_seconds(timings.first_scheduled_ns, timings.first_token_ns))
        self.decode_time.observe(decode_s)
        if num_tokens > 1:
            self.tpot.observe(decode_s / (num_tokens - 1))


def _seconds(begin_ns: int, end_ns: int) -> float:
    return max(0, end_ns - begin_ns) / 1e9


class RequestMeter:
    """Watches the deltas of one engine request, all its completions."""

    __slots__ = (
        *("_is_computed", "_last_token_at", "_longest", "_metrics", "_num_open", "_tokens"),
        *("finish_reasons", "num_cached_tokens", "num_output_tokens", "num_prompt_tokens"),
        "timings",
    )

    def __init__(self, metrics: RequestMetrics, job: Job) -> None:
        self._metrics = metrics
        self._is_computed = job.is_computed
        self._num_open = job.params.n
        self._longest = 0
        """Tokens of the longest completion that has ended."""
        self._tokens = metrics.tokens
        self._last_token_at: dict[int, float] = {}
        self.num_prompt_tokens: int | None = None
        self.num_cached_tokens = 0
        self.num_output_tokens = 0
        self.finish_reasons: list[str] = []
        self.timings: RequestTimings | None = None
        """Timings of the completion that ended last."""
        metrics.begun(job)

    def on_delta(self, delta: TokenDelta) -> None:
        if self.num_prompt_tokens is None:
            self.num_prompt_tokens = delta.num_prompt_tokens
            self.num_cached_tokens = delta.num_cached_tokens
            self._metrics.on_prompt(
                delta.num_prompt_tokens, delta.num_cached_tokens, is_computed=self._is_computed
            )
        num_tokens = len(delta.token_ids)
        if num_tokens:
            now = time.perf_counter()
            self.num_output_tokens += num_tokens
            self._tokens.num_tokens += num_tokens
            before = self._last_token_at.get(delta.index)
            if before is not None:
                self._tokens.between((now - before) / num_tokens)
            self._last_token_at[delta.index] = now
        if delta.finish_reason is not None:
            self._on_end(delta)

    def _on_end(self, delta: TokenDelta) -> None:
        self.finish_reasons.append(str(delta.finish_reason))
        self._metrics.finished(str(delta.finish_reason))
        self._metrics.output_size.observe(delta.num_output_tokens)
        self._longest = max(self._longest, delta.num_output_tokens)
        self._num_open -= 1
        if not self._num_open:
            self._metrics.longest_size.observe(self._longest)
        if delta.timings is not None:
            self.timings = delta.timings
            self._metrics.on_timings(delta.timings, delta.num_output_tokens)


# -- reports -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RequestReport:
    """One HTTP request that was given to the engine."""

    request_id: str
    """The value of `x-request-id`."""
    answer_id: str
    path: str
    operation: str
    """OpenTelemetry's name of what the endpoint does."""
    model: str
    traceparent: str | None
    """The client's own trace, as it sent it."""
    num_choices: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    finish_reasons: tuple[str, ...]
    outcome: str
    """`ok`, the code of the error that ended it, or `disconnected while` and where."""
    timings: tuple[RequestTimings, ...]
    """Timings of the prompts that were completed."""
    began_ns: int
    ended_ns: int
    """perf_counter_ns."""

    @property
    def ttft_s(self) -> float | None:
        found = [t.ttft_s for t in self.timings if t.first_token_ns]
        return min(found, default=None)

    @property
    def queue_s(self) -> float | None:
        return max((t.queue_s for t in self.timings if t.first_scheduled_ns), default=None)


class ReportSink(Protocol):
    def add(self, report: RequestReport) -> None: ...

    def close(self) -> None: ...


class RequestLog:
    """Logs one line a request."""

    def add(self, report: RequestReport) -> None:
        logger.info(
            "%s %s %s: %d prompt tokens (%d cached), %d choices, %d tokens, %s; queue %s, first"
            " token %s, all %.1f ms; %s",
            report.request_id,
            report.answer_id,
            report.path,
            report.num_prompt_tokens,
            report.num_cached_tokens,
            report.num_choices,
            report.num_output_tokens,
            "/".join(sorted(set(report.finish_reasons))) or "unfinished",
            _ms(report.queue_s),
            _ms(report.ttft_s),
            (report.ended_ns - report.began_ns) / 1e6,
            report.outcome,
        )

    def close(self) -> None:
        pass


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.1f} ms"


def total(counts: Sequence[int | None]) -> int:
    return sum(count or 0 for count in counts)
