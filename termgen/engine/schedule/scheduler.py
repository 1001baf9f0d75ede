"""Chooses which requests each step computes, with how many tokens. No torch, no threads.

There are no prefill and decode phases: a request's `num_computed` tokens catch up with its known
tokens. A step distributes `max_num_batched_tokens` tokens, first to running requests in order, then
to waiting ones. `schedule` counts optimistically (as if the step had run), so the next step can be
planned before this one lands; `apply` reads results through the plan they answer. The policy
follows vLLM's V1 scheduler; the columns (see slot_table.py) do not.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import repeat
from typing import Any

import numpy as np
import numpy.typing as npt

from termgen.engine.schedule.block_pool import CachedPrefix
from termgen.engine.schedule.constraints import Constraints
from termgen.engine.schedule.corrupt_rows import forget_corrupt
from termgen.engine.schedule.decode_step import DecodeStep
from termgen.engine.schedule.drafts import (
    append_kept,
    blocks_ahead,
    had_drafts,
    kept_tokens,
    places_for_drafts,
    take_places_back,
)
from termgen.engine.schedule.effects import AppliedStep, SchedulerStats
from termgen.engine.schedule.kv_cache import KVCacheManager
from termgen.engine.schedule.plan import PlanBuilder, copy_states, drop_unseen
from termgen.engine.schedule.pooled import landed_vectors
from termgen.engine.schedule.prompt_pace import PromptPace
from termgen.engine.schedule.request_queue import RequestQueue, choose_victim, priority_key
from termgen.engine.schedule.slot_table import Fence, SlotTable
from termgen.engine.schedule.window_blocks import drop_unpublished, gives_up_blocks
from termgen.errors import CorruptedLogitsError, EngineError, RequestError, TermgenError
from termgen.vocabulary.request import FinishReason, IntArray, Request, RequestStatus
from termgen.vocabulary.step import FinishedRow, StartedRow, StepPlan, StepResult


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Resolved limits; see EngineConfig for their meaning."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    long_prefill_token_threshold: int = 0
    adaptive_prefill: bool = False
    policy: str = "fcfs"
    num_speculative_tokens: int = 0
    """Drafts of a row in a step, at most; 0 where the device makes none."""
    most_forced: int = 0
    """Tokens that a grammar forces, of a row in a step, at most; 0 where the device takes none."""
    num_ahead: int = 0
    """Positions behind those of a step that a drafter computes, where there are blocks for them."""


class Scheduler:
    """Owns every request from `add_request` to its end."""

    def __init__(self, config: SchedulerConfig, kv: KVCacheManager) -> None:
        assert config.max_num_batched_tokens >= config.max_num_seqs
        self.config = config
        self.kv = kv
        self.slots = SlotTable(config.max_num_seqs, config.max_model_len)
        self.waiting = RequestQueue(config.policy)
        self.stats = SchedulerStats()
        self.constraints = Constraints(config.most_forced)
        self.requests: dict[str, Request] = {}
        self.started: list[StartedRow] = []
        """Requests that got a slot since the caller last cleared this list."""
        self.preempted: list[Request] = []
        """Requests that lost their slot since the caller last cleared this list."""
        self.free_slots = list(range(config.max_num_seqs - 1, -1, -1))
        self._released: list[int] = []
        self.fence = Fence()
        self._decode_step = DecodeStep(
            self.slots,
            kv,
            self.fence,
            self.constraints,
            num_drafts=config.num_speculative_tokens,
            num_ahead=config.num_ahead,
            budget=config.max_num_batched_tokens,
        )
        self.admits_new = True
        """False: only requests that have run before get a slot."""
        self.unread: set[str] = set()
        """Ids of requests whose output is not read: they run only while no other request waits."""
        self._lacks_blocks = False
        """The first waiting request has found too few free blocks."""
        self._next_step = self._newest_loss = 0
        """All rows of the steps from `_newest_loss` on still have their slots."""
        self._all_rows = np.arange(config.max_num_seqs, dtype=np.int32)
        self._pace = PromptPace() if config.adaptive_prefill else None
        self._threshold = config.long_prefill_token_threshold or config.max_num_batched_tokens

    # -- requests in and out ---------------------------------------------------------------

    def add_request(self, request: Request) -> None:
        """Queue a request. Raises RequestError at once if it could never run."""
        if request.request_id in self.requests:
            raise RequestError(
                f"request id {request.request_id!r} is already in use", param="request_id"
            )
        limit = self.config.max_model_len + (request.pooling is not None)
        assert len(request.token_ids) < request.max_total_tokens <= limit
        needed = request.max_total_tokens - 1  # the last token's KV is never computed
        if needed > (capacity := self.kv.capacity_tokens):
            raise RequestError(
                f"the request may need {needed} tokens of KV cache, but the cache holds only "
                f"{capacity}: lower max_tokens or raise --kv-cache-gib",
                param="max_tokens",
            )
        self.requests[request.request_id] = request
        self.constraints.begin(request)
        self.waiting.push(request)

    def finish(
        self, request_id: str, reason: FinishReason, error: TermgenError | None = None
    ) -> FinishedRow | None:
        """End a request from outside (abort, error). None if it has already ended."""
        request = self.requests.get(request_id)
        if request is None:
            return None
        if request.status is RequestStatus.RUNNING:
            self._release_slot(request.slot)
        else:
            self.waiting.remove(request)
        return self._finished(request, reason, error=error)

    def set_unread(self, request_ids: Iterable[str], is_unread: bool) -> None:
        """Note that the output of these requests is not read, or is read again."""
        if is_unread:
            self.unread.update(self.requests.keys() & set(request_ids))
        else:
            self.unread.difference_update(request_ids)

    @property
    def num_running(self) -> int:
        return len(self.slots.running)

    @property
    def has_requests(self) -> bool:
        return bool(self.requests)

    @property
    def newest_step(self) -> int:
        """Id of the step planned last; -1 before the first."""
        return self._next_step - 1

    # -- planning --------------------------------------------------------------------------

    def yield_unread(self) -> None:
        """Preempt rows whose output is not read, the newest first, for requests that wait."""
        lacks_blocks, self._lacks_blocks = self._lacks_blocks, False
        if not (self.unread and self.admits_new and len(self.waiting)):
            return
        num_waiting = sum(
            request.request_id not in self.unread
            and (request.grammar is None or request.grammar.is_ready)
            for request in self.waiting
        )
        table = self.slots
        rows = [
            slot
            for slot in table.running[::-1].tolist()
            if table.request_at(slot).request_id in self.unread
        ]
        num_leased = sum(1 for _ in self.fence)
        needed = num_waiting - len(self.free_slots) - num_leased
        if num_waiting and lacks_blocks and not num_leased:
            needed = max(needed, 1)
        for slot in rows[: max(0, needed)]:
            self._preempt(slot)

    def schedule(self, now_ns: int = 0) -> StepPlan | None:
        """Plan the next step and count it as run. None when nothing can be computed now."""
        for request in self.constraints.take_ready():
            self.waiting.take_back(request)
        may_admit = bool(len(self.waiting) and self.free_slots)
        # Fast path, skip on a first reading: a decode step by whole columns.
        plan = None if may_admit else self._decode_step.plan(self._next_step, tuple(self._released))
        while plan is None:
            before, is_busy = self.stats.num_preemptions, self.fence.landed_step < self.newest_step
            plan = self._plan(may_admit, now_ns)
            if plan is None and (is_busy or self.stats.num_preemptions == before):
                return None
            may_admit = bool(self.free_slots)  # the row that had the whole step preempted itself
        return self._count_plan(plan)

    def _plan(self, may_admit: bool, now_ns: int) -> StepPlan | None:
        """Give running requests the tokens they lack, in order, then admit waiting ones."""
        table, running = self.slots, self.slots.running
        known = table.num_tokens[running] + table.num_pending[running]
        want = np.where(known < table.limit[running], known - table.num_computed[running], 0)
        is_busy = self.fence.landed_step < self.newest_step
        self.constraints.hold_back(table, running, want, is_busy=is_busy)
        num_new = np.minimum(want, self._threshold)
        states = self.kv.states
        if states is not None:
            num_new = states.cut(running, table.num_computed[running], num_new)
        budget = self.config.max_num_batched_tokens
        most, drafts = self.config.num_speculative_tokens, np.zeros_like(running)
        forced = self.constraints.forced_drafts(table, running)
        if most or forced.any():
            drafts = places_for_drafts(table, running, most, budget, forced) * (num_new > 0)
        newcomers = self._share_among_prompts(num_new, budget - int(drafts.sum()), may_admit)
        ends = np.cumsum(num_new + drafts)
        if len(ends) and ends[-1] > budget:
            room = budget - (ends - num_new - drafts)
            num_new = np.clip(room, 0, num_new)
            drafts = np.clip(room - num_new, 0, drafts)
        builder = PlanBuilder()
        drop_unseen(table, self.kv, running)
        if drafts.any():
            if self._missing_blocks(running, num_new + drafts).sum() > self.kv.pool.num_free:
                drafts *= 0  # no row loses its blocks to a guess
            num_new += drafts
        preempted = self._give_blocks(running, num_new, builder)
        chosen = np.flatnonzero(num_new)
        slots, counts, drafts = running[chosen], num_new[chosen], drafts[chosen]
        if states is not None:
            copy_states(table, states, slots, builder, has_drafts=most > 0)
        self._advance(slots, counts, (counts - drafts == want[chosen]) * (1 + drafts))
        if may_admit and not preempted:
            left = budget - int(counts.sum())
            new_slots, new_counts = self._admit(left, newcomers, builder, now_ns)
            slots = np.concatenate((slots, new_slots))
            counts = np.concatenate((counts, new_counts))
            drafts = np.concatenate((drafts, np.zeros_like(new_counts)))
        if not len(slots):
            self.constraints.rest()
            return None
        if self.config.num_ahead:
            missing = blocks_ahead(table, self.kv, slots, self.config.num_ahead)
            for i in np.flatnonzero(missing.any(axis=0)).tolist():
                self._append_blocks(int(slots[i]), missing[:, i], builder)
        counts, released = counts.astype(np.int32), tuple(self._released)
        return builder.build(
            self._next_step, table, slots=slots, counts=counts, drafts=drafts, released=released
        )

    def _share_among_prompts(
        self, num_new: IntArray, budget: int, may_admit: bool
    ) -> list[tuple[Request, int]] | None:
        """Cut the prompts of running rows in `num_new` where others generate. Returns the requests
        to admit, with their tokens; None if admission is not limited."""
        pace = self._pace
        rows = np.flatnonzero(num_new > 1).tolist()
        num_generating = len(num_new) - len(rows)
        if pace is None or not (num_generating and pace.is_measured):
            return None
        budget -= num_generating
        prompts = [
            (self.slots.request_at(int(self.slots.running[row])), int(num_new[row]), row)
            for row in rows
        ]
        if may_admit:
            prompts += ((*found, -1) for found in self._admissible(budget, pace))
        if self.config.policy == "priority":
            prompts.sort(key=lambda prompt: priority_key(prompt[0]))
        counts = pace.divide([missing for _, missing, _ in prompts], budget)
        newcomers = []
        for (request, _, row), count in zip(prompts, counts, strict=True):
            if row >= 0:
                num_new[row] = count
            elif count:
                newcomers.append((request, count))
        return newcomers

    def _admissible(self, budget: int, pace: PromptPace) -> list[tuple[Request, int]]:
        """Waiting requests for which there are slots and blocks now, with the tokens they lack, up
        to where more of them would change nothing about the step."""
        found: list[tuple[Request, int]] = []
        num_blocks = num_missing = 0
        for request in self._ready():
            fit = self.kv.try_fit(request, self._threshold, num_blocks)
            if fit is None:
                self._lacks_blocks = not found
                break
            cached, limit = fit
            num_tokens = len(request.token_ids)
            missing = min(num_tokens - cached.num_blocks * self.kv.block_size, limit)
            found.append((request, missing))
            num_blocks += self.kv.num_needed(num_tokens, cached, limit)
            num_missing += missing
            is_full = num_missing >= budget and pace.fills(budget, len(found))
            if is_full or len(found) == len(self.free_slots):
                break
        return found

    def _give_blocks(self, running: IntArray, num_new: IntArray, builder: PlanBuilder) -> bool:
        """Extend block tables for the tokens in `num_new`, preempting if blocks run out.

        Sets num_new to 0 for rows that cannot be computed. Returns True if a row was preempted.
        """
        kv = self.kv
        missing = self._missing_blocks(running, num_new)
        needy = np.flatnonzero(missing.any(axis=0))
        if int(missing.sum()) <= kv.pool.num_free:
            for i in needy.tolist():
                self._append_blocks(int(running[i]), missing[:, i], builder)
            return False
        drop_unpublished(self.slots, kv, running)
        order: npt.NDArray[np.integer[Any]] = needy
        if self.config.policy == "priority":
            keys = [priority_key(self.slots.request_at(int(running[i]))) for i in needy]
            order = needy[sorted(range(len(needy)), key=keys.__getitem__)]
        if self.unread:  # they take blocks last, as they lose theirs first
            ids = [self.slots.request_at(int(running[i])).request_id for i in order]
            order = order[np.argsort([name in self.unread for name in ids], kind="stable")]
        return self._give_blocks_by_preempting(running, num_new, missing, order, builder)

    def _give_blocks_by_preempting(
        self,
        running: IntArray,
        num_new: IntArray,
        missing: IntArray,
        order: npt.NDArray[np.integer[Any]],
        builder: PlanBuilder,
    ) -> bool:
        """The slow path: rows take blocks in order, preempting the row of lowest precedence."""
        index_of = {int(slot): i for i, slot in enumerate(running)}
        before = self.stats.num_preemptions
        for i in order:
            slot = int(running[i])
            if self.slots.requests[slot] is None:  # was a victim itself
                continue
            if self.kv.has_windows and num_new[i] > 1:
                # A prompt takes as much as there are blocks for, and no more than a block of
                # another row.
                computed = int(self.slots.num_computed[slot])
                room = self.kv.room(slot, self.kv.pool.num_free) - computed
                if room <= 0:
                    room = self.kv.block_size - computed % self.kv.block_size
                if room < num_new[i]:
                    num_new[i] = room
                    missing[:, [i]] = self._missing_blocks(running[[i]], num_new[[i]])
            need = int(missing[:, i].sum())
            if need > self.kv.pool.num_free and gives_up_blocks(self.slots, self.kv, slot):
                num_new[i] = 0
                continue
            while self.kv.pool.num_free < need:
                if self.kv.pool.num_free + self.fence.num_blocks >= need:
                    break  # enough blocks become free once the steps in flight have landed
                victim = choose_victim(self.slots, self.config.policy, self.unread)
                num_new[index_of[victim]] = 0
                self._preempt(victim)
                if victim == slot:
                    break
            if self.slots.requests[slot] is None:
                continue
            if self.kv.pool.num_free < need:
                num_new[i] = 0
                continue
            # A row is never preempted for one of lower precedence, so allocated blocks stay.
            self._append_blocks(slot, missing[:, i], builder)
        return self.stats.num_preemptions > before

    def _missing_blocks(self, slots: IntArray, num_new: IntArray) -> IntArray:
        """[groups, rows] blocks that these slots lack to compute so many tokens more."""
        target = self.slots.num_computed[slots] + num_new
        missing: IntArray = np.maximum(self.kv.missing(slots, target), 0) * (num_new > 0)
        return missing

    def _append_blocks(self, slot: int, counts: IntArray, builder: PlanBuilder) -> None:
        """counts: [groups]"""
        for group, count in enumerate(counts.tolist()):
            if count:
                builder.add_blocks(slot, *self.kv.append(slot, group, count), group)

    def _preempt(self, slot: int) -> None:
        """Release a row's slot; the request keeps its tokens and recomputes their KV later."""
        request = self._release_slot(slot)
        request.status = RequestStatus.PREEMPTED
        request.num_preemptions += 1
        self.stats.num_preemptions += 1
        self.waiting.push_front(request)
        self.preempted.append(request)

    def _admit(
        self,
        budget: int,
        newcomers: list[tuple[Request, int]] | None,
        builder: PlanBuilder,
        now_ns: int,
    ) -> tuple[IntArray, IntArray]:
        """Admit waiting requests while there are tokens, slots and blocks.

        newcomers: the only ones to admit, with their most tokens; None for all.
        """
        slots, counts = list[int](), list[int]()
        if self.waiting.num_aside:
            self.constraints.is_late = True
        turns: Iterator[tuple[Request, int]]
        turns = zip(self._ready(), repeat(budget)) if newcomers is None else iter(newcomers)
        while budget > 0 and self.free_slots and (turn := next(turns, None)) is not None:
            request, limit = turn
            fit = self.kv.try_fit(request, min(budget, limit, self._threshold))
            if fit is None:
                self._lacks_blocks = True
                break
            cached, limit = fit
            missing = len(request.token_ids) - cached.num_blocks * self.kv.block_size
            self.waiting.remove(request)
            slot = self.free_slots.pop()
            count = min(missing, limit)
            if self.kv.states is not None:
                count = self._cut_first(request, slot, cached, count)
            self._start(request, slot, cached, count, builder, now_ns)
            complete = np.asarray([count == missing])
            self._advance(np.asarray([slot]), np.asarray([count], np.int32), complete)
            slots.append(slot)
            counts.append(count)
            budget -= count
        return np.asarray(slots, np.int32), np.asarray(counts, np.int32)

    def _cut_first(self, request: Request, slot: int, cached: CachedPrefix, count: int) -> int:
        """Tokens of a new row's first step, after which its state may be copied."""
        states = self.kv.states
        assert states is not None
        states.occupy(slot, request, cached.state_place)
        computed = np.asarray([cached.num_blocks * self.kv.block_size], np.int32)
        (count,) = states.cut(np.asarray([slot]), computed, np.asarray([count])).tolist()
        return count

    def _ready(self) -> Iterator[Request]:
        """Waiting requests that may join this step, in order; the caller may remove each. Those
        whose output is not read come last. Requests without their mask are set aside, so that a
        step checks each only once."""
        for is_unread in (False, True) if self.unread else (False,):
            for request in self.waiting.queued():
                if (request.request_id in self.unread) is not is_unread:
                    continue
                if not self.admits_new and request.status is not RequestStatus.PREEMPTED:
                    continue
                if self.constraints.is_ready(request):
                    yield request
                elif self.admits_new:
                    self.waiting.set_aside(request)
                    self.constraints.set_aside(request)

    def _start(
        self,
        request: Request,
        slot: int,
        cached: CachedPrefix,
        num_first: int,
        builder: PlanBuilder,
        now_ns: int,
    ) -> None:
        """num_first: tokens that it computes in this step."""
        num_tokens = len(request.token_ids)
        num_computed = cached.num_blocks * self.kv.block_size
        request.hit = cached.hit
        if request.num_preemptions == 0:
            request.num_cached_tokens = num_computed
            request.first_scheduled_ns = now_ns
            if self.kv.enable_prefix_caching:
                self.stats.prefix_query_tokens += num_tokens
                self.stats.prefix_hit_tokens += num_computed
        given = self.kv.admit(slot, num_tokens, cached, num_first)
        for group, (first, blocks) in enumerate(given):
            builder.add_blocks(slot, first, blocks, group)
        self.slots.occupy(slot, request, num_computed)
        self.constraints.seat(request, slot)
        request.status = RequestStatus.RUNNING
        builder.add_row(request, num_computed, cached.state_place)
        self.started.append(
            StartedRow(
                request_id=request.request_id,
                slot=slot,
                epoch=request.epoch,
                num_cached_tokens=request.num_cached_tokens,
                first_scheduled_ns=request.first_scheduled_ns,
            )
        )

    def _advance(self, slots: IntArray, counts: IntArray, samples: npt.NDArray[Any]) -> None:
        """Count tokens as computed; rows that reach their newest token will sample one, and one
        more for each draft.

        Then publish full blocks. Only tokens known to the host are hashed: never one in flight.
        """
        table, kv = self.slots, self.kv
        if table.num_pooling:
            samples = samples * (table.pooling[slots] == 0)
        table.num_computed[slots] += counts
        table.num_pending[slots] += samples
        table.last_step[slots] = self._next_step
        if kv.enable_prefix_caching:
            known = np.minimum(table.num_computed[slots], table.num_settled(slots))
            fuller = np.flatnonzero(known // kv.block_size > kv.num_registered[slots])
            full = zip(slots[fuller].tolist(), known[fuller].tolist(), strict=True)
            for slot, num_tokens in full:
                self._publish(slot, num_tokens)

    def _publish(self, slot: int, num_tokens: int) -> None:
        """Make a slot's full blocks within its first `num_tokens` tokens findable."""
        kv, table = self.kv, self.slots
        if kv.enable_prefix_caching:
            kv.register(slot, num_tokens, table.request_at(slot), table.token_ids[slot])

    def _count_plan(self, plan: StepPlan) -> StepPlan:
        if self.kv.given_up:
            plan = plan._replace(given_up=np.asarray(self.kv.given_up, np.int32))
            self.kv.given_up = []
        if not plan.is_decode:
            prompt_left = self.slots.num_prompt[plan.slots] - plan.num_computed
            self.stats.prompt_tokens += int(np.clip(prompt_left, 0, plan.num_tokens).sum())
        self._released = []
        self._next_step += 1
        return plan

    def withhold_masks(self) -> None:
        """Have the steps in flight not wait for masks: their results are not read."""
        self.constraints.withhold_all(self.slots)

    # -- results ---------------------------------------------------------------------------

    def apply(self, plan: StepPlan, result: StepResult) -> AppliedStep:
        """Process a landed step: append tokens, end finished requests, free what it fenced."""
        if result.corrupt is not None:
            forget_corrupt(self.slots, self.kv, self.fence, plan, result.corrupt)
        self._land(plan.step_id)
        if plan.num_drafts:
            self._decode_step.forget()  # what stays of the drafts changes the counts
        if self._pace is not None:
            self._pace.landed(plan, result)
        slots, epochs, tokens = plan.slots, plan.epochs, result.token_ids
        rows, chosen = self._all_rows[: plan.num_rows], None
        has_drafts = plan.num_drafts > 0 and had_drafts(result)
        num_sampled = np.count_nonzero(result.num_sampled) if has_drafts else len(tokens)
        is_whole = plan.step_id >= self._newest_loss and num_sampled == plan.num_rows
        if not is_whole:
            alive = self.slots.epoch[slots] == epochs
            sampled = result.num_sampled > 0
            is_one_each = np.count_nonzero(sampled) == len(tokens)
            assert is_one_each or plan.num_drafts, "no drafts were planned"
            self.stats.wasted_tokens += int(plan.num_tokens[~alive].sum())
            if plan.constrained is not None:
                self._uncount_late(plan, alive & ~sampled, result.corrupt)
            rows = chosen = (alive & sampled).nonzero()[0].astype(np.int32)
            slots, epochs, tokens = slots[rows], epochs[rows], result.last_tokens()[rows]
        applied = AppliedStep(slots, epochs, tokens, rows)
        if has_drafts:
            kept = kept_tokens(plan, result, chosen)
            tokens = kept.token_ids.take(kept.ends - 1)
            applied.token_ids, applied.samples, applied.num_tokens = kept[:3]
            guessed = kept.guesses(self.slots.may_draft.take(slots))
            if guessed.drafted.any():
                applied.num_drafted = guessed.drafted
            self.stats.count_drafts(guessed)
            self.stats.num_forced_tokens += int((kept.counts - 1 - guessed.accepted).sum())
            stopped, ended = append_kept(self.slots, slots, kept, guessed)
        else:
            if plan.num_drafts:
                take_places_back(self.slots, slots, plan.num_draft_tokens[rows])
            stopped, ended = self.slots.append_tokens(slots, tokens)
        if self.kv.states is not None and self.config.num_speculative_tokens:
            self.kv.states.landed(
                plan.step_id, slots, applied.num_tokens, self.slots.num_tokens[slots]
            )
        self.stats.generation_tokens += len(applied.token_ids)
        landed = applied.token_ids, applied.num_tokens
        endings = self.constraints.endings(self.slots, slots, *landed, stopped, ended)
        for i, (reason, error) in sorted(endings.items()):
            request = self._release_slot(int(slots[i]))
            token = int(tokens[i]) if stopped[i] else None
            applied.finished.append(self._finished(request, reason, stop_token=token, error=error))
        for slot, vector in landed_vectors(self.slots, plan, result) if plan.pooled else ():
            ended_row = self._finished(self._release_slot(slot), FinishReason.STOP)
            applied.finished.append(replace(ended_row, vector=vector))
        if result.corrupt is not None:
            self._end_corrupt(plan, result.corrupt, applied)
        return applied

    def _uncount_late(
        self, plan: StepPlan, is_missing: npt.NDArray[np.bool_], corrupt: IntArray | None
    ) -> None:
        """Uncount the rows that sampled nothing for lack of their masks. is_missing: [num_rows]
        rows that have their slot still and sampled nothing, corrupt ones included."""
        if corrupt is not None:
            is_missing[corrupt] = False
        assert plan.constrained is not None
        late = plan.constrained[is_missing[plan.constrained]]
        if len(late):
            self._decode_step.forget()
            self.slots.take_back(plan.slots[late], plan.num_draft_tokens[late])
            self.constraints.note_late(self.slots, plan.slots[late])
            self.stats.wasted_tokens += len(late)
            self.stats.num_late_masks += len(late)

    def _end_corrupt(self, plan: StepPlan, rows: IntArray, applied: AppliedStep) -> None:
        """End the requests with NaN or infinite logits; the device has stopped them already."""
        slots, epochs = plan.slots[rows], plan.epochs[rows]
        for slot in slots[self.slots.epoch[slots] == epochs].tolist():
            request = self._release_slot(slot, publish=False)
            self.stats.num_corrupted += 1
            error = CorruptedLogitsError(request.request_id)
            applied.finished.append(self._finished(request, FinishReason.ERROR, error=error))

    def fail(self, plan: StepPlan, error: EngineError) -> list[FinishedRow]:
        """End the requests of a failed step, and make all others recompute from scratch.

        Call it when no step is running; results of later steps must not be applied. Their plans may
        have named released slots, so the device must accept an AddedRow for a row it believes
        occupied. The failed step's KV is findable, so the whole prefix cache is dropped.
        """
        alive = plan.slots[self.slots.epoch[plan.slots] == plan.epochs]
        finished = [
            self._finished(self._release_slot(int(s)), FinishReason.ERROR, error=error)
            for s in alive
        ]
        self.recompute_all()
        return finished

    def land_all(self) -> None:
        """Free everything fenced: no step is running, whether its result was read or not."""
        self._land(self.newest_step)

    def recompute_all(self) -> None:
        """Preempt all running requests and drop the prefix cache. No step may be running."""
        self.land_all()
        for slot in self.slots.running[::-1].tolist():
            self._preempt(slot)
        is_empty = self.reset_prefix_cache()
        assert is_empty, "a block is in use, but nothing runs"

    def reset_prefix_cache(self) -> bool:
        """Drop the cached prefixes that no request uses; returns True if none is left."""
        return self.kv.forget_idle()

    def _finished(
        self,
        request: Request,
        reason: FinishReason,
        *,
        stop_token: int | None = None,
        error: TermgenError | None = None,
    ) -> FinishedRow:
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        if request.grammar is not None:
            request.grammar.drop()
        del self.requests[request.request_id]
        self.unread.discard(request.request_id)
        self.stats.num_finished += 1
        own = stop_token is not None and stop_token in request.params.stop_token_ids
        return FinishedRow(
            request_id=request.request_id,
            reason=reason,
            stop_token_id=stop_token if own else None,
            stopped_by_token=stop_token is not None,
            error=error,
            num_prompt_tokens=request.num_prompt_tokens,
            num_output_tokens=len(request.token_ids) - request.num_prompt_tokens,
            num_cached_tokens=request.num_cached_tokens,
            drafts=request.drafts,
        )

    def _release_slot(self, slot: int, *, publish: bool = True) -> Request:
        """Release a request's slot. Slot and blocks are reusable once no step can access them.
        publish: keep its KV findable in the prefix cache."""
        table = self.slots
        last_step = int(table.last_step[slot])
        if publish:
            # The newest token may be a stop token, whose KV the device does not write.
            known = min(int(table.num_computed[slot]), int(table.num_tokens[slot]) - 1)
            self._publish(slot, known)
        request = table.vacate(slot)
        self.constraints.unseat(request)
        self._newest_loss = self._next_step
        self._released.append(slot)
        blocks = self.kv.take_all(slot)
        if not self.fence.hold(last_step, slot, blocks):
            self._give_back(slot, blocks)
        return request

    def _land(self, step_id: int) -> None:
        """Record that every step up to this one has ended on the device."""
        for _, slot, blocks in self.fence.land(step_id):
            self._give_back(slot, blocks)

    def _give_back(self, slot: int, blocks: list[int]) -> None:
        self.kv.pool.release(blocks)
        self.free_slots.append(slot)
