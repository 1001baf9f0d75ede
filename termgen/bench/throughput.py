"""`termgen bench throughput`: how long many requests take when all are there from the start.

Runs over any `EngineClient`; knows nothing of how the engine is built.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from tqdm import tqdm

from termgen.bench.options import ThroughputOptions
from termgen.bench.workload import (
    BenchRequest,
    check_fits,
    run_request,
    run_requests,
    throughput_requests,
)
from termgen.client import EngineClient

WARMUP_TOKENS = 8


@dataclass(frozen=True, slots=True)
class ThroughputResult:
    options: ThroughputOptions
    elapsed_time: float
    """Seconds from the first submission to the last token."""
    num_requests: int
    num_prompt_tokens: int
    num_output_tokens: int

    @property
    def total_num_tokens(self) -> int:
        return self.num_prompt_tokens + self.num_output_tokens

    @property
    def output_tokens_per_second(self) -> float:
        return self.num_output_tokens / self.elapsed_time

    def as_json(self) -> dict[str, Any]:
        """vLLM's keys first, then ours."""
        return {
            "elapsed_time": self.elapsed_time,
            "num_requests": self.num_requests,
            "total_num_tokens": self.total_num_tokens,
            "requests_per_second": self.num_requests / self.elapsed_time,
            "tokens_per_second": self.total_num_tokens / self.elapsed_time,
            "total_prompt_tokens": self.num_prompt_tokens,
            "total_output_tokens": self.num_output_tokens,
            "output_tokens_per_second": self.output_tokens_per_second,
        }

    def rows(self) -> list[tuple[str, str]]:
        """The table: what, and how much."""
        figures = self.as_json()
        return [
            ("dataset", self.options.dataset_name),
            ("requests", f"{self.num_requests}"),
            ("prompt tokens", f"{self.num_prompt_tokens}"),
            ("output tokens", f"{self.num_output_tokens}"),
            ("elapsed time", f"{self.elapsed_time:.2f} s"),
            ("requests/s", f"{figures['requests_per_second']:.3f}"),
            ("total tokens/s", f"{figures['tokens_per_second']:.2f}"),
            ("output tokens/s", f"{self.output_tokens_per_second:.2f}"),
        ]


async def run_throughput(
    client: EngineClient,
    options: ThroughputOptions,
    *,
    seed: int,
    show_progress: bool | None = None,
) -> ThroughputResult:
    """One short request warms up, untimed. show_progress None: only on a terminal."""
    vocab_size, max_model_len = client.model.vocab_size, client.model.max_model_len
    requests = throughput_requests(options, vocab_size=vocab_size, seed=seed)
    check_fits(requests, max_model_len=max_model_len)
    first = requests[0]
    await run_request(
        client,
        BenchRequest(first.prompt_token_ids[:WARMUP_TOKENS], min(WARMUP_TOKENS, first.output_len)),
    )
    disable = None if show_progress is None else not show_progress
    with tqdm(total=len(requests), desc="throughput", leave=False, disable=disable) as bar:
        start = time.perf_counter()
        await run_requests(client, requests, on_done=bar.update)
        elapsed = time.perf_counter() - start
    return ThroughputResult(
        options,
        elapsed,
        len(requests),
        sum(len(r.prompt_token_ids) for r in requests),
        sum(r.output_len for r in requests),
    )
