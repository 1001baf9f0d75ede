"""Reads model files, a folder of safetensors or one .gguf file, through one `Checkpoint` protocol.

torch is imported when a checkpoint is opened.
"""

from __future__ import annotations

from pathlib import Path

from termgen.engine.device.loader.checkpoint import (
    PICKLE_SUFFIXES,
    Checkpoint,
    check_exists,
    load_generation_config,
    load_model_config,
)
from termgen.errors import ModelNotFoundError

__all__ = ["Checkpoint", "load_generation_config", "load_model_config", "open_checkpoint"]


def open_checkpoint(path: Path | str) -> Checkpoint:
    """Open a folder with config.json and safetensors, or a .gguf file."""
    path = Path(path)
    if path.is_dir():
        from termgen.engine.device.loader.safetensors_file import FolderCheckpoint

        return FolderCheckpoint(path)
    check_exists(path)
    if path.suffix.lower() == ".json":
        raise ModelNotFoundError(f"{path} describes a model without weights: use load_format=dummy")
    if path.suffix.lower() in (".safetensors", *PICKLE_SUFFIXES):
        raise ModelNotFoundError(f"{path} is not a whole model: give the folder it is in")
    from termgen.engine.device.loader.gguf_checkpoint import GGUFCheckpoint

    return GGUFCheckpoint(path)
