"""Triton's interpreter for the tests: fixes for its errors, and shortcuts for needless work.

The shortcuts change no result: repeated preparation, checks whose outcome is never read, and
rebuilding the same types and shapes for each value took two thirds of its time.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from triton_operators import UFUNCS, at_once

HALVES = ("fp16", "bf16")
"""Types whose quotients are computed in another."""
MAX_CONSTANTS = 20_000


def prepare() -> None:
    """Once a process; a second call does nothing."""
    from triton.runtime import interpreter

    if hasattr(interpreter, "is_prepared_for_tests"):
        return
    interpreter.is_prepared_for_tests = True  # type: ignore[attr-defined]
    _mend_index(interpreter)
    _mend_fp8(interpreter)
    _patch_once_a_launch(interpreter)
    _list_builtins_once(interpreter)
    _leave_arguments_in_place(interpreter)
    _multiply_floats(interpreter)
    _combine_whole_slices(interpreter)
    _call_builtins_at_once(interpreter)
    _leave_out_unread_checks(interpreter)
    _look_types_up(interpreter)
    _check_types_once(interpreter)


def _mend_index(interpreter: Any) -> None:
    """Its own version calls int() on an array of one element, which numpy no longer allows."""
    patch = interpreter._patch_lang_tensor

    def patch_with_index(tensor: type, scope: object) -> None:
        patch(tensor, scope)
        tensor.__index__ = lambda self: int(self.handle.data.item())  # type: ignore[attr-defined]

    interpreter._patch_lang_tensor = patch_with_index


def _mend_fp8(interpreter: Any) -> None:
    """Its own conversion to e4m3 does not round to nearest even, and its conversion from e4m3 has
    no NaN.

    Values out of range become NaN here: a kernel must not count on a device that saturates.
    """
    import triton.language as tl

    types = {tl.float32: torch.float32, tl.float16: torch.float16}
    types |= {tl.float8e4nv: torch.float8_e4m3fn}
    convert = interpreter.InterpreterBuilder.create_fp_to_fp

    def create_fp_to_fp(self: Any, src: Any, dst_type: Any, rounding_mode: Any) -> Any:
        source, target = src.dtype.scalar, dst_type.scalar
        if tl.float8e4nv not in (source, target) or not {source, target} <= types.keys():
            return convert(self, src, dst_type, rounding_mode)
        values = torch.from_numpy(src.data.copy()).view(types[source])
        if target == tl.float8e4nv:
            values = values.masked_fill(values.abs() > 448, float("nan"))
        values = values.to(types[target])
        data = values.view(torch.uint8).numpy().view(interpreter._get_np_dtype(dst_type))
        return interpreter.TensorHandle(data, target)

    interpreter.InterpreterBuilder.create_fp_to_fp = create_fp_to_fp


def _patch_once_a_launch(interpreter: Any) -> None:
    """It patches the language for a launch, and again at each call of a function in its kernel."""
    import triton.language as tl

    patch = interpreter._patch_lang
    patched: set[str] = set()

    @functools.cache
    def languages(fn: Callable[..., Any]) -> frozenset[str]:
        modules = (value for value in fn.__globals__.values() if inspect.ismodule(value))
        return frozenset(m.__name__ for m in modules if m is tl or m is tl.core)

    class Scope(interpreter._LangPatchScope):  # type: ignore[misc, name-defined]
        def restore(self) -> None:
            patched.clear()
            super().restore()

    def patch_lang(fn: Callable[..., Any]) -> Any:
        if languages(fn) <= patched:
            return Scope()
        patched.update(languages(fn))
        return patch(fn)

    interpreter._LangPatchScope = Scope
    interpreter._patch_lang = patch_lang


def _list_builtins_once(interpreter: Any) -> None:
    """It looks through all members of the language at each launch."""
    import triton.language as tl

    @functools.cache
    def builtins(package: Any) -> tuple[tuple[str, Any], ...]:
        members = inspect.getmembers(package)
        return tuple((name, member) for name, member in members if tl.core.is_builtin(member))

    def patch_builtin(package: Any, builder: Any, scope: Any) -> None:
        for name, member in builtins(package):
            interpreter._patch_attr(package, name, member, builder, scope)

    interpreter._patch_builtin = patch_builtin


def _leave_arguments_in_place(interpreter: Any) -> None:
    """It copies all storages of a launch back, also onto themselves."""
    executor = interpreter.GridExecutor
    restore = executor._restore_args_dev

    def restore_args_dev(self: Any, args: Any, on_host: Any, kwargs: Any, kwargs_hst: Any) -> None:
        pairs = [*zip(args, on_host, strict=True), *((v, kwargs_hst[k]) for k, v in kwargs.items())]
        if not all(
            one.data_ptr() == two.data_ptr()
            for one, two in pairs
            if hasattr(one, "data_ptr") and hasattr(two, "data_ptr")
        ):
            restore(self, args, on_host, kwargs, kwargs_hst)

    executor._restore_args_dev = restore_args_dev


def _multiply_floats(interpreter: Any) -> None:
    """It has numpy multiply halves with sums of float32, for which there is no fast way."""
    builder = interpreter.InterpreterBuilder
    dot = builder.create_dot

    def create_dot(self: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
        sizes = (a.data.dtype, b.data.dtype, d.data.dtype)
        if sizes == (np.float16, np.float16, np.float32):
            left, right = (one.data.astype(np.float32) for one in (a, b))
            return interpreter.TensorHandle(np.matmul(left, right) + d.data, d.dtype.scalar)
        return dot(self, a, b, d, *options)

    builder.create_dot = create_dot


def _combine_whole_slices(interpreter: Any) -> None:
    """It reduces with a function of the kernel element by element. Slices of the axis, in the same
    order, give the same."""

    def generic_reduce(self: Any, input: Any) -> list[Any]:
        is_whole, num_axes = self.axis is None, input[0].handle.data.ndim
        input, axis = self.unravel(input, self.axis)
        dtypes = [arg.dtype for arg in input]
        parts = (np.moveaxis(arg.handle.data, axis, 0) for arg in input)
        so_far: tuple[Any, ...] = ()
        for slices in zip(*parts, strict=True):
            found = tuple(map(self.to_tensor, slices, dtypes))
            if so_far:
                combined = self.combine_fn.fn(*so_far, *found)
                found = combined if isinstance(combined, tuple) else (combined,)
            arrays = (np.broadcast_to(one.handle.data, np.shape(slices[0]) or 1) for one in found)
            so_far = tuple(map(self.to_tensor, arrays, dtypes))
        results = []
        for one, dtype in zip(so_far, dtypes, strict=True):
            data = one.handle.data
            if self.keep_dims:
                data = data.reshape((1,) * num_axes) if is_whole else np.expand_dims(data, axis)
            elif is_whole or num_axes == 1:
                data = data.item()
            results.append(self.to_tensor(data, dtype))
        return results

    interpreter.ReduceOps.generic_reduce = generic_reduce


def _call_builtins_at_once(interpreter: Any) -> None:
    """It filters the keywords of each call, and then checks that one of them is there."""
    import triton.language as tl

    semantic = interpreter.interpreter_semantic

    @functools.cache
    def direct(obj: Any, name: str, member: Any) -> Callable[..., Any]:
        function = getattr(member, "__wrapped__", member)

        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return function(*args, **kwargs)

        is_operator = obj is tl.tensor and name in UFUNCS
        return at_once(interpreter, name, call) if is_operator else call

    def patch_attr(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        scope.set_attr(obj, name, direct(obj, name, member))

    interpreter._patch_attr = patch_attr


def _leave_out_unread_checks(interpreter: Any) -> None:
    """Without `debug` it still works out whether each sum and product overflows; nothing reads
    that."""
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = replace(builder.options, sanitize_overflow=False)


def _look_types_up(interpreter: Any) -> None:
    """It builds the table of all types anew for each value, and each value's type and shape."""
    import triton.language as tl

    get_np_dtype, make_type = interpreter._get_np_dtype, tl.block_type.__init__
    np_dtypes: dict[str, Any] = {}
    types: dict[tuple[object, ...], dict[str, Any]] = {}

    def look_np_dtype_up(tt_dtype: Any) -> Any:
        scalar = tt_dtype.element_ty if isinstance(tt_dtype, tl.block_type) else tt_dtype
        if scalar.name not in np_dtypes:
            np_dtypes[scalar.name] = get_np_dtype(tt_dtype)
        return np_dtypes[scalar.name]

    def init_type(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple(size.value if isinstance(size, tl.constexpr) else size for size in shape)
        key = (element_ty.name, *sizes, *map(type, sizes))
        if key not in types:
            make_type(self, element_ty, shape)
            of_tensors = (tl.tuple([tl.constexpr(s) for s in sizes]), tl.constexpr(self.numel))
            types[key] = {**vars(self), "of_tensors": of_tensors, "key": key}
        vars(self).update(types[key], element_ty=element_ty)

    make_tensor = tl.tensor.__init__
    of_scalars = (tl.tuple([]), tl.constexpr(1))

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        of_tensors = getattr(type, "of_tensors", None)
        if of_tensors is not None:
            self.handle, self.type, self.dtype = handle, type, type.element_ty
            self.shape, self.numel = of_tensors
        elif not type.is_block():
            self.handle, self.type, self.dtype = handle, type, type.scalar
            self.shape, self.numel = of_scalars
        else:
            make_tensor(self, handle, type)

    interpreter._get_np_dtype = look_np_dtype_up
    tl.block_type.__init__ = init_type
    tl.tensor.__init__ = init_tensor
    _compare_shapes_at_once(type(interpreter.interpreter_semantic))


def _compare_shapes_at_once(semantic: Any) -> None:
    broadcast = semantic.broadcast_impl_value

    def broadcast_impl_value(self: Any, lhs: Any, rhs: Any) -> Any:
        left, right = lhs.type, rhs.type
        if left.is_block() and right.is_block():
            is_same = left.shape.values == right.shape.values
        else:
            is_same = left.is_block() == right.is_block()
        return (lhs, rhs) if is_same else broadcast(self, lhs, rhs)

    semantic.broadcast_impl_value = broadcast_impl_value


def _check_types_once(interpreter: Any) -> None:
    """It finds the types that an operation needs anew for operands that have them, and makes the
    same constants again and again."""
    import triton.language as tl

    semantic = type(interpreter.interpreter_semantic)
    check, check_bits = (
        semantic.binary_op_type_checking_impl,
        semantic.bitwise_op_type_checking_impl,
    )
    constants: dict[tuple[object, ...], Any] = {}

    def binary_op_type_checking_impl(
        self: Any,
        lhs: Any,
        rhs: Any,
        allow_lhs_ptr: bool = False,
        allow_rhs_ptr: bool = False,
        arithmetic_check: bool = True,
        div_or_mod: bool = False,
    ) -> Any:
        flags = (allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)
        if not isinstance(lhs, tl.tensor):
            return check(self, lhs, rhs, *flags)
        dtype = lhs.dtype
        if isinstance(rhs, tl.tensor):
            is_kept = dtype.name == rhs.dtype.name and not dtype.is_ptr()
            if is_kept and not (div_or_mod and dtype.name in HALVES):
                return self.broadcast_impl_value(lhs, rhs)
            return check(self, lhs, rhs, *flags)
        key = (getattr(lhs.type, "key", dtype.name), type(rhs), rhs, flags)
        if key in constants:
            data, dtype, of_type = constants[key]
            return lhs, self.tensor(interpreter.TensorHandle(data, dtype), of_type)
        left, right = check(self, lhs, rhs, *flags)
        if left is lhs and len(constants) < MAX_CONSTANTS:
            handle = right.handle  # a number and a shape, which nothing can write into
            data = np.broadcast_to(handle.data.reshape(-1)[0], handle.data.shape)
            constants[key] = (data, handle.dtype, right.type)
        return left, right

    def bitwise_op_type_checking_impl(self: Any, lhs: Any, rhs: Any) -> Any:
        left, right = self.binary_op_type_checking_impl(lhs, rhs)
        if left.dtype.name == right.dtype.name and left.dtype.is_int():
            return left, right
        return check_bits(self, lhs, rhs)

    semantic.binary_op_type_checking_impl = binary_op_type_checking_impl
    semantic.bitwise_op_type_checking_impl = bitwise_op_type_checking_impl
