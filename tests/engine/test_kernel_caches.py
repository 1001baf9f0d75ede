"""What oneDNN keeps of compiled matrix products is bounded, however many sizes steps have."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from termgen.engine import executor

PROGRAM = """
from termgen.engine import executor
executor.NUM_KERNELS = "4"
executor.bound_kernel_caches()
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


def grown_kib(**settings: str) -> int:
    """In a process of its own: both caches are read once."""
    names = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
    environment = {name: value for name, value in os.environ.items() if name not in names}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
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
    """112 numbers of rows, a kernel each: the figure above is not small by itself."""
    many = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "1024", "LRU_CACHE_CAPACITY": "1024"}
    assert grown_kib(**many) > 24 * 1024


def test_an_engine_on_its_way_sets_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LRU_CACHE_CAPACITY", raising=False)
    monkeypatch.setenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "9")
    executor.bound_kernel_caches()
    assert os.environ["LRU_CACHE_CAPACITY"] == executor.NUM_KERNELS
    assert os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] == "9"
