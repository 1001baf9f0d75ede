"""act(gate) * up of a gated MLP, from the two side by side or apart, and the gate of attention's
result.

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
    gate_ptr,
    up_ptr,
    out_ptr,
    gate_stride,
    up_stride,
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
    gate = tl.load(gate_ptr + row * gate_stride + columns, mask=inside, other=0.0)
    up = tl.load(up_ptr + row * up_stride + columns, mask=inside, other=0.0)
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
    gate, up = gate_up.chunk(2, dim=-1)
    return activated_product(gate, up, activation, out=out, pdl=pdl)


def activated_product(
    gate: torch.Tensor,
    up: torch.Tensor,
    activation: str,
    *,
    out: torch.Tensor | None = None,
    pdl: bool = True,
) -> torch.Tensor:
    """act(gate) * up, [T, size] each, of dense rows."""
    num_rows, size = gate.shape
    assert activation in ACTIVATIONS and gate.shape == up.shape, (activation, up.shape)
    assert gate.stride(1) == up.stride(1) == 1, (gate.stride(), up.stride())
    if out is None:
        out = torch.empty((num_rows, size), dtype=gate.dtype, device=gate.device)
    assert out.is_contiguous()
    if num_rows:
        _gated_activation_kernel[(num_rows, triton.cdiv(size, _BLOCK))](
            gate,
            up,
            out,
            # A lone row's stride means nothing and must not choose another variant.
            *((gate.stride(0), up.stride(0)) if num_rows > 1 else (2 * size, 2 * size)),
            SIZE=size,
            BLOCK=_BLOCK,
            ACTIVATION=activation,
            num_warps=4,
            **pdl_options(gate.device, enabled=pdl),
        )
    return out


@triton.jit
def _sigmoid_gate_kernel(
    x_ptr, gate_ptr, SIZE: tl.constexpr, BLOCK: tl.constexpr, USE_PDL: tl.constexpr
):
    if USE_PDL:
        gdc_launch_dependents()
        gdc_wait()
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < SIZE
    at = tl.program_id(0).to(tl.int64) * SIZE + columns
    x = tl.load(x_ptr + at, mask=inside, other=0.0)
    gate = tl.load(gate_ptr + at, mask=inside, other=0.0)
    opening = (1.0 / (1.0 + tl.exp(-gate.to(tl.float32)))).to(gate.dtype).to(tl.float32)
    tl.store(gate_ptr + at, (x.to(tl.float32) * opening).to(gate.dtype), mask=inside)


def sigmoid_gate(x: torch.Tensor, gate: torch.Tensor, *, pdl: bool = True) -> torch.Tensor:
    """x [T, size] * sigmoid(gate [T, size]), in the memory of the gate."""
    num_rows, size = gate.shape
    assert x.shape == gate.shape and x.is_contiguous() and gate.is_contiguous(), x.shape
    if num_rows:
        _sigmoid_gate_kernel[(num_rows, triton.cdiv(size, _BLOCK))](
            x,
            gate,
            SIZE=size,
            BLOCK=_BLOCK,
            num_warps=4,
            **pdl_options(gate.device, enabled=pdl),
        )
    return gate


def sigmoid_gate_reference(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(gate)


def gated_activation_reference(gate_up: torch.Tensor, *, activation: str = "silu") -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    if activation == "silu":
        return F.silu(gate) * up
    return F.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none") * up
