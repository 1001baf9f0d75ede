"""A step's rows as lists of pages, on the host: what FlashInfer plans from.

FlashInfer takes a batch as three arrays that it reads on the host (where each row's queries start,
where its pages start, how full its last page is) and one of page ids on the device. Padding has no
place in them, so rows and tokens of padding are left out here.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from termgen.engine.device.attention.base import AttentionMetadata


@dataclass(frozen=True, slots=True, eq=False)
class PageLists:
    """Rows of a step that are computed together, n of them, in batch order."""

    tokens: slice | torch.Tensor
    """Where their queries are among the step's: a range, or indices where padding lies between."""
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
