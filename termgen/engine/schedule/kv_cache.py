"""Block tables, and the prefix cache.

`KVCacheManager` gives blocks to slots and finds cached prefixes. Called by the scheduler only, on
the engine thread; knows nothing of tensors. The design (chained block hashes, tail-first freeing,
groups of layers over one pool) follows vLLM's V1 KV cache manager.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from termgen.engine.schedule.block_pool import (
    NULL_BLOCK,
    BlockPool,
    CachedPrefix,
    PrefixSearch,
    block_key,
    first_seen,
    first_seen_of,
    reuse_order,
)
from termgen.engine.schedule.state_cache import StateCache
from termgen.vocabulary.cache_groups import Window, longest_context
from termgen.vocabulary.events import HitLimit, PrefixHit
from termgen.vocabulary.request import IntArray, Request, hash_blocks


class KVCacheManager:
    """Block tables by group and slot over one `BlockPool`.

    A group is the layers that share a block table. Each block of a request takes a block of the
    pool in every group. A group with a window gives up the blocks that no later token sees, and
    takes those of a prompt chunk by chunk; other groups take a prompt's blocks at once.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        max_model_len: int,
        enable_prefix_caching: bool,
        windows: tuple[Window | None, ...] = (None,),
        debug: bool = False,
        states: StateCache | None = None,
    ) -> None:
        """windows: per group, the part of a context that its layers keep; None: all. debug: keep a
        list of the blocks that are given up, for the device to spoil. states: for models with
        recurrent layers."""
        self.states = states
        self.pool = BlockPool(num_blocks)
        self.block_groups = np.zeros(num_blocks if len(windows) > 1 else 0, np.uint8)
        """[num_blocks] the group that used each block last; empty if there is one group."""
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.windows = windows
        self.capacity_tokens = longest_context(num_blocks - 1, block_size, windows)
        """Tokens of the longest request that the cache can hold."""
        self._windowed = [(g, window) for g, window in enumerate(windows) if window is not None]
        shape = (len(windows), max_num_seqs)
        self.block_tables = np.zeros((*shape, -(-max_model_len // block_size)), np.int32)
        self.num_blocks = np.zeros(shape, np.int32)
        """[groups, max_num_seqs] blocks of each slot's tokens, given-up ones included."""
        self.num_dropped = np.zeros(shape, np.int32)
        """[groups, max_num_seqs] leading blocks that the slot has given up, or never held."""
        self.num_registered = np.zeros(max_num_seqs, np.int32)
        """[max_num_seqs] leading blocks of each slot that are findable by hash."""
        self._num_found = np.zeros(max_num_seqs, np.int32)
        """[max_num_seqs] leading blocks that each slot found in the cache."""
        self.given_up: list[int] | None = [] if debug else None
        """Blocks that slots have given up, and that no prefix can be found in, since the caller
        last cleared the list; None if it is not kept."""
        self._misfit: tuple[Request, int, int] | None = None
        """(last request that did not fit, its cached blocks, the pool's `num_freed` then)."""

    @property
    def has_windows(self) -> bool:
        """True if blocks are given up while a request runs."""
        return bool(self._windowed)

    @property
    def hash_block_size(self) -> int | None:
        """Tokens per hashed block; None without a prefix cache."""
        return self.block_size if self.enable_prefix_caching else None

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks of so many tokens in one group that keeps all."""
        return -(-num_tokens // self.block_size)

    def find_cached(self, request: Request) -> CachedPrefix:
        """The request's leading blocks that are cached.

        At most (tokens - 1) // block_size: the last token is always computed, as its logits are
        needed. Empty for a request that needs what its whole prompt computes.
        """
        if not self.enable_prefix_caching or request.owes_prompt_logprobs:
            limit = HitLimit.LOGPROBS if self.enable_prefix_caching else HitLimit.OFF
            return self._no_prefix(limit)
        if request.pooling is not None and request.pooling.needs_all:
            return self._no_prefix(HitLimit.POOLING)
        hash_blocks(request.token_ids, self.block_size, request.block_hashes, request.cache_salt)
        num_blocks = (len(request.token_ids) - 1) // self.block_size
        hashes = request.block_hashes[:num_blocks]
        search = PrefixSearch(self.pool, self.windows, self.block_size, self.states, hashes)
        return search.find()

    def _no_prefix(self, limit: HitLimit) -> CachedPrefix:
        return CachedPrefix(0, tuple([] for _ in self.windows), hit=PrefixHit(limit=limit))

    def num_needed(self, num_tokens: int, cached: CachedPrefix, num_first: int) -> int:
        """Free blocks that a request with these known tokens and cached blocks takes, to compute
        its first `num_first` tokens after them.

        Unused cached blocks count as needed, as taking them shortens the free list.
        """
        return sum(
            self._end(window, num_tokens, cached, num_first)
            - cached.num_blocks
            + sum(self.pool.is_free(b) for b in blocks)
            for window, blocks in zip(self.windows, cached.blocks, strict=True)
        )

    def _end(
        self, window: Window | None, num_tokens: int, cached: CachedPrefix, num_first: int
    ) -> int:
        """Number of blocks up to which a group is given blocks at admission."""
        if window is not None:
            num_tokens = min(num_tokens, cached.num_blocks * self.block_size + num_first)
        return self.blocks_for(num_tokens)

    def try_fit(
        self, request: Request, num_first: int, num_reserved: int = 0
    ) -> tuple[CachedPrefix, int] | None:
        """The request's cached blocks, if it fits now, and how many tokens it may compute first, at
        most `num_first`; else None.

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
        room = self.pool.num_free - num_reserved
        num_tokens = len(request.token_ids)
        least = self.block_size if self._windowed else num_first
        while not (fits := self.num_needed(num_tokens, cached, num_first) <= room):
            if num_first <= least:
                break
            num_first = max(least, num_first // 2)
        if not num_reserved:  # what others will take, they may yet leave
            self._misfit = None if fits else (request, cached.num_blocks, freed)
        return (cached, num_first) if fits else None

    def admit(
        self, slot: int, num_tokens: int, cached: CachedPrefix, num_first: int
    ) -> list[tuple[int, list[int]]]:
        """Give an empty slot its cached blocks, and new ones as `num_needed` counts them. Returns,
        per group, the position of its first block and the ids from there on."""
        assert not self.num_blocks[:, slot].any()
        for blocks in cached.blocks:  # before taking new blocks, which could evict a hit
            for block in blocks:
                self.pool.touch(block)
        given = []
        for group, (window, blocks) in enumerate(zip(self.windows, cached.blocks, strict=True)):
            first = cached.num_blocks - len(blocks)
            end = self._end(window, num_tokens, cached, num_first)
            new = [self.pool.pop_free() for _ in range(end - cached.num_blocks)]
            ids = [*blocks, *new]
            if len(self.block_groups):
                self.block_groups[new] = group
            self.block_tables[group, slot, first:end] = ids
            self.num_blocks[group, slot] = end
            self.num_dropped[group, slot] = first
            given.append((first, ids))
        self.num_registered[slot] = self._num_found[slot] = cached.num_blocks
        return given

    def missing(self, slots: IntArray, num_tokens: IntArray) -> IntArray:
        """[groups, rows] blocks that each slot lacks for its first `num_tokens` tokens; negative
        where it has more."""
        missing: IntArray = -(-num_tokens // self.block_size) - self.num_blocks[:, slots]
        return missing

    def room(self, slot: int, num_free: int) -> int:
        """Tokens for which a slot can have blocks, if its groups with a window get `num_free`
        blocks in equal parts and the others none."""
        held = self.num_blocks[:, slot].copy()
        for group, _ in self._windowed:
            held[group] += num_free // len(self._windowed)
        return int(held.min()) * self.block_size

    def append(self, slot: int, group: int = 0, count: int = 1) -> tuple[int, list[int]]:
        """Give a slot more blocks in a group. Returns the position of the first, and their ids."""
        first = int(self.num_blocks[group, slot])
        blocks = [self.pool.pop_free() for _ in range(count)]
        if len(self.block_groups):
            self.block_groups[blocks] = group
        self.block_tables[group, slot, first : first + count] = blocks
        self.num_blocks[group, slot] = first + count
        return first, blocks

    def append_one_each(self, groups: IntArray, slots: IntArray) -> tuple[IntArray, list[int]]:
        """Give one block more to each of these slots in these groups, all pairs different. Returns
        the blocks' positions and ids."""
        positions: IntArray = self.num_blocks[groups, slots]
        blocks = [self.pool.pop_free() for _ in range(len(slots))]
        if len(self.block_groups):
            self.block_groups[blocks] = groups
        self.block_tables[groups, slots, positions] = blocks
        self.num_blocks[groups, slots] = positions + 1
        return positions, blocks

    def drop_unseen(self, slots: IntArray, positions: IntArray) -> None:
        """Give up the blocks that these slots' tokens from `positions` on do not see. Steps in
        flight may read them still: what is written to them later is written by a later step.

        They stay findable until they are used again, before other cached blocks: hits need the
        blocks in front of them less often. Blocks that were found in the cache count as others.
        """
        for group, window in self._windowed:
            unseen = first_seen_of(positions, window, self.block_size)
            if self.enable_prefix_caching:
                unseen = np.minimum(unseen, self.num_registered[slots])
            for i in np.flatnonzero(unseen > self.num_dropped[group, slots]).tolist():
                slot, end = int(slots[i]), int(unseen[i])
                first = int(self.num_dropped[group, slot])
                row = self.block_tables[group, slot]
                found = min(max(first, int(self._num_found[slot])), end)
                self.pool.release(reuse_order(row[first:found], window))
                self.pool.release(reuse_order(row[found:end], window), reuse_soon=True)
                if self.given_up is not None and not self.enable_prefix_caching:
                    self.given_up += row[first:end].tolist()
                row[first:end] = NULL_BLOCK
                self.num_dropped[group, slot] = end

    def has_unseen(self, slot: int, position: int) -> bool:
        """True if a slot holds blocks that its tokens from `position` on do not see."""
        return any(
            first_seen(position, window, self.block_size) > self.num_dropped[group, slot]
            for group, window in self._windowed
        )

    def register(self, slot: int, num_tokens: int, request: Request, tokens: IntArray) -> None:
        """Make the slot's full blocks within its first `num_tokens` tokens findable.

        The caller guarantees that these tokens are known to the host and that a step already
        planned writes their KV; steps run in order, and a step writes before it reads.
        """
        hash_blocks(tokens[:num_tokens], self.block_size, request.block_hashes, request.cache_salt)
        full = num_tokens // self.block_size
        for i in range(int(self.num_registered[slot]), full):
            for group in range(len(self.windows)):
                block = int(self.block_tables[group, slot, i])
                self.pool.register(block, block_key(group, request.block_hashes[i]))
        self.num_registered[slot] = full
        if self.states is not None:
            self.states.publish(slot, full, request.block_hashes)

    def forget_idle(self) -> bool:
        """Drop the cached prefixes that no request uses; returns True if none is left."""
        if self.states is not None:
            self.states.clear()
        return self.pool.forget_idle()

    def forget(self, blocks: Iterable[int]) -> None:
        """Remove the hashes of these blocks, whose slot holds NaN. Where blocks are given up, all
        hashes go: those that the slot has given up are not known any more."""
        if self.states is not None:
            self.states.clear()
        if self._windowed:
            self.pool.forget(range(1, self.pool.num_blocks))
        else:
            self.pool.forget(blocks)

    def held(self, slot: int) -> list[int]:
        """The blocks of a slot, group by group, each from its newest to its oldest."""
        table, first, end = self.block_tables, self.num_dropped[:, slot], self.num_blocks[:, slot]
        return [
            block
            for group in range(len(self.windows))
            for block in table[group, slot, first[group] : end[group]][::-1].tolist()
        ]

    def copy_held(self, slot: int) -> IntArray:
        """The blocks of a slot, in any order."""
        spans = zip(self.num_dropped[:, slot], self.num_blocks[:, slot], strict=True)
        tables = self.block_tables[:, slot]
        parts = [tables[group, first:end] for group, (first, end) in enumerate(spans)]
        return parts[0].copy() if len(parts) == 1 else np.concatenate(parts)

    def num_held(self, slots: IntArray) -> IntArray:
        """[rows] blocks of these slots."""
        held: IntArray = (self.num_blocks[:, slots] - self.num_dropped[:, slots]).sum(axis=0)
        return held

    def take_all(self, slot: int) -> list[int]:
        """Empty a slot's block tables; the caller owns the returned references, tail first."""
        blocks = self.held(slot)
        for group, end in enumerate(self.num_blocks[:, slot].tolist()):
            self.block_tables[group, slot, :end] = NULL_BLOCK
        self.num_blocks[:, slot] = self.num_dropped[:, slot] = 0
        self.num_registered[slot] = self._num_found[slot] = 0
        if self.states is not None:
            self.states.vacate(slot)
        return blocks
