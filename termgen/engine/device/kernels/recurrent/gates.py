"""Scalar functions that the kernels of the gated delta net share."""

from __future__ import annotations

import triton
import triton.language as tl

from termgen.engine.device.kernels.recurrent.layout import CONV_TAPS

RING = tl.constexpr(CONV_TAPS)
L2_EPS = tl.constexpr(1e-6)


@triton.jit
def ring_row(position, ROWS: tl.constexpr):
    """The row of a ring of so many that has the token at `position`, which is -ROWS at least."""
    if ROWS & (ROWS - 1) == 0:
        return position & (ROWS - 1)
    else:
        return (position + ROWS) % ROWS


@triton.jit
def silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def log_decay(a, a_log, dt_bias):
    """-exp(a_log) * softplus(a + dt_bias) of float32 values.

    A series where the exponential is small: log(1 + e) would lose its digits, and over thousands of
    tokens a decay near zero decides what is left of a state.
    """
    x = a + dt_bias
    e = tl.exp(tl.minimum(x, 20.0))
    series = e * (1.0 - e * (0.5 - e * (0.33333334 - e * 0.25)))
    softplus = tl.where(x > 20.0, x, tl.where(e < 0.01, series, tl.log(1.0 + e)))
    return -tl.exp(a_log) * softplus


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def to_operand(x, dtype: tl.constexpr):
    """x as an operand of a product: float16 holds everything here but values of unusual size."""
    if dtype == tl.float16:
        return tl.clamp(x, -65504.0, 65504.0, tl.PropagateNan.ALL).to(tl.float16)
    else:
        return x
