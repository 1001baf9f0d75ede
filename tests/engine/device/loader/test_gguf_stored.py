"""Matrices of a GGUF file that go to a layer in their own blocks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from gguf_samples import text_config, write_model
from paged_model import PagedModel, Row, build, load

from termgen.engine.device.loader import open_checkpoint
from termgen.engine.device.loader.weights import load_weights
from termgen.engine.device.quantization.int8 import Int8Linear
from termgen.engine.gguf.gguf_file import GGUFFile
from termgen.errors import CorruptFileError

Q = gguf.GGMLQuantizationType
TOKENS = list(range(3, 60))


@pytest.fixture(scope="module")
def folder(tiny_model_dir: Callable[..., Path]) -> Path:
    return tiny_model_dir("llama", intermediate_size=128)


def int8_layers(model: torch.nn.Module) -> list[Int8Linear]:
    return [module for module in model.modules() if isinstance(module, Int8Linear)]


@pytest.mark.parametrize(("quant", "bits"), [(Q.Q8_0, 8), (Q.Q4_1, 4)])
def test_layers_keep_the_numbers_of_the_file(
    folder: Path, tmp_path: Path, quant: Q, bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of q and k are in another order there."""
    path = write_model(folder, tmp_path / "m.gguf", arch="llama", quant=quant)
    expected = PagedModel(load(path)).step([Row(0, 0, TOKENS)])[0]
    kept = load(path, quantization="int8")
    assert {r.num_bits for x in int8_layers(kept) if x._blocks for r in x._blocks.runs} == {bits}
    error = (PagedModel(kept).step([Row(0, 0, TOKENS)])[0] - expected).std() / expected.std()
    monkeypatch.setattr(Int8Linear, "kinds", frozenset())
    rounded = load(path, quantization="int8")
    again = (PagedModel(rounded).step([Row(0, 0, TOKENS)])[0] - expected).std() / expected.std()
    assert error < 3e-3 and (quant is Q.Q4_1 or 3 * error < again)


def test_a_file_of_two_types_keeps_four_bits_where_it_has_no_more(
    folder: Path, tmp_path: Path
) -> None:
    """q, k and v are one matrix here, and v has more bits than the others in many files."""
    path = write_model(
        folder, tmp_path / "m.gguf", arch="llama", quant=Q.Q4_1, quants={"v_proj": Q.Q8_0}
    )
    expected = PagedModel(load(path)).step([Row(0, 0, TOKENS)])[0]
    kept = load(path, quantization="int8")
    runs = [[run.num_bits for run in x._blocks.runs] for x in int8_layers(kept) if x._blocks]
    assert runs.count([4, 8]) == text_config(folder)["num_hidden_layers"]
    assert all(bits in ([4], [4, 8]) for bits in runs)
    error = (PagedModel(kept).step([Row(0, 0, TOKENS)])[0] - expected).std() / expected.std()
    assert error < 3e-3


def test_no_number_of_such_a_matrix_is_made(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_model(folder, tmp_path / "m.gguf", arch="llama", quant=Q.Q8_0)
    checkpoint = open_checkpoint(path)
    made: list[str] = []
    tensor = checkpoint.tensor

    def note(name: str) -> torch.Tensor:
        made.append(name)
        return tensor(name)

    monkeypatch.setattr(checkpoint, "tensor", note)
    monkeypatch.setattr(checkpoint, "parts", lambda name: iter([note(name)]))
    model = build(checkpoint.config, quantization="int8")
    load_weights(model, checkpoint)
    assert made and not any("proj" in name or "lm_head" in name for name in made)
    assert checkpoint.kind("model.layers.0.self_attn.q_proj.weight") == "Q8_0"
    assert checkpoint.kind("model.norm.weight") is None
    checkpoint.close()


@pytest.mark.parametrize("part", ["attn_q", "ffn_down"])
def test_a_scale_that_is_no_number_is_named(folder: Path, tmp_path: Path, part: str) -> None:
    path = write_model(folder, tmp_path / "m.gguf", arch="llama", quant=Q.Q8_0)
    file = GGUFFile.open(path)
    at = file.tensors[f"blk.1.{part}.weight"].offset
    file.close()
    raw = bytearray(path.read_bytes())
    raw[at : at + 2] = b"\x00\x7e"
    path.write_bytes(raw)
    with pytest.raises(CorruptFileError, match=rf"blk\.1\.{part}\.weight' has values that are not"):
        load(path, quantization="int8")


def test_blocks_that_no_method_keeps_become_numbers(folder: Path, tmp_path: Path) -> None:
    path = write_model(folder, tmp_path / "m.gguf", arch="llama", quant=Q.Q8_0)
    model: Any = load(path)
    assert not int8_layers(model) and model.layers[0].qkv_proj.method.kinds == frozenset()


@pytest.mark.gpu
def test_a_file_keeps_both_widths_on_a_gpu(
    tiny_model_dir: Callable[..., Path], tmp_path: Path
) -> None:
    """Through the engine, beside the same file on a CPU."""
    from termgen.config import EngineConfig
    from termgen.engine.device.quantization.int8_groups import GroupLinear
    from termgen.engine.loop.engine import SyncEngine

    folder = tiny_model_dir("llama", hidden_size=128, intermediate_size=256)
    path = write_model(
        folder, tmp_path / "m.gguf", arch="llama", quant=Q.Q4_1, quants={"v_proj": Q.Q8_0}
    )
    on_cpu = [x for x in int8_layers(load(path, quantization="int8")) if x._blocks]
    engine = SyncEngine(
        EngineConfig(model=str(path), device="cuda", quantization="int8", skip_tokenizer_init=True)
    )
    model = engine.core.executor._runner.model  # type: ignore[attr-defined]
    on_gpu = [x for x in model.modules() if isinstance(x, GroupLinear)]
    widths = [[run.num_bits for run in layer._runs] for layer in on_gpu]
    assert widths == [[run.num_bits for run in x._blocks.runs] for x in on_cpu if x._blocks]
    assert widths.count([4, 8]) == text_config(folder)["num_hidden_layers"]
    for own, other in zip(on_gpu, on_cpu, strict=True):
        ids = torch.arange(own._spec.out_features)
        rows, expected = own.embed(ids.cuda()).float().cpu(), other.embed(ids)
        assert torch.allclose(rows, expected, rtol=2**-7, atol=1e-3 * float(expected.abs().max()))
