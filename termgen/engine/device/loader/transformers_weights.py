"""A model that runs through transformers' code, with its weights by transformers' own loading.

That knows which tensors of old files are named, split or fused otherwise, which `loader.weights`
cannot know. The files are checked first, as for termgen's own models. Called by the runner.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from termgen.engine.device.attention.groups import GroupedAttention
from termgen.engine.device.config.model_config import ModelConfig
from termgen.engine.device.layers.ops import LayerOps
from termgen.engine.device.loader.cache_scales import read_scales_of_modules
from termgen.engine.device.loader.safetensors_file import WeightFiles
from termgen.engine.device.loader.weights import check_finite
from termgen.engine.device.models.transformers_attention import IMPLEMENTATION, register
from termgen.engine.device.models.transformers_backend import TransformersDecoder
from termgen.engine.device.models.transformers_config import (
    build_empty,
    freeze_rope,
    make_hf_config,
    quiet,
    refusals_of,
)
from termgen.errors import CorruptFileError
from termgen.vocabulary.device.kv_cache_types import LayerScales

_PROBLEMS = {"missing_keys": "lacks tensor", "mismatched_keys": "has another shape for tensor"}


def build_transformers_model(
    config: ModelConfig,
    *,
    folder: Path | None,
    dtype: torch.dtype,
    device: torch.device,
    attention: GroupedAttention,
    ops: LayerOps,
) -> TransformersDecoder:
    """The model with the weights in `folder`; without one, memory that the caller must fill."""
    assert config.transformers is not None
    with refusals_of(config.architecture), quiet():
        hf_config = make_hf_config(config.transformers.raw)
        if folder is None:
            hf_model = build_empty(
                hf_config, dtype=dtype, device=device, length=config.max_position_embeddings
            )
    if folder is not None:
        hf_model = _load_hf_model(hf_config, folder, dtype)
        freeze_rope(hf_model, config.max_position_embeddings)
        hf_model.to(device)
        check_finite(hf_model)
    hf_model.requires_grad_(False)
    return TransformersDecoder(
        hf_model, config, dtype=dtype, device=device, attention=attention, ops=ops
    )


def cache_scales_of(model: TransformersDecoder, folder: Path) -> dict[int, LayerScales]:
    """The scales for an fp8 KV cache in a model's files, by layer; the model is finalized. Raises
    CorruptFileError."""
    own = {slot.name for slot in model.weight_slots()}
    with closing(WeightFiles(folder, any_type=True)) as files:
        names = [name for name in files.tensor_names() if name not in own]
        return read_scales_of_modules(names, files.read, model.layer_names())


def _load_hf_model(hf_config: Any, folder: Path, dtype: torch.dtype) -> Any:
    """transformers' model on the CPU. Raises CorruptFileError when its weights are not there."""
    from transformers import AutoModelForCausalLM

    WeightFiles(folder, any_type=True).close()
    register()
    auto_class: Any = AutoModelForCausalLM  # its own types leave the second result out
    try:
        with quiet():
            model, info = auto_class.from_pretrained(
                folder,
                config=hf_config,
                dtype=dtype,
                attn_implementation=IMPLEMENTATION,
                local_files_only=True,
                use_safetensors=True,
                trust_remote_code=False,
                output_loading_info=True,
            )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "memory" in str(error):
            raise
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise CorruptFileError(f"{folder}: {reason[0][:300]}") from error
    for kind, words in _PROBLEMS.items():
        names = sorted(name if isinstance(name, str) else name[0] for name in info[kind])
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise CorruptFileError(f"{folder}: the checkpoint {words} {names[0]}{more}")
    return model
