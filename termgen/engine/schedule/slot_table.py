"""Running requests as numpy columns, one row per slot, and the fence behind released slots.

A decode step works on whole columns, which keeps its host cost nearly independent of the batch
size. Owned by the scheduler, on the engine thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from termgen.vocabulary.events import DraftCounts
from termgen.vocabulary.request import IntArray, Request

NUM_STOP_COLUMNS = 8
"""Stop ids kept in the table; requests with more are checked one by one."""


class SlotTable:
    """Columns over slots. A row is valid from `occupy` to `vacate`.

    Token counts of a row, always `num_computed <= num_tokens + num_pending`:

        [0, num_tokens)                       known to the host, ids in `token_ids`
        [num_tokens, num_tokens+num_pending)  sampled by steps still in flight, ids on the device
        [0, num_computed)                     KV written by steps already planned

    A step with drafts counts as if all of them stayed: the last two are upper bounds until it has
    landed.
    """

    def __init__(self, max_num_seqs: int, max_model_len: int) -> None:
        self.requests: list[Request | None] = [None] * max_num_seqs
        self.facts: IntArray = np.zeros((6, max_num_seqs), np.int32)
        """The next six columns as rows of one array, in this order, to be gathered at once."""
        self.facts_of_ends: IntArray = self.facts[:4]
        self.num_tokens, self.num_pending = self.facts[:2]
        self.limit: IntArray = self.facts[2]
        """Total tokens at which the request ends by length."""
        self.stop_after: IntArray = self.facts[3]
        """Total tokens from which stop ids count: prompt + min_tokens."""
        self.num_computed: IntArray = self.facts[4]
        self.epoch: IntArray = self.facts[5]
        """Number of requests that have used the slot; results of an older epoch are dropped."""
        self.num_prompt: IntArray = np.zeros(max_num_seqs, np.int32)
        self.stop_ids = np.full((max_num_seqs, NUM_STOP_COLUMNS), -1, np.int32)
        self.more_stops: set[int] = set()
        """Slots whose request has more stop ids than `NUM_STOP_COLUMNS`."""
        self.last_step = np.full(max_num_seqs, -1, np.int64)
        """Newest step that computes this row; its blocks are fenced until that step has landed."""
        self.num_logprobs = np.full(max_num_seqs, -1, np.int32)
        self.has_penalties = np.zeros(max_num_seqs, np.bool_)
        self.is_random = np.zeros(max_num_seqs, np.bool_)
        self.has_filter = np.zeros(max_num_seqs, np.bool_)
        """Cuts the tail of the distribution."""
        self.has_minimum = np.zeros(max_num_seqs, np.bool_)
        """Has a minimum length."""
        self.has_grammar = np.zeros(max_num_seqs, np.bool_)
        self.num_constrained = 0
        """Rows that have a grammar."""
        self.may_draft = np.zeros(max_num_seqs, np.bool_)
        """Its tokens may be guessed. Without, only those that a grammar forces are drafts."""
        self.drafts: IntArray = np.zeros((2, max_num_seqs), np.int32)
        """The fields of each request's `DraftCounts`, counted when steps land."""
        self.has_edits = np.zeros(max_num_seqs, np.bool_)
        """Has a logit bias, allowed ids or bad words."""
        self.num_prompt_logprobs = np.full(max_num_seqs, -1, np.int32)
        """-1 if none are requested, or all have been delivered."""
        self.pooling = np.zeros(max_num_seqs, np.int8)
        """The `PoolingKind` of a row that wants a vector; 0 for one that generates."""
        self.num_pooling = 0
        """Rows that want one."""
        self.token_ids: npt.NDArray[np.int32] = np.zeros((max_num_seqs, max_model_len), np.int32)
        self.row_of_ids = np.arange(max_num_seqs, dtype=np.int64) * max_model_len
        """Offset of each slot's tokens in the flattened `token_ids`."""
        self.running: IntArray = np.zeros(0, np.int32)
        """Occupied slots in scheduling order."""

    def occupy(self, slot: int, request: Request, num_computed: int) -> None:
        assert self.requests[slot] is None
        params = request.params
        num_tokens = len(request.token_ids)
        self.requests[slot] = request
        request.slot, request.epoch = slot, int(self.epoch[slot])
        self.token_ids[slot, :num_tokens] = request.token_ids
        self.num_tokens[slot] = num_tokens
        self.num_pending[slot] = 0
        self.num_computed[slot] = num_computed
        self.limit[slot] = request.max_total_tokens
        self.stop_after[slot] = request.num_prompt_tokens + params.min_tokens
        self.num_prompt[slot] = request.num_prompt_tokens
        stops = sorted(request.stop_token_ids)
        self.stop_ids[slot] = -1
        if len(stops) > NUM_STOP_COLUMNS:
            self.more_stops.add(slot)
        else:
            self.stop_ids[slot, : len(stops)] = stops
        self.last_step[slot] = -1
        self.num_logprobs[slot] = -1 if params.logprobs is None else params.logprobs
        self.has_penalties[slot] = params.has_penalties
        self.is_random[slot] = not params.is_greedy
        self.has_filter[slot] = params.has_cuts
        self.has_minimum[slot] = params.min_tokens > 0
        self.has_grammar[slot] = request.grammar is not None
        self.num_constrained += request.grammar is not None
        self.may_draft[slot] = request.may_draft
        self.drafts[:, slot] = request.drafts
        self.has_edits[slot] = params.edits_logits
        owed = params.prompt_logprobs if request.owes_prompt_logprobs else None
        self.num_prompt_logprobs[slot] = -1 if owed is None else owed
        self.pooling[slot] = 0 if request.pooling is None else request.pooling.kind
        self.num_pooling += request.pooling is not None
        self.running = np.append(self.running, np.int32(slot))

    def vacate(self, slot: int) -> Request:
        """Empty a row, bring the request's own token list up to date and end the epoch."""
        request = self.requests[slot]
        assert request is not None
        request.token_ids = self.token_ids[slot, : self.num_tokens[slot]].copy()
        request.drafts = DraftCounts(*self.drafts[:, slot].tolist())
        request.slot = request.epoch = -1
        self.requests[slot] = None
        self.more_stops.discard(slot)
        self.num_constrained -= request.grammar is not None
        self.num_pooling -= request.pooling is not None
        self.has_grammar[slot] = False
        self.epoch[slot] += 1
        self.running = self.running[self.running != slot]
        return request

    def append_tokens(
        self, slots: IntArray, tokens: IntArray
    ) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.intp]]:
        """Add a landed token to each of these rows.

        Returns (rows ended by a stop id, indices of all rows that end, by length included).
        """
        # `take` and `put` need half the time of indexing.
        lengths, num_pending, limit, stop_after = self.facts_of_ends.take(slots, axis=1)
        self.token_ids.put(self.row_of_ids.take(slots) + lengths, tokens)
        lengths += 1
        num_pending -= 1
        self.num_tokens.put(slots, lengths)
        self.num_pending.put(slots, num_pending)
        return self.ended(slots, tokens, lengths, limit, stop_after)

    def ended(
        self,
        slots: IntArray,
        tokens: IntArray,
        lengths: IntArray,
        limit: IntArray,
        stop_after: IntArray,
    ) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.intp]]:
        """See `append_tokens`. tokens: the newest of each row."""
        is_stop = self.stop_ids.take(slots, axis=0) == tokens[:, None]
        stopped = np.logical_or.reduce(is_stop, axis=1)
        if self.more_stops:
            for i, slot in enumerate(slots.tolist()):
                if slot in self.more_stops:
                    stopped[i] = int(tokens[i]) in self.request_at(slot).stop_token_ids
        stopped &= lengths > stop_after
        return stopped, (stopped | (lengths >= limit)).nonzero()[0]

    def num_settled(self, slots: IntArray) -> IntArray:
        """Tokens of these rows whose KV, once computed, is not written again. A step may compute
        the newest token of a row with a grammar once more, for lack of its mask."""
        settled: IntArray = self.num_tokens.take(slots) - self.has_grammar.take(slots)
        return settled

    def take_back(self, slots: IntArray, num_drafts: IntArray) -> None:
        """Uncount rows that sampled nothing in a landed step although planned to, and the places
        that they had for drafts: their newest token is computed again."""
        self.num_pending[slots] -= 1 + num_drafts
        self.num_computed[slots] -= 1 + num_drafts

    def request_at(self, slot: int) -> Request:
        request = self.requests[slot]
        assert request is not None, f"slot {slot} is empty"
        return request


Lease = tuple[int, int, list[int]]
"""(last step that computes it, slot, its blocks tail first)."""


class Fence:
    """Released slots that are not reusable yet, in order of release."""

    def __init__(self) -> None:
        self._held: deque[Lease] = deque()
        self.landed_step = -1
        """Newest step known to have ended; steps end in order."""
        self.num_blocks = 0
        """Block references held back."""

    def hold(self, last_step: int, slot: int, blocks: list[int]) -> bool:
        """Hold a release back if needed. False: no step is in flight, so reuse it now."""
        if last_step <= self.landed_step:
            return False
        self._held.append((last_step, slot, blocks))
        self.num_blocks += len(blocks)
        return True

    def land(self, step_id: int) -> list[Lease]:
        """Record that this step and all before it have ended; returns the reusable leases."""
        self.landed_step = max(self.landed_step, step_id)
        if not self._held:
            return []
        freed = [lease for lease in self._held if lease[0] <= self.landed_step]
        self._held = deque(lease for lease in self._held if lease[0] > self.landed_step)
        self.num_blocks -= sum(len(blocks) for _, _, blocks in freed)
        return freed

    def __iter__(self) -> Iterator[Lease]:
        return iter(self._held)
