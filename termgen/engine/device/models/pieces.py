"""A forward pass in pieces, with attention between them. Skip it on a first reading.

What lies between two attentions depends on the number of tokens alone, so it can be recorded per
token count; attention, which depends on rows and lengths, runs eagerly between recordings. The
runner's `PiecewiseGraphs` drives any model that has this shape.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from termgen.engine.device.attention.base import ForwardContext
from termgen.engine.device.layers.ops import Rotation


@dataclass(slots=True, eq=False)
class Carried:
    """The state of one forward pass, from its first piece to its last."""

    residual: torch.Tensor
    """[T, hidden]: every piece adds to it in place; made anew by each layer, from `streams`, in a
    family that has these."""
    rotations: tuple[Rotation, ...]
    """One for each kind of rotary embedding among the layers."""
    gate: torch.Tensor | None = None
    """[T, num_heads * head_dim], in a family that gates attention: made by the piece ahead of an
    attention, used up by the piece after it."""
    temperature: torch.Tensor | None = None
    """[T, 1, 1] float32, in a family where queries have a factor that grows with the position."""
    per_layer: torch.Tensor | None = None
    """[T, num_layers, size], in a family whose layers have an input of their own each."""
    streams: torch.Tensor | None = None
    """[T, num_streams, hidden], in a family with several residual streams. Ahead of an attention
    these are the layer's predictions of them."""


@runtime_checkable
class PiecewiseModel(Protocol):
    """`num_attentions` attentions and one piece more.

    Queries are [T, num_heads, head_dim]. `q` and `out` are memory for the result, where the caller
    wants it at an address of its own. Pieces look at no more of `ctx.metadata` than where keys and
    values go.
    """

    @property
    def num_attentions(self) -> int: ...

    def head_dim(self, index: int) -> int:
        """The head size of attention `index`."""

    def first_piece(
        self,
        input_ids: torch.Tensor,  # [T]
        positions: torch.Tensor,  # [T]
        ctx: ForwardContext,
        *,
        q: torch.Tensor | None = None,
    ) -> tuple[Carried, torch.Tensor]:
        """The queries of attention 0."""

    def attend(
        self,
        index: int,
        q: torch.Tensor,
        ctx: ForwardContext,
        *,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention `index`: [T, num_heads, head_dim]."""

    def next_piece(
        self,
        index: int,
        attended: torch.Tensor,  # [T, num_heads, head_dim]
        carried: Carried,
        ctx: ForwardContext,
        *,
        q: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The queries of the attention after `index`, from the result of that one."""

    def last_piece(
        self, attended: torch.Tensor, carried: Carried, wanted: torch.Tensor | None
    ) -> torch.Tensor:
        """The normed hidden states [N, hidden] of the tokens `wanted` [N] int64, or of all, from
        the result of the last attention."""
