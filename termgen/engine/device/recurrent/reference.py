"""The gated delta net token by token in plain torch: what every other implementation must equal.

Read this first. It follows the formula of `base` literally and waits for the device.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from termgen.engine.device.kernels.recurrent.layout import CONV_TAPS, GatedDeltaShape
from termgen.engine.device.recurrent.base import (
    GatedDeltaState,
    GatedDeltaWeights,
    RecurrentMetadata,
)

L2_EPS = 1e-6


def gated_delta_reference(
    mixed: torch.Tensor,  # [T, channels]
    a: torch.Tensor,  # [T, num_v_heads]
    b: torch.Tensor,  # [T, num_v_heads]
    weights: GatedDeltaWeights,
    state: GatedDeltaState,
    metadata: RecurrentMetadata,
    shape: GatedDeltaShape,
) -> torch.Tensor:  # [T, num_v_heads, v_dim] in the type of mixed
    decay = -weights.a_log.float().exp() * F.softplus(a.float() + weights.dt_bias.float())
    rate = b.float().sigmoid()
    taps = weights.conv.float()
    key_size = shape.num_k_heads * shape.k_dim
    out = torch.zeros(
        (mixed.shape[0], shape.num_v_heads, shape.v_dim), dtype=mixed.dtype, device=mixed.device
    )
    starts = metadata.query_start_loc.tolist()
    for row in range(metadata.num_rows):
        if starts[row] == starts[row + 1]:
            continue
        slot, position = int(metadata.slots[row]), int(metadata.positions[row])
        if not metadata.has_state[row]:
            state.delta[slot] = 0
            state.conv[slot] = 0
        s, ring = state.delta[slot], state.conv.shape[1]
        num_pending, num_drafts = (
            0 if of_rows is None else int(of_rows[row])
            for of_rows in (metadata.num_pending, metadata.num_drafts)
        )
        position -= num_pending
        for token in range(starts[row] - num_pending, starts[row + 1]):
            if token == starts[row + 1] - num_drafts:
                s = s.clone()  # what it takes up from here on is not kept
            at = position % ring
            if token >= starts[row]:
                state.conv[slot, at] = mixed[token]
                gates = decay[token], rate[token]
                if state.gates is not None:
                    state.gates[slot, at] = torch.stack(gates)
            else:
                assert state.gates is not None
                gates = state.gates[slot, at, 0], state.gates[slot, at, 1]
            latest = [(position + 1 + tap - CONV_TAPS) % ring for tap in range(CONV_TAPS)]
            x = F.silu((state.conv[slot, latest].float() * taps.t()).sum(0))
            q, k, v = x.tensor_split((key_size, 2 * key_size))
            q, k = (_unit(heads.view(-1, shape.k_dim))[shape.k_heads] for heads in (q, k))
            v = v.view(-1, shape.v_dim)
            s *= gates[0].exp()[:, None, None]
            error = v - (s * k[:, None]).sum(-1)
            s += (gates[1][:, None] * error)[:, :, None] * k[:, None]
            if token >= starts[row]:
                out[token] = (s * q[:, None]).sum(-1) * shape.k_dim**-0.5
            position += 1
    return out


def _unit(x: torch.Tensor) -> torch.Tensor:
    return x * ((x * x).sum(-1, keepdim=True) + L2_EPS).rsqrt()


def gated_norm_reference(
    o: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    x = o.float()
    x = x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.float()
    return (x.flatten(1) * F.silu(z.float())).to(o.dtype)
