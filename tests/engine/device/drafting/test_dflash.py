"""DFlash heads: the same text, and the drafts of transformers' class for such a head."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from drafted_runs import KINDS, NUM_TOKENS, Written, engine_of, note_drafts, prompts, run, runner_of
from safetensors.torch import load_file, save_file
from tiny_dflash import Drafts, make_dflash, plain_dflash, settings, target_of_few
from tiny_heads import change_config

from termgen.engine.device.attention.base import AttentionForm, AttentionMetadata
from termgen.engine.device.attention.reference import attend, gather
from termgen.engine.device.config.dflash_config import dflash_head
from termgen.engine.device.config.model_config import ModelConfig
from termgen.engine.device.drafting.block_drafts import BlockDrafts
from termgen.errors import ConfigError, ModelError

NUM_DRAFTS, NUM_LAYERS, LAYERS = 3, 5, (0, 2, 3)
KV_BLOCK, LONGEST = 16, 94
"""The longest text ends within a KV block."""
FEW = (20, 33)

Target = tuple[Path, list[list[int]]]


@pytest.fixture(scope="module")
def target(tiny_model_dir: Callable[..., Path]) -> Callable[[str], Target]:
    """A family's tiny model, and what it says without drafts."""

    @functools.cache
    def make(family: str) -> Target:
        more = {} if family == "muse_glimmer" else {"num_hidden_layers": NUM_LAYERS}
        folder = tiny_model_dir(family, **more)
        engine = engine_of(folder)
        found = run(engine)
        engine.shutdown()
        return folder, found

    return make


def check(written: Written, draft: Drafts, number: int) -> int:
    """Compare drafts with plain ones. Returns how many texts had some."""
    count = 0
    for text, drafts in written:
        prompt = next(p for p in prompts() if text[: len(p)] == p)
        last = len(prompt) + NUM_TOKENS - 1  # whose keys nothing reads
        expected = draft(text, number, min(-(-last // KV_BLOCK) * KV_BLOCK, LONGEST))
        # At the end of a context places behind the blocks have a guess as well.
        assert drafts[: len(expected)] == expected[: len(drafts)], len(text)
        count += bool(expected)
    return count


HEADS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "windows": ("qwen3", {"window": 12}),
    "own key heads": ("qwen3", {"num_key_value_heads": 4}),
    "a long block": ("llama", {"num_noised": 16}),
    "muse": ("muse_glimmer", {"of_muse": True, "window": 20}),
}


@pytest.mark.parametrize("name", HEADS)
def test_drafts_are_those_of_transformers(
    target: Callable[[str], Target], tmp_path: Path, name: str
) -> None:
    family, form = HEADS[name]
    folder, expected = target(family)
    head = make_dflash(folder, tmp_path / "head", layers=LAYERS, **form)
    limits = {"max_num_batched_tokens": 40, "max_model_len": LONGEST}
    engine = engine_of(folder, **settings(head, NUM_DRAFTS), **limits)
    written = note_drafts(engine)
    assert run(engine) == expected
    engine.shutdown()
    assert check(written[::2], plain_dflash(folder, head), NUM_DRAFTS) > 25


class QueriesAtPositions:
    """Attention that takes several queries of a row, as that of a GPU does: each sees the keys up
    to the position that it is said to have."""

    max_queries = 3

    def prepare(self, metadata: tuple[AttentionMetadata, ...]) -> None:
        first, num_rows = metadata[0], metadata[0].num_rows
        queries, ends = first.max_query_len, first.positions
        assert ends is not None and queries == 3 and first.num_tokens == num_rows * queries
        assert torch.equal(first.query_start_loc.long(), torch.arange(num_rows + 1) * queries)
        lengths = first.seq_lens.long().repeat_interleave(queries)
        # What kernels ask for: a position is of the row, and one of its last `queries`.
        assert bool(((ends < lengths) & (ends >= lengths - queries) | (lengths == 0)).all())

    def forward(
        self,
        q: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
        form: AttentionForm,
        *,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert metadata.positions is not None and len(q) == metadata.num_tokens
        made = torch.zeros_like(q)
        for query, position in enumerate(metadata.positions.tolist()):
            row = query // metadata.max_query_len
            if metadata.seq_lens[row]:
                keys, values = gather(kv_cache, metadata.block_table[row], position + 1)
                one = q[query : query + 1].double() * form.scale
                made[query] = attend(one, keys, values, form.window)[0].to(q.dtype)
        return made


def test_blocks_are_cut_into_rows_of_several_queries(
    target: Callable[[str], Target], tmp_path: Path
) -> None:
    folder, expected = target("qwen3")
    head = make_dflash(folder, tmp_path / "head", layers=LAYERS, window=12)
    engine = engine_of(folder, **settings(head, NUM_DRAFTS), max_model_len=LONGEST)
    drafter, attention = runner_of(engine).drafts.drafter, QueriesAtPositions()
    own = drafter.model.head
    own.attention = attention
    for layer in own.layers:
        layer.place = replace(layer.place, attention=attention)
    drafter.model = BlockDrafts(
        own,
        num_noised=6,
        mask_token_id=7,
        most_drafted=512,
        max_rows=8,
        max_tokens=2048,
        block_size=KV_BLOCK,
        device=torch.device("cpu"),
    )
    written = note_drafts(engine)
    assert run(engine) == expected
    engine.shutdown()
    assert check(written[::2], plain_dflash(folder, head), NUM_DRAFTS) > 25


def test_no_more_drafts_than_a_step_computes(
    target: Callable[[str], Target], tmp_path: Path
) -> None:
    """Nine tokens for four rows or five: one draft each, or none, where keys are still written."""
    folder, expected = target("llama")
    head = make_dflash(folder, tmp_path / "head", layers=LAYERS)
    engine = engine_of(folder, **settings(head, NUM_DRAFTS), max_model_len=LONGEST)
    model = runner_of(engine).drafts.drafter.model
    model._most_drafted = 9
    written = note_drafts(engine)
    lengths: set[int] = set()

    def disturb(engine: Any, turn: int) -> None:
        lengths.update(len(drafts) for _, drafts in written)
        if turn == 12:
            assert lengths == set()  # all five rows run
            engine.abort("4")

    found = run(engine, disturb=disturb)
    assert found[:4] == expected[:4] and lengths == {1}
    assert check(written, plain_dflash(folder, head), 1) > 10
    engine.shutdown()


@pytest.mark.parametrize("is_async", [False, True])
def test_right_drafts_stay(target: Callable[[str], Target], tmp_path: Path, is_async: bool) -> None:
    """The context then grows by several tokens at once, and rejected ones are none of it."""
    made, _ = target("llama")
    folder = target_of_few(made, tmp_path / "target", FEW)
    head = make_dflash(folder, tmp_path / "head", layers=LAYERS)
    kinds = [{**kind, "temperature": 0.3 * kind["temperature"]} for kind in KINDS]
    without = engine_of(folder)
    options = {"async_scheduling": is_async, "max_model_len": LONGEST}
    engine = engine_of(folder, **settings(head, None), **options)
    written = note_drafts(engine)
    expected = run(without, kinds=kinds)
    for _ in range(2):  # the second time over cached prefixes
        assert run(engine, kinds=kinds) == expected
    stats = engine.core.scheduler.stats
    assert 0.05 < stats.num_accepted_tokens / stats.num_draft_tokens < 0.9
    assert engine.core.scheduler.stats.num_accepted_tokens > 20
    check(written[::3], plain_dflash(folder, head), 5)
    without.shutdown()
    engine.shutdown()


def test_preempted_requests_say_the_same(target: Callable[[str], Target], tmp_path: Path) -> None:
    folder, expected = target("llama")
    head = make_dflash(folder, tmp_path / "head", layers=LAYERS)
    few = {"num_gpu_blocks_override": 12, "max_model_len": 128}
    engine = engine_of(folder, **settings(head, NUM_DRAFTS), **few, async_scheduling=True)
    note_drafts(engine)
    assert run(engine) == expected
    assert engine.core.scheduler.stats.num_preemptions > 0
    engine.shutdown()


def test_layers_of_a_head_are_in_the_cache(target: Callable[[str], Target], tmp_path: Path) -> None:
    folder, _ = target("qwen3")
    plain = engine_of(folder)
    of_target = runner_of(plain).bytes_per_block()
    plain.shutdown()
    for number, changes in enumerate(({}, {"window": 12}, {"num_key_value_heads": 4})):
        head = make_dflash(folder, tmp_path / str(number), layers=LAYERS, **changes)
        engine = engine_of(folder, **settings(head, NUM_DRAFTS))
        runner = runner_of(engine)
        assert len(runner.kv_caches) == NUM_LAYERS + 3
        groups = runner.attention.groups
        alike = runner.attention.group_of(NUM_LAYERS) == runner.attention.group_of(0)
        assert alike == (not changes)
        assert sum(len(group.layers) for group in groups) == NUM_LAYERS + 3
        if not changes:
            assert runner.bytes_per_block() == of_target * (NUM_LAYERS + 3) // NUM_LAYERS
        if "window" in changes:  # counted from the last token of a block of six
            assert {group.spec.window for group in groups} == {None, 18}
        engine.shutdown()


def test_drafts_end_with_the_block(target: Callable[[str], Target], tmp_path: Path) -> None:
    folder, expected = target("llama")
    head = make_dflash(folder, tmp_path / "head", layers=LAYERS, num_noised=4)
    engine = engine_of(folder, **settings(head, None))
    assert runner_of(engine).drafts.drafter.num_tokens == 3
    written = note_drafts(engine)
    assert run(engine) == expected and {len(drafts) for _, drafts in written} == {3}
    engine.shutdown()
    with pytest.raises(ConfigError) as refused:
        engine_of(folder, **settings(head, 4))
    text = str(refused.value)
    assert "num_speculative_tokens is 4, but a block of this head has 3 besides" in text
    assert refused.value.param == "speculative_config"


def in_head(**changes: object) -> dict[str, object]:
    """A change to the keys of `dflash_config`."""
    return {"dflash_config": {"target_layer_ids": list(LAYERS), "mask_token_id": 7, **changes}}


Change = dict[str, torch.Tensor | None]
BAD_FILES: dict[str, tuple[dict[str, object], Change, str]] = {
    "vocabulary": ({"vocab_size": 500}, {}, "vocab_size is 500, but its target has 512"),
    "sizes": ({"hidden_size": 96}, {}, "hidden_size is 96, but its target has 64"),
    "other target": ({"num_target_layers": 9}, {}, "num_target_layers is 9, but its target has 5"),
    "class": ({"architectures": ["LlamaForCausalLM"]}, {}, "'LlamaForCausalLM' is no DFlash head"),
    "no part": ({"dflash_config": None}, {}, "dflash_config is missing"),
    "no block": ({"block_size": None}, {}, "block_size is missing"),
    "small block": ({"block_size": 1}, {}, "block_size must be between 2 and 64, not 1"),
    "no mask": (in_head(mask_token_id=None), {}, "dflash_config.mask_token_id is missing"),
    "far mask": (in_head(mask_token_id=512), {}, "mask_token_id must be between 0 and 511"),
    "causal": (in_head(causal=True), {}, "causal true is not supported"),
    "sinks": (in_head(attention_sink_bias=True), {}, "attention_sink_bias true is not supported"),
    "last layer": (
        in_head(target_layer_ids=[0, 2, 4]),
        {},
        "target_layer_ids names [0, 2, 4], not some of the target's 5 layers but the last",
    ),
    "falling": (in_head(target_layer_ids=[2, 0, 3]), {}, "target_layer_ids names [2, 0, 3], not"),
    "no ids": (in_head(target_layer_ids="all"), {}, "target_layer_ids must be a list of layers"),
    "heads": ({"num_attention_heads": 2}, {}, "num_attention_heads is 2 on key heads like"),
    "kinds": ({"layer_types": ["full_attention"]}, {}, "layer_types must be a list of 3 names"),
    "kind": ({"layer_types": ["linear"] * 3}, {}, "layer_types has 'linear', not supported"),
    "window": ({"layer_types": ["sliding_attention"] * 3}, {}, "sliding_window is missing"),
    "no fc": ({}, {"fc.weight": None}, "lacks tensor fc.weight"),
    "narrow fc": (
        {},
        {"fc.weight": torch.zeros(64, 128)},
        "tensor fc.weight has shape [64, 128], but config.json asks for [64, 192]",
    ),
    "no layer": ({}, {"layers.2.self_attn.k_norm.weight": None}, "layers.2.self_attn.k_norm.weigh"),
    "more": ({}, {"lm_head.weight": torch.zeros(512, 64)}, "has tensor lm_head.weight"),
    "nan": ({}, {"hidden_norm.weight": torch.full((64,), torch.nan)}, "hidden_norm.weight has NaN"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_bad_file_is_named(target: Callable[[str], Target], tmp_path: Path, name: str) -> None:
    changes, change, words = BAD_FILES[name]
    folder, _ = target("llama")
    head = make_dflash(folder, tmp_path / "head", layers=LAYERS)
    change_config(head, **changes)
    tensors = load_file(head / "model.safetensors")
    for tensor, value in change.items():
        if value is None:
            del tensors[tensor]
        else:
            tensors[tensor] = value
    save_file(tensors, head / "model.safetensors")
    with pytest.raises(ModelError) as refused:
        engine_of(folder, **settings(head, NUM_DRAFTS))
    text = str(refused.value)
    assert words in text and str(head) in text and "\n" not in text
    assert text.startswith("speculative_config: method dflash: ")


def test_a_bad_muse_assistant_is_named(target: Callable[[str], Target], tmp_path: Path) -> None:
    folder, _ = target("muse_glimmer")
    head = make_dflash(folder, tmp_path / "head", layers=LAYERS, of_muse=True, window=20)
    change_config(head, mask_token_id=None)  # then it is the published one's
    with pytest.raises(ModelError, match="mask_token_id must be between 0 and 511, not 201818"):
        engine_of(folder, **settings(head, NUM_DRAFTS))


def test_heads_of_other_families_are_refused(
    tiny_model_dir: Callable[..., Path], target: Callable[[str], Target], tmp_path: Path
) -> None:
    head = make_dflash(target("llama")[0], tmp_path / "head", layers=LAYERS)
    with pytest.raises(ModelError, match="not for Gemma2ForCausalLM"):
        engine_of(tiny_model_dir("gemma2"), **settings(head, NUM_DRAFTS))


def test_layers_that_are_not_named_are_the_usual_ones(tmp_path: Path) -> None:
    qwen3: dict[str, Any] = {
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "rope_theta": 1000000.0,
        "rms_norm_eps": 1e-6,
    }
    head = {**qwen3, "architectures": ["DFlashDraftModel"], "num_hidden_layers": 5}
    head |= {"block_size": 16, "dflash_config": {"mask_token_id": 151669}}
    head |= {"num_target_layers": 36, "max_position_embeddings": 2048}
    read = dflash_head(json.loads(json.dumps(head)), ModelConfig.from_hf(qwen3), tmp_path)
    assert read.kept_layers == (2, 10, 18, 26, 34) and read.layers.layer_windows == (None,) * 5
    assert (read.block_size, read.mask_token_id) == (16, 151669)
    assert read.layers.max_position_embeddings == 40960
    one = dflash_head({**head, "num_hidden_layers": 1}, ModelConfig.from_hf(qwen3), tmp_path)
    assert one.kept_layers == (19,)
