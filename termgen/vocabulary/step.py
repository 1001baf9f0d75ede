"""A step as messages: to the device, back from it, and on to the front ends.

A `StepPlan` says what one step computes; a `StepResult` is its outcome. Neither holds a tensor, so
both can be stored or sent to another process. Results are read through the plan they answer, never
through live request state: a row whose (slot, epoch) is no longer current is dropped. This rule
prevents most errors of steps that run ahead. A `StepDelivery` goes to the front end once per step:
arrays, not text. The front end maps (slot, epoch) to its own request through `started`.

Plan and result are named tuples because they are built in every step: a frozen dataclass with as
many fields takes three times as long.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from termgen.errors import TermgenError
from termgen.vocabulary.device.pooling import PoolingSpan
from termgen.vocabulary.events import DraftChoice, DraftCounts
from termgen.vocabulary.request import FinishReason, IntArray
from termgen.vocabulary.sampling_params import SamplingParams

FloatArray = npt.NDArray[np.float32]

CORRUPT_TOKEN = -2
"""Placeholder token of a row with NaN or infinite logits, until the host reads the step."""
MAX_STEPS_IN_FLIGHT = 31
"""Limit of submitted steps that have not landed; the device keeps the tokens of so many."""


@dataclass(frozen=True, slots=True, eq=False)
class AddedRow:
    """A request that gets a device row before the step runs, at first or after a preemption."""

    slot: int
    epoch: int
    token_ids: IntArray
    """[num_known_tokens] the prompt and, after a preemption, the tokens generated so far."""
    num_prompt_tokens: int
    num_computed_tokens: int
    """Tokens whose KV is already in the row's first blocks (prefix-cache hits)."""
    max_total_tokens: int
    stop_token_ids: tuple[int, ...]
    """Sorted ids that end the request once `min_tokens` are generated."""
    params: SamplingParams
    seed: int
    has_grammar: bool = False
    """Every step in which the row samples needs a mask; `StepPlan.constrained` lists the row."""
    state_place: int = -1
    """Where a copy of the states that have taken up the computed tokens lies; -1: nowhere."""
    bad_token_ids: tuple[tuple[int, ...], ...] = ()
    """Token sequences that must not be completed."""
    is_pooled: bool = False
    """It samples nothing: to the device a prompt of which a token is always missing."""


class PromptSpan(NamedTuple):
    """Computed prompt tokens whose successors in the prompt get log-probabilities."""

    row: int
    """Batch row."""
    start: int
    """Position of the first of them; exact, as the host knows the prompt."""
    num_tokens: int


class SamplingNeeds(NamedTuple):
    """Sampler features that the rows of one step need; kernels of other features are skipped."""

    all_greedy: bool = False
    filters: bool = False
    """Top-k, top-p and other cuts of the tail: `sampling_params.CUTS`."""
    grammar: bool = False
    penalties: bool = False
    min_tokens: bool = False
    edits: bool = False
    """A logit bias, allowed ids or bad words."""
    max_logprobs: int | None = None
    """Largest `logprobs` of any row; the device computes that many for all. 0: the sampled token
    only. None: nothing."""

    @property
    def is_plain(self) -> bool:
        """True if no row asks for more than a temperature."""
        asks = self.filters or self.grammar or self.penalties or self.min_tokens or self.edits
        return not asks and self.max_logprobs is None


class StepPlan(NamedTuple):
    """One step's work. Arrays are read-only; rows are in batch order.

    Applied in this order: release rows, add rows, append blocks, copy states, compute.
    """

    step_id: int
    slots: IntArray
    """[num_rows] device row of each batch row."""
    epochs: IntArray
    """[num_rows] epoch of the slot's current request."""
    num_tokens: IntArray
    """[num_rows] tokens computed for the row in this step, drafts included."""
    num_draft_tokens: IntArray
    """[num_rows] places for drafts among them, at the end: tokens that the device has guessed, each
    of which stays if the model draws it, or that a grammar forces."""
    num_computed: IntArray
    """[num_rows] the host's upper bound of tokens computed before this step. The device has its own
    exact count; this one sizes buffers and is displayed."""
    num_decode_rows: int
    """Rows that compute one token, and drafts, after their prompt."""
    released_slots: tuple[int, ...]
    added: tuple[AddedRow, ...]
    block_slots: IntArray
    """[num_new_blocks] row each new block belongs to."""
    block_positions: IntArray
    """[num_new_blocks] index in that row's block table."""
    block_ids: IntArray
    """[num_new_blocks] physical block."""
    sampling: SamplingNeeds
    block_groups: IntArray | None = None
    """[num_new_blocks] group of layers whose block table it extends; None: the first for all."""
    copied_slots: IntArray | None = None
    """[num_copies] rows whose recurrent states are copied before they go on; None: of none."""
    copy_places: IntArray | None = None
    """[num_copies] where the copies go."""
    given_up: IntArray | None = None
    """Only while debugging: blocks that rows have given up, to be spoilt before the step."""
    constrained: IntArray | None = None
    """[num_constrained] rows that sample under a grammar: masks follow while the model runs."""
    prompt_spans: tuple[PromptSpan, ...] = ()
    """Prompt tokens whose log-probabilities are requested."""
    max_prompt_logprobs: int = 0
    """Largest `prompt_logprobs` of these spans."""
    num_drafts: int = 0
    """Sum of `num_draft_tokens`."""
    pooled: tuple[PoolingSpan, ...] = ()
    """Prompt tokens whose hidden states go into a vector."""
    num_pooled_rows: int = 0
    """Rows that want a vector, and sample nothing."""

    @property
    def num_rows(self) -> int:
        return len(self.slots)

    @property
    def num_samples(self) -> int:
        """Tokens that the device draws: one for each row, and one more for each of its drafts."""
        return len(self.slots) + self.num_drafts

    @property
    def most_guesses(self) -> int:
        """Most drafts of a row that were guessed: those of a row with a grammar are forced."""
        if not self.num_drafts:
            return 0
        guesses = self.num_draft_tokens.copy()
        if self.constrained is not None:
            guesses[self.constrained] = 0
        return int(guesses.max())

    @property
    def num_single_rows(self) -> int:
        """Rows at the front that compute one token each."""
        is_longer = self.num_tokens > 1
        return int(is_longer.argmax()) if is_longer.any() else self.num_rows

    def with_drafts(self, num_drafts: IntArray) -> StepPlan:
        """The plan with no more drafts than these [num_rows]."""
        drafts = np.minimum(self.num_draft_tokens, num_drafts).astype(np.int32)
        return self._replace(
            num_tokens=self.num_tokens - (self.num_draft_tokens - drafts),
            num_draft_tokens=drafts,
            num_drafts=int(drafts.sum()),
        )

    @property
    def changes_rows(self) -> bool:
        """True if device rows must be updated before this plan can run."""
        return bool(self.released_slots or self.added or len(self.block_ids))

    @property
    def is_decode(self) -> bool:
        """True if every row computes one token, and drafts, after its prompt."""
        return self.num_decode_rows == len(self.slots)

    @property
    def total_tokens(self) -> int:
        if self.is_decode:
            return len(self.slots) + self.num_drafts
        return int(np.add.reduce(self.num_tokens))  # half the time of `sum`


def first_samples(num_drafts: IntArray) -> IntArray:
    """[num_rows] index of each row's first sample, where a row has one more than its drafts."""
    ends = np.cumsum(1 + num_drafts, dtype=np.int32)
    firsts: IntArray = ends - (1 + num_drafts)
    return firsts


@dataclass(frozen=True, slots=True, eq=False)
class StepLogprobs:
    """Log-probabilities of one step's samples, before any logits processor, natural log.

    Column 0 is the sampled token, columns 1.. are the most likely ones, best first. The host cuts
    the rows that ask for fewer.
    """

    token_ids: IntArray  # [num_samples, 1 + max_logprobs]
    logprobs: FloatArray  # [num_samples, 1 + max_logprobs]
    ranks: IntArray  # [num_samples] rank of the sampled token, 1 = most likely


class StepResult(NamedTuple):
    """A step's output, ragged by row."""

    step_id: int
    num_sampled: IntArray
    """[num_rows] tokens that each row keeps: those of its drafts that the model draws, and one
    more; 0 for a prefill chunk before the last, for a late mask and for corrupt logits. A token
    that ends the row is its last."""
    token_ids: IntArray
    """[sum(num_sampled)] sampled tokens, row after row."""
    logprobs: StepLogprobs | None
    """A row for each sample, kept or not."""
    started_ns: int
    """perf_counter_ns when the device began the step, by the device's clock where it has one."""
    ended_ns: int
    """When it had the tokens; it may have waited for masks between the model and sampling."""
    graph_mode: str = "NONE"
    """CUDA-graph mode of the step: FULL, PIECEWISE or NONE."""
    num_padded_tokens: int = 0
    graph_reason: str = ""
    """Why no graph was replayed, or a piecewise instead of a full one."""
    num_late_compiles: int = 0
    """Kernels compiled since the engine was ready; should be 0, as each stalls a step."""
    prompt_logprobs: StepLogprobs | None = None
    """Log-probabilities of the prompt's own next tokens, for the plan's `prompt_spans` in order."""
    corrupt: IntArray | None = None
    """[num_corrupt] rows that were to sample but had NaN or infinite logits, or whose vectors have
    such numbers."""
    num_drafted: IntArray | None = None
    """[num_rows] drafts that were there to fill the plan's places for them: each row has one sample
    more than these. None: all places."""
    seen_ns: int = 0
    """perf_counter_ns when the thread that waited for the step woke up; 0: when it got this
    result."""
    model_span_ns: tuple[int, int] = (0, 0)
    """On a CPU, perf_counter_ns of the model's start and end; zeros elsewhere."""
    draft_choice: DraftChoice | None = None
    """See `StepRecord`."""
    pooled: FloatArray | None = None
    """[ended prompts, hidden] for those of the plan's `pooled` that end a prompt, in order."""

    def last_tokens(self) -> IntArray:
        """[num_rows] newest token of each row, -1 for none."""
        tokens = np.full(len(self.num_sampled), -1, np.int32)
        ends = np.cumsum(self.num_sampled)
        has_some = self.num_sampled > 0
        tokens[has_some] = self.token_ids[ends[has_some] - 1]
        return tokens


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
    drafts: DraftCounts = DraftCounts()
    vector: FloatArray | None = None
    """[hidden] of a pooling request that was not ended before."""


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
    """Rows aligned with `token_ids`."""
    finished: tuple[FinishedRow, ...]
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()
    num_drafted: IntArray | None = None
    """[num_rows] drafts that were computed for each; None: the step had none."""
