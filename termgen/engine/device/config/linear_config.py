"""A model's recurrent layers, read from its config.json."""

from __future__ import annotations

from dataclasses import dataclass

from termgen.engine.device.config.config_reader import ConfigReader
from termgen.errors import UnsupportedModelError


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearAttention:
    """Recurrent layers: gated delta nets, which keep a state of one size per sequence."""

    layers: tuple[int, ...]
    """The layers that have one in the place of attention."""
    num_k_heads: int
    num_v_heads: int
    k_dim: int
    v_dim: int
    is_by_k_head: bool = False
    """True if a checkpoint has the projections of q, k, v and z in one tensor, and those of the two
    gates in another, with the rows of a key head side by side."""

    @property
    def num_channels(self) -> int:
        """Values of a token that go through the convolution: q, k and v."""
        return 2 * self.num_k_heads * self.k_dim + self.num_v_heads * self.v_dim

    @property
    def state_numbers(self) -> int:
        """float32 numbers of a sequence's state over all layers, without its few latest inputs."""
        return len(self.layers) * self.num_v_heads * self.k_dim * self.v_dim


def linear_attention(read: ConfigReader, num_layers: int) -> LinearAttention | None:
    """None for a model all of whose layers have attention."""
    kinds = read.get("layer_types")
    if kinds is None:
        every = read.integer("full_attention_interval", default=4)
        kinds = [
            "linear_attention" if (layer + 1) % every else "full_attention"
            for layer in range(num_layers)
        ]
    if not isinstance(kinds, list | tuple) or len(kinds) != num_layers:
        read.fail("layer_types", f"must be a list of {num_layers} names")
    for kind in kinds:
        if kind not in ("linear_attention", "full_attention"):
            raise UnsupportedModelError(f"config.json: layer_types has {kind!r}, not supported")
    if "full_attention" not in kinds:
        read.fail("layer_types", "has no full_attention, of which models of this family have some")
    if "linear_attention" not in kinds:
        return None
    num_k_heads = read.integer("linear_num_key_heads")
    num_v_heads = read.integer("linear_num_value_heads")
    if num_v_heads % num_k_heads:
        read.fail(
            "linear_num_value_heads",
            f"is {num_v_heads}, no multiple of linear_num_key_heads {num_k_heads}",
        )
    return LinearAttention(
        layers=tuple(layer for layer, kind in enumerate(kinds) if kind == "linear_attention"),
        num_k_heads=num_k_heads,
        num_v_heads=num_v_heads,
        k_dim=read.integer("linear_key_head_dim"),
        v_dim=read.integer("linear_value_head_dim"),
    )
