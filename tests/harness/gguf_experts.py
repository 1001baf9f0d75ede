"""Write small GGUF files of families with experts or delta nets, as llama.cpp's converter does."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf_samples import finish, gguf_name, start, text_config, text_weights

Arrays = dict[str, np.ndarray]
DELTA_NETS = ("qwen35", "qwen35moe", "qwen3next")
FLOATS = ("ffn_gate_inp", "ssm_conv1d", "norm", "altup_correct", "altup_predict")
"""Matrices that conversion does not quantise, by a part of their names."""
_BLOCK = re.compile(r"model\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"mlp\.experts\.(\d+)\.(gate|up|down)_proj\.weight")
_RENAMED = {
    "mlp.gate": "ffn_gate_inp",
    "mlp.router": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_ba": "ssm_ba",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
}


def converted(weights: Arrays, arch: str, config: dict[str, Any]) -> Arrays:
    """Tensors of a file by name, from those of a checkpoint."""
    made: Arrays = {}
    experts: dict[tuple[str, str], Arrays] = {}
    for name, values in weights.items():
        match = _BLOCK.fullmatch(name)
        if match is None:
            is_norm = name == "model.norm.weight" and arch in DELTA_NETS
            made[gguf_name(name)] = values + 1 if is_norm else values
            continue
        block, part = f"blk.{match[1]}", match[2]
        if expert := _EXPERT.fullmatch(part):
            experts.setdefault((block, expert[2]), {})[f"{int(expert[1]):04}"] = values
        elif arch == "gpt-oss" and ".experts." in part:
            made |= _gpt_oss_experts(f"{block}.ffn", part, values)
        else:
            if arch in DELTA_NETS:
                values = _delta_net(part, values, config, is_tiled=arch != "qwen3next")
                if part == "linear_attn.in_proj_qkvz.weight":
                    made |= _apart(block, values, config)
                    continue
            made[f"{block}.{_part(part, arch)}"] = values
    for (block, kind), of_expert in experts.items():
        stacked = np.stack([of_expert[number] for number in sorted(of_expert)])
        made[f"{block}.ffn_{kind}_exps.weight"] = stacked
    return made


def _part(part: str, arch: str) -> str:
    exact = {
        "linear_attn.A_log": "ssm_a",
        "linear_attn.dt_bias": "ssm_dt.bias",
        "self_attn.sinks": "attn_sinks.weight",
    }
    if part in exact:
        return exact[part]
    stem, _, suffix = part.rpartition(".")
    if stem == "post_attention_layernorm" and arch != "qwen3moe":
        return f"post_attention_norm.{suffix}"
    if stem in _RENAMED:
        return f"{_RENAMED[stem]}.{suffix}"
    return gguf_name(f"model.layers.0.{part}").removeprefix("blk.0.")


def _gpt_oss_experts(prefix: str, part: str, values: np.ndarray) -> Arrays:
    kind = "bias" if part.endswith("_bias") else "weight"
    if kind == "weight":
        values = values.swapaxes(1, 2)
    if "down_proj" in part:
        return {f"{prefix}_down_exps.{kind}": values}
    return {
        f"{prefix}_gate_exps.{kind}": values[:, ::2],
        f"{prefix}_up_exps.{kind}": values[:, 1::2],
    }


def _delta_net(
    part: str, values: np.ndarray, config: dict[str, Any], *, is_tiled: bool
) -> np.ndarray:
    k_heads, v_heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    k_dim, v_dim = config["linear_key_head_dim"], config["linear_value_head_dim"]
    qk = 2 * k_heads * k_dim

    def tiled(rows: np.ndarray, dim: int) -> np.ndarray:
        grouped = rows.reshape(k_heads, v_heads // k_heads, dim, *rows.shape[1:])
        return grouped.swapaxes(0, 1).reshape(rows.shape)

    name = part.removeprefix("linear_attn.").removesuffix(".weight")
    if part.endswith("norm.weight") and name != "norm":
        return values + 1
    if name == "conv1d":
        values = values.squeeze(1)
    if is_tiled and name in ("in_proj_qkv", "conv1d"):
        values = np.concatenate([values[:qk], tiled(values[qk:], v_dim)])
    elif is_tiled and name == "in_proj_z":
        values = tiled(values, v_dim)
    elif is_tiled and name in ("in_proj_a", "in_proj_b", "A_log", "dt_bias"):
        values = tiled(values, 1)
    elif is_tiled and name == "out_proj":
        values = tiled(values.T, v_dim).T
    return -np.exp(values) if name == "A_log" else values


def _apart(block: str, rows: np.ndarray, config: dict[str, Any]) -> Arrays:
    """The rows of q, k and v of all key heads, and those of the output's gate."""
    k_heads, k_dim = config["linear_num_key_heads"], config["linear_key_head_dim"]
    v_rows = config["linear_num_value_heads"] // k_heads * config["linear_value_head_dim"]
    of_head = rows.reshape(k_heads, -1, rows.shape[1])
    parts = np.split(of_head, [k_dim, 2 * k_dim, 2 * k_dim + v_rows], axis=1)
    q, k, v, z = (part.reshape(-1, rows.shape[1]) for part in parts)
    return {f"{block}.attn_qkv.weight": np.concatenate([q, k, v]), f"{block}.attn_gate.weight": z}


def _add_keys(writer: gguf.GGUFWriter, arch: str, config: dict[str, Any]) -> None:
    head_dim, rope = config["head_dim"], config["rope_parameters"]
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    experts = config.get("num_experts", config.get("num_local_experts"))
    if experts is not None:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
        inner = config.get("moe_intermediate_size", config["intermediate_size"])
        writer.add_expert_feed_forward_length(inner)
    if "shared_expert_intermediate_size" in config:
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])
    if arch in DELTA_NETS:
        v_heads = config["linear_num_value_heads"]
        writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
        writer.add_ssm_state_size(config["linear_key_head_dim"])
        writer.add_ssm_group_count(config["linear_num_key_heads"])
        writer.add_ssm_time_step_rank(v_heads)
        writer.add_ssm_inner_size(config["linear_value_head_dim"] * v_heads)
        writer.add_full_attention_interval(4)
        writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 0.25)))
    if arch in ("qwen35", "qwen35moe"):
        writer.add_rope_dimension_sections([11, 11, 10, 0])
    if arch == "gpt-oss":
        writer.add_sliding_window(config["sliding_window"])
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
        writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])


def write_experts(
    folder: Path,
    path: Path,
    arch: str,
    *,
    quant: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    change: Callable[[Arrays], None] | None = None,
    extra: Callable[[gguf.GGUFWriter], None] | None = None,
    keys: dict[str, Any] | None = None,
    convert: Callable[[Arrays, str, dict[str, Any]], Arrays] = converted,
    add_keys: Callable[[gguf.GGUFWriter, str, dict[str, Any]], None] = _add_keys,
) -> Path:
    """change: of the tensors; `extra` writes more. keys: metadata in the place of that of the
    config, under its name without the architecture; None leaves one out. convert and add_keys: for
    an architecture of another module."""
    config = text_config(folder)
    writer = start(path, arch, config)
    add_keys(writer, arch, config)
    for key, value in (keys or {}).items():
        writer.kv_data[0].pop(f"{arch}.{key}", None)
        if isinstance(value, list):
            writer.add_array(f"{arch}.{key}", value)
        elif value is not None:
            add = writer.add_uint32 if isinstance(value, int) else writer.add_float32
            add(f"{arch}.{key}", value)
    if extra is not None:
        extra(writer)
    made = convert(text_weights(folder), arch, config)
    if change is not None:
        change(made)
    for name, values in made.items():
        array = np.ascontiguousarray(values)
        if array.ndim == 1 or any(part in name for part in FLOATS):
            writer.add_tensor(name, array)
        else:
            writer.add_tensor(name, gguf.quants.quantize(array, quant), raw_dtype=quant)
    finish(writer)
    return path


def packed_mxfp4(blocks: torch.Tensor, scales: torch.Tensor) -> np.ndarray:
    """Rows of bytes of a file, from a checkpoint's blocks [..., n, 16] and scales [..., n]."""
    codes = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2)
    halves = codes[..., :16] | codes[..., 16:] << 4
    rows = torch.cat((scales.unsqueeze(-1), halves), -1).flatten(-2)
    return rows.numpy()
