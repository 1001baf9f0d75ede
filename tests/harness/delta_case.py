"""Random inputs, weights and states of a gated delta net, and the steps that consume them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from termgen.engine.device.kernels.recurrent.layout import CONV_TAPS, GatedDeltaShape
from termgen.engine.device.recurrent.base import (
    GatedDeltaNet,
    GatedDeltaState,
    GatedDeltaWeights,
    RecurrentMetadata,
    empty_state,
    tap_major,
)
from termgen.engine.device.recurrent.reference import gated_delta_reference

SMALL = GatedDeltaShape(num_k_heads=2, num_v_heads=4, k_dim=16, v_dim=32)
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""mixed, a and b of some tokens."""
Rows = Sequence[tuple[int, int, int]]
"""(slot, position, tokens) of each row; position 0 begins a sequence."""


def make_metadata(
    rows: Rows, device: str, *, num_decodes: int | None = None, padding: int = 0
) -> RecurrentMetadata:
    """num_decodes: None for a recorded step's. padding: rows of the scratch slot, without tokens,
    and as many tokens of no row."""
    rows = [*rows, *[(0, 0, 0)] * padding]
    starts = torch.tensor([0] + [n for _, _, n in rows]).cumsum(0)
    return RecurrentMetadata(
        query_start_loc=starts.to(device, torch.int32),
        slots=torch.tensor([slot for slot, _, _ in rows], dtype=torch.int32, device=device),
        positions=torch.tensor([p for _, p, _ in rows], dtype=torch.int32, device=device),
        has_state=torch.tensor([p > 0 for _, p, _ in rows], device=device),
        num_rows=len(rows),
        num_tokens=int(starts[-1]) + padding,
        num_decodes=num_decodes,
        max_query_len=max(n for _, _, n in rows),
    )


class DeltaCase:
    """One layer of random weights, and sequences of random inputs, the same for all devices."""

    def __init__(
        self,
        shape: GatedDeltaShape = SMALL,
        *,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        decay: float = 0.3,
        num_slots: int = 8,
        seed: int = 0,
    ) -> None:
        """decay: the largest exp(a_log)."""
        self.shape, self.dtype, self.device, self.num_slots = shape, dtype, device, num_slots
        self._generator = torch.Generator().manual_seed(seed)
        heads = shape.num_v_heads
        self.weights = GatedDeltaWeights(
            tap_major((self._normal(shape.num_channels, CONV_TAPS) * 0.5).to(device, dtype)),
            (torch.linspace(0.01, 1, heads) * decay).log().to(device),
            self._normal(heads).to(device),
        )

    def _normal(self, *size: int) -> torch.Tensor:
        return torch.randn(size, generator=self._generator)

    def inputs(self, tokens: int) -> Inputs:
        """mixed, a and b, as parts of wider rows. Keys of neighbours are alike, as those of
        repeated words are."""
        mixed = self._normal(tokens, self.shape.num_channels + 16)
        mixed[1:] += mixed[:-1].clone()
        gates = self._normal(tokens, 2 * self.shape.num_v_heads)
        mixed, gates = (x.to(self.device, self.dtype) for x in (mixed, gates))
        a, b = gates.chunk(2, 1)
        return mixed[:, : self.shape.num_channels], a, b

    def state(self, num_drafts: int = 0) -> GatedDeltaState:
        """Slots full of NaN, as freed ones may be."""

        def make(size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            return torch.full(size, float("nan"), dtype=dtype, device=self.device)

        return empty_state(
            make, self.shape, num_slots=self.num_slots, dtype=self.dtype, num_drafts=num_drafts
        )

    def run(
        self,
        net: GatedDeltaNet,
        inputs: Inputs,
        state: GatedDeltaState,
        metadata: RecurrentMetadata,
    ) -> torch.Tensor:
        out = torch.full(
            (inputs[0].shape[0], self.shape.num_v_heads, self.shape.v_dim),
            float("nan"),
            dtype=self.dtype,
            device=self.device,
        )
        net.prepare(metadata)
        result = net.gated_delta(*inputs, self.weights, state, metadata, out=out)
        assert result is out
        return out

    def reference(
        self, inputs: Inputs, state: GatedDeltaState, metadata: RecurrentMetadata
    ) -> torch.Tensor:
        return gated_delta_reference(*inputs, self.weights, state, metadata, self.shape)


def take(inputs: Inputs, *parts: slice) -> Inputs:
    """Some tokens of each, one after another."""
    mixed, a, b = (torch.cat([x[part] for part in parts]) for x in inputs)
    return mixed, a, b


def join(parts: Sequence[Inputs]) -> Inputs:
    """The tokens of all parts, one part after another."""
    mixed, a, b = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    return mixed, a, b


def copy_slot(state: GatedDeltaState, source: int, target: int) -> None:
    for tensor in state.tensors():
        tensor[target] = tensor[source]


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """In the norm of all values; infinite with a NaN."""
    actual, expected = actual.double(), expected.double()
    error = float((actual - expected).norm() / expected.norm().clamp_min(1e-30))
    return error if error == error else float("inf")


def known_inputs(state: GatedDeltaState, slot: int, position: int) -> torch.Tensor:
    """The three convolution inputs before `position`, in order of time."""
    return state.conv[slot, [(position - back) % CONV_TAPS for back in (3, 2, 1)]]
