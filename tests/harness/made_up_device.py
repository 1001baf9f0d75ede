"""A simulated GPU that only counts bytes, and the steps of a start over its memory account."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from termgen.config import EngineConfig
from termgen.engine.device.runner.memory import HostMeter, MemoryAccount
from termgen.errors import ConfigError
from termgen.vocabulary.memory_ledger import GIB, MIB, MemoryLedger

BLOCK = 2 * MIB
"""KV bytes of one block of 16 tokens."""


class Device:
    """A simulated GPU whose allocator keeps freed memory."""

    name = "GPU memory"
    counts_tensors = True
    segment_bytes = 2 * MIB

    def __init__(self, total: int = 80 * GIB, others: int = GIB // 2) -> None:
        self.total, self.others = total, others
        self.live = self.kept = self.driver = 0

    def free_and_total(self) -> tuple[int, int]:
        return self.total - self.others - self.driver - self.live - self.kept, self.total

    def allocated(self) -> int:
        return self.live

    def reserved(self) -> int:
        return self.live + self.kept

    def release(self) -> None:
        self.kept = 0

    def allocate(self, nbytes: int) -> None:
        if nbytes > self.kept + self.free_and_total()[0]:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")
        self.kept -= min(nbytes, self.kept)
        self.live += nbytes

    def free(self, nbytes: int) -> None:
        self.live -= nbytes
        self.kept += nbytes

    def run_steps(self, nbytes: int) -> None:
        self.allocate(nbytes)
        self.free(nbytes)


class Graphs:
    """Recordings on such a device, until they are dropped."""

    def __init__(self, device: Device, *, pool: int, driver: int) -> None:
        self._device, self._pool, self._driver = device, pool, driver
        device.allocate(pool)
        device.driver += driver

    def __del__(self) -> None:
        self._device.live -= self._pool
        self._device.driver -= self._driver


def account(device: Device | HostMeter, **settings: object) -> MemoryAccount:
    return MemoryAccount(device, EngineConfig(**settings), where="cuda:0")  # type: ignore[arg-type]


def num_blocks(memory: MemoryAccount, *, max_model_len: int = 1024, kv_bytes: int = 0) -> int:
    return memory.num_blocks(
        block_size=16,
        bytes_per_block=BLOCK,
        max_model_len=max_model_len,
        kv_bytes=kv_bytes,
        num_tensors=4,
    )


def start(device: Device, memory: MemoryAccount, scale: int = MIB) -> MemoryLedger:
    """The builder's steps, with made-up sizes, all multiples of `scale`."""
    earlier = device.live
    with memory.loading_weights("bfloat16"):
        device.allocate(1000 * scale)
    memory.weights = 1000 * scale
    with memory.making("workspace"):
        device.allocate(200 * scale)
    trial_kv = 2 * BLOCK
    device.allocate(trial_kv)

    def steps() -> None:
        device.run_steps(900 * scale)

    memory.measure_activations(steps)
    pools = iter((300 * scale, 0))
    memory.expect_graphs(
        lambda: Graphs(device, pool=next(pools), driver=20 * scale), num_recorded=4, num_wanted=40
    )
    assert device.live == earlier + 1200 * scale + trial_kv, "the trial is forgotten"
    kv_bytes = num_blocks(memory, kv_bytes=trial_kv) * BLOCK
    device.free(trial_kv)
    with memory.making_kv(kv_bytes):
        device.allocate(kv_bytes)
    with memory.recording_graphs():
        graphs = Graphs(device, pool=310 * scale, driver=180 * scale)
        device.run_steps(50 * scale)  # on the recorder's own stream
    steps()
    ledger = memory.ledger(kv_bytes=kv_bytes, kv_tokens=kv_bytes // BLOCK * 16)
    device.graphs = graphs  # type: ignore[attr-defined]
    return ledger


def refusal(call: Callable[[], object]) -> tuple[str, str | None]:
    with pytest.raises(ConfigError) as caught:
        call()
    return str(caught.value), caught.value.param
