"""GGUF files of Gemma 2 against their source weights, and against transformers."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf_samples import finish, write_model
from paged_model import PagedModel, Row, load
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from termgen.engine.device.loader import load_model_config, open_checkpoint

# No key of a file holds it: scores are divided by the root of the head size.
SILENT = {"query_pre_attn_scalar": 32}


@pytest.fixture(scope="module")
def folder(tiny_model_dir: Callable[..., Path]) -> Path:
    return tiny_model_dir("gemma2", **SILENT)


def write(folder: Path, path: Path) -> Path:
    def keys(writer: gguf.GGUFWriter) -> None:
        writer.add_sliding_window(8)
        writer.add_attn_logit_softcapping(4.0)
        writer.add_final_logit_softcapping(3.0)

    return write_model(folder, path, arch="gemma2", extra=keys)


def test_equals_the_model_it_was_made_from(folder: Path, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write(folder, tmp_path / "m.gguf"))
    expected = load_file(folder / "model.safetensors")
    assert sorted(checkpoint.names()) == sorted(expected)
    for name in checkpoint.names():
        # One was added to a norm in single precision.
        atol = 1e-6 if "norm" in name else 0.0
        torch.testing.assert_close(checkpoint.tensor(name), expected[name], rtol=0, atol=atol)
    config, original = checkpoint.config, load_model_config(folder)
    checkpoint.close()
    assert config.rms_norm_eps == pytest.approx(original.rms_norm_eps, rel=1e-6)
    assert dataclasses.replace(config, rms_norm_eps=original.rms_norm_eps) == original
    assert (config.attention_softcap, config.logit_softcap) == (4.0, 3.0)
    assert config.layer_windows == (8, None, 8, None)


def test_logits_equal_transformers(folder: Path, tmp_path: Path) -> None:
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    rng = random.Random(2)
    tokens = [rng.randrange(512) for _ in range(60)]
    with torch.inference_mode():
        expected = reference(torch.tensor([tokens])).logits[0]
    actual = PagedModel(load(write(folder, tmp_path / "m.gguf"))).step([Row(0, 0, tokens)])[0]
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("layers", "scalar"), [(26, 128), (46, 144)])
def test_what_a_file_without_keys_means(layers: int, scalar: int, tmp_path: Path) -> None:
    """The 27B model alone divides scores by another number than the head size."""
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "gemma2")
    writer.add_block_count(layers)
    writer.add_context_length(8192)
    writer.add_embedding_length(4608)
    writer.add_feed_forward_length(36864)
    writer.add_head_count(32)
    writer.add_head_count_kv(16)
    writer.add_key_length(128)
    writer.add_value_length(128)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_tensor("token_embd.weight", np.ones((4, 4608), "float32"))
    finish(writer)
    config = load_model_config(tmp_path / "m.gguf")
    assert config.attention_scale == scalar**-0.5
    assert (config.attention_softcap, config.logit_softcap) == (50.0, 30.0)
    assert config.layer_windows[:3] == (4096, None, 4096)
