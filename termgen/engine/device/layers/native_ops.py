"""LayerOps of a CPU: norms, rotation and activation, each one kernel over rows of float32.

`TorchOps` is the reference, and runs what the kernels do not: other types and sizes, the rarer
activations, experts that are stored as floats.
"""

from __future__ import annotations

from typing import Any

import torch

from termgen.engine.device.config.experts_config import GluClamp
from termgen.engine.device.kernels.kv_cache import LayerScales
from termgen.engine.device.layers.ops import ExpertMatrices, Rotation, TorchOps, route
from termgen.engine.device.native.expert_kernels import ACTIVATIONS, Activation
from termgen.engine.device.native.experts import ExpertWeights, run_natively
from termgen.engine.device.native.jit import LANES, threads_for
from termgen.engine.device.native.row_kernels import row_kernels

_MOST_ROWS = 48
"""Rows of an average expert from which on each expert is widened to floats first, see `Int8Linear`:
each is multiplied alone then."""


class NativeOps(TorchOps):
    """Kernels where they fit, torch elsewhere."""

    def __init__(self) -> None:
        self._kernels = row_kernels()

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        if not _fits(x, weight):
            return super().rms_norm(x, weight, eps)
        return self._normalise(x, None, weight, eps)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        if not (_fits(x, weight) and residual.is_contiguous()):
            return super().add_rms_norm(x, residual, weight, eps)
        return self._normalise(x, residual, weight, eps)

    def _normalise(
        self, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        out = torch.empty_like(x)
        self._kernels["rms_norm"](
            x.data_ptr(),
            0 if residual is None else residual.data_ptr(),
            weight.data_ptr(),
            out.data_ptr(),
            x.shape[1],
            eps,
            x.shape[0],
            threads_for(x.nbytes),
        )
        return out

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
        cache_scales: LayerScales | None = None,
    ) -> torch.Tensor:
        num_kv_heads, head_dim = kv_cache.shape[3:]
        num_qk = num_heads + num_kv_heads
        fits = (
            qkv.shape[1] == (num_qk + num_kv_heads) * head_dim
            and qkv.dtype == kv_cache.dtype == torch.float32
            and qkv.is_contiguous()
            and kv_cache.is_contiguous()
            and head_dim % (2 * LANES) == 0
            and rotation.cos.shape[-1] == head_dim
            and (
                norm_weight is None
                or (norm_weight.dtype is torch.float32 and len(norm_weight) == num_qk)
            )
        )
        if not fits:
            return super().rotate_and_store(
                qkv,
                kv_cache,
                rotation,
                slot_mapping,
                num_heads=num_heads,
                norm_weight=norm_weight,
                eps=eps,
                q=q,
                cache_scales=cache_scales,
            )
        num_rows = qkv.shape[0]
        out = torch.empty(num_rows, num_heads, head_dim) if q is None else q
        cos, sin = rotation.cos.contiguous(), rotation.sin.contiguous()
        self._kernels["rotate_and_store"](
            qkv.data_ptr(),
            out.data_ptr(),
            kv_cache.data_ptr(),
            slot_mapping.data_ptr(),
            cos.data_ptr(),
            sin.data_ptr(),
            0 if norm_weight is None else norm_weight.data_ptr(),
            num_heads,
            num_kv_heads,
            head_dim,
            eps,
            num_rows,
            threads_for(qkv.nbytes),
        )
        return out

    def experts(
        self,
        x: torch.Tensor,
        router_logits: torch.Tensor,
        gate_up: torch.Tensor | ExpertMatrices,
        down: torch.Tensor | ExpertMatrices,
        *,
        top_k: int,
        activation: str,
        gate_up_bias: torch.Tensor | None = None,
        down_bias: torch.Tensor | None = None,
        clamp: GluClamp | None = None,
        weighs_inputs: bool = False,
        **routing: Any,
    ) -> torch.Tensor:
        first, second = getattr(gate_up, "table", None), getattr(down, "table", None)
        if (
            first is None
            or second is None
            or not second.takes(first)
            or (clamp is None and activation not in ACTIVATIONS)
            or x.dtype is not torch.float32
            or len(x) * top_k > _MOST_ROWS * len(down)
        ):
            return super().experts(
                *(x, router_logits, gate_up, down),
                top_k=top_k,
                activation=activation,
                gate_up_bias=gate_up_bias,
                down_bias=down_bias,
                clamp=clamp,
                weighs_inputs=weighs_inputs,
                **routing,
            )
        routing["scale"] = routing.pop("expert_scale", None)
        ids, weights = route(router_logits, top_k, weighs_inputs=weighs_inputs, **routing)
        limits = (0.0, 0.0) if clamp is None else (clamp.limit, clamp.alpha)
        chosen = Activation(activation, *limits)
        all_experts = ExpertWeights(first, second, chosen, gate_up_bias, down_bias, weighs_inputs)
        counts = getattr(gate_up, "counts", None)
        return run_natively(x.contiguous(), ids.int(), weights.contiguous(), all_experts, counts)

    def gated_activation(self, gate_up: torch.Tensor, activation: str) -> torch.Tensor:
        size = gate_up.shape[1] // 2
        fits = gate_up.dtype is torch.float32 and gate_up.is_contiguous() and size % LANES == 0
        if activation != "silu" or not fits:
            return super().gated_activation(gate_up, activation)
        num_rows = gate_up.shape[0]
        out = torch.empty(num_rows, size)
        self._kernels["gated_silu"](
            gate_up.data_ptr(), out.data_ptr(), size, num_rows, threads_for(gate_up.nbytes)
        )
        return out


def _fits(x: torch.Tensor, weight: torch.Tensor) -> bool:
    return (
        x.dtype == weight.dtype == torch.float32
        and x.dim() == 2
        and x.is_contiguous()
        and x.shape[1] % LANES == 0
    )
