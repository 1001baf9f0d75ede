"""Measures a model's products of few rows on this GPU, and finds what was measured before.

The products are those of its `Linear` layers. Their shapes are known from the configuration alone:
a model without memory, on torch's meta device, has them. How many bits a weight has is known from
the names, shapes and types of a checkpoint's tensors. Measuring takes seconds to a minute or two
for a model, mostly to compile the candidates, so it is done once and kept (`tuned_tables`): by
`termgen tune`, which an engine also runs as a process of its own while it has nothing to do.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from torch import nn

from termgen.config import EngineConfig
from termgen.engine.device.attention.base import AttentionBackend
from termgen.engine.device.attention.groups import GroupedAttention
from termgen.engine.device.attention.torch_reference import TorchReferenceAttention
from termgen.engine.device.config.model_config import ModelConfig
from termgen.engine.device.kernels import why_unusable
from termgen.engine.device.kernels.gemm.candidates import Found, Gpu, candidates_by_rows, search
from termgen.engine.device.kernels.gemm.small_gemm_config import (
    COLUMNS_MULTIPLE,
    Shape,
    SmallGemmConfig,
    can_choose,
)
from termgen.engine.device.kernels.gemm.tuned_tables import TunedTables
from termgen.engine.device.layers.linear import Linear, VocabEmbedding
from termgen.engine.device.layers.ops import TorchOps
from termgen.engine.device.layers.stored_rows import StoredRows
from termgen.engine.device.layers.weight_slot import WeightSlot
from termgen.engine.device.loader import (
    Checkpoint,
    as_stored,
    load_model_config,
    open_checkpoint,
)
from termgen.engine.device.loader.weights import LoadableModel, StoredSource, kept_kinds
from termgen.engine.device.models.registry import make_model, make_planned_build
from termgen.engine.device.quantization.affine_blocks import GROUPS, ORDERED_GROUPS
from termgen.engine.device.runner.resolve import (
    resolve_device,
    resolve_quantization,
    why_no_cuda,
)
from termgen.errors import ConfigError, EngineError, ModelNotFoundError, UnsupportedModelError
from termgen.library.catalog import tuned_folder

logger = logging.getLogger(__name__)

_GPU = torch.device("cuda")

Timer = Callable[[SmallGemmConfig | None], float]
"""Seconds of a product by a configuration, or by cuBLAS (None)."""
Measure = Callable[[Shape, dict[int, list[SmallGemmConfig]]], Callable[[int], Timer]]
"""(shape, candidates by rows) -> the timer for each number of rows."""


@dataclass(frozen=True, slots=True)
class TunedShape:
    """One measured shape."""

    shape: Shape
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
            for shape in self.missing:
                yield tune_shape(shape, self.tables, measure_on(self.device, self.tables.gpu))
                torch.cuda.empty_cache()
        except torch.OutOfMemoryError:
            raise EngineError(
                "the GPU has too little free memory to measure with; run `termgen tune` while no "
                "engine runs on it"
            ) from None


def plan(path: Path, *, again: bool = False, quantization: str = "auto") -> Tuning:
    """What to measure for the model at `path`: the shapes that have not been measured on this GPU,
    or all of them. quantization: the engine's setting. Raises ConfigError where there is no such
    GPU, or it cannot multiply such weights, and ModelError."""
    device = resolve_device("auto")
    if device.type != "cuda":
        raise ConfigError(
            f"`termgen tune` measures on an NVIDIA GPU, and {why_no_cuda()}", param="device"
        )
    tables = make_tables(device)
    if tables is None:
        reason = why_unusable(device) or "this torch is not built for NVIDIA GPUs"
        raise ConfigError(f"`termgen tune` has nothing to measure here: {reason}", param="device")
    shapes = planned_shapes(path, device, quantization)
    missing = shapes if again else [shape for shape in shapes if tables.get(*shape) is None]
    return Tuning(device, tables, shapes, missing)


def make_tables(device: torch.device) -> TunedTables | None:
    """What was measured on this GPU; None where products of few rows are left to torch."""
    if why_unusable(device) or torch.version.hip is not None:
        return None
    return TunedTables(tuned_folder(), Gpu.of(device))


def planned_shapes(path: Path, device: torch.device, quantization: str) -> list[Shape]:
    """The measurable shapes of the model at `path`, as an engine on `device` would load it. A
    folder without weights is taken for one whose weights will be made up. Raises ConfigError and
    ModelError."""
    config = load_model_config(path)
    if config.transformers is not None:
        return shapes_of(config)
    with ExitStack() as stack:
        load_format, checkpoint = "auto", None
        try:
            checkpoint = stack.enter_context(closing(open_checkpoint(path)))
        except ModelNotFoundError:
            load_format = "dummy"
        setting = EngineConfig(model=str(path), quantization=quantization, load_format=load_format)
        resolved = resolve_quantization(setting, config, device, path)
        if resolved is not None and checkpoint is not None:
            config = as_stored(path, config, resolved)
        return shapes_of(config, resolved, checkpoint, device)


def shapes_of(
    config: ModelConfig,
    quantization: str | None = None,
    checkpoint: Checkpoint | None = None,
    device: torch.device = _GPU,
) -> list[Shape]:
    """The measurable shapes of a model, in the order of its layers. checkpoint: says which weights
    stay what they are; None: all are rounded. Raises ConfigError and ModelError."""
    if config.transformers is not None:
        raise UnsupportedModelError(
            f"{config.architecture} runs through transformers, whose products are torch's own: "
            "there is nothing to measure"
        )
    ops = TorchOps()
    build = make_planned_build(config, quantization=quantization, device=device, ops=ops)
    backend = cast(AttentionBackend, TorchReferenceAttention())
    model = make_model(
        config, build, GroupedAttention.without_windows(backend, config.layer_caches)
    )
    if quantization is not None and checkpoint is not None:
        _note_kinds(model, checkpoint)
    return linear_shapes(model)


def _note_kinds(model: LoadableModel, checkpoint: Checkpoint) -> None:
    """Have the layers of a planned model know what their rows are."""
    for slot, kind in kept_kinds(model, checkpoint):
        if kind is not None and slot.load_stored is not None:
            assert isinstance(checkpoint, StoredSource)
            slot.load_stored(_some_rows(slot, kind, checkpoint), 0)


def _some_rows(slot: WeightSlot, kind: str, checkpoint: StoredSource) -> StoredRows:
    """Blocks [rows, ...] without numbers; for groups, with the largest of the first rows, by which
    their levels are known, and with the order of their columns."""
    if kind not in (GROUPS, ORDERED_GROUPS):
        return StoredRows(kind, torch.empty(slot.shape[0], 0, 0, dtype=torch.uint8))
    first = next(iter(checkpoint.stored(slot.name)))
    blocks = first.blocks.amax((0, 1), keepdim=True).expand(slot.shape[0], 1, -1)
    return StoredRows(kind, blocks, first.order)


def linear_shapes(model: nn.Module) -> list[Shape]:
    """Distinct shapes of the linear layers' weights that the kernels can multiply."""
    linears = (
        module
        for module in model.modules()
        if isinstance(module, Linear) and not isinstance(module, VocabEmbedding)
    )
    shapes = dict.fromkeys(shape for linear in linears for shape in linear.method.shapes())
    return [shape for shape in shapes if shape.k % COLUMNS_MULTIPLE == 0]


def report_tuned(model: nn.Module, dtype: torch.dtype, tables: TunedTables | None) -> int:
    """Log how many shapes of a loaded model were measured on this GPU; returns the number of those
    that could be and were not."""
    if tables is None:
        return 0
    device = next(model.parameters()).device
    shapes = [shape for shape in linear_shapes(model) if can_choose(shape.k, dtype, device)]
    num_tuned = sum(tables.get(*shape) is not None for shape in shapes)
    if shapes:
        logger.info(
            "products of few rows: %d of %d shapes were measured on this GPU",
            num_tuned,
            len(shapes),
        )
    return len(shapes) - num_tuned


def tune_shape(shape: Shape, tables: TunedTables, measure: Measure) -> TunedShape:
    """Measure one shape and keep what was found."""
    started = time.perf_counter()
    n, k, weights = shape
    tried = candidates_by_rows(n, k, tables.gpu, weights)
    timer_for = measure(shape, tried)
    tie = tables.gpu.tie
    found = {rows: search(configs, timer_for(rows), tie) for rows, configs in tried.items()}
    tables.write(n, k, found, weights)
    return TunedShape(shape, found, time.perf_counter() - started)


def measure_on(device: torch.device, gpu: Gpu) -> Measure:
    """Measurements by the clock of a GPU."""
    from termgen.engine.device.kernels.gemm.timing import Products  # triton may be missing

    def measure(shape: Shape, tried: dict[int, list[SmallGemmConfig]]) -> Callable[[int], Timer]:
        products = Products(shape, gpu, device)
        products.compile({config for configs in tried.values() for config in configs})
        return lambda rows: products.timer(rows, tried[rows])

    return measure
