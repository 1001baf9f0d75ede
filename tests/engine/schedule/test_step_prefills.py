"""The events' account of each request's part in a step, against the plan."""

from __future__ import annotations

import random

import numpy as np
import pytest
from core_harness import CoreDriver

from termgen.engine.loop.snapshot import copy_state
from termgen.tui.dashboard.state.request_history import Doing, RequestHistory, token_times
from termgen.vocabulary.events import RequestEvent, RequestEventKind, StepRecord
from termgen.vocabulary.model_info import GraphStatus
from termgen.vocabulary.sampling_params import SamplingParams
from termgen.vocabulary.structured_outputs import StructuredOutputsParams


def run_load(driver: CoreDriver, seed: int, num_requests: int = 40) -> RequestHistory:
    """Random requests; checks every step's record against its plan, and returns the lanes."""
    chance = random.Random(seed)
    ring = driver.core.bus.subscribe(100_000)
    book, submitted = RequestHistory(), 0
    plans_seen = 0
    while submitted < num_requests or driver.core.has_work:
        if submitted < num_requests and chance.random() < 0.4:
            prompt = [chance.randrange(2, 30) for _ in range(chance.choice((3, 20, 90)))]
            driver.submit(f"r{submitted}", prompt, max_tokens=chance.randrange(1, 20))
            submitted += 1
        driver.step()
        for event in ring.drain():
            if isinstance(event, RequestEvent):
                book.add_event(event)
                continue
            plan = driver.executor.plans[plans_seen]
            plans_seen += 1
            assert plan.step_id == event.step_id
            counts = sorted(event.prefill_tokens)
            assert len(event.prefill_ids) == len(set(event.prefill_ids)) == len(counts)
            assert sum(counts) + plan.num_rows - len(counts) == plan.total_tokens
            assert set(plan.num_tokens[plan.num_tokens > 1].tolist()) <= set(counts)
            book.add_step(event)
            check_lanes(book, event, seed)
    return book


def check_lanes(book: RequestHistory, record: StepRecord, seed: int) -> None:
    doing = [history.doing(record.step_id) for history in book]
    assert doing.count(Doing.PREFILL) == record.num_prefill_rows, (seed, record)
    assert doing.count(Doing.DECODE) == record.num_decode_rows, (seed, record)


@pytest.mark.parametrize("seed", range(3))
def test_lanes_say_what_the_plans_did(seed: int) -> None:
    driver = CoreDriver(depth=1, stops=False, max_num_batched_tokens=32, max_model_len=128)
    book = run_load(driver, seed)
    assert len(list(book)) == 40
    for history in book:
        bearer = next(b for b in driver.bearers if b.request.request_id == history.request_id)
        computed = sum(chunk.num_tokens for chunk in history.chunks)
        assert computed + history.num_cached_tokens == history.num_prompt_tokens, seed
        assert history.num_output_tokens == len(bearer.tokens), seed
        decodes = sum(
            history.doing(s) is Doing.DECODE for s in range(driver.core.scheduler.newest_step + 1)
        )
        assert decodes == len(bearer.tokens) - 1, seed
        assert 0 < history.queued_ns <= history.scheduled_ns <= history.first_token_ns
        assert history.first_token_ns <= history.finished_ns and history.reason == "length"


def test_nothing_is_collected_when_nobody_listens() -> None:
    driver = CoreDriver(depth=1)
    driver.submit("a", [5] * 10, max_tokens=3)
    driver.step()
    record = driver.core._last_record
    assert record is not None and record.prefill_ids == () and record.num_prefill_tokens == 10


def test_a_request_that_ends_with_its_prompt_is_told_of_too() -> None:
    driver = CoreDriver(depth=2, stops=False)
    ring = driver.core.bus.subscribe()
    driver.submit("one", [5] * 10, max_tokens=1)
    driver.run()
    steps = [e for e in ring.drain() if isinstance(e, StepRecord)]
    assert (steps[0].prefill_ids, steps[0].prefill_tokens) == (("one",), (10,))


def test_parameters_are_told_without_any_text() -> None:
    driver = CoreDriver(depth=1, stops=False)
    ring = driver.core.bus.subscribe()
    driver.submit("a", [5] * 4, max_tokens=3, temperature=0.5, stop=("secret",), ignore_eos=True)
    driver.submit("b", [5] * 4, max_tokens=2)
    driver.core._read_inbox()
    queued = [e for e in ring.drain() if isinstance(e, RequestEvent)]
    assert [e.kind for e in queued] == [RequestEventKind.QUEUED] * 2
    assert queued[0].detail == "temperature 0.5 stop (1) ignore_eos True max_tokens 3"
    assert queued[1].detail == "max_tokens 2"
    assert SamplingParams().describe() == ""
    form = StructuredOutputsParams(regex="[a-z]{3}")
    every = SamplingParams(
        temperature=0.5,
        max_tokens=3,
        stop=("a", "b"),
        logit_bias={5: 1.0},
        allowed_token_ids=(5, 6),
        bad_words=("no",),
        structured_outputs=form,
        ignore_eos=True,
    ).describe()
    for words in ("temperature 0.5", "stop (2)", "structured_outputs (regex)", "ignore_eos True"):
        assert words in every
    assert "[a-z]" not in every and "no" not in every.split()


def test_the_queue_says_what_its_first_lacks() -> None:
    driver = CoreDriver(
        depth=1, stops=False, max_num_seqs=2, num_blocks=20, max_num_batched_tokens=16
    )

    def reason(paused: bool = False) -> str:
        driver.core._read_inbox()
        state = copy_state(
            driver.scheduler,
            record=None,
            plan=driver.executor.plans[-1] if driver.executor.plans else None,
            last_progress_ns=0,
            graphs=GraphStatus(0, 0),
            paused=paused,
            sleep_level=0,
        )
        return state.snapshot().waiting_reason

    assert reason() == ""
    driver.submit("a", [5] * 40, max_tokens=20)
    assert reason() == "next step" and reason(paused=True) == "the engine is paused"
    driver.step()
    driver.submit("b", [6] * 8, max_tokens=20)
    assert reason() == "token budget spent"
    driver.submit("c", [7] * 50, max_tokens=20)
    for _ in range(4):
        driver.step()
    assert reason() == "all places taken"
    driver.abort("b")
    driver.core.step()
    assert reason() in ("not enough free KV blocks", "next step", "")
    driver.run()
    assert reason() == ""


@pytest.mark.parametrize("seed", range(2))
def test_a_preempted_request_is_seen_to_lose_its_place_and_come_back(seed: int) -> None:
    driver = CoreDriver(depth=1, stops=False, num_blocks=24, max_num_seqs=4)
    ring, book = driver.core.bus.subscribe(10_000), RequestHistory()
    for i in range(4):
        driver.submit(
            f"r{i}", np.random.default_rng([seed, i]).integers(2, 30, 12).tolist(), max_tokens=40
        )
    steps: list[StepRecord] = []
    while driver.core.has_work:
        driver.step()
        for event in ring.drain():
            if isinstance(event, RequestEvent):
                book.add_event(event)
            else:
                book.add_step(event)
                steps.append(event)
                check_lanes(book, event, seed)
    lost = [history for history in book if history.preemptions]
    assert lost and steps[-1].num_preemptions == sum(len(h.preemptions) for h in lost)
    for history in lost:
        assert Doing.PREEMPTED in history.run_kinds
        assert history.preemptions[0][1] == "out of KV blocks"
        after = history.run_kinds[history.run_kinds.index(Doing.PREEMPTED) :]
        assert after[-1] is Doing.OVER and {Doing.PREFILL, Doing.DECODE} & set(after)
        assert len(token_times(history, steps)) <= history.num_output_tokens
