"""Model files in, tensors out."""

from termgen.engine.device.loader.checkpoint import (
    Checkpoint,
    load_generation_config,
    load_model_config,
    open_checkpoint,
)

__all__ = ["Checkpoint", "load_generation_config", "load_model_config", "open_checkpoint"]
