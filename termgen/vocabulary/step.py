"""The two messages between the host half (decides) and the device half (computes).

A `StepPlan` says what one step computes; a `StepResult` says what came of it. Neither holds a
tensor, both can be kept and sent to another process. Results are read through the plan they answer,
never through live request state: a row whose (slot, epoch) is no longer current is dropped. That
rule settles most of what can go wrong when steps run ahead. Both are made in every step, so they
are named tuples: a frozen dataclass of as many fields takes three times as long to make.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from termgen.vocabulary.memory_ledger import MemoryLedger
from termgen.vocabulary.request import IntArray
from termgen.vocabulary.sampling_params import SamplingParams

FloatArray = npt.NDArray[np.float32]

CORRUPT_TOKEN = -2
"""Stands for the token of a row whose logits are not numbers, until the host reads the step."""
MAX_STEPS_IN_FLIGHT = 31
"""Most steps that are ever submitted and not yet landed; a device keeps the tokens of so many."""


@dataclass(frozen=True, slots=True, eq=False)
class AddedRow:
    """A request that gets a device row before the step runs (first time, or after preemption)."""

    slot: int
    epoch: int
    token_ids: IntArray
    """[num_known_tokens] prompt and, after a preemption, the tokens generated so far."""
    num_prompt_tokens: int
    num_computed_tokens: int
    """Tokens whose KV is already in the row's first blocks (a prefix-cache hit)."""
    max_total_tokens: int
    stop_token_ids: tuple[int, ...]
    """Sorted ids that end the request once `min_tokens` are out."""
    params: SamplingParams
    seed: int
    has_grammar: bool = False
    """Whatever the row samples is masked; the plans of those steps name it."""
    bad_token_ids: tuple[tuple[int, ...], ...] = ()
    """Sequences that must not be completed."""


class PromptSpan(NamedTuple):
    """Computed prompt tokens whose successors in the prompt get log-probabilities."""

    row: int
    """Batch row."""
    start: int
    """Position of the first of them, exact: a prompt is known to the host."""
    num_tokens: int


class SamplingNeeds(NamedTuple):
    """What the rows of one step ask of the sampler, all together; the rest is not launched."""

    all_greedy: bool = False
    filters: bool = False
    """Top-k, top-p or min-p."""
    grammar: bool = False
    penalties: bool = False
    min_tokens: bool = False
    edits: bool = False
    """A logit bias, allowed ids or bad words."""
    max_logprobs: int | None = None
    """Most alternatives any row asks for; the device computes that many for all. 0 reports the
    sampled token alone, None nothing."""

    @property
    def is_simple(self) -> bool:
        """Whether the sampling kernels serve, once single logits are edited."""
        return not (self.penalties or self.min_tokens or self.max_logprobs is not None)


class StepPlan(NamedTuple):
    """What one step does. Arrays are read-only; rows are in batch order.

    Applied in this order: release rows, add rows, append blocks, compute.
    """

    step_id: int
    slots: IntArray
    """[num_rows] device row of each batch row."""
    epochs: IntArray
    """[num_rows] which residency of that slot is meant."""
    num_tokens: IntArray
    """[num_rows] tokens computed for the row in this step, drafts included."""
    num_draft_tokens: IntArray
    """[num_rows] how many of those are drafts."""
    num_computed: IntArray
    """[num_rows] host's upper bound of computed tokens before this step. The device has its own
    exact count; this one sizes buffers and is shown to people."""
    num_decode_rows: int
    """Rows that compute one token behind their prompt."""
    released_slots: tuple[int, ...]
    added: tuple[AddedRow, ...]
    block_slots: IntArray
    """[num_new_blocks] row each new block belongs to."""
    block_positions: IntArray
    """[num_new_blocks] index in that row's block table."""
    block_ids: IntArray
    """[num_new_blocks] physical block."""
    sampling: SamplingNeeds
    constrained: IntArray | None = None
    """[num_constrained] rows that sample under a grammar: masks follow while the model runs."""
    prompt_spans: tuple[PromptSpan, ...] = ()
    """Where log-probabilities of prompt tokens are wanted."""
    max_prompt_logprobs: int = 0
    """Most alternatives any of these spans asks for."""

    @property
    def num_rows(self) -> int:
        return len(self.slots)

    @property
    def changes_rows(self) -> bool:
        """Whether rows of the device must be brought up to this plan before it can run."""
        return bool(self.released_slots or self.added or len(self.block_ids))

    @property
    def is_decode(self) -> bool:
        """Whether no row computes any of its prompt, or more than one token."""
        return self.num_decode_rows == len(self.slots)

    @property
    def total_tokens(self) -> int:
        if self.is_decode:
            return len(self.slots)
        return int(np.add.reduce(self.num_tokens))  # half the time of `sum`


@dataclass(frozen=True, slots=True, eq=False)
class StepLogprobs:
    """Log-probabilities of one step, before any logits processor, natural log.

    Column 0 is the sampled token, columns 1.. are the most likely ones, best first. Rows that ask
    for fewer are cut by the host.
    """

    token_ids: IntArray  # [num_rows, 1 + max_logprobs]
    logprobs: FloatArray  # [num_rows, 1 + max_logprobs]
    ranks: IntArray  # [num_rows] rank of the sampled token, 1 = most likely


class StepResult(NamedTuple):
    """What a step produced, ragged by row."""

    step_id: int
    num_sampled: IntArray
    """[num_rows] tokens sampled by each row: 0 for a prefill chunk that is not the last, for a row
    whose mask was late and for a corrupt one."""
    token_ids: IntArray
    """[sum(num_sampled)] sampled tokens, row after row."""
    logprobs: StepLogprobs | None
    started_ns: int
    """perf_counter_ns when the device began the step: by its own clock where it has one."""
    ended_ns: int
    """When it had the tokens. Between its model and its sampling it may have waited for masks."""
    graph_mode: str = "NONE"
    """FULL, PIECEWISE or NONE: how much of the step was replayed."""
    num_padded_tokens: int = 0
    graph_reason: str = ""
    """Why nothing was replayed, or only pieces where a whole step might have been."""
    num_late_compiles: int = 0
    """Kernels compiled since the engine was ready, which should be none: each is a stall."""
    prompt_logprobs: StepLogprobs | None = None
    """For the plan's `prompt_spans`, one after the other: of the prompt's own next token."""
    corrupt: IntArray | None = None
    """[num_corrupt] rows whose logits held a NaN or an infinity where a token was to be drawn."""
    seen_ns: int = 0
    """perf_counter_ns when the thread that waited for the step went on; 0: when it had this
    result."""
    model_span_ns: tuple[int, int] = (0, 0)
    """On a CPU, perf_counter_ns when the model began and had ended; zeros elsewhere."""

    def by_row(self) -> IntArray:
        """[num_rows] sampled token of each row, -1 where it sampled none."""
        tokens = np.full(len(self.num_sampled), -1, np.int32)
        tokens[self.num_sampled > 0] = self.token_ids
        return tokens


class GraphStatus(NamedTuple):
    """How far the recording of CUDA graphs is."""

    num_recorded: int
    num_graphs: int
    """Those recorded and those that wait for an idle moment."""


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """What the executor found and decided while starting; facts for the scheduler and screens."""

    device: str
    """`cpu` or `cuda:0`."""
    device_name: str
    dtype: str
    num_blocks: int
    block_size: int
    max_model_len: int
    vocab_size: int
    attention_backend: str
    architecture: str
    max_num_seqs: int
    max_num_batched_tokens: int
    max_in_flight: int
    """Steps that may be planned before the oldest one's result is read; 1 is synchronous."""
    eos_token_ids: tuple[int, ...]
    """Those of the model's own config.json."""
    memory: MemoryLedger
    implementation: str = "termgen"
    """Whose code runs the model: one of config.MODEL_IMPLS."""
    num_threads: int = 0
    """Threads that the model computes with on a CPU; 0 on a GPU."""
    num_cores: int = 0
    """Processors that this process may run on."""
