"""Keep what a grammar does not allow from being drawn.

Masks have a bit per token: bit i % 32 of word i // 32 stands for token i. On CUDA a kernel does the
same in place (`kernels.token_mask`) where the logits as they came are not needed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(slots=True)
class TokenMasks:
    """The masks of every slot, and which slots one step computes."""

    slots: torch.Tensor  # [B] int64
    has_grammar: torch.Tensor  # [R] bool
    bits: torch.Tensor  # [R, W] int32


def mask_tokens(logits: torch.Tensor, masks: TokenMasks) -> torch.Tensor:
    """-inf where a constrained row's mask has no bit; a new tensor. logits [B, V]."""
    has_grammar = masks.has_grammar[masks.slots]
    if logits.device.type != "cpu":
        allowed = _allowed(masks.bits[masks.slots], logits.shape[1])
        return logits.masked_fill(~allowed & has_grammar[:, None], -torch.inf)
    rows = has_grammar.nonzero()[:, 0]  # which on CUDA would wait for the device
    masked = logits.clone()
    allowed = _allowed(masks.bits[masks.slots[rows]], logits.shape[1])
    masked[rows] = logits[rows].masked_fill(~allowed, -torch.inf)
    return masked


def _allowed(bits: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """[B, W] int32 -> [B, V] bool."""
    shift = torch.arange(8, dtype=torch.uint8, device=bits.device)
    spread = (bits.view(torch.uint8)[:, :, None] >> shift) & 1  # [B, 4 W, 8], low bytes first
    return spread.flatten(1)[:, :vocab_size].bool()
