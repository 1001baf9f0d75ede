"""Reference counts, the free list and block hashes, without requests."""

from __future__ import annotations

import numpy as np
import pytest
from scheduler_harness import free_order

from termgen.engine.schedule.block_pool import NULL_BLOCK, BlockPool


def test_blocks_are_handed_out_in_order_and_never_the_null_block() -> None:
    pool = BlockPool(4)
    assert [pool.pop_free() for _ in range(3)] == [1, 2, 3]
    assert pool.num_free == 0 and pool.num_used == 3
    with pytest.raises(AssertionError, match="no free block"):
        pool.pop_free()


def test_unhashed_blocks_go_to_the_head_and_hashed_ones_to_the_tail() -> None:
    pool = BlockPool(6)
    for _ in range(4):
        pool.pop_free()
    pool.register(2, b"two")
    pool.register(4, b"four")
    pool.release([4, 3, 2, 1])
    assert free_order(pool) == [1, 3, 5, 4, 2]
    assert pool.num_cached == 2 and pool.num_freed == 4


def test_touch_takes_a_block_out_of_the_middle_of_the_free_list() -> None:
    pool = BlockPool(6)
    for _ in range(3):
        pool.pop_free()
    for block in (1, 2, 3):
        pool.register(block, b"%d" % block)
    pool.release([3, 2, 1])
    assert free_order(pool) == [4, 5, 3, 2, 1] and pool.num_cached == 3
    pool.touch(2)
    assert free_order(pool) == [4, 5, 3, 1] and pool.num_cached == 2
    pool.touch(2)
    pool.release([2])
    assert free_order(pool) == [4, 5, 3, 1], "it still has a user"
    pool.release([2])
    assert free_order(pool) == [4, 5, 3, 1, 2] and pool.num_cached == 3


def test_double_free_is_caught() -> None:
    pool = BlockPool(3)
    block = pool.pop_free()
    pool.release([block])
    for wrong in (block, NULL_BLOCK):
        with pytest.raises(AssertionError, match="double free"):
            pool.release([wrong])


def test_only_a_block_in_use_can_be_registered() -> None:
    pool = BlockPool(3)
    with pytest.raises(AssertionError, match="in use"):
        pool.register(1, b"hash")


@pytest.mark.parametrize("seed", range(5))
def test_random_pool_operations_agree_with_a_plain_list(seed: int) -> None:
    """Compare the intrusive list with the same rules on a Python list."""
    print(f"seed={seed}")
    rng = np.random.default_rng(seed)
    pool = BlockPool(12)
    free, refs, hashes = list(range(1, 12)), dict.fromkeys(range(1, 12), 0), dict[int, bytes]()
    for step in range(400):
        held = [b for b, n in refs.items() if n]
        action = rng.integers(4)
        if action == 0 and free:
            block = free.pop(0)
            hashes.pop(block, None)
            refs[block] = 1
            assert pool.pop_free() == block
        elif action == 1 and held:
            block = int(rng.choice(held))
            refs[block] -= 1
            if refs[block] == 0:
                free.insert(len(free) if block in hashes else 0, block)
            pool.release([block])
        elif action == 2 and held:
            block = int(rng.choice(held))
            hashes.setdefault(block, b"%d" % (step % 5))
            pool.register(block, b"%d" % (step % 5))
        elif action == 3 and hashes:
            block = pool.lookup(list(hashes.values())[int(rng.integers(len(hashes)))])
            assert block is not None
            refs[block] += 1
            if block in free:
                free.remove(block)
            pool.touch(block)
        assert free_order(pool) == free
        assert pool.num_cached == sum(b in hashes for b in free)
        pool.check_integrity(refs)
