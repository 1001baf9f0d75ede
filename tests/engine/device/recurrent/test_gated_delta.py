"""Both forms of the gated delta net against the recurrence token by token: in torch, and by Triton
kernels, which are interpreted on a CPU."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch
from delta_case import (
    SMALL,
    DeltaCase,
    Rows,
    copy_slot,
    join,
    known_inputs,
    make_metadata,
    relative_error,
    take,
)
from triton_device import DEVICES_AND_DTYPES, IS_CUDA, require_triton

from termgen.engine.device.kernels.recurrent.layout import GatedDeltaShape
from termgen.engine.device.recurrent.base import GatedDeltaNet, GatedDeltaState
from termgen.engine.device.recurrent.torch_delta import TorchGatedDelta

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
STATE_ERROR = {F32: 1e-4 if IS_CUDA else 1e-5, F16: 1e-3, BF16: 1e-3}
OUT_ERROR = {F32: 1e-4 if IS_CUDA else 1e-5, F16: 1e-3, BF16: 4e-3}
NETS = [
    pytest.param("torch", "cpu", F32, id="torch-f32"),
    pytest.param("torch", "cpu", BF16, id="torch-bf16"),
    *(
        pytest.param("triton", *p.values, marks=p.marks, id=f"triton-{p.id}")
        for p in DEVICES_AND_DTYPES
    ),
]
every_net = pytest.mark.parametrize(("kind", "device", "dtype"), NETS)
TWICE = SMALL
EQUAL = GatedDeltaShape(num_k_heads=3, num_v_heads=3, k_dim=32, v_dim=16)
THRICE = GatedDeltaShape(num_k_heads=2, num_v_heads=6, k_dim=16, v_dim=16)
TILED = GatedDeltaShape(num_k_heads=2, num_v_heads=6, k_dim=16, v_dim=16, is_tiled=True)
ONE_HEAD = GatedDeltaShape(num_k_heads=1, num_v_heads=1, k_dim=16, v_dim=16)


def make_net(kind: str, case: DeltaCase) -> GatedDeltaNet:
    if kind == "torch":
        return TorchGatedDelta(case.shape)
    require_triton()
    from termgen.engine.device.recurrent.triton_delta import TritonGatedDelta

    device = torch.device(case.device)
    return TritonGatedDelta(case.shape, max_rows=16, max_tokens=512, device=device)


def assert_same_state(
    actual: GatedDeltaState, expected: GatedDeltaState, ends: dict[int, int], dtype: torch.dtype
) -> None:
    """ends: slot -> the position that it has reached."""
    for slot, position in ends.items():
        assert relative_error(actual.delta[slot], expected.delta[slot]) < STATE_ERROR[dtype], slot
        inputs = [known_inputs(state, slot, position) for state in (actual, expected)]
        assert torch.equal(*inputs), slot


@every_net
@pytest.mark.parametrize(
    ("shape", "is_recorded"),
    [
        pytest.param(TWICE, True, id="twice-recorded"),
        pytest.param(EQUAL, False, id="equal"),
        pytest.param(THRICE, False, id="thrice"),
        pytest.param(TILED, True, id="tiled-recorded"),
    ],
)
def test_a_mixed_step_equals_the_reference(
    kind: str, device: str, dtype: torch.dtype, shape: GatedDeltaShape, is_recorded: bool
) -> None:
    """Decodes first, among them a sequence's first token; then prompts that begin or go on; then,
    if it is recorded, padding. Slots are full of NaN before."""
    case = DeltaCase(shape, dtype=dtype, device=device)
    net = make_net(kind, case)
    prompts: Rows = [(1, 0, 5), (2, 0, 3), (3, 0, 2)]
    step: Rows = [(1, 5, 1), (4, 0, 1), (2, 3, 64), (5, 0, 2), (6, 0, 1), (3, 2, 67)]
    if is_recorded:  # rows of one token come first
        step = sorted(step, key=lambda row: row[2] > 1)
    first, second = case.inputs(10), case.inputs(136 + 3 * is_recorded)
    begun = make_metadata(prompts, device, num_decodes=None if is_recorded else 0)
    mixed = make_metadata(
        step, device, num_decodes=None if is_recorded else 2, padding=3 * is_recorded
    )
    actual, expected = case.state(), case.state()
    for inputs, metadata in ((first, begun), (second, mixed)):
        out = case.run(net, inputs, actual, metadata)
        real = int(metadata.query_start_loc[-1])
        wanted = case.reference(inputs, expected, metadata)[:real]
        assert relative_error(out[:real], wanted) < OUT_ERROR[dtype]
        assert out[real:].isnan().all(), "wrote results of tokens of no row"
    assert_same_state(actual, expected, {slot: p + n for slot, p, n in step}, dtype)
    for slot in (0, 7):
        assert actual.delta[slot].isnan().all() and actual.conv[slot].isnan().all()


@every_net
@pytest.mark.parametrize("length", [1, 2, 3, 4, 63, 64, 65, 130])
def test_prompts_of_any_length(kind: str, device: str, dtype: torch.dtype, length: int) -> None:
    """And the token after each, which reads what the prompt left in the state."""
    case = DeltaCase(dtype=dtype, device=device, seed=length)
    net = make_net(kind, case)
    inputs = case.inputs(length + 1)
    actual, expected = case.state(), case.state()
    for part, rows, decodes in (
        (slice(0, length), [(3, 0, length)], 0),
        (slice(length, None), [(3, length, 1)], 1),
    ):
        metadata = make_metadata(rows, device, num_decodes=decodes)
        out = case.run(net, take(inputs, part), actual, metadata)
        wanted = case.reference(take(inputs, part), expected, metadata)
        assert relative_error(out, wanted) < OUT_ERROR[dtype]
    assert_same_state(actual, expected, {3: length + 1}, dtype)


@every_net
def test_resuming_equals_a_whole_prompt_at_every_cut(
    kind: str, device: str, dtype: torch.dtype
) -> None:
    """Kernels that are interpreted try the cuts where a ring or a chunk goes over its edge."""
    length = 133
    case = DeltaCase(ONE_HEAD, dtype=dtype, device=device)
    net = make_net(kind, case)
    inputs = case.inputs(length)
    whole = case.state()
    wanted = case.run(net, inputs, whole, make_metadata([(1, 0, length)], device, num_decodes=0))
    cuts = range(1, length)
    if kind == "triton" and device == "cpu":
        cuts = [1, 2, 3, 4, 61, 63, 64, 65, 66, 127, 128, 129, 130, 132]
    for cut in cuts:
        state = case.state()
        parts = [
            case.run(net, take(inputs, part), state, make_metadata([row], device, num_decodes=0))
            for part, row in (
                (slice(0, cut), (1, 0, cut)),
                (slice(cut, None), (1, cut, length - cut)),
            )
        ]
        assert relative_error(torch.cat(parts), wanted) < OUT_ERROR[dtype], cut
        assert_same_state(state, whole, {1: length}, dtype)


@every_net
def test_a_prompt_in_pieces_of_one_to_five_tokens(
    kind: str, device: str, dtype: torch.dtype
) -> None:
    case = DeltaCase(ONE_HEAD, dtype=dtype, device=device)
    net = make_net(kind, case)
    inputs = case.inputs(30)
    expected, state = case.state(), case.state()
    wanted = case.reference(inputs, expected, make_metadata([(1, 0, 30)], device, num_decodes=0))
    bounds = [0, 1, 3, 6, 10, 15, 16, 17, 18, 20, 21, 24, 29, 30]
    parts = []
    for start, end in pairwise(bounds):
        # A recorded step: which kernel computes a row is settled on the device.
        metadata = make_metadata([(1, start, end - start)], device)
        parts.append(case.run(net, take(inputs, slice(start, end)), state, metadata))
    assert relative_error(torch.cat(parts), wanted) < OUT_ERROR[dtype]
    assert_same_state(state, expected, {1: 30}, dtype)


@every_net
def test_two_tails_of_one_copied_slot(kind: str, device: str, dtype: torch.dtype) -> None:
    case = DeltaCase(dtype=dtype, device=device)
    net = make_net(kind, case)
    shared, tails = case.inputs(6), [case.inputs(1), case.inputs(70)]
    state = case.state()
    case.run(net, shared, state, make_metadata([(2, 0, 6)], device, num_decodes=0))
    copy_slot(state, 2, 5)
    rows = [(5, 6, 1), (2, 6, 70)]
    out = case.run(net, join(tails), state, make_metadata(rows, device))
    for tail, part, (slot, _, count) in zip(tails, (out[:1], out[1:]), rows, strict=True):
        alone = case.state()
        metadata = make_metadata([(slot, 0, 6 + count)], device, num_decodes=0)
        wanted = case.reference(join([shared, tail]), alone, metadata)[6:]
        assert relative_error(part, wanted) < OUT_ERROR[dtype]
        assert_same_state(state, alone, {slot: 6 + count}, dtype)


@every_net
def test_a_row_of_a_mixed_step_equals_the_row_alone(
    kind: str, device: str, dtype: torch.dtype
) -> None:
    case = DeltaCase(ONE_HEAD, dtype=dtype, device=device)
    net = make_net(kind, case)
    counts = [(1, 1), (2, 1), (3, 2), (4, 66), (5, 4)]
    inputs = {slot: case.inputs(4 + count) for slot, count in counts}
    seed = random.Random(7)
    print("seed 7")
    alone = case.state()
    results = {}
    for slot, count in counts:
        for part, row in ((slice(0, 4), (slot, 0, 4)), (slice(4, None), (slot, 4, count))):
            metadata = make_metadata([row], device, num_decodes=int(row[2] == 1))
            results[slot] = case.run(net, take(inputs[slot], part), alone, metadata)
    for _ in range(3):
        singles, longer = counts[:2], counts[2:]
        seed.shuffle(singles)
        seed.shuffle(longer)
        order = singles + longer
        state = case.state()
        begun = make_metadata([(slot, 0, 4) for slot, _ in order], device, num_decodes=0)
        heads = [take(inputs[slot], slice(0, 4)) for slot, _ in order]
        case.run(net, join(heads), state, begun)
        metadata = make_metadata([(slot, 4, n) for slot, n in order], device, num_decodes=2)
        out = case.run(
            net, join([take(inputs[slot], slice(4, None)) for slot, _ in order]), state, metadata
        )
        for (slot, count), part in zip(order, out.split([n for _, n in order]), strict=True):
            assert relative_error(part, results[slot]) < 1e-6, slot
            assert relative_error(state.delta[slot], alone.delta[slot]) < 1e-6, slot
            inputs_left = [known_inputs(s, slot, 4 + count) for s in (state, alone)]
            assert torch.equal(*inputs_left)


@every_net
def test_strong_decay(kind: str, device: str, dtype: torch.dtype) -> None:
    """Sums of log decays far below -88, where float32 ends, beside heads that hardly decay."""
    case = DeltaCase(dtype=dtype, device=device, decay=16.0)
    net = make_net(kind, case)
    mixed, a, b = case.inputs(70)
    inputs = (mixed, a * 4 + 4, b)
    assert case.weights.a_log.exp().max() == 16
    actual, expected = case.state(), case.state()
    metadata = make_metadata([(1, 0, 70)], device, num_decodes=0)
    out = case.run(net, inputs, actual, metadata)
    wanted = case.reference(inputs, expected, metadata)
    assert relative_error(out, wanted) < OUT_ERROR[dtype]
    assert_same_state(actual, expected, {1: 70}, dtype)


@every_net
def test_equal_keys_that_hardly_decay(kind: str, device: str, dtype: torch.dtype) -> None:
    """One token again and again: powers of M grow to 10^18, while its inverse stays at most 1."""
    case = DeltaCase(dtype=dtype, device=device, decay=1e-4)
    net = make_net(kind, case)
    mixed, a, b = (x[:1].expand(100, -1).contiguous() for x in case.inputs(1))
    inputs = (mixed, a, b.abs() + 4)
    actual, expected = case.state(), case.state()
    metadata = make_metadata([(1, 0, 100)], device, num_decodes=0)
    out = case.run(net, inputs, actual, metadata)
    wanted = case.reference(inputs, expected, metadata)
    assert relative_error(out, wanted) < OUT_ERROR[dtype]
    assert_same_state(actual, expected, {1: 100}, dtype)


@every_net
def test_padded_rows_touch_the_scratch_slot_alone(
    kind: str, device: str, dtype: torch.dtype
) -> None:
    """Also with a token each, as in a recorded step of decodes."""
    case = DeltaCase(dtype=dtype, device=device)
    net = make_net(kind, case)
    state = case.state()
    inputs = case.inputs(4)
    rows = [(3, 0, 1), (0, 0, 1), (0, 0, 1), (0, 0, 1)]
    out = case.run(net, inputs, state, make_metadata(rows, device, num_decodes=4))
    expected = case.state()
    wanted = case.reference(
        take(inputs, slice(0, 1)), expected, make_metadata(rows[:1], device, num_decodes=1)
    )
    assert relative_error(out[:1], wanted) < OUT_ERROR[dtype]
    assert_same_state(state, expected, {3: 1}, dtype)
    for slot in (1, 2, 4, 5, 6, 7):
        assert state.delta[slot].isnan().all() and state.conv[slot].isnan().all()
