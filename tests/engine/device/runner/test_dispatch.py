"""Every (rows, tokens) pair gets the smallest recording that holds it, or a reason."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from paged_model import build

from termgen.config import CUDAGRAPH_MODES, EngineConfig
from termgen.engine.device.attention.torch_reference import TorchReferenceAttention
from termgen.engine.device.loader import load_model_config
from termgen.engine.device.runner.build import choose_graphs
from termgen.engine.device.runner.cuda_graphs import next_larger, split_by_use
from termgen.engine.device.runner.dispatch import (
    EVERYTHING,
    MOST_DRAFTED_TOKENS,
    NEEDS,
    PLAIN_TOKENS,
    BatchDescriptor,
    CudaGraphDispatcher,
    Dispatch,
    GraphMode,
    SamplingVariant,
    decode_sizes,
    drafted_sizes,
    mixed_sizes,
    most_recorded_tokens,
    piecewise_sizes,
    variant_of,
)
from termgen.engine.device.runner.resolve import Limits
from termgen.vocabulary.step import SamplingNeeds

STEPS = tuple(SamplingVariant)


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
        for variant in STEPS:
            found = dispatcher.dispatch(num_rows=rows, num_tokens=rows, sampling=variant)
            assert found.mode is GraphMode.FULL and found.reason == ""
            assert found.descriptor in recorded
            assert found.descriptor.num_rows == min(s for s in sizes if s >= rows)
            assert found.num_padded(rows) == found.descriptor.num_rows - rows < max(8, rows)


@pytest.mark.parametrize(("most", "max_num_seqs"), [(1, 4), (3, 64), (8, 300), (16, 7)])
def test_rows_with_drafts_have_recordings_of_their_own(most: int, max_num_seqs: int) -> None:
    sizes, lengths = decode_sizes(max_num_seqs), sorted({most, most // 2} - {0})
    drafted = drafted_sizes(sizes, lengths, MOST_DRAFTED_TOKENS)
    dispatcher = CudaGraphDispatcher(sizes, mixed=mixed_sizes(512), drafted=drafted, max_num_seqs=8)
    recorded = set(dispatcher.descriptors())
    assert dispatcher.num_recordings == len(recorded) and not dispatcher.is_empty
    for rows in range(1, max_num_seqs + 1):
        for drafts in range(1, most + 2):
            at = {"num_rows": rows, "num_tokens": rows + drafts, "num_drafts": drafts}
            found = dispatcher.dispatch(**at, sampling=SamplingVariant.ANY)
            k = min((k for k in lengths if k >= drafts), default=most + 1)
            size = min((s for s in sizes if s >= rows and (s, k) in drafted), default=0)
            if size:
                wanted = BatchDescriptor(size * (1 + k), size, True, SamplingVariant.ANY, k)
                assert found == Dispatch(GraphMode.FULL, wanted, size * (1 + k))
                assert wanted in recorded and wanted.num_tokens <= MOST_DRAFTED_TOKENS
            else:
                assert found.mode is not GraphMode.PIECEWISE
                assert found.descriptor is None or found.descriptor.num_drafts > k
                assert found.reason or found.descriptor
    largest = dispatcher.largest().descriptors()
    assert max(d.num_tokens for d in recorded if d.num_drafts) in {d.num_tokens for d in largest}


def test_idle_steps_have_recordings_of_their_own() -> None:
    both = CudaGraphDispatcher((1, 4), drafted=[(1, 2)], has_idle=True, max_num_seqs=4)
    one = CudaGraphDispatcher((1, 4), drafted=[(1, 2)], max_num_seqs=4)
    assert both.num_recordings == one.num_recordings + 4
    for dispatcher in (both, one, both.up_to(1)):
        for is_idle in (False, True):
            at = {"num_rows": 3, "num_tokens": 3, "sampling": SamplingVariant.PLAIN}
            found = dispatcher.dispatch(**at, is_idle=is_idle).descriptor
            assert found in dispatcher.descriptors()
            assert found is not None and found.is_idle == (is_idle and dispatcher is not one)
    first, later = split_by_use(both.descriptors())
    assert {d.is_idle for d in first if d.num_rows == 4 and not d.num_drafts} == {False, True}
    idle = next(d for d in both.descriptors() if d.is_idle and d.num_rows == 1)
    other = next_larger(idle, [d for d in (*first, *later) if d != idle], most_padding=2)
    assert other is not None and other.is_idle and other.num_rows == 4


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


def test_rows_that_ask_for_more_than_a_temperature_have_recordings_of_their_own() -> None:
    assert variant_of(SamplingNeeds()) is SamplingVariant.PLAIN
    assert variant_of(SamplingNeeds(all_greedy=True)) is SamplingVariant.PLAIN
    for need in ("filters", "grammar", "penalties", "min_tokens", "edits"):
        assert variant_of(SamplingNeeds(**{need: True})) is SamplingVariant.ANY
    assert variant_of(SamplingNeeds(max_logprobs=0)) is SamplingVariant.ANY
    assert variant_of(EVERYTHING) is SamplingVariant.ANY


def test_recordings_sample_all_that_their_steps_may_need() -> None:
    assert NEEDS[SamplingVariant.PLAIN].is_plain
    assert NEEDS[SamplingVariant.ANY] == EVERYTHING


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
            is_short = found.descriptor.num_tokens <= PLAIN_TOKENS
            assert (found.descriptor.sampling is SamplingVariant.PLAIN) == is_short
            assert found.descriptor.num_rows >= rows
            assert found.num_padded(tokens) == found.descriptor.num_tokens - tokens


def test_prompts_are_padded_little() -> None:
    sizes = mixed_sizes(8192, 8192)
    for tokens in range(128, 8193):
        padded = next(s for s in sizes if s >= tokens)
        assert padded - tokens < max(64, tokens / 4), (tokens, padded)


def test_large_steps_are_recorded_where_memory_is_plenty() -> None:
    gib = 2**30
    assert most_recorded_tokens(8192, 1 * gib, 141 * gib) > 8192
    assert 4096 < most_recorded_tokens(8192, 1 * gib, 32 * gib) < 8192
    assert most_recorded_tokens(8192, 4 * gib, 16 * gib) == most_recorded_tokens(512, 0, 1) == 2048
    limits = Limits(max_num_seqs=8, max_num_batched_tokens=8192, max_model_len=128)
    everything = choose("cuda", ALL_MODES, limits=limits)
    assert everything.mixed[-1] == 8192
    some = everything.up_to(5000)
    assert some.mixed == tuple(size for size in everything.mixed if size <= 5000)
    assert (some.sizes, some.max_rows) == (everything.sizes, everything.max_rows)
    assert choose("cpu", ALL_MODES).up_to(100).disabled_reason == "no CUDA device"


def test_the_largest_recordings_are_among_all() -> None:
    dispatcher = CudaGraphDispatcher((1, 2, 8), mixed=(16, 32), max_num_seqs=8)
    largest = dispatcher.largest().descriptors()
    assert {(d.num_tokens, d.num_rows, d.is_decode) for d in largest} == {
        (32, 8, False),
        (8, 8, True),
    }
    assert set(largest) <= set(dispatcher.descriptors())
    pieces = CudaGraphDispatcher((1, 2), piecewise=(8, 1, 2), max_num_seqs=5)
    assert pieces.largest().piecewise == (8,)
    assert pieces.max_rows == pieces.largest().max_rows == 5


def test_a_disabled_dispatcher_gives_its_reason() -> None:
    dispatcher = CudaGraphDispatcher((), disabled_reason="--enforce-eager")
    found = dispatcher.dispatch(num_rows=1, num_tokens=1, sampling=SamplingVariant.PLAIN)
    assert (found.mode, found.reason) == (GraphMode.NONE, "--enforce-eager")
    assert dispatcher.descriptors() == []


class InPieces:
    """The part of `PiecewiseModel` that dispatch uses."""

    num_attentions = 1

    def first_piece(self) -> None: ...

    attend = next_piece = last_piece = head_dim = first_piece


SMALL = Limits(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=128)


def choose(
    device_type: str,
    graph_modes: set[str],
    *,
    limits: Limits = SMALL,
    model: object = None,
    **options: object,
) -> CudaGraphDispatcher:
    class Attention(TorchReferenceAttention):
        capabilities = replace(
            TorchReferenceAttention.capabilities, graph_modes=frozenset(graph_modes)
        )

    return choose_graphs(
        EngineConfig(**options),  # type: ignore[arg-type]
        limits,
        device_type=device_type,
        attention=Attention(),
        model=model or InPieces(),
    )


ALL_MODES = {"NONE", "PIECEWISE", "FULL"}
CANNOT = "torch_reference attention cannot be recorded"


@pytest.mark.parametrize(
    ("device_type", "graph_modes", "options", "reason"),
    [
        ("cpu", ALL_MODES, {}, "no CUDA device"),
        ("cpu", ALL_MODES, {"cudagraph_mode": "piecewise"}, "no CUDA device"),
        ("cuda", {"NONE"}, {}, CANNOT),
        ("cuda", {"NONE", "PIECEWISE"}, {"cudagraph_mode": "full_decode_only"}, CANNOT),
        ("cuda", {"NONE", "PIECEWISE"}, {"model": object()}, CANNOT),
        (
            "cuda",
            {"NONE", "FULL"},
            {"cudagraph_mode": "piecewise"},
            "the model cannot be cut at attention",
        ),
        (
            "cuda",
            ALL_MODES,
            {"cudagraph_mode": "piecewise", "model": object()},
            "the model cannot be cut at attention",
        ),
        ("cuda", ALL_MODES, {"enforce_eager": True}, "--enforce-eager"),
        ("cuda", ALL_MODES, {"cudagraph_mode": "none"}, "--cudagraph-mode none"),
    ],
)
def test_no_recordings_and_why(
    device_type: str, graph_modes: set[str], options: dict[str, Any], reason: str
) -> None:
    dispatcher = choose(device_type, graph_modes, **options)
    assert dispatcher.is_empty and dispatcher.descriptors() == []
    found = dispatcher.dispatch(num_rows=1, num_tokens=1, sampling=SamplingVariant.PLAIN)
    assert (found.mode, found.reason) == (GraphMode.NONE, reason)


@pytest.mark.parametrize("mode", ["full", "full_and_piecewise"])
def test_attention_that_cannot_be_recorded_runs_between_pieces(mode: str) -> None:
    dispatcher = choose("cuda", {"NONE", "PIECEWISE"}, cudagraph_mode=mode)
    assert not dispatcher.descriptors()
    for tokens in (3, 40):
        found = dispatcher.dispatch(num_rows=3, num_tokens=tokens, sampling=SamplingVariant.PLAIN)
        assert (found.mode, found.reason) == (GraphMode.PIECEWISE, CANNOT)


def test_a_model_without_pieces_still_has_its_decodes_recorded() -> None:
    dispatcher = choose("cuda", ALL_MODES, cudagraph_mode="full_and_piecewise", model=object())
    assert dispatcher.sizes and not dispatcher.piecewise
    found = dispatcher.dispatch(num_rows=1, num_tokens=9, sampling=SamplingVariant.PLAIN)
    assert (found.mode, found.reason) == (GraphMode.NONE, "a prompt is being computed")


@pytest.mark.parametrize("family", ["qwen3_moe", "llama"])
def test_experts_that_wait_for_the_device_are_in_no_recording(
    family: str, tiny_model_dir: Callable[[str], Path]
) -> None:
    """Without Triton on a GPU, the only attention is the one between pieces."""
    model = build(load_model_config(tiny_model_dir(family)))
    dispatcher = choose("cuda", {"NONE", "PIECEWISE"}, model=model)
    assert dispatcher.is_empty == (family == "qwen3_moe")
    assert ("experts" in dispatcher.disabled_reason) == dispatcher.is_empty


def test_the_mode_says_which_steps_are_recorded() -> None:
    decodes, mixed, pieces = (1, 2, 4, 8), (16, 32, 64), (1, 2, 4, 8, 16, 32, 64)
    expected = {
        "none": ((), (), ()),
        "piecewise": ((), (), pieces),
        "full_decode_only": (decodes, (), ()),
        "full": (decodes, mixed, ()),
        "full_and_piecewise": (decodes, (), pieces),
    }
    assert set(expected) == set(CUDAGRAPH_MODES)
    for mode, sizes in expected.items():
        found = choose("cuda", ALL_MODES, cudagraph_mode=mode)
        assert (found.sizes, found.mixed, found.piecewise) == sizes, mode


@pytest.mark.parametrize("mode", CUDAGRAPH_MODES)
@pytest.mark.parametrize(("max_num_seqs", "budget"), [(1, 16), (13, 70), (40, 100)])
def test_every_pair_in_every_mode(mode: str, max_num_seqs: int, budget: int) -> None:
    limits = Limits(max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, max_model_len=128)
    dispatcher = choose("cuda", ALL_MODES, limits=limits, cudagraph_mode=mode)
    recorded = set(dispatcher.descriptors())
    decodes, mixed = decode_sizes(max_num_seqs), mixed_sizes(budget)
    cut = piecewise_sizes(max_num_seqs, budget)
    for rows in range(1, max_num_seqs + 1):
        for tokens in range(rows, budget + 1):
            for sampling in STEPS:
                found = dispatcher.dispatch(num_rows=rows, num_tokens=tokens, sampling=sampling)
                is_decode = tokens == rows
                whole: tuple[int, ...] = ()
                if mode.startswith("full"):
                    whole = decodes if is_decode else mixed if mode == "full" else ()
                pieces = cut if mode.endswith("piecewise") else ()
                if any(size >= tokens for size in whole):
                    assert found.mode is GraphMode.FULL and found.reason == ""
                    descriptor = found.descriptor
                    assert descriptor in recorded and descriptor is not None
                    assert descriptor.num_tokens == min(s for s in whole if s >= tokens)
                    assert rows <= descriptor.num_rows <= dispatcher.max_rows
                    assert descriptor.is_decode == is_decode
                    is_joined = not is_decode and descriptor.num_tokens > PLAIN_TOKENS
                    own = SamplingVariant.ANY if sampling is SamplingVariant.PLAIN else sampling
                    assert descriptor.sampling is (own if is_joined else sampling)
                elif any(size >= tokens for size in pieces):
                    assert found.mode is GraphMode.PIECEWISE and found.descriptor is None
                    assert found.padded_tokens == min(s for s in pieces if s >= tokens)
                    assert found.reason == "", "it is what was asked for"
                else:
                    assert found.mode is GraphMode.NONE and found.reason
                    assert found.descriptor is None and found.padded_tokens is None
                padded = found.padded_tokens
                assert found.num_padded(tokens) == (0 if padded is None else padded - tokens)


@pytest.mark.parametrize(
    ("mode", "rows", "tokens", "sampling", "expected"),
    [
        ("piecewise", 4, 2049, SamplingVariant.PLAIN, "a prompt, and more than 2048 tokens"),
        ("piecewise", 2049, 2049, SamplingVariant.ANY, "more than 2048 tokens"),
        ("full_and_piecewise", 600, 600, SamplingVariant.PLAIN, "more than 512 rows"),
        ("full_decode_only", 600, 600, SamplingVariant.PLAIN, "more than 512 rows"),
        ("full_decode_only", 4, 9, SamplingVariant.ANY, "a prompt is being computed"),
        ("full", 4, 8193, SamplingVariant.ANY, "a prompt, and more than 8192 tokens"),
    ],
)
def test_reasons_name_what_to_change(
    mode: str, rows: int, tokens: int, sampling: SamplingVariant, expected: str
) -> None:
    limits = Limits(max_num_seqs=3000, max_num_batched_tokens=8192, max_model_len=128)
    dispatcher = choose("cuda", ALL_MODES, limits=limits, cudagraph_mode=mode)
    found = dispatcher.dispatch(num_rows=rows, num_tokens=tokens, sampling=sampling)
    assert found.reason == expected
    has_pieces = mode == "full_and_piecewise" and tokens <= 2048
    assert found.mode is (GraphMode.PIECEWISE if has_pieces else GraphMode.NONE)


def test_recordings_are_made_from_the_largest_down() -> None:
    sizes = [d.num_rows for d in CudaGraphDispatcher((1, 4, 2)).descriptors()]
    assert sizes == sorted(sizes, reverse=True)
    decodes = CudaGraphDispatcher((4,)).descriptors()
    assert BatchDescriptor(4, 4, True, SamplingVariant.PLAIN) in decodes
