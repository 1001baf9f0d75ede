"""The prompts of the benches: seeded random token ids. The same seed gives the same prompts.

Ids are drawn from the whole vocabulary, so prompts share no prefix and a prefix cache
finds nothing in them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from termgen.bench.options import ThroughputOptions
from termgen.client import EngineClient
from termgen.errors import ConfigError, EngineError
from termgen.vocabulary.sampling_params import SamplingParams

JOB256_REQUESTS = 256
JOB256_LENGTHS = (100, 1024)
"""Inclusive range of input and of output lengths."""


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """A prompt and how many tokens to generate for it, no fewer and no more."""

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
    """Lengths are uniform from (1 - ratio) to (1 + ratio) of those given, and at least 1."""
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
    """Refuse before starting what the model's context cannot hold. Raises `ConfigError`."""
    longest = max(len(r.prompt_token_ids) + r.output_len for r in requests)
    if longest > max_model_len:
        raise ConfigError(
            f"input plus output is up to {longest} tokens, but the model's context holds "
            f"{max_model_len}; lower input_len or output_len",
            param="output_len",
        )


async def run_request(client: EngineClient, request: BenchRequest) -> float:
    """Run one request to its end and return its time to first token, in seconds.

    Raises `EngineError` when the engine failed it or it came out shorter than asked: a figure
    over fewer tokens would be a wrong figure.
    """
    params = SamplingParams(
        temperature=0.0,
        ignore_eos=True,
        max_tokens=request.output_len,
    )
    num_tokens, ttft_s = 0, 0.0
    async for delta in client.generate(request.prompt_token_ids, params):
        num_tokens += len(delta.token_ids)
        if delta.error is not None:
            raise delta.error
        if delta.timings is not None:
            ttft_s = delta.timings.ttft_s
    if num_tokens != request.output_len:
        raise EngineError(f"a request made {num_tokens} tokens instead of {request.output_len}")
    return ttft_s


async def run_requests(
    client: EngineClient,
    requests: Sequence[BenchRequest],
    *,
    on_done: Callable[[], object] | None = None,
) -> list[float]:
    """Run all at once; their times to first token, in order. The first failure stops the rest."""

    async def run(request: BenchRequest) -> float:
        ttft_s = await run_request(client, request)
        if on_done is not None:
            on_done()
        return ttft_s

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(run(request)) for request in requests]
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]
