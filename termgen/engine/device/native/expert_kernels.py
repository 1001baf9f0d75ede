"""All experts of a layer in one call: a program over the tiles of `int8_blocks`.

Pairs of a token and an expert are sorted by expert and cut into runs of one expert, so that numbers
cut out of a weight serve the rows of a run together. A product's items are the tiles of all runs:
eight experts of one token keep as many threads busy as one large matrix.

    sort        runs of pairs; counts how often each expert was chosen
    scale       x with the factors of `int8_kernels.Layout`, and the sums of its blocks
    gate_up     the first product, by place in the order of experts
    activate    activation, scaled as x was
    down        the second product, by pair
    add_up      each token's pairs, weighted, in their order: in a sum no thread comes first
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from termgen.engine.device.native.int8_kernels import Layout, emit_rows
from termgen.engine.device.native.jit import (
    FLOAT,
    FLOAT_BYTES,
    FLOATS,
    INT32,
    INT64,
    LANES,
    POINTER,
    VECTOR_BYTES,
    Call,
    Definition,
    Emitter,
    Kernel,
    Program,
    Value,
    compile_kernels,
    has_wide_vectors,
)

_LONG, _INT = 8, 4
MOST_ROWS = 8
"""Rows of a run."""
_ALONE = 4
"""Up to so many tokens one thread does all but the products: it is done before others wake."""
ACTIVATIONS = ("silu", "gelu_tanh")
_ADDRESSES = frozenset(
    "x ids weights out gate_up down gate_up_bias down_bias counts x_scaled gated activated y order"
    " runs starts".split()
)
"""Fields of a `Job` that are addresses."""


class Job(ctypes.Structure):
    """The argument of the program. Addresses of contiguous arrays, and numbers."""

    _fields_ = [
        ("x", ctypes.c_int64),  # [T, hidden] float32
        # [T, k] int32; a negative one, -1 - expert, is not computed. What is no expert becomes -1:
        # a step that only compiles kernels leaves them unwritten.
        ("ids", ctypes.c_int64),
        ("weights", ctypes.c_int64),  # [T, k] float32
        ("out", ctypes.c_int64),  # [T, hidden] float32
        ("gate_up", ctypes.c_int64),  # [num_experts, 2] int64: addresses of tiles and row scales
        ("down", ctypes.c_int64),  # the same
        ("gate_up_bias", ctypes.c_int64),  # [num_experts, 2 * inner] float32, or 0
        ("down_bias", ctypes.c_int64),  # [num_experts, hidden] float32, or 0
        ("counts", ctypes.c_int64),  # [num_experts] int64: added to, for those computed or not
        ("x_scaled", ctypes.c_int64),  # room for T * hidden * (1 + 1 / block) floats
        ("gated", ctypes.c_int64),  # T * k * 2 * inner floats
        ("activated", ctypes.c_int64),  # T * k * inner * (1 + 1 / block) floats
        ("y", ctypes.c_int64),  # T * k * hidden floats
        ("order", ctypes.c_int64),  # [T * k] int32
        ("runs", ctypes.c_int64),  # [T * k, 3] int32: expert, first place, pairs
        ("starts", ctypes.c_int64),  # [num_experts + 1] int32
        ("num_runs", ctypes.c_int64),  # written
        ("num_pairs", ctypes.c_int64),  # written: those computed
        ("num_tokens", ctypes.c_int64),
        ("top_k", ctypes.c_int64),
        ("num_experts", ctypes.c_int64),
        ("hidden", ctypes.c_int64),
        ("inner", ctypes.c_int64),
        ("weighs_inputs", ctypes.c_int64),
        ("threads", ctypes.c_int64),
    ]


@dataclass(frozen=True, slots=True)
class Activation:
    """A function of gate and up."""

    name: str
    limit: float = 0.0
    """Above 0: see `GluClamp`, and the name does not matter."""
    alpha: float = 0.0

    def emit(self, e: Emitter, gate: Value, up: Value) -> Value:
        if self.limit:
            highest, lowest = _all(self.limit), _all(-self.limit)
            gate = e.select(e.fcmp_ordered(">", gate, highest), highest, gate)
            up = e.select(e.fcmp_ordered(">", up, highest), highest, up)
            up = e.select(e.fcmp_ordered("<", up, lowest), lowest, up)
            up = e.fadd(up, _all(1.0))
            return e.fmul(up, _times_sigmoid(e, gate, e.fmul(gate, _all(self.alpha))))
        inner = gate
        if self.name == "gelu_tanh":  # (1 + tanh u) / 2 is the sigmoid of 2 u
            cubed = e.fmul(e.fmul(gate, gate), gate)
            inner = e.multiply_add(cubed, _all(0.044715), gate)
            inner = e.fmul(inner, _all(2 * math.sqrt(2 / math.pi)))
        return e.fmul(_times_sigmoid(e, gate, inner), up)


def _times_sigmoid(e: Emitter, number: Value, inner: Value) -> Value:
    return e.fdiv(number, e.fadd(_all(1.0), e.exponential(e.fneg(inner))))


def _all(number: float) -> Value:
    return FLOATS([number] * LANES)


@functools.cache
def experts_program(gate_up: Layout, down: Layout, activation: Activation) -> Kernel:
    """The program for weights of these layouts: called with the address of a `Job`. Its sizes are
    multiples of a layout's block and tile."""
    rows_together = (8, 4, 2, 1) if has_wide_vectors() else (2, 1)
    parts = _Parts(gate_up, down, activation, rows_together)
    names = "sort", "scale", "gate_up", "activate", "down", "add_up"
    definitions = {name: Definition((POINTER,), getattr(parts, name)) for name in names}
    programs = {"experts": Program((POINTER,), parts.run)}
    key = "experts", gate_up, down, activation, rows_together
    return compile_kernels(definitions, programs, key=key)["experts"]


class _Fields:
    """The fields of a job, read when they are asked for."""

    def __init__(self, e: Emitter, job: Value) -> None:
        self._e, self._job = e, job

    def __getattr__(self, name: str) -> Value:
        value = self._e.read(INT64, self._job, getattr(Job, name).offset)
        return self._e.inttoptr(value, POINTER) if name in _ADDRESSES else value

    def write(self, name: str, value: Value) -> None:
        self._e.write(value, self._job, getattr(Job, name).offset)


@dataclass(frozen=True, slots=True)
class _Parts:
    of_gate_up: Layout
    of_down: Layout
    activation: Activation
    rows_together: Sequence[int]

    def run(self, e: Emitter, arguments: Sequence[Value], call: Call) -> None:
        job = arguments[0]
        fields = _Fields(e, job)
        one, threads = e.number(1), fields.threads
        few = e.icmp_unsigned("<=", fields.num_tokens, e.number(_ALONE))
        beside = e.select(few, one, threads)
        call("sort", [job], one, one)
        num_runs, num_pairs = fields.num_runs, fields.num_pairs
        with e.if_then(e.icmp_unsigned(">", num_runs, e.number(0))):
            blocks = e.udiv(fields.hidden, e.number(self.of_gate_up.block))
            call("scale", [job], e.times(fields.num_tokens, blocks), beside)
            tiles = e.udiv(e.times(fields.inner, 2), e.number(self.of_gate_up.tile))
            call("gate_up", [job], e.times(num_runs, tiles), threads)
            call("activate", [job], num_pairs, beside)
            tiles = e.udiv(fields.hidden, e.number(self.of_down.tile))
            call("down", [job], e.times(num_runs, tiles), threads)
        call("add_up", [job], fields.num_tokens, beside)

    def sort(self, e: Emitter, arguments: Sequence[Value], first: Value, end: Value) -> None:
        """The one item is everything."""
        fields = _Fields(e, arguments[0])
        ids, counts, starts, order = fields.ids, fields.counts, fields.starts, fields.order
        num_experts = fields.num_experts
        pairs = e.times(fields.num_tokens, fields.top_k)
        zero = INT32(0)
        with e.if_then(e.icmp_unsigned("<", first, end)):
            with e.loop(0, e.plus(num_experts, 1)) as expert:
                e.write(zero, starts, e.times(expert, _INT))
            with e.loop(0, pairs) as pair:
                chosen = e.read(INT32, ids, e.times(pair, _INT))
                is_here = e.icmp_signed(">=", chosen, zero)
                expert = e.sext(e.select(is_here, chosen, e.not_(chosen)), INT64)
                is_known = e.icmp_unsigned("<", expert, num_experts)
                with e.if_then(is_known):
                    _add_to(e, counts, e.times(expert, _LONG), INT64(1))
                with e.if_then(e.and_(is_known, is_here)):
                    # Counted one further on: sums become beginnings.
                    _add_to(e, starts, e.times(e.plus(expert, 1), _INT), INT32(1))
                with e.if_then(e.not_(is_known)):
                    e.write(INT32(-1), ids, e.times(pair, _INT))
            with e.loop(0, num_experts) as expert:
                before = e.read(INT32, starts, e.times(expert, _INT))
                _add_to(e, starts, e.times(e.plus(expert, 1), _INT), before)
            self._cut(e, fields, starts, num_experts)
            fields.write(
                "num_pairs", e.sext(e.read(INT32, starts, e.times(num_experts, _INT)), INT64)
            )
            with e.loop(0, pairs) as pair:
                chosen = e.read(INT32, ids, e.times(pair, _INT))
                with e.if_then(e.icmp_signed(">=", chosen, zero)):
                    at = e.times(e.sext(chosen, INT64), _INT)
                    place = e.read(INT32, starts, at)
                    e.write(e.trunc(pair, INT32), order, e.times(e.sext(place, INT64), _INT))
                    e.write(e.add(place, INT32(1)), starts, at)

    @staticmethod
    def _cut(e: Emitter, fields: _Fields, starts: Value, num_experts: Value) -> None:
        runs, num_runs = fields.runs, e.variable(e.number(0))
        with e.loop(0, num_experts) as expert:
            begin = e.sext(e.read(INT32, starts, e.times(expert, _INT)), INT64)
            until = e.sext(e.read(INT32, starts, e.times(e.plus(expert, 1), _INT)), INT64)
            with e.loop(begin, until, MOST_ROWS) as place:
                left = e.sub(until, place)
                is_last = e.icmp_unsigned("<", left, e.number(MOST_ROWS))
                count = e.select(is_last, left, e.number(MOST_ROWS))
                number = e.load(num_runs)
                run = e.move(runs, e.times(number, 3 * _INT))
                for index, value in enumerate((expert, place, count)):
                    e.write(e.trunc(value, INT32), run, index * _INT)
                e.store(e.plus(number, 1), num_runs)
        fields.write("num_runs", e.load(num_runs))

    def scale(self, e: Emitter, arguments: Sequence[Value], first: Value, end: Value) -> None:
        fields, layout = _Fields(e, arguments[0]), self.of_gate_up
        x, scaled, factors = fields.x, fields.x_scaled, _factors(layout)
        sums = e.move(scaled, e.times(fields.num_tokens, fields.hidden, FLOAT_BYTES))
        with e.loop(first, end) as block:
            start = e.times(block, layout.block * FLOAT_BYTES)
            total = _all(0.0)
            for at in range(0, layout.block * FLOAT_BYTES, VECTOR_BYTES):
                numbers = e.read(FLOATS, x, e.plus(start, at))
                e.write(e.fmul(numbers, factors), scaled, e.plus(start, at))
                total = e.fadd(total, numbers)
            e.write(e.add_up(total), sums, e.times(block, FLOAT_BYTES))

    def gate_up(self, e: Emitter, arguments: Sequence[Value], first: Value, end: Value) -> None:
        fields = _Fields(e, arguments[0])
        rows, columns = e.times(fields.inner, 2), fields.hidden
        order, top_k = fields.order, fields.top_k

        def token(place: Value) -> Value:
            return e.udiv(_index(e, order, place), top_k)

        x, num_rows = fields.x_scaled, fields.num_tokens
        places = fields.gate_up, x, num_rows, fields.gated
        self._multiply(
            *(e, fields, self.of_gate_up, rows, columns, places, token, lambda place: place),
            *(first, end),
        )

    def down(self, e: Emitter, arguments: Sequence[Value], first: Value, end: Value) -> None:
        fields = _Fields(e, arguments[0])
        order = fields.order
        places = fields.down, fields.activated, fields.num_pairs, fields.y
        self._multiply(
            *(e, fields, self.of_down, fields.hidden, fields.inner, places),
            *(lambda place: place, lambda place: _index(e, order, place), first, end),
        )

    def _multiply(
        self,
        e: Emitter,
        fields: _Fields,
        layout: Layout,
        num_rows: Value,
        num_columns: Value,
        places: tuple[Value, Value, Value, Value],
        input_of: Callable[[Value], Value],
        output_of: Callable[[Value], Value],
        first: Value,
        end: Value,
    ) -> None:
        """One product. places: the table of weights, rows of x, their number, rows of the
        result. input_of, output_of: the row of x, and of the result, of a place in the order."""
        table, x, num_inputs, y = places
        tiles = e.udiv(num_rows, e.number(layout.tile))
        num_blocks = e.udiv(num_columns, e.number(layout.block))
        x_stride = e.times(num_columns, FLOAT_BYTES)
        sums = e.move(x, e.times(num_inputs, x_stride))
        sums_stride, y_stride = e.times(num_blocks, FLOAT_BYTES), e.times(num_rows, FLOAT_BYTES)
        runs = fields.runs
        with e.loop(first, end) as item:
            run = e.move(runs, e.times(e.udiv(item, tiles), 3 * _INT))
            tile = e.urem(item, tiles)
            expert, start, count = (_index(e, run, e.number(i)) for i in range(3))
            entry = e.move(table, e.times(expert, 2 * _LONG))
            matrix, row_scale = (
                e.inttoptr(e.read(INT64, entry, i * _LONG), POINTER) for i in range(2)
            )
            weights = e.move(matrix, e.times(tile, num_blocks, layout.block_bytes))
            outputs = e.move(y, e.times(tile, layout.tile * FLOAT_BYTES))
            scales = layout.row_scales(e, row_scale, tile)
            done = e.number(0)
            for together in self.rows_together:
                until = e.sub(count, e.urem(e.sub(count, done), e.number(together)))
                with e.loop(done, until, together) as row:
                    here = [e.plus(start, row, i) for i in range(together)]
                    inputs = [input_of(place) for place in here]
                    emit_rows(
                        *(layout, e, weights),
                        [e.move(x, e.times(each, x_stride)) for each in inputs],
                        [e.move(sums, e.times(each, sums_stride)) for each in inputs],
                        [e.move(outputs, e.times(output_of(place), y_stride)) for place in here],
                        *(scales, num_blocks),
                    )
                done = until

    def activate(self, e: Emitter, arguments: Sequence[Value], first: Value, end: Value) -> None:
        fields, layout = _Fields(e, arguments[0]), self.of_down
        inner, order, ids, weights = fields.inner, fields.order, fields.ids, fields.weights
        gated, scaled, bias = fields.gated, fields.activated, fields.gate_up_bias
        weighs_inputs = _is_set(e, fields.weighs_inputs)
        has_bias = _is_set(e, e.ptrtoint(bias, INT64))
        half, factors = e.times(inner, FLOAT_BYTES), _factors(layout)
        sums = e.move(scaled, e.times(fields.num_pairs, half))
        num_blocks = e.udiv(inner, e.number(layout.block))
        with e.loop(first, end) as place:
            pair = _index(e, order, place)
            gate = e.move(gated, e.times(place, 2, half))
            of_expert = e.move(bias, e.times(_index(e, ids, pair), 2, half))
            factor = e.variable(_all(1.0))
            with e.if_then(weighs_inputs):
                e.store(e.splat(e.read(FLOAT, weights, e.times(pair, FLOAT_BYTES))), factor)
            target, its_sums = e.times(place, half), e.times(place, num_blocks)
            with e.loop(0, num_blocks) as block:
                start = e.times(block, layout.block * FLOAT_BYTES)
                total = _all(0.0)
                for offset in range(0, layout.block * FLOAT_BYTES, VECTOR_BYTES):
                    at = e.plus(start, offset)
                    parts = []
                    for where in (at, e.plus(half, at)):
                        part = e.variable(e.fmul(e.read(FLOATS, gate, where), e.load(factor)))
                        with e.if_then(has_bias):
                            added = e.read(FLOATS, of_expert, where)
                            e.store(e.fadd(e.load(part), added), part)
                        parts.append(e.load(part))
                    number = self.activation.emit(e, *parts)
                    e.write(e.fmul(number, factors), scaled, e.plus(target, at))
                    total = e.fadd(total, number)
                e.write(e.add_up(total), sums, e.times(e.plus(its_sums, block), FLOAT_BYTES))

    @staticmethod
    def add_up(e: Emitter, arguments: Sequence[Value], first: Value, end: Value) -> None:
        fields = _Fields(e, arguments[0])
        ids, weights, y, out, bias = (
            getattr(fields, name) for name in ("ids", "weights", "y", "out", "down_bias")
        )
        top_k, row_bytes = fields.top_k, e.times(fields.hidden, FLOAT_BYTES)
        weighs_inputs = _is_set(e, fields.weighs_inputs)
        has_bias = _is_set(e, e.ptrtoint(bias, INT64))
        with e.loop(first, end) as token:
            target = e.move(out, e.times(token, row_bytes))
            with e.loop(0, row_bytes, VECTOR_BYTES) as at:
                e.write(_all(0.0), target, at)
            with e.loop(0, top_k) as slot:
                pair = e.plus(e.times(token, top_k), slot)
                expert = _index(e, ids, pair)
                with e.if_then(e.icmp_signed(">=", expert, e.number(0))):
                    weight = e.splat(e.read(FLOAT, weights, e.times(pair, FLOAT_BYTES)))
                    weight = e.select(weighs_inputs, _all(1.0), weight)
                    row = e.move(y, e.times(pair, row_bytes))
                    of_expert = e.move(bias, e.times(expert, row_bytes))
                    with e.loop(0, row_bytes, VECTOR_BYTES) as at:
                        number = e.variable(e.read(FLOATS, row, at))
                        with e.if_then(has_bias):
                            added = e.read(FLOATS, of_expert, at)
                            e.store(e.fadd(e.load(number), added), number)
                        total = e.multiply_add(e.load(number), weight, e.read(FLOATS, target, at))
                        e.write(total, target, at)


def _factors(layout: Layout) -> Any:
    """What a vector of x is multiplied by."""
    return FLOATS([layout.factor(lane % len(layout.places)) for lane in range(LANES)])


def _index(e: Emitter, numbers: Value, at: Value) -> Value:
    """One of int32 numbers."""
    return e.sext(e.read(INT32, numbers, e.times(at, _INT)), INT64)


def _add_to(e: Emitter, numbers: Value, offset: Value, added: Value) -> None:
    e.write(e.add(e.read(added.type, numbers, offset), added), numbers, offset)


def _is_set(e: Emitter, number: Value) -> Value:
    return e.icmp_unsigned("!=", number, e.number(0))
