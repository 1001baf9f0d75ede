"""Masks that threads fill: alone and in place, or many at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from constrained_harness import ConstrainedDriver, FakeGrammar, FakeMatcher, fill_each

from termgen.engine.grammar.mask_filler import MANY, MaskFiller
from termgen.errors import RequestError
from termgen.vocabulary.token_mask import GrammarState, IntArray


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
    def fill_all(matchers: Sequence[FakeMatcher], bits: IntArray) -> list[BaseException | None]:
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


def test_a_watched_row_is_told_once_whether_it_becomes_ready_before_or_after() -> None:
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
