"""Steps with drafts through the whole loop: what stays, what it saves, and what has none."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from constrained_harness import ConstrainedDriver, FakeGrammar
from core_harness import Bearer, CoreDriver
from scripted_device import next_token

from termgen.vocabulary.events import RequestEvent, RequestEventKind
from termgen.vocabulary.step import StepDelivery, StepPlan

DEPTHS = (1, 2, 5)


def driver_of(depth: int, num_drafts: int, num_right: int, **settings: object) -> CoreDriver:
    """Its device guesses the next `num_right` tokens rightly each time, and no further one."""
    driver = CoreDriver(depth=depth, num_drafts=num_drafts, **settings)  # type: ignore[arg-type]
    device = driver.executor.device

    def guess(slot: int) -> None:
        length, ids = int(device.num_tokens[slot]), device.token_ids[slot]
        for place in range(length, min(length + num_drafts, len(ids))):
            right = next_token(ids[:place], device.vocab)
            ids[place] = right if place < length + num_right else (right + 1) % device.vocab

    device._guess = guess  # type: ignore[method-assign]
    return driver


def decodes(driver: CoreDriver) -> list[StepPlan]:
    return [plan for plan in driver.executor.plans if plan.is_decode]


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("num_right", [0, 2, 4])
def test_a_step_keeps_the_right_drafts_and_one_token_more(depth: int, num_right: int) -> None:
    driver = driver_of(depth, 4, num_right)
    one, two = driver.submit("one", [1, 2, 3], max_tokens=60), driver.submit("two", [4], n=1)
    driver.abort("two")
    driver.run()
    assert one.tokens == driver.reference(one) and not two.tokens
    stats = driver.scheduler.stats
    assert stats.generation_tokens == 60
    num_steps = sum(plan.num_rows for plan in decodes(driver))
    # The first token comes from the prompt; at the end there is no room for all drafts.
    fewest = -(-59 // (1 + num_right))
    assert fewest <= num_steps <= fewest + 4
    assert stats.num_accepted_tokens == 59 - num_steps
    assert stats.num_draft_tokens == sum(plan.num_drafts for plan in driver.executor.plans)
    assert stats.num_drafts == sum(plan.num_drafts > 0 for plan in decodes(driver))
    drafts = [plan.num_drafts for plan in decodes(driver)]
    assert stats.drafted_per_pos == tuple(sum(n > i for n in drafts) for i in range(4))
    accepted = stats.accepted_per_pos
    assert len(accepted) == 4 and sum(accepted) == stats.num_accepted_tokens
    for position, (made, kept) in enumerate(zip(stats.drafted_per_pos, accepted, strict=True)):
        assert kept == (made if position < num_right else 0)
    driver.assert_drained()


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("declines", [0.5, 1.0])
def test_a_device_may_compute_fewer_drafts_than_there_are_places(
    depth: int, declines: float
) -> None:
    driver = driver_of(depth, 4, 2)
    driver.executor.device.declines = declines
    bearers = [driver.submit(f"{i}", [i, 1], max_tokens=30 + i) for i in range(3)]
    driver.run()
    for bearer in bearers:
        assert bearer.tokens == driver.reference(bearer)
    stats = driver.scheduler.stats
    assert (stats.num_accepted_tokens > 0) == (declines < 1.0) == (stats.num_draft_tokens > 0)
    driver.assert_drained()


@pytest.mark.parametrize("depth", DEPTHS)
def test_rows_under_a_grammar_have_no_guesses(depth: int) -> None:
    """The host masks one place of a row, and what is forced before it, which here is nothing."""
    driver = ConstrainedDriver(depth=depth, num_drafts=3)
    plain = driver.submit("plain", [1, 2, 3], max_tokens=30)
    bound = driver.constrain("bound", [4, 5], FakeGrammar(25), max_tokens=30)
    driver.run()
    by_slot = {bearer.residencies[0][0]: bearer for bearer in (plain, bound)}
    drafts = dict.fromkeys(by_slot.values(), 0)
    for plan in driver.executor.plans:
        for slot, count in zip(plan.slots.tolist(), plan.num_draft_tokens.tolist(), strict=True):
            drafts[by_slot[slot]] += count
    assert drafts[plain] > 0 == drafts[bound]
    for bearer in (plain, bound):
        assert bearer.tokens == driver.reference(bearer)


def test_drafts_take_no_token_of_the_budget_from_others() -> None:
    """Eight rows, 19 tokens a step: one draft each, and prompts with what is left."""
    driver = driver_of(1, 6, 6, max_num_batched_tokens=19)
    for i in range(8):
        driver.submit(str(i), [i, 1], max_tokens=40)
    for _ in range(6):
        driver.step()
    full = [plan for plan in decodes(driver) if plan.num_rows == 8]
    assert full and all(plan.num_draft_tokens.tolist() == [1] * 8 for plan in full)
    assert all(plan.total_tokens <= 19 for plan in driver.executor.plans)
    driver.run()
    for bearer in driver.bearers:
        assert bearer.tokens == driver.reference(bearer)


def test_no_request_is_preempted_for_a_guess() -> None:
    """Blocks for every token that two requests ever know, and not for the drafts beyond."""
    settings = {"num_blocks": 1 + 2 * 12, "block_size": 1, "max_model_len": 12}
    driver = driver_of(1, 5, 0, **settings)
    for i in range(2):
        driver.submit(str(i), [i, 1], max_tokens=10)
    driver.run()
    assert driver.scheduler.stats.num_preemptions == 0
    assert any(plan.num_drafts for plan in driver.executor.plans)
    for bearer in driver.bearers:
        assert bearer.tokens == driver.reference(bearer)


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_drafter_has_blocks_ahead_of_its_rows(depth: int) -> None:
    """For as many positions as it computes behind a step's, as far as a request may come."""
    driver = driver_of(depth, 2, 1, num_ahead=5, block_size=2, windows=(None, 6))
    for i, num_prompt in enumerate((1, 4, 9)):
        driver.submit(str(i), [i] * num_prompt, max_tokens=20)
    table, kv = driver.scheduler.slots, driver.scheduler.kv
    while driver.core.has_work:
        driver.step()
        for slot in table.running.tolist():
            if table.last_step[slot] == driver.scheduler.newest_step:
                needed = min(int(table.num_computed[slot]) + 5, int(table.limit[slot]) - 1)
                assert (kv.num_blocks[:, slot] * 2 >= needed).all()
    for bearer in driver.bearers:
        assert bearer.tokens == driver.reference(bearer)
    driver.assert_drained()


def test_no_request_is_preempted_for_blocks_ahead() -> None:
    settings = {"num_blocks": 1 + 2 * 12, "block_size": 1, "max_model_len": 12}
    driver = driver_of(1, 3, 0, num_ahead=4, **settings)
    for i in range(2):
        driver.submit(str(i), [i, 1], max_tokens=10)
    driver.run()
    assert driver.scheduler.stats.num_preemptions == 0
    for bearer in driver.bearers:
        assert bearer.tokens == driver.reference(bearer)


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_stop_token_among_the_drafts_ends_the_answer_there(depth: int) -> None:
    for first in itertools.count():
        driver = driver_of(depth, 6, 6)
        bearer = driver.submit("x", [first, 2], max_tokens=40)
        answer = driver.reference(bearer)
        stop = answer[9]
        if answer.index(stop) == 9:
            break
    driver = driver_of(depth, 6, 6)
    bearer = driver.submit("x", [first, 2], max_tokens=40, stop_token_ids=(stop,))
    driver.run()
    assert bearer.tokens == answer[:10]
    assert bearer.ending is not None and bearer.ending.stop_token_id == stop
    driver.assert_drained()


@pytest.mark.parametrize("depth", DEPTHS)
def test_each_token_comes_with_its_own_log_probabilities(depth: int) -> None:
    driver = driver_of(depth, 3, 2)
    bearer = driver.submit("x", [3, 1], max_tokens=25, logprobs=1)
    driver.run()  # the driver checks the row of each
    assert len(bearer.tokens) == bearer.num_logprobs == 25


def test_a_shared_prefix_holds_no_rejected_draft() -> None:
    driver = driver_of(2, 5, 1, block_size=2)
    bearer = driver.submit("x", [3, 1, 4, 1, 5], max_tokens=30)
    driver.run()
    history = [3, 1, 4, 1, 5, *bearer.tokens]
    again = driver.submit("y", history, max_tokens=10)
    driver.run()
    assert again.num_cached_tokens >= len(history) - 3
    assert again.tokens == driver.reference(again)


@pytest.mark.parametrize("depth", DEPTHS)
def test_each_request_knows_what_became_of_its_drafts(depth: int) -> None:
    """Also over preemptions: there are blocks for one whole answer and a half."""
    driver = driver_of(depth, 4, 2, num_blocks=1 + 60, block_size=1, max_model_len=42)
    events = driver.core._publisher._bus.subscribe()
    deliveries: list[StepDelivery] = []
    deliver = driver.core._on_delivery

    def read(news: StepDelivery) -> None:
        deliveries.append(news)
        deliver(news)

    driver.core._on_delivery = read
    bearers = [driver.submit(name, [i, 1], max_tokens=40) for i, name in enumerate("ab")]
    driver.run()
    stats = driver.scheduler.stats
    assert stats.num_preemptions > 0 and stats.num_accepted_tokens > 20
    counts = {}
    for bearer in bearers:
        assert bearer.tokens == driver.reference(bearer) and bearer.ending is not None
        counts[bearer.request.request_id] = drafted, accepted = bearer.ending.drafts
        own = set(bearer.residencies)
        news = [
            (0 if step.num_drafted is None else int(step.num_drafted[row]), int(num_tokens))
            for step in deliveries
            for row, num_tokens in enumerate(step.num_tokens)
            if (int(step.slots[row]), int(step.epochs[row])) in own
        ]
        assert drafted == sum(num_drafted for num_drafted, _ in news) > accepted
        assert accepted == len(bearer.tokens) - len(news)
    assert sum(drafted for drafted, _ in counts.values()) == stats.num_draft_tokens
    assert sum(accepted for _, accepted in counts.values()) == stats.num_accepted_tokens
    ended = {
        event.request_id: (event.num_draft_tokens, event.num_accepted_tokens)
        for event in events.drain()
        if isinstance(event, RequestEvent) and event.kind is RequestEventKind.FINISHED
    }
    assert ended == counts


def test_a_view_of_a_running_request_counts_its_drafts() -> None:
    driver = driver_of(1, 3, 1)
    driver.submit("x", [3, 1], max_tokens=40)
    for _ in range(9):
        driver.step()
    (view,) = driver.core.copy_state().snapshot().requests
    stats = driver.scheduler.stats
    counted = (view.num_draft_tokens, view.num_accepted_tokens)
    assert counted == (stats.num_draft_tokens, stats.num_accepted_tokens)
    assert view.num_draft_tokens > view.num_accepted_tokens > 3
    assert (view.status, view.num_scheduled_tokens) == ("decode", 4), "its drafts are no prompt"


RUNS = {2, 3, 4, 5, 6, 7, 12, 13, 14, 20, 21, 22, 23}
"""Indices of forced tokens in an answer of 26."""


def steps_of(driver: CoreDriver, bearer: Bearer) -> int:
    """Steps that computed a row."""
    slots = [slot for slot, _ in bearer.residencies]
    return sum(bool(np.isin(plan.slots, slots).any()) for plan in driver.executor.plans)


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("num_drafts", [0, 3])
def test_what_a_grammar_forces_takes_a_step_together(depth: int, num_drafts: int) -> None:
    driver = ConstrainedDriver(depth=depth, num_drafts=num_drafts, most_forced=16)
    bound = driver.constrain("bound", [4, 5], FakeGrammar(26, forced=RUNS), max_tokens=40)
    driver.run()
    assert bound.tokens == driver.reference(bound) and len(bound.tokens) == 26
    # A step ahead knows what is forced behind a token that has landed: of each run one token is
    # computed singly, and one more while another thread still looks for it.
    saved = driver.device.num_forced
    assert saved == len(RUNS) if depth == 1 else len(RUNS) - 6 <= saved <= len(RUNS) - 3
    # And one behind the last token, which only the grammar knows to be that.
    assert steps_of(driver, bound) == 26 - saved + (depth > 1)
    stats = driver.scheduler.stats
    assert (stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens) == (0, 0, 0)
    assert stats.num_forced_tokens == saved
    assert bound.ending is not None and bound.ending.drafts == (0, 0)
    driver.assert_drained()


@pytest.mark.parametrize("depth", DEPTHS)
def test_without_room_for_them_forced_tokens_come_one_by_one(depth: int) -> None:
    driver = ConstrainedDriver(depth=depth, most_forced=0)
    bound = driver.constrain("bound", [4, 5], FakeGrammar(26, forced=RUNS), max_tokens=40)
    driver.run()
    assert bound.tokens == driver.reference(bound)
    assert steps_of(driver, bound) == 26 + (depth > 1)


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("most_forced", [2, 5])
def test_a_long_run_of_forced_tokens_takes_several_steps(depth: int, most_forced: int) -> None:
    driver = ConstrainedDriver(depth=depth, most_forced=most_forced)
    bound = driver.constrain("bound", [4], FakeGrammar(40, forced=range(1, 39)), max_tokens=60)
    driver.run()
    assert bound.tokens == driver.reference(bound)
    saved = driver.device.num_forced
    assert steps_of(driver, bound) == 40 - saved + (depth > 1)
    # Each is computed with the token before it, and the one behind it, which is forced as well; a
    # step ahead loses some.
    lost = 1 if depth == 1 else 5
    assert saved >= 38 * most_forced // (most_forced + lost) - lost


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("max_tokens", [5, 6, 7, 8, 9])
def test_an_answer_ends_in_the_middle_of_what_is_forced(depth: int, max_tokens: int) -> None:
    driver = ConstrainedDriver(depth=depth, most_forced=16)
    grammar = FakeGrammar(26, forced=RUNS)
    bound = driver.constrain("bound", [4, 5], grammar, max_tokens=max_tokens)
    answer = driver.reference(driver.constrain("whole", [4, 5], grammar, max_tokens=26))
    stop = answer[max_tokens - 1]
    stopped = driver.constrain("stopped", [4, 5], grammar, stop_token_ids=(stop,), max_tokens=26)
    driver.run()
    assert bound.tokens == answer[:max_tokens] == driver.reference(bound)
    assert stopped.tokens == driver.reference(stopped) and stopped.tokens[-1] == stop
    driver.assert_drained()


@pytest.mark.parametrize("depth", DEPTHS)
def test_forced_tokens_and_guesses_share_steps(depth: int) -> None:
    """Only guesses are counted as such."""
    driver = ConstrainedDriver(depth=depth, num_drafts=3, most_forced=8)
    plain = driver.submit("plain", [1, 2, 3], max_tokens=40)
    bound = driver.constrain("bound", [4, 5], FakeGrammar(26, forced=RUNS), max_tokens=40)
    driver.run()
    for bearer in (plain, bound):
        assert bearer.tokens == driver.reference(bearer) and bearer.ending is not None
    assert driver.device.num_forced > 5
    stats = driver.scheduler.stats
    assert plain.ending is not None and bound.ending is not None
    assert plain.ending.drafts == (stats.num_draft_tokens, stats.num_accepted_tokens)
    assert stats.num_accepted_tokens > 0 and bound.ending.drafts == (0, 0)


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_preempted_row_goes_on_within_what_is_forced(depth: int) -> None:
    """There are blocks for one whole answer and a half."""
    settings = {"num_blocks": 1 + 60, "block_size": 1, "max_model_len": 42}
    driver = ConstrainedDriver(depth=depth, most_forced=4, **settings)
    grammar = FakeGrammar(38, forced={*range(2, 36)} - {9, 19, 29})
    bearers = [driver.constrain(name, [i, 1], grammar) for i, name in enumerate("ab")]
    driver.run()
    assert driver.scheduler.stats.num_preemptions > 0 and driver.device.num_forced > 20
    for bearer in bearers:
        assert bearer.tokens == driver.reference(bearer) and len(bearer.tokens) == 38
    driver.assert_drained()
