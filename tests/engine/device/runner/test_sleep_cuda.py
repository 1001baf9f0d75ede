"""Sleep on a GPU: the memory is free for others, and recordings are made for new addresses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from termgen.config import EngineConfig
from termgen.engine.loop.engine import SyncEngine
from termgen.vocabulary.request import GenerationRequest
from termgen.vocabulary.sampling_params import SamplingParams

pytestmark = pytest.mark.gpu

MIB = 2**20


def generate(engine: SyncEngine, name: str) -> tuple[list[int], set[str]]:
    """Tokens of one request, and the graph modes of its decode steps."""
    ring = engine.core.bus.subscribe()
    params = SamplingParams(
        temperature=0, max_tokens=12, ignore_eos=True, frequency_penalty=0.7, logprobs=2
    )
    prompt = tuple(range(9, 100))
    engine.add(GenerationRequest(request_id=name, prompt_token_ids=prompt, params=params))
    tokens: list[int] = []
    while engine.has_unfinished:
        tokens += [token for delta in engine.step() for token in delta.token_ids]
    engine.core.bus.unsubscribe(ring)
    records = [event for event in ring.drain() if hasattr(event, "graph_mode")]
    return tokens, {record.graph_mode for record in records if record.num_decode_rows}


@pytest.mark.parametrize(
    ("mode", "kind"),
    [
        ("full_decode_only", "auto"),
        ("full_and_piecewise", "auto"),
        ("full_decode_only", "int8"),
        ("full_and_piecewise", "int4"),
    ],
)
def test_memory_is_free_and_steps_are_recorded_again(
    tiny_model_dir: Callable[..., Path], mode: str, kind: str
) -> None:
    """`debug` compares every address that a recording reads at every replay."""
    import torch

    folder = tiny_model_dir("llama", hidden_size=1024, intermediate_size=8192, head_dim=64)
    engine = SyncEngine(
        EngineConfig(
            model=str(folder),
            device="cuda",
            kv_cache_gib=0.5,
            kv_cache_dtype=kind,
            max_num_seqs=4,
            max_num_batched_tokens=256,
            cudagraph_mode=mode,
            debug=True,
        )
    )
    ledger = engine.model.memory
    assert ledger is not None and ledger.weights_bytes > 90 * MIB
    told, modes = generate(engine, "before")
    assert "FULL" in modes
    num_graphs = engine.core.executor.graph_status()
    assert num_graphs.num_recorded > 0

    for level in (1, 2):
        awake, _ = torch.cuda.mem_get_info()
        held = torch.cuda.memory_allocated()
        engine.sleep(level)
        free, _ = torch.cuda.mem_get_info()
        # Large tensors have segments of their own, so freed memory is returned completely.
        wanted = ledger.kv_cache_bytes + ledger.weights_bytes
        assert free - awake > 0.95 * wanted, (level, (free - awake) / MIB, wanted / MIB)
        assert held - torch.cuda.memory_allocated() > 0.99 * wanted
        assert engine.core.executor.graph_status().num_recorded == 0
        print(f"level {level}: {(free - awake) / MIB:.0f} MiB free, {wanted / MIB:.0f} wanted")
        # Memory that is allocated meanwhile must not be written to by a stale recording.
        others = torch.full((ledger.kv_cache_bytes // 4,), 7, dtype=torch.int32, device="cuda")
        engine.wake_up()
        assert engine.core.executor.graph_status() == num_graphs
        again, modes = generate(engine, f"after {level}")
        assert again == told and "FULL" in modes
        assert bool((others == 7).all())
        del others
        torch.cuda.empty_cache()

    engine.sleep(1)
    free, _ = torch.cuda.mem_get_info()
    hog = torch.empty(free - 64 * MIB, dtype=torch.uint8, device="cuda")
    from termgen.errors import EngineError

    with pytest.raises(EngineError, match="cannot wake up"):
        engine.wake_up()
    assert engine.core.control.sleep_level == 1
    del hog
    torch.cuda.empty_cache()
    engine.wake_up()
    assert generate(engine, "last")[0] == told
    engine.shutdown()
