"""Gemma 4's assistants: the same text, and the drafts of transformers' class for such a model."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from drafted_runs import KINDS, engine_of, note_drafts, run, runner_of
from tiny_assistant import change_tensors, change_text, make_assistant, plain_assistant
from tiny_heads import change_config

from termgen.errors import ModelError

NUM_DRAFTS = 3
FEW = (20, 33)
"""Tokens that a bias makes the target say alone."""

Target = tuple[Path, list[list[int]]]


@pytest.fixture(scope="module")
def target(tiny_model_dir: Callable[..., Path]) -> Callable[[str], Target]:
    """A tiny Gemma 4, and what it says without drafts."""

    @functools.cache
    def make(family: str) -> Target:
        folder = tiny_model_dir(family)
        engine = engine_of(folder)
        found = run(engine)
        engine.shutdown()
        return folder, found

    return make


def settings(head: Path) -> dict[str, Any]:
    chosen = {"method": "assistant", "model": str(head)}
    return {"speculative_config": json.dumps(chosen)}


HEADS: dict[str, tuple[str, dict[str, Any]]] = {
    "small": ("gemma4_text", {}),
    "large": ("gemma4_moe", {}),
    "fewer heads": ("gemma4_text", {"num_heads": 2}),
    "clusters": ("gemma4_text", {"num_centroids": 16}),
}


@pytest.mark.parametrize("name", HEADS)
def test_drafts_are_those_of_transformers(
    target: Callable[[str], Target], tmp_path: Path, name: str
) -> None:
    family, form = HEADS[name]
    folder, expected = target(family)
    head = make_assistant(folder, tmp_path / "head", **form)
    engine = engine_of(folder, **settings(head), max_num_batched_tokens=40)
    written = note_drafts(engine)
    assert run(engine) == expected
    engine.shutdown()
    draft = plain_assistant(folder, head)
    assert len(written) > 50
    for text, drafts in written[::5]:
        assert drafts == draft(text, NUM_DRAFTS), len(text)


@pytest.mark.parametrize("is_async", [False, True])
def test_right_drafts_stay(target: Callable[[str], Target], tmp_path: Path, is_async: bool) -> None:
    """States are then taken from within a row, not from its end."""
    folder, _ = target("gemma4_text")
    head = make_assistant(folder, tmp_path / "head", few=FEW)
    kinds = [{**kind, "logit_bias": dict.fromkeys(FEW, 60.0)} for kind in KINDS]
    without = engine_of(folder)
    engine = engine_of(folder, **settings(head), async_scheduling=is_async)
    written = note_drafts(engine)
    expected = run(without, kinds=kinds)
    for _ in range(2):  # the second time over cached prefixes
        assert run(engine, kinds=kinds) == expected
    stats = engine.core.scheduler.stats
    assert 0.1 < stats.num_accepted_tokens / stats.num_draft_tokens < 0.9
    draft = plain_assistant(folder, head)
    for text, drafts in written[::12]:
        assert drafts == draft(text, NUM_DRAFTS), len(text)
    without.shutdown()
    engine.shutdown()


def test_preempted_requests_say_the_same(target: Callable[[str], Target], tmp_path: Path) -> None:
    folder, expected = target("gemma4_text")
    head = make_assistant(folder, tmp_path / "head")
    few = {"num_gpu_blocks_override": 24, "max_model_len": 128}
    engine = engine_of(folder, **settings(head), **few, async_scheduling=True)
    note_drafts(engine)
    assert run(engine) == expected
    assert engine.core.scheduler.stats.num_preemptions > 0
    engine.shutdown()


def test_it_takes_nothing_of_the_cache(target: Callable[[str], Target], tmp_path: Path) -> None:
    folder, _ = target("gemma4_text")
    engines = [
        engine_of(folder, **more)
        for more in ({}, settings(make_assistant(folder, tmp_path / "head")))
    ]
    plain, drafting = (runner_of(engine) for engine in engines)
    assert drafting.bytes_per_block() == plain.bytes_per_block()
    assert len(drafting.kv_caches) == len(plain.kv_caches)
    assert drafting.attention.groups == plain.attention.groups
    assert drafting.drafts.drafter.model.num_ahead == 0
    for engine in engines:
        engine.shutdown()


def test_rows_look_into_their_own_clusters(target: Callable[[str], Target], tmp_path: Path) -> None:
    """One row after another by the tokens of its clusters, and many at once by all tokens."""
    head = make_assistant(target("gemma4_text")[0], tmp_path / "head", num_centroids=16)
    engine = engine_of(target("gemma4_text")[0], **settings(head))
    own = runner_of(engine).drafts.drafter.model.head
    states = torch.randn(40, 48, generator=torch.Generator().manual_seed(2))
    with torch.inference_mode():
        alone = torch.cat([own.guess(state[None]) for state in states])
        assert torch.equal(own.guess(states), alone)
        among_all = own.head(states).argmax(dim=1)
    assert 0 < int((alone != among_all).sum()) < 40
    engine.shutdown()


def test_no_more_drafts_than_a_step_computes(
    target: Callable[[str], Target], tmp_path: Path
) -> None:
    """Nine tokens for five rows: none; for four: one draft each."""
    folder, expected = target("gemma4_text")
    engine = engine_of(folder, **settings(make_assistant(folder, tmp_path / "head")))
    runner_of(engine).drafts.drafter.model._most_drafted = 9
    written = note_drafts(engine)
    lengths: set[int] = set()

    def disturb(engine: Any, turn: int) -> None:
        lengths.update(len(drafts) for _, drafts in written)
        if turn == 12:
            assert lengths == set()
            engine.abort("4")

    assert run(engine, disturb=disturb)[:4] == expected[:4] and lengths == {1}
    engine.shutdown()


Tensors = dict[str, torch.Tensor | None]
BAD_FILES: dict[str, tuple[dict[str, object], dict[str, object], Tensors, str]] = {
    "vocabulary": (
        {},
        {"vocab_size": 500},
        {},
        "text_config.vocab_size is 500, but its target has 512",
    ),
    "other target": (
        {"backbone_hidden_size": 96},
        {},
        {},
        "backbone_hidden_size is 96, but its target has 64",
    ),
    "class": (
        {"architectures": ["Gemma4ForCausalLM"]},
        {},
        {},
        "'Gemma4ForCausalLM' is no assistant; such is Gemma4AssistantForCausalLM",
    ),
    "no text": ({"text_config": None}, {}, {}, "text_config is missing"),
    "inputs": (
        {},
        {"hidden_size_per_layer_input": 16},
        {},
        "text_config.hidden_size_per_layer_inp",
    ),
    "experts": ({}, {"enable_moe_block": True}, {}, "enable_moe_block must be False in an assista"),
    "wide": ({}, {"use_double_wide_mlp": True}, {}, "use_double_wide_mlp must be False"),
    "window": (
        {},
        {"sliding_window": 16},
        {},
        "text_config.sliding_window is 16, but its target has 8",
    ),
    "heads": (
        {},
        {"num_key_value_heads": 4},
        {},
        "text_config has 4 key heads of 16 in layers of sliding_attention, but its target has 2",
    ),
    "centroids": ({"num_centroids": 15}, {}, {}, "num_centroids is 15, which does not divide"),
    "active": (
        {"centroid_intermediate_top_k": 17},
        {},
        {},
        "centroid_intermediate_top_k must be between 1 and 16, not 17",
    ),
    "no projection": (
        {},
        {},
        {"post_projection.weight": None},
        "lacks tensor post_projection.weight",
    ),
    "narrow projection": (
        {},
        {},
        {"pre_projection.weight": torch.zeros(48, 64)},
        "tensor pre_projection.weight has shape [48, 64], but config.json asks for [48, 128]",
    ),
    "no layer": ({}, {}, {"model.layers.3.layer_scalar": None}, "tensor model.layers.3.layer_scal"),
    "more": ({}, {}, {"model.more.weight": torch.zeros(2)}, "has tensor model.more.weight"),
    "no order": (
        {},
        {},
        {"masked_embedding.token_ordering": None},
        "tensor masked_embedding.token_ordering is missing, for use_ordered_embeddings",
    ),
    "short order": (
        {},
        {},
        {"masked_embedding.token_ordering": torch.arange(511)},
        "tensor masked_embedding.token_ordering is int64 [511], not 512 whole numbers",
    ),
    "order": (
        {},
        {},
        {"masked_embedding.token_ordering": torch.zeros(512, dtype=torch.long)},
        "token_ordering does not name each of the 512 tokens once",
    ),
    "nan": ({}, {}, {"model.norm.weight": torch.full((48,), torch.nan)}, "model.norm.weight has N"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_bad_file_is_named(target: Callable[[str], Target], tmp_path: Path, name: str) -> None:
    changes, in_text, tensors, words = BAD_FILES[name]
    folder, _ = target("gemma4_text")
    head = make_assistant(folder, tmp_path / "head", num_centroids=16)
    change_text(head, **in_text)
    change_config(head, **changes)
    change_tensors(head, tensors)
    with pytest.raises(ModelError) as refused:
        engine_of(folder, **settings(head))
    text = str(refused.value)
    assert words in text and str(head) in text and "\n" not in text
    assert text.startswith("speculative_config: method assistant: ")


def test_other_targets_are_refused(
    tiny_model_dir: Callable[..., Path], target: Callable[[str], Target], tmp_path: Path
) -> None:
    head = make_assistant(target("gemma4_text")[0], tmp_path / "head")
    with pytest.raises(ModelError, match="not for LlamaForCausalLM"):
        engine_of(tiny_model_dir("llama"), **settings(head))
