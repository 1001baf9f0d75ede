"""GGUF files of Llama 4 against their source weights, and against transformers."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import gguf_llama4
import numpy as np
import pytest
import torch
from gguf_experts import Arrays, write_experts
from gguf_samples import rounded
from paged_model import PagedModel, Row, load
from reference_model import load_reference

from termgen.engine.device.loader import load_model_config, open_checkpoint
from termgen.engine.device.loader.gguf_config import llama3_factors
from termgen.errors import CorruptFileError, ModelError, UnsupportedModelError

Q = gguf.GGMLQuantizationType
# What a file has no keys for, and blocks of 32 columns.
FIXED: dict[str, Any] = {
    "no_rope_layer_interval": 4,
    "attention_chunk_size": 8192,
    "floor_scale": 8192,
    "attn_scale": 0.1,
    "intermediate_size": 64,
    "intermediate_size_mlp": 96,
    "head_dim": 32,
}
TOKENS = [random.Random(30).randrange(512) for _ in range(60)]


@pytest.fixture(scope="module")
def folder(tiny_model_dir: Callable[..., Path]) -> Path:
    return tiny_model_dir("llama4_text", **FIXED)


def write(folder: Path, path: Path, **options: Any) -> Path:
    converting = {"convert": gguf_llama4.converted, "add_keys": gguf_llama4.add_keys}
    return write_experts(folder, path, "llama4", **converting, **options)


def logits(path: Path, **options: Any) -> torch.Tensor:
    return PagedModel(load(path, **options)).step([Row(0, 0, TOKENS)])[0]


def test_the_config_is_that_of_the_source(folder: Path, tmp_path: Path) -> None:
    config = load_model_config(write(folder, tmp_path / "m.gguf"))
    assert rounded(config) == rounded(load_model_config(folder))
    many = load_model_config(
        write(folder, tmp_path / "n.gguf", keys={"interleave_moe_layer_step": 1})
    )
    assert many.moe is not None and many.moe.sparse_layers == frozenset(range(4))


def test_logits_equal_transformers(folder: Path, tmp_path: Path) -> None:
    with torch.inference_mode():
        expected = load_reference(folder)(torch.tensor([TOKENS])).logits[0]
    actual = logits(write(folder, tmp_path / "m.gguf"))
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


def test_a_small_model_equals_transformers(
    tiny_model_dir: Callable[..., Path], tmp_path: Path
) -> None:
    """MobileLLM-R1 has no experts and no chunks."""
    kinds = {"layer_types": ["full_attention"] * 4, "no_rope_layers": [1] * 4, "moe_layers": []}
    folder = tiny_model_dir("llama4_text", **FIXED, **kinds, tie_word_embeddings=True)
    keys = {"attention.sliding_window": 0, "expert_count": 0, "expert_used_count": 0}
    with torch.inference_mode():
        expected = load_reference(folder)(torch.tensor([TOKENS])).logits[0]
    actual = logits(write(folder, tmp_path / "m.gguf", keys=keys))
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("quant", [Q.Q8_0, Q.Q4_0])
def test_numbers_of_a_file_stay_what_they_are_on_a_cpu(
    quant: gguf.GGMLQuantizationType, folder: Path, tmp_path: Path
) -> None:
    """The file's numbers in 8 or 4 bits, in whatever order of rows, against the same as floats."""
    path = write(folder, tmp_path / "m.gguf", quant=quant)
    kept, floats = logits(path, quantization="int8"), logits(path)
    assert (kept - floats).norm() < 2e-3 * floats.norm(), "only scales are rounded"
    with torch.inference_mode():
        source = load_reference(folder)(torch.tensor([TOKENS])).logits[0]
    assert (floats - source).norm() > 2e-3 * source.norm(), "rounding shows"


def test_rotations_of_scout_are_found(folder: Path, tmp_path: Path) -> None:
    factors = llama3_factors(32, 500000.0, 16.0, high=1.0).astype(np.float32)
    assert set(factors.tolist()) == {1.0, 16.0}

    def extra(writer: gguf.GGUFWriter) -> None:
        writer.add_tensor("rope_freqs.weight", factors)

    rope = load_model_config(write(folder, tmp_path / "m.gguf", extra=extra)).rope
    assert (rope.type, rope.factor) == ("llama3", 16.0)
    assert rope.low_freq_factor == rope.high_freq_factor == 1.0


def test_the_larger_model_alone_does_not_normalise(folder: Path, tmp_path: Path) -> None:
    def more_experts(tensors: Arrays) -> None:
        for name in [name for name in tensors if "_exps" in name or "gate_inp" in name]:
            axis = [1] * tensors[name].ndim
            tensors[name] = np.tile(tensors[name], [22, *axis[1:]])[:128]

    keys = {"expert_count": 128}
    path = write(folder, tmp_path / "m.gguf", change=more_experts, keys=keys)
    config = load_model_config(path)
    assert not config.qk_norm and load_model_config(folder).qk_norm
    assert config.moe is not None and config.moe.num_experts == 128
    assert logits(path).isfinite().all()


@pytest.mark.parametrize(
    ("keys", "error", "said"),
    [
        (
            {"attention.sliding_window": 512},
            UnsupportedModelError,
            "sliding_window 512 is not supported",
        ),
        ({"expert_gating_func": 1}, UnsupportedModelError, "expert_gating_func 1 is not supported"),
        ({"expert_used_count": 7}, CorruptFileError, "expert_used_count is 7, but"),
        (
            {"interleave_moe_layer_step": None},
            CorruptFileError,
            "interleave_moe_layer_step is miss",
        ),
        ({"interleave_moe_layer_step": 1}, CorruptFileError, r"feed_forward.*missing|is missing"),
        ({"expert_count": None}, CorruptFileError, r"feed_forward\.up_proj\.weight is missing"),
    ],
)
def test_files_that_cannot_be_run(
    keys: dict[str, Any], error: type[ModelError], said: str, folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(error, match=said) as raised:
        open_checkpoint(write(folder, tmp_path / "m.gguf", keys=keys))
    assert "\n" not in str(raised.value)


def test_a_config_of_another_expert_size_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(CorruptFileError, match="but the configuration asks for"):
        open_checkpoint(write(folder, tmp_path / "m.gguf", keys={"expert_feed_forward_length": 32}))
