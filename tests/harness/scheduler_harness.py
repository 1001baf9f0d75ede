"""Shared by the scheduler tests: requests, a reference to compare with, and a core loop.

Their device is in scripted_device.py.
"""

from __future__ import annotations

import copy
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
from scripted_device import VOCAB, DeviceFailure, ScriptedDevice, is_stop, next_token

from termgen.engine.schedule.block_pool import BlockPool
from termgen.engine.schedule.effects import AppliedStep
from termgen.engine.schedule.invariants import check_scheduler
from termgen.engine.schedule.kv_cache import KVCacheManager
from termgen.engine.schedule.scheduler import Scheduler, SchedulerConfig
from termgen.engine.schedule.state_cache import StateCache
from termgen.errors import StepError
from termgen.vocabulary.cache_groups import Chunk, Window
from termgen.vocabulary.request import FinishReason, Request, TurnEnds, hash_blocks
from termgen.vocabulary.sampling_params import SamplingParams
from termgen.vocabulary.step import StepPlan, StepResult

DEPTHS = (1, 2, 3, 4)


def make_request(
    request_id: str,
    prompt: Sequence[int],
    *,
    max_tokens: int = 16,
    stop: Iterable[int] = (),
    eos: Iterable[int] = (),
    min_tokens: int = 0,
    priority: int = 0,
    arrival_ns: int = 0,
    salt: str | None = None,
    turn_ends: TurnEnds | None = None,
    **params: object,
) -> Request:
    """`stop` are the request's own stop ids; `eos` are the model's."""
    sampling = SamplingParams(
        max_tokens=max_tokens,
        stop_token_ids=tuple(stop),
        min_tokens=min_tokens,
        **params,  # type: ignore[arg-type]
    )
    return Request(
        request_id=request_id,
        token_ids=np.asarray(prompt, np.int32),
        num_prompt_tokens=len(prompt),
        params=sampling,
        seed=0,
        max_total_tokens=len(prompt) + max_tokens,
        stop_token_ids=frozenset(stop) | frozenset(eos),
        priority=priority,
        arrival_ns=arrival_ns,
        cache_salt=salt,
        turn_ends=turn_ends or TurnEnds(),
    )


def make_scheduler(
    *,
    num_blocks: int = 1000,
    block_size: int = 4,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 256,
    max_model_len: int = 2048,
    threshold: int = 0,
    policy: str = "fcfs",
    caching: bool = True,
    adaptive: bool = False,
    windows: tuple[Window | None, ...] = (None,),
    state_places: int = 0,
    num_drafts: int = 0,
) -> Scheduler:
    kv = KVCacheManager(
        num_blocks=num_blocks,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        enable_prefix_caching=caching,
        windows=windows,
        states=make_states(block_size, max_num_seqs, state_places),
    )
    config = SchedulerConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
        long_prefill_token_threshold=threshold,
        adaptive_prefill=adaptive,
        policy=policy,
        num_speculative_tokens=num_drafts,
    )
    return Scheduler(config, kv)


def make_states(block_size: int, max_num_seqs: int, state_places: int) -> StateCache | None:
    """For a device that is not recurrent: None."""
    if not state_places:
        return None
    return StateCache(
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        first_place=max_num_seqs + 1,
        num_places=state_places,
    )


def draw_state_places(rng: np.random.Generator) -> int:
    """For a random test: mostly 0, for a device that is not recurrent."""
    return int(rng.choice([0, 0, 0, 1, 3, 12]))


def draw_windows(rng: np.random.Generator) -> tuple[Window | None, ...]:
    """Groups of layers for a random test: half of the time one that keeps all tokens."""
    if rng.random() < 0.5:
        return (None,)
    short, long = sorted(rng.integers(2, 40, 2).tolist())
    kinds: list[tuple[int | None, ...]] = [
        (None, short),
        (long,),
        (None, short, short, short),
        (None, None, long, short),
        (short, long),
    ]
    drawn = kinds[int(rng.integers(len(kinds)))]
    chunked = {window for window in (short, long) if rng.random() < 0.4}
    return tuple(Chunk(window) if window in chunked else window for window in drawn)


def reference_tokens(request: Request, vocab: int = VOCAB) -> list[int]:
    """Output of one request alone, with no scheduler, cache or batch."""
    tokens: list[int] = request.token_ids[: request.num_prompt_tokens].tolist()
    while len(tokens) < request.max_total_tokens:
        tokens.append(next_token(np.asarray(tokens), vocab))
        if is_stop(request, len(tokens), tokens[-1]):
            break
    return tokens[request.num_prompt_tokens :]


class Driver:
    """A core loop for tests: plans up to `depth` steps ahead of the oldest result.

    With `check`, integrity is verified after every schedule and apply, and plans are compared
    with the scheduler's own tables and with the steps still in flight.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        *,
        depth: int = 1,
        stops: bool = True,
        step_ns: Callable[[StepPlan], int] = lambda plan: 0,
        state_places: int = 0,
    ) -> None:
        """step_ns: the device time that a step's result tells."""
        self.scheduler = scheduler
        self._step_ns = step_ns
        self.depth = depth
        config, kv = scheduler.config, scheduler.kv
        self.device = ScriptedDevice(
            num_blocks=kv.pool.num_blocks,
            block_size=kv.block_size,
            max_num_seqs=config.max_num_seqs,
            max_model_len=config.max_model_len,
            stops=stops,
            windows=kv.windows,
            state_places=state_places,
            num_drafts=config.num_speculative_tokens,
        )
        self.in_flight: deque[tuple[StepPlan, StepResult | None, set[int]]] = deque()
        self.plans: list[StepPlan] = []
        self.outputs: dict[str, list[int]] = {}
        self.reasons: dict[str, FinishReason] = {}
        self.stop_token_ids: dict[str, int | None] = {}
        self.records: dict[str, Request] = {}
        self._rows: dict[tuple[int, int], str] = {}
        self._published: dict[bytes, tuple[int, np.ndarray]] = {}
        self._num_hashes: dict[str, int] = {}

    def add(self, *requests: Request) -> None:
        for request in requests:
            self.scheduler.add_request(request)
            self.records[request.request_id] = request
            self.outputs[request.request_id] = []

    def launch(self, *, fails: bool = False) -> StepPlan | None:
        """Plan one step and hand it to the device."""
        self.scheduler.yield_unread()
        plan = self.scheduler.schedule()
        check_scheduler(self.scheduler)
        for row in self.scheduler.started:
            self._rows[(row.slot, row.epoch)] = row.request_id
        self.scheduler.started.clear()
        self.scheduler.preempted.clear()
        if plan is None:
            return None
        self.plans.append(plan)
        self._check_plan(plan)
        result = None
        if self.in_flight and self.in_flight[-1][1] is None:
            pass  # behind a failed step: this one never runs
        else:
            try:
                result = self.device.execute(plan, fails=fails)
                result = result._replace(ended_ns=result.started_ns + self._step_ns(plan))
            except DeviceFailure:
                pass
        self.in_flight.append((plan, result, self._blocks_of(plan)))
        self.check_published()
        return plan

    def land(self) -> AppliedStep | None:
        """Process the oldest step in flight, or its failure."""
        plan, result, _ = self.in_flight.popleft()
        if result is None:
            self.in_flight.clear()
            error = StepError("scripted failure", step_id=plan.step_id)
            self.device.recover(self.plans[-1].step_id + 1)
            self._note_finished(self.scheduler.fail(plan, error))
            check_scheduler(self.scheduler)
            return None
        applied = self.scheduler.apply(plan, result)
        check_scheduler(self.scheduler)
        self.check_published()
        counts = 1 if applied.num_tokens is None else applied.num_tokens
        columns = (applied.slots.repeat(counts), applied.epochs.repeat(counts), applied.token_ids)
        for slot, epoch, token in zip(*(column.tolist() for column in columns), strict=True):
            self.outputs[self._rows[(slot, epoch)]].append(token)
        self._note_finished(applied.finished)
        return applied

    def step(self, *, fails: bool = False) -> StepPlan | None:
        """Launch one step if the depth allows, then land the oldest if the depth is reached."""
        plan = self.launch(fails=fails)
        if self.in_flight and (plan is None or len(self.in_flight) >= self.depth):
            self.land()
        return plan

    def run(self, max_steps: int = 10_000) -> None:
        """Step until nothing is left to do."""
        for _ in range(max_steps):
            if not self.scheduler.has_requests and not self.in_flight:
                return
            idle = not self.in_flight
            assert self.step() is not None or not idle, "stuck: work left, nothing planned"
        raise AssertionError(f"not done after {max_steps} steps")

    def abort(self, request_id: str) -> None:
        row = self.scheduler.finish(request_id, FinishReason.ABORT)
        if row is not None:
            self._note_finished([row])
        check_scheduler(self.scheduler)

    def total_scheduled(self) -> int:
        return sum(plan.total_tokens for plan in self.plans)

    def assert_drained(self) -> None:
        """Check that no request holds a slot or a block."""
        scheduler = self.scheduler
        check_scheduler(scheduler)
        assert not scheduler.has_requests and not len(scheduler.waiting)
        assert scheduler.kv.pool.num_used == 0 and scheduler.fence.num_blocks == 0
        assert sorted(scheduler.free_slots) == list(range(scheduler.config.max_num_seqs))

    def assert_reference(self, *request_ids: str) -> None:
        """Check that these requests (default: all) gave exactly the tokens they give alone."""
        for request_id in request_ids or self.records:
            expected = reference_tokens(self.records[request_id])
            assert self.outputs[request_id] == expected, request_id

    def scheduled(self, plan: StepPlan) -> dict[str, int]:
        """Tokens by request id in a plan."""
        keys = zip(plan.slots.tolist(), plan.epochs.tolist(), strict=True)
        return {
            self._rows[key]: int(count) for key, count in zip(keys, plan.num_tokens, strict=True)
        }

    def check_published(self) -> None:
        """Check that every block that can be found by hash holds exactly the tokens that were
        hashed."""
        scheduler, device = self.scheduler, self.device
        size = scheduler.kv.block_size
        for request in self.records.values():
            done = self._num_hashes.get(request.request_id, 0)
            if len(request.block_hashes) == done:
                continue
            tokens = request.token_ids
            if request.slot >= 0:
                table = scheduler.slots
                tokens = table.token_ids[request.slot, : table.num_tokens[request.slot]]
            chain: list[bytes] = []
            hash_blocks(tokens, size, chain, request.cache_salt)
            count = len(request.block_hashes)
            assert request.block_hashes == chain[:count], "hashed a token nobody knew"
            for i in range(done, count):
                block_tokens = tokens[i * size : (i + 1) * size].copy()
                self._published[chain[i]] = (i * size, block_tokens)
            self._num_hashes[request.request_id] = count
        if self.in_flight and self.in_flight[-1][1] is None:
            return  # a failed step leaves garbage until it lands
        hashes = scheduler.kv.pool._hashes  # no public way to list them
        size_of_hash = len(next(iter(self._published), b""))  # a group's number may follow it
        hashed = [(b, held[:size_of_hash]) for b, held in enumerate(hashes) if held is not None]
        if not hashed:
            return
        where = np.asarray([block for block, _ in hashed])[:, None] * size + np.arange(size)
        starts = np.asarray([self._published[held][0] for _, held in hashed])
        tokens = np.stack([self._published[held][1] for _, held in hashed])
        assert (device.kv_tokens[where] == tokens).all(), "a published block holds other tokens"
        assert (device.kv_positions[where] == starts[:, None] + np.arange(size)).all()

    def _note_finished(self, rows: Iterable[object]) -> None:
        for row in rows:
            self.reasons[row.request_id] = row.reason  # type: ignore[attr-defined]
            self.stop_token_ids[row.request_id] = row.stop_token_id  # type: ignore[attr-defined]
            record = self.records[row.request_id]  # type: ignore[attr-defined]
            tokens = record.token_ids[record.num_prompt_tokens :].tolist()
            assert tokens == self.outputs[record.request_id]

    def _blocks_of(self, plan: StepPlan) -> set[int]:
        kv = self.scheduler.kv
        # Blocks of a window are given up while steps may read them, to be written by later ones.
        return {
            int(block)
            for group, window in enumerate(kv.windows)
            if window is None
            for slot in plan.slots
            for block in kv.block_tables[group, slot, : kv.num_blocks[group, slot]]
        }

    def _check_plan(self, plan: StepPlan) -> None:
        scheduler, config = self.scheduler, self.scheduler.config
        counts = plan.num_tokens
        assert plan.num_rows == len(set(plan.slots.tolist())) <= config.max_num_seqs
        assert counts.min() >= 1 and plan.total_tokens <= config.max_num_batched_tokens
        if config.long_prefill_token_threshold:
            assert counts.max() <= config.long_prefill_token_threshold
        singles = int(np.count_nonzero(counts == 1))
        assert (counts[:singles] == 1).all(), "rows with one token come first"
        for array in (plan.slots, plan.epochs, counts, plan.num_computed, plan.block_ids):
            assert array.dtype == np.int32
        # Later steps change the tables, so a plan is compared with them right after planning.
        groups = 0 if plan.block_groups is None else plan.block_groups
        table = scheduler.kv.block_tables[groups, plan.block_slots, plan.block_positions]
        assert (table == plan.block_ids).all()
        assert (scheduler.slots.epoch[plan.slots] == plan.epochs).all()
        assert {row.slot for row in plan.added} <= set(plan.slots.tolist())
        self._check_reuse(plan)

    def _check_reuse(self, plan: StepPlan) -> None:
        """Check that no slot or block used by a step in flight goes to another request."""
        hits = {
            (row.slot, i)
            for row in plan.added
            for i in range(row.num_computed_tokens // self.scheduler.kv.block_size)
        }
        places = zip(plan.block_slots.tolist(), plan.block_positions.tolist(), strict=True)
        new = {
            int(block)
            for place, block in zip(places, plan.block_ids, strict=True)
            if place not in hits
        }
        for other, _, blocks in self.in_flight:
            assert not new & blocks, "a block was reused while a step in flight may touch it"
            assert not {row.slot for row in plan.added} & set(other.slots.tolist())


def drive(scheduler: Scheduler, requests: Sequence[Request], **kwargs: object) -> Driver:
    """Add everything, run to the end, compare with the reference."""
    driver = Driver(scheduler, **kwargs)  # type: ignore[arg-type]
    driver.add(*requests)
    driver.run()
    driver.assert_drained()
    driver.assert_reference()
    return driver


def unique_prompts(lengths: Iterable[int], vocab: int = VOCAB) -> Iterator[list[int]]:
    """Prompts of these lengths; no two share a prefix of a whole block."""
    for seed, length in enumerate(lengths):
        yield np.random.default_rng(seed).integers(0, vocab, length).tolist()


def prompts(*lengths: int) -> list[list[int]]:
    return list(unique_prompts(lengths))


def prompt_with_output(
    accepts: Callable[[list[int]], bool], *, length: int = 6, num_tokens: int = 12
) -> tuple[list[int], list[int]]:
    """A prompt whose first output tokens have some property, and those tokens."""
    for seed in itertools.count():
        prompt = np.random.default_rng(seed).integers(0, 40, length).tolist()
        output = reference_tokens(make_request("x", prompt, max_tokens=num_tokens))
        if accepts(output):
            return prompt, output
    raise AssertionError("unreachable")


def all_different(output: list[int]) -> bool:
    return len(set(output)) == len(output)


def free_order(pool: BlockPool) -> list[int]:
    """Blocks in the order in which they would be reused."""
    pool = copy.deepcopy(pool)
    return [pool.pop_free() for _ in range(pool.num_free)]
