"""From an architecture's name to a model with empty parameters.

Called by the model runner, once. Literal dictionaries, resolved lazily: a family's file is
imported only when a model of it is built. The weights come from `loader.weights`, after which the
caller runs `model.finalize()`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from termgen.engine.models.config import ModelConfig, unsupported_architecture
from termgen.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from termgen.engine.attention.base import AttentionBackend
    from termgen.engine.models.decoder import CausalDecoder

MODELS = {
    "LlamaForCausalLM": "termgen.engine.models.decoder:CausalDecoder",
    "MistralForCausalLM": "termgen.engine.models.decoder:CausalDecoder",
    "Qwen2ForCausalLM": "termgen.engine.models.decoder:CausalDecoder",
    "Qwen3ForCausalLM": "termgen.engine.models.qwen3:Qwen3ForCausalLM",
}
"""Families that differ from the skeleton by their config alone share its class."""

LINEAR_METHODS = {
    None: "termgen.engine.layers.linear:FloatLinear",
    "int8": "termgen.engine.quantization.int8:Int8Linear",
}


def build_model(
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    quantization: str | None,
    attention: AttentionBackend,
) -> CausalDecoder:
    """A model whose parameters are allocated but not filled."""
    if config.architecture not in MODELS:
        raise unsupported_architecture(config.architecture)
    if quantization not in LINEAR_METHODS:
        known = ", ".join(name for name in LINEAR_METHODS if name)
        raise ConfigError(
            f"quantization {quantization!r} is not known; known are {known}", param="quantization"
        )
    method = _resolve(LINEAR_METHODS[quantization])
    model_class = _resolve(MODELS[config.architecture])
    model: CausalDecoder = model_class(
        config, dtype=dtype, device=device, method=method, attention=attention
    )
    return model


def _resolve(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)
