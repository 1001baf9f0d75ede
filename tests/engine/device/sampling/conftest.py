from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from sampling_columns import asks, make_cuts

from termgen.engine.device.sampling.metadata import SamplingMetadata
from termgen.engine.device.sampling.penalties import Penalties
from termgen.vocabulary.step import SamplingNeeds

MakeMeta = Callable[..., SamplingMetadata]


def _rows(value: Any, num_rows: int, dtype: torch.dtype) -> torch.Tensor:
    tensor = torch.as_tensor(value, dtype=dtype)
    return tensor.expand(num_rows).clone() if tensor.dim() == 0 else tensor.clone()


def _make_meta(
    num_rows: int,
    *,
    temperature: Any = 1.0,
    seeds: Any = None,
    positions: Any = 0,
    repetition: Any = 1.0,
    presence: Any = 0.0,
    frequency: Any = 0.0,
    output_counts: torch.Tensor | None = None,
    prompt_mask: torch.Tensor | None = None,
    stop_token_ids: torch.Tensor | None = None,
    suppress_stop: Any = False,
    min_tokens: bool = True,
    max_logprobs: int | None = None,
    device: str = "cpu",
    **cuts: Any,
) -> SamplingMetadata:
    """Metadata whose host flags follow from the values, as the scheduler would set them."""
    float32 = torch.float32
    tensors = {
        "temperature": _rows(temperature, num_rows, float32),
        "seeds": torch.arange(num_rows) if seeds is None else _rows(seeds, num_rows, torch.int64),
        "positions": _rows(positions, num_rows, torch.int64),
        "suppress_stop": _rows(suppress_stop, num_rows, torch.bool),
        "stop_token_ids": (
            torch.empty(num_rows, 0, dtype=torch.int64)
            if stop_token_ids is None
            else stop_token_ids
        ),
    }
    columns = make_cuts(num_rows, device=device, **cuts)
    penalties = (_rows(value, num_rows, float32) for value in (repetition, presence, frequency))
    return SamplingMetadata(
        **{name: tensor.to(device) for name, tensor in tensors.items()},
        cuts=columns,
        penalties=Penalties(*(column.to(device) for column in penalties)),
        output_counts=None if output_counts is None else output_counts.to(device),
        prompt_mask=None if prompt_mask is None else prompt_mask.to(device),
        needs=SamplingNeeds(
            all_greedy=bool((tensors["temperature"] < 1e-5).all()),
            filters=asks(columns),
            penalties=output_counts is not None,
            min_tokens=min_tokens,
            max_logprobs=max_logprobs,
        ),
    )


@pytest.fixture
def make_meta() -> MakeMeta:
    return _make_meta


def _assert_chi_square(counts: torch.Tensor, expected: torch.Tensor) -> None:
    """Goodness of fit within 6 sigma on both sides, by the Wilson-Hilferty normal approximation."""
    cells = expected > 0
    assert not counts[~cells].any(), "something impossible happened"
    freedom = int(cells.sum()) - 1
    statistic = float(((counts - expected)[cells] ** 2 / expected[cells]).sum())
    spread = 2 / (9 * freedom)
    z = ((statistic / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(spread)
    assert abs(z) < 6, (z, statistic, freedom)


@pytest.fixture
def assert_chi_square() -> Callable[[torch.Tensor, torch.Tensor], None]:
    return _assert_chi_square


def _random_logits(
    num_rows: int, vocab_size: int, *, scale: float = 3.0, seed: int | None = None
) -> torch.Tensor:
    if seed is None:
        seed = random.randrange(2**31)
        print(f"logits seed {seed}")
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, vocab_size, generator=generator) * scale


@pytest.fixture
def random_logits() -> Callable[..., torch.Tensor]:
    return _random_logits
