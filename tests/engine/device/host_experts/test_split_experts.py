"""Experts in two places: the sum is what all of them in one place give."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from triton_device import DEVICES, DEVICES_AND_DTYPES, assert_near, normal, require_triton

require_triton()

from termgen.engine.device.config.experts_config import GluClamp  # noqa: E402
from termgen.engine.device.host_experts import placement as placement_module  # noqa: E402
from termgen.engine.device.host_experts.host_list import HostExperts  # noqa: E402
from termgen.engine.device.host_experts.placement import (  # noqa: E402
    ExpertPlaces,
    HostCompute,
    Placement,
)
from termgen.engine.device.host_experts.split_ops import SplitOps  # noqa: E402
from termgen.engine.device.layers.linear import Build, FloatLinear  # noqa: E402
from termgen.engine.device.layers.ops import TorchOps  # noqa: E402
from termgen.engine.device.layers.stored_rows import StoredRows  # noqa: E402
from termgen.engine.device.native.expert_kernels import Activation  # noqa: E402
from termgen.engine.device.native.int8_blocks import (  # noqa: E402
    Int8Blocks,
    dequantize,
    quantize_rows,
)

HIDDEN, INNER, TOP_K, MOST = 64, 32, 2, 600
devices_and_dtypes = pytest.mark.parametrize(
    ("device", "dtype"), [p for p in DEVICES_AND_DTYPES if p.id not in ("cuda-f32", "cuda-f16")]
)


class Layer:
    """A layer's experts, and one in which all are floats in one place."""

    def __init__(
        self,
        *,
        device: str,
        dtype: torch.dtype,
        num_on_card: int,
        num_experts: int = 6,
        has_shared: bool = False,
        bits: int = 8,
        clamp: GluClamp | None = None,
        number: int = 0,
        compute: HostCompute | None = None,
    ) -> None:
        self.device, self.dtype = torch.device(device), dtype
        build = Build(dtype, self.device, FloatLinear, TorchOps())
        num = num_experts + has_shared
        shapes = (num, 2 * INNER, HIDDEN), (num, HIDDEN, INNER)
        self.lists: list[HostExperts] = []
        self.floats: list[torch.Tensor] = []
        for seed, shape in enumerate(shapes, 10 * number):
            matrices = HostExperts(shape, build, bits)
            values = normal(*shape, dtype=torch.float32, device=device, seed=seed, scale=0.2)
            for expert, matrix in enumerate(values):
                matrices[expert] = matrix
            self.lists.append(matrices)
            whole = [dequantize(one.quantized(self.device)) for one in matrices.blocks]
            self.floats.append(torch.stack(whole))
        self.biases: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)
        if clamp is not None:
            self.biases = (
                normal(num, 2 * INNER, dtype=dtype, device=device, seed=5),
                normal(num, HIDDEN, dtype=dtype, device=device, seed=6),
            )
        if compute is None:
            compute = HostCompute(HIDDEN, TOP_K + has_shared, MOST, device=self.device, threads=2)
        limits = (0.0, 0.0) if clamp is None else (clamp.limit, clamp.alpha)
        self.places = ExpertPlaces(
            number,
            (self.lists[0], self.lists[1]),
            compute,
            num_experts=num_experts,
            num_on_card=num_on_card,
            activation=Activation("silu", *limits),
            biases=self.biases,
        )
        for matrices in self.lists:
            matrices.places = self.places
            matrices.finalize()
        self.num_experts, self.has_shared = num_experts, has_shared
        self.options: dict[str, Any] = {
            "top_k": TOP_K,
            "renormalize": True,
            "activation": "silu",
            "has_shared": has_shared,
            "clamp": clamp,
        }

    def inputs(self, num_tokens: int, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
        device = str(self.device)
        x = normal(num_tokens, HIDDEN, dtype=self.dtype, device=device, seed=seed)
        num_logits = self.num_experts + self.has_shared
        # No two are so near each other that rounding decides the choice of experts.
        logits = normal(num_tokens, num_logits, dtype=torch.float32, device=device, seed=seed + 1)
        return x, (logits.argsort(1) * 0.25).to(self.dtype)

    def run(self, x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        names = "gate_up_bias", "down_bias"
        options = self.options | dict(zip(names, self.biases, strict=True))
        return SplitOps().experts(x, logits, *self.lists, **options)

    def check(self, num_tokens: int) -> None:
        x, logits = self.inputs(num_tokens)
        names = "gate_up_bias", "down_bias"
        biases = [None if bias is None else bias.float() for bias in self.biases]
        options = self.options | dict(zip(names, biases, strict=True))
        expected = TorchOps().experts(x.float(), logits.float(), *self.floats, **options)
        assert_near(self.run(x, logits), expected, self.dtype)


@devices_and_dtypes
@pytest.mark.parametrize("num_on_card", [0, 2, 5, 6])
@pytest.mark.parametrize("num_tokens", [1, 3, 40])
def test_a_token_has_experts_in_both_places(
    num_tokens: int, num_on_card: int, device: str, dtype: torch.dtype
) -> None:
    Layer(device=device, dtype=dtype, num_on_card=num_on_card).check(num_tokens)


@devices_and_dtypes
@pytest.mark.parametrize("num_on_card", [0, 3])
@pytest.mark.parametrize("bits", [4, 8])
def test_an_expert_of_all_tokens_is_on_the_gpu(
    bits: int, num_on_card: int, device: str, dtype: torch.dtype
) -> None:
    layer = Layer(device=device, dtype=dtype, num_on_card=num_on_card, has_shared=True, bits=bits)
    layer.check(7)
    assert layer.places.slots.tolist()[-1] == num_on_card


@devices_and_dtypes
def test_each_place_has_the_biases_of_its_experts(device: str, dtype: torch.dtype) -> None:
    clamp = GluClamp(alpha=1.7, limit=2.0)
    layer = Layer(device=device, dtype=dtype, num_on_card=3, clamp=clamp)
    layer.check(9)
    layer.places.replace(1, 5)
    layer.check(9)


@pytest.mark.parametrize("device", DEVICES)
def test_long_prompts_are_several_calls(device: str) -> None:
    Layer(device=device, dtype=torch.float32, num_on_card=2).check(600)


@pytest.mark.parametrize("device", DEVICES)
def test_an_expert_takes_the_place_of_another(device: str) -> None:
    layer = Layer(device=device, dtype=torch.float32, num_on_card=2)
    for slot, expert in ((0, 4), (1, 3), (0, 1), (1, 0)):
        layer.places.replace(slot, expert)
        layer.check(12)
    assert layer.places.on_card == [1, 0]
    assert layer.places.slots.tolist() == [1, 0, -1, -1, -1, -1]
    assert layer.places.codes.tolist() == [-1, -2, 2, 3, 4, 5]


@pytest.mark.parametrize("device", DEVICES)
def test_experts_in_both_widths_are_kept_in_eight_bits(device: str) -> None:
    build = Build(torch.float32, torch.device(device), FloatLinear, TorchOps())
    shapes = (4, 2 * INNER, HIDDEN), (4, HIDDEN, INNER)
    lists = [HostExperts(shape, build, 8) for shape in shapes]
    for matrices in lists:
        for expert, bits in enumerate((8, 4, 4, 8)):
            rows = torch.randn(*matrices.shape[1:])
            matrices[expert] = dequantize(quantize_rows(rows, bits)).to(device)
    expected = [[dequantize(one.quantized()) for one in m.blocks] for m in lists]
    assert [one.num_bits for one in lists[0].blocks] == [8] * 4
    compute = HostCompute(HIDDEN, TOP_K, 8, device=torch.device(device), threads=1)
    places = ExpertPlaces(
        *(0, (lists[0], lists[1]), compute),
        num_experts=4,
        num_on_card=2,
        activation=Activation("silu"),
    )
    places.replace(0, 2)
    assert places.down is not None
    found = dequantize(places.down.stored(0))
    torch.testing.assert_close(found.cpu(), expected[1][2], rtol=0, atol=0)


def test_values_of_mxfp4_are_floats_on_the_gpu() -> None:
    build = Build(torch.float32, torch.device("cpu"), FloatLinear, TorchOps())
    generator = torch.Generator().manual_seed(4)
    lists = []
    for num_rows, num_columns in ((2 * INNER, HIDDEN), (HIDDEN, INNER)):
        matrices = HostExperts((4, num_rows, num_columns), build, 8)
        for expert in range(4):
            shape = num_rows, num_columns // 32, 17
            blocks = torch.randint(0, 256, shape, generator=generator)
            blocks[:, :, 0] = blocks[:, :, 0] % 4 + 118
            matrices.load_stored(expert, StoredRows("MXFP4", blocks.to(torch.uint8)))
        lists.append(matrices)
    compute = HostCompute(HIDDEN, TOP_K, 8, device=torch.device("cpu"), threads=1)
    places = ExpertPlaces(
        *(0, (lists[0], lists[1]), compute),
        num_experts=4,
        num_on_card=2,
        activation=Activation("silu"),
    )
    places.replace(1, 3)
    for host, card in ((lists[0], places.gate_up), (lists[1], places.down)):
        assert card is not None and card.weights.are_floats
        held = sum(p.nbytes for p in card.parameters()) - card.row_scale.nbytes
        assert host.card_bytes == 2 * held
        for slot, expert in enumerate(places.on_card):
            expected = dequantize(host.blocks[expert].quantized())
            assert torch.equal(dequantize(card.stored(slot)), expected)


def test_what_was_rounded_is_found_again() -> None:
    for bits in (8, 4):
        rounded = quantize_rows(torch.randn(70, 96), bits)
        found = Int8Blocks(rounded).quantized()
        for part, expected in zip(found, rounded, strict=True):
            assert torch.equal(part, expected)


@pytest.mark.parametrize("device", DEVICES)
def test_the_most_used_experts_come_to_the_gpu(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement_module, "STEPS_BETWEEN", 1)
    compute = HostCompute(HIDDEN, TOP_K, MOST, device=torch.device(device), threads=2)
    layers = [
        Layer(device=device, dtype=torch.float32, num_on_card=2, number=number, compute=compute)
        for number in range(2)
    ]
    placement = Placement([layer.places for layer in layers])
    favourites = ((4, 5), (1, 3))
    for step in range(40):
        for layer, chosen in zip(layers, favourites, strict=True):
            x, logits = layer.inputs(3, seed=step)
            logits[:, list(chosen)] += 50.0
            layer.run(x, logits)
        if device == "cuda":
            torch.cuda.synchronize()
        placement.before_step()
    assert [sorted(layer.places.on_card) for layer in layers] == [[4, 5], [1, 3]]
    assert placement.counts.sum() == 40 * 2 * 3 * TOP_K
    for layer in layers:
        layer.check(5)


def test_experts_used_alike_hardly_ever_change_places(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Layer(device="cpu", dtype=torch.float32, num_on_card=2)
    placement = Placement([layer.places])
    changes: list[int] = []
    monkeypatch.setattr(layer.places, "replace", lambda slot, expert: changes.append(expert))
    rng = np.random.default_rng(3)
    for _ in range(2000):
        layer.places.counts += torch.from_numpy(rng.multinomial(4, [1 / 6] * 6))
        placement.before_step()
    assert len(changes) < 5


@pytest.mark.gpu
@pytest.mark.parametrize("num_on_card", [0, 3])
def test_a_recording_gives_what_eager_does(num_on_card: int) -> None:
    layer = Layer(device="cuda", dtype=torch.bfloat16, num_on_card=num_on_card)
    x, logits = layer.inputs(4)
    layer.run(x, logits)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer.run(x, logits)
    for seed in range(5):
        if seed == 3 and num_on_card:
            layer.places.replace(1, 5)
        new_x, new_logits = layer.inputs(4, seed=10 + seed)
        x.copy_(new_x)
        logits.copy_(new_logits)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, layer.run(new_x, new_logits))


@pytest.mark.gpu
def test_rehearsals_compute_nothing_but_recordings_do() -> None:
    layer = Layer(device="cuda", dtype=torch.float32, num_on_card=0)
    placement = Placement([layer.places])
    x, logits = layer.inputs(4)
    expected = layer.run(x, logits).clone()
    torch.cuda.synchronize()  # the CPU's part has ended as well
    counts = placement.counts.copy()
    graph = torch.cuda.CUDAGraph()
    with placement.at_rest():
        layer.places.compute._out.zero_()
        assert not layer.run(x, logits).any()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            out = layer.run(x, logits)
        graph.replay()
        torch.cuda.synchronize()
    assert torch.equal(out, expected) and (placement.counts == counts).all()
