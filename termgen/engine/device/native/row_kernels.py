"""Kernels that go row by row over float32: norms, rotation, activation."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from termgen.engine.device.native.jit import (
    FLOAT,
    FLOAT_BYTES,
    FLOATS,
    INT64,
    LANES,
    POINTER,
    VECTOR_BYTES,
    Definition,
    Emitter,
    Kernel,
    Value,
    compile_kernels,
)


@functools.cache
def row_kernels() -> dict[str, Kernel]:
    """The kernels below, compiled for this machine.

    rms_norm(x, residual, weight, out, size, eps, num_rows, threads): residual may be 0, for none.
    rotate_and_store(qkv, q, kv_cache, slot_mapping, cos, sin, norm_weight, num_heads, num_kv_heads,
    head_dim, eps, num_rows, threads): norm_weight may be 0, for none.
    gated_silu(gate_up, out, size, num_rows, threads).
    """
    p, i = POINTER, INT64
    definitions = {
        "rms_norm": Definition((p, p, p, p, i, FLOAT), _emit_rms_norm),
        "rotate_and_store": Definition((p, p, p, p, p, p, p, i, i, i, FLOAT), _emit_rotate),
        "gated_silu": Definition((p, p, i), _emit_gated_silu),
    }
    return compile_kernels(definitions, key="row_kernels")


def _emit_rms_norm(e: Emitter, arguments: Sequence[Value], first: Value, end: Value) -> None:
    x, residual, weight, out, size, eps = arguments
    row_bytes = e.times(size, FLOAT_BYTES)
    is_added = e.icmp_unsigned("!=", e.ptrtoint(residual, INT64), e.number(0))
    with e.loop(first, end) as row:
        offset = e.times(row, row_bytes)
        source, target = e.variable(e.move(x, offset)), e.move(out, offset)
        with e.if_then(is_added):
            total, added = e.move(residual, offset), e.load(source)
            with e.loop(0, row_bytes, VECTOR_BYTES) as at:
                e.write(e.fadd(e.read(FLOATS, total, at), e.read(FLOATS, added, at)), total, at)
            e.store(total, source)
        _emit_normalised(e, e.load(source), weight, target, row_bytes, eps)


def _emit_normalised(
    e: Emitter, source: Value, weight: Value, target: Value, num_bytes: Value, eps: Value
) -> None:
    """target = source * weight / root mean square of source. They may be the same."""
    squares = e.variable(FLOATS([0.0] * LANES))
    with e.loop(0, num_bytes, VECTOR_BYTES) as at:
        vector = e.read(FLOATS, source, at)
        e.store(e.multiply_add(vector, vector, e.load(squares)), squares)
    count = e.uitofp(e.udiv(num_bytes, e.number(FLOAT_BYTES)), FLOAT)
    mean = e.fdiv(e.add_up(e.load(squares)), count)
    factor = e.splat(e.fdiv(FLOAT(1.0), e.square_root(e.fadd(mean, eps))))
    with e.loop(0, num_bytes, VECTOR_BYTES) as at:
        scaled = e.fmul(e.read(FLOATS, source, at), factor)
        e.write(e.fmul(scaled, e.read(FLOATS, weight, at)), target, at)


def _emit_rotate(e: Emitter, arguments: Sequence[Value], first: Value, end: Value) -> None:
    qkv, q, cache, slots, cos, sin, norm_weight, num_heads, num_kv_heads, head_dim, eps = arguments
    head_bytes = e.times(head_dim, FLOAT_BYTES)
    q_bytes, kv_bytes = e.times(num_heads, head_bytes), e.times(num_kv_heads, head_bytes)
    has_norm = e.icmp_unsigned("!=", e.ptrtoint(norm_weight, INT64), e.number(0))
    with e.loop(first, end) as row:
        # A token's keys and values lie together in its slot, in the order of qkv.
        heads = e.move(qkv, e.times(row, e.plus(q_bytes, kv_bytes, kv_bytes)))
        slot = e.read(INT64, slots, e.times(row, 8))
        keys = e.move(cache, e.times(slot, 2, kv_bytes))
        queries = e.move(q, e.times(row, q_bytes))
        turn = e.times(row, head_bytes)

        def rotate(source: Value, target: Value, weight: Value) -> None:
            start = e.variable(source)
            with e.if_then(has_norm):
                _emit_normalised(e, source, weight, target, head_bytes, eps)
                e.store(target, start)
            _emit_rotated(e, e.load(start), target, e.move(cos, turn), e.move(sin, turn), head_dim)

        with e.loop(0, q_bytes, head_bytes) as at:
            rotate(e.move(heads, at), e.move(queries, at), e.move(norm_weight, at))
        with e.loop(0, kv_bytes, head_bytes) as at:
            place = e.plus(q_bytes, at)
            rotate(e.move(heads, place), e.move(keys, at), e.move(norm_weight, place))
        with e.loop(kv_bytes, e.times(kv_bytes, 2), VECTOR_BYTES) as at:
            e.write(e.read(FLOATS, heads, e.plus(q_bytes, at)), keys, at)


def _emit_rotated(
    e: Emitter, source: Value, target: Value, cos: Value, sin: Value, head_dim: Value
) -> None:
    """A head with its halves turned against each other; `layers.ops.Rotation` has the signs."""
    half = e.times(e.udiv(head_dim, e.number(2)), FLOAT_BYTES)
    with e.loop(0, half, VECTOR_BYTES) as at:
        other = e.plus(at, half)
        lower, upper = e.read(FLOATS, source, at), e.read(FLOATS, source, other)
        for place, number, swapped in ((at, lower, upper), (other, upper, lower)):
            turned = e.fmul(number, e.read(FLOATS, cos, place))
            turned = e.multiply_add(swapped, e.read(FLOATS, sin, place), turned)
            e.write(turned, target, place)


def _emit_gated_silu(e: Emitter, arguments: Sequence[Value], first: Value, end: Value) -> None:
    gate_up, out, size = arguments
    row_bytes = e.times(size, FLOAT_BYTES)
    ones = FLOATS([1.0] * LANES)
    with e.loop(first, end) as row:
        gate = e.move(gate_up, e.times(row, 2, row_bytes))
        up, target = e.move(gate, row_bytes), e.move(out, e.times(row, row_bytes))
        with e.loop(0, row_bytes, VECTOR_BYTES) as at:
            number = e.read(FLOATS, gate, at)
            divisor = e.fadd(ones, e.exponential(e.fneg(number)))
            activated = e.fdiv(number, divisor)
            e.write(e.fmul(activated, e.read(FLOATS, up, at)), target, at)
