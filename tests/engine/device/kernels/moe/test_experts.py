"""Mixtures of experts, kernels against the loop over experts, in every cut and at every edge."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from triton_device import DEVICES, DEVICES_AND_DTYPES, assert_near, normal, require_triton

require_triton()

from termgen.engine.device.config.experts_config import GluClamp  # noqa: E402
from termgen.engine.device.kernels.moe.experts import (  # noqa: E402
    ExpertTiles,
    Tile,
    choose_tiles,
    experts,
)
from termgen.engine.device.kernels.moe.routing import max_tiles  # noqa: E402
from termgen.engine.device.layers.ops import TorchOps  # noqa: E402
from termgen.engine.device.runner.dispatch import decode_sizes  # noqa: E402
from termgen.engine.device.runner.warm_up import size_classes  # noqa: E402

TILES = {
    "16": ExpertTiles(16, Tile(16, 32, 2, 2, 1), Tile(32, 64, 4, 3, 1), chunk=16, scan=64),
    "32": ExpertTiles(32, Tile(32, 32, 4, 2, 3), Tile(32, 64, 4, 2, 2), chunk=64, scan=256),
    "64": ExpertTiles(64, Tile(64, 32, 4, 3, 8), Tile(64, 32, 4, 2, 1), chunk=32, scan=128),
}
cuts = pytest.mark.parametrize("tiles", TILES.values(), ids=TILES.keys())
# A GPU runs only the models' type: each further type compiles as many kernels again.
devices_and_dtypes = pytest.mark.parametrize(
    ("device", "dtype"), [p for p in DEVICES_AND_DTYPES if p.id not in ("cuda-f32", "cuda-f16")]
)


class Case:
    def __init__(
        self,
        num_tokens: int,
        *,
        dtype: torch.dtype,
        device: str,
        num_experts: int = 6,
        top_k: int = 2,
        hidden: int = 40,
        inner: int = 32,
    ) -> None:
        def draw(*shape: int, seed: int, scale: float = 1.0) -> torch.Tensor:
            return normal(*shape, dtype=dtype, device=device, seed=seed, scale=scale)

        self.x = draw(num_tokens, hidden, seed=1)
        # All values of a row differ, even in half types, so rounding does not decide the choice of
        # experts.
        ranks = draw(num_tokens, num_experts, seed=2).float().argsort(1)
        self.logits = (ranks * 0.25).to(dtype)
        self.gate_up = draw(num_experts, 2 * inner, hidden, seed=3, scale=hidden**-0.5)
        self.down = draw(num_experts, hidden, inner, seed=4, scale=inner**-0.5)
        self.options: dict[str, Any] = {"top_k": top_k, "renormalize": True, "activation": "silu"}

    def add_biases(self) -> None:
        weights = {"gate_up_bias": self.gate_up, "down_bias": self.down}
        for seed, (name, weight) in enumerate(weights.items(), 5):
            device = str(weight.device)
            bias = normal(*weight.shape[:2], dtype=weight.dtype, device=device, seed=seed)
            self.options[name] = bias

    def run(self, tiles: ExpertTiles | None, rows: slice = slice(None)) -> torch.Tensor:
        x, logits = self.x[rows].contiguous(), self.logits[rows].contiguous()
        return experts(x, logits, self.gate_up, self.down, tiles=tiles, **self.options)

    def check(self, tiles: ExpertTiles | None) -> None:
        weights = self.gate_up.float(), self.down.float()
        options = {
            key: value.float() if isinstance(value, torch.Tensor) else value
            for key, value in self.options.items()
        }
        expected = TorchOps().experts(self.x.float(), self.logits.float(), *weights, **options)
        assert_near(self.run(tiles), expected, self.x.dtype)


@devices_and_dtypes
@cuts
@pytest.mark.parametrize("num_tokens", [1, 21])
def test_numbers_of_tokens(
    device: str, dtype: torch.dtype, tiles: ExpertTiles, num_tokens: int
) -> None:
    Case(num_tokens, dtype=dtype, device=device).check(tiles)


@devices_and_dtypes
@cuts
def test_odd_sizes(device: str, dtype: torch.dtype, tiles: ExpertTiles) -> None:
    Case(5, dtype=dtype, device=device, hidden=72, inner=33).check(tiles)


@devices_and_dtypes
@pytest.mark.parametrize(
    ("activation", "renormalize"), [("silu", False), ("gelu", True), ("gelu_tanh", False)]
)
def test_options(device: str, dtype: torch.dtype, activation: str, renormalize: bool) -> None:
    case = Case(3, dtype=dtype, device=device, num_experts=3, top_k=3)
    case.options.update(activation=activation, renormalize=renormalize)
    case.check(TILES["16"])


@devices_and_dtypes
@cuts
@pytest.mark.parametrize("limit", [None, 0.4])
def test_biases_and_clamps(
    device: str, dtype: torch.dtype, tiles: ExpertTiles, limit: float | None
) -> None:
    case = Case(9, dtype=dtype, device=device, hidden=72, inner=33)
    case.add_biases()
    plain = case.run(tiles)
    if limit is not None:
        case.options["clamp"] = GluClamp(alpha=1.702, limit=limit)
        assert not torch.allclose(case.run(tiles), plain, atol=0.1)
    case.check(tiles)


@devices_and_dtypes
@pytest.mark.parametrize("num_tokens", [1, 2, 3])
def test_pairs_that_are_not_sorted(device: str, dtype: torch.dtype, num_tokens: int) -> None:
    """The result of a few is the same bit by bit as among many; two tokens share an expert."""
    case = Case(24, dtype=dtype, device=device, num_experts=48)
    case.logits[1] = case.logits[0]
    many = case.run(TILES["16"])
    few = case.run(TILES["16"], slice(num_tokens))
    assert torch.equal(few, many[:num_tokens])
    case.check(TILES["16"])


@devices_and_dtypes
@cuts
@pytest.mark.parametrize("top_k", [1, 3])
def test_a_shared_expert(device: str, dtype: torch.dtype, tiles: ExpertTiles, top_k: int) -> None:
    """The last expert, which no router picks, though its logit may be the highest."""
    case = Case(9, dtype=dtype, device=device, num_experts=5, top_k=top_k)
    case.logits[::2, -1] = 7.0
    others = Case(9, dtype=dtype, device=device, num_experts=5, top_k=top_k)
    others.logits, others.gate_up, others.down = (
        tensor.contiguous() for tensor in (case.logits[:, :-1], case.gate_up[:-1], case.down[:-1])
    )
    case.options["has_shared"] = True
    case.check(tiles)
    alone = Case(9, dtype=dtype, device=device, num_experts=1, top_k=1)
    alone.gate_up, alone.down = case.gate_up[-1:].contiguous(), case.down[-1:].contiguous()
    added = others.run(tiles) + case.logits[:, -1:].sigmoid() * alone.run(tiles)
    assert_near(case.run(tiles), added.float(), dtype)


@devices_and_dtypes
@cuts
@pytest.mark.parametrize("top_k", [1, 3])
def test_weighted_inputs(device: str, dtype: torch.dtype, tiles: ExpertTiles, top_k: int) -> None:
    """Each expert alone, for inputs times the sigmoid of its logit; a shared one for all as they
    are."""
    case = Case(9, dtype=dtype, device=device, num_experts=5, top_k=top_k)
    case.options.update(renormalize=False, weighs_inputs=True)
    case.check(tiles)
    expected = torch.zeros_like(case.x, dtype=torch.float32)
    chosen = case.logits.topk(top_k).indices
    for expert in range(5):
        inputs = case.x.float() * case.logits[:, expert, None].float().sigmoid()
        gate, up = (inputs @ case.gate_up[expert].float().T).chunk(2, 1)
        outputs = torch.nn.functional.silu(gate) * up @ case.down[expert].float().T
        expected += outputs * (chosen == expert).any(1, keepdim=True)
    assert_near(case.run(tiles), expected, dtype)

    case.options["has_shared"] = True
    case.logits = case.logits[:, :-1].contiguous()
    case.check(tiles)
    case.gate_up[:-1] = 0.0  # what is left is that of the last, whatever the logits
    alone = case.run(tiles)
    case.logits.neg_()
    assert torch.equal(case.run(tiles), alone)
    gate, up = (case.x.float() @ case.gate_up[-1].float().T).chunk(2, 1)
    outputs = torch.nn.functional.silu(gate) * up @ case.down[-1].float().T
    assert_near(alone, outputs, dtype)


@devices_and_dtypes
def test_experts_without_tokens(device: str, dtype: torch.dtype) -> None:
    """Two of nine have all tokens; the values of an expert without tokens are not read."""
    case = Case(20, dtype=dtype, device=device, num_experts=9)
    case.logits[:] = -5.0
    case.logits[:, 3], case.logits[:, 7] = 2.0, 1.0
    case.check(TILES["16"])
    expected = case.run(TILES["16"])
    for expert in set(range(9)) - {3, 7}:
        case.gate_up[expert] = case.down[expert] = float("nan")
    assert torch.equal(case.run(TILES["16"]), expected)


@devices_and_dtypes
def test_the_cut_that_serving_chooses(device: str, dtype: torch.dtype) -> None:
    for num_tokens in (1, 12) if device == "cpu" else (1, 40, 100, 300, 900):
        Case(num_tokens, dtype=dtype, device=device, num_experts=8, top_k=2).check(None)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("tiles", [TILES["16"], TILES["64"]], ids=["16", "64"])
def test_a_token_does_not_see_the_others(device: str, tiles: ExpertTiles) -> None:
    """The result is the same bit by bit: alone, among others, and beside tokens of NaN."""
    case = Case(6, dtype=torch.float16, device=device)
    expected = case.run(tiles)
    assert torch.equal(case.run(tiles), expected)
    x, logits = case.x.clone(), case.logits.clone()
    for row in (0, 5):
        assert torch.equal(case.run(tiles, slice(row, row + 1))[0], expected[row])
        case.x, case.logits = torch.full_like(x, float("nan")), torch.full_like(logits, torch.nan)
        case.x[row], case.logits[row] = x[row], logits[row]
        assert torch.equal(case.run(tiles)[row], expected[row])
        case.x, case.logits = x, logits


@pytest.mark.gpu
@pytest.mark.parametrize("is_clamped", [False, True])
def test_a_recording_gives_what_eager_does(is_clamped: bool) -> None:
    """The result is the same bit by bit, padded or not, whatever values it was recorded with."""
    recorded = Case(32, dtype=torch.bfloat16, device="cuda", num_experts=64, top_k=4, hidden=256)
    if is_clamped:
        recorded.add_biases()
        recorded.options["clamp"] = GluClamp(alpha=1.702, limit=0.4)
    recorded.run(None)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    x, logits = recorded.x.clone(), recorded.logits.clone()
    recorded.x.zero_()
    recorded.logits.zero_()
    with torch.cuda.graph(graph):
        out = recorded.run(None)
    for shift in range(3):
        recorded.x.copy_(x.roll(shift, 0))
        recorded.logits.copy_(logits.roll(-shift, 0))
        graph.replay()
        assert torch.equal(out, recorded.run(None))
        assert torch.equal(out[:19], recorded.run(None, slice(19)))
        recorded.logits[19:] = float("nan")  # values of padded tokens do not matter
        assert torch.equal(out[:19], recorded.run(None)[:19])


def test_no_token() -> None:
    case = Case(0, dtype=torch.float32, device="cpu")
    assert case.run(None).shape == (0, 40)
    options = case.options
    out = TorchOps().experts(case.x, case.logits, case.gate_up, case.down, **options)
    assert out.shape == (0, 40)


@pytest.mark.parametrize(("num_experts", "top_k"), [(128, 8), (8, 2), (64, 6), (4, 4)])
def test_padding_keeps_the_cut(num_experts: int, top_k: int) -> None:
    def cut(num_tokens: int) -> ExpertTiles:
        return choose_tiles(num_tokens, num_experts=num_experts, top_k=top_k, itemsize=2)

    for max_num_seqs in (1, 3, 10, 100, 256, 512):
        sizes = decode_sizes(max_num_seqs)
        for num_tokens in range(1, max_num_seqs + 1):
            assert cut(num_tokens) == cut(min(s for s in sizes if s >= num_tokens))
    warmed = {cut(num_tokens) for num_tokens in size_classes(20000)}
    assert {cut(num_tokens) for num_tokens in range(1, 20000)} <= warmed


def test_there_are_tiles_for_the_worst_case() -> None:
    """One pair for each expert but one, and all others of that one."""
    for num_pairs in range(1, 200):
        for num_experts in (1, 3, 8, 128):
            used = min(num_pairs, num_experts)
            worst = used - 1 + -(-(num_pairs - used + 1) // 16)
            assert worst <= max_tiles(num_pairs, num_experts, 16) <= num_pairs
