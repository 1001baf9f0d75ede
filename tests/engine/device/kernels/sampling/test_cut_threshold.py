"""Cuts without a sort against the sampler's, which sorts."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from sampling_columns import make_cuts
from triton_device import DEVICES, DEVICES_AND_DTYPES, normal, require_triton

require_triton()

from termgen.engine.device.kernels.sampling.top_k_top_p import (  # noqa: E402
    CutWorkspace,
    cut_threshold,
    cut_threshold_of_slots,
)
from termgen.engine.device.sampling.top_k_top_p import Cuts  # noqa: E402

devices = pytest.mark.parametrize("device", DEVICES)
devices_and_dtypes = pytest.mark.parametrize(("device", "dtype"), DEVICES_AND_DTYPES)
INF, NAN = float("inf"), float("nan")


def run(
    logits: torch.Tensor,
    *,
    temperature: Any = 1.0,
    capacity: int = 4096,
    **cuts: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The logits that the kernel and the reference keep. Rows use slots in reverse order."""
    device, num_rows = logits.device, len(logits)

    def of_slots(column: torch.Tensor) -> torch.Tensor:
        return torch.cat((column.flip(0), column[:1]))

    columns = Cuts(*map(of_slots, make_cuts(num_rows, device=device, **cuts)))
    rows = torch.as_tensor(temperature, dtype=torch.float32, device=device)
    temperatures = of_slots(rows.expand(num_rows))
    slots = torch.arange(num_rows - 1, -1, -1, device=device)
    workspace = CutWorkspace(
        max_rows=num_rows, vocab_size=logits.shape[1], device=device, tile=1024, capacity=capacity
    )
    workspace.pieces.fill_(2**31 - 1)
    workspace.collected.fill_(2**31 - 1)
    out = torch.full((num_rows,), NAN, device=device)
    assert (
        cut_threshold(logits, slots, workspace, columns, temperature=temperatures, out=out) is out
    )
    expected = cut_threshold_of_slots(logits, slots, columns, temperature=temperatures)
    temperatures = temperatures[slots]
    scaled = logits.float() / temperatures.masked_fill(temperatures < 1e-5, 1.0)[:, None]
    return ~(scaled < out[:, None]), ~(scaled < expected[:, None])


def assert_same_cut(
    kept: tuple[torch.Tensor, torch.Tensor],
    logits: torch.Tensor,
    *,
    temperature: float = 1.0,
    top_p: float = 1.0,
) -> None:
    """The results may differ only in a logit whose preceding mass is `top_p` up to rounding."""
    ours, theirs = kept
    either = (logits / temperature).double().masked_fill(~(ours | theirs), -INF)
    probs = either.softmax(-1)
    for row, index in (ours != theirs).nonzero().tolist():
        before = float(probs[row][logits[row] > logits[row, index]].sum())
        assert abs(before - top_p) < 2e-6, (row, index, before)


@devices_and_dtypes
@pytest.mark.parametrize("vocab_size", [1, 7, 1024, 1500])
@pytest.mark.parametrize("capacity", [32, 4096])
def test_top_k(device: str, dtype: torch.dtype, vocab_size: int, capacity: int) -> None:
    wide = normal(4, vocab_size + 3, dtype=dtype, device=device, seed=vocab_size, scale=4.0)
    wide[:, vocab_size:] = 99.0
    logits = wide[:, :vocab_size]
    for top_k in ([1, 2, 5, 20], [40, 700, vocab_size, 2**31 - 1]):
        ours, theirs = run(logits, temperature=0.7, top_k=top_k, capacity=capacity)
        assert torch.equal(ours, theirs), top_k


@devices
@pytest.mark.parametrize("scale", [0.0, 0.02, 1.0, 8.0])
@pytest.mark.parametrize("capacity", [64, 512])
def test_top_p(device: str, scale: float, capacity: int) -> None:
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    logits = normal(1, 1500, dtype=torch.float32, device=device, seed=seed, scale=scale)
    for top_p in (1e-6, 0.3, 0.9, 0.999):
        kept = run(logits, temperature=1.3, top_p=top_p, capacity=capacity)
        assert_same_cut(kept, logits, temperature=1.3, top_p=top_p)
        assert kept[0].any()


@devices
@pytest.mark.parametrize("capacity", [32, 4096])
@pytest.mark.parametrize("top_p", [0.0, 1e-45, 2.0**-126])
def test_the_likeliest_stays_however_small_top_p_is(
    device: str, top_p: float, capacity: int
) -> None:
    logits = normal(4, 1300, dtype=torch.float32, device=device, seed=4)
    logits[1, 256:512] = 3.0  # more than fit, so that the whole row is searched
    logits[2] = -1.0
    kept = run(logits, top_p=top_p, top_k=[0, 0, 0, 40], capacity=capacity)
    assert torch.equal(*kept)
    assert torch.equal(kept[0], logits == logits.amax(dim=1, keepdim=True))


@devices
@pytest.mark.parametrize("capacity", [32, 4096])
def test_the_cuts_compose_in_order(device: str, capacity: int) -> None:
    """min-p, then top-k, then top-p of the rest, renormalised."""
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    logits = normal(6, 1300, dtype=torch.float32, device=device, seed=seed, scale=1.5)
    min_p, top_k = [0.0, 0.02, 0.02, 0.2, 0.9, 0.0], [40, 40, 600, 5, 3, 1000]
    kept = run(logits, min_p=min_p, top_k=top_k, top_p=0.8, capacity=capacity)
    assert_same_cut(kept, logits, top_p=0.8)


@devices
def test_min_p_alone(device: str) -> None:
    logits = normal(5, 1300, dtype=torch.float32, device=device, seed=3, scale=2.0)
    ours, theirs = run(logits, min_p=[0.0, 0.001, 0.05, 0.5, 1.0])
    relative = (logits - logits.amax(dim=1, keepdim=True)).double().exp()
    for row, index in (ours != theirs).nonzero().tolist():
        expected = (0.0, 0.001, 0.05, 0.5, 1.0)[row]
        assert float(relative[row, index]) == pytest.approx(expected, rel=1e-5)
    assert ours[0].all() and int(ours[4].sum()) == 1


@devices
@pytest.mark.parametrize("capacity", [16, 4096])
def test_ties_at_a_cut_are_all_kept(device: str, capacity: int) -> None:
    logits = torch.zeros(5, 1100, device=device)
    logits[0, 700:] = -1.0
    logits[1, 7] = 5.0
    logits[2, ::2] = -0.0
    logits[3, :9] = 3.0
    logits[4, 100:] = -INF
    for cuts in ({"top_k": 3}, {"top_k": 3, "top_p": 0.4}, {"top_p": 0.9}):
        ours, theirs = run(logits, **cuts, capacity=capacity)
        assert torch.equal(ours, theirs), cuts
        assert int(ours[0].sum()) in (700, 1100) and int(ours[2].sum()) == 1100
        assert ours[3, :9].all() and int(ours[4].sum()) == 100


@devices
def test_large_logits_crowded_in_one_place(device: str) -> None:
    # The estimate assumes a uniform spread over the row: here it lets far too many through.
    logits = normal(3, 1500, dtype=torch.float32, device=device, seed=5)
    logits[:, 256:512] += 40.0
    for cuts in ({"top_k": 200}, {"top_k": 50, "top_p": 0.9}, {"top_p": 0.95}):
        kept = run(logits, **cuts, capacity=128)
        assert_same_cut(kept, logits, top_p=cuts.get("top_p", 1.0))


@devices
def test_only_rows_that_ask_are_cut(device: str) -> None:
    logits = normal(5, 1100, dtype=torch.float32, device=device, seed=9)
    logits[4, 5] = NAN
    temperature = [1.0, 0.0, 0.8, 1.0, 1.0]
    top_k, top_p = [0, 3, 3, 0, 3], [1.0, 0.5, 1.0, 0.5, 0.5]
    ours, theirs = run(logits, temperature=temperature, top_k=top_k, top_p=top_p)
    assert ours[[0, 1, 4]].all() and int(ours[2].sum()) == 3
    assert_same_cut((ours[3:4], theirs[3:4]), logits[3:4], top_p=0.5)


@devices
def test_lost_rows_are_not_cut(device: str) -> None:
    logits = normal(4, 1100, dtype=torch.float32, device=device, seed=9)
    logits[0] = -INF
    logits[1] = NAN
    logits[2, [3, 4]] = torch.tensor([NAN, INF], device=device)
    logits[3, 4] = INF
    ours, _ = run(logits, top_k=2, top_p=0.5, min_p=0.1)
    assert ours.all()


@devices
@pytest.mark.parametrize(("top_p", "num_kept"), [(0.5, 1), (0.6, 3)])
def test_a_mass_reached_exactly_is_enough_and_equals_stay_together(
    device: str, top_p: float, num_kept: int
) -> None:
    logits = torch.full((1, 3000), -INF, device=device)
    logits[0, [2900, 7, 1500]] = torch.tensor([0.5, 0.25, 0.25], device=device).log()
    for kept in run(logits, top_p=top_p):
        assert int(kept.sum()) == num_kept and bool(kept[0, 2900])
