"""EAGLE-3 heads in a folder of their own: the same text, and the drafts of a plain computation."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from drafted_runs import KINDS, VOCAB, engine_of, note_drafts, run, runner_of
from safetensors.torch import load_file, save_file
from tiny_heads import change_config, make_eagle3, plain_eagle3

from termgen.engine.device.config.head_config import eagle3_head
from termgen.engine.device.config.model_config import ModelConfig
from termgen.errors import ModelError

NUM_DRAFTS, NUM_LAYERS, LAYERS = 3, 4, (1, 2, 3)
KNOWN = tuple(range(5, VOCAB, 4))
FEW = (20, 33, 90)
"""Tokens that a bias makes the target say alone, so that a head that knows no others is right
often."""

Target = tuple[Path, list[list[int]]]


@pytest.fixture(scope="module")
def target(tiny_model_dir: Callable[..., Path]) -> Callable[[str], Target]:
    """A family's tiny model, and what it says without drafts."""

    @functools.cache
    def make(family: str) -> Target:
        folder = tiny_model_dir(family, num_hidden_layers=NUM_LAYERS)
        engine = engine_of(folder)
        found = run(engine)
        engine.shutdown()
        return folder, found

    return make


def settings(head: Path) -> dict[str, Any]:
    chosen = {"method": "eagle3", "model": str(head), "num_speculative_tokens": NUM_DRAFTS}
    return {"speculative_config": json.dumps(chosen)}


HEADS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"known": KNOWN}),
    "by speculators": (
        "llama",
        {"known": KNOWN, "by_speculators": True, "has_embedding": True, "norms_residual": True},
    ),
    "shared head": ("qwen3", {}),
    "own key heads": ("qwen3", {"known": KNOWN, "num_key_value_heads": 4}),
}


@pytest.mark.parametrize("name", HEADS)
def test_drafts_are_those_of_a_plain_head(
    target: Callable[[str], Target], tmp_path: Path, name: str
) -> None:
    family, form = HEADS[name]
    folder, expected = target(family)
    head = make_eagle3(folder, tmp_path / "head", layers=LAYERS, **form)
    engine = engine_of(folder, **settings(head), **({"max_num_batched_tokens": 40} if form else {}))
    written = note_drafts(engine)
    assert run(engine) == expected
    engine.shutdown()
    draft = plain_eagle3(folder, head, layers=LAYERS)
    assert len(written) > 50
    for text, drafts in written[::2]:
        assert drafts == draft(text, NUM_DRAFTS), len(text)


def test_right_drafts_stay(target: Callable[[str], Target], tmp_path: Path) -> None:
    """States are then taken from within a row, not from its end."""
    folder, _ = target("llama")
    head = make_eagle3(folder, tmp_path / "head", layers=LAYERS, known=FEW)
    bias = {"logit_bias": dict.fromkeys(FEW, 60.0)}
    kinds = [{**kind, **bias} for kind in KINDS]
    without, engine = engine_of(folder), engine_of(folder, **settings(head), async_scheduling=True)
    written = note_drafts(engine)
    assert run(engine, kinds=kinds) == run(without, kinds=kinds)
    stats = engine.core.scheduler.stats
    assert 0.1 < stats.num_accepted_tokens / stats.num_draft_tokens < 0.9
    draft = plain_eagle3(folder, head, layers=LAYERS)
    for text, drafts in written[::2]:
        assert drafts == draft(text, NUM_DRAFTS), len(text)
    without.shutdown()
    engine.shutdown()


def test_a_head_with_its_own_key_heads_has_a_group(
    target: Callable[[str], Target], tmp_path: Path
) -> None:
    folder, _ = target("qwen3")
    for number in (2, 4):
        head = make_eagle3(
            *(folder, tmp_path / str(number)), layers=LAYERS, num_key_value_heads=number
        )
        engine = engine_of(folder, **settings(head))
        runner = runner_of(engine)
        with_targets = runner.attention.group_of(NUM_LAYERS) == runner.attention.group_of(0)
        assert with_targets == (number == 2)
        assert len(runner.kv_caches) == NUM_LAYERS + 1
        engine.shutdown()


Change = Callable[[dict[str, torch.Tensor]], None]


def put(name: str, value: torch.Tensor | None) -> Change:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        if value is None:
            del tensors[name]
        else:
            tensors[name] = value

    return change


TWICE = torch.zeros(len(KNOWN), dtype=torch.long)
BAD_FILES: dict[str, tuple[dict[str, object], Change | None, str]] = {
    "vocabulary": ({"vocab_size": 500}, None, "vocab_size is 500, but its target has 512"),
    "layers": ({"num_hidden_layers": 2}, None, "num_hidden_layers is 2, but a head has 1"),
    "other target": ({"target_hidden_size": 128}, None, "target_hidden_size is 128, but its tar"),
    "class": ({"architectures": ["LlamaForCausalLM"]}, None, "'LlamaForCausalLM' is no EAGLE-3"),
    "flag": ({"norm_before_fc": True}, None, "norm_before_fc true is not supported"),
    "aux": (
        {"eagle_aux_hidden_state_layer_ids": [1, 2, 4]},
        None,
        "eagle_aux_hidden_state_layer_ids names [1, 2, 4], not 3 of the target's 4 layers",
    ),
    "heads": ({"num_attention_heads": 2}, None, "num_attention_heads is 2 on key heads like"),
    "no fc": ({}, put("fc.weight", None), "lacks tensor fc.weight"),
    "narrow fc": (
        {},
        put("fc.weight", torch.zeros(64, 3 * 48)),
        "tensor fc.weight has shape [64, 144], but config.json asks for [64, 192]",
    ),
    "no layer": ({}, put("midlayer.hidden_norm.weight", None), "tensor layers.0.hidden_norm.weig"),
    "more": ({}, put("lm_head2.weight", torch.zeros(2)), "has tensor lm_head2.weight"),
    "no head": ({}, put("lm_head.weight", None), "tensor lm_head.weight is missing"),
    "no d2t": ({}, put("d2t", None), "tensor d2t is missing, for a draft_vocab_size of 127"),
    "far d2t": ({}, put("d2t", TWICE + 400), "tensor d2t names tokens beyond the target's 512"),
    "float d2t": ({}, put("d2t", TWICE.float()), "tensor d2t is float32 [127], not 127 whole"),
    "short d2t": ({}, put("d2t", TWICE[1:]), "tensor d2t is int64 [126], not 127 whole numbers"),
    "t2d": ({}, put("t2d", torch.ones(VOCAB, dtype=torch.bool)), "tensor t2d marks other tokens"),
    "nan": ({}, put("norm.weight", torch.full((64,), float("nan"))), "norm.weight has NaN"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_bad_file_is_named(target: Callable[[str], Target], tmp_path: Path, name: str) -> None:
    changes, change, words = BAD_FILES[name]
    folder, _ = target("llama")
    head = make_eagle3(folder, tmp_path / "head", layers=LAYERS, known=KNOWN)
    change_config(head, **changes)
    if change is not None:
        tensors = load_file(head / "model.safetensors")
        change(tensors)
        save_file(tensors, head / "model.safetensors")
    with pytest.raises(ModelError) as refused:
        engine_of(folder, **settings(head))
    text = str(refused.value)
    assert words in text and str(head) in text and "\n" not in text
    assert text.startswith("speculative_config: method eagle3: ")


def test_bad_speculators_are_named(target: Callable[[str], Target], tmp_path: Path) -> None:
    folder, _ = target("llama")
    head = make_eagle3(folder, tmp_path / "head", layers=LAYERS, by_speculators=True)
    for changes, words in (
        ({"speculators_model_type": "eagle"}, "speculators_model_type 'eagle' is not supported"),
        ({"transformer_layer_config": {"model_type": "qwen3"}}, "model_type 'qwen3' of a head"),
        ({"transformer_layer_config": []}, "transformer_layer_config must be a dictionary"),
    ):
        config = json.loads((head / "config.json").read_text())
        other = tmp_path / f"{len(words)}"
        other.mkdir()
        (other / "config.json").write_text(json.dumps({**config, **changes}))
        with pytest.raises(ModelError, match=words):
            engine_of(folder, **settings(other))


def test_a_folder_that_is_not_there_is_named(
    target: Callable[[str], Target], tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match="no such file or folder: .*nowhere"):
        engine_of(target("llama")[0], **settings(tmp_path / "nowhere"))


def test_heads_of_other_families_are_refused(
    tiny_model_dir: Callable[..., Path], target: Callable[[str], Target], tmp_path: Path
) -> None:
    head = make_eagle3(target("llama")[0], tmp_path / "head", layers=LAYERS)
    with pytest.raises(ModelError, match="not for Gemma2ForCausalLM"):
        engine_of(tiny_model_dir("gemma2"), **settings(head))


def test_layers_that_are_not_named_are_the_usual_ones(tmp_path: Path) -> None:
    llama = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rope_theta": 500000.0,
        "rms_norm_eps": 1e-5,
    }
    head = {**llama, "architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1}
    head |= {"draft_vocab_size": 32000, "max_position_embeddings": 2048}
    read = eagle3_head(head, ModelConfig.from_hf(llama), tmp_path)
    assert read.kept_layers == (2, 16, 29) and read.draft_vocab_size == 32000
    assert read.layers.max_position_embeddings == 131072
