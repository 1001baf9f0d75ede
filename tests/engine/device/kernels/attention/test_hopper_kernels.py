"""Kernels for Hopper alone, which no interpreter runs, compile for it on any machine."""

from __future__ import annotations

import os
import subprocess
import sys

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

head_dim, group, window, dtype = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
kernel = paged_prefill_hopper._paged_prefill_hopper_kernel
config = prefill_plan.specialised_config(head_dim)
element = {"bf16": gl.bfloat16, "fp16": gl.float16}[dtype]
layout = gl.NVMMASharedLayout.get_default_for([64, head_dim], element)
pointer, index = f"*{dtype}", "*i32"
types = {
    "q_ptr": pointer, "lines": f"tensordesc<{dtype}[64, {head_dim}],{layout!r}>",
    "out_ptr": pointer, "block_table_ptr": index, "plan_ptr": index, "scale": "fp32",
    "num_tiles": "i32", "q_stride": "i32", "table_stride": "i32",
}
constants = {
    "NUM_KV_HEADS": 8, "HEAD_DIM": head_dim, "GROUP": group, "BLOCK_SIZE": 64, "WINDOW": window,
    "TILE": config.tile, "STAGES": config.num_stages, "GROUPS": config.rows // 64,
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
    ("head_dim", "group", "window", "dtype"), [(64, 4, 0, "bf16"), (128, 7, 1000, "fp16")]
)
def test_prefill_compiles(head_dim: int, group: int, window: int, dtype: str) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, str(head_dim), str(group), str(window), dtype],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("compiled ")
