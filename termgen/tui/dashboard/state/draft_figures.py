"""What guessed tokens gave in the latest steps: tokens per step, and how many came of them a
second."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from operator import attrgetter
from typing import Any, NamedTuple

from termgen.vocabulary.events import DraftChoice, StepRecord

WINDOW_NS = 2_000_000_000
"""Steps that ended within it, before the last one, are counted."""
_ENDED = attrgetter("ended_ns")


class DraftFigures(NamedTuple):
    """Figures of a window. The counts per second are 0 where it has one step alone."""

    choice: DraftChoice | None
    """How many drafts the last step had, and why; None where it had no place for any."""
    tokens_per_step: float | None
    """Tokens that a request got from a step that it decoded in; None where no step was one."""
    drafted_per_s: float
    kept_per_s: float
    given_up_per_s: float
    """Drafts that were computed and did not stay."""
    kept_share: float | None
    """None where no draft was computed."""

    def as_json(self) -> dict[str, Any]:
        """Plain values, shares from 0 to 1, None where nothing is known."""
        figures: dict[str, Any] = {
            "tokens_per_step": _rounded(self.tokens_per_step, 3),
            "drafted_per_s": round(self.drafted_per_s, 1),
            "kept_per_s": round(self.kept_per_s, 1),
            "given_up_per_s": round(self.given_up_per_s, 1),
            "kept_share": _rounded(self.kept_share, 4),
            "choice": None,
        }
        if (choice := self.choice) is not None:
            figures["choice"] = {
                "drafts": choice.num_drafts,
                "most": choice.most,
                "why": choice.why.value,
                "words": str(choice),
                "compared": choice.compared or None,
                "tokens_per_s": round(choice.rate, 1) if choice.compared else None,
                "tokens_per_s_without": round(choice.rate_without, 1) if choice.compared else None,
                "expected_kept_share": round(choice.kept_share, 4) if choice.compared else None,
            }
        return figures


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)


def latest(steps: Sequence[StepRecord]) -> Sequence[StepRecord]:
    """Those of the window and the one before them, whose counters they go on from."""
    begin = bisect_right(steps, steps[-1].ended_ns - WINDOW_NS, key=_ENDED)
    return steps[max(0, begin - 1) :]


def draft_figures(steps: Sequence[StepRecord]) -> DraftFigures | None:
    """Figures of the newest of these steps, oldest first; None where they had no drafts, and the
    last one no place for any. A record's counters include its own step."""
    if not steps:
        return None
    first, *counted = latest(steps)
    last = steps[-1]
    drafted = last.num_draft_tokens - first.num_draft_tokens
    kept = last.num_accepted_tokens - first.num_accepted_tokens
    if drafted <= 0 and last.draft_choice is None:
        return None
    num_rows = sum(step.num_decode_rows for step in counted)
    seconds = (last.ended_ns - counted[0].started_ns) / 1e9 if counted else 0.0
    per_s = 1 / seconds if seconds > 0 else 0.0
    return DraftFigures(
        choice=last.draft_choice,
        tokens_per_step=1 + kept / num_rows if num_rows else None,
        drafted_per_s=max(0, drafted) * per_s,
        kept_per_s=max(0, kept) * per_s,
        given_up_per_s=max(0, drafted - kept) * per_s,
        kept_share=kept / drafted if drafted > 0 else None,
    )
