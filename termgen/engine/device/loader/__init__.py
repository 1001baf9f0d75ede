"""Reads model files, a folder of safetensors or one .gguf file, through one `Checkpoint` protocol.

torch is imported when a checkpoint is opened.
"""

from __future__ import annotations

import math
import re
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from termgen.engine.device.loader.checkpoint import (
    PICKLE_SUFFIXES,
    Checkpoint,
    check_exists,
    load_generation_config,
    load_model_config,
)
from termgen.errors import ModelNotFoundError

if TYPE_CHECKING:
    from termgen.engine.device.config.model_config import ModelConfig

__all__ = [
    "Checkpoint",
    "are_apart",
    "as_stored",
    "kept_form",
    "load_generation_config",
    "load_model_config",
    "open_checkpoint",
]

_FLOATS = frozenset({"F32", "F16", "BF16"})
_SHARED = re.compile(r"(.*)\.shared_expert\.(gate|up|down)_proj\.weight", re.ASCII)
_8_BITS, _ROUNDED = "8 bits", "floats"
"""Forms of blocks of more than 4 bits, and of what is rounded, or stays floats."""
_TABLES = ("embed_tokens.weight", "embed_tokens_per_layer.weight", "lm_head.weight")
"""Ends of the names of matrices that are no layer's."""


def open_checkpoint(path: Path | str, *, mtp: bool = False) -> Checkpoint:
    """Open a folder with config.json and safetensors, or a .gguf file. mtp: for the tensors of its
    MTP layer alone, under `mtp.`; there may be none."""
    path = Path(path)
    if path.is_dir():
        from termgen.engine.device.loader.safetensors_file import FolderCheckpoint

        return FolderCheckpoint(path, mtp=mtp)
    check_exists(path)
    if path.suffix.lower() == ".json":
        raise ModelNotFoundError(f"{path} describes a model without weights: use load_format=dummy")
    if path.suffix.lower() in (".safetensors", *PICKLE_SUFFIXES):
        raise ModelNotFoundError(f"{path} is not a whole model: give the folder it is in")
    from termgen.engine.device.loader.gguf_checkpoint import GGUFCheckpoint

    return GGUFCheckpoint(path, mtp=mtp)


def as_stored(path: Path | str, config: ModelConfig, quantization: str) -> ModelConfig:
    """The configuration with the expert of all tokens apart from the others, if the file has it in
    numbers of another form: the matrices of all experts of a layer have one. path: with weights."""
    moe = config.moe
    if moe is None or not moe.has_shared_of_same_size or moe.weighs_inputs:
        return config
    from termgen.engine.device.loader.weights import StoredSource

    with closing(open_checkpoint(path)) as checkpoint:
        assert isinstance(checkpoint, StoredSource), "every reader of files is"
        names = set(checkpoint.names())
        for name in sorted(names):
            if (found := _SHARED.fullmatch(name)) is None:
                continue
            block, part = found.groups()
            stack = f"{block}.experts.{'down_proj' if part == 'down' else 'gate_up_proj'}"
            alike = (f"{block}.experts.0.{part}_proj.weight", stack, f"{stack}.weight")
            other = next((one for one in alike if one in names), name)
            kinds = checkpoint.kind(name), checkpoint.kind(other)
            if are_apart(*kinds, quantization):
                return replace(config, moe=replace(moe, is_shared_apart=True))
    return config


def are_apart(shared: str | None, others: str | None, quantization: str) -> bool:
    """True if matrices of these kinds take different forms, of which the wider one is not that of
    both."""
    forms = {_form(kind, quantization) for kind in (shared, others)}
    return len(forms) > 1 and not (quantization == "int8" and forms <= {_8_BITS, _ROUNDED})


def _form(kind: str | None, quantization: str) -> str:
    from termgen.engine.device.quantization.affine_blocks import (
        GROUPS,
        OF_16_LEVELS,
        ORDERED_GROUPS,
    )
    from termgen.engine.device.quantization.stored_matrices import FLOAT8_KINDS, NVFP4

    if kind is None or kind in _FLOATS:
        return _ROUNDED
    if kind in FLOAT8_KINDS:
        return "8-bit floats" if quantization == "fp8" else _ROUNDED
    if kind in OF_16_LEVELS:
        return "4 bits"
    if kind in (GROUPS, ORDERED_GROUPS):
        return "groups"
    return kind if kind in (NVFP4, "MXFP4") else _8_BITS


def kept_form(path: Path | str) -> str | None:
    """The quantization that keeps a model's matrices as a file has them, exactly or nearly so:
    "int8" if most numbers are in blocks of integers, or of floats of 4 bits; "fp8" if most of those
    in layers are 8-bit floats; None for floats."""
    from termgen.engine.device.loader.weights import StoredSource
    from termgen.engine.device.quantization.stored_matrices import FLOAT8_KINDS

    in_blocks = others = in_float8 = in_layers = 0
    with closing(open_checkpoint(path)) as checkpoint:
        assert isinstance(checkpoint, StoredSource), "every reader of files is"
        for name in checkpoint.names():
            shape = checkpoint.shape(name)
            if len(shape) < 2:
                continue
            kind, count = checkpoint.kind(name), math.prod(shape)
            if kind in FLOAT8_KINDS:
                in_float8 += count
            if kind in (None, *_FLOATS, *FLOAT8_KINDS):
                others += count
            else:
                in_blocks += count
            if not name.endswith(_TABLES):
                in_layers += count
    if in_blocks > others:
        return "int8"
    return "fp8" if 2 * in_float8 > in_layers else None
