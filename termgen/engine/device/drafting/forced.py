"""The drafter of an engine that guesses nothing: its only drafts are tokens that grammars force.

The host posts these, and a step takes them at its start (`PostedMasks.take_forced`), whichever
drafter there is.
"""

from __future__ import annotations

from collections.abc import Sequence

from termgen.engine.device.drafting.base import DraftedRows, DraftModel
from termgen.vocabulary.events import DraftChoice
from termgen.vocabulary.request import IntArray
from termgen.vocabulary.step import StepPlan, StepResult


class NoGuesses:
    """A `Drafter` for a CPU."""

    num_tokens = 0
    model: DraftModel | None = None
    num_wanted = 0
    lengths: Sequence[int] = ()
    may_idle = is_idle = False
    choice: DraftChoice | None = None

    def places(self, plan: StepPlan, state: DraftedRows, lengths: Sequence[int]) -> IntArray:
        """See `Drafter`."""
        counts: IntArray = state.num_drafts.numpy()[plan.slots]
        return counts

    def landed(self, plan: StepPlan, result: StepResult) -> None:
        """See `Drafter`: there is nothing to learn."""

    def step_ended(self, plan: StepPlan, took_ns: int, state: DraftedRows) -> None:
        """See `Drafter`: the number of a row's drafts is written where they are taken."""
