"""The verdict of `benchmarks/memory_soak.py`, and its figures about a process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import machine
import memory_soak
from memory_soak import Requests, is_flat, verdict

PROGRAM = """
import subprocess, sys
block = bytearray(b"x") * (64 << 20)
child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
print(child.pid, flush=True)
input()
child.kill()
"""


def samples(sizes: list[float]) -> list[dict[str, Any]]:
    return [
        {"seconds": 5.0 * i, "total_kib": size, "server": {"rss": size}}
        for i, size in enumerate(sizes)
    ]


@pytest.mark.parametrize(
    ("second_half", "flat"),
    [
        ([1000.0 + (i % 7) for i in range(300)], True),
        ([1000.0 + i / 60 for i in range(300)], True),
        ([1000.0 + i / 20 for i in range(300)], False),
        ([1000.0] * 150 + [1020.0] * 150, False),
        ([1000.0] * 250 + [1200.0] + [1000.0] * 49, True),
        ([1020.0 - i / 20 for i in range(300)], True),
    ],
    ids=["noise", "half a per cent", "a line up", "a step", "one peak", "a line down"],
)
def test_only_growth_of_the_second_half_counts(second_half: list[float], flat: bool) -> None:
    first_half = [100.0 + 3 * i for i in range(300)]
    assert is_flat(verdict(samples(first_half + second_half)), 1.0) is flat


def test_too_few_samples_are_no_verdict() -> None:
    with pytest.raises(SystemExit, match="too few"):
        verdict(samples([1.0, 1.0, 1.0]))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_process_is_seen_with_its_children() -> None:
    command = [sys.executable, "-c", PROGRAM]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdin is not None
        child = int(process.stdout.readline())
        assert machine.descendants(process.pid) == [child]
        whole, kinds = (read(process.pid) for read in (resident, machine.resident_by_kind))
        assert whole["rss"] >= whole["anonymous"] >= 64 << 10
        parts = sum(kinds[kind] for kind in ("heap", "arenas", "blocks", "files"))
        assert abs(parts - whole["rss"]) < 2 << 10
        assert kinds["blocks"] + kinds["arenas"] > 64 << 10
        process.stdin.write(b"\n")
        process.stdin.close()
    assert machine.resident_kib(process.pid) == {}


resident = machine.resident_kib


def test_a_fifth_has_schemas_and_most_differ() -> None:
    requests = Requests(5)
    drawn = [requests.draw() for _ in range(3000)]
    keys = [asked.body.keys() for asked in drawn]
    wanted = [body for body in keys if body & {"response_format", "structured_outputs", "text"}]
    assert 0.16 < len(wanted) / len(drawn) < 0.24
    leaving = [asked for asked in drawn if asked.leaves_after is not None]
    assert 0.1 < len(leaving) / len(drawn) < 0.2
    assert {asked.path for asked in drawn} >= {"/v1/responses", "/v1/messages"}
    assert memory_soak.ALL_SCHEMAS > 100 * memory_soak.POPULAR_SCHEMAS
