"""How busy the GPU is and how full its memory, by NVML: where the package `nvidia-ml-py` is.

The dashboard owns one and calls it on a thread, as a driver may take its time. Memory is what all
processes on the GPU hold together, so it differs from what the engine knows of itself.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from termgen.tui.feeds.feed import EngineFeed, StreamFeed

READ_S = 1.0
KEPT = 120
"""Readings: as far back as the series of the engine go."""


class GpuReading(NamedTuple):
    busy: float
    """Share of the last moment in which something ran."""
    used_bytes: int
    total_bytes: int
    time_ns: int = 0


GpuHistory = Sequence[GpuReading]
"""The newest last; empty where there is nothing to read."""


class GpuMeter:
    """Meter of one GPU. nvml: the module of NVML's functions."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml = nvml
        self._handle = handle

    @classmethod
    def open(cls, client: EngineFeed, environ: Mapping[str, str] = os.environ) -> GpuMeter | None:
        """None where there is nothing to read: no GPU, a GPU elsewhere, no package, no driver."""
        device = client.model.device
        if isinstance(client, StreamFeed) or not device.startswith("cuda"):
            return None
        try:
            nvml = importlib.import_module("pynvml")
        except ImportError:
            return None
        try:
            nvml.nvmlInit()
            return cls(nvml, _handle(nvml, int(device.partition(":")[2] or 0), environ))
        except (nvml.NVMLError, IndexError):
            return None

    def read(self) -> GpuReading | None:
        """None when the driver does not tell, as for a part of a shared GPU."""
        try:
            busy = self._nvml.nvmlDeviceGetUtilizationRates(self._handle).gpu
            memory = self._nvml.nvmlDeviceGetMemoryInfo(self._handle)
        except self._nvml.NVMLError:
            return None
        return GpuReading(busy / 100, memory.used, memory.total)


class GpuWatch:
    """The readings of a client's GPU, as long as `follow` runs."""

    def __init__(self, client: EngineFeed) -> None:
        self._readings: deque[GpuReading] = deque(maxlen=KEPT)
        self._client = client
        self._meter: GpuMeter | None = None

    @property
    def history(self) -> GpuHistory:
        return tuple(self._readings)

    async def follow(self) -> None:
        """Read once a second; ends at once where there is nothing to read."""
        if self._meter is None:
            self._meter = await asyncio.to_thread(GpuMeter.open, self._client)
        while self._meter is not None:
            reading = await asyncio.to_thread(self._meter.read)
            if reading is None:
                self._readings.clear()
            else:
                self._readings.append(reading._replace(time_ns=time.perf_counter_ns()))
            await asyncio.sleep(READ_S)


def _handle(nvml: Any, number: int, environ: Mapping[str, str]) -> Any:
    """NVML counts all GPUs, the engine those that it may see."""
    visible = environ.get("CUDA_VISIBLE_DEVICES", "")
    name = visible.split(",")[number].strip() if visible else str(number)
    if name.isdigit():
        return nvml.nvmlDeviceGetHandleByIndex(int(name))
    return nvml.nvmlDeviceGetHandleByUUID(name)
