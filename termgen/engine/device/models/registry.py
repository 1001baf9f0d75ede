"""The model class of each architecture, and models with empty parameters.

Called by the model runner, once. Literal dictionaries, resolved lazily: a family's file is
imported only when a model of it is built. The weights come from `loader.weights`, after which the
caller runs `model.finalize()`.
"""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from termgen.engine.device.config.model_config import ModelConfig, unsupported_architecture
from termgen.engine.device.kernels import why_unusable
from termgen.errors import ConfigError, ModelError

if TYPE_CHECKING:
    import torch

    from termgen.engine.device.attention.groups import GroupedAttention
    from termgen.engine.device.kernels.gemm.small_gemm_config import Tuned
    from termgen.engine.device.layers.linear import Build, MakeExperts
    from termgen.engine.device.layers.ops import LayerOps
    from termgen.engine.device.models.decoder import CausalDecoder
    from termgen.engine.device.recurrent.base import GatedDeltaNet

MODELS = {
    "LlamaForCausalLM": "termgen.engine.device.models.decoder:CausalDecoder",
    "MistralForCausalLM": "termgen.engine.device.models.decoder:CausalDecoder",
    "Qwen2ForCausalLM": "termgen.engine.device.models.decoder:CausalDecoder",
    "Qwen3ForCausalLM": "termgen.engine.device.models.qwen3:Qwen3ForCausalLM",
    "Gemma2ForCausalLM": "termgen.engine.device.models.gemma2:Gemma2ForCausalLM",
    "Gemma3ForCausalLM": "termgen.engine.device.models.gemma3:Gemma3ForCausalLM",
    "Gemma3ForConditionalGeneration": "termgen.engine.device.models.gemma3:Gemma3ForCausalLM",
    "Gemma3nForCausalLM": "termgen.engine.device.models.gemma3n:Gemma3nForCausalLM",
    "Gemma3nForConditionalGeneration": "termgen.engine.device.models.gemma3n:Gemma3nForCausalLM",
    "Gemma4ForCausalLM": "termgen.engine.device.models.gemma4:Gemma4ForCausalLM",
    "Gemma4ForConditionalGeneration": "termgen.engine.device.models.gemma4:Gemma4ForCausalLM",
    "GptOssForCausalLM": "termgen.engine.device.models.gpt_oss:GptOssForCausalLM",
    "Llama4ForCausalLM": "termgen.engine.device.models.llama4:Llama4ForCausalLM",
    "Llama4ForConditionalGeneration": "termgen.engine.device.models.llama4:Llama4ForCausalLM",
    "MuseGlimmerForConditionalGeneration": (
        "termgen.engine.device.models.muse_glimmer:MuseGlimmerForCausalLM"
    ),
    "Qwen3MoeForCausalLM": "termgen.engine.device.models.qwen3:Qwen3ForCausalLM",
    "Qwen3_5ForCausalLM": "termgen.engine.device.models.qwen3_5:Qwen3_5ForCausalLM",
    "Qwen3_5ForConditionalGeneration": "termgen.engine.device.models.qwen3_5:Qwen3_5ForCausalLM",
    "Qwen3_5MoeForCausalLM": "termgen.engine.device.models.qwen3_5:Qwen3_5ForCausalLM",
    "Qwen3_5MoeForConditionalGeneration": "termgen.engine.device.models.qwen3_5:Qwen3_5ForCausalLM",
    "Qwen3NextForCausalLM": "termgen.engine.device.models.qwen3_next:Qwen3NextForCausalLM",
    "MixtralForCausalLM": "termgen.engine.device.models.decoder:CausalDecoder",
}
"""Families that differ from the skeleton by their config alone share its class."""

LINEAR_METHODS = {
    None: "termgen.engine.device.layers.linear:FloatLinear",
    "int8": "termgen.engine.device.quantization.int8:Int8Linear",
    "q4": "termgen.engine.device.quantization.int8:Q4Linear",
    "fp8": "termgen.engine.device.quantization.float8:Float8Linears",
}

_BYTES = {"int8": 1.0, "q4": 0.6}
"""Bytes of a parameter on a CPU, not much more than there are."""
_GROUPS_ON_A_GPU = "termgen.engine.device.quantization.int8_groups:GroupLinears"
_MIXED_FLOAT8 = "termgen.engine.device.quantization.mixed_float8:MixedFloat8Linears"
_PLANNED = {
    "int8": "termgen.engine.device.quantization.planned:PlannedGroups",
    "q4": "termgen.engine.device.quantization.planned:PlannedGroups4",
    "fp8": "termgen.engine.device.quantization.planned:PlannedFloat8",
}
_EXPERTS_IN_FLOAT8 = "termgen.engine.device.quantization.float8_experts:Float8Experts"
_EXPERTS_ON_A_CPU = "termgen.engine.device.quantization.block_experts:BlockExperts"


def build_model(
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    quantization: str | None,
    attention: GroupedAttention,
    ops: LayerOps,
    tuned: Tuned | None = None,
    recurrent: GatedDeltaNet | None = None,
    make_experts: MakeExperts | None = None,
    keeps_floats: bool = False,
) -> CausalDecoder:
    """A model whose parameters are allocated but not filled. tuned: products measured on this GPU.
    make_experts: in the place of those that the quantization has. keeps_floats: with fp8, for
    matrices that are floats of 16 bits, which are not rounded then.

    Raises ModelError when the config asks for more than this machine's memory.
    """
    if config.architecture not in MODELS:
        raise unsupported_architecture(config.architecture)
    if device.type == "cpu":
        check_memory(config.num_parameters * _BYTES.get(quantization or "", dtype.itemsize))
    build = make_build(
        config,
        dtype=dtype,
        device=device,
        quantization=quantization,
        ops=ops,
        tuned=tuned,
        keeps_floats=keeps_floats,
    )
    if make_experts is not None:
        build = replace(build, make_experts=make_experts)
    return make_model(config, build, attention, recurrent)


def make_model(
    config: ModelConfig,
    build: Build,
    attention: GroupedAttention,
    recurrent: GatedDeltaNet | None = None,
) -> CausalDecoder:
    """A model whose layers are made as `build` says. Raises UnsupportedModelError."""
    if config.architecture not in MODELS:
        raise unsupported_architecture(config.architecture)
    model: CausalDecoder = resolve_name(MODELS[config.architecture])(
        config, build, attention, recurrent
    )
    return model


def make_build(
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    quantization: str | None,
    ops: LayerOps,
    tuned: Tuned | None = None,
    keeps_floats: bool = False,
) -> Build:
    """How the layers of a model, and of a head that drafts for it, store and multiply weights.
    keeps_floats: as of `build_model`. Raises ConfigError."""
    if quantization not in LINEAR_METHODS:
        known = ", ".join(name for name in LINEAR_METHODS if name)
        raise ConfigError(
            f"quantization {quantization!r} is not known; known are {known}", param="quantization"
        )
    import torch  # seconds

    from termgen.engine.device.layers.linear import Build, FloatLinear

    if quantization in ("int8", "q4") and device.type == "cuda":
        check_quantization(quantization, device)
        groups = resolve_name(_GROUPS_ON_A_GPU)(tuned)
        is_q4 = quantization == "q4"
        return Build(
            *(dtype, device, groups.in_4_bits if is_q4 else groups, ops),
            make_experts=groups.experts_in_4_bits if is_q4 else groups.experts,
            router_method=_linear_method(None, device, tuned),
            table_method=groups,
        )
    if quantization == "fp8":
        check_quantization("fp8", device, torch.float8_e4m3fn)
        floats = _linear_method(None, device, tuned)
        method = _linear_method("fp8", device)(tuned)
        if keeps_floats:
            method = resolve_name(_MIXED_FLOAT8)(method, floats)
        return Build(
            *(dtype, device, method, ops),
            make_experts=partial(resolve_name(_EXPERTS_IN_FLOAT8), keeps_floats=keeps_floats),
            router_method=floats,
            table_method=floats,
        )
    method = _linear_method(quantization, device, tuned)
    make_experts = None
    if quantization is not None:
        make_experts = partial(resolve_name(_EXPERTS_ON_A_CPU), make_method=method)
    return Build(
        *(dtype, device, method, ops),
        make_experts=make_experts,
        # A little off, a router picks other experts.
        router_method=None if quantization is None else FloatLinear,
        table_method=_linear_method("int8", device) if quantization == "q4" else method,
    )


def make_planned_build(
    config: ModelConfig, *, quantization: str | None, device: torch.device, ops: LayerOps
) -> Build:
    """Layers without memory, which know what `device` would multiply: in the place of those of
    `make_build`. Raises ConfigError, as that does."""
    import torch  # seconds

    from termgen.engine.device.layers.linear import Build, FloatLinear

    dtype, meta = torch.bfloat16, torch.device("meta")
    if quantization is None:
        return Build(dtype, meta, FloatLinear, ops)
    make_build(config, dtype=dtype, device=device, quantization=quantization, ops=ops)
    method = resolve_name(_PLANNED[quantization])
    of_tables = FloatLinear if quantization == "fp8" else resolve_name(_PLANNED["int8"])
    return Build(*(dtype, meta, method, ops), router_method=FloatLinear, table_method=of_tables)


def _linear_method(
    quantization: str | None, device: torch.device, tuned: Tuned | None = None
) -> Any:
    if quantization is None and not why_unusable(device):
        from termgen.engine.device.layers.triton_ops import (
            SmallBatchLinears,  # triton may be missing
            measured_choice,
        )

        return SmallBatchLinears(partial(measured_choice, tuned=tuned))
    return resolve_name(LINEAR_METHODS[quantization])


def check_quantization(name: str, device: torch.device, dtype: torch.dtype | None = None) -> None:
    """Raises ConfigError where the kernels of a GPU cannot multiply such weights. dtype: a type
    that the GPU must have."""
    if problem := why_unusable(device, dtype=dtype):
        raise ConfigError(f"quantization {name}: {problem}", param="quantization")


def check_memory(needed_bytes: float) -> None:
    """Refuse weights that do not fit in memory, before anything is allocated: swapping is useless,
    and a hostile config may ask for terabytes."""
    if not hasattr(os, "sysconf"):
        return
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed_bytes > memory_bytes:
        raise ModelError(
            f"the model's weights need {needed_bytes / 2**30:.1f} GiB, but this machine has"
            f" {memory_bytes / 2**30:.1f} GiB of memory; use a smaller model or dtype, or"
            " --quantization int8"
        )
