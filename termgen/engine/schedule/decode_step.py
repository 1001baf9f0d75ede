"""Plans the most common step in a few operations: every running row decodes one token.

The scheduler asks here first and plans any other step itself. What comes of it is the same, plan
and bookkeeping, which a test compares step by step. Engine thread only.

Most such steps go on with the rows of the one before, and nothing but their counts has changed. So
a look at all rows also tells for how many steps it holds; until then a step is planned without one.
"""

from __future__ import annotations

import numpy as np

from termgen.engine.schedule.constraints import may_all_run_ahead, rows_with_grammar
from termgen.engine.schedule.kv_cache import KVCacheManager
from termgen.engine.schedule.plan_builder import PlanBuilder, sampling_needs
from termgen.engine.schedule.slot_table import Fence, SlotTable
from termgen.vocabulary.request import IntArray
from termgen.vocabulary.step import SamplingNeeds, StepPlan

NEVER = 1 << 62


class DecodeStep:
    """Reads and advances the scheduler's columns."""

    def __init__(self, table: SlotTable, kv: KVCacheManager, fence: Fence) -> None:
        self._table = table
        self._kv = kv
        self._fence = fence
        self._rows: IntArray = table.running
        """The batch that the rest belongs to. A request that joins or leaves makes a new array."""
        self._constrained: IntArray | None = None
        """Which of them have a grammar."""
        self._sampling: SamplingNeeds | None = None
        self._ones = self._zeros = self._epochs = self._rows
        self._computed: IntArray = self._rows
        """[num_rows] tokens computed before the next step."""
        self._next_step = -1
        """The step that what is known here holds for; any other one was planned by the
        scheduler."""
        self._steps_left = 0
        """Steps in which no row needs a block or reaches its limit."""
        self._look_at_step = NEVER
        """The step whose landing may fill a block of some row, for the prefix cache to know."""

    def plan(self, step_id: int, released: tuple[int, ...]) -> StepPlan | None:
        """The next step, counted as run; None, and nothing done, where it is not such a step."""
        table = self._table
        if table.running is not self._rows:
            self._rows, self._sampling, self._steps_left = table.running, None, 0
        rows = self._rows
        if not (len(rows) and may_all_run_ahead(table)):
            return None
        builder = PlanBuilder()
        if (
            step_id != self._next_step
            or self._steps_left <= 0
            or self._fence.landed_step >= self._look_at_step
        ):
            if not self._look(builder):
                return None
            num_decode_rows = int(np.count_nonzero(self._computed >= table.num_prompt[rows]))
        else:
            num_decode_rows = len(rows)  # each of them was in a step like this before
        assert self._sampling is not None
        num_computed = self._computed
        self._computed = num_computed + 1
        self._steps_left -= 1
        self._next_step = step_id + 1
        table.num_computed.put(rows, self._computed)
        table.num_pending.put(rows, table.num_pending.take(rows) + 1)
        table.last_step.put(rows, step_id)
        if self._fence.landed_step >= self._look_at_step:
            self._publish(rows)
        return builder.freeze(
            step_id,
            self._sampling,
            slots=rows,
            epochs=self._epochs,
            num_tokens=self._ones,
            num_draft_tokens=self._zeros,
            num_computed=num_computed,
            num_decode_rows=num_decode_rows,
            released=released,
            constrained=self._constrained,
        )

    def forget(self) -> None:
        """Look again: counts of rows were changed elsewhere."""
        self._steps_left = 0

    def _look(self, builder: PlanBuilder) -> bool:
        """See whether every row decodes, and for how many steps; give blocks to those that need
        one for the first of these. False, with nothing done, where they do not."""
        table, kv, rows = self._table, self._kv, self._rows
        facts = table.facts.take(rows, axis=1)  # [num facts, num_rows]
        num_tokens, num_pending, limit, _, num_computed, epochs = facts
        known = num_tokens + num_pending
        steps = int(np.minimum.reduce(limit - known))
        if steps <= 0 or np.count_nonzero(known - num_computed != 1):
            return False
        room = kv.num_blocks.take(rows) * kv.block_size - num_computed
        needy = (room <= 0).nonzero()[0]
        if len(needy) > kv.pool.num_free:
            return False
        for slot in rows[needy].tolist():
            builder.add_blocks(slot, int(kv.num_blocks[slot]), [kv.append(slot)])
        room[needy] += kv.block_size
        self._steps_left = min(steps, int(np.minimum.reduce(room)))
        self._computed, self._epochs = num_computed, epochs
        self._look_at_step = self._fence.landed_step if kv.enable_prefix_caching else NEVER
        if self._sampling is None:
            self._constrained = rows_with_grammar(table, rows)
            self._sampling = sampling_needs(table, rows, self._constrained)
            self._ones, self._zeros = np.ones_like(rows), np.zeros_like(rows)
        return True

    def _publish(self, rows: IntArray) -> None:
        """Make blocks findable whose tokens the host has in full."""
        table, kv = self._table, self._kv
        landed = np.minimum(self._computed, table.num_tokens.take(rows))
        missing = (kv.num_registered.take(rows) + 1) * kv.block_size - landed
        for row in (missing <= 0).nonzero()[0].tolist():
            slot = int(rows[row])
            kv.register(slot, int(landed[row]), table.request_at(slot), table.token_ids[slot])
            missing[row] += kv.block_size
        # A landed step adds one token to a row at most.
        self._look_at_step = self._fence.landed_step + max(1, int(missing.min()))
