"""What a KV cache below 16 bits does to the next-token probabilities of real models."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from paged_model import PagedModel, Row, load

from termgen.engine.device.kernels.kv_cache import kv_cache_dtype
from termgen.engine.device.models.decoder import CausalDecoder
from termgen.engine.text.tokenizer import load_tokenizer

NUM_READ, NUM_WRITTEN = 210, 10
NEAR_TIE = 0.02
"""Nats between two tokens that rounding may rank otherwise."""
BOUNDS = {
    "smollm2_gguf": {"fp8": 0.03, "int8": 0.0006, "int4": 0.12},
    "gemma_gguf": {"fp8": 0.03, "int8": 0.003, "int4": 0.7},
}
"""Nats in the mean, at most."""


def log_probabilities(model: CausalDecoder, ids: list[int], kind: str) -> torch.Tensor:
    """[115, vocab] a prompt in two parts, the second of which is compared, and the last tokens one
    by one."""
    paged = PagedModel(model, num_blocks=160, dtype=kv_cache_dtype(kind, torch.float32))
    half = NUM_READ // 2
    paged.last_logits([Row(0, 0, ids[:half])])
    compared = paged.step([Row(0, half, ids[half:NUM_READ])])[0]
    singles = [paged.step([Row(0, i, [ids[i]])])[0] for i in range(NUM_READ, len(ids))]
    return torch.cat([compared, *singles]).log_softmax(-1)


def errors(exact: torch.Tensor, rounded: torch.Tensor) -> torch.Tensor:
    return (exact.exp() * (exact - rounded)).sum(-1)


def as_it_is(heads: torch.Tensor) -> torch.Tensor:
    return heads


@pytest.mark.parametrize("name", BOUNDS)
def test_a_real_model_with_a_smaller_kv_cache(
    name: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = request.getfixturevalue(name)
    text = (Path(__file__).parents[4] / "README.md").read_text()[:4000]
    ids = list(load_tokenizer(file).encode(text))[: NUM_READ + NUM_WRITTEN]
    assert len(ids) == NUM_READ + NUM_WRITTEN
    model = load(file)
    exact = log_probabilities(model, ids, "auto")
    means = {}
    for kind, most in BOUNDS[name].items():
        rounded = log_probabilities(model, ids, kind)
        found = errors(exact, rounded)
        chosen = rounded.argmax(-1)
        tops = float((chosen == exact.argmax(-1)).float().mean())
        loss = exact.amax(-1) - exact.gather(-1, chosen[:, None])[:, 0]
        near = float((loss < NEAR_TIE).float().mean())
        print(
            f"{name} {kind}: mean {found.mean():.1e}, p99 {found.quantile(0.99):.1e}, "
            f"same first token {tops:.1%}, but for near ties {near:.1%}"
        )
        assert 0 <= found.mean() < most
        means[kind] = found.mean()
    for module in ("kernels.kv_cache", "layers.ops"):
        monkeypatch.setattr(f"termgen.engine.device.{module}.spread", as_it_is)
    for kind in ("int8", "int4"):
        plain = errors(exact, log_probabilities(model, ids, kind)).mean()
        print(f"{name} {kind}, keys not spread: mean {plain:.1e}")
        assert means[kind] < 0.7 * plain
