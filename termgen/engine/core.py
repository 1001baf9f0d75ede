"""The loop: inbox -> schedule -> submit -> land -> apply -> deliver.

`EngineCore` joins the host half (scheduler) and the device half (executor) through frozen plans
and results. One thread calls `step`; any thread may call `submit`, `abort` and `call`, which only
append to the inbox. Whatever the steps produce goes out through `on_delivery` and the event bus.
"""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np

from termgen.engine.delivery import FinishedRow, StartedRow, StepDelivery
from termgen.engine.events import EngineSnapshot, EventBus, RequestEvent, RequestEventKind
from termgen.engine.events import StepRecord as Record
from termgen.engine.executor import Executor, StepHandle
from termgen.engine.request import FinishReason, GenerationRequest, Request
from termgen.engine.scheduler import Scheduler
from termgen.engine.scheduler_types import AppliedStep
from termgen.engine.snapshot import build_snapshot
from termgen.engine.step import StepLogprobs, StepPlan, StepResult
from termgen.errors import EngineError, RequestError, StepError, TermgenError


@dataclass(slots=True)
class _InFlight:
    plan: StepPlan
    handle: StepHandle
    planned_ns: int
    submitted_ns: int


@dataclass(frozen=True, slots=True)
class _Submit:
    request: GenerationRequest
    arrival_ns: int


@dataclass(frozen=True, slots=True)
class _Abort:
    request_id: str


@dataclass(frozen=True, slots=True)
class _Call:
    function: Callable[[], Any]
    future: Future[Any]


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
    ) -> None:
        self.executor = executor
        self.scheduler = scheduler
        self.bus = bus or EventBus()
        self._depth = max_in_flight
        self._max_model_len = max_model_len
        self._eos_token_ids = eos_token_ids
        self._seeds = random.Random(seed)
        self._on_delivery = on_delivery
        self._inbox: deque[_Submit | _Abort | _Call] = deque()
        self._calls: deque[_Call] = deque()
        self._wake = threading.Event()
        self._in_flight: deque[_InFlight] = deque()
        self._finished: list[FinishedRow] = []
        self._last_record: Record | None = None
        self._last_plan: StepPlan | None = None
        self.last_progress_ns = time.perf_counter_ns()

    # -- from any thread -------------------------------------------------------------------

    def submit(self, request: GenerationRequest, arrival_ns: int) -> None:
        self._post(_Submit(request, arrival_ns))

    def abort(self, request_id: str) -> None:
        self._post(_Abort(request_id))

    def call(self, function: Callable[[], Any]) -> Future[Any]:
        """Run a function on the engine thread between two steps."""
        future: Future[Any] = Future()
        self._post(_Call(function, future))
        return future

    def wake(self) -> None:
        self._wake.set()

    def wait_for_work(self, timeout: float | None = None) -> None:
        """Block, using no CPU, until something is posted."""
        self._wake.wait(timeout)
        self._wake.clear()

    def mark_progress(self) -> None:
        """Start the stall clock anew, after an idle time."""
        self.last_progress_ns = time.perf_counter_ns()

    def _post(self, item: _Submit | _Abort | _Call) -> None:
        self._inbox.append(item)
        self._wake.set()

    # -- on the engine thread --------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Requests, steps in flight, mail, or news not yet delivered."""
        return bool(self.scheduler.has_requests or self._in_flight or self._inbox or self._finished)

    def step(self) -> bool:
        """One turn: fill the pipeline, land its oldest step. False when there was nothing to do."""
        self._read_inbox()
        self._run_calls()
        while len(self._in_flight) < self._depth and self._launch():
            pass
        if self._in_flight:
            self._land()
            return True
        assert not self.scheduler.has_requests, "requests are queued, but nothing can run"
        self._deliver_finished()
        return False

    def _launch(self) -> bool:
        planned_ns = time.perf_counter_ns()
        plan = self.scheduler.schedule(planned_ns)
        self._publish_preempted()
        if plan is None:
            return False
        submitted_ns = time.perf_counter_ns()
        handle = self.executor.submit(plan)
        self._in_flight.append(_InFlight(plan, handle, planned_ns, submitted_ns))
        self._last_plan = plan
        return True

    def _land(self) -> None:
        step = self._in_flight.popleft()
        try:
            result = step.handle.result()
        except Exception as cause:  # whatever a device can throw; reported with its requests
            self._fail(step, cause)
            return
        landed_ns = time.perf_counter_ns()
        self._read_inbox()  # an abort that is already here wins over the step's own ending
        applied = self.scheduler.apply(step.plan, result)
        self.last_progress_ns = time.perf_counter_ns()
        self._publish_step(step, result, applied, landed_ns)
        self._finished += applied.finished
        self._deliver(step.plan.step_id, landed_ns, applied, result.logprobs)

    def _fail(self, step: _InFlight, cause: Exception) -> None:
        """End the failed step's requests; let later steps run out unread; go on with the rest."""
        for later in self._in_flight:
            try:
                later.handle.result()
            except Exception:  # it depends on the failed step, whose cause is told
                continue
        self._in_flight.clear()
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
        self._publish_preempted()
        self._deliver_finished()

    # -- inbox -----------------------------------------------------------------------------

    def _read_inbox(self) -> None:
        while self._inbox:
            match self._inbox.popleft():
                case _Submit(request, arrival_ns):
                    self._admit(request, arrival_ns)
                case _Abort(request_id):
                    finished = self.scheduler.finish(request_id, FinishReason.ABORT)
                    if finished is not None:
                        self._finished.append(finished)
                case _Call() as call:
                    self._calls.append(call)

    def _run_calls(self) -> None:
        """Only between two steps, when every landed step has been applied."""
        while self._calls:
            call = self._calls.popleft()
            try:
                call.future.set_result(call.function())
            except Exception as error:  # goes to whoever waits on the future
                call.future.set_exception(error)

    def _admit(self, submitted: GenerationRequest, arrival_ns: int) -> None:
        params = submitted.params
        num_prompt = len(submitted.prompt_token_ids)
        stops = frozenset(params.stop_token_ids)
        room = self._max_model_len - num_prompt
        request = Request(
            request_id=submitted.request_id,
            token_ids=np.asarray(submitted.prompt_token_ids, np.int32),
            num_prompt_tokens=num_prompt,
            params=params,
            seed=params.seed if params.seed is not None else self._seeds.getrandbits(63),
            max_total_tokens=num_prompt + min(room, params.max_tokens or room),
            stop_token_ids=stops if params.ignore_eos else stops | self._eos_token_ids,
            priority=submitted.priority,
            arrival_ns=arrival_ns,
            cache_salt=submitted.cache_salt,
        )
        try:
            if room < 1 or not num_prompt:
                raise RequestError("the prompt does not fit the context", param="prompt")
            self.scheduler.add_request(request)
        except RequestError as error:
            cause = EngineError(str(error))
            cause.__cause__ = error
            self._finished.append(
                FinishedRow(
                    request_id=submitted.request_id,
                    reason=FinishReason.ERROR,
                    stop_token_id=None,
                    stopped_by_token=False,
                    error=cause,
                    num_prompt_tokens=num_prompt,
                )
            )
            return
        self.bus.publish(
            RequestEvent(arrival_ns, request.request_id, RequestEventKind.QUEUED, num_prompt, 0, 0)
        )

    # -- outbox ----------------------------------------------------------------------------

    def _deliver(
        self, step_id: int, time_ns: int, applied: AppliedStep, logprobs: StepLogprobs | None
    ) -> None:
        started = self._take_started()
        finished, self._finished = tuple(self._finished), []
        self._publish_finished(finished, time_ns)
        if logprobs is not None:
            rows = applied.rows
            logprobs = StepLogprobs(
                logprobs.token_ids[rows], logprobs.logprobs[rows], logprobs.ranks[rows]
            )
        self._on_delivery(
            StepDelivery(
                step_id=step_id,
                time_ns=time_ns,
                started=started,
                slots=applied.slots,
                epochs=applied.epochs,
                num_tokens=np.ones_like(applied.slots),
                token_ids=applied.token_ids,
                logprobs=logprobs,
                finished=finished,
            )
        )

    def _deliver_finished(self) -> None:
        """Send what ended without a step."""
        if self._finished or self.scheduler.started:
            nothing = np.zeros(0, np.int32)
            empty = AppliedStep(nothing, nothing, nothing, nothing)
            self._deliver(-1, time.perf_counter_ns(), empty, None)

    def _take_started(self) -> tuple[StartedRow, ...]:
        started = tuple(self.scheduler.started)
        self.scheduler.started.clear()
        return started

    # -- events ----------------------------------------------------------------------------

    def _publish_step(
        self, step: _InFlight, result: StepResult, applied: AppliedStep, landed_ns: int
    ) -> None:
        scheduler, plan = self.scheduler, step.plan
        pool, stats = scheduler.kv.pool, scheduler.stats
        is_decode = (plan.num_tokens == 1) & (plan.num_computed > 0)
        num_decode = int(np.count_nonzero(is_decode))
        record = Record(
            step_id=plan.step_id,
            planned_ns=step.planned_ns,
            submitted_ns=step.submitted_ns,
            started_ns=result.started_ns,
            ended_ns=result.ended_ns,
            applied_ns=self.last_progress_ns,
            schedule_us=(step.submitted_ns - step.planned_ns) / 1e3,
            apply_us=(self.last_progress_ns - landed_ns) / 1e3,
            num_decode_rows=num_decode,
            num_prefill_rows=plan.num_rows - num_decode,
            num_prefill_tokens=plan.total_tokens - num_decode,
            num_sampled_tokens=len(applied.rows),
            num_padded_tokens=result.num_padded_tokens,
            graph_mode=result.graph_mode,
            num_running=scheduler.num_running,
            num_waiting=len(scheduler.waiting),
            num_used_blocks=pool.num_used,
            num_cached_blocks=pool.num_cached,
            num_free_blocks=pool.num_free - pool.num_cached,
            prefix_query_tokens=stats.prefix_query_tokens,
            prefix_hit_tokens=stats.prefix_hit_tokens,
            num_preemptions=stats.num_preemptions,
        )
        self._last_record = record
        self.bus.publish(record)
        self._publish_started()
        self._publish_first_tokens(applied, landed_ns)

    def _publish_started(self) -> None:
        for row in self.scheduler.started:
            request = self.scheduler.requests.get(row.request_id)
            if request is not None:
                self._publish(request, RequestEventKind.SCHEDULED, row.first_scheduled_ns)

    def _publish_first_tokens(self, applied: AppliedStep, time_ns: int) -> None:
        table = self.scheduler.slots
        first = table.num_tokens[applied.slots] == table.num_prompt[applied.slots] + 1
        for slot in applied.slots[first]:
            request = table.requests[slot]
            if request is not None:
                self._publish(request, RequestEventKind.FIRST_TOKEN, time_ns)

    def _publish_preempted(self) -> None:
        for request in self.scheduler.preempted:
            self._publish(
                request, RequestEventKind.PREEMPTED, time.perf_counter_ns(), "out of KV blocks"
            )
        self.scheduler.preempted.clear()

    def _publish_finished(self, finished: tuple[FinishedRow, ...], time_ns: int) -> None:
        for row in finished:
            self.bus.publish(
                RequestEvent(
                    time_ns,
                    row.request_id,
                    RequestEventKind.FINISHED,
                    row.num_prompt_tokens,
                    row.num_output_tokens,
                    0,
                    row.reason.value,
                )
            )

    def _publish(
        self, request: Request, kind: RequestEventKind, time_ns: int, detail: str = ""
    ) -> None:
        slot = request.slot
        total = int(self.scheduler.slots.num_tokens[slot]) if slot >= 0 else len(request.token_ids)
        self.bus.publish(
            RequestEvent(
                time_ns,
                request.request_id,
                kind,
                request.num_prompt_tokens,
                total - request.num_prompt_tokens,
                request.num_cached_tokens,
                detail,
            )
        )

    def snapshot(self) -> EngineSnapshot:
        """Present state for screens. Engine thread only; others use `call(core.snapshot)`."""
        return build_snapshot(
            self.scheduler,
            record=self._last_record,
            plan=self._last_plan if self._in_flight else self._idle_plan(),
            last_progress_ns=self.last_progress_ns,
        )

    def _idle_plan(self) -> StepPlan | None:
        """The newest plan while its requests still run; screens show it between two steps."""
        return self._last_plan if self.scheduler.has_requests else None
