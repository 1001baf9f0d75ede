"""The parts of the gated delta kernels: the plan, the norm, and what compiles for which GPU."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from triton_device import DEVICES, DEVICES_AND_DTYPES, assert_near, normal, require_triton

require_triton()

from termgen.engine.device.kernels.recurrent.chunk_plan import (  # noqa: E402
    ChunkPlan,
    max_chunks,
    plan_chunks,
)
from termgen.engine.device.kernels.recurrent.gated_norm import gated_norm  # noqa: E402
from termgen.engine.device.kernels.recurrent.layout import CHUNK  # noqa: E402
from termgen.engine.device.recurrent.reference import gated_norm_reference  # noqa: E402

PROGRAM = Path(__file__).with_name("delta_compiled_without_gpu.py")
SEED = 11


def listed_chunks(
    lengths: list[int], first_row: int, skip_single: bool
) -> list[tuple[int, int, int, int]]:
    found, start = [], 0
    for row, length in enumerate(lengths):
        if row >= first_row and not (skip_single and length == 1):
            found += [
                (row, start + offset, min(CHUNK, length - offset), offset)
                for offset in range(0, length, CHUNK)
            ]
        start += length
    return found


@pytest.mark.parametrize("device", DEVICES)
def test_a_plan_lists_chunks_and_rows(device: str) -> None:
    print("seed", SEED)
    source = random.Random(SEED)
    cases = [([1], 0, False), ([1], 0, True), ([64], 0, False), ([1, 1, 65, 128], 2, False)]
    for _ in range(6):
        lengths = [source.choice([0, 1, 2, 63, 64, 65, 300]) for _ in range(source.randint(1, 9))]
        cases.append((lengths, 0, True))
    for lengths, first_row, skip_single in cases:
        # Tokens of no row, and rows without tokens, as in a recorded step.
        num_tokens = sum(lengths[first_row:]) + 3
        plan = ChunkPlan(max_rows=16, max_tokens=4096, device=torch.device(device))
        plan.chunks.fill_(-7)
        plan.rows.fill_(-7)
        starts = torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)
        num_chunks = plan_chunks(
            starts,
            plan,
            first_row=first_row,
            num_rows=len(lengths),
            num_tokens=num_tokens,
            skip_single=skip_single,
        )
        assert num_chunks == max_chunks(num_tokens, len(lengths) - first_row)
        expected = listed_chunks(lengths, first_row, skip_single)
        chunks = plan.chunks.tolist()
        assert [tuple(chunk) for chunk in chunks[: len(expected)]] == expected
        assert all(row == -1 for row, *_ in chunks[len(expected) : num_chunks])
        assert all(row == -7 for row, *_ in chunks[num_chunks:]), "wrote past the plan"
        rows = list(dict.fromkeys(row for row, *_ in expected))
        assert plan.rows.tolist()[: len(rows) + 1] == [len(rows), *rows]


@pytest.mark.parametrize(("device", "dtype"), DEVICES_AND_DTYPES)
@pytest.mark.parametrize(("num_heads", "dim"), [(1, 16), (9, 128)])
def test_gated_norm(device: str, dtype: torch.dtype, num_heads: int, dim: int) -> None:
    o = normal(3, num_heads, dim, dtype=dtype, device=device, seed=1, scale=2.0)
    # A slice of a wider tensor, as a fused projection's output may be.
    wide = normal(3, num_heads * dim + 8, dtype=dtype, device=device, seed=2, scale=3.0)
    z = wide[:, : num_heads * dim]
    weight = normal(dim, dtype=torch.float32, device=device, seed=3)
    assert_near(gated_norm(o, z, weight, 1e-6), gated_norm_reference(o, z, weight, 1e-6), dtype)


def test_the_kernels_compile_for_other_gpus() -> None:
    """27B shapes, in a process of its own: this one may interpret kernels, which compiles
    nothing."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(PROGRAM)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert {(line["arch"], line["dtype"]) for line in lines} == {(80, "f16"), (90, "bf16")}
    for line in lines:
        # Where the recurrence has not all shared memory to itself, two programs fit.
        is_alone = line["arch"] == 90 and line["name"] == "_recurrence_kernel"
        assert line["shared"] <= line["has"] // (1 if is_alone else 2), line
        assert ("griddepcontrol" in line["words"]) == (line["arch"] == 90 and line["is_chained"])
    products = {line["name"] for line in lines if "wgmma" in line["words"]}
    assert products == {"_factors_kernel", "_recurrence_kernel"}
