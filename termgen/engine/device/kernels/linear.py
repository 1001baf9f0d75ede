"""Linear layers in 16-bit types on CUDA: `small_gemm` where it was measured to win, else cuBLAS.

Used by the model registry as the linear method of unquantized models on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from termgen.engine.device.kernels.small_gemm import SmallGemmWorkspace, small_gemm
from termgen.engine.device.kernels.small_gemm_config import MAX_ROWS, SmallGemmConfig, choose
from termgen.engine.device.kernels.small_gemm_table import MEASURED
from termgen.engine.device.layers.linear import FloatLinear, LinearSpec

Choose = Callable[[int, LinearSpec], SmallGemmConfig | None]


def measured_choice(num_rows: int, spec: LinearSpec) -> SmallGemmConfig | None:
    return choose(num_rows, spec.out_features, spec.in_features, spec.dtype, spec.device, MEASURED)


class SmallBatchLinears:
    """LinearMethodFactory: makes the layers of one model, which share a workspace.

    Layers run one after another on one stream, so one workspace serves them all.
    """

    def __init__(self, choose: Choose = measured_choice) -> None:
        self._choose = choose
        self._num_values = 0
        self._num_tiles = 0
        self._workspace: SmallGemmWorkspace | None = None

    def __call__(self, spec: LinearSpec) -> SmallBatchLinear:
        configs = {}
        for num_rows in range(1, MAX_ROWS + 1):
            config = self._choose(num_rows, spec)
            if config is not None:
                configs[num_rows] = config
                self._num_tiles = max(self._num_tiles, config.tiles(spec.out_features))
                self._num_values = max(self._num_values, config.partial_values(spec.out_features))
        return SmallBatchLinear(spec, self, configs)

    def workspace(self, device: torch.device) -> SmallGemmWorkspace:
        """Made once, when every layer is known."""
        if self._workspace is None:
            self._workspace = SmallGemmWorkspace(
                device, num_values=self._num_values, num_tiles=self._num_tiles
            )
        return self._workspace


class SmallBatchLinear(FloatLinear):
    """LinearMethod. A row count and those it is padded to in a recorded step share one
    configuration, so padding changes no bit of a row."""

    def __init__(
        self,
        spec: LinearSpec,
        shared: SmallBatchLinears,
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
        workspace = self._shared.workspace(x.device)
        return small_gemm(x, self.weight, bias, config=config, workspace=workspace)
