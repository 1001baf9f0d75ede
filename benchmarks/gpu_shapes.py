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
}
READ_BYTES_PER_SECOND = 3.0e12
"""What one H100 sustains; the floor below divides by it."""


def write_config(folder: Path, name: str) -> Path:
    """A model folder that holds nothing but config.json."""
    target = folder / name
    target.mkdir(parents=True, exist_ok=True)
    (target / "config.json").write_text(json.dumps(MODELS[name]))
    return target


def floor_ms(name: str, batch_size: int, context: int, *, kv_bytes: int = 2) -> float:
    """Milliseconds to read the weights once, in a 16-bit type, and every row's keys and values,
    of `kv_bytes` each."""
    c = MODELS[name]
    hidden, inner, layers = c["hidden_size"], c["intermediate_size"], c["num_hidden_layers"]
    heads, kv_heads, dim = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
    layer = hidden * (heads + 2 * kv_heads) * dim + heads * dim * hidden + 3 * hidden * inner
    weights = 2 * (layers * layer + hidden * c["vocab_size"])
    kv = batch_size * context * layers * 2 * kv_heads * dim * kv_bytes
    return (weights + kv) / READ_BYTES_PER_SECOND * 1e3
