"""Attention by FlashInfer, an optional package: used only when asked for.

FlashInfer plans a step on the host, from lengths that it must know there. So each step waits once
for the device, and no recording can hold this attention: it runs between recorded pieces, or
eagerly. Its kernels are compiled when first used, by nvcc and ninja, and kept on disk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from termgen.engine.device.attention.base import (
    AttentionCapabilities,
    AttentionForm,
    AttentionMetadata,
    AttentionShape,
)
from termgen.errors import ConfigError
from termgen.vocabulary.cache_groups import Chunk

if TYPE_CHECKING:
    from flashinfer import BatchPrefillWithPagedKVCacheWrapper

_LARGEST_QUERY_TILE = 128
_BLOCKS_PER_MULTIPROCESSOR = 2


class FlashInferAttention:
    """AttentionBackend. Decode rows and other rows are two calls, each with its own plan.

    One wrapper class serves both: with the "fa2" kernels it splits long contexts of short queries,
    and "auto" picks the fastest kernels for prompts.
    """

    name = "flashinfer"
    max_queries = 1
    kv_cache_order = (0, 2, 3, 1, 4)
    """FlashInfer's own "HND" layout: it reads the cache as it lies."""
    capabilities = AttentionCapabilities(
        device_types=frozenset({"cuda"}),
        dtypes=frozenset({torch.bfloat16, torch.float16}),
        graph_modes=frozenset({"NONE", "PIECEWISE"}),
        head_dims=frozenset({64, 128, 256}),
        min_compute_capability=(8, 0),
    )

    def __init__(self, shape: AttentionShape) -> None:
        """Compiles every kernel that this shape needs, which takes minutes the first time."""
        try:
            from flashinfer import BatchPrefillWithPagedKVCacheWrapper
        except ImportError as error:
            raise ConfigError(
                f"attention_backend flashinfer: the package does not load: {error}",
                param="attention_backend",
            ) from error
        self._make_wrapper = BatchPrefillWithPagedKVCacheWrapper
        self._shape = shape
        self._workspace = torch.empty(
            _workspace_bytes(shape), dtype=torch.uint8, device=shape.device
        )
        self._wrappers: dict[
            tuple[str, float, int | None], BatchPrefillWithPagedKVCacheWrapper
        ] = {}
        self._planned: set[tuple[str, float, int | None]] = set()
        self._parts: dict[str, PageLists | None] = {}
        self._prepared: AttentionMetadata | None = None
        self._compile()

    def prepare(self, metadata: AttentionMetadata) -> None:
        # It waits until the device is done, so no plan that is still being copied is overwritten.
        decode, prefill = split_page_lists(metadata)
        self._parts = {"fa2": decode, "auto": prefill}
        self._planned.clear()
        self._prepared = metadata

    def forward(
        self,
        q: torch.Tensor,  # [T, num_heads, head_dim]
        kv_cache: torch.Tensor,  # [num_blocks, block_size, 2, num_kv_heads, head_dim]
        metadata: AttentionMetadata,
        form: AttentionForm,
        *,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:  # [T, num_heads, head_dim]
        assert self._prepared is metadata, "prepare was not called for this step"
        if out is None:
            out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
        assert not isinstance(form.window, Chunk), "not among its features"
        pages = kv_cache.permute(0, 2, 3, 1, 4)  # [num_blocks, 2, num_kv_heads, block_size, dim]
        for kernels, part in self._parts.items():
            if part is None:
                continue
            wrapper = self._plan(kernels, part, form.scale, form.window)
            if isinstance(part.tokens, slice):
                wrapper.run(q[part.tokens], pages, out=out[part.tokens])
            else:
                out.index_copy_(0, part.tokens, wrapper.run(q[part.tokens], pages))
        return out

    def _plan(
        self, kernels: str, part: PageLists, scale: float, window: int | None
    ) -> BatchPrefillWithPagedKVCacheWrapper:
        """A wrapper that is planned for this step: the first layer to ask plans for all alike."""
        key = (kernels, scale, window)
        wrapper = self._wrappers.get(key)
        if wrapper is None:
            wrapper = self._wrappers[key] = self._make_wrapper(
                self._workspace, "HND", backend=kernels
            )
        if key not in self._planned:
            shape = self._shape
            wrapper.plan(
                part.qo_indptr,
                part.kv_indptr,
                part.indices,
                part.last_page_len,
                shape.num_heads,
                shape.num_kv_heads,
                shape.head_dim,
                shape.block_size,
                causal=True,
                sm_scale=scale,
                window_left=-1 if window is None else window - 1,
                q_data_type=shape.dtype,
                kv_data_type=shape.dtype,
            )
            self._planned.add(key)
        return wrapper

    def _compile(self) -> None:
        """Plans one row of one key with each kind of kernel, and so compiles or loads it: prompts
        and decodes, with and without a window."""
        windows = {window is None: window for window in self._shape.windows}
        host = torch.tensor([0, 1], dtype=torch.int32)
        indices = torch.zeros(1, dtype=torch.int32, device=self._shape.device)
        part = PageLists(slice(0, 1), host, host, host[1:], indices)
        try:
            for kernels in ("fa2", "auto"):
                for window in windows.values():
                    assert not isinstance(window, Chunk), "not among its features"
                    self._plan(kernels, part, self._shape.head_dim**-0.5, window)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, OSError) as error:
            cause = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ConfigError(
                f"attention_backend flashinfer: its kernels were not compiled ({cause}); "
                "they need nvcc and ninja",
                param="attention_backend",
            ) from error


def _workspace_bytes(shape: AttentionShape) -> int:
    """Partial results of a split context: one tile of queries, in float32, for each thread block
    that runs at a time. Contexts are split only while that many suffice."""
    properties = torch.cuda.get_device_properties(shape.device)
    blocks = _BLOCKS_PER_MULTIPROCESSOR * properties.multi_processor_count
    group = shape.num_heads // shape.num_kv_heads
    per_block = group * _LARGEST_QUERY_TILE * (shape.head_dim + 1) * 4
    return blocks * per_block + 2**20


@dataclass(frozen=True, slots=True, eq=False)
class PageLists:
    """Rows of a step that are computed together, n of them, in batch order, as FlashInfer takes
    them: arrays on the host, and one of page ids on the device. Padding has no place in them."""

    tokens: slice | torch.Tensor
    """Their tokens among the step's: a range, or indices where padding lies between."""
    qo_indptr: torch.Tensor
    """[n+1] int32 on the host: row i's queries are [qo_indptr[i], qo_indptr[i+1]) of `tokens`."""
    kv_indptr: torch.Tensor
    """[n+1] int32 on the host: row i's pages are indices[kv_indptr[i]:kv_indptr[i+1]]."""
    last_page_len: torch.Tensor
    """[n] int32 on the host: keys in a row's last page, 1 to block_size."""
    indices: torch.Tensor
    """[kv_indptr[-1]] int32 on the step's device: block ids."""


@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    """The rows that are not padding; all arrays [n] int64."""

    row: np.ndarray
    first_token: np.ndarray
    query_len: np.ndarray
    num_pages: np.ndarray
    last_page_len: np.ndarray

    def __getitem__(self, part: slice) -> _Rows:
        return _Rows(
            self.row[part],
            self.first_token[part],
            self.query_len[part],
            self.num_pages[part],
            self.last_page_len[part],
        )


def split_page_lists(metadata: AttentionMetadata) -> tuple[PageLists | None, PageLists | None]:
    """The step's decode rows, which come first, and its other rows; None where there are none.

    Waits for the device: lengths exist only there, and the plan is made here.
    """
    num_rows = metadata.num_rows
    lengths = torch.cat((metadata.query_start_loc[: num_rows + 1], metadata.seq_lens[:num_rows]))
    values = lengths.cpu().numpy().astype(np.int64)
    rows = _live_rows(values[: num_rows + 1], values[num_rows + 1 :], metadata.block_size)
    is_prefill = rows.query_len > 1
    num_decodes = int(is_prefill.argmax()) if is_prefill.any() else rows.row.size
    parts = rows[:num_decodes], rows[num_decodes:]
    decode, prefill = (_page_lists(part, metadata) if part.row.size else None for part in parts)
    return decode, prefill


def _live_rows(query_start_loc: np.ndarray, seq_lens: np.ndarray, block_size: int) -> _Rows:
    query_lens = np.diff(query_start_loc)
    row = np.flatnonzero((query_lens > 0) & (seq_lens > 0))
    num_pages = -(-seq_lens[row] // block_size)
    return _Rows(
        row=row,
        first_token=query_start_loc[row],
        query_len=query_lens[row],
        num_pages=num_pages,
        last_page_len=seq_lens[row] - (num_pages - 1) * block_size,
    )


def _page_lists(rows: _Rows, metadata: AttentionMetadata) -> PageLists:
    qo_indptr, kv_indptr = _indptr(rows.query_len), _indptr(rows.num_pages)
    return PageLists(
        tokens=_tokens(rows, qo_indptr, metadata.query_start_loc.device),
        qo_indptr=_int32(qo_indptr),
        kv_indptr=_int32(kv_indptr),
        last_page_len=_int32(rows.last_page_len),
        indices=_page_ids(metadata.block_table, rows, kv_indptr),
    )


def _tokens(
    rows: _Rows, qo_indptr: np.ndarray, device: torch.device
) -> slice | torch.Tensor:  # [num_tokens] int64
    first, num_tokens = int(rows.first_token[0]), int(qo_indptr[-1])
    if np.array_equal(rows.first_token, first + qo_indptr[:-1]):
        return slice(first, first + num_tokens)
    offsets = np.repeat(rows.first_token - qo_indptr[:-1], rows.query_len)
    return torch.from_numpy(offsets + np.arange(num_tokens)).to(device)


def _page_ids(
    block_table: torch.Tensor,  # [B, max_blocks] int32
    rows: _Rows,
    kv_indptr: np.ndarray,  # [n+1] int64
) -> torch.Tensor:  # [kv_indptr[-1]] int32
    """Row by row, gathered on the device: a table is too long to bring over each step."""
    device, total = block_table.device, int(kv_indptr[-1])
    columns = np.stack((rows.num_pages, rows.row, kv_indptr[:-1]))
    num_pages, row, start = torch.from_numpy(columns).to(device)
    entry = torch.repeat_interleave(num_pages, output_size=total)  # which of the rows a page is of
    return block_table[row[entry], torch.arange(total, device=device) - start[entry]]


def _indptr(lengths: np.ndarray) -> np.ndarray:
    return np.concatenate(([0], np.cumsum(lengths)))


def _int32(values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(values.astype(np.int32))
