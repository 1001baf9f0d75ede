"""Launching a step never waits for the device: otherwise it would idle until the host catches
up."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from mixed_load import run_mixed_load
from no_waits import no_waits

from termgen.config import EngineConfig
from termgen.engine.loop.engine import SyncEngine

SEED = 5


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["full", "full_and_piecewise", "none"])
def test_no_launch_waits_for_the_device(mode: str, tiny_model_dir: Callable[..., Path]) -> None:
    print("seed", SEED)
    engine = SyncEngine(
        EngineConfig(
            model=str(tiny_model_dir("llama")),
            device="cuda",
            dtype="bfloat16",
            cudagraph_mode=mode,
            max_num_seqs=8,
            max_num_batched_tokens=256,
            max_model_len=512,
            num_gpu_blocks_override=16,
            skip_tokenizer_init=True,
        )
    )
    load = {"num_requests": 30, "longest_prompt": 300, "most_tokens": 40}
    run_mixed_load(engine, SEED, **load)
    with no_waits():
        _, steps = run_mixed_load(engine, SEED, **load)
    assert steps[-1].num_preemptions > 0
    assert {s.num_prefill_rows > 0 for s in steps} == {True, False}
