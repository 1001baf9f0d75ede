"""Requests that want a vector of their prompt: what steps pool, and how such requests end.

They are scheduled like all others, sample nothing, and end when the step with their prompt's last
token lands. A row that was preempted or aborted meanwhile is dropped as its tokens would be.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from termgen.engine.schedule.slot_table import SlotTable
from termgen.vocabulary.device.pooling import PoolingKind, PoolingSpan
from termgen.vocabulary.request import IntArray
from termgen.vocabulary.step import StepPlan, StepResult

if TYPE_CHECKING:
    from termgen.vocabulary.device.pooling import FloatVector


def pooling_spans(
    table: SlotTable, slots: IntArray, counts: IntArray
) -> tuple[tuple[PoolingSpan, ...], int]:
    """(tokens of this step whose hidden states are pooled, rows that want a vector). The counts are
    already counted in `table`."""
    kinds = table.pooling[slots]
    rows = np.flatnonzero(kinds)
    spans = []
    for row in rows.tolist():
        slot, count = int(slots[row]), int(counts[row])
        end, length = int(table.num_computed[slot]), int(table.num_prompt[slot])
        kind, start = PoolingKind(int(kinds[row])), end - count
        is_first = kind is PoolingKind.CLS and start == 0
        is_used = end == length or is_first or kind is PoolingKind.MEAN
        if is_used:
            spans.append(PoolingSpan(row, start, count, kind, length if end == length else 0))
    return tuple(spans), len(rows)


def landed_vectors(
    table: SlotTable, plan: StepPlan, result: StepResult
) -> list[tuple[int, FloatVector]]:
    """(slot, vector) of each row whose prompt this step has completed, that still has its slot,
    and whose vector has no NaN."""
    ended = [span.row for span in plan.pooled if span.length]
    if not ended:
        return []
    assert result.pooled is not None, "the device pools what the plan names"
    is_sound = table.epoch[plan.slots] == plan.epochs
    if result.corrupt is not None:
        is_sound[result.corrupt] = False
    pairs = zip(ended, result.pooled, strict=True)
    return [(int(plan.slots[row]), vector) for row, vector in pairs if is_sound[row]]
