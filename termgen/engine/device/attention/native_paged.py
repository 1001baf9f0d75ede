"""AttentionBackend of a CPU: steps of one token a row run one kernel, all others torch."""

from __future__ import annotations

import torch

from termgen.engine.device.attention.base import (
    CHUNKS,
    SINKS,
    SOFTCAP,
    UNEQUAL_LAYERS,
    AttentionCapabilities,
    AttentionForm,
    AttentionMetadata,
    AttentionShape,
)
from termgen.engine.device.attention.torch_reference import TorchReferenceAttention
from termgen.engine.device.native.decode_attention import decode_kernel
from termgen.engine.device.native.jit import LANES, threads_for
from termgen.vocabulary.cache_groups import Chunk


class NativeAttention:
    """One-token rows by the kernel; prompts through `TorchReferenceAttention`."""

    name = "native"
    max_queries = 1
    kv_cache_order = (0, 1, 2, 3, 4)
    capabilities = AttentionCapabilities(
        device_types=frozenset({"cpu"}),
        dtypes=frozenset({torch.float32}),
        graph_modes=frozenset({"NONE"}),
        head_dims=frozenset(range(LANES, 513, LANES)),
        features=frozenset({SOFTCAP, SINKS, CHUNKS, UNEQUAL_LAYERS}),
    )

    def __init__(self, shape: AttentionShape) -> None:
        self._num_kv_heads = shape.num_kv_heads
        self._prompts = TorchReferenceAttention(shape)
        self._decode = decode_kernel()
        self._scores = torch.empty(0)

    def prepare(self, metadata: AttentionMetadata) -> None:
        if not _is_decode(metadata):
            self._prompts.prepare(metadata)
            return
        num_scores = metadata.num_rows * self._num_kv_heads * metadata.max_seq_len
        if len(self._scores) < num_scores:
            self._scores = torch.empty(num_scores)

    def forward(
        self,
        q: torch.Tensor,  # [T, num_heads, head_dim]
        kv_cache: torch.Tensor,  # [num_blocks, block_size, 2, num_kv_heads, head_dim]
        metadata: AttentionMetadata,
        form: AttentionForm,
        *,
        out: torch.Tensor | None = None,  # [T, num_heads, head_dim]
    ) -> torch.Tensor:
        if not _is_decode(metadata):
            return self._prompts.forward(q, kv_cache, metadata, form, out=out)
        q = q.contiguous()
        out = torch.empty_like(q) if out is None else out
        block_size, _, num_kv_heads, head_dim = kv_cache.shape[1:]
        num_items, most = metadata.num_rows * num_kv_heads, max(metadata.max_seq_len, 1)
        num_bytes = 2 * metadata.num_rows * metadata.max_seq_len * q.shape[1] * head_dim * 4
        self._decode(
            q.data_ptr(),
            kv_cache.data_ptr(),
            out.data_ptr(),
            metadata.block_table.data_ptr(),
            metadata.seq_lens.data_ptr(),
            self._scores.data_ptr(),
            0 if form.sinks is None else form.sinks.data_ptr(),
            metadata.block_table.stride(0),
            kv_cache.stride(0),
            metadata.max_seq_len,
            most if isinstance(form.window, Chunk) else form.window or most,
            form.window.size if isinstance(form.window, Chunk) else most,
            num_kv_heads,
            q.shape[1] // num_kv_heads,
            head_dim,
            block_size,
            int(form.sinks is not None),
            form.scale,
            form.softcap or 0.0,
            num_items,
            min(num_items, threads_for(num_bytes)),
        )
        return out


def _is_decode(metadata: AttentionMetadata) -> bool:
    return metadata.num_decodes == metadata.num_rows == metadata.num_tokens
