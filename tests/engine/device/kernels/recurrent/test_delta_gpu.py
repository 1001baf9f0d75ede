"""The gated delta kernels on a GPU at the sizes of a 27B model: alone, and in recorded steps."""

from __future__ import annotations

import pytest
import torch
from delta_case import (
    DeltaCase,
    Inputs,
    Rows,
    copy_slot,
    known_inputs,
    make_metadata,
    relative_error,
    take,
)
from triton_device import require_triton

from termgen.engine.device.kernels.recurrent.layout import GatedDeltaShape
from termgen.engine.device.recurrent.base import GatedDeltaState

require_triton()

from termgen.engine.device.recurrent.triton_delta import TritonGatedDelta  # noqa: E402

pytestmark = pytest.mark.gpu

LARGE = GatedDeltaShape(num_k_heads=16, num_v_heads=48, k_dim=128, v_dim=128)
TILED = GatedDeltaShape(num_k_heads=16, num_v_heads=32, k_dim=128, v_dim=128, is_tiled=True)
STATE_ERROR = {torch.float32: 1e-4, torch.float16: 1e-3, torch.bfloat16: 1e-3}
OUT_ERROR = {torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 5e-3}
MAX_ROWS, MAX_TOKENS = 16, 2048

every_dtype = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16], ids=["f32", "f16", "bf16"]
)


def make_net(shape: GatedDeltaShape) -> TritonGatedDelta:
    return TritonGatedDelta(
        shape, max_rows=MAX_ROWS, max_tokens=MAX_TOKENS, device=torch.device("cuda")
    )


def assert_same(
    actual: GatedDeltaState, expected: GatedDeltaState, rows: Rows, dtype: torch.dtype
) -> None:
    for slot, position, count in rows:
        error = relative_error(actual.delta[slot], expected.delta[slot])
        assert error < STATE_ERROR[dtype], (slot, error)
        inputs = [known_inputs(state, slot, position + count) for state in (actual, expected)]
        assert torch.equal(*inputs), slot


@every_dtype
@pytest.mark.parametrize("shape", [LARGE, TILED], ids=["27b", "35b-tiled"])
@pytest.mark.parametrize("decay", [0.02, 16.0])
def test_prompts_then_a_mixed_step(
    shape: GatedDeltaShape, dtype: torch.dtype, decay: float
) -> None:
    """A slow decay keeps errors for long, a strong one reaches where exponentials overflow."""
    case = DeltaCase(shape, dtype=dtype, device="cuda", decay=decay)
    net = make_net(shape)
    steps: list[tuple[Rows, int | None]] = [
        ([(1, 0, 200), (2, 0, 3), (3, 0, 65)], 0),
        ([(1, 200, 1), (2, 3, 1), (3, 65, 64), (4, 0, 1000), (5, 0, 2)], 2),
        ([(3, 129, 1), (6, 0, 1), (1, 201, 130), (2, 4, 2)], None),
    ]
    actual, expected = case.state(), case.state()
    ends = {}
    for rows, num_decodes in steps:
        metadata = make_metadata(rows, "cuda", num_decodes=num_decodes, padding=2)
        inputs = case.inputs(metadata.num_tokens)
        out = case.run(net, inputs, actual, metadata)[:-2]
        wanted = case.reference(inputs, expected, metadata)[:-2]
        assert relative_error(out, wanted) < OUT_ERROR[dtype]
        ends.update({slot: (slot, position, count) for slot, position, count in rows})
    assert_same(actual, expected, list(ends.values()), dtype)
    assert actual.delta[7].isnan().all() and actual.conv[7].isnan().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16])
def test_a_long_prompt_in_chunks_equals_it_whole(dtype: torch.dtype) -> None:
    case = DeltaCase(LARGE, dtype=dtype, device="cuda", decay=0.05)
    net = make_net(LARGE)
    inputs = case.inputs(2000)
    whole, cut = case.state(), case.state()
    wanted = case.run(net, inputs, whole, make_metadata([(1, 0, 2000)], "cuda", num_decodes=0))
    parts, start = [], 0
    for end in (1, 700, 701, 703, 1500, 2000):
        metadata = make_metadata([(1, start, end - start)], "cuda")
        parts.append(case.run(net, take(inputs, slice(start, end)), cut, metadata))
        start = end
    assert relative_error(torch.cat(parts), wanted) < OUT_ERROR[dtype]
    assert_same(cut, whole, [(1, 0, 2000)], dtype)


class Recorded:
    """A step recorded once; its rows and inputs are written over before each replay."""

    def __init__(self, case: DeltaCase, num_rows: int, num_tokens: int, *, mixed: bool) -> None:
        self.case, self.mixed = case, mixed
        self.net = make_net(case.shape)
        self.state = case.state()
        self.inputs = case.inputs(num_tokens)
        rows: Rows = [(0, 0, 1)] * num_rows
        self.metadata = make_metadata(rows, "cuda", num_decodes=None if mixed else num_rows)
        self.metadata.num_tokens = self.metadata.max_query_len = num_tokens
        if not mixed:
            self.metadata.max_query_len = 1
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._step()  # compiles
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.out = self._step()

    def _step(self) -> torch.Tensor:
        self.net.prepare(self.metadata)
        return self.net.gated_delta(*self.inputs, self.case.weights, self.state, self.metadata)

    def replay(self, rows: Rows, inputs: Inputs) -> torch.Tensor:
        count = len(inputs[0])
        for own, given in zip(self.inputs, inputs, strict=True):
            own.fill_(float("nan"))
            own[:count] = given
        padded = [*rows, *[(0, 0, 0 if self.mixed else 1)] * (self.metadata.num_rows - len(rows))]
        new = make_metadata(padded, "cuda")
        for name in ("query_start_loc", "slots", "positions", "has_state"):
            getattr(self.metadata, name).copy_(getattr(new, name))
        self.graph.replay()
        return self.out[:count].clone()


@every_dtype
def test_a_recorded_step_holds_any_mix_of_rows(dtype: torch.dtype) -> None:
    case = DeltaCase(LARGE, dtype=dtype, device="cuda")
    step = Recorded(case, 8, 512, mixed=True)
    expected = case.state()
    ends = {}
    for rows in (
        [(1, 0, 512)],
        [(1, 512, 1), (2, 0, 1), (3, 0, 2), (4, 0, 130), (5, 0, 63)],
        [(2, 1, 1)],
        [(5, 63, 1), (4, 130, 1), (3, 2, 1), (2, 2, 1), (1, 513, 1)],
        [(2, 3, 300), (1, 514, 3)],
    ):
        inputs = case.inputs(sum(count for _, _, count in rows))
        out = step.replay(rows, inputs)
        wanted = case.reference(inputs, expected, make_metadata(rows, "cuda"))
        assert relative_error(out, wanted) < OUT_ERROR[dtype]
        ends.update({slot: (slot, position, count) for slot, position, count in rows})
    assert_same(step.state, expected, list(ends.values()), dtype)


@every_dtype
@pytest.mark.parametrize("num_rows", [1, 6])
def test_many_recorded_steps_of_decodes(dtype: torch.dtype, num_rows: int) -> None:
    """Among them padded rows, and a copy of a slot that goes on by itself."""
    case = DeltaCase(LARGE, dtype=dtype, device="cuda", decay=0.02)
    step = Recorded(case, num_rows, num_rows, mixed=False)
    expected = case.state()
    rows: Rows = [(1, 0, 1)]
    for number in range(40):
        if number == 5 and num_rows > 1:
            for state in (step.state, expected):
                copy_slot(state, 1, 3)
            rows = [(3, number, 1), *rows, (2, 0, 1)]
        inputs = case.inputs(len(rows))
        out = step.replay(rows, inputs)
        wanted = case.reference(inputs, expected, make_metadata(rows, "cuda"))
        assert relative_error(out, wanted) < OUT_ERROR[dtype], number
        rows = [(slot, position + 1, 1) for slot, position, _ in rows]
    assert_same(step.state, expected, [(slot, p - 1, 1) for slot, p, _ in rows], torch.float32)
