"""Products of every format that stays what it is on a GPU, beside float64, and what the formats do
to the probabilities of a model's next token."""

from __future__ import annotations

import random

import pytest
import torch
from triton_device import DEVICES_AND_DTYPES, normal, require_triton
from weight_formats import FORMATS

from termgen.engine.device.layers.linear import LinearMethod, LinearSpec

require_triton()

from termgen.engine.device.quantization.float8 import Float8Linears  # noqa: E402
from termgen.engine.device.quantization.int8_groups import GroupLinears  # noqa: E402

COUNTS = (1, 4, 16, 64, 300)
"""Rows: integers, matrix units, and a weight that is widened."""
UNIT = {torch.float32: 2.0**-20, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
"""Half of a number's last place; of float32, what sums add too."""
OF_INTEGERS = 2.0**-16
"""Most that a number of x is off where it becomes an integer of 16 bits, in parts of the largest
of its 32."""
SAME = 2.0**-10
"""What rounding scales and offsets to 16 bits does to a matrix, in its norm: a number times its
scale and the offset may both be larger than their sum."""
LOSSES = {"int8": 0.01, "q4": 0.11, "fp8": 0.035}
"""The same of formats that are rounded anew."""


def make_method(quantization: str, spec: LinearSpec) -> LinearMethod:
    if quantization == "fp8":
        return Float8Linears()(spec)
    layers = GroupLinears()
    return layers.in_4_bits(spec) if quantization == "q4" else layers(spec)


def check_format(
    name: str, rows: int, columns: int, dtype: torch.dtype, device: str, counts: tuple[int, ...]
) -> None:
    """Each error is one of rounding: within a bound for each number, and, as roundings go either
    way, far smaller ones on the whole."""
    quantization, make = FORMATS[name]
    matrix = make(rows, columns, rows + columns)
    methods = []
    for own in (dtype, torch.float32):
        spec = LinearSpec(columns, rows, own, torch.device(device), is_looked_up=True)
        methods.append(make_method(quantization, spec))
        matrix.load(methods[-1])
        methods[-1].finalize()
    method, exact = methods
    weight = exact.embed(torch.arange(rows, device=device)).double()
    of_file = matrix.values.to(device).double()
    assert (weight - of_file).norm() / of_file.norm() < LOSSES.get(name, SAME)
    for count in counts:
        x = normal(count, columns, dtype=dtype, device=device, seed=count)
        found, expected = method.multiply(x, None).double(), x.double() @ weight.T
        error, unit = (found - expected).abs(), UNIT[dtype]
        products = x.double().abs() @ weight.abs().T
        is_integer = count == 1 and dtype.itemsize == 2 and quantization != "fp8"
        if is_integer:
            largest = x.double().abs().view(count, -1, 32).amax(2).repeat_interleave(32, 1)
            room = largest @ weight.abs().T * OF_INTEGERS + products * UNIT[torch.float32]
        else:
            room = products * unit
        room += expected.abs() * unit + torch.finfo(dtype).smallest_normal
        assert (error <= room).all(), (count, float((error / room).max()))
        total = float(error.norm() / expected.norm())
        assert total < unit, (count, total)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("device", "dtype"), DEVICES_AND_DTYPES)
def test_products_of_small_matrices(name: str, device: str, dtype: torch.dtype) -> None:
    """Interpreted on a CPU, where the same formats need not be tried in each way."""
    counts = COUNTS if device == "cuda" else (1, 16, 300) if dtype.itemsize == 2 else (4,)
    check_format(name, 48, 256, dtype, device, counts)


@pytest.mark.gpu
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("seed", range(3))
def test_products_of_random_shapes(name: str, dtype: torch.dtype, seed: int) -> None:
    print("seed", seed)
    rng = random.Random(seed)
    # Groups lie in words of eight outputs, and the largest blocks have 256 columns.
    rows, columns = 8 * rng.randrange(10, 400), 256 * rng.randrange(1, 14)
    check_format(name, rows, columns, dtype, "cuda", COUNTS)
