"""What writes to a cache with scales compiles for GPUs that are not here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from triton_device import require_triton

require_triton()

CASES = [
    {"arch": 90, "kind": "int8", "head_dim": 128},
    {"arch": 90, "kind": "int4", "head_dim": 256, "has_norm": True, "has_values": False},
    {"arch": 90, "kind": "int4", "head_dim": 128, "rotary_dim": 64, "num_tokens": 2000},
    {"arch": 80, "kind": "int8", "head_dim": 80, "rotary_dim": 32, "dtype": "float16"},
    {"arch": 90, "kind": "int4", "head_dim": 512, "dtype": "float32", "num_tokens": 2000},
    {"arch": 90, "kind": "fp8", "head_dim": 128},
    {"arch": 80, "kind": "auto", "head_dim": 80, "rotary_dim": 32},
]


def test_spreading_compiles_and_other_caches_have_nothing_of_it() -> None:
    program = Path(__file__).with_name("spread_without_gpu.py")
    done = subprocess.run(
        [sys.executable, program, json.dumps(CASES)],
        env={k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for case, kernels in zip(CASES, json.loads(done.stdout), strict=True):
        is_spread = case["kind"] in ("int8", "int4")
        names = {kernel["kernel"] for kernel in kernels}
        wanted = ("rotate_and_spread", "spread") if is_spread else ("qk_rope_kv", "store_kv")
        assert names == {f"_{name}_kernel" for name in wanted}, "one launch each"
        for kernel in kernels:
            assert not kernel["spills"], (case, kernel)
            assert kernel["shared"] <= 48 * 1024, (case, kernel)
            assert (kernel["shuffles"] > 0) == is_spread, (case, kernel)
