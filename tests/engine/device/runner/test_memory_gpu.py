"""The account of memory on a real GPU: its parts are the device's, and steps keep to them."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from termgen.config import EngineConfig
from termgen.engine.device.runner.memory import CudaMeter, weight_bytes
from termgen.engine.loop.engine import SyncEngine
from termgen.errors import ConfigError, ModelError
from termgen.vocabulary.memory_ledger import GIB, MIB
from termgen.vocabulary.request import GenerationRequest
from termgen.vocabulary.sampling_params import SamplingParams

pytestmark = pytest.mark.gpu

MAX_NUM_SEQS = 96
BUDGET = 2048
VOCAB = 100_000
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "max_position_embeddings": 4096,
}


@pytest.fixture
def meter() -> Iterator[CudaMeter]:
    """The device, without leftovers of earlier tests."""
    gc.collect()
    meter = CudaMeter(torch.device("cuda:0"))
    meter.release()
    yield meter
    gc.collect()
    meter.release()


@pytest.fixture
def model(tiny_model_dir: Callable[..., Path], tmp_path: Path) -> Callable[..., Path]:
    def make(**shape: int) -> Path:
        config = json.loads((tiny_model_dir("llama") / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps({**config, **SHAPE, **shape}))
        return tmp_path

    return make


def make_engine(folder: Path, **settings: object) -> SyncEngine:
    settings = {
        "max_num_seqs": MAX_NUM_SEQS,
        "max_num_batched_tokens": BUDGET,
        "load_format": "dummy",
        "dtype": "bfloat16",
        "skip_tokenizer_init": True,
        **settings,
    }
    return SyncEngine(EngineConfig(model=str(folder), device="cuda", **settings))  # type: ignore[arg-type]


def run_everything(engine: SyncEngine) -> None:
    """Prompts that fill the budget, all rows decoding, and every kind of sampling at once."""
    params = SamplingParams(
        max_tokens=8,
        temperature=1.0,
        top_k=50,
        top_p=0.9,
        min_tokens=4,
        repetition_penalty=1.1,
        frequency_penalty=0.5,
        logprobs=20,
        ignore_eos=True,
    )
    for i in range(MAX_NUM_SEQS + 8):
        length = 3000 if i % 32 == 0 else 100
        prompt = tuple((7 * i + j) % VOCAB for j in range(length))
        engine.add(GenerationRequest(request_id=str(i), prompt_token_ids=prompt, params=params))
    while engine.has_unfinished:
        for delta in engine.step():
            assert delta.error is None, delta.error


@pytest.mark.parametrize("mode", ["full", "full_decode_only"])
def test_the_ledger_is_the_device(meter: CudaMeter, model: Callable[..., Path], mode: str) -> None:
    free, total = meter.free_and_total()
    held_before = total - free
    share = (total - free + 6 * GIB) / total
    engine = make_engine(model(), gpu_memory_utilization=share, cudagraph_mode=mode)
    ledger = engine.model.memory
    assert ledger is not None
    print(ledger)
    runner = engine.core.executor._runner  # type: ignore[attr-defined]
    assert sum(ledger.parts().values()) == ledger.total_bytes == total
    assert ledger.weights_bytes == weight_bytes(runner.model)
    assert ledger.kv_cache_bytes == sum(cache.nbytes for cache in runner.kv_caches) > GIB
    # Measured separately: the rest must be the others' memory from before, and the kernels that the
    # driver has loaded since.
    assert -8 * MIB <= ledger.other_bytes - held_before < 400 * MIB
    assert abs(meter.free_and_total()[0] - ledger.free_bytes) < 8 * MIB
    # The logits of the largest recording stay in its pool, if nothing else does.
    assert ledger.graphs_bytes > 2 * VOCAB * MAX_NUM_SEQS
    assert ledger.graphs_bytes <= ledger.expected_graphs_bytes
    assert ledger.total_bytes - ledger.free_bytes <= ledger.limit_bytes
    assert ledger.free_below_limit_bytes < GIB, "the KV cache got what was left"
    run_everything(engine)
    used = total - meter.free_and_total()[0]
    print(f"after steps: {(used - total + ledger.free_bytes) / MIB:.0f} MiB more")
    assert used <= ledger.limit_bytes
    assert used - (total - ledger.free_bytes) < 64 * MIB, "activations are what steps take"


def test_what_is_short_is_named(meter: CudaMeter, model: Callable[..., Path]) -> None:
    free, total = meter.free_and_total()

    def refused(folder: Path, **settings: object) -> ConfigError:
        with pytest.raises(ConfigError) as caught:
            make_engine(folder, **settings)
        print(caught.value)
        return caught.value

    with pytest.raises(ModelError, match=r"weights do not fit on cuda:0 in bfloat16: .* were free"):
        make_engine(model(vocab_size=2**27))
    gc.collect()
    small = model()
    held = refused(small, gpu_memory_utilization=0.5 * (total - free) / total)
    assert held.param == "gpu_memory_utilization" and "already" in str(held)
    rows = {"max_num_seqs": 65536, "max_num_batched_tokens": 65536}
    assert refused(model(max_position_embeddings=2**20), **rows).param == "max_num_seqs"
    small = model()
    eager = {"enforce_eager": True}
    assert refused(small, kv_cache_gib=total / GIB, **eager).param == "kv_cache_gib"
    long = refused(small, kv_cache_gib=0.01, max_model_len=4096, **eager)
    assert long.param == "max_model_len" and "needs a KV cache of 32 MiB" in str(long)
    gc.collect()
    meter.release()  # leftovers of the engines above are not others' memory
    free, _ = meter.free_and_total()
    full = refused(small, gpu_memory_utilization=(total - free + 300 * MIB) / total, **eager)
    assert full.param == "gpu_memory_utilization" and "weights" in str(full)
