"""LayerOps of a GPU whose model has experts in main memory."""

from __future__ import annotations

from typing import Any

import torch

from termgen.engine.device.host_experts.host_list import HostExperts
from termgen.engine.device.host_experts.placement import ExpertPlaces
from termgen.engine.device.kernels.moe.experts import choose_tiles, run_routed
from termgen.engine.device.kernels.moe.routing import look_up, route
from termgen.engine.device.kernels.moe.tiles import Clamp
from termgen.engine.device.layers.triton_ops import StoredWeights, TritonOps


class SplitOps(TritonOps):
    """A token's experts on the GPU and those on the CPU are computed at the same time."""

    def experts(
        self,
        x: torch.Tensor,
        router_logits: torch.Tensor,
        gate_up: torch.Tensor | StoredWeights,
        down: torch.Tensor | StoredWeights,
        **options: Any,
    ) -> torch.Tensor:
        if not isinstance(gate_up, HostExperts):  # of a model that drafts
            return super().experts(x, router_logits, gate_up, down, **options)
        assert isinstance(gate_up.places, ExpertPlaces)
        for name in ("gate_up_bias", "down_bias"):  # each side has its own
            options.pop(name, None)
        return run_split(x, router_logits, gate_up.places, **options)


def run_split(
    x: torch.Tensor,  # [T, hidden], contiguous
    router_logits: torch.Tensor,  # [T, num_experts]
    places: ExpertPlaces,
    *,
    top_k: int,
    renormalize: bool,
    activation: str,
    clamp: Clamp | None = None,
    expert_scale: torch.Tensor | None = None,
    has_shared: bool = False,
    weighs_inputs: bool = False,
) -> torch.Tensor:
    """[T, hidden]. `layers.ops.LayerOps.experts` says what the options are."""
    if not len(x):
        return torch.empty_like(x)
    ids, weights = route(
        router_logits,
        top_k,
        renormalize=renormalize,
        scale=expert_scale,
        has_shared=has_shared,
        weighs_inputs=weighs_inputs,
    )
    slots, codes = look_up(ids, places.slots, places.codes)
    elsewhere = None
    if places.num_away:
        elsewhere = places.compute.begin(places, x, codes, weights)
    if places.gate_up is None or places.down is None:
        assert elsewhere is not None
        places.compute.end()
        return elsewhere.to(x.dtype)
    tiles = choose_tiles(
        len(x),
        num_experts=places.num_ids,
        top_k=top_k,
        itemsize=x.element_size(),
        stored=places.gate_up.weights,
    )
    out = run_routed(
        *(x, slots, weights),
        *(places.gate_up.weights, places.down.weights),
        activation=activation,
        gate_up_bias=places.biases[0],
        down_bias=places.biases[1],
        clamp=clamp,
        weighs_inputs=weighs_inputs,
        may_miss=True,
        tiles=tiles,
    )
    if elsewhere is None:
        return out
    places.compute.end()
    return torch.add(out, elsewhere, out=out)
