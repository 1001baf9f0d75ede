"""Peculiarities of the torch reference: grouping rows, tiling queries, no synchronisation."""

from __future__ import annotations

import pytest
import torch
from attention_case import AttentionCase

from termgen.engine.device.attention import torch_reference
from termgen.engine.device.attention.base import AttentionForm
from termgen.engine.device.attention.torch_reference import TorchReferenceAttention


def test_tiles_and_split_groups_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [(c, 1) for c in (0, 90, 3, 41, 40, 120, 1)]
    rows += [(0, 50), (60, 3), (9, 30), (0, 2), (5, 17)]
    monkeypatch.setattr(torch_reference, "_QUERY_TILE", 8)
    monkeypatch.setattr(torch_reference, "_MAX_GATHERED", 128)
    monkeypatch.setattr(torch_reference, "_MAX_SCORES", 600)
    monkeypatch.setattr(torch_reference, "_WORTH_A_GROUP", 10)
    case = AttentionCase(rows, num_heads=6)
    case.check()
    case.check(window=6)


def test_lengths_far_apart_are_computed_apart() -> None:
    case = AttentionCase([(2, 1), (1999, 1), (5, 1), (1200, 1)], block_size=16)
    backend = TorchReferenceAttention()
    backend.prepare(case.metadata)
    assert len(backend._groups) > 1
    case.check()


@pytest.mark.parametrize("window", [None, 4])
def test_batches_made_without_looking_at_the_device_are_the_same(
    monkeypatch: pytest.MonkeyPatch, window: int | None
) -> None:
    case = AttentionCase([(15, 1), (3, 1), (40, 1), (0, 20), (16, 2), (4, 9)])
    expected = case.run(window=window)
    monkeypatch.setattr(torch_reference, "_QUERY_TILE", 8)
    monkeypatch.setattr(
        torch_reference, "_batches_from_lengths", torch_reference._batches_from_bounds
    )
    torch.testing.assert_close(case.run(window=window), expected)


def test_forward_needs_prepare_for_this_very_step() -> None:
    case, other = AttentionCase([(5, 1)]), AttentionCase([(5, 1)])
    backend = TorchReferenceAttention()
    backend.prepare(other.metadata)
    with pytest.raises(AssertionError, match="prepare"):
        backend.forward(
            case.queries[0],
            case.cache,
            case.metadata,
            AttentionForm(1.0),
        )
