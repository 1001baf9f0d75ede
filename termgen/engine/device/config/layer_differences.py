"""How the layers of one model differ from each other in shape. Frozen, and free of torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerDifferences:
    """What layers have that the model's config does not say of all. The defaults are none."""

    full_heads: tuple[int, int] | None = None
    """Number and size of key heads in layers without a window, where they are others; queries have
    the same size."""
    keys_are_values: bool = False
    """True if layers without a window have no projection of values: these are the keys, as they
    were before their norm and rotation."""
    kv_sources: tuple[int, ...] = ()
    """Per layer, the one whose keys and values it reads: its own number, or that of an earlier
    layer of the same kind, and then it stores none. Empty: each has its own."""
    mlp_sizes: tuple[int, ...] = ()
    """Per layer, the inner size of its MLP; empty: the same for all."""
    gate_sparsities: tuple[float, ...] = ()
    """Per layer, the part of its MLP's gates that are closed, were they normally distributed; 0 for
    a plain MLP. Empty: all are plain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PerLayerInputs:
    """A second embedding: some numbers of a token for every layer."""

    vocab_size: int
    """Tokens beyond it have the row of token 0."""
    size: int
    """Numbers of a token in one layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidualStreams:
    """Several residual streams (AltUp). A layer works on one, and what it changes there changes the
    others, each by a factor of the token."""

    num: int
    active: int
    """The stream that layers work on."""
    has_output_scale: bool
    """True if that stream is scaled on its way to the input of its own that a layer has."""
    laurel_rank: int
    """Inner size of a product that is added to a layer's input, beside attention."""
