"""One token per row by Gumbel-max, with noise that only (seed, position, stream, index) decide.

The argmax of logits plus standard Gumbel noise is a draw from their softmax. A row without noise
is therefore greedy, and both kinds share every operation. The noise at a vocabulary index never
depends on which other indices survived a cut; batching, chunking, preemption, restarts and the
device cannot change a draw.

The random bits are those of Philox4x32-10, a counter-based generator (J. K. Salmon, M. A. Moraes,
R. O. Dror, D. E. Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3", SC11), written from the
recurrence in the paper and checked against the known answers its authors publish with Random123.
CUDA and Triton offer the same function, so a fused kernel reproduces every bit of this file.

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

from termgen.vocabulary.step import CORRUPT_TOKEN

_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_LANES = 4

_LARGEST_UNIFORM = 1.0 - 2.0**-24  # the float32 just below 1

Words = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]

# Noise for single indices costs about four times as much per index as noise for a whole row.
_SPARSE_SHARE = 1 / 8


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


def gumbel_argmax(
    logits: torch.Tensor,
    *,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    greedy: torch.Tensor,
    stream: Stream,
    threshold: torch.Tensor | None = None,
) -> torch.Tensor:
    """[B, V] float32 logits -> [B] int64 ids.

    `greedy` [B] bool marks rows that get no noise; `threshold` [B, 1] drops the logits below it.
    -inf is drawn only from a row that holds nothing else. A NaN wins its row, else +inf does:
    `mark_corrupt` finds such rows by the logit that was drawn.
    """
    if threshold is not None:
        dropped = logits < threshold
        if logits.device.type == "cpu":
            survivors = ~dropped
            if int(survivors.count_nonzero()) < logits.numel() * _SPARSE_SHARE:
                return _argmax_of_few(logits, survivors, seeds, positions, greedy, stream)
        logits = logits.masked_fill(dropped, -torch.inf)
    bits = random_bits(seeds, positions, stream=stream, vocab_size=logits.shape[-1])
    noise = gumbel_from_bits(bits).masked_fill_(greedy.unsqueeze(1), 0.0)
    return noise.add_(logits).argmax(dim=-1)


def mark_corrupt(
    token_ids: torch.Tensor, logits: torch.Tensor, *, may_be_empty: torch.Tensor | bool
) -> torch.Tensor:
    """The drawn ids [B], with CORRUPT_TOKEN in the rows whose logits [B, V] are not numbers.

    A NaN or +inf wins its row, so the drawn logit tells. A row of nothing but -inf is corrupt too,
    unless masks may have left it nothing to draw (may_be_empty, of all rows or of each [B]).
    """
    drawn = logits.gather(1, token_ids.unsqueeze(1)).squeeze(1)
    is_number = drawn.isfinite() | ((drawn == -torch.inf) & may_be_empty)
    return token_ids.masked_fill(~is_number, CORRUPT_TOKEN)


def _argmax_of_few(
    logits: torch.Tensor,
    survivors: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    greedy: torch.Tensor,
    stream: Stream,
) -> torch.Tensor:
    """Fast path, skip on a first reading: the same draw with noise for the survivors [B, V] alone.

    CPU only: how many there are is a host value. Every row has at least one.
    """
    rows, ids = survivors.nonzero(as_tuple=True)  # [N] each, row after row
    bits = random_bits_at(seeds[rows], positions[rows], ids, stream=stream)
    noise = gumbel_from_bits(bits).masked_fill_(greedy[rows], 0.0)
    counts = rows.bincount(minlength=len(logits))
    starts = counts.cumsum(0) - counts
    columns = torch.arange(len(ids)) - starts[rows]
    scores = logits.new_full((len(logits), int(counts.max())), -torch.inf)
    scores[rows, columns] = noise.add_(logits[rows, ids])
    return ids[starts + scores.argmax(dim=-1)]
