"""Figures of a load test under vLLM's JSON keys, computed from the load generator's answers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from termgen.bench.options import ServeOptions

LAG_LIMIT_S = 0.010
"""Above this at the 99th percentile, the client was measured rather than the server."""
CPU_LIMIT = 0.9
TITLES = {
    "ttft": "time to first token",
    "tpot": "time per output token after it",
    "itl": "time between chunks",
    "e2el": "whole request",
}


@dataclass(frozen=True, slots=True)
class AnswerTimes:
    """Times of one successful request."""

    start_s: float
    ttft_s: float
    latency_s: float
    gaps_s: Sequence[float]
    num_chunks: int
    num_input_tokens: int
    num_output_tokens: int
    num_cached_tokens: int

    @property
    def tpot_s(self) -> float | None:
        """Seconds per output token after the first; None for a single token."""
        later = self.num_output_tokens - 1
        return (self.latency_s - self.ttft_s) / later if later > 0 else None


@dataclass(frozen=True, slots=True)
class ServeResult:
    options: ServeOptions
    times: tuple[AnswerTimes, ...]
    errors: tuple[str, ...]
    """[num_answers] error of each request that has ended; empty for a success."""
    texts: tuple[str, ...]
    duration_s: float
    """From the start of the run to the last token of the last answer."""
    is_counted: bool
    """The server reported token counts; otherwise chunks were counted."""
    lateness_s: Sequence[float]
    lag_s: Sequence[float]
    cpu_share: float
    num_cut_off: int = 0
    """Requests without an answer because the run was stopped; no figure includes them."""

    @property
    def num_output_tokens(self) -> int:
        return sum(t.num_output_tokens for t in self.times)

    @property
    def num_input_tokens(self) -> int:
        return sum(t.num_input_tokens for t in self.times)

    def values_ms(self, metric: str) -> list[float]:
        """One value per successful request; for `itl` every gap of every request."""
        if metric == "itl":
            return [gap * 1e3 for t in self.times for gap in t.gaps_s]
        if metric == "tpot":
            return [t.tpot_s * 1e3 for t in self.times if t.tpot_s is not None]
        name = {"ttft": "ttft_s", "e2el": "latency_s"}[metric]
        return [getattr(t, name) * 1e3 for t in self.times]

    def summary_ms(self, metric: str, percentiles: Sequence[float]) -> list[float | None]:
        """The mean, then the percentiles; None without any value."""
        values = self.values_ms(metric)
        if not values:
            return [None] * (1 + len(percentiles))
        found = [float(value) for value in np.percentile(values, percentiles)]
        return [float(np.mean(values)), *found]

    @property
    def num_good(self) -> int:
        """Requests within every limit of `--goodput`."""
        limits = self.options.slo_ms()
        return sum(all(_keeps(t, name, ms) for name, ms in limits.items()) for t in self.times)

    def statistics(self) -> dict[str, float]:
        """mean, median, std and percentiles of each metric asked for, by vLLM's names."""
        found: dict[str, float] = {}
        for metric in self.options.metrics():
            values = self.values_ms(metric) or [0.0]
            found[f"mean_{metric}_ms"] = float(np.mean(values))
            found[f"median_{metric}_ms"] = float(np.median(values))
            found[f"std_{metric}_ms"] = float(np.std(values))
            for percentile in self.options.percentiles():
                value = float(np.percentile(values, percentile))
                found[f"p{percentile:g}_{metric}_ms"] = value
        return found

    def as_json(self) -> dict[str, Any]:
        """vLLM's keys first, then ours."""
        o, seconds = self.options, max(self.duration_s, 1e-9)
        tokens, inputs = self.num_output_tokens, self.num_input_tokens
        per_second = self.output_tokens_by_second()
        figures: dict[str, Any] = {
            "backend": o.backend,
            "num_prompts": len(self.errors),
            "request_rate": _rate(o.request_rate),
            "burstiness": o.burstiness,
            "max_concurrency": o.max_concurrency,
            "duration": self.duration_s,
            "completed": len(self.times),
            "failed": len(self.errors) - len(self.times),
            "cut_off": self.num_cut_off,
            "total_input_tokens": inputs,
            "total_output_tokens": tokens,
            "request_throughput": len(self.times) / seconds,
            "request_goodput": self.num_good / seconds if o.goodput else None,
            "output_throughput": tokens / seconds,
            "total_token_throughput": (tokens + inputs) / seconds,
            **self.statistics(),
            "max_output_tokens_per_s": max(per_second, default=0.0),
            "max_concurrent_requests": max(self.running_by_second(), default=0),
        }
        if o.goodput:
            figures["good_requests"] = self.num_good
            figures["slo_ms"] = o.slo_ms()
        figures |= {
            "total_chunks": sum(t.num_chunks for t in self.times),
            "total_cached_tokens": sum(t.num_cached_tokens for t in self.times),
            "tokens_counted_by_server": self.is_counted,
            "client": self.client(),
            "output_tokens_by_second": per_second,
            "running_by_second": self.running_by_second(),
        }
        return figures | self._arrays()

    def _arrays(self) -> dict[str, Any]:
        """Per-request arrays, successes only: the samples that `compare` uses."""
        arrays: dict[str, Any] = {
            "input_lens": [t.num_input_tokens for t in self.times],
            "output_lens": [t.num_output_tokens for t in self.times],
            "start_times": [round(t.start_s, 6) for t in self.times],
            "ttfts": [round(t.ttft_s, 6) for t in self.times],
            "e2els": [round(t.latency_s, 6) for t in self.times],
            "errors": [e for e in self.errors if e],
        }
        if self.options.save_detailed:
            arrays["itls"] = [[round(g, 6) for g in t.gaps_s] for t in self.times]
            arrays["generated_texts"] = list(self.texts)
        return arrays

    def client(self) -> dict[str, float]:
        """Delays and CPU share of the load generator itself."""
        lateness, lag = list(self.lateness_s) or [0.0], list(self.lag_s) or [0.0]
        return {
            "p99_send_lateness_ms": float(np.percentile(lateness, 99)) * 1e3,
            "max_send_lateness_ms": max(lateness) * 1e3,
            "p99_loop_lag_ms": float(np.percentile(lag, 99)) * 1e3,
            "max_loop_lag_ms": max(lag) * 1e3,
            "cpu_share": self.cpu_share,
        }

    def warnings(self) -> list[str]:
        """Reasons to doubt the figures."""
        client, found = self.client(), []
        for name, what in (
            ("p99_send_lateness_ms", "sent its requests"),
            ("p99_loop_lag_ms", "woke up"),
        ):
            if client[name] > LAG_LIMIT_S * 1e3:
                found.append(
                    f"the load generator {what} up to {client[name]:.0f} ms late (p99): the times "
                    "include this delay, give it more CPU or less load"
                )
        if self.cpu_share > CPU_LIMIT:
            found.append(
                f"the load generator used {self.cpu_share:.0%} of a core: it may be the limit"
            )
        if self.num_cut_off:
            asked = len(self.errors) + self.num_cut_off
            found.append(
                "stopped early: requests without an answer, left out of all figures: "
                f"{self.num_cut_off} of {asked}"
            )
        failed = [e for e in self.errors if e]
        if failed:
            found.append(f"failed requests: {len(failed)}, the first with: {failed[0]}")
        if self.times and not self.is_counted:
            found.append("the server sent no usage: chunks were counted as tokens")
        return found

    def output_tokens_by_second(self) -> list[float]:
        """[seconds] tokens that arrived in each second of the run.

        A request's tokens are spread evenly over its chunks, as a chunk may hold several.
        """
        sums = [0.0] * max(1, math.ceil(self.duration_s))
        for t in self.times:
            weight = t.num_output_tokens / (len(t.gaps_s) + 1)
            at = t.start_s + t.ttft_s
            for gap in (0.0, *t.gaps_s):
                at += gap
                sums[min(len(sums) - 1, max(0, int(at)))] += weight
        return [round(s, 3) for s in sums]

    def running_by_second(self) -> list[int]:
        """[seconds] most requests running at the same time within each second."""
        peaks = [0] * max(1, math.ceil(self.duration_s))
        # Ends sort before starts of the same time: a client's next request does not count twice.
        changes = [(t.start_s, 1) for t in self.times]
        changes += [(t.start_s + t.latency_s, -1) for t in self.times]
        running, second = 0, 0
        for at, change in sorted(changes):
            while second < min(len(peaks) - 1, int(at)):
                second += 1
                peaks[second] = running
            running += change
            peaks[second] = max(peaks[second], running)
        return peaks


def make_result(
    options: ServeOptions, measured: dict[str, Any], planned_inputs: Sequence[int]
) -> ServeResult:
    """`measured`: what `run_load` returned. `planned_inputs` [num_prompts]: prompt lengths, used
    where the server reports none."""
    asked = list(zip(measured["answers"], planned_inputs, strict=True))
    answers = [a for a, _ in asked if a]
    good = [(a, n) for a, n in asked if a and not a["error"]]
    times = tuple(
        AnswerTimes(
            a["start_s"],
            a["ttft_s"],
            a["latency_s"],
            a["gaps_s"],
            a["num_chunks"],
            n if a["num_prompt_tokens"] is None else a["num_prompt_tokens"],
            a["num_chunks"] if a["num_output_tokens"] is None else a["num_output_tokens"],
            a["num_cached_tokens"] or 0,
        )
        for a, n in good
    )
    return ServeResult(
        options,
        times,
        tuple(a["error"] or "" for a in answers),
        tuple(a["text"] or "" for a, _ in good),
        max((t.start_s + t.latency_s for t in times), default=0.0),
        all(a["num_output_tokens"] is not None for a, _ in good),
        measured["lateness_s"],
        measured["lag_s"],
        measured["cpu_share"],
        len(asked) - len(answers),
    )


def _keeps(times: AnswerTimes, metric: str, limit_ms: float) -> bool:
    value = {"ttft": times.ttft_s, "tpot": times.tpot_s, "e2el": times.latency_s}[metric]
    return value is None or value * 1e3 <= limit_ms


def _rate(rate: float | None) -> float | str:
    return "inf" if rate is None or math.isinf(rate) else rate
