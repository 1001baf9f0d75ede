"""Publishes the scheduler's work on the event bus: a record per step, an event per request change.

Used by the core, on the engine thread; only reads the scheduler.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from termgen.engine.schedule.effects import AppliedStep
from termgen.engine.schedule.scheduler import Scheduler
from termgen.vocabulary.events import EventBus, RequestEvent, RequestEventKind, StepRecord
from termgen.vocabulary.request import Request
from termgen.vocabulary.step import FinishedRow, StartedRow, StepPlan, StepResult

Prefills = tuple[tuple[str, ...], tuple[int, ...]]
"""(ids of the requests that prefill in a step, number of tokens of each)."""


@dataclass(slots=True)
class StepTimes:
    """perf_counter_ns stamps of one step on the host, in chronological order."""

    planned_ns: int
    submitted_ns: int
    launched_ns: int
    queue_depth: int
    """Steps in flight when it was submitted."""
    prefills: Prefills = ((), ())
    waited_ns: int = 0
    """Time the loop began to wait for it."""
    landed_ns: int = 0
    applied_ns: int = 0
    host_ns: int = 0
    """Host time from the previous landing to `waited_ns`."""
    busy_since_ns: int = 0
    """End of the last idle time before it."""
    covered_ns: float = 0.0
    """Pause of the host that the queue covered when it landed."""


class EventPublisher:
    """Creates all events of one engine; none while the bus has no subscriber."""

    def __init__(self, bus: EventBus, scheduler: Scheduler) -> None:
        self._bus = bus
        self._scheduler = scheduler
        self._last_ended_ns = 0
        self._publish_ns = 0
        self._masks_ns = 0
        """Time that the host had waited for masks when the last step was published."""

    def queued(self, request: Request) -> None:
        if self._bus.has_readers:
            detail = request.params.describe()
            self._tell(request, RequestEventKind.QUEUED, request.arrival_ns, detail)

    def started(self, rows: Iterable[StartedRow], time_ns: int) -> None:
        """Publish requests that got a slot; called at planning, as they may end before landing."""
        for row in rows if self._bus.has_readers else ():
            request = self._scheduler.requests[row.request_id]
            self._tell(request, RequestEventKind.SCHEDULED, time_ns, str(request.hit))

    def preempted(self, requests: Iterable[Request], why: str) -> None:
        for request in requests if self._bus.has_readers else ():
            self._tell(request, RequestEventKind.PREEMPTED, time.perf_counter_ns(), why)

    def finished(self, rows: Iterable[FinishedRow], time_ns: int) -> None:
        for row in rows if self._bus.has_readers else ():
            self._tell_ended(row, RequestEventKind.FINISHED, time_ns, row.reason.value)

    def prefills(self, plan: StepPlan) -> Prefills:
        """The requests that prefill in a new plan; empty while the bus has no subscriber.

        Called at planning: when the step lands, a request may have ended and its slot be reused.
        """
        if not self._bus.has_readers:
            return (), ()
        if plan.is_decode:
            return (), ()
        table = self._scheduler.slots
        past_prompt = plan.num_computed >= table.num_prompt[plan.slots]
        rows = np.flatnonzero((plan.num_tokens - plan.num_draft_tokens > 1) | ~past_prompt)
        ids = tuple(table.request_at(slot).request_id for slot in plan.slots[rows].tolist())
        return ids, tuple(plan.num_tokens[rows].tolist())

    def step(
        self,
        plan: StepPlan,
        result: StepResult,
        applied: AppliedStep,
        times: StepTimes,
    ) -> StepRecord:
        """Publish a landed step, with the first tokens and endings in it."""
        began_ns = time.perf_counter_ns()
        scheduler = self._scheduler
        pool, stats = scheduler.kv.pool, scheduler.stats
        num_decode = plan.num_decode_rows
        free_since_ns = max(self._last_ended_ns, times.busy_since_ns)
        self._last_ended_ns = result.ended_ns
        record = StepRecord(
            step_id=plan.step_id,
            planned_ns=times.planned_ns,
            submitted_ns=times.submitted_ns,
            started_ns=result.started_ns,
            ended_ns=result.ended_ns,
            applied_ns=times.applied_ns,
            schedule_us=(times.submitted_ns - times.planned_ns) / 1e3,
            apply_us=(times.applied_ns - times.landed_ns) / 1e3,
            num_decode_rows=num_decode,
            num_prefill_rows=plan.num_rows - num_decode,
            num_prefill_tokens=plan.total_tokens - num_decode - plan.num_drafts,
            num_sampled_tokens=len(applied.token_ids),
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
            graph_reason=result.graph_reason,
            num_late_compiles=result.num_late_compiles,
            landed_ns=times.landed_ns,
            launch_us=(times.launched_ns - times.submitted_ns) / 1e3,
            queue_depth=times.queue_depth,
            num_wasted_tokens=stats.wasted_tokens,
            num_late_masks=stats.num_late_masks,
            num_forced_tokens=stats.num_forced_tokens,
            num_draft_tokens=stats.num_draft_tokens,
            num_accepted_tokens=stats.num_accepted_tokens,
            num_drafts=stats.num_drafts,
            drafted_per_pos=stats.drafted_per_pos,
            accepted_per_pos=stats.accepted_per_pos,
            draft_choice=result.draft_choice,
            host_us=times.host_ns / 1e3,
            wait_us=(times.landed_ns - times.waited_ns) / 1e3,
            idle_us=max(0, result.started_ns - free_since_ns) / 1e3,
            prefill_ids=times.prefills[0],
            prefill_tokens=times.prefills[1],
            num_evictions=pool.num_evictions,
            num_corrupted=stats.num_corrupted,
            publish_us=self._publish_ns / 1e3,
            covered_us=times.covered_ns / 1e3,
            mask_us=(scheduler.constraints.waited_ns - self._masks_ns) / 1e3,
            **_parts_us(result),
        )
        self._masks_ns = scheduler.constraints.waited_ns
        self._bus.publish(record)
        if not plan.is_decode:  # only rows at the end of their prompt have a first token
            self._first_tokens(applied, times.landed_ns)
        self._publish_ns = time.perf_counter_ns() - began_ns
        return record

    def _first_tokens(self, applied: AppliedStep, time_ns: int) -> None:
        if not self._bus.has_readers:
            return
        table = self._scheduler.slots
        first = table.num_tokens[applied.slots] == table.num_prompt[applied.slots] + 1
        for slot in applied.slots[first]:
            request = table.requests[slot]
            if request is not None:
                self._tell(request, RequestEventKind.FIRST_TOKEN, time_ns)
        for row in applied.finished:  # these have no slot any more
            if row.num_output_tokens == 1:
                self._tell_ended(row, RequestEventKind.FIRST_TOKEN, time_ns)

    def _tell(
        self, request: Request, kind: RequestEventKind, time_ns: int, detail: str = ""
    ) -> None:
        slot, num_prompt = request.slot, request.num_prompt_tokens
        total = int(self._scheduler.slots.num_tokens[slot]) if slot >= 0 else len(request.token_ids)
        self._bus.publish(
            RequestEvent(
                time_ns,
                request.request_id,
                kind,
                num_prompt,
                total - num_prompt,
                request.num_cached_tokens,
                detail,
                *request.drafts,
            )
        )

    def _tell_ended(
        self, row: FinishedRow, kind: RequestEventKind, time_ns: int, detail: str = ""
    ) -> None:
        self._bus.publish(
            RequestEvent(
                time_ns,
                row.request_id,
                kind,
                row.num_prompt_tokens,
                row.num_output_tokens,
                row.num_cached_tokens,
                detail,
                *row.drafts,
            )
        )


def _parts_us(result: StepResult) -> dict[str, float]:
    """Times before, in and after the model, if the step measured them."""
    began, ended = result.model_span_ns
    if not ended:
        return {}
    return {
        "input_us": max(0, began - result.started_ns) / 1e3,
        "model_us": (ended - began) / 1e3,
        "sample_us": max(0, result.ended_ns - ended) / 1e3,
    }
