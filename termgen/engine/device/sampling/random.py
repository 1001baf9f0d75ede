"""Random numbers that depend on nothing but (seed, position, stream, vocabulary index).

Stateless, so that batching, chunking, preemption, restarts and the device cannot change a draw.
The generator is Philox4x32-10, a counter-based generator (J. K. Salmon, M. A. Moraes, R. O. Dror,
D. E. Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3", SC11), written from the recurrence in
the paper and checked against the known answers its authors publish with Random123. CUDA and
Triton offer the same function, so a fused kernel can reproduce every bit of this file.

    key      seed, low and high 32 bits
    counter  word 0: vocabulary index / 4     word 1, 2: position, low and high 32 bits
             word 3: stream
    output   word `index % 4` of the four

Words are 32-bit values held in int64 tensors: a product of two fills the 64 bits exactly, and
torch has the integer operations for it on every device.
"""

from __future__ import annotations

import enum

import torch

_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_LANES = 4

_LARGEST_UNIFORM = 1.0 - 2.0**-24  # the float32 just below 1

Words = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


class Stream(enum.IntEnum):
    """Independent sequences for one (seed, position). The numbers are part of the output."""

    TARGET = 0
    """Drawing a token from the model's distribution."""
    DRAFT = 1
    """Drawing a draft token. Noise shared with TARGET would bias what speculation accepts."""
    ACCEPT = 2
    """Accepting or rejecting a draft token."""


def philox4x32(counter: Words, key: tuple[torch.Tensor, torch.Tensor]) -> Words:
    """Encrypt `counter` with `key`: four words of random bits per counter.

    All arguments are int64 tensors of values below 2**32 whose shapes broadcast. What is constant
    along an axis may have size 1 there: the first rounds then run at that size.
    """
    c0, c1, c2, c3 = counter
    keys = [_round_keys(word, step) for word, step in zip(key, _KEY_STEPS, strict=True)]
    for k0, k1 in zip(*keys, strict=True):
        product0 = c0 * _MULTIPLIERS[0]
        product1 = c2 * _MULTIPLIERS[1]
        # Words 1 and 3 keep their upper half dirty: they only meet xor before the mask.
        c0 = ((product1 >> 32) ^ c1 ^ k0) & _WORD
        c2 = ((product0 >> 32) ^ c3 ^ k1) & _WORD
        c1, c3 = product1, product0
    return c0, c1 & _WORD, c2, c3 & _WORD


def _round_keys(word: torch.Tensor, step: int) -> tuple[torch.Tensor, ...]:
    steps = torch.arange(_ROUNDS, dtype=torch.int64, device=word.device) * step
    return ((word.unsqueeze(-1) + steps) & _WORD).unbind(-1)


def _split(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Low and high 32 bits of int64 values."""
    return values & _WORD, (values >> 32) & _WORD


def random_bits(
    seeds: torch.Tensor, positions: torch.Tensor, *, stream: Stream, vocab_size: int
) -> torch.Tensor:
    """[B] seeds, [B] positions -> [B, vocab_size] int64 in [0, 2**32)."""
    block = torch.arange(-(-vocab_size // _LANES), dtype=torch.int64, device=seeds.device)
    position_low, position_high = _split(positions.unsqueeze(-1))  # [B, 1]
    stream_word = torch.full_like(position_low, stream)
    words = philox4x32(
        (block.unsqueeze(0), position_low, position_high, stream_word),
        _split(seeds.unsqueeze(-1)),
    )  # four of [B, ceil(V / 4)]
    bits = torch.stack(words, dim=-1).flatten(1)
    return bits[:, :vocab_size]


def random_bits_at(
    seeds: torch.Tensor, positions: torch.Tensor, ids: torch.Tensor, *, stream: Stream
) -> torch.Tensor:
    """Element-wise: what `random_bits` has for these (seed, position) at vocabulary index `ids`.

    Costs four times as much per element, and pays off when few indices matter.
    """
    position_low, position_high = _split(positions)
    stream_word = torch.full_like(position_low, stream)
    words = philox4x32(
        (ids // _LANES, position_low, position_high, stream_word), _split(seeds)
    )  # four of [N]
    lane = (ids % _LANES).unsqueeze(0)
    return torch.stack(words).gather(0, lane).squeeze(0)


def uniform_from_bits(bits: torch.Tensor) -> torch.Tensor:
    """Float32 in [2**-33, 1 - 2**-24], with 24 significant bits all the way down to 2**-9.

    Below 2**-9 the grid is 2**-32: small values, which decide who wins from far behind, keep a
    finer grid than `rand` gives. Never 0 and never 1.
    """
    return ((bits.to(torch.float32) + 0.5) * 2.0**-32).clamp_(max=_LARGEST_UNIFORM)


def gumbel_from_bits(bits: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise, float32, always finite: about -2.8 to 22.9.

    The large values come from small uniforms through `log1p`, where float32 resolves them; with
    `log(u)` they would come from u near 1, whose grid ends at a noise of 16.6 and would never let
    a token win that is 20 nats behind.
    """
    return uniform_from_bits(bits).neg_().log1p_().neg_().log_().neg_()
