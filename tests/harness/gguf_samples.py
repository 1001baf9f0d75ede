"""Write small GGUF files for tests, following the rules of llama.cpp's converter."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import load_file

_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_GEMMA3_LAYER = {
    **_LAYER,
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def gguf_name(name: str, arch: str = "llama") -> str:
    stem, _, suffix = name.rpartition(".")
    if stem in _TOP:
        return f"{_TOP[stem]}.{suffix}"
    _, _, layer, part = stem.split(".", 3)
    parts = _GEMMA3_LAYER if arch == "gemma3" else _LAYER
    return f"blk.{layer}.{parts[part]}.{suffix}"


def permute(weights: np.ndarray, num_heads: int) -> np.ndarray:
    """The converter's permutation of q and k in llama models."""
    halves = weights.reshape(num_heads, 2, weights.shape[0] // num_heads // 2, *weights.shape[1:])
    return halves.swapaxes(1, 2).reshape(weights.shape)


def write_model(
    folder: Path,
    path: Path,
    *,
    arch: str,
    quant: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    extra: Callable[[gguf.GGUFWriter], None] | None = None,
    leave_out: frozenset[str] = frozenset(),
) -> Path:
    """Convert a folder with config.json and one model.safetensors to GGUF."""
    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    ropes = config["rope_parameters"]
    writer.add_rope_freq_base(ropes.get("full_attention", ropes)["rope_theta"])
    if arch in ("qwen3", "gemma3"):
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    if extra is not None:
        extra(writer)
    for name, weights in load_file(folder / "model.safetensors").items():
        if gguf_name(name, arch) not in leave_out:
            _add_tensor(writer, name, weights, arch, quant, config)
    finish(writer)
    return path


def _add_tensor(
    writer: gguf.GGUFWriter,
    name: str,
    weights: np.ndarray,
    arch: str,
    quant: gguf.GGMLQuantizationType,
    config: dict[str, Any],
) -> None:
    if arch == "llama" and ".q_proj." in name:
        weights = permute(weights, config["num_attention_heads"])
    if arch == "llama" and ".k_proj." in name:
        weights = permute(weights, config["num_key_value_heads"])
    if arch == "gemma3" and name.endswith("norm.weight"):
        weights = weights + 1
    weights = np.ascontiguousarray(weights)
    name = gguf_name(name, arch)
    if weights.ndim == 1:
        writer.add_tensor(name, weights)
    else:
        writer.add_tensor(name, gguf.quants.quantize(weights, quant), raw_dtype=quant)


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
