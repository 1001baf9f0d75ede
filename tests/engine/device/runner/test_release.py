"""An engine's memory is freed when the engine is left, not at the next garbage collection."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest

from termgen.config import EngineConfig
from termgen.engine.loop.engine import SyncEngine
from termgen.vocabulary.request import GenerationRequest
from termgen.vocabulary.sampling_params import SamplingParams

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("debug", [False, True])
def test_a_shut_down_engine_holds_no_memory(
    tiny_model_dir: Callable[[str], Path], device: str, debug: bool
) -> None:
    engine = SyncEngine(
        EngineConfig(
            model=str(tiny_model_dir("llama")),
            device=device,
            threads=1,
            max_num_seqs=4,
            num_gpu_blocks_override=32,
            max_model_len=128,
            skip_tokenizer_init=True,
            async_scheduling=True,
            debug=debug,
        )
    )
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    engine.add(GenerationRequest(request_id="a", prompt_token_ids=(5, 6, 7), params=params))
    while engine.has_unfinished:
        engine.step()
    runner = engine.core.executor._runner  # type: ignore[attr-defined]
    watched = {
        "runner": weakref.ref(runner),
        "recordings": weakref.ref(runner.graphs),
        "keys and values": weakref.ref(runner.kv_caches[0]),
        "rows": weakref.ref(runner.state.token_ids),
        "weights": weakref.ref(next(runner.model.parameters())),
    }
    gc.collect()
    gc.disable()
    try:
        del runner
        engine.shutdown()
        assert not [name for name, ref in watched.items() if ref() is not None]
    finally:
        gc.enable()
