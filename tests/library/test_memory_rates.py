"""The rate of a device's memory: measured once, and kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from termgen.library.memory_rates import device_key, keep_rate, kept_rate, measure_cpu_rate


def test_a_rate_is_kept_for_its_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERMGEN_CACHE", str(tmp_path))
    key = device_key("CPU", 2)
    assert kept_rate(key) is None
    keep_rate(key, 2.5e10)
    assert kept_rate(key) == 2.5e10
    assert kept_rate(device_key("CPU", 4)) is None and kept_rate(device_key("GPU", 2)) is None
    for wrong in (float("nan"), float("inf"), 0.0, -1.0):
        keep_rate(key, wrong)
        assert kept_rate(key) is None
    (tmp_path / "memory-rates" / key).write_bytes(b"damaged")
    assert kept_rate(key) is None


@pytest.mark.parametrize("threads", [1, 3])
def test_a_cpu_is_measured(threads: int) -> None:
    rate = measure_cpu_rate(threads, total_bytes=1 << 22)
    assert 1e8 < rate < 1e13
