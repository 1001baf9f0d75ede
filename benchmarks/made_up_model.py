"""A tiny model and a tokenizer that need no download. Weights are random."""

from __future__ import annotations

import json
from pathlib import Path

TINY = {
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
}


def write_tiny(folder: Path) -> Path:
    """A model folder that only holds config.json."""
    target = folder / "tiny"
    target.mkdir()
    (target / "config.json").write_text(json.dumps(TINY))
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
