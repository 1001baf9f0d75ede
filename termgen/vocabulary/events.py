"""Events that the engine publishes about itself, and the bounded rings that carry them.

The engine appends one fixed-size `StepRecord` per step and one `RequestEvent` per change in a
request's life. Each subscriber has a ring; when it is full the oldest entry is dropped and counted,
so a slow reader never slows a step. Vocabulary: no torch, no scheduler.
"""

from __future__ import annotations

import enum
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from termgen.vocabulary.device.expert_load import ExpertLoad


class DraftReason(enum.StrEnum):
    """What decided how many drafts a step had."""

    BEST = "best"
    """They promised the most tokens for their time."""
    NO_GAIN = "no_gain"
    """None did: those that there could be did not promise enough."""
    UNTRIED = "untried"
    """No step of that size was measured yet."""
    NONE_FOUND = "none_found"
    """The drafter had no guess."""
    FEWER = "fewer"
    """More were chosen, and were not there or had no room."""
    PROMPTS = "prompts"
    """The step computed prompts."""
    NO_RECORDING = "no_recording"
    """No CUDA graph held the step with drafts, or so many requests have none."""


class DraftChoice(NamedTuple):
    """How many drafts a row of a step had, and why."""

    num_drafts: int
    """The most that a row had."""
    most: int
    """The most that a row may have."""
    why: DraftReason
    compared: int = 0
    """Number of drafts that `gain` and `kept_share` are of: those of a row, or where a step without
    any was better, the best number other than none. 0: none was compared."""
    rate: float = 0.0
    """Tokens per second that a step with so many promised, by the measured times of steps."""
    rate_without: float = 0.0
    """The same of a step without drafts."""
    kept_share: float = 0.0
    """Part of those drafts that were expected to stay, by what drafts of these requests gave."""

    @property
    def gain(self) -> float:
        """Tokens per second with the compared drafts, as a multiple of those without; 0: nothing
        was compared."""
        return self.rate / self.rate_without if self.compared and self.rate_without > 0 else 0.0

    def as_ran(self, num_drafts: int) -> DraftChoice:
        """The same for a step whose rows had no more than these."""
        if num_drafts == self.num_drafts:
            return self
        why = DraftReason.FEWER if num_drafts else DraftReason.NONE_FOUND
        return DraftChoice(num_drafts, self.most, why)

    def __str__(self) -> str:
        """`drafts 4 of 7: 1.62x of none expected, at 61% kept`"""
        return f"drafts {self.num_drafts} of {self.most}: {self._reason}"

    @property
    def _reason(self) -> str:
        match self.why:
            case DraftReason.BEST:
                return f"{self.gain:.2f}x of none expected, at {self.kept_share:.0%} kept"
            case DraftReason.NO_GAIN:
                change = round(100 * abs(self.gain - 1))
                faster = f"only {change}% faster" if change else "no faster"
                speed = faster if self.gain >= 1 or not change else f"{change}% slower"
                return f"{self.compared} would be {speed} at {self.kept_share:.0%} kept"
            case DraftReason.UNTRIED:
                return "no step of this size was measured yet"
            case DraftReason.NONE_FOUND:
                return "no guess was found, or had room"
            case DraftReason.FEWER:
                return "no more were found, or had room"
            case DraftReason.PROMPTS:
                return "not in steps with prompts"
        return "no CUDA graph for such a step"


class StepRecord(NamedTuple):
    """One engine step. Times are perf_counter_ns; counts are tokens, rows or blocks."""

    step_id: int
    planned_ns: int
    submitted_ns: int
    started_ns: int
    """Start of the step on the device, by the device's clock where it has one."""
    ended_ns: int
    """End of the step on the device; includes waiting for grammar masks before sampling."""
    applied_ns: int
    """When the host had applied the results."""
    schedule_us: float
    apply_us: float
    num_decode_rows: int
    num_prefill_rows: int
    num_prefill_tokens: int
    num_sampled_tokens: int
    num_padded_tokens: int
    graph_mode: str
    num_running: int
    num_waiting: int
    num_used_blocks: int
    num_cached_blocks: int
    num_free_blocks: int
    prefix_query_tokens: int
    """Prompt tokens looked up in the prefix cache, since start."""
    prefix_hit_tokens: int
    num_preemptions: int
    """Preemptions since start."""
    graph_reason: str = ""
    """Why no CUDA graph was replayed, or a piecewise instead of a full one; else empty."""
    num_late_compiles: int = 0
    """Kernels compiled since the engine was ready. Anything but 0 is a fault."""
    landed_ns: int = 0
    """When the host had the step's results."""
    launch_us: float = 0.0
    """Host time to hand the step to the device."""
    queue_depth: int = 0
    """Steps in flight when this one was submitted. 0: the device may have been idle."""
    num_wasted_tokens: int = 0
    """Since start: tokens computed for requests that, unknown to the plan, had ended or lost their
    slot, or in vain because of a late mask."""
    host_us: float = 0.0
    """Host time of the loop between the previous landing and this one, without device waits."""
    wait_us: float = 0.0
    """Time that the loop waited for this step's results."""
    idle_us: float = 0.0
    """Time that the device was idle before this step, although there was work."""
    prefill_ids: tuple[str, ...] = ()
    """Requests that prefill (or recompute) in this step, as planned: some may have ended when it
    lands. All other rows decode. Empty if the events had no subscriber."""
    prefill_tokens: tuple[int, ...] = ()
    """Number of tokens of each."""
    num_evictions: int = 0
    """Since start: cached blocks evicted for new tokens."""
    num_corrupted: int = 0
    """Since start: requests ended by NaN or infinite logits. Anything but 0 is a fault of the model
    or its dtype."""
    publish_us: float = 0.0
    """Engine time that publishing the previous step took."""
    input_us: float = 0.0
    """On a CPU, the time of the step before the model; zero on a GPU, which is not measured."""
    model_us: float = 0.0
    """On a CPU, the model's time in the step."""
    sample_us: float = 0.0
    """On a CPU, the time after the model: logits, sampling, and waiting for masks."""
    covered_us: float = 0.0
    """Longest recent pause of the host, which more than two steps in flight cover; 0: none."""
    num_late_masks: int = 0
    """Since start: rows that a step did not sample, as the masks of their grammars were late."""
    num_forced_tokens: int = 0
    """Since start: tokens that grammars forced, computed in one step with the token before. They
    are no guesses."""
    mask_us: float = 0.0
    """Time that the host waited for masks of grammars since the step before landed."""
    num_draft_tokens: int = 0
    """Since start: guessed tokens that steps computed."""
    num_accepted_tokens: int = 0
    """Since start: those of them that the model drew as well."""
    num_drafts: int = 0
    """Since start: rows of steps that computed guessed tokens."""
    drafted_per_pos: tuple[int, ...] = ()
    """Since start: guessed tokens that were the first, second, ... of their row in a step."""
    accepted_per_pos: tuple[int, ...] = ()
    """Those of them that the model drew as well, for the same positions."""
    draft_choice: DraftChoice | None = None
    """How many drafts the step had, and why; None where it had no place for any."""

    @property
    def launched_ns(self) -> int:
        """When the host had submitted the step to the device."""
        return self.submitted_ns + round(self.launch_us * 1e3)


class HitLimit(enum.Enum):
    """What ended a hit."""

    OFF = enum.auto()
    """There is no prefix cache."""
    LOGPROBS = enum.auto()
    """The request needs the logits of its whole prompt."""
    LAST_TOKEN = enum.auto()
    """Nothing: all blocks in front of the last token were found."""
    KEYS = enum.auto()
    """No cached block continues the text."""
    WINDOW = enum.auto()
    """A group with a window lacks blocks of it."""
    STATES = enum.auto()
    """No copy of the recurrent layers' states."""
    POOLING = enum.auto()
    """The request's vector needs the hidden states of its whole prompt."""


class PrefixHit(NamedTuple):
    """What one request found. Each kind of layers was asked for what those before it had: layers
    that keep all tokens, layers with windows, recurrent layers."""

    num_tokens: int = 0
    limit: HitLimit = HitLimit.OFF
    asked: int = 0
    """Tokens up to which the kind of layers that ended the hit was asked."""
    window: int = 0
    """Window of the layers that ended the hit, if they have one."""
    ends: tuple[tuple[str, int], ...] = ()
    """(kind, tokens that it had of those asked for); empty for layers that all keep all."""
    is_chunk: bool = False
    """True if that window is a chunk."""

    @property
    def reason(self) -> str:
        """What ended it, in one line."""
        end, asked = f"{self.num_tokens:,}", f"{self.asked:,}"
        match self.limit:
            case HitLimit.OFF:
                return "the prefix cache is off"
            case HitLimit.LOGPROBS:
                return "log-probabilities of the prompt are asked for, so all of it is computed"
            case HitLimit.POOLING:
                return "the embedding is made of all hidden states, so all of it is computed"
            case HitLimit.LAST_TOKEN if not self.asked:
                return "no full block lies before the last token"
            case HitLimit.LAST_TOKEN:
                return f"all blocks before the last token were found, {asked} tokens"
            case HitLimit.KEYS if not self.num_tokens:
                return "no cached block begins with these tokens"
            case HitLimit.KEYS:
                return f"no cached block continues after token {end}"
            case HitLimit.WINDOW:
                what = "chunk" if self.is_chunk else "window"
                return f"the {what} of {self.window:,} before token {asked} is not all cached"
        between = f"between tokens {end} and {asked}" if self.num_tokens else f"up to token {asked}"
        return f"no copy of the states {between}"

    def __str__(self) -> str:
        """How far each kind had what was asked for, and the reason."""
        parts = ", ".join(f"{kind} up to {end:,}" for kind, end in self.ends)
        return f"{parts}; {self.reason}" if parts else self.reason


class DraftCounts(NamedTuple):
    """What became of the tokens that were guessed for one request."""

    num_drafted: int = 0
    num_accepted: int = 0
    """Those of them that the model drew as well."""


class RequestEventKind(enum.StrEnum):
    QUEUED = "queued"
    SCHEDULED = "scheduled"
    FIRST_TOKEN = "first_token"
    PREEMPTED = "preempted"
    FINISHED = "finished"


class RequestEvent(NamedTuple):
    """One change in a request's life. Never carries text."""

    time_ns: int
    request_id: str
    kind: RequestEventKind
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    detail: str = ""
    """Finish reason, reason for a preemption, sampling parameters of a queued request, or what a
    scheduled one found in the prefix cache and what ended that: see `PrefixHit`."""
    num_draft_tokens: int = 0
    """Guessed tokens that steps computed for it, up to when it last had no slot."""
    num_accepted_tokens: int = 0
    """Those of them that the model drew as well."""


EngineEvent = StepRecord | RequestEvent


class EventRing:
    """A subscriber's bounded queue. The engine thread calls `append`, the reader `drain`.

    `deque.append` and `popleft` are atomic under the GIL, so neither side takes a lock.
    """

    __slots__ = ("_ring", "_seen", "num_appended")

    def __init__(self, capacity: int = 4096) -> None:
        self._ring: deque[EngineEvent] = deque(maxlen=capacity)
        self.num_appended = 0
        self._seen = 0

    def append(self, event: EngineEvent) -> None:
        self._ring.append(event)
        self.num_appended += 1

    def drain(self) -> list[EngineEvent]:
        """Take all entries, oldest first."""
        out: list[EngineEvent] = []
        while True:
            try:
                out.append(self._ring.popleft())
            except IndexError:
                break
        self._seen += len(out)
        return out

    @property
    def num_dropped(self) -> int:
        """Events lost because the reader was too slow."""
        return max(0, self.num_appended - self._seen - len(self._ring))


class EventBus:
    """Fans events out to every subscriber's ring."""

    def __init__(self) -> None:
        self._rings: tuple[EventRing, ...] = ()

    def subscribe(self, capacity: int = 4096) -> EventRing:
        ring = EventRing(capacity)
        self._rings = (*self._rings, ring)
        return ring

    def unsubscribe(self, ring: EventRing) -> None:
        self._rings = tuple(r for r in self._rings if r is not ring)

    @property
    def has_readers(self) -> bool:
        return bool(self._rings)

    def publish(self, event: EngineEvent) -> None:
        for ring in self._rings:
            ring.append(event)


class BlockState(enum.IntEnum):
    """State of a KV block in the block map."""

    FREE = 0
    CACHED = 1
    """Unused, with a reusable prefix."""
    ACTIVE = 2
    SHARED = 3
    """Used by more than one request."""
    NULL = 4
    """Block 0, the padding target."""


class StateView(NamedTuple):
    """Copies of the states of recurrent layers, in the prefix cache. The states themselves lie at
    the rows of running requests."""

    num_places: int
    num_free: int
    """Places without a copy."""
    num_copies: int
    """Copies that a request can start from; the rest are of tokens that the host does not know
    yet."""
    num_made: int
    """Since start, like the two that follow."""
    num_used: int
    """Requests that started from a copy."""
    num_evicted: int
    """Copies whose place was given to a new one."""


@dataclass(frozen=True, slots=True)
class RequestView:
    """One request for a screen."""

    request_id: str
    status: str
    """waiting, prefill, decode or preempted."""
    num_prompt_tokens: int
    num_cached_tokens: int
    num_computed_tokens: int
    num_output_tokens: int
    num_blocks: int
    num_scheduled_tokens: int
    """Tokens of this request in the newest step; 0 if it has none."""
    age_s: float
    num_preemptions: int
    priority: int
    is_unread: bool = False
    """Its client takes no output: it runs only while no other request waits."""
    num_draft_tokens: int = 0
    """Guessed tokens that steps computed for it."""
    num_accepted_tokens: int = 0
    """Those of them that the model drew as well."""


@dataclass(frozen=True, slots=True, eq=False)
class EngineSnapshot:
    """The engine's state for a screen, beside the time series. Built by the engine thread on
    request."""

    time_ns: int
    step: StepRecord | None
    """The newest step."""
    requests: tuple[RequestView, ...]
    """Running requests in batch order, then waiting ones in queue order (at most 256 of each)."""
    num_running: int
    num_waiting: int
    block_states: npt.NDArray[np.uint8]
    """[num_blocks] BlockState values."""
    block_owners: npt.NDArray[np.int32]
    """[num_blocks] index into `requests` of an owner; -1: none."""
    num_used_blocks: int
    num_cached_blocks: int
    num_free_blocks: int
    prefix_query_tokens: int
    prefix_hit_tokens: int
    num_preemptions: int
    num_finished: int
    prompt_tokens: int
    """Prompt tokens computed since start."""
    generation_tokens: int
    max_num_seqs: int
    max_num_batched_tokens: int
    last_progress_ns: int
    """perf_counter_ns of the last applied step, for watchdogs."""
    num_graphs_recorded: int = 0
    num_graphs: int = 0
    """CUDA graphs, including those still to be recorded in idle moments."""
    paused: bool = False
    """`EngineClient.pause` holds back new requests, or all steps."""
    sleep_level: int = 0
    """Sleep level as in `EngineClient.sleep`; 0: awake."""
    waiting_reason: str = ""
    """Why the first request of the queue does not run; the others wait behind it."""
    evicted_blocks: npt.NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    """The latest evicted blocks, newest last."""
    num_evictions: int = 0
    """Blocks evicted since start."""
    cpu_s: float = 0.0
    """CPU time of the engine's process, all cores together."""
    resident_bytes: int = 0
    """Resident memory of the engine's process; 0 if unknown."""
    states: StateView | None = None
    """None for models without recurrent layers, or without a prefix cache."""
    block_groups: npt.NDArray[np.uint8] = field(default_factory=lambda: np.empty(0, np.uint8))
    """[num_blocks] the group of layers that used each block last; empty if there is one group."""
    experts: ExpertLoad | None = None
    """None for models that are no mixtures, and where the use of experts is not counted."""
