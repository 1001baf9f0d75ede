"""Random traffic against a scripted device, compared with each request run alone.

Every choice comes from the seed in the test's name: rerun one with `-k "seed-17"`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from scheduler_harness import (
    Driver,
    draw_state_places,
    draw_windows,
    make_request,
    make_scheduler,
    reference_tokens,
)
from scripted_device import VOCAB

from termgen.engine.schedule.invariants import check_scheduler
from termgen.vocabulary.cache_groups import blocks_of_context
from termgen.vocabulary.request import FinishReason, Request

NUM_SEEDS = 48
NUM_ACTIONS = 120


@dataclass(frozen=True)
class Traffic:
    """The traffic of one seed, drawn once."""

    p_add: float
    p_abort: float
    p_fail: float
    p_reset: float
    p_unread: float
    p_pause: float
    max_prompt: int
    max_tokens: int
    p_shared: float


class Soak:
    def __init__(self, seed: int) -> None:
        self.rng = rng = np.random.default_rng(seed)
        block_size = int(rng.choice([1, 2, 4, 8]))
        max_num_seqs = int(rng.integers(1, 9))
        self.traffic = Traffic(
            p_add=float(rng.choice([0.1, 0.4, 0.8])),
            p_abort=float(rng.choice([0.0, 0.02, 0.1])),
            p_fail=float(rng.choice([0.0, 0.0, 0.03])),
            p_reset=float(rng.choice([0.0, 0.05])),
            p_unread=float(rng.choice([0.0, 0.0, 0.2])),
            p_pause=float(rng.choice([0.0, 0.0, 0.1])),
            max_prompt=int(rng.choice([8, 30, 60])),
            max_tokens=int(rng.choice([4, 20, 40])),
            p_shared=float(rng.choice([0.0, 0.5, 0.9])),
        )
        longest = self.traffic.max_prompt + self.traffic.max_tokens
        windows = draw_windows(np.random.default_rng([seed, 2]))
        # So that every request can run alone.
        smallest = blocks_of_context(longest, block_size, windows) + 1
        num_blocks = smallest + int(rng.choice([0, 2, smallest, 5 * smallest]))
        depth = int(rng.integers(1, 9))
        self.policy = str(rng.choice(["fcfs", "priority"]))
        self.setting = {
            "num_blocks": num_blocks,
            "block_size": block_size,
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": max_num_seqs + int(rng.choice([0, 3, 20, 200])),
            "max_model_len": longest,
            "threshold": int(rng.choice([0, 0, 1, 3, 7, 16])),
            "policy": self.policy,
            "caching": bool(rng.random() < 0.8),
            "adaptive": bool(rng.random() < 0.5),
            "windows": windows,
        }
        # A device that is not said to keep copies is not recurrent.
        places = draw_state_places(np.random.default_rng([seed, 3])) * self.setting["caching"]
        self.setting["state_places"] = places
        self.driver = Driver(
            make_scheduler(**self.setting),  # type: ignore[arg-type]
            depth=depth,
            state_places=places,
            stops=bool(rng.random() < 0.7),
            step_ns=lambda plan: int(rng.integers(0, 5) + rng.choice([0, 1]) * plan.total_tokens),
        )
        self.prefixes = [rng.integers(0, VOCAB, longest).tolist() for _ in range(3)]
        self.num_added = 0

    def describe(self) -> str:
        return f"depth={self.driver.depth} {self.setting} {self.traffic}"

    def prompt(self) -> list[int]:
        rng = self.rng
        length = int(rng.integers(1, self.traffic.max_prompt + 1))
        fresh = rng.integers(0, VOCAB, length).tolist()
        if rng.random() >= self.traffic.p_shared:
            return fresh
        past = [r for r in self.driver.records.values() if r.finish_reason is not None]
        if past and rng.random() < 0.4:  # the next turn of a conversation
            turn = past[int(rng.integers(len(past)))].token_ids.tolist()
            return (turn + fresh[:3])[: self.traffic.max_prompt]
        keep = int(rng.integers(0, length + 1))
        prefix = self.prefixes[int(rng.integers(len(self.prefixes)))]
        return prefix[:keep] + fresh[keep:]

    def add(self) -> None:
        rng = self.rng
        max_tokens = int(rng.integers(1, self.traffic.max_tokens + 1))
        num_stops = int(rng.choice([0, 0, 1, 3, 12]))
        request = make_request(
            f"r{self.num_added}",
            self.prompt(),
            max_tokens=max_tokens,
            stop=rng.choice(VOCAB, num_stops, replace=False).tolist(),
            eos=() if rng.random() < 0.5 else (7,),
            min_tokens=int(rng.integers(0, max_tokens + 1)) if rng.random() < 0.3 else 0,
            priority=int(rng.integers(-2, 3)),
            arrival_ns=int(rng.integers(0, 4)) if rng.random() < 0.5 else self.num_added,
            salt=str(rng.choice(["a", "b"])) if rng.random() < 0.2 else None,
        )
        self.num_added += 1
        self.driver.add(request)

    def run(self) -> None:
        rng, traffic, driver = self.rng, self.traffic, self.driver
        for _ in range(NUM_ACTIONS):
            while rng.random() < traffic.p_add and len(driver.scheduler.waiting) < 12:
                self.add()
            if rng.random() < traffic.p_abort and driver.scheduler.requests:
                driver.abort(str(rng.choice(sorted(driver.scheduler.requests))))
            if rng.random() < traffic.p_reset:
                driver.scheduler.reset_prefix_cache()
                check_scheduler(driver.scheduler)
            if rng.random() < traffic.p_unread and driver.scheduler.requests:
                names = rng.choice(sorted(driver.scheduler.requests), size=2).tolist()
                driver.scheduler.set_unread(names, bool(rng.random() < 0.6))
            if rng.random() < traffic.p_pause:
                driver.scheduler.admits_new = not driver.scheduler.admits_new
            if rng.random() < 0.15 and driver.in_flight:
                driver.land()  # a burst of results: the run-ahead shrinks and grows again
            driver.step(fails=bool(rng.random() < traffic.p_fail))
        driver.scheduler.admits_new = True
        driver.run()
        driver.assert_drained()

    def check(self) -> None:
        for request_id, record in self.driver.records.items():
            expected = reference_tokens(record)
            output, reason = self.driver.outputs[request_id], self.driver.reasons[request_id]
            if reason in (FinishReason.ABORT, FinishReason.ERROR):
                assert output == expected[: len(output)], request_id
                continue
            assert output == expected, request_id
            assert reason is expected_reason(record, expected), request_id


def expected_reason(record: Request, output: list[int]) -> FinishReason:
    stops = output[-1] in record.stop_token_ids and len(output) > record.params.min_tokens
    return FinishReason.STOP if stops else FinishReason.LENGTH


def counts_of(soak: Soak) -> dict[str, int]:
    scheduler = soak.driver.scheduler
    reasons = list(soak.driver.reasons.values())
    return {
        "steps": len(soak.driver.plans),
        "preemptions": scheduler.stats.num_preemptions,
        "hits": scheduler.stats.prefix_hit_tokens,
        "evictions": scheduler.kv.pool.num_evictions,
        "chunked": sum(
            int((p.num_tokens > 1).any()) for p in soak.driver.plans if len(p.added) == 0
        ),
    } | {str(reason): reasons.count(reason) for reason in FinishReason}


@pytest.mark.parametrize("seed", range(NUM_SEEDS), ids=lambda seed: f"seed-{seed}")
def test_random_traffic_gives_reference_tokens(seed: int) -> None:
    soak = Soak(seed)
    print(f"seed={seed} {soak.describe()}")  # pytest shows it when the test fails
    soak.run()
    soak.check()


def test_the_soak_reaches_what_it_is_for() -> None:
    """A fuzz test without preemptions, hits, evictions, failures or chunks proves nothing."""
    totals: dict[str, int] = {}
    for seed in range(12):
        soak = Soak(seed)
        soak.run()
        for name, count in counts_of(soak).items():
            totals[name] = totals.get(name, 0) + count
    assert totals["steps"] > 1000
    assert all(count > 0 for count in totals.values()), totals
