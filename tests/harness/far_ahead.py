"""A run-ahead that always queues all it may, as after a pause longer than `run_ahead_ms`."""

from __future__ import annotations

from termgen.engine.loop.control import RunAhead


class FarAhead(RunAhead):
    @property
    def covered_ns(self) -> float:
        return self._most_ns
