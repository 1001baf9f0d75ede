"""The device tensors from which one step's tokens are drawn, and the masks of grammars among them.

The runner gathers them from its permanent per-slot rows, once per step, and hands them to the
`Sampler`; a step launches no work that its rows do not need. Masks have a bit per token: bit i % 32
of word i // 32 stands for token i.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from termgen.engine.device.sampling.penalties import Penalties
from termgen.engine.device.sampling.top_k_top_p import Cuts
from termgen.vocabulary.step import SamplingNeeds

HAS_PENALTIES = 1
"""Bit of a slot's `edit_kinds`: its request has penalties."""
HAS_EDITS = 2
"""Bit of a slot's `edit_kinds`: a logit bias, allowed ids or bad words."""
HAS_GRAMMAR = 4
"""Bit of a slot's `edit_kinds`: its tokens are sampled under masks."""
PROMPT_BIT = -(2**31)
"""An entry of the table of counts, int32, is how often the request generated a token, and this bit
if its prompt has the token."""
COUNT_MASK = 2**31 - 1


@dataclass(slots=True, kw_only=True)
class SamplingMetadata:
    """Row `i` of every tensor belongs to row `i` of the logits. B rows, vocabulary of V."""

    temperature: torch.Tensor
    """[B] float32; below `GREEDY_EPSILON` the row is greedy."""
    cuts: Cuts | None
    """Given where rows are cut."""
    seeds: torch.Tensor
    """[B] int64, any bits."""
    positions: torch.Tensor
    """[B] int64: index in its sequence of the token being drawn."""
    penalties: Penalties | None
    """Given where rows need penalties."""
    output_counts: torch.Tensor | None
    """[B, V] int32: how often each id was generated so far. Given where rows need penalties."""
    prompt_mask: torch.Tensor | None
    """[B, V] bool: ids of the prompt. Given where rows need penalties."""
    stop_token_ids: torch.Tensor
    """[B, K] int64, padded with -1; K may be 0."""
    suppress_stop: torch.Tensor
    """[B] bool: `min_tokens` is not reached yet, so no stop id may be drawn."""
    needs: SamplingNeeds
    """Decided with the plan on the host, so that reading them costs no device sync."""
    edit: Callable[[torch.Tensor], torch.Tensor] | None = None
    """Logits [B, V] to new ones with allowed ids, biases and bad words; None: no row has any."""
    token_masks: TokenMasks | None = None
    """Masks of the rows under a grammar, if there may be any."""
    may_hide: torch.Tensor | None = None
    """[B] bool: rows in which `edit` or `min_tokens` may hide tokens; None: in none. Masks may hide
    any."""


@dataclass(slots=True)
class TokenMasks:
    """The masks of every slot, and which slots one step computes."""

    slots: torch.Tensor  # [B] int64
    has_grammar: torch.Tensor  # [R] bool
    bits: torch.Tensor  # [R, W] int32
    forced: torch.Tensor | None = None  # [B] int32 the only token allowed, -1: what the bits allow


def mask_tokens(logits: torch.Tensor, masks: TokenMasks) -> torch.Tensor:
    """-inf where a constrained row's mask has no bit; a new tensor. logits [B, V]."""
    has_grammar = masks.has_grammar[masks.slots]
    forced = masks.forced
    if forced is None:
        forced = torch.full_like(masks.slots, -1)
    is_forced = has_grammar & (forced >= 0)
    if logits.device.type != "cpu":
        allowed = _allowed(masks.bits[masks.slots], logits.shape[1])
        ids = torch.arange(logits.shape[1], device=logits.device)
        allowed = torch.where(is_forced[:, None], ids == forced[:, None], allowed)
        return logits.masked_fill(~allowed & has_grammar[:, None], -torch.inf)
    rows = (has_grammar & ~is_forced).nonzero()[:, 0]  # which on CUDA would wait for the device
    masked = logits.clone()
    allowed = _allowed(masks.bits[masks.slots[rows]], logits.shape[1])
    masked[rows] = logits[rows].masked_fill(~allowed, -torch.inf)
    rows = is_forced.nonzero()[:, 0]
    ids = forced[rows].long()
    masked[rows] = -torch.inf
    masked[rows, ids] = logits[rows, ids]
    return masked


def _allowed(bits: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """[B, W] int32 -> [B, V] bool."""
    shift = torch.arange(8, dtype=torch.uint8, device=bits.device)
    spread = (bits.view(torch.uint8)[:, :, None] >> shift) & 1  # [B, 4 W, 8], low bytes first
    return spread.flatten(1)[:, :vocab_size].bool()
