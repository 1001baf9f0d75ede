"""Llama 4's config.json: intervals and lists, the text part of a config, and contradictions."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoConfig

from termgen.engine.device.config.llama4_config import Temperature
from termgen.engine.device.config.model_config import ModelConfig
from termgen.errors import CorruptFileError, UnsupportedModelError
from termgen.vocabulary.cache_groups import Chunk

# What the config.json of Llama-4-Scout-17B-16E says of its text model, and of other things.
SCOUT: dict[str, Any] = {
    "architectures": ["Llama4ForConditionalGeneration"],
    "model_type": "llama4",
    "boi_token_index": 200080,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vision_config": {"hidden_size": 1408, "model_type": "llama4_vision_model"},
    "text_config": {
        "attention_bias": False,
        "attention_chunk_size": 8192,
        "attn_scale": 0.1,
        "attn_temperature_tuning": 4,
        "bos_token_id": 200000,
        "eos_token_id": [200001, 200007, 200008],
        "floor_scale": 8192,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 5120,
        "interleave_moe_layer_step": 1,
        "intermediate_size": 8192,
        "intermediate_size_mlp": 16384,
        "max_position_embeddings": 10485760,
        "model_type": "llama4_text",
        "no_rope_layers": [],
        "num_attention_heads": 40,
        "num_experts_per_tok": 1,
        "num_hidden_layers": 48,
        "num_key_value_heads": 8,
        "num_local_experts": 16,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "factor": 16.0,
            "high_freq_factor": 1.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "rope_theta": 500000.0,
        "router_jitter_noise": 0.0,
        "torch_dtype": "bfloat16",
        "use_qk_norm": True,
        "vocab_size": 202048,
    },
}
SMALL: dict[str, Any] = {"architectures": ["Llama4ForCausalLM"], "num_hidden_layers": 4}


def changed(**changes: Any) -> ModelConfig:
    return ModelConfig.from_hf({**SCOUT, "text_config": {**SCOUT["text_config"], **changes}})


def small(**changes: Any) -> ModelConfig:
    return ModelConfig.from_hf({**SMALL, **changes})


def test_a_scout_config() -> None:
    config = ModelConfig.from_hf(SCOUT)
    assert config.layer_windows[:5] == (*[Chunk(8192)] * 3, None, Chunk(8192))
    assert config.unrotated_layers == frozenset(range(3, 48, 4)) and config.qk_norm
    assert config.temperature == Temperature(8192, 0.1)
    assert (config.rope.type, config.rope.factor, config.rope.theta) == ("llama3", 16.0, 5e5)
    assert config.layer_ropes[3].type == "none" and config.eos_token_ids == (200001, 200007, 200008)
    moe = config.moe
    assert moe is not None and moe.sparse_layers == frozenset(range(48)) and moe.weighs_inputs
    assert (moe.num_experts, moe.num_experts_per_tok, moe.intermediate_size) == (16, 1, 8192)
    assert moe.has_shared_of_same_size and config.of_layer(0).moe == moe
    assert config.torch_dtype == "bfloat16"
    assert 106e9 < config.num_parameters < 109e9


def test_a_maverick_config() -> None:
    changes = {"interleave_moe_layer_step": 2, "num_local_experts": 128, "rope_scaling": None}
    config = changed(**changes, use_qk_norm=False)
    moe = config.moe
    assert moe is not None and moe.sparse_layers == frozenset(range(1, 48, 2))
    assert not config.qk_norm and config.rope.type == "default"
    assert config.of_layer(0).moe is None and config.of_layer(0).intermediate_size == 16384
    assert 395e9 < config.num_parameters < 402e9


def test_what_is_left_out_is_what_transformers_fills_in() -> None:
    written = {**AutoConfig.for_model("llama4_text").to_dict()}
    bare = {"architectures": SMALL["architectures"]}
    assert ModelConfig.from_hf(bare) == ModelConfig.from_hf({**written, **bare})


def test_lists_count_before_intervals() -> None:
    lists = {"moe_layers": [2, 0], "no_rope_layers": [0, 1, 0, 1]}
    config = small(**lists, interleave_moe_layer_step=3, no_rope_layer_interval=2)
    assert config.moe is not None and config.moe.sparse_layers == frozenset({0, 2})
    assert config.unrotated_layers == frozenset({0, 2})
    assert config.layer_windows == (None, Chunk(8192), None, Chunk(8192))
    assert small(moe_layers=[]).moe is None


def test_small_models_rotate_and_see_everything() -> None:
    """MobileLLM-R1 has no experts and no chunks; Llama Guard 4 has zeros for its experts."""
    config = small(layer_types=["full_attention"] * 4, no_rope_layers=[1] * 4, moe_layers=[])
    assert config.layer_windows == (None,) * 4 and not config.unrotated_layers
    guard = changed(moe_layers=[], interleave_moe_layer_step=0, num_local_experts=0)
    assert guard.moe is None and guard.unrotated_layers == frozenset(range(3, 48, 4))


@pytest.mark.parametrize("value", [False, 0])
def test_queries_need_no_factor(value: Any) -> None:
    assert small(attn_temperature_tuning=value).temperature is None
    assert small(attn_temperature_tuning=True).temperature == Temperature(8192, 0.1)


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"attention_chunk_size": None}, CorruptFileError, "attention_chunk_size must be a number"),
        ({"attention_chunk_size": 0}, CorruptFileError, "attention_chunk_size must be between"),
        ({"layer_types": ["full_attention"]}, CorruptFileError, "layer_types must be a list of 48"),
        (
            {"layer_types": ["chunked_attention"] * 48},
            CorruptFileError,
            "layer_types has chunked_attention at layer 3, which does not rotate by no_rope_layer",
        ),
        (
            {"layer_types": ["sliding_attention"] * 48},
            UnsupportedModelError,
            "layer_types has 'sliding_attention'",
        ),
        ({"no_rope_layers": [1, 0]}, CorruptFileError, "no_rope_layers must be a list of 48"),
        ({"no_rope_layers": [2] * 48}, CorruptFileError, "no_rope_layers must hold 0 and 1, not 2"),
        ({"no_rope_layer_interval": 0, "no_rope_layers": None}, CorruptFileError, "_interval must"),
        ({"moe_layers": [48]}, CorruptFileError, "moe_layers must hold layers from 0 to 47"),
        ({"moe_layers": 3}, CorruptFileError, "moe_layers must be a list"),
        ({"num_experts_per_tok": 17}, CorruptFileError, "num_experts_per_tok is 17, but there are"),
        ({"floor_scale": 0}, CorruptFileError, "floor_scale must be above 0"),
        ({"attn_temperature_tuning": "4"}, CorruptFileError, "attn_temperature_tuning must be"),
        ({"tie_word_embeddings": True}, CorruptFileError, "tie_word_embeddings is not what"),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
            UnsupportedModelError,
            "rope_type 'yarn' is not supported",
        ),
    ],
)
def test_a_config_that_cannot_be_run(
    changes: dict[str, Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said) as raised:
        changed(**changes)
    assert "\n" not in str(raised.value) and "config.json" in str(raised.value)
