"""The half of a drafter that every one has: how many drafts of a row pay, from what they gave.

Runs on the host, in memory that it reads: for a CPU.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from termgen.engine.device.drafting.base import DraftedRows, DraftModel
from termgen.engine.device.drafting.payoff import DraftPayoff
from termgen.engine.device.sampling.metadata import HAS_GRAMMAR
from termgen.vocabulary.events import DraftChoice
from termgen.vocabulary.request import IntArray
from termgen.vocabulary.step import StepPlan, StepResult


class PayingDrafter:
    """Learns from steps. Rows under a grammar get no guesses: the host masks one place of a row,
    and what is forced before it."""

    model: DraftModel | None = None
    lengths: Sequence[int] = ()
    num_wanted = 0
    may_idle = is_idle = False

    def __init__(self, num_tokens: int, *, num_slots: int, num_kinds: int = 1) -> None:
        self.num_tokens = num_tokens
        self._payoff = DraftPayoff(num_slots, num_kinds)
        self._kinds = np.zeros(num_slots, np.int64)
        """Kind of each row's drafts."""
        self._lengths = np.zeros(num_slots, np.int64)
        """Tokens of each row when its step began."""
        self.choice: DraftChoice | None = None

    def places(self, plan: StepPlan, state: DraftedRows, lengths: Sequence[int]) -> IntArray:
        """See `Drafter`: as many as there are, so that none is computed in vain."""
        return state.num_drafts.numpy()[plan.slots].astype(np.int32)

    def landed(self, plan: StepPlan, result: StepResult) -> None:
        """See `Drafter`: `step_ended` saw all of it."""

    def _choose(
        self, slots: npt.NDArray[np.int32], num_found: npt.NDArray[np.int64], num_rows: int
    ) -> npt.NDArray[np.int64]:
        """[n] drafts of these rows in the next step, and the reason in `choice`. See
        `DraftPayoff.choose`."""
        offer = (slots, num_found, self._kinds[slots], num_rows)
        counts = self._payoff.choose(*offer)
        self.choice = self._payoff.explain(*offer, counts, self.num_tokens)
        return counts

    def _learn(self, plan: StepPlan, took_ns: int, state: DraftedRows) -> tuple[IntArray, int]:
        """Note what a step's drafts gave. Returns the slots that may get new ones, and the number
        of the step's rows that go on."""
        self.choice = None
        for added in plan.added:
            self._payoff.begin(added.slot)
            self._lengths[added.slot] = len(added.token_ids)
        lengths = state.total_len.numpy()
        slots, is_over = plan.slots, state.finished.numpy()[plan.slots]
        gained = lengths[slots] - self._lengths[slots]
        self._lengths[slots] = lengths[slots]
        is_bound = state.edit_kinds.numpy()[slots] & HAS_GRAMMAR > 0
        goes_on = (gained > 0) & ~is_over & ~is_bound
        for row in np.flatnonzero(goes_on).tolist():
            slot, num_drafts = int(slots[row]), int(plan.num_draft_tokens[row])
            kind = int(self._kinds[slot])
            self._payoff.note_row(slot, num_drafts, int(gained[row]) - 1, kind)
        if plan.is_decode:
            self._payoff.note_step(plan.total_tokens, took_ns)
        return slots[goes_on], int((~is_over).sum())


class ModelDrafter(PayingDrafter):
    """The half of a drafter whose drafts a model makes."""

    def __init__(self, model: DraftModel, num_tokens: int, *, num_slots: int) -> None:
        super().__init__(num_tokens, num_slots=num_slots)
        self.model = model
        self.num_wanted = num_tokens

    def step_ended(self, plan: StepPlan, took_ns: int, state: DraftedRows) -> None:
        """See `Drafter`."""
        num_drafts = state.num_drafts.numpy()
        made = num_drafts.copy()
        slots, num_rows = self._learn(plan, took_ns, state)
        num_drafts[plan.slots] = 0
        if len(slots):
            most = np.full(len(slots), self.num_tokens)
            counts = self._choose(slots, most, num_rows)
            self.num_wanted = int(counts.max())
            num_drafts[slots] = np.minimum(counts, made[slots])
