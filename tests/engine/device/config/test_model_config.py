from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from transformers import AutoConfig

from termgen.engine.device.config.cache_spec import CacheSpec
from termgen.engine.device.config.experts_config import GluClamp
from termgen.engine.device.config.model_config import (
    SUPPORTED_ARCHITECTURES,
    LinearAttention,
    ModelConfig,
)
from termgen.engine.device.config.rope_config import NO_ROPE, RopeConfig
from termgen.engine.device.models.registry import MODELS
from termgen.errors import CorruptFileError, UnsupportedModelError

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}
LLAMA3_SCALING = {
    "factor": 32.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}


def read(**changes: Any) -> ModelConfig:
    return ModelConfig.from_hf({**LLAMA, **changes})


def test_a_llama_config() -> None:
    config = read()
    assert config.head_dim == 64
    assert (config.num_heads, config.num_kv_heads, config.num_layers) == (9, 3, 30)
    assert config.rope == RopeConfig(theta=100000.0)
    assert config.layer_windows == (None,) * 30
    assert config.eos_token_ids == (2,) and config.bos_token_id == 1
    assert config.torch_dtype == "bfloat16" and config.tie_word_embeddings
    assert not (config.qkv_bias or config.o_bias or config.mlp_bias or config.qk_norm)


def test_older_and_newer_rope_keys_mean_the_same() -> None:
    older = read(rope_theta=500000.0, rope_scaling=LLAMA3_SCALING)
    newer = read(rope_theta=None, rope_parameters={**LLAMA3_SCALING, "rope_theta": 500000.0})
    oldest = {**LLAMA3_SCALING, "type": "llama3"}
    del oldest["rope_type"]
    assert older.rope == newer.rope == read(rope_theta=500000.0, rope_scaling=oldest).rope
    assert older.rope.type == "llama3" and older.rope.factor == 32.0


def test_older_and_newer_dtype_keys_mean_the_same() -> None:
    assert read(torch_dtype="float16").torch_dtype == "float16"
    assert read(torch_dtype=None, dtype="float16").torch_dtype == "float16"
    assert read(torch_dtype="torch.bfloat16").torch_dtype == "bfloat16"


def test_yarn_fills_in_what_is_absent() -> None:
    scaling = {"rope_type": "yarn", "original_max_position_embeddings": 2048}
    rope = read(rope_scaling=scaling).rope
    assert rope.factor == 4.0 and rope.truncate
    assert rope.attention_factor == pytest.approx(1.13863, abs=1e-5)
    assert read(rope_scaling={**scaling, "attention_factor": 1.0}).rope.attention_factor == 1.0


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3"])
def test_what_transformers_writes_is_read(model_type: str) -> None:
    written = AutoConfig.for_model(model_type, num_hidden_layers=3)
    raw = written.to_dict()
    raw["architectures"] = [f"{model_type.capitalize()}ForCausalLM"]
    config = ModelConfig.from_hf(raw)
    assert config.hidden_size == written.hidden_size
    assert config.num_kv_heads == written.num_key_value_heads
    assert config.rms_norm_eps == written.rms_norm_eps
    assert config.rope.theta == written.rope_parameters["rope_theta"]
    assert config.sliding_window == written.sliding_window if model_type == "mistral" else True


def test_qwen_windows_cover_the_later_layers() -> None:
    qwen = {
        "architectures": ["Qwen2ForCausalLM"],
        "num_hidden_layers": 4,
        "sliding_window": 128,
        "max_window_layers": 3,
    }
    assert read(**qwen).layer_windows == (None,) * 4
    assert read(**qwen, use_sliding_window=True).layer_windows == (None, None, None, 128)
    kinds = ["sliding_attention", "full_attention"] * 2
    config = read(**qwen, use_sliding_window=True, layer_types=kinds)
    assert config.layer_windows == (128, None, 128, None)
    with pytest.raises(CorruptFileError, match="layer_types"):
        read(**qwen, layer_types=kinds)
    with pytest.raises(UnsupportedModelError, match="chunked_attention"):
        read(**qwen, layer_types=["chunked_attention"] * 4)


def test_mistral_windows_cover_every_layer() -> None:
    mistral = {"architectures": ["MistralForCausalLM"], "num_hidden_layers": 2}
    assert read(**mistral, sliding_window=64).layer_windows == (64, 64)
    assert read(**mistral, sliding_window=None).layer_windows == (None, None)


def test_qwen3_says_its_own_head_size() -> None:
    qwen3 = read(architectures=["Qwen3ForCausalLM"])
    assert qwen3.head_dim == 128 and qwen3.qk_norm and not qwen3.qkv_bias


# config.json of gemma-3-1b, which leaves out the class's defaults.
GEMMA: dict[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "bos_token_id": 2,
    "eos_token_id": [1, 106],
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "max_position_embeddings": 32768,
    "num_attention_heads": 4,
    "num_hidden_layers": 26,
    "num_key_value_heads": 1,
    "query_pre_attn_scalar": 256,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "torch_dtype": "bfloat16",
    "vocab_size": 262144,
}
# config.json of gemma-2-2b, which leaves out the class's own defaults.
GEMMA2: dict[str, Any] = {
    "architectures": ["Gemma2ForCausalLM"],
    "model_type": "gemma2",
    "attn_logit_softcapping": 50.0,
    "bos_token_id": 2,
    "cache_implementation": "hybrid",
    "eos_token_id": [1, 107],
    "final_logit_softcapping": 30.0,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "max_position_embeddings": 8192,
    "num_attention_heads": 8,
    "num_hidden_layers": 26,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 224,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "torch_dtype": "float32",
    "vocab_size": 256000,
}


def test_a_gemma2_config() -> None:
    config = ModelConfig.from_hf(GEMMA2)
    assert config.tie_word_embeddings and not config.qk_norm and config.hidden_act == "gelu_tanh"
    assert config.attention_scale == 224**-0.5
    assert (config.attention_softcap, config.logit_softcap) == (50.0, 30.0)
    assert config.layer_windows[:4] == (4096, None, 4096, None)
    assert config.rope == RopeConfig(theta=1e4) and config.window_rope is None
    free = ModelConfig.from_hf({**GEMMA2, "attn_logit_softcapping": None})
    assert (free.attention_softcap, free.logit_softcap) == (None, 30.0)


def test_what_gemma2_leaves_out_is_what_transformers_fills_in() -> None:
    bare = {"architectures": GEMMA2["architectures"]}
    written = AutoConfig.for_model("gemma2").to_dict()
    ours, theirs = ModelConfig.from_hf(bare), ModelConfig.from_hf({**written, **bare})
    assert ours == dataclasses.replace(theirs, bos_token_id=None, eos_token_ids=())


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"attn_logit_softcapping": 0}, CorruptFileError, "attn_logit_softcapping"),
        ({"final_logit_softcapping": -30.0}, CorruptFileError, "final_logit_softcapping"),
        ({"final_logit_softcapping": "30"}, CorruptFileError, "final_logit_softcapping"),
        ({"use_bidirectional_attention": True}, UnsupportedModelError, "use_bidirectional"),
        ({"hidden_act": "silu"}, CorruptFileError, "hidden_act is not hidden_activation"),
        ({"query_pre_attn_scalar": 0}, CorruptFileError, "query_pre_attn_scalar"),
        ({"sliding_window": None}, CorruptFileError, "layer_types has sliding_attention, but no"),
        ({"layer_types": ["full_attention"]}, CorruptFileError, "layer_types"),
        ({"num_hidden_layers": 10**9}, CorruptFileError, "num_hidden_layers"),
    ],
)
def test_a_gemma2_config_that_cannot_be_run(
    changes: dict[str, Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said) as raised:
        ModelConfig.from_hf({**GEMMA2, **changes})
    assert "\n" not in str(raised.value)


# config.json of gpt-oss-20b.
GPT_OSS: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "attention_bias": True,
    "eos_token_id": 200002,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "quantization_config": {"modules_to_not_convert": ["lm_head"], "quant_method": "mxfp4"},
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "vocab_size": 201088,
}


def test_a_gpt_oss_config() -> None:
    config = ModelConfig.from_hf(GPT_OSS)
    assert config.qkv_bias and config.o_bias and config.has_sinks
    assert config.rms_norm_eps == 1e-5 and config.attention_scale == 1 / 8
    assert config.layer_windows[:3] == (128, None, 128) and config.torch_dtype == "bfloat16"
    assert (config.rope.type, config.rope.theta, config.rope.truncate) == ("yarn", 150000, False)
    assert config.rope.attention_factor == pytest.approx(1.3465736)
    moe = config.moe
    assert moe is not None and moe.clamp == GluClamp(alpha=1.702, limit=7.0) and moe.has_biases
    assert (moe.num_experts, moe.num_experts_per_tok, moe.intermediate_size) == (32, 4, 2880)
    billions = config.num_parameters / 1e9
    assert 20.5 < billions < 21.5


def test_what_gpt_oss_leaves_out_is_what_transformers_fills_in() -> None:
    bare = {"architectures": GPT_OSS["architectures"]}
    written = {**AutoConfig.for_model("gpt_oss").to_dict(), "dtype": "bfloat16"}
    assert ModelConfig.from_hf(bare) == ModelConfig.from_hf({**written, **bare})


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"experts_per_token": 2}, CorruptFileError, "experts_per_token is 2, but num_experts_per"),
        ({"num_experts": 16}, CorruptFileError, "num_experts is 16, but num_local_experts is 32"),
        ({"num_experts_per_tok": 33}, CorruptFileError, "num_experts_per_tok|experts_per_token"),
        ({"hidden_act": "gelu"}, CorruptFileError, "hidden_act is 'gelu'"),
        ({"swiglu_limit": 0}, CorruptFileError, "swiglu_limit"),
        ({"swiglu_alpha": "x"}, CorruptFileError, "swiglu_alpha"),
        ({"sliding_window": None}, CorruptFileError, "layer_types has sliding_attention, but no"),
        ({"layer_types": ["full_attention"]}, CorruptFileError, "layer_types"),
        ({"quantization_config": {"quant_method": "hqq"}}, UnsupportedModelError, "hqq"),
        ({"quantization_config": "mxfp4"}, UnsupportedModelError, "quantization_config"),
    ],
)
def test_a_gpt_oss_config_that_cannot_be_run(
    changes: dict[str, Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said) as raised:
        ModelConfig.from_hf({**GPT_OSS, **changes})
    assert "\n" not in str(raised.value)


def test_four_bits_are_read_for_gpt_oss_alone() -> None:
    with pytest.raises(UnsupportedModelError, match="quantization_config asks for mxfp4"):
        read(quantization_config={"quant_method": "mxfp4"})


# What counts in the config.json of Qwen3.5-27B.
QWEN3_5_TEXT: dict[str, Any] = {
    "model_type": "qwen3_5_text",
    "attn_output_gate": True,
    "dtype": "bfloat16",
    "eos_token_id": 248044,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "layer_types": [*["linear_attention"] * 3, "full_attention"] * 16,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 48,
    "linear_value_head_dim": 128,
    "mamba_ssm_dtype": "float32",
    "max_position_embeddings": 262144,
    "mtp_num_hidden_layers": 1,
    "num_attention_heads": 24,
    "num_hidden_layers": 64,
    "num_key_value_heads": 4,
    "output_gate_type": "swish",
    "rms_norm_eps": 1e-06,
    "rope_parameters": {
        "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
        "partial_rotary_factor": 0.25,
        "rope_theta": 10000000,
        "rope_type": "default",
    },
    "vocab_size": 248320,
}
QWEN3_5: dict[str, Any] = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "model_type": "qwen3_5",
    "text_config": QWEN3_5_TEXT,
    "tie_word_embeddings": False,
    "vision_config": {"depth": 27, "model_type": "qwen3_5"},
}
EVERY_FOURTH = tuple(layer for layer in range(64) if (layer + 1) % 4)


def test_a_qwen3_5_config() -> None:
    config = ModelConfig.from_hf(QWEN3_5)
    linear = config.linear
    assert linear == LinearAttention(
        layers=EVERY_FOURTH, num_k_heads=16, num_v_heads=48, k_dim=128, v_dim=128
    )
    assert linear.num_channels == 10240
    caches = config.layer_caches
    assert [layer for layer, spec in enumerate(caches) if spec is None] == list(EVERY_FOURTH)
    assert caches[3] == CacheSpec(4, 256, None)
    assert config.rope == RopeConfig(theta=1e7, partial_rotary_factor=0.25)
    assert config.has_output_gate and config.qk_norm and config.attention_scale == 1 / 16
    assert config.eos_token_ids == (248044,) and config.torch_dtype == "bfloat16"
    assert 26.8e9 < config.num_parameters < 27.0e9


def test_forms_of_a_qwen3_5_config_mean_the_same() -> None:
    nested = ModelConfig.from_hf(QWEN3_5)
    architecture = "Qwen3_5ForCausalLM"
    flat = {**QWEN3_5_TEXT, "architectures": [architecture]}
    expected = dataclasses.replace(nested, architecture=architecture)
    assert ModelConfig.from_hf(flat) == expected
    for key in ("layer_types", "output_gate_type", "attn_output_gate", "mamba_ssm_dtype"):
        assert ModelConfig.from_hf({**flat, key: None}) == expected, key
    older = {"rope_theta": 1e7, "partial_rotary_factor": 0.25, "rope_parameters": None}
    assert ModelConfig.from_hf({**flat, **older}) == expected
    half = ModelConfig.from_hf({**flat, **older, "partial_rotary_factor": 0.5})
    assert half.rope.partial_rotary_factor == 0.5
    every_second = {**flat, "layer_types": None, "full_attention_interval": 2}
    linear = ModelConfig.from_hf(every_second).linear
    assert linear is not None and linear.layers == tuple(range(0, 64, 2))


# What counts in the config.json of Qwen3.5-35B-A3B.
QWEN3_5_MOE: dict[str, Any] = {
    "architectures": ["Qwen3_5MoeForConditionalGeneration"],
    "model_type": "qwen3_5_moe",
    "text_config": {
        **{key: value for key, value in QWEN3_5_TEXT.items() if key != "intermediate_size"},
        "hidden_size": 2048,
        "layer_types": [*["linear_attention"] * 3, "full_attention"] * 10,
        "linear_num_value_heads": 32,
        "moe_intermediate_size": 512,
        "num_attention_heads": 16,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 40,
        "num_key_value_heads": 2,
        "shared_expert_intermediate_size": 512,
    },
}


def test_a_qwen3_5_config_with_experts() -> None:
    config = ModelConfig.from_hf(QWEN3_5_MOE)
    moe = config.moe
    assert moe is not None and moe.norm_topk_prob and moe.sparse_layers == set(range(40))
    assert (moe.num_experts, moe.num_experts_per_tok, moe.intermediate_size) == (256, 8, 512)
    assert moe.shared_intermediate_size == 512
    assert config.linear is not None and len(config.linear.layers) == 30
    assert 34e9 < config.num_parameters < 36e9


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_experts": None}, "num_experts is missing"),
        ({"num_experts_per_tok": 300}, "num_experts_per_tok is 300"),
        ({"moe_intermediate_size": None}, "moe_intermediate_size is missing"),
        ({"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size must be"),
        ({"mlp_only_layers": [1]}, r"mlp_only_layers \[1\] is not supported"),
        ({"norm_topk_prob": False}, "norm_topk_prob False is not supported"),
    ],
)
def test_qwen3_5_experts_that_cannot_be_run(changes: dict[str, Any], said: str) -> None:
    text = {**QWEN3_5_MOE["text_config"], **changes}
    with pytest.raises((CorruptFileError, UnsupportedModelError), match=said):
        ModelConfig.from_hf({**QWEN3_5_MOE, "text_config": text})


# What counts in the config.json of Qwen3-Next-80B-A3B.
QWEN3_NEXT: dict[str, Any] = {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "decoder_sparse_step": 1,
    "dtype": "bfloat16",
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 262144,
    "mlp_only_layers": [],
    "moe_intermediate_size": 512,
    "norm_topk_prob": True,
    "num_attention_heads": 16,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "num_hidden_layers": 48,
    "num_key_value_heads": 2,
    "partial_rotary_factor": 0.25,
    "rope_theta": 10000000,
    "shared_expert_intermediate_size": 512,
    "vocab_size": 151936,
}


def test_a_qwen3_next_config() -> None:
    config = ModelConfig.from_hf(QWEN3_NEXT)
    assert config.linear is not None and config.linear.is_by_k_head
    assert len(config.linear.layers) == 36 and config.layer_caches[3] == CacheSpec(2, 256, None)
    assert config.rope == RopeConfig(theta=1e7, partial_rotary_factor=0.25)
    assert config.has_output_gate and config.moe is not None and config.moe.norm_topk_prob
    assert 79e9 < config.num_parameters < 81e9
    drawn = {
        **QWEN3_NEXT,
        "norm_topk_prob": False,
        "decoder_sparse_step": 2,
        "mlp_only_layers": [3],
    }
    moe = ModelConfig.from_hf(drawn).moe
    assert moe is not None and not moe.norm_topk_prob
    assert moe.sparse_layers == set(range(1, 48, 2)) - {3}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"linear_conv_kernel_dim": 3}, "linear_conv_kernel_dim 3 is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"rope_theta": None}, "rope_theta is missing"),
        ({"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size must be"),
    ],
)
def test_a_qwen3_next_config_that_cannot_be_run(changes: dict[str, Any], said: str) -> None:
    with pytest.raises((CorruptFileError, UnsupportedModelError), match=said):
        ModelConfig.from_hf({**QWEN3_NEXT, **changes})


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"layer_types": ["full_attention"]}, CorruptFileError, "layer_types must be a list of 64"),
        ({"layer_types": ["linear_attention"] * 64}, CorruptFileError, "no full_attention"),
        ({"layer_types": ["mamba"] * 64}, UnsupportedModelError, "layer_types has 'mamba'"),
        ({"linear_num_value_heads": 40}, CorruptFileError, "linear_num_value_heads is 40"),
        ({"linear_num_value_heads": None}, CorruptFileError, "linear_num_value_heads is missing"),
        ({"linear_num_key_heads": 0}, CorruptFileError, "linear_num_key_heads must be"),
        ({"linear_key_head_dim": None}, CorruptFileError, "linear_key_head_dim is missing"),
        ({"linear_value_head_dim": "x"}, CorruptFileError, "linear_value_head_dim must be"),
        ({"linear_conv_kernel_dim": 3}, UnsupportedModelError, "linear_conv_kernel_dim 3"),
        ({"attn_output_gate": False}, UnsupportedModelError, "attn_output_gate False"),
        ({"output_gate_type": "sigmoid"}, UnsupportedModelError, "output_gate_type 'sigmoid'"),
        ({"mamba_ssm_dtype": "bfloat16"}, UnsupportedModelError, "mamba_ssm_dtype 'bfloat16'"),
        ({"hidden_act": "gelu"}, UnsupportedModelError, "hidden_act 'gelu'"),
        ({"hidden_size": None}, CorruptFileError, "hidden_size is missing"),
        ({"rope_parameters": None}, CorruptFileError, "rope_theta is missing"),
        ({"tie_word_embeddings": True}, CorruptFileError, "tie_word_embeddings is False, which"),
        (
            {"rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 1.5}},
            CorruptFileError,
            "partial_rotary_factor must be at most 1",
        ),
        (
            {"rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 0.02}},
            CorruptFileError,
            "head_dim gives 5 rotated values",
        ),
    ],
)
def test_a_qwen3_5_config_that_cannot_be_run(
    changes: dict[str, Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said) as raised:
        ModelConfig.from_hf({**QWEN3_5, "text_config": {**QWEN3_5_TEXT, **changes}})
    assert "\n" not in str(raised.value)


# Muse-Glimmer-30B, as its class describes it.
MUSE_LAYERS = 52
MUSE_TEXT: dict[str, Any] = {
    "model_type": "muse_glimmer_text",
    "head_dim": 128,
    "hidden_size": 6656,
    "intermediate_size": 19968,
    "layer_rope_theta": [500000.0, 500000.0, 500000.0, 0] * 13,
    "layer_types": [*["sliding_attention"] * 3, "full_attention"] * 13,
    "max_position_embeddings": 131072,
    "num_attention_heads": 32,
    "num_hidden_layers": MUSE_LAYERS,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-05,
    "rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"},
    "sliding_window": 2048,
    "vocab_size": 202048,
}
MUSE: dict[str, Any] = {
    "architectures": ["MuseGlimmerForConditionalGeneration"],
    "model_type": "muse_glimmer",
    "dtype": "bfloat16",
    "eos_token_id": [200001, 200008],
    "text_config": MUSE_TEXT,
    "vision_config": {"hidden_size": 1536, "model_type": "muse_glimmer_vision"},
}


def test_a_muse_glimmer_config() -> None:
    config = ModelConfig.from_hf(MUSE)
    assert config.torch_dtype == "bfloat16" and config.eos_token_ids == (200001, 200008)
    assert config.attention_scale == pytest.approx(3.87 * 128**-0.5)
    assert (config.rms_norm_eps, config.post_norm_eps) == (1e-5, 1e-8)
    assert config.logit_softcap == 20.0 and config.logit_factor == pytest.approx(26**-0.5)
    assert config.layer_windows == (2048, 2048, 2048, None) * 13
    turning = RopeConfig(theta=5e5)
    assert config.layer_ropes == (turning, turning, turning, NO_ROPE) * 13
    assert config.has_attention_gate and not config.tie_word_embeddings
    assert ("model.language_model.", "model.") in config.weight_prefixes
    without_gate = dataclasses.replace(config, has_attention_gate=False)
    assert config.num_parameters - without_gate.num_parameters == 52 * 4096 * 6656
    assert 27.5e9 < config.num_parameters < 28.5e9


def test_what_muse_glimmer_leaves_out_is_what_transformers_fills_in() -> None:
    bare = {"architectures": MUSE["architectures"]}
    written = AutoConfig.for_model("muse_glimmer").to_dict()
    assert ModelConfig.from_hf(bare) == ModelConfig.from_hf({**written, **bare})
    few = {"num_hidden_layers": 6, "sliding_window": 64, "rope_theta": 5e4}
    written = AutoConfig.for_model("muse_glimmer", text_config=few).to_dict()
    found = ModelConfig.from_hf({**bare, "text_config": few})
    assert found == ModelConfig.from_hf({**written, **bare})
    assert found.unrotated_layers == {1, 5} and found.rope.theta == 5e4


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"layer_rope_theta": [0]}, CorruptFileError, "layer_rope_theta must be a list of 52 num"),
        ({"layer_rope_theta": 5e5}, CorruptFileError, "layer_rope_theta must be a list"),
        ({"layer_rope_theta": ["0"] * 52}, CorruptFileError, "layer_rope_theta must hold numbers"),
        ({"layer_rope_theta": [1e4] * 52}, CorruptFileError, "layer_rope_theta is 10000.0 at lay"),
        ({"rope_parameters": None}, CorruptFileError, "layer_rope_theta is 500000.0 at layer 0"),
        ({"layer_types": ["full_attention"]}, CorruptFileError, "layer_types must be a list of 52"),
        ({"layer_types": ["chunked"] * 52}, UnsupportedModelError, "layer_types has 'chunked'"),
        ({"sliding_window": None}, CorruptFileError, "layer_types has sliding_attention, but no"),
        ({"sliding_window": 0}, CorruptFileError, "text_config.sliding_window"),
        ({"num_hidden_layers": 10**9}, CorruptFileError, "text_config.num_hidden_layers"),
        ({"num_hidden_layers": 3}, CorruptFileError, "layer_rope_theta must be a list of 3"),
        ({"hidden_act": "gelu"}, CorruptFileError, "hidden_act is not hidden_activation 'silu'"),
        ({"hidden_activation": "relu2"}, UnsupportedModelError, "relu2"),
        ({"final_logit_softcapping": None}, CorruptFileError, "final_logit_softcapping must be a"),
        ({"final_logit_softcapping": 0}, CorruptFileError, "final_logit_softcapping"),
        ({"output_multiplier": -0.2}, CorruptFileError, "text_config.output_multiplier"),
        ({"output_multiplier": None}, CorruptFileError, "text_config.output_multiplier must be"),
        ({"qk_scale_factor": "3.87"}, CorruptFileError, "text_config.qk_scale_factor"),
        ({"post_norm_eps": 0}, CorruptFileError, "text_config.post_norm_eps"),
        ({"tie_word_embeddings": True}, CorruptFileError, "text_config.tie_word_embeddings is not"),
    ],
)
def test_a_muse_glimmer_config_that_cannot_be_run(
    changes: dict[str, Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said) as raised:
        ModelConfig.from_hf({**MUSE, "text_config": {**MUSE_TEXT, **changes}})
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("text", ["muse_glimmer_text", ["head_dim"], 3])
def test_a_text_config_must_be_a_dictionary(text: Any) -> None:
    with pytest.raises(CorruptFileError, match="text_config must be a dictionary"):
        ModelConfig.from_hf({**MUSE, "text_config": text})


# config.json of gemma-3-27b.
GEMMA_WITH_VISION: dict[str, Any] = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "model_type": "gemma3",
    "eos_token_id": [1, 106],
    "text_config": {
        "model_type": "gemma3_text",
        "head_dim": 128,
        "hidden_size": 5376,
        "intermediate_size": 21504,
        "num_attention_heads": 32,
        "num_hidden_layers": 62,
        "num_key_value_heads": 16,
        "query_pre_attn_scalar": 168,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "torch_dtype": "bfloat16",
    "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model"},
}


def test_a_gemma3_config() -> None:
    config = ModelConfig.from_hf(GEMMA)
    assert config.tie_word_embeddings and config.qk_norm and config.hidden_act == "gelu_tanh"
    assert config.attention_scale == 1 / 16 and config.weight_prefixes == (("", ""),)
    assert config.layer_windows[:7] == (512, 512, 512, 512, 512, None, 512)
    near, far = RopeConfig(theta=1e4), RopeConfig(theta=1e6)
    assert config.layer_ropes[:7] == (near, near, near, near, near, far, near)
    assert config.eos_token_ids == (1, 106)


def test_the_text_part_of_a_gemma3_with_vision() -> None:
    config = ModelConfig.from_hf(GEMMA_WITH_VISION)
    assert (config.vocab_size, config.max_position_embeddings) == (262208, 131072)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (32, 16, 128)
    assert config.attention_scale == 168**-0.5
    assert config.torch_dtype == "bfloat16" and config.eos_token_ids == (1, 106)
    assert config.weight_prefixes == (("language_model.", ""), ("", None))
    assert config.rope.type == "linear" and (config.rope.theta, config.rope.factor) == (1e6, 8.0)
    assert config.window_rope == RopeConfig(theta=1e4)


def test_older_and_newer_gemma3_keys_mean_the_same() -> None:
    older = {**GEMMA, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    keys = {key: value for key, value in older.items() if key != "model_type"}
    written = AutoConfig.for_model("gemma3_text", **keys).to_dict()
    newer = {key: value for key, value in written.items() if "pattern" not in key}
    assert "rope_theta" not in newer and len(newer["layer_types"]) == 26
    assert ModelConfig.from_hf(newer) == ModelConfig.from_hf(older)


def test_what_gemma3_leaves_out_is_what_transformers_fills_in() -> None:
    bare = {"architectures": GEMMA["architectures"]}
    written = AutoConfig.for_model("gemma3_text").to_dict()
    ours, theirs = ModelConfig.from_hf(bare), ModelConfig.from_hf({**written, **bare})
    # The config alone says which tokens are special.
    assert ours == dataclasses.replace(theirs, bos_token_id=None, eos_token_ids=())


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"final_logit_softcapping": 30.0}, UnsupportedModelError, "final_logit_softcapping 30"),
        ({"attn_logit_softcapping": 50.0}, UnsupportedModelError, "attn_logit_softcapping"),
        ({"use_bidirectional_attention": True}, UnsupportedModelError, "use_bidirectional"),
        ({"hidden_activation": "relu2"}, UnsupportedModelError, "relu2"),
        (
            {"rope_scaling": {"type": "linear", "factor": 8.0}},
            UnsupportedModelError,
            "rope_scaling.type is an old name",
        ),
        ({"query_pre_attn_scalar": 0}, CorruptFileError, "query_pre_attn_scalar"),
        ({"sliding_window_pattern": 0}, CorruptFileError, "sliding_window_pattern"),
        ({"sliding_window": "x"}, CorruptFileError, "sliding_window"),
        ({"layer_types": ["full_attention"]}, CorruptFileError, "layer_types"),
        ({"rope_parameters": {"rope_theta": 1e4}}, CorruptFileError, "rope_parameters.rope_theta"),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "linear"}}},
            CorruptFileError,
            "rope_parameters.full_attention.factor is missing",
        ),
        ({"rope_local_base_freq": -1}, CorruptFileError, "sliding_attention.rope_theta"),
    ],
)
def test_a_gemma3_config_that_cannot_be_run(
    changes: dict[str, Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        ModelConfig.from_hf({**GEMMA, **changes})


def test_an_error_in_the_text_part_says_where() -> None:
    text = {**GEMMA_WITH_VISION["text_config"], "hidden_size": "5376"}
    with pytest.raises(CorruptFileError, match=r"text_config\.hidden_size"):
        ModelConfig.from_hf({**GEMMA_WITH_VISION, "text_config": text})


MOE: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_hidden_layers": 6,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 96,
}


def test_which_layers_have_experts() -> None:
    def sparse(**changes: Any) -> set[int]:
        moe = read(**{**MOE, **changes}).moe
        assert moe is not None
        return set(moe.sparse_layers)

    assert sparse() == {0, 1, 2, 3, 4, 5}
    assert sparse(decoder_sparse_step=2) == {1, 3, 5}
    assert sparse(mlp_only_layers=[0, 3], decoder_sparse_step=2) == {1, 5}
    config = read(**{**MOE, "mlp_only_layers": [2]})
    assert config.of_layer(2).moe is None and config.of_layer(3).moe is config.moe
    assert read().moe is None and read().of_layer(0).moe is None


def test_older_and_newer_names_of_the_experts_mean_the_same() -> None:
    older = read(**MOE).moe
    assert older == read(**{**MOE, "num_experts": None, "num_local_experts": 16}).moe
    assert older is not None and not older.norm_topk_prob
    assert (older.num_experts, older.num_experts_per_tok, older.intermediate_size) == (16, 4, 96)


def test_mixtral_scales_the_weights_of_every_layers_experts() -> None:
    mixtral = {"architectures": ["MixtralForCausalLM"], "num_hidden_layers": 3}
    config = read(**mixtral, num_local_experts=8, num_experts_per_tok=2, sliding_window=64)
    assert config.moe is not None and config.moe.norm_topk_prob
    assert config.moe.sparse_layers == {0, 1, 2}
    assert config.moe.intermediate_size == config.intermediate_size
    assert config.layer_windows == (64,) * 3


def test_experts_count_as_parameters() -> None:
    dense = read(**{**MOE, "mlp_only_layers": list(range(6))}).num_parameters
    one = read(**{**MOE, "mlp_only_layers": list(range(5))}).num_parameters
    assert one - dense == 576 * (16 * (3 * 96 + 1) - 3 * 1536)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"num_experts": None}, "num_experts"),
        ({"num_experts": 0}, "num_experts"),
        ({"num_experts": 10**6}, "num_experts"),
        ({"num_experts_per_tok": 17}, "num_experts_per_tok"),
        ({"num_experts_per_tok": None}, "num_experts_per_tok"),
        ({"moe_intermediate_size": -1}, "moe_intermediate_size"),
        ({"norm_topk_prob": "yes"}, "norm_topk_prob"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step"),
        ({"mlp_only_layers": 3}, "mlp_only_layers"),
        ({"mlp_only_layers": [6]}, "mlp_only_layers"),
        ({"mlp_only_layers": [True]}, "mlp_only_layers"),
    ],
)
def test_bad_values_of_the_experts_name_the_key(changes: dict[str, Any], key: str) -> None:
    with pytest.raises(CorruptFileError, match=rf"config\.json: {key} "):
        read(**{**MOE, **changes})


def test_an_unknown_architecture_is_named_beside_the_known_ones() -> None:
    with pytest.raises(UnsupportedModelError) as error:
        read(architectures=["GPT2LMHeadModel"])
    assert "GPT2LMHeadModel" in str(error.value)
    for name in SUPPORTED_ARCHITECTURES:
        assert name in str(error.value)
    assert set(MODELS) == set(SUPPORTED_ARCHITECTURES)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "longrope"),
        ({"rope_parameters": {"full_attention": {}, "sliding_attention": {}}}, "rope_parameters"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        (
            {
                "rope_parameters": {
                    "rope_type": "linear",
                    "factor": 2.0,
                    "partial_rotary_factor": 0.5,
                }
            },
            "partial_rotary_factor 0.5",
        ),
        ({"hidden_act": "relu2"}, "relu2"),
        ({"quantization_config": {"quant_method": "hqq"}}, "hqq"),
        ({"torch_dtype": "float8_e4m3fn"}, "float8_e4m3fn"),
    ],
)
def test_what_is_not_supported_is_named(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UnsupportedModelError, match=said):
        read(**changes)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"architectures": []}, "architectures"),
        ({"architectures": "LlamaForCausalLM"}, "architectures"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": 0}, "hidden_size"),
        ({"hidden_size": "576"}, "hidden_size"),
        ({"hidden_size": True}, "hidden_size"),
        ({"hidden_size": 577}, "hidden_size 577"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"num_key_value_heads": 2}, "num_key_value_heads"),
        ({"head_dim": 63}, "head_dim"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"rope_theta": -1.0}, "rope_theta"),
        ({"rope_parameters": {"rope_theta": 1.0}}, "rope_parameters.rope_theta"),
        ({"rope_scaling": "linear"}, "rope_scaling"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling.factor is missing"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, "rope_scaling.factor"),
        ({"rope_scaling": {**LLAMA3_SCALING, "high_freq_factor": 0.5}}, "high_freq_factor"),
        ({"eos_token_id": "</s>"}, "eos_token_id"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
    ],
)
def test_a_wrong_value_is_an_error_naming_its_key(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(CorruptFileError, match=said):
        read(**changes)


def test_many_end_tokens() -> None:
    assert read(eos_token_id=[128001, 128008]).eos_token_ids == (128001, 128008)
    assert read(eos_token_id=None).eos_token_ids == ()


def test_parameters_are_counted() -> None:
    assert read().num_parameters == pytest.approx(134.5e6, rel=0.001)
    untied = read(tie_word_embeddings=False).num_parameters
    assert untied - read().num_parameters == 49152 * 576


SMALL: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 512,
    "intermediate_size": 112,
    "num_hidden_layers": 8,
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-3,
    "sliding_window": 24,
    "use_sliding_window": True,
    "max_window_layers": 2,
    "tie_word_embeddings": True,
    "rope_theta": 5e4,
    "num_experts_per_tok": 3,
    "num_local_experts": 16,
    "num_experts": 16,
    "shared_expert_intermediate_size": 64,
    "moe_intermediate_size": 64,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
NO_ARITHMETIC = {"bos_token_id": None, "eos_token_ids": (), "torch_dtype": "float32"}


@pytest.mark.parametrize(
    "model_type",
    [
        "llama",
        "mistral",
        "mixtral",
        "qwen2",
        "qwen3",
        "qwen3_moe",
        "gemma2",
        "gemma3_text",
        "gpt_oss",
        "llama4_text",
        "qwen3_5_text",
        "qwen3_next",
    ],
)
def test_a_key_that_is_left_out_means_what_transformers_takes_it_for(model_type: str) -> None:
    config_class = type(AutoConfig.for_model(model_type))
    names = {
        "qwen3_moe": "Qwen3MoeForCausalLM",
        "gemma3_text": "Gemma3ForCausalLM",
        "gpt_oss": "GptOssForCausalLM",
        "llama4_text": "Llama4ForCausalLM",
        "qwen3_5_text": "Qwen3_5ForCausalLM",
        "qwen3_next": "Qwen3NextForCausalLM",
    }
    architectures = [names.get(model_type, f"{model_type.title()}ForCausalLM")]
    known = set(config_class().to_dict()) | {"rope_theta"}
    given = {key: value for key, value in SMALL.items() if key in known}
    num_compared = 0
    for key in given:
        left = {k: v for k, v in given.items() if k != key}
        whole = {**config_class(**left).to_dict(), "architectures": architectures}
        try:
            found = ModelConfig.from_hf({**left, "architectures": architectures})
        except CorruptFileError as error:  # sizes are required
            name = "num_experts" if key == "num_local_experts" else key
            assert f"{key} is missing" in str(error) or f"{name} is missing" in str(error), key
            continue
        expected = ModelConfig.from_hf(whole)
        assert dataclasses.replace(found, **NO_ARITHMETIC) == dataclasses.replace(
            expected, **NO_ARITHMETIC
        ), key
        num_compared += 1
    assert num_compared >= 4


def test_a_qwen3_5_model_may_have_attention_alone() -> None:
    text = {**QWEN3_5_TEXT, "layer_types": ["full_attention"] * 64}
    config = ModelConfig.from_hf({**QWEN3_5, "text_config": text})
    assert config.linear is None and config.num_mtp_layers == 1
