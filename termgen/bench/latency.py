"""`termgen bench latency`: how long one batch of equal requests takes from start to end.

Runs over any `EngineClient`; knows nothing of how the engine is built.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
from tqdm import tqdm

from termgen.bench.options import LatencyOptions
from termgen.bench.workload import BenchRequest, check_fits, equal_requests, run_requests
from termgen.client import EngineClient
from termgen.durations import took

PERCENTILES = (10, 25, 50, 75, 90, 99)


@dataclass(frozen=True, slots=True)
class LatencyResult:
    """Seconds per batch, and what follows from them."""

    options: LatencyOptions
    latencies: tuple[float, ...]
    """[num_iters] first submission to last token of the batch."""
    first_token_times: tuple[float, ...]
    """[num_iters] mean time to first token in the batch."""

    @property
    def avg_latency(self) -> float:
        return float(np.mean(self.latencies))

    @property
    def avg_ttft(self) -> float:
        return float(np.mean(self.first_token_times))

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens over the whole time, prefill included."""
        return self.options.batch_size * self.options.output_len / self.avg_latency

    @property
    def decode_tokens_per_second(self) -> float | None:
        """Generated tokens after the first ones over the time after them; None for one token."""
        later = self.options.batch_size * (self.options.output_len - 1)
        return later / (self.avg_latency - self.avg_ttft) if later else None

    def as_json(self) -> dict[str, Any]:
        """vLLM's keys first, then ours."""
        levels = np.percentile(self.latencies, PERCENTILES).tolist()
        return {
            "avg_latency": self.avg_latency,
            "latencies": list(self.latencies),
            "percentiles": dict(zip(map(str, PERCENTILES), levels, strict=True)),
            "avg_ttft": self.avg_ttft,
            "tokens_per_second": self.tokens_per_second,
            "decode_tokens_per_second": self.decode_tokens_per_second,
        }

    def rows(self) -> list[tuple[str, str]]:
        """The table: what, and how much."""
        o = self.options
        figures = self.as_json()
        decode = self.decode_tokens_per_second
        return [
            ("batch", f"{o.batch_size} x ({o.input_len} in, {o.output_len} out)"),
            ("iterations", f"{o.num_iters} after {o.num_iters_warmup} warm-ups"),
            ("average latency", took(self.avg_latency * 1e3)),
            *((f"p{p} latency", took(v * 1e3)) for p, v in figures["percentiles"].items()),
            ("average time to first token", took(self.avg_ttft * 1e3)),
            ("output tokens/s", f"{self.tokens_per_second:.2f}"),
            ("output tokens/s, decode only", "-" if decode is None else f"{decode:.2f}"),
        ]


async def run_latency(
    client: EngineClient, options: LatencyOptions, *, seed: int, show_progress: bool | None = None
) -> LatencyResult:
    """show_progress None: only when standard error is a terminal."""
    requests = equal_requests(
        options.batch_size,
        options.input_len,
        options.output_len,
        vocab_size=client.model.vocab_size,
        seed=seed,
    )
    check_fits(requests, max_model_len=client.model.max_model_len)
    total = options.num_iters_warmup + options.num_iters
    times: list[tuple[float, float]] = []
    disable = None if show_progress is None else not show_progress
    for _ in tqdm(range(total), desc="latency", leave=False, disable=disable):
        times.append(await _run_batch(client, requests))
    measured = times[options.num_iters_warmup :]
    return LatencyResult(
        options, tuple(t for t, _ in measured), tuple(ttft for _, ttft in measured)
    )


async def _run_batch(client: EngineClient, requests: list[BenchRequest]) -> tuple[float, float]:
    start = time.perf_counter()
    first_token_times = await run_requests(client, requests)
    return time.perf_counter() - start, float(np.mean(first_token_times))
