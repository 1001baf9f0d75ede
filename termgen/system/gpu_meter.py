"""Figures of an engine's GPU by NVML: where the package `nvidia-ml-py` is.

Only a process on the GPU's machine reads them; a dashboard elsewhere gets them from its server.
Reading runs on a thread, as a driver may take its time: most calls take microseconds, the energy
counter milliseconds.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from termgen.vocabulary.device.gpu_reading import (
    CLOCKS_SET,
    HEAT,
    IDLE,
    POWER_BRAKE,
    POWER_CAP,
    READINGS_KEPT,
    SLOWDOWN,
    GpuHistory,
    GpuReading,
)

READ_S = 1.0
SAMPLES = 10
"""Samples of the power between two readings, where the GPU counts no energy."""
MAX_GAP_S = 1.0
"""Samples that are farther apart do not tell the power between them."""
TIMEOUT_S = 1.0
REASONS = {
    0x1: IDLE,
    0x2: CLOCKS_SET,
    0x4: POWER_CAP,
    0x8: SLOWDOWN,
    0x20: HEAT,
    0x40: HEAT,
    0x80: POWER_BRAKE,
}
"""NVML's bits of clock event reasons; of the others none says that anything is short."""


class GpuMeter:
    """Meter of one GPU. nvml: the module of NVML's functions."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml = nvml
        self._handle = handle

    @classmethod
    def open(cls, device: str, environ: Mapping[str, str] = os.environ) -> GpuMeter | None:
        """None where there is nothing to read: no GPU, no package, no driver. device: the engine's
        name of it, as `cuda:0`."""
        if not device.startswith("cuda"):
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

    def read(self) -> GpuReading:
        """All figures; without any when the driver reports nothing."""
        nvml, ask = self._nvml, self._ask
        memory = ask(nvml.nvmlDeviceGetMemoryInfo)
        busy = ask(nvml.nvmlDeviceGetUtilizationRates)
        limit_mw = ask(nvml.nvmlDeviceGetEnforcedPowerLimit)
        energy_mj = ask(nvml.nvmlDeviceGetTotalEnergyConsumption)
        now_ns = time.perf_counter_ns()  # of the energy, the figure that is divided by time
        bits = ask(nvml.nvmlDeviceGetCurrentClocksEventReasons)
        found = {name: None for bit, name in REASONS.items() if bits is not None and bits & bit}
        return GpuReading(
            time_ns=now_ns,
            busy=None if busy is None else busy.gpu / 100,
            used_bytes=None if memory is None else memory.used,
            total_bytes=None if memory is None else memory.total,
            power_w=self.power_w(),
            power_limit_w=None if limit_mw is None else limit_mw / 1e3,
            energy_j=None if energy_mj is None else energy_mj / 1e3,
            sm_mhz=ask(nvml.nvmlDeviceGetClockInfo, nvml.NVML_CLOCK_SM),
            max_sm_mhz=ask(nvml.nvmlDeviceGetMaxClockInfo, nvml.NVML_CLOCK_SM),
            memory_mhz=ask(nvml.nvmlDeviceGetClockInfo, nvml.NVML_CLOCK_MEM),
            temperature_c=ask(nvml.nvmlDeviceGetTemperature, nvml.NVML_TEMPERATURE_GPU),
            clock_reasons=None if bits is None else tuple(found),
        )

    def power_w(self) -> float | None:
        """Watts now; None where the GPU does not report them."""
        power_mw = self._ask(self._nvml.nvmlDeviceGetPowerUsage)
        return None if power_mw is None else float(power_mw) / 1e3

    def _ask(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """The driver's answer, None for what this GPU does not support, as for a part of a shared
        one."""
        try:
            return call(self._handle, *arguments)
        except self._nvml.NVMLError:
            return None


class PowerSum:
    """Energy as the integral of samples of the power. A gap between them counts for nothing."""

    def __init__(self) -> None:
        self.energy_j = 0.0
        self._last: tuple[int, float] | None = None

    def add(self, time_ns: int, power_w: float) -> None:
        if self._last is not None:
            elapsed_s = (time_ns - self._last[0]) / 1e9
            if elapsed_s < MAX_GAP_S:
                self.energy_j += elapsed_s * (power_w + self._last[1]) / 2
        self._last = time_ns, power_w


class GpuWatch:
    """The readings of an engine's GPU while `follow` runs. Belongs to one event loop."""

    def __init__(self, device: str) -> None:
        self._readings: deque[GpuReading] = deque(maxlen=READINGS_KEPT)
        self._device = device
        self._meter: GpuMeter | None = None
        self._is_open = False
        self._sum = PowerSum()
        self._asking: asyncio.Task[GpuReading | None] | None = None

    @property
    def history(self) -> GpuHistory:
        return tuple(self._readings)

    async def follow(self) -> None:
        """Read once a second; ends at once where there is nothing to read."""
        meter = await self._open()
        while meter is not None:
            reading = await asyncio.to_thread(meter.read)
            if not reading.is_known:
                self._readings.clear()
            if reading.energy_j is None and reading.power_w is not None:
                self._sum.add(reading.time_ns, reading.power_w)
                reading = reading._replace(energy_j=self._sum.energy_j)
                self._readings.append(reading)
                await self._sample(meter)
            else:
                if reading.is_known:
                    self._readings.append(reading)
                await asyncio.sleep(READ_S)

    async def now(self) -> GpuReading | None:
        """A new reading, with the energy that the GPU itself has counted; None without a GPU, or
        while its driver does not answer."""
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._ask())
        with suppress(TimeoutError):
            async with asyncio.timeout(TIMEOUT_S):
                return await asyncio.shield(self._asking)
        return None

    async def _ask(self) -> GpuReading | None:
        meter = await self._open()
        return await asyncio.to_thread(meter.read) if meter is not None else None

    async def _open(self) -> GpuMeter | None:
        if not self._is_open and self._device.startswith("cuda"):
            self._meter = await asyncio.to_thread(GpuMeter.open, self._device)
        self._is_open = True
        return self._meter

    async def _sample(self, meter: GpuMeter) -> None:
        for _ in range(SAMPLES - 1):
            await asyncio.sleep(READ_S / SAMPLES)
            power_w = await asyncio.to_thread(meter.power_w)
            if power_w is not None:
                self._sum.add(time.perf_counter_ns(), power_w)
        await asyncio.sleep(READ_S / SAMPLES)


def _handle(nvml: Any, number: int, environ: Mapping[str, str]) -> Any:
    """NVML counts all GPUs, the engine those that it may see."""
    visible = environ.get("CUDA_VISIBLE_DEVICES", "")
    name = visible.split(",")[number].strip() if visible else str(number)
    if name.isdigit():
        return nvml.nvmlDeviceGetHandleByIndex(int(name))
    return nvml.nvmlDeviceGetHandleByUUID(name)
