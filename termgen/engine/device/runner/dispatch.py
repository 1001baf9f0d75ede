"""Which recorded graph a step may replay, decided from counts the host knows. Pure Python.

The dispatcher is separate from the graphs themselves so that every (rows, tokens) pair can be
tested without a GPU. A step that replays nothing always has a reason, which screens show.
"""

from __future__ import annotations

import enum
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from termgen.vocabulary.sampling_params import MAX_LOGPROBS
from termgen.vocabulary.step import SamplingNeeds

EVERYTHING = SamplingNeeds(
    filters=True,
    grammar=True,
    penalties=True,
    min_tokens=True,
    edits=True,
    max_logprobs=MAX_LOGPROBS,
)
"""All sampler features at once."""

PLAIN_TOKENS = 64
"""Steps with prompts and more tokens than this are recorded for any sampling alone: its few
launches are a small part of them."""

MOST_DRAFTED_TOKENS = 512
"""Tokens of the largest step with drafts that is recorded: beyond, arithmetic bounds a step, and a
draft costs what a token does."""

RECORDED_SHARE = 0.02
"""Share of the device's memory that the activations of recordings may take: a second copy, beside
that of steps without a recording."""


class GraphMode(enum.StrEnum):
    FULL = "FULL"
    """The whole step is one graph: inputs, model, sampling, state update."""
    PIECEWISE = "PIECEWISE"
    """Inputs and model are graphs with attention between them; sampling is launched after them."""
    NONE = "NONE"
    """Operations are launched one by one."""


class SamplingVariant(enum.StrEnum):
    """The sampling that a full graph contains, part of its key."""

    PLAIN = "plain"
    """Greedy rows and rows with a temperature."""
    ANY = "any"
    """Rows with anything. Each costs what it asks for; but a plain step would take a few launches
    more."""


def variant_of(needs: SamplingNeeds) -> SamplingVariant:
    """The sampling of the recordings that fit."""
    return SamplingVariant.PLAIN if needs.is_plain else SamplingVariant.ANY


NEEDS = {
    SamplingVariant.PLAIN: SamplingNeeds(),
    SamplingVariant.ANY: EVERYTHING,
}
"""Sampler features of the recordings that sample."""


@dataclass(frozen=True, slots=True)
class BatchDescriptor:
    """What distinguishes one recording of a whole step from another. Sizes are padded ones."""

    num_tokens: int
    num_rows: int
    is_decode: bool
    """Each row has one token, and drafts; otherwise any rows and tokens up to these numbers."""
    sampling: SamplingVariant
    num_drafts: int = 0
    """Drafts among the tokens of each row, in a decode."""
    is_idle: bool = False
    """True if it makes no drafts for the next step, in a decode that has none."""


@dataclass(frozen=True, slots=True)
class Dispatch:
    """The decision for one step."""

    mode: GraphMode
    descriptor: BatchDescriptor | None = None
    """The recording of a FULL step."""
    padded_tokens: int | None = None
    """Tokens that the recording computes; None when nothing is replayed. It is all that
    distinguishes the recordings of PIECEWISE steps."""
    reason: str = ""
    """Why no recording of the whole step serves, where one might be expected."""

    def num_padded(self, num_tokens: int) -> int:
        return 0 if self.padded_tokens is None else self.padded_tokens - num_tokens


def decode_sizes(max_num_seqs: int, largest: int = 512) -> tuple[int, ...]:
    """Row counts to record, ascending: dense where padding costs most, always `max_num_seqs`."""
    sizes = {1, 2, 4, *range(8, 65, 8), *range(80, 257, 16), *range(288, largest + 1, 32)}
    top = min(max_num_seqs, largest)
    return tuple(sorted({s for s in sizes if s < top} | {top}))


def drafted_sizes(
    sizes: Sequence[int], lengths: Sequence[int], most_tokens: int
) -> tuple[tuple[int, int], ...]:
    """(rows, drafts of each) to record. sizes: rows of decodes; lengths: numbers of drafts."""
    return tuple((rows, k) for k in lengths for rows in sizes if rows * (1 + k) <= most_tokens)


def mixed_sizes(max_num_batched_tokens: int, largest: int = 8192) -> tuple[int, ...]:
    """Token counts to record for steps that hold prompts, ascending: close together, since padding
    costs what a prompt's tokens cost."""
    middle = (*range(128, 1025, 64), *range(1152, 2049, 128))
    sizes = {16, 32, 64, *middle, *range(2560, 8193, 512)}
    return tuple(sorted(s for s in sizes if s <= min(largest, max_num_batched_tokens)))


def most_recorded_tokens(max_num_batched_tokens: int, activations: int, total: int) -> int:
    """Size up to which steps that hold prompts are recorded: launched one by one, their operations
    take the host tens of milliseconds where others want the GIL. Up to 2048 tokens, and more where
    memory is plenty. activations: bytes of the largest step; total: those of the device."""
    return max(2048, int(max_num_batched_tokens * RECORDED_SHARE * total / max(1, activations)))


def piecewise_sizes(max_num_seqs: int, max_num_batched_tokens: int) -> tuple[int, ...]:
    """Token counts to record for steps cut at attention, ascending. Each is many recordings, so
    those that hold prompts are further apart."""
    prompts = {16, 32, 64, 128, 256, 384, 512, 768, 1024, 1536, 2048}
    mixed = {size for size in prompts if size <= max_num_batched_tokens}
    return tuple(sorted({*decode_sizes(max_num_seqs), *mixed}))


class CudaGraphDispatcher:
    """Maps a step to a recording through precomputed tables of padded sizes.

    A recording of the whole step comes first, then the pieces of its token count, then nothing.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        *,
        mixed: Sequence[int] = (),
        piecewise: Sequence[int] = (),
        drafted: Sequence[tuple[int, int]] = (),
        has_idle: bool = False,
        max_num_seqs: int = 0,
        disabled_reason: str = "",
        why_not_full: str = "",
    ) -> None:
        """sizes: rows of the decode recordings; drafted: rows of those with drafts, and drafts of
        each; has_idle: those without drafts are recorded as idle steps, too; mixed: tokens of the
        others, whose rows are as many as their tokens allow, `max_num_seqs` at most; piecewise:
        tokens of the recordings that are cut at attention and hold any rows. disabled_reason: why
        no graph is ever used, when that is so; why_not_full: the same of whole steps, where they
        were asked for."""
        assert max_num_seqs or not (mixed or piecewise), "their rows go by max_num_seqs"
        self.sizes = tuple(sorted(sizes))
        self.mixed = tuple(sorted(mixed))
        self.piecewise = tuple(sorted(piecewise))
        self.drafted = tuple(sorted(drafted))
        self.has_idle = has_idle
        self.max_num_seqs = max_num_seqs
        self.disabled_reason = disabled_reason
        self._why_not_full = why_not_full
        self._padded_rows = _padded(self.sizes)
        self._padded_tokens = _padded(self.mixed)
        self._padded_pieces = _padded(self.piecewise)
        self.draft_lengths = tuple(sorted({k for _, k in self.drafted}))
        self._padded_drafted = {
            k: _padded(tuple(rows for rows, of_each in self.drafted if of_each == k))
            for k in self.draft_lengths
        }

    @property
    def is_empty(self) -> bool:
        return not (self.sizes or self.mixed or self.piecewise or self.drafted)

    @property
    def num_recordings(self) -> int:
        """Recordings of steps: one that is cut at attention counts once."""
        return len(self.descriptors()) + len(self.piecewise)

    @property
    def max_rows(self) -> int:
        """The most rows of any recording; 0 when there is none."""
        tokens = max((*self.mixed, *self.piecewise), default=0)
        rows = (rows for rows, _ in self.drafted)
        return max((min(tokens, self.max_num_seqs), *self.sizes, *rows))

    def descriptors(self) -> list[BatchDescriptor]:
        """Every recording of a whole step, the largest first: later ones fit into its memory."""
        plain, unusual = SamplingVariant
        kinds = (False, True) if self.has_idle else (False,)
        found = [
            self._decode(size, v, is_idle=is_idle)
            for size in self.sizes
            for v in (plain, unusual)
            for is_idle in kinds
        ]
        found += [self._drafted(*size, v) for size in self.drafted for v in (plain, unusual)]
        found += [self._mixed(s, plain) for s in self.mixed if s <= PLAIN_TOKENS]
        found += [self._mixed(s, unusual) for s in self.mixed]
        return sorted(found, key=lambda d: (-d.num_tokens, -d.num_rows))

    def up_to(self, num_tokens: int) -> CudaGraphDispatcher:
        """A dispatcher without the larger recordings of whole steps that hold prompts."""
        return CudaGraphDispatcher(
            self.sizes,
            mixed=[size for size in self.mixed if size <= num_tokens],
            piecewise=self.piecewise,
            drafted=self.drafted,
            has_idle=self.has_idle,
            max_num_seqs=self.max_num_seqs,
            disabled_reason=self.disabled_reason,
            why_not_full=self._why_not_full,
        )

    def largest(self) -> CudaGraphDispatcher:
        """A dispatcher of only the largest recordings, whose memory all others fit into."""
        return CudaGraphDispatcher(
            self.sizes[-1:],
            mixed=self.mixed[-1:],
            piecewise=self.piecewise[-1:],
            drafted=sorted(self.drafted, key=lambda size: size[0] * (1 + size[1]))[-1:],
            max_num_seqs=self.max_num_seqs,
        )

    def _decode(
        self, size: int, sampling: SamplingVariant, *, is_idle: bool = False
    ) -> BatchDescriptor:
        return BatchDescriptor(size, size, True, sampling, is_idle=is_idle)

    def _drafted(self, rows: int, num_drafts: int, sampling: SamplingVariant) -> BatchDescriptor:
        return BatchDescriptor(rows * (1 + num_drafts), rows, True, sampling, num_drafts)

    def _mixed(self, size: int, sampling: SamplingVariant) -> BatchDescriptor:
        return BatchDescriptor(size, min(size, self.max_num_seqs), False, sampling)

    def dispatch(
        self,
        *,
        num_rows: int,
        num_tokens: int,
        sampling: SamplingVariant,
        num_drafts: int = 0,
        is_idle: bool = False,
    ) -> Dispatch:
        """num_drafts: the most of any row, in a decode. is_idle: no drafts need be made."""
        if self.disabled_reason:
            return Dispatch(GraphMode.NONE, reason=self.disabled_reason)
        if num_drafts:
            return self._with_drafts(num_rows, num_drafts, sampling)
        full = self._full(num_rows, num_tokens, sampling, is_idle and self.has_idle)
        if full is not None:
            return Dispatch(GraphMode.FULL, full, full.num_tokens)
        reason = self._miss(num_rows, num_tokens)
        if num_tokens >= len(self._padded_pieces):
            return Dispatch(GraphMode.NONE, reason=reason)
        if not self._recorded_whole(num_rows, num_tokens):
            reason = self._why_not_full  # pieces are what was asked for
        size = self._padded_pieces[num_tokens]
        return Dispatch(GraphMode.PIECEWISE, padded_tokens=size, reason=reason)

    def _with_drafts(self, num_rows: int, num_drafts: int, sampling: SamplingVariant) -> Dispatch:
        for k in self.draft_lengths:
            if k >= num_drafts and num_rows < len(padded := self._padded_drafted[k]):
                found = self._drafted(padded[num_rows], k, sampling)
                return Dispatch(GraphMode.FULL, found, found.num_tokens)
        return Dispatch(
            GraphMode.NONE, reason=f"more rows than are recorded with {num_drafts} drafts"
        )

    def _full(
        self, num_rows: int, num_tokens: int, sampling: SamplingVariant, is_idle: bool
    ) -> BatchDescriptor | None:
        if num_tokens == num_rows and num_rows < len(self._padded_rows):
            return self._decode(self._padded_rows[num_rows], sampling, is_idle=is_idle)
        if num_tokens >= len(self._padded_tokens) or num_rows > self.max_num_seqs:
            return None
        size = self._padded_tokens[num_tokens]
        if sampling is SamplingVariant.PLAIN and size > PLAIN_TOKENS:
            sampling = SamplingVariant.ANY
        return self._mixed(size, sampling)

    def _recorded_whole(self, num_rows: int, num_tokens: int) -> tuple[int, ...]:
        """Sizes of the whole steps of this kind, decodes or others, that are recorded."""
        return self.sizes if num_tokens == num_rows else self.mixed

    def _miss(self, num_rows: int, num_tokens: int) -> str:
        """Why no recording of the whole step serves, or none at all where only pieces could."""
        is_decode = num_tokens == num_rows
        if is_decode and self.sizes:
            return f"more than {self.sizes[-1]} rows"
        largest = max((*self.mixed, *self.piecewise), default=0)
        if not largest:
            return "a prompt is being computed"
        return f"{'' if is_decode else 'a prompt, and '}more than {largest} tokens"


def _padded(sizes: tuple[int, ...]) -> list[int]:
    """The smallest size that holds each count from 0 on."""
    return [sizes[bisect_left(sizes, n)] for n in range(sizes[-1] + 1)] if sizes else []
