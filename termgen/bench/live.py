"""Figures of a load test that is running, added up from the load generator's progress reports.

Fed by `on_progress` of a `ServeBench`; read by the watching screen. The figures of a finished run
come from `serve_result`, which has every single time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from termgen.bench.options import ServeOptions
from termgen.bench.progress_lines import LiveTimes

METRICS = ("ttft", "itl", "tpot", "e2el")
RATE_WINDOW = 8
"""Reports over which a current rate is averaged: about two seconds."""


@dataclass(frozen=True, slots=True)
class Moment:
    """One progress report."""

    at_s: float
    running: int
    tokens: float
    """Generated since the start."""
    done: int


class LiveRun:
    def __init__(self, options: ServeOptions, num_requests: int) -> None:
        self.options = options
        self.num_requests = num_requests
        self.num_done = 0
        self.num_failed = 0
        self.num_running = 0
        self.num_good = 0
        self.at_s = 0.0
        self.times = {name: LiveTimes() for name in METRICS}
        self.moments: list[Moment] = []
        self._limits = options.slo_ms()
        self._kept = dict.fromkeys(self._limits, 0)
        self._num_finished = 0
        self._finished_chunks = 0
        self._finished_tokens = 0

    def take(self, report: dict[str, Any]) -> None:
        """Add one progress report of the load generator."""
        self.num_done, self.num_failed = report["done"], report["failed"]
        self.num_running, self.at_s = report["running"], max(0.0, report["at_s"])
        self.times["ttft"].merge(report["first"])
        self.times["itl"].merge(report["gaps"])
        for first_s, latency_s, chunks, tokens in report["finished"]:
            self._finish(first_s, latency_s, chunks, tokens)
        self.moments.append(Moment(self.at_s, self.num_running, self.num_tokens, self.num_done))

    def _finish(self, first_s: float, latency_s: float, chunks: int, tokens: int) -> None:
        self._num_finished += 1
        self._finished_chunks += chunks
        self._finished_tokens += tokens
        self.times["e2el"].add(latency_s)
        measured = {"ttft": first_s, "e2el": latency_s}
        if tokens > 1:
            measured["tpot"] = (latency_s - first_s) / (tokens - 1)
            self.times["tpot"].add(measured["tpot"])
        kept = [n for n, ms in self._limits.items() if measured.get(n, 0.0) * 1e3 <= ms]
        for name in kept:
            self._kept[name] += 1
        self.num_good += len(kept) == len(self._limits)

    @property
    def num_tokens(self) -> float:
        """Estimate: chunks received times tokens per chunk of the finished answers, as the token
        count comes only at an answer's end."""
        chunks = self.times["ttft"].number + self.times["itl"].number
        if not self._finished_chunks:
            return float(chunks)
        return chunks * self._finished_tokens / self._finished_chunks

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.at_s if self.at_s else 0.0

    @property
    def requests_per_s(self) -> float:
        return self.num_done / self.at_s if self.at_s else 0.0

    @property
    def good_share(self) -> float | None:
        """Share of finished requests within all limits; None without limits or before the first."""
        return self.num_good / self.num_done if self._limits and self.num_done else None

    def kept_share(self, metric: str) -> float | None:
        if metric not in self._kept or not self.num_done:
            return None
        return self._kept[metric] / self.num_done

    @property
    def left_s(self) -> float | None:
        """Estimate: the rest at the pace so far, and not before the last request is due."""
        rest = self.num_requests - self.num_done
        if rest == 0:
            return 0.0
        if not self.num_done:
            return None
        rate = self.options.request_rate
        if self.options.has_rate and rate is not None:
            last_due = self.num_requests / rate - self.at_s
            return max(last_due, 0.0) + (self.times["e2el"].mean or 0.0)
        return rest / self.requests_per_s

    def token_rates(self) -> list[float]:
        """Tokens per second at each report, over `RATE_WINDOW` reports before it."""
        return _rates([(m.at_s, m.tokens) for m in self.moments])

    def answer_rates(self) -> list[float]:
        return _rates([(m.at_s, m.done) for m in self.moments])


def _rates(points: Sequence[tuple[float, float]]) -> list[float]:
    found = []
    for i, (at, value) in enumerate(points):
        before_at, before = points[i - RATE_WINDOW] if i >= RATE_WINDOW else (0.0, 0.0)
        found.append(max(0.0, (value - before) / (at - before_at)) if at > before_at else 0.0)
    return found
