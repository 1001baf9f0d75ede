"""Finds the quantised matrices among a checkpoint's tensors.

A matrix `x.weight` is stored as `x.weight` of 8 bits beside `x.weight_scale` or `_scale_inv`, as
`x.weight_packed` with its scales, or as `x.qweight`, `x.qzeros` and `x.scales`. Sizes of groups and
numbers of bits follow from the shapes, which are checked against each other. Scales of activations
and of cached keys and values are left in the files: weights are multiplied as floats here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NoReturn

import torch

from termgen.engine.device.config.stored_weights import StoredWeights
from termgen.engine.device.layers.stored_rows import StoredRows
from termgen.engine.device.quantization.affine_blocks import (
    GROUPS,
    GROUPS_BLOCK,
    ORDERED_GROUPS,
)
from termgen.engine.device.quantization.mxfp4 import BLOCK, NO_POWER, with_scales
from termgen.engine.device.quantization.mxfp4 import KIND as MXFP4
from termgen.engine.device.quantization.stored_matrices import (
    FLOAT8_RUN,
    NVFP4,
    NVFP4_COLUMNS,
    WORD_BITS,
    FourBitFloats,
    PackedColumns,
    PackedRows,
    ScaledNumbers,
    StoredMatrix,
    kept,
    nvfp4_rows,
    words_of,
)
from termgen.errors import CorruptFileError

FLOATS_8 = ("F8_E4M3", "F8_E5M2")
_KEPT_FLOATS, _POWERS, _SIGNED = "F8_E4M3", "U8", "I8"
TYPES = {"F8_E8M0": 1, **dict.fromkeys(FLOATS_8, 1), "I8": 1, "U8": 1, "I32": 4, "I64": 8}
"""Types in which quantised weights are stored, and their bytes."""
PART_NUMBERS = 2**22
"""Numbers of a matrix that are dequantised at a time."""
_UNUSED = re.compile(
    r".*\.(input_scale|input_zero_point|input_global_scale|input_activation_scale"
    r"|activation_scale(_inv)?|output_scale|q_scale|k_scale|v_scale|kv_scale|prob_scale)",
    re.ASCII,
)
_FOUR_BIT_GROUPS = (16, 32)

Read = Callable[[str], torch.Tensor]


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """What a file's header says of a tensor."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class QuantizedTensor:
    """A matrix, or one for each expert, and the tensors that hold it."""

    matrix: StoredMatrix
    members: Mapping[str, str]
    """Role -> name in the files."""
    num_experts: int | None = None
    """Matrices that are stacked, their tensors along the first dimension."""
    dtype: str = ""
    """The type of numbers that have scales alone, and of the scales of floats of 4 bits."""

    @property
    def shape(self) -> tuple[int, ...]:
        stacked = () if self.num_experts is None else (self.num_experts,)
        return *stacked, *self.matrix.shape

    def parts(self, read: Read) -> Iterator[torch.Tensor]:
        """Some rows at a time, or an expert, as float32."""
        tensors = {role: read(name) for role, name in self.members.items()}
        if (groups := tensors.get("g_idx", tensors.get("weight_g_idx"))) is not None:
            self._check_groups(groups, tensors)
        num_rows, num_columns = self.matrix.shape
        if self.num_experts is not None:
            for own in self._matrices(tensors):
                yield self.matrix.rows(own, 0, num_rows)[None]
            return
        step = max(1, PART_NUMBERS // num_columns)
        for first in range(0, num_rows, step):
            yield self.matrix.rows(tensors, first, min(first + step, num_rows))

    def _groups_kind(self, read: Read) -> str | None:
        """A kind of integers, if all groups have the same number of whole blocks of columns."""
        matrix = self.matrix
        assert isinstance(matrix, PackedRows | PackedColumns)
        num_columns = matrix.shape[1]
        size, rest = divmod(num_columns, matrix.num_groups)
        if rest or size % GROUPS_BLOCK:
            return None
        groups = self._groups(read)
        runs = torch.arange(num_columns) // size
        if groups is None or torch.equal(groups, runs):
            return GROUPS
        return ORDERED_GROUPS if torch.equal(groups.sort().values, runs) else None

    def _groups(self, read: Read) -> torch.Tensor | None:
        """The group of each column; None: they are runs."""
        name = self.members.get("g_idx", self.members.get("weight_g_idx"))
        return None if name is None else read(name).long()

    def kind(self, read: Read) -> str | None:
        """The kind of rows that `stored` gives; None if there are only numbers to be had."""
        if isinstance(self.matrix, ScaledNumbers) and self.dtype == _SIGNED:
            return GROUPS if self.num_experts is None and self.matrix.has_groups else None
        if isinstance(self.matrix, ScaledNumbers):
            is_kept = self.dtype == _KEPT_FLOATS and "zero_point" not in self.members
            return self.matrix.float8_kind if is_kept else None
        if isinstance(self.matrix, FourBitFloats):
            if self.dtype == _POWERS:
                return MXFP4
            num_columns = self.matrix.shape[1]
            is_whole = self.dtype == _KEPT_FLOATS and num_columns % NVFP4_COLUMNS == 0
            return NVFP4 if is_whole else None
        is_integer = isinstance(self.matrix, PackedRows | PackedColumns)
        return self._groups_kind(read) if is_integer else None

    def stored(self, read: Read) -> Iterator[StoredRows]:
        """Some rows at a time, of a matrix of some kind."""
        if isinstance(self.matrix, ScaledNumbers) and self.dtype != _SIGNED:
            yield from self._floats8(self.matrix, read)
            return
        if isinstance(self.matrix, FourBitFloats):
            yield from self._floats4(self.matrix, read)
            return
        assert isinstance(self.matrix, ScaledNumbers | PackedRows | PackedColumns)
        order = None
        if self.kind(read) == ORDERED_GROUPS:
            groups = self._groups(read)
            assert groups is not None
            order = groups.argsort(stable=True)
        tensors = {role: read(name) for role, name in self.members.items()}
        num_rows, num_columns = self.matrix.shape
        step = max(1, PART_NUMBERS // num_columns)
        for first in range(0, num_rows, step):
            last = min(first + step, num_rows)
            yield kept(self.matrix.integers(tensors, first, last), order)

    def _floats8(self, matrix: ScaledNumbers, read: Read) -> Iterator[StoredRows]:
        tensors = {role: read(name) for role, name in self.members.items()}
        num_rows, num_columns = matrix.shape
        step = max(1, PART_NUMBERS // num_columns // FLOAT8_RUN) * FLOAT8_RUN
        is_number = bool(tensors["scale"].float().isfinite().all())
        for own in self._matrices(tensors):
            for first in range(0, num_rows, step):
                last = min(first + step, num_rows)
                # Products take all bits for numbers.
                bits = own["weight"][first:last].view(torch.uint8) & 127
                if not is_number or bool((bits == 127).any()):
                    name = self.members["weight" if is_number else "scale"]
                    raise CorruptFileError(f"tensor {name} has NaN or infinite values")
                yield matrix.float8(own, first, last)

    def _matrices(
        self, tensors: Mapping[str, torch.Tensor]
    ) -> Iterator[Mapping[str, torch.Tensor]]:
        """The tensors of each matrix."""
        if self.num_experts is None:
            yield tensors
        for expert in range(self.num_experts or 0):
            yield {role: tensor[expert] for role, tensor in tensors.items()}

    def _floats4(self, matrix: FourBitFloats, read: Read) -> Iterator[StoredRows]:
        tensors = {role: read(name) for role, name in self.members.items()}
        is_mxfp4 = self.dtype == _POWERS
        for role in ("scale",) if is_mxfp4 else ("scale", "global_scale"):
            values = tensors[role]
            is_number = values != NO_POWER if is_mxfp4 else values.float().isfinite()
            if not bool(is_number.all()):
                raise CorruptFileError(f"tensor {self.members[role]} has NaN or infinite values")
        num_rows, num_columns = matrix.shape
        step = max(1, PART_NUMBERS // num_columns)
        for first in range(0, num_rows, step):
            last = min(first + step, num_rows)
            if is_mxfp4:
                packed, scale = (tensors[role][first:last] for role in ("weight_packed", "scale"))
                yield StoredRows(MXFP4, with_scales(packed.view(*scale.shape, -1), scale))
            else:
                yield nvfp4_rows(tensors, first, last, is_divided=matrix.is_divided)

    def _check_groups(self, groups: torch.Tensor, tensors: Mapping[str, torch.Tensor]) -> None:
        is_gptq = "g_idx" in tensors
        num_groups = len(tensors["scales"]) if is_gptq else tensors["weight_scale"].shape[1]
        if groups.numel() and not 0 <= int(groups.min()) <= int(groups.max()) < num_groups:
            name = self.members["g_idx" if is_gptq else "weight_g_idx"]
            raise CorruptFileError(
                f"tensor {name!r} names groups beyond the {num_groups} there are"
            )


class QuantizedTensors:
    """The quantised matrices of a checkpoint, by the name that the matrix has elsewhere."""

    def __init__(
        self, tensors: Mapping[str, StoredTensor], stored: StoredWeights, read: Read
    ) -> None:
        """read: gives a whole tensor. Raises CorruptFileError naming a tensor that does not fit."""
        self._tensors = tensors
        self._stored = stored
        self._read = read
        self.found: dict[str, QuantizedTensor] = {}
        for name, tensor in tensors.items():
            stem, _, end = name.rpartition(".")
            if end == "qweight":
                self._add(f"{stem}.weight", self._columns(stem, tensor))
            elif end == "weight_packed":
                find = self._four_bits if tensor.dtype == "U8" else self._packed
                self._add(f"{stem}.weight", find(stem, name, tensor))
            elif tensor.dtype == "U8" and f"{name}_scale_2" in tensors:
                self._add(name, self._four_bits(stem, name, tensor))
            elif tensor.dtype in (*FLOATS_8, "I8") and not end.endswith(("_scale", "_zero_point")):
                self._add(name, self._scaled(name, tensor))
        members = {name for made in self.found.values() for name in made.members.values()}
        self.unused = {name for name in tensors if _UNUSED.fullmatch(name)} - members
        self.unused |= {name for name in tensors if name.endswith(".weight_shape")}
        self.members = members

    def _add(self, name: str, tensor: QuantizedTensor) -> None:
        if name in self.found or (name in self._tensors and name not in tensor.members.values()):
            self._fail(name, "is in the files twice, as floats and quantised")
        self.found[name] = tensor

    def _scaled(self, name: str, weight: StoredTensor) -> QuantizedTensor:
        ends = ("_scale_inv", "_scale")
        scale_name = next((name + end for end in ends if name + end in self._tensors), None)
        if scale_name is None:
            self._fail(name, f"of the type {weight.dtype} has no scale {name}_scale")
        if len(weight.shape) not in (2, 3):
            self._fail(name, f"is {list(weight.shape)}, which is no matrix")
        *experts, num_rows, num_columns = weight.shape
        block = self._block(name, weight.shape, scale_name)
        members = {"weight": name, "scale": scale_name}
        if (zero := f"{name}_zero_point") in self._tensors:
            if self._tensors[zero].shape != self._tensors[scale_name].shape:
                self._differs(zero, self._tensors[zero].shape, scale_name)
            members["zero_point"] = zero
        matrix = ScaledNumbers((num_rows, num_columns), block)
        num_experts = experts[0] if experts else None
        return QuantizedTensor(matrix, members, num_experts, weight.dtype)

    def _block(self, name: str, shape: tuple[int, ...], scale_name: str) -> tuple[int, int]:
        """Rows and columns that share a scale."""
        *outer, num_rows, num_columns = shape
        scale = self._tensors[scale_name].shape
        while len(scale) > len(shape):
            if scale[-1] != 1:
                self._differs(scale_name, scale, name)
            scale = scale[:-1]
        if len(scale) <= 1 and not outer:
            counts = (scale or (1,))[0]
            if counts == 1:
                return num_rows, num_columns
            if counts == num_rows:
                return 1, num_columns
            self._differs(scale_name, scale, name)
        if len(scale) == len(outer) and scale == tuple(outer):  # one for each expert
            return num_rows, num_columns
        if len(scale) != len(shape) or scale[:-2] != tuple(outer):
            self._differs(scale_name, scale, name)
        if scale[-2:] == (1, 1):
            return num_rows, num_columns
        if scale[-2:] == (num_rows, 1):
            return 1, num_columns
        block = self._stored.block or _even_block((num_rows, num_columns), scale[-2:])
        if block is None or scale[-2:] != (-(-num_rows // block[0]), -(-num_columns // block[1])):
            self._differs(scale_name, scale, name)
        return block

    def _packed(self, stem: str, name: str, packed: StoredTensor) -> QuantizedTensor:
        scale_name = self._need(f"{stem}.weight_scale", name)
        if packed.dtype != "I32" or len(packed.shape) != 2:
            self._fail(name, f"is {packed.dtype} {list(packed.shape)}, not a matrix of I32")
        num_rows = packed.shape[0]
        scale = self._tensors[scale_name].shape
        num_groups = scale[1] if len(scale) > 1 else 1
        num_columns, bits = self._columns_of(stem, name, packed.shape)
        if scale[:1] != (num_rows,) or not num_groups or num_columns % num_groups:
            self._differs(scale_name, scale, name)
        members = {"weight_packed": name, "weight_scale": scale_name}
        for role, wanted in (
            ("weight_zero_point", (words_of(num_rows, bits), num_groups)),
            ("weight_g_idx", (num_columns,)),
        ):
            if (other := f"{stem}.{role}") in self._tensors:
                if self._tensors[other].shape != wanted:
                    self._differs(other, self._tensors[other].shape, name)
                members[role] = other
        return QuantizedTensor(PackedRows((num_rows, num_columns), bits, num_groups), members)

    def _columns_of(self, stem: str, name: str, packed: tuple[int, ...]) -> tuple[int, int]:
        """Columns of a packed matrix, and bits of a number."""
        shape_name = self._need(f"{stem}.weight_shape", name)
        sizes = self._read(shape_name).flatten().tolist()
        if len(sizes) != 2 or sizes[0] != packed[0] or not WORD_BITS <= sizes[1] < 2**31:
            self._fail(shape_name, f"holds {sizes}, which does not fit {name} {list(packed)}")
        num_columns = int(sizes[1])
        bits = next((b for b in range(1, 9) if words_of(num_columns, b) == packed[1]), 0)
        if not bits:
            self._fail(name, f"is {list(packed)}, which does not fit {num_columns} columns")
        return num_columns, bits

    def _columns(self, stem: str, weight: StoredTensor) -> QuantizedTensor:
        name, is_awq = f"{stem}.qweight", self._stored.method == "awq"
        zeros_name, scales_name = (self._need(f"{stem}.{e}", name) for e in ("qzeros", "scales"))
        zeros, scales = self._tensors[zeros_name].shape, self._tensors[scales_name].shape
        if len(weight.shape) != 2 or len(zeros) != 2 or len(scales) != 2 or not all(zeros):
            self._fail(name, f"is {list(weight.shape)}, with {list(zeros)} and {list(scales)}")
        num_groups, num_outputs = scales
        bits = WORD_BITS * zeros[1] // num_outputs if num_outputs else 0
        if bits not in ((4,) if is_awq else (2, 4, 8)):
            self._fail(name, f"has {bits} bits a number, which is not supported")
        num_inputs = weight.shape[0] if is_awq else weight.shape[0] * WORD_BITS // bits
        wanted = (num_inputs, words_of(num_outputs, bits)) if is_awq else (None, num_outputs)
        if weight.shape[1] != wanted[1] or zeros != (num_groups, words_of(num_outputs, bits)):
            self._differs(zeros_name, zeros, name)
        members = {"qweight": name, "qzeros": zeros_name, "scales": scales_name}
        if (order := f"{stem}.g_idx") in self._tensors and not is_awq:
            if self._tensors[order].shape != (num_inputs,):
                self._differs(order, self._tensors[order].shape, name)
            members["g_idx"] = order
        elif num_inputs % num_groups:
            self._differs(scales_name, scales, name)
        shape = (num_outputs, num_inputs)
        return QuantizedTensor(
            PackedColumns(shape, bits, num_groups, is_awq, self._stored.zero_offset), members
        )

    def _four_bits(self, stem: str, name: str, packed: StoredTensor) -> QuantizedTensor:
        scale_name = self._need(f"{stem}.weight_scale", name)
        scale = self._tensors[scale_name]
        if len(packed.shape) != 2 or len(scale.shape) != 2:
            self._differs(scale_name, scale.shape, name)
        num_rows, num_columns = packed.shape[0], 2 * packed.shape[1]
        sizes = {num_columns / scale.shape[1]} if scale.shape[1] else set()
        if scale.shape[0] != num_rows or not sizes & {*_FOUR_BIT_GROUPS}:
            self._differs(scale_name, scale.shape, name)
        members = {"weight_packed": name, "scale": scale_name}
        divisor, factor = f"{stem}.weight_global_scale", f"{stem}.weight_scale_2"
        for whole in (divisor, factor):
            if whole in self._tensors:
                if self._tensors[whole].shape not in ((), (1,)):
                    self._differs(whole, self._tensors[whole].shape, name)
                members["global_scale"] = whole
        if scale.dtype != "U8" and "global_scale" not in members:
            self._fail(name, f"has no scale {divisor}")
        shape = (num_rows, num_columns)
        matrix = FourBitFloats(shape, is_divided=divisor in self._tensors)
        # NVFP4 or MXFP4; others are not kept.
        size = {_KEPT_FLOATS: NVFP4_COLUMNS // 2, _POWERS: BLOCK}.get(scale.dtype)
        is_whole = scale.dtype != _POWERS or "global_scale" not in members
        kept_type = scale.dtype if size in sizes and is_whole else ""
        return QuantizedTensor(matrix, members, dtype=kept_type)

    def _need(self, name: str, of: str) -> str:
        if name not in self._tensors:
            self._fail(of, f"has no {name}")
        return name

    def _differs(self, name: str, shape: tuple[int, ...], of: str) -> NoReturn:
        self._fail(name, f"is {list(shape)}, which does not fit {of}")

    def _fail(self, name: str, problem: str) -> NoReturn:
        raise CorruptFileError(f"tensor {name!r} {problem}")


def _even_block(shape: tuple[int, int], grid: tuple[int, ...]) -> tuple[int, int] | None:
    """The size of blocks that are all alike."""
    if not all(grid) or shape[0] % grid[0] or shape[1] % grid[1]:
        return None
    return shape[0] // grid[0], shape[1] // grid[1]
