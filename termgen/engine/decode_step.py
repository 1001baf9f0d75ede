"""Plans the most common step in a few operations: every running row decodes one token.

The scheduler asks here first and plans any other step itself. What comes of it is the same, plan
and bookkeeping, which a test compares step by step. Engine thread only.
"""

from __future__ import annotations

import numpy as np

from termgen.engine.kv_cache import KVCacheManager
from termgen.engine.plan_builder import PlanBuilder, SamplingDemands
from termgen.engine.request import IntArray
from termgen.engine.slot_table import SlotTable
from termgen.engine.step import StepPlan


class DecodeStep:
    """Reads and advances the scheduler's columns."""

    def __init__(self, table: SlotTable, kv: KVCacheManager) -> None:
        self._table = table
        self._kv = kv
        self._running: IntArray = table.running
        """The batch that the next three belong to: they stay as they are while it runs."""
        self._demands: SamplingDemands | None = None
        self._ones = self._zeros = self._running

    def plan(self, step_id: int, released: tuple[int, ...]) -> StepPlan | None:
        """The next step, counted as run; None, and nothing done, where it is not such a step."""
        table, kv, running = self._table, self._kv, self._table.running
        if not len(running) or table.num_constrained:
            return None
        facts = table.facts[:, running]  # [num facts, num_rows], a copy
        num_tokens, num_pending, num_computed, limit, epochs = facts
        known = num_tokens + num_pending
        if not ((known - num_computed == 1) & (known < limit)).all():
            return None
        needy = (num_computed >= kv.num_blocks[running] * kv.block_size).nonzero()[0]
        if len(needy) > kv.pool.num_free:
            return None
        builder = PlanBuilder()
        for slot in running[needy].tolist():
            builder.add_blocks(slot, int(kv.num_blocks[slot]), [kv.append(slot)])
        written = num_computed + 1
        table.num_computed[running] = written
        table.num_pending[running] = num_pending + 1
        table.last_step[running] = step_id
        if kv.enable_prefix_caching:
            self._publish(running, np.minimum(written, num_tokens))
        if self._demands is None or running is not self._running:
            self._running, self._demands = running, SamplingDemands.of(table, running)
            self._ones, self._zeros = np.ones_like(running), np.zeros_like(running)
        return builder.freeze(
            step_id,
            self._demands,
            slots=running,
            epochs=epochs,
            num_tokens=self._ones,
            num_draft_tokens=self._zeros,
            num_computed=num_computed,
            released=released,
        )

    def _publish(self, running: IntArray, landed: IntArray) -> None:
        """Make blocks findable whose tokens, `landed` of each row, the host has in full."""
        table, kv = self._table, self._kv
        full = landed >= (kv.num_registered[running] + 1) * kv.block_size
        for row in full.nonzero()[0].tolist():
            slot = int(running[row])
            kv.register(slot, int(landed[row]), table.request_at(slot), table.token_ids[slot])
