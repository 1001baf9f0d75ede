"""NVML of two GPUs: the second is full, busy, and held by its power cap."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

GIB = 2**30


class FakeNvml:
    """The module `pynvml`. unsupported: functions that the GPU does not have, as for a part of a
    shared one."""

    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0

    class NVMLError(Exception):
        pass

    def __init__(self) -> None:
        self.reads = 0
        self.unsupported: set[str] = set()
        self.is_broken = False
        self.began = time.perf_counter()

    def nvmlInit(self) -> None:
        pass

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        if index > 1:
            raise self.NVMLError("no such device")
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:
        return {"GPU-aa": 0, "GPU-bb": 1}[uuid]

    def _check(self, name: str) -> None:
        if self.is_broken or name in self.unsupported:
            raise self.NVMLError("not supported")

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:
        self.reads += 1
        self._check("busy")
        return SimpleNamespace(gpu=(7, 93)[handle])

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        self._check("memory")
        return SimpleNamespace(used=(1, 71)[handle] * GIB, total=79 * GIB)

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:
        self._check("power")
        return (78_000, 684_500)[handle]

    def nvmlDeviceGetEnforcedPowerLimit(self, handle: int) -> int:
        self._check("limit")
        return 685_000

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: int) -> int:
        self._check("energy")
        return 5_000_000 + int((time.perf_counter() - self.began) * self.nvmlDeviceGetPowerUsage(1))

    def nvmlDeviceGetClockInfo(self, handle: int, kind: int) -> int:
        self._check("clocks")
        return (1605, 3201)[kind - 1]

    def nvmlDeviceGetMaxClockInfo(self, handle: int, kind: int) -> int:
        self._check("clocks")
        return (1980, 3201)[kind - 1]

    def nvmlDeviceGetTemperature(self, handle: int, sensor: int) -> int:
        self._check("temperature")
        return 71

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: int) -> int:
        self._check("reasons")
        return (0x1, 0x4)[handle]
