"""Models with random weights that need no download: a tiny one, and shapes of real ones."""

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
REAL = ("qwen3-0.6b", "llama-3.2-1b", "llama-3.1-8b")
"""Those whose products are in the table that comes with termgen."""
OTHERS = ("qwen3-4b", "mistral-7b", "gemma-3-4b")
_GEMMA4 = {
    "head_dim": 256, "global_head_dim": 512, "sliding_window": 1024, "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0, "final_logit_softcapping": 30.0,
    "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 10,
}  # fmt: skip
LARGE: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt-oss-20b": (
        "gpt_oss", "GptOssForCausalLM", {"num_hidden_layers": 24, "num_local_experts": 32},
    ),
    "qwen3.6-27b": (
        "qwen3_5_text", "Qwen3_5ForCausalLM",
        _shape(5120, 17408, 64, heads=(24, 4, 256), tied=False) | {"linear_num_value_heads": 48},
    ),
    "qwen3-30b-a3b": (
        "qwen3_moe", "Qwen3MoeForCausalLM",
        _shape(2048, 6144, 48, heads=(32, 4, 128), tied=False) | {"norm_topk_prob": True},
    ),
    "qwen3.6-35b-a3b": ("qwen3_5_moe_text", "Qwen3_5MoeForCausalLM", {}),
    "gemma-4-31b": (
        "gemma4_text", "Gemma4ForCausalLM",
        _GEMMA4 | _shape(5376, 21504, 60, heads=(32, 16, 256), tied=True)
        | {"num_global_key_value_heads": 4},
    ),
    "gemma-4-26b-a4b": (
        "gemma4_text", "Gemma4ForCausalLM",
        _GEMMA4 | _shape(2816, 2112, 30, heads=(16, 8, 256), tied=True)
        | {"num_global_key_value_heads": 2, "layer_types": _GEMMA4["layer_types"][:30]}
        | {"enable_moe_block": True, "num_experts": 128, "top_k_experts": 8}
        | {"moe_intermediate_size": 704},
    ),
    "muse-glimmer-30b": ("muse_glimmer", "MuseGlimmerForConditionalGeneration", {}),
}  # fmt: skip
"""transformers' name of the configuration, the class, and what differs from transformers' own."""


def write_config(folder: Path, name: str = "tiny", *, vocab: int = 0, **fields: Any) -> Path:
    """A model folder that holds config.json, and a tokenizer of `vocab` tokens if given."""
    target = folder / name
    target.mkdir(parents=True, exist_ok=True)
    fields |= {"vocab_size": vocab} if vocab else {}
    if name in LARGE:
        from transformers import AutoConfig

        kind, architecture, differences = LARGE[name]
        config = AutoConfig.for_model(kind, dtype="bfloat16", **differences, **fields)
        found = {**config.to_dict(), "architectures": [architecture]}
    else:
        found = {**MODELS[name], **fields}
    (target / "config.json").write_text(json.dumps(found))
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
