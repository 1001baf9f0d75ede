"""Engines on a GPU whose experts the CPU computes give the tokens of those where none are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from drafted_runs import engine_of, run

from termgen.errors import ConfigError

pytestmark = pytest.mark.gpu

SIZES = {
    "qwen3_moe": {"moe_intermediate_size": 32},
    "mixtral": {"intermediate_size": 64},
    "gpt_oss": {"intermediate_size": 32},
    "gemma4_moe": {"moe_intermediate_size": 32},
    "qwen3_5_moe_text": {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32},
    "llama4_text": {"intermediate_size": 64},
}


def tokens(folder: Path, **options: Any) -> list[Any]:
    fixed = {"gpu_memory_utilization": 0.1, "num_gpu_blocks_override": 60, "max_model_len": 256}
    engine = engine_of(folder, device="cuda", quantization="int8", **(fixed | options))
    found = run(
        engine, kinds=[{"temperature": 0.0}, {"temperature": 0.8}, *[{"temperature": 0.0}] * 3]
    )
    engine.shutdown()
    return found


@pytest.mark.parametrize("family", SIZES)
def test_the_text_is_the_same(family: str, tiny_model_dir: Callable[..., Path]) -> None:
    folder = tiny_model_dir(family, **SIZES[family])
    expected = tokens(folder, cpu_experts="0")
    for number in ("1", "3"):
        for options in ({}, {"enforce_eager": True}, {"async_scheduling": False}):
            assert tokens(folder, cpu_experts=number, **options) == expected, (number, options)


def test_what_cannot_be_done_is_refused(tiny_model_dir: Callable[..., Path]) -> None:
    folder = tiny_model_dir("qwen3_moe", moe_intermediate_size=32)
    with pytest.raises(ConfigError, match="cpu_experts 2: .* add quantization int8 or q4"):
        engine_of(folder, device="cuda", quantization="none", cpu_experts="2")
    with pytest.raises(ConfigError, match="cpu_experts is 99, but a layer has"):
        engine_of(folder, device="cuda", quantization="int8", cpu_experts="99")
    with pytest.raises(ConfigError, match="the model has no experts"):
        engine_of(tiny_model_dir("llama"), device="cuda", cpu_experts="2")
