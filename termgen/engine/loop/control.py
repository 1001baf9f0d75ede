"""What the loop may launch: after pause, resume, reset and sleep, and how many steps ahead.

`EngineControl` belongs to the core and lives on its thread. The core calls `may_launch` before each
launch and `settle` after each turn. Commands that wait for steps to land return a future. Front
ends reach it with `core.call`. Knows the scheduler, and of steps only their numbers. `RunAhead`
bounds the steps in flight.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import get_args

from termgen.client import PauseMode, SleepLevel
from termgen.engine.schedule.scheduler import Scheduler
from termgen.errors import EngineError, RequestError
from termgen.vocabulary.request import FinishReason, RequestStatus
from termgen.vocabulary.step import MAX_STEPS_IN_FLIGHT, FinishedRow, StepPlan, StepResult

NEWEST_WEIGHT = 0.25
"""Weight of the newest step in the mean step time."""
WINDOW_S = 3.0
"""Time that a pause is covered: so that one a second stays covered, even if one of them falls into
a prefill. A pause of 20 ms that comes less often costs the device under 0.7% of its time, which is
not worth a longer wait of every request."""


@dataclass(frozen=True, slots=True)
class _Reset:
    force: bool
    last_step: int
    """The newest step planned at the time of the call, which waits for it to land."""
    done: Future[bool] = field(default_factory=Future)


class EngineControl:
    """The engine's pause and sleep state, and the callers that wait for it to be idle."""

    def __init__(
        self,
        scheduler: Scheduler,
        *,
        on_ended: Callable[[list[FinishedRow]], None],
        on_preempted: Callable[[str], None],
    ) -> None:
        self._scheduler = scheduler
        self._on_ended = on_ended
        self._on_preempted = on_preempted
        self._mode: PauseMode | None = None
        self._pauses: list[Future[None]] = []
        self._resets: list[_Reset] = []
        self.is_resting = False
        """Paused, with nothing left to do before `resume`. Any thread may read it."""
        self.sleep_level = 0
        """0: awake. Any thread may read it."""

    @property
    def is_paused(self) -> bool:
        return self._mode is not None

    @property
    def may_launch(self) -> bool:
        """False while no step may follow those in flight."""
        if self._mode not in (None, "wait"):
            return False
        return not (self._resets and any(reset.force for reset in self._resets))

    def pause(self, mode: PauseMode) -> Future[None]:
        """See `EngineClient.pause`. A later mode replaces an earlier one."""
        if mode not in get_args(PauseMode):
            raise RequestError(
                f"mode must be one of {', '.join(get_args(PauseMode))}, not {mode!r}", param="mode"
            )
        self._check_awake()
        self._mode = mode
        self._scheduler.admits_new = False
        self.is_resting = False
        if mode == "abort":
            self._on_ended(finish_all(self._scheduler))
        done: Future[None] = Future()
        self._pauses.append(done)
        return done

    def resume(self) -> None:
        """Continue. Callers that still wait for a pause to take effect get an error."""
        self._check_awake()
        self._mode = None
        self._scheduler.admits_new = True
        self.is_resting = False
        self._fail_pauses(EngineError("the engine was resumed before it had come to rest"))

    def lie_down(self, level: int) -> None:
        """Prepare for sleep: the device is about to lose its KV cache, so drop all cached KV."""
        self._check_awake()
        if not self.is_resting:
            raise EngineError("the engine was resumed before it could sleep")
        self.sleep_level = level
        self._reset(force=True, why="the engine sleeps")

    def get_up(self) -> None:
        """Continue after sleep."""
        self.sleep_level = 0
        self.resume()

    def _check_awake(self) -> None:
        if self.sleep_level:
            raise RequestError(
                f"the engine sleeps at level {self.sleep_level}; wake it up first",
                code="asleep",
                status=409,
            )

    def reset_prefix_cache(self, force: bool) -> Future[bool]:
        """See `EngineClient.reset_prefix_cache`."""
        reset = _Reset(force, self._scheduler.newest_step)
        self._resets.append(reset)
        return reset.done

    def settle(self) -> None:
        """Answer waiting callers at the end of a turn, after its delivery.

        With nothing in flight and nothing running no caller is left waiting, so the loop may sleep.
        """
        landed = self._scheduler.fence.landed_step
        if self._resets:
            due = [reset for reset in self._resets if reset.last_step <= landed]
            self._resets = [reset for reset in self._resets if reset.last_step > landed]
            for reset in due:
                is_empty = self._reset(reset.force)
                if reset.done.set_running_or_notify_cancel():
                    reset.done.set_result(is_empty)
        if self._mode is None or self.is_resting or landed < self._scheduler.newest_step:
            return
        self.is_resting = self._mode != "wait" or not self._has_begun
        if self.is_resting:
            pauses, self._pauses = self._pauses, []
            for done in pauses:
                if done.set_running_or_notify_cancel():
                    done.set_result(None)

    def close(self, error: EngineError) -> None:
        """Fail all waiting callers: no step will follow."""
        self._fail_pauses(error)
        resets, self._resets = self._resets, []
        for reset in resets:
            if reset.done.set_running_or_notify_cancel():
                reset.done.set_exception(error)

    @property
    def _has_begun(self) -> bool:
        """True if any request is running or preempted."""
        waiting = self._scheduler.waiting
        return bool(self._scheduler.num_running) or any(
            request.status is RequestStatus.PREEMPTED for request in waiting
        )

    def _reset(self, force: bool, why: str = "the prefix cache was reset") -> bool:
        if not force:
            return self._scheduler.reset_prefix_cache()
        self._scheduler.recompute_all()
        self._on_preempted(why)
        return True

    def _fail_pauses(self, error: EngineError) -> None:
        pauses, self._pauses = self._pauses, []
        for done in pauses:
            if done.set_running_or_notify_cancel():
                done.set_exception(error)


def end_failed(scheduler: Scheduler) -> list[FinishedRow]:
    """End the requests whose next mask cannot be filled."""
    rows = [
        scheduler.finish(request.request_id, FinishReason.ERROR, error)
        for request, error in scheduler.constraints.take_failed()
        if scheduler.requests.get(request.request_id) is request
    ]
    return [row for row in rows if row is not None]


def finish_all(scheduler: Scheduler) -> list[FinishedRow]:
    """End every request, running or waiting, with reason ABORT."""
    table = scheduler.slots
    requests = [table.request_at(slot) for slot in table.running.tolist()] + [*scheduler.waiting]
    rows = [scheduler.finish(request.request_id, FinishReason.ABORT) for request in requests]
    return [row for row in rows if row is not None]


def check_level(level: object) -> None:
    """Raises RequestError; called before the pause, so that a wrong level changes nothing."""
    if isinstance(level, bool) or level not in get_args(SleepLevel):
        raise RequestError(f"level must be 1 or 2, not {level!r:.40}", param="level")


# Number of steps in flight: two, or as many as the host's recent pauses need.
#
# While another thread holds the GIL, such as a screen that draws, the engine thread stalls, but
# steps queued on the device run. On the other hand a new request waits for every queued step, and a
# stop token makes the steps after it useless. So the queue covers the longest pause of the last
# seconds, at most `run_ahead_ms`; in a quiet process it has no step more than without. It grows by
# one step at a time while only decodes run, and shrinks at once when a request waits.
#
# A pause is measured where it costs: from the device's end of a step to the launch that its landing
# made room for. With d steps in flight, the device is idle if that takes longer than d - 1 steps.


class RunAhead:
    """The currently allowed number of steps in flight. Used by the core, on the engine thread;
    knows plans and times, but no clock."""

    def __init__(self, base: int, run_ahead_ms: float) -> None:
        """base: depth when not running ahead; with 1 (synchronous) it never runs ahead.
        run_ahead_ms: the longest pause to cover."""
        self._base = base
        self._most_ns = run_ahead_ms * 1e6 if base > 1 else 0.0
        self._depth = base
        self._num_steady = 0
        """Newest launches in a row that only decode rows of the step before, without masks."""
        self._step_ns = 0.0
        self._ended_ns = self._launched_ns = 0
        self._has_landed = False
        """A step has landed since the newest launch."""
        self._pauses: deque[tuple[int, float]] = deque()
        """(time, length in ns) of the recent ones, each longer than all that follow."""

    def launched(self, plan: StepPlan, launched_ns: int, num_ahead: int) -> None:
        """Note a launch, and how long the host was away before it.
        num_ahead: steps in flight before it."""
        if not self._most_ns:
            return
        if plan.is_decode and not plan.added:
            # A row with a grammar makes the host wait for masks: no pause, but no prefill either.
            self._num_steady = self._num_steady + 1 if plan.constrained is None else 0
        else:
            self._num_steady, self._depth = 0, self._base
        # The step that landed, those in flight and this one are all steady. With none in flight the
        # engine was idle, paused or asleep, or the steps before had ended all requests.
        if self._has_landed and num_ahead and self._num_steady >= num_ahead + 2:
            # Time for landing what had ended before the last launch is the host's pace, no pause.
            away_ns = launched_ns - max(self._ended_ns, self._launched_ns)
            if away_ns > (self._base - 1) * self._step_ns:
                self._add_pause(launched_ns, away_ns)
        self._has_landed = False
        self._launched_ns = launched_ns

    def _add_pause(self, time_ns: int, away_ns: int) -> None:
        """Add a pause: it may have begun up to a step before the end of the step that shows it."""
        length_ns = away_ns + self._step_ns
        while self._pauses and self._pauses[-1][1] <= length_ns:
            self._pauses.pop()
        self._pauses.append((time_ns, length_ns))

    def landed(self, plan: StepPlan, result: StepResult) -> None:
        """Measure a step, and let the queue grow by one step if a recent pause needs it."""
        if not self._most_ns:
            return
        started_ns = max(result.started_ns, self._ended_ns)
        self._ended_ns = result.ended_ns
        self._has_landed = True
        while self._pauses and result.ended_ns - self._pauses[0][0] > WINDOW_S * 1e9:
            self._pauses.popleft()
        if not plan.is_decode:
            return  # a prefill's time does not predict decode steps
        step_ns = max(0, result.ended_ns - started_ns)
        weight = NEWEST_WEIGHT if self._step_ns else 1.0
        self._step_ns += weight * (step_ns - self._step_ns)
        if self._num_steady:
            self._depth = min(self._depth + 1, self._needed())

    def allowed(self, *, is_wanted: bool) -> int:
        """Steps that may be in flight. is_wanted: no request waits, and there are blocks left."""
        if not is_wanted:
            self._depth = self._base
        return self._depth

    @property
    def covered_ns(self) -> float:
        """Longest pause of the last seconds, at most `run_ahead_ms`; 0: none that two steps in
        flight do not cover."""
        return min(self._pauses[0][1], self._most_ns) if self._pauses else 0.0

    def _needed(self) -> int:
        """The running step, and as many as last for the pause to cover."""
        behind = math.ceil(min(self.covered_ns / max(self._step_ns, 1.0), MAX_STEPS_IN_FLIGHT))
        return max(self._base, min(1 + behind, MAX_STEPS_IN_FLIGHT))
