"""Block pool and prefix cache: owners of blocks, prefix hits, and the order of eviction."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from scheduler_harness import free_order, make_request

from termgen.engine.schedule.block_pool import EVICTED_KEPT, CachedPrefix
from termgen.engine.schedule.kv_cache import KVCacheManager
from termgen.vocabulary.events import BlockState
from termgen.vocabulary.request import Request, hash_blocks

BLOCK_SIZE = 4
MANY = 1000
"""Tokens that a request may compute first: all of them."""
NOTHING = CachedPrefix(0, ([],))


def fits(kv: KVCacheManager, request: Request) -> tuple[object, ...] | None:
    """(blocks found, their ids, place of the states, tokens to compute first), if it fits."""
    fit = kv.try_fit(request, MANY)
    return None if fit is None else (*fit[0][:3], fit[1])


def make_kv(num_blocks: int = 11, *, caching: bool = True) -> KVCacheManager:
    return KVCacheManager(
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        max_num_seqs=4,
        max_model_len=64,
        enable_prefix_caching=caching,
    )


def take(kv: KVCacheManager, slot: int, tokens: Sequence[int], salt: str | None = None) -> Request:
    """Admit a request as a whole and compute all of it."""
    request = make_request(f"r{slot}", tokens, salt=salt)
    cached = kv.find_cached(request)
    assert kv.num_needed(len(tokens), cached, MANY) <= kv.pool.num_free
    kv.admit(slot, len(tokens), cached, MANY)
    assert kv.num_registered[slot] == cached.num_blocks, (
        "what was found need not be published again"
    )
    if kv.enable_prefix_caching:
        kv.register(slot, len(tokens), request, request.token_ids)
    return request


def give_back(kv: KVCacheManager, slot: int) -> list[int]:
    blocks = kv.take_all(slot)
    kv.pool.release(blocks)
    return blocks


def blocks_of(kv: KVCacheManager, slot: int) -> list[int]:
    return kv.block_tables[0, slot, : kv.num_blocks[0, slot]].tolist()


def hits(kv: KVCacheManager, tokens: Sequence[int], salt: str | None = None) -> list[int]:
    (found,) = kv.find_cached(make_request("probe", tokens, salt=salt)).blocks
    return found


def users_of(kv: KVCacheManager) -> dict[int, int]:
    users: dict[int, int] = {}
    for slot in range(kv.num_blocks.shape[1]):
        for block in blocks_of(kv, slot):
            users[block] = users.get(block, 0) + 1
    return users


def run_of(first: int, count: int) -> list[int]:
    return list(range(first, first + count))


def test_hit_shares_blocks_and_counts_users() -> None:
    kv = make_kv()
    take(kv, 0, run_of(0, 18))  # four full blocks and a partial one
    assert blocks_of(kv, 0) == [1, 2, 3, 4, 5]

    assert hits(kv, run_of(100, 18)) == []
    assert hits(kv, [*run_of(0, 9), 99, 99, 99]) == [1, 2]
    assert hits(kv, run_of(0, 16) + [77, 78]) == [1, 2, 3, 4]

    take(kv, 1, run_of(0, 16) + [77, 78])
    assert blocks_of(kv, 1) == [1, 2, 3, 4, 6]
    states = kv.pool.copy().states()
    assert (states[[1, 2, 3, 4]] == BlockState.SHARED).all()
    assert (states[[5, 6]] == BlockState.ACTIVE).all()
    assert kv.pool.num_used == 6 and kv.pool.num_free == 4
    kv.pool.check_integrity(users_of(kv))


def test_free_list_order_after_release() -> None:
    kv = make_kv()
    take(kv, 0, run_of(0, 18))
    take(kv, 1, run_of(0, 16) + [77, 78])

    assert give_back(kv, 0) == [5, 4, 3, 2, 1], "tail first"
    assert free_order(kv.pool) == [5, 7, 8, 9, 10], (
        "shared blocks stay, the partial goes to the head"
    )
    assert kv.pool.num_cached == 0

    give_back(kv, 1)
    assert free_order(kv.pool) == [6, 5, 7, 8, 9, 10, 4, 3, 2, 1]
    assert kv.pool.num_cached == 4 and kv.pool.num_used == 0
    kv.pool.check_integrity({})


def test_eviction_takes_unhashed_then_least_recent_tails_first() -> None:
    kv = make_kv(num_blocks=7)
    take(kv, 0, run_of(0, 8) + [1])  # blocks 1 2 hashed, 3 partial
    take(kv, 1, run_of(50, 12))  # blocks 4 5 6 hashed
    give_back(kv, 1)
    give_back(kv, 0)
    assert free_order(kv.pool) == [3, 6, 5, 4, 2, 1]

    take(kv, 2, run_of(200, 13))  # takes 3 6 5 4
    assert blocks_of(kv, 2) == [3, 6, 5, 4]
    assert kv.pool.num_evictions == 3
    assert kv.pool.copy().last_evicted().tolist() == [6, 5, 4], "for a screen, the newest last"
    assert hits(kv, run_of(50, 13)) == []
    assert hits(kv, run_of(0, 9)) == [1, 2], "the more recent prefix is still whole"

    give_back(kv, 2)
    take(kv, 3, run_of(300, 17))  # the partial block, then 2 before 1: tail before head
    assert blocks_of(kv, 3) == [4, 2, 1, 5, 6]
    kv.pool.check_integrity(users_of(kv))


def test_a_tail_is_evicted_before_its_prefix() -> None:
    kv = make_kv(num_blocks=4)
    take(kv, 0, run_of(0, 12))
    give_back(kv, 0)
    take(kv, 1, [99])
    assert hits(kv, run_of(0, 13)) == [1, 2]


def test_a_reused_block_loses_its_hash() -> None:
    kv = make_kv(num_blocks=3)
    take(kv, 0, run_of(0, 8))
    give_back(kv, 0)
    assert hits(kv, run_of(0, 9)) == [1, 2] and kv.pool.num_cached == 2
    take(kv, 1, run_of(50, 7))
    assert hits(kv, run_of(0, 9)) == [] and kv.pool.num_cached == 0
    give_back(kv, 1)
    assert hits(kv, run_of(0, 9)) == []
    assert hits(kv, run_of(50, 7)) == [2]


def test_a_hit_is_not_evicted_by_the_request_that_hits_it() -> None:
    kv = make_kv(num_blocks=5)
    take(kv, 0, run_of(0, 8))  # blocks 1 2
    give_back(kv, 0)
    take(kv, 1, [9])  # takes 3; free: 4, then the cached 2 and 1
    take(kv, 2, run_of(0, 8) + [1, 2, 3])
    assert blocks_of(kv, 2) == [1, 2, 4], "a new block came from the others"
    assert kv.pool.num_evictions == 0
    kv.pool.check_integrity(users_of(kv))


def test_a_used_prefix_moves_behind_others_in_eviction_order() -> None:
    kv = make_kv(num_blocks=5)
    take(kv, 0, run_of(0, 8))
    give_back(kv, 0)
    take(kv, 0, run_of(50, 8))
    give_back(kv, 0)
    assert free_order(kv.pool) == [2, 1, 4, 3]
    for block in hits(kv, run_of(0, 9)):
        kv.pool.touch(block)
    kv.pool.release([2, 1])
    assert free_order(kv.pool) == [4, 3, 2, 1]


def test_cached_blocks_nobody_uses_count_as_needed() -> None:
    kv = make_kv(num_blocks=5)
    take(kv, 0, run_of(0, 8))
    give_back(kv, 0)
    take(kv, 1, run_of(50, 8))
    assert kv.pool.num_free == 2
    request = make_request("x", run_of(0, 12))
    cached = kv.find_cached(request)
    assert cached[:3] == (2, ([1, 2],), -1)
    assert kv.num_needed(12, cached, MANY) == 3, "two hits would leave no block for the third"
    assert kv.num_needed(8, cached, MANY) == 2
    assert kv.try_fit(request, MANY) is None


def test_a_failed_admission_changes_nothing() -> None:
    kv = make_kv(num_blocks=5)
    take(kv, 0, run_of(0, 8))
    give_back(kv, 0)
    take(kv, 1, run_of(50, 8))
    order, states = free_order(kv.pool), kv.pool.copy().states()
    table = kv.block_tables.copy()
    assert kv.try_fit(make_request("x", run_of(0, 12)), MANY) is None
    assert free_order(kv.pool) == order and (kv.pool.copy().states() == states).all()
    assert (kv.block_tables == table).all()
    kv.pool.check_integrity(users_of(kv))


def test_a_request_that_did_not_fit_is_looked_at_again_after_a_release() -> None:
    kv = make_kv(num_blocks=5)
    take(kv, 0, run_of(0, 12))
    request = make_request("x", run_of(100, 8))
    assert kv.try_fit(request, MANY) is None
    assert kv.try_fit(request, MANY) is None
    give_back(kv, 0)
    assert fits(kv, request) == (*NOTHING[:3], MANY)


def test_a_request_that_did_not_fit_is_looked_at_again_when_its_next_block_is_cached() -> None:
    kv = make_kv(num_blocks=6)
    prompt = run_of(0, 12)
    other = make_request("other", prompt)
    kv.admit(0, 12, NOTHING, MANY)
    kv.register(0, 4, other, other.token_ids)
    kv.admit(1, 4, NOTHING, MANY)
    request = make_request("x", [*prompt, 1, 2])
    assert kv.try_fit(request, MANY) is None, "one block is shared, three are needed, one is free"
    kv.register(0, 8, other, other.token_ids)
    assert kv.try_fit(request, MANY) is None, "two shared, two needed"
    kv.register(0, 12, other, other.token_ids)
    assert fits(kv, request) == (3, ([1, 2, 3],), -1, MANY)


def test_waiting_for_room_does_not_walk_the_prompt_every_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kv = make_kv(num_blocks=5)
    take(kv, 0, run_of(0, 12))
    request = make_request("x", run_of(100, 12))
    walks = []
    find = kv.find_cached
    monkeypatch.setattr(kv, "find_cached", lambda r: walks.append(r) or find(r))
    for _ in range(5):
        assert kv.try_fit(request, MANY) is None
    assert len(walks) == 1
    assert fits(kv, make_request("y", run_of(200, 2))) is not None, (
        "the answer is about one request"
    )


def test_salt_separates_prefixes_through_the_whole_chain() -> None:
    kv = make_kv()
    take(kv, 0, run_of(0, 12), salt="alice")
    probe = run_of(0, 13)
    assert hits(kv, probe, salt="alice") == [1, 2, 3]
    assert hits(kv, probe, salt="bob") == []
    assert hits(kv, probe) == []
    chains: list[list[bytes]] = [[], [], []]
    for chain, salt in zip(chains, ("alice", "bob", None), strict=True):
        hash_blocks(np.arange(12, dtype=np.int32), BLOCK_SIZE, chain, salt)
    assert len({block_hash for chain in chains for block_hash in chain}) == 9


def test_a_block_is_found_only_behind_its_own_prefix() -> None:
    kv = make_kv()
    take(kv, 0, run_of(0, 12))
    assert hits(kv, [99, 99, 99, 99, *run_of(4, 8), 1]) == []


def test_hashing_in_pieces_equals_hashing_at_once() -> None:
    tokens = np.arange(40, dtype=np.int32)
    whole: list[bytes] = []
    hash_blocks(tokens, BLOCK_SIZE, whole, "s")
    pieces: list[bytes] = []
    for end in (3, 4, 9, 9, 31, 40):
        hash_blocks(tokens[:end], BLOCK_SIZE, pieces, "s")
        assert len(pieces) == end // BLOCK_SIZE
    assert pieces == whole and len(set(whole)) == 10


def test_duplicates_are_kept_and_evicting_one_keeps_the_other() -> None:
    kv = make_kv(num_blocks=5)
    first, second = make_request("a", run_of(0, 8)), make_request("b", run_of(0, 8))
    kv.admit(0, 8, NOTHING, MANY)
    kv.admit(1, 8, NOTHING, MANY)  # both computed the same tokens before either was registered
    kv.register(0, 8, first, first.token_ids)
    kv.register(1, 8, second, second.token_ids)
    assert blocks_of(kv, 0) == [1, 2] and blocks_of(kv, 1) == [3, 4]
    assert hits(kv, run_of(0, 9)) == [1, 2]

    give_back(kv, 0)
    take(kv, 2, run_of(70, 7))  # evicts 2 and 1
    assert kv.pool.num_evictions == 2
    assert hits(kv, run_of(0, 9)) == [3, 4]
    kv.pool.check_integrity(users_of(kv))


def test_without_caching_nothing_is_hashed_or_found() -> None:
    kv = make_kv(caching=False)
    request = take(kv, 0, run_of(0, 12))
    give_back(kv, 0)
    assert hits(kv, run_of(0, 13)) == []
    assert request.block_hashes == [] and kv.pool.num_cached == 0


def test_a_full_cache_admits_nobody() -> None:
    kv = make_kv(num_blocks=4)
    take(kv, 0, run_of(0, 12))
    assert kv.pool.num_free == 0
    assert kv.num_needed(1, NOTHING, MANY) == 1
    assert kv.try_fit(make_request("x", [1]), MANY) is None
    assert kv.try_fit(make_request("y", run_of(0, 12)), MANY) is None, (
        "its last block must be its own"
    )


def test_a_partial_block_is_findable_once_decoding_has_filled_it() -> None:
    kv = make_kv()
    request = take(kv, 0, run_of(0, 6))
    tokens = np.concatenate((request.token_ids, [80, 81, 82]))
    for num_tokens in (6, 7):
        kv.register(0, num_tokens, request, tokens)
        assert hits(kv, [*tokens[:8], 1]) == [1]
        assert kv.num_registered[0] == 1
    kv.register(0, 8, request, tokens)
    assert hits(kv, [*tokens[:8], 1]) == [1, 2]
    assert kv.append(0) == (2, [3]) and blocks_of(kv, 0) == [1, 2, 3]


def test_the_last_token_is_always_computed() -> None:
    kv = make_kv()
    take(kv, 0, run_of(0, 12))
    assert hits(kv, run_of(0, 13)) == [1, 2, 3]
    assert hits(kv, run_of(0, 12)) == [1, 2], "a whole number of blocks recomputes the last one"
    assert hits(kv, run_of(0, 11)) == [1, 2]
    assert hits(kv, run_of(0, 8)) == [1]
    assert hits(kv, run_of(0, 4)) == [] and hits(kv, run_of(0, 1)) == []


def test_a_slot_is_admitted_once() -> None:
    kv = make_kv()
    take(kv, 0, run_of(0, 4))
    with pytest.raises(AssertionError):
        kv.admit(0, 4, NOTHING, MANY)


def test_forget_idle_spares_what_is_in_use() -> None:
    kv = make_kv()
    take(kv, 0, run_of(0, 12))
    take(kv, 1, run_of(50, 12))
    give_back(kv, 1)
    assert not kv.pool.forget_idle(), "slot 0 still uses some"
    assert len(hits(kv, run_of(0, 13))) == 3 and hits(kv, run_of(50, 13)) == []
    assert kv.pool.num_cached == 0 and kv.pool.num_used == 3
    kv.pool.check_integrity(users_of(kv))
    assert give_back(kv, 0) == [3, 2, 1]
    assert kv.pool.num_cached == 3 and kv.pool.forget_idle() and kv.pool.num_cached == 0
    assert hits(kv, run_of(0, 13)) == []
    take(kv, 2, run_of(0, 12))
    assert len(hits(kv, run_of(0, 13))) == 3


def test_states_name_every_block() -> None:
    kv = make_kv(num_blocks=8)
    take(kv, 0, run_of(0, 9))  # 1 2 hashed, 3 partial
    take(kv, 1, run_of(0, 8) + [70])  # shares 1 2, owns 4
    take(kv, 2, run_of(50, 8))  # 5 6
    give_back(kv, 2)
    expected = [
        BlockState.NULL,
        BlockState.SHARED,
        BlockState.SHARED,
        BlockState.ACTIVE,
        BlockState.ACTIVE,
        BlockState.CACHED,
        BlockState.CACHED,
        BlockState.FREE,
    ]
    assert kv.pool.copy().states().dtype == np.uint8
    assert kv.pool.copy().states().tolist() == expected
    assert kv.pool.num_used == 4 and kv.pool.num_cached == 2 and kv.pool.num_free == 3


def test_integrity_check_notices_a_lost_reference_and_a_broken_list() -> None:
    kv = make_kv()
    take(kv, 0, run_of(0, 9))
    kv.pool.check_integrity(users_of(kv))
    with pytest.raises(AssertionError, match="reference count"):
        kv.pool.check_integrity({})
    kv.pool.num_free += 1
    with pytest.raises(AssertionError, match="lost count"):
        kv.pool.check_integrity(users_of(kv))


def test_of_many_evictions_the_last_are_known() -> None:
    kv = make_kv(num_blocks=3)
    blocks: list[int] = []
    for i in range(EVICTED_KEPT):
        take(kv, 0, run_of(10 * i, 8))
        blocks += blocks_of(kv, 0)
        give_back(kv, 0)
    assert kv.pool.num_evictions == len(blocks) - 2 > EVICTED_KEPT
    assert kv.pool.copy().last_evicted().tolist() == blocks[-EVICTED_KEPT:]
