"""From a model's files to a model that is ready to run, by our own code or by transformers'."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path

from termgen.config import EngineConfig
from termgen.engine.device.attention.base import AttentionBackend, AttentionShape
from termgen.engine.device.config.model_config import ModelConfig
from termgen.engine.device.kernels import why_unusable
from termgen.engine.device.layers.ops import LayerOps, TorchOps
from termgen.engine.device.loader import open_checkpoint
from termgen.engine.device.loader.transformers_weights import build_transformers_model
from termgen.engine.device.loader.weights import load_dummy, load_weights
from termgen.engine.device.models.decoder import CausalDecoder
from termgen.engine.device.models.registry import build_model, check_memory
from termgen.engine.device.models.transformers_backend import TransformersDecoder
from termgen.errors import ConfigError, ModelNotFoundError


def load_model(
    config: EngineConfig,
    path: Path,
    model_config: ModelConfig,
    attention: AttentionBackend,
    shape: AttentionShape,
    on_progress: Callable[[float], None],
) -> CausalDecoder | TransformersDecoder:
    """Raises ModelError or ConfigError."""
    if model_config.transformers is not None:
        return _load_transformers_model(config, path, model_config, attention, shape)
    with ExitStack() as stack:
        checkpoint = None
        if config.load_format != "dummy":
            # Opened first: it refuses a config.json whose sizes are not those of the tensors,
            # before anything of those sizes is allocated.
            checkpoint = stack.enter_context(closing(open_checkpoint(path)))
        model = build_model(
            model_config,
            dtype=shape.dtype,
            device=shape.device,
            quantization=config.quantization,
            attention=attention,
            ops=_make_ops(shape),
        )
        if checkpoint is None:
            load_dummy(model, config.seed)
        else:
            load_weights(model, checkpoint, progress=on_progress)
    model.finalize()
    return model


def _load_transformers_model(
    config: EngineConfig,
    path: Path,
    model_config: ModelConfig,
    attention: AttentionBackend,
    shape: AttentionShape,
) -> TransformersDecoder:
    if config.quantization is not None:
        raise ConfigError(
            f"quantization {config.quantization} is for the models that termgen's own code runs, "
            f"and {model_config.architecture} runs through transformers; leave it out",
            param="quantization",
        )
    is_dummy = config.load_format == "dummy"
    if not is_dummy and not path.is_dir():
        raise ModelNotFoundError(f"{path} describes a model without weights: use load_format=dummy")
    if shape.device.type == "cpu":
        check_memory(model_config.num_parameters * shape.dtype.itemsize)
    model = build_transformers_model(
        model_config,
        folder=None if is_dummy else path,
        dtype=shape.dtype,
        device=shape.device,
        attention=attention,
        ops=_make_ops(shape),
    )
    if is_dummy:
        load_dummy(model, config.seed)
    model.finalize()
    return model


def _make_ops(shape: AttentionShape) -> LayerOps:
    if why_unusable(shape.device, dtype=shape.kv_cache_dtype):
        return TorchOps()
    from termgen.engine.device.layers.triton_ops import TritonOps  # triton may be missing elsewhere

    return TritonOps()
