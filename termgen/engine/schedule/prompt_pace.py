"""How many prompt tokens a step computes where other requests generate.

A step ends when all of it is computed, so everyone who generates waits for the prompts in it. A
prompt's share of such a step is therefore bounded by time: by that of two steps without prompts,
or of as many as there are requests that wait for their first token. So one long prompt makes the
others' tokens come at a third of their pace instead of stopping them, and a burst of prompts, each
of which would wait for all smaller steps before its own, is read in large steps.

Both times are measured: what a step without prompts takes, and what each prompt token adds to it.
No torch, no clock.
"""

from __future__ import annotations

import math

from termgen.vocabulary.step import StepPlan, StepResult

LEAST_STEPS = 2
"""Steps without prompts in whose time a step's prompts are computed, at least."""
NEWEST_WEIGHT = 0.1
"""Weight of the newest step in the means."""


class PromptShare:
    """Prompt tokens that one step may still take."""

    def __init__(self, num_tokens: float = math.inf) -> None:
        self.num_tokens = num_tokens
        self._more = num_tokens / 2
        """Tokens beyond, if they end a prompt: a step of its own would hold up others again."""

    def take(self, num_missing: int) -> int:
        """Tokens of a prompt that lacks so many."""
        count = num_missing
        if not self.num_tokens:
            return 0
        if num_missing > self.num_tokens + self._more:
            count = int(self.num_tokens)
        self.num_tokens = max(0, self.num_tokens - count)
        return count


class PromptPace:
    """Time of the steps that have landed, and the share that follows from it.

    Beyond the time of a step without prompts, one with n prompt tokens takes a + b * n: a line
    through the newest steps, by least squares with weights that decay. `b` is kept while their
    sizes are too much alike to tell it. The share is what the bound on the time allows. But where
    `a` is large, as without CUDA graphs, small shares would make more steps and none of them short:
    so the tokens take at least the time of all else in the step. With an old `b` that could be
    wrong for long, so every other share is then half of it, until the sizes tell the line again.
    """

    def __init__(self) -> None:
        self._step_ns = 0.0
        """Mean time of a step without prompts; 0 before the first."""
        self._sums: tuple[float, ...] = (0.0,) * 5
        """Over the steps with prompts, weighted: 1, n, t, n * n, n * t."""
        self._fixed_ns = self._token_ns = 0.0
        """The line; its slope is 0 before it is known."""
        self._is_told = self._halves = False
        """The newest sizes tell the slope; the next share is half of what else it would be."""

    def landed(self, plan: StepPlan, result: StepResult) -> None:
        """Measure a step. One with constrained rows may have waited for their masks."""
        spent_ns = float(result.ended_ns - result.started_ns)
        if spent_ns <= 0 or plan.constrained is not None:
            return
        if plan.is_decode:
            newest = NEWEST_WEIGHT if self._step_ns else 1.0
            self._step_ns += newest * (spent_ns - self._step_ns)
            return
        n = plan.total_tokens - plan.num_decode_rows
        kept = (total * (1.0 - NEWEST_WEIGHT) for total in self._sums)
        added = (1.0, n, spent_ns, n * n, n * spent_ns)
        self._sums = tuple(old + new for old, new in zip(kept, added, strict=True))
        weight, *sums = self._sums
        mean_n, mean_t, nn, nt = (total / weight for total in sums)
        self._is_told = nn - mean_n**2 > (mean_n / 4) ** 2
        if self._is_told:
            self._token_ns = max(0.0, (nt - mean_n * mean_t) / (nn - mean_n**2))
        self._fixed_ns = mean_t - self._token_ns * mean_n

    def share(self, *, num_generating: int, num_prompts: int) -> PromptShare:
        """Share of the next step's prompts. num_prompts: requests without their first token."""
        if not (num_generating and self._token_ns and self._step_ns):
            return PromptShare()
        fixed_ns = self._fixed_ns - self._step_ns
        share_ns = max(LEAST_STEPS, num_prompts) * self._step_ns - fixed_ns
        if self._fixed_ns > share_ns:
            share_ns = self._fixed_ns
            self._halves = not (self._is_told or self._halves)
            share_ns /= 1 + self._halves
        return PromptShare(max(1, round(share_ns / self._token_ns)))
