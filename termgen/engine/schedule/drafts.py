"""The scheduler's part of speculation: how many places for drafts a row gets, and which of a landed
step's tokens are its own.

A row with drafts computes and draws several tokens in one step; the device keeps those that the
model draws as well, and one more. The host plans as if all stayed and corrects its counts when the
step lands. Engine thread only.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import zip_longest
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from termgen.engine.schedule.kv_cache import KVCacheManager
from termgen.engine.schedule.slot_table import SlotTable
from termgen.vocabulary.request import IntArray
from termgen.vocabulary.step import StepPlan, StepResult, first_samples


def places_for_drafts(
    table: SlotTable, rows: IntArray, most: int, budget: int, forced: IntArray | None = None
) -> IntArray:
    """[num_rows] drafts that each of these running rows may compute in a step: `most`, or as many
    as are forced [num_rows], where it has generated a token and computes no more than its newest,
    as far as its limit and the step's budget allow."""
    num_tokens, num_pending, limit, _, num_computed, _ = table.facts.take(rows, axis=1)
    known = num_tokens + num_pending
    wanted: IntArray = most * table.may_draft.take(rows).astype(np.int32)
    if forced is not None:
        wanted += forced
    each = max(0, (budget - len(rows)) // max(1, len(rows)))
    drafts: IntArray = np.clip(np.minimum(limit - known - 1, each), 0, wanted).astype(np.int32)
    drafts *= (known - num_computed == 1) & (known > table.num_prompt.take(rows))
    return drafts


def blocks_ahead(table: SlotTable, kv: KVCacheManager, slots: IntArray, num_ahead: int) -> IntArray:
    """[groups, num_rows] blocks that these rows lack for the positions that a drafter computes
    behind their own; none if there are too few for all."""
    target = table.num_computed[slots] + num_ahead
    missing: IntArray = np.maximum(kv.missing(slots, np.minimum(target, table.limit[slots] - 1)), 0)
    if int(missing.sum()) > kv.pool.num_free:
        missing[:] = 0
    return missing


def had_drafts(result: StepResult) -> bool:
    """True if a row of a step with places for drafts had any."""
    return result.num_drafted is None or bool(np.count_nonzero(result.num_drafted))


def take_places_back(table: SlotTable, slots: IntArray, places: IntArray) -> None:
    """Uncount the places of rows that had no drafts for them."""
    table.num_pending.put(slots, table.num_pending.take(slots) - places)
    table.num_computed.put(slots, table.num_computed.take(slots) - places)


class KeptTokens(NamedTuple):
    """Tokens that rows of a landed step keep, one or more of each."""

    token_ids: IntArray
    """Row after row."""
    samples: IntArray
    """Their indices among the step's samples."""
    counts: IntArray
    """[num_rows] tokens of each row."""
    drafted: IntArray
    """[num_rows] drafts that were computed for each row."""
    places: IntArray
    """[num_rows] places for drafts that each row had in the plan."""

    def guesses(self, may_draft: npt.NDArray[np.bool_]) -> GuessedTokens:
        """Those among them that were guessed: a token that a grammar forces is no guess.
        may_draft: [num_rows]"""
        return GuessedTokens(self.drafted * may_draft, (self.counts - 1) * may_draft)


class GuessedTokens(NamedTuple):
    """How many of each row's tokens in a landed step were guessed."""

    drafted: IntArray
    """[num_rows] guesses that were computed for each row."""
    accepted: IntArray
    """[num_rows] those that stayed."""


@dataclass(slots=True)
class DraftStats:
    """Counters of all requests since start. Tokens that a grammar forces are no drafts here."""

    num_drafts: int = 0
    """Rows of steps that had drafts."""
    num_draft_tokens: int = 0
    """Drafts that the device computed."""
    num_accepted_tokens: int = 0
    """Drafts that stayed."""
    drafted_per_pos: tuple[int, ...] = ()
    """How many of `num_draft_tokens` were the first, second, ... draft of their row."""
    accepted_per_pos: tuple[int, ...] = ()

    def count_drafts(self, guessed: GuessedTokens) -> None:
        drafted, accepted = guessed
        self.num_drafts += int(np.count_nonzero(drafted))
        self.num_draft_tokens += int(drafted.sum())
        self.num_accepted_tokens += int(accepted.sum())
        positions = np.arange(drafted.max(initial=0))
        self.drafted_per_pos = _with_rows(self.drafted_per_pos, drafted, positions)
        self.accepted_per_pos = _with_rows(self.accepted_per_pos, accepted, positions)


def _with_rows(totals: tuple[int, ...], rows: IntArray, positions: IntArray) -> tuple[int, ...]:
    """Totals by position, with one more at the first positions of each row, as many as it has."""
    more = (positions < rows[:, None]).sum(axis=0).tolist()
    return tuple(map(sum, zip_longest(totals, more, fillvalue=0)))


def kept_tokens(plan: StepPlan, result: StepResult, rows: IntArray) -> KeptTokens:
    """rows: those of the plan that sampled and have their slots."""
    counts, places = result.num_sampled[rows], plan.num_draft_tokens[rows]
    within = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
    begins = np.cumsum(result.num_sampled) - result.num_sampled
    drafted = plan.num_draft_tokens if result.num_drafted is None else result.num_drafted
    first = first_samples(drafted)
    return KeptTokens(
        result.token_ids[np.repeat(begins[rows], counts) + within],
        (np.repeat(first[rows], counts) + within).astype(np.int32),
        counts,
        drafted[rows],
        places,
    )


def append_kept(
    table: SlotTable, slots: IntArray, kept: KeptTokens, guessed: GuessedTokens
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.intp]]:
    """Add landed tokens to these rows, and uncount the drafts that did not stay. Returns as
    `SlotTable.append_tokens`: the device cuts a row's tokens behind its end."""
    table.drafts[:, slots] += np.stack(guessed)
    lengths, num_pending, limit, stop_after = table.facts_of_ends.take(slots, axis=1)
    ends = np.cumsum(kept.counts)
    first = table.row_of_ids.take(slots) + lengths - (ends - kept.counts)
    table.token_ids.put(
        np.repeat(first, kept.counts) + np.arange(len(kept.token_ids)), kept.token_ids
    )
    lengths += kept.counts
    table.num_tokens.put(slots, lengths)
    table.num_pending.put(slots, num_pending - 1 - kept.places)
    table.num_computed[slots] -= 1 + kept.places - kept.counts
    return table.ended(slots, kept.token_ids.take(ends - 1), lengths, limit, stop_after)
