"""The plan of a decode step, which has a token of every running row, made by whole columns.

A fast path: skip it on a first reading. It gives the plan and the bookkeeping of the general path
(a test compares them step by step). One check of all rows also gives the number of steps that it is
valid for. Engine thread only.
"""

from __future__ import annotations

import numpy as np

from termgen.engine.schedule.constraints import Constraints, rows_with_grammar
from termgen.engine.schedule.drafts import places_for_drafts
from termgen.engine.schedule.kv_cache import KVCacheManager
from termgen.engine.schedule.plan import PlanBuilder, copy_states, drop_unseen, sampling_needs
from termgen.engine.schedule.slot_table import Fence, SlotTable
from termgen.vocabulary.request import IntArray
from termgen.vocabulary.step import SamplingNeeds, StepPlan

NEVER = 1 << 62


class DecodeStep:
    """Reads and advances the scheduler's columns."""

    def __init__(
        self,
        table: SlotTable,
        kv: KVCacheManager,
        fence: Fence,
        constraints: Constraints,
        *,
        num_drafts: int,
        num_ahead: int,
        budget: int,
    ) -> None:
        """num_drafts: most drafts of a row in a step; num_ahead: see `SchedulerConfig`; budget:
        most tokens of a step."""
        self._table = table
        self._constraints = constraints
        self._kv = kv
        self._fence = fence
        self._most_drafts = num_drafts
        self._num_ahead = num_ahead
        self._budget = budget
        self._rows: IntArray = table.running
        """The batch of the cached facts. A request that joins or leaves creates a new array."""
        self._constrained: IntArray | None = None
        """Rows of the batch that have a grammar."""
        self._sampling: SamplingNeeds | None = None
        self._num_tokens = self._drafts = self._epochs = self._rows
        self._num_drafts = 0
        self._all_may_draft = False
        """Every row of the batch may have drafts and is behind its prompt."""
        self._computed: IntArray = self._rows
        """[num_rows] tokens computed before the next step."""
        self._next_step = -1
        """The step that the cached facts are valid for; the scheduler planned any other one."""
        self._steps_left = 0
        """Steps until a row needs a block or reaches its limit."""
        self._look_at_step = NEVER
        """The step whose landing may fill a block of some row, to be published in the prefix
        cache."""

    def plan(self, step_id: int, released: tuple[int, ...]) -> StepPlan | None:
        """The next step, counted as run; None, without side effects, if it is not such a step."""
        table = self._table
        if table.running is not self._rows:
            self._rows, self._sampling, self._steps_left = table.running, None, 0
            self._all_may_draft = False
        rows = self._rows
        if not (len(rows) and self._constraints.may_all_run_ahead(table)) or table.num_pooling:
            return None
        if table.num_constrained and self._constraints.forced_drafts(table, rows).any():
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
            num_decode_rows = len(rows)  # each was in such a step before
        assert self._sampling is not None
        num_computed, num_tokens = self._computed, self._num_tokens
        self._computed = num_computed + num_tokens
        self._steps_left -= 1
        self._next_step = step_id + 1
        table.num_computed.put(rows, self._computed)
        table.num_pending.put(rows, table.num_pending.take(rows) + num_tokens)
        table.last_step.put(rows, step_id)
        if self._fence.landed_step >= self._look_at_step:
            self._publish(rows)
        return builder.freeze(
            step_id,
            self._sampling,
            slots=rows,
            epochs=self._epochs,
            num_tokens=num_tokens,
            num_draft_tokens=self._drafts,
            num_drafts=self._num_drafts,
            num_computed=num_computed,
            num_decode_rows=num_decode_rows,
            released=released,
            constrained=self._constrained,
        )

    def forget(self) -> None:
        """Invalidate the cached facts: counts of rows were changed elsewhere."""
        self._steps_left = 0

    def _look(self, builder: PlanBuilder) -> bool:
        """Check that every row decodes, with as many drafts as the others, and for how many steps;
        give blocks to those that need one for the first. False, without side effects, if not."""
        table, kv, rows = self._table, self._kv, self._rows
        facts = table.facts.take(rows, axis=1)  # [num facts, num_rows]
        num_tokens, num_pending, limit, _, num_computed, epochs = facts
        known = num_tokens + num_pending
        steps = int(np.minimum.reduce(limit - known))
        if steps <= 0 or np.count_nonzero(known - num_computed != 1):
            return False
        drafts = 0
        if self._most_drafts:
            drafts = min(self._most_drafts, max(0, self._budget // len(rows) - 1))
            if not self._all_may_draft:
                may = np.minimum(known > table.num_prompt.take(rows), table.may_draft.take(rows))
                self._all_may_draft = bool(may.all())
            if steps <= drafts or not self._all_may_draft:
                places = places_for_drafts(table, rows, self._most_drafts, self._budget)
                drafts = int(places[0])
                if np.count_nonzero(places != drafts):
                    return False
            steps = 1  # what lands may change every count
        rooms = kv.num_blocks.take(rows, axis=1) * kv.block_size - num_computed
        beyond: IntArray | int = drafts
        if self._num_ahead:
            beyond = np.minimum(drafts + self._num_ahead, limit - num_computed - 2)
        groups, needy = (rooms <= beyond).nonzero()
        if self._most_drafts and np.count_nonzero(rooms + kv.block_size <= beyond):
            return False  # more than one block
        drop_unseen(table, kv, rows)
        if len(needy) > kv.pool.num_free:
            return False
        if len(needy):
            slots = rows.take(needy)
            builder.add_columns(groups, slots, *kv.append_one_each(groups, slots))
            rooms[groups, needy] += kv.block_size
        if kv.states is not None and (len(needy) or self._most_drafts):
            passing = rows if self._most_drafts else np.unique(rows.take(needy))
            has_drafts = self._most_drafts > 0
            copy_states(table, kv.states, passing, builder, has_drafts=has_drafts)
        room = np.minimum.reduce(rooms)
        self._steps_left = min(steps, int(np.minimum.reduce(room)))
        self._computed, self._epochs = num_computed, epochs
        self._look_at_step = self._fence.landed_step if kv.enable_prefix_caching else NEVER
        if self._sampling is None:
            self._constrained = rows_with_grammar(table, rows)
            self._sampling = sampling_needs(table, rows, self._constrained)
            self._num_drafts = -1
        if self._num_drafts != drafts * len(rows):
            self._num_drafts = drafts * len(rows)
            self._num_tokens = np.full_like(rows, 1 + drafts)
            self._drafts = np.full_like(rows, drafts)
        return True

    def _publish(self, rows: IntArray) -> None:
        """Publish the blocks whose tokens are all known to the host."""
        table, kv = self._table, self._kv
        landed = np.minimum(self._computed, table.num_settled(rows))
        missing = (kv.num_registered.take(rows) + 1) * kv.block_size - landed
        for row in (missing <= 0).nonzero()[0].tolist():
            slot = int(rows[row])
            kv.register(slot, int(landed[row]), table.request_at(slot), table.token_ids[slot])
            missing[row] += kv.block_size
        most = 1 + self._most_drafts  # tokens that a landed step adds to a row
        self._look_at_step = self._fence.landed_step + max(1, int(missing.min()) // most)
