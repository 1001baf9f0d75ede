"""The tokens of each expert are counted while a mixture answers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from termgen.config import EngineConfig
from termgen.engine.loop.sync_engine import SyncEngine
from termgen.vocabulary.request import GenerationRequest
from termgen.vocabulary.sampling_params import SamplingParams

TinyModelDir = Callable[..., Path]
WIDE = {"hidden_size": 64, "moe_intermediate_size": 64}
"""Sizes that the kernel for all experts covers; others are multiplied one by one."""


def answered(folder: Path, num_prompt: int, num_output: int, **config: Any) -> SyncEngine:
    options: dict[str, Any] = {"quantization": "int8", "device": "cpu", **config}
    engine = SyncEngine(EngineConfig(model=str(folder), skip_tokenizer_init=True, **options))
    params = SamplingParams(max_tokens=num_output, temperature=0.0, ignore_eos=True)
    ids = tuple(3 + i % 90 for i in range(num_prompt))
    engine.add(GenerationRequest(request_id="", prompt_token_ids=ids, params=params))
    while engine.has_unfinished:
        engine.step()
    return engine


@pytest.mark.parametrize(
    ("family", "shape", "top_k", "num_prompt"),
    [
        ("qwen3_moe", WIDE, 3, 20),
        ("qwen3_moe", {}, 3, 20),
        ("qwen3_moe", WIDE, 3, 400),
        ("qwen3_5_moe_text", {}, 3, 20),
        ("mixtral", {"intermediate_size": 96}, 2, 20),
    ],
)
def test_every_token_is_counted(
    family: str,
    shape: dict[str, int],
    top_k: int,
    num_prompt: int,
    tiny_model_dir: TinyModelDir,
) -> None:
    engine = answered(tiny_model_dir(family, max_position_embeddings=1024, **shape), num_prompt, 7)
    try:
        counts = engine.core.executor.expert_counts()
        assert counts is not None
        load = engine.snapshot().experts
        moe = engine.core.executor._runner.config.moe  # type: ignore[attr-defined]
        assert load is not None and moe.num_experts_per_tok == top_k
        assert counts.shape == (len(load.peaks), moe.num_experts)
        # the last token of the answer is computed in no step, and the last layer only for tokens
        # that are sampled from
        *first, last = (counts.sum(axis=1) / top_k).tolist()
        assert first == [num_prompt + 6] * (len(counts) - 1) and last == 7
        assert load.num_choices == counts.sum() and load.num_experts == moe.num_experts
        assert load.busiest.tolist() == counts.argmax(axis=1).tolist()
    finally:
        engine.shutdown()


def test_counts_are_those_of_the_router(tiny_model_dir: TinyModelDir) -> None:
    """In both ways of computing them."""
    shape = {"max_position_embeddings": 1024, **WIDE}
    folder = tiny_model_dir("qwen3_moe", **shape)
    whole = answered(folder, 400, 1)
    parts = answered(folder, 400, 1, max_num_batched_tokens=32)
    try:
        found = [engine.core.executor.expert_counts() for engine in (whole, parts)]
        assert found[0] is not None and found[1] is not None
        first, second = found[0][:-1], found[1][:-1]  # the last layer is for some tokens only
        differing = np.abs(first - second).sum()
        assert differing <= 0.02 * first.sum(), "close choices may fall either way"
    finally:
        whole.shutdown()
        parts.shutdown()


@pytest.mark.parametrize(
    ("family", "config"), [("llama", {}), ("qwen3_moe", {"quantization": "none"})]
)
def test_where_nothing_is_counted(
    family: str, config: dict[str, str], tiny_model_dir: TinyModelDir
) -> None:
    engine = answered(tiny_model_dir(family), 5, 2, **config)
    try:
        assert engine.core.executor.expert_counts() is None and engine.snapshot().experts is None
    finally:
        engine.shutdown()
