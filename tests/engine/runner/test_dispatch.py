"""Every (rows, tokens) pair gets the smallest recording that holds it, or a reason."""

from __future__ import annotations

import pytest

from termgen.engine.runner.dispatch import (
    BatchDescriptor,
    CudaGraphDispatcher,
    GraphMode,
    SamplingVariant,
    capture_sizes,
)


@pytest.mark.parametrize("max_num_seqs", [1, 2, 3, 7, 8, 30, 64, 100, 256, 300, 512, 2000])
def test_sizes_always_hold_the_most_rows_there_can_be(max_num_seqs: int) -> None:
    sizes = capture_sizes(max_num_seqs)
    assert sizes[-1] == min(max_num_seqs, 512)
    assert list(sizes) == sorted(set(sizes)) and sizes[0] == 1


@pytest.mark.parametrize("max_num_seqs", [1, 5, 64, 256])
def test_every_decode_batch_replays_the_smallest_recording_that_holds_it(
    max_num_seqs: int,
) -> None:
    sizes = capture_sizes(max_num_seqs)
    dispatcher = CudaGraphDispatcher(sizes)
    recorded = set(dispatcher.descriptors())
    for rows in range(1, max_num_seqs + 1):
        for variant in SamplingVariant:
            found = dispatcher.dispatch(num_rows=rows, num_tokens=rows, sampling=variant)
            assert found.mode is GraphMode.FULL and found.reason == ""
            assert found.descriptor in recorded
            assert found.descriptor.num_rows == min(s for s in sizes if s >= rows)
            assert found.num_padded(rows) == found.descriptor.num_rows - rows < max(8, rows)


def test_every_other_step_replays_nothing_and_says_why() -> None:
    dispatcher = CudaGraphDispatcher(capture_sizes(32))
    for rows in range(1, 40):
        for tokens in range(rows, 80):
            found = dispatcher.dispatch(
                num_rows=rows, num_tokens=tokens, sampling=SamplingVariant.GREEDY
            )
            if tokens == rows and rows <= 32:
                continue
            assert found.mode is GraphMode.NONE and found.descriptor is None
            assert found.reason and found.num_padded(rows) == 0
    unusual = dispatcher.dispatch(num_rows=4, num_tokens=4, sampling=None)
    assert "penalties" in unusual.reason


def test_a_disabled_dispatcher_gives_its_reason() -> None:
    dispatcher = CudaGraphDispatcher((), disabled_reason="--enforce-eager")
    found = dispatcher.dispatch(num_rows=1, num_tokens=1, sampling=SamplingVariant.GREEDY)
    assert (found.mode, found.reason) == (GraphMode.NONE, "--enforce-eager")
    assert dispatcher.descriptors() == []


def test_recordings_are_made_from_the_largest_down() -> None:
    sizes = [d.num_rows for d in CudaGraphDispatcher((1, 4, 2)).descriptors()]
    assert sizes == sorted(sizes, reverse=True)
    assert BatchDescriptor(4, SamplingVariant.GREEDY) in CudaGraphDispatcher((4,)).descriptors()
