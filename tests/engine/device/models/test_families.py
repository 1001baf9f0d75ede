"""Logits of every family against transformers, through a paged cache."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from paged_model import PagedModel, Row, build, load
from reference_model import load_reference

from termgen.engine.device.loader import open_checkpoint
from termgen.engine.device.loader.weights import load_weights
from termgen.engine.device.models.decoder import CausalDecoder

TinyModelDir = Callable[..., Path]
MAX_RELATIVE_ERROR = 1e-4
"""The norm of the error of one token's logits, divided by the norm of the logits."""

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-multi-head": ("llama", {"num_key_value_heads": 4}),
    "llama-multi-query": ("llama", {"num_key_value_heads": 1}),
    "llama-head-dim": ("llama", {"head_dim": 24}),
    "llama-gelu": ("llama", {"hidden_act": "gelu"}),
    "llama-theta": ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e5}}),
    "llama-linear": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}},
    ),
    "llama-llama3": ("llama", {"rope_parameters": LLAMA3}),
    "llama-yarn": ("llama", {"rope_parameters": YARN}),
    "llama-yarn-options": (
        "llama",
        {
            "rope_parameters": {
                **YARN,
                "beta_fast": 16.0,
                "beta_slow": 2.0,
                "mscale": 0.7,
                "mscale_all_dim": 1.3,
                "truncate": False,
            }
        },
    ),
    "llama-yarn-attention-factor": (
        "llama",
        {"rope_parameters": {**YARN, "attention_factor": 1.3}},
    ),
    "mistral-window": ("mistral", {"sliding_window": 7}),
    "mistral-no-window": ("mistral", {"sliding_window": None, "head_dim": 32}),
    "qwen2": ("qwen2", {}),
    "qwen2-window": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    ),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {}),
    "qwen3-tied": ("qwen3", {"tie_word_embeddings": True, "attention_bias": True}),
    "qwen3-yarn": ("qwen3", {"rope_parameters": YARN}),
    "qwen3-window": (
        "qwen3",
        {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    ),
    "gemma2": ("gemma2", {}),
    "gemma2-no-caps": (
        "gemma2",
        {"attn_logit_softcapping": None, "final_logit_softcapping": None, "attention_bias": True},
    ),
    "gemma2-untied": ("gemma2", {"tie_word_embeddings": False, "num_key_value_heads": 1}),
    "gemma3": ("gemma3_text", {}),
    "gemma3-linear": (
        "gemma3_text",
        {
            "tie_word_embeddings": True,
            "num_key_value_heads": 1,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "gemma3n": ("gemma3n_text", {}),
    "gemma3n-other-streams": (
        "gemma3n_text",
        {
            "altup_num_inputs": 3,
            "altup_active_idx": 1,
            "altup_correct_scale": False,
            "num_kv_shared_layers": 0,
            "intermediate_size": 96,
            "activation_sparsity_pattern": [0.0] * 7,
            "vocab_size_per_layer_input": 600,
            "attention_bias": True,
            "tie_word_embeddings": False,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
            },
        },
    ),
    "gemma4": ("gemma4_text", {}),
    "gemma4-experts": ("gemma4_moe", {}),
    "gemma4-plain": (
        "gemma4_text",
        {
            "num_kv_shared_layers": 0,
            "use_double_wide_mlp": False,
            "hidden_size_per_layer_input": 0,
            "attention_bias": True,
            "tie_word_embeddings": False,
            "final_logit_softcapping": None,
        },
    ),
    "gemma4-other-ropes": (
        "gemma4_moe",
        {
            "num_key_value_heads": 4,
            "num_global_key_value_heads": None,
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "proportional",
                    "rope_theta": 5e3,
                    "partial_rotary_factor": 0.5,
                    "factor": 3.0,
                },
                "sliding_attention": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
            },
        },
    ),
    "qwen3-moe": ("qwen3_moe", {}),
    "qwen3-moe-as-drawn": ("qwen3_moe", {"norm_topk_prob": False, "tie_word_embeddings": True}),
    "qwen3-moe-every-second": ("qwen3_moe", {"decoder_sparse_step": 2, "num_hidden_layers": 3}),
    "qwen3-moe-dense-layer": ("qwen3_moe", {"mlp_only_layers": [0], "attention_bias": True}),
    "qwen3-moe-window": ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 6}),
    "qwen3-moe-one-expert": ("qwen3_moe", {"num_experts": 5, "num_experts_per_tok": 1}),
    "gpt-oss": ("gpt_oss", {}),
    "gpt-oss-one-expert": ("gpt_oss", {"num_experts_per_tok": 1, "swiglu_alpha": 0.9}),
    "gpt-oss-full": (
        "gpt_oss",
        {"layer_types": ["full_attention"] * 3, "num_key_value_heads": 1, "attention_bias": False},
    ),
    "gpt-oss-default-rope": (
        "gpt_oss",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "swiglu_limit": 7.0},
    ),
    "llama4": ("llama4_text", {}),
    "llama4-one-expert": (
        "llama4_text",
        {
            "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 1,
            "num_hidden_layers": 3,
            "attention_bias": True,
            "attention_chunk_size": 5,
        },
    ),
    "llama4-plain": (
        "llama4_text",
        {
            "use_qk_norm": False,
            "attn_temperature_tuning": False,
            "moe_layers": [],
            "no_rope_layers": [0, 1, 1, 0],
            "tie_word_embeddings": True,
        },
    ),
    "llama4-small": (
        "llama4_text",
        {
            "layer_types": ["full_attention"] * 4,
            "no_rope_layers": [1, 1, 0, 1],
            "moe_layers": [],
            "tie_word_embeddings": True,
        },
    ),
    "llama4-long": (
        "llama4_text",
        {"rope_parameters": {**LLAMA3, "high_freq_factor": 1.0}, "moe_layers": [0, 3]},
    ),
    "muse": ("muse_glimmer", {}),
    "muse-biases": ("muse_glimmer", {"attention_bias": True, "num_key_value_heads": 1}),
    "muse-tied": ("muse_glimmer", {"tie_word_embeddings": True, "hidden_activation": "gelu"}),
    "muse-turned-about": (
        "muse_glimmer",
        {
            "num_hidden_layers": 3,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
            "layer_rope_theta": [5e4, 0, 5e4],
            "rope_parameters": {"rope_type": "default", "rope_theta": 5e4},
        },
    ),
    "qwen3-5": ("qwen3_5_text", {}),
    "qwen3-5-every-second": (
        "qwen3_5_text",
        {
            "full_attention_interval": 2,
            "linear_num_value_heads": 6,
            "linear_value_head_dim": 32,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3-5-ends-with-a-delta-net": (
        "qwen3_5_text",
        {
            "layer_types": ["full_attention", "linear_attention"] * 2,
            "linear_num_value_heads": 2,
            "num_key_value_heads": 1,
            "rope_parameters": {"rope_theta": 1e5, "partial_rotary_factor": 0.5},
        },
    ),
    "qwen3-5-yarn": (
        "qwen3_5_text",
        {"rope_parameters": {**YARN, "partial_rotary_factor": 0.5}},
    ),
    "qwen3-5-moe": ("qwen3_5_moe_text", {}),
    "qwen3-5-moe-one-expert": (
        "qwen3_5_moe_text",
        {"full_attention_interval": 2, "num_experts_per_tok": 1, "tie_word_embeddings": True},
    ),
    "qwen3-next": ("qwen3_next", {}),
    "qwen3-next-as-drawn": (
        "qwen3_next",
        {
            "norm_topk_prob": False,
            "mlp_only_layers": [3],
            "linear_num_value_heads": 6,
            "linear_value_head_dim": 32,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3-next-every-second": (
        "qwen3_next",
        {"decoder_sparse_step": 2, "full_attention_interval": 2, "attention_bias": True},
    ),
    "mixtral": ("mixtral", {}),
    "mixtral-window": ("mixtral", {"sliding_window": 7, "head_dim": 24}),
    "mixtral-all-experts": ("mixtral", {"num_experts_per_tok": 4, "hidden_act": "gelu"}),
}


def reference_logits(folder: Path, sequences: list[list[int]]) -> list[torch.Tensor]:
    model = load_reference(folder)
    with torch.inference_mode():
        return [model(torch.tensor([tokens])).logits[0] for tokens in sequences]


def random_sequences(rng: random.Random, lengths: tuple[int, ...]) -> list[list[int]]:
    return [[rng.randrange(512) for _ in range(length)] for length in lengths]


def random_steps(rng: random.Random, sequences: list[list[int]]) -> list[list[Row]]:
    """Split sequences into ragged steps of chunks and single tokens, decodes first in each."""
    computed = [0] * len(sequences)
    steps = []
    while any(done < len(tokens) for done, tokens in zip(computed, sequences, strict=True)):
        rows = []
        for key, tokens in enumerate(sequences):
            rest = len(tokens) - computed[key]
            if rest and rng.random() < 0.8:
                size = min(rest, rng.choice((1, 1, 1, 2, 5, 13)))
                start = computed[key]
                rows.append(Row(key, start, tokens[start : start + size]))
                computed[key] += size
        rows.sort(key=lambda row: len(row.tokens) > 1)
        if rows:
            steps.append(rows)
    return steps


def check_logits(actual: torch.Tensor, expected: torch.Tensor) -> None:
    error = (actual - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert error.max() < MAX_RELATIVE_ERROR, error


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case: str, tiny_model_dir: TinyModelDir) -> None:
    family, overrides = CASES[case]
    folder = tiny_model_dir(family, **overrides)
    rng = random.Random(case)
    print("seed", case)
    sequences = random_sequences(rng, (45, 17, 4, 30))
    expected = reference_logits(folder, sequences)
    model = load(folder)

    whole = PagedModel(model, seed=1).step([Row(k, 0, s) for k, s in enumerate(sequences)])
    for actual, reference in zip(whole, expected, strict=True):
        check_logits(actual, reference)

    paged = PagedModel(model, seed=2)
    for rows in random_steps(rng, sequences):
        for row, actual in zip(rows, paged.step(rows), strict=True):
            reference = expected[row.key][row.computed : row.computed + len(row.tokens)]
            check_logits(actual, reference)


def check_greedy(model: CausalDecoder, reference: Any, prompt: list[int], num_tokens: int) -> None:
    """Each of our tokens is transformers' choice after the same ones: by induction, all are."""
    tokens = PagedModel(model).greedy(prompt, num_tokens)
    with torch.inference_mode():
        logits = reference(torch.tensor([prompt + tokens[:-1]])).logits[0, len(prompt) - 1 :]
    assert tokens == logits.argmax(-1).tolist()


@pytest.mark.parametrize(
    "family",
    [
        "llama",
        "mistral",
        "qwen2",
        "qwen3",
        "gemma2",
        "gemma3_text",
        "gemma3n_text",
        "gemma4_text",
        "gemma4_moe",
        "qwen3_moe",
        "mixtral",
        "gpt_oss",
        "llama4_text",
        "muse_glimmer",
        "qwen3_5_text",
        "qwen3_5_moe_text",
        "qwen3_next",
    ],
)
def test_greedy_tokens_equal_transformers(family: str, tiny_model_dir: TinyModelDir) -> None:
    folder = tiny_model_dir(family)
    check_greedy(load(folder), load_reference(folder), [5, 77, 401, 9, 33], 40)


def test_rows_of_one_step_may_share_blocks(tiny_llama_dir: Path) -> None:
    """The second row's first block is written by the first row, in the same step."""
    model = load(tiny_llama_dir)
    prompt = [5, 77, 401, 9, 33, 12, 250]
    expected = PagedModel(model).step([Row(0, 0, prompt)])[0]
    paged = PagedModel(model, block_size=4)
    paged.pool.tables = {0: [3, 7], 1: [3, 9]}
    first, second = paged.step([Row(0, 0, prompt[:6]), Row(1, 4, prompt[4:])])
    check_logits(first, expected[:6])
    check_logits(second, expected[4:])


def test_no_token_asks_for_no_logits(tiny_llama_dir: Path) -> None:
    model = load(tiny_llama_dir)
    with torch.inference_mode():
        logits = model.compute_logits(torch.empty(0, model.config.hidden_size))
    assert logits.shape == (0, model.config.vocab_size) and logits.dtype is model.dtype


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types_stay_near_float32(dtype: torch.dtype, tiny_model_dir: TinyModelDir) -> None:
    folder = tiny_model_dir("qwen3")
    checkpoint = open_checkpoint(folder)
    model = build(checkpoint.config, dtype=dtype)
    load_weights(model, checkpoint)
    model.finalize()
    tokens = random_sequences(random.Random(3), (30,))[0]
    actual = PagedModel(model, dtype=dtype).step([Row(0, 0, tokens)])[0]
    expected = PagedModel(load(folder)).step([Row(0, 0, tokens)])[0]
    assert actual.dtype is torch.float32
    error = (actual - expected).std() / expected.std()
    assert error < (0.05 if dtype is torch.bfloat16 else 0.006)


def test_smollm2_greedy_tokens_equal_transformers(
    smollm2_gguf: Path, smollm2_reference: Any
) -> None:
    prompt = [1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018]
    check_greedy(load(smollm2_gguf), smollm2_reference, prompt, 40)
