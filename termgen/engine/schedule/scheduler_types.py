"""Small types of the scheduler: its limits, its counters and the effect of a landed step."""

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
    """Prompt tokens computed (without cache hits, with recomputation)."""
    generation_tokens: int = 0
    num_corrupted: int = 0
    """Requests that ended because of NaN or infinite logits."""
    wasted_tokens: int = 0
    """Tokens computed for requests whose end or preemption was not known to the plan, or again
    because of a late mask."""


@dataclass(slots=True, eq=False)
class AppliedStep:
    """The effect of a landed step: rows that produced tokens, and finished requests."""

    slots: IntArray
    epochs: IntArray
    token_ids: IntArray
    rows: IntArray
    """Index of these rows in the plan."""
    finished: list[FinishedRow] = field(default_factory=list)
