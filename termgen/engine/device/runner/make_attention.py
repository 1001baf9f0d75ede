"""Makes one engine's attention: a backend for each kind of layer, and the groups of layers."""

from __future__ import annotations

from dataclasses import replace

import torch

from termgen.config import EngineConfig
from termgen.engine.device.attention.base import (
    CHUNKS,
    SINKS,
    SOFTCAP,
    UNEQUAL_LAYERS,
    AttentionBackend,
    AttentionShape,
)
from termgen.engine.device.attention.groups import GroupedAttention
from termgen.engine.device.attention.registry import make_backends
from termgen.engine.device.config.cache_spec import group_layers
from termgen.engine.device.config.head_config import HeadConfig
from termgen.engine.device.config.model_config import ModelConfig
from termgen.engine.device.kernels.kv_cache import head_items, kv_cache_dtype
from termgen.engine.device.runner import resolve
from termgen.vocabulary.cache_groups import Chunk, Window


def make_attention(
    config: EngineConfig,
    model: ModelConfig,
    limits: resolve.Limits,
    dtype: torch.dtype,
    device: torch.device,
    head: HeadConfig | None = None,
    *,
    max_queries: int = 1,
) -> tuple[GroupedAttention, AttentionShape, str]:
    """The attention, the shape of the first kind of layer with its block size settled, and why a
    faster backend was passed over, or "". head: of layers behind the model's. max_queries: see
    `AttentionShape`. Raises ConfigError."""
    wanted = [
        replace(shape, max_queries=max_queries)
        for shape in attention_shapes(config, model, limits, dtype, device, head)
    ]
    backends, shapes, passed_over = make_backends(config.attention_backend, wanted)
    shape = shapes[0]
    assert shape.block_size is not None
    of_head = () if head is None else head.layers.layer_caches
    caches = (*model.layer_caches, *of_head)
    groups = group_layers(
        caches,
        block_size=shape.block_size,
        max_model_len=limits.max_model_len,
        head_size=lambda head_dim: head_items(head_dim, shape.kv_cache_dtype),
    )
    return GroupedAttention.of_shapes(backends, shapes, groups), shape, passed_over


def attention_shapes(
    config: EngineConfig,
    model: ModelConfig,
    limits: resolve.Limits,
    dtype: torch.dtype,
    device: torch.device,
    head: HeadConfig | None = None,
) -> list[AttentionShape]:
    """One for each number and size of key heads among the layers."""
    windows: dict[tuple[int, int], dict[Window | None, None]] = {}
    num_heads: dict[tuple[int, int], int] = {}
    models = [model] if head is None else [model, head.layers]
    for of_model in models:
        for spec in of_model.layer_caches:
            if spec is not None:
                windows.setdefault(spec.heads, {})[spec.window] = None
                num_heads.setdefault(spec.heads, of_model.num_heads)
    return [
        AttentionShape(
            num_heads=num_heads[num_kv_heads, head_dim],
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            windows=tuple(of_these),
            block_size=config.block_size,
            max_num_seqs=limits.max_num_seqs * (1 if head is None else head.block_size),
            max_num_tokens=limits.max_num_batched_tokens,
            dtype=dtype,
            kv_cache_dtype=kv_cache_dtype(config.kv_cache_dtype, dtype),
            device=device,
            needs=attention_needs(*models),
        )
        for (num_kv_heads, head_dim), of_these in windows.items()
    ]


def reading_attention(
    attention: GroupedAttention, shape: AttentionShape, reader: ModelConfig
) -> GroupedAttention:
    """Attention over the groups of a target's layers for layers that read what those store, with
    heads of their own. shape: as `make_attention` gives it. reader: see `assistant_config`."""
    windows: dict[tuple[int, int], dict[Window | None, None]] = {}
    for layer, window in enumerate(reader.layer_windows):
        windows.setdefault(reader.kv_heads(layer), {})[window] = None
    shapes: list[AttentionShape] = []
    backends: list[AttentionBackend] = []
    for group in attention.groups:
        heads = group.spec.heads
        if heads not in (made.kv_heads for made in shapes):
            # One of the same class, so that it reads caches of the same memory order.
            of_same = attention.backend_of(group.layers[0])
            own = replace(
                shape,
                num_heads=reader.num_heads if heads in windows else heads[0],
                num_kv_heads=heads[0],
                head_dim=heads[1],
                windows=tuple(windows.get(heads, (None,))),
                max_queries=1,
            )
            shapes.append(own)
            backends.append(type(of_same)(own))
    return GroupedAttention.of_shapes(backends, shapes, attention.groups)


def attention_needs(config: ModelConfig, *others: ModelConfig) -> frozenset[str]:
    """What attention has to compute for such a model beyond the common form. others: of whose
    layers its heads consist."""
    caches = [spec for model in (config, *others) for spec in model.layer_caches]
    sizes = {spec.numbers for spec in caches if spec is not None}
    needs = {
        SOFTCAP: config.attention_softcap is not None,
        SINKS: config.has_sinks,
        CHUNKS: any(isinstance(window, Chunk) for window in config.layer_windows),
        UNEQUAL_LAYERS: len(sizes) > 1,
    }
    return frozenset(name for name, is_needed in needs.items() if is_needed)
