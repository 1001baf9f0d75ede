"""Log-probabilities of drawn tokens and of the likeliest ones, without a sort of the vocabulary.

Computes what `sampling.logprobs.gather_logprobs` does, from the logits as the model made them. A
row is divided among programs that read it once; each leaves the largest logit and the sum of its
part, how many logits of it are larger than the drawn one, and the best logit of every small piece
of it. The last to arrive adds up, in a fixed order, and takes the likeliest ones in turn: the best
of all pieces, which is then replaced by the next best of its own piece, read again.

A 64-bit integer holds a logit's sortable key above and its id, reversed, below, as in `sample`. So
the larger logit comes first and, of equal ones, the lower id, as in the reference. Rows that ask
for nothing end at once: how many tokens a row wants is device memory.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from termgen.engine.device.kernels.launch import next_power_of_2
from termgen.engine.device.kernels.sampling.edit_logits import slot_and_place
from termgen.engine.device.kernels.sampling.sample import _LARGEST_KEY, sortable_key
from termgen.engine.device.sampling.logprobs import LogprobTensors

_BLOCK = 4096
_MAX_PIECES = 2048
_MIN_PIECE = 16
_NOTHING = tl.constexpr(-(2**63))  # below every logit


@triton.jit
def _ranked(logits, ids, inside):
    """int64 that sorts by logit, then by id from the highest on."""
    key = sortable_key(logits).to(tl.int64) << 32
    return tl.where(inside, key | (_LARGEST_KEY - ids), _NOTHING)


@triton.jit
def _id_of(ranked):
    return ((ranked & 0xFFFFFFFF) ^ _LARGEST_KEY).to(tl.int32)


@triton.jit
def _logit_of(ranked):
    key = (ranked >> 32).to(tl.int32)
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _exp_below(logits, top):
    """exp(logits - top), also where both are infinite: 1 at the top, but 0 at -inf."""
    powers = tl.where(logits == top, 1.0, tl.exp(logits - top))
    return tl.where(logits == float("-inf"), 0.0, powers)


@triton.jit(
    do_not_specialize=["ring_stride"], do_not_specialize_on_alignment=["slots_ptr", "tokens_ptr"]
)
def _logprobs_kernel(
    logits_ptr,
    slots_ptr,
    tokens_ptr,
    num_logprobs_ptr,
    ring_index_ptr,
    ids_ptr,
    logprobs_ptr,
    ranks_ptr,
    tops_ptr,
    sums_ptr,
    larger_ptr,
    pieces_ptr,
    arrivals_ptr,
    logits_stride,
    ring_stride,
    VOCAB_SIZE: tl.constexpr,
    SAMPLES: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    PIECE: tl.constexpr,
    MAX_PARTS: tl.constexpr,
    MAX_PIECES: tl.constexpr,
):
    PIECES_OF_BLOCK: tl.constexpr = BLOCK // PIECE
    NUM_PIECES: tl.constexpr = (VOCAB_SIZE + PIECE - 1) // PIECE
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    num_parts = tl.num_programs(1)
    slot, _ = slot_and_place(row, slots_ptr, SAMPLES)
    num_likeliest = tl.load(num_logprobs_ptr + slot).to(tl.int32)
    if num_likeliest < 0:
        return
    row_ptr = logits_ptr + row * logits_stride
    token = tl.maximum(tl.load(tokens_ptr + row), 0).to(tl.int32)  # a corrupt row is not looked at
    drawn = tl.load(row_ptr + token).to(tl.float32)

    places = tl.arange(0, PIECES_OF_BLOCK)[:, None] * PIECE + tl.arange(0, PIECE)[None, :]
    ids = part * BLOCK + places
    inside = ids < VOCAB_SIZE
    logits = tl.load(row_ptr + ids, mask=inside, other=float("-inf")).to(tl.float32)
    top = tl.max(tl.max(logits, axis=1), axis=0)
    total = tl.sum(tl.sum(_exp_below(logits, top), axis=1), axis=0)
    larger = tl.sum(tl.sum((logits > drawn).to(tl.int32), axis=1), axis=0)
    tl.store(tops_ptr + row * MAX_PARTS + part, top)
    tl.store(sums_ptr + row * MAX_PARTS + part, total)
    tl.store(larger_ptr + row * MAX_PARTS + part, larger)
    best_of_pieces = tl.max(_ranked(logits, ids, inside), axis=1)
    at = part * PIECES_OF_BLOCK + tl.arange(0, PIECES_OF_BLOCK)
    tl.store(pieces_ptr + row * MAX_PIECES + at, best_of_pieces, mask=at < NUM_PIECES)
    tl.debug_barrier()  # the stores come before the arrival
    arrived = tl.atomic_add(arrivals_ptr + row, 1, sem="acq_rel")
    if arrived < num_parts - 1:
        return

    tl.store(arrivals_ptr + row, 0)  # ready for the next launch
    # L1 may hold what an earlier launch left in the workspace: read past it.
    parts = tl.arange(0, MAX_PARTS)
    is_part = parts < num_parts
    at = row * MAX_PARTS + parts
    tops = tl.load(tops_ptr + at, mask=is_part, other=float("-inf"), cache_modifier=".cg")
    sums = tl.load(sums_ptr + at, mask=is_part, other=0.0, cache_modifier=".cg")
    counts = tl.load(larger_ptr + at, mask=is_part, other=0, cache_modifier=".cg")
    top = tl.max(tops, axis=0)
    log_total = top + tl.log(tl.sum(sums * _exp_below(tops, top), axis=0))
    rank = tl.sum(counts, axis=0) + 1

    piece_ids = tl.arange(0, MAX_PIECES)
    pieces = tl.load(
        pieces_ptr + row * MAX_PIECES + piece_ids,
        mask=piece_ids < NUM_PIECES,
        other=_NOTHING,
        cache_modifier=".cg",
    )
    columns = tl.arange(0, BLOCK_COLUMNS)
    out_ids = tl.where(columns == 0, token, 0)
    out_logits = tl.where(columns == 0, drawn, 0.0)
    for i in range(tl.minimum(num_likeliest, VOCAB_SIZE)):
        best = tl.max(pieces, axis=0)
        best_id = _id_of(best)
        out_ids = tl.where(columns == i + 1, best_id, out_ids)
        out_logits = tl.where(columns == i + 1, _logit_of(best), out_logits)
        piece = best_id // PIECE
        others = piece * PIECE + tl.arange(0, PIECE)
        exists = others < VOCAB_SIZE
        logits_left = tl.load(row_ptr + others, mask=exists, other=0.0).to(tl.float32)
        left = _ranked(logits_left, others, exists)
        next_best = tl.max(tl.where(left < best, left, _NOTHING), axis=0)
        pieces = tl.where(piece_ids == piece, next_best, pieces)

    out_row = tl.load(ring_index_ptr) * ring_stride + row
    is_column = columns < COLUMNS
    tl.store(ids_ptr + out_row * COLUMNS + columns, out_ids, mask=is_column)
    tl.store(logprobs_ptr + out_row * COLUMNS + columns, out_logits - log_total, mask=is_column)
    tl.store(ranks_ptr + out_row, rank)


class LogprobWorkspace:
    """Buffers of one engine's log-probabilities; one launch at a time may use them."""

    def __init__(self, *, max_rows: int, vocab_size: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self.piece = min(_BLOCK, max(_MIN_PIECE, next_power_of_2(-(-vocab_size // _MAX_PIECES))))
        self.num_parts = -(-vocab_size // _BLOCK)
        parts = (max_rows, next_power_of_2(self.num_parts))
        pieces = (max_rows, next_power_of_2(-(-vocab_size // self.piece)))
        self.tops = torch.empty(parts, dtype=torch.float32, device=device)
        self.sums = torch.empty(parts, dtype=torch.float32, device=device)
        self.larger = torch.empty(parts, dtype=torch.int32, device=device)
        self.pieces = torch.empty(pieces, dtype=torch.int64, device=device)
        self.arrivals = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self.first_row = torch.zeros(1, dtype=torch.int64, device=device)
        """Index of the only row of a ring, for results that go to no ring."""


def gather_logprobs(
    logits: torch.Tensor,  # [B * num_samples, V], rows dense
    slots: torch.Tensor,  # [B] int64
    token_ids: torch.Tensor,  # [B * num_samples] int64
    num_logprobs: torch.Tensor,  # [R] int64
    workspace: LogprobWorkspace,
    *,
    out: LogprobTensors,  # [steps, at least B, C] twice, and [steps, at least B]
    index: torch.Tensor | None = None,  # [1] int64
    num_samples: int = 1,
) -> None:
    """Write the row of `out` that the index names, the first without one: of each row of logits, as
    many columns as its slot wants; -1 is nothing at all."""
    num_rows, vocab_size = logits.shape
    assert logits.stride(1) == 1 and vocab_size == workspace.vocab_size, logits.shape
    assert num_rows <= len(workspace.arrivals), (num_rows, len(workspace.arrivals))
    assert all(t.is_contiguous() for t in out) and out.ranks.shape[1] >= num_rows
    if not num_rows:
        return
    num_columns = out.token_ids.shape[2]
    _logprobs_kernel[(num_rows, workspace.num_parts)](
        logits,
        slots,
        token_ids,
        num_logprobs,
        workspace.first_row if index is None else index,
        out.token_ids,
        out.logprobs,
        out.ranks,
        workspace.tops,
        workspace.sums,
        workspace.larger,
        workspace.pieces,
        workspace.arrivals,
        logits.stride(0),
        out.ranks.shape[1],
        VOCAB_SIZE=vocab_size,
        SAMPLES=num_samples,
        COLUMNS=num_columns,
        BLOCK_COLUMNS=next_power_of_2(num_columns),
        BLOCK=_BLOCK,
        PIECE=workspace.piece,
        MAX_PARTS=workspace.tops.shape[1],
        MAX_PIECES=workspace.pieces.shape[1],
        num_warps=8,
    )
