"""The engine's snapshot for screens: copied on the engine thread between steps, built elsewhere.

Computing with 100,000 blocks releases the GIL in each operation, and the engine would wait to get
it back each time, so the engine thread only copies.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from itertools import islice

import numpy as np
import numpy.typing as npt

from termgen.engine.schedule.block_pool import PoolCopy
from termgen.engine.schedule.scheduler import Scheduler
from termgen.vocabulary.cache_groups import blocks_of_context
from termgen.vocabulary.device.expert_load import ExpertLoad
from termgen.vocabulary.events import EngineSnapshot, RequestView, StepRecord
from termgen.vocabulary.model_info import GraphStatus
from termgen.vocabulary.request import Request, RequestStatus
from termgen.vocabulary.step import StepPlan

MAX_LISTED = 256


@dataclass(frozen=True, slots=True, eq=False)
class StateCopy:
    """Copy of the engine's state. Any thread may build the snapshot from it."""

    pool: PoolCopy
    owned: tuple[npt.NDArray[np.int32], ...]
    """Blocks of each listed running request."""
    groups: npt.NDArray[np.uint8]
    """The group that used each block last; empty if there is one group."""
    expert_counts: npt.NDArray[np.int64] | None
    """[layers, experts]"""
    rest: Callable[..., EngineSnapshot]
    """Builds the snapshot, given the block map."""

    def snapshot(self) -> EngineSnapshot:
        states = self.pool.states()
        owners = np.full(len(states), -1, np.int32)
        if self.owned:
            places = np.arange(len(self.owned), dtype=np.int32)
            owners[np.concatenate(self.owned)] = np.repeat(places, [*map(len, self.owned)])
        return self.rest(
            block_states=states,
            block_owners=owners,
            block_groups=self.groups,
            evicted_blocks=self.pool.last_evicted(),
            num_evictions=self.pool.num_evictions,
            cpu_s=time.process_time(),
            resident_bytes=resident_bytes(),
            experts=None if self.expert_counts is None else ExpertLoad.of(self.expert_counts),
        )


def resident_bytes() -> int:
    """Resident memory of this process; 0 if unknown (not Linux)."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def copy_state(
    scheduler: Scheduler,
    *,
    record: StepRecord | None,
    plan: StepPlan | None,
    last_progress_ns: int,
    graphs: GraphStatus,
    paused: bool,
    sleep_level: int,
    expert_counts: npt.NDArray[np.int64] | None = None,
) -> StateCopy:
    """Copy the engine's state. `plan`: the newest one, for each request's tokens in it.
    expert_counts: tokens of each layer's experts."""
    now = time.perf_counter_ns()
    table, kv = scheduler.slots, scheduler.kv
    scheduled: dict[int, tuple[int, int]] = {}  # slot: (tokens in the step, drafts among them)
    if plan is not None:
        current = table.epoch[plan.slots] == plan.epochs
        columns = (plan.slots, plan.num_tokens, plan.num_draft_tokens)
        rows = zip(*(column[current].tolist() for column in columns), strict=True)
        scheduled = {slot: (num_tokens, drafts) for slot, num_tokens, drafts in rows}
    running = table.running
    listed = running[:MAX_LISTED]
    views = _running_views(scheduler, listed, scheduled, now)
    waiting = islice(scheduler.waiting, MAX_LISTED)
    views += [_waiting_view(request, now, scheduler.unread) for request in waiting]
    stats, pool = scheduler.stats, kv.pool
    owned = tuple(kv.copy_held(slot) for slot in listed.tolist())
    rest = partial(
        EngineSnapshot,
        time_ns=now,
        step=record,
        requests=tuple(views),
        num_running=len(running),
        num_waiting=len(scheduler.waiting),
        num_used_blocks=pool.num_used,
        num_cached_blocks=pool.num_cached,
        num_free_blocks=pool.num_free - pool.num_cached,
        prefix_query_tokens=stats.prefix_query_tokens,
        prefix_hit_tokens=stats.prefix_hit_tokens,
        num_preemptions=stats.num_preemptions,
        num_finished=stats.num_finished,
        prompt_tokens=stats.prompt_tokens,
        generation_tokens=stats.generation_tokens,
        max_num_seqs=scheduler.config.max_num_seqs,
        max_num_batched_tokens=scheduler.config.max_num_batched_tokens,
        last_progress_ns=last_progress_ns,
        num_graphs_recorded=graphs.num_recorded,
        num_graphs=graphs.num_graphs,
        paused=paused,
        sleep_level=sleep_level,
        states=None if kv.states is None else kv.states.view(),
        waiting_reason=_waiting_reason(scheduler, plan, paused) if len(scheduler.waiting) else "",
    )
    return StateCopy(pool.copy(), owned, kv.block_groups.copy(), expert_counts, rest)


def _waiting_reason(scheduler: Scheduler, plan: StepPlan | None, paused: bool) -> str:
    """The reason that the first request of the queue does not run."""
    if paused:
        return "the engine is paused"
    if not scheduler.free_slots:
        return "all places taken"
    request = next(iter(scheduler.waiting))
    if request.grammar is not None and not request.grammar.is_ready:
        return "the mask of its grammar takes long"
    kv = scheduler.kv
    needed = blocks_of_context(len(request.token_ids), kv.block_size, kv.windows)
    if needed > kv.pool.num_free:
        return "not enough free KV blocks"
    budget = scheduler.config.max_num_batched_tokens
    return "token budget spent" if plan and plan.total_tokens >= budget else "next step"


def _running_views(
    scheduler: Scheduler,
    slots: npt.NDArray[np.int32],
    scheduled: dict[int, tuple[int, int]],
    now: int,
) -> list[RequestView]:
    """Views of running requests, read by whole columns to save time on the engine thread."""
    table = scheduler.slots
    columns = (slots, table.num_tokens[slots], table.num_computed[slots])
    numbers = (*columns, scheduler.kv.num_held(slots), *table.drafts[:, slots])
    views = []
    for slot, num_tokens, num_computed, num_blocks, num_drafted, num_accepted in zip(
        *(column.tolist() for column in numbers), strict=True
    ):
        request, (now_tokens, drafts) = table.request_at(slot), scheduled.get(slot, (0, 0))
        # All but the newest known token are computed: it decodes one token, and drafts, per step.
        is_decoding = num_computed >= num_tokens - 1 and now_tokens - drafts <= 1
        num_output = num_tokens - request.num_prompt_tokens
        views.append(
            RequestView(
                request_id=request.request_id,
                status="decode" if is_decoding and num_output > 0 else "prefill",
                num_prompt_tokens=request.num_prompt_tokens,
                num_cached_tokens=request.num_cached_tokens,
                num_computed_tokens=num_computed,
                num_output_tokens=num_output,
                num_blocks=num_blocks,
                num_scheduled_tokens=now_tokens,
                age_s=(now - request.arrival_ns) / 1e9,
                num_preemptions=request.num_preemptions,
                priority=request.priority,
                is_unread=request.request_id in scheduler.unread,
                num_draft_tokens=num_drafted,
                num_accepted_tokens=num_accepted,
            )
        )
    return views


def _waiting_view(request: Request, now: int, unread: Collection[str]) -> RequestView:
    preempted = request.status is RequestStatus.PREEMPTED
    return RequestView(
        request_id=request.request_id,
        status="preempted" if preempted else "waiting",
        num_prompt_tokens=request.num_prompt_tokens,
        num_cached_tokens=request.num_cached_tokens,
        num_computed_tokens=0,
        num_output_tokens=len(request.token_ids) - request.num_prompt_tokens,
        num_blocks=0,
        num_scheduled_tokens=0,
        age_s=(now - request.arrival_ns) / 1e9,
        num_preemptions=request.num_preemptions,
        priority=request.priority,
        is_unread=request.request_id in unread,
        num_draft_tokens=request.drafts.num_drafted,
        num_accepted_tokens=request.drafts.num_accepted,
    )
