"""Masks that take long or never come: which requests they delay, and how those end."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable

import pytest
from constrained_harness import ConstrainedDriver, FakeGrammar, FakeMatcher
from process_resources import no_thread

from termgen.engine.grammar.mask_filler import NUM_SLOW_THREADS, NUM_THREADS, SLOW_S, MaskFiller
from termgen.errors import RequestError
from termgen.vocabulary.request import FinishReason, Request
from termgen.vocabulary.token_mask import GrammarState, IntArray


@pytest.fixture
def make_driver() -> Callable[..., ConstrainedDriver]:
    def make(**settings: object) -> ConstrainedDriver:
        driver = ConstrainedDriver(**settings)
        driver.scheduler.constraints.patience_s = 0.4
        driver.scheduler.constraints.idle_patience_s = 0.4
        driver.device.patience_s = 0.4
        return driver

    return make


class Gate:
    """Grammars whose masks wait here while the gate is closed."""

    def __init__(self) -> None:
        self.is_open = threading.Event()
        self.is_open.set()

    def grammar(self, length: int) -> FakeGrammar:
        grammar = FakeGrammar(length)
        grammar.may_fill = self.is_open
        return grammar


def wait_for(condition: Callable[[], bool]) -> bool:
    for _ in range(2000):
        if condition():
            return True
        time.sleep(0.01)
    return False


def test_slow_masks_hold_up_neither_free_rows_nor_other_constrained_ones(
    make_driver: Callable[..., ConstrainedDriver],
) -> None:
    """There are as many slow rows as threads; they give their usual tokens once their masks are
    there."""
    driver, gate = make_driver(depth=2), Gate()
    free = driver.submit("free", [5, 6], max_tokens=60)
    slow = [
        driver.constrain(f"slow{i}", [3, i], gate.grammar(6), max_tokens=20)
        for i in range(NUM_THREADS - 1)
    ]
    quick = driver.constrain("quick", [3, 4], FakeGrammar(20), max_tokens=20)
    for _ in range(4):
        driver.step()
    gate.is_open.clear()
    driver.step()  # all masks are one job, which takes long once
    time.sleep(2 * SLOW_S)
    gate.is_open.set()
    requests = [driver.scheduler.requests[b.request.request_id] for b in (*slow, quick)]
    assert wait_for(lambda: all(r.grammar is not None and r.grammar.is_ready for r in requests))
    gate.is_open.clear()
    for _ in range(4):
        driver.step()
    counts = [len(bearer.tokens) for bearer in slow]
    before = len(free.tokens), len(quick.tokens)
    for _ in range(10):
        driver.step()
    assert [len(bearer.tokens) for bearer in slow] == counts
    assert len(free.tokens) == before[0] + 10 and len(quick.tokens) >= before[1] + 4
    gate.is_open.set()
    driver.run()
    driver.assert_reference()
    driver.assert_drained()


def test_rows_that_were_slow_do_not_take_the_threads_of_others(
    make_driver: Callable[..., ConstrainedDriver], monkeypatch: pytest.MonkeyPatch
) -> None:
    driver, gate = make_driver(depth=1), Gate()
    monkeypatch.setattr("termgen.engine.grammar.mask_filler.SLOW_S", -1.0)  # every mask is slow
    slow = [
        driver.constrain(f"slow{i}", [3, i], gate.grammar(19), max_tokens=20)
        for i in range(NUM_THREADS + NUM_SLOW_THREADS)
    ]
    while not all(bearer.tokens for bearer in slow):
        driver.step()
    gate.is_open.clear()
    requests = list(driver.scheduler.requests.values())
    while any(request.grammar.is_ready for request in requests if request.grammar is not None):
        driver.step()
    monkeypatch.undo()
    quick = driver.constrain("quick", [3, 4], FakeGrammar(8), max_tokens=20)
    while quick.ending is None:
        driver.step()
    assert all(bearer.ending is None for bearer in slow)
    gate.is_open.set()
    driver.run()
    driver.assert_reference()


@pytest.mark.parametrize("depth", [1, 2])
def test_while_the_only_row_waits_for_its_mask_the_engine_listens(
    make_driver: Callable[..., ConstrainedDriver], depth: int
) -> None:
    driver, gate = make_driver(depth=depth), Gate()
    alone = driver.constrain("alone", [3, 4], gate.grammar(9), max_tokens=20)
    for _ in range(3):
        driver.step()
    gate.is_open.clear()
    for _ in range(6):
        driver.step()
    count = len(alone.tokens)
    assert not driver.step() and driver.core.has_work and len(alone.tokens) == count
    late = driver.submit("late", [5, 6], max_tokens=3)
    while late.ending is None:
        driver.step()
    driver.abort("alone")
    driver.step()
    assert alone.reason is FinishReason.ABORT and len(alone.tokens) == count
    gate.is_open.set()
    driver.run()
    driver.assert_reference(late)
    driver.assert_drained()


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_first_mask_that_takes_long_delays_no_request_behind_it(
    make_driver: Callable[..., ConstrainedDriver], policy: str
) -> None:
    driver, gate = make_driver(depth=2, policy=policy), Gate()
    gate.is_open.clear()
    first = driver.constrain("first", [3, 4], gate.grammar(5), max_tokens=20)
    assert not driver.step() and not driver.step()
    reason = driver.core.copy_state().snapshot().waiting_reason
    assert reason == "the mask of its grammar takes long"
    second = driver.submit("second", [5, 6], max_tokens=4)
    third = driver.constrain("third", [3, 7], FakeGrammar(4), max_tokens=9)
    while second.ending is None or third.ending is None:
        driver.step()
    assert not first.tokens and len(driver.scheduler.waiting) == 1
    gate.is_open.set()
    driver.run()
    driver.assert_reference()
    driver.assert_drained()


def test_a_request_that_waits_for_a_mask_is_looked_at_once_in_a_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The cost does not grow with the requests admitted behind them."""
    driver, gate, asked = ConstrainedDriver(depth=1), Gate(), list[str]()
    constraints = driver.scheduler.constraints
    constraints.patience_s = constraints.idle_patience_s = 0.0
    is_ready = constraints.is_ready

    def noting(request: Request) -> bool:
        asked.append(request.request_id)
        return is_ready(request)

    monkeypatch.setattr(constraints, "is_ready", noting)
    gate.is_open.clear()
    for i in range(40):
        driver.constrain(f"slow {i}", [3, i], gate.grammar(5), max_tokens=9)
    for i in range(5):
        driver.submit(f"free {i}", [5, i], max_tokens=3)
    driver.step()
    assert driver.scheduler.num_running == 5 and len(asked) == len(set(asked)) == 45
    gate.is_open.set()
    driver.run()
    driver.assert_reference()


def test_an_abort_while_the_mask_is_filled(
    make_driver: Callable[..., ConstrainedDriver],
) -> None:
    driver = make_driver(depth=2)
    grammar = FakeGrammar(9)
    bound = driver.constrain("bound", [3, 4], grammar, max_tokens=20)
    free = driver.submit("free", [5, 6], max_tokens=9)
    driver.step()
    grammar.may_fill.clear()
    driver.step()
    driver.abort("bound")
    driver.step()
    grammar.may_fill.set()
    driver.run()
    assert bound.reason is FinishReason.ABORT
    driver.assert_reference(free)
    driver.assert_drained()


def test_masks_of_aborted_requests_are_not_filled(
    make_driver: Callable[..., ConstrainedDriver],
) -> None:
    """Every thread is filling one when the requests are aborted; the other masks must delay
    nothing."""
    filled: list[str] = []

    class Noting(FakeGrammar):
        def start(self, *, ends_at_eos: bool) -> FakeMatcher:
            filled.append(threading.current_thread().name)
            return super().start(ends_at_eos=ends_at_eos)

    driver, gate = make_driver(depth=2), threading.Event()
    for i in range(20):
        grammar = Noting(5)
        grammar.may_fill = gate
        driver.constrain(f"aborted {i}", [3, i], grammar, max_tokens=9)
    driver.core._read_inbox()
    assert wait_for(lambda: len(filled) == NUM_THREADS)
    for i in range(20):
        driver.abort(f"aborted {i}")
    last = driver.constrain("last", [3, 4], FakeGrammar(4), max_tokens=9)
    driver.core._read_inbox()
    gate.set()
    driver.run()
    driver.assert_reference(last)
    assert len(filled) == NUM_THREADS


class Panic(BaseException):
    """The exception type that libraries written in Rust raise."""


class Breaking(FakeGrammar):
    """Fails at one stage."""

    def __init__(self, place: str) -> None:
        super().__init__(9)
        self.place = place
        self.threads: set[str] = set()

    def start(self, *, ends_at_eos: bool) -> FakeMatcher:
        self.threads.add(threading.current_thread().name)
        if self.place == "start":
            raise RuntimeError("broken at start")
        return BreakingMatcher(self)


class BreakingMatcher(FakeMatcher):
    def accept(self, token_id: int) -> bool:
        if self.place == "accept" and len(self.tokens) == 2:
            raise RuntimeError("broken at accept")
        return super().accept(token_id)

    @property
    def place(self) -> str:
        assert isinstance(self._grammar, Breaking)
        return self._grammar.place

    def fill(self, bits: IntArray) -> None:
        if self.place == "limit" and len(self.tokens) == 2:
            raise RequestError("the grammar is too complex: broken at limit")
        if self.place == "panic":
            raise Panic("broken at panic")
        if self.place == "fill" or (self.place == "fill 2" and len(self.tokens) == 2):
            raise RuntimeError("broken at fill")
        super().fill(bits)


@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize(
    ("place", "num_tokens"),
    [("start", 0), ("fill", 0), ("panic", 0), ("fill 2", 2), ("limit", 2), ("accept", 3)],
)
def test_a_grammar_that_fails_ends_its_own_request_with_an_error(
    place: str, num_tokens: int, depth: int
) -> None:
    """The failure may be at any stage, and the answer must not look complete."""
    driver = ConstrainedDriver(depth=depth)
    grammar = Breaking(place)
    free = driver.submit("free", [5, 6], max_tokens=9)
    bad = driver.constrain("bad", [3, 4], grammar, max_tokens=20)
    good = driver.constrain("good", [3, 5], FakeGrammar(6), max_tokens=20)
    driver.run()
    alone = driver.constrain("bad alone", [3, 4], Breaking(place), max_tokens=20)
    driver.run()
    for bearer in (bad, alone):
        assert bearer.reason is FinishReason.ERROR and len(bearer.tokens) == num_tokens
        assert bearer.ending is not None
        assert f"broken at {place.split()[0]}" in str(bearer.ending.error)
        assert bearer.tokens == driver.reference(bearer)[:num_tokens]
    driver.assert_reference(free, good)
    driver.assert_drained()
    assert all(name.startswith("termgen-masks") for name in grammar.threads)


def test_the_threads_end_with_their_owner() -> None:
    before = set(threading.enumerate())
    filler = MaskFiller()
    rows = [GrammarState(FakeGrammar(3), ends_at_eos=True) for _ in range(4)]
    filler.begin(rows)
    filler.wait(rows, 20.0)
    assert all(row.is_ready and row.mask.any() for row in rows)
    threads = set(threading.enumerate()) - before
    assert len(threads) == NUM_THREADS and all(thread.daemon for thread in threads)
    del filler
    gc.collect()
    for thread in threads:
        thread.join(20.0)
        assert not thread.is_alive()


def test_without_threads_masks_are_filled_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    start, num_started = threading.Thread.start, 0

    def one_more(thread: threading.Thread) -> None:
        nonlocal num_started
        if num_started:
            raise RuntimeError("can't start new thread")
        num_started += 1
        start(thread)

    for refuse in (no_thread, one_more):
        monkeypatch.setattr(threading.Thread, "start", refuse)
        filler = MaskFiller()
        for _ in range(3):
            rows = [GrammarState(FakeGrammar(3), ends_at_eos=True) for _ in range(4)]
            filler.begin(rows)
            filler.wait(rows, 20.0)
            assert all(row.is_ready and row.mask.any() for row in rows)


def test_a_failed_request_whose_name_is_taken_again_ends_alone() -> None:
    driver = ConstrainedDriver(depth=1)
    bad = driver.constrain("name", [3, 4], Breaking("fill"), max_tokens=20)
    driver.run()
    again = driver.constrain("name", [3, 4], FakeGrammar(5), max_tokens=20)
    driver.run()
    assert bad.reason is FinishReason.ERROR
    driver.assert_reference(again)
