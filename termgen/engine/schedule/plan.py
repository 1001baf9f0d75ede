"""Step plans, and what is decided with each: block tables, copies of states, sampler features.

A `PlanBuilder` lives for one call of `Scheduler.schedule`. `decode_step` makes the most common
plan by whole columns. Engine thread only.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from termgen.engine.schedule.constraints import rows_with_grammar
from termgen.engine.schedule.kv_cache import KVCacheManager
from termgen.engine.schedule.pooled import pooling_spans
from termgen.engine.schedule.slot_table import SlotTable
from termgen.engine.schedule.state_cache import StateCache
from termgen.vocabulary.request import IntArray, Request
from termgen.vocabulary.step import AddedRow, PromptSpan, SamplingNeeds, StepPlan

_NO_IDS: IntArray = np.zeros(0, np.int32)


def drop_unseen(table: SlotTable, kv: KVCacheManager, slots: IntArray) -> None:
    """Give up the blocks that no later token of these slots sees. A step may compute the newest
    known token once more, for lack of its mask."""
    if kv.has_windows and len(slots):
        newest = np.minimum(table.num_computed[slots], table.num_tokens[slots] - 1)
        kv.drop_unseen(slots, newest)


def copy_states(
    table: SlotTable,
    states: StateCache,
    slots: IntArray,
    builder: PlanBuilder,
    *,
    has_drafts: bool,
) -> None:
    """Have the states of recurrent layers copied that stand where later requests may start.
    has_drafts: rows may have passed such a place within a step."""
    known, pending, _, _, computed, _ = table.facts.take(slots, axis=1)
    num_prompt = table.num_prompt[slots]
    least = states.least(slots, computed, known, pending) if has_drafts else computed
    due, ends = states.due(slots, computed, num_prompt, least)
    for i in due.tolist():
        slot, position = int(slots[i]), int(ends[i])
        is_try = has_drafts and pending[i] > 0
        place = states.copy(
            slot,
            position,
            is_answer=bool(position > num_prompt[i]),
            try_after=int(table.last_step[slot]) if is_try else None,
        )
        if place is not None:
            builder.copied_slots.append(slot)
            builder.copy_places.append(place)


def sampling_needs(
    table: SlotTable, slots: IntArray, constrained: IntArray | None
) -> SamplingNeeds:
    """Sampler features that these rows need. constrained: rows that sample under a grammar, which
    excludes prefill chunks before the last."""
    max_logprobs = int(table.num_logprobs[slots].max())
    return SamplingNeeds(
        all_greedy=not table.is_random[slots].any(),
        filters=bool(table.has_filter[slots].any()),
        grammar=constrained is not None,
        penalties=bool(table.has_penalties[slots].any()),
        min_tokens=bool(table.has_minimum[slots].any()),
        edits=bool(table.has_edits[slots].any()),
        max_logprobs=None if max_logprobs < 0 else max_logprobs,
    )


@dataclass(slots=True)
class PlanBuilder:
    """The parts of a plan that Python collects row by row."""

    block_slots: list[int] = field(default_factory=list)
    block_positions: list[int] = field(default_factory=list)
    block_ids: list[int] = field(default_factory=list)
    block_groups: list[int] = field(default_factory=list)
    copied_slots: list[int] = field(default_factory=list)
    copy_places: list[int] = field(default_factory=list)
    added: list[AddedRow] = field(default_factory=list)

    def add_blocks(self, slot: int, start: int, blocks: list[int], group: int = 0) -> None:
        """Extend a slot's block table in a group from index `start`."""
        self.block_groups += [group] * len(blocks)
        self.block_slots += [slot] * len(blocks)
        self.block_positions += range(start, start + len(blocks))
        self.block_ids += blocks

    def add_columns(
        self, groups: IntArray, slots: IntArray, positions: IntArray, blocks: list[int]
    ) -> None:
        """Add a block to each of these slots' block tables."""
        self.block_groups += groups.tolist()
        self.block_slots += slots.tolist()
        self.block_positions += positions.tolist()
        self.block_ids += blocks

    def add_row(self, request: Request, num_computed: int, state_place: int = -1) -> None:
        """Add a request that has just got a slot."""
        self.added.append(
            AddedRow(
                slot=request.slot,
                epoch=request.epoch,
                token_ids=request.token_ids,
                num_prompt_tokens=request.num_prompt_tokens,
                num_computed_tokens=num_computed,
                state_place=state_place,
                max_total_tokens=request.max_total_tokens,
                stop_token_ids=tuple(sorted(request.stop_token_ids)),
                params=request.params,
                has_grammar=request.grammar is not None,
                seed=request.seed,
                bad_token_ids=request.bad_token_ids,
                is_pooled=request.pooling is not None,
            )
        )

    def build(
        self,
        step_id: int,
        table: SlotTable,
        *,
        slots: IntArray,
        counts: IntArray,
        drafts: IntArray,
        released: tuple[int, ...],
    ) -> StepPlan:
        """The plan of a step that computes `counts` tokens of `slots`, already counted in `table`,
        `drafts` among them.

        Rows with one query token come first: attention treats them as one uniform batch.
        """
        is_long = counts > 1
        if is_long.any():
            order = np.argsort(is_long, kind="stable")
            slots, counts, drafts = slots[order], counts[order], drafts[order]
        max_prompt_logprobs = int(table.num_prompt_logprobs[slots].max())
        spans = _prompt_spans(table, slots, counts) if max_prompt_logprobs >= 0 else ()
        num_computed = table.num_computed[slots] - counts
        is_decode = (counts - drafts == 1) & (num_computed >= table.num_prompt[slots])
        constrained = rows_with_grammar(table, slots)
        plan = self.freeze(
            step_id,
            sampling_needs(table, slots, constrained),
            slots=slots,
            epochs=table.epoch[slots],
            num_tokens=counts,
            num_draft_tokens=drafts,
            num_drafts=int(drafts.sum()),
            num_computed=num_computed,
            num_decode_rows=int(np.count_nonzero(is_decode)),
            released=released,
            constrained=constrained,
            prompt_spans=spans,
            max_prompt_logprobs=max(0, max_prompt_logprobs),
        )
        if not table.num_pooling:
            return plan
        pooled, num_rows = pooling_spans(table, slots, counts)
        return plan._replace(pooled=pooled, num_pooled_rows=num_rows)

    def freeze(
        self,
        step_id: int,
        sampling: SamplingNeeds,
        *,
        slots: IntArray,
        epochs: IntArray,
        num_tokens: IntArray,
        num_draft_tokens: IntArray,
        num_computed: IntArray,
        num_decode_rows: int,
        released: tuple[int, ...],
        constrained: IntArray | None = None,
        prompt_spans: tuple[PromptSpan, ...] = (),
        max_prompt_logprobs: int = 0,
        num_drafts: int = 0,
    ) -> StepPlan:
        """The plan with these columns, which must not be modified afterwards."""
        return StepPlan(
            step_id=step_id,
            slots=slots,
            epochs=epochs,
            num_tokens=num_tokens,
            num_draft_tokens=num_draft_tokens,
            num_computed=num_computed,
            num_decode_rows=num_decode_rows,
            released_slots=released,
            added=tuple(self.added),
            block_slots=_ids(self.block_slots),
            block_positions=_ids(self.block_positions),
            block_ids=_ids(self.block_ids),
            block_groups=_ids(self.block_groups) if any(self.block_groups) else None,
            copied_slots=_ids(self.copied_slots) if self.copied_slots else None,
            copy_places=_ids(self.copy_places) if self.copied_slots else None,
            sampling=sampling,
            constrained=constrained,
            prompt_spans=prompt_spans,
            max_prompt_logprobs=max_prompt_logprobs,
            num_drafts=num_drafts,
        )


_NO_IDS.flags.writeable = False


def _ids(values: list[int]) -> IntArray:
    return np.asarray(values, np.int32) if values else _NO_IDS


def _prompt_spans(table: SlotTable, slots: IntArray, counts: IntArray) -> tuple[PromptSpan, ...]:
    """Prompt tokens of this step whose successors' log-probabilities are requested.

    The last token of a prompt is in no span, as its successor is generated.
    """
    starts = table.num_computed[slots] - counts
    wanted = np.minimum(counts, table.num_prompt[slots] - 1 - starts)
    rows = np.flatnonzero((table.num_prompt_logprobs[slots] >= 0) & (wanted > 0))
    return tuple(PromptSpan(int(row), int(starts[row]), int(wanted[row])) for row in rows)
