"""Weights in 8 bits or 4 on a GPU: a `LinearMethod` over the groups of `group_gemm`.

The numbers are those that the CPU keeps (`native.int8_blocks`): every 32 of a row have a scale and
an offset. Blocks of a GGUF file keep their numbers, where their type has no more scales than that;
other weights are rounded while they are loaded. Types with a scale for every 16 numbers and no
offset (Q6_K, Q3_K, NVFP4) have a second scale in the place of the offset. Rows whose numbers have
16 levels take 4 bits.
Activations stay in 16 bits.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from termgen.engine.device.kernels.gemm.group_gemm import (
    group_gemm,
    widen,
)
from termgen.engine.device.kernels.gemm.group_layout import GROUP, pack, pack_pairs, rows_aside
from termgen.engine.device.kernels.gemm.small_gemm_config import (
    ROW_BANDS,
    SmallGemmConfig,
)
from termgen.engine.device.kernels.launch import shared_bytes
from termgen.engine.device.layers.linear import Build, LinearMethod, LinearSpec
from termgen.engine.device.layers.stored_rows import StoredRows
from termgen.engine.device.layers.triton_ops import SharedWorkspace
from termgen.engine.device.native.int8_blocks import Quantized
from termgen.engine.device.quantization.affine_blocks import ORDERED_GROUPS
from termgen.engine.device.quantization.gathered_rows import RoundedLinear
from termgen.engine.device.quantization.group_experts import GroupExperts
from termgen.engine.device.quantization.halved_blocks import WIDTHS, halved
from termgen.engine.device.quantization.stored_matrices import NVFP4

BANDS = (*ROW_BANDS, 128)
"""Rows of x; from the last on the weight is widened in memory."""
TILE = 32
"""Rows whose numbers have one width."""
_MOST_RUNS = 4
"""A matrix with more runs of tiles of one width is kept in 8 bits: each is a kernel of its own."""
_PART_NUMBERS = 2**26
"""Numbers of a weight that are widened, or rounded, at a time."""
# Chosen on an H200, on the products of Llama 3.1 8B.
_LEAST_ROWS = 16
_BLOCK_N = 128
_ENOUGH = 264
"""Programs, two for each multiprocessor: K is cut no further."""
_SPARE_BYTES = 2048
"""Shared memory for all but the tiles."""
_MOST_SPLITS = {16: 8, 32: 8, 64: 4, 128: 4}
"""Rows of x -> the most parts of K."""


class GroupLinears:
    """LinearMethodFactory: makes the layers of one model, which share a workspace."""

    def __init__(self) -> None:
        self._shared = SharedWorkspace()

    def __call__(self, spec: LinearSpec) -> LinearMethod:
        return GroupLinear(spec, self._shared)

    def in_4_bits(self, spec: LinearSpec) -> LinearMethod:
        """The same, but of 16 levels whatever the weights were."""
        return Group4Linear(spec, self._shared)

    def experts(self, shape: tuple[int, int, int], build: Build) -> GroupExperts:
        """The matrices of one layer's experts."""
        return GroupExperts(shape, build, 8)

    def experts_in_4_bits(self, shape: tuple[int, int, int], build: Build) -> GroupExperts:
        return GroupExperts(shape, build, 4)


class Form(NamedTuple):
    """How some rows lie in memory, where it is not as others do."""

    order: int = 0
    """Which of `GroupLinear.orders` their columns have."""
    halved_bits: int = 0
    """Bits of their numbers, if 16 columns share a scale."""


class _Run(NamedTuple):
    """Neighbouring rows whose numbers have one form and one width."""

    first: int
    end: int
    num_bits: int
    form: Form
    words: nn.Parameter
    pairs: nn.Parameter
    configs: dict[int, SmallGemmConfig]


class GroupLinear(RoundedLinear):
    """LinearMethod: 8 or 4 bits a number, and 32 bits for every 32 of them. Rows of a file with
    groups in disorder have their columns in the order of groups, and meet x in that order. Those
    with a scale for every 16 numbers have two of them in the 32 bits, and no offset."""

    kinds = RoundedLinear.kinds | {ORDERED_GROUPS, NVFP4}
    part_numbers = _PART_NUMBERS

    def __init__(self, spec: LinearSpec, shared: SharedWorkspace) -> None:
        super().__init__(spec)
        self._shared = shared
        self._runs: list[_Run] = []
        self.orders: list[torch.Tensor | None] = [None]
        """The columns of x that those of some rows meet; None: they are in their order."""
        self._formed: list[tuple[int, int, Form]] = []
        """(first row, end, form) of rows that were loaded in another form than most."""

    def load_stored(self, rows: StoredRows, first_row: int) -> None:
        end = first_row + len(rows.blocks)
        if rows.order is not None:
            self._formed.append((first_row, end, Form(order=self._number_of(rows.order))))
        halved_bits = WIDTHS.get(rows.kind, 0)
        if not 0 < halved_bits <= self.num_bits:
            super().load_stored(rows, first_row)
            return
        self._formed.append((first_row, end, Form(halved_bits=halved_bits)))
        for blocks in torch.split(rows.blocks, max(1, _PART_NUMBERS // self._spec.in_features)):
            here = blocks.to(self._spec.device)
            self._add(halved(replace(rows, blocks=here)), first_row)
            first_row += len(blocks)

    def _number_of(self, order: torch.Tensor) -> int:
        """Its place among the orders: x is brought into equal ones once."""
        here = order.to(self._spec.device)
        for number, known in enumerate(self.orders):
            if known is not None and torch.equal(known, here):
                return number
        self.register_buffer(f"order_{len(self.orders)}", here)  # counts as a weight
        self.orders.append(here)
        return len(self.orders) - 1

    def _keep(self, whole: Quantized) -> None:
        self.row_scale = nn.Parameter(whole.row_scale, requires_grad=False)
        for first, end, form in in_one_form(self._formed, self._spec.out_features):
            if form.halved_bits:
                self._keep_run(whole, first, end, form.halved_bits, form)
                continue
            for begin, last, num_bits in widths(whole.numbers[first:end]):
                self._keep_run(whole, first + begin, first + last, num_bits, form)

    def _keep_run(self, whole: Quantized, first: int, end: int, num_bits: int, form: Form) -> None:
        columns = (end - first, self._spec.in_features)
        words = nn.Parameter(pack(whole.numbers[first:end], num_bits), requires_grad=False)
        scale, low = whole.scale[first:end], whole.low[first:end]
        pairs = nn.Parameter(pack_pairs(scale, low, num_bits), requires_grad=False)
        configs = {band: choose(band, *columns, num_bits, self._spec) for band in BANDS}
        for config in configs.values():
            self._shared.reserve(config, end - first)
        run = _Run(first, end, num_bits, form, words, pairs, configs)
        self.register_parameter(f"words_{len(self._runs)}", words)
        self.register_parameter(f"pairs_{len(self._runs)}", pairs)
        self._runs.append(run)

    def finalize(self) -> None:
        assert self._runs, "not all rows were loaded"

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        num_rows = x.shape[0]
        out = x.new_empty(num_rows, self._spec.out_features)
        if not 0 < num_rows <= BANDS[-1]:
            self._multiply_wide(x, bias, out)
            return out
        inputs = self._in_orders(x)
        band = next(rows for rows in BANDS if rows >= num_rows)
        workspace = self._shared.on(x.device)
        for run in self._runs:
            rows = slice(run.first, run.end)
            group_gemm(
                *(inputs[run.form.order], run.words, run.pairs, self.row_scale[rows]),
                None if bias is None else bias[rows],
                num_bits=run.num_bits,
                is_halved=run.form.halved_bits > 0,
                config=run.configs[band],
                workspace=workspace,
                out=out[:, rows],
            )
        return out

    def _in_orders(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [x if order is None else x.index_select(1, order) for order in self.orders]

    def _multiply_wide(self, x: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
        spec, inputs = self._spec, self._in_orders(x)
        step = max(1, _PART_NUMBERS // spec.in_features)
        for run in self._runs:
            for first in range(run.first, run.end, step):
                end = min(first + step, run.end)
                weight = self._widen(run, slice(first - run.first, end - run.first), x.dtype)
                torch.mm(inputs[run.form.order], weight.T, out=out[:, first:end])
        if bias is not None:
            out += bias

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """A row is looked up in every run: which one has it is known on the device alone."""
        found = None
        for run in self._runs:
            place = (ids - run.first).clamp(0, run.end - run.first - 1)
            rows = self._widen(run, place, self._spec.dtype)
            if (order := self.orders[run.form.order]) is not None:
                rows = torch.empty_like(rows).index_copy_(1, order, rows)
            is_here = (ids >= run.first)[:, None]
            found = rows if found is None else torch.where(is_here, rows, found)
        assert found is not None, "not finalized"
        return found

    def _widen(self, run: _Run, rows: slice | torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Rows of a run, counted from its first."""
        row_scale = self.row_scale[run.first : run.end]
        num_columns = self._spec.in_features
        weight = (run.words, run.pairs, row_scale, num_columns)
        is_halved = run.form.halved_bits > 0
        return widen(*weight, dtype, run.num_bits, rows, is_halved=is_halved)


class Group4Linear(GroupLinear):
    """LinearMethod: 4 bits a number, and 32 bits for every 32 of them."""

    num_bits = 4


def in_one_form(formed: list[tuple[int, int, Form]], num_rows: int) -> list[tuple[int, int, Form]]:
    """Runs (first row, end, form) of all rows, of neighbours with one form. formed: those with
    another form than most, in parts."""
    parts, done = [], 0
    for first, end, form in sorted(formed):
        parts += [(done, first, Form())] if done < first else []
        parts.append((first, end, form))
        done = end
    parts += [(done, num_rows, Form())] if done < num_rows else []
    runs = []
    for form, group in groupby(parts, key=lambda part: part[2]):
        alike = list(group)
        runs.append((alike[0][0], alike[-1][1], form))
    return runs


def widths(numbers: torch.Tensor) -> list[tuple[int, int, int]]:
    """(first row, end, bits) of each run. numbers: [rows, columns] uint8."""
    num_rows = len(numbers)
    is_coarse = torch.cat(
        [((part & 15) == (part >> 4)).all(1) for part in torch.split(numbers, 64 * TILE)]
    )
    tiles = F.pad(is_coarse, (0, -num_rows % TILE), value=True).view(-1, TILE).all(1).tolist()
    runs, first = [], 0
    for flag, of_run in groupby(tiles):
        end = min(first + TILE * len(list(of_run)), num_rows)
        runs.append((first, end, 4 if flag else 8))
        first = end
    return runs if len(runs) <= _MOST_RUNS else [(0, num_rows, 8)]


def choose(
    band: int, out_features: int, in_features: int, num_bits: int, spec: LinearSpec
) -> SmallGemmConfig:
    """The configuration for up to `band` rows, one of `BANDS`: a number of rows and those it is
    padded to in a recorded step share it, so padding changes no bit of a row. spec: of the layer,
    whose type and device count."""
    # Integers of 16 bits would lose a third of float32.
    if spec.dtype.itemsize == 2:
        if band == 1:
            return SmallGemmConfig("gemv", 1, rows_aside(num_bits), 128, 4)
        if band == 2 and num_bits == 4:
            return SmallGemmConfig("gemv", 2, 8, 64, 2)
    groups, block_m = -(-in_features // GROUP.value), max(_LEAST_ROWS, band)
    tiles, splits = -(-out_features // _BLOCK_N), 1
    while splits < _MOST_SPLITS[block_m] and 2 * splits * tiles <= _ENOUGH:
        splits *= 2
    is_small = block_m == _LEAST_ROWS
    block_k = 8 if is_small and splits > 1 and num_bits == 4 else 4
    while splits > 1 and splits * 2 * block_k > groups:
        splits //= 2
    tile_bytes = block_k * (_BLOCK_N * (4 * num_bits + 4) + block_m * 32 * spec.dtype.itemsize)
    most_stages = (shared_bytes(spec.device) - _SPARE_BYTES) // tile_bytes
    num_stages = max(1, min(most_stages, 3 if splits > 1 else 4))
    num_warps = 4 if is_small and num_bits == 8 else 8
    return SmallGemmConfig("mma", block_m, _BLOCK_N, block_k, num_warps, num_stages, splits)
