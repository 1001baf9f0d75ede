"""Experts in torch: the routing, and each expert's MLP over the tokens that chose it.

Used by `layers.ops.TorchOps`, and the reference for the kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
import torch.nn.functional as F


def route(
    logits: torch.Tensor, top_k: int, *, renormalize: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """logits [T, num_experts] -> each token's experts, int64, and their weights, float32, [T, k]:
    the softmax over all experts, scaled to add up to one if `renormalize`."""
    weights, ids = logits.softmax(dim=-1, dtype=torch.float32).topk(top_k, dim=-1)
    if renormalize:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return ids, weights


def run_experts(
    x: torch.Tensor,  # [T, hidden]
    ids: torch.Tensor,  # [T, k]
    weights: torch.Tensor,  # [T, k] float32
    gate_up: torch.Tensor,  # [num_experts, 2 * inner, hidden]
    down: torch.Tensor,  # [num_experts, hidden, inner]
    activate: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """The weighted sum of each token's experts, [T, hidden], added up in float32.

    Pairs of a token and an expert are sorted by expert, so that an expert is two products.
    """
    top_k = ids.shape[1]
    pairs = ids.flatten().argsort(stable=True)  # pair p is expert p % top_k of token p // top_k
    ends = torch.bincount(ids.flatten(), minlength=len(gate_up)).cumsum(0).tolist()
    outputs = x.new_empty(len(pairs), x.shape[1])
    for expert, (start, end) in enumerate(pairwise([0, *ends])):
        if start < end:
            rows = pairs[start:end]
            activated = activate(F.linear(x[rows // top_k], gate_up[expert]))
            outputs[rows] = F.linear(activated, down[expert])
    weighted = outputs.view(*ids.shape, x.shape[1]).float() * weights[..., None]
    return weighted.sum(dim=1).to(x.dtype)
