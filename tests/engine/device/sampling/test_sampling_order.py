"""The order of operations is part of the output: rebuilt with transformers' processors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from termgen.engine.device.sampling.gumbel import Stream, gumbel_from_bits, random_bits
from termgen.engine.device.sampling.metadata import SamplingMetadata
from termgen.engine.device.sampling.sampler import Sampler

MakeMeta = Callable[..., SamplingMetadata]
Step = Callable[[torch.Tensor], torch.Tensor]

ROWS, VOCAB = 2000, 67
STOP = 11
OUTPUT_IDS = torch.arange(3, 40, 2).expand(ROWS, -1)  # 19 output tokens, each once
COUNTS = torch.zeros(ROWS, VOCAB, dtype=torch.int32).scatter_(1, OUTPUT_IDS, 1)


def warp(processor: Any, history: torch.Tensor | None = None) -> Step:
    return lambda logits: processor(history, logits)


ORDER: dict[str, Step] = {
    "stop mask": lambda logits: logits.index_fill(1, torch.tensor([STOP]), -torch.inf),
    "repetition": warp(RepetitionPenaltyLogitsProcessor(1.5), OUTPUT_IDS),
    "frequency and presence": lambda logits: logits - 0.3 * COUNTS - 0.4 * (COUNTS > 0),
    "temperature": warp(TemperatureLogitsWarper(0.6)),
    "min-p": warp(MinPLogitsWarper(0.08)),
    "top-k": warp(TopKLogitsWarper(7)),
    "top-p": warp(TopPLogitsWarper(0.8)),
}
MATTERS = [
    ("repetition", "frequency and presence"),
    ("frequency and presence", "temperature"),
    ("repetition", "min-p"),
    ("temperature", "min-p"),
    ("min-p", "top-p"),
    ("top-k", "top-p"),
]


@pytest.fixture
def logits(random_logits: Callable[..., torch.Tensor]) -> torch.Tensor:
    return random_logits(ROWS, VOCAB, scale=2.0, seed=23)


@pytest.fixture
def meta(make_meta: MakeMeta) -> SamplingMetadata:
    return make_meta(
        ROWS,
        seeds=23,
        positions=torch.arange(ROWS),
        temperature=0.6,
        min_p=0.08,
        top_k=7,
        top_p=0.8,
        repetition=1.5,
        presence=0.4,
        frequency=0.3,
        output_counts=COUNTS,
        prompt_mask=torch.zeros(ROWS, VOCAB, dtype=torch.bool),
        stop_token_ids=torch.full((ROWS, 1), STOP),
        suppress_stop=True,
        max_logprobs=3,
    )


def rebuild(steps: list[str], logits: torch.Tensor, meta: SamplingMetadata) -> torch.Tensor:
    bits = random_bits(meta.seeds, meta.positions, stream=Stream.TARGET, vocab_size=VOCAB)
    for step in steps:
        logits = ORDER[step](logits)
    return (logits + gumbel_from_bits(bits)).argmax(-1)


def test_every_step_in_order(logits: torch.Tensor, meta: SamplingMetadata) -> None:
    tokens = Sampler()(logits, meta).token_ids
    assert torch.equal(tokens, rebuild(list(ORDER), logits, meta))


@pytest.mark.parametrize("first, second", MATTERS)
def test_another_order_differs(
    logits: torch.Tensor, meta: SamplingMetadata, first: str, second: str
) -> None:
    """A control for the test above: swapped, these two would give other tokens."""
    steps = list(ORDER)
    left, right = steps.index(first), steps.index(second)
    steps[left], steps[right] = second, first
    assert not torch.equal(Sampler()(logits, meta).token_ids, rebuild(steps, logits, meta))


@pytest.mark.parametrize("step", list(ORDER))
def test_every_step_has_an_effect(logits: torch.Tensor, meta: SamplingMetadata, step: str) -> None:
    steps = [name for name in ORDER if name != step]
    assert not torch.equal(Sampler()(logits, meta).token_ids, rebuild(steps, logits, meta))


def test_logprobs_come_before_everything(logits: torch.Tensor, meta: SamplingMetadata) -> None:
    output = Sampler()(logits, meta)
    assert output.logprobs is not None
    raw = logits.log_softmax(-1)
    chosen = raw.gather(1, output.token_ids.unsqueeze(1))
    torch.testing.assert_close(output.logprobs.logprobs[:, :1], chosen)
    torch.testing.assert_close(output.logprobs.logprobs[:, 1:], raw.topk(3).values)
