"""`termgen bench latency` and `termgen bench throughput`, with the prompts of both.

Latency times one batch of equal requests from start to end. Throughput times many requests that are
all submitted at the start. Prompts are seeded random token ids, so they share no prefix and there
are no prefix-cache hits. Runs over any `EngineClient`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from termgen.bench.options import LatencyOptions, ThroughputOptions
from termgen.bench.report import draft_figures, draft_rows
from termgen.client import EngineClient
from termgen.errors import ConfigError, EngineError
from termgen.vocabulary.durations import took
from termgen.vocabulary.sampling_params import SamplingParams

JOB256_REQUESTS = 256
JOB256_LENGTHS = (100, 1024)
"""Inclusive range of input and of output lengths."""

PERCENTILES = (10, 25, 50, 75, 90, 99)

WARMUP_TOKENS = 8


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """A prompt and the exact number of tokens to generate for it."""

    prompt_token_ids: tuple[int, ...]
    output_len: int


def equal_requests(
    count: int, input_len: int, output_len: int, *, vocab_size: int, seed: int
) -> list[BenchRequest]:
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, vocab_size, size=(count, input_len))  # [count, input_len]
    return [BenchRequest(tuple(row), output_len) for row in ids.tolist()]


def job256(*, vocab_size: int, seed: int) -> list[BenchRequest]:
    """256 requests whose input and output lengths are uniform in 100..1024."""
    rng = np.random.default_rng(seed)
    low, high = JOB256_LENGTHS
    lengths = rng.integers(low, high + 1, size=(JOB256_REQUESTS, 2))  # (input, output)
    return [
        BenchRequest(tuple(rng.integers(0, vocab_size, size=n_in).tolist()), n_out)
        for n_in, n_out in lengths.tolist()
    ]


def varied_requests(
    count: int, input_len: int, output_len: int, ratio: float, *, vocab_size: int, seed: int
) -> list[BenchRequest]:
    """Requests with lengths uniform in (1 - ratio) .. (1 + ratio) of those given, at least 1."""
    rng = np.random.default_rng(seed)

    def lengths(middle: int) -> list[int]:
        low, high = int(middle * (1 - ratio)), int(middle * (1 + ratio))
        return [max(1, int(n)) for n in rng.integers(low, high + 1, size=count)]

    sizes = zip(lengths(input_len), lengths(output_len), strict=True)
    return [
        BenchRequest(tuple(rng.integers(0, vocab_size, size=n_in).tolist()), n_out)
        for n_in, n_out in sizes
    ]


def throughput_requests(
    options: ThroughputOptions, *, vocab_size: int, seed: int
) -> list[BenchRequest]:
    if options.dataset_name == "job256":
        return job256(vocab_size=vocab_size, seed=seed)
    count, input_len = options.num_prompts or 1000, options.input_len or 512
    output_len, ratio = options.output_len or 128, options.random_range_ratio
    if not ratio:
        return equal_requests(count, input_len, output_len, vocab_size=vocab_size, seed=seed)
    return varied_requests(count, input_len, output_len, ratio, vocab_size=vocab_size, seed=seed)


def check_fits(requests: list[BenchRequest], *, max_model_len: int) -> None:
    """Refuse requests that the model's context cannot hold. Raises `ConfigError`."""
    longest = max(len(r.prompt_token_ids) + r.output_len for r in requests)
    if longest > max_model_len:
        raise ConfigError(
            f"input plus output is up to {longest} tokens, but the model's context holds "
            f"{max_model_len}; lower input_len or output_len",
            param="output_len",
        )


class DraftTotals(NamedTuple):
    """What an engine that guesses tokens did in the measured requests."""

    num_drafted: int
    num_kept: int

    def figures(self, num_output_tokens: int) -> dict[str, float]:
        return draft_figures(self.num_drafted, self.num_kept, num_output_tokens)

    def rows(self, num_output_tokens: int) -> list[tuple[str, str]]:
        none = [] if self.num_drafted else [("guessed tokens kept", "none was guessed")]
        return none + draft_rows(self.figures(num_output_tokens), self.num_drafted)


class Ran(NamedTuple):
    """A request at its end."""

    ttft_s: float
    num_drafted: int
    num_kept: int


def totals_of(client: EngineClient, requests: Iterable[Ran]) -> DraftTotals | None:
    """None where the engine guesses no tokens."""
    ran = list(requests)
    totals = DraftTotals(sum(r.num_drafted for r in ran), sum(r.num_kept for r in ran))
    return totals if client.model.num_drafts or totals.num_drafted else None


async def run_request(client: EngineClient, request: BenchRequest) -> Ran:
    """Run one request to its end.

    Raises `EngineError` when the engine failed it or generated fewer tokens than asked.
    """
    params = SamplingParams(
        temperature=0.0,
        ignore_eos=True,
        max_tokens=request.output_len,
    )
    num_tokens, ttft_s, drafts = 0, 0.0, (0, 0)
    async for delta in client.generate(request.prompt_token_ids, params):
        num_tokens += len(delta.token_ids)
        if delta.error is not None:
            raise delta.error
        if delta.timings is not None:
            ttft_s = delta.timings.ttft_s
            drafts = delta.num_draft_tokens, delta.num_accepted_tokens
    if num_tokens != request.output_len:
        raise EngineError(f"a request made {num_tokens} tokens instead of {request.output_len}")
    return Ran(ttft_s, *drafts)


async def run_requests(
    client: EngineClient,
    requests: Sequence[BenchRequest],
    *,
    on_done: Callable[[], object] | None = None,
) -> list[Ran]:
    """Run all at once; return what they were, in order. The first failure cancels the rest."""

    async def run(request: BenchRequest) -> Ran:
        ran = await run_request(client, request)
        if on_done is not None:
            on_done()
        return ran

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(run(request)) for request in requests]
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]


@dataclass(frozen=True, slots=True)
class LatencyResult:
    options: LatencyOptions
    latencies: tuple[float, ...]
    """[num_iters] seconds from the first submission to the last token of the batch."""
    first_token_times: tuple[float, ...]
    """[num_iters] mean time to first token in the batch, in seconds."""
    drafts: DraftTotals | None = None
    """Totals of all iterations; None: the engine guesses no tokens."""

    @property
    def avg_latency(self) -> float:
        return float(np.mean(self.latencies))

    @property
    def avg_ttft(self) -> float:
        return float(np.mean(self.first_token_times))

    @property
    def num_output_tokens(self) -> int:
        return self.options.batch_size * self.options.output_len * len(self.latencies)

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens over the total time, prefill included."""
        return self.options.batch_size * self.options.output_len / self.avg_latency

    @property
    def decode_tokens_per_second(self) -> float | None:
        """Tokens after the first of each request, over the time after TTFT; None for one token."""
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
            "drafts": self.drafts and self.drafts.figures(self.num_output_tokens),
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
            *(self.drafts.rows(self.num_output_tokens) if self.drafts is not None else ()),
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
    batches: list[tuple[float, list[Ran]]] = []
    disable = None if show_progress is None else not show_progress
    for _ in tqdm(range(total), desc="latency", leave=False, disable=disable):
        batches.append(await _run_batch(client, requests))
    measured = batches[options.num_iters_warmup :]
    return LatencyResult(
        options,
        tuple(took_s for took_s, _ in measured),
        tuple(float(np.mean([each.ttft_s for each in ran])) for _, ran in measured),
        totals_of(client, (each for _, ran in measured for each in ran)),
    )


async def _run_batch(client: EngineClient, requests: list[BenchRequest]) -> tuple[float, list[Ran]]:
    start = time.perf_counter()
    ran = await run_requests(client, requests)
    return time.perf_counter() - start, ran


@dataclass(frozen=True, slots=True)
class ThroughputResult:
    options: ThroughputOptions
    elapsed_time: float
    """Seconds from the first submission to the last token."""
    num_requests: int
    num_prompt_tokens: int
    num_output_tokens: int
    drafts: DraftTotals | None = None
    """None: the engine guesses no tokens."""

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
            "drafts": self.drafts and self.drafts.figures(self.num_output_tokens),
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
            *(self.drafts.rows(self.num_output_tokens) if self.drafts is not None else ()),
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
        ran = await run_requests(client, requests, on_done=bar.update)
        elapsed = time.perf_counter() - start
    return ThroughputResult(
        options,
        elapsed,
        len(requests),
        sum(len(r.prompt_token_ids) for r in requests),
        sum(r.output_len for r in requests),
        totals_of(client, ran),
    )
