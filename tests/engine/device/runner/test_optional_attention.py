"""Whole engines on FlashInfer and FlashAttention: the tokens of the torch reference."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import stand_ins
import torch

from termgen.config import EngineConfig
from termgen.engine.device.attention.registry import backend_class
from termgen.engine.loop.engine import SyncEngine
from termgen.vocabulary.events import StepRecord
from termgen.vocabulary.request import GenerationRequest
from termgen.vocabulary.sampling_params import SamplingParams

ModelDir = Callable[..., Path]
BLOCK_SIZES = [("flashinfer", 16), ("flash_attn", 256)]
NUM_TOKENS = 12


def greedy_tokens(folder: Path, **options: object) -> tuple[list[int], set[str]]:
    """Prompts of many lengths that arrive while others decode; all tokens, and the graph modes."""
    settings: dict[str, object] = {
        "max_num_seqs": 5,
        "max_num_batched_tokens": 48,
        "num_gpu_blocks_override": 60,
        "max_model_len": 128,
        "skip_tokenizer_init": True,
        **options,
    }
    engine = SyncEngine(EngineConfig(model=str(folder), **settings))  # type: ignore[arg-type]
    ring = engine.core.bus.subscribe()
    rng = random.Random(3)
    outputs: dict[str, list[int]] = {}

    def step() -> None:
        for delta in engine.step():
            assert delta.error is None, delta.error
            outputs.setdefault(delta.request_id, []).extend(delta.token_ids)

    for i in range(9):
        prompt = tuple(rng.randrange(3, 500) for _ in range(rng.randint(1, 90)))
        params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
        engine.add(GenerationRequest(request_id=str(i), prompt_token_ids=prompt, params=params))
        step()
    while engine.has_unfinished:
        step()
    modes = {e.graph_mode for e in ring.drain() if isinstance(e, StepRecord)}
    tokens = [token for name in sorted(outputs) for token in outputs[name]]
    assert len(tokens) == 9 * NUM_TOKENS
    return tokens, modes


@pytest.mark.parametrize(("name", "block_size"), BLOCK_SIZES)
def test_an_engine_hands_over_what_the_package_wants(
    name: str, block_size: int, tiny_model_dir: ModelDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_ins.install(monkeypatch, name)
    backend = backend_class(name)
    on_cpu = dataclasses.replace(
        backend.capabilities,
        device_types=frozenset({"cpu"}),
        dtypes=frozenset({torch.float32}),
        head_dims=None,
        min_compute_capability=None,
    )
    monkeypatch.setattr(backend, "capabilities", on_cpu)
    folder = tiny_model_dir("mistral")
    options = {"device": "cpu", "dtype": "float32", "block_size": block_size}
    expected, _ = greedy_tokens(folder, attention_backend="torch_reference", **options)
    actual, _ = greedy_tokens(folder, attention_backend=name, **options)
    assert actual == expected


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "block_size"), BLOCK_SIZES)
def test_an_engine_agrees_with_the_reference(
    name: str, block_size: int, tiny_model_dir: ModelDir
) -> None:
    pytest.importorskip(name)
    folder = tiny_model_dir("mistral", head_dim=128)
    options = {"device": "cuda", "dtype": "bfloat16", "block_size": block_size}
    expected, _ = greedy_tokens(folder, attention_backend="torch_reference", **options)
    actual, modes = greedy_tokens(folder, attention_backend=name, **options)
    assert ("FULL" in modes) == (name == "flash_attn")
    # Rounding differs, so a near tie may go the other way.
    equal = sum(a == b for a, b in zip(actual, expected, strict=True))
    assert equal > 0.8 * len(expected), f"{equal} of {len(expected)} tokens"
