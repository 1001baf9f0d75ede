"""Log-probabilities in a kernel against the sampler's torch code, ties included."""

from __future__ import annotations

import random

import pytest
import torch
from triton_device import DEVICES, DEVICES_AND_DTYPES, normal, require_triton

require_triton()

from termgen.engine.device.kernels.sampling.logprobs import (  # noqa: E402
    LogprobWorkspace,
    gather_logprobs,
)
from termgen.engine.device.sampling import logprobs as reference  # noqa: E402
from termgen.engine.device.sampling.token_ring import TokenRing  # noqa: E402
from termgen.vocabulary.sampling_params import MAX_LOGPROBS  # noqa: E402

devices = pytest.mark.parametrize("device", DEVICES)
devices_and_dtypes = pytest.mark.parametrize(("device", "dtype"), DEVICES_AND_DTYPES)
INF = float("inf")


class Batch:
    """Rows at random slots, some of which want nothing, and a ring to write to."""

    def __init__(self, num_rows: int, vocab: int, device: str, rng: random.Random) -> None:
        place = torch.device(device)
        self.workspace = LogprobWorkspace(max_rows=num_rows + 1, vocab_size=vocab, device=place)
        self.ring = TokenRing(3, num_rows + 2, place, num_logprobs=min(MAX_LOGPROBS, vocab))
        slots = rng.sample(range(num_rows + 3), num_rows)
        self.slots = torch.tensor([0, *slots], device=device)[1:]
        wanted = [rng.choice([-1, 0, 1, 5, 20]) for _ in range(num_rows + 3)]
        wanted[slots[0]] = 20
        self.wanted = torch.tensor(wanted, device=device)
        self.num_rows = num_rows

    def check(self, logits: torch.Tensor, token_ids: torch.Tensor) -> None:
        out = self.ring.logprobs
        for tensor in out:
            tensor.fill_(-7)
        row = int(self.ring.index)
        wanted = self.wanted[self.slots].tolist()
        gather_logprobs(
            logits,
            self.slots,
            token_ids,
            self.wanted,
            self.workspace,
            out=out,
            index=self.ring.index,
        )
        expected = reference.gather_logprobs(logits, token_ids, MAX_LOGPROBS)
        for i, most in enumerate(wanted):
            ids, values, ranks = (t[row, i] for t in out)
            if most < 0:
                assert (ids == -7).all() and (values == -7).all() and ranks == -7
                continue
            used = min(most + 1, expected.token_ids.shape[1])
            assert torch.equal(ids[:used], expected.token_ids[i, :used]), i
            assert ranks == expected.ranks[i]
            torch.testing.assert_close(
                values[:used], expected.logprobs[i, :used], rtol=2e-6, atol=2e-5
            )
        for tensor in out:
            tensor[row, : self.num_rows] = -7
            assert (tensor == -7).all(), "other rows of the ring"
        assert not self.workspace.arrivals.any()
        self.ring.push(torch.zeros(self.num_rows, dtype=torch.int32, device=logits.device))


@devices_and_dtypes
@pytest.mark.parametrize(
    ("num_rows", "vocab"), [(1, 1), (4, 7), (3, 50), (2, 4096), (5, 4097), (9, 20011), (1, 70000)]
)
def test_values_and_ranks_are_those_of_the_reference(
    device: str, dtype: torch.dtype, num_rows: int, vocab: int
) -> None:
    seed = random.randrange(10**6)
    print("seed", seed)
    rng = random.Random(seed)
    batch = Batch(num_rows, vocab, device, rng)
    for scale in (0.5, 30.0):  # at the small one half-precision logits are often equal
        wide = normal(num_rows, vocab + 3, dtype=dtype, device=device, seed=seed, scale=scale)
        wide[:, vocab:] = 1000.0
        logits = wide[:, :vocab]
        token_ids = torch.tensor([rng.randrange(vocab) for _ in range(num_rows)], device=device)
        token_ids[0] = logits[0].argmax()
        batch.check(logits, token_ids)


@devices
def test_of_equal_logits_the_lower_id_comes_first(device: str) -> None:
    vocab = 9000
    batch = Batch(5, vocab, device, random.Random(1))
    logits = torch.zeros(5, vocab, device=device)
    logits[0, ::2] = -0.0  # equal to 0
    logits[1, torch.arange(8999, 0, -450)] = 3.0  # a tie of 20, over all blocks
    logits[2, [8, 4095, 4096, 8999]] = torch.tensor([2.0, 2.0, 5.0, 5.0], device=device)
    logits[3] = -INF
    logits[3, [70, 4200]] = -1.0
    logits[4] = torch.arange(vocab, device=device) // 1000
    token_ids = torch.tensor([0, 449, 4095, 70, 0], device=device)
    batch.wanted.fill_(20)
    batch.check(logits, token_ids)
    top = reference.gather_logprobs(logits, token_ids, 20).token_ids[:, 1:].tolist()
    assert top[0] == list(range(20))
    assert top[1] == sorted(range(8999, 0, -450))
    assert top[2][:6] == [4096, 8999, 8, 4095, 0, 1]
    assert top[3][:4] == [70, 4200, 0, 1]
    assert top[4] == list(range(8000, 8020))


@devices
def test_launches_in_a_row_use_the_same_memory(device: str) -> None:
    batch = Batch(6, 5000, device, random.Random(2))
    for seed in range(4):
        logits = normal(6, 5000, dtype=torch.float32, device=device, seed=seed, scale=4.0)
        batch.check(logits, logits.argmax(dim=1))
    assert int(batch.ring.index) == 1
    gather_logprobs(
        torch.zeros(0, 5000, device=device),
        batch.slots[:0],
        batch.slots[:0],
        batch.wanted,
        batch.workspace,
        out=batch.ring.logprobs,
    )
