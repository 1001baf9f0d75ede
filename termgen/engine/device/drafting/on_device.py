"""The host's half of a drafter whose drafts lie in a device's memory, which the host does not see.

Every row of a step has places for as many drafts, whether it has drafts for them or not. How many
pay is learned from steps that have landed, a few steps late.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from termgen.engine.device.drafting import payoff
from termgen.engine.device.drafting.base import DraftedRows, DraftModel
from termgen.engine.device.drafting.payoff import DraftPayoff
from termgen.vocabulary.events import DraftChoice, DraftReason
from termgen.vocabulary.request import IntArray
from termgen.vocabulary.step import StepPlan, StepResult

CHOSEN_FOR = 8
"""Steps of the same rows for which a number of drafts is chosen: choosing takes the host longer
than all else that it does for such a step."""
TOKEN_SHARE = 0.01
"""See `payoff.TOKEN_SHARE`: of a device that waits for its memory."""
CERTAIN = 0.9999
"""Share of a row's drafts that stay, where a grammar forces them."""
KEPT_WITHOUT = 0.997
"""See `payoff.KEPT_WITHOUT`: of a drafter that takes time to draft."""
LEAST_GAIN = 1.05
"""Tokens for their time that drafts must promise, with none as the measure: what is known of a
row's drafts is never quite that they are useless, and the time of a step never quite its time."""
REMEMBERED = 100_000
"""See `payoff.REMEMBERED`: the device is no one else's, and keeps its own time."""


class DeviceDrafter:
    """Chooses one of a few numbers of drafts for all rows of a step."""

    def __init__(self, model: DraftModel, num_tokens: int, *, num_slots: int) -> None:
        """num_tokens: most drafts of a row."""
        self.model: DraftModel | None = model
        self.may_idle = not model.is_lookup
        self.is_idle = False
        self.num_tokens = self.num_wanted = num_tokens
        self.lengths: Sequence[int] = sorted({num_tokens, num_tokens // 2} - {0})
        """Numbers of drafts to choose from, besides none."""
        self._payoff = DraftPayoff(
            num_slots,
            token_share=TOKEN_SHARE,
            remembered=REMEMBERED,
            kept_without=KEPT_WITHOUT if self.may_idle else payoff.KEPT_WITHOUT,
        )
        self._kinds = np.zeros(num_slots, np.int64)
        self._chosen_for: IntArray | None = None
        self._chosen, self._steps_left = DraftChoice(0, num_tokens, DraftReason.UNTRIED), 0
        self.choice: DraftChoice | None = None
        self._ahead: set[int] = set()
        """Steps in flight without drafts that make some: no measure of what none take."""

    def places(self, plan: StepPlan, state: DraftedRows, lengths: Sequence[int]) -> IntArray:
        """See `Drafter`."""
        if plan.slots is not self._chosen_for or self._steps_left <= 0:
            self._chosen_for, self._steps_left = plan.slots, CHOSEN_FOR
            self._chosen = self._choose(plan, lengths)
        self._steps_left -= 1
        self.choice = chosen = self._chosen
        if chosen.num_drafts and chosen.num_drafts not in lengths:
            self.choice = chosen = self._none_possible(plan)
        was_idle, self.is_idle = self.is_idle, self.may_idle and not chosen.num_drafts
        if was_idle and not self.is_idle and plan.constrained is None:
            self._ahead.add(plan.step_id)
            self.choice = chosen = DraftChoice(0, self.num_tokens, DraftReason.NONE_FOUND)
        return np.full(plan.num_rows, chosen.num_drafts, np.int32)

    def _none_possible(self, plan: StepPlan) -> DraftChoice:
        why = DraftReason.NO_RECORDING if plan.is_decode else DraftReason.PROMPTS
        return DraftChoice(0, self.num_tokens, why)

    def _choose(self, plan: StepPlan, lengths: Sequence[int]) -> DraftChoice:
        if not lengths:
            return self._none_possible(plan)
        rows, places = plan.num_rows, plan.num_draft_tokens
        for k in (0, *lengths[-1:]):
            if not self._payoff.has_seen_like(rows * (1 + k)):
                return DraftChoice(k, self.num_tokens, DraftReason.UNTRIED)
        share = self._payoff.share_right(plan.slots, self._kinds[plan.slots])
        if plan.constrained is not None:
            share[plan.constrained] = CERTAIN
        sizes = np.asarray([1, *(1 + k for k in lengths)])
        best, most = 0, 0.0
        rates, kept_shares = {}, {}
        times = self._payoff.times(rows * sizes)
        for k, took in zip((0, *lengths), times.tolist(), strict=True):
            drafts = np.minimum(places, k)
            # The sum of a row's powers of its share, 1 for its own token included.
            tokens = float(((1 - share ** (1 + drafts)) / (1 - share)).sum())
            if tokens / took > (most if best or not k else LEAST_GAIN * most):
                best, most = k, tokens / took
            rates[k] = 1e9 * tokens / took
            kept_shares[k] = (tokens - rows) / max(1, int(drafts.sum()))
        why = DraftReason.BEST if best else DraftReason.NO_GAIN
        shown = best or max(lengths, key=rates.__getitem__)
        of_shown = (shown, rates[shown], rates[0], kept_shares[shown])
        return DraftChoice(best, self.num_tokens, why, *of_shown)

    def step_ended(self, plan: StepPlan, took_ns: int, state: DraftedRows) -> None:
        """See `Drafter`: nothing is known before the step has landed."""

    def landed(self, plan: StepPlan, result: StepResult) -> None:
        """Learn from a step, planned with these places."""
        for added in plan.added:
            self._payoff.begin(added.slot)
        is_ahead = plan.step_id in self._ahead
        if self._ahead:  # steps land in order, but for those that failed
            self._ahead = {later for later in self._ahead if later > plan.step_id}
        if not plan.is_decode:
            return
        places = plan.num_draft_tokens
        is_guessed = result.num_sampled > 0
        if plan.constrained is not None:
            is_guessed[plan.constrained] = False
        rows = np.flatnonzero(is_guessed)
        kept = result.num_sampled[rows] - 1
        self._payoff.note_rows(plan.slots[rows], places[rows], kept)
        if is_ahead:
            return
        size = plan.num_rows * (1 + int(places.max())) if plan.num_drafts else plan.num_rows
        self._payoff.note_step(size, result.ended_ns - result.started_ns)
