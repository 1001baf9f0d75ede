"""A layer's experts on a CPU, all in one call: what `expert_kernels` needs to be given."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from termgen.engine.device.native.expert_kernels import Activation, Job, experts_program
from termgen.engine.device.native.int8_blocks import BLOCK, COARSE, TILE, Int8Blocks
from termgen.engine.device.native.int8_kernels import Layout
from termgen.engine.device.native.jit import Kernel, threads_for

MOST_TOKENS = 256
"""Tokens of one call: what it computes on its way stays in memory of some megabytes."""
_memory = threading.local()


@dataclass(frozen=True, slots=True)
class BlockTable:
    """Matrices of one shape, [num_rows, num_columns], whose numbers have one width."""

    matrices: Sequence[Int8Blocks]
    addresses: torch.Tensor  # [num, 2] int64: tiles and scales of rows
    num_bits: int

    @classmethod
    def of(cls, matrices: Sequence[Int8Blocks]) -> BlockTable | None:
        """None for widths that are not alike, and for sizes that the kernels do not cover."""
        first = matrices[0]
        num_bits = first.runs[0].num_bits
        are_alike = all(len(one.runs) == 1 and one.runs[0].num_bits == num_bits for one in matrices)
        if not are_alike or first.num_rows % TILE or first.num_columns % BLOCK:
            return None
        places = [(one.tiles.data_ptr(), one.row_scale.data_ptr()) for one in matrices]
        return cls(matrices, torch.tensor(places, dtype=torch.int64), num_bits)

    def takes(self, gate_up: BlockTable) -> bool:
        """True if its columns are what half of the other's rows give: columns that fill no block
        are padded, and rows are not."""
        return 2 * self.matrices[0].num_columns == gate_up.matrices[0].num_rows

    @property
    def layout(self) -> Layout:
        return Layout(BLOCK, TILE, self.num_bits, COARSE)


@dataclass(frozen=True)
class ExpertWeights:
    """What a layer's experts are, but for the router."""

    gate_up: BlockTable  # of matrices [2 * inner, hidden]
    down: BlockTable  # of matrices [hidden, inner]
    activation: Activation
    gate_up_bias: torch.Tensor | None = None  # [num_experts, 2 * inner] float32
    down_bias: torch.Tensor | None = None  # [num_experts, hidden] float32
    weighs_inputs: bool = False
    """True if weights multiply what goes into an expert and not what comes out."""

    @property
    def num_experts(self) -> int:
        return len(self.gate_up.matrices)

    @property
    def hidden(self) -> int:
        return self.down.matrices[0].num_rows

    @property
    def inner(self) -> int:
        return self.down.matrices[0].num_columns

    @cached_property
    def program(self) -> Kernel:
        return experts_program(self.gate_up.layout, self.down.layout, self.activation)

    @property
    def expert_bytes(self) -> int:
        return self.gate_up.matrices[0].tiles.nbytes + self.down.matrices[0].tiles.nbytes

    def job(
        self,
        x: torch.Tensor,  # [T, hidden] float32
        ids: torch.Tensor,  # [T, k] int32; -1 - expert for one that is not to be computed
        weights: torch.Tensor,  # [T, k] float32
        out: torch.Tensor,  # [T, hidden] float32
        scratch: torch.Tensor,
        *,
        counts: torch.Tensor,  # [num_experts] int64
        threads: int,
    ) -> Job:
        """The argument of `program`. All tensors contiguous, and to be kept until it has run.
        scratch: `scratch_bytes` or more. counts: how often each expert was chosen is added."""
        num_tokens, top_k = ids.shape
        assert x.shape == out.shape == (num_tokens, self.hidden), (x.shape, out.shape)
        assert num_tokens <= MOST_TOKENS, num_tokens
        assert scratch.nbytes >= self.scratch_bytes(num_tokens, top_k), scratch.nbytes
        names = {"x": x, "ids": ids, "weights": weights, "out": out, "counts": counts}
        names |= {"gate_up": self.gate_up.addresses, "down": self.down.addresses}
        assert all(part.is_contiguous() for part in names.values())
        fields = {name: part.data_ptr() for name, part in names.items()}
        for name, bias in (("gate_up_bias", self.gate_up_bias), ("down_bias", self.down_bias)):
            fields[name] = 0 if bias is None else bias.data_ptr()
        at = scratch.data_ptr()
        for name, size in self._rooms(num_tokens, top_k).items():
            fields[name] = at
            at += size
        return Job(
            **fields,
            num_tokens=num_tokens,
            top_k=top_k,
            num_experts=self.num_experts,
            hidden=self.hidden,
            inner=self.inner,
            weighs_inputs=self.weighs_inputs,
            threads=threads,
        )

    def scratch_bytes(self, num_tokens: int, top_k: int) -> int:
        return sum(self._rooms(num_tokens, top_k).values())

    def _rooms(self, num_tokens: int, top_k: int) -> dict[str, int]:
        """Bytes of each part of the scratch memory, whole lines of the cache."""
        pairs = num_tokens * top_k
        numbers = {
            "x_scaled": num_tokens * (self.hidden + self.hidden // BLOCK),
            "gated": pairs * 2 * self.inner,
            "activated": pairs * (self.inner + self.inner // BLOCK),
            "y": pairs * self.hidden,
            "order": pairs,
            "runs": 3 * pairs,
            "starts": self.num_experts + 1,
        }
        return {name: -(-4 * count // 64) * 64 for name, count in numbers.items()}


def run_natively(
    x: torch.Tensor,  # [T, hidden] float32
    ids: torch.Tensor,  # [T, k] int32
    weights: torch.Tensor,  # [T, k] float32
    experts: ExpertWeights,
    counts: torch.Tensor | None = None,  # [num_experts] int64
) -> torch.Tensor:
    """[T, hidden]: each token's experts, weighted and added up. `ops.run_experts` is the
    reference. counts: how often each expert was chosen is added."""
    out = torch.empty_like(x)
    if counts is None:
        counts = torch.zeros(experts.num_experts, dtype=torch.int64)
    top_k = ids.shape[1]
    scratch = _scratch(experts.scratch_bytes(min(len(x), MOST_TOKENS), top_k))
    parts = (torch.split(part, MOST_TOKENS) for part in (x, ids, weights, out))
    for x_part, ids_part, weights_part, out_part in zip(*parts, strict=True):
        num_bytes = ids_part.numel() * experts.expert_bytes
        job = experts.job(
            *(x_part, ids_part, weights_part, out_part, scratch),
            counts=counts,
            threads=threads_for(num_bytes),
        )
        experts.program(ctypes.addressof(job))
    return out


def _scratch(num_bytes: int) -> torch.Tensor:
    """This thread's memory for what a call computes on its way."""
    kept: torch.Tensor | None = getattr(_memory, "scratch", None)
    if kept is None or kept.nbytes < num_bytes:
        kept = _memory.scratch = torch.empty(num_bytes, dtype=torch.uint8)
    return kept
