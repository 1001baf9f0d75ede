"""What Gemma 3n alone has: streams over pieces of a pass; and files of models with other parts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from paged_model import PagedModel, Row, StateDictCheckpoint, build, load
from safetensors.torch import load_file, save_file

from termgen.engine.device.loader import open_checkpoint
from termgen.engine.device.loader.weights import load_weights
from termgen.errors import CorruptFileError

TOKENS = [5, 77, 401, 9, 33, 12, 250, 511, 3, 8, 412, 411, 60]


@pytest.fixture(scope="module")
def folder(tiny_model_dir: Callable[..., Path]) -> Path:
    return tiny_model_dir("gemma3n_text")


@torch.inference_mode()
def test_pieces_with_attention_between_them_are_the_whole_pass(folder: Path) -> None:
    model = load(folder)
    expected = PagedModel(model).step([Row(0, 0, TOKENS)])[0]
    ids, positions, ctx = PagedModel(model).inputs([Row(0, 0, TOKENS)])
    assert model.can_be_cut and model.can_be_recorded
    carried, q = model.first_piece(ids, positions, ctx)
    for index in range(model.num_attentions - 1):
        streams = carried.streams
        assert streams is not None and streams.shape == (len(TOKENS), 4, 64)
        attended = model.attend(index, q, ctx)
        q = model.next_piece(index, attended, carried, ctx)
        assert carried.streams is not streams
    wanted = torch.tensor([3, 12])
    hidden = model.last_piece(model.attend(model.num_attentions - 1, q, ctx), carried, wanted)
    torch.testing.assert_close(model.compute_logits(hidden), expected[wanted])


def test_a_model_with_other_parts_gives_its_text_part(folder: Path, tmp_path: Path) -> None:
    text = json.loads((folder / "config.json").read_text())
    whole = {
        "architectures": ["Gemma3nForConditionalGeneration"],
        "model_type": "gemma3n",
        "dtype": text.pop("dtype"),
        "text_config": text,
    }
    (tmp_path / "config.json").write_text(json.dumps(whole))
    tensors = {
        name.replace("model.", "model.language_model.", 1): tensor
        for name, tensor in load_file(folder / "model.safetensors").items()
    }
    # Layers that read what others stored have these in published files.
    for part in ("k_proj", "v_proj", "k_norm"):
        name = f"model.language_model.layers.5.self_attn.{part}.weight"
        tensors[name] = torch.full((2, 2), float("nan"))
    for name in ("vision_tower.conv.weight", "audio_tower.norm.weight", "embed_vision.norm.weight"):
        tensors[f"model.{name}"] = torch.full((2, 2), float("nan"))
    save_file(tensors, tmp_path / "model.safetensors")
    row = [Row(0, 0, TOKENS)]
    assert torch.equal(
        PagedModel(load(tmp_path)).step(row)[0], PagedModel(load(folder)).step(row)[0]
    )


def test_half_type_stays_near_float32(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    model = build(checkpoint.config, dtype=torch.bfloat16)
    load_weights(model, checkpoint)
    model.finalize()
    actual = PagedModel(model, dtype=torch.bfloat16).step([Row(0, 0, TOKENS)])[0]
    expected = PagedModel(load(folder)).step([Row(0, 0, TOKENS)])[0]
    assert (actual - expected).std() / expected.std() < 0.08


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"laurel_rank": 2**30}, r"laurel\.linear_left\.weight is \[8, 64\]"),
        ({"altup_num_inputs": 9}, r"model\.altup_projections\.7\.weight is missing"),
        ({"altup_num_inputs": 3}, r"has tensor model\.altup_projections\.2\.weight and 1 more"),
    ],
)
def test_streams_that_are_not_those_of_the_file(
    folder: Path, tmp_path: Path, changes: dict[str, int], said: str
) -> None:
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    with pytest.raises(CorruptFileError, match=said):
        load(tmp_path)


def test_a_missing_tensor_is_named(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    tensors = {name: checkpoint.tensor(name).clone() for name in checkpoint.names()}
    checkpoint.close()
    del tensors["model.layers.2.altup.correct_output_scale"]
    with pytest.raises(CorruptFileError, match=r"layers\.2\.altup\.correct_output_scale"):
        load_weights(build(checkpoint.config), StateDictCheckpoint(tensors))
