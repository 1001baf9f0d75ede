"""Every (rows, tokens) pair gets the smallest recording that holds it, or a reason."""

from __future__ import annotations

from dataclasses import replace

import pytest

from termgen.config import EngineConfig
from termgen.engine.attention.torch_reference import TorchReferenceAttention
from termgen.engine.runner.build import choose_graphs
from termgen.engine.runner.dispatch import (
    BatchDescriptor,
    CudaGraphDispatcher,
    GraphMode,
    SamplingVariant,
    decode_sizes,
    mixed_sizes,
)
from termgen.engine.runner.resolve import Limits


@pytest.mark.parametrize("max_num_seqs", [1, 2, 3, 7, 8, 30, 64, 100, 256, 300, 512, 2000])
def test_sizes_always_hold_the_most_rows_there_can_be(max_num_seqs: int) -> None:
    sizes = decode_sizes(max_num_seqs)
    assert sizes[-1] == min(max_num_seqs, 512)
    assert list(sizes) == sorted(set(sizes)) and sizes[0] == 1


@pytest.mark.parametrize("max_num_seqs", [1, 5, 64, 256])
def test_every_decode_batch_replays_the_smallest_recording_that_holds_it(
    max_num_seqs: int,
) -> None:
    sizes = decode_sizes(max_num_seqs)
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
    dispatcher = CudaGraphDispatcher(decode_sizes(32))
    for rows in range(1, 40):
        for tokens in range(rows, 80):
            found = dispatcher.dispatch(
                num_rows=rows, num_tokens=tokens, sampling=SamplingVariant.PLAIN
            )
            if tokens == rows and rows <= 32:
                continue
            assert found.mode is GraphMode.NONE and found.descriptor is None
            assert found.reason and found.num_padded(rows) == 0
    unusual = dispatcher.dispatch(num_rows=4, num_tokens=4, sampling=None)
    assert "penalties" in unusual.reason


@pytest.mark.parametrize(("max_num_seqs", "budget"), [(4, 16), (32, 300), (256, 8192)])
def test_mixed_steps_replay_the_smallest_recording_that_holds_them(
    max_num_seqs: int, budget: int
) -> None:
    sizes = mixed_sizes(budget)
    dispatcher = CudaGraphDispatcher(
        decode_sizes(max_num_seqs), mixed=sizes, max_num_seqs=max_num_seqs
    )
    recorded = set(dispatcher.descriptors())
    largest = dispatcher.descriptors()[0]
    assert largest.num_tokens == max(sizes[-1], max_num_seqs)
    assert dispatcher.max_rows == max_num_seqs
    for tokens in range(2, sizes[-1] + 20):
        for rows in {1, tokens // 2, min(tokens - 1, max_num_seqs)} - {0}:
            if rows > max_num_seqs:
                continue
            found = dispatcher.dispatch(
                num_rows=rows, num_tokens=tokens, sampling=SamplingVariant.PLAIN
            )
            if tokens > sizes[-1]:
                assert found.mode is GraphMode.NONE and str(sizes[-1]) in found.reason
                continue
            assert found.descriptor in recorded and not found.descriptor.is_decode
            assert found.descriptor.num_tokens == min(s for s in sizes if s >= tokens)
            assert found.descriptor.num_rows >= rows
            assert found.num_padded(tokens) == found.descriptor.num_tokens - tokens


def test_the_largest_recordings_are_among_all() -> None:
    dispatcher = CudaGraphDispatcher((1, 2, 8), mixed=(16, 32), max_num_seqs=8)
    largest = dispatcher.largest().descriptors()
    assert {(d.num_tokens, d.num_rows, d.is_decode) for d in largest} == {
        (32, 8, False),
        (8, 8, True),
    }
    assert set(largest) <= set(dispatcher.descriptors())


def test_a_disabled_dispatcher_gives_its_reason() -> None:
    dispatcher = CudaGraphDispatcher((), disabled_reason="--enforce-eager")
    found = dispatcher.dispatch(num_rows=1, num_tokens=1, sampling=SamplingVariant.PLAIN)
    assert (found.mode, found.reason) == (GraphMode.NONE, "--enforce-eager")
    assert dispatcher.descriptors() == []


def choose(device_type: str, graph_modes: set[str], **options: object) -> CudaGraphDispatcher:
    class Attention(TorchReferenceAttention):
        capabilities = replace(
            TorchReferenceAttention.capabilities, graph_modes=frozenset(graph_modes)
        )

    limits = Limits(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=128)
    config = EngineConfig(**options)  # type: ignore[arg-type]
    return choose_graphs(config, limits, device_type=device_type, attention=Attention())


@pytest.mark.parametrize(
    ("device_type", "graph_modes", "options", "reason"),
    [
        ("cpu", {"FULL"}, {}, "no CUDA device"),
        ("cuda", {"NONE", "PIECEWISE"}, {}, "torch_reference attention cannot be recorded"),
        ("cuda", {"FULL"}, {"enforce_eager": True}, "--enforce-eager"),
        ("cuda", {"FULL"}, {"cudagraph_mode": "none"}, "--cudagraph-mode none"),
    ],
)
def test_no_recordings_and_why(
    device_type: str, graph_modes: set[str], options: dict[str, object], reason: str
) -> None:
    dispatcher = choose(device_type, graph_modes, **options)
    assert dispatcher.descriptors() == []
    found = dispatcher.dispatch(num_rows=1, num_tokens=1, sampling=SamplingVariant.PLAIN)
    assert (found.mode, found.reason) == (GraphMode.NONE, reason)


def test_the_mode_says_which_steps_are_recorded() -> None:
    full = choose("cuda", {"FULL"})
    decodes = choose("cuda", {"FULL"}, cudagraph_mode="full_decode_only")
    assert full.mixed == (16, 32, 64) and decodes.mixed == ()
    assert full.sizes == decodes.sizes == (1, 2, 4, 8)
    found = decodes.dispatch(num_rows=1, num_tokens=9, sampling=SamplingVariant.PLAIN)
    assert (found.mode, found.reason) == (GraphMode.NONE, "a prompt is being computed")


def test_recordings_are_made_from_the_largest_down() -> None:
    sizes = [d.num_rows for d in CudaGraphDispatcher((1, 4, 2)).descriptors()]
    assert sizes == sorted(sizes, reverse=True)
    decodes = CudaGraphDispatcher((4,)).descriptors()
    assert BatchDescriptor(4, 4, True, SamplingVariant.PLAIN) in decodes
