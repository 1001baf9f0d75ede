"""What is told of a request once it is over: a log line, a trace. Counts and times, never text."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from termgen.client import RequestTimings

logger = logging.getLogger("termgen.server.requests")

OPERATIONS = {"/v1/completions": "text_completion"}
"""OpenTelemetry's names for what was asked; everything else that generates is a `chat`."""


@dataclass(frozen=True, slots=True)
class RequestReport:
    """One HTTP request that was given to the engine."""

    request_id: str
    """As in `x-request-id`."""
    answer_id: str
    path: str
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
    """Of its prompts, as far as they came to an end."""
    began_ns: int
    ended_ns: int
    """perf_counter_ns."""

    @property
    def operation(self) -> str:
        return OPERATIONS.get(self.path, "chat")

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
    """One line a request."""

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
