"""Qwen3-Next: as Qwen3.5 with experts, but a checkpoint has the projections into a delta net key
head by key head, and some layers may have a plain MLP."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from termgen.engine.device.config.model_config import ModelConfig
from termgen.engine.device.layers.linear import Build
from termgen.engine.device.layers.weight_slot import WeightSlot
from termgen.engine.device.models.qwen3_5 import Qwen3_5DeltaLayer, Qwen3_5ForCausalLM
from termgen.vocabulary.cache_groups import Window


class Qwen3NextDeltaLayer(Qwen3_5DeltaLayer):
    """Its projection has the rows in the order of Qwen3.5: all of q, of k, of v, of the output's
    gate, and of the two gates of the state."""

    def __init__(self, config: ModelConfig, build: Build, *, window: Window | None) -> None:
        super().__init__(config, build, window=window)
        linear = config.linear
        assert linear is not None
        per_k_head = linear.num_v_heads // linear.num_k_heads
        self._num_k_heads = linear.num_k_heads
        qk = 2 * linear.k_dim
        self._cuts = {
            "in_proj_qkvz": (linear.k_dim, qk, qk + per_k_head * linear.v_dim),
            "in_proj_ba": (per_k_head,),
        }
        """Where the rows of the next of q, k, v and z begin in those of a key head."""

    def projection_slots(self, prefix: str) -> Iterator[WeightSlot]:
        path = f"{prefix}.linear_attn"
        slots = {slot.name: slot for slot in super().projection_slots(prefix)}
        into = {
            part: [slots.pop(f"{path}.in_proj_{name}.weight") for name in names]
            for part, names in (("in_proj_qkvz", ("qkv", "z")), ("in_proj_ba", ("b", "a")))
        }
        for part, own in into.items():
            yield self._by_k_head(f"{path}.{part}.weight", own, self._cuts[part])
        yield from slots.values()

    def _by_k_head(self, name: str, own: list[WeightSlot], cuts: tuple[int, ...]) -> WeightSlot:
        """A slot for the rows of one key head after another, the last of which are those of the
        second slot."""
        first, second = own

        def load(tensor: torch.Tensor) -> None:
            of_heads = tensor.view(self._num_k_heads, -1, tensor.shape[1])
            *ahead, last = (part.flatten(0, 1) for part in of_heads.tensor_split(cuts, 1))
            first.load(torch.cat(ahead))
            second.load(last)

        shape = (first.shape[0] + second.shape[0], first.shape[1])
        return WeightSlot(name, shape, "matrix", load)


class Qwen3NextForCausalLM(Qwen3_5ForCausalLM):
    recurrent_class = Qwen3NextDeltaLayer
