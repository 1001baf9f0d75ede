"""Models with random weights that need no download: a tiny one, and shapes of real ones with their
rooflines."""

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
_MISTRAL = {
    **_LLAMA3,
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "vocab_size": 32768,
    "rope_theta": 1000000.0,
    "max_position_embeddings": 32768,
    "sliding_window": None,
}
_GEMMA3 = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "vocab_size": 262208,
    "sliding_window": 1024,
    "torch_dtype": "bfloat16",
}


def _shape(
    hidden: int, inner: int, layers: int, *, heads: tuple[int, int, int], tied: bool
) -> dict[str, Any]:
    """heads: of queries, of keys, and values of each."""
    return {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "head_dim": heads[2],
        "tie_word_embeddings": tied,
    }


MODELS: dict[str, dict[str, Any]] = {
    "tiny": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 2048,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 16384,
        "hidden_act": "silu",
        "torch_dtype": "float32",
    },
    "qwen3-0.6b": _QWEN3 | _shape(1024, 3072, 28, heads=(16, 8, 128), tied=True),
    "llama-3.2-1b": _LLAMA3 | _shape(2048, 8192, 16, heads=(32, 8, 64), tied=True),
    "llama-3.1-8b": _LLAMA3 | _shape(4096, 14336, 32, heads=(32, 8, 128), tied=False),
    "qwen3-4b": _QWEN3 | _shape(2560, 9728, 36, heads=(32, 8, 128), tied=True),
    "mistral-7b": _MISTRAL | _shape(4096, 14336, 32, heads=(32, 8, 128), tied=False),
    "gemma-3-4b": _GEMMA3 | _shape(2560, 10240, 34, heads=(8, 4, 256), tied=True),
}
READ_BYTES_PER_SECOND = 3.0e12
"""Sustained read rate of one H100; the floor below divides by it."""


REAL = ("qwen3-0.6b", "llama-3.2-1b", "llama-3.1-8b")
"""Those whose products are in the table that comes with termgen."""
OTHERS = ("qwen3-4b", "mistral-7b", "gemma-3-4b")


def write_config(folder: Path, name: str = "tiny", *, vocab: int = 0, **fields: Any) -> Path:
    """A model folder that holds config.json, and a tokenizer of `vocab` tokens if given."""
    target = folder / name
    target.mkdir(parents=True, exist_ok=True)
    fields |= {"vocab_size": vocab} if vocab else {}
    (target / "config.json").write_text(json.dumps({**MODELS[name], **fields}))
    if vocab:
        write_tokenizer(target, vocab)
    return target


def write_tokenizer(folder: Path, vocab: int) -> None:
    """Bytes and made-up words, one for every id, so that any token has a text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*alphabet, *(f"Ġw{index}" for index in range(vocab - len(alphabet) - 1)), "</s>"]
    tokenizer = Tokenizer(models.BPE({word: index for index, word in enumerate(words)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))


def floor_ms(name: str, batch_size: int, context: int, *, kv_bytes: int = 2) -> float:
    """Milliseconds to read the weights once, in a 16-bit type, and the keys and values that every
    row sees, of `kv_bytes` each."""
    c = MODELS[name]
    hidden, inner, layers = c["hidden_size"], c["intermediate_size"], c["num_hidden_layers"]
    heads, kv_heads, dim = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
    layer = hidden * (heads + 2 * kv_heads) * dim + heads * dim * hidden + 3 * hidden * inner
    weights = 2 * (layers * layer + hidden * c["vocab_size"])
    kv = batch_size * layers * context * 2 * kv_heads * dim * kv_bytes
    return (weights + kv) / READ_BYTES_PER_SECOND * 1e3
