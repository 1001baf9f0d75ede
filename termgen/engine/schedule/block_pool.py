"""Ownership of KV blocks: reference counts, the free list, what a block holds, and the search for
those that a prompt begins with.

Called by `KVCacheManager` and the scheduler only, on the engine thread; knows nothing of tensors.
The design (flat pool with a null block, free list in eviction order) follows vLLM's V1 KV cache
manager.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from termgen.engine.schedule.state_cache import StateCache
from termgen.vocabulary.cache_groups import Chunk, Window, first_key, most_keys, window_name
from termgen.vocabulary.events import BlockState, HitLimit, PrefixHit
from termgen.vocabulary.request import IntArray

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
    A mark in the list divides it: hashed blocks that are to be reused soon go before the mark.
    """

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks >= 2, "the pool needs the null block and at least one more"
        self.num_blocks = num_blocks
        self._end = num_blocks  # sentinel: next of it is the head, prev of it the tail
        self._mark = num_blocks + 1  # at first behind all blocks, as none has a hash
        self._next: array[int] = array("i", [0, *range(2, num_blocks), self._mark, 1, self._end])
        before = [0, self._end, *range(1, num_blocks - 1), self._mark, num_blocks - 1]
        self._prev: array[int] = array("i", before)
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
        if block == self._mark:
            block = self._next[block]
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

    def release(self, blocks: Iterable[int], *, reuse_soon: bool = False) -> None:
        """Remove a user of each block, in this order: pass the tail of a sequence first.
        reuse_soon: before all cached blocks that are not."""
        hashed_before = self._mark if reuse_soon else self._end
        for block in blocks:
            assert self._ref_counts[block] > 0 and block != NULL_BLOCK, f"double free of {block}"
            self._ref_counts[block] -= 1
            if self._ref_counts[block] == 0:
                self.num_freed += 1
                hashed = self._hashes[block] is not None
                self._link(block, before=hashed_before if hashed else self._next[self._end])
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
        following, free = self._next, list[int]()
        block = following[self._end]
        while block != self._end:
            free.append(block)
            assert len(free) <= self.num_blocks, "the free list has a cycle"
            block = following[block]
        before = np.asarray([self._end, *free])
        behind = np.asarray([*free, self._end])
        assert np.array_equal(np.asarray(self._prev)[behind], before), "the free list is broken"
        free.remove(self._mark)
        assert len(free) == self.num_free, "the free list lost count"
        counts = np.zeros(self.num_blocks, np.int32)
        counts[list(users)] = list(users.values())
        counts[NULL_BLOCK] = self._ref_counts[NULL_BLOCK]
        wrong = np.flatnonzero(counts != np.asarray(self._ref_counts))
        assert not len(wrong), f"block {wrong[0]} has the wrong reference count"
        assert sorted(free) == np.flatnonzero(counts == 0).tolist(), "another block is free"
        hashed = [b for b, held in enumerate(self._hashes) if held is not None]
        assert hashed == np.flatnonzero(np.asarray(self._is_hashed)).tolist()
        for b in hashed:
            assert b in self._by_hash[self._hashes[b] or b""], f"block {b} is not found by its hash"
        assert sum(map(len, self._by_hash.values())) == len(hashed)
        assert self.num_cached == np.count_nonzero(counts[hashed] == 0), "cached count is off"

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


class CachedPrefix(NamedTuple):
    """The cached blocks that a request can start from."""

    num_blocks: int
    """Leading blocks of the request that need not be computed."""
    blocks: tuple[list[int], ...]
    """Per group, the ids of the last of them: all, or those that later tokens still see."""
    state_place: int = -1
    """Where a copy of the states of recurrent layers lies; -1 where there are none."""
    hit: PrefixHit = PrefixHit()
    """The same for screens."""


def block_key(group: int, block_hash: bytes) -> bytes:
    """The name of a block's contents in the pool: tokens have other keys and values in every
    group."""
    return block_hash + bytes((group,)) if group else block_hash


def first_seen(position: int, window: Window, block_size: int) -> int:
    """The first block that the token at `position` sees."""
    return first_key(position, window) // block_size


def first_seen_of(positions: IntArray, window: Window, block_size: int) -> IntArray:
    """The same of many positions."""
    if isinstance(window, Chunk):
        return (positions - positions % window.size) // block_size
    return np.maximum(positions - (window - 1), 0) // block_size


def reuse_order(blocks: IntArray, window: Window) -> list[int]:
    """Blocks of one text that are given up, those first that a hit is least likely to need. What a
    hit inside a chunk needs begins where the chunk does, and what one under a sliding window needs
    ends where the window does."""
    ordered: list[int] = (blocks[::-1] if isinstance(window, Chunk) else blocks).tolist()
    return ordered


class PrefixSearch:
    """Finds the longest cached prefix of one request, and says what ended it.

    All groups of layers must have what the next token sees: groups without a window all blocks
    before it, groups with one those of its window (none where that is a chunk which it begins),
    recurrent layers a copy of their states. They shorten each other's answer until they agree.
    """

    def __init__(
        self,
        pool: BlockPool,
        windows: Sequence[Window | None],
        block_size: int,
        states: StateCache | None,
        hashes: Sequence[bytes],
    ) -> None:
        """hashes: of the request's full blocks in front of its last token."""
        self._pool, self._windows, self._block_size = pool, windows, block_size
        self._states, self._hashes = states, hashes
        self._end = len(hashes)
        """Blocks up to which all that was asked agrees."""
        self._limit, self._asked = HitLimit.LAST_TOKEN, len(hashes)
        self._window: Window | None = None
        self._ends: dict[str, int] = {}

    def find(self) -> CachedPrefix:
        found: dict[int, list[int]] = {}
        for group, window in enumerate(self._windows):
            if window is None:
                found[group] = self._leading(group)
                self._shorten("full", len(found[group]), HitLimit.KEYS)
        self._cut_to_windows()
        place = -1
        while self._states is not None:
            before = self._end
            end, place = self._states.find(self._hashes[:before])
            self._shorten("states", end, HitLimit.STATES)
            if end == before:
                break
            self._cut_to_windows()
        end, size = self._end, self._block_size
        for group, window in enumerate(self._windows):
            if window is None:
                found[group] = found[group][:end]
            else:
                tail = self._hashes[first_seen(end * size, window, size) : end]
                found[group] = [self._known(group, block_hash) for block_hash in tail]
        blocks = tuple(found[group] for group in range(len(self._windows)))
        return CachedPrefix(end, blocks, place, self._hit())

    def _hit(self) -> PrefixHit:
        size, is_plain = self._block_size, len(self._ends) == 1 and "full" in self._ends
        ends = () if is_plain else tuple((kind, end * size) for kind, end in self._ends.items())
        window = self._window
        return PrefixHit(
            self._end * size,
            self._limit,
            self._asked * size,
            0 if window is None else most_keys(window),
            ends,
            isinstance(window, Chunk),
        )

    def _shorten(self, kind: str, end: int, limit: HitLimit, window: Window | None = None) -> None:
        """Note up to which block layers of a kind have what they were asked for."""
        self._ends[kind] = end
        if end < self._end:
            self._limit, self._asked, self._window = limit, self._end, window
            self._end = end

    def _leading(self, group: int) -> list[int]:
        found: list[int] = []
        for block_hash in self._hashes[: self._end]:
            block = self._pool.lookup(block_key(group, block_hash))
            if block is None:
                break
            found.append(block)
        return found

    def _known(self, group: int, block_hash: bytes) -> int:
        block = self._pool.lookup(block_key(group, block_hash))
        assert block is not None, "it was found a moment ago"
        return block

    def _cut_to_windows(self) -> None:
        """Shorten to the most leading blocks after which every group with a window has what the
        next token sees."""
        before = -1
        while self._end != before:
            before = self._end
            for group, window in enumerate(self._windows):
                if window is not None:
                    end = self._cut_to_window(group, window)
                    self._shorten(window_name(window), end, HitLimit.WINDOW, window)

    def _first_asked(self, end: int, window: Window) -> int:
        """The first block that a hit up to `end` needs. At a chunk's edge that is none: where no
        group keeps all tokens, the block in front is asked for, as a text that was never computed
        is no hit."""
        first = first_seen(end * self._block_size, window, self._block_size)
        return first if None in self._windows else min(first, max(0, end - 1))

    def _cut_to_window(self, group: int, window: Window) -> int:
        at = end = self._end
        while at > self._first_asked(end, window):
            at -= 1
            if self._pool.lookup(block_key(group, self._hashes[at])) is None:
                end = at
        return end
