"""Measures a model's products of few rows on this GPU, and finds what was measured before.

The products are those of its `Linear` layers. Their shapes are known from the configuration alone:
a model without memory, on torch's meta device, has them. Measuring takes seconds to a minute or two
for a model, mostly to compile the candidates, so it is done once and kept (`tuned_tables`): by
`termgen tune`, which an engine also runs as a process of its own while it has nothing to do.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from torch import nn

from termgen.engine.device.attention.base import AttentionBackend
from termgen.engine.device.attention.groups import GroupedAttention
from termgen.engine.device.attention.torch_reference import TorchReferenceAttention
from termgen.engine.device.config.model_config import ModelConfig
from termgen.engine.device.kernels import why_unusable
from termgen.engine.device.kernels.gemm.candidates import Found, Gpu, candidates_by_rows, search
from termgen.engine.device.kernels.gemm.small_gemm_config import (
    COLUMNS_MULTIPLE,
    SmallGemmConfig,
    can_choose,
)
from termgen.engine.device.kernels.gemm.tuned_tables import TunedTables
from termgen.engine.device.layers.linear import Linear, VocabEmbedding
from termgen.engine.device.layers.ops import TorchOps
from termgen.engine.device.loader import load_model_config
from termgen.engine.device.models.registry import build_model
from termgen.engine.device.runner.resolve import resolve_device, why_no_cuda
from termgen.errors import ConfigError, EngineError, UnsupportedModelError
from termgen.library.catalog import tuned_folder

logger = logging.getLogger(__name__)

Shape = tuple[int, int]
"""(N, K) of a weight."""
Timer = Callable[[SmallGemmConfig | None], float]
"""Seconds of a product by a configuration, or by cuBLAS (None)."""
Measure = Callable[[int, int, dict[int, list[SmallGemmConfig]]], Callable[[int], Timer]]
"""(N, K, candidates by rows) -> the timer for each number of rows."""


@dataclass(frozen=True, slots=True)
class TunedShape:
    """One measured shape."""

    n: int
    k: int
    found: dict[int, Found]
    seconds: float
    """Time that it took to measure."""


@dataclass(frozen=True, slots=True)
class Tuning:
    """What is to be measured for a model."""

    device: torch.device
    tables: TunedTables
    shapes: list[Shape]
    """All of the model's."""
    missing: list[Shape]
    """Those to measure."""

    def run(self) -> Iterator[TunedShape]:
        """Measure shape by shape; each is kept as soon as it is complete. Raises EngineError."""
        try:
            for n, k in self.missing:
                yield tune_shape(n, k, self.tables, measure_on(self.device, self.tables.gpu))
                torch.cuda.empty_cache()
        except torch.OutOfMemoryError:
            raise EngineError(
                "the GPU has too little free memory to measure with; run `termgen tune` while no "
                "engine runs on it"
            ) from None


def plan(path: Path, *, again: bool = False) -> Tuning:
    """What to measure for the model at `path`: the shapes that have not been measured on this GPU,
    or all of them. Raises ConfigError where there is no such GPU, and ModelError."""
    device = resolve_device("auto")
    if device.type != "cuda":
        raise ConfigError(
            f"`termgen tune` measures on an NVIDIA GPU, and {why_no_cuda()}", param="device"
        )
    tables = make_tables(device)
    if tables is None:
        reason = why_unusable(device) or "this torch is not built for NVIDIA GPUs"
        raise ConfigError(f"`termgen tune` has nothing to measure here: {reason}", param="device")
    shapes = shapes_of(load_model_config(path))
    missing = shapes if again else [shape for shape in shapes if tables.get(*shape) is None]
    return Tuning(device, tables, shapes, missing)


def make_tables(device: torch.device) -> TunedTables | None:
    """What was measured on this GPU; None where products of few rows are left to torch."""
    if why_unusable(device) or torch.version.hip is not None:
        return None
    return TunedTables(tuned_folder(), Gpu.of(device))


def shapes_of(config: ModelConfig) -> list[Shape]:
    """The measurable shapes of a model, in the order of its layers. Raises ModelError."""
    if config.transformers is not None:
        raise UnsupportedModelError(
            f"{config.architecture} runs through transformers, whose products are torch's own: "
            "there is nothing to measure"
        )
    backend = cast(AttentionBackend, TorchReferenceAttention())
    model = build_model(
        config,
        dtype=torch.bfloat16,
        device=torch.device("meta"),
        quantization=None,
        attention=GroupedAttention.without_windows(backend, config.layer_caches),
        ops=TorchOps(),
    )
    return linear_shapes(model)


def linear_shapes(model: nn.Module) -> list[Shape]:
    """Distinct shapes of the linear layers' weights that the kernels can multiply."""
    linears = (
        module
        for module in model.modules()
        if isinstance(module, Linear) and not isinstance(module, VocabEmbedding)
    )
    shapes = dict.fromkeys((linear.out_features, linear.in_features) for linear in linears)
    return [(n, k) for n, k in shapes if k % COLUMNS_MULTIPLE == 0]


def report_tuned(model: nn.Module, dtype: torch.dtype, tables: TunedTables | None) -> int:
    """Log how many shapes of a loaded model were measured on this GPU; returns the number of those
    that could be and were not."""
    if tables is None:
        return 0
    device = next(model.parameters()).device
    shapes = [(n, k) for n, k in linear_shapes(model) if can_choose(k, dtype, device)]
    num_tuned = sum(tables.get(n, k) is not None for n, k in shapes)
    if shapes:
        logger.info(
            "products of few rows: %d of %d shapes were measured on this GPU",
            num_tuned,
            len(shapes),
        )
    return len(shapes) - num_tuned


def tune_shape(n: int, k: int, tables: TunedTables, measure: Measure) -> TunedShape:
    """Measure one shape and keep what was found."""
    started = time.perf_counter()
    tried = candidates_by_rows(n, k, tables.gpu)
    timer_for = measure(n, k, tried)
    tie = tables.gpu.tie
    found = {rows: search(configs, timer_for(rows), tie) for rows, configs in tried.items()}
    tables.write(n, k, found)
    return TunedShape(n, k, found, time.perf_counter() - started)


def measure_on(device: torch.device, gpu: Gpu) -> Measure:
    """Measurements by the clock of a GPU."""
    from termgen.engine.device.kernels.gemm.timing import Products  # triton may be missing

    def measure(n: int, k: int, tried: dict[int, list[SmallGemmConfig]]) -> Callable[[int], Timer]:
        products = Products(n, k, gpu, device)
        products.compile({config for configs in tried.values() for config in configs})
        return lambda rows: products.timer(rows, tried[rows])

    return measure
