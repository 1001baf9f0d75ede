"""Random traffic through the whole loop, up to 31 steps ahead, compared with each request alone.

Requests arrive, stop, are aborted or preempted, steps fail, and the engine is paused and its cache
reset in between.

Every choice comes from the seed in the test's name; rerun one with `-k "seed-17"`. More of them:
    TERMGEN_FUZZ_SCHEDULES=5000 pytest tests/engine/loop/test_async_fuzz.py
"""

from __future__ import annotations

import os
from collections import Counter
from concurrent.futures import Future
from typing import Any, get_args

import numpy as np
import pytest
from core_harness import Bearer, CoreDriver
from scheduler_harness import draw_state_places, draw_windows
from scripted_device import VOCAB

from termgen.client import PauseMode
from termgen.errors import CorruptedLogitsError
from termgen.vocabulary.cache_groups import blocks_of_context
from termgen.vocabulary.device.pooling import PoolingKind, PoolingParams
from termgen.vocabulary.request import FinishReason, TurnEnds
from termgen.vocabulary.step import MAX_STEPS_IN_FLIGHT

NUM_SCHEDULES = int(os.environ.get("TERMGEN_FUZZ_SCHEDULES", "128"))
SCHEDULES_PER_TEST = 8
NUM_TURNS = 40
NUM_DEEP_SCHEDULES = NUM_SCHEDULES // 8
MODES: tuple[PauseMode, ...] = get_args(PauseMode)


class Schedule:
    """One run: the requests, their arrival times, and the engine."""

    def __init__(self, seed: int, *, is_deep: bool = False) -> None:
        """is_deep: fewer and longer requests, so that the queue grows to its full length."""
        self.seed = seed
        self.rng = rng = np.random.default_rng(seed)
        self.max_prompt = int(rng.choice([6, 20, 40]))
        self.max_tokens = 120 if is_deep else int(rng.choice([3, 12, 25]))
        block_size = int(rng.choice([1, 2, 4, 8]))
        longest = self.max_prompt + self.max_tokens
        windows = draw_windows(np.random.default_rng([seed, 2]))
        # So that every request can run alone.
        smallest = blocks_of_context(longest, block_size, windows) + 1
        max_num_seqs = int(rng.integers(1, 7))
        self.setting = {
            "depth": 1 + seed % 8,
            "stops": bool(rng.random() < 0.7),
            "eos": int(rng.choice([7, VOCAB])),
            "num_blocks": smallest + int(rng.choice([0, 2, smallest, 4 * smallest])),
            "block_size": block_size,
            "max_num_seqs": max_num_seqs,
            "max_model_len": longest,
            "max_num_batched_tokens": max_num_seqs + int(rng.choice([0, 3, 16, 100])),
            "policy": str(rng.choice(["fcfs", "priority"])),
            "run_ahead_ms": float(rng.choice([0.0, 20.0])),
            "windows": windows,
            "most_forced": 0,
            "state_places": draw_state_places(np.random.default_rng([seed, 3])),
        }
        self.setting["num_drafts"] = int(np.random.default_rng([seed, 4]).choice([0, 1, 3, 6]))
        if self.setting["state_places"]:
            self.setting["num_drafts"] *= int(np.random.default_rng([seed, 9]).integers(2))
        if is_deep:
            self.setting |= {"depth": 2 + seed % 7, "run_ahead_ms": 20.0}
        self.driver = self.make_driver()
        declines = np.random.default_rng([seed, 10]).choice([0.0, 0.5])
        self.driver.executor.device.declines = float(declines)
        self.p_add = 0.03 if is_deep else float(rng.choice([0.2, 0.5, 0.8]))
        self.p_abort = float(rng.choice([0.0, 0.01] if is_deep else [0.0, 0.05, 0.2]))
        self.p_fail = float(rng.choice([0.0, 0.0, 0.02]))
        self.p_reset = float(rng.choice([0.0, 0.1]))
        self.p_pause = float(rng.choice([0.0, 0.1]))
        nan_rng = np.random.default_rng([seed, 1])
        self.p_nan = float(nan_rng.choice([0.0, 0.0, 0.002] if is_deep else [0.0, 0.0, 0.01, 0.05]))
        if self.p_nan:
            device = self.driver.executor.device
            device.turns_nan = lambda: bool(nan_rng.random() < self.p_nan)
        self.prefix = rng.integers(0, VOCAB, self.max_prompt).tolist()
        self.cuts: dict[Bearer, int] = {}
        """Requests whose reader leaves at a token of its own choice, as for a stop string."""
        self.poolings = np.random.default_rng([seed, 11])
        self.p_pooling = 0.05 if is_deep else 0.25
        self.answers: list[tuple[str, Future[Future[Any]]]] = []
        """Futures of pauses and resets, by the name of the command."""
        self.in_flight_at_rest: list[int] = []
        """Steps in flight when a pause was said to have taken effect."""
        self.driver.executor.on_result = lambda _: self.meanwhile()

    def make_driver(self) -> CoreDriver:
        return CoreDriver(**self.setting)  # type: ignore[arg-type]

    def run(self) -> None:
        rng, driver = self.rng, self.driver
        for _ in range(NUM_TURNS):
            while rng.random() < self.p_add and len(self.alive()) < 12:
                self.add()
            self.meanwhile()
            self.command()
            if rng.random() < self.p_fail:
                driver.executor.fail_steps.add(len(driver.executor.plans))
            driver.step()
            self.read()
        driver.executor.on_result = None
        driver.core.call(driver.core.control.resume)
        while driver.core.has_work:
            driver.step()
            self.read()
        driver.assert_drained()

    def command(self) -> None:
        """Resets, forced or not, and pauses that end after a while."""
        rng, core = self.rng, self.driver.core
        if rng.random() < self.p_reset:
            force = bool(rng.random() < 0.5)
            self.answers.append(
                (f"reset {force}", core.call(lambda: core.control.reset_prefix_cache(force)))
            )
        if core.control.is_paused and rng.random() < 0.3:
            core.call(core.control.resume)
        elif rng.random() < self.p_pause:
            mode: PauseMode = MODES[int(rng.integers(len(MODES)))]
            self.answers.append((f"pause {mode}", core.call(lambda: self.pause(mode))))

    def pause(self, mode: PauseMode) -> Future[Any]:
        def note(paused: Future[None]) -> None:
            if paused.exception() is None:
                self.in_flight_at_rest.append(len(self.driver.executor.in_flight))

        paused = self.driver.core.control.pause(mode)
        paused.add_done_callback(note)
        return paused

    def alive(self) -> list[Bearer]:
        return [b for b in self.driver.bearers if b.ending is None]

    def prompt(self) -> list[int]:
        rng = self.rng
        fresh: list[int] = rng.integers(
            0, VOCAB, int(rng.integers(1, self.max_prompt + 1))
        ).tolist()
        kind = rng.random()
        if kind < 0.4:
            return fresh
        if kind < 0.7 or not self.driver.bearers:
            keep = int(rng.integers(0, len(fresh) + 1))
            return self.prefix[:keep] + fresh[keep:]
        past = self.driver.bearers[int(rng.integers(len(self.driver.bearers)))]
        return [*past.request.prompt_token_ids, *past.tokens, *fresh][: self.max_prompt]

    def add(self) -> None:
        rng = self.rng
        in_use = {b.request.request_id for b in self.alive()}
        free = [name for name in map(str, range(20)) if name not in in_use]
        max_tokens = int(rng.integers(1, self.max_tokens + 1))
        num_stops = int(rng.choice([0, 0, 1, 3, 12]))
        count = len(self.driver.bearers)
        prompt = self.prompt()
        ends = rng.integers(0, len(prompt) + 1, len(TurnEnds._fields)).tolist()
        bearer = self.submit(
            str(rng.choice(free)),
            prompt,
            turn_ends=TurnEnds(*ends) if rng.random() < 0.7 else None,
            max_tokens=None if rng.random() < 0.1 else max_tokens,
            stop_token_ids=tuple(rng.choice(VOCAB, num_stops, replace=False).tolist()),
            min_tokens=int(rng.integers(0, max_tokens + 1)) if rng.random() < 0.3 else 0,
            ignore_eos=bool(rng.random() < 0.3),
            logprobs=int(rng.integers(0, 3)) if rng.random() < 0.2 else None,
            frequency_penalty=0.5 * (count % 3 == 0),
            logit_bias={3: 1.0} if count % 5 == 0 else {},
            priority=int(rng.integers(-2, 3)),
            salt="salt" if rng.random() < 0.1 else None,
            **self.pooling(),
        )
        if rng.random() < 0.2:
            self.cuts[bearer] = int(rng.integers(VOCAB))

    def pooling(self) -> dict[str, PoolingParams]:
        """That of a request which wants a vector."""
        if self.poolings.random() > self.p_pooling:
            return {}
        kinds = list(PoolingKind)
        kind = kinds[int(self.poolings.integers(len(kinds)))]
        return {"pooling": PoolingParams(kind, normalize=False)}

    def submit(self, name: str, prompt: list[int], **params: Any) -> Bearer:
        return self.driver.submit(name, prompt, **params)

    def meanwhile(self) -> None:
        """Abort a request, possibly a finished or unknown one, while a step may be waited for."""
        if self.rng.random() < self.p_abort:
            names = [b.request.request_id for b in self.alive()]
            self.driver.abort(str(self.rng.choice([*names, "nobody"])))

    def read(self) -> None:
        """Read like a front end that searches the text."""
        for bearer in self.alive():
            if self.cuts.get(bearer) in bearer.tokens:
                self.driver.abort(bearer.request.request_id)

    def check(self) -> None:
        for bearer in self.driver.bearers:
            self.check_output(bearer)
            self.check_computed(bearer)
        assert not any(self.in_flight_at_rest)
        for name, asked in self.answers:
            answer = asked.result(0)
            assert answer.done(), f"{name} was never answered"
            assert answer.exception() is None or name.startswith("pause"), name

    def check_output(self, bearer: Bearer) -> None:
        driver, name = self.driver, bearer.request.request_id
        expected, tokens = driver.reference(bearer), bearer.tokens
        if bearer.ending is not None and isinstance(bearer.ending.error, CorruptedLogitsError):
            assert self.p_nan, name
        else:
            assert bearer.reason is not FinishReason.ERROR or driver.executor.fail_steps, name
        if bearer.reason in (FinishReason.ABORT, FinishReason.ERROR):
            assert tokens == expected[: len(tokens)], name
            cut = self.cuts.get(bearer)
            if bearer.reason is FinishReason.ABORT and cut in tokens:
                # The reader saw it one step later at most: the abort wins over the next result.
                most = 1 + max(self.setting[name] for name in ("num_drafts", "most_forced"))
                assert tokens.index(cut) >= len(tokens) - most, name
            return
        assert tokens == expected, name
        assert bearer.ending is not None
        if bearer.request.pooling is not None:  # the driver has compared the vector
            assert bearer.reason is FinishReason.STOP and bearer.ending.vector is not None, name
            return
        params, num = bearer.request.params, len(tokens)
        eos = () if params.ignore_eos else (driver.eos,)
        stopped = tokens[-1] in (*params.stop_token_ids, *eos) and num > params.min_tokens
        is_over = stopped or self.is_complete(bearer)
        assert bearer.reason is (FinishReason.STOP if is_over else FinishReason.LENGTH), name
        own = stopped and tokens[-1] in params.stop_token_ids
        assert bearer.ending.stop_token_id == (tokens[-1] if own else None), name

    def is_complete(self, bearer: Bearer) -> bool:
        """True if the answer satisfies its grammar."""
        return False

    def check_computed(self, bearer: Bearer) -> None:
        """Exactly the needed tokens; behind a stop token at most those of the steps ahead."""
        if len(bearer.residencies) != 1:
            return
        (total,) = self.driver.computed(bearer)
        useful = len(bearer.request.prompt_token_ids) + len(bearer.tokens) - 1
        if bearer.request.pooling is not None:
            assert total == useful + 1 - bearer.num_cached_tokens or bearer.reason in (
                FinishReason.ABORT,
                FinishReason.ERROR,
            )
            return
        useful -= bearer.num_cached_tokens
        if self.setting.get("num_drafts"):
            assert bearer.reason in (FinishReason.ABORT, FinishReason.ERROR) or total >= useful
        elif bearer.reason is FinishReason.LENGTH:
            assert total == useful
        elif bearer.reason is FinishReason.STOP:
            assert useful <= total <= useful + self.driver.executor.most_in_flight - 1

    def counts(self) -> Counter[str]:
        scheduler, plans = self.driver.scheduler, self.driver.executor.plans
        seen = Counter(str(bearer.reason) for bearer in self.driver.bearers)
        seen["steps"] = len(plans)
        seen["corrupted"] = scheduler.stats.num_corrupted
        seen["preemptions"] = scheduler.stats.num_preemptions
        seen["drafts"] = scheduler.stats.num_draft_tokens
        seen["accepted"] = scheduler.stats.num_accepted_tokens
        seen["hits"] = scheduler.stats.prefix_hit_tokens
        seen["evictions"] = scheduler.kv.pool.num_evictions
        seen["chunks"] = sum(bool((p.num_tokens > 1).any()) for p in plans if not p.added)
        seen.update(name for name, _ in self.answers)
        seen["run ahead"] = self.driver.executor.most_in_flight - self.driver.depth
        for bearer in self.driver.bearers:
            if bearer.ending is not None and bearer.ending.vector is not None:
                assert bearer.request.pooling is not None
                seen[f"vector {bearer.request.pooling.kind.name}"] += 1
                seen["vector after a hit"] += bearer.num_cached_tokens > 0
                seen["vector after a preemption"] += len(bearer.residencies) > 1
        seen["cut"] = sum(cut in bearer.tokens for bearer, cut in self.cuts.items())
        names = Counter(bearer.request.request_id for bearer in self.driver.bearers)
        seen["names used again"] = sum(count - 1 for count in names.values())
        return seen


@pytest.mark.parametrize(
    "first", range(0, NUM_SCHEDULES, SCHEDULES_PER_TEST), ids=lambda seed: f"seed-{seed}"
)
def test_random_schedules_give_what_each_request_gives_alone(first: int) -> None:
    """Depths 1 to 8, one of each; `step` checks the engine's integrity every time."""
    for seed in range(first, first + SCHEDULES_PER_TEST):
        schedule = Schedule(seed)
        print(f"seed={seed} {schedule.setting}")  # pytest shows it when the test fails
        schedule.run()
        schedule.check()


@pytest.mark.parametrize(
    "first", range(0, NUM_DEEP_SCHEDULES, SCHEDULES_PER_TEST), ids=lambda seed: f"deep-{seed}"
)
def test_schedules_that_run_far_ahead_give_the_same(first: int) -> None:
    """The queue grows, and is given up, cut short or failed at any length."""
    for seed in range(first, first + SCHEDULES_PER_TEST):
        schedule = Schedule(seed, is_deep=True)
        print(f"seed={seed} {schedule.setting}")
        schedule.add()
        schedule.run()
        schedule.check()


def test_the_schedules_reach_what_they_are_for() -> None:
    totals: Counter[str] = Counter()
    for seed in range(16):
        schedule = Schedule(seed)
        schedule.run()
        totals += schedule.counts()
    assert totals["steps"] > 600
    wanted = {"stop", "length", "abort", "error", "preemptions", "hits", "evictions", "chunks"}
    wanted |= {"reset True", "reset False", "run ahead", *(f"pause {mode}" for mode in MODES)}
    wanted |= {"vector LAST", "vector MEAN", "vector CLS"}
    wanted |= {"vector after a hit", "vector after a preemption"}
    wanted |= {"cut", "names used again", "corrupted", "drafts", "accepted"}
    assert wanted <= set(totals), totals
    deepest = []
    for seed in range(8):
        schedule = Schedule(seed, is_deep=True)
        schedule.add()
        schedule.run()
        deepest.append(schedule.driver.executor.most_in_flight)
    assert max(deepest) == MAX_STEPS_IN_FLIGHT, deepest
