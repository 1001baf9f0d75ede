"""Folders of safetensors: reading, and a one-line error for each way to break a folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from termgen.engine.device.loader import load_generation_config, load_model_config, open_checkpoint
from termgen.errors import CorruptFileError, ModelNotFoundError, TermgenError, UnsupportedModelError

TinyModelDir = Callable[..., Path]
INDEX = "model.safetensors.index.json"


@pytest.fixture
def folder(tiny_llama_dir: Path, tmp_path: Path) -> Path:
    """A copy that a test may break."""
    return Path(shutil.copytree(tiny_llama_dir, tmp_path / "model"))


@pytest.fixture
def sharded(tiny_model_dir: TinyModelDir, tmp_path: Path) -> Path:
    source = tiny_model_dir("llama", max_shard_size="60KB")
    assert not (source / "model.safetensors").exists()
    return Path(shutil.copytree(source, tmp_path / "sharded"))


def refused(folder: Path, kind: type[TermgenError], message: str) -> None:
    with pytest.raises(kind, match=message) as raised:
        open_checkpoint(folder)
    assert "\n" not in str(raised.value) and str(folder) in str(raised.value)


def edit_json(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "mixtral"])
def test_single_file(family: str, tiny_model_dir: TinyModelDir) -> None:
    folder = tiny_model_dir(family)
    checkpoint = open_checkpoint(folder)
    expected = load_file(folder / "model.safetensors")
    assert sorted(checkpoint.names()) == sorted(expected)
    for name, tensor in expected.items():
        assert torch.equal(checkpoint.tensor(name), tensor)
    assert checkpoint.nbytes == sum(tensor.nbytes for tensor in expected.values())
    assert (
        checkpoint.config == load_model_config(folder) == load_model_config(folder / "config.json")
    )
    assert checkpoint.config.hidden_size == 64 and checkpoint.config.num_layers == 2
    checkpoint.close()


def test_shards_equal_the_single_file(tiny_llama_dir: Path, sharded: Path) -> None:
    assert len(list(sharded.glob("model-*.safetensors"))) > 3
    single, parts = open_checkpoint(tiny_llama_dir), open_checkpoint(sharded)
    assert sorted(single.names()) == sorted(parts.names())
    assert single.nbytes == parts.nbytes
    for name in single.names():
        assert torch.equal(single.tensor(name), parts.tensor(name))
    assert single.config == parts.config


def test_shards_are_read_one_after_the_other(sharded: Path) -> None:
    shard_of = json.loads((sharded / INDEX).read_text())["weight_map"]
    order = [shard_of[name] for name in open_checkpoint(sharded).names()]
    assert order == sorted(order)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_stored_type_is_kept(dtype: torch.dtype, folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    save_file({name: w.to(dtype) for name, w in weights.items()}, folder / "model.safetensors")
    checkpoint = open_checkpoint(folder)
    assert {checkpoint.tensor(name).dtype for name in checkpoint.names()} == {dtype}
    assert checkpoint.nbytes == sum(w.numel() for w in weights.values()) * dtype.itemsize


def test_tensors_are_mapped_not_read(folder: Path) -> None:
    """Asking for the same tensor twice gives two views of one mapping, and both outlive it."""
    checkpoint = open_checkpoint(folder)
    name = checkpoint.names()[0]
    first, second = checkpoint.tensor(name), checkpoint.tensor(name)
    assert first.data_ptr() == second.data_ptr()
    checkpoint.close()
    assert torch.equal(first, load_file(folder / "model.safetensors")[name])


def test_derived_tables_are_no_weights(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    names = sorted(weights)
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8, dtype=torch.float64)
    save_file(weights, folder / "model.safetensors")
    assert sorted(open_checkpoint(folder).names()) == names


def test_auto_map_is_not_run(folder: Path) -> None:
    (folder / "evil.py").write_text("raise SystemExit('ran')")
    edit_json(
        folder / "config.json",
        lambda c: c.update(auto_map={"AutoModelForCausalLM": "evil.Model", "AutoConfig": "evil.C"}),
    )
    assert open_checkpoint(folder).config.architecture == "LlamaForCausalLM"


def test_truncated(folder: Path) -> None:
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    refused(folder, CorruptFileError, "model.safetensors: ")
    path.write_bytes(whole[:100])
    refused(folder, CorruptFileError, "truncated: a header of [0-9]+ bytes in a file of 100")
    path.write_bytes(whole[:5])
    refused(folder, CorruptFileError, "truncated: 5 bytes, no header")
    path.write_bytes(b"")
    refused(folder, CorruptFileError, "truncated: 0 bytes")


def test_header_too_long(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes((2**62).to_bytes(8, "little") + path.read_bytes()[8:])
    refused(folder, CorruptFileError, "a header of 4611686018427387904 bytes is announced")


def test_header_that_is_not_json(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes((16).to_bytes(8, "little") + b"x" * 64)
    refused(folder, CorruptFileError, "model.safetensors: .*header")


def test_shard_missing(sharded: Path) -> None:
    victim = sorted(sharded.glob("model-*.safetensors"))[1]
    victim.unlink()
    refused(sharded, CorruptFileError, f"the file {victim.name} that it names is missing")


def test_tensor_missing_from_its_shard(sharded: Path) -> None:
    first, last = (sorted(sharded.glob("model-*.safetensors"))[i] for i in (0, -1))
    shutil.copy(first, last)
    refused(sharded, CorruptFileError, f"is not in {last.name}")


@pytest.mark.parametrize("name", ["../other.safetensors", "/etc/x.safetensors", 7, "pytorch.bin"])
def test_index_cannot_point_elsewhere(name: Any, sharded: Path) -> None:
    edit_json(sharded / INDEX, lambda c: c["weight_map"].update({"lm_head.weight": name}))
    refused(sharded, CorruptFileError, "'lm_head.weight' is not a file name")


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {}}'])
def test_broken_index(content: str, sharded: Path) -> None:
    (sharded / INDEX).write_text(content)
    refused(sharded, CorruptFileError, "not valid JSON|not a JSON object|no weight_map")


def test_pickle_is_refused(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04")
    refused(folder, UnsupportedModelError, r"pytorch_model\.bin: pickle files are refused")
    with pytest.raises(ModelNotFoundError, match="give the folder it is in"):
        open_checkpoint(folder / "pytorch_model.bin")


def test_no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    refused(folder, ModelNotFoundError, "a config.json but no model.safetensors")


def test_config_missing(folder: Path) -> None:
    (folder / "config.json").unlink()
    refused(folder, CorruptFileError, "has no config.json")


@pytest.mark.parametrize("content", ["", "{", "[1]", "null", "\xff", '{"a":' + "[" * 100_000])
def test_config_is_not_json(content: str, folder: Path) -> None:
    (folder / "config.json").write_bytes(content.encode("latin-1"))
    refused(folder, CorruptFileError, "config.json: (not valid JSON|not a JSON object)")


def test_config_too_large(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("termgen.engine.device.loader.checkpoint.MAX_CONFIG_BYTES", 100)
    refused(folder, CorruptFileError, "config.json: larger than 100 bytes")


def test_config_errors_name_the_file_once(folder: Path) -> None:
    edit_json(folder / "config.json", lambda c: c.update(hidden_size="wide"))
    refused(folder, CorruptFileError, r"^[^:]*/config\.json: hidden_size")
    edit_json(folder / "config.json", lambda c: c.update(architectures=["MambaForCausalLM"]))
    refused(folder, UnsupportedModelError, "MambaForCausalLM")


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("hidden_size", 2**20, r"model\.embed_tokens\.weight is \[512, 64\], but"),
        ("vocab_size", 2**30, r"model\.embed_tokens\.weight is \[512, 64\], but"),
        ("intermediate_size", 2**30, "mlp.up_proj.weight"),
        ("num_hidden_layers", 1000, r"model\.layers\.999\.self_attn\.q_proj\.weight is missing"),
        ("num_attention_heads", 4096, "self_attn.q_proj.weight"),
        ("num_key_value_heads", 1, "self_attn.k_proj.weight"),
    ],
)
def test_sizes_must_be_those_of_the_tensors(
    key: str, value: int, message: str, folder: Path
) -> None:
    edit_json(folder / "config.json", lambda c: c.update({key: value}))
    refused(folder, CorruptFileError, message)


@pytest.mark.parametrize(
    ("family", "key", "message"),
    [
        ("qwen3_moe", "num_local_experts", r"mlp\.experts\.999\.up_proj\.weight is missing"),
        ("qwen3_moe", "moe_intermediate_size", r"experts\.7\.up_proj\.weight is \[40, 64\], but"),
        ("mixtral", "num_local_experts", r"block_sparse_moe\.experts\.999\.w3\.weight is missing"),
        ("mixtral", "intermediate_size", r"experts\.3\.w3\.weight is \[112, 64\], but"),
    ],
)
def test_sizes_of_experts_must_be_those_of_the_tensors(
    family: str, key: str, message: str, tiny_model_dir: TinyModelDir, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_model_dir(family), folder)
    edit_json(folder / "config.json", lambda c: c.update({key: 1000}, num_experts=None))
    refused(folder, CorruptFileError, message)


def test_foreign_quantisation_is_named(folder: Path) -> None:
    edit_json(
        folder / "config.json", lambda c: c.update(quantization_config={"quant_method": "quanto"})
    )
    refused(folder, UnsupportedModelError, "quanto.* supported are awq, compressed-tensors")


def test_integer_weights_are_refused(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = weights["lm_head.weight"].to(torch.int8)
    save_file(weights, folder / "model.safetensors")
    refused(folder, UnsupportedModelError, r"'lm_head\.weight' has the type I8")


def test_config_alone(tiny_llama_dir: Path, tmp_path: Path) -> None:
    alone = tmp_path / "shape.json"
    shutil.copy(tiny_llama_dir / "config.json", alone)
    assert load_model_config(alone) == load_model_config(tiny_llama_dir)
    with pytest.raises(ModelNotFoundError, match="without weights: use load_format=dummy"):
        open_checkpoint(alone)
    assert load_generation_config(alone) == {}


def test_nothing_there(tmp_path: Path) -> None:
    for function in (open_checkpoint, load_model_config):
        with pytest.raises(TermgenError, match="no such file|has no absent.json"):
            function(tmp_path / "absent")
        with pytest.raises(TermgenError, match="no such file|has no absent.json"):
            function(tmp_path / "absent.json")


def test_generation_config(folder: Path) -> None:
    path = folder / "generation_config.json"
    assert load_generation_config(folder) == {"eos_token_id": [1], "bos_token_id": 0}
    path.write_text(
        json.dumps(
            {
                "eos_token_id": [5, 6],
                "pad_token_id": [9, 10],
                "temperature": 0.6,
                "top_p": 0.9,
                "top_k": None,
                "do_sample": True,
                "transformers_version": "5",
            }
        )
    )
    assert load_generation_config(folder) == {
        "eos_token_id": [5, 6],
        "pad_token_id": 9,
        "temperature": 0.6,
        "top_p": 0.9,
        "do_sample": True,
    }
    path.unlink()
    assert load_generation_config(folder) == {}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"temperature": "hot"}', "temperature is 'hot', which is not a number"),
        ('{"eos_token_id": "</s>"}', "</s> is not a token id"),
        ('{"eos_token_id": [1, -1]}', "is not a token id"),
        ('{"eos_token_id": []}', "is not a token id"),
        ("{", "not valid JSON"),
    ],
)
def test_broken_generation_config(content: str, message: str, folder: Path) -> None:
    (folder / "generation_config.json").write_text(content)
    with pytest.raises(CorruptFileError, match=message):
        load_generation_config(folder)
