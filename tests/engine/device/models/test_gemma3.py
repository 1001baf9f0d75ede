"""Gemma 3 apart from its arithmetic: files with a vision part, types, tokens."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from paged_model import PagedModel, Row, load
from tokenizers import Tokenizer

from termgen.config import EngineConfig
from termgen.engine.device.loader import load_model_config, open_checkpoint
from termgen.engine.device.runner.resolve import resolve_dtype
from termgen.engine.loop.engine import SyncEngine
from termgen.errors import ConfigError, CorruptFileError, RequestError

TinyModelDir = Callable[..., Path]
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(scope="module")
def folder_with_vision(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A random model of text and images as transformers saves it, and that model."""
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    text = {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "sliding_window": 8,
        "sliding_window_pattern": 3,
        "initializer_range": 0.15,
    }
    vision = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    folder = tmp_path_factory.mktemp("gemma3-vision")
    config = Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=500
    )
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = Gemma3ForConditionalGeneration(config).eval()
    model.save_pretrained(folder)
    return folder, model


def test_the_text_model_of_a_folder_with_a_vision_part(
    folder_with_vision: tuple[Path, Any],
) -> None:
    folder, reference = folder_with_vision
    checkpoint = open_checkpoint(folder)
    names = checkpoint.names()
    assert "model.layers.2.mlp.up_proj.weight" in names
    assert not any("vision" in name or "projector" in name for name in names)
    assert checkpoint.nbytes == sum(checkpoint.tensor(name).nbytes for name in names)
    checkpoint.close()
    tokens = [5, 77, 401, 9, 33, 12, 250, 8, 1, 90, 311, 45]
    with torch.inference_mode():
        expected = reference(torch.tensor([tokens])).logits[0]
    actual = PagedModel(load(folder)).step([Row(0, 0, tokens)])[0]
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


def test_a_folder_without_the_text_model_is_an_error(
    folder_with_vision: tuple[Path, Any], tmp_path: Path, tiny_model_dir: TinyModelDir
) -> None:
    shutil.copy(folder_with_vision[0] / "config.json", tmp_path)
    weights = tiny_model_dir("gemma3_text") / "model.safetensors"
    shutil.copy(weights, tmp_path)
    with pytest.raises(CorruptFileError, match=r"embed_tokens\.weight is missing"):
        open_checkpoint(tmp_path)


def test_float16_is_refused_and_never_chosen(tiny_model_dir: TinyModelDir) -> None:
    config = load_model_config(tiny_model_dir("gemma3_text"))
    with pytest.raises(ConfigError, match="float16.*65504; use bfloat16 or float32") as error:
        resolve_dtype("float16", config, CUDA)
    assert error.value.param == "dtype"
    half = dataclasses.replace(config, torch_dtype="float16")
    assert resolve_dtype("auto", half, CUDA) is torch.bfloat16
    assert resolve_dtype("auto", half, CPU) is torch.float32
    assert resolve_dtype("bfloat16", half, CPU) is torch.bfloat16
    llama = dataclasses.replace(load_model_config(tiny_model_dir("llama")), torch_dtype="float16")
    assert resolve_dtype("auto", llama, CUDA) is resolve_dtype("float16", llama, CUDA)


@pytest.mark.parametrize("special", [True, False])
def test_a_tokenizer_may_know_special_tokens_without_rows(
    special: bool, tiny_model_dir: TinyModelDir, tmp_path: Path
) -> None:
    """The tokenizer of gemma-3-1b has such a token for images."""
    folder = shutil.copytree(tiny_model_dir("gemma3_text"), tmp_path / "model")
    path = folder / "tokenizer.json"
    raw = json.loads(path.read_text())
    token = {"id": 512, "content": "<image>", "special": special, "normalized": False}
    flags = {"single_word": False, "lstrip": False, "rstrip": False}
    raw["added_tokens"].append({**token, **flags})
    path.write_text(json.dumps(raw))
    assert Tokenizer.from_file(str(path)).get_vocab_size() == 513
    config = EngineConfig(model=str(folder), device="cpu", threads=1, kv_cache_gib=0.01)
    if not special:
        with pytest.raises(ConfigError, match="tokenizer has 513 tokens, the model only 512"):
            SyncEngine(config)
        return
    engine = SyncEngine(config)
    with pytest.raises(RequestError, match="512 is outside the vocabulary"):
        engine.input_processor.tokenize("Look: <image>")
    engine.shutdown()
