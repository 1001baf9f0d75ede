"""On a GPU a change of models releases the former engine's memory before the next allocates."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from termgen.commands.launch import EngineHolder
from termgen.config import EngineConfig
from termgen.vocabulary.memory_ledger import GIB, MIB
from termgen.vocabulary.sampling_params import SamplingParams

pytestmark = pytest.mark.gpu
KV_GIB = 2.0


def silent(stage: str, share: float) -> None:
    pass


async def _change(model: Path) -> None:
    config = EngineConfig(
        model=str(model), max_model_len=128, max_num_seqs=4, kv_cache_gib=KV_GIB, dtype="bfloat16"
    )
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    holder = EngineHolder(config)
    try:
        first = await holder.start(silent)
        expected = [t async for d in first.generate([5, 6, 7], params) for t in d.token_ids]
        free, _ = torch.cuda.mem_get_info()
        for _ in range(2):
            client = await holder.restart(config, silent)
            assert [
                t async for d in client.generate([5, 6, 7], params) for t in d.token_ids
            ] == expected
        again, _ = torch.cuda.mem_get_info()
        lost = (free - again) / MIB
        assert lost < KV_GIB * GIB / MIB / 8, f"{lost:.0f} MiB were not given back"
    finally:
        await holder.stop()


def test_memory_comes_back_when_engines_change(tiny_llama_dir: Path) -> None:
    asyncio.run(_change(tiny_llama_dir))
