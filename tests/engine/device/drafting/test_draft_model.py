"""A smaller model that drafts: the same text, and what it says itself as drafts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from drafted_runs import engine_of, note_drafts, run
from transformers import AutoModelForCausalLM

from termgen.engine.device.runner import make_drafter
from termgen.errors import ModelError
from termgen.library.catalog import LocalModel

NUM_DRAFTS = 3


def settings(model: Path) -> dict[str, Any]:
    chosen = {"method": "draft_model", "model": str(model), "num_speculative_tokens": NUM_DRAFTS}
    return {"speculative_config": json.dumps(chosen)}


@pytest.mark.parametrize(
    ("target", "drafter"),
    [("llama", "qwen3"), ("qwen3", "gemma3_text"), ("llama", "llama")],
)
def test_drafts_are_what_the_model_says(
    tiny_model_dir: Callable[..., Path], target: str, drafter: str
) -> None:
    """One of another shape, one with windows, and the target itself, whose greedy drafts stay."""
    folder, small = tiny_model_dir(target), tiny_model_dir(drafter)
    without = engine_of(folder)
    expected = run(without)
    without.shutdown()
    engine = engine_of(folder, **settings(small), max_num_batched_tokens=40, async_scheduling=True)
    written = note_drafts(engine)
    assert run(engine) == expected
    plain: Any = AutoModelForCausalLM.from_pretrained(small, dtype=torch.float32).eval()
    for text, drafts in written[::2]:
        said = list(text)
        with torch.inference_mode():
            for _ in range(NUM_DRAFTS):
                said.append(int(plain(torch.tensor([said])).logits[0, -1].argmax()))
        assert drafts == said[len(text) :], len(text)
    stats = engine.core.scheduler.stats
    assert (stats.num_accepted_tokens > 0.3 * stats.num_draft_tokens) == (target == drafter)
    engine.shutdown()


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("llama", {"vocab_size": 600}, "vocab_size is 600, but its target has 512"),
        ("qwen3_5_text", {}, "has recurrent layers, so it cannot draft"),
    ],
)
def test_a_model_that_cannot_draft_is_named(
    tiny_model_dir: Callable[..., Path], family: str, changes: dict[str, Any], words: str
) -> None:
    small = tiny_model_dir(family, **changes)
    with pytest.raises(ModelError) as refused:
        engine_of(tiny_model_dir("llama"), **settings(small))
    text = str(refused.value)
    assert words in text and str(small) in text
    assert text.startswith("speculative_config: method draft_model: ")


def test_it_is_named_as_other_models_are(
    tiny_model_dir: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name of `termgen models` does, once the model is on this machine."""
    folder = tiny_model_dir("llama")
    asked = []

    def resolve(name: str) -> LocalModel:
        asked.append(name)
        return LocalModel(name, folder, "folder", str(folder))

    monkeypatch.setattr(make_drafter, "resolve_model", resolve)
    engine = engine_of(folder, **settings(Path("small-one")))
    assert asked == ["small-one"] and run(engine)
    engine.shutdown()
    monkeypatch.undo()
    with pytest.raises(ModelError, match="method draft_model: unknown model 'small-one'"):
        engine_of(folder, **settings(Path("small-one")))
