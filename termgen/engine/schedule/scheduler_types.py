"""Small values around the scheduler: its limits, its counters, and what a landed step means."""

from __future__ import annotations

from dataclasses import dataclass, field

from termgen.vocabulary.delivery import FinishedRow
from termgen.vocabulary.request import IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Resolved limits; see EngineConfig for their meaning."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    long_prefill_token_threshold: int = 0
    policy: str = "fcfs"


@dataclass(slots=True)
class SchedulerStats:
    """Counters since start."""

    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    num_preemptions: int = 0
    num_finished: int = 0
    prompt_tokens: int = 0
    """Prompt tokens computed (cache hits left out, recomputation counted)."""
    generation_tokens: int = 0
    num_corrupted: int = 0
    """Requests that ended because their logits were not numbers."""
    wasted_tokens: int = 0
    """Computed for requests whose end, or loss of the slot, was not known when planned, or for a
    mask that was late: these are computed once more."""


@dataclass(slots=True, eq=False)
class AppliedStep:
    """What a landed step means: rows that produced tokens, and who is finished."""

    slots: IntArray
    epochs: IntArray
    token_ids: IntArray
    rows: IntArray
    """Index of each of those rows in the plan."""
    finished: list[FinishedRow] = field(default_factory=list)
