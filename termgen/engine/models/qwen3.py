"""Qwen3: every head of q and k is normalised before it is rotated."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from termgen.engine.layers.linear import LinearMethodFactory
from termgen.engine.layers.ops import LayerOps
from termgen.engine.layers.weight_slot import WeightSlot, empty_parameter
from termgen.engine.models.config import ModelConfig
from termgen.engine.models.decoder import CausalDecoder, DecoderLayer


class Qwen3Layer(DecoderLayer):
    def __init__(
        self,
        config: ModelConfig,
        *,
        sliding_window: int | None,
        dtype: torch.dtype,
        device: torch.device,
        method: LinearMethodFactory,
        ops: LayerOps,
    ) -> None:
        super().__init__(
            config,
            sliding_window=sliding_window,
            dtype=dtype,
            device=device,
            method=method,
            ops=ops,
        )
        self.qk_norm = HeadNorm(config, dtype=dtype, device=device)

    def qk_norm_weight(self) -> torch.Tensor:
        return self.qk_norm.weight

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        yield from super().weight_slots(prefix)
        yield from self.qk_norm.weight_slots(f"{prefix}.self_attn")


class HeadNorm(nn.Module):
    """The weights of an RMS norm over each head: one for the heads of q and one for those of k.

    Kept spread over all heads [num_qk_heads, head_dim], so that q and k are normalised together.
    """

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self._num_heads = config.num_heads
        num_qk_heads = config.num_heads + config.num_kv_heads
        self.weight = empty_parameter(num_qk_heads, config.head_dim, dtype=dtype, device=device)
        self._shape = (config.head_dim,)

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        yield self._slot(f"{prefix}.q_norm.weight", self.weight[: self._num_heads])
        yield self._slot(f"{prefix}.k_norm.weight", self.weight[self._num_heads :])

    def _slot(self, name: str, heads: torch.Tensor) -> WeightSlot:
        def load(tensor: torch.Tensor) -> None:
            heads.copy_(tensor.expand_as(heads))

        return WeightSlot(name, self._shape, "norm", load)


class Qwen3ForCausalLM(CausalDecoder):
    layer_class = Qwen3Layer
