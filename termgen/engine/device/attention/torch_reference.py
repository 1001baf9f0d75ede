"""Paged attention in torch without a loop over requests: the backend of a CPU.

Computes what `reference.py` spells out row by row; skip it on a first reading. `prepare` cuts a
step into groups, each computed as one padded batch: the decode rows (one query each), and the rest
in tiles of queries. What all layers share (which slots to gather, what each query may see) is
worked out once per step and window size; a layer then gathers and runs one fused attention call
per group.

    cache of a layer   [num_blocks, block_size, 2 (k, v), num_kv_heads, head_dim]

Only slots inside a row's sequence are ever gathered: positions beyond it repeat its last token and
are masked. Masking alone would not do, for 0 * NaN of a stale slot is NaN.
What an 8-bit cache holds turns into the queries' type once it is gathered.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

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
from termgen.engine.device.kernels.kv_cache import FP8, INT4, INT8, SCALED, read_slots
from termgen.vocabulary.cache_groups import Chunk, Window, most_keys

_QUERY_TILE = 256
"""Queries of one row computed together: past this, causal tiles skip what cannot be seen."""
_MAX_GATHERED = 2**16
"""Keys gathered for one group, over all its rows: bounds the copy a layer makes."""
_MAX_SCORES = 2**22
"""Query-key pairs of one group: bounds its mask."""
_WORTH_A_GROUP = 2**13
"""Padding (in the units of `_cost`) that costs more than launching another group."""


class TorchReferenceAttention:
    """AttentionBackend. Keeps the plan of the step it last prepared and nothing else."""

    name = "torch_reference"
    max_queries = 1
    kv_cache_order = (0, 1, 2, 3, 4)
    capabilities = AttentionCapabilities(
        device_types=frozenset({"cpu", "cuda"}),
        dtypes=frozenset({torch.float32, torch.bfloat16, torch.float16}),
        graph_modes=frozenset({"NONE", "PIECEWISE"}),
        kv_cache_dtypes=frozenset({FP8, INT8, INT4}),
        features=frozenset({SOFTCAP, SINKS, CHUNKS, UNEQUAL_LAYERS}),
    )

    def __init__(self, shape: AttentionShape | None = None) -> None:
        """Runs any shape, so it ignores this one."""
        del shape
        self._prepared: AttentionMetadata | None = None
        self._groups: list[_Group] = []

    def prepare(self, metadata: AttentionMetadata) -> None:
        if metadata.seq_lens.device.type == "cpu":
            batches = _batches_from_lengths(metadata)
        else:
            batches = _batches_from_bounds(metadata)
        self._groups = [_Group(metadata, batch) for batch in batches]
        self._prepared = metadata

    def forward(
        self,
        q: torch.Tensor,  # [T, num_heads, head_dim]
        kv_cache: torch.Tensor,  # [num_blocks, block_size, 2, num_kv_heads, head_dim]
        metadata: AttentionMetadata,
        form: AttentionForm,
        *,
        out: torch.Tensor | None = None,  # [T, num_heads, head_dim]
    ) -> torch.Tensor:
        attended = self._attend(q, kv_cache, metadata, form)
        return attended if out is None else out.copy_(attended)

    def _attend(
        self,
        q: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
        form: AttentionForm,
    ) -> torch.Tensor:
        assert self._prepared is metadata, "prepare was not called for this step"
        if kv_cache.dtype in SCALED and q.dtype != torch.float32:
            # Integers times scales are no numbers of a half type.
            return self._attend(q.float(), kv_cache, metadata, form).to(q.dtype)
        num_tokens = q.shape[0]
        if len(self._groups) == 1 and self._groups[0].is_whole(num_tokens):
            return self._groups[0].attend(q, kv_cache, form)
        # The extra row takes what is computed for padding.
        out = q.new_zeros(num_tokens + 1, *q.shape[1:])
        for group in self._groups:
            group.store(out, group.attend(group.queries(q), kv_cache, form))
        return out[:num_tokens]


@dataclass(frozen=True, slots=True)
class _Batch:
    """Tiles of rows to compute together: item i is queries [first_query[i], + num_queries) of
    row rows[i], cut off where the row ends."""

    rows: torch.Tensor  # [n] int64
    first_query: torch.Tensor  # [n] int64
    num_queries: int
    first_token: int | None
    """The batch's first token, if its tokens are consecutive and none is padding."""


@dataclass(frozen=True, slots=True)
class _View:
    """The keys that a group gathers and sees through one window size."""

    num_keys: int
    key_slots: torch.Tensor  # [n * num_keys] int64
    mask: torch.Tensor | None  # [n, 1, num_queries * group_size, num_keys], 0 or -inf


class _Group:
    """One padded batch of a step; n items of num_queries queries each."""

    def __init__(self, metadata: AttentionMetadata, batch: _Batch) -> None:
        rows = batch.rows
        starts = metadata.query_start_loc.to(torch.int64)
        first_token = starts.index_select(0, rows)
        query_len = starts.index_select(0, rows + 1) - first_token
        self._metadata = metadata
        self._batch = batch
        self._seq_lens = metadata.seq_lens.index_select(0, rows).to(torch.int64)  # [n]
        self._is_padding = self._seq_lens == 0  # [n]
        offsets = batch.first_query[:, None] + torch.arange(batch.num_queries, device=rows.device)
        context = self._seq_lens - query_len
        self._first_position = context + batch.first_query  # [n]
        self._positions = context[:, None] + offsets  # [n, num_queries]
        is_live = (offsets < query_len[:, None]) & ~self._is_padding[:, None]
        tokens = first_token[:, None] + offsets
        self._query_index = torch.where(is_live, tokens, 0).flatten()
        self._output_index = torch.where(is_live, tokens, metadata.num_tokens).flatten()
        self._views: dict[tuple[Window | None, int], _View] = {}

    def is_whole(self, num_tokens: int) -> bool:
        """True if the group's queries are the step's tokens, in order and without padding."""
        return self._batch.first_token == 0 and self._query_index.shape[0] == num_tokens

    def queries(self, q: torch.Tensor) -> torch.Tensor:
        first = self._batch.first_token
        if first is None:
            return q.index_select(0, self._query_index)
        return q[first : first + self._query_index.shape[0]]

    def store(self, out: torch.Tensor, attended: torch.Tensor) -> None:
        first = self._batch.first_token
        if first is None:
            out.index_copy_(0, self._output_index, attended)
        else:
            out[first : first + attended.shape[0]] = attended

    def attend(
        self,
        q: torch.Tensor,  # [n * num_queries, num_heads, head_dim]
        kv_cache: torch.Tensor,  # [num_blocks, block_size, 2, num_kv_heads, head_dim]
        form: AttentionForm,
    ) -> torch.Tensor:  # [n * num_queries, num_heads, head_dim]
        n, num_queries = self._batch.rows.shape[0], self._batch.num_queries
        num_heads, head_dim = q.shape[1:]
        num_kv_heads = kv_cache.shape[3]
        group_size = num_heads // num_kv_heads
        window = form.window
        view = self._views.get((window, group_size))
        if view is None:
            view = self._build_view(window, group_size, q.dtype)
            self._views[window, group_size] = view
        keys_values = read_slots(kv_cache, view.key_slots, q.dtype)
        keys_values = keys_values.view(n, view.num_keys, 2, num_kv_heads, head_dim)
        # The heads that share a key head are laid beside the queries, so no key is repeated.
        folded = q.view(n, num_queries, num_kv_heads, group_size, head_dim).transpose(1, 2)
        folded = folded.reshape(n, num_kv_heads, num_queries * group_size, head_dim)
        keys, values = keys_values.permute(2, 0, 3, 1, 4)  # [n, num_kv_heads, num_keys, head_dim]
        if form.softcap is None and form.sinks is None:
            attended = F.scaled_dot_product_attention(
                folded, keys, values, attn_mask=view.mask, scale=form.score_scale
            )
        else:
            attended = _attend_step_by_step(folded, keys, values, view.mask, form)
        if form.value_scale is not None:
            attended = attended * form.value_scale
        attended = attended.view(n, num_kv_heads, num_queries, group_size, head_dim)
        return attended.transpose(1, 2).reshape(n * num_queries, num_heads, head_dim)

    def _build_view(self, window: Window | None, group_size: int, dtype: torch.dtype) -> _View:
        metadata, positions = self._metadata, self._positions
        last = (self._seq_lens - 1).clamp_(min=0)  # [n]
        first = torch.zeros_like(last)
        if window is not None:
            first = torch.minimum(_first_keys(self._first_position, window), last)
        num_keys = self._num_keys(first, window)
        keys = first[:, None] + torch.arange(num_keys, device=first.device)  # [n, num_keys]
        inside = torch.minimum(keys, last[:, None])
        blocks = metadata.block_table.index_select(0, self._batch.rows).to(torch.int64)
        blocks = blocks.gather(1, inside // metadata.block_size)
        blocks.masked_fill_(self._is_padding[:, None], 0)
        key_slots = blocks * metadata.block_size + inside % metadata.block_size
        is_seen = keys[:, None] <= positions[:, :, None]  # [n, num_queries, num_keys]
        if window is not None:
            is_seen &= keys[:, None] >= _first_keys(positions, window)[:, :, None]
        return _View(num_keys, key_slots.flatten(), _mask(is_seen, group_size, dtype))

    def _num_keys(self, first: torch.Tensor, window: Window | None) -> int:
        """The most keys any item gathers: exact on the CPU, an upper bound elsewhere."""
        num_queries = self._batch.num_queries
        if first.device.type == "cpu":
            end = torch.minimum(self._first_position + num_queries, self._seq_lens)
            return max(1, int(np.max((end - first).numpy())))
        longest = self._metadata.max_seq_len
        return longest if window is None else min(longest, most_keys(window) + num_queries - 1)


def _first_keys(positions: torch.Tensor, window: Window) -> torch.Tensor:
    """`first_key` of many positions; those of padding may lie before 0."""
    if isinstance(window, Chunk):
        positions = positions.clamp(min=0)
        return positions - positions % window.size
    return (positions - (window - 1)).clamp_(min=0)


def _attend_step_by_step(
    q: torch.Tensor,  # [n, num_kv_heads, num_queries * group_size, head_dim]
    keys: torch.Tensor,  # [n, num_kv_heads, num_keys, head_dim]
    values: torch.Tensor,  # the same
    mask: torch.Tensor | None,
    form: AttentionForm,
) -> torch.Tensor:  # as q
    """Attention with the scores in memory, float32, as torch's own has no soft cap and no sinks:
    some key heads at a time, so that the scores stay as few as `_MAX_SCORES`."""
    n, num_kv_heads, num_rows, _ = q.shape
    together = max(1, _MAX_SCORES // (n * num_rows * keys.shape[2]))
    sinks = None
    if form.sinks is not None:
        of_group = form.sinks.float().view(num_kv_heads, -1)
        sinks = of_group.repeat(1, num_rows // of_group.shape[1])[None, :, :, None]
    out = torch.empty_like(q)
    for first in range(0, num_kv_heads, together):
        some = slice(first, first + together)
        scores = q[:, some].float() @ keys[:, some].float().transpose(2, 3)
        scores *= form.score_scale
        if form.softcap is not None:
            scores = scores.div_(form.softcap).tanh_().mul_(form.softcap)
        if mask is not None:
            scores += mask
        if sinks is not None:
            scores = torch.cat((scores, sinks[:, some].expand(n, -1, -1, -1)), -1)
        weights = scores.softmax(-1)[..., : keys.shape[2]]
        out[:, some] = weights @ values[:, some].float()
    return out


def _mask(is_seen: torch.Tensor, group_size: int, dtype: torch.dtype) -> torch.Tensor | None:
    """is_seen [n, num_queries, num_keys] -> what is added to the scores, or None for nothing."""
    if is_seen.device.type == "cpu" and np.all(is_seen.numpy()):
        return None
    # A query that sees nothing is padding; it may see its first key, lest it become NaN.
    blind = ~is_seen.any(-1, keepdim=True)
    mask = torch.zeros(is_seen.shape, dtype=dtype, device=is_seen.device)
    mask.masked_fill_(~is_seen & ~blind, float("-inf"))
    if is_seen.shape[1] > 1:
        mask = mask.repeat_interleave(group_size, 1)
    return mask[:, None]


def _batches_from_bounds(metadata: AttentionMetadata) -> list[_Batch]:
    """Batches that need no look at the device: every row padded to the longest."""
    device = metadata.seq_lens.device
    num_decodes, num_rows = metadata.num_decodes or 0, metadata.num_rows
    batches = []

    def add(first_row: int, end_row: int, first_query: int, num_queries: int) -> None:
        step = _rows_together(num_queries, metadata.max_seq_len)
        for start in range(first_row, end_row, step):
            rows = torch.arange(start, min(start + step, end_row), device=device)
            batches.append(_Batch(rows, torch.full_like(rows, first_query), num_queries, None))

    add(0, num_decodes, 0, 1)
    if num_rows > num_decodes:
        for first_query in range(0, metadata.max_query_len, _QUERY_TILE):
            num_queries = min(_QUERY_TILE, metadata.max_query_len - first_query)
            add(num_decodes, num_rows, first_query, num_queries)
    return batches


def _batches_from_lengths(metadata: AttentionMetadata) -> list[_Batch]:
    """Batches of like lengths, for a device whose numbers are at hand."""
    num_rows, num_decodes = metadata.num_rows, metadata.num_decodes or 0
    starts = metadata.query_start_loc.numpy()[: num_rows + 1].astype(np.int64)
    seq_lens = metadata.seq_lens.numpy()[:num_rows].astype(np.int64)
    query_lens = np.diff(starts)
    num_tiles = -(-query_lens // _QUERY_TILE)
    rows = np.repeat(np.arange(num_rows), num_tiles)
    tile = np.arange(rows.size) - np.repeat(np.cumsum(num_tiles) - num_tiles, num_tiles)
    items = _Items(
        rows=rows,
        first_query=tile * _QUERY_TILE,
        num_queries=np.minimum(query_lens[rows] - tile * _QUERY_TILE, _QUERY_TILE),
        num_keys=np.maximum(
            np.minimum((tile + 1) * _QUERY_TILE, query_lens[rows]) + (seq_lens - query_lens)[rows],
            1,
        ),
        first_token=starts[rows] + tile * _QUERY_TILE,
        is_padding=seq_lens[rows] == 0,
    )
    num_decode_items = int(np.searchsorted(rows, num_decodes))
    batches: list[_Batch] = []
    for part in (np.arange(num_decode_items), np.arange(num_decode_items, rows.size)):
        if part.size:
            batches += [items.batch(chunk) for chunk in items.split(part)]
    return batches


@dataclass(frozen=True, slots=True)
class _Items:
    """Every tile of every row; all arrays [num_items], in token order."""

    rows: np.ndarray
    first_query: np.ndarray
    num_queries: np.ndarray
    num_keys: np.ndarray
    first_token: np.ndarray
    is_padding: np.ndarray

    def split(self, part: np.ndarray) -> list[np.ndarray]:
        """Cuts the items `part` into batches in which padding is not worth another launch."""
        queries, keys = self.num_queries[part], self.num_keys[part]
        padding = part.size * _cost(queries.max(), keys.max()) - _cost(queries, keys).sum()
        pieces = [part]
        if padding > _WORTH_A_GROUP:
            kind = _size_class(queries, 8) * 64 + _size_class(keys, 256)
            pieces = [part[kind == value] for value in np.unique(kind)]
        chunks = []
        for piece in pieces:
            step = _rows_together(
                int(self.num_queries[piece].max()), int(self.num_keys[piece].max())
            )
            chunks += [piece[start : start + step] for start in range(0, piece.size, step)]
        return chunks

    def batch(self, chunk: np.ndarray) -> _Batch:
        num_queries = int(self.num_queries[chunk].max())
        first = self.first_token[chunk]
        consecutive = first[0] + np.arange(chunk.size) * num_queries
        is_run = (
            np.array_equal(first, consecutive)
            and bool((self.num_queries[chunk] == num_queries).all())
            and not self.is_padding[chunk].any()
        )
        return _Batch(
            rows=torch.from_numpy(self.rows[chunk]),
            first_query=torch.from_numpy(self.first_query[chunk]),
            num_queries=num_queries,
            first_token=int(first[0]) if is_run else None,
        )


def _cost(queries: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Relative time of an item: a key is moved once, and multiplied once per query."""
    cost: np.ndarray = keys * (queries + 8)
    return cost


def _size_class(sizes: np.ndarray, smallest: int) -> np.ndarray:
    """Sizes within a factor of two share a class, as do all up to `smallest`."""
    classes: np.ndarray = np.ceil(np.log2(np.maximum(sizes, smallest))).astype(np.int64)
    return classes


def _rows_together(num_queries: int, num_keys: int) -> int:
    """The most items of this size in one group."""
    num_keys = max(num_keys, 1)
    return max(1, min(_MAX_GATHERED // num_keys, _MAX_SCORES // (num_queries * num_keys)))
