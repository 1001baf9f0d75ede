"""Drafts from a row's own text, looked up on the device: `ngram` for rows that the host cannot see.

Finds what `NgramDrafter.guess` does, with operations whose shapes follow from the number of rows
alone, so that they can be part of a recorded step.
"""

from __future__ import annotations

import torch

from termgen.engine.device.drafting.base import DraftedBatch, DraftedRows, TargetStates
from termgen.engine.device.sampling.metadata import HAS_GRAMMAR


class PromptLookup:
    """Looks up drafts at the end of every step: a `DraftModel` that has no layers."""

    kept_layers: tuple[int, ...] = ()
    reads_states = False
    is_lookup = True
    num_ahead = 0

    def __init__(
        self,
        *,
        shortest: int,
        longest: int,
        max_rows: int,
        max_model_len: int,
        device: torch.device,
        by_kernels: bool,
    ) -> None:
        """shortest, longest: tokens that must have been there before."""
        self._shortest, self._longest = shortest, longest
        self._workspace = None
        if by_kernels:
            from termgen.engine.device.kernels.drafting.prompt_lookup import LookupWorkspace

            self._workspace = LookupWorkspace(
                max_rows=max_rows, max_model_len=max_model_len, device=device
            )

    def draft(
        self,
        batch: DraftedBatch,
        states: TargetStates,
        kv_caches: list[torch.Tensor],
        rows: DraftedRows,
        num_drafts: int,
    ) -> None:
        """See `DraftModel`. Rows under a grammar get no drafts: the host masks one place of a
        row."""
        lengths = {"shortest": self._shortest, "longest": self._longest}
        if self._workspace is None:
            look_up_with_torch(batch.slots, rows, num_drafts=num_drafts, **lengths)
            return
        # Fast path, skip on a first reading: the same in one kernel.
        from termgen.engine.device.kernels.drafting.prompt_lookup import look_up

        look_up(batch.slots, rows, self._workspace, num_drafts=num_drafts, **lengths)


def look_up_with_torch(
    slots: torch.Tensor,  # [B] int64, all different but for padded rows, which are finished
    state: DraftedRows,
    *,
    num_drafts: int,
    shortest: int,
    longest: int,
) -> None:
    """The reference."""
    max_tokens = state.token_ids.shape[1]
    ids, total = state.token_ids[slots], state.total_len[slots]
    end = (total - 1).clamp(0, max_tokens - 1)
    places = torch.arange(max_tokens, device=ids.device)
    is_same = places < end[:, None]
    lengths = torch.zeros_like(ids, dtype=torch.int64)
    for i in range(min(longest, max_tokens)):
        wanted = ids.gather(1, (end - i).clamp(min=0)[:, None])
        is_same = is_same & (places >= i) & (torch.roll(ids, i, dims=1) == wanted)
        lengths += is_same
    # The longest match, and of equal ones the newest.
    found, behind = (lengths * max_tokens + places).max(dim=1)
    behind += 1
    is_found = found // max_tokens >= shortest
    may_draft = ~state.finished[slots] & (state.edit_kinds[slots] & HAS_GRAMMAR == 0)
    counts = (max_tokens - total).clamp(0, num_drafts) * (is_found & may_draft)
    drafts = torch.arange(num_drafts, device=ids.device)
    period = (total - behind).clamp(min=1)[:, None]
    sources = (behind[:, None] + drafts % period).clamp(max=max_tokens - 1)
    targets = (total[:, None] + drafts).clamp(max=max_tokens - 1)
    is_draft = drafts < counts[:, None]
    # Behind its last draft a row writes what is there.
    kept = torch.where(is_draft, ids.gather(1, sources), ids.gather(1, targets))
    last = (counts - 1).clamp(min=0)[:, None]
    targets = torch.minimum(targets, targets.gather(1, last))
    kept = torch.where(drafts <= last, kept, kept.gather(1, last))
    state.token_ids[slots[:, None], targets] = kept
    state.num_drafts[slots] = counts
