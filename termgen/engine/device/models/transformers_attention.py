"""The attention that transformers' modelling code calls when termgen runs it.

transformers looks an attention function up by name; one function is registered, and it hands the
call to whatever `install` put on the calling model's modules. So nothing of an engine is global,
and two models in one process never meet. A model goes through three stages: its calls are measured
without computing anything (`MeasuredCalls`), its layers are numbered and its code is checked on
three tokens (`OwnTokens`) and compared with transformers' own attention on one short text
(`PlainLayers`), then it runs over a paged cache (`PagedLayers`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from termgen.engine.device.attention.base import AttentionForm, ForwardContext
from termgen.engine.device.attention.groups import GroupedAttention
from termgen.engine.device.attention.reference import attend
from termgen.engine.device.layers.ops import LayerOps
from termgen.errors import UnsupportedModelError
from termgen.vocabulary.device.kv_cache_types import LayerScales

IMPLEMENTATION = "termgen_paged"
"""The name transformers knows the function by. For a name of its own it builds no masks."""

_STAGE = "termgen_attention_stage"
_HARMLESS = frozenset(
    {"dropout", "position_ids", "use_cache", "output_attentions", "output_hidden_states"}
)
"""Arguments of an attention call that change nothing of what it computes."""


class AttentionCall(NamedTuple):
    """One layer's call of attention."""

    module: nn.Module
    q: torch.Tensor  # [T, num_heads, head_dim]
    k: torch.Tensor  # [T, num_kv_heads, head_dim]
    v: torch.Tensor  # [T, num_kv_heads, head_dim]
    scale: float
    sliding_window: int | None
    options: Mapping[str, Any]
    """All other arguments of the call."""


AttentionStage = Callable[[AttentionCall], torch.Tensor]
"""Returns [T, num_heads, head_dim]."""


def register() -> None:
    """Make the name known to transformers. It may be done again."""
    from transformers import AttentionInterface

    AttentionInterface.register(IMPLEMENTATION, _attention)


def install(model: nn.Module, stage: AttentionStage) -> None:
    """Make `stage` the model's attention."""
    for module in model.modules():
        setattr(module, _STAGE, stage)


def _attention(
    module: nn.Module,
    query: torch.Tensor,  # [1, num_heads, T, head_dim]
    key: torch.Tensor,  # [1, num_kv_heads, T, head_dim]
    value: torch.Tensor,  # [1, num_kv_heads, T, head_dim]
    attention_mask: torch.Tensor | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:  # [1, T, num_heads, head_dim], and no weights
    stage: AttentionStage = getattr(module, _STAGE)
    call = AttentionCall(
        module,
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        query.shape[-1] ** -0.5 if scaling is None else scaling,
        sliding_window,
        {"attention_mask": attention_mask, **options},
    )
    return stage(call)[None], None


@dataclass(frozen=True, slots=True)
class LayerCall:
    """The attention that one layer asks for."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    sliding_window: int | None


class MeasuredCalls:
    """AttentionStage for a model without memory: records what each layer asks for.

    Raises UnsupportedModelError for what paged attention does not do.
    """

    def __init__(self) -> None:
        self.calls: list[LayerCall] = []
        self._seen: set[int] = set()

    def __call__(self, call: AttentionCall) -> torch.Tensor:
        q, k, v = call.q, call.k, call.v
        if id(call.module) in self._seen:
            raise UnsupportedModelError("it calls attention more than once in a layer")
        self._seen.add(id(call.module))
        _check_options(call.module, call.options)
        if any(isinstance(value, torch.Tensor) for value in (call.scale, call.sliding_window)):
            raise UnsupportedModelError("it computes the scale or window of attention")
        if k.shape[-1] != v.shape[-1]:
            raise UnsupportedModelError(
                f"it has keys of size {k.shape[-1]} and values of size {v.shape[-1]}"
            )
        if q.shape[1] % k.shape[1]:
            raise UnsupportedModelError(f"{k.shape[1]} key heads do not divide {q.shape[1]} heads")
        self.calls.append(LayerCall(q.shape[1], k.shape[1], q.shape[2], call.sliding_window))
        return torch.empty_like(q)


def _check_options(module: nn.Module, options: Mapping[str, Any]) -> None:
    is_causal = options.get("is_causal")
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    if not is_causal:
        raise UnsupportedModelError("its attention is not causal")
    for name, value in options.items():
        if name != "is_causal" and name not in _HARMLESS and value is not None:
            raise UnsupportedModelError(f"its attention needs {name}, which is not supported")


class OwnTokens:
    """AttentionStage in which a token sees itself alone, through q, k and v: nothing of one token
    reaches another then, unless the model's code passes it on outside attention."""

    def __init__(self) -> None:
        self.layers: dict[int, int] = {}
        """id of the calling module -> its layer, in the order of the calls."""

    def __call__(self, call: AttentionCall) -> torch.Tensor:
        self.layers.setdefault(id(call.module), len(self.layers))
        group = call.q.shape[1] // call.k.shape[1]
        return (call.q + (call.k + call.v).repeat_interleave(group, 1)) / 2


class PlainLayers:
    """AttentionStage over one text without a cache: what `PagedLayers` computes for it."""

    def __call__(self, call: AttentionCall) -> torch.Tensor:
        out = attend(
            call.q.float() * call.scale, call.k.float(), call.v.float(), call.sliding_window
        )
        # Some models' code takes views that only a dense result has.
        return out.to(call.q.dtype).contiguous()


class PagedLayers:
    """AttentionStage over a paged cache: what serves."""

    def __init__(
        self, layers: Mapping[int, int], attention: GroupedAttention, ops: LayerOps
    ) -> None:
        self.layers = layers
        self._attention = attention
        self._ops = ops
        self.cache_scales: Mapping[int, LayerScales] = {}
        """For an fp8 cache, by layer."""
        self.context: ForwardContext | None = None
        """The context of the forward pass under way."""

    def __call__(self, call: AttentionCall) -> torch.Tensor:
        assert self.context is not None, "attention outside a forward pass"
        layer = self.layers[id(call.module)]
        metadata = self.context.metadata[self._attention.group_of(layer)]
        kv_cache = self.context.kv_caches[layer]
        q = call.q.contiguous()  # no copy for most models: a view of [T, num_heads, head_dim]
        scales = self.cache_scales.get(layer)
        k, v = _dense(call.k), _dense(call.v)
        q = self._ops.store(k, v, kv_cache, metadata.slot_mapping, q, scales)
        return self._attention.backend_of(layer).forward(
            q,
            kv_cache,
            metadata,
            AttentionForm(call.scale, call.sliding_window, cache_scales=scales),
        )


def _dense(x: torch.Tensor) -> torch.Tensor:
    """x [T, heads, head_dim] with the heads of a token together; tokens may be apart."""
    return (
        x if x.stride()[1:] == (x.shape[2], 1) else x.clone(memory_format=torch.contiguous_format)
    )
