"""Sampling in one kernel against the sampler's torch code, bit by bit and token by token."""

from __future__ import annotations

import random

import pytest
import torch
from triton_device import DEVICES, DEVICES_AND_DTYPES, normal, require_triton

require_triton()

import triton  # noqa: E402
import triton.language as tl  # noqa: E402

from termgen.engine.device.kernels.sampling.sample import (  # noqa: E402
    SampleWorkspace,
    gumbel_from_uniform,
    random_bits,
    sample,
    sample_reference,
    uniform_from_bits,
)
from termgen.engine.device.sampling import gumbel as reference  # noqa: E402
from termgen.engine.device.sampling.gumbel import Stream  # noqa: E402
from termgen.vocabulary.step import CORRUPT_TOKEN  # noqa: E402

devices = pytest.mark.parametrize("device", DEVICES)
devices_and_dtypes = pytest.mark.parametrize(("device", "dtype"), DEVICES_AND_DTYPES)
INF, NAN = float("inf"), float("nan")


@triton.jit
def _noise_kernel(seeds_ptr, positions_ptr, bits_ptr, noise_ptr, first, STREAM: tl.constexpr):
    row = tl.program_id(0)
    seed, position = tl.load(seeds_ptr + row), tl.load(positions_ptr + row)
    bits = random_bits(seed, position, first, STREAM, 64)
    at = row * 256 + tl.arange(0, 256)
    tl.store(bits_ptr + at, bits.to(tl.int64))
    tl.store(noise_ptr + at, gumbel_from_uniform(uniform_from_bits(bits)))


@triton.jit
def _gumbel_kernel(bits_ptr, noise_ptr, size, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    bits = tl.load(bits_ptr + at, mask=at < size, other=0).to(tl.uint32)
    tl.store(noise_ptr + at, gumbel_from_uniform(uniform_from_bits(bits)), mask=at < size)


@devices
@pytest.mark.parametrize("stream", list(Stream))
def test_random_bits_are_those_of_the_sampler(device: str, stream: Stream) -> None:
    seeds = [0, -1, 7, 2**63 - 1, -(2**63), 0x1234_5678_9ABC_DEF0, 2**32, 2**31]
    positions = [0, 1, 2**31, 2**32 - 1, 2**32, 5, 77, 2**33 + 1]
    columns = [torch.tensor(c, device=device) for c in (seeds, positions)]
    bits = torch.full((8, 256), -1, dtype=torch.int64, device=device)
    noise = torch.full((8, 256), NAN, dtype=torch.float32, device=device)
    _noise_kernel[(8,)](*columns, bits, noise, 1000, STREAM=int(stream))
    expected = reference.random_bits(*columns, stream=stream, vocab_size=4256)[:, 4000:]
    assert torch.equal(bits, expected)
    torch.testing.assert_close(noise, reference.gumbel_from_bits(expected), rtol=3e-7, atol=3e-7)


@devices
def test_noise_is_exact_at_both_ends(device: str) -> None:
    ends = [0, 1, 2, 3, 100, 2**10, 2**16, 2**23, 2**24 - 1, 2**24, 2**24 + 1, 2**30, 2**31]
    bits = torch.tensor([*ends, *(2**32 - 1 - end for end in ends)], device=device)
    noise = torch.full(bits.shape, NAN, dtype=torch.float32, device=device)
    _gumbel_kernel[(1,)](bits, noise, len(bits), BLOCK=32)
    torch.testing.assert_close(noise, reference.gumbel_from_bits(bits), rtol=3e-7, atol=3e-7)


class Batch:
    """Rows at random slots of tables larger than the batch."""

    def __init__(self, num_rows: int, vocab_size: int, *, device: str, seed: int) -> None:
        print(f"seed {seed}")
        rng = random.Random(seed)
        num_slots = num_rows + 3
        self.workspace = SampleWorkspace(
            max_rows=num_rows + 1, vocab_size=vocab_size, device=torch.device(device)
        )
        self.slots = torch.tensor(rng.sample(range(num_slots), num_rows), device=device)
        self.num_tokens = torch.tensor([rng.randint(0, 5) for _ in range(num_rows)], device=device)
        temperatures = [rng.choice([0.0, 0.0, 0.3, 1.0, 1.7]) for _ in range(num_slots)]
        self.tables = {
            "num_computed": torch.tensor(
                [rng.randint(0, 2**20) for _ in range(num_slots)], device=device
            ),
            "temperature": torch.tensor(temperatures, dtype=torch.float32, device=device),
            "seeds": torch.tensor(
                [rng.randint(-(2**63), 2**63 - 1) for _ in range(num_slots)], device=device
            ),
        }

    def check(
        self,
        logits: torch.Tensor,
        threshold: torch.Tensor | None = None,
    ) -> torch.Tensor:
        out = torch.full((len(logits),), -1, dtype=torch.int64, device=logits.device)
        arguments = {**self.tables, "threshold": threshold}
        result = sample(logits, self.slots, self.num_tokens, self.workspace, **arguments, out=out)
        assert result is out
        expected = sample_reference(logits, self.slots, self.num_tokens, **arguments)
        assert torch.equal(out, expected), (out, expected)
        assert not self.workspace.arrivals.any()
        return out


@devices_and_dtypes
@pytest.mark.parametrize(
    ("num_rows", "vocab_size"), [(1, 1), (5, 3), (9, 1024), (2, 1025), (3, 5003), (33, 2051)]
)
def test_tokens_are_those_of_the_reference(
    device: str, dtype: torch.dtype, num_rows: int, vocab_size: int
) -> None:
    batch = Batch(num_rows, vocab_size, device=device, seed=vocab_size)
    # Rows of a wider tensor, whose other columns would win.
    wide = normal(num_rows, vocab_size + 5, dtype=dtype, device=device, seed=num_rows, scale=3.0)
    wide[:, vocab_size:] = 1000.0
    batch.check(wide[:, :vocab_size])


@devices
def test_a_peaked_row_and_a_flat_one_get_the_reference_tokens(device: str) -> None:
    # Later blocks of a row skip the noise: the winner must not be among the skipped.
    batch = Batch(8, 9000, device=device, seed=12)
    batch.tables["temperature"].fill_(0.9)
    scales = torch.tensor([0.0, 0.01, 0.1, 0.5, 1.0, 4.0, 20.0, 200.0], device=device)
    logits = normal(8, 9000, dtype=torch.float32, device=device, seed=6) * scales[:, None]
    for step in range(3):
        batch.tables["num_computed"] += step
        batch.check(logits)


@devices
def test_only_logits_that_reach_the_threshold_are_drawn(device: str) -> None:
    batch = Batch(6, 3000, device=device, seed=31)
    batch.tables["temperature"].fill_(0.5)
    batch.tables["temperature"][batch.slots[5]] = 0.0
    logits = normal(6, 3000, dtype=torch.float32, device=device, seed=32)
    scaled = (logits / 0.5).sort(dim=-1, descending=True).values
    kept = [1, 2, 7, 2999]
    threshold = torch.full((6,), -INF, device=device)
    threshold[:4] = torch.stack([scaled[i, k - 1] for i, k in enumerate(kept)])
    out = batch.check(logits, threshold)
    assert out[0] == logits[0].argmax() and out[5] == logits[5].argmax()


@devices
def test_ties_go_to_the_lowest_id_in_whatever_program_it_is(device: str) -> None:
    batch = Batch(4, 4200, device=device, seed=4)
    batch.tables["temperature"].zero_()
    logits = torch.full((4, 4200), -1.0, device=device)
    logits[0, [4100, 3000, 20]] = 2.0
    logits[1] = 0.0
    logits[1, 1::2] = -0.0
    logits[1, 0] = -0.0
    logits[2] = -INF
    logits[3, 4199] = 3e38
    assert batch.check(logits).tolist() == [20, 0, CORRUPT_TOKEN, 4199]


@devices_and_dtypes
@pytest.mark.parametrize("temperature", [0.0, 1.0, 1.7])
@pytest.mark.parametrize("num_programs", [1, 10**6])
def test_a_row_whose_logits_are_not_numbers_is_marked_and_no_other(
    device: str, dtype: torch.dtype, temperature: float, num_programs: int
) -> None:
    """The NaN may be anywhere in the row, in one program or in many."""
    batch = Batch(9, 2500, device=device, seed=5)
    batch.workspace.num_programs = num_programs
    batch.workspace.partial = torch.empty(64, dtype=torch.int64, device=device)
    batch.tables["temperature"].fill_(temperature)
    logits = normal(9, 2500, dtype=dtype, device=device, seed=3)
    healthy = batch.check(logits).tolist()
    logits[0, 2400] = NAN
    logits[1, :] = NAN
    logits[2, [7, 1300]] = torch.tensor([INF, -NAN], dtype=dtype, device=device)
    logits[3] = -INF
    logits[4] = -INF
    logits[4, 2499] = -50.0
    logits[5, 0] = NAN
    logits[6, 2499] = INF
    logits[7, :2000] = -INF
    threshold = torch.full((9,), -INF, device=device)
    for cut in (None, threshold):
        drawn = batch.check(logits, cut).tolist()
        assert drawn[:7] == [*[CORRUPT_TOKEN] * 4, 2499, CORRUPT_TOKEN, CORRUPT_TOKEN]
        assert drawn[7] >= 2000 and drawn[8] == healthy[8]


@devices
def test_a_finite_logit_is_no_fault_whatever_its_temperature(device: str) -> None:
    batch = Batch(2, 50, device=device, seed=5)
    batch.tables["temperature"].fill_(0.01)
    logits = torch.zeros(2, 50, device=device)
    logits[0, 17] = 3e38  # infinite once it is divided
    logits[1] = -3e38
    assert batch.check(logits).tolist()[0] == 17
    assert batch.check(logits).tolist()[1] >= 0


def test_a_workspace_holds_the_parts_of_any_number_of_rows() -> None:
    workspace = SampleWorkspace(max_rows=300, vocab_size=151936, device=torch.device("cpu"))
    for workspace.num_programs in (32, 1056):
        workspace.partial = torch.empty(max(300, workspace.num_programs))
        for num_rows in range(1, 301):
            each = workspace.num_blocks_each(num_rows)
            parts = -(-workspace.num_blocks // each)
            assert num_rows * parts <= len(workspace.partial)
            assert (parts - 1) * each < workspace.num_blocks <= parts * each
