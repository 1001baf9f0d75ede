"""Counts of what ran from a CUDA graph and what did not, since the dashboard began to listen.

Fed by the store with the steps of a frame; the graphs page draws the frozen `GraphFigures`. No
Textual.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

from termgen.vocabulary.events import StepRecord

MAX_SIZES = 512
"""Sizes and reasons kept apart; an engine records far fewer."""
_KIND = attrgetter(
    "graph_mode", "graph_reason", "num_decode_rows", "num_prefill_tokens", "num_padded_tokens"
)


@dataclass(frozen=True, slots=True)
class SizeFigures:
    """One recorded size in one mode."""

    mode: str
    size: int
    """Tokens of the recording: those of the step and its padding."""
    hits: int
    tokens: int
    padded: int

    @property
    def waste(self) -> float:
        """Share of the computed tokens that were padding."""
        total = self.tokens + self.padded
        return self.padded / total if total else 0.0


@dataclass(frozen=True, slots=True)
class GraphFigures:
    """What happened so far; the tuples have the most frequent first."""

    num_steps: int = 0
    modes: tuple[tuple[str, int], ...] = ()
    """Steps by mode: FULL, PIECEWISE, NONE."""
    sizes: tuple[SizeFigures, ...] = ()
    reasons: tuple[tuple[str, str, int], ...] = ()
    """Mode the step had to run in, why, and how often."""

    @property
    def share_recorded(self) -> float | None:
        """Steps run from a recording, whole or in pieces."""
        without = dict(self.modes).get("NONE", 0)
        return (self.num_steps - without) / self.num_steps if self.num_steps else None


class GraphStats:
    """Counts steps. `figures` is cheap to ask for again while nothing was counted."""

    def __init__(self) -> None:
        self._modes: Counter[str] = Counter()
        self._sizes: dict[tuple[str, int], list[int]] = {}
        self._reasons: Counter[tuple[str, str]] = Counter()
        self._figures: GraphFigures | None = GraphFigures()

    def add(self, steps: Sequence[StepRecord]) -> None:
        """Many steps are alike: those are counted at once."""
        self._figures = None
        for (mode, reason, decode, prefill, padded), number in Counter(map(_KIND, steps)).items():
            self._modes[mode] += number
            if reason:
                self._count_reason(mode, reason, number)
            tokens = decode + prefill
            key = (mode, tokens + padded)
            if mode == "NONE" or (key not in self._sizes and len(self._sizes) >= MAX_SIZES):
                continue
            counts = self._sizes.setdefault(key, [0, 0, 0])
            for i, more in enumerate((1, tokens, padded)):
                counts[i] += number * more

    def _count_reason(self, mode: str, reason: str, number: int) -> None:
        key = (mode, reason)
        self._reasons[
            key if key in self._reasons or len(self._reasons) < MAX_SIZES else (mode, "other")
        ] += number

    @property
    def figures(self) -> GraphFigures:
        if self._figures is None:
            sizes = [SizeFigures(mode, size, *c) for (mode, size), c in self._sizes.items()]
            self._figures = GraphFigures(
                num_steps=sum(self._modes.values()),
                modes=tuple(self._modes.most_common()),
                sizes=tuple(sorted(sizes, key=lambda s: (-s.hits, s.mode, s.size))),
                reasons=tuple((m, why, n) for (m, why), n in self._reasons.most_common()),
            )
        return self._figures
