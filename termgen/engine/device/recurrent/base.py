"""The interface of the gated delta net: a step's metadata, a layer's state, and the methods.

The gated delta net (linear attention of Qwen3.5 and Qwen3-Next) keeps a matrix S per value head
instead of keys and values per token. Of a token with key k, value v, query q, decay g <= 0 and rate
beta, after a convolution over the last four tokens and with k and q of unit length:

    S = exp(g) * S
    S = S + beta * (v - S k) k^T
    o = S q / sqrt(k_dim)

The state of a sequence lies in a slot. All tensors of a slot are copied row by row to another one
to go on from the same position twice; see `GatedDeltaState`.

A state cannot be taken back, so none takes up a draft before it is known to stay. A step with
drafts leaves what the state would take up of them (its convolution input, decay and rate), and the
next step of the row takes up those that stayed, in front of its own tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from termgen.engine.device.kernels.recurrent.layout import CONV_TAPS, GatedDeltaShape

SCRATCH_SLOT = 0
"""Slot that padded rows read and write."""


@dataclass(slots=True, eq=False)
class RecurrentMetadata:
    """Rows of one step and the states they continue.

    Rows and tokens are in the order of `AttentionMetadata`: rows [0, num_decodes) have exactly one
    token, or drafts behind one, and later rows one or more. Rows of one step have different slots,
    but for padded rows, which share the scratch slot and may have no token.
    """

    query_start_loc: torch.Tensor
    """[B+1] int32: row b's tokens are [query_start_loc[b], query_start_loc[b+1])."""
    slots: torch.Tensor
    """[B] int32: the slot of each row's state."""
    positions: torch.Tensor
    """[B] int32: the position of each row's first token, which is the number of tokens that its
    state has taken up, and of those that are pending."""
    has_state: torch.Tensor
    """[B] bool: False for rows that begin a sequence: they start from zeros, and what is in their
    slot, NaN included, reaches no result."""
    num_rows: int
    num_tokens: int
    num_decodes: int | None
    """None in a recorded step of prompts and decodes: rows of one token come first, but only the
    device knows how many there are."""
    max_query_len: int
    """Upper bound over all rows, known to the host without asking the device."""
    num_pending: torch.Tensor | None = None
    """[B] int32: tokens before `positions` that stayed, but that the row's state has not taken up.
    Their inputs are in the slot. None, as the next: of an engine without drafts."""
    num_drafts: torch.Tensor | None = None
    """[B] int32: of each row's tokens the last ones, which its state does not take up. At least one
    token of a row is none."""


@dataclass(slots=True, eq=False)
class GatedDeltaWeights:
    """Weights of one layer besides its projections."""

    conv: torch.Tensor
    """[channels, CONV_TAPS], the last tap of which is a token's own. Any strides: kernels read it
    fastest as `tap_major` returns it."""
    a_log: torch.Tensor
    """[num_v_heads] float32"""
    dt_bias: torch.Tensor
    """[num_v_heads] float32"""


def tap_major(conv: torch.Tensor) -> torch.Tensor:
    """The same [channels, CONV_TAPS], the channels of a tap side by side in memory."""
    return conv.t().contiguous().t()


@dataclass(slots=True, eq=False)
class GatedDeltaState:
    """One layer's states of all sequences.

    `t[d] = t[s]` for all of `tensors` copies slot s to slot d. A copy goes on at the position that
    slot s had reached, or at that of any token that is pending there, for the rings are entered by
    position.
    """

    delta: torch.Tensor
    """[num_slots, num_v_heads, v_dim, k_dim] float32: S."""
    conv: torch.Tensor
    """[num_slots, ring, channels] in the model's type: inputs of the convolution before it is
    applied. The token at position p is in row p % ring. The three latest that the state has taken
    up count, with zeros for positions before the first, and the pending ones behind them. The rows
    of a step's own tokens are never read, so a kernel writes them while other programs read the
    rest; see `ring_rows`."""
    gates: torch.Tensor | None = None
    """[num_slots, ring, 2, num_v_heads] float32: the logarithm of the decay, and the rate, of each
    pending token, in the same rows. None in an engine without drafts."""

    def tensors(self) -> list[torch.Tensor]:
        """What a copy of a slot consists of."""
        return [self.delta, self.conv] + ([] if self.gates is None else [self.gates])


@dataclass(slots=True, eq=False)
class RecurrentStep:
    """What the recurrent layers of one forward pass continue."""

    metadata: RecurrentMetadata
    states: list[GatedDeltaState]
    """One for each recurrent layer, in the order of the layers."""


def empty_state(
    make: Callable[[tuple[int, ...], torch.dtype], torch.Tensor],
    shape: GatedDeltaShape,
    *,
    num_slots: int,
    dtype: torch.dtype,
    num_drafts: int = 0,
) -> GatedDeltaState:
    """States of uninitialised slots, the scratch slot among them. dtype: the model's type.
    num_drafts: most drafts of a row in a step."""
    s = make((num_slots, shape.num_v_heads, shape.v_dim, shape.k_dim), torch.float32)
    rows = ring_rows(num_drafts)
    conv = make((num_slots, rows, shape.num_channels), dtype)
    if not num_drafts:
        return GatedDeltaState(s, conv)
    gates = make((num_slots, rows, 2, shape.num_v_heads), torch.float32)
    return GatedDeltaState(s, conv, gates)


def ring_rows(num_drafts: int) -> int:
    """Rows of a slot's ring. A step reads the inputs of three tokens and of as many as were drafts,
    and writes its own one's and its drafts': no row is both."""
    return CONV_TAPS + 2 * num_drafts


class GatedDeltaNet(Protocol):
    """The part of a gated delta layer between its projections, for all layers of one shape."""

    shape: GatedDeltaShape

    def prepare(self, metadata: RecurrentMetadata) -> None:
        """Compute what all layers share; once per step, before the model's forward."""

    def gated_delta(
        self,
        mixed: torch.Tensor,  # [T, channels]
        a: torch.Tensor,  # [T, num_v_heads]
        b: torch.Tensor,  # [T, num_v_heads]
        weights: GatedDeltaWeights,
        state: GatedDeltaState,
        metadata: RecurrentMetadata,
        *,
        out: torch.Tensor | None = None,  # [T, num_v_heads, v_dim], contiguous
    ) -> torch.Tensor:  # [T, num_v_heads, v_dim]
        """Convolution, gates and recurrence; the rows' states are updated in place.

        Decays are exp(-exp(a_log) * softplus(a + dt_bias)), rates sigmoid(b), in float32. The rows
        of mixed, a and b may be parts of wider rows. Results of tokens of no row are undefined.
        """

    def gated_norm(
        self,
        o: torch.Tensor,  # [T, num_v_heads, v_dim]
        z: torch.Tensor,  # [T, num_v_heads * v_dim], rows of any stride
        weight: torch.Tensor,  # [v_dim]
        eps: float,
    ) -> torch.Tensor:  # [T, num_v_heads * v_dim]
        """Each head normalised to a root mean square of 1 and weighted, times silu(z)."""
