"""Counts of what ran from a CUDA graph and what did not, since the dashboard began to listen.

Fed by the store with every step; the graphs page draws the frozen `GraphFigures`. No Textual.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from termgen.engine.events import StepRecord

MAX_SIZES = 512
"""Sizes and reasons kept apart; an engine records far fewer."""


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


class GraphStats:
    """Counts steps. `figures` is cheap to ask for again while nothing was counted."""

    def __init__(self) -> None:
        self._modes: Counter[str] = Counter()
        self._sizes: dict[tuple[str, int], list[int]] = {}
        self._reasons: Counter[tuple[str, str]] = Counter()
        self._figures: GraphFigures | None = GraphFigures()

    def add(self, step: StepRecord) -> None:
        self._figures = None
        mode = step.graph_mode
        self._modes[mode] += 1
        if step.graph_reason:
            self._count_reason(mode, step.graph_reason)
        if mode == "NONE":
            return
        tokens = step.num_decode_rows + step.num_prefill_tokens
        key = (mode, tokens + step.num_padded_tokens)
        if key not in self._sizes and len(self._sizes) >= MAX_SIZES:
            return
        counts = self._sizes.setdefault(key, [0, 0, 0])
        for i, more in enumerate((1, tokens, step.num_padded_tokens)):
            counts[i] += more

    def _count_reason(self, mode: str, reason: str) -> None:
        key = (mode, reason)
        self._reasons[
            key if key in self._reasons or len(self._reasons) < MAX_SIZES else (mode, "other")
        ] += 1

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
