"""Memory that libraries keep beside the engine is bounded, whatever the sizes of its steps."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from termgen.system import cpu_settings

PROGRAM = """
from termgen.system import cpu_settings
cpu_settings.NUM_KERNELS = "4"
cpu_settings.bound_kernel_caches()
import torch
torch.set_num_threads(1)

def kib():
    with open("/proc/self/smaps_rollup") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("Anonymous:"))

packed = torch.ops.mkldnn._reorder_linear_weight(torch.zeros(512, 512), None)

def multiply(rows):
    torch.ops.mkldnn._linear_pointwise.default(torch.zeros(rows, 512), packed, None, "none", [], "")

for rows in range(1, 17):
    multiply(rows)
before = kib()
for rows in range(17, 129):
    multiply(rows)
print(kib() - before)
"""


def grown_kib(program: str = PROGRAM, *arguments: str, **settings: str) -> int:
    """Growth of a process of its own: such settings are read once."""
    names = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
    environment = {name: value for name, value in os.environ.items() if name not in names}
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env=environment | settings,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return int(done.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_kernels_for_ever_new_numbers_of_rows_are_let_go() -> None:
    assert grown_kib() < 16 * 1024


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_what_the_user_set_stays() -> None:
    """A control for the test above: 112 numbers of rows, with a kernel each, are not small by
    themselves."""
    many = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "1024", "LRU_CACHE_CAPACITY": "1024"}
    assert grown_kib(**many) > 24 * 1024


def test_an_engine_on_its_way_sets_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LRU_CACHE_CAPACITY", raising=False)
    monkeypatch.setenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "9")
    cpu_settings.bound_kernel_caches()
    assert os.environ["LRU_CACHE_CAPACITY"] == cpu_settings.NUM_KERNELS
    assert os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] == "9"


HEAP_PROGRAM = """
import sys
from termgen.system import cpu_settings
if len(sys.argv) > 1:
    cpu_settings.keep_heaps_compact()
import torch

def kib():
    with open("/proc/self/smaps_rollup") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("Anonymous:"))

for mib in range(1, 24):  # what it has learnt to take from a heap stays so
    torch.ones(mib << 18)
before, small = kib(), []
for _ in range(20):
    large = torch.ones(12 << 18)
    small.append(torch.ones(20_000))  # behind it in the heap, and there to stay
    del large
    small.append(torch.ones(11 << 18).sum())
print(kib() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="a setting of glibc")
def test_large_tensors_leave_no_holes_in_a_heap() -> None:
    assert grown_kib(HEAP_PROGRAM, "compact") < 8 * 1024


def test_limits_of_the_user_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, int]] = []
    library = SimpleNamespace(mallopt=lambda *given: calls.append(given))
    monkeypatch.setattr(cpu_settings.ctypes, "CDLL", lambda name: library)
    monkeypatch.setattr(cpu_settings.sys, "platform", "linux")
    for name in [name for name in os.environ if name.startswith(("MALLOC_", "GLIBC_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "1048576")
    cpu_settings.keep_heaps_compact()
    assert calls == []
    monkeypatch.delenv("MALLOC_MMAP_THRESHOLD_")
    cpu_settings.keep_heaps_compact()
    assert dict(calls) == {-3: cpu_settings.MAPPED_BYTES, -1: cpu_settings.KEPT_BYTES}
