"""The scheduler's part of speculation: how many places for drafts a row gets, and which of a landed
step's tokens are its own.

A row with drafts computes and draws several tokens in one step; the device keeps those that the
model draws as well, and one more. The host plans as if all stayed and corrects its counts when the
step lands. Engine thread only.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

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
    ends: IntArray
    """[num_rows] index in `token_ids` behind each row's last."""
    order: IntArray
    """[num_tokens] their indices in `token_ids`, to be added to an offset of each row's."""

    def guesses(self, may_draft: npt.NDArray[np.bool_]) -> GuessedTokens:
        """Those among them that were guessed: a token that a grammar forces is no guess.
        may_draft: [num_rows]"""
        return GuessedTokens(self.drafted * may_draft, (self.counts - 1) * may_draft)

    def indices(self, firsts: IntArray) -> npt.NDArray[np.integer[Any]]:
        """[num_tokens] where these tokens lie if each row's begin at `firsts` [num_rows]."""
        return np.repeat(firsts + self.counts - self.ends, self.counts) + self.order


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
    _drafted: list[int] = field(default_factory=list)
    """Rows of steps by how many drafts each had."""
    _accepted: list[int] = field(default_factory=list)
    """The same rows by how many of their drafts stayed."""

    def count_drafts(self, guessed: GuessedTokens) -> None:
        size = 1 + int(guessed.drafted.max(initial=0))
        for totals, counts in zip((self._drafted, self._accepted), guessed, strict=True):
            totals += [0] * (size - len(totals))
            for num_tokens, num_rows in enumerate(np.bincount(counts).tolist()):
                totals[num_tokens] += num_rows
        self.num_drafts = sum(self._drafted[1:])
        self.drafted_per_pos = _per_position(self._drafted)
        self.accepted_per_pos = _per_position(self._accepted)
        self.num_draft_tokens = sum(self.drafted_per_pos)
        self.num_accepted_tokens = sum(self.accepted_per_pos)


def _per_position(rows: list[int]) -> tuple[int, ...]:
    """Tokens by position from rows by their number of tokens: a row has one at each position below
    that."""
    return tuple(accumulate(rows[:0:-1]))[::-1]


def kept_tokens(plan: StepPlan, result: StepResult, rows: IntArray | None) -> KeptTokens:
    """rows: those of the plan that sampled and have their slots; None: all."""
    drafted = plan.num_draft_tokens if result.num_drafted is None else result.num_drafted
    firsts, places = first_samples(drafted), plan.num_draft_tokens
    counts, token_ids = result.num_sampled, result.token_ids
    ends = counts.cumsum()
    if rows is not None:
        begins = (ends - counts)[rows]
        counts, drafted, firsts, places = counts[rows], drafted[rows], firsts[rows], places[rows]
        ends = counts.cumsum()
    kept = KeptTokens(
        token_ids, token_ids, counts, drafted, places, ends, np.arange(ends[-1] if len(ends) else 0)
    )
    if rows is not None:
        kept = kept._replace(token_ids=token_ids[kept.indices(begins)])
    return kept._replace(samples=kept.indices(firsts).astype(np.int32))


def append_kept(
    table: SlotTable, slots: IntArray, kept: KeptTokens, guessed: GuessedTokens
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.intp]]:
    """Add landed tokens to these rows, and uncount the drafts that did not stay. Returns as
    `SlotTable.append_tokens`: the device cuts a row's tokens behind its end."""
    drafts, counts = table.drafts, kept.counts
    drafts[0].put(slots, drafts[0].take(slots) + guessed.drafted)
    drafts[1].put(slots, drafts[1].take(slots) + guessed.accepted)
    lengths, num_pending, limit, stop_after, num_computed, _ = table.facts.take(slots, axis=1)
    table.token_ids.put(kept.indices(table.row_of_ids.take(slots) + lengths), kept.token_ids)
    lengths += counts
    counted = 1 + kept.places
    table.num_tokens.put(slots, lengths)
    table.num_pending.put(slots, num_pending - counted)
    table.num_computed.put(slots, num_computed - counted + counts)
    return table.ended(slots, kept.token_ids.take(kept.ends - 1), lengths, limit, stop_after)
