from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from termgen.engine.device.config.model_config import ModelConfig
from termgen.engine.device.config.rope_config import RopeConfig
from termgen.engine.device.layers.ops import TorchOps, inverse_frequencies, rotate

REAL_SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    "llama-3.1": {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "qwen2.5-yarn": {
        "rope_type": "yarn",
        "rope_theta": 1e6,
        "factor": 4.0,
        "original_max_position_embeddings": 32768,
    },
}


@pytest.mark.parametrize("scaling", REAL_SCALINGS)
def test_frequencies_of_real_models_equal_transformers(scaling: str) -> None:
    theirs = LlamaConfig(
        hidden_size=4096,
        num_attention_heads=32,
        max_position_embeddings=131072,
        rope_parameters=REAL_SCALINGS[scaling],
        architectures=["LlamaForCausalLM"],
    )
    expected, scale = ROPE_INIT_FUNCTIONS[theirs.rope_parameters["rope_type"]](theirs)
    ours = ModelConfig.from_hf(theirs.to_dict())
    actual = inverse_frequencies(ours.rope, ours.head_dim)
    torch.testing.assert_close(actual, expected, rtol=3e-7, atol=0)
    assert ours.rope.attention_factor == pytest.approx(scale)


def rotate_pair_by_pair(heads: torch.Tensor, positions: torch.Tensor, dim: int) -> torch.Tensor:
    out = heads.double().clone()
    for token, position in enumerate(positions.tolist()):
        for i in range(dim // 2):
            angle = torch.tensor(position * 10000.0 ** (-2 * i / dim), dtype=torch.float64)
            a, b = heads[token, :, i].double(), heads[token, :, i + dim // 2].double()
            out[token, :, i] = a * angle.cos() - b * angle.sin()
            out[token, :, i + dim // 2] = b * angle.cos() + a * angle.sin()
    return out


@pytest.mark.parametrize("partial", [1.0, 0.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_rotation_turns_each_pair(partial: float, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    heads = torch.randn(4, 5, 16, generator=generator).to(dtype)
    before = heads.clone()
    positions = torch.tensor([0, 1, 77, 500])
    frequencies = inverse_frequencies(RopeConfig(partial_rotary_factor=partial), 16)
    rotated = rotate(heads, TorchOps().rotation(positions, frequencies, 1.0))
    assert rotated.dtype is dtype and torch.equal(heads, before)
    expected = rotate_pair_by_pair(heads, positions, int(16 * partial))
    tolerance = 1e-4 if dtype is torch.float32 else 2e-2
    torch.testing.assert_close(rotated.double(), expected, atol=tolerance, rtol=tolerance)


def test_far_positions_keep_their_precision() -> None:
    frequencies = inverse_frequencies(RopeConfig(theta=5e5), 128)
    position = 131071
    cos = TorchOps().rotation(torch.tensor([position]), frequencies, 1.0).cos[0, 0, :64]
    exact = torch.arange(0, 128, 2, dtype=torch.float64) / 128
    expected = (position * 5e5 ** (-exact)).cos()
    assert (cos - expected).abs().max() < 0.02
