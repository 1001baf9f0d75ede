"""How many steps may be in flight: two, or more while nobody waits and nobody joins the batch.

A process that holds the GIL, or a screen that draws, stops the engine thread; what is queued on the
device runs meanwhile. Each queued step is also a step that a new request waits for, and one that
computes for nobody if a stop token turns up before it. So the queue grows by one step at a time
while only decodes run, lasts about `run_ahead_ms`, and is given up at once when something waits.
Used by the core, on the engine thread; knows plans, times and no clock.
"""

from __future__ import annotations

import math

from termgen.vocabulary.step import MAX_STEPS_IN_FLIGHT, StepPlan, StepResult

NEWEST_WEIGHT = 0.25
"""Of the newest step in the mean time of a step."""


class RunAhead:
    """The depth that is allowed now."""

    def __init__(self, base: int, run_ahead_ms: float) -> None:
        """base: the depth at other times; at 1 (synchronous) it is the only one."""
        self._base = base
        self._run_ahead_ns = run_ahead_ms * 1e6 if base > 1 else 0.0
        self._depth = base
        self._is_steady = False
        self._step_ns = 0.0
        self._last_ended_ns = 0

    def planned(self, plan: StepPlan) -> None:
        """See whether a step only goes on with rows that decode. Some may have left."""
        if not self._run_ahead_ns:
            return
        self._is_steady = not plan.added and plan.total_tokens == plan.num_rows
        if not self._is_steady:
            self._depth = self._base

    def landed(self, plan: StepPlan, result: StepResult) -> None:
        """Measure a step, and let the queue grow by one step if nothing speaks against it."""
        if not self._run_ahead_ns:
            return
        started_ns = max(result.started_ns, self._last_ended_ns)
        self._last_ended_ns = result.ended_ns
        if plan.total_tokens > plan.num_rows:
            return  # a prompt says nothing about the decodes to come
        step_ns = max(0, result.ended_ns - started_ns)
        weight = NEWEST_WEIGHT if self._step_ns else 1.0
        self._step_ns += weight * (step_ns - self._step_ns)
        if self._is_steady:
            self._depth = min(self._depth + 1, self._most())

    def allowed(self, *, is_wanted: bool) -> int:
        """Steps that may be in flight. is_wanted: nothing waits, and there is room for more."""
        if not is_wanted:
            self._depth = self._base
        return self._depth

    def _most(self) -> int:
        """The step that runs, and as many behind it as last for the time asked for."""
        behind = math.ceil(min(self._run_ahead_ns / max(self._step_ns, 1.0), MAX_STEPS_IN_FLIGHT))
        return max(self._base, min(1 + behind, MAX_STEPS_IN_FLIGHT))
