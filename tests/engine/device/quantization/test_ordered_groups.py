"""Integers whose groups are columns in disorder (GPTQ's desc_act): kept in the order of groups,
with products of x in that order."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from paged_model import PagedModel, Row, load
from quantized_weights import Write, gptq, packed, quantize_folder
from safetensors.torch import load_file, save_file
from triton_device import DEVICES_AND_DTYPES, normal, require_triton

from termgen.engine.device.layers.linear import FloatLinear, LinearMethod, LinearSpec
from termgen.engine.device.loader import kept_form, open_checkpoint
from termgen.engine.device.models import registry
from termgen.engine.device.quantization.affine_blocks import GROUPS, ORDERED_GROUPS
from termgen.engine.device.quantization.stored_matrices import PackedColumns, kept
from termgen.errors import CorruptFileError

require_triton()

from termgen.engine.device.quantization import int8_groups  # noqa: E402
from termgen.engine.device.quantization.column_orders import in_one_order  # noqa: E402
from termgen.engine.device.quantization.int8_groups import (  # noqa: E402
    GroupLinear,
    GroupLinears,
)

TinyModelDir = Callable[..., Path]
GPTQ = {"quant_method": "gptq", "bits": 4, "desc_act": True}
PACKED = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
COLUMNS, GROUP = 256, 64
ROUNDING = {torch.float32: 2.0**-11, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}
"""Scales have 16 bits always."""
PARTS: dict[str, list[tuple[int | None, int]]] = {
    "one order": [(1, 64), (1, 40), (1, 24)],
    "two orders": [(1, 40), (2, 33), (1, 64)],
    "some in their order": [(None, 32), (1, 64), (None, 9)],
}
"""(seed of the order, rows)"""


def matrix(
    rows: int, bits: int, order: int | None
) -> tuple[PackedColumns, dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(rows)
    num_groups = COLUMNS // GROUP
    groups = torch.arange(COLUMNS) // GROUP
    if order is not None:
        groups = groups[torch.randperm(COLUMNS, generator=torch.Generator().manual_seed(order))]
    low, high = -(2**31), 2**31
    per_word = 32 // bits
    padded = -(-rows // per_word)
    tensors = {
        "qweight": torch.randint(low, high, (COLUMNS // per_word, rows), generator=generator).int(),
        "qzeros": torch.randint(low, high, (num_groups, padded), generator=generator).int(),
        "scales": torch.rand(num_groups, rows, generator=generator).add(0.2).div(40).half(),
        "g_idx": groups,
    }
    return PackedColumns((rows, COLUMNS), bits, num_groups, is_awq=False, zero_offset=1), tensors


@pytest.mark.parametrize(("device", "dtype"), DEVICES_AND_DTYPES)
@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("seed", [1])
def test_products_are_those_of_the_columns_in_their_order(
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    dtype: torch.dtype,
    name: str,
    bits: int,
    seed: int,
) -> None:
    print("seed", seed)
    monkeypatch.setattr(int8_groups, "_PART_NUMBERS", 33 * COLUMNS)
    num_rows = sum(rows for _, rows in PARTS[name])
    spec = LinearSpec(COLUMNS, num_rows, dtype, torch.device(device), is_looked_up=True)
    layer = GroupLinears()(spec)
    assert isinstance(layer, GroupLinear)
    loads, values, first = [], [], 0
    for order, rows in PARTS[name]:
        made, tensors = matrix(rows, bits, order)
        values.append(made.rows(tensors, 0, rows).double())
        columns = None if order is None else tensors["g_idx"].argsort(stable=True)
        for begin in range(0, rows, 17):
            end = min(begin + 17, rows)
            stored = kept(made.integers(tensors, begin, end), columns)
            assert stored.kind == (GROUPS if order is None else ORDERED_GROUPS)
            loads.append((stored, first + begin))
        first += rows
    random.Random(seed).shuffle(loads)
    for stored, row in loads:
        layer.load_stored(stored, row)
    layer.finalize()
    assert len(layer.orders) == 1 + len({order for order, _ in PARTS[name] if order is not None})
    assert {run.num_bits for run in layer._runs} == {bits}
    weight = torch.cat(values).to(device)
    bias = normal(num_rows, dtype=dtype, device=device, seed=9)
    for count in (0, 1, 2, 16, 65, 130):
        x = normal(count, COLUMNS, dtype=dtype, device=device, seed=count)
        for own in (None, bias):
            wide = torch.zeros_like(bias).double() if own is None else own.double()
            expected = x.double() @ weight.T + wide
            room = (x.double().abs() @ weight.abs().T + wide.abs() + 1) * ROUNDING[dtype]
            found = layer.multiply(x, own).double()
            assert ((found - expected).abs() <= room).all(), count
    ids = torch.tensor([0, num_rows - 1, 35, num_rows // 2], device=device)
    difference = (layer.embed(ids).double() - weight[ids]).abs().max()
    assert difference <= weight.abs().max() * ROUNDING[dtype]


def test_neighbours_with_one_order_are_a_run() -> None:
    parts = [(8, 16, 1), (0, 8, 1), (20, 24, 2), (24, 30, 1)]
    expected = [(0, 16, 1), (16, 20, 0), (20, 24, 2), (24, 30, 1), (30, 40, 0)]
    for shuffled in itertools.permutations(parts):
        assert in_one_order(list(shuffled), 40) == expected
    assert in_one_order([], 40) == [(0, 40, 0)]


FORMATS: dict[str, tuple[dict[str, object], Write]] = {
    "GPTQ": (GPTQ, gptq(4, 32, in_order=False)),
    "GPTQ, 8 bits": ({**GPTQ, "bits": 8}, gptq(8, 32, in_order=False)),
    "packed": (PACKED, packed(4, group=32, in_order=False)),
}
VOCABULARY = 333
SIZES = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": VOCABULARY}


@pytest.fixture
def groups_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The layers that a GPU has, on a CPU. Tables and heads are floats, which nothing rounds."""
    monkeypatch.setitem(registry.LINEAR_METHODS, "int8", "test_ordered_groups:make_group_linear")


_factory = GroupLinears()


def make_group_linear(spec: LinearSpec) -> LinearMethod:
    is_table = spec.is_looked_up or spec.out_features == VOCABULARY
    return FloatLinear(spec) if is_table else _factory(spec)


@pytest.mark.parametrize("name", FORMATS)
def test_a_model_of_them_computes_as_its_twin(
    name: str, tiny_model_dir: TinyModelDir, tmp_path: Path, groups_of_a_gpu: None
) -> None:
    config, write = FORMATS[name]
    source = tiny_model_dir("llama", **SIZES)
    folder, twin = quantize_folder(source, tmp_path / "m", config, write)
    checkpoint = open_checkpoint(folder)
    kind = checkpoint.kind("model.layers.0.self_attn.q_proj.weight")  # type: ignore[attr-defined]
    checkpoint.close()
    assert kind == ORDERED_GROUPS and kept_form(folder) == "int8"
    model = load(folder, quantization="int8")
    fused = [m for m in model.modules() if isinstance(m, GroupLinear) and len(m.orders) > 1]
    assert len(fused) == 8 and all(len(layer.orders) == 2 for layer in fused)
    tokens = list(range(5, 25))
    found = PagedModel(model).step([Row(0, 0, tokens)])[0]
    expected = PagedModel(load(twin)).step([Row(0, 0, tokens)])[0]
    # Logits reach 11, and wrong columns change them by as much. Scales are rounded to 16 bits.
    assert (found - expected).abs().max() < 0.12


def test_groups_of_other_sizes_and_numbers_are_floats(
    tiny_model_dir: TinyModelDir, tmp_path: Path
) -> None:
    source = tiny_model_dir("llama", **SIZES)
    folder, _ = quantize_folder(source, tmp_path / "m", *FORMATS["GPTQ"])
    name = "model.layers.0.self_attn.q_proj"

    def kind(change: Callable[[torch.Tensor], None]) -> str | None:
        weights = load_file(folder / "model.safetensors")
        groups = weights[f"{name}.g_idx"].clone()
        change(groups)
        weights[f"{name}.g_idx"] = groups
        save_file(weights, folder / "model.safetensors")
        checkpoint = open_checkpoint(folder)
        found: str | None = checkpoint.kind(f"{name}.weight")  # type: ignore[attr-defined]
        checkpoint.close()
        return found

    assert kind(lambda groups: None) == ORDERED_GROUPS
    assert kind(lambda groups: groups.copy_(groups.sort().values)) == GROUPS
    assert kind(lambda groups: groups.copy_(groups.clamp(min=1))) is None, "a group is larger"
    assert kind(lambda groups: groups[:1].fill_(99)) is None
    with pytest.raises(CorruptFileError, match=f"{name}.g_idx.*names groups beyond the 8"):
        load(folder, quantization="int8")
