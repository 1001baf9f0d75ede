"""GGUF files of Gemma 4 against their source weights, and against transformers."""

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
from gguf_gemmas import write_gemma4
from gguf_samples import check_tensors, rounded
from paged_model import PagedModel, Row, load
from reference_model import load_reference
from safetensors.torch import load_file
from transformers import CONFIG_MAPPING

from termgen.engine.device.loader import gguf_checkpoint, load_model_config, open_checkpoint
from termgen.errors import CorruptFileError, ModelError, UnsupportedModelError

pytestmark = pytest.mark.skipif(
    "gemma4_text" not in CONFIG_MAPPING, reason="this release of transformers has no gemma4"
)
Q = gguf.GGMLQuantizationType
# Rows of whole blocks of 32.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "small": ("gemma4_text", {"intermediate_size": 96, "hidden_size_per_layer_input": 32}),
    "sparse": ("gemma4_moe", {"intermediate_size": 96, "moe_intermediate_size": 32}),
}
both = pytest.mark.parametrize("case", CASES)
Folder = Callable[[str], Path]


@pytest.fixture(scope="module")
def folder_of(tiny_model_dir: Callable[..., Path]) -> Folder:
    return lambda case: tiny_model_dir(CASES[case][0], **CASES[case][1])


@both
@pytest.mark.parametrize("quant", [Q.F32, Q.Q8_0])
def test_equals_the_model_it_was_made_from(
    case: str,
    quant: gguf.GGMLQuantizationType,
    folder_of: Folder,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = folder_of(case)
    checkpoint = open_checkpoint(write_gemma4(folder, tmp_path / "m.gguf", quant=quant))
    expected = load_file(folder / "model.safetensors")
    monkeypatch.setattr(gguf_checkpoint, "CHUNK_ELEMENTS", 5 * 64)
    check_tensors(checkpoint, expected, quant)
    if quant is Q.F32:
        assert checkpoint.config == rounded(load_model_config(folder))
    checkpoint.close()


@both
def test_logits_equal_transformers(case: str, folder_of: Folder, tmp_path: Path) -> None:
    rng = random.Random(40)
    tokens = [rng.randrange(512) for _ in range(60)]
    with torch.inference_mode():
        expected = load_reference(folder_of(case))(torch.tensor([tokens])).logits[0]
    model = PagedModel(load(write_gemma4(folder_of(case), tmp_path / "m.gguf")))
    actual = model.step([Row(0, 0, tokens)])[0]
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


def test_what_a_converter_writes_of_other_checkpoints(folder_of: Folder, tmp_path: Path) -> None:
    """Keys and values of layers that have none of their own are left where they are; other
    rotations are in the divisors of frequencies."""

    def change(tensors: Arrays) -> None:
        for part in ("attn_k.weight", "attn_v.weight", "attn_k_norm.weight"):
            tensors[f"blk.7.{part}"] = tensors[f"blk.2.{part}"]
        tensors["rope_freqs.weight"] = np.array([1.0] * 11 + [1e30] * 5, "float32")

    plain, other = (
        write_gemma4(folder_of("small"), tmp_path / f"{i}.gguf", change=how)
        for i, how in enumerate((None, change))
    )
    assert load(other).config.rope.proportion == 11 / 16
    found = dataclasses.replace(load_model_config(other), rope=load_model_config(plain).rope)
    assert found == load_model_config(plain)


def test_gate_and_up_in_two_tensors(folder_of: Folder, tmp_path: Path) -> None:
    def part(tensors: Arrays) -> None:
        for name in [name for name in tensors if "gate_up_exps" in name]:
            gate, up = np.split(tensors.pop(name), 2, axis=1)
            tensors[name.replace("gate_up", "gate")] = gate
            tensors[name.replace("gate_up", "up")] = up

    fused, apart = (
        open_checkpoint(write_gemma4(folder_of("sparse"), tmp_path / f"{i}.gguf", change=change))
        for i, change in enumerate((None, part))
    )
    assert sorted(apart.names()) == sorted(fused.names())
    name = "model.layers.3.experts.gate_up_proj"
    assert torch.equal(apart.tensor(name), fused.tensor(name))


def without(name: str) -> Callable[[Arrays], None]:
    return lambda tensors: [tensors.pop(name)] and None


def setting(name: str, values: np.ndarray) -> Callable[[Arrays], None]:
    return lambda tensors: tensors.update({name: values})


def factors(*values: float) -> Callable[[Arrays], None]:
    return setting("rope_freqs.weight", np.array(values, "float32"))


@pytest.mark.parametrize(
    ("case", "options", "error", "said"),
    [
        (
            "small",
            {"keys": {"attention.key_length_swa": None}},
            CorruptFileError,
            r"gemma4\.attention\.key_length_swa is missing",
        ),
        (
            "small",
            {"keys": {"attention.value_length": 16}},
            UnsupportedModelError,
            r"value_length 16 differs from gemma4\.attention\.key_length 32",
        ),
        (
            "small",
            {"keys": {"rope.dimension_count_swa": 8}},
            UnsupportedModelError,
            r"dimension_count_swa 8 differs from gemma4\.attention\.key_length_swa 16",
        ),
        (
            "small",
            {"keys": {"attention.sliding_window_pattern": None}},
            CorruptFileError,
            "sliding_window_pattern is missing or no list",
        ),
        (
            "small",
            {"keys": {"attention.sliding_window_pattern": [True] * 8}},
            UnsupportedModelError,
            "sliding_window_pattern gives the last layer a window",
        ),
        (
            "small",
            {"keys": {"attention.sliding_window": None}},
            CorruptFileError,
            "sliding_window is missing",
        ),
        (
            "small",
            {"keys": {"attention.shared_kv_layers": 6}},
            CorruptFileError,
            "shared_kv_layers is 6, which leaves no layer of full_attention",
        ),
        (
            "small",
            {"keys": {"attention.shared_kv_layers": 9}},
            CorruptFileError,
            "shared_kv_layers is 9, which leaves no layer of sliding_attention",
        ),
        (
            "small",
            {"keys": {"attention.shared_kv_layers": 2}},
            UnsupportedModelError,
            "feed_forward_length differs between layers otherwise",
        ),
        (
            "small",
            {"keys": {"feed_forward_length": [96] * 7}},
            CorruptFileError,
            "feed_forward_length is not a list of 8 possible sizes",
        ),
        (
            "small",
            {"keys": {"attention.head_count_kv": [1, 2] * 4}},
            UnsupportedModelError,
            "head_count_kv differs between layers of one kind",
        ),
        (
            "small",
            {"keys": {"attention.head_count_kv": [2, 2, 1, 2, 2, 1, 2, 1]}},
            UnsupportedModelError,
            "head_count_kv differs between layers, and values are not the keys",
        ),
        ("small", {"keys": {"attention.scale": 0.25}}, UnsupportedModelError, "only 1"),
        (
            "small",
            {"keys": {"rope.freq_base_swa": None}},
            CorruptFileError,
            "freq_base_swa is missing",
        ),
        ("small", {"keys": {"rope.scale_linear": 4.0}}, UnsupportedModelError, "scale_linear 4.0"),
        (
            "small",
            {"change": without("rope_freqs.weight")},
            CorruptFileError,
            "rope_freqs.weight is missing",
        ),
        ("small", {"change": factors(1.0, 1e30)}, CorruptFileError, "is not 16 32-bit numbers"),
        (
            "small",
            {"change": factors(*[1.0] * 4, *[2.0] * 12)},
            UnsupportedModelError,
            "rope_freqs.weight is not ones and then 1e30",
        ),
        (
            "small",
            {"change": without("per_layer_token_embd.weight")},
            CorruptFileError,
            "per_layer_token_embd.weight is missing",
        ),
        (
            "small",
            {"keys": {"embedding_length_per_layer_input": 16}},
            CorruptFileError,
            r"embed_tokens_per_layer\.weight is \[512, 256\], but .* \[512, 128\]",
        ),
        (
            "small",
            {"change": without("blk.4.attn_v.weight")},
            CorruptFileError,
            r"lacks tensor model\.layers\.4\.self_attn\.v_proj",
        ),
        (
            "small",
            {"change": without("blk.3.layer_output_scale.weight")},
            CorruptFileError,
            r"lacks tensor model\.layers\.3\.layer_scalar",
        ),
        (
            "small",
            {"change": setting("blk.0.ffn_gate_inp.scale", np.ones(64, "float32"))},
            CorruptFileError,
            r"has tensor model\.layers\.0\.router\.scale",
        ),
        (
            "small",
            {"change": setting("blk.0.attn_sinks.weight", np.ones(4, "float32"))},
            UnsupportedModelError,
            r"'blk\.0\.attn_sinks\.weight' belongs to no supported part",
        ),
        (
            "sparse",
            {"change": setting("blk.2.attn_v.weight", np.ones((32, 64), "float32"))},
            CorruptFileError,
            r"blk\.4\.attn_v\.weight is missing, which other layers without a window have",
        ),
        ("sparse", {"keys": {"expert_used_count": 7}}, CorruptFileError, "expert_used_count is 7"),
        (
            "sparse",
            {"keys": {"expert_feed_forward_length": None}},
            CorruptFileError,
            "expert_feed_forward_length is missing",
        ),
        (
            "sparse",
            {"change": without("blk.1.ffn_down_exps.scale")},
            CorruptFileError,
            r"lacks tensor model\.layers\.1\.router\.per_expert_scale",
        ),
    ],
)
def test_what_cannot_be_run_is_named(
    case: str,
    options: dict[str, Any],
    error: type[ModelError],
    said: str,
    folder_of: Folder,
    tmp_path: Path,
) -> None:
    with pytest.raises(error, match=said) as raised:
        load(write_gemma4(folder_of(case), tmp_path / "m.gguf", **options))
    assert "\n" not in str(raised.value)
