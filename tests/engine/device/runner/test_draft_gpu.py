"""Recorded steps with drafts on a GPU give the tokens of those without."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from constrained_harness import FakeGrammar
from drafted_runs import engine_of, prompts, run, runner_of
from tiny_assistant import make_assistant
from tiny_dflash import make_dflash, target_of_few
from tiny_heads import add_mtp, make_eagle3, quiet_target

from termgen.config import EngineConfig
from termgen.engine.loop.engine import SyncEngine
from termgen.vocabulary.events import DraftChoice, DraftReason, StepRecord
from termgen.vocabulary.request import GenerationRequest
from termgen.vocabulary.sampling_params import SamplingParams

pytestmark = pytest.mark.gpu

FEW = (20, 33, 90)
"""Tokens that a bias makes the target say alone, so that a head that knows no others is right
often."""

KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "logprobs": 3},
    {"temperature": 0.3, "frequency_penalty": 0.01},
    {"temperature": 0.0, "repetition_penalty": 1.01, "min_tokens": 20},
    {"temperature": 0.2, "top_k": 20, "top_p": 0.9},
    {"temperature": 0.0, "logit_bias": {7: 1.0}, "logprobs": 0},
    {"temperature": 0.0, "allowed_token_ids": range(3, 9)},
    {"temperature": 1.0},
]


def make_engine(folder: Path, mode: str, drafts: str | None, blocks: int) -> SyncEngine:
    return SyncEngine(
        EngineConfig(
            model=str(folder),
            device="cuda",
            dtype="float32",
            max_num_seqs=12,
            num_gpu_blocks_override=blocks,
            block_size=16,
            max_model_len=256,
            gpu_memory_utilization=0.1,
            max_num_batched_tokens=512,
            skip_tokenizer_init=True,
            cudagraph_mode=mode,
            speculative_config=drafts,
            debug=True,
        )
    )


def generate(
    engine: SyncEngine, seed: int, *, with_grammars: bool = False
) -> tuple[dict[str, list[int]], list[StepRecord]]:
    rng = np.random.default_rng(seed)
    events = engine.core.bus.subscribe()
    outputs: dict[str, list[int]] = {}
    for i in range(24):
        kind = KINDS[i % len(KINDS)]
        most = max(int(rng.integers(3, 90)), kind.get("min_tokens", 0))
        params = SamplingParams(max_tokens=most, seed=i, ignore_eos=True, **kind)
        prompt = np.tile(rng.integers(3, 500, int(rng.integers(2, 40))), 2).tolist()
        grammar = None
        if with_grammars and i % 3 == 0 and params.allowed_token_ids is None:
            forced = {run + k for run in rng.integers(0, 40, 3).tolist() for k in range(9)}
            grammar = FakeGrammar(45, vocab=512, modulus=40 + i, forced=forced)
        engine.add(
            GenerationRequest(
                request_id=str(i), prompt_token_ids=tuple(prompt), params=params, grammar=grammar
            )
        )
        for _ in range(int(rng.integers(0, 4))):
            step(engine, outputs)
    while engine.has_unfinished:
        step(engine, outputs)
    return outputs, [e for e in events.drain() if isinstance(e, StepRecord)]


def step(engine: SyncEngine, outputs: dict[str, list[int]]) -> None:
    for delta in engine.step():
        assert delta.error is None, delta.error
        outputs.setdefault(delta.request_id, []).extend(delta.token_ids)


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt_oss", "qwen3_moe", "qwen3_5_text"])
@pytest.mark.parametrize("mode", ["full", "none", "full_and_piecewise"])
def test_the_text_is_the_same(mode: str, family: str, tiny_model_dir: Callable[..., Path]) -> None:
    seed = 7
    print("seed", seed)
    folder = tiny_model_dir(family)
    plain = make_engine(folder, mode, "none", 60)
    expected, _ = generate(plain, seed)
    plain.shutdown()
    wanted = '{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 1}'
    engine = make_engine(folder, mode, wanted, 60)
    found, steps = generate(engine, seed)
    stats = engine.core.scheduler.stats
    engine.shutdown()
    assert found == expected
    # The text of this hybrid hardly repeats itself.
    assert stats.num_accepted_tokens > (1 if "qwen3_5" in family else 8) and stats.num_preemptions
    drafted = [s for s in steps if s.num_sampled_tokens > s.num_decode_rows + s.num_prefill_rows]
    assert {s.graph_mode for s in drafted} == {"NONE" if mode == "none" else "FULL"}


@pytest.mark.parametrize("mode", ["full", "none"])
def test_what_grammars_force_is_part_of_steps_with_drafts(
    mode: str, tiny_model_dir: Callable[..., Path]
) -> None:
    """The first steps of each size try how long they take with drafts and without, so some have
    forced ones whatever pays."""
    seed = 11
    print("seed", seed)
    folder = tiny_model_dir("llama")
    plain = make_engine(folder, mode, None, 60)
    expected, _ = generate(plain, seed, with_grammars=True)
    assert not plain.core.scheduler.stats.num_forced_tokens
    plain.shutdown()
    wanted = '{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 1}'
    engine = make_engine(folder, mode, wanted, 60)
    found, steps = generate(engine, seed, with_grammars=True)
    stats = engine.core.scheduler.stats
    engine.shutdown()
    assert found == expected
    assert stats.num_forced_tokens > 3
    assert mode == "none" or steps[-1].num_late_compiles == 0


def head_of(method: str, tiny_model_dir: Callable[..., Path], tmp_path: Path) -> tuple[Path, str]:
    """A target, and its setting."""
    chosen: dict[str, Any] = {"method": method, "num_speculative_tokens": 3}
    if method.startswith("mtp"):
        chosen["method"] = "mtp"
        options: dict[str, Any] = {}
        if method == "mtp":
            options = {"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3}
        target = quiet_target(tiny_model_dir("qwen3_5_text", **options), tmp_path / "target")
        add_mtp(target)
    else:
        target = tiny_model_dir("llama", num_hidden_layers=4)
        chosen["model"] = str(target if method == "draft_model" else tmp_path / "head")
    if method == "eagle3":
        make_eagle3(target, tmp_path / "head", layers=(1, 2, 3), known=FEW)
    elif method.startswith("assistant"):
        chosen["method"] = "assistant"
        target = tiny_model_dir("gemma4_text")
        number = 4 if "clusters" in method else 0
        make_assistant(target, tmp_path / "head", few=FEW[:2], num_centroids=number)
    elif method.startswith("dflash"):
        chosen["method"] = "dflash"
        target = target_of_few(target, tmp_path / "target", FEW[:2])
        more: dict[str, Any] = {"window": 12} if "windows" in method else {}
        more |= {"num_noised": 12} if "long" in method else {}
        make_dflash(target, tmp_path / "head", layers=(0, 1, 2), **more)
    return target, json.dumps(chosen)


Drafts = dict[tuple[int, ...], list[int]]
"""The drafts behind each text."""


def note_drafts(engine: SyncEngine) -> Drafts:
    """What the engine's model will draft in steps that are not recorded."""
    drafts: Drafts = {}
    model = runner_of(engine).drafts.drafter.model
    draft = model.draft

    def noting(batch: Any, states: Any, kv_caches: Any, rows: Any, num_drafts: int) -> None:
        draft(batch, states, kv_caches, rows, num_drafts)
        for slot in batch.slots.tolist():
            length, number = rows.total_len[slot].item(), rows.num_drafts[slot].item()
            text = rows.token_ids[slot].tolist()
            if number:
                drafts[tuple(text[:length])] = text[length : length + number]

    model.draft = noting
    return drafts


METHODS = [
    *("draft_model", "mtp", "mtp of a hybrid", "eagle3"),
    *("dflash", "dflash with windows", "dflash of a long block"),
    *("assistant", "assistant with clusters"),
]


@pytest.mark.parametrize("method", METHODS)
def test_models_draft_what_they_do_on_a_cpu(
    method: str, tiny_model_dir: Callable[..., Path], tmp_path: Path
) -> None:
    target, chosen = head_of(method, tiny_model_dir, tmp_path)
    greedy: dict[str, Any] = {"temperature": 0.0}
    if method == "eagle3" or method.startswith("assistant"):
        greedy["logit_bias"] = dict.fromkeys(FEW[: 3 if method == "eagle3" else 2], 100.0)
    texts, drafts, shares = [], [], []
    for device, mode in (("cpu", "none"), ("cuda", "none"), ("cuda", "full")):
        options: dict[str, Any] = {"gpu_memory_utilization": 0.1, "num_gpu_blocks_override": 120}
        if device == "cuda":
            options |= {"cudagraph_mode": mode, "async_scheduling": True}
        engine = engine_of(
            target, device=device, speculative_config=chosen, max_model_len=256, **options
        )
        drafter = runner_of(engine).drafts.drafter
        drafter._payoff.choose = lambda slots, num_found, kinds, num_rows: num_found
        if device == "cuda":
            drafter._choose = lambda plan, lengths: DraftChoice(
                max(lengths, default=0), 3, DraftReason.BEST
            )
        if mode == "none":
            drafts.append(note_drafts(engine))
        texts.append(run(engine, kinds=[greedy] * len(prompts())))
        stats = engine.core.scheduler.stats
        shares.append(stats.num_accepted_tokens / stats.num_draft_tokens)
        engine.shutdown()
    assert texts[0] == texts[1] == texts[2]
    both = drafts[0].keys() & drafts[1].keys()
    equal = sum(drafts[0][text] == drafts[1][text] for text in both) / len(both)
    print(shares, len(both), equal)
    # Rounding decides between drafts that are nearly as likely as each other.
    assert len(both) > 20 and equal > 0.9
    # Recorded steps have other numbers of drafts: rows with prompts beside them have none.
    assert shares[1] > 0.03 and shares[2] == pytest.approx(shares[1], rel=0.3)
    assert (shares[1] > 0.8) == (method == "draft_model")
