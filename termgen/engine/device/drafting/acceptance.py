"""Keeps the drafts of a step that the model draws as well.

A row with d drafts has 1 + d samples: what the model draws behind its newest token, and behind each
draft. They are its own tokens up to the first that differs from the draft at its place; that one is
a token too, as its draw saw right tokens only. Nothing is kept behind a token that ends the row. So
a row's tokens are those of as many steps without drafts (Leviathan et al., "Fast Inference from
Transformers via Speculative Decoding", 2023, where both draws use the same noise).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from termgen.engine.device.sampling.logprobs import LogprobTensors
from termgen.engine.device.sampling.metadata import HAS_PENALTIES
from termgen.engine.device.sampling.token_ring import TokenRing
from termgen.vocabulary.step import StepPlan


@dataclass(frozen=True, slots=True)
class Samples:
    """The samples of a step with drafts, row after row: S in all for B rows. A row's samples lie
    side by side, in order."""

    rows: torch.Tensor  # [S] int64, batch row of each
    places: torch.Tensor  # [S] int64, index of each among those of its row
    drafts: torch.Tensor  # [B] int64, drafts of each row
    most_drafts: int
    is_even: bool = False
    """True if each row has 1 + most_drafts samples, of which those behind its drafts do not count:
    the layout of a recorded step, as it follows from the number of rows alone."""

    @classmethod
    def of_plan(cls, plan: StepPlan, device: torch.device) -> Samples:
        """The layout that the host expects: of each row one sample more than it has drafts."""
        drafts = plan.num_draft_tokens.astype(np.int64)
        counts = 1 + drafts
        rows = np.repeat(np.arange(plan.num_rows), counts)
        places = np.arange(plan.num_samples) - np.repeat(np.cumsum(counts) - counts, counts)
        columns = torch.from_numpy(np.concatenate((rows, places, drafts))).to(device)
        size = plan.num_samples
        return cls(columns[:size], columns[size : 2 * size], columns[2 * size :], int(drafts.max()))

    @classmethod
    def even(cls, drafts: torch.Tensor, most_drafts: int) -> Samples:
        """drafts: [B] int64."""
        samples = torch.arange(len(drafts) * (1 + most_drafts), device=drafts.device)
        rows = samples // (1 + most_drafts)
        return cls(rows, samples - rows * (1 + most_drafts), drafts, most_drafts, is_even=True)

    def by_row(self, values: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
        """[S] -> [B, 1 + most_drafts]. counted: [B, 1 + most_drafts], True for each sample that
        counts; others have any value."""
        if self.is_even:
            return values.view(counted.shape)
        return values.new_full(counted.shape, -1).masked_scatter_(counted, values)

    def in_line(self, values: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
        """The other way."""
        return values.flatten() if self.is_even else values[counted]


class CheckedRows(Protocol):
    """Rows of the request state. R slots."""

    token_ids: torch.Tensor  # [R, max_model_len] int32
    total_len: torch.Tensor  # [R] int64
    num_computed: torch.Tensor  # [R] int64
    min_total: torch.Tensor  # [R] int64
    limit: torch.Tensor  # [R] int64
    finished: torch.Tensor  # [R] bool
    stop_ids: torch.Tensor  # [R, K] int64
    edit_kinds: torch.Tensor  # [R] int64
    token_counts: torch.Tensor  # [R, V] int32


def count_drafts(
    packed: torch.Tensor,  # [S, V] int32, see `sampling.metadata`
    slots: torch.Tensor,  # [S] int64
    samples: Samples,
    state: CheckedRows,
) -> None:
    """Count the drafts before each sample's place as tokens of its row: where they are wrong, the
    sample is not kept."""
    ends = state.total_len[slots]
    for i in range(samples.most_drafts):
        where = (ends + i).clamp(max=state.token_ids.shape[1] - 1)
        drafts = state.token_ids[slots, where].long()[:, None]
        packed.scatter_add_(1, drafts, (samples.places > i).to(packed.dtype)[:, None])


def keep_drawn(
    state: CheckedRows,
    slots: torch.Tensor,  # [B] int64
    num_tokens: torch.Tensor,  # [B] int64, drafts not among them, not yet in num_computed
    sampled: torch.Tensor,  # [S] int64
    samples: Samples,
    ring: TokenRing | None = None,
    logprobs: LogprobTensors | None = None,
) -> torch.Tensor:  # [S] int32
    """`RequestState.append_sampled` of a step with drafts: -1 for a sample that is not kept."""
    columns = torch.arange(1 + samples.most_drafts, device=slots.device)
    is_sample = columns <= samples.drafts[:, None]  # [B, width]
    drawn = samples.by_row(sampled, is_sample)
    total = state.total_len[slots]
    first = state.num_computed[slots] + num_tokens
    takes = (first >= total) & ~state.finished[slots]
    places = (total[:, None] + columns).clamp_(max=state.token_ids.shape[1] - 1)
    drafts = state.token_ids[slots[:, None], places]

    lengths = total[:, None] + columns + 1  # of the row with each of these tokens
    is_stop = (state.stop_ids[slots][:, None] == drawn[:, :, None]).any(dim=2)
    ends = is_stop & (lengths > state.min_total[slots][:, None])
    ends |= (lengths >= state.limit[slots][:, None]) | (drawn < 0)  # CORRUPT_TOKEN
    goes_on = (drawn == drafts) & ~ends & (columns < samples.drafts[:, None])
    kept = torch.cat((takes[:, None], goes_on[:, :-1]), dim=1).cumprod(dim=1).bool()

    num_kept = kept.sum(dim=1)
    known = drawn.clamp(min=0).to(torch.int32)
    ids = torch.where(kept, known, drafts)
    # Columns that are no samples of a row repeat its last token: two writes to one place, clamped
    # at the end of the context, then write the same.
    last = (num_kept - 1).clamp(min=0)[:, None]
    ids = torch.where(columns <= last, ids, ids.gather(1, last))
    state.token_ids[slots[:, None], torch.minimum(places, places.gather(1, last))] = ids
    counts = kept & (drawn >= 0) & (state.edit_kinds[slots] & HAS_PENALTIES > 0)[:, None]
    where = (slots[:, None].expand_as(known), known.long())
    state.token_counts.index_put_(where, counts.to(torch.int32), accumulate=True)
    state.finished[slots] |= (kept & ends).any(dim=1)
    state.total_len[slots] = total + num_kept
    state.num_computed[slots] = first + (num_kept - 1).clamp(min=0)
    tokens = samples.in_line(torch.where(kept, drawn, -1), is_sample).to(torch.int32)
    if ring is not None:
        ring.push(tokens, logprobs, samples.drafts)
    return tokens
