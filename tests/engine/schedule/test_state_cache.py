"""Copies of recurrent states: where they are made, what finds them, which place is free."""

from __future__ import annotations

import numpy as np
import pytest
from core_harness import CoreDriver
from scheduler_harness import Driver, make_request, make_scheduler

from termgen.engine.schedule.state_cache import LEAST_APART, LONG_STEP, MARGIN, StateCache
from termgen.vocabulary.request import TurnEnds

SIZE = 4


def make_states(num_places: int = 3) -> StateCache:
    return StateCache(block_size=SIZE, max_num_seqs=4, first_place=5, num_places=num_places)


def make_driver(*, num_places: int = 8, depth: int = 1, **setting: int) -> Driver:
    scheduler = make_scheduler(block_size=SIZE, state_places=num_places, **setting)
    return Driver(scheduler, depth=depth, state_places=num_places)


def ask(driver: Driver, name: str, prompt: list[int], max_tokens: int = 5) -> list[int]:
    """The tokens of one request, which are those of the reference."""
    driver.add(make_request(name, prompt, max_tokens=max_tokens))
    driver.run()
    driver.assert_reference()
    return driver.outputs[name]


def cached(driver: Driver, name: str) -> int:
    return driver.records[name].num_cached_tokens


def test_prompts_are_cut_where_their_states_are_copied() -> None:
    states = make_states()
    states.occupy(2, make_request("long", range(50)))
    states.occupy(3, make_request("short", range(MARGIN)))
    cut = (50 - 1 - MARGIN) // SIZE * SIZE
    assert states.cuts[0].tolist() == [0, 0, cut, 0] and not states.cuts[1:].any()
    slots = np.asarray([2, 2, 2, 3], np.int32)
    computed = np.asarray([0, cut, 48, LONG_STEP - 3], np.int32)
    new = np.asarray([50, 10, 2, 20], np.int32)
    assert states.cut(slots, computed, new).tolist() == [cut, 10, 2, 3]


def test_a_chats_prompt_is_cut_where_its_turns_end() -> None:
    states = make_states()
    last, question, previous = 300 + SIZE - 1, 302 - LEAST_APART, 300 - LEAST_APART + SIZE
    ends = TurnEnds(last=last, question=question, previous=previous, system=90)
    states.occupy(1, make_request("chat", range(310), turn_ends=ends))
    cuts = sorted(set(states.cuts[:, 1].tolist()))
    assert cuts == [0, 88, question // SIZE * SIZE, 300], "`previous` is too near to the end"
    computed = np.asarray([0, 88, 100, 299, 300], np.int32)
    slots = np.ones(5, np.int32)
    stops = computed + states.cut(slots, computed, np.full(5, 310, np.int32) - computed)
    assert stops.tolist() == [88, cuts[2], cuts[2], 300, 310]
    due, ends = states.due(slots, computed, np.full(5, 310, np.int32), computed)
    assert due.tolist() == [1, 4] and ends[due].tolist() == [88, 300]
    states.vacate(1)
    assert not states.cuts.any()


def test_what_a_live_conversation_starts_from_is_given_away_last() -> None:
    driver = make_driver(num_places=4)
    system = list(range(LEAST_APART + 1))
    for turn in range(9):
        talk = [*system, *[50 + turn] * (LEAST_APART + 10)]
        ends = TurnEnds(last=len(talk) - 5, system=len(system))
        driver.add(make_request(f"{turn}", talk, max_tokens=1, turn_ends=ends))
        driver.run()
        assert cached(driver, f"{turn}") == (LEAST_APART if turn else 0)


@pytest.mark.parametrize("num_places", [1, 2, 3])
def test_an_answer_leaves_the_copy_of_its_prompt(num_places: int) -> None:
    """Few requests at once mean few places, and the next prompt may not have the answer."""
    driver = make_driver(num_places=num_places)
    for turn in range(4):
        prompt = [*range(60), *range(turn)]
        ends = TurnEnds(last=len(prompt))
        driver.add(make_request(f"{turn}", [*prompt, 7, 8], max_tokens=30, turn_ends=ends))
        driver.run()
        assert cached(driver, f"{turn}") == (60 if turn else 0)


def test_an_answer_leaves_the_copies_of_other_prompts_that_run() -> None:
    states = make_states(1)
    place = states.copy(0, 4, is_answer=False)
    states.publish(0, 1, [b"a"])
    assert states.copy(1, 8, is_answer=True) is None
    states.vacate(0)
    assert states.copy(1, 8, is_answer=True) == place and not len(states)


def test_the_newest_copy_of_a_chain_is_found() -> None:
    states = make_states()
    hashes = [b"a", b"b", b"c"]
    assert states.find(hashes) == (0, -1)
    first, second = (states.copy(0, position, is_answer=False) for position in (4, 12))
    states.publish(0, 2, hashes)
    assert states.find(hashes) == (1, first), "not all tokens of the other are known"
    states.publish(0, 3, hashes)
    assert states.find(hashes) == (3, second) and states.find(hashes[:2]) == (1, first)
    assert states.find([b"x", b"y"]) == (0, -1)


def test_the_least_recently_used_place_is_given_away() -> None:
    states = make_states(2)
    places = [states.copy(0, position, is_answer=False) for position in (4, 8)]
    states.publish(0, 2, [b"a", b"b"])
    states.find([b"a"])
    assert states.copy(1, 4, is_answer=False) == places[1]
    assert states.find([b"a", b"b"]) == (1, places[0])
    assert states.copy(2, 4, is_answer=False) == places[0]
    assert states.copy(3, 4, is_answer=False) is None, "all are for copies not known yet"
    states.vacate(1)
    assert states.copy(3, 4, is_answer=False) == places[1]


def test_of_an_answer_the_newest_copy_is_kept() -> None:
    states = make_states()
    hashes = [b"a", b"b", b"c"]
    states.copy(0, 4, is_answer=False)
    for num_blocks in (2, 3):
        states.copy(0, num_blocks * SIZE, is_answer=True)
        states.publish(0, num_blocks, hashes)
    assert len(states) == 2
    assert states.find(hashes)[0] == 3 and states.find(hashes[:2])[0] == 1


def test_a_copy_that_exists_already_takes_no_place() -> None:
    states = make_states(2)
    for slot in (0, 1):
        states.copy(slot, 4, is_answer=False)
    for slot in (0, 1):
        states.publish(slot, 1, [b"a"])
    assert len(states) == 1 and states.copy(2, 4, is_answer=False) is not None
    states.clear()
    assert states.find([b"a"]) == (0, -1)


def test_a_conversation_that_grows_reads_only_what_is_new() -> None:
    for depth in (1, 2):
        driver = make_driver(depth=depth)
        talk, known = list(range(40, 0, -1)), 0
        for turn in range(6):
            answer = ask(driver, f"turn {turn}", talk, max_tokens=9)
            if turn:
                # The end of the last answer but for its last block.
                assert cached(driver, f"turn {turn}") >= known - 2 * SIZE
            talk = talk + answer
            known = len(talk)
            talk += [turn, turn, turn]


def test_a_prompt_of_another_answer_or_question_starts_where_they_part() -> None:
    driver = make_driver()
    shared = list(range(33))
    ask(driver, "first", [*shared, 1, 2, 3])
    ask(driver, "again", [*shared, 1, 2, 3])
    assert cached(driver, "again") == 24, "the copy in front of the prompt's end"
    ask(driver, "edited", [*shared, 7, 7])
    assert cached(driver, "edited") == 24
    ask(driver, "other", [*shared[:20], *range(30)])
    assert cached(driver, "other") == 0, "no copy lies where they part"


def test_blocks_without_a_state_and_states_without_blocks_are_no_hit() -> None:
    driver = make_driver()
    prompt = list(range(40))
    ask(driver, "first", prompt)
    kv = driver.scheduler.kv
    assert kv.states is not None
    kv.states.clear()
    ask(driver, "states are gone", prompt)
    assert cached(driver, "states are gone") == 0
    kv.pool.forget(range(1, kv.pool.num_blocks))
    assert len(kv.states)
    ask(driver, "blocks are gone", prompt)
    assert cached(driver, "blocks are gone") == 0


def test_a_reset_forgets_states_too() -> None:
    driver = make_driver()
    ask(driver, "first", list(range(40)))
    assert driver.scheduler.reset_prefix_cache()
    assert not len(driver.scheduler.kv.states or ())


@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize("num_drafts", [1, 3, 6])
def test_answers_with_drafts_leave_copies_too(num_drafts: int, depth: int) -> None:
    """Their rows pass the ends of blocks within a step, and the host may not know yet."""
    driver = CoreDriver(
        depth=depth, num_drafts=num_drafts, block_size=8, state_places=8, max_model_len=400
    )
    talk, num_missed, known = list(range(30)), list[int](), 0
    for turn in range(8):
        asked = driver.submit(f"{turn}", talk, max_tokens=20 + turn)
        driver.run()
        assert asked.tokens == driver.reference(asked)
        if turn:
            num_missed.append(known - asked.num_cached_tokens)
        talk += asked.tokens
        known = len(talk)
        talk += [turn] * 3
    states = driver.scheduler.kv.states
    assert states is not None and states.num_made <= 8 * 6
    assert driver.scheduler.stats.num_accepted_tokens > 40
    if depth == 1:
        assert max(num_missed) <= 8 + 1 + num_drafts, "the last block, and the last step's tokens"
    else:  # tries may miss a block's end
        assert sorted(num_missed)[len(num_missed) // 2] <= 16, num_missed
    driver.assert_drained()


def test_a_try_counts_if_the_state_was_there() -> None:
    states = make_states(4)
    slots = np.asarray([0, 1], np.int32)

    def land(step: int, num_new: int, known: int) -> None:
        states.landed(step, slots, np.asarray([1, num_new]), np.asarray([5, known]))

    # (tokens that step 7 gave, tokens known behind it) of a state that may be found at 8
    for num_new, known, is_found in ((3, 8, False), (3, 9, True), (3, 11, True), (3, 12, False)):
        place = states.copy(1, 8, is_answer=True, try_after=7)
        assert place is not None
        states.publish(1, 2, [b"a", b"b"])
        assert not len(states), "found before it is known to be right"
        land(6, 1, known - num_new)
        land(7, num_new, known)
        states.publish(1, 2, [b"a", b"b"])
        assert states.find([b"a", b"b"]) == ((2, place) if is_found else (0, -1))
        states.vacate(1)
        states.clear()
    states.copy(1, 8, is_answer=True, try_after=8)
    states.vacate(1)
    land(8, 3, 9)
    assert states.view().num_free == states.num_places
