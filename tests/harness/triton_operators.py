"""Operators of Triton's interpreted tensors, at once where the result's type is known.

The interpreter finds the types, shapes and constants of every sum and comparison anew, which takes
ten times as long as numpy's part. Here an operator of the same types, shapes and constant goes that
way once; from then on numpy computes it directly, as well as a pointer plus an offset. What the
first call gave has to be the same both ways, bit for bit, and what is converted on the way (mixed
types, floats of 8 bits, bfloat16) always goes the interpreter's way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

MAX_RECIPES = 50_000
UFUNCS: dict[str, Callable[..., Any]] = {
    "__add__": np.add,
    "__radd__": np.add,
    "__sub__": np.subtract,
    "__mul__": np.multiply,
    "__rmul__": np.multiply,
    "__and__": np.bitwise_and,
    "__or__": np.bitwise_or,
    "__xor__": np.bitwise_xor,
    "__lshift__": np.left_shift,
    "__rshift__": np.right_shift,
    "__lt__": np.less,
    "__le__": np.less_equal,
    "__gt__": np.greater,
    "__ge__": np.greater_equal,
    "__eq__": np.equal,
    "__ne__": np.not_equal,
}
PLAIN = {"int1": "bool", "fp16": "float16", "fp32": "float32", "fp64": "float64"}
PLAIN |= {name: name for bits in (8, 16, 32, 64) for name in (f"int{bits}", f"uint{bits}")}
"""Types that numpy computes in as they are."""
OFFSETS = ("int32", "int64")
UNKNOWN: Any = object()
Operator = Callable[..., Any]


class Recipe(NamedTuple):
    """How numpy computes an operator's result."""

    compute: Callable[..., npt.NDArray[Any]]
    dtypes: tuple[npt.DTypeLike, npt.DTypeLike]
    """Types of the operands' data."""
    constant: npt.NDArray[Any] | None
    """The second operand, if that is a number."""
    handle_type: Any
    result_type: Any


def at_once(interpreter: Any, name: str, slow: Operator) -> Operator:
    """The operator `name` of interpreted tensors. slow: the interpreter's own."""
    import triton.language as tl

    ufunc, tensor, handle_of = UFUNCS[name], tl.tensor, interpreter.TensorHandle
    recipes: dict[tuple[object, ...], Recipe | None] = {}

    def learn(left: Any, other: Any, key: tuple[object, ...]) -> Any:
        result = slow(left, other)
        if len(recipes) < MAX_RECIPES:
            recipes[key] = _recipe(ufunc, left, other, result)
        return result

    def operate(left: Any, other: Any, **_: Any) -> Any:
        is_tensor = type(other) is tensor
        if is_tensor:
            key: tuple[object, ...] = (_key(left.type), _key(other.type))
        else:
            value = other.value if type(other) is tl.constexpr else other
            if type(value) not in (int, float, bool):
                return slow(left, other)
            key = (_key(left.type), type(value), value)
        recipe = recipes.get(key, UNKNOWN)
        if recipe is UNKNOWN:
            return learn(left, other, key)
        if recipe is None:
            return slow(left, other)
        compute, dtypes, constant, handle_type, result_type = recipe
        data = left.handle.data
        operand: Any = other.handle.data if is_tensor else constant
        if (data.dtype, operand.dtype) != dtypes:
            return slow(left, other)
        handle = handle_of.__new__(handle_of)
        handle.data, handle.dtype, handle.attr = compute(data, operand), handle_type, {}
        return tensor(handle, result_type)

    return operate


def _key(of: Any) -> object:
    """Type and shape."""
    return of.__dict__.get("key") or of.name


def _recipe(ufunc: Callable[..., Any], left: Any, other: Any, result: Any) -> Recipe | None:
    """None if numpy alone computes something else, or may."""
    value = None
    if not hasattr(other, "handle"):
        value, other = getattr(other, "value", other), None
    found = _operands(ufunc, left.dtype, left.dtype if other is None else other.dtype)
    if found is None or result.dtype.name not in (left.dtype.name, "int1"):
        return None  # the number widens it
    compute, dtypes = found
    if other is None and left.dtype.is_ptr():
        return None
    constant = np.full(1, value, dtypes[1]) if other is None else None
    data = left.handle.data
    operand: Any = constant if other is None else other.handle.data
    if (data.dtype, operand.dtype) != dtypes:
        return None
    with np.errstate(all="ignore"):
        one, two = compute(data, operand), result.handle.data
    if one.dtype != two.dtype or one.shape != two.shape or one.tobytes() != two.tobytes():
        return None
    return Recipe(compute, dtypes, constant, result.handle.dtype, result.type)


def _operands(
    ufunc: Callable[..., Any], left: Any, right: Any
) -> tuple[Callable[..., Any], tuple[np.dtype[Any], np.dtype[Any]]] | None:
    """What computes values of these types, and numpy's types of them."""
    if left.is_ptr() and ufunc is np.add and right.name in OFFSETS:
        width = max(1, left.element_ty.primitive_bitwidth // 8)

        def add_offset(pointers: Any, offsets: Any) -> Any:
            return pointers + width * offsets.astype(np.uint64)

        return add_offset, (np.dtype(np.uint64), np.dtype(right.name))
    if left.name != right.name or left.name not in PLAIN:
        return None
    dtype = np.dtype(PLAIN[left.name])
    return ufunc, (dtype, dtype)
