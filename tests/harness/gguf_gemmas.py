"""Write small GGUF files of Gemma 3n and 4, as llama.cpp's converter does."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import gguf
import numpy as np
import torch
from gguf_experts import Arrays, write_experts

_BLOCK = re.compile(r"model\.layers\.(\d+)\.(.+?)(?:\.weight)?")
_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.embed_tokens_per_layer": "per_layer_token_embd",
    "model.per_layer_model_projection": "per_layer_model_proj",
    "model.per_layer_projection_norm": "per_layer_proj_norm",
}
_PARTS = {
    "input_layernorm": "attn_norm.weight",
    "self_attn.q_proj": "attn_q.weight",
    "self_attn.k_proj": "attn_k.weight",
    "self_attn.v_proj": "attn_v.weight",
    "self_attn.o_proj": "attn_output.weight",
    "self_attn.q_norm": "attn_q_norm.weight",
    "self_attn.k_norm": "attn_k_norm.weight",
    "post_attention_layernorm": "post_attention_norm.weight",
    "pre_feedforward_layernorm": "ffn_norm.weight",
    "post_feedforward_layernorm": "post_ffw_norm.weight",
    "mlp.gate_proj": "ffn_gate.weight",
    "mlp.up_proj": "ffn_up.weight",
    "mlp.down_proj": "ffn_down.weight",
    "per_layer_input_gate": "inp_gate.weight",
    "per_layer_projection": "proj.weight",
    "post_per_layer_input_norm": "post_norm.weight",
    "altup.correction_coefs": "altup_correct_coef.weight",
    "altup.prediction_coefs": "altup_predict_coef.weight",
    "altup.modality_router": "altup_router.weight",
    "altup.router_norm": "altup_router_norm.weight",
    "altup.correct_output_scale": "altup_correct_scale.weight",
    "laurel.linear_left": "laurel_l.weight",
    "laurel.linear_right": "laurel_r.weight",
    "laurel.post_laurel_norm": "laurel_post_norm.weight",
    "layer_scalar": "layer_output_scale.weight",
    "router.proj": "ffn_gate_inp.weight",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
    "experts.gate_up_proj": "ffn_gate_up_exps.weight",
    "experts.down_proj": "ffn_down_exps.weight",
    "pre_feedforward_layernorm_2": "pre_ffw_norm_2.weight",
    "post_feedforward_layernorm_1": "post_ffw_norm_1.weight",
    "post_feedforward_layernorm_2": "post_ffw_norm_2.weight",
}


def _renamed(weights: Arrays) -> Arrays:
    made: Arrays = {}
    for name, values in weights.items():
        if match := _BLOCK.fullmatch(name):
            made[f"blk.{match[1]}.{_PARTS[match[2]]}"] = values
        else:
            made[f"{_NAMES[name.removesuffix('.weight')]}.weight"] = values
    return made


def _gemma3n_tensors(weights: Arrays, arch: str, config: dict[str, Any]) -> Arrays:
    weights = dict(weights)
    others = range(config["altup_num_inputs"] - 1)
    stacked = {
        f"{part}.weight": np.stack([weights.pop(f"model.{name}.{i}.weight") for i in others])
        for part, name in (
            ("altup_proj", "altup_projections"),
            ("altup_unembd_proj", "altup_unembed_projections"),
        )
    }
    made = {**_renamed(weights), **stacked}
    table = made["per_layer_token_embd.weight"]
    missing = config["vocab_size"] - len(table)
    made["per_layer_token_embd.weight"] = np.pad(table, ((0, missing), (0, 0)))
    return made


def _gemma3n_keys(writer: gguf.GGUFWriter, arch: str, config: dict[str, Any]) -> None:
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_freq_base_swa(config["rope_parameters"]["sliding_attention"]["rope_theta"])
    writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    writer.add_sliding_window(config["sliding_window"])
    writer.add_altup_active_idx(config["altup_active_idx"])
    writer.add_altup_num_inputs(config["altup_num_inputs"])
    writer.add_embedding_length_per_layer_input(config["hidden_size_per_layer_input"])
    writer.add_shared_kv_layers(config["num_kv_shared_layers"])
    parts = torch.tensor(config["activation_sparsity_pattern"])
    writer.add_activation_sparsity_scale(torch.distributions.Normal(0, 1).icdf(parts).tolist())
    writer.add_sliding_window_pattern([k == "sliding_attention" for k in config["layer_types"]])


def _gemma4_tensors(weights: Arrays, arch: str, config: dict[str, Any]) -> Arrays:
    half = _full_layer(config)["head_dim"] // 2
    turning = int(half * config["rope_parameters"]["full_attention"]["partial_rotary_factor"])
    factors = np.full(half, 1e30, dtype="float32")
    factors[:turning] = 1.0
    return {**_renamed(weights), "rope_freqs.weight": factors}


def _full_layer(config: dict[str, Any]) -> dict[str, Any]:
    """The heads of a layer without a window: all have the same."""
    of_layers: dict[str, dict[str, Any]] = config["per_layer_config"]
    return {**config, **next(iter(of_layers.values()))}


def _replace(writer: gguf.GGUFWriter, key: str, values: list[int]) -> None:
    full = f"{writer.arch}.{key}"
    del writer.kv_data[0][full]
    writer.add_array(full, values)


def _gemma4_keys(writer: gguf.GGUFWriter, arch: str, config: dict[str, Any]) -> None:
    full, num_layers = _full_layer(config), config["num_hidden_layers"]
    num_shared = config["num_kv_shared_layers"]
    windows = [kind == "sliding_attention" for kind in config["layer_types"]]
    writer.add_shared_kv_layers(num_shared)
    writer.add_embedding_length_per_layer_input(config["hidden_size_per_layer_input"])
    writer.add_sliding_window(config["sliding_window"])
    writer.add_sliding_window_pattern(windows)
    for size, suffix in ((full["head_dim"], ""), (config["head_dim"], "_swa")):
        for key in ("attention.key_length", "attention.value_length", "rope.dimension_count"):
            writer.add_uint32(f"{arch}.{key}{suffix}", size)
    writer.add_rope_freq_base_swa(config["rope_parameters"]["sliding_attention"]["rope_theta"])
    if (cap := config["final_logit_softcapping"]) is not None:
        writer.add_final_logit_softcapping(cap)
    if config["use_double_wide_mlp"]:
        size = config["intermediate_size"]
        sizes = [size] * (num_layers - num_shared) + [2 * size] * num_shared
        _replace(writer, "feed_forward_length", sizes)
    if full["num_key_value_heads"] != config["num_key_value_heads"]:
        counts = [(config if w else full)["num_key_value_heads"] for w in windows]
        _replace(writer, "attention.head_count_kv", counts)
    if config["num_experts"] is not None:
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["top_k_experts"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])


write_gemma3n = partial(
    write_experts, arch="gemma3n", convert=_gemma3n_tensors, add_keys=_gemma3n_keys
)
write_gemma4 = partial(write_experts, arch="gemma4", convert=_gemma4_tensors, add_keys=_gemma4_keys)
