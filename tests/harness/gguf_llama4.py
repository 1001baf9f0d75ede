"""Write small GGUF files of Llama 4, as llama.cpp's converter does."""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np
from gguf_experts import Arrays
from gguf_samples import gguf_name

_RENAMED = {
    "router": "ffn_gate_inp",
    "gate_proj": "ffn_gate",
    "up_proj": "ffn_up",
    "down_proj": "ffn_down",
    "shared_expert.gate_proj": "ffn_gate_shexp",
    "shared_expert.up_proj": "ffn_up_shexp",
    "shared_expert.down_proj": "ffn_down_shexp",
}


def converted(weights: Arrays, arch: str, config: dict[str, Any]) -> Arrays:
    """Tensors of a file by name, from those of a checkpoint: q and k stay as they are."""
    del arch, config
    made: Arrays = {}
    for name, values in weights.items():
        path, is_block, part = name.partition(".feed_forward.")
        if not is_block:
            made[gguf_name(name)] = values
            continue
        prefix = f"blk.{path.rpartition('.')[2]}"
        if part == "experts.gate_up_proj":
            gate, up = np.split(values.swapaxes(1, 2), 2, 1)
            made |= {f"{prefix}.ffn_gate_exps.weight": gate, f"{prefix}.ffn_up_exps.weight": up}
        elif part == "experts.down_proj":
            made[f"{prefix}.ffn_down_exps.weight"] = values.swapaxes(1, 2)
        else:
            made[f"{prefix}.{_RENAMED[part.removesuffix('.weight')]}.weight"] = values
    return made


def add_keys(writer: gguf.GGUFWriter, arch: str, config: dict[str, Any]) -> None:
    del arch
    writer.kv_data[0].pop("llama4.feed_forward_length")
    writer.add_feed_forward_length(config["intermediate_size_mlp"])
    writer.add_expert_feed_forward_length(config["intermediate_size"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_expert_count(config["num_local_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_interleave_moe_layer_step(config["interleave_moe_layer_step"])
