"""How evenly tokens go to experts, as numbers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from termgen.vocabulary.device.expert_load import FULL, FULL_SHARE, MOST_COLUMNS, ExpertLoad


def test_an_even_load_and_an_uneven_one() -> None:
    counts = np.array([[10, 10, 10, 10], [40, 0, 0, 0], [30, 10, 0, 0]], np.int64)
    load = ExpertLoad.of(counts)
    assert (load.num_experts, load.num_choices) == (4, 120)
    assert load.peaks.tolist() == [1.0, 4.0, 3.0] and load.busiest.tolist() == [0, 0, 0]
    assert load.num_unused.tolist() == [0, 3, 2]
    assert load.imbalance == pytest.approx(8 / 3) and load.worst_layer == 1
    assert load.unused_share == 5 / 12
    even = int(np.ceil(FULL / FULL_SHARE))
    assert load.cells.tolist()[:2] == [[even] * 4, [FULL, 0, 0, 0]]


def test_before_the_first_token() -> None:
    load = ExpertLoad.of(np.zeros((2, 8), np.int64))
    assert load.num_choices == 0 and load.imbalance == 0.0 and load.unused_share == 1.0


@pytest.mark.parametrize("num_experts", [1, 8, 64, 100, 512])
def test_neighbours_share_a_cell(num_experts: int) -> None:
    seed = int(np.random.SeedSequence().generate_state(1)[0])
    counts = np.random.default_rng(seed).integers(1, 50, (3, num_experts))
    load = ExpertLoad.of(counts)
    columns = min(num_experts, MOST_COLUMNS)
    assert load.cells.shape == (3, columns), seed
    ends = [index * num_experts // columns for index in range(columns + 1)]
    shares = counts * num_experts / counts.sum(axis=1, keepdims=True)
    for layer in range(3):
        for column, cell in enumerate(load.cells[layer].tolist()):
            mean = shares[layer, ends[column] : ends[column + 1]].mean()
            exact = round(mean * FULL / FULL_SHARE, 9)
            assert cell - 1 <= exact <= cell or cell == FULL, seed


def test_a_tokens_count_is_not_lost_in_large_numbers() -> None:
    counts = np.full((1, 4), 2**40, np.int64)
    counts[0, 3] = 1
    assert ExpertLoad.of(counts).cells[0, 3] == 1, "it is not unused"


@pytest.mark.parametrize(
    "change",
    [
        {"peaks": np.zeros(0, np.float32)},
        {"peaks": np.full(2, np.nan, np.float32)},
        {"busiest": np.zeros(3, np.int32)},
        {"cells": np.zeros(2, np.uint8)},
        {"cells": np.zeros((3, 4), np.uint8)},
        {"num_experts": 0},
    ],
)
def test_what_another_process_says_is_checked(change: dict[str, object]) -> None:
    load = ExpertLoad.of(np.ones((2, 4), np.int64))
    with pytest.raises(ValueError, match="^experts: "):
        replace(load, **change)  # type: ignore[arg-type]
