"""Write small GGUF files for tests, following the rules of llama.cpp's converter."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.numpy import load_file

from termgen.engine.device.config.model_config import ModelConfig
from termgen.engine.device.loader.gguf_checkpoint import GGUFCheckpoint

_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_GEMMA_LAYER = {
    **_LAYER,
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_MUSE_LAYER = {**_GEMMA_LAYER, "self_attn.gate_proj": "attn_gate"}
GEMMAS = ("gemma2", "gemma3")
MUSE = "muse-glimmer"
_TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def gguf_name(name: str, arch: str = "llama") -> str:
    stem, _, suffix = name.rpartition(".")
    if stem in _TOP:
        return f"{_TOP[stem]}.{suffix}"
    _, _, layer, part = stem.split(".", 3)
    parts = _MUSE_LAYER if arch == MUSE else _GEMMA_LAYER if arch in GEMMAS else _LAYER
    return f"blk.{layer}.{parts[part]}.{suffix}"


def permute(weights: np.ndarray, num_heads: int) -> np.ndarray:
    """The converter's permutation of q and k in llama models."""
    halves = weights.reshape(num_heads, 2, weights.shape[0] // num_heads // 2, *weights.shape[1:])
    return halves.swapaxes(1, 2).reshape(weights.shape)


def write_model(
    folder: Path,
    path: Path,
    *,
    arch: str,
    quant: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    quants: Mapping[str, gguf.GGMLQuantizationType] | None = None,
    extra: Callable[[gguf.GGUFWriter], None] | None = None,
    leave_out: frozenset[str] = frozenset(),
) -> Path:
    """Convert a folder with config.json and one model.safetensors to GGUF.

    quants: types of the matrices with a part of the name, such as v_proj, that differ from `quant`.
    """
    config = text_config(folder)
    writer = start(path, arch, config)
    if arch in ("qwen3", MUSE, *GEMMAS):
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    if extra is not None:
        extra(writer)
    for name, weights in text_weights(folder).items():
        if gguf_name(name, arch) not in leave_out:
            types = [each for part, each in (quants or {}).items() if part in name]
            _add_tensor(writer, name, weights, arch, types[0] if types else quant, config)
    finish(writer)
    return path


def text_config(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config.get("text_config", config)


def start(path: Path, arch: str, config: dict[str, Any]) -> gguf.GGUFWriter:
    """A writer with the keys that all architectures have."""
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    ropes = config["rope_parameters"]
    writer.add_rope_freq_base(ropes.get("full_attention", ropes)["rope_theta"])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    return writer


def text_weights(folder: Path) -> dict[str, np.ndarray]:
    """The tensors of the model, without those of a part that sees images."""
    return {
        name.replace("model.language_model.", "model."): weights
        for name, weights in load_file(folder / "model.safetensors").items()
        if not name.startswith("model.vision_")
    }


def _add_tensor(
    writer: gguf.GGUFWriter,
    name: str,
    weights: np.ndarray,
    arch: str,
    quant: gguf.GGMLQuantizationType,
    config: dict[str, Any],
) -> None:
    if arch in ("llama", MUSE) and ".q_proj." in name:
        weights = permute(weights, config["num_attention_heads"])
    if arch in ("llama", MUSE) and ".k_proj." in name:
        weights = permute(weights, config["num_key_value_heads"])
    if arch in GEMMAS and name.endswith("norm.weight"):
        weights = weights + 1
    if arch == MUSE and name.endswith("layernorm.weight"):
        weights = weights + 1
    weights = np.ascontiguousarray(weights)
    name = gguf_name(name, arch)
    if weights.ndim == 1:
        writer.add_tensor(name, weights)
    else:
        writer.add_tensor(name, gguf.quants.quantize(weights, quant), raw_dtype=quant)


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def rounded(config: ModelConfig) -> ModelConfig:
    """A config as a file holds it: single precision where JSON holds double."""
    eps = float(np.float32(config.rms_norm_eps))
    return dataclasses.replace(config, rms_norm_eps=eps)


def check_tensors(
    checkpoint: GGUFCheckpoint,
    expected: Mapping[str, torch.Tensor],
    quant: gguf.GGMLQuantizationType,
    *,
    loose: tuple[str, ...] = (),
) -> None:
    """The checkpoint has these tensors, in parts as a whole: equal, or within a step of 8 bits.
    loose: ends of names whose values conversion computes in single precision."""
    assert sorted(checkpoint.names()) == sorted(expected)
    for name, reference in expected.items():
        actual = checkpoint.tensor(name)
        assert checkpoint.shape(name) == tuple(actual.shape), name
        assert torch.equal(torch.cat(list(checkpoint.parts(name))), actual), name
        if quant is gguf.GGMLQuantizationType.F32 or actual.dim() == 1:
            atol = 1e-6 if name.endswith(loose) else 0.0
            torch.testing.assert_close(actual, reference, rtol=0, atol=atol)
        else:
            # A block's largest number is 127 steps; a row in another place would be far off.
            error = (actual - reference).abs().amax() / reference.abs().amax()
            assert error < 1 / 200, name
