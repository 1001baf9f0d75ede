"""Pause, resume, reset and sleep of an engine that may have steps in flight.

`EngineControl` belongs to the core and lives on its thread. The core calls `may_launch` before each
launch and `settle` after each turn. Commands that wait for steps to land return a future. Front
ends reach it with `core.call`. Knows the scheduler, and of steps only their numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import get_args

from termgen.client import PauseMode, SleepLevel
from termgen.engine.schedule.request_queue import first_begun
from termgen.engine.schedule.scheduler import Scheduler
from termgen.errors import EngineError, RequestError
from termgen.vocabulary.request import FinishReason
from termgen.vocabulary.step import FinishedRow


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
        return bool(self._scheduler.num_running or first_begun(self._scheduler.waiting))

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
