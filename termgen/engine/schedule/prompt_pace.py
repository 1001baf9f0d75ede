"""How many prompt tokens a step computes where other requests generate.

A step ends when all of it is computed, so every request that generates waits for the prompts in
it. Such a step is therefore bounded by time: its prompts take as long as two steps without prompts,
or as many as there are prompts that could be computed now. So one long prompt makes the others'
tokens come at a third of their pace instead of stopping them, and a burst of prompts, each of which
would wait for all smaller steps before its own, is computed in large steps.

Within the bound each prompt has an equal part. Those that end within their part come first, so a
short prompt does not wait for a long one; the rest goes to the long ones in order of precedence,
because equal parts of them would all end late.

Both times are measured: what a step without prompts takes, and what each prompt token adds to it.
No torch, no clock.
"""

from __future__ import annotations

from collections.abc import Sequence

from termgen.vocabulary.step import StepPlan, StepResult

LEAST_STEPS = 2
"""Steps without prompts in whose time a step's prompts are computed, at least."""
NEWEST_WEIGHT = 0.1
"""Weight of the newest step in the means."""


class PromptShare:
    """Prompt tokens that one step may still compute."""

    def __init__(self, num_tokens: float) -> None:
        self.num_tokens = num_tokens
        self._more = num_tokens / 2
        """Tokens beyond, if they end a prompt: a step of its own would hold up others again."""

    def take(self, num_missing: int, budget: int) -> int:
        """Tokens of a prompt that lacks `num_missing`, at most `budget`."""
        count = min(num_missing, budget)
        if not self.num_tokens:
            return 0
        if count > self.num_tokens + self._more:
            count = int(self.num_tokens)
        self.num_tokens = max(0, self.num_tokens - count)
        return count


class PromptPace:
    """Measured time of landed steps, and the prompt tokens of the next step that follow from it.

    Beyond the time of a step without prompts, one with n prompt tokens takes a + b * n: a line
    through the newest steps, by least squares with decaying weights. While their sizes are too much
    alike to fit a slope, `b` keeps its last value. The share is what the bound on the time allows.
    But where `a` is large, as without CUDA graphs, small shares would make more steps and none of
    them short: so the tokens take at least the time of all else in the step. A stale `b` could then
    be wrong for long, so every other share is halved until the sizes differ enough for a new fit.
    """

    def __init__(self) -> None:
        self._step_ns = 0.0
        """Mean time of a step without prompts; 0 before the first."""
        self._sums: tuple[float, ...] = (0.0,) * 5
        """Over the steps with prompts, weighted: 1, n, t, n * n, n * t."""
        self._fixed_ns = self._token_ns = 0.0
        """The line's `a` and `b`; `b` is 0 before the first fit."""
        self._has_fit = self._is_halved = False
        """The newest sizes differ enough to fit the slope; the newest share was halved."""

    def landed(self, plan: StepPlan, result: StepResult) -> None:
        """Measure a step. One with constrained rows may have waited for their masks."""
        spent_ns = float(result.ended_ns - result.started_ns)
        if spent_ns <= 0 or plan.constrained is not None:
            return
        if plan.is_decode:
            newest = NEWEST_WEIGHT if self._step_ns else 1.0
            self._step_ns += newest * (spent_ns - self._step_ns)
            return
        n = plan.total_tokens - plan.num_decode_rows - plan.num_drafts
        kept = (total * (1.0 - NEWEST_WEIGHT) for total in self._sums)
        added = (1.0, n, spent_ns, n * n, n * spent_ns)
        self._sums = tuple(old + new for old, new in zip(kept, added, strict=True))
        weight, *sums = self._sums
        mean_n, mean_t, nn, nt = (total / weight for total in sums)
        self._has_fit = nn - mean_n**2 > (mean_n / 4) ** 2
        if self._has_fit:
            self._token_ns = max(0.0, (nt - mean_n * mean_t) / (nn - mean_n**2))
        self._fixed_ns = mean_t - self._token_ns * mean_n

    @property
    def is_measured(self) -> bool:
        """True once both times are known."""
        return bool(self._token_ns and self._step_ns)

    def fills(self, num_tokens: int, num_prompts: int) -> bool:
        """True if the share of so many prompts is at least `num_tokens`, however long they are."""
        room_ns = num_prompts * self._step_ns - (self._fixed_ns - self._step_ns)
        return room_ns >= num_tokens * self._token_ns

    def divide(self, missing: Sequence[int], budget: int) -> list[int]:
        """Tokens of the next step for each prompt, where others generate and times are measured.

        missing: tokens that each prompt lacks, by precedence. budget: most tokens in all.
        """
        if not missing:
            return []
        share = PromptShare(self._share(len(missing)))
        part = share.num_tokens / len(missing)
        counts = [0] * len(missing)
        for i in sorted(range(len(missing)), key=lambda i: missing[i] > part):
            counts[i] = share.take(missing[i], budget)
            budget -= counts[i]
        return counts

    def _share(self, num_prompts: int) -> int:
        """Prompt tokens of the next step."""
        assert self.is_measured
        fixed_ns = self._fixed_ns - self._step_ns
        share_ns = max(LEAST_STEPS, num_prompts) * self._step_ns - fixed_ns
        if self._fixed_ns > share_ns:
            share_ns = self._fixed_ns
            self._is_halved = not (self._has_fit or self._is_halved)
            share_ns /= 1 + self._is_halved
        return max(1, round(share_ns / self._token_ns))
