"""Ownership of KV blocks, and the prefix cache.

`BlockPool` owns block ids: reference counts, the free list, and the hash of what a block holds.
`KVCacheManager` gives blocks to slots and finds cached prefixes. Called by the scheduler only, on
the engine thread; knows nothing of tensors. The design (flat pool with a null block, free list in
eviction order, chained block hashes, tail-first freeing) follows vLLM's V1 KV cache manager.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from termgen.vocabulary.events import BlockState
from termgen.vocabulary.request import IntArray, Request, hash_blocks

NULL_BLOCK = 0
"""Never allocated; padded rows and released rows write here."""
EVICTED_KEPT = 1024
"""Latest evictions whose blocks are recorded for screens."""


@dataclass(frozen=True, slots=True)
class PoolCopy:
    """State of all blocks at one moment."""

    ref_counts: bytes
    """[num_blocks] int32."""
    is_hashed: bytes
    """[num_blocks] 1 if the block holds a findable prefix."""
    evicted: bytes
    """[EVICTED_KEPT] int32, the pool's ring buffer."""
    num_evictions: int

    def last_evicted(self) -> npt.NDArray[np.int32]:
        """[<= EVICTED_KEPT] evicted blocks, newest last."""
        ring = np.frombuffer(self.evicted, dtype=np.int32)
        first = max(0, self.num_evictions - EVICTED_KEPT)
        return ring[np.arange(first, self.num_evictions) % EVICTED_KEPT]

    def states(self) -> npt.NDArray[np.uint8]:
        """[num_blocks] BlockState of every block."""
        refs = np.frombuffer(self.ref_counts, dtype=np.int32)
        hashed = np.frombuffer(self.is_hashed, dtype=np.uint8)
        # uint8 is several times as fast. 0, 1 and 2 users are FREE, ACTIVE and SHARED.
        used = np.minimum(refs, 2).astype(np.uint8)
        states: npt.NDArray[np.uint8] = used + (used != 0)
        states += hashed & (used == 0)  # FREE to CACHED
        states[NULL_BLOCK] = BlockState.NULL
        return states


class BlockPool:
    """Block ids 0..num_blocks-1 with reference counts, an intrusive free list and block hashes.

    The free list runs from next-to-be-reused to last: blocks without a hash go to its head, hashed
    ones to its tail, so reusable prefixes live longest and the least recently used goes first.
    """

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks >= 2, "the pool needs the null block and at least one more"
        self.num_blocks = num_blocks
        self._end = num_blocks  # sentinel: next of it is the head, prev of it the tail
        self._next = array("i", range(1, num_blocks + 2))
        self._prev = array("i", range(-1, num_blocks))
        self._next[num_blocks], self._prev[1] = 1, num_blocks
        self._prev[num_blocks] = num_blocks - 1
        self._ref_counts = array("i", bytes(4 * num_blocks))
        self._ref_counts[NULL_BLOCK] = 1
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._is_hashed = bytearray(num_blocks)
        self._by_hash: dict[bytes, list[int]] = {}
        self.num_free = num_blocks - 1
        """Blocks that no request uses, cached ones included."""
        self.num_cached = 0
        """Blocks that no request uses and that hold a findable prefix."""
        self.num_evictions = 0
        self._evicted = array("i", bytes(4 * EVICTED_KEPT))
        """Ring buffer of evicted blocks, the n-th at n % EVICTED_KEPT."""
        self.num_freed = 0
        """Times a block lost its last user, since start."""

    def lookup(self, block_hash: bytes) -> int | None:
        """A block that holds this prefix, or None."""
        blocks = self._by_hash.get(block_hash)
        return blocks[0] if blocks else None

    def is_free(self, block: int) -> bool:
        return self._ref_counts[block] == 0

    def pop_free(self) -> int:
        """Take the next free block; its cached prefix, if any, is evicted."""
        block = self._next[self._end]
        assert block != self._end, "no free block: check num_free first"
        if self._hashes[block] is not None:
            self._forget(block)
            self._evicted[self.num_evictions % EVICTED_KEPT] = block
            self.num_evictions += 1
        self._unlink(block)
        self._ref_counts[block] = 1
        return block

    def touch(self, block: int) -> None:
        """Add a user of a block found by `lookup`."""
        if self._ref_counts[block] == 0:
            self._unlink(block)
            self.num_cached -= self._is_hashed[block]
        self._ref_counts[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Remove a user of each block, in this order: pass the tail of a sequence first."""
        for block in blocks:
            assert self._ref_counts[block] > 0 and block != NULL_BLOCK, f"double free of {block}"
            self._ref_counts[block] -= 1
            if self._ref_counts[block] == 0:
                self.num_freed += 1
                hashed = self._hashes[block] is not None
                self._link(block, before=self._end if hashed else self._next[self._end])
                self.num_cached += hashed

    def register(self, block: int, block_hash: bytes) -> None:
        """Set the hash of a block. Several blocks may have the same hash; all are kept."""
        assert self._ref_counts[block] > 0, "only a block in use can be registered"
        if self._hashes[block] is None:
            self._hashes[block] = block_hash
            self._is_hashed[block] = 1
            self._by_hash.setdefault(block_hash, []).append(block)

    def forget(self, blocks: Iterable[int]) -> None:
        """Remove the hashes of these blocks; requests that use them keep them."""
        for block in blocks:
            if self._hashes[block] is not None:
                self._forget(block)

    def forget_idle(self) -> bool:
        """Remove the hashes of unused blocks; returns True if no hash is left."""
        for blocks in list(self._by_hash.values()):
            for block in list(blocks):
                if self.is_free(block):
                    self._forget(block)
        return not self._by_hash

    def copy(self) -> PoolCopy:
        evicted = self._evicted.tobytes()
        return PoolCopy(
            self._ref_counts.tobytes(), bytes(self._is_hashed), evicted, self.num_evictions
        )

    @property
    def num_used(self) -> int:
        """Blocks in use, without the null block."""
        return self.num_blocks - 1 - self.num_free

    def check_integrity(self, users: dict[int, int]) -> None:
        """Compare with an independent count of `users` per block; AssertionError on any breach."""
        free: list[int] = []
        block, previous = self._next[self._end], self._end
        while block != self._end:
            assert self._prev[block] == previous, f"broken free list at block {block}"
            assert len(free) <= self.num_blocks, "the free list has a cycle"
            free.append(block)
            block, previous = self._next[block], block
        assert len(free) == self.num_free == len(set(free)), "the free list lost count"
        for b in range(1, self.num_blocks):
            assert self._ref_counts[b] == users.get(b, 0), f"block {b} has wrong reference count"
            held = self._hashes[b]
            assert (held is not None) == bool(self._is_hashed[b])
            assert held is None or b in self._by_hash[held], f"block {b} is not found by its hash"
        assert set(free) == {b for b in range(1, self.num_blocks) if users.get(b, 0) == 0}
        assert sum(map(len, self._by_hash.values())) == sum(self._is_hashed)
        assert self.num_cached == sum(self._is_hashed[b] for b in free), "cached count is off"

    def _forget(self, block: int) -> None:
        block_hash = self._hashes[block]
        assert block_hash is not None
        owners = self._by_hash[block_hash]
        owners.remove(block)
        if not owners:
            del self._by_hash[block_hash]
        self._hashes[block] = None
        self._is_hashed[block] = 0
        self.num_cached -= self._ref_counts[block] == 0

    def _unlink(self, block: int) -> None:
        before, after = self._prev[block], self._next[block]
        self._next[before], self._prev[after] = after, before
        self.num_free -= 1

    def _link(self, block: int, *, before: int) -> None:
        previous = self._prev[before]
        self._next[previous] = self._prev[before] = block
        self._prev[block], self._next[block] = previous, before
        self.num_free += 1


class KVCacheManager:
    """Block tables by slot over one `BlockPool`."""

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        max_model_len: int,
        enable_prefix_caching: bool,
    ) -> None:
        self.pool = BlockPool(num_blocks)
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.block_table = np.zeros((max_num_seqs, -(-max_model_len // block_size)), np.int32)
        self.num_blocks = np.zeros(max_num_seqs, np.int32)
        """[max_num_seqs] blocks each slot holds."""
        self.num_registered = np.zeros(max_num_seqs, np.int32)
        """[max_num_seqs] leading blocks of each slot that are findable by hash."""
        self._misfit: tuple[Request, int, int] | None = None
        """(last request that did not fit, its cached blocks, the pool's `num_freed` then)."""

    @property
    def capacity_tokens(self) -> int:
        return (self.pool.num_blocks - 1) * self.block_size

    @property
    def hash_block_size(self) -> int | None:
        """Tokens per hashed block; None without a prefix cache."""
        return self.block_size if self.enable_prefix_caching else None

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def find_cached(self, request: Request) -> list[int]:
        """The request's leading blocks that are cached.

        At most (tokens - 1) // block_size: the last token is always computed, as its logits are
        needed. Empty for a request that needs the logits of its whole prompt.
        """
        if not self.enable_prefix_caching or request.owes_prompt_logprobs:
            return []
        hash_blocks(request.token_ids, self.block_size, request.block_hashes, request.cache_salt)
        found: list[int] = []
        for block_hash in request.block_hashes[: (len(request.token_ids) - 1) // self.block_size]:
            block = self.pool.lookup(block_hash)
            if block is None:
                break
            found.append(block)
        return found

    def num_needed(self, num_tokens: int, cached: Sequence[int]) -> int:
        """Free blocks that a request with these known tokens and cached blocks takes.

        Unused cached blocks count as needed, as taking them shortens the free list.
        """
        idle = sum(self.pool.is_free(b) for b in cached)
        return self.blocks_for(num_tokens) - len(cached) + idle

    def try_fit(self, request: Request, num_reserved: int = 0) -> list[int] | None:
        """The request's cached blocks if all its known tokens fit now, else None.

        num_reserved: free blocks that others will take. A request may wait for blocks over many
        steps. It can fit only after a block was freed or its next block became cached, so until
        then its prompt is not looked up again.
        """
        freed = self.pool.num_freed
        if self._misfit is not None and self._misfit[0] is request and self._misfit[2] == freed:
            upcoming = request.block_hashes[self._misfit[1] : self._misfit[1] + 1]
            if not upcoming or self.pool.lookup(upcoming[0]) is None:
                return None
        cached = self.find_cached(request)
        needed = self.num_needed(len(request.token_ids), cached)
        fits = needed + num_reserved <= self.pool.num_free
        if not num_reserved:  # what others will take, they may yet leave
            self._misfit = None if fits else (request, len(cached), freed)
        return cached if fits else None

    def admit(self, slot: int, num_tokens: int, cached: Sequence[int]) -> IntArray:
        """Give an empty slot its cached blocks, and new ones for the rest; returns all ids."""
        assert self.num_blocks[slot] == 0
        for block in cached:  # before taking new blocks, which could evict a hit
            self.pool.touch(block)
        count = self.blocks_for(num_tokens)
        new = [self.pool.pop_free() for _ in range(count - len(cached))]
        self.block_table[slot, :count] = [*cached, *new]
        self.num_blocks[slot] = count
        self.num_registered[slot] = len(cached)
        return self.block_table[slot, :count].copy()

    def append(self, slot: int) -> int:
        """Give a slot one more block; returns its id."""
        block = self.pool.pop_free()
        self.block_table[slot, self.num_blocks[slot]] = block
        self.num_blocks[slot] += 1
        return block

    def register(self, slot: int, num_tokens: int, request: Request, tokens: IntArray) -> None:
        """Make the slot's full blocks within its first `num_tokens` tokens findable.

        The caller guarantees that these tokens are known to the host and that a step already
        planned writes their KV; steps run in order, and a step writes before it reads.
        """
        hash_blocks(tokens[:num_tokens], self.block_size, request.block_hashes, request.cache_salt)
        full = num_tokens // self.block_size
        for i in range(int(self.num_registered[slot]), full):
            self.pool.register(int(self.block_table[slot, i]), request.block_hashes[i])
        self.num_registered[slot] = full

    def forget(self, slot: int) -> None:
        """Remove the hashes of the slot's blocks, including shared ones."""
        self.pool.forget(self.block_table[slot, : self.num_blocks[slot]].tolist())

    def take_all(self, slot: int) -> list[int]:
        """Empty a slot's block table; the caller owns the returned references, tail first."""
        blocks: list[int] = self.block_table[slot, : self.num_blocks[slot]][::-1].tolist()
        self.block_table[slot, : len(blocks)] = NULL_BLOCK
        self.num_blocks[slot] = 0
        self.num_registered[slot] = 0
        return blocks
