"""What the GGUF metadata of families with experts or delta nets says, in the keys of a config.json.

Called by `gguf_config`, which reads the keys that all families have.
"""

from __future__ import annotations

from typing import Any

from termgen.engine.device.loader.gguf_keys import GGUFKeys

DELTA_NETS = frozenset({"qwen35", "qwen35moe", "qwen3next"})
"""Architectures some of whose layers are gated delta nets. Those heads are rotated in part."""
EXPERTS = frozenset({"qwen3moe", "qwen35moe", "qwen3next", "gpt-oss", "gemma4", "llama4"})
"""Architectures every layer of which has experts; of gemma4, in some models, and of llama4 every so
many layers."""

# What llama.cpp takes a key to be that a file does not have.
_FULL_ATTENTION_INTERVAL = 4
_GPT_OSS_PATTERN = 2
_CONV_TAPS = 4
# Constants of Llama 4 for which there are no keys at all.
_LLAMA4_CHUNK, _LLAMA4_PERIOD, _LLAMA4_INTERVAL, _LLAMA4_SCALE = 8192, 4, 8192, 0.1
_MAVERICK_EXPERTS = 128
_SIGMOID = 2


def num_draft_layers(keys: GGUFKeys) -> int:
    """Blocks behind the model's own that draft tokens for it. `block_count` includes them."""
    key = "nextn_predict_layers"
    if keys.architecture not in DELTA_NETS:
        return 0
    drafts, blocks = keys.size(key, default=0, least=0), keys.num_blocks()
    if drafts >= blocks:
        keys.corrupt(
            f"{keys.full(key)} is {drafts}, but {keys.full('block_count')} is {blocks} with them"
        )
    return drafts


def qwen3_moe(keys: GGUFKeys) -> dict[str, Any]:
    return {
        **experts(keys),
        "moe_intermediate_size": _expert_size(keys),
        "norm_topk_prob": True,  # no key of a file holds it: all published models have it
    }


def qwen3_5(keys: GGUFKeys, config: dict[str, Any]) -> dict[str, Any]:
    _refuse_window(keys)
    return {
        **_delta_nets(keys, config),
        "mtp_num_hidden_layers": num_draft_layers(keys) or None,
        "rope_theta": keys.number("rope.freq_base"),
        "partial_rotary_factor": _rotated_part(keys, config["head_dim"]),
    }


def qwen3_5_moe(keys: GGUFKeys, config: dict[str, Any]) -> dict[str, Any]:
    return {**qwen3_5(keys, config), **experts(keys), **_shared_expert(keys)}


def qwen3_next(keys: GGUFKeys, config: dict[str, Any]) -> dict[str, Any]:
    found = qwen3_5_moe(keys, config)
    # No layer has a plain MLP, of whichever size.
    inner = keys.size("feed_forward_length", default=found["moe_intermediate_size"])
    return {**found, "intermediate_size": inner}


def gpt_oss(keys: GGUFKeys, config: dict[str, Any]) -> dict[str, Any]:
    theta = keys.number("rope.freq_base_swa", default=config["rope_theta"])
    if theta != config["rope_theta"]:
        keys.refuse(
            f"{keys.full('rope.freq_base_swa')} {theta} is not supported, only"
            f" {keys.full('rope.freq_base')} {config['rope_theta']}"
        )
    chosen = experts(keys)
    return {
        "num_local_experts": chosen["num_experts"],
        "num_experts_per_tok": chosen["num_experts_per_tok"],
        "intermediate_size": keys.size("expert_feed_forward_length"),
        "sliding_window": keys.size("attention.sliding_window"),
        "layer_types": keys.window_layers(config["num_hidden_layers"], _GPT_OSS_PATTERN),
    }


def llama4(keys: GGUFKeys, config: dict[str, Any]) -> dict[str, Any]:
    num_layers, num_experts = config["num_hidden_layers"], 0
    found: dict[str, Any] = {
        "intermediate_size_mlp": keys.size("feed_forward_length"),
        "attention_chunk_size": _LLAMA4_CHUNK,
        "no_rope_layer_interval": _LLAMA4_PERIOD,
        "attn_temperature_tuning": True,
        "floor_scale": _LLAMA4_INTERVAL,
        "attn_scale": _LLAMA4_SCALE,
    }
    if (gate := keys.get(keys.full("expert_gating_func"), _SIGMOID)) != _SIGMOID:
        keys.refuse(f"{keys.full('expert_gating_func')} {str(gate)[:40]} is not supported")
    if keys.get(keys.full("expert_count"), 0):
        chosen = experts(keys)
        num_experts = chosen["num_experts"]
        found["num_local_experts"] = num_experts
        found["num_experts_per_tok"] = chosen["num_experts_per_tok"]
        found["intermediate_size"] = keys.size("expert_feed_forward_length")
        found["interleave_moe_layer_step"] = keys.size("interleave_moe_layer_step")
    else:
        found |= {"intermediate_size": found["intermediate_size_mlp"], "moe_layers": []}
    # The larger of the two models with experts alone does not normalise q and k.
    found["use_qk_norm"] = num_experts != _MAVERICK_EXPERTS
    window = keys.get(keys.full("attention.sliding_window"), _LLAMA4_CHUNK)
    if window == 0:  # small models, which rotate and see all in every layer
        found["layer_types"] = ["full_attention"] * num_layers
        found["no_rope_layers"] = [1] * num_layers
    elif window != _LLAMA4_CHUNK:
        keys.refuse(f"{keys.full('attention.sliding_window')} {str(window)[:40]} is not supported")
    return found


def experts(keys: GGUFKeys) -> dict[str, Any]:
    number, chosen = keys.size("expert_count"), keys.size("expert_used_count")
    if chosen > number:
        keys.corrupt(
            f"{keys.full('expert_used_count')} is {chosen}, but {keys.full('expert_count')} is"
            f" {number}"
        )
    return {"num_experts": number, "num_experts_per_tok": chosen}


def _expert_size(keys: GGUFKeys) -> int:
    """The inner size of an expert; without a key, those of a token together have the layer's."""
    key = "expert_feed_forward_length"
    if keys.get(keys.full(key)) is not None:
        return keys.size(key)
    return max(keys.size("feed_forward_length") // keys.size("expert_used_count"), 1)


def _shared_expert(keys: GGUFKeys) -> dict[str, Any]:
    if (number := keys.size("expert_shared_count", default=1, least=0)) > 1:
        keys.refuse(f"{keys.full('expert_shared_count')} {number} is not supported, only 1")
    key = "expert_shared_feed_forward_length"
    has_key = keys.get(keys.full(key)) is not None
    return {
        "moe_intermediate_size": _expert_size(keys),
        "shared_expert_intermediate_size": keys.size(key if has_key else "feed_forward_length"),
    }


def _delta_nets(keys: GGUFKeys, config: dict[str, Any]) -> dict[str, Any]:
    if (taps := keys.size("ssm.conv_kernel")) != _CONV_TAPS:
        keys.refuse(f"{keys.full('ssm.conv_kernel')} {taps} is not supported, only {_CONV_TAPS}")
    k_heads, v_heads = keys.size("ssm.group_count"), keys.size("ssm.time_step_rank")
    v_size = keys.size("ssm.inner_size")
    for key, value, divisor, by in (
        ("ssm.time_step_rank", v_heads, "ssm.group_count", k_heads),
        ("ssm.inner_size", v_size, "ssm.time_step_rank", v_heads),
    ):
        if value % by:
            keys.corrupt(f"{keys.full(key)} is {value}, no multiple of {keys.full(divisor)} {by}")
    return {
        "layer_types": _kinds(keys, config["num_hidden_layers"]),
        "linear_conv_kernel_dim": taps,
        "linear_num_key_heads": k_heads,
        "linear_num_value_heads": v_heads,
        "linear_key_head_dim": keys.size("ssm.state_size"),
        "linear_value_head_dim": v_size // v_heads,
    }


def _kinds(keys: GGUFKeys, layers: int) -> list[str]:
    """The kind of each layer: a list, or the number of which the last one has attention."""
    key = "attention.recurrent_layers"
    recurrent = keys.flags(key, keys.num_blocks())
    if recurrent is None:
        if keys.get(keys.full(key)) is not None:
            keys.corrupt(f"{keys.full(key)} is not a list of truth values")
        key = "full_attention_interval"
        every = keys.size(key, default=_FULL_ATTENTION_INTERVAL)
        recurrent = [bool((layer + 1) % every) for layer in range(layers)]
    recurrent = recurrent[:layers]
    if all(recurrent) or not any(recurrent):
        keys.refuse(f"{keys.full(key)} leaves all of {layers} layers of one kind")
    return ["linear_attention" if item else "full_attention" for item in recurrent]


def _rotated_part(keys: GGUFKeys, head_dim: int) -> float:
    key = "rope.dimension_count"
    rotated = keys.size(key, default=head_dim)
    if rotated > head_dim or rotated % 2:
        keys.corrupt(f"{keys.full(key)} is {rotated}, no even part of a head of {head_dim}")
    # Text has one position a token, so it makes no difference which of the three an image's tokens
    # have turns which value. A fourth position is not the text's.
    sections = keys.get(keys.full("rope.dimension_sections"), [])
    if not isinstance(sections, list) or any(type(size) is not int for size in sections):
        keys.corrupt(f"{keys.full('rope.dimension_sections')} is not a list of sizes")
    if any(sections[3:]):
        keys.refuse(f"{keys.full('rope.dimension_sections')} {sections} is not supported")
    return rotated / head_dim


def _refuse_window(keys: GGUFKeys) -> None:
    key = keys.full("attention.sliding_window")
    if keys.get(key, 0):
        keys.refuse(f"{key} {str(keys.get(key))[:40]} is not supported")
