"""Collects the parts of a step and freezes them into a `StepPlan`.

One builder lives for one `Scheduler.schedule()` call, on the engine thread.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from termgen.engine.schedule.constraints import rows_with_grammar
from termgen.engine.schedule.slot_table import SlotTable
from termgen.vocabulary.request import IntArray, Request
from termgen.vocabulary.step import AddedRow, PromptSpan, SamplingNeeds, StepPlan


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
    added: list[AddedRow] = field(default_factory=list)

    def add_blocks(self, slot: int, start: int, blocks: list[int]) -> None:
        """Extend a slot's block table from index `start`."""
        self.block_slots += [slot] * len(blocks)
        self.block_positions += range(start, start + len(blocks))
        self.block_ids += blocks

    def add_row(self, request: Request, num_computed: int) -> None:
        """Add a request that has just got a slot."""
        self.added.append(
            AddedRow(
                slot=request.slot,
                epoch=request.epoch,
                token_ids=request.token_ids,
                num_prompt_tokens=request.num_prompt_tokens,
                num_computed_tokens=num_computed,
                max_total_tokens=request.max_total_tokens,
                stop_token_ids=tuple(sorted(request.stop_token_ids)),
                params=request.params,
                has_grammar=request.grammar is not None,
                seed=request.seed,
                bad_token_ids=request.bad_token_ids,
            )
        )

    def build(
        self,
        step_id: int,
        table: SlotTable,
        *,
        slots: IntArray,
        counts: IntArray,
        released: tuple[int, ...],
    ) -> StepPlan:
        """The plan of a step that computes `counts` tokens of `slots`, already counted in `table`.

        Rows with one query token come first: attention treats them as one uniform batch.
        """
        is_long = counts > 1
        if is_long.any():
            order = np.argsort(is_long, kind="stable")
            slots, counts = slots[order], counts[order]
        max_prompt_logprobs = int(table.num_prompt_logprobs[slots].max())
        spans = _prompt_spans(table, slots, counts) if max_prompt_logprobs >= 0 else ()
        num_computed = table.num_computed[slots] - counts
        is_decode = (counts == 1) & (num_computed >= table.num_prompt[slots])
        constrained = rows_with_grammar(table, slots)
        return self.freeze(
            step_id,
            sampling_needs(table, slots, constrained),
            slots=slots,
            epochs=table.epoch[slots],
            num_tokens=counts,
            num_draft_tokens=np.zeros_like(counts),
            num_computed=num_computed,
            num_decode_rows=int(np.count_nonzero(is_decode)),
            released=released,
            constrained=constrained,
            prompt_spans=spans,
            max_prompt_logprobs=max(0, max_prompt_logprobs),
        )

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
            sampling=sampling,
            constrained=constrained,
            prompt_spans=prompt_spans,
            max_prompt_logprobs=max_prompt_logprobs,
        )


_NO_IDS: IntArray = np.zeros(0, np.int32)
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
