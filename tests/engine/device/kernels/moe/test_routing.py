"""The experts of a token, and the pairs sorted by expert, against their definitions."""

from __future__ import annotations

import pytest
import torch
from triton_device import DEVICES, DEVICES_AND_DTYPES, normal, require_triton

require_triton()

from termgen.engine.device.kernels.moe.routing import (  # noqa: E402
    route,
    sort_pairs,
    sort_pairs_reference,
)
from termgen.engine.device.layers import ops as reference  # noqa: E402

devices = pytest.mark.parametrize("device", DEVICES)


@pytest.mark.parametrize(("device", "dtype"), [p for p in DEVICES_AND_DTYPES if p.id != "cuda-f16"])
@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize(
    ("num_experts", "top_k"), [(128, 8), (8, 2), (5, 1), (1, 1), (60, 4), (6, 6), (200, 3)]
)
def test_route(
    device: str, dtype: torch.dtype, renormalize: bool, num_experts: int, top_k: int
) -> None:
    logits = normal(6, num_experts, dtype=dtype, device=device, seed=num_experts, scale=4.0)
    logits[3] *= 30.0  # all but one probability vanish
    ids, weights = route(logits, top_k, renormalize=renormalize)
    expected, expected_weights = reference.route(logits, top_k, renormalize=renormalize)
    torch.testing.assert_close(weights, expected_weights, atol=1e-6, rtol=1e-5)
    # Any of several equal logits, which half types have, and of underflowed weights may come first.
    chosen, best = logits.gather(1, ids.long()), logits.gather(1, expected)
    assert torch.equal(chosen[weights > 0], best[weights > 0])
    assert all(len(set(row)) == top_k for row in ids.tolist())


@devices
@pytest.mark.parametrize("renormalize", [False, True])
def test_weights_are_scaled_by_the_experts_own_factors(device: str, renormalize: bool) -> None:
    logits = normal(5, 7, dtype=torch.float32, device=device, seed=2, scale=2.0)
    scale = normal(7, dtype=torch.float32, device=device, seed=3)
    ids, weights = route(logits, 3, renormalize=renormalize)
    scaled_ids, scaled = route(logits, 3, renormalize=renormalize, scale=scale)
    assert torch.equal(scaled_ids, ids)
    torch.testing.assert_close(scaled, weights * scale[ids.long()])
    expected = reference.route(logits, 3, renormalize=renormalize, scale=scale)
    torch.testing.assert_close(scaled, expected[1], atol=1e-6, rtol=1e-5)


@devices
@pytest.mark.parametrize("has_shared", [False, True])
@pytest.mark.parametrize(("num_experts", "top_k"), [(16, 1), (128, 1), (5, 3), (1, 1)])
def test_weights_of_inputs_are_sigmoids(
    device: str, num_experts: int, top_k: int, has_shared: bool
) -> None:
    logits = normal(6, num_experts, dtype=torch.float32, device=device, seed=4, scale=3.0)
    options = {"renormalize": False, "has_shared": has_shared, "weighs_inputs": True}
    ids, weights = route(logits, top_k, **options)
    expected_ids, expected = reference.route(logits, top_k, **options)
    assert torch.equal(ids.long(), expected_ids)
    torch.testing.assert_close(weights, expected, atol=1e-6, rtol=1e-5)
    values, best = logits.topk(top_k)
    assert torch.equal(expected_ids[:, :top_k], best)
    torch.testing.assert_close(expected[:, :top_k], values.sigmoid())
    if has_shared:
        assert (ids[:, -1] == num_experts).all() and (weights[:, -1] == 1.0).all()


@devices
def test_equal_logits_choose_the_first_experts(device: str) -> None:
    ids, weights = route(torch.zeros(2, 70, device=device), 4, renormalize=True)
    assert ids.tolist() == [[0, 1, 2, 3]] * 2 and weights.tolist() == [[0.25] * 4] * 2


@devices
def test_what_is_no_number_goes_to_experts_that_exist(device: str) -> None:
    logits = normal(4, 5, dtype=torch.float32, device=device, seed=1)
    expected = route(logits, 3, renormalize=True)
    logits[0] = float("nan")
    logits[1] = float("-inf")
    logits[2, 1:] = float("nan")
    ids, weights = route(logits, 3, renormalize=True)
    assert 0 <= int(ids.min()) and int(ids.max()) < 5
    assert int(ids[2, 0]) == 0, "the only number should come first"
    assert torch.equal(ids[3], expected[0][3]) and torch.equal(weights[3], expected[1][3])


def some_ids(kind: str, num_tokens: int, top_k: int, num_experts: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(num_tokens)
    if kind == "one expert":
        return torch.full((num_tokens, top_k), num_experts - 1)
    if kind == "few experts":
        return torch.randint(0, 3, (num_tokens, top_k), generator=generator) * 2
    draws = torch.rand(num_tokens, num_experts, generator=generator)
    return draws.topk(top_k, dim=1).indices


@devices
@pytest.mark.parametrize("kind", ["random", "one expert", "few experts"])
@pytest.mark.parametrize(
    ("num_tokens", "top_k", "num_experts", "block_m"),
    [(1, 8, 128, 16), (1, 1, 6, 16), (70, 2, 8, 32), (33, 8, 60, 16), (300, 2, 7, 64)],
)
def test_sorted_pairs(
    device: str, kind: str, num_tokens: int, top_k: int, num_experts: int, block_m: int
) -> None:
    ids = some_ids(kind, num_tokens, top_k, num_experts).int().to(device)
    expected = sort_pairs_reference(ids, num_experts=num_experts, block_m=block_m)
    for chunk, scan in ((32, 64), (128, 512)):
        actual = sort_pairs(ids, num_experts=num_experts, block_m=block_m, chunk=chunk, scan=scan)
        assert torch.equal(actual.order, expected.order)
        assert torch.equal(actual.tiles[0], expected.tiles[0])
        used = expected.tiles[0] >= 0
        assert torch.equal(actual.tiles[:, used], expected.tiles[:, used])
