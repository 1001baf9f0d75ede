"""act(gate) * up of a gated MLP, from the two side by side.

Called by the decoder's layers. The activation is rounded before it is multiplied, as
`layers.ops` does it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from termgen.engine.device.kernels.launch import pdl_options

ACTIVATIONS = ("silu", "gelu", "gelu_tanh")
_BLOCK = 1024


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """The activation of x, float32."""
    if ACTIVATION == "silu":
        return x / (1.0 + tl.exp(-x))
    elif ACTIVATION == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    else:
        # tanh(y) = 1 - 2 / (exp(2 y) + 1), which neither overflows nor cancels to NaN.
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        return 0.5 * x * (2.0 - 2.0 / (tl.exp(2.0 * inner) + 1.0))


@triton.jit
def _gated_activation_kernel(
    gate_up_ptr,
    out_ptr,
    gate_up_stride,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ACTIVATION: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    if USE_PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < SIZE
    gate_ptr = gate_up_ptr + row * gate_up_stride
    gate = tl.load(gate_ptr + columns, mask=inside, other=0.0)
    up = tl.load(gate_ptr + SIZE + columns, mask=inside, other=0.0)
    x = activate(gate.to(tl.float32), ACTIVATION)
    activated = x.to(gate.dtype).to(tl.float32)
    out = (activated * up.to(tl.float32)).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * SIZE + columns, out, mask=inside)


def gated_activation(
    gate_up: torch.Tensor,
    activation: str = "silu",
    *,
    out: torch.Tensor | None = None,
    pdl: bool = True,
) -> torch.Tensor:
    """gate_up [T, 2 * size] -> act(gate) * up, [T, size]."""
    num_rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    assert activation in ACTIVATIONS and gate_up.stride(1) == 1, (activation, gate_up.stride())
    if out is None:
        out = torch.empty((num_rows, size), dtype=gate_up.dtype, device=gate_up.device)
    assert out.is_contiguous()
    if num_rows:
        _gated_activation_kernel[(num_rows, triton.cdiv(size, _BLOCK))](
            gate_up,
            out,
            # A lone row's stride means nothing and must not choose another variant.
            gate_up.stride(0) if num_rows > 1 else 2 * size,
            SIZE=size,
            BLOCK=_BLOCK,
            ACTIVATION=activation,
            num_warps=4,
            **pdl_options(gate_up.device, enabled=pdl),
        )
    return out


def gated_activation_reference(gate_up: torch.Tensor, *, activation: str = "silu") -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    if activation == "silu":
        return F.silu(gate) * up
    return F.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none") * up
