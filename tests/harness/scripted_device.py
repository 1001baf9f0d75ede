"""A test device in pure numpy whose only input is the plans.

It stores each token and its position in a simulated paged KV cache and, to sample, reads the whole
sequence back through the block table: wrong sharing, early reuse or a missed write changes the
tokens.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence

import numpy as np

from termgen.engine.schedule.block_pool import NULL_BLOCK
from termgen.vocabulary.cache_groups import Window, first_key
from termgen.vocabulary.device.pooling import PoolingSpan
from termgen.vocabulary.request import IntArray, Request
from termgen.vocabulary.sampling_params import SamplingParams
from termgen.vocabulary.step import CORRUPT_TOKEN, AddedRow, SamplingNeeds, StepPlan, StepResult

VOCAB = 40
NAN = -99
"""Stands for NaN in the KV cache: logits computed from it are NaN."""


def next_token(token_ids: np.ndarray, vocab: int = VOCAB) -> int:
    """The scripted model: a hash of everything before."""
    return zlib.crc32(np.ascontiguousarray(token_ids, np.int32).tobytes()) % vocab


def is_stop(request: Request | AddedRow, length: int, token: int) -> bool:
    """True if `token`, the one that makes the sequence `length` long, ends it."""
    minimum = request.num_prompt_tokens + request.params.min_tokens
    return token in request.stop_token_ids and length > minimum


def is_token(token: int | None) -> bool:
    return token is not None and token != CORRUPT_TOKEN


def check_needs(needs: SamplingNeeds, params: SamplingParams) -> None:
    """A step launches only what it is said to need: its rows must not need more."""
    assert needs.penalties or not params.has_penalties
    assert needs.min_tokens or not params.min_tokens
    assert needs.edits or not params.edits_logits
    most = -1 if needs.max_logprobs is None else needs.max_logprobs
    assert most >= (-1 if params.logprobs is None else params.logprobs)


class DeviceFailure(Exception):
    """A failure that the test asked for."""


class ScriptedDevice:
    """Runs plans in order on its own rows; `stops` says whether it notices stop tokens itself."""

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        max_model_len: int,
        stops: bool = True,
        vocab: int = VOCAB,
        windows: tuple[Window | None, ...] = (None,),
        state_places: int = 0,
        num_drafts: int = 0,
        draft_seed: int = 0,
    ) -> None:
        """windows: per group, the part of a context that the device looks at; None: at all.
        state_places: copies of recurrent states that it keeps; 0: it is not recurrent. num_drafts:
        tokens that it guesses for each row after a step, often rightly."""
        self.state_places = state_places
        self.num_drafts = num_drafts
        self.most_forced = 0
        """Drafts of a row that its grammar forces, at most."""
        self._guesses = np.random.default_rng(draft_seed)
        self.states: dict[int, list[int]] = {}
        """Place -> the tokens that the state there has taken up, and those that the latest step
        read behind them; a row's place is its slot."""
        self.num_taken_up: dict[int, int] = {}
        """Place -> how many tokens its state has taken up: none that was a draft in the latest
        step."""
        self.block_size = block_size
        self.vocab = vocab
        self.stops = stops
        self.kv_tokens = np.full(num_blocks * block_size, -1, np.int32)
        self.kv_positions = np.full(num_blocks * block_size, -1, np.int32)
        self.windows = windows
        shape = (len(windows), max_num_seqs)
        self.block_tables = np.zeros((*shape, -(-max_model_len // block_size)), np.int32)
        self.num_blocks = np.zeros(shape, np.int32)
        self.token_ids = np.zeros((max_num_seqs, max_model_len), np.int32)
        self.num_tokens = np.zeros(max_num_seqs, np.int32)
        self.num_computed = np.zeros(max_num_seqs, np.int32)
        self.rows: list[AddedRow | None] = [None] * max_num_seqs
        self.finished = np.zeros(max_num_seqs, np.bool_)
        self.num_computed_tokens = 0
        self.next_step = 0
        self.declines = 0.0
        """The share of steps that compute none of the drafts that there are places for."""
        self.turns_nan: Callable[[], bool] | None = None
        """Called for each row of a step: whether the KV that it writes is NaN."""

    def execute(self, plan: StepPlan, *, fails: bool = False) -> StepResult:
        """Run one step. On a requested failure it leaves garbage in the KV it should have
        written."""
        assert plan.step_id == self.next_step, "a step was skipped or repeated"
        planned, plan = plan, self._cut(plan)
        num_drafted = None if plan is planned else plan.num_draft_tokens
        self.next_step += 1
        self._update_rows(plan)
        pairs = list(zip(plan.slots.tolist(), plan.num_tokens.tolist(), strict=True))
        most_drafts = max(self.num_drafts, self.most_forced)
        assert plan.num_drafts == plan.num_draft_tokens.sum() <= most_drafts * plan.num_rows
        for i, (slot, count) in enumerate(pairs):  # all writes precede all reads
            row = self.rows[slot]
            assert row is not None and row.epoch == plan.epochs[i], "a plan names a stale row"
            check_needs(plan.sampling, row.params)
            if not self.finished[slot]:
                # A late mask makes the host's count an upper bound, until its step has landed.
                ahead = int(plan.num_computed[i] - self.num_computed[slot])
                assert 0 <= ahead and (most_drafts or ahead <= row.has_grammar)
                self._write(slot, count, int(plan.num_draft_tokens[i]), rubbish=fails)
                if self.turns_nan is not None and self.turns_nan():
                    end = int(self.num_computed[slot]) + count
                    for group in range(len(self.windows)):
                        self.kv_tokens[self.slot_mapping(slot, end - 1, end, group)] = NAN
            self.num_computed[slot] += count
            self.num_computed_tokens += count
        if fails:
            raise DeviceFailure
        for slot, count in pairs:
            if not self.finished[slot]:
                self._attend(slot, count)
            if self.state_places:
                self._take_up(slot, count, int(plan.num_draft_tokens[plan.slots == slot][0]))
        pooled = [self._vector(plan, span) for span in plan.pooled if span.length]
        assert plan.num_pooled_rows == sum(self._row(slot).is_pooled for slot, _ in pairs)
        drafts = plan.num_draft_tokens.tolist()
        sampled = [self._sample(slot, num) for (slot, _), num in zip(pairs, drafts, strict=True)]
        for slot, _ in pairs if self.num_drafts else ():
            self._guess(slot)
        kept = [[token for token in tokens if is_token(token)] for tokens in sampled]
        is_corrupt = [CORRUPT_TOKEN in tokens for tokens in sampled]
        ended = [span.row for span in plan.pooled if span.length]
        for i, vector in zip(ended, pooled, strict=True):
            is_corrupt[i] = bool(np.isnan(vector).any())
        return StepResult(
            step_id=plan.step_id,
            num_sampled=np.asarray([len(tokens) for tokens in kept], np.int32),
            token_ids=np.asarray([token for tokens in kept for token in tokens], np.int32),
            corrupt=np.flatnonzero(is_corrupt).astype(np.int32),
            logprobs=None,
            started_ns=0,
            ended_ns=0,
            num_drafted=num_drafted,
            pooled=np.stack(pooled) if pooled else None,
        )

    def _row(self, slot: int) -> AddedRow:
        row = self.rows[slot]
        assert row is not None
        return row

    def _vector(self, plan: StepPlan, span: PoolingSpan) -> np.ndarray:
        """The scripted model's vector of a prompt, from what is in the KV cache."""
        slot = int(plan.slots[span.row])
        end = int(self.num_computed[slot])
        assert end == span.start + span.num_tokens == span.length == self.num_tokens[slot]
        read = self._read(slot, end)
        return np.full(2, np.nan if read is None else next_token(read), np.float32)

    def _read(self, slot: int, length: int) -> np.ndarray | None:
        """The row's tokens as its last one sees them; None where NaN is among them."""
        read = self.token_ids[slot, :length].copy()
        if self.state_places:
            if NAN in self.states[slot][:length]:
                return None
            read[0] += self.states[slot][:length] != read.tolist()
        for positions, where in self._seen_by(slot, length - 1, length):
            tokens = self.kv_tokens[where]
            if (tokens == NAN).any():
                return None
            # Wrong tokens and positions enter the hash, so they show as a wrong token.
            read[positions] += tokens - self.token_ids[slot, positions]
            read[positions] += self.kv_positions[where] - positions
        return read

    def _cut(self, plan: StepPlan) -> StepPlan:
        """The plan with the drafts that are there."""
        if plan.num_drafts and self._guesses.random() < self.declines:
            return plan.with_drafts(np.zeros_like(plan.num_draft_tokens))
        return plan

    def post_masks(
        self,
        slots: IntArray,
        positions: IntArray,
        bits: IntArray,
        forced: Sequence[Sequence[int]] | None = None,
    ) -> None:
        raise AssertionError("no request of these tests has a grammar")

    def withhold_masks(self, slots: IntArray) -> None:
        raise AssertionError("no request of these tests has a grammar")

    def _update_rows(self, plan: StepPlan) -> None:
        for slot in plan.released_slots:
            self.rows[slot] = None
        if plan.copied_slots is not None:
            assert plan.copy_places is not None and self.state_places
            for slot, place in zip(
                plan.copied_slots.tolist(), plan.copy_places.tolist(), strict=True
            ):
                assert len(self.rows) < place <= len(self.rows) + self.state_places
                self.states[place] = list(self.states[slot])
                self.num_taken_up[place] = self.num_taken_up[slot]
        for row in plan.added:
            slot, count = row.slot, len(row.token_ids)
            assert self.rows[slot] is None, "a slot was given away before it was released"
            assert 0 <= row.num_computed_tokens < count < row.max_total_tokens
            self.rows[slot] = row
            self.states[slot], self.num_taken_up[slot] = [], 0
            if row.state_place >= 0:
                self._start_from(row.state_place, slot, row.num_computed_tokens)
            self.token_ids[slot, :count] = row.token_ids
            self.num_tokens[slot] = count
            self.num_computed[slot] = row.num_computed_tokens
            self.num_blocks[:, slot] = 0
            self.block_tables[:, slot] = NULL_BLOCK
            self.finished[slot] = False
        groups = plan.block_groups
        if groups is None:
            groups = np.zeros_like(plan.block_slots)
        blocks = zip(groups, plan.block_slots, plan.block_positions, plan.block_ids, strict=True)
        for group, slot, position, block in blocks:
            held = self.num_blocks[group, slot]
            skips = self.windows[group] is not None and not held  # what no token sees any more
            assert position == held or skips, "block tables only grow, one by one"
            assert block != NULL_BLOCK
            self.block_tables[group, slot, position] = block
            self.num_blocks[group, slot] = position + 1

    def slot_mapping(self, slot: int, start: int, end: int, group: int = 0) -> np.ndarray:
        """Where positions [start, end) of a row live; only blocks the row was given."""
        positions = np.arange(start, end)
        assert end <= self.num_blocks[group, slot] * self.block_size, "computes past its blocks"
        blocks: np.ndarray = self.block_tables[group, slot, positions // self.block_size]
        return blocks * self.block_size + positions % self.block_size

    def _seen_by(self, slot: int, position: int, end: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """Per group, the positions before `end` that the token at `position` sees, and where they
        live."""
        seen = []
        for group, window in enumerate(self.windows):
            first = first_key(position, window)
            seen.append((np.arange(first, end), self.slot_mapping(slot, first, end, group)))
        return seen

    def _write(self, slot: int, count: int, num_drafts: int, *, rubbish: bool) -> None:
        start = int(self.num_computed[slot])
        end = start + count
        assert end <= self.num_tokens[slot] + num_drafts, "computes a token nobody knows"
        for group in range(len(self.windows)):
            where = self.slot_mapping(slot, start, end, group)
            self.kv_tokens[where] = -7 if rubbish else self.token_ids[slot, start:end]
            self.kv_positions[where] = -7 if rubbish else np.arange(start, end)

    def _start_from(self, place: int, slot: int, position: int) -> None:
        """A state that has taken up more cannot go on from there, nor one that has read less."""
        known, taken_up = self.states[place], self.num_taken_up[place]
        is_right = taken_up <= position <= len(known)
        self.states[slot] = known[:position] if is_right else [-6] * position
        self.num_taken_up[slot] = taken_up

    def _take_up(self, slot: int, count: int, num_drafts: int) -> None:
        """What a recurrent layer does with the tokens that a row has just written."""
        end = int(self.num_computed[slot])
        assert self.num_taken_up[slot] <= end - count or self.finished[slot]
        self.num_taken_up[slot] = end - num_drafts
        tokens = [-5] * count  # of a row that has ended: anything
        if not self.finished[slot]:
            tokens = self.kv_tokens[self.slot_mapping(slot, end - count, end)].tolist()
        self.states[slot][end - count :] = tokens

    def _attend(self, slot: int, count: int) -> None:
        """Make the keys and values that a row has just written wrong, or NaN, if those are that its
        first new token sees: as in a model of several layers."""
        end = int(self.num_computed[slot])
        start = end - count
        for positions, where in self._seen_by(slot, start, start):
            tokens = self.kv_tokens[where]
            expected = self.token_ids[slot, positions] + positions
            if (tokens == NAN).any():
                spoilt = NAN
            elif (tokens + self.kv_positions[where] != expected).any():
                spoilt = -8
            else:
                continue
            for group in range(len(self.windows)):
                self.kv_tokens[self.slot_mapping(slot, start, end, group)] = spoilt

    def _sample(self, slot: int, num_drafts: int) -> list[int | None]:
        """The drafts that are what the model draws, and one token more; nothing behind an end."""
        row, length = self.rows[slot], int(self.num_tokens[slot])
        assert row is not None
        is_short = self.num_computed[slot] < length + row.is_pooled + num_drafts
        if self.finished[slot] or is_short:
            assert not num_drafts or self.finished[slot], "drafts behind a part of a prompt"
            return [None]
        tokens: list[int | None] = []
        for place in range(length, length + num_drafts + 1):
            draft = int(self.token_ids[slot, place]) if place < length + num_drafts else -1
            tokens.append(token := self._draw(slot))
            if token == CORRUPT_TOKEN or token != draft:
                break
            if is_stop(row, place + 1, token) or place + 1 >= row.max_total_tokens:
                break
        self.num_computed[slot] -= 1 + num_drafts - len(tokens)
        return tokens

    def _guess(self, slot: int) -> None:
        """Write drafts behind a row's tokens: from some place on wrong ones."""
        length = int(self.num_tokens[slot])
        ids = self.token_ids[slot]
        num_right = int(self._guesses.integers(0, self.num_drafts + 1))
        for place in range(length, min(length + self.num_drafts, len(ids))):
            is_right = place < length + num_right
            ids[place] = next_token(ids[:place], self.vocab) if is_right else place % self.vocab

    def _draw(self, slot: int) -> int:
        """Draw the next token of a row and take it."""
        row, length = self.rows[slot], int(self.num_tokens[slot])
        assert row is not None
        read = self._read(slot, length)
        if read is None:
            self.finished[slot] = True
            return CORRUPT_TOKEN
        token = next_token(read, self.vocab)
        if length < row.max_total_tokens:  # past its limit only on a device that does not stop
            self.token_ids[slot, length] = token
        self.num_tokens[slot] = length + 1
        if self.stops:
            self.finished[slot] = is_stop(row, length + 1, token) or (
                length + 1 >= row.max_total_tokens
            )
        return token

    def recover(self, next_step: int) -> None:
        """Recover from a failed step: no row survives, and steps planned but not run never will
        be."""
        self.rows = [None] * len(self.rows)
        self.next_step = next_step
