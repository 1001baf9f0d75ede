"""A GPU's figures by NVML: choice of the GPU, what it does not support, and energy."""

from __future__ import annotations

import asyncio
import sys
import time
from contextlib import suppress

import pytest
from fake_nvml import GIB, FakeNvml
from server_harness import eventually

from termgen.system import gpu_meter
from termgen.system.gpu_meter import GpuMeter, GpuWatch, PowerSum
from termgen.vocabulary.device.gpu_reading import GpuReading

ALL = ("busy", "memory", "power", "limit", "energy", "clocks", "temperature", "reasons")


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    fake = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return fake


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
        ("remote", None, None),
    ],
)
def test_it_reads_the_gpu_of_the_engine(
    nvml: FakeNvml, device: str, visible: str | None, busy: float | None
) -> None:
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    meter = GpuMeter.open(device, environ)
    assert (meter is None) == (busy is None)
    if meter is not None:
        reading = meter.read()
        assert reading.busy == busy and reading.used_bytes == (71 if busy == 0.93 else 1) * GIB


def test_it_reads_every_figure(nvml: FakeNvml) -> None:
    meter = GpuMeter.open("cuda:1", {})
    assert meter is not None
    before = time.perf_counter_ns()
    reading = meter.read()
    assert before <= reading.time_ns <= time.perf_counter_ns()
    assert reading.energy_j is not None and reading.energy_j >= 5000
    assert reading._replace(time_ns=0, energy_j=None) == GpuReading(
        busy=0.93,
        used_bytes=71 * GIB,
        total_bytes=79 * GIB,
        power_w=684.5,
        power_limit_w=685.0,
        sm_mhz=1605,
        max_sm_mhz=1980,
        memory_mhz=3201,
        temperature_c=71,
        clock_reasons=("power cap",),
    )
    assert reading.memory_share == pytest.approx(71 / 79)


@pytest.mark.parametrize("missing", ALL)
def test_each_figure_may_be_missing(nvml: FakeNvml, missing: str) -> None:
    nvml.unsupported = {missing}
    meter = GpuMeter.open("cuda:0", {})
    assert meter is not None
    found = {name for name, value in meter.read()._asdict().items() if value is None}
    names = {
        "busy": {"busy"},
        "memory": {"used_bytes", "total_bytes"},
        "power": {"power_w", "energy_j"},  # the stand-in counts energy from its power
        "limit": {"power_limit_w"},
        "energy": {"energy_j"},
        "clocks": {"sm_mhz", "max_sm_mhz", "memory_mhz"},
        "temperature": {"temperature_c"},
        "reasons": {"clock_reasons"},
    }
    assert found == names[missing]


def test_a_driver_that_reports_nothing_gives_no_figure(nvml: FakeNvml) -> None:
    nvml.is_broken = True
    meter = GpuMeter.open("cuda:0", {})
    assert meter is not None and not meter.read().is_known


def test_without_the_package_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert GpuMeter.open("cuda:0", {}) is None


def test_every_reason_of_nvml_that_holds_clocks_is_named() -> None:
    assert {bit for bit in gpu_meter.REASONS} == {0x1, 0x2, 0x4, 0x8, 0x20, 0x40, 0x80}


def test_energy_is_the_integral_of_the_power_and_gaps_count_for_nothing() -> None:
    power = PowerSum()
    for tenth in range(11):
        power.add(tenth * 100_000_000, 100.0 + 10 * tenth)
    assert power.energy_j == pytest.approx(150.0)
    power.add(60_000_000_000, 700.0)
    assert power.energy_j == pytest.approx(150.0)
    power.add(60_500_000_000, 300.0)
    assert power.energy_j == pytest.approx(150.0 + 250.0)


async def test_a_watch_reads_while_it_follows(
    nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_meter, "READ_S", 0.01)
    watch = GpuWatch("cuda:1")
    following = asyncio.create_task(watch.follow())
    await eventually(lambda: len(watch.history) > 3)
    following.cancel()
    with suppress(asyncio.CancelledError):
        await following
    times = [reading.time_ns for reading in watch.history]
    assert times == sorted(times) and watch.history[-1].busy == 0.93
    now = await watch.now()
    assert now is not None and now.time_ns > times[-1] and len(watch.history) == len(times)


async def test_without_a_counter_the_power_is_added_up(
    nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_meter, "READ_S", 0.05)
    nvml.unsupported = {"energy"}
    watch = GpuWatch("cuda:1")
    following = asyncio.create_task(watch.follow())
    await eventually(lambda: len(watch.history) > 4)
    following.cancel()
    first, last = watch.history[0], watch.history[-1]
    assert first.energy_j is not None and last.energy_j is not None
    elapsed_s = (last.time_ns - first.time_ns) / 1e9
    assert last.energy_j - first.energy_j == pytest.approx(684.5 * elapsed_s, rel=0.01)
    now = await watch.now()
    assert now is not None and now.energy_j is None, "no counter of the GPU's own"


async def test_readings_end_when_the_driver_reports_nothing_any_more(
    nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_meter, "READ_S", 0.01)
    watch = GpuWatch("cuda:0")
    following = asyncio.create_task(watch.follow())
    await eventually(lambda: len(watch.history) > 1)
    nvml.is_broken = True
    await eventually(lambda: not watch.history)
    following.cancel()


async def test_a_driver_that_hangs_holds_nothing_up(
    nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_meter, "TIMEOUT_S", 0.02)
    asked = 0

    def hang(self: GpuMeter) -> GpuReading:
        nonlocal asked
        asked += 1
        time.sleep(0.3)
        return GpuReading(busy=0.5)

    monkeypatch.setattr(GpuMeter, "read", hang)
    watch = GpuWatch("cuda:0")
    assert await watch.now() is None and await watch.now() is None
    assert asked == 1, "it is not asked again while it hangs"
    await eventually(lambda: watch._asking is not None and watch._asking.done())


@pytest.mark.parametrize("device", ["cpu", "remote"])
async def test_nothing_is_read_without_a_gpu_here(nvml: FakeNvml, device: str) -> None:
    watch = GpuWatch(device)
    await watch.follow()
    assert await watch.now() is None and not watch.history and not nvml.reads
