"""Products of experts compile for GPUs that are not here, in the shared memory that they have."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from triton_device import require_triton

require_triton()

PROGRAM = Path(__file__).with_name("experts_without_gpu.py")
SHARED_KIB = {80: 163, 89: 99, 90: 227}
CASES = [
    *({"arch": 90, "form": "fp8-blocks", "num_tokens": n} for n in (1, 64, 128, 4096)),
    {"arch": 90, "form": "fp8", "num_tokens": 4096, "dtype": "float16"},
    {"arch": 90, "form": "fp8", "num_tokens": 1, "hidden": 1000, "inner": 360},
    *({"arch": 90, "form": "nvfp4", "num_tokens": n} for n in (1, 64, 4096)),
    # Sizes differ: a process compiles a kernel once.
    {"arch": 90, "form": "ordered", "num_tokens": 1},
    {"arch": 90, "form": "ordered", "num_tokens": 4096, "hidden": 1024, "inner": 512},
    {"arch": 80, "form": "nvfp4", "num_tokens": 256, "dtype": "float16"},
    {"arch": 89, "form": "fp8-blocks", "num_tokens": 4096},
    {"arch": 89, "form": "fp8", "num_tokens": 1, "dtype": "float16"},
]


def test_products_compile() -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(PROGRAM), json.dumps(CASES)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: list[list[dict[str, Any]]] = json.loads(done.stdout)
    for case, kernels in zip(CASES, found, strict=True):
        # Gate and up, and down; each brings x into another order first.
        assert len(kernels) == (4 if case["form"] == "ordered" else 2)
        for kernel in kernels:
            assert kernel["shared"] <= SHARED_KIB[case["arch"]] * 1024, (case, kernel)
            assert not kernel["local"], (case, kernel)
