"""Heads with random weights that draft for a model of `made_up_models`, in the shapes of real ones.

An EAGLE-3 head has one layer like those of its target, and a vocabulary of 32,000 tokens. A DFlash
head has five of Qwen3's kind and blocks of 16, as published ones.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

EAGLE_VOCABULARY = 32_000
DFLASH_LAYERS, DFLASH_BLOCK = 5, 16


def _of_layer(config: dict[str, Any], width: int) -> dict[str, tuple[int, ...]]:
    """Matrices of a layer whose attention reads `width` numbers."""
    hidden, inner, heads = (
        config[key] for key in ("hidden_size", "intermediate_size", "num_attention_heads")
    )
    dim = config.get("head_dim") or hidden // heads
    keys = config["num_key_value_heads"] * dim
    return {
        "self_attn.q_proj": (heads * dim, width),
        "self_attn.k_proj": (keys, width),
        "self_attn.v_proj": (keys, width),
        "self_attn.o_proj": (hidden, heads * dim),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }


def write_eagle3(target: Path, folder: Path) -> Path:
    config = json.loads((target / "config.json").read_text())
    hidden = config["hidden_size"]
    config |= {
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "draft_vocab_size": EAGLE_VOCABULARY,
        "tie_word_embeddings": False,
    }
    shapes = {f"midlayer.{name}": s for name, s in _of_layer(config, 2 * hidden).items()}
    shapes |= {
        "midlayer.hidden_norm": (hidden,),
        "fc": (hidden, 3 * hidden),
        "lm_head": (EAGLE_VOCABULARY, hidden),
        "norm": (hidden,),
    }
    return _write(folder, config, shapes, d2t=torch.zeros(EAGLE_VOCABULARY, dtype=torch.int64))


def write_dflash(target: Path, folder: Path) -> Path:
    config = json.loads((target / "config.json").read_text())
    hidden, num_layers = config["hidden_size"], config["num_hidden_layers"]
    dim = config.get("head_dim") or hidden // config["num_attention_heads"]
    read = [1 + layer * (num_layers - 4) // (DFLASH_LAYERS - 1) for layer in range(DFLASH_LAYERS)]
    config |= {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "num_hidden_layers": DFLASH_LAYERS,
        "num_target_layers": num_layers,
        "head_dim": dim,
        "block_size": DFLASH_BLOCK,
        "dflash_config": {"target_layer_ids": read, "mask_token_id": 7},
    }
    shapes: dict[str, tuple[int, ...]] = {"fc": (hidden, len(read) * hidden)}
    shapes |= {"hidden_norm": (hidden,), "norm": (hidden,)}
    of_layer = _of_layer(config, hidden)
    of_layer |= {"self_attn.q_norm": (dim,), "self_attn.k_norm": (dim,)}
    for layer in range(DFLASH_LAYERS):
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in of_layer.items()}
    return _write(folder, config, shapes)


def _write(
    folder: Path, config: dict[str, Any], shapes: dict[str, tuple[int, ...]], **more: torch.Tensor
) -> Path:
    tensors = {
        f"{name}.weight": torch.randn(shape, dtype=torch.bfloat16) * shape[-1] ** -0.5
        for name, shape in shapes.items()
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file({**tensors, **more}, folder / "model.safetensors")
    return folder


HEADS: dict[str, Callable[[Path, Path], Path]] = {"eagle3": write_eagle3, "dflash": write_dflash}
"""What writes the head of each method."""
