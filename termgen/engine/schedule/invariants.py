"""The scheduler's invariants, checked from scratch by tests after every step."""

from __future__ import annotations

from termgen.engine.schedule.scheduler import Scheduler
from termgen.vocabulary.cache_groups import first_key
from termgen.vocabulary.request import RequestStatus


def check_scheduler(scheduler: Scheduler) -> None:
    """AssertionError if any block or slot is lost, shared by mistake or miscounted."""
    table, kv = scheduler.slots, scheduler.kv
    running = set(table.running.tolist())
    fenced_slots = {slot for _, slot, _ in scheduler.fence}
    assert len(running) == len(table.running)
    assert running == {s for s, r in enumerate(table.requests) if r is not None}
    assert sorted([*running, *fenced_slots, *scheduler.free_slots]) == list(
        range(scheduler.config.max_num_seqs)
    ), "a slot is lost or held twice"
    users: dict[int, int] = {}
    held = [kv.held(slot) for slot in running]
    for blocks in [*held, *(b for _, _, b in scheduler.fence)]:
        for block in blocks:
            users[block] = users.get(block, 0) + 1
    kv.pool.check_integrity(users)
    assert scheduler.fence.num_blocks == sum(len(b) for _, _, b in scheduler.fence)
    for slot in set(range(scheduler.config.max_num_seqs)) - running:
        is_empty = not (kv.num_blocks[:, slot].any() or kv.num_registered[slot])
        assert is_empty and not kv.block_tables[:, slot].any(), "an empty slot holds blocks"
    for slot in running:
        request = table.request_at(slot)
        tokens, pending = int(table.num_tokens[slot]), int(table.num_pending[slot])
        computed = int(table.num_computed[slot])
        assert request.status is RequestStatus.RUNNING and request.slot == slot
        assert 0 <= computed <= tokens + pending <= request.max_total_tokens
        assert computed <= int(kv.num_blocks[:, slot].min()) * kv.block_size
        newest = min(computed, tokens - 1)
        for group, window in enumerate(kv.windows):
            dropped = int(kv.num_dropped[group, slot])
            is_unseen = dropped * kv.block_size <= first_key(newest, window)
            assert is_unseen, "a block in use was given up"
            ids = kv.block_tables[group, slot, dropped : kv.num_blocks[group, slot]]
            assert ids.all(), "a block is lost"
        registered = int(kv.num_registered[slot]) * kv.block_size
        assert registered <= min(computed, tokens), "a block is findable before it is computed"
        assert scheduler.requests[request.request_id] is request
    waiting = [r for r in scheduler.waiting]
    assert all(r.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED) for r in waiting)
    assert len(waiting) + len(running) == len(scheduler.requests)
