"""Emits and compiles kernels for this machine's CPU, with LLVM.

A kernel is a Python function that emits instructions through an `Emitter`. `compile_kernels` makes
each of them a function that divides `num_items` items among threads and can be called with
addresses. The threads are those of the OpenMP library that torch has loaded, so that a step does
not have two teams that fight for the cores; without that library there is one thread.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import llvmlite
import llvmlite.binding as llvm
import numpy as np
import torch
from llvmlite import ir
from numpy.polynomial import Chebyshev, Polynomial

from termgen.library.user_cache import UserCache, digest

LANES = 16
"""Numbers in a vector: one register of AVX-512, two of AVX2, four of NEON."""

FLOAT_BYTES = 4
VECTOR_BYTES = LANES * FLOAT_BYTES

INT32, INT64 = ir.IntType(32), ir.IntType(64)
POINTER = ir.IntType(8).as_pointer()
FLOAT = ir.FloatType()
FLOATS = ir.VectorType(FLOAT, LANES)
HALVES = ir.VectorType(ir.HalfType(), LANES)
INTS = ir.VectorType(INT32, LANES)
BYTES = ir.VectorType(ir.IntType(8), LANES)

Value = Any
"""An LLVM value: a number or address that exists when the kernel runs."""
Emit = Callable[["Emitter", Sequence[Value], Value, Value], None]
"""(emitter, arguments, first, end): emits a kernel's work on items first..end - 1."""

_BYTES_PER_THREAD = 2**15
"""One thread reads so much in the time that it takes to wake another and wait for it."""
_LN2_UPPER = float(np.float32(math.log(2)))
_LN2_LOWER = math.log(2) - _LN2_UPPER

_CODE = UserCache("kernels", most_entries=64)
"""Compiled kernels. A model uses four entries or five, of some ten kilobytes each."""
_C_TYPES = {POINTER: ctypes.c_void_p, INT64: ctypes.c_int64, FLOAT: ctypes.c_float}
_OPENMP_NAMES = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")


@dataclass(frozen=True, slots=True)
class Definition:
    """A kernel to compile: called with `arguments`, then the number of items and of threads."""

    arguments: tuple[Any, ...]
    """POINTER, INT64 or FLOAT each."""
    emit: Emit
    prepare: Callable[[Emitter, Sequence[Value]], None] | None = None
    """Emits what one thread does before the others start."""


Call = Callable[[str, Sequence["Value"], "Value", "Value"], None]
"""(name, arguments, number of items, number of threads): emits a call of a kernel."""


@dataclass(frozen=True, slots=True)
class Program:
    """Kernels one after another, in one call with `arguments`."""

    arguments: tuple[Any, ...]
    emit: Callable[[Emitter, Sequence[Value], Call], None]


class Emitter(ir.IRBuilder):  # type: ignore[misc]
    """Appends instructions to a function. Offsets are bytes, and may be Python integers."""

    def number(self, value: int | Value) -> Value:
        return ir.Constant(INT64, value) if isinstance(value, int) else value

    def times(self, *factors: int | Value) -> Value:
        product = self.number(factors[0])
        for factor in factors[1:]:
            product = self.mul(product, self.number(factor))
        return product

    def plus(self, *terms: int | Value) -> Value:
        total = self.number(terms[0])
        for term in terms[1:]:
            total = self.add(total, self.number(term))
        return total

    def move(self, address: Value, offset: int | Value) -> Value:
        return self.gep(address, [self.number(offset)])

    def read(self, kind: Any, address: Value, offset: int | Value = 0) -> Value:
        """The value of a type at an address, which need not be aligned."""
        place = self.bitcast(self.move(address, offset), kind.as_pointer())
        return self.load(place, align=1)

    def write(self, value: Value, address: Value, offset: int | Value = 0) -> None:
        place = self.bitcast(self.move(address, offset), value.type.as_pointer())
        self.store(value, place, align=1)

    def variable(self, value: Value) -> Value:
        """A place for a value that changes; LLVM keeps it in a register."""
        with self.goto_entry_block():
            place = self.alloca(value.type)
        self.store(value, place)
        return place

    def splat(self, scalar: Value) -> Value:
        """A vector with the float in every lane."""
        empty = ir.Constant(FLOATS, ir.Undefined)
        first = self.insert_element(empty, scalar, ir.Constant(INT32, 0))
        lanes = ir.Constant(ir.VectorType(INT32, LANES), [0] * LANES)
        return self.shuffle_vector(first, empty, lanes)

    def multiply_add(self, a: Value, b: Value, c: Value) -> Value:
        """a * b + c in every lane, rounded once."""
        return self.call(self._intrinsic(f"llvm.fma.v{LANES}f32", FLOATS, 3), [a, b, c])

    def add_up(self, vector: Value) -> Value:
        """The sum of a vector's lanes: its halves are added until one number is left."""
        count = LANES
        while count > 1:
            count //= 2
            lanes = ir.Constant(INTS, [*range(count, LANES), *range(count)])
            vector = self.fadd(vector, self.shuffle_vector(vector, vector, lanes))
        return self.extract_element(vector, ir.Constant(INT32, 0))

    def maximum(self, a: Value, b: Value) -> Value:
        return self.select(self.fcmp_ordered(">", a, b), a, b)

    def square_root(self, number: Value) -> Value:
        return self.call(self._intrinsic("llvm.sqrt.f32", FLOAT, 1), [number])

    def exponential(self, x: Value) -> Value:
        """e ** x in every lane, to within 3e-7 of its size; 0 below -87, and finite above 88.

        It is 2 ** n times e ** f for the whole number n nearest to x / ln 2: n goes to the
        exponent's bits, and e ** f is a polynomial.
        """
        lowest, highest = _all(-87.0), _all(88.0)
        is_tiny = self.fcmp_ordered("<", x, lowest)
        inside = self.select(is_tiny, lowest, x)
        inside = self.select(self.fcmp_ordered(">", inside, highest), highest, inside)
        rint = self._intrinsic(f"llvm.rint.v{LANES}f32", FLOATS, 1)
        whole = self.call(rint, [self.fmul(inside, _all(1 / math.log(2)))])
        # In two steps, as x / ln 2 alone would lose the digits that `whole` takes.
        rest = self.multiply_add(whole, _all(-_LN2_UPPER), inside)
        rest = self.multiply_add(whole, _all(-_LN2_LOWER), rest)
        result, *others = [_all(number) for number in reversed(_EXP)]
        for number in others:
            result = self.multiply_add(result, rest, number)
        exponent = self.add(self.fptosi(whole, INTS), INTS([127] * LANES))
        scale = self.bitcast(self.shl(exponent, INTS([23] * LANES)), FLOATS)
        return self.select(is_tiny, _all(0.0), self.fmul(result, scale))

    def _intrinsic(self, name: str, kind: Any, num_arguments: int) -> Value:
        function = self.module.globals.get(name)
        if function is None:
            function = ir.Function(self.module, ir.FunctionType(kind, [kind] * num_arguments), name)
        return function

    @contextmanager
    def loop(self, first: int | Value, end: int | Value, step: int | Value = 1) -> Iterator[Value]:
        """The instructions of the `with` block for first, first + step, ... below end."""
        index = self.variable(self.number(first))
        test, body = self.append_basic_block("test"), self.append_basic_block("body")
        after = self.append_basic_block("after")
        self.branch(test)
        self.position_at_end(test)
        current = self.load(index)
        self.cbranch(self.icmp_unsigned("<", current, self.number(end)), body, after)
        self.position_at_end(body)
        yield current
        self.store(self.plus(current, step), index)
        self.branch(test)
        self.position_at_end(after)


def _all(number: float) -> Value:
    return ir.Constant(FLOATS, [number] * LANES)


def _exp_polynomial(degree: int) -> list[float]:
    """Coefficients of e ** f for f up to ln 2 / 2 from 0, lowest first: the polynomial that equals
    it in the Chebyshev points, close to the best of its degree."""
    end = math.log(2) / 2
    found = Chebyshev.interpolate(np.exp, degree, domain=(-end, end))
    return [float(number) for number in found.convert(kind=Polynomial).coef]


_EXP = _exp_polynomial(6)


Kernel = Callable[..., None]
"""A compiled kernel."""


def threads_for(num_bytes: int) -> int:
    """Threads that are worth waking for work that reads so many bytes."""
    worth, most = num_bytes // _BYTES_PER_THREAD, torch.get_num_threads()
    if worth >= most:  # spelled out: steps call this hundreds of times
        return most
    return worth if worth > 1 else 1


@dataclass(frozen=True, slots=True)
class Processor:
    """The processor that kernels are compiled for."""

    name: str
    features: str
    """What it can do, as LLVM writes it: +avx2,-avx512f,..."""

    @property
    def has_wide_vectors(self) -> bool:
        """True if a vector of `LANES` floats fits in one register."""
        return "+avx512f" in self.features.split(",")


@functools.cache
def this_processor() -> Processor:
    return Processor(llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten())


def has_wide_vectors() -> bool:
    """True if a vector of `LANES` floats fits in one register."""
    return this_processor().has_wide_vectors


def compile_kernels(
    definitions: Mapping[str, Definition],
    programs: Mapping[str, Program] | None = None,
    *,
    key: object = None,
) -> dict[str, Kernel]:
    """The kernels, and programs that call them, as functions. Compiling takes a tenth of a second
    or two, reading the compiled code of an earlier start a hundredth.

    key: everything, beside the files of this package, that the definitions depend on, in a form
    that `repr` shows whole. The code is kept under it; without a key it is not.
    """
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    has_openmp = _load_openmp()
    processor = this_processor()
    machine = llvm.Target.from_default_triple().create_target_machine(
        cpu=processor.name, features=processor.features, opt=3, jit=True
    )
    entry = "" if key is None else _entry_name(processor, has_openmp, key)
    code = _CODE.read(entry) if entry else None
    if code is None:
        code = _compile(definitions, programs or {}, machine, has_openmp)
        if entry:
            _CODE.write(entry, code)
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    functions: dict[str, Kernel] = {}
    counts = ctypes.c_int64, ctypes.c_int32
    kinds = {name: (*made.arguments, *counts) for name, made in definitions.items()}
    kinds |= {name: made.arguments for name, made in (programs or {}).items()}
    for name, arguments in kinds.items():
        prototype = ctypes.CFUNCTYPE(None, *(_C_TYPES.get(kind, kind) for kind in arguments))
        function = prototype(engine.get_function_address(name))
        function.owner = engine  # type: ignore[attr-defined]  # frees the code when it goes
        functions[name] = function
    return functions


def _entry_name(processor: Processor, has_openmp: bool, key: object) -> str:
    """The name under which compiled code is kept. Constants of the code come from numpy."""
    libraries = (llvmlite.__version__, llvm.llvm_version_info, np.__version__)
    triple = llvm.get_process_triple()
    return digest(processor, triple, libraries, has_openmp, _source_digest(), key)


@functools.cache
def _source_digest() -> str:
    """A digest of the files that emit kernels."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    return digest(*(file.read_bytes() for file in files))


def _compile(
    definitions: Mapping[str, Definition],
    programs: Mapping[str, Program],
    machine: Any,
    has_openmp: bool,
) -> bytes:
    """The kernels as an object file."""
    module = ir.Module()
    team = _OpenMP(module) if has_openmp else None
    for name, definition in definitions.items():
        _add_kernel(module, name, definition, team)
    for name, program in programs.items():
        _add_program(module, name, program)
    parsed = llvm.parse_assembly(str(module))
    parsed.verify()
    options = llvm.create_pipeline_tuning_options(speed_level=3)
    builder = llvm.create_pass_builder(machine, options)
    builder.getModulePassManager().run(parsed, builder)
    code: bytes = machine.emit_object(parsed)
    return code


@functools.cache
def _load_openmp() -> bool:
    """Make torch's GNU OpenMP library known to LLVM; False where torch has another one."""
    folder = Path(torch.__file__).parent
    files = [*folder.glob("lib/libgomp*.so*"), *folder.parent.glob("torch.libs/libgomp*.so*")]
    if not files:
        return False
    library = ctypes.CDLL(str(files[0]))
    for name in _OPENMP_NAMES:
        llvm.add_symbol(name, ctypes.cast(getattr(library, name), ctypes.c_void_p).value)
    return True


class _OpenMP:
    """The functions of GNU OpenMP, declared in a module."""

    def __init__(self, module: Any) -> None:
        void, part = ir.VoidType(), ir.FunctionType(ir.VoidType(), [POINTER])
        kinds = (
            ir.FunctionType(void, [part.as_pointer(), POINTER, INT32, INT32]),
            ir.FunctionType(INT32, []),
            ir.FunctionType(INT32, []),
        )
        self.parallel, self.thread, self.num_threads = (
            ir.Function(module, kind, name) for kind, name in zip(kinds, _OPENMP_NAMES, strict=True)
        )


def _add_kernel(module: Any, name: str, definition: Definition, team: _OpenMP | None) -> None:
    """The kernel, and the part of it that each thread runs."""
    kinds = [*definition.arguments, INT64]
    task_kind = ir.LiteralStructType(kinds)
    part = ir.Function(module, ir.FunctionType(ir.VoidType(), [POINTER]), f"{name}_part")
    part.linkage = "internal"
    e = Emitter(part.append_basic_block("entry"))
    task = e.bitcast(part.args[0], task_kind.as_pointer())
    fields = [ir.Constant(INT32, 0), *(ir.Constant(INT32, i) for i in range(len(kinds)))]
    *arguments, num_items = (e.load(e.gep(task, [fields[0], field])) for field in fields[1:])
    first, end = e.number(0), num_items
    if team is not None:
        thread, num_threads = (
            e.sext(e.call(function, []), INT64) for function in (team.thread, team.num_threads)
        )
        first = e.udiv(e.mul(num_items, thread), num_threads)
        end = e.udiv(e.mul(num_items, e.plus(thread, 1)), num_threads)
    definition.emit(e, arguments, first, end)
    e.ret_void()

    whole = ir.Function(module, ir.FunctionType(ir.VoidType(), [*kinds, INT32]), name)
    e = Emitter(whole.append_basic_block("entry"))
    if definition.prepare is not None:
        definition.prepare(e, whole.args[: len(definition.arguments)])
    place = e.alloca(task_kind)
    for field, value in zip(fields[1:], whole.args[:-1], strict=True):
        e.store(value, e.gep(place, [fields[0], field]))
    task = e.bitcast(place, POINTER)
    if team is None:
        e.call(part, [task])
    else:
        e.call(team.parallel, [part, task, whole.args[-1], ir.Constant(INT32, 0)])
    e.ret_void()


def _add_program(module: Any, name: str, program: Program) -> None:
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), program.arguments), name)
    e = Emitter(function.append_basic_block("entry"))

    def call(kernel: str, arguments: Sequence[Value], num_items: Value, threads: Value) -> None:
        e.call(module.globals[kernel], [*arguments, num_items, e.trunc(threads, INT32)])

    program.emit(e, function.args, call)
    e.ret_void()
