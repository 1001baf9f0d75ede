"""The layers' arithmetic on CUDA by Triton kernels: `TritonOps` between matrix products, and
`SmallBatchLinears` for products of a few rows, where they were measured to beat cuBLAS.

The fast path of `ops` and `linear`: skip it on a first reading. Imported where the path is chosen,
after `kernels.why_unusable`: triton may be missing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from termgen.engine.device.kernels.gemm.small_gemm import SmallGemmWorkspace, small_gemm
from termgen.engine.device.kernels.gemm.small_gemm_config import (
    MAX_ROWS,
    SmallGemmConfig,
    Tuned,
    choose,
)
from termgen.engine.device.kernels.gemm.small_gemm_table import MEASURED
from termgen.engine.device.kernels.kv_cache import LayerScales
from termgen.engine.device.kernels.moe.experts import Weights, experts
from termgen.engine.device.kernels.rows.gated_activation import (
    activated_product,
    gated_activation,
    sigmoid_gate,
)
from termgen.engine.device.kernels.rows.qk_rope_kv import qk_rope_kv, rotation, store_kv
from termgen.engine.device.kernels.rows.rmsnorm import add_rmsnorm, norm_add_norm, rmsnorm
from termgen.engine.device.layers.linear import FloatLinear, LinearSpec
from termgen.engine.device.layers.ops import Rotation


class TritonOps:
    """LayerOps."""

    can_record_experts = True

    def rotation(
        self, positions: torch.Tensor, frequencies: torch.Tensor, scale: float
    ) -> Rotation:
        return Rotation(*rotation(positions, frequencies, scale))

    rms_norm = staticmethod(rmsnorm)
    add_rms_norm = staticmethod(add_rmsnorm)
    norm_add_norm = staticmethod(norm_add_norm)
    gated_activation = staticmethod(gated_activation)
    activated_product = staticmethod(activated_product)
    sigmoid_gate = staticmethod(sigmoid_gate)
    store = staticmethod(store_kv)

    def experts(
        self,
        x: torch.Tensor,
        router_logits: torch.Tensor,
        gate_up: torch.Tensor | StoredWeights,
        down: torch.Tensor | StoredWeights,
        **options: Any,
    ) -> torch.Tensor:
        return experts(x, router_logits, _weights(gate_up), _weights(down), **options)

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
            cache_scales=cache_scales,
        )


class StoredWeights(Protocol):
    @property
    def weights(self) -> Weights: ...


def _weights(matrices: torch.Tensor | StoredWeights) -> Weights:
    return matrices if isinstance(matrices, torch.Tensor) else matrices.weights


Choose = Callable[[int, LinearSpec], SmallGemmConfig | None]


def measured_choice(
    num_rows: int, spec: LinearSpec, tuned: Tuned | None = None
) -> SmallGemmConfig | None:
    """tuned: what was measured on this GPU, which goes before the table in the package."""
    n, k = spec.out_features, spec.in_features
    return choose(num_rows, n, k, spec.dtype, spec.device, MEASURED, tuned)


class SharedWorkspace:
    """The workspace of all products of a model: its layers run one after another on one stream."""

    def __init__(self) -> None:
        self._num_values = 0
        self._num_tiles = 0
        self._workspace: SmallGemmWorkspace | None = None

    def reserve(self, config: SmallGemmConfig, out_features: int) -> None:
        self._num_tiles = max(self._num_tiles, config.tiles(out_features))
        self._num_values = max(self._num_values, config.partial_values(out_features))

    def on(self, device: torch.device) -> SmallGemmWorkspace:
        """Made once, when every layer is known."""
        if self._workspace is None:
            self._workspace = SmallGemmWorkspace(
                device, num_values=self._num_values, num_tiles=self._num_tiles
            )
        return self._workspace


class SmallBatchLinears:
    """LinearMethodFactory: makes the layers of one model, which share a workspace."""

    def __init__(self, choose: Choose = measured_choice) -> None:
        self._choose = choose
        self._shared = SharedWorkspace()

    def __call__(self, spec: LinearSpec) -> FloatLinear:
        if not spec.is_multiplied:
            return FloatLinear(spec)
        configs = {}
        for num_rows in range(1, MAX_ROWS + 1):
            config = self._choose(num_rows, spec)
            if config is not None:
                configs[num_rows] = config
                self._shared.reserve(config, spec.out_features)
        return SmallBatchLinear(spec, self._shared, configs)


class SmallBatchLinear(FloatLinear):
    """LinearMethod. A row count and those it is padded to in a recorded step share one
    configuration, so padding changes no bit of a row."""

    def __init__(
        self,
        spec: LinearSpec,
        shared: SharedWorkspace,
        configs: dict[int, SmallGemmConfig],
    ) -> None:
        super().__init__(spec)
        self._shared = shared
        self._configs = configs

    def finalize(self) -> None:
        """The kernels read the weight as it was loaded."""

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        assert self.weight is not None
        config = self._configs.get(x.shape[0])
        if config is None:
            return F.linear(x, self.weight, bias)
        workspace = self._shared.on(x.device)
        return small_gemm(x, self.weight, bias, config=config, workspace=workspace)
