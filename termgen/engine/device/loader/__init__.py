"""Reads model files, a folder of safetensors or one .gguf file, through one `Checkpoint` protocol.

torch is imported when a checkpoint is opened.
"""

from __future__ import annotations

import math
from contextlib import closing
from pathlib import Path

from termgen.engine.device.loader.checkpoint import (
    PICKLE_SUFFIXES,
    Checkpoint,
    check_exists,
    load_generation_config,
    load_model_config,
)
from termgen.errors import ModelNotFoundError

__all__ = [
    "Checkpoint",
    "kept_form",
    "load_generation_config",
    "load_model_config",
    "open_checkpoint",
]

_FLOATS = frozenset({"F32", "F16", "BF16"})
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
