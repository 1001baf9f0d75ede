"""The GPU's load and memory by NVML: choice of the GPU, display, and machines without one."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from fake_engine import FakeEngine
from tui_harness import MODEL, SECOND, FrozenApp, TimedEngine, ready, wait_until

from termgen.tui.feeds.gpu_meter import GpuMeter, GpuReading
from termgen.tui.paint.canvas import Canvas

GIB = 2**30


class FakeNvml:
    """Two GPUs; the second is full and busy."""

    class NVMLError(Exception):
        pass

    def __init__(self) -> None:
        self.reads = 0
        self.is_broken = False

    def nvmlInit(self) -> None:
        pass

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        if index > 1:
            raise self.NVMLError("no such device")
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:
        return {"GPU-aa": 0, "GPU-bb": 1}[uuid]

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:
        self.reads += 1
        if self.is_broken:
            raise self.NVMLError("not supported")
        return SimpleNamespace(gpu=(7, 93)[handle])

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        return SimpleNamespace(used=(1, 71)[handle] * GIB, total=79 * GIB)


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    fake = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return fake


def engine(device: str) -> FakeEngine:
    return TimedEngine(model=replace(MODEL, device=device))


@pytest.mark.parametrize(
    ("device", "visible", "busy"),
    [
        ("cuda", None, 0.07),
        ("cuda:1", None, 0.93),
        ("cuda:0", "1", 0.93),
        ("cuda:1", "GPU-bb,GPU-aa", 0.07),
        ("cuda:2", None, None),
        ("cuda:1", "0", None),
        ("cpu", None, None),
    ],
)
def test_it_reads_the_gpu_of_the_engine(
    nvml: FakeNvml, device: str, visible: str | None, busy: float | None
) -> None:
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    meter = GpuMeter.open(engine(device), environ)
    assert (meter is None) == (busy is None)
    if meter is not None:
        used = 71 if busy == 0.93 else 1
        assert meter.read() == GpuReading(busy or 0.0, used * GIB, 79 * GIB)
        nvml.is_broken = True
        assert meter.read() is None


def test_without_the_package_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert GpuMeter.open(engine("cuda:0")) is None


@pytest.mark.parametrize(
    ("size", "name", "words"),
    [
        ((200, 52), "#gauges", ("GPU busy", "93%", "GPU memory", "71/79 GiB", "▇")),
        ((120, 40), "#gauges", ("GPU", "93%", "GPU mem", "71/79G", "▇")),
        ((100, 24), "#numbers", ("GPU 93%",)),
    ],
)
async def test_the_overview_shows_it_while_it_is_looked_at(
    nvml: FakeNvml,
    monkeypatch: pytest.MonkeyPatch,
    size: tuple[int, int],
    name: str,
    words: tuple[str, ...],
) -> None:
    monkeypatch.setattr("termgen.tui.feeds.gpu_meter.READ_S", 0.01)
    app = FrozenApp(engine("cuda:1"), start_screen="dashboard")
    async with app.run_test(size=size) as pilot:
        await ready(app, pilot)
        await wait_until(pilot, lambda: nvml.reads > 2)
        app.now_ns += 2 * SECOND
        await app.dashboard.refresh_view()
        await pilot.pause()  # the tiles are higher where there is a GPU
        text = app.screen.query_one(name, Canvas).text
        assert all(word in text for word in words), text
        await pilot.press("f2")
        await pilot.pause()
        before = nvml.reads
        await pilot.pause(0.1)
        assert nvml.reads <= before + 1, "nobody looks"


async def test_nothing_is_shown_of_a_cpu(nvml: FakeNvml) -> None:
    app = FrozenApp(engine("cpu"), start_screen="dashboard")
    async with app.run_test(size=(140, 52)) as pilot:
        await ready(app, pilot)
        await app.dashboard.refresh_view()
        assert "GPU" not in app.screen.query_one("#gauges", Canvas).text and not nvml.reads
