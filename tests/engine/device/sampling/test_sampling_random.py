"""The generator: known answers, the shape of the noise, and independence."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from termgen.engine.device.sampling.gumbel import (
    Stream,
    gumbel_from_bits,
    philox4x32,
    random_bits,
    random_bits_at,
    uniform_from_bits,
)

AssertChiSquare = Callable[[torch.Tensor, torch.Tensor], None]

# Counter, key, output: the test vectors published with Random123 for philox4x32, 10 rounds.
KNOWN_ANSWERS = [
    ("00000000 " * 4, "00000000 " * 2, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff " * 4, "ffffffff " * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    (
        "243f6a88 85a308d3 13198a2e 03707344",
        "a4093822 299f31d0",
        "d16cfe09 94fdcceb 5001e420 24126ea1",
    ),
]


def words(text: str) -> tuple[torch.Tensor, ...]:
    return tuple(torch.tensor([int(word, 16)]) for word in text.split())


@pytest.mark.parametrize("counter, key, expected", KNOWN_ANSWERS)
def test_philox_known_answers(counter: str, key: str, expected: str) -> None:
    result = philox4x32(words(counter), words(key))  # type: ignore[arg-type]
    assert [f"{int(word):08x}" for word in result] == expected.split()


def test_key_and_counter_layout_is_pinned() -> None:
    """Seeds give the same text in every release: these bits must never change."""
    seeds = torch.tensor([0, 1, -1, 2**63 - 1])
    positions = torch.tensor([0, 7, 2**33 + 5, 123456])
    bits = random_bits(seeds, positions, stream=Stream.TARGET, vocab_size=6)
    assert bits[0, :4].tolist() == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    low, high = 0xFFFFFFFF, torch.tensor([1])
    counter = (high, torch.tensor([5]), torch.tensor([2]), torch.tensor([0]))
    word = philox4x32(counter, (torch.tensor([low]), torch.tensor([low])))[1]
    assert int(bits[2, 5]) == int(word)
    counter = (high, torch.tensor([5]), torch.tensor([2]), torch.tensor([int(Stream.ACCEPT)]))
    word = philox4x32(counter, (torch.tensor([low]), torch.tensor([low])))[1]
    accept = random_bits(seeds, positions, stream=Stream.ACCEPT, vocab_size=6)
    assert int(accept[2, 5]) == int(word)


@pytest.mark.parametrize("vocab_size", [1, 3, 4, 257, 1001, 49152])
def test_bits_at_indices_equal_the_row(vocab_size: int) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    seeds = torch.randint(-(2**62), 2**62, (3,), generator=generator)
    positions = torch.randint(0, 2**20, (3,), generator=generator)
    row = random_bits(seeds, positions, stream=Stream.DRAFT, vocab_size=vocab_size)
    assert row.shape == (3, vocab_size) and int(row.min()) >= 0 and int(row.max()) < 2**32
    ids = torch.randint(0, vocab_size, (3, 50), generator=generator)
    for i in range(3):
        at = random_bits_at(
            seeds[i].expand(50), positions[i].expand(50), ids[i], stream=Stream.DRAFT
        )
        assert torch.equal(at, row[i, ids[i]])
        # The float noise is the same too, wherever in a tensor the element is.
        assert torch.equal(gumbel_from_bits(at), gumbel_from_bits(row)[i, ids[i]])


def test_bits_do_not_depend_on_the_vocabulary_size() -> None:
    seeds, positions = torch.tensor([5]), torch.tensor([9])
    long = random_bits(seeds, positions, stream=Stream.TARGET, vocab_size=1003)
    short = random_bits(seeds, positions, stream=Stream.TARGET, vocab_size=130)
    assert torch.equal(long[:, :130], short)


def test_uniform_is_uniform_and_open(assert_chi_square: AssertChiSquare) -> None:
    edges = uniform_from_bits(torch.tensor([0, 2**32 - 1]))
    assert edges.tolist() == [2.0**-33, 1.0 - 2.0**-24]
    seeds = torch.arange(64)
    bits = random_bits(seeds, torch.zeros_like(seeds), stream=Stream.TARGET, vocab_size=20_000)
    uniform = uniform_from_bits(bits).double()
    assert 0.0 < float(uniform.min()) and float(uniform.max()) < 1.0
    counts = torch.histc(uniform, bins=1000, min=0.0, max=1.0)
    assert_chi_square(counts, torch.full_like(counts, uniform.numel() / 1000))
    for bit in range(32):
        ones = int(((bits >> bit) & 1).sum())
        assert abs(ones - bits.numel() / 2) < 6 * math.sqrt(bits.numel() / 4), bit


def test_gumbel_equals_the_formula_in_float64() -> None:
    bits = torch.cat((torch.arange(1000), 2 ** torch.arange(32), 2**32 - 1 - torch.arange(1000)))
    uniform = uniform_from_bits(bits).double()
    exact = -torch.log(-torch.log1p(-uniform))
    noise = gumbel_from_bits(bits)
    assert noise.isfinite().all()
    torch.testing.assert_close(noise.double(), exact, rtol=2e-6, atol=2e-6)
    assert noise.max() > 22.8 and noise.min() < -2.8


def test_far_tail_is_resolved() -> None:
    """A token 18 nats behind wins with the right probability, summed exactly over the noise grid.

    P = sum over the tail's noise values x of 2**-32 * P(head noise < x - 18).
    """
    noise = gumbel_from_bits(torch.arange(2**16)).double()
    for gap in (14.0, 18.0, 20.0):
        probability = float(torch.exp(-torch.exp(gap - noise)).sum()) * 2.0**-32
        exact = 1.0 / (1.0 + math.exp(gap))
        assert abs(probability / exact - 1.0) < 0.01, gap


@pytest.mark.parametrize("what", ["seed", "position", "stream", "index"])
def test_neighbours_are_independent(what: str, assert_chi_square: AssertChiSquare) -> None:
    """Chi-square on the joint distribution of draws that differ in one part of the key by one."""
    size, cells = 30_000, 16
    base, zeros = torch.arange(size), torch.zeros(size, dtype=torch.int64)
    one = torch.ones_like(zeros)
    first = random_bits_at(base * 2, base * 2, zeros, stream=Stream.TARGET)
    second = random_bits_at(
        base * 2 + one * (what == "seed"),
        base * 2 + one * (what == "position"),
        one if what == "index" else zeros,
        stream=Stream.DRAFT if what == "stream" else Stream.TARGET,
    )
    joint = (first * cells >> 32) * cells + (second * cells >> 32)
    counts = torch.bincount(joint, minlength=cells * cells).double()
    assert_chi_square(counts, torch.full_like(counts, size / cells**2))


@pytest.mark.gpu
def test_cuda_gives_the_same_bits() -> None:
    seeds = torch.randint(-(2**62), 2**62, (16,), generator=torch.Generator().manual_seed(3))
    positions = torch.arange(16) * 1_000_003
    for stream in Stream:
        cpu = random_bits(seeds, positions, stream=stream, vocab_size=5003)
        cuda = random_bits(seeds.cuda(), positions.cuda(), stream=stream, vocab_size=5003)
        assert torch.equal(cpu, cuda.cpu())
        assert torch.equal(uniform_from_bits(cpu), uniform_from_bits(cuda).cpu())
        torch.testing.assert_close(
            gumbel_from_bits(cpu), gumbel_from_bits(cuda).cpu(), rtol=1e-6, atol=1e-6
        )
