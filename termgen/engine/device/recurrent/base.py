"""The interface of the gated delta net: a step's metadata, a layer's state, and the methods.

The gated delta net (linear attention of Qwen3.5 and Qwen3-Next) keeps a matrix S per value head
instead of keys and values per token. Of a token with key k, value v, query q, decay g <= 0 and rate
beta, after a convolution over the last four tokens and with k and q of unit length:

    S = exp(g) * S
    S = S + beta * (v - S k) k^T
    o = S q / sqrt(k_dim)

The state of a sequence lies in a slot. All tensors of a slot are copied row by row to another one
to go on from the same position twice; see `GatedDeltaState`.
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
    token, later rows one or more. Rows of one step have different slots, but for padded rows, which
    share the scratch slot and may have no token.
    """

    query_start_loc: torch.Tensor
    """[B+1] int32: row b's tokens are [query_start_loc[b], query_start_loc[b+1])."""
    slots: torch.Tensor
    """[B] int32: the slot of each row's state."""
    positions: torch.Tensor
    """[B] int32: the position of each row's first token, which is the number of tokens that its
    state has consumed."""
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

    `delta[d] = delta[s]; conv[d] = conv[s]` copies slot s to slot d. A copy goes on at the position
    that slot s had reached, for the ring of convolution inputs is entered by position.
    """

    delta: torch.Tensor
    """[num_slots, num_v_heads, v_dim, k_dim] float32: S."""
    conv: torch.Tensor
    """[num_slots, CONV_TAPS, channels] in the model's type: inputs of the convolution before it is
    applied. The token at position p is in row p % CONV_TAPS. The three latest count, with zeros for
    positions before the first; the row of the next token is never read, so a kernel writes it while
    other programs read the rest."""


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
) -> GatedDeltaState:
    """States of uninitialised slots, the scratch slot among them. dtype: the model's type."""
    s = (num_slots, shape.num_v_heads, shape.v_dim, shape.k_dim)
    conv = (num_slots, CONV_TAPS, shape.num_channels)
    return GatedDeltaState(make(s, torch.float32), make(conv, dtype))


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
