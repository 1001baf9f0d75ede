"""Muse Glimmer apart from its logits: what of its files is read, roundings, and its gate."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from paged_model import BlockPool, PagedModel, Row, StateDictCheckpoint, build, load
from reference_model import load_reference
from safetensors.torch import load_file, save_file

from termgen.engine.device.attention.base import ForwardContext
from termgen.engine.device.loader import open_checkpoint
from termgen.engine.device.loader.weights import load_weights
from termgen.errors import CorruptFileError

TinyModelDir = Callable[..., Path]
TOKENS = [5, 77, 401, 9, 33, 12, 250, 3, 8, 100, 41, 7, 7, 300, 2, 19, 64]


@pytest.fixture(scope="module")
def folder(tiny_model_dir: TinyModelDir) -> Path:
    return tiny_model_dir("muse_glimmer")


def copy_with(folder: Path, to: Path, tensors: dict[str, torch.Tensor]) -> Path:
    shutil.copytree(folder, to, dirs_exist_ok=True)
    save_file(tensors, to / "model.safetensors")
    return to


def test_the_part_that_sees_images_stays_in_the_file(folder: Path, tmp_path: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    seen = [name for name in tensors if name.startswith("model.vision_")]
    text = {name: tensors[name] for name in tensors if name not in seen}
    assert {name.split(".")[1] for name in seen} == {
        "vision_tower",
        "vision_adapter",
        "vision_projection",
    }
    checkpoint = open_checkpoint(folder)
    names = {name.replace("model.language_model.", "model.") for name in text}
    assert set(checkpoint.names()) == names
    assert checkpoint.nbytes == sum(tensor.nbytes for tensor in text.values())
    checkpoint.close()
    # Wrong numbers there do not matter, and neither does it if there are none.
    for name in seen:
        tensors[name].fill_(float("nan"))
    expected = PagedModel(load(folder)).step([Row(0, 0, TOKENS)])[0]
    for number, kept in enumerate((tensors, text)):
        copied = copy_with(folder, tmp_path / str(number), kept)
        assert torch.equal(PagedModel(load(copied)).step([Row(0, 0, TOKENS)])[0], expected)


@pytest.mark.parametrize("missing", ["self_attn.gate_proj", "post_feedforward_layernorm"])
def test_a_tensor_that_is_missing_is_named(folder: Path, tmp_path: Path, missing: str) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors[f"model.language_model.layers.4.{missing}.weight"]
    with pytest.raises(CorruptFileError, match=rf"lacks tensor model\.layers\.4\.{missing}"):
        load(copy_with(folder, tmp_path, tensors))


def test_one_line_for_a_contradictory_file(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    config["text_config"]["layer_rope_theta"][0] = 123.0
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        CorruptFileError, match=r"config\.json.*layer_rope_theta is 123\.0"
    ) as error:
        open_checkpoint(tmp_path)
    assert "\n" not in str(error.value)


@torch.inference_mode()
def test_norms_without_an_offset_are_rounded_as_transformers_rounds_them(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    model = build(checkpoint.config, dtype=torch.bfloat16)
    tensors = {name: checkpoint.tensor(name).to(torch.bfloat16) for name in checkpoint.names()}
    load_weights(model, StateDictCheckpoint(tensors))
    checkpoint.close()
    reference = load_reference(folder).to(torch.bfloat16).model.language_model
    ids = torch.arange(512)
    rows = model.embed(ids)
    assert torch.equal(rows, reference.embed_tokens(ids))
    assert torch.equal(model.norm(rows), reference.norm(rows))


@torch.inference_mode()
def test_the_gate_waits_for_its_attention_and_no_longer(folder: Path) -> None:
    model = load(folder)
    paged = PagedModel(model)
    metadata, positions = BlockPool(16, 4, 1).metadata([Row(0, 0, TOKENS)])
    ids = torch.tensor(TOKENS, dtype=torch.int32)
    context = ForwardContext((metadata,), paged.kv_caches)
    model.attention.prepare((metadata,))
    carried, q = model.first_piece(ids, positions, context)
    for index in range(model.num_attentions - 1):
        gate = carried.gate
        assert gate is not None and gate.shape == (len(TOKENS), 4 * 32)
        q = model.next_piece(index, model.attend(index, q, context), carried, context)
        assert carried.gate is not gate
    attended = model.attend(model.num_attentions - 1, q, context)
    wanted = torch.tensor([3, 16])
    hidden = model.last_piece(attended, carried, wanted)
    assert carried.gate is None
    whole = PagedModel(model).step([Row(0, 0, TOKENS)])[0]
    torch.testing.assert_close(model.compute_logits(hidden), whole[wanted])
