"""Weights in 8 bits or 4 on a GPU: a `LinearMethod` over the groups of `group_gemm`.

The numbers are those that the CPU keeps (`native.int8_blocks`): every 32 of a row have a scale and
an offset. Blocks of a GGUF file keep their numbers, where their type has no more scales than that;
other weights are rounded while they are loaded. Types with a scale for every 16 numbers and no
offset (NVFP4) have a second scale in the place of the offset. Rows whose numbers have
16 levels take 4 bits.
Activations stay in 16 bits.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import nn

from termgen.engine.device.kernels.gemm.group_config import gated_cut, group_cut
from termgen.engine.device.kernels.gemm.group_gemm import (
    group_gemm,
    widen,
)
from termgen.engine.device.kernels.gemm.group_layout import pack, pack_pairs
from termgen.engine.device.kernels.gemm.small_gemm_config import (
    GROUP_BANDS,
    ByRows,
    Shape,
    SmallGemmConfig,
    Tuned,
    measured,
)
from termgen.engine.device.kernels.launch import shared_bytes
from termgen.engine.device.layers.linear import Build, LinearMethod, LinearSpec
from termgen.engine.device.layers.stored_rows import StoredRows
from termgen.engine.device.layers.triton_ops import SharedWorkspace
from termgen.engine.device.native.int8_blocks import Quantized
from termgen.engine.device.quantization.affine_blocks import ORDERED_GROUPS
from termgen.engine.device.quantization.column_orders import ColumnOrders
from termgen.engine.device.quantization.gathered_rows import RoundedLinear
from termgen.engine.device.quantization.group_experts import GroupExperts
from termgen.engine.device.quantization.halved_blocks import WIDTHS, halved
from termgen.engine.device.quantization.planned import group_shape, widths
from termgen.engine.device.quantization.stored_matrices import NVFP4

_PART_NUMBERS = 2**26
"""Numbers of a weight that are widened, or rounded, at a time."""


class GroupLinears:
    """LinearMethodFactory: makes the layers of one model, which share a workspace."""

    def __init__(self, tuned: Tuned | None = None) -> None:
        """tuned: what was measured on this GPU."""
        self._shared = SharedWorkspace()
        self._tuned = tuned

    def __call__(self, spec: LinearSpec) -> LinearMethod:
        return GroupLinear(spec, self._shared, self._tuned)

    def in_4_bits(self, spec: LinearSpec) -> LinearMethod:
        """The same, but of 16 levels whatever the weights were."""
        return Group4Linear(spec, self._shared, self._tuned)

    def experts(self, shape: tuple[int, int, int], build: Build) -> GroupExperts:
        """The matrices of one layer's experts."""
        return GroupExperts(shape, build, 8)

    def experts_in_4_bits(self, shape: tuple[int, int, int], build: Build) -> GroupExperts:
        return GroupExperts(shape, build, 4)


class _Run(NamedTuple):
    """Neighbouring rows whose numbers have one width."""

    first: int
    end: int
    num_bits: int
    order: int
    """Which of `GroupLinear.orders` its columns have."""
    is_halved: bool
    """True if 16 columns share a scale."""
    words: nn.Parameter
    pairs: nn.Parameter
    configs: ByRows
    gated: SmallGemmConfig | None
    """For one row of x, if the rows are those of a gate and of what it opens for."""


class GroupLinear(RoundedLinear):
    """LinearMethod: 8 or 4 bits a number, and 32 bits for every 32 of them. Rows of a file with
    groups in disorder have their columns in the order of groups, and meet x in that order. Those
    with a scale for every 16 numbers have two of them in the 32 bits, and no offset."""

    kinds = RoundedLinear.kinds | {ORDERED_GROUPS, NVFP4}
    part_numbers = _PART_NUMBERS

    def __init__(
        self, spec: LinearSpec, shared: SharedWorkspace, tuned: Tuned | None = None
    ) -> None:
        super().__init__(spec)
        self._shared = shared
        self._tuned = tuned
        self._runs: list[_Run] = []
        self._orders = ColumnOrders()

    @property
    def orders(self) -> list[torch.Tensor | None]:
        """The columns of x that those of some rows meet; None: they are in their order."""
        return self._orders.orders

    def load_stored(self, rows: StoredRows, first_row: int) -> None:
        if rows.order is not None:
            here = rows.order.to(self._spec.device)
            if (number := self._orders.note(here, first_row, len(rows.blocks))) is not None:
                self.register_buffer(f"order_{number}", here)  # counts as a weight
        halved_bits = WIDTHS.get(rows.kind, 0)
        if not 0 < halved_bits <= self.num_bits:
            super().load_stored(rows, first_row)
            return
        self._orders.note_halved(halved_bits, first_row, len(rows.blocks))
        for blocks in torch.split(rows.blocks, max(1, _PART_NUMBERS // self._spec.in_features)):
            here = blocks.to(self._spec.device)
            self._add(halved(replace(rows, blocks=here)), first_row)
            first_row += len(blocks)

    def _keep(self, whole: Quantized) -> None:
        self.row_scale = nn.Parameter(whole.row_scale, requires_grad=False)
        for first, end, order in self._orders.runs(self._spec.out_features):
            if order < 0:
                self._keep_run(whole, first, end, -order, 0, is_halved=True)
                continue
            for begin, last, num_bits in widths(whole.numbers[first:end]):
                self._keep_run(whole, first + begin, first + last, num_bits, order)

    def _keep_run(
        self,
        whole: Quantized,
        first: int,
        end: int,
        num_bits: int,
        order: int,
        *,
        is_halved: bool = False,
    ) -> None:
        columns = (end - first, self._spec.in_features)
        words = nn.Parameter(pack(whole.numbers[first:end], num_bits), requires_grad=False)
        scale, low = whole.scale[first:end], whole.low[first:end]
        pairs = nn.Parameter(pack_pairs(scale, low, num_bits), requires_grad=False)
        shape = group_shape(*columns, num_bits)
        configs = measured(shape, self._spec.dtype, self._tuned) or {
            band: choose(band, *columns, num_bits, self._spec) for band in GROUP_BANDS
        }
        for config in configs.values():
            if config is not None:
                self._shared.reserve(config, end - first)
        gated = gated_cut(configs[1], num_bits, pairs.shape[1])
        run = _Run(first, end, num_bits, order, is_halved, words, pairs, configs, gated)
        self.register_parameter(f"words_{len(self._runs)}", words)
        self.register_parameter(f"pairs_{len(self._runs)}", pairs)
        self._runs.append(run)

    def finalize(self) -> None:
        assert self._runs, "not all rows were loaded"

    def shapes(self) -> list[Shape]:
        k = self._spec.in_features
        return [group_shape(run.end - run.first, k, run.num_bits) for run in self._runs]

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        num_rows = x.shape[0]
        out = x.new_empty(num_rows, self._spec.out_features)
        inputs = self._in_orders(x)
        if not 0 < num_rows <= GROUP_BANDS[-1]:
            for run in self._runs:
                self._multiply_wide(run, inputs[run.order], out)
            return out if bias is None else out.add_(bias)
        band = next(rows for rows in GROUP_BANDS if rows >= num_rows)
        workspace = self._shared.on(x.device)
        for run in self._runs:
            rows, config = slice(run.first, run.end), run.configs[band]
            own = None if bias is None else bias[rows]
            if config is None:
                self._multiply_wide(run, inputs[run.order], out)
                if own is not None:
                    out[:, rows] += own
                continue
            group_gemm(
                *(inputs[run.order], run.words, run.pairs, self.row_scale[rows], own),
                num_bits=run.num_bits,
                is_halved=run.is_halved,
                config=config,
                workspace=workspace,
                out=out[:, rows],
            )
        return out

    def multiply_gated(
        self, x: torch.Tensor, bias: torch.Tensor | None, activation: str
    ) -> torch.Tensor | None:
        """act(gate) * up of a product with rows of both, in one launch; None: there is none."""
        run = self._runs[0]
        if len(x) != 1 or len(self._runs) > 1 or run.gated is None or len(self.row_scale) % 8:
            return None
        return group_gemm(
            *(self._in_orders(x)[run.order], run.words, run.pairs, self.row_scale, bias),
            num_bits=run.num_bits,
            is_halved=run.is_halved,
            config=run.gated,
            activation=activation,
        )

    def _in_orders(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [x if order is None else x.index_select(1, order) for order in self.orders]

    def _multiply_wide(self, run: _Run, x: torch.Tensor, out: torch.Tensor) -> None:
        """x: in the order of the run."""
        step = max(1, _PART_NUMBERS // self._spec.in_features)
        for first in range(run.first, run.end, step):
            end = min(first + step, run.end)
            weight = self._widen(run, slice(first - run.first, end - run.first), x.dtype)
            torch.mm(x, weight.T, out=out[:, first:end])

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """A row is looked up in every run: which one has it is known on the device alone."""
        found = None
        for run in self._runs:
            place = (ids - run.first).clamp(0, run.end - run.first - 1)
            rows = self._widen(run, place, self._spec.dtype)
            if (order := self.orders[run.order]) is not None:
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
        return widen(*weight, dtype, run.num_bits, rows, is_halved=run.is_halved)


class Group4Linear(GroupLinear):
    """LinearMethod: 4 bits a number, and 32 bits for every 32 of them."""

    num_bits = 4


def choose(
    band: int, out_features: int, in_features: int, num_bits: int, spec: LinearSpec
) -> SmallGemmConfig:
    """The configuration without a measurement. spec: of the layer, whose type and device count."""
    return group_cut(
        *(band, out_features, in_features, num_bits),
        item_bytes=spec.dtype.itemsize,
        shared_bytes=shared_bytes(spec.device),
    )
