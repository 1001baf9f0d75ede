"""The gated delta net by Triton kernels: `delta_decode` for rows of one token, `delta_prefill` for
others.

Which row is which is settled on the device, in a plan made once per step, so that a recorded step
stays right for every mix of prompts and decodes.
"""

from __future__ import annotations

import torch

from termgen.engine.device.kernels.recurrent.chunk_plan import ChunkPlan, plan_chunks
from termgen.engine.device.kernels.recurrent.delta_decode import delta_decode
from termgen.engine.device.kernels.recurrent.delta_prefill import delta_prefill
from termgen.engine.device.kernels.recurrent.delta_replay import delta_replay
from termgen.engine.device.kernels.recurrent.gated_norm import gated_norm
from termgen.engine.device.kernels.recurrent.layout import GatedDeltaShape
from termgen.engine.device.recurrent.base import (
    GatedDeltaState,
    GatedDeltaWeights,
    RecurrentMetadata,
)


class TritonGatedDelta:
    """GatedDeltaNet. Its plan serves one step at a time, in stream order."""

    def __init__(
        self, shape: GatedDeltaShape, *, max_rows: int, max_tokens: int, device: torch.device
    ) -> None:
        self.shape = shape
        self._plan = ChunkPlan(max_rows=max_rows, max_tokens=max_tokens, device=device)
        self._decode_rows = 0
        self._prompt_rows = 0
        self._num_chunks = 0
        self._prepared: RecurrentMetadata | None = None

    gated_norm = staticmethod(gated_norm)

    def prepare(self, metadata: RecurrentMetadata) -> None:
        # A row of drafts may stand among the prompts, and a prompt may go on from a copied state
        # that has pending tokens.
        drafts = metadata.num_drafts
        is_mixed = metadata.num_decodes is None or drafts is not None
        first_row = metadata.num_decodes or 0
        self._decode_rows = metadata.num_rows if is_mixed else first_row
        self._prompt_rows = metadata.num_rows - first_row
        if is_mixed and metadata.max_query_len <= 1:
            self._prompt_rows = 0
        if self._prompt_rows:
            self._num_chunks = plan_chunks(
                metadata.query_start_loc,
                self._plan,
                first_row=first_row,
                num_rows=metadata.num_rows,
                num_tokens=metadata.num_tokens - first_row,
                skip_single=is_mixed,
                num_drafts=drafts,
            )
        self._prepared = metadata

    def gated_delta(
        self,
        mixed: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        weights: GatedDeltaWeights,
        state: GatedDeltaState,
        metadata: RecurrentMetadata,
        *,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert self._prepared is metadata, "prepare was not called for this step"
        shape = self.shape
        if out is None:
            size = (mixed.shape[0], shape.num_v_heads, shape.v_dim)
            out = torch.empty(size, dtype=mixed.dtype, device=mixed.device)
        inputs = (mixed, a, b, weights.conv, weights.a_log, weights.dt_bias)
        states = (state.delta, state.conv)
        rows = (
            *(metadata.query_start_loc, metadata.slots, metadata.positions, metadata.has_state),
        )
        num_rows = self._decode_rows
        if metadata.num_drafts is not None:
            assert state.gates is not None and metadata.num_pending is not None
            counts = (metadata.num_pending, metadata.num_drafts)
            tensors = (*inputs, *states, state.gates, *rows, *counts)
            delta_replay(*tensors, shape=shape, num_rows=num_rows, out=out)
        elif num_rows:
            delta_decode(*inputs, *states, *rows, shape=shape, num_rows=num_rows, out=out)
        if self._prompt_rows and self._num_chunks:
            delta_prefill(
                *inputs,
                *states,
                *rows,
                self._plan,
                shape=shape,
                max_rows=self._prompt_rows,
                num_chunks=self._num_chunks,
                out=out,
            )
        return out
