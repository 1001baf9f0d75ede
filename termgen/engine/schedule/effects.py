"""What steps have done: the effect of each, and counters of all."""

from __future__ import annotations

from dataclasses import dataclass, field

from termgen.engine.schedule.drafts import DraftStats
from termgen.vocabulary.request import IntArray
from termgen.vocabulary.step import FinishedRow


@dataclass(slots=True)
class SchedulerStats(DraftStats):
    """Counters since start."""

    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    num_preemptions: int = 0
    num_finished: int = 0
    prompt_tokens: int = 0
    """Prompt tokens computed (without cache hits, with recomputation)."""
    generation_tokens: int = 0
    num_corrupted: int = 0
    """Requests that ended because of NaN or infinite logits."""
    num_late_masks: int = 0
    """Rows that a step did not sample because their masks came too late."""
    num_forced_tokens: int = 0
    """Tokens that grammars forced, and that steps computed together with the token before."""
    wasted_tokens: int = 0
    """Tokens computed for requests whose end or preemption was not known to the plan, or again
    because of a late mask."""


@dataclass(slots=True, eq=False)
class AppliedStep:
    """The effect of a landed step: rows that produced tokens, and finished requests."""

    slots: IntArray
    epochs: IntArray
    token_ids: IntArray
    """Row after row."""
    samples: IntArray
    """Index of these tokens among the step's samples."""
    num_tokens: IntArray | None = None
    """[num_rows] tokens of each row; None: one."""
    num_drafted: IntArray | None = None
    """[num_rows] drafts that were computed for each row; None: no row had any."""
    finished: list[FinishedRow] = field(default_factory=list)
