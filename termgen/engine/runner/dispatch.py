"""Which recorded graph a step may replay, decided from counts the host knows. Pure Python.

The dispatcher is separate from the graphs themselves so that every (rows, tokens) pair can be
tested without a GPU. A step that replays nothing always has a reason, which screens show.
"""

from __future__ import annotations

import enum
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from termgen.engine.step import StepPlan


class GraphMode(enum.StrEnum):
    FULL = "FULL"
    """The whole step is one graph: inputs, model, sampling, state update."""
    NONE = "NONE"
    """Operations are launched one by one."""


class SamplingVariant(enum.StrEnum):
    """Which sampling a full graph contains; steps that need more sample eagerly."""

    GREEDY = "greedy"
    RANDOM = "random"
    """Temperature only; greedy rows may be among them."""
    FILTERED = "filtered"
    """Temperature with top-k, top-p or min-p."""


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
        if self.filters:
            return SamplingVariant.FILTERED
        return SamplingVariant.GREEDY if self.all_greedy else SamplingVariant.RANDOM


NEEDS = {
    SamplingVariant.GREEDY: SamplingNeeds(all_greedy=True),
    SamplingVariant.RANDOM: SamplingNeeds(),
    SamplingVariant.FILTERED: SamplingNeeds(filters=True),
}
"""What each recording does."""


@dataclass(frozen=True, slots=True)
class BatchDescriptor:
    """What distinguishes one recording from another: one token for each of `num_rows` rows."""

    num_rows: int
    """Padded."""
    sampling: SamplingVariant


@dataclass(frozen=True, slots=True)
class Dispatch:
    """The decision for one step."""

    mode: GraphMode
    descriptor: BatchDescriptor | None
    reason: str = ""
    """Why nothing is replayed; empty when something is."""

    def num_padded(self, num_rows: int) -> int:
        return self.descriptor.num_rows - num_rows if self.descriptor is not None else 0


def capture_sizes(max_num_seqs: int, largest: int = 512) -> tuple[int, ...]:
    """Row counts to record, ascending: dense where padding costs most, always `max_num_seqs`."""
    sizes = {1, 2, 4, *range(8, 65, 8), *range(80, 257, 16), *range(288, largest + 1, 32)}
    top = min(max_num_seqs, largest)
    return tuple(sorted({s for s in sizes if s < top} | {top}))


class CudaGraphDispatcher:
    """Maps a step to a recording through a precomputed table of padded sizes."""

    def __init__(self, sizes: Sequence[int], *, disabled_reason: str = "") -> None:
        """disabled_reason: why no graph is ever used, when that is so."""
        self.sizes = tuple(sorted(sizes))
        self._disabled_reason = disabled_reason
        self._padded = [self.sizes[bisect_left(self.sizes, n)] for n in range(self.largest + 1)]

    @property
    def largest(self) -> int:
        return self.sizes[-1] if self.sizes else -1

    def descriptors(self) -> list[BatchDescriptor]:
        """Every recording to make, the largest first: later ones fit into its memory."""
        return [
            BatchDescriptor(size, variant)
            for size in reversed(self.sizes)
            for variant in SamplingVariant
        ]

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
        if num_tokens != num_rows:
            return Dispatch(GraphMode.NONE, None, "a prompt is being computed")
        if num_rows > self.largest:
            return Dispatch(GraphMode.NONE, None, f"more than {self.largest} rows")
        if sampling is None:
            return Dispatch(GraphMode.NONE, None, "log-probabilities, penalties or min_tokens")
        return Dispatch(GraphMode.FULL, BatchDescriptor(self._padded[num_rows], sampling))
