"""GGUF files of Gemma 3n against their source weights, and against transformers."""

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
from gguf_experts import Arrays
from gguf_gemmas import write_gemma3n
from paged_model import PagedModel, Row, load
from reference_model import load_reference
from safetensors.torch import load_file
from transformers import CONFIG_MAPPING

from termgen.engine.device.config.model_config import ModelConfig
from termgen.engine.device.loader import load_model_config, open_checkpoint
from termgen.errors import CorruptFileError, ModelError, UnsupportedModelError

pytestmark = pytest.mark.skipif(
    "gemma3n_text" not in CONFIG_MAPPING, reason="this release of transformers has no gemma3n"
)
Q = gguf.GGMLQuantizationType
# Rows of whole blocks of 32.
WHOLE_BLOCKS = {
    "intermediate_size": [96, 96, 64, 96, 96, 128, 96],
    "hidden_size_per_layer_input": 32,
    "laurel_rank": 32,
}
NUM_ROWS = 412
"""Tokens that have a row in the second embedding; conversion adds rows of zeros for the others."""


@pytest.fixture(scope="module")
def folder(tiny_model_dir: Callable[..., Path]) -> Path:
    return tiny_model_dir("gemma3n_text", **WHOLE_BLOCKS)


def comparable(config: ModelConfig) -> ModelConfig:
    """Without what a file does not have exactly: numbers in double precision, and how many rows of
    the second embedding are not padding."""
    inputs, differences = config.per_layer_inputs, config.differences
    assert inputs is not None
    parts = tuple(round(part, 6) for part in differences.gate_sparsities)
    return dataclasses.replace(
        config,
        rms_norm_eps=float(np.float32(config.rms_norm_eps)),
        per_layer_inputs=dataclasses.replace(inputs, vocab_size=512),
        differences=dataclasses.replace(differences, gate_sparsities=parts),
    )


@pytest.mark.parametrize("quant", [Q.F32, Q.Q8_0])
def test_equals_the_model_it_was_made_from(
    quant: gguf.GGMLQuantizationType, folder: Path, tmp_path: Path
) -> None:
    checkpoint = open_checkpoint(write_gemma3n(folder, tmp_path / "m.gguf", quant=quant))
    expected = load_file(folder / "model.safetensors")
    assert sorted(checkpoint.names()) == sorted(expected)
    for name, reference in expected.items():
        actual = checkpoint.tensor(name)
        assert checkpoint.shape(name) == tuple(actual.shape), name
        assert torch.equal(torch.cat(list(checkpoint.parts(name))), actual), name
        if "per_layer" in name and len(actual) > len(reference):
            assert not actual[len(reference) :].any()
            actual = actual[: len(reference)]
        if quant is Q.F32 or actual.dim() == 1:
            assert torch.equal(actual, reference), name
        else:
            error = (actual - reference).abs().amax() / reference.abs().amax()
            assert error < 1 / 200, name
    if quant is Q.F32:
        assert comparable(checkpoint.config) == comparable(load_model_config(folder))
        assert checkpoint.nbytes == sum(
            tensor.nbytes + ("embed_tokens_per_layer" in name) * 4 * (512 - NUM_ROWS) * 7 * 32
            for name, tensor in expected.items()
        )
    checkpoint.close()


def test_logits_equal_transformers(folder: Path, tmp_path: Path) -> None:
    rng = random.Random(50)
    tokens = [rng.randrange(NUM_ROWS) for _ in range(60)]
    with torch.inference_mode():
        expected = load_reference(folder)(torch.tensor([tokens])).logits[0]
    path = write_gemma3n(folder, tmp_path / "m.gguf")
    actual = PagedModel(load(path)).step([Row(0, 0, tokens)])[0]
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


def test_what_a_file_without_keys_means(
    tmp_path: Path, tiny_model_dir: Callable[..., Path]
) -> None:
    """What llama.cpp takes it to be."""
    folder = tiny_model_dir(
        "gemma3n_text",
        num_hidden_layers=22,
        num_kv_shared_layers=2,
        intermediate_size=96,
        layer_types=None,
        activation_sparsity_pattern=None,
        final_logit_softcapping=30.0,
    )
    keys = {
        "altup.num_inputs": None,
        "altup.active_idx": None,
        "activation_sparsity_scale": None,
        "attention.shared_kv_layers": None,
        "attention.sliding_window_pattern": None,
        "final_logit_softcapping": None,
        "rope.freq_base": None,
        "rope.freq_base_swa": None,
    }
    path = write_gemma3n(folder, tmp_path / "m.gguf", keys=keys)
    assert comparable(load_model_config(path)) == comparable(load_model_config(folder))


def without(name: str) -> Callable[[Arrays], None]:
    return lambda tensors: [tensors.pop(name)] and None


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        (
            {"keys": {"altup.active_idx": 4}},
            CorruptFileError,
            r"gemma3n\.altup\.active_idx is 4, but gemma3n\.altup\.num_inputs is 4",
        ),
        (
            {"keys": {"altup.num_inputs": 3}},
            CorruptFileError,
            r"altup_proj\.weight \[3, 64, 64\]: not the sizes that the metadata asks for",
        ),
        (
            {"keys": {"activation_sparsity_scale": [0.5] * 6}},
            CorruptFileError,
            "activation_sparsity_scale is not a list of 7 numbers",
        ),
        (
            {"keys": {"activation_sparsity_scale": [float("inf")] * 7}},
            CorruptFileError,
            "activation_sparsity_scale has inf, which",
        ),
        (
            {"keys": {"attention.shared_kv_layers": 5}},
            CorruptFileError,
            "shared_kv_layers is 5, which leaves no layer of full_attention",
        ),
        (
            {"keys": {"embedding_length_per_layer_input": 16}},
            CorruptFileError,
            r"embed_tokens_per_layer\.weight is \[512, 224\], but .* \[512, 112\]",
        ),
        ({"keys": {"feed_forward_length": None}}, CorruptFileError, "feed_forward_length is miss"),
        ({"keys": {"attention.sliding_window": None}}, CorruptFileError, "sliding_window is miss"),
        ({"keys": {"attention.scale": 0.25}}, UnsupportedModelError, "attention.scale 0.25"),
        (
            {"change": without("blk.0.laurel_l.weight")},
            CorruptFileError,
            r"the tensor blk\.0\.laurel_l\.weight is missing",
        ),
        (
            {"change": without("altup_unembd_proj.weight")},
            CorruptFileError,
            r"lacks tensor model\.altup_unembed_projections\.0\.weight and 2 more",
        ),
        (
            {"change": without("blk.4.altup_correct_scale.weight")},
            CorruptFileError,
            r"lacks tensor model\.layers\.4\.altup\.correct_output_scale",
        ),
        (
            {"change": lambda t: t.update({"blk.1.layer_output_scale.weight": np.ones(1, "f")})},
            UnsupportedModelError,
            r"'blk\.1\.layer_output_scale\.weight' belongs to no supported part",
        ),
    ],
)
def test_what_cannot_be_run_is_named(
    options: dict[str, Any], error: type[ModelError], said: str, folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(error, match=said) as raised:
        load(write_gemma3n(folder, tmp_path / "m.gguf", **options))
    assert "\n" not in str(raised.value)
