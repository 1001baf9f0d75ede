"""Masks that threads fill: alone and in place, or many at once."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import pytest
from constrained_harness import ConstrainedDriver, FakeGrammar, FakeMatcher, fill_each

from termgen.engine.grammar import mask_filler
from termgen.engine.grammar.mask_filler import MANY, MOST_HERE, MaskFiller
from termgen.errors import RequestError
from termgen.vocabulary.token_mask import PROVEN_AFTER, GrammarState, IntArray


class Panic(BaseException):
    """The exception type that libraries written in Rust raise."""


class Counting(FakeGrammar):
    """Counts how many masks are filled at once."""

    def __init__(self, *, fault: BaseException | None = None) -> None:
        super().__init__(9)
        self.fault = fault
        """The exception of filling many at once, or of this grammar's own mask."""
        self.at_once: list[int] = []

    def start(self, *, ends_at_eos: bool) -> CountingMatcher:
        return CountingMatcher(self)


class CountingMatcher(FakeMatcher):
    @staticmethod
    def fill_all(
        matchers: Sequence[FakeMatcher], bits: IntArray, *, in_this_thread: bool
    ) -> list[BaseException | None]:
        grammar = matchers[0]._grammar
        assert isinstance(grammar, Counting)
        grammar.at_once.append(len(matchers))
        if isinstance(grammar.fault, Panic):
            raise grammar.fault
        return fill_each(matchers, bits)

    def fill(self, bits: IntArray) -> None:
        assert isinstance(self._grammar, Counting)
        if self._grammar.fault is not None and self.tokens:
            raise self._grammar.fault
        super().fill(bits)


def landed_rows(grammars: Sequence[FakeGrammar]) -> tuple[MaskFiller, list[GrammarState]]:
    """Rows whose first masks were quick, and whose first tokens have landed."""
    filler = MaskFiller()
    rows = [GrammarState(grammar, ends_at_eos=True) for grammar in grammars]
    filler.begin(rows)
    filler.wait(rows, 20.0)
    for row in rows:
        row.note_time(is_slow=False)
        row.accept(row_first(row))
    return filler, rows


def row_first(row: GrammarState) -> int:
    return int(np.flatnonzero(np.unpackbits(row.mask.view(np.uint8), bitorder="little"))[0])


class Watching:
    """A receiver that notes whether rows were ready when their masks came."""

    def __init__(self, rows: Sequence[GrammarState]) -> None:
        self._rows = rows
        self.were_ready: list[bool] = []

    def post_masks(
        self,
        slots: IntArray,
        positions: IntArray,
        bits: IntArray,
        forced: Sequence[Sequence[int]] | None = None,
    ) -> None:
        self.were_ready += [self._rows[slot].is_ready for slot in slots.tolist()]

    def withhold_masks(self, slots: IntArray) -> None:
        raise AssertionError("no row loses its slot")


@pytest.mark.parametrize("num_rows", [1, MANY])
def test_a_mask_is_posted_before_its_row_is_ready(num_rows: int) -> None:
    """A step that is launched with a ready row may take what is posted then."""
    filler, rows = landed_rows([Counting()] * num_rows)
    filler.receiver = receiver = Watching(rows)
    for slot, row in enumerate(rows):
        filler.seat(row, slot, 1)
    del receiver.were_ready[:]
    filler.begin(rows)
    filler.wait(rows, 20.0)
    assert receiver.were_ready == [False] * num_rows and all(row.is_ready for row in rows)


@pytest.mark.parametrize(("num_rows", "at_once"), [(MANY - 1, []), (MANY, [MANY])])
def test_many_masks_are_filled_at_once_and_few_in_place(num_rows: int, at_once: list[int]) -> None:
    grammar = Counting()
    filler, rows = landed_rows([grammar] * num_rows)
    before = [(row.mask, row.mask.copy()) for row in rows]
    filler.begin(rows)
    filler.wait(rows, 20.0)
    assert grammar.at_once == at_once
    for row, (mask, old) in zip(rows, before, strict=True):
        assert row.is_ready and row.error is None and (row.mask != old).any()
        assert (row.mask is mask) == (not at_once)


@pytest.mark.parametrize("fault", [RequestError("too complex"), Panic("a bug")])
def test_of_masks_filled_at_once_only_the_broken_one_has_an_error(fault: BaseException) -> None:
    good, bad = Counting(), Counting(fault=fault)
    filler, rows = landed_rows([bad, *[good] * MANY])
    filler.begin(rows)
    filler.wait(rows, 20.0)
    assert [row.error for row in rows] == [fault, *[None] * MANY]
    assert all(row.is_ready for row in rows) and all(row.mask.any() for row in rows[1:])


def test_slow_company_is_left_and_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The slow one is found when each runs alone; the others are together again after a mask."""
    grammar = Counting()
    filler, rows = landed_rows([grammar] * MANY)
    monkeypatch.setattr("termgen.engine.grammar.mask_filler.SLOW_S", -1.0)
    filler.begin(rows)
    filler.wait(rows, 20.0)
    assert grammar.at_once == [MANY]
    assert not any(row.may_share or row.is_slow for row in rows)
    monkeypatch.setattr("termgen.engine.grammar.mask_filler.SLOW_S", 60.0)
    for at_once in ([MANY], [MANY, MANY]):
        for row in rows:
            row.accept(row_first(row))
        filler.begin(rows)
        filler.wait(rows, 20.0)
        assert grammar.at_once == at_once and all(row.may_share for row in rows)


def test_a_row_shares_a_job_again_after_more_and_more_quick_masks() -> None:
    row = GrammarState(FakeGrammar(3), ends_at_eos=True)
    assert not row.may_share, "its first mask takes longer than any"
    row.note_time(is_slow=False)
    assert row.may_share
    for needed in (8, 64):
        row.note_time(is_slow=True)
        for _ in range(needed):
            assert not row.may_share
            row.note_time(is_slow=False)
        assert row.may_share and not row.is_slow


def test_masks_of_rows_that_go_on_together_are_one_job(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    fill = MaskFiller._fill

    def noting(filler: MaskFiller, rows: list[GrammarState]) -> None:
        sizes.append(len(rows))
        fill(filler, rows)

    monkeypatch.setattr(MaskFiller, "_fill", noting)
    monkeypatch.setattr("termgen.engine.grammar.mask_filler.SLOW_S", 60.0)  # on a busy machine too
    driver = ConstrainedDriver(depth=2)
    for i in range(4):
        driver.constrain(f"c{i}", [3, i], FakeGrammar(7), max_tokens=20)
    driver.run()
    driver.assert_reference()
    assert sizes == [1] * 4 + [4] * 6


def test_a_watched_row_is_returned_once_whether_it_becomes_ready_before_or_after() -> None:
    grammar = FakeGrammar(9)
    grammar.may_fill.clear()
    filler, late = MaskFiller(), GrammarState(grammar, ends_at_eos=True)
    filler.begin([late])
    filler.watch(late)
    assert filler.take_watched() == []
    grammar.may_fill.set()
    filler.wait([late], 20.0)
    assert filler.take_watched() == [late] and filler.take_watched() == []
    filler.watch(late)  # between a look at it and this, it became ready
    assert filler.take_watched() == [late] and filler.take_watched() == []


def prove(rows: list[GrammarState]) -> None:
    """Count many quick masks of each row."""
    for row in rows:
        for _ in range(PROVEN_AFTER):
            row.note_time(is_slow=False)


def test_masks_that_were_always_quick_are_filled_in_this_thread() -> None:
    threads: list[str] = []

    class Noting(Counting):
        def allowed(self, tokens: Sequence[int]) -> list[int]:
            threads.append(threading.current_thread().name)
            return super().allowed(tokens)

    grammar = Noting()
    filler, rows = landed_rows([grammar] * 10)
    threads.clear()
    prove(rows[:4])
    filler.begin(rows)
    assert all(row.is_ready for row in rows[:4]), "they are there at once"
    filler.wait(rows, 20.0)
    own = threading.current_thread().name
    assert threads.count(own) == 4 and len(threads) == 10
    assert all(row.mask.any() and row.error is None for row in rows)


def test_a_long_fill_in_this_thread_is_not_repeated_for_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mask_filler, "LONG_HERE_S", -1.0)  # each is long
    grammar = Counting()
    filler, rows = landed_rows([grammar] * 3)
    prove(rows)
    filler.begin(rows)
    assert all(row.is_ready for row in rows)
    assert filler._rests_until_s > 0
    filler._rests_until_s += 60.0
    names: list[str] = []
    fill_many = filler._fill_many

    def noting(rows: list[GrammarState], **options: bool) -> None:
        names.append(threading.current_thread().name)
        fill_many(rows, **options)

    monkeypatch.setattr(filler, "_fill_many", noting)
    for row in rows:
        row.accept(row_first(row))
    filler.begin(rows)
    filler.wait(rows, 20.0)
    assert not names, "a thread fills so few one by one"
    assert all(row.is_ready and row.mask.any() for row in rows)


def test_many_masks_are_left_to_the_threads() -> None:
    grammar = Counting()
    filler, rows = landed_rows([grammar] * (MOST_HERE + 1))
    prove(rows)
    grammar.may_fill.clear()
    filler.begin(rows)
    assert not any(row.is_ready for row in rows)
    grammar.may_fill.set()
    filler.wait(rows, 20.0)
    assert all(row.is_ready and row.mask.any() for row in rows)


class Board:
    """A `MaskReceiver` that notes what it gets."""

    waits_for_masks = True

    def __init__(self) -> None:
        self.posted: list[tuple[int, int, list[int]]] = []
        self.withheld: list[int] = []

    def post_masks(
        self,
        slots: IntArray,
        positions: IntArray,
        bits: IntArray,
        forced: Sequence[Sequence[int]] | None = None,
    ) -> None:
        self.posted += zip(slots.tolist(), positions.tolist(), bits.tolist(), strict=True)

    def withhold_masks(self, slots: IntArray) -> None:
        self.withheld += slots.tolist()


@pytest.mark.parametrize("num_rows", [3, 12])
@pytest.mark.parametrize("proven", [False, True])
def test_masks_of_rows_with_a_slot_are_posted(num_rows: int, proven: bool) -> None:
    filler, rows = landed_rows([Counting() for _ in range(num_rows)])
    filler.receiver = board = Board()
    if proven:
        prove(rows)
    filler.begin(rows)
    filler.wait(rows, 20.0)
    assert not board.posted, "no row has a slot"
    for i, row in enumerate(rows[1:]):
        filler.seat(row, i, 70 + i)
    assert board.posted == [(i, 70 + i, row.mask.tolist()) for i, row in enumerate(rows[1:])]
    board.posted.clear()
    filler.unseat(rows[1])
    assert board.withheld == [0]
    for row in rows:
        row.accept(row_first(row))
        row.position += 1
    filler.begin(rows)
    filler.wait(rows, 20.0)
    expected = [(i + 1, 72 + i, row.mask.tolist()) for i, row in enumerate(rows[2:])]
    assert sorted(board.posted) == expected


def test_a_row_whose_mask_cannot_be_filled_keeps_no_step_waiting() -> None:
    fault = RuntimeError("broken")
    filler, rows = landed_rows([Counting(), Counting(fault=fault)])
    for row in rows:
        row.is_ready, row.error = True, None
    filler.receiver = board = Board()
    filler.seat(rows[0], 5, 70)
    rows[1].slot = 6
    board.posted.clear()
    filler.begin(rows)
    filler.wait(rows, 20.0)
    assert rows[1].error is fault
    assert [slot for slot, _, _ in board.posted] == [5] and board.withheld == [6]
