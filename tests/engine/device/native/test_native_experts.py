"""All experts of a layer in one call of a kernel, against one product after another."""

from __future__ import annotations

import ctypes
import random
from typing import Any

import pytest
import torch

from termgen.engine.device.config.experts_config import GluClamp
from termgen.engine.device.layers.linear import Build, FloatLinear
from termgen.engine.device.layers.native_ops import NativeOps
from termgen.engine.device.layers.ops import TorchOps, clamped_glu, run_experts
from termgen.engine.device.native.expert_kernels import Activation
from termgen.engine.device.native.experts import BlockTable, ExpertWeights, run_natively
from termgen.engine.device.native.int8_blocks import Int8Blocks, dequantize, quantize_rows
from termgen.engine.device.quantization.block_experts import BlockExperts
from termgen.engine.device.quantization.int8 import Int8Linear

CLAMP = GluClamp(alpha=1.702, limit=0.7)


def made(num: int, rows: int, columns: int, num_bits: int) -> tuple[BlockTable, torch.Tensor]:
    """Matrices, and what they stand for."""
    rounded = [
        quantize_rows(torch.randn(rows, columns) * columns**-0.5, num_bits) for _ in range(num)
    ]
    table = BlockTable.of([Int8Blocks(one) for one in rounded])
    assert table is not None and table.num_bits == num_bits
    return table, torch.stack([dequantize(one) for one in rounded])


def activated(name: str, pair: torch.Tensor) -> torch.Tensor:
    if name == "clamp":
        return clamped_glu(pair, CLAMP)
    return TorchOps().gated_activation(pair, name)


@pytest.mark.parametrize("weighs_inputs", [False, True])
@pytest.mark.parametrize("name", ["silu", "gelu_tanh", "clamp"])
@pytest.mark.parametrize("bits", [(4, 8), (8, 4), (8, 8), (4, 4)])
@pytest.mark.parametrize("num_tokens", [1, 5, 70, 300])
def test_a_call_computes_all_experts(
    num_tokens: int, bits: tuple[int, int], name: str, weighs_inputs: bool
) -> None:
    seed = random.randrange(10**6)
    print("seed", seed)
    torch.manual_seed(seed)
    num, top_k, hidden, inner = 7, 3, 96, 64
    (gate_up, first), (down, second) = (
        made(num, 2 * inner, hidden, bits[0]),
        made(num, hidden, inner, bits[1]),
    )
    has_biases = not weighs_inputs and num_tokens != 70
    biases = (torch.randn(num, 2 * inner), torch.randn(num, hidden)) if has_biases else (None, None)
    x = torch.randn(num_tokens, hidden)
    ids = torch.stack([torch.randperm(num)[:top_k] for _ in range(num_tokens)])
    weights = torch.rand(num_tokens, top_k)
    activation = Activation(name, CLAMP.limit, CLAMP.alpha) if name == "clamp" else Activation(name)
    experts = ExpertWeights(gate_up, down, activation, *biases, weighs_inputs)
    found = run_natively(x, ids.int(), weights, experts)
    expected = run_experts(
        *(x, ids, weights, first, second),
        lambda pair: activated(name, pair),
        biases,
        weighs_inputs,
    )
    torch.testing.assert_close(found, expected, rtol=2e-4, atol=2e-4)


def test_experts_elsewhere_are_counted_and_left_out() -> None:
    torch.manual_seed(2)
    num, top_k, hidden, inner = 6, 3, 64, 32
    (gate_up, first), (down, second) = made(num, 2 * inner, hidden, 8), made(num, hidden, inner, 8)
    experts = ExpertWeights(gate_up, down, Activation("silu"))
    x = torch.randn(20, hidden)
    ids = torch.stack([torch.randperm(num)[:top_k] for _ in range(20)]).int()
    weights = torch.rand(20, top_k)
    is_elsewhere = ids < 2
    sent = torch.where(is_elsewhere, -1 - ids, ids)
    sent[4] = -1 - ids[4]  # a token without any expert here
    for row, number in enumerate((2**31 - 1, -(2**31), num, -2 - num)):  # none that there is
        sent[row, 1] = number
        ids[row, 1] = -1
    counts = torch.full((num,), 5, dtype=torch.int64)
    out, scratch = (
        torch.full_like(x, 7.0),
        torch.empty(experts.scratch_bytes(20, top_k), dtype=torch.uint8),
    )
    job = experts.job(x, sent, weights, out, scratch, counts=counts, threads=2)
    experts.program(ctypes.addressof(job))
    known = ids[ids >= 0]
    assert counts.tolist() == (5 + torch.bincount(known, minlength=num)).tolist()
    assert sent[:4, 1].tolist() == [-1] * 4
    kept = weights * (sent >= 0)
    expected = run_experts(
        *(x, ids.long().clamp(min=0), kept, first, second),
        lambda pair: activated("silu", pair),
    )
    torch.testing.assert_close(out, expected, rtol=2e-4, atol=2e-4)
    assert not out[4].any()


def test_a_token_has_the_same_result_beside_others() -> None:
    torch.manual_seed(3)
    num, hidden, inner = 5, 64, 64
    gate_up, down = made(num, 2 * inner, hidden, 8)[0], made(num, hidden, inner, 4)[0]
    experts = ExpertWeights(gate_up, down, Activation("silu"))
    x, weights = torch.randn(40, hidden), torch.rand(40, 2)
    ids = torch.stack([torch.randperm(num)[:2] for _ in range(40)]).int()
    whole = run_natively(x, ids, weights, experts)
    alone = [
        run_natively(*(part[i : i + 1] for part in (x, ids, weights)), experts) for i in range(40)
    ]
    assert torch.equal(whole, torch.cat(alone))


@pytest.mark.parametrize("inner", [16, 48, 80, 64])
def test_columns_that_fill_no_block_are_computed_one_by_one(inner: int) -> None:
    """With `2 * inner` rows in whole tiles, and columns that are padded."""
    num, hidden = 4, 64
    build = Build(torch.float32, torch.device("cpu"), FloatLinear, NativeOps())
    parts, floats = [], []
    for rows, columns in ((2 * inner, hidden), (hidden, inner)):
        part = BlockExperts((num, rows, columns), build, Int8Linear)
        weights = torch.randn(num, rows, columns) * columns**-0.5
        for expert, weight in enumerate(weights):
            part._loaders[expert].load_rows(weight, 0)
        part.finalize()
        parts.append(part)
        floats.append(weights)
    x, logits = torch.randn(5, hidden), torch.randn(5, num)
    options: dict[str, Any] = {"top_k": 2, "renormalize": True, "activation": "silu"}
    found = NativeOps().experts(x, logits, *parts, **options)
    expected = TorchOps().experts(x, logits, *floats, **options)
    torch.testing.assert_close(found, expected, rtol=0.05, atol=0.05)


def test_matrices_that_are_not_alike_have_no_table() -> None:
    eight, four = (Int8Blocks(quantize_rows(torch.randn(32, 32), bits)) for bits in (8, 4))
    assert BlockTable.of([eight, four]) is None
    assert BlockTable.of([Int8Blocks(quantize_rows(torch.randn(40, 32)))]) is None
