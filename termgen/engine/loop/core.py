"""The loop: inbox -> schedule -> submit -> land -> apply -> deliver.

`EngineCore` joins the host half (scheduler) and the device half (executor) through frozen plans
and results. One thread calls `step`; any thread may call `submit`, `abort` and `call`, which only
append to the inbox. Output goes through `on_delivery` and the event bus.
"""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np

from termgen.engine.loop.control import EngineControl, RunAhead, end_failed, finish_all
from termgen.engine.loop.event_publisher import EventPublisher, StepTimes
from termgen.engine.loop.executor import Executor, StepHandle
from termgen.engine.loop.snapshot import StateCopy, copy_state
from termgen.engine.schedule.effects import AppliedStep
from termgen.engine.schedule.scheduler import Scheduler
from termgen.errors import EngineError, RequestError, StepError, TermgenError
from termgen.vocabulary.events import EventBus, StepRecord
from termgen.vocabulary.request import FinishReason, GenerationRequest, Request
from termgen.vocabulary.step import (
    FinishedRow,
    PromptLogprobs,
    StartedRow,
    StepDelivery,
    StepLogprobs,
    StepPlan,
)

DEPTH_WITH_MASKS = 2
"""Steps in flight while rows need masks: a third would wait for those of the second."""


@dataclass(slots=True)
class _InFlight:
    plan: StepPlan
    handle: StepHandle
    times: StepTimes


class EngineCore:
    """Single owner of scheduler and executor."""

    def __init__(
        self,
        executor: Executor,
        scheduler: Scheduler,
        *,
        max_in_flight: int,
        max_model_len: int,
        eos_token_ids: frozenset[int],
        seed: int,
        on_delivery: Callable[[StepDelivery], None],
        bus: EventBus | None = None,
        run_ahead_ms: float = 0.0,
    ) -> None:
        self.executor = executor
        self.scheduler = scheduler
        self.bus = bus or EventBus()
        self._publisher = EventPublisher(self.bus, scheduler)
        self.run_ahead = RunAhead(max_in_flight, run_ahead_ms)
        """May be replaced between two steps."""
        self._max_model_len = max_model_len
        self._eos_token_ids = eos_token_ids
        self._seeds = random.Random(seed)
        self._on_delivery = on_delivery
        self._inbox: deque[InboxItem] = deque()
        self._calls: deque[Call] = deque()
        self._closed: EngineError | None = None
        self._wake = threading.Event()
        self._in_flight: deque[_InFlight] = deque()
        self._ones = np.ones(scheduler.config.max_num_seqs, np.int32)
        self._started: list[StartedRow] = []
        self._finished: list[FinishedRow] = []
        scheduler.constraints.connect(executor)
        self.control = EngineControl(
            scheduler,
            on_ended=lambda rows: self._finished.extend(rows),
            on_preempted=self._tell_preempted,
        )
        """Pause, resume and reset; on the engine thread only."""
        self._last_record: StepRecord | None = None
        self._last_plan: StepPlan | None = None
        self.last_progress_ns = self._busy_since_ns = time.perf_counter_ns()
        self._turn_ns = 0
        """Start of this turn, or the time a step landed in it."""
        self._host_ns = 0
        """Host time of the previous turn after its step landed."""

    # -- from any thread -------------------------------------------------------------------

    def submit(self, request: GenerationRequest, arrival_ns: int) -> None:
        self._post(Submit(request, arrival_ns))

    def abort(self, request_id: str) -> None:
        self._post(Abort(request_id))

    def call(self, function: Callable[[], Any]) -> Future[Any]:
        """Run a function on the engine thread between two steps.

        Cancelling the future is safe at any time. After `close` it raises the error given there.
        """
        future: Future[Any] = Future()
        self._post(Call(function, future))
        if self._closed is not None:  # checked after posting: either side sees the other
            self._fail_calls(self._closed)
        return future

    def close(self, error: EngineError) -> None:
        """Fail all current and later calls with this error: no step follows. Engine thread only."""
        self._closed = error
        self.control.close(error)
        self._fail_calls(error)

    def wake(self) -> None:
        self._wake.set()

    def wait_for_work(self, timeout: float | None = None) -> None:
        """Block, using no CPU, until something is posted."""
        self._wake.wait(timeout)
        self._wake.clear()

    def _post(self, item: InboxItem) -> None:
        if not self.has_work:
            # Idle time is neither a stall nor lost device time.
            self.last_progress_ns = self._busy_since_ns = time.perf_counter_ns()
        self._inbox.append(item)
        self._wake.set()

    def _fail_calls(self, error: EngineError) -> None:
        for queue in (self._calls, self._inbox):
            while queue:
                try:
                    item = queue.popleft()
                except IndexError:  # another thread took it
                    break
                if isinstance(item, Call) and item.future.set_running_or_notify_cancel():
                    item.future.set_exception(error)

    # -- on the engine thread --------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Requests that are not paused, steps in flight, inbox entries or undelivered results."""
        is_due = self.scheduler.has_requests and not self.control.is_resting
        return bool(is_due or self._in_flight or self._inbox or self._finished)

    def step(self) -> bool:
        """One turn: fill the pipeline, land its oldest step. False if there was nothing to do."""
        self._turn_ns = time.perf_counter_ns()
        self._read_inbox()
        self._finished += end_failed(self.scheduler)
        self._run_calls()
        may_launch = self.control.may_launch
        while may_launch and len(self._in_flight) < self._allowed_depth() and self._launch():
            pass
        is_busy = bool(self._in_flight)
        if is_busy:
            self._land()
        else:
            stuck = self.scheduler.has_requests and may_launch and not self.control.is_paused
            assert not stuck or self.scheduler.constraints.is_late, "queued, but nothing can run"
            self._deliver_finished()
        self.control.settle()
        self._host_ns = time.perf_counter_ns() - self._turn_ns if is_busy else 0
        return is_busy

    def _allowed_depth(self) -> int:
        """Steps that may be in flight: two or one if a request waits, if more would preempt one, or
        if rows need masks, which come one step at a time."""
        scheduler = self.scheduler
        room = scheduler.kv.pool.num_free >= scheduler.num_running
        waits = self._inbox or len(scheduler.waiting) or scheduler.slots.num_constrained
        depth = self.run_ahead.allowed(is_wanted=room and not waits)
        return min(depth, DEPTH_WITH_MASKS) if scheduler.slots.num_constrained else depth

    def use_idle_time(self) -> bool:
        """Do one piece of deferred work; False if there is none. Call it only when idle."""
        return not (self.has_work or self.scheduler.has_requests) and self.executor.idle()

    def drain(self) -> None:
        """The last turn: wait for the steps in flight, end every request and free everything.
        Endings are not delivered: `close` follows."""
        self._run_out()
        self.scheduler.land_all()
        finish_all(self.scheduler)
        self._finished.clear()

    def _launch(self) -> bool:
        planned_ns = time.perf_counter_ns()
        self.scheduler.yield_unread()
        self._tell_preempted("its output is not read")
        plan = self.scheduler.schedule(planned_ns)
        self._tell_preempted("out of KV blocks")
        if plan is None:
            return False
        if self.scheduler.started:
            self._publisher.started(self.scheduler.started, planned_ns)
            self._started += self.scheduler.started
            self.scheduler.started.clear()
        submitted_ns = time.perf_counter_ns()
        handle = self.executor.submit(plan)
        launched_ns = time.perf_counter_ns()
        self.run_ahead.launched(plan, launched_ns, len(self._in_flight))
        prefills = self._publisher.prefills(plan)
        times = StepTimes(planned_ns, submitted_ns, launched_ns, len(self._in_flight), prefills)
        self._in_flight.append(_InFlight(plan, handle, times))
        self._last_plan = plan
        return True

    def _land(self) -> None:
        step = self._in_flight.popleft()
        times = step.times
        times.waited_ns = time.perf_counter_ns()
        try:
            result = step.handle.result()
        except Exception as cause:  # any error of the device; reported with its requests
            self._fail(step, cause)
            return
        times.landed_ns = result.seen_ns or time.perf_counter_ns()
        times.host_ns = self._host_ns + times.waited_ns - self._turn_ns
        times.busy_since_ns = self._busy_since_ns
        times.covered_ns = self.run_ahead.covered_ns
        self._turn_ns = times.landed_ns
        self.run_ahead.landed(step.plan, result)
        self._read_inbox()  # an abort that has arrived takes precedence over the step's ending
        applied = self.scheduler.apply(step.plan, result)
        times.applied_ns = self.last_progress_ns = time.perf_counter_ns()
        self._last_record = self._publisher.step(step.plan, result, applied, times)
        self._finished += applied.finished
        of_prompts = PromptLogprobs.of_step(step.plan, result)
        self._deliver(step.plan.step_id, times.landed_ns, applied, result.logprobs, of_prompts)

    def _fail(self, step: _InFlight, cause: Exception) -> None:
        """End the failed step's requests, discard later steps, continue with the other requests."""
        self._run_out()
        table = self.scheduler.slots
        rows = zip(step.plan.slots.tolist(), step.plan.epochs.tolist(), strict=True)
        ids = tuple(
            table.request_at(slot).request_id for slot, epoch in rows if table.epoch[slot] == epoch
        )
        detail = str(cause).strip() or type(cause).__name__
        if not isinstance(cause, TermgenError):
            detail = f"{type(cause).__name__}: {detail}"
        error = StepError(
            f"step {step.plan.step_id} ({step.plan.num_rows} requests, {step.plan.total_tokens} "
            f"tokens) failed: {detail}",
            step_id=step.plan.step_id,
            request_ids=ids,
        )
        error.__cause__ = cause
        self._finished += self.scheduler.fail(step.plan, error)
        self._tell_preempted("a step failed")
        self._deliver_finished()

    def _run_out(self) -> None:
        """Wait for the steps in flight and discard their results."""
        self.scheduler.withhold_masks()
        while self._in_flight:
            step = self._in_flight.popleft()
            try:
                step.handle.result()
            except Exception:  # follows from a failed step, which is reported, or at shutdown
                continue

    def _tell_preempted(self, why: str) -> None:
        if self.scheduler.preempted:
            self._publisher.preempted(self.scheduler.preempted, why)
            self.scheduler.preempted.clear()

    # -- inbox -----------------------------------------------------------------------------

    def _read_inbox(self) -> None:
        while self._inbox:
            match self._inbox.popleft():
                case Submit() as submitted:
                    self._admit(submitted)
                case Abort(request_id):
                    finished = self.scheduler.finish(request_id, FinishReason.ABORT)
                    if finished is not None:
                        self._finished.append(finished)
                case Call() as call:
                    self._calls.append(call)

    def _run_calls(self) -> None:
        """Only between two steps, when every landed step has been applied."""
        while self._calls:
            call = self._calls.popleft()
            if not call.future.set_running_or_notify_cancel():
                continue  # the caller has cancelled it
            try:
                call.future.set_result(call.function())
            except Exception as error:  # raised where the future is awaited
                call.future.set_exception(error)

    def _admit(self, submitted: Submit) -> None:
        request = submitted.to_request(self._max_model_len, self._eos_token_ids, self._seeds)
        num_prompt = request.num_prompt_tokens
        try:
            if not 0 < num_prompt < self._max_model_len + (request.pooling is not None):
                raise RequestError("the prompt does not fit the context", param="prompt")
            self.scheduler.add_request(request)
        except RequestError as error:
            cause = EngineError(str(error))
            cause.__cause__ = error
            self._finished.append(
                FinishedRow(
                    request_id=request.request_id,
                    reason=FinishReason.ERROR,
                    stop_token_id=None,
                    stopped_by_token=False,
                    error=cause,
                    num_prompt_tokens=num_prompt,
                )
            )
            return
        self._publisher.queued(request)

    # -- outbox ----------------------------------------------------------------------------

    def _deliver(
        self,
        step_id: int,
        time_ns: int,
        applied: AppliedStep,
        logprobs: StepLogprobs | None,
        prompt_logprobs: tuple[PromptLogprobs, ...] = (),
    ) -> None:
        started, self._started = tuple(self._started), []
        finished, self._finished = tuple(self._finished), []
        counts = applied.num_tokens
        self._publisher.finished(finished, time_ns)
        if logprobs is not None:
            kept = applied.samples
            logprobs = StepLogprobs(
                logprobs.token_ids[kept], logprobs.logprobs[kept], logprobs.ranks[kept]
            )
        self._on_delivery(
            StepDelivery(
                step_id=step_id,
                time_ns=time_ns,
                started=started,
                slots=applied.slots,
                epochs=applied.epochs,
                num_tokens=self._ones[: len(applied.slots)] if counts is None else counts,
                token_ids=applied.token_ids,
                logprobs=logprobs,
                finished=finished,
                prompt_logprobs=prompt_logprobs,
                num_drafted=applied.num_drafted,
            )
        )

    def _deliver_finished(self) -> None:
        """Deliver requests that ended without a step."""
        if self._finished or self._started:
            nothing = np.zeros(0, np.int32)
            empty = AppliedStep(nothing, nothing, nothing, nothing)
            self._deliver(-1, time.perf_counter_ns(), empty, None)

    def copy_state(self) -> StateCopy:
        """Current state for screens. Engine thread only; others use `call(core.copy_state)`."""
        return copy_state(
            self.scheduler,
            record=self._last_record,
            plan=self._last_plan if self._in_flight else self._idle_plan(),
            last_progress_ns=self.last_progress_ns,
            graphs=self.executor.graph_status(),
            paused=self.control.is_paused,
            sleep_level=self.control.sleep_level,
            expert_counts=self.executor.expert_counts(),
        )

    def _idle_plan(self) -> StepPlan | None:
        """The newest plan while its requests still run; screens show it between two steps."""
        return self._last_plan if self.scheduler.has_requests else None


# The inbox: messages of other threads, which the engine thread reads between two steps.


@dataclass(frozen=True, slots=True)
class Submit:
    request: GenerationRequest
    arrival_ns: int

    def to_request(self, max_model_len: int, eos: frozenset[int], seeds: Random) -> Request:
        """The scheduler's record of the request. seeds: source for a request without a seed."""
        submitted, params = self.request, self.request.params
        num_prompt = len(submitted.prompt_token_ids)
        stops = frozenset(params.stop_token_ids)
        room = max_model_len - num_prompt
        if submitted.pooling is not None:
            room = 1  # it gets no token, and may be as long as the context
        return Request(
            request_id=submitted.request_id,
            token_ids=submitted.prompt,
            num_prompt_tokens=num_prompt,
            params=params,
            seed=params.seed if params.seed is not None else seeds.getrandbits(63),
            max_total_tokens=num_prompt + min(room, params.max_tokens or room),
            stop_token_ids=stops if params.ignore_eos else stops | eos,
            priority=submitted.priority,
            arrival_ns=self.arrival_ns,
            cache_salt=submitted.cache_salt,
            grammar=submitted.start_grammar(),
            bad_token_ids=submitted.bad_token_ids,
            block_hashes=list(submitted.block_hashes),
            turn_ends=submitted.turn_ends,
            pooling=submitted.pooling,
        )


@dataclass(frozen=True, slots=True)
class Abort:
    request_id: str


@dataclass(frozen=True, slots=True)
class Call:
    function: Callable[[], Any]
    future: Future[Any]


InboxItem = Submit | Abort | Call
