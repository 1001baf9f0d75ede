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
    "is_in_blocks",
    "load_generation_config",
    "load_model_config",
    "open_checkpoint",
]

_FLOATS = frozenset({"F32", "F16", "BF16"})


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


def is_in_blocks(path: Path | str) -> bool:
    """True if most numbers of a model's matrices are stored as blocks of integers, or of floats of
    4 bits, that a quantised matrix keeps or comes close to."""
    from termgen.engine.device.loader.weights import StoredSource

    in_blocks = others = 0
    with closing(open_checkpoint(path)) as checkpoint:
        assert isinstance(checkpoint, StoredSource), "every reader of files is"
        for name in checkpoint.names():
            shape = checkpoint.shape(name)
            if len(shape) < 2:
                continue
            if checkpoint.kind(name) in (None, *_FLOATS):
                others += math.prod(shape)
            else:
                in_blocks += math.prod(shape)
    return in_blocks > others
