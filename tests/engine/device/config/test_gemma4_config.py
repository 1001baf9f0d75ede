"""Gemma 4's config.json in the forms in which it is found."""

from __future__ import annotations

import json
from typing import Any

import pytest
from transformers import CONFIG_MAPPING, AutoConfig

from termgen.engine.device.config.cache_spec import CacheSpec
from termgen.engine.device.config.layer_differences import PerLayerInputs
from termgen.engine.device.config.model_config import ModelConfig
from termgen.engine.device.config.rope_config import RopeConfig
from termgen.errors import CorruptFileError, UnsupportedModelError

pytestmark = pytest.mark.skipif(
    "gemma4_text" not in CONFIG_MAPPING, reason="this release of transformers has no gemma4"
)
ROPE = {"rope_type": "proportional", "partial_rotary_factor": 2}
PERIOD = [*["sliding_attention"] * 4, "full_attention"]
# The small one: 35 layers, of which the last 20 have no keys and values of their own.
SMALL_TEXT: dict[str, Any] = {
    "model_type": "gemma4_text",
    "head_dim": 256,
    "global_head_dim": 512,
    "hidden_size": 1536,
    "hidden_size_per_layer_input": 256,
    "intermediate_size": 6144,
    "layer_types": PERIOD * 7,
    "num_attention_heads": 8,
    "num_hidden_layers": 35,
    "num_key_value_heads": 1,
    "num_kv_shared_layers": 20,
    "use_double_wide_mlp": True,
    "final_logit_softcapping": 30.0,
    "sliding_window": 512,
}
SMALL: dict[str, Any] = {
    "architectures": ["Gemma4ForConditionalGeneration"],
    "model_type": "gemma4",
    "dtype": "bfloat16",
    "eos_token_id": [1, 106],
    "text_config": SMALL_TEXT,
    "vision_config": {"model_type": "gemma4_vision"},
    "audio_config": {"model_type": "gemma4_audio"},
}
# The sparse one: keys are values, and experts beside each MLP.
SPARSE_TEXT: dict[str, Any] = {
    "model_type": "gemma4_text",
    "attention_k_eq_v": True,
    "enable_moe_block": True,
    "global_head_dim": 512,
    "head_dim": 256,
    "hidden_size": 2816,
    "hidden_size_per_layer_input": 0,
    "intermediate_size": 2112,
    "moe_intermediate_size": 704,
    "num_attention_heads": 16,
    "num_experts": 128,
    "num_global_key_value_heads": 2,
    "num_hidden_layers": 30,
    "num_key_value_heads": 8,
    "sliding_window": 1024,
    "top_k_experts": 8,
}
SPARSE: dict[str, Any] = {**SMALL, "text_config": SPARSE_TEXT}


def test_the_small_model() -> None:
    config = ModelConfig.from_hf(SMALL)
    assert config.eos_token_ids == (1, 106) and config.torch_dtype == "bfloat16"
    assert config.attention_scale == 1.0 and config.logit_softcap == 30.0 and config.qk_norm
    assert config.tie_word_embeddings and config.hidden_act == "gelu_tanh"
    assert config.per_layer_inputs == PerLayerInputs(vocab_size=262144, size=256)
    assert config.layer_windows[:6] == (512, 512, 512, 512, None, 512)
    near = RopeConfig(theta=1e4)
    far = RopeConfig(theta=1e6, type="proportional", proportion=0.25)
    assert config.layer_ropes[3:6] == (near, far, near)
    own = [spec for spec in config.layer_caches if spec is not None]
    assert own == [*[CacheSpec(1, 256, 512)] * 4, CacheSpec(1, 512, None)] * 3
    assert [config.kv_source(i) for i in (0, 4, 14, 15, 19, 34)] == [0, 4, 14, 13, 14, 14]
    own, shared = config.of_layer(14), config.of_layer(34)
    assert (own.num_kv_heads, own.head_dim, own.intermediate_size) == (1, 512, 6144)
    assert (shared.num_kv_heads, shared.head_dim, shared.intermediate_size) == (0, 512, 12288)
    assert config.of_layer(15).head_dim == 256 and config.weight_prefixes[-1] == ("", None)
    assert 4.5e9 < config.num_parameters < 5.3e9  # 2.3 billion, and the second embedding


def test_the_sparse_model() -> None:
    config = ModelConfig.from_hf(SPARSE)
    assert config.per_layer_inputs is None and config.logit_softcap is None
    assert config.layer_windows == (*[1024] * 5, None) * 5
    assert config.layer_caches[4:6] == (CacheSpec(8, 256, 1024), CacheSpec(2, 512, None))
    assert config.of_layer(5).keys_are_values and not config.of_layer(4).keys_are_values
    moe = config.of_layer(7).moe
    assert moe is not None and moe.is_beside_mlp and config.of_layer(7).intermediate_size == 2112
    assert (moe.num_experts, moe.num_experts_per_tok, moe.intermediate_size) == (128, 8, 704)
    assert 24e9 < config.num_parameters < 27e9


@pytest.mark.parametrize("text", [SMALL_TEXT, SPARSE_TEXT])
def test_the_form_that_transformers_writes_says_the_same(text: dict[str, Any]) -> None:
    written = json.loads(AutoConfig.for_model(**text).to_json_string(use_diff=False))
    assert "global_head_dim" not in written and "per_layer_config" in written
    architectures = {"architectures": ["Gemma4ForCausalLM"]}
    found = ModelConfig.from_hf({**written, **architectures})
    assert found == ModelConfig.from_hf({**text, **architectures})
    assert found.weight_prefixes == (("", ""),)


def test_what_is_left_out_is_what_transformers_fills_in() -> None:
    bare = {"architectures": ["Gemma4ForCausalLM"]}
    written = json.loads(CONFIG_MAPPING["gemma4_text"]().to_json_string(use_diff=False))
    found = ModelConfig.from_hf(bare)
    assert found == ModelConfig.from_hf({**written, **bare})
    assert found.layer_windows == (*[512] * 5, None) * 5
    few = {"num_hidden_layers": 4, "layer_types": ["sliding_attention"] * 4}
    written = CONFIG_MAPPING["gemma4_text"](**few).to_dict()
    found = ModelConfig.from_hf({**bare, **few})
    assert found == ModelConfig.from_hf({**written, **bare})
    assert found.layer_windows == (512, 512, 512, None), "the last one sees everything"


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"layer_types": PERIOD}, CorruptFileError, "layer_types must be a list of 35 names"),
        ({"layer_types": ["chunked"] * 35}, UnsupportedModelError, "layer_types has 'chunked'"),
        ({"use_bidirectional_attention": "all"}, UnsupportedModelError, "use_bidirectional_att"),
        ({"num_kv_shared_layers": 35}, CorruptFileError, "num_kv_shared_layers is 35, and there"),
        ({"num_kv_shared_layers": 32}, CorruptFileError, "leaves no layer of full_attention"),
        ({"num_kv_shared_layers": -1}, CorruptFileError, "text_config.num_kv_shared_layers"),
        ({"rope_parameters": {"full_attention": ROPE}}, CorruptFileError, "has no sliding_atten"),
        ({"vocab_size_per_layer_input": 512}, CorruptFileError, "vocab_size_per_layer_input is"),
        ({"hidden_size_per_layer_input": "x"}, CorruptFileError, "hidden_size_per_layer_input"),
        ({"global_head_dim": 0}, CorruptFileError, "global_head_dim"),
        (
            {"attention_k_eq_v": True, "num_global_key_value_heads": 3},
            CorruptFileError,
            "num_global_key_value_heads is 3, which does not divide num_attention_heads 8",
        ),
        ({"enable_moe_block": True}, CorruptFileError, "num_experts"),
        (
            {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 5},
            CorruptFileError,
            "top_k_experts is 5, but there are 4 experts",
        ),
        ({"per_layer_config": {"99": {}}}, CorruptFileError, "99 is no layer of 35"),
        ({"per_layer_config": {"0": {"head_dim": 64}}}, CorruptFileError, "per_layer_config.0"),
        ({"per_layer_config": {"4": {"head_dim": 64}}}, CorruptFileError, "other heads in some"),
        (
            {"per_layer_config": {str(i): {"head_dim": 128} for i in range(4, 35, 5)}},
            CorruptFileError,
            "global_head_dim is 512, but per_layer_config says 128",
        ),
        ({"tie_word_embeddings": False}, CorruptFileError, "tie_word_embeddings is True, which"),
        (
            {"rope_parameters": {"full_attention": ROPE, "sliding_attention": {"rope_theta": 9.0}}},
            CorruptFileError,
            "full_attention.partial_rotary_factor must be at most 1",
        ),
        ({"num_hidden_layers": 10**9}, CorruptFileError, "text_config.num_hidden_layers"),
    ],
)
def test_a_config_that_cannot_be_run(
    changes: dict[str, Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said) as raised:
        text = {**SMALL_TEXT, **changes}
        ModelConfig.from_hf({**SMALL, "tie_word_embeddings": True, "text_config": text})
    assert "\n" not in str(raised.value)
