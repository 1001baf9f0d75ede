"""Which recorded graph a step may replay, decided from counts the host knows. Pure Python.

The dispatcher is separate from the graphs themselves so that every (rows, tokens) pair can be
tested without a GPU. A step that replays nothing always has a reason, which screens show.
"""

from __future__ import annotations

import enum
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from termgen.engine.sampling_params import MAX_LOGPROBS
from termgen.engine.step import StepPlan


class GraphMode(enum.StrEnum):
    FULL = "FULL"
    """The whole step is one graph: inputs, model, sampling, state update."""
    NONE = "NONE"
    """Operations are launched one by one."""


class SamplingVariant(enum.StrEnum):
    """Which sampling a full graph contains; steps that need more sample eagerly."""

    PLAIN = "plain"
    """Greedy rows and rows with a temperature."""
    FILTERED = "filtered"
    """Those, and rows with top-k, top-p or min-p."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingNeeds:
    """What a step's rows ask of the sampler; what nobody asks for is not launched."""

    all_greedy: bool = False
    filters: bool = False
    """Top-k, top-p or min-p."""
    penalties: bool = False
    min_tokens: bool = False
    max_logprobs: int | None = None

    @classmethod
    def of(cls, plan: StepPlan) -> SamplingNeeds:
        return cls(
            all_greedy=not plan.needs_sampling,
            filters=plan.needs_top_k_top_p,
            penalties=plan.needs_penalties,
            min_tokens=plan.needs_min_tokens,
            max_logprobs=plan.max_logprobs if plan.needs_logprobs else None,
        )

    @property
    def variant(self) -> SamplingVariant | None:
        """The recording that does this, if any does."""
        if self.penalties or self.min_tokens or self.max_logprobs is not None:
            return None
        return SamplingVariant.FILTERED if self.filters else SamplingVariant.PLAIN


NEEDS = {
    SamplingVariant.PLAIN: SamplingNeeds(),
    SamplingVariant.FILTERED: SamplingNeeds(filters=True),
}
"""What each recording does."""

EVERYTHING = SamplingNeeds(filters=True, penalties=True, min_tokens=True, max_logprobs=MAX_LOGPROBS)
"""All that rows may ask of a sampler, at once."""


@dataclass(frozen=True, slots=True)
class BatchDescriptor:
    """What distinguishes one recording from another. Sizes are padded ones."""

    num_tokens: int
    num_rows: int
    is_decode: bool
    """One token for each row; otherwise any rows and tokens up to these numbers."""
    sampling: SamplingVariant


@dataclass(frozen=True, slots=True)
class Dispatch:
    """The decision for one step."""

    mode: GraphMode
    descriptor: BatchDescriptor | None
    reason: str = ""
    """Why nothing is replayed; empty when something is."""

    def num_padded(self, num_tokens: int) -> int:
        return self.descriptor.num_tokens - num_tokens if self.descriptor is not None else 0


def decode_sizes(max_num_seqs: int, largest: int = 512) -> tuple[int, ...]:
    """Row counts to record, ascending: dense where padding costs most, always `max_num_seqs`."""
    sizes = {1, 2, 4, *range(8, 65, 8), *range(80, 257, 16), *range(288, largest + 1, 32)}
    top = min(max_num_seqs, largest)
    return tuple(sorted({s for s in sizes if s < top} | {top}))


def mixed_sizes(max_num_batched_tokens: int, largest: int = 2048) -> tuple[int, ...]:
    """Token counts to record for steps that hold prompts, ascending. Above the largest, launching
    operations one by one takes less time than the device does."""
    sizes = {16, 32, 64, *range(128, 513, 128), 768, 1024, 1536, 2048}
    return tuple(sorted(s for s in sizes if s <= min(largest, max_num_batched_tokens)))


class CudaGraphDispatcher:
    """Maps a step to a recording through precomputed tables of padded sizes."""

    def __init__(
        self,
        sizes: Sequence[int],
        *,
        mixed: Sequence[int] = (),
        max_num_seqs: int = 0,
        disabled_reason: str = "",
    ) -> None:
        """sizes: rows of the decode recordings; mixed: tokens of the others, whose rows are as many
        as their tokens allow, `max_num_seqs` at most. disabled_reason: why no graph is ever used,
        when that is so."""
        self.sizes = tuple(sorted(sizes))
        self.mixed = tuple(sorted(mixed))
        self._max_num_seqs = max_num_seqs
        self._disabled_reason = disabled_reason
        self._padded_rows = _padded(self.sizes)
        self._padded_tokens = _padded(self.mixed)

    @property
    def max_rows(self) -> int:
        """The most rows of any recording; 0 when there is none."""
        return max((d.num_rows for d in self.descriptors()), default=0)

    def descriptors(self) -> list[BatchDescriptor]:
        """Every recording to make, the largest first: later ones fit into its memory."""
        found = [self._decode(size, v) for size in self.sizes for v in SamplingVariant]
        found += [self._mixed(size, v) for size in self.mixed for v in SamplingVariant]
        return sorted(found, key=lambda d: (-d.num_tokens, -d.num_rows))

    def largest(self) -> CudaGraphDispatcher:
        """A dispatcher of only the largest recordings, whose memory all others fit into."""
        return CudaGraphDispatcher(
            self.sizes[-1:], mixed=self.mixed[-1:], max_num_seqs=self._max_num_seqs
        )

    def _decode(self, size: int, sampling: SamplingVariant) -> BatchDescriptor:
        return BatchDescriptor(size, size, True, sampling)

    def _mixed(self, size: int, sampling: SamplingVariant) -> BatchDescriptor:
        return BatchDescriptor(size, min(size, self._max_num_seqs), False, sampling)

    def dispatch(
        self,
        *,
        num_rows: int,
        num_tokens: int,
        sampling: SamplingVariant | None,
    ) -> Dispatch:
        """sampling: None when the step asks for more than any recording holds."""
        if self._disabled_reason:
            return Dispatch(GraphMode.NONE, None, self._disabled_reason)
        if sampling is None:
            return Dispatch(GraphMode.NONE, None, "log-probabilities, penalties or min_tokens")
        if num_tokens == num_rows and num_rows < len(self._padded_rows):
            return Dispatch(GraphMode.FULL, self._decode(self._padded_rows[num_rows], sampling))
        if num_tokens < len(self._padded_tokens) and num_rows <= self._max_num_seqs:
            return Dispatch(GraphMode.FULL, self._mixed(self._padded_tokens[num_tokens], sampling))
        if num_tokens == num_rows:
            return Dispatch(GraphMode.NONE, None, f"more than {self.sizes[-1]} rows")
        if not self.mixed:
            return Dispatch(GraphMode.NONE, None, "a prompt is being computed")
        return Dispatch(GraphMode.NONE, None, f"a prompt, and more than {self.mixed[-1]} tokens")


def _padded(sizes: tuple[int, ...]) -> list[int]:
    """The smallest size that holds each count from 0 on."""
    return [sizes[bisect_left(sizes, n)] for n in range(sizes[-1] + 1)] if sizes else []
