from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from termgen.engine.device.native import jit
from termgen.engine.device.native.jit import (
    FLOAT,
    FLOAT_BYTES,
    FLOATS,
    INT64,
    LANES,
    POINTER,
    VECTOR_BYTES,
    Definition,
    Emitter,
    Kernel,
    Value,
    compile_kernels,
    threads_for,
)


def each_vector(emit_one: object, *, reads: int = 1) -> Kernel:
    """f(inputs..., out, num_items, threads): out = emit_one(e, vectors...) for every vector."""

    def emit(e: Emitter, arguments: Sequence[Value], first: Value, end: Value) -> None:
        *inputs, out = arguments
        with e.loop(first, end) as index:
            at = e.times(index, VECTOR_BYTES)
            found = emit_one(e, *(e.read(FLOATS, place, at) for place in inputs))  # type: ignore[operator]
            e.write(found, out, at)

    return compile_kernels({"f": Definition((POINTER,) * (reads + 1), emit)})["f"]


def test_the_exponential() -> None:
    kernel = each_vector(lambda e, x: e.exponential(x))
    x = torch.cat((torch.linspace(-87, 88, LANES * 5000), torch.linspace(-1e-3, 1e-3, LANES * 50)))
    y = torch.empty_like(x)
    kernel(x.data_ptr(), y.data_ptr(), len(x) // LANES, 2)
    exact = x.double().exp()
    assert ((y - exact).abs() / exact).max() < 3e-7
    ends = torch.tensor([-math.inf, -1e30, -87.5, 88.5, 1e30, math.inf, math.nan, 0.0] * 2)
    y = torch.empty_like(ends)
    kernel(ends.data_ptr(), y.data_ptr(), 1, 1)
    assert y[:3].tolist() == [0.0, 0.0, 0.0]
    assert y[3:6].isfinite().all() and (y[3:6] > 1e38).all()
    assert y[6].isnan() and y[7] == 1.0


def test_lanes_are_added_up() -> None:
    kernel = each_vector(lambda e, x: e.splat(e.add_up(x)))
    x = torch.randn(7, LANES)
    y = torch.empty_like(x)
    kernel(x.data_ptr(), y.data_ptr(), 7, 1)
    torch.testing.assert_close(y, x.sum(1, keepdim=True).expand(-1, LANES))


@pytest.mark.parametrize("num_items", [0, 1, 2, 3, 7, 1000])
@pytest.mark.parametrize("threads", [1, 2, 3, 8])
def test_threads_divide_the_items(num_items: int, threads: int) -> None:
    """Each item is worked on once, whatever the number of threads."""

    def emit(e: Emitter, arguments: Sequence[Value], first: Value, end: Value) -> None:
        (out,) = arguments
        with e.loop(first, end) as index:
            at = e.times(index, FLOAT_BYTES)
            e.write(e.fadd(e.read(FLOAT, out, at), FLOAT(1.0)), out, at)

    kernel = compile_kernels({"count": Definition((POINTER,), emit)})["count"]
    out = torch.zeros(num_items + 1)
    kernel(out.data_ptr(), num_items, threads)
    assert out[:num_items].eq(1.0).all() and out[num_items] == 0.0


def test_numbers_reach_a_kernel() -> None:
    """Addresses, whole numbers and floats, and what one thread prepares before the others start."""

    def prepare(e: Emitter, arguments: Sequence[Value]) -> None:
        out, count, number = arguments
        e.write(e.fmul(number, e.sitofp(count, FLOAT)), out)

    def emit(e: Emitter, arguments: Sequence[Value], first: Value, end: Value) -> None:
        out, _, _ = arguments
        with e.loop(first, end) as index:
            e.write(e.read(FLOAT, out), out, e.times(e.plus(index, 1), FLOAT_BYTES))

    kernels = compile_kernels({"fill": Definition((POINTER, INT64, FLOAT), emit, prepare)})
    out = torch.zeros(9)
    kernels["fill"](out.data_ptr(), 3, 0.5, 8, 2)
    assert out.tolist() == [1.5] * 9


def test_the_gil_is_free_while_a_kernel_runs() -> None:
    def emit(e: Emitter, arguments: Sequence[Value], first: Value, end: Value) -> None:
        (out,) = arguments
        with e.loop(first, end) as index:
            at = e.times(e.urem(index, e.number(8)), FLOAT_BYTES)
            e.write(e.square_root(e.fadd(e.read(FLOAT, out, at), FLOAT(1.0))), out, at)

    kernel = compile_kernels({"busy": Definition((POINTER,), emit)})["busy"]
    out = torch.zeros(8)
    counted: list[float] = []
    thread = threading.Thread(target=kernel, args=(out.data_ptr(), 30_000_000, 1))
    thread.start()
    while thread.is_alive():
        counted.append(time.perf_counter())
    assert len(counted) > 1000


def test_small_work_keeps_to_one_thread() -> None:
    """Waking another thread would take longer than the work."""
    threads = torch.get_num_threads()
    assert [threads_for(size) for size in (0, 1, 2**15, 2**16 - 1)] == [1, 1, 1, 1]
    assert threads_for(2**16) == min(2, threads)
    assert threads_for(2**30) == threads


@pytest.fixture
def counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The compilations that happen, with an empty cache."""
    monkeypatch.setenv("TERMGEN_CACHE", str(tmp_path))
    found: list[int] = []
    compiled = jit._compile

    def count(*arguments: Any) -> bytes:
        found.append(1)
        return compiled(*arguments)

    monkeypatch.setattr(jit, "_compile", count)
    return found


def check_constant(number: float, key: object) -> None:
    """Compile a kernel that writes the number, or read its code, and run it."""

    def emit(e: Emitter, arguments: Sequence[Value], first: Value, end: Value) -> None:
        (out,) = arguments
        with e.loop(first, end) as index:
            e.write(FLOAT(number), out, e.times(index, FLOAT_BYTES))

    kernel = compile_kernels({"set": Definition((POINTER,), emit)}, key=key)["set"]
    out = torch.zeros(5)
    kernel(out.data_ptr(), 5, 2)
    assert out.tolist() == [number] * 5


def test_compiled_code_is_kept(counted: list[int]) -> None:
    for _ in range(3):
        check_constant(1.5, "key")
    assert len(counted) == 1
    check_constant(2.5, "another key")
    assert len(counted) == 2


def test_code_without_a_key_is_not_kept(counted: list[int], tmp_path: Path) -> None:
    check_constant(1.5, None)
    check_constant(2.5, None)
    assert len(counted) == 2 and not (tmp_path / "kernels").exists()


@pytest.mark.parametrize("what", ["processor", "llvmlite", "source"])
def test_code_is_kept_for_one_processor_library_and_source(
    counted: list[int], monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    check_constant(1.5, "key")
    if what == "processor":
        own = jit.this_processor()
        other = replace(own, features=own.features + ",-rdseed")
        monkeypatch.setattr(jit, "this_processor", lambda: other)
    elif what == "llvmlite":
        monkeypatch.setattr(jit.llvmlite, "__version__", "0.0")
    else:
        monkeypatch.setattr(jit, "_source_digest", lambda: "other")
    check_constant(1.5, "key")
    assert len(counted) == 2


def test_damaged_code_is_compiled_anew(counted: list[int]) -> None:
    check_constant(1.5, "key")
    (entry,) = jit._CODE.folder.iterdir()
    entry.write_bytes(entry.read_bytes()[:-1] + b"?")
    check_constant(1.5, "key")
    check_constant(1.5, "key")
    assert len(counted) == 2


def test_a_cache_that_can_only_be_read_serves(counted: list[int]) -> None:
    check_constant(1.5, "key")
    jit._CODE.folder.chmod(0o500)
    try:
        check_constant(1.5, "key")
        check_constant(2.5, "another key")
    finally:
        jit._CODE.folder.chmod(0o700)
    assert len(counted) == 2
