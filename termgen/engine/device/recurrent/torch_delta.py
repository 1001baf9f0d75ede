"""The gated delta net in torch: rows of one token all at once, others in chunks of 64 tokens.

The path of the CPU; runs on any device, but waits for it. A chunk from state S, with c the running
sum of the decays g and D_ij = exp(c_i - c_j) for i >= j, row vectors q, k, v:

    (1 + M) U = beta (v - exp(c) k S^T)     M_ij = beta_i (k_i . k_j) D_ij for i > j
    o = exp(c) q S^T + ((q k^T) D) U
    S' = exp(c_n) S + U^T (exp(c_n - c) k)

U are the very updates that token by token would be added to S. D is made of differences that are
set to minus infinity above the diagonal before they are exponentiated: over 64 tokens c reaches
-1000, and exp(-c) would overflow.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from termgen.engine.device.kernels.recurrent.layout import CHUNK, CONV_TAPS, GatedDeltaShape
from termgen.engine.device.recurrent.base import (
    GatedDeltaState,
    GatedDeltaWeights,
    RecurrentMetadata,
)
from termgen.engine.device.recurrent.reference import L2_EPS, gated_norm_reference


class _Row(NamedTuple):
    """A row of several tokens, those that are pending among them."""

    slot: int
    position: int
    """Tokens that its state has taken up."""
    has_state: bool
    start: int
    end: int
    """Its tokens in the step."""
    num_pending: int
    num_drafts: int


class TorchGatedDelta:
    """GatedDeltaNet."""

    def __init__(self, shape: GatedDeltaShape) -> None:
        self.shape = shape
        self._k_heads = torch.tensor(shape.k_heads)
        self._prompts: list[_Row] = []
        self._single_rows = self._single_tokens = torch.zeros(0, dtype=torch.int64)
        self._single_slots: torch.Tensor | slice = self._single_rows
        self._new_singles = self._single_rows
        self._prepared: RecurrentMetadata | None = None

    gated_norm = staticmethod(gated_norm_reference)

    def prepare(self, metadata: RecurrentMetadata) -> None:
        device = metadata.slots.device
        self._k_heads = self._k_heads.to(device)
        starts = metadata.query_start_loc.tolist()
        pending, drafts = [0] * metadata.num_rows, [0] * metadata.num_rows
        if metadata.num_pending is not None and metadata.num_drafts is not None:
            pending, drafts = metadata.num_pending.tolist(), metadata.num_drafts.tolist()
        rows = [(row, starts[row], starts[row + 1]) for row in range(metadata.num_rows)]
        singles = [
            (row, start) for row, start, end in rows if end - start == 1 and not pending[row]
        ]
        self._prompts = [
            _Row(
                int(metadata.slots[row]),
                int(metadata.positions[row]) - pending[row],
                bool(metadata.has_state[row]),
                *(start, end, pending[row], drafts[row]),
            )
            for row, start, end in rows
            if end - start > 1 or (end > start and pending[row])
        ]
        table = torch.tensor(singles, dtype=torch.int64, device=device).view(-1, 2)
        rows_of_one, self._single_tokens = table.unbind(1)
        self._single_rows = rows_of_one
        slots = metadata.slots[rows_of_one].long()
        self._single_slots = slots
        if len(slots) and bool((slots.diff() == 1).all()):
            # Side by side: their states are read and written where they lie.
            self._single_slots = slice(int(slots[0]), int(slots[-1]) + 1)
        self._new_singles = (~metadata.has_state[rows_of_one]).nonzero()[:, 0]
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
        log_decay = -weights.a_log.float().exp() * F.softplus(a.float() + weights.dt_bias.float())
        rate = b.float().sigmoid()
        taps = weights.conv.float().t()
        if len(tokens := self._single_tokens):
            out[tokens] = self._step(
                mixed[tokens], log_decay[tokens], rate[tokens], taps, state, metadata
            ).to(out.dtype)
        for row in self._prompts:
            part = slice(row.start, row.end)
            result = self._prompt(mixed[part], log_decay[part], rate[part], taps, state, row)
            out[part] = result.transpose(0, 1).to(out.dtype)
        return out

    def _split(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Convolved [N, channels] -> q, k [N, num_k_heads, k_dim] of unit length, q scaled for the
        output, and v [N, num_v_heads, v_dim]."""
        shape = self.shape
        key_size = shape.num_k_heads * shape.k_dim
        x = F.silu(x)
        q, k = x[:, : 2 * key_size].view(-1, 2, shape.num_k_heads, shape.k_dim).unbind(1)
        v = x[:, 2 * key_size :].view(-1, shape.num_v_heads, shape.v_dim)
        q_factor = (q.square().sum(-1, keepdim=True) + L2_EPS).rsqrt_() * shape.k_dim**-0.5
        return q * q_factor, k * (k.square().sum(-1, keepdim=True) + L2_EPS).rsqrt_(), v

    def _step(
        self,
        x: torch.Tensor,
        log_decay: torch.Tensor,
        rate: torch.Tensor,
        taps: torch.Tensor,
        state: GatedDeltaState,
        metadata: RecurrentMetadata,
    ) -> torch.Tensor:
        """Rows of one token [R, channels] -> [R, num_v_heads, v_dim] float32."""
        slots = metadata.slots[self._single_rows].long()
        positions = metadata.positions[self._single_rows].long()[:, None]
        ring = _ring_rows(positions, 1 - CONV_TAPS, 1, state)
        inputs = state.conv[slots[:, None], ring]
        s = state.delta[self._single_slots]
        if len(self._new_singles):
            inputs[self._new_singles] = 0
            s[self._new_singles] = 0
        inputs[:, -1] = x
        state.conv[slots[:, None], ring] = inputs
        q, k, v = self._split((inputs.float() * taps).sum(1))
        q, k = q[:, self._k_heads], k[:, self._k_heads]

        # The state is read once, before it decays.
        decay = log_decay.exp()[..., None]
        known, o = (s @ torch.stack((k, q), -1)).mul_(decay[..., None]).unbind(-1)
        update = (v - known) * rate[..., None]
        s.mul_(decay[..., None]).addcmul_(update[..., None], k[:, :, None])
        if not isinstance(self._single_slots, slice):
            state.delta[self._single_slots] = s
        return o.addcmul_(update, (q * k).sum(-1, keepdim=True))

    def _prompt(
        self,
        x: torch.Tensor,
        log_decay: torch.Tensor,
        rate: torch.Tensor,
        taps: torch.Tensor,
        state: GatedDeltaState,
        row: _Row,
    ) -> torch.Tensor:
        """A row's tokens [N, channels] -> [num_v_heads, N, v_dim] float32."""
        slot, position, num_pending, num_drafts = row.slot, row.position, *row[-2:]
        count = num_pending + x.shape[0]
        s = state.delta[slot]
        before = state.conv[slot, _ring_rows(position, 1 - CONV_TAPS, num_pending, state)]
        if not row.has_state:
            before = before.zero_()
            s.zero_()
        if num_pending:
            assert state.gates is not None
            left = state.gates[slot, _ring_rows(position, 0, num_pending, state)]
            log_decay, rate = (
                torch.cat(both) for both in zip(left.unbind(1), (log_decay, rate), strict=True)
            )
        inputs = torch.cat((before, x))
        first = 1 - CONV_TAPS - num_drafts
        state.conv[slot, _ring_rows(position + count, first, 0, state)] = inputs[first:]
        if num_drafts:
            assert state.gates is not None
            drafts = torch.stack((log_decay[-num_drafts:], rate[-num_drafts:]), 1)
            state.gates[slot, _ring_rows(position + count, -num_drafts, 0, state)] = drafts
        convolved = inputs[:count].float() * taps[0]
        for tap in range(1, CONV_TAPS):
            convolved.addcmul_(inputs[tap : tap + count].float(), taps[tap])
        q, k, v = (heads.transpose(0, 1) for heads in self._split(convolved))
        out, s_new = chunked_delta_rule(
            *(q, k, v, log_decay.t(), rate.t(), s, self._k_heads), num_unkept=num_drafts
        )
        s.copy_(s_new)
        return out[:, num_pending:]


def _ring_rows(
    position: torch.Tensor | int, first: int, end: int, state: GatedDeltaState
) -> torch.Tensor:
    """Rows of the ring of positions [position + first, position + end)."""
    offsets = torch.arange(first, end, device=state.conv.device)
    return (position + offsets) % state.conv.shape[1]


def chunked_delta_rule(
    q: torch.Tensor,  # [num_k_heads, N, k_dim], scaled
    k: torch.Tensor,  # [num_k_heads, N, k_dim], of unit length
    v: torch.Tensor,  # [num_v_heads, N, v_dim]
    log_decay: torch.Tensor,  # [num_v_heads, N]
    rate: torch.Tensor,  # [num_v_heads, N]
    s: torch.Tensor,  # [num_v_heads, v_dim, k_dim]
    k_heads: torch.Tensor,  # [num_v_heads]: the key head of each value head
    *,
    num_unkept: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs [num_v_heads, N, v_dim] and the new s; all float32. num_unkept: of the last tokens,
    which the new s does not take up; N is no more than a chunk then."""
    count = q.shape[1]
    assert not num_unkept or count <= CHUNK, (count, num_unkept)
    size = min(CHUNK, count)
    kept = size - num_unkept
    pad = -count % size
    # Padding changes nothing: it neither decays (g = 0) nor updates (beta = 0) the state.
    q, k, v = (_cut(F.pad(x, (0, 0, 0, pad)), size) for x in (q, k, v))
    log_decay, rate = (_cut(F.pad(x, (0, pad)), size) for x in (log_decay, rate))
    c = log_decay.cumsum(-1)
    upper = torch.ones(size, size, dtype=torch.bool, device=q.device).triu(1)
    decays = (c[..., None] - c[..., None, :]).masked_fill_(upper, float("-inf")).exp_()
    scores, solve = q @ k.mT, k @ k.mT
    if len(k_heads) != q.shape[0]:
        q, k, scores, solve = (x[k_heads] for x in (q, k, scores, solve))
    scores = scores * decays
    # What is on the diagonal is not read: it counts as 1.
    solve = (solve * decays).mul_(rate[..., None])
    one = torch.eye(size, device=q.device).expand_as(solve)
    solve = torch.linalg.solve_triangular(solve, one, upper=False, unitriangular=True)
    solve = solve * rate[..., None, :]
    left = c[..., kept - 1 : kept] - c
    left[..., kept:] = float("-inf")
    left = left.exp_()[..., None]
    decayed = c.exp_()[..., None]
    out = torch.empty_like(v)
    for i in range(q.shape[1]):
        update = solve[:, i] @ torch.addcmul(v[:, i], k[:, i] @ s.mT, decayed[:, i], value=-1)
        known = (q[:, i] @ s.mT).mul_(decayed[:, i])
        torch.baddbmm(known, scores[:, i], update, out=out[:, i])
        s = torch.baddbmm(s * decayed[:, i, kept - 1 : kept], update.mul_(left[:, i]).mT, k[:, i])
    return out.flatten(1, 2)[:, :count], s


def _cut(x: torch.Tensor, size: int) -> torch.Tensor:
    """[heads, N, ...] -> [heads, N / size, size, ...]."""
    return x.reshape(x.shape[0], -1, size, *x.shape[2:])
