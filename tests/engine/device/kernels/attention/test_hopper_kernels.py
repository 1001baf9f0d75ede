"""Attention compiles for GPUs that are not here, in the shared memory that they have.

Kernels for Hopper alone are not even run by an interpreter.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from triton_device import require_triton

require_triton()

# A process of its own: this one interprets kernels, and then even Triton's library is interpreted.
COMPILE = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from termgen.engine.device.kernels.attention import paged_prefill_hopper, prefill_plan

head_dim, group, window, has_sinks = (int(number) for number in sys.argv[1:5])
dtype = sys.argv[5]
kernel = paged_prefill_hopper._paged_prefill_hopper_kernel
config = prefill_plan.specialised_config(head_dim)
element = {"bf16": gl.bfloat16, "fp16": gl.float16}[dtype]
layout = gl.NVMMASharedLayout.get_default_for([64, head_dim], element)
pointer, index = f"*{dtype}", "*i32"
types = {
    "q_ptr": pointer, "lines": f"tensordesc<{dtype}[64, {head_dim}],{layout!r}>",
    "out_ptr": pointer, "block_table_ptr": index, "plan_ptr": index,
    "sinks_ptr": "*fp32" if has_sinks else pointer, "scale": "fp32", "num_tiles": "i32",
    "q_stride": "i32", "table_stride": "i32",
}
constants = {
    "NUM_KV_HEADS": 8, "HEAD_DIM": head_dim, "GROUP": group, "BLOCK_SIZE": 64, "WINDOW": window,
    "TILE": config.tile, "STAGES": config.num_stages, "GROUPS": config.rows // 64,
    "HAS_SINKS": bool(has_sinks),
}
names = [p.name for p in kernel.params]
source = GluonASTSource(
    kernel,
    {name: types.get(name, "constexpr") for name in names},
    {(names.index(name),): value for name, value in constants.items()},
    {(names.index(n),): [["tt.divisibility", 16]] for n in ("q_ptr", "out_ptr", "q_stride")},
)
made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
assert made.metadata.shared <= 227 * 1024, made.metadata.shared
assert "wgmma.mma_async" in made.asm["ptx"] and ".local" not in made.asm["ptx"]
print("compiled", len(made.asm["cubin"]))
"""


@pytest.mark.parametrize(
    ("head_dim", "group", "window", "has_sinks", "dtype"),
    [(64, 8, 128, 1, "bf16"), (128, 7, 0, 0, "fp16"), (128, 5, -8192, 0, "bf16")],
)
def test_prefill_compiles(
    head_dim: int, group: int, window: int, has_sinks: int, dtype: str
) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            COMPILE,
            str(head_dim),
            str(group),
            str(window),
            str(has_sinks),
            dtype,
        ],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("compiled ")


KIB = {80: 163, 89: 99, 90: 227}
LARGE = [
    {"arch": 90, "head_dim": 512},
    {"arch": 90, "head_dim": 512, "dtype": "float32"},
    {"arch": 90, "head_dim": 192, "softcap": 50.0, "has_sinks": True, "window": 100, "group": 2},
    {"arch": 90, "head_dim": 128, "chunk": 8192, "group": 5},
    {"arch": 90, "head_dim": 128, "cache_dtype": "int8"},
    {"arch": 90, "head_dim": 256, "cache_dtype": "int8", "window": 100},
    {"arch": 90, "head_dim": 512, "cache_dtype": "int8", "has_sinks": True},
    {"arch": 90, "head_dim": 128, "cache_dtype": "uint8"},
    {"arch": 80, "head_dim": 256, "cache_dtype": "uint8", "window": 100},
    {"arch": 80, "head_dim": 80, "cache_dtype": "int8", "softcap": 50.0},
    {"arch": 89, "head_dim": 512},
    {"arch": 89, "head_dim": 256, "softcap": 50.0, "has_sinks": True},
]


def test_large_heads_caps_and_sinks_fit_in_shared_memory() -> None:
    program = Path(__file__).with_name("attention_without_gpu.py")
    done = subprocess.run(
        [sys.executable, program, json.dumps(LARGE)],
        env={k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    names: set[str] = set()
    for case, kernels in zip(LARGE, found, strict=True):
        for kernel in kernels:
            assert kernel["shared"] <= KIB[case["arch"]] * 1024, (case, kernel)
            assert not kernel["spills"], (case, kernel)
            names.add(kernel["kernel"])
    assert names == {"_paged_decode_kernel", "_paged_prefill_kernel"}
    (prompt,) = (k for k in found[0] if k["kernel"] == "_paged_prefill_kernel")
    assert prompt["wgmma"], "multiplied by the instructions of older generations"
