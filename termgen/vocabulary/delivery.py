"""The engine thread's output to a front end, once per step: arrays, not text.

A front end maps (slot, epoch) to its own request through `started`; the arrays carry the step's
tokens. Vocabulary: no torch, no scheduler.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from termgen.errors import TermgenError
from termgen.vocabulary.request import FinishReason, IntArray
from termgen.vocabulary.step import StepLogprobs, StepPlan, StepResult


@dataclass(frozen=True, slots=True)
class StartedRow:
    """A request that got a slot, for the first time or after a preemption."""

    request_id: str
    slot: int
    epoch: int
    num_cached_tokens: int
    """Prefix-cache hits, in tokens, when it was first scheduled."""
    first_scheduled_ns: int


@dataclass(frozen=True, slots=True)
class FinishedRow:
    """A finished request; comes in the same delivery as its last token, or in a later one."""

    request_id: str
    reason: FinishReason
    stop_token_id: int | None
    """The token that ended it, unless that is an end-of-sequence token."""
    stopped_by_token: bool
    """The last token is a stop or end-of-sequence token: it is reported without its text."""
    error: TermgenError | None = None
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class PromptLogprobs:
    """Log-probabilities of the prompt tokens that a step computed for one row."""

    slot: int
    epoch: int
    start: int
    """Index in the prompt of the first of these tokens."""
    logprobs: StepLogprobs

    @classmethod
    def of_step(cls, plan: StepPlan, result: StepResult) -> tuple[PromptLogprobs, ...]:
        """Log-probabilities for every row of the plan; they are valid even if it lost its slot."""
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
    """One step's output. Apply in this order: `started`, `prompt_logprobs`, tokens, `finished`."""

    step_id: int
    time_ns: int
    """perf_counter_ns when the tokens reached the host."""
    started: tuple[StartedRow, ...]
    slots: IntArray
    """[num_rows] slots of the rows that produced tokens."""
    epochs: IntArray
    """[num_rows]"""
    num_tokens: IntArray
    """[num_rows] tokens that each produced."""
    token_ids: IntArray
    """[sum(num_tokens)]"""
    logprobs: StepLogprobs | None
    """Rows aligned with `slots`."""
    finished: tuple[FinishedRow, ...]
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()
