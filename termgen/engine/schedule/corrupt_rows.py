"""Rows whose logits or vectors were no numbers: what they computed is found by no other request."""

from __future__ import annotations

from termgen.engine.schedule.kv_cache import KVCacheManager
from termgen.engine.schedule.slot_table import Fence, SlotTable
from termgen.vocabulary.request import IntArray
from termgen.vocabulary.step import StepPlan


def forget_corrupt(
    table: SlotTable, kv: KVCacheManager, fence: Fence, plan: StepPlan, rows: IntArray
) -> None:
    """Unpublish the KV of these rows: it holds NaN from an unknown block on. The blocks of a
    released row are fenced until this step has landed."""
    slots, epochs = plan.slots[rows], plan.epochs[rows]
    is_current = table.epoch[slots] == epochs
    for slot in slots[is_current].tolist():
        kv.forget(kv.held(slot))
    released = set(slots[~is_current].tolist())
    for _, slot, blocks in fence:
        if slot in released:
            kv.forget(blocks)
