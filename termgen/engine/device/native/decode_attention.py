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
    """decode(q, kv_cache, out, block_table, seq_lens, scores, table_stride, most_keys, window,
    num_kv_heads, group_size, head_dim, block_size, scale, num_items, threads), compiled for this
    machine. An item is a row's key head with its group of query heads; scores: memory for most_keys
    floats for every item."""
    arguments = (*[POINTER] * 6, *[INT64] * 7, FLOAT)
    definitions = {"decode": Definition(arguments, _emit_decode)}
    return compile_kernels(definitions, key="decode_attention")["decode"]


def _emit_decode(e: Emitter, arguments: Sequence[Value], first: Value, end: Value) -> None:
    q, cache, out, block_table, seq_lens, scores, *sizes, scale = arguments
    table_stride, most_keys, window, num_kv_heads, group_size, head_dim, block_size = sizes
    head_bytes = e.times(head_dim, FLOAT_BYTES)
    kv_bytes = e.times(num_kv_heads, head_bytes)
    with e.loop(first, end) as item:
        row, kv_head = e.udiv(item, num_kv_heads), e.urem(item, num_kv_heads)
        length = e.zext(e.read(INT32, seq_lens, e.times(row, 4)), INT64)
        is_cut = e.icmp_unsigned(">", length, window)
        start = e.select(is_cut, e.sub(length, window), e.number(0))
        table = e.move(block_table, e.times(row, table_stride, 4))
        heads = e.move(cache, e.times(kv_head, head_bytes))
        weights = e.move(scores, e.times(item, most_keys, FLOAT_BYTES))

        def key(position: Value, table: Value = table, heads: Value = heads) -> Value:
            """Address of a position's key; its value lies `kv_bytes` behind."""
            block = e.read(INT32, table, e.times(e.udiv(position, block_size), 4))
            slot = e.plus(e.times(e.zext(block, INT64), block_size), e.urem(position, block_size))
            return e.move(heads, e.times(slot, 2, kv_bytes))

        with e.loop(0, group_size) as member:
            head = e.plus(e.times(item, group_size), member)
            query, target = (e.move(base, e.times(head, head_bytes)) for base in (q, out))
            most = _emit_scores(e, query, key, weights, start, length, head_bytes, scale)
            total = _emit_softmax(e, weights, most, e.sub(length, start))
            _emit_mean(e, key, weights, start, length, kv_bytes, head_bytes, target, total)


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
        lanes = e.exponential(e.splat(e.fsub(e.read(FLOAT, scores, at), most)))
        weight = e.extract_element(lanes, INT32(0))
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
