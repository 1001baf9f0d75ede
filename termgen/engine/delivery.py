"""What the engine thread hands to a front end once per step: arrays, not text.

A front end maps (slot, epoch) to its own request through `started`; the arrays then carry the
step's tokens. Vocabulary: no torch, no scheduler.
"""

from __future__ import annotations

from dataclasses import dataclass

from termgen.engine.request import FinishReason, IntArray
from termgen.engine.step import StepLogprobs
from termgen.errors import EngineError


@dataclass(frozen=True, slots=True)
class StartedRow:
    """A request took a slot: for the first time, or again after a preemption."""

    request_id: str
    slot: int
    epoch: int
    num_cached_tokens: int
    """Prompt tokens found in the prefix cache the first time it was scheduled."""
    first_scheduled_ns: int


@dataclass(frozen=True, slots=True)
class FinishedRow:
    """A request is over. Comes in the same delivery as its last token, or in a later one."""

    request_id: str
    reason: FinishReason
    stop_token_id: int | None
    """The token that ended it when that token is not an end-of-sequence token."""
    stopped_by_token: bool
    """The last token is a stop token or end-of-sequence: it is reported, its text is not shown."""
    error: EngineError | None = None
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class StepDelivery:
    """One step's news. Apply in this order: `started`, tokens, `finished`."""

    step_id: int
    time_ns: int
    """perf_counter_ns when the tokens reached the host."""
    started: tuple[StartedRow, ...]
    slots: IntArray
    """[num_rows] rows that produced tokens."""
    epochs: IntArray
    """[num_rows]"""
    num_tokens: IntArray
    """[num_rows] how many each produced."""
    token_ids: IntArray
    """[sum(num_tokens)]"""
    logprobs: StepLogprobs | None
    """Rows aligned with `slots`."""
    finished: tuple[FinishedRow, ...]
