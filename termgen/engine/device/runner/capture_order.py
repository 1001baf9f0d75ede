"""In which order recordings are made, and which of them serving waits for. Pure Python.

All recordings share one memory pool, so the largest of each kind comes first: the pool then has its
full size, and every later recording fits into it, whatever the order. With capture in the
background the sizes that most steps need follow; the others are made in idle moments.
"""

from __future__ import annotations

from collections.abc import Sequence

from termgen.engine.device.runner.dispatch import BatchDescriptor

USEFUL_DECODES = 8
"""Rows up to which decodes are recorded before anything is served: a conversation, or a few."""
USEFUL_TOKENS = 128
"""Likewise the tokens of steps that hold prompts: most chat messages."""


def split_by_use(
    descriptors: Sequence[BatchDescriptor],
) -> tuple[list[BatchDescriptor], list[BatchDescriptor]]:
    """(those to record before serving, those for idle moments), each in the order to make them."""
    largest: dict[tuple[bool, object], BatchDescriptor] = {}
    for descriptor in descriptors:
        kind = (descriptor.is_decode, descriptor.sampling)
        if kind not in largest or descriptor.num_tokens > largest[kind].num_tokens:
            largest[kind] = descriptor
    first = sorted(largest.values(), key=lambda d: (-d.num_tokens, -d.num_rows))
    others = [d for d in _by_use(descriptors) if d not in first]
    useful = [d for d in others if _is_useful(d)]
    return first + useful, [d for d in others if not _is_useful(d)]


def split_pieces_by_use(sizes: Sequence[int]) -> tuple[list[int], list[int]]:
    """The same of recordings cut at attention. A power of two stands in for those down to its half,
    so the small ones serve all short steps."""
    ordered = sorted(sizes)
    small = [n for n in ordered[:-1] if n <= USEFUL_TOKENS and n & (n - 1) == 0]
    first = ordered[-1:] + small
    return first, [n for n in ordered if n not in first]


def _is_useful(descriptor: BatchDescriptor) -> bool:
    most = USEFUL_DECODES if descriptor.is_decode else USEFUL_TOKENS
    return descriptor.num_tokens <= most


def _by_use(descriptors: Sequence[BatchDescriptor]) -> list[BatchDescriptor]:
    """Smallest first: few requests run at once far more often than many."""
    return sorted(descriptors, key=lambda d: (d.num_tokens, not d.is_decode))


def next_larger(
    wanted: BatchDescriptor, recorded: Sequence[BatchDescriptor], *, most_padding: int
) -> BatchDescriptor | None:
    """The smallest recording that can stand in for one that is not made yet.

    A decode reads the weights whatever its size, so any size will do; a step with prompts costs
    its tokens, so not one of more than `most_padding` times as many.
    """
    fits = [
        d
        for d in recorded
        if (d.is_decode, d.sampling) == (wanted.is_decode, wanted.sampling)
        and d.num_tokens >= wanted.num_tokens
        and d.num_rows >= wanted.num_rows
        and (d.is_decode or d.num_tokens <= most_padding * wanted.num_tokens)
    ]
    return min(fits, key=lambda d: d.num_tokens, default=None)
