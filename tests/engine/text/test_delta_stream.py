"""Deltas for a reader that is behind: merged, in order, at low cost."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import pytest

from termgen.client import TokenDelta
from termgen.engine.loop import engine as stream_module
from termgen.engine.loop.engine import MERGE_AT, UNREAD_S, DeltaStream
from termgen.vocabulary.request import FinishReason


def delta(index: int, number: int, *, is_last: bool = False) -> TokenDelta:
    return TokenDelta(
        request_id="r",
        index=index,
        text=f"{number} ",
        token_ids=(number,),
        logprobs=None,
        finish_reason=FinishReason.LENGTH if is_last else None,
        stop_reason=None,
        num_prompt_tokens=1,
        num_cached_tokens=0,
        num_output_tokens=number + 1,
    )


@pytest.mark.parametrize("count", [1, 2, MERGE_AT - 1, MERGE_AT, MERGE_AT + 1, 1000])
async def test_a_reader_that_is_behind_gets_everything_at_once(count: int) -> None:
    stream = DeltaStream(2)
    for number in range(count):
        for index in (0, 1):
            stream.push(delta(index, number, is_last=number == count - 1))
    taken = [d async for d in stream]
    assert [d.index for d in taken] == [0, 1]
    for d in taken:
        assert d.token_ids == tuple(range(count))
        assert d.text == "".join(f"{n} " for n in range(count))
        assert (d.num_output_tokens, d.finish_reason) == (count, FinishReason.LENGTH)


async def test_waiting_costs_little_however_much_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    real, merges = stream_module.merge_deltas, list[int]()

    def counted(deltas: Sequence[TokenDelta]) -> TokenDelta:
        merges.append(len(deltas))
        return real(deltas)

    monkeypatch.setattr(stream_module, "merge_deltas", counted)
    stream = DeltaStream(1)
    for number in range(10_000):
        stream.push(delta(0, number))
        assert len(stream._waiting[0]) < MERGE_AT, "what waits is few deltas"
    assert len(merges) <= 10_000 / (MERGE_AT - 1)


async def test_a_reader_that_takes_nothing_is_reported_and_again_when_it_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, reports = [100.0], list[bool]()
    clock = SimpleNamespace(monotonic=lambda: now[0])
    monkeypatch.setattr(stream_module, "time", clock)
    stream = DeltaStream(2, reports.append)
    stream.push(delta(1, 0))
    for number in range(10):  # a slow reader takes something now and then, and never all
        for _ in range(3):
            now[0] += UNREAD_S / 4
            stream.push(delta(number % 2, number))
        await anext(stream)
    assert reports == [] and len(stream._waiting) == 1
    for _ in range(2):
        now[0] += UNREAD_S + 1
        stream.push(delta(0, 10))
    assert reports == [True], "reported once"
    while stream._waiting:
        await anext(stream)
    assert reports == [True, False]
    now[0] += 10 * UNREAD_S
    stream.push(delta(0, 11))
    assert reports == [True, False], "nothing waited before"
