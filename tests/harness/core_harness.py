"""The whole loop over the scripted device, with steps that run as late as they can.

`CoreDriver` submits, steps and collects what a front end would; `ScriptedExecutor` runs a plan only
when its result is read, so a plan that changes after its submission shows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from fake_executor import make_core
from scheduler_harness import make_states
from scripted_device import VOCAB, DeviceFailure, ScriptedDevice, next_token

from termgen.engine.schedule.invariants import check_scheduler
from termgen.vocabulary.device.pooling import PoolingParams
from termgen.vocabulary.model_info import DeviceInfo, GraphStatus
from termgen.vocabulary.request import FinishReason, GenerationRequest, TurnEnds
from termgen.vocabulary.sampling_params import SamplingParams
from termgen.vocabulary.step import FinishedRow, StepDelivery, StepLogprobs, StepPlan, StepResult
from termgen.vocabulary.token_mask import IntArray

NO_EOS = VOCAB
"""An end-of-sequence id that the scripted model never gives."""

Residency = tuple[int, int]
"""(slot, epoch)."""


def residencies(plan: StepPlan) -> list[Residency]:
    return list(zip(plan.slots.tolist(), plan.epochs.tolist(), strict=True))


class ScriptedExecutor:
    """Runs plans in order on a `ScriptedDevice`; reading a result runs every plan up to it."""

    def __init__(self, device: ScriptedDevice) -> None:
        self.device = device
        # A recurrent device computes no token twice, so masks are there before the step.
        self.waits_for_masks = not device.state_places
        self.plans: list[StepPlan] = []
        self.landed_at: list[int] = []
        """Number of landed steps at each plan's submission."""
        self.num_landed = 0
        self.most_in_flight = 0
        self.fail_steps: set[int] = set()
        self.on_result: Callable[[StepPlan], None] | None = None
        """Called while the core waits for a step: the moment when another thread could
        interfere."""
        self.breach: AssertionError | None = None
        """A fault that the device found in a plan; the core sees it as a failed step."""
        self._waiting: deque[ScriptedHandle] = deque()
        self._is_broken = False
        self._blocks: dict[int, set[int]] = {}
        """Blocks of each slot in the newest plan."""
        self._touched: list[set[int]] = []
        """Blocks that each plan may read or write."""

    def start(self, on_progress: Callable[[str, float], None]) -> DeviceInfo:
        raise AssertionError("the test builds the core itself")

    def submit(self, plan: StepPlan) -> ScriptedHandle:
        if self._is_broken and self.num_landed == len(self.plans):
            self.device.recover(plan.step_id)
            self._is_broken = False
        self._check_reuse(plan)
        self.plans.append(plan)
        self.landed_at.append(self.num_landed)
        self.most_in_flight = max(self.most_in_flight, len(self.in_flight))
        handle = ScriptedHandle(self, plan)
        self._waiting.append(handle)
        return handle

    def post_masks(
        self,
        slots: IntArray,
        positions: IntArray,
        bits: IntArray,
        forced: Sequence[Sequence[int]] | None = None,
    ) -> None:
        self.device.post_masks(slots, positions, bits, forced)

    def withhold_masks(self, slots: IntArray) -> None:
        self.device.withhold_masks(slots)

    def _check_reuse(self, plan: StepPlan) -> None:
        """Check that no slot or block used by a step in flight goes to another request."""
        added = {row.slot: row.num_computed_tokens // self.device.block_size for row in plan.added}
        for slot in (*plan.released_slots, *added):
            self._blocks[slot] = set()
        new = set()
        places = (plan.block_slots.tolist(), plan.block_positions.tolist(), plan.block_ids.tolist())
        groups = [0] * len(places[0]) if plan.block_groups is None else plan.block_groups.tolist()
        for group, slot, position, block in zip(groups, *places, strict=True):
            if self.device.windows[group] is None:  # others' are given up while steps may read them
                self._blocks[slot].add(block)
            if position >= added.get(slot, 0):  # blocks before these are shared prefixes
                new.add(block)
        for other, touched in zip(self.in_flight, self._touched[self.num_landed :], strict=True):
            assert not new & touched, "a block was given away while a step in flight touches it"
            assert not added.keys() & set(other.slots.tolist()), "so was a slot"
        self._touched.append(set().union(*(self._blocks[slot] for slot in plan.slots.tolist())))

    @property
    def in_flight(self) -> list[StepPlan]:
        return self.plans[self.num_landed :]

    def wait(self, plan: StepPlan) -> None:
        """Run everything up to a plan."""
        self.num_landed += 1
        while self._waiting and self._waiting[0].plan.step_id <= plan.step_id:
            step = self._waiting.popleft()
            if self._is_broken:
                continue  # behind a failed step: this one never runs
            fails = step.plan.step_id in self.fail_steps
            try:
                step.answer.append(self.device.execute(step.plan, fails=fails))
            except DeviceFailure:
                self._is_broken = True
            except AssertionError as breach:
                self.breach = breach
                raise
        if self.on_result is not None:
            self.on_result(plan)

    def idle(self) -> bool:
        return False

    def graph_status(self) -> GraphStatus:
        return GraphStatus(0, 0)

    def expert_counts(self) -> None:
        return None

    def shutdown(self) -> None:
        self.plans.clear()


class ScriptedHandle:
    def __init__(self, executor: ScriptedExecutor, plan: StepPlan) -> None:
        self._executor = executor
        self.plan = plan
        self.answer: list[StepResult] = []

    def result(self) -> StepResult:
        self._executor.wait(self.plan)
        if not self.answer:
            raise DeviceFailure(f"step {self.plan.step_id} was made to fail")
        return with_logprobs(self.plan, self.answer[0])


def with_logprobs(plan: StepPlan, result: StepResult) -> StepResult:
    """Log-probability rows whose numbers encode the slot and, as rank, the epoch."""
    if plan.sampling.max_logprobs is None:
        return result
    counts = 1 + (plan.num_draft_tokens if result.num_drafted is None else result.num_drafted)
    ids = np.repeat(plan.slots.repeat(counts)[:, None], 1 + plan.sampling.max_logprobs, axis=1)
    logprobs = StepLogprobs(ids, -ids.astype(np.float32), plan.epochs.repeat(counts))
    return result._replace(logprobs=logprobs)


@dataclass(eq=False)
class Bearer:
    """One submitted request and everything delivered for it. Its name may be used again later."""

    request: GenerationRequest
    tokens: list[int] = field(default_factory=list)
    residencies: list[Residency] = field(default_factory=list)
    num_cached_tokens: int = 0
    num_logprobs: int = 0
    ending: FinishedRow | None = None
    is_aborted: bool = False
    """Its reader asked for an abort before it saw an end."""

    @property
    def reason(self) -> FinishReason | None:
        return None if self.ending is None else self.ending.reason


class _Reader(list[StepDelivery]):
    """Reads each delivery at once, like a front end that never lags."""

    def __init__(self, read: Callable[[StepDelivery], None]) -> None:
        super().__init__()
        self._read = read

    def append(self, news: StepDelivery) -> None:
        self._read(news)


class CoreDriver:
    """A core, its device, and a front end that checks every delivery."""

    def __init__(
        self,
        *,
        depth: int,
        stops: bool = True,
        eos: int = NO_EOS,
        num_blocks: int = 200,
        block_size: int = 4,
        max_num_seqs: int = 8,
        max_model_len: int = 128,
        max_num_batched_tokens: int = 64,
        policy: str = "fcfs",
        run_ahead_ms: float = 0.0,
        windows: tuple[int | None, ...] = (None,),
        state_places: int = 0,
        num_drafts: int = 0,
        num_ahead: int = 0,
        most_forced: int = 0,
    ) -> None:
        device = ScriptedDevice(
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            stops=stops,
            windows=windows,
            state_places=state_places,
            num_drafts=num_drafts,
        )
        self.depth = depth
        self.eos = eos
        self.max_model_len = max_model_len
        self.executor = ScriptedExecutor(device)
        self.core = make_core(
            self.executor,
            _Reader(self._read),
            depth=depth,
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            max_num_batched_tokens=max_num_batched_tokens,
            policy=policy,
            eos=eos,
            run_ahead_ms=run_ahead_ms,
            windows=windows,
            states=make_states(block_size, max_num_seqs, state_places),
            num_drafts=num_drafts,
            num_ahead=num_ahead,
            most_forced=most_forced,
        )
        self.scheduler = self.core.scheduler
        self.bearers: list[Bearer] = []
        self._by_name: dict[str, Bearer] = {}
        self._by_row: dict[Residency, Bearer] = {}

    def submit(
        self,
        name: str,
        prompt: Sequence[int],
        *,
        priority: int = 0,
        salt: str | None = None,
        turn_ends: TurnEnds | None = None,
        pooling: PoolingParams | None = None,
        **params: object,
    ) -> Bearer:
        old = self._by_name.get(name)
        assert old is None or old.ending is not None, "a name is free when its end was delivered"
        request = GenerationRequest(
            request_id=name,
            prompt_token_ids=tuple(prompt),
            params=SamplingParams(**params),  # type: ignore[arg-type]
            priority=priority,
            cache_salt=salt,
            turn_ends=turn_ends or TurnEnds(),
            pooling=pooling,
        )
        bearer = self._by_name[name] = Bearer(request)
        self.bearers.append(bearer)
        self.core.submit(request, len(self.bearers))
        return bearer

    def abort(self, name: str) -> None:
        """Abort: no token may come after this call, even while a step is being waited for."""
        bearer = self._by_name.get(name)
        if bearer is not None and bearer.ending is None:
            bearer.is_aborted = True
        self.core.abort(name)

    def step(self) -> bool:
        worked = self.core.step()
        if self.executor.breach is not None:
            raise self.executor.breach
        check_scheduler(self.scheduler)
        return worked

    def run(self, max_steps: int = 10_000) -> None:
        for _ in range(max_steps):
            if not self.core.has_work:
                return
            self.step()
        raise AssertionError(f"the engine never came to rest in {max_steps} steps")

    def _read(self, news: StepDelivery) -> None:
        for start in news.started:
            bearer = self._by_name[start.request_id]
            bearer.residencies.append((start.slot, start.epoch))
            bearer.num_cached_tokens = start.num_cached_tokens
            self._by_row[start.slot, start.epoch] = bearer
        counts = news.num_tokens
        assert len(counts) == len(news.slots) and (counts > 0).all()
        columns = (news.slots.repeat(counts).tolist(), news.epochs.repeat(counts).tolist())
        rows = list(zip(*columns, strict=True))
        for row, token in zip(rows, news.token_ids.tolist(), strict=True):
            bearer = self._by_row[row]
            assert bearer.ending is None, "a token after the end"
            assert not bearer.is_aborted, "a token after the abort"
            assert row == bearer.residencies[-1], "a token of a residency that is over"
            bearer.tokens.append(token)
        if news.logprobs is not None:
            pairs = zip(news.logprobs.token_ids[:, 0], news.logprobs.ranks, strict=True)
            assert [(int(slot), int(epoch)) for slot, epoch in pairs] == rows
            for row in rows:
                self._by_row[row].num_logprobs += 1
        for end in news.finished:
            bearer = self._by_name[end.request_id]
            assert bearer.ending is None, "a request ends once"
            bearer.ending = end
            if end.vector is not None:  # it is that of the prompt alone
                assert bearer.request.pooling is not None
                prompt = np.asarray(bearer.request.prompt_token_ids)
                assert end.vector.tolist() == [next_token(prompt)] * 2
            if bearer.is_aborted:
                assert end.reason in (FinishReason.ABORT, FinishReason.ERROR)
            assert end.num_output_tokens == len(bearer.tokens), "a token was lost or made up"

    def computed(self, bearer: Bearer) -> list[int]:
        """Tokens that all plans together computed for each residency of a request."""
        totals = dict.fromkeys(bearer.residencies, 0)
        for plan in self.executor.plans:
            for row, count in zip(residencies(plan), plan.num_tokens.tolist(), strict=True):
                if row in totals:
                    totals[row] += count
        return list(totals.values())

    def reference(self, bearer: Bearer) -> list[int]:
        """The request's output when it runs alone on the scripted model."""
        if bearer.request.pooling is not None:
            return []
        params, tokens = bearer.request.params, list(bearer.request.prompt_token_ids)
        num_prompt, stops = len(tokens), set(params.stop_token_ids)
        if not params.ignore_eos:
            stops.add(self.eos)
        limit = min(self.max_model_len, num_prompt + (params.max_tokens or self.max_model_len))
        while len(tokens) < limit:
            tokens.append(next_token(np.asarray(tokens)))
            if tokens[-1] in stops and len(tokens) > num_prompt + params.min_tokens:
                break
        return tokens[num_prompt:]

    def assert_reference(self, *bearers: Bearer) -> None:
        """Check that these requests (default: all) gave their reference output, and that the engine
        holds nothing."""
        for bearer in bearers or self.bearers:
            assert bearer.tokens == self.reference(bearer), bearer.request.request_id

    def assert_drained(self) -> None:
        scheduler = self.scheduler
        check_scheduler(scheduler)
        assert not self.core.has_work and not scheduler.has_requests and not scheduler.waiting
        assert scheduler.kv.pool.num_used == 0 and scheduler.fence.num_blocks == 0
        assert sorted(scheduler.free_slots) == list(range(scheduler.config.max_num_seqs))
        assert self.executor.num_landed == len(self.executor.plans)
        total = sum(len(bearer.tokens) for bearer in self.bearers)
        assert scheduler.stats.generation_tokens == total
        assert scheduler.stats.num_finished == len(self.bearers)
