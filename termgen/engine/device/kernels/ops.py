"""The operations between matrix products as fused kernels: `layers.ops.LayerOps` for CUDA."""

from __future__ import annotations

import torch

from termgen.engine.device.kernels.experts import experts
from termgen.engine.device.kernels.gated_activation import gated_activation
from termgen.engine.device.kernels.qk_rope_kv import qk_rope_kv
from termgen.engine.device.kernels.rmsnorm import add_rmsnorm, norm_add_norm, rmsnorm
from termgen.engine.device.kernels.rotation import rotation
from termgen.engine.device.kernels.store_kv import store_kv
from termgen.engine.device.layers.rotary import Rotation


class TritonOps:
    """LayerOps."""

    can_record_experts = True

    def rotation(
        self, positions: torch.Tensor, frequencies: torch.Tensor, scale: float
    ) -> Rotation:
        return Rotation(*rotation(positions, frequencies, scale))

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return rmsnorm(x, weight, eps)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        return add_rmsnorm(x, residual, weight, eps)

    def norm_add_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        first: torch.Tensor,
        second: torch.Tensor,
        eps: float,
    ) -> torch.Tensor:
        return norm_add_norm(x, residual, first, second, eps)

    def rotate_and_store(
        self,
        qkv: torch.Tensor,
        kv_cache: torch.Tensor,
        rotation: Rotation,
        slot_mapping: torch.Tensor,
        *,
        num_heads: int,
        norm_weight: torch.Tensor | None,
        eps: float,
        q: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return qk_rope_kv(
            qkv,
            kv_cache,
            rotation.cos,
            rotation.sin,
            slot_mapping,
            num_heads=num_heads,
            norm_weight=norm_weight,
            eps=eps,
            q=q,
        )

    def store(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        store_kv(k, v, kv_cache, slot_mapping)

    def gated_activation(self, gate_up: torch.Tensor, activation: str) -> torch.Tensor:
        return gated_activation(gate_up, activation=activation)

    def experts(
        self,
        x: torch.Tensor,
        router_logits: torch.Tensor,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        *,
        top_k: int,
        renormalize: bool,
        activation: str,
    ) -> torch.Tensor:
        return experts(
            x,
            router_logits,
            gate_up,
            down,
            top_k=top_k,
            renormalize=renormalize,
            activation=activation,
        )
