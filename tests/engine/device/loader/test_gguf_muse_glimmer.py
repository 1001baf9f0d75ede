"""GGUF files of Muse Glimmer against their source weights, and against transformers."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf_samples import MUSE, finish, text_weights, write_model
from paged_model import PagedModel, Row, load
from reference_model import load_reference

from termgen.engine.device.config.model_config import ModelConfig
from termgen.engine.device.config.rope_config import NO_ROPE, RopeConfig
from termgen.engine.device.loader import load_model_config, open_checkpoint
from termgen.engine.device.loader.checkpoint import load_generation_config
from termgen.errors import CorruptFileError, ModelError, UnsupportedModelError

Q = gguf.GGMLQuantizationType
Extra = Callable[[gguf.GGUFWriter], None]
LAYERS = 6
# No key of a file holds it.
SILENT = {"post_norm_eps": 1e-8, "intermediate_size": 128}


@pytest.fixture(scope="module")
def folder(tiny_model_dir: Callable[..., Path]) -> Path:
    return tiny_model_dir("muse_glimmer", **SILENT)


def write(
    folder: Path,
    path: Path,
    *,
    norms: dict[str, float | list[float]] | None = None,
    extra: Extra | None = None,
    **options: Any,
) -> Path:
    """norms: weights of those of q and k, which conversion makes up."""

    def all_keys(writer: gguf.GGUFWriter) -> None:
        writer.add_sliding_window(8)
        writer.add_sliding_window_pattern([layer not in (1, 5) for layer in range(LAYERS)])
        writer.add_logit_scale(0.6)
        writer.add_final_logit_softcapping(3.0)
        for layer in range(LAYERS):
            for part, weights in {"q": 1.7, "k": 1.0, **(norms or {})}.items():
                filled = np.broadcast_to(np.array(weights, "float32"), (32,)).copy()
                writer.add_tensor(f"blk.{layer}.attn_{part}_norm.weight", filled)
        if extra is not None:
            extra(writer)

    return write_model(folder, path, arch=MUSE, extra=all_keys, **options)


def rounded(config: ModelConfig) -> ModelConfig:
    """The file holds single precision where JSON holds double."""
    names = ("rms_norm_eps", "attention_scale", "logit_factor")
    return dataclasses.replace(config, **{n: float(np.float32(getattr(config, n))) for n in names})


def test_equals_the_model_it_was_made_from(folder: Path, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write(folder, tmp_path / "m.gguf"))
    expected = text_weights(folder)
    assert sorted(checkpoint.names()) == sorted(expected)
    for name in checkpoint.names():
        # One was added to a norm in single precision.
        atol = 1e-6 if "layernorm" in name else 0.0
        tensor = torch.from_numpy(expected[name])
        torch.testing.assert_close(checkpoint.tensor(name), tensor, rtol=0, atol=atol)
    config = checkpoint.config
    checkpoint.close()
    assert rounded(config) == rounded(load_model_config(folder))
    assert config.layer_windows == (8, None, 8, 8, 8, None)
    assert config.attention_scale == pytest.approx(1.7 * 32**-0.5)


@pytest.mark.parametrize("quant", [Q.F32, Q.Q8_0])
def test_logits_equal_transformers(
    quant: gguf.GGMLQuantizationType, folder: Path, tmp_path: Path
) -> None:
    path = write(folder, tmp_path / "m.gguf", quant=quant)
    reference = load_reference(folder)
    checkpoint = open_checkpoint(path)
    weights = {name: checkpoint.tensor(name) for name in checkpoint.names()}
    checkpoint.close()
    inside = {name: name.replace("model.", "model.language_model.", 1) for name in weights}
    read = reference.load_state_dict({inside[n]: w for n, w in weights.items()}, strict=False)
    assert not read.unexpected_keys
    assert all(name.startswith("model.vision_") for name in read.missing_keys)
    rng = random.Random(30)
    tokens = [rng.randrange(512) for _ in range(60)]
    with torch.inference_mode():
        expected = reference(torch.tensor([tokens])).logits[0]
    actual = PagedModel(load(path)).step([Row(0, 0, tokens)])[0]
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


def test_what_a_published_file_says(tmp_path: Path) -> None:
    """One number in the place of the list, and what has no key as llama.cpp takes it to be."""
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", MUSE)
    writer.add_block_count(52)
    writer.add_context_length(131072)
    writer.add_embedding_length(6656)
    writer.add_feed_forward_length(19968)
    writer.add_head_count(32)
    writer.add_head_count_kv(2)
    writer.add_key_length(128)
    writer.add_value_length(128)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(5e5)
    writer.add_sliding_window(2048)
    writer.add_uint32(f"{MUSE}.attention.sliding_window_pattern", 4)
    writer.add_logit_scale(26**-0.5)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_eot_token_id(2)
    writer.add_uint32("tokenizer.ggml.eom_token_id", 3)
    for name in ("token_embd.weight", "output.weight"):
        writer.add_tensor(name, np.ones((4, 6656), "float32"))
    for layer in range(52):
        for part, weight in (("q", 3.87), ("k", 1.0)):
            filled = np.full(128, weight, "float32")
            writer.add_tensor(f"blk.{layer}.attn_{part}_norm.weight", filled)
    finish(writer)
    config = load_model_config(tmp_path / "m.gguf")
    assert config.layer_windows == (2048, 2048, 2048, None) * 13
    turning = RopeConfig(theta=5e5)
    assert config.layer_ropes == (turning, turning, turning, NO_ROPE) * 13
    assert (config.post_norm_eps, config.logit_softcap) == (1e-8, 30.0)
    assert config.logit_factor == pytest.approx(26**-0.5)
    assert config.attention_scale == pytest.approx(3.87 * 128**-0.5)
    assert not config.tie_word_embeddings and config.eos_token_ids == (1,)
    assert load_generation_config(tmp_path / "m.gguf")["eos_token_id"] == [1, 2]


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        (
            {"norms": {"q": list(range(1, 33))}},
            UnsupportedModelError,
            "the norms of q have weights",
        ),
        ({"norms": {"k": 1.5}}, UnsupportedModelError, "the norms of k have weights"),
        ({"norms": {"q": -1.7}}, CorruptFileError, "qk_scale_factor must be above 0"),
        ({"norms": {"q": float("inf")}}, CorruptFileError, "qk_scale_factor must be finite"),
        (
            {"extra": lambda w: w.add_attn_logit_softcapping(50.0)},
            UnsupportedModelError,
            "attn_logit_softcapping 50.0 is not supported",
        ),
        (
            {"leave_out": frozenset({"blk.3.attn_gate.weight"})},
            CorruptFileError,
            r"lacks tensor model\.layers\.3\.self_attn\.gate_proj\.weight",
        ),
    ],
)
def test_what_cannot_be_run_is_named(
    options: dict[str, Any],
    error: type[ModelError],
    said: str,
    folder: Path,
    tmp_path: Path,
) -> None:
    with pytest.raises(error, match=said) as raised:
        load(write(folder, tmp_path / "m.gguf", **options))
    assert "\n" not in str(raised.value)
