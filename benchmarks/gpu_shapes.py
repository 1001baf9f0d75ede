"""Shapes of the models that the GPU benchmarks run with random weights, and their rooflines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "max_position_embeddings": 40960,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
}
_EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "norm_topk_prob": True,
}
_LLAMA3 = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "max_position_embeddings": 131072,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": {
        **_QWEN3,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": True,
    },
    "llama-3.2-1b": {
        **_LLAMA3,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "tie_word_embeddings": True,
    },
    "llama-3.1-8b": {
        **_LLAMA3,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": False,
    },
    "gemma-3-1b": {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "vocab_size": 262144,
        "hidden_size": 1152,
        "intermediate_size": 6912,
        "num_hidden_layers": 26,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
        "max_position_embeddings": 32768,
        "torch_dtype": "bfloat16",
    },
    "qwen3-30b-a3b": {  # 57 GiB of weights in a 16-bit type
        **_QWEN3,
        **_EXPERTS,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "tie_word_embeddings": False,
    },
}
READ_BYTES_PER_SECOND = 3.0e12
"""Sustained read rate of one H100; the floor below divides by it."""


def write_config(folder: Path, name: str) -> Path:
    """A model folder that only holds config.json."""
    target = folder / name
    target.mkdir(parents=True, exist_ok=True)
    (target / "config.json").write_text(json.dumps(MODELS[name]))
    return target


def experts_in_use(num_experts: int, chosen: int, num_tokens: int) -> float:
    """The expected number of experts in use when each token chooses at random: num_experts * (1 -
    p), where p = (1 - chosen / num_experts) ** num_tokens is the probability that no token chose
    one."""
    return num_experts * (1 - (1 - chosen / num_experts) ** num_tokens)


def floor_ms(name: str, batch_size: int, context: int, *, kv_bytes: int = 2) -> float:
    """Milliseconds to read the weights once, in a 16-bit type, and the keys and values that every
    row sees, of `kv_bytes` each. Only the experts that a batch of random choices uses on average
    count."""
    c = MODELS[name]
    hidden, inner, layers = c["hidden_size"], c["intermediate_size"], c["num_hidden_layers"]
    heads, kv_heads, dim = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
    if "num_experts" in c:
        num, chosen = c["num_experts"], c["num_experts_per_tok"]
        inner = c["moe_intermediate_size"] * experts_in_use(num, chosen, batch_size)
    layer = hidden * (heads + 2 * kv_heads) * dim + heads * dim * hidden + 3 * hidden * inner
    weights = 2 * (layers * layer + hidden * c["vocab_size"])
    # One layer in every so many sees the whole context.
    window, every = c.get("sliding_window", context), c.get("sliding_window_pattern", 1)
    seen = layers // every * context + (layers - layers // every) * min(context, window)
    kv = batch_size * seen * 2 * kv_heads * dim * kv_bytes
    return (weights + kv) / READ_BYTES_PER_SECOND * 1e3
