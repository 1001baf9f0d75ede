"""The small operations between matrix products, in torch: norms, rotation, activation, experts.

A layer gets these as an object, so that a device can bring its own: `layers.triton_ops` has the
fused Triton form. Called by the decoder's layers; the caller holds `torch.inference_mode`.

Cosines and sines of the rotary position embedding are computed once per step from the positions, in
float32, and handed to the layers; there is no table, so memory does not grow with the context.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F

from termgen.engine.device.config.experts_config import GluClamp
from termgen.engine.device.config.rope_config import RopeConfig
from termgen.engine.device.kernels.kv_cache import (
    SCALED,
    LayerScales,
    heads_of,
    kv_store_reference,
    movable,
    queries_for,
    spread,
    to_cache_dtype,
    write_heads,
)


class Rotation(NamedTuple):
    """One step's cosines and sines, [T, 1, rotary_dim] float32.

    The sines of the first half carry a minus sign: with the halves of x swapped,
    x * cos + swapped * sin is the rotation, without negating anything in a layer.
    """

    cos: torch.Tensor
    sin: torch.Tensor


def rotate(heads: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """heads [T, any, head_dim], the first rotary_dim values of each head rotated in float32."""
    rotary_dim = rotation.cos.shape[-1]
    if rotary_dim < heads.shape[-1]:
        turned = rotate(heads[..., :rotary_dim], rotation)
        return torch.cat((turned, heads[..., rotary_dim:]), -1)
    swapped = heads.roll(rotary_dim // 2, -1)
    return (heads * rotation.cos).addcmul_(swapped, rotation.sin).to(heads.dtype)


def inverse_frequencies(config: RopeConfig, head_dim: int) -> torch.Tensor:
    """[rotary_dim / 2] float32 on the CPU: radians per position."""
    dim = int(head_dim * config.partial_rotary_factor)
    if config.type == "none":
        return torch.zeros(dim // 2)
    powers = config.theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    if config.type == "linear":
        return 1.0 / powers / config.factor
    if config.type == "llama3":
        return _llama3(1.0 / powers, config)
    if config.type == "yarn":
        return _yarn(powers, config, dim)
    if config.type == "proportional":
        frequencies = 1.0 / powers / config.factor
        frequencies[int(config.proportion * dim // 2) :] = 0.0
        return frequencies
    assert config.type == "default", config.type
    return 1.0 / powers


def _llama3(frequencies: torch.Tensor, config: RopeConfig) -> torch.Tensor:
    """Long waves are slowed by `factor`, short ones kept, those between blended."""
    turns = config.original_max_position_embeddings * frequencies / (2 * math.pi)
    low, high = config.low_freq_factor, config.high_freq_factor
    if low == high:  # as in Llama 4: none between
        keep = (turns >= low).float()
    else:
        keep = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - keep) * frequencies / config.factor + keep * frequencies


def _yarn(powers: torch.Tensor, config: RopeConfig, dim: int) -> torch.Tensor:
    """Dimensions that turn often in the original context are kept, the slow ones interpolated."""

    def dimension_turning(times: float) -> float:
        length = config.original_max_position_embeddings / (times * 2 * math.pi)
        return dim * math.log(length) / (2 * math.log(config.theta))

    low, high = dimension_turning(config.beta_fast), dimension_turning(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    span = high - low if high != low else 0.001
    interpolate = ((torch.arange(dim // 2, dtype=torch.float32) - low) / span).clamp(0.0, 1.0)
    return (1.0 / (config.factor * powers)) * interpolate + (1.0 / powers) * (1 - interpolate)


class LayerOps(Protocol):
    can_record_experts: bool
    """True if `experts` may be part of a CUDA graph: it does not wait for the device."""

    def rotation(
        self, positions: torch.Tensor, frequencies: torch.Tensor, scale: float
    ) -> Rotation:
        """The cosines and sines, times scale, of positions [T]; frequencies [rotary_dim / 2]."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """x [T, size] -> its rows normalised in float32, [T, size]."""

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """residual [T, size] += x, in place; returns its rows normalised, [T, size]."""

    def norm_add_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        first: torch.Tensor,
        second: torch.Tensor,
        first_eps: float,
        second_eps: float,
        scale: float | None = None,
    ) -> torch.Tensor:
        """residual [T, size] += x normalised by weight `first`, then *= scale if there is one, in
        place; returns the rows of that normalised by weight `second`, [T, size]."""

    def rotate_and_store(
        self,
        qkv: torch.Tensor,  # [T, n * head_dim]: q, k and v, or q and k, or q alone
        kv_cache: torch.Tensor,  # [num_blocks, block_size, 2, num_kv_heads, head_dim]
        rotation: Rotation,
        slot_mapping: torch.Tensor,  # [T] int64
        *,
        num_heads: int,
        norm_weight: torch.Tensor | None,  # [heads of q and k, or of all three, head_dim]
        eps: float,
        q: torch.Tensor | None = None,  # [T, num_heads, head_dim], contiguous
        cache_scales: LayerScales | None = None,
    ) -> torch.Tensor:  # [T, num_heads, head_dim]
        """Normalises (the heads that have a weight) and rotates q and k, writes k and v, and
        returns q as attention to this cache takes it (`queries_for`), in the memory given for it if
        any is. Without v, the values are the keys as they were given; without k and v, nothing
        is written. cache_scales: see `AttentionForm`."""

    def store(
        self,
        k: torch.Tensor,  # [T, num_kv_heads, head_dim]
        v: torch.Tensor,  # [T, num_kv_heads, head_dim]
        kv_cache: torch.Tensor,  # [num_blocks, block_size, 2, num_kv_heads, head_dim]
        slot_mapping: torch.Tensor,  # [T] int64
        q: torch.Tensor,  # [T, num_heads, head_dim]
        cache_scales: LayerScales | None = None,
    ) -> torch.Tensor:  # [T, num_heads, head_dim]
        """Writes k and v, not rotated, and returns q as attention to this cache takes it
        (`queries_for`). The heads of a token lie together. cache_scales: see `AttentionForm`."""

    def gated_activation(self, gate_up: torch.Tensor, activation: str) -> torch.Tensor:
        """act(gate) * up, from the two side by side: [T, 2 * size] -> [T, size]."""

    def activated_product(
        self, gate: torch.Tensor, up: torch.Tensor, activation: str
    ) -> torch.Tensor:
        """act(gate) * up, [T, size] each."""

    def sigmoid_gate(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """x * sigmoid(gate), [T, size] each, in the memory of the gate."""

    def experts(
        self,
        x: torch.Tensor,  # [T, hidden]
        router_logits: torch.Tensor,  # [T, num_experts]
        gate_up: torch.Tensor,  # [num_experts, 2 * inner, hidden]
        down: torch.Tensor,  # [num_experts, hidden, inner]
        *,
        top_k: int,
        renormalize: bool,
        activation: str,
        gate_up_bias: torch.Tensor | None = None,  # [num_experts, 2 * inner]
        down_bias: torch.Tensor | None = None,  # [num_experts, hidden]
        clamp: GluClamp | None = None,
        expert_scale: torch.Tensor | None = None,  # [num_experts] float32
        has_shared: bool = False,
        weighs_inputs: bool = False,
    ) -> torch.Tensor:  # [T, hidden]
        """Each token through its top_k experts, their outputs weighted and added up. Weights are
        the router's softmax over all experts, scaled to add up to one if `renormalize`, and then
        by the expert's own factor. With a clamp, that is the activation. has_shared: the last
        expert is not among those that the router picks from; each token goes through it, too,
        times the sigmoid of its logit. weighs_inputs: weights are the sigmoids of the logits, and
        what goes into an expert is multiplied; the shared expert has no logit, and weight one."""


class ExpertMatrices(Protocol):
    """A matrix for each expert."""

    def __len__(self) -> int: ...

    def product(self, expert: int, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x [M, columns] -> [M, rows]"""


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh")


_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": _gelu_tanh,
}


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [..., size] normalised over its last dimension; weight [..., size] broadcasts."""
    size = x.shape[-1]
    if x.device.type == "cpu" and x.dtype == torch.float32:
        # F.rms_norm is ten operations there, which a step of one token feels: this is four.
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return (x * weight).div_(torch.hypot(norm, _root(size * eps)).mul_(size**-0.5))
    if weight.dtype != x.dtype:  # in float32: one rounding, after the product
        return F.rms_norm(x.float(), (size,), None, eps).mul_(weight).to(x.dtype)
    if weight.dim() == 1:
        return F.rms_norm(x, (size,), weight, eps)
    return F.rms_norm(x, (size,), None, eps) * weight


@functools.lru_cache
def _root(value: float) -> torch.Tensor:
    return torch.tensor(math.sqrt(value))


class TorchOps:
    """LayerOps for any device, and the reference for faster ones."""

    can_record_experts = False

    def rotation(
        self, positions: torch.Tensor, frequencies: torch.Tensor, scale: float
    ) -> Rotation:
        angles = positions[:, None].float() * frequencies  # [T, rotary_dim / 2]
        cos, sin = angles.cos(), angles.sin()
        cos, sin = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
        if scale is not None:
            cos, sin = cos * scale, sin * scale
        return Rotation(cos[:, None], sin[:, None])

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return _rms_norm(x, weight, eps)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        return _rms_norm(residual.add_(x), weight, eps)

    def norm_add_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        first: torch.Tensor,
        second: torch.Tensor,
        first_eps: float,
        second_eps: float,
        scale: float | None = None,
    ) -> torch.Tensor:
        residual.add_(_rms_norm(x, first, first_eps))
        if scale is not None:
            residual.mul_(scale)
        return _rms_norm(residual, second, second_eps)

    def rotate_and_store(
        self,
        qkv: torch.Tensor,
        kv_cache: torch.Tensor,
        rotation: Rotation,
        slot_mapping: torch.Tensor,
        *,
        num_heads: int,
        norm_weight: torch.Tensor | None,
        eps: float,
        q: torch.Tensor | None = None,
        cache_scales: LayerScales | None = None,
    ) -> torch.Tensor:
        num_kv_heads, head_dim = heads_of(kv_cache)
        heads = qkv.view(-1, qkv.shape[1] // head_dim, head_dim)
        qk = heads[:, : num_heads + num_kv_heads]
        v = heads[:, num_heads:][:, -num_kv_heads:]  # the keys, where there are no others
        if norm_weight is not None:
            num_qk = qk.shape[1]
            qk = _rms_norm(qk, norm_weight[:num_qk], eps)
            if len(norm_weight) > num_qk:
                v = _rms_norm(v, norm_weight[num_qk:], eps)
        qk = rotate(qk, rotation)
        if kv_cache.dtype in SCALED:
            qk = spread(qk)
            if v.shape[1]:
                write_heads(qk[:, num_heads:], v, kv_cache, slot_mapping, cache_scales)
            qk = qk.to(qkv.dtype)
        elif v.shape[1]:
            self._store(qk[:, num_heads:], v, kv_cache, slot_mapping, cache_scales)
        return qk[:, :num_heads] if q is None else q.copy_(qk[:, :num_heads])

    def store(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        q: torch.Tensor,
        cache_scales: LayerScales | None = None,
    ) -> torch.Tensor:
        self._store(k, v, kv_cache, slot_mapping, cache_scales)
        return queries_for(kv_cache, q)

    def _store(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        cache_scales: LayerScales | None,
    ) -> None:
        if cache_scales is not None:
            k, v = k.float() * (1 / cache_scales.key), v.float() * (1 / cache_scales.value)
        cache = movable(kv_cache)
        if cache.is_contiguous() and cache.dtype not in SCALED:
            k, v = (movable(to_cache_dtype(heads, kv_cache.dtype)) for heads in (k, v))
            slots = cache.flatten(0, 1)  # [num_slots, 2, num_kv_heads, head_dim]
            slots[:, 0].index_copy_(0, slot_mapping, k)
            slots[:, 1].index_copy_(0, slot_mapping, v)
        else:  # with scales, or another memory order: slots have no view
            kv_store_reference(k, v, kv_cache, slot_mapping)

    def gated_activation(self, gate_up: torch.Tensor, activation: str) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return self.activated_product(gate, up, activation)

    def activated_product(
        self, gate: torch.Tensor, up: torch.Tensor, activation: str
    ) -> torch.Tensor:
        return _ACTIVATIONS[activation](gate).mul_(up)

    def sigmoid_gate(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return gate.sigmoid_().mul_(x)

    def experts(
        self,
        x: torch.Tensor,
        router_logits: torch.Tensor,
        gate_up: torch.Tensor | ExpertMatrices,
        down: torch.Tensor | ExpertMatrices,
        *,
        top_k: int,
        renormalize: bool,
        activation: str,
        gate_up_bias: torch.Tensor | None = None,
        down_bias: torch.Tensor | None = None,
        clamp: GluClamp | None = None,
        expert_scale: torch.Tensor | None = None,
        has_shared: bool = False,
        weighs_inputs: bool = False,
    ) -> torch.Tensor:
        ids, weights = route(
            router_logits,
            top_k,
            renormalize=renormalize,
            scale=expert_scale,
            has_shared=has_shared,
            weighs_inputs=weighs_inputs,
        )

        def activate(pair: torch.Tensor) -> torch.Tensor:
            if clamp is not None:
                return clamped_glu(pair, clamp)
            return self.gated_activation(pair, activation)

        biases = gate_up_bias, down_bias
        return run_experts(x, ids, weights, gate_up, down, activate, biases, weighs_inputs)


def clamped_glu(gate_up: torch.Tensor, clamp: GluClamp) -> torch.Tensor:
    """The activation that `GluClamp` describes: [T, 2 * size] -> [T, size]."""
    gate, up = gate_up.chunk(2, dim=-1)
    gate, up = gate.clamp(max=clamp.limit), up.clamp(-clamp.limit, clamp.limit)
    return (up + 1) * (gate * torch.sigmoid(gate * clamp.alpha))


def route(
    logits: torch.Tensor,
    top_k: int,
    *,
    renormalize: bool,
    scale: torch.Tensor | None = None,
    has_shared: bool = False,
    weighs_inputs: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """logits [T, num_experts] -> each token's experts, int64, and their weights, float32, [T, k]:
    the softmax over all experts, scaled to add up to one if `renormalize`, and then by the factors
    `scale` [num_experts]. has_shared: the last expert follows behind each token's own, [T, k + 1],
    with the sigmoid of its logit as its weight. weighs_inputs: sigmoids of their logits; the shared
    expert's number is that of logits, and its weight one."""
    if weighs_inputs:
        assert not renormalize and scale is None
        weights, ids = logits.topk(top_k, dim=-1)
        weights = weights.float().sigmoid()
        if has_shared:
            ids = F.pad(ids, (0, 1), value=logits.shape[1])
            weights = F.pad(weights, (0, 1), value=1.0)
        return ids, weights
    if has_shared:
        ids, weights = route(logits[:, :-1], top_k, renormalize=renormalize, scale=scale)
        shared = torch.full_like(ids[:, :1], logits.shape[1] - 1)
        weight = logits[:, -1:].float().sigmoid()
        return torch.cat((ids, shared), 1), torch.cat((weights, weight), 1)
    weights, ids = logits.softmax(dim=-1, dtype=torch.float32).topk(top_k, dim=-1)
    if renormalize:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    if scale is not None:
        weights = weights * scale[ids]
    return ids, weights


def run_experts(
    x: torch.Tensor,  # [T, hidden]
    ids: torch.Tensor,  # [T, k]
    weights: torch.Tensor,  # [T, k] float32
    gate_up: torch.Tensor | ExpertMatrices,  # [num_experts, 2 * inner, hidden]
    down: torch.Tensor | ExpertMatrices,  # [num_experts, hidden, inner]
    activate: Callable[[torch.Tensor], torch.Tensor],
    biases: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
    weighs_inputs: bool = False,
) -> torch.Tensor:
    """The weighted sum of each token's experts, [T, hidden], added up in float32. weighs_inputs:
    the sum of its experts for inputs times the weights.

    Pairs of a token and an expert are sorted by expert, so that an expert is two products.
    """
    top_k = ids.shape[1]
    pairs = ids.flatten().argsort(stable=True)  # pair p is expert p % top_k of token p // top_k
    chosen = torch.bincount(ids.flatten(), minlength=len(gate_up))
    if (counts := getattr(gate_up, "counts", None)) is not None:
        counts += chosen
    ends = chosen.cumsum(0).tolist()
    outputs = x.new_empty(len(pairs), x.shape[1])
    for expert, (start, end) in enumerate(pairwise([0, *ends])):
        if start < end:
            rows = pairs[start:end]
            first, second = (None if bias is None else bias[expert] for bias in biases)
            inputs = x[rows // top_k]
            if weighs_inputs:
                inputs = (inputs * weights.flatten()[rows, None]).to(x.dtype)
            activated = activate(_product(gate_up, expert, inputs, first))
            outputs[rows] = _product(down, expert, activated, second)
    weighted = outputs.view(*ids.shape, x.shape[1]).float()
    if not weighs_inputs:
        weighted = weighted * weights[..., None]
    return weighted.sum(dim=1).to(x.dtype)


def _product(
    matrices: torch.Tensor | ExpertMatrices, expert: int, x: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    if isinstance(matrices, torch.Tensor):
        return F.linear(x, matrices[expert], bias)
    return matrices.product(expert, x, bias)
