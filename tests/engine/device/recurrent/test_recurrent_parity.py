"""The reference against transformers' own gated delta net, in float32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from delta_case import make_metadata, relative_error
from transformers import DynamicCache
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig

from termgen.engine.device.kernels.recurrent.layout import GatedDeltaShape
from termgen.engine.device.recurrent.base import (
    GatedDeltaState,
    GatedDeltaWeights,
    empty_state,
    tap_major,
)
from termgen.engine.device.recurrent.reference import gated_delta_reference, gated_norm_reference
from termgen.engine.device.recurrent.torch_delta import TorchGatedDelta

HIDDEN = 24
MAX_ERROR = 1e-5
"""Largest relative error of a float32 result; 1e-4 would do."""


class Layer:
    """transformers' module with random weights, and the same layer made of our parts."""

    def __init__(self, num_k_heads: int, num_v_heads: int) -> None:
        self.config = Qwen3_5TextConfig(
            hidden_size=HIDDEN,
            num_hidden_layers=2,
            layer_types=["linear_attention", "full_attention"],
            linear_num_key_heads=num_k_heads,
            linear_num_value_heads=num_v_heads,
            linear_key_head_dim=16,
            linear_value_head_dim=32,
        )
        with torch.random.fork_rng():
            torch.manual_seed(3)
            self.theirs = modeling_qwen3_5.Qwen3_5GatedDeltaNet(self.config, 0).eval()
            with torch.no_grad():
                self.theirs.dt_bias.normal_()
                self.theirs.norm.weight.uniform_(0.5, 1.5)
        self.shape = GatedDeltaShape(
            num_k_heads=num_k_heads, num_v_heads=num_v_heads, k_dim=16, v_dim=32
        )
        conv = self.theirs.conv1d.weight.squeeze(1)
        self.weights = GatedDeltaWeights(tap_major(conv), self.theirs.A_log, self.theirs.dt_bias)
        self.net = TorchGatedDelta(self.shape)

    def state(self) -> GatedDeltaState:
        def make(size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            return torch.full(size, float("nan"), dtype=dtype)

        return empty_state(make, self.shape, num_slots=2, dtype=torch.float32)

    def ours(
        self, x: torch.Tensor, state: GatedDeltaState, position: int, *, token_by_token: bool
    ) -> torch.Tensor:
        module: Any = self.theirs
        metadata = make_metadata([(1, position, len(x))], "cpu")
        inputs = (module.in_proj_qkv(x), module.in_proj_a(x), module.in_proj_b(x))
        if token_by_token:
            o = gated_delta_reference(*inputs, self.weights, state, metadata, self.shape)
        else:
            self.net.prepare(metadata)
            o = self.net.gated_delta(*inputs, self.weights, state, metadata)
        normed = gated_norm_reference(o, module.in_proj_z(x), module.norm.weight, 1e-6)
        return module.out_proj(normed)


@pytest.fixture(params=[(2, 2), (2, 4), (1, 3)], ids=["equal", "twice", "thrice"], scope="module")
def layer(request: pytest.FixtureRequest) -> Layer:
    return Layer(*request.param)


@pytest.mark.parametrize("token_by_token", [True, False])
@pytest.mark.parametrize("length", [1, 2, 3, 70])
@torch.no_grad()
def test_a_prompt_and_the_tokens_after_it(layer: Layer, length: int, token_by_token: bool) -> None:
    generator = torch.Generator().manual_seed(length)
    x = torch.randn(length + 3, HIDDEN, generator=generator)
    cache, state = DynamicCache(config=layer.config), layer.state()
    start = 0
    for end in (length, length + 1, length + 2, length + 3):
        expected = layer.theirs(x[None, start:end], cache_params=cache)[0]
        actual = layer.ours(x[start:end], state, start, token_by_token=token_by_token)
        assert relative_error(actual, expected) < MAX_ERROR
        start = end
    assert relative_error(state.delta[1].mT, cache.layers[0].recurrent_states[0][0]) < MAX_ERROR


@torch.no_grad()
def test_the_rule_alone_from_a_given_state() -> None:
    """Without convolution and gates: weights and inputs that leave them out."""
    shape = GatedDeltaShape(num_k_heads=2, num_v_heads=6, k_dim=16, v_dim=16)
    generator = torch.Generator().manual_seed(1)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator)

    mixed, a, b = normal(67, shape.num_channels), normal(67, 6), normal(67, 6)
    conv = torch.tensor([0.0, 0.0, 0.0, 1.0]).expand(shape.num_channels, 4)
    weights = GatedDeltaWeights(conv, normal(6) * 0.3, normal(6))
    state = GatedDeltaState(normal(2, 6, 16, 16), torch.zeros(2, 4, shape.num_channels))
    activated = torch.nn.functional.silu(mixed)
    q, k, v = (
        x.unflatten(1, (-1, 16))[None] for x in activated.tensor_split((2 * 16, 4 * 16), dim=1)
    )
    decay = -weights.a_log.exp() * torch.nn.functional.softplus(a + weights.dt_bias)
    expected, expected_state = modeling_qwen3_5.torch_recurrent_gated_delta_rule(
        q, k, v, g=decay[None], beta=b.sigmoid()[None], initial_state=state.delta[1:].mT.clone(),
        output_final_state=True, use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    metadata = make_metadata([(1, 9, 67)], "cpu")
    actual = gated_delta_reference(mixed, a, b, weights, state, metadata, shape)
    assert relative_error(actual, expected[0]) < MAX_ERROR
    assert relative_error(state.delta[1].mT, expected_state[0]) < MAX_ERROR
