"""What the engine thread hands to a front end once per step: arrays, not text.

A front end maps (slot, epoch) to its own request through `started`; the arrays then carry the
step's tokens. Vocabulary: no torch, no scheduler.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from termgen.errors import TermgenError
from termgen.vocabulary.request import FinishReason, IntArray
from termgen.vocabulary.step import StepLogprobs, StepPlan, StepResult


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
    error: TermgenError | None = None
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class PromptLogprobs:
    """Log-probabilities of prompt tokens that a step has computed for one row."""

    slot: int
    epoch: int
    start: int
    """Index in the prompt of the first of these tokens."""
    logprobs: StepLogprobs

    @classmethod
    def of_step(cls, plan: StepPlan, result: StepResult) -> tuple[PromptLogprobs, ...]:
        """Log-probabilities of every row of the plan: what it says of one that has lost its slot is
        still true."""
        values = result.prompt_logprobs
        if values is None:
            return ()
        parts = []
        end = 0
        for span in plan.prompt_spans:
            begin, end = end, end + span.num_tokens
            part = StepLogprobs(
                values.token_ids[begin:end], values.logprobs[begin:end], values.ranks[begin:end]
            )
            slot, epoch = int(plan.slots[span.row]), int(plan.epochs[span.row])
            parts.append(cls(slot, epoch, span.start + 1, part))
        return tuple(parts)


class StepDelivery(NamedTuple):
    """One step's news. Apply in this order: `started`, `prompt_logprobs`, tokens, `finished`."""

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
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()
