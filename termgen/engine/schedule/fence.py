"""Holds back released slots and blocks until no step in flight can access them.

A slot and its blocks may be reused only after the last step that computes them has ended on the
device. Doing so without exception costs little and removes a whole class of races.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

Lease = tuple[int, int, list[int]]
"""(last step that computes it, slot, its blocks tail first)."""


class Fence:
    """Released slots that are not reusable yet, in order of release."""

    def __init__(self) -> None:
        self._held: deque[Lease] = deque()
        self.landed_step = -1
        """Newest step known to have ended; steps end in order."""
        self.num_blocks = 0
        """Block references held back."""

    def hold(self, last_step: int, slot: int, blocks: list[int]) -> bool:
        """Hold a release back if needed. False: no step is in flight, so reuse it now."""
        if last_step <= self.landed_step:
            return False
        self._held.append((last_step, slot, blocks))
        self.num_blocks += len(blocks)
        return True

    def land(self, step_id: int) -> list[Lease]:
        """Record that this step and all before it have ended; returns the reusable leases."""
        self.landed_step = max(self.landed_step, step_id)
        if not self._held:
            return []
        freed = [lease for lease in self._held if lease[0] <= self.landed_step]
        self._held = deque(lease for lease in self._held if lease[0] > self.landed_step)
        self.num_blocks -= sum(len(blocks) for _, _, blocks in freed)
        return freed

    def __iter__(self) -> Iterator[Lease]:
        return iter(self._held)
