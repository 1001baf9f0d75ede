"""Kernel for attention of one query a row, over the paged cache.

Keys and values are read where they lie. A row's result does not depend on the rows beside it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

from termgen.engine.device.native.jit import (
    FLOAT,
    FLOAT_BYTES,
    FLOATS,
    INT32,
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
def decode_kernel() -> Kernel:
    """decode(q, kv_cache, out, block_table, seq_lens, scores, sinks, table_stride, block_stride,
    most_keys, window, chunk, num_kv_heads, group_size, head_dim, block_size, has_sinks, scale,
    softcap, num_items, threads), compiled for this machine. An item is a row's key head with its
    group of query heads; block_stride: floats from one block to the next; scores: memory for
    most_keys floats for every item; window and chunk: at least most_keys for none; softcap: 0 for
    none."""
    arguments = (*[POINTER] * 7, *[INT64] * 10, FLOAT, FLOAT)
    definitions = {"decode": Definition(arguments, _emit_decode)}
    return compile_kernels(definitions, key="decode_attention")["decode"]


def _emit_decode(e: Emitter, arguments: Sequence[Value], first: Value, end: Value) -> None:
    q, cache, out, block_table, seq_lens, scores, sinks, *sizes, scale, softcap = arguments
    table_stride, block_stride, most_keys, window, chunk, num_kv_heads, *sizes = sizes
    group_size, head_dim, block_size, has_sinks = sizes
    block_bytes = e.times(block_stride, FLOAT_BYTES)
    is_capped = e.fcmp_ordered(">", softcap, FLOAT(0.0))
    has_sink = e.icmp_unsigned(">", has_sinks, e.number(0))
    head_bytes = e.times(head_dim, FLOAT_BYTES)
    kv_bytes = e.times(num_kv_heads, head_bytes)
    with e.loop(first, end) as item:
        row, kv_head = e.udiv(item, num_kv_heads), e.urem(item, num_kv_heads)
        length = e.zext(e.read(INT32, seq_lens, e.times(row, 4)), INT64)
        start = _emit_first_key(e, length, window, chunk)
        table = e.move(block_table, e.times(row, table_stride, 4))
        heads = e.move(cache, e.times(kv_head, head_bytes))
        weights = e.move(scores, e.times(item, most_keys, FLOAT_BYTES))

        def key(position: Value, table: Value = table, heads: Value = heads) -> Value:
            """Address of a position's key; its value lies `kv_bytes` behind."""
            block = e.read(INT32, table, e.times(e.udiv(position, block_size), 4))
            at = e.times(e.zext(block, INT64), block_bytes)
            return e.move(heads, e.plus(at, e.times(e.urem(position, block_size), 2, kv_bytes)))

        with e.loop(0, group_size) as member:
            head = e.plus(e.times(item, group_size), member)
            query, target = (e.move(base, e.times(head, head_bytes)) for base in (q, out))
            largest = _emit_scores(e, query, key, weights, start, length, head_bytes, scale)
            most, sink = e.variable(largest), e.variable(FLOAT(-math.inf))
            count = e.sub(length, start)
            with e.if_then(is_capped):
                e.store(_emit_caps(e, weights, largest, count, softcap), most)
            with e.if_then(has_sink):
                of_head = e.plus(e.times(kv_head, group_size), member)
                e.store(e.read(FLOAT, sinks, e.times(of_head, FLOAT_BYTES)), sink)
                e.store(e.maximum(e.load(sink), e.load(most)), most)
            total = e.variable(_emit_softmax(e, weights, e.load(most), count))
            with e.if_then(has_sink):
                weight = _exponential(e, e.fsub(e.load(sink), e.load(most)))
                e.store(e.fadd(e.load(total), weight), total)
            _emit_mean(e, key, weights, start, length, kv_bytes, head_bytes, target, e.load(total))


def _emit_first_key(e: Emitter, length: Value, window: Value, chunk: Value) -> Value:
    """The first key that the last token of a sequence sees; 0 for a row without tokens."""
    none = e.number(0)
    is_cut = e.icmp_unsigned(">", length, window)
    in_window = e.select(is_cut, e.sub(length, window), none)
    last = e.sub(length, e.number(1))
    in_chunk = e.sub(last, e.urem(last, chunk))
    in_chunk = e.select(e.icmp_unsigned(">", length, none), in_chunk, none)
    return e.select(e.icmp_unsigned(">", in_chunk, in_window), in_chunk, in_window)


def _emit_scores(
    e: Emitter,
    query: Value,
    key: Callable[[Value], Value],
    scores: Value,
    start: Value,
    end: Value,
    head_bytes: Value,
    scale: Value,
) -> Value:
    """Writes the scaled products of a query with its keys; returns the largest."""
    most = e.variable(FLOAT(-math.inf))
    with e.loop(start, end) as position:
        address = key(position)
        sums = e.variable(FLOATS([0.0] * LANES))
        with e.loop(0, head_bytes, VECTOR_BYTES) as at:
            product = e.multiply_add(
                e.read(FLOATS, query, at), e.read(FLOATS, address, at), e.load(sums)
            )
            e.store(product, sums)
        score = e.fmul(e.add_up(e.load(sums)), scale)
        e.write(score, scores, e.times(e.sub(position, start), FLOAT_BYTES))
        e.store(e.maximum(score, e.load(most)), most)
    return e.load(most)


def _emit_caps(e: Emitter, scores: Value, most: Value, count: Value, softcap: Value) -> Value:
    """Turns every score s into softcap * tanh(s / softcap); returns that of the largest."""

    def capped(lanes: Value) -> Value:
        # tanh(x) = 1 - 2 / (e ** 2x + 1)
        power = e.exponential(e.fmul(lanes, e.splat(e.fdiv(FLOAT(2.0), softcap))))
        share = e.fdiv(e.splat(e.fmul(FLOAT(2.0), softcap)), e.fadd(power, e.splat(FLOAT(1.0))))
        return e.fsub(e.splat(softcap), share)

    whole = e.times(e.udiv(count, e.number(LANES)), LANES)
    with e.loop(0, whole, LANES) as index:
        at = e.times(index, FLOAT_BYTES)
        e.write(capped(e.read(FLOATS, scores, at)), scores, at)
    with e.loop(whole, count) as index:
        at = e.times(index, FLOAT_BYTES)
        lanes = capped(e.splat(e.read(FLOAT, scores, at)))
        e.write(e.extract_element(lanes, INT32(0)), scores, at)
    return e.extract_element(capped(e.splat(most)), INT32(0))


def _exponential(e: Emitter, number: Value) -> Value:
    return e.extract_element(e.exponential(e.splat(number)), INT32(0))


def _emit_softmax(e: Emitter, scores: Value, most: Value, count: Value) -> Value:
    """Turns scores into their exponentials, less the largest; returns the sum of these."""
    whole = e.times(e.udiv(count, e.number(LANES)), LANES)
    total, shift = e.variable(FLOATS([0.0] * LANES)), e.splat(most)
    with e.loop(0, whole, LANES) as index:
        at = e.times(index, FLOAT_BYTES)
        weight = e.exponential(e.fsub(e.read(FLOATS, scores, at), shift))
        e.write(weight, scores, at)
        e.store(e.fadd(e.load(total), weight), total)
    rest = e.variable(e.add_up(e.load(total)))
    with e.loop(whole, count) as index:
        at = e.times(index, FLOAT_BYTES)
        weight = _exponential(e, e.fsub(e.read(FLOAT, scores, at), most))
        e.write(weight, scores, at)
        e.store(e.fadd(e.load(rest), weight), rest)
    return e.load(rest)


def _emit_mean(
    e: Emitter,
    key: Callable[[Value], Value],
    weights: Value,
    start: Value,
    end: Value,
    kv_bytes: Value,
    head_bytes: Value,
    target: Value,
    total: Value,
) -> None:
    """Writes the weighted mean of the values; zeros for a row without keys."""
    with e.loop(0, head_bytes, VECTOR_BYTES) as at:
        e.write(FLOATS([0.0] * LANES), target, at)
    with e.loop(start, end) as position:
        value = e.move(key(position), kv_bytes)
        weight = e.read(FLOAT, weights, e.times(e.sub(position, start), FLOAT_BYTES))
        share = e.splat(e.fdiv(weight, total))
        with e.loop(0, head_bytes, VECTOR_BYTES) as at:
            added = e.multiply_add(e.read(FLOATS, value, at), share, e.read(FLOATS, target, at))
            e.write(added, target, at)
