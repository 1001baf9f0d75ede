"""Gemma 3n's config.json in the forms in which it is found."""

from __future__ import annotations

import json
from typing import Any

import pytest
from transformers import CONFIG_MAPPING, AutoConfig

from termgen.engine.device.config.cache_spec import CacheSpec
from termgen.engine.device.config.layer_differences import PerLayerInputs, ResidualStreams
from termgen.engine.device.config.model_config import ModelConfig
from termgen.engine.device.config.rope_config import RopeConfig
from termgen.errors import CorruptFileError, UnsupportedModelError

pytestmark = pytest.mark.skipif(
    "gemma3n_text" not in CONFIG_MAPPING, reason="this release of transformers has no gemma3n"
)
# The small one, in the keys of its time.
TEXT: dict[str, Any] = {
    "model_type": "gemma3n_text",
    "activation_sparsity_pattern": [0.95] * 10 + [0.0] * 20,
    "altup_num_inputs": 4,
    "final_logit_softcapping": 30.0,
    "head_dim": 256,
    "hidden_size": 2048,
    "intermediate_size": [8192] * 30,
    "layer_types": [*["sliding_attention"] * 4, "full_attention"] * 6,
    "num_attention_heads": 8,
    "num_hidden_layers": 30,
    "num_key_value_heads": 2,
    "num_kv_shared_layers": 10,
    "rope_local_base_freq": 10000.0,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "sliding_window": 512,
    "vocab_size": 262400,
    "vocab_size_per_layer_input": 262144,
}
WHOLE: dict[str, Any] = {
    "architectures": ["Gemma3nForConditionalGeneration"],
    "model_type": "gemma3n",
    "dtype": "bfloat16",
    "eos_token_id": [1, 106],
    "text_config": TEXT,
    "vision_config": {"model_type": "gemma3n_vision"},
    "audio_config": {"model_type": "gemma3n_audio"},
}
ALONE = {"architectures": ["Gemma3nForCausalLM"]}


def test_the_small_model() -> None:
    config = ModelConfig.from_hf(WHOLE)
    assert config.eos_token_ids == (1, 106) and config.torch_dtype == "bfloat16"
    assert config.attention_scale == 1.0 and config.logit_softcap == 30.0 and config.qk_norm
    assert config.tie_word_embeddings and config.hidden_act == "gelu_tanh"
    assert config.per_layer_inputs == PerLayerInputs(vocab_size=262144, size=256)
    assert config.streams == ResidualStreams(num=4, active=0, has_output_scale=True, laurel_rank=64)
    near, far = RopeConfig(theta=1e4), RopeConfig(theta=1e6)
    assert config.layer_ropes[3:6] == (near, far, near)
    own = [spec for spec in config.layer_caches if spec is not None]
    assert own == [*[CacheSpec(2, 256, 512)] * 4, CacheSpec(2, 256, None)] * 4
    assert [config.kv_source(i) for i in (0, 19, 20, 24, 28, 29)] == [0, 19, 18, 19, 18, 19]
    assert [config.of_layer(i).gate_sparsity for i in (0, 9, 10)] == [0.95, 0.95, 0.0]
    assert config.of_layer(29).num_kv_heads == 0 and config.of_layer(29).intermediate_size == 8192
    assert config.weight_prefixes[-1] == ("", None)
    assert 4.2e9 < config.num_parameters < 4.6e9  # half of them in the second embedding


def test_the_form_that_transformers_writes_says_the_same() -> None:
    written = json.loads(AutoConfig.for_model(**TEXT).to_json_string(use_diff=False))
    assert "rope_parameters" in written and "rope_theta" not in written
    assert ModelConfig.from_hf({**written, **ALONE}) == ModelConfig.from_hf({**TEXT, **ALONE})


@pytest.mark.parametrize(
    "few", [{}, {"num_hidden_layers": 6, "num_kv_shared_layers": 1, "intermediate_size": 512}]
)
def test_what_is_left_out_is_what_transformers_fills_in(few: dict[str, int]) -> None:
    written = CONFIG_MAPPING["gemma3n_text"](**few).to_dict()
    assert ModelConfig.from_hf({**few, **ALONE}) == ModelConfig.from_hf({**written, **ALONE})


def test_layers_of_unequal_sizes() -> None:
    changed = {**TEXT, "intermediate_size": [8192] * 20 + [4096] * 10}
    config = ModelConfig.from_hf({**changed, **ALONE})
    assert [config.of_layer(i).intermediate_size for i in (19, 20)] == [8192, 4096]
    fewer = ModelConfig.from_hf({**TEXT, **ALONE}).num_parameters - config.num_parameters
    assert fewer == 10 * 3 * 4096 * 2048


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"intermediate_size": [8192] * 29}, CorruptFileError, "intermediate_size must be a size"),
        ({"intermediate_size": [8192] * 29 + ["x"]}, CorruptFileError, "config.intermediate_size"),
        ({"layer_types": ["full_attention"]}, CorruptFileError, "layer_types must be a list of 30"),
        ({"layer_types": ["chunked"] * 30}, UnsupportedModelError, "layer_types has 'chunked'"),
        ({"activation_sparsity_pattern": 0.95}, CorruptFileError, "sparsity_pattern must be a lis"),
        ({"activation_sparsity_pattern": [1.0] * 30}, CorruptFileError, "0 to below 1, not 1.0"),
        ({"activation_sparsity_pattern": ["x"] * 30}, CorruptFileError, "0 to below 1, not 'x'"),
        ({"altup_num_inputs": 1}, CorruptFileError, "altup_num_inputs must be between 2"),
        ({"altup_active_idx": 4}, CorruptFileError, "altup_active_idx must be between 0 and 3"),
        ({"laurel_rank": 0}, CorruptFileError, "laurel_rank"),
        ({"num_kv_shared_layers": 27}, CorruptFileError, "leaves no layer of full_attention"),
        ({"hidden_size_per_layer_input": 0}, CorruptFileError, "hidden_size_per_layer_input"),
        ({"use_bidirectional_attention": True}, UnsupportedModelError, "use_bidirectional_atten"),
        ({"rope_scaling": {"type": "linear"}}, UnsupportedModelError, "rope_scaling.type is an"),
        ({"tie_word_embeddings": False}, CorruptFileError, "tie_word_embeddings is True, which"),
    ],
)
def test_a_config_that_cannot_be_run(
    changes: dict[str, Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said) as raised:
        text = {**TEXT, **changes}
        ModelConfig.from_hf({**WHOLE, "tie_word_embeddings": True, "text_config": text})
    assert "\n" not in str(raised.value)
