"""Groups of layers with a window: blocks given up, hits that need only a tail, what it saves."""

from __future__ import annotations

import numpy as np
import pytest
from scheduler_harness import Driver, free_order, make_request, make_scheduler

from termgen.engine.schedule.kv_cache import KVCacheManager
from termgen.vocabulary.cache_groups import Chunk, Window, blocks_of_context, window_name
from termgen.vocabulary.request import Request

SIZE = 4
WINDOW = 6


def make_kv(
    *windows: Window | None, num_blocks: int = 60, caching: bool = True, debug: bool = False
) -> KVCacheManager:
    return KVCacheManager(
        num_blocks=num_blocks,
        block_size=SIZE,
        max_num_seqs=4,
        max_model_len=200,
        enable_prefix_caching=caching,
        windows=windows,
        debug=debug,
    )


def compute(kv: KVCacheManager, slot: int, tokens: range, chunk: int = 8) -> Request:
    """Admit a request and compute its tokens chunk by chunk, giving up what is not seen."""
    request = make_request(f"r{slot}", tokens)
    fit = kv.try_fit(request, chunk)
    assert fit is not None
    cached, chunk = fit
    kv.admit(slot, len(tokens), cached, chunk)
    done = cached.num_blocks * SIZE
    slots = np.asarray([slot], np.int32)
    while done < len(tokens):
        done = min(done + chunk, len(tokens))
        target = np.asarray([done], np.int32)
        for group, (missing,) in enumerate(kv.missing(slots, target).tolist()):
            kv.append(slot, group, max(0, missing))
        if kv.enable_prefix_caching:
            kv.register(slot, done, request, request.token_ids)
        kv.drop_unseen(slots, target)
    return request


def give_back(kv: KVCacheManager, slot: int) -> None:
    kv.pool.release(kv.take_all(slot))


def hit(kv: KVCacheManager, tokens: range) -> tuple[int, list[int]]:
    """Blocks that need not be computed, and how many are found in each group."""
    found = kv.find_cached(make_request("probe", tokens))
    return found.num_blocks, [len(blocks) for blocks in found.blocks]


def test_blocks_outside_the_window_are_given_up() -> None:
    kv = make_kv(None, WINDOW)
    compute(kv, 0, range(40))
    assert kv.num_held(np.asarray([0])).tolist() == [10 + 2]
    # Token 40 sees 35..40: its first block is 8.
    assert kv.num_dropped[:, 0].tolist() == [0, 8]
    assert not kv.block_tables[1, 0, :8].any() and kv.block_tables[1, 0, 8:10].all()
    assert kv.pool.num_used == 12
    give_back(kv, 0)
    assert kv.pool.num_used == 0 and kv.pool.num_cached == 20
    kv.pool.check_integrity({})


@pytest.mark.parametrize("position", range(WINDOW - 1, WINDOW + 2 * SIZE + 1))
def test_what_the_next_token_sees_is_kept(position: int) -> None:
    kv = make_kv(WINDOW)
    compute(kv, 0, range(position), chunk=1)
    first_seen = max(0, position - WINDOW + 1)
    assert kv.num_dropped[0, 0] == first_seen // SIZE


def test_a_hit_needs_only_what_the_next_token_sees() -> None:
    kv = make_kv(None, WINDOW)
    compute(kv, 0, range(40))
    give_back(kv, 0)
    for block_hash in make_hashes(range(40))[:7]:  # all but the tail is used again
        kv.pool.forget(kv.pool._by_hash.get(block_hash + b"\x01", [])[:])
    assert hit(kv, range(40)) == (9, [9, 2]), "the last token is always computed"
    assert hit(kv, range(48)) == (10, [10, 2])
    assert hit(kv, range(30)) == (0, [0, 0]), "what token 28 sees is gone"


def make_hashes(tokens: range) -> list[bytes]:
    request = make_request("hashes", tokens)
    make_kv(None).find_cached(request)
    return request.block_hashes


def test_groups_shorten_a_hit_until_they_agree() -> None:
    kv = make_kv(None, WINDOW, 3 * SIZE + 1)
    compute(kv, 0, range(60))
    give_back(kv, 0)
    hashes = make_hashes(range(60))
    # Without block 12 the long window ends a hit at 12 blocks, where the short one needs 10 and 11;
    # without its 11 it ends at 11, where the long one needs 8 to 10.
    for name in (hashes[12] + b"\x02", hashes[11] + b"\x01"):
        kv.pool.forget(kv.pool._by_hash[name][:])
    assert hit(kv, range(60)) == (11, [11, 2, 3])


def test_a_salt_and_a_group_keep_blocks_apart() -> None:
    kv = make_kv(None, WINDOW)
    compute(kv, 0, range(8))
    full, windowed = kv.find_cached(make_request("probe", range(9))).blocks
    assert not set(full) & set(windowed)
    assert kv.find_cached(make_request("probe", range(9), salt="other")).num_blocks == 0


def test_given_up_blocks_are_used_again_before_other_cached_ones() -> None:
    kv = make_kv(WINDOW, num_blocks=12)
    compute(kv, 0, range(12))
    old = kv.held(0)
    give_back(kv, 0)
    compute(kv, 1, range(100, 120), chunk=4)
    given_up = int(kv.num_dropped[0, 1])
    assert given_up == 3
    order = free_order(kv.pool)
    assert [block in old for block in order[-len(old) :]] == [True] * len(old)
    assert kv.pool.num_cached == given_up + 3 and len(order) == kv.pool.num_free
    assert hit(kv, range(13)) == (3, [2]), "the older answer is still whole"
    kv.pool.check_integrity({block: 1 for block in kv.held(1)})


def test_blocks_that_were_found_once_are_kept_as_long_as_others() -> None:
    kv = make_kv(WINDOW, num_blocks=12)
    compute(kv, 0, range(12))
    give_back(kv, 0)
    (found,) = kv.find_cached(make_request("probe", range(13))).blocks
    request = compute(kv, 1, range(32), chunk=4)  # finds 12 tokens, and gives their blocks up
    assert request.block_hashes and kv.num_dropped[0, 1] > 3
    assert set(free_order(kv.pool)[-2:]) == set(found)


def test_a_prompt_takes_blocks_of_a_window_chunk_by_chunk() -> None:
    kv = make_kv(None, WINDOW, num_blocks=30)
    request = make_request("long", range(80))
    assert kv.num_needed(80, kv.find_cached(request), 8) == 20 + 2
    assert kv.try_fit(request, 80) == (kv.find_cached(request), 20), "cut until it fits"
    assert kv.try_fit(make_request("longer", range(120)), 80) is None


def test_what_was_given_up_is_named_for_debugging_alone() -> None:
    kv = make_kv(None, WINDOW, caching=False, debug=True)
    compute(kv, 0, range(20))
    assert kv.given_up is not None and len(kv.given_up) == 3
    assert 0 not in kv.given_up
    cached = make_kv(None, WINDOW, debug=True)
    compute(cached, 0, range(20))
    assert cached.given_up == [], "hits may read them"
    assert make_kv(None, WINDOW).given_up is None


def test_nan_in_a_row_drops_all_hashes_where_blocks_are_given_up() -> None:
    kv = make_kv(None, WINDOW)
    compute(kv, 0, range(40))
    kv.forget(kv.held(0))
    give_back(kv, 0)
    assert kv.pool.num_cached == 0 and hit(kv, range(40)) == (0, [0, 0])


def most_at_once(windows: tuple[Window | None, ...], num_blocks: int) -> int:
    """Requests of 96 tokens that run at the same time."""
    scheduler = make_scheduler(
        num_blocks=num_blocks,
        max_num_seqs=40,
        windows=windows,
        max_num_batched_tokens=64,
        caching=False,
    )
    driver = Driver(scheduler)
    for i in range(40):
        driver.add(make_request(f"r{i}", range(i, i + 80), max_tokens=16))
    most = 0
    while scheduler.has_requests:
        driver.step()
        decoding = scheduler.slots.num_computed[scheduler.slots.running] >= 80
        most = max(most, int(np.count_nonzero(decoding)))
    driver.assert_reference()
    return most


def test_a_cache_holds_more_requests_whose_layers_have_windows() -> None:
    # The bytes are the same: six groups of one layer, or one group of six.
    assert most_at_once((None, *[8] * 5), 6 * 48 + 1) >= 2 * most_at_once((None,), 48 + 1)


CHUNK = Chunk(3 * SIZE)


@pytest.mark.parametrize("position", range(4 * SIZE * 3))
@pytest.mark.parametrize("size", [1, 3, SIZE, 10, 3 * SIZE])
def test_what_the_next_token_sees_of_its_chunk_is_kept(size: int, position: int) -> None:
    kv = make_kv(None, Chunk(size))
    if position:
        compute(kv, 0, range(position), chunk=1)
    first_seen = position // size * size
    assert kv.num_dropped[:, 0].tolist() == [0, first_seen // SIZE]
    assert kv.num_held(np.asarray([0]))[0] == 2 * -(-position // SIZE) - first_seen // SIZE


@pytest.mark.parametrize(
    ("num_tokens", "blocks"),
    [
        # The chunks begin at tokens 0, 12, 24 and 36; the one of 24 to 35 is gone.
        (24, (5, 2)),
        (25, (6, 0)),
        (28, (6, 0)),
        (29, (6, 0)),
        (36, (6, 0)),
        (37, (9, 0)),
        (40, (9, 0)),
        (41, (10, 1)),
        (48, (11, 2)),
        (49, (12, 0)),
    ],
)
def test_a_hit_needs_the_chunk_that_it_ends_in(num_tokens: int, blocks: tuple[int, int]) -> None:
    kv = make_kv(None, CHUNK)
    compute(kv, 0, range(48))
    give_back(kv, 0)
    for block_hash in make_hashes(range(60))[6:9]:
        kv.pool.forget(kv.pool._by_hash[block_hash + b"\x01"][:])
    num_blocks, needed = blocks
    assert hit(kv, range(num_tokens)) == (num_blocks, [num_blocks, needed])


def test_a_hit_in_chunks_that_begin_inside_a_block() -> None:
    kv = make_kv(Chunk(10))
    compute(kv, 0, range(48))
    give_back(kv, 0)
    # Tokens 12, 16, 20 and 24: their chunks begin at 10, 10, 20 and 20.
    assert [hit(kv, range(n + 1))[1] for n in (12, 16, 20, 24)] == [[1], [2], [0], [1]]


@pytest.mark.parametrize("windows", [(CHUNK,), (1,), (CHUNK, 1), (CHUNK, Chunk(SIZE))])
def test_a_text_that_was_never_computed_is_no_hit(windows: tuple[Window, ...]) -> None:
    kv = make_kv(*windows)
    assert hit(kv, range(40)) == (0, [0] * len(windows))
    compute(kv, 0, range(26))
    assert hit(kv, range(40))[0] == 6


def test_the_end_of_a_chunk_is_used_again_before_its_beginning() -> None:
    kv = make_kv(CHUNK, num_blocks=8)
    compute(kv, 0, range(16), chunk=4)
    assert kv.num_dropped[0, 0] == 3 and kv.pool.num_free == 6
    held = [kv.pool.pop_free() for _ in range(5)]  # three that never were used, then two
    assert hit(kv, range(12)) == (1, [1])
    assert kv.pool.num_cached == 1
    kv.pool.check_integrity({block: 1 for block in (*held, *kv.held(0))})


@pytest.mark.parametrize("window", [29, Chunk(29)], ids=window_name)
@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("lengths", [(34, 5), (40, 35, 40), (34, 34, 34, 34)])
@pytest.mark.parametrize("budget", [7, 20, 103])
def test_prompts_that_take_each_others_blocks_all_end(
    budget: int, lengths: tuple[int, ...], depth: int, window: Window
) -> None:
    for block_size, state_places in ((1, 0), (1, 1), (4, 0), (4, 1)):
        scheduler = make_scheduler(
            num_blocks=1 + blocks_of_context(50, block_size, (window,)),
            block_size=block_size,
            max_num_seqs=4,
            max_model_len=50,
            max_num_batched_tokens=budget,
            windows=(window,),
            state_places=state_places,
            caching=bool(state_places),
        )
        driver = Driver(scheduler, depth=depth, state_places=state_places)
        for i, length in enumerate(lengths):
            driver.add(make_request(f"r{i}", range(i, i + length), max_tokens=8))
        for _ in range(400):
            driver.step()
        assert not scheduler.has_requests
        driver.assert_reference()


@pytest.mark.parametrize("window", [1, 3, 5, Chunk(1), Chunk(3), Chunk(4)], ids=window_name)
@pytest.mark.parametrize("depth", [1, 4, 8])
def test_a_request_alone_is_never_preempted(window: Window, depth: int) -> None:
    """In the smallest cache that holds it, it waits for blocks that it has to give up itself: those
    whose tokens the host knows are published first, and given up then."""
    for block_size in (1, 2, 4):
        windows = (None, window)
        scheduler = make_scheduler(
            num_blocks=1 + blocks_of_context(40, block_size, windows),
            block_size=block_size,
            max_num_seqs=2,
            max_model_len=40,
            max_num_batched_tokens=8,
            windows=windows,
        )
        driver = Driver(scheduler, depth=depth)
        driver.add(make_request("alone", range(3), max_tokens=37))
        for _ in range(300):
            driver.step()
        assert not scheduler.has_requests and scheduler.stats.num_preemptions == 0
        driver.assert_reference()
