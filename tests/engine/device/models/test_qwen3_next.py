"""Qwen3-Next apart from its logits: tensors of a draft head, sizes, rows of key heads."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from paged_model import load
from safetensors.torch import load_file, save_file

from termgen.engine.device.loader import open_checkpoint
from termgen.errors import CorruptFileError


@pytest.fixture(scope="module")
def folder(tiny_model_dir: Callable[..., Path]) -> Path:
    return tiny_model_dir("qwen3_next")


def test_tensors_of_a_draft_head_are_left_where_they_are(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, "mtp.fc.weight": torch.zeros(4, 8)}, tmp_path / "model.safetensors")
    expected = dict(load(folder).named_parameters())
    found = dict(load(tmp_path).named_parameters())
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"linear_num_value_heads": 8}, r"layers\.0\.linear_attn\.in_proj_qkvz"),
        ({"linear_key_head_dim": 8}, r"layers\.0\.linear_attn\.in_proj_qkvz"),
        ({"mlp_only_layers": [0]}, r"layers\.0\.mlp\.up_proj\.weight is missing"),
        ({"shared_expert_intermediate_size": 32}, r"shared_expert\.up_proj"),
    ],
)
def test_sizes_that_are_not_those_of_the_tensors(
    folder: Path, tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(CorruptFileError, match=said):
        open_checkpoint(tmp_path)
