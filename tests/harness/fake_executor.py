"""An executor without a model: rows follow the plans, next tokens come from a function."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from termgen.engine.loop.core import EngineCore
from termgen.engine.loop.executor import Executor
from termgen.engine.schedule.kv_cache import KVCacheManager
from termgen.engine.schedule.scheduler import Scheduler, SchedulerConfig
from termgen.engine.schedule.state_cache import StateCache
from termgen.vocabulary.model_info import DeviceInfo, GraphStatus
from termgen.vocabulary.step import AddedRow, StepDelivery, StepPlan, StepResult
from termgen.vocabulary.token_mask import IntArray


class _Handle:
    def __init__(self, result: StepResult | Exception) -> None:
        self._result = result

    def result(self) -> StepResult:
        if isinstance(self._result, Exception):
            raise self._result
        return self._result


class FakeExecutor:
    """Keeps its own rows, as a device does, and stops rows by the device's own rules."""

    def __init__(self, next_token: Callable[[Sequence[int]], int]) -> None:
        self.next_token = next_token
        self.plans: list[StepPlan] = []
        self.fail_steps: dict[int, Exception] = {}
        self.on_submit: Callable[[StepPlan], None] | None = None
        self.num_idle_jobs = 0
        """Pieces of idle work to offer."""
        self.slept: list[str] = []
        """The sleep calls it received."""
        self.sleep_error: Exception | None = None
        self._rows: dict[int, tuple[AddedRow, list[int]]] = {}
        self._computed: dict[int, int] = {}
        self._finished: set[int] = set()

    def start(self, on_progress: Callable[[str, float], None]) -> DeviceInfo:
        raise AssertionError("the test builds the core itself")

    def submit(self, plan: StepPlan) -> _Handle:
        self.plans.append(plan)
        if self.on_submit is not None:
            self.on_submit(plan)
        for row in plan.added:
            self._rows[row.slot] = (row, row.token_ids.tolist())
            self._computed[row.slot] = row.num_computed_tokens
            self._finished.discard(row.slot)
        if plan.step_id in self.fail_steps:
            return _Handle(self.fail_steps[plan.step_id])
        sampled, tokens = [], []
        for slot, count in zip(plan.slots.tolist(), plan.num_tokens.tolist(), strict=True):
            token = self._advance(slot, count)
            sampled.append(int(token is not None))
            tokens += [] if token is None else [token]
        now = time.perf_counter_ns()
        return _Handle(
            StepResult(
                step_id=plan.step_id,
                num_sampled=np.asarray(sampled, np.int32),
                token_ids=np.asarray(tokens, np.int32),
                logprobs=None,
                started_ns=now,
                ended_ns=now,
            )
        )

    waits_for_masks = False

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

    def _advance(self, slot: int, count: int) -> int | None:
        row, tokens = self._rows[slot]
        self._computed[slot] += count
        if self._computed[slot] < len(tokens) + row.is_pooled or slot in self._finished:
            return None
        token = self.next_token(tokens)
        tokens.append(token)
        past_minimum = len(tokens) > row.num_prompt_tokens + row.params.min_tokens
        if (token in row.stop_token_ids and past_minimum) or len(tokens) >= row.max_total_tokens:
            self._finished.add(slot)
        return token

    def idle(self) -> bool:
        if not self.num_idle_jobs:
            return False
        self.num_idle_jobs -= 1
        return True

    def graph_status(self) -> GraphStatus:
        return GraphStatus(0, self.num_idle_jobs)

    def expert_counts(self) -> None:
        return None

    def sleep(self, level: int) -> None:
        if self.sleep_error is not None:
            raise self.sleep_error
        self.slept.append(f"sleep {level}")

    def give_back(self) -> None:
        self.slept.append("give back")

    def wake_up(self, on_progress: Callable[[str, float], None]) -> None:
        if self.sleep_error is not None:
            raise self.sleep_error
        on_progress("loading weights", 0.5)
        self.slept.append("wake up")

    def shutdown(self) -> None:
        self.plans.clear()


def make_core(
    executor: Executor,
    deliveries: list[StepDelivery],
    *,
    depth: int = 1,
    num_blocks: int = 64,
    block_size: int = 4,
    max_num_seqs: int = 8,
    max_model_len: int = 128,
    max_num_batched_tokens: int = 64,
    policy: str = "fcfs",
    eos: int = 1,
    run_ahead_ms: float = 0.0,
    windows: tuple[int | None, ...] = (None,),
    states: StateCache | None = None,
    num_drafts: int = 0,
    num_ahead: int = 0,
    most_forced: int = 0,
) -> EngineCore:
    kv = KVCacheManager(
        num_blocks=num_blocks,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        enable_prefix_caching=True,
        windows=windows,
        states=states,
    )
    scheduler = Scheduler(
        SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            policy=policy,
            num_speculative_tokens=num_drafts,
            num_ahead=num_ahead,
            most_forced=most_forced,
        ),
        kv,
    )
    return EngineCore(
        executor,
        scheduler,
        max_in_flight=depth,
        max_model_len=max_model_len,
        eos_token_ids=frozenset({eos}),
        seed=0,
        on_delivery=deliveries.append,
        run_ahead_ms=run_ahead_ms,
    )
