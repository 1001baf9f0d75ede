"""The real scheduler on a device of known times, two steps in flight: when tokens would come.

Nothing is computed: every row that reaches its newest token samples a 7.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from scheduler_harness import make_request

from termgen.engine.schedule.invariants import check_scheduler
from termgen.engine.schedule.kv_cache import KVCacheManager
from termgen.engine.schedule.scheduler import Scheduler, SchedulerConfig
from termgen.vocabulary.step import StepPlan, StepResult

STEP_MS = 5.0
"""A step without prompts, as an 8B model's on one large GPU."""
TOKEN_MS = 0.02
"""What each prompt token adds: 8,192 take 164 ms."""
IN_FLIGHT = 2


@dataclass(frozen=True, slots=True)
class Arrival:
    at_ms: float
    name: str
    num_prompt: int
    max_tokens: int
    priority: int = 0


@dataclass(slots=True)
class Times:
    """When each request's tokens came, in ms since the start, and when it arrived."""

    arrived: dict[str, float] = field(default_factory=dict)
    tokens: dict[str, list[float]] = field(default_factory=dict)

    def first(self, name: str) -> float:
        """Time to first token, ms."""
        return self.tokens[name][0] - self.arrived[name]


def simulate(
    arrivals: Sequence[Arrival],
    *,
    adaptive: bool,
    threshold: int = 0,
    policy: str = "fcfs",
    num_blocks: int = 20_000,
    max_num_seqs: int = 256,
    pauses_admission_ms: tuple[float, float] | None = None,
) -> Times:
    """Run all requests to their end. Their prompts share no prefix."""
    max_model_len = 131_072
    kv = KVCacheManager(
        num_blocks=num_blocks,
        block_size=16,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        enable_prefix_caching=False,
    )
    config = SchedulerConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=8192,
        max_model_len=max_model_len,
        long_prefill_token_threshold=threshold,
        adaptive_prefill=adaptive,
        policy=policy,
    )
    scheduler, times = Scheduler(config, kv), Times()
    coming = deque(sorted(arrivals, key=lambda arrival: arrival.at_ms))
    in_flight: deque[tuple[float, float, StepPlan]] = deque()
    names: dict[tuple[int, int], str] = {}
    now = free_at = 0.0
    while coming or in_flight or scheduler.has_requests:
        while coming and coming[0].at_ms <= now:
            _add(scheduler, times, coming.popleft())
        if pauses_admission_ms is not None:
            start, end = pauses_admission_ms
            scheduler.admits_new = not start <= now < end
        plan = scheduler.schedule() if len(in_flight) < IN_FLIGHT else None
        for row in scheduler.started:
            names[row.slot, row.epoch] = row.request_id
        scheduler.started.clear()
        if plan is not None:
            num_prompt = plan.total_tokens - plan.num_decode_rows
            began = max(now, free_at)
            free_at = began + STEP_MS + num_prompt * TOKEN_MS
            in_flight.append((began, free_at, plan))
        elif in_flight:
            began, now, plan = in_flight.popleft()
            applied = scheduler.apply(plan, _result(scheduler, plan, began, now))
            for key in zip(applied.slots.tolist(), applied.epochs.tolist(), strict=True):
                times.tokens[names[key]].append(now)
        else:
            now = coming[0].at_ms
    check_scheduler(scheduler)
    return times


def _add(scheduler: Scheduler, times: Times, arrival: Arrival) -> None:
    times.arrived[arrival.name], times.tokens[arrival.name] = arrival.at_ms, []
    request = make_request(
        arrival.name,
        np.ones(arrival.num_prompt, np.int32),  # type: ignore[arg-type]
        max_tokens=arrival.max_tokens,
        priority=arrival.priority,
        arrival_ns=int(arrival.at_ms * 1e6),
    )
    scheduler.add_request(request)


def _result(scheduler: Scheduler, plan: StepPlan, began: float, ended: float) -> StepResult:
    """Rows whose newest token is computed by this step sample one."""
    ends = plan.num_computed + plan.num_tokens
    alive = scheduler.slots.epoch[plan.slots] == plan.epochs
    known = np.where(alive, scheduler.slots.num_tokens[plan.slots], 0)
    num_sampled = (ends >= known).astype(np.int32)
    return StepResult(
        step_id=plan.step_id,
        num_sampled=num_sampled,
        token_ids=np.full(int(num_sampled.sum()), 7, np.int32),
        corrupt=None,
        logprobs=None,
        started_ns=int(began * 1e6),
        ended_ns=int(ended * 1e6),
    )
