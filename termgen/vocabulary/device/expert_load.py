"""How evenly the tokens of a mixture go to its experts. Vocabulary: no torch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

MOST_COLUMNS = 64
"""Cells of a layer: neighbouring experts share one where there are more."""
FULL = 255
"""A cell whose experts have four times an even share each, or more."""
FULL_SHARE = 4.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExpertLoad:
    """Counted since the start: of each layer with experts, the tokens that went to each of them."""

    num_experts: int
    """Experts of a layer, without one that all tokens go to."""
    num_choices: int
    """Pairs of a token and an expert, of all layers together."""
    peaks: npt.NDArray[np.float32]
    """[layers] the share of the most used expert, as a multiple of an even one; 1: all alike."""
    busiest: npt.NDArray[np.int32]
    """[layers] that expert."""
    num_unused: npt.NDArray[np.int32]
    """[layers] experts that no token went to."""
    cells: npt.NDArray[np.uint8]
    """[layers, columns] shares of neighbouring experts, `FULL` being `FULL_SHARE` times an even
    one."""

    def __post_init__(self) -> None:
        """Check what another process says. Raises ValueError."""
        shapes = {self.peaks.shape, self.busiest.shape, self.num_unused.shape}
        is_whole = len(shapes) == 1 and self.peaks.ndim == 1 and self.peaks.size > 0
        is_filled = self.cells.ndim == 2 and len(self.cells) == len(self.peaks)
        if not is_whole or not is_filled or not self.cells.size or self.num_experts < 1:
            raise ValueError("experts: figures of other layers or experts than there are")
        if not np.isfinite(self.peaks).all():
            raise ValueError("experts: peaks must be numbers")

    @classmethod
    def of(cls, counts: npt.NDArray[np.int64]) -> ExpertLoad:
        """counts: [layers, experts]."""
        num_layers, num_experts = counts.shape
        totals = counts.sum(axis=1, keepdims=True)
        shares = counts * (num_experts / np.maximum(totals, 1))
        columns = min(num_experts, MOST_COLUMNS)
        starts = np.arange(columns) * num_experts // columns
        widths = np.diff(np.append(starts, num_experts))
        means = np.add.reduceat(shares, starts, axis=1) / widths
        return cls(
            num_experts=num_experts,
            num_choices=int(totals.sum()),
            peaks=shares.max(axis=1).astype(np.float32),
            busiest=counts.argmax(axis=1).astype(np.int32),
            num_unused=(counts == 0).sum(axis=1).astype(np.int32),
            cells=np.minimum(FULL, np.ceil(means * (FULL / FULL_SHARE))).astype(np.uint8),
        )

    @property
    def imbalance(self) -> float:
        """Mean of the layers' peaks; 0 before the first token."""
        return float(self.peaks.mean()) if self.num_choices else 0.0

    @property
    def worst_layer(self) -> int:
        return int(self.peaks.argmax())

    @property
    def unused_share(self) -> float:
        """Part of all experts that no token went to."""
        return float(self.num_unused.sum()) / (len(self.peaks) * self.num_experts)
