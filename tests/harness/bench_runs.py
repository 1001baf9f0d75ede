"""Made-up results of load tests, for the tests of sweeps, comparisons and reports."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from termgen.bench.options import ServeOptions
from termgen.bench.serve import ServeRun
from termgen.bench.serve_result import make_result
from termgen.bench.server_api import ServedModel


def make_run(
    options: ServeOptions,
    *,
    first_s: Sequence[float],
    gap_s: float = 0.01,
    num_tokens: int = 5,
    apart_s: float = 0.1,
    num_failed: int = 0,
    num_cut_off: int = 0,
) -> ServeRun:
    """One request for each of `first_s`, its time to first token."""
    answers: list[dict[str, Any]] = []
    for i, first in enumerate(first_s):
        gaps = [gap_s] * (num_tokens - 1)
        answers.append(
            {
                "start_s": i * apart_s,
                "ttft_s": first,
                "latency_s": first + sum(gaps),
                "gaps_s": gaps,
                "num_chunks": num_tokens,
                "num_prompt_tokens": 7,
                "num_output_tokens": num_tokens,
                "num_cached_tokens": 0,
                "text": None,
                "error": "broke" if i < num_failed else None,
            }
        )
    measured = {"answers": answers, "lateness_s": [], "lag_s": [], "cpu_share": 0.1}
    answers += [{}] * num_cut_off
    result = make_result(options, measured, [7] * len(answers))
    return ServeRun(result, ServedModel("m", "termgen", 99), "http://h:1", 0, True, None)
