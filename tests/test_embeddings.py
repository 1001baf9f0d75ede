"""Vectors of prompts: transformers' hidden states, pooled, whatever happens around the request."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from reference_model import load_reference
from safetensors.torch import load_file, save_file
from server_harness import socket_client

from termgen import LLM, SamplingParams
from termgen.config import EngineConfig
from termgen.engine.loop.engine import AsyncEngine
from termgen.errors import CorruptedLogitsError, CorruptFileError, EngineError, RequestError
from termgen.vocabulary.device.pooling import PoolingInfo, PoolingKind, PoolingParams

TinyModelDir = Callable[..., Path]
FAMILIES = ("llama", "qwen3", "mistral", "gemma3_text", "gemma3n_text", "qwen3_moe", "qwen3_5_text")
TOLERANCE = 1e-4
KINDS = [PoolingParams(kind, normalize=False) for kind in PoolingKind]


def make_llm(folder: Path, **options: Any) -> LLM:
    settings: dict[str, Any] = {
        "device": "cpu",
        "dtype": "float32",
        "max_num_seqs": 8,
        "max_model_len": 128,
        "num_gpu_blocks_override": 64,
        "block_size": 16,
    }
    return LLM(folder, **settings | options)


def prompts_of(lengths: Sequence[int], vocab: int = 300, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(3, vocab, length).tolist() for length in lengths]


class Reference:
    """transformers' last hidden states of a folder's model."""

    def __init__(self, folder: Path) -> None:
        model = load_reference(folder)
        self._body = getattr(model.base_model, "language_model", model.base_model)

    def hidden(self, prompt: Sequence[int]) -> np.ndarray:
        with torch.inference_mode():
            found = self._body(torch.tensor([prompt])).last_hidden_state[0]
        states: np.ndarray = found.numpy()
        return states

    def vector(self, prompt: Sequence[int], kind: PoolingKind) -> np.ndarray:
        states = self.hidden(prompt)
        if kind is PoolingKind.MEAN:
            return states.mean(axis=0)
        return states[-1] if kind is PoolingKind.LAST else states[0]


def check(found: np.ndarray, expected: np.ndarray) -> None:
    assert found.dtype == np.float32
    error = np.linalg.norm(found - expected) / np.linalg.norm(expected)
    assert error < TOLERANCE, error


@pytest.mark.parametrize("family", FAMILIES)
def test_vectors_are_those_of_transformers(tiny_model_dir: TinyModelDir, family: str) -> None:
    """In chunks of 20 tokens, among others, and a second time with the prefix cache."""
    folder = tiny_model_dir(family)
    reference = Reference(folder)
    prompts = prompts_of((1, 2, 16, 17, 33, 128))
    with make_llm(folder, max_num_batched_tokens=20) as llm:
        for params in KINDS:
            for turn in range(2):
                outputs = llm.embed(prompts, pooling_params=params)
                for prompt, output in zip(prompts, outputs, strict=True):
                    check(output.embedding, reference.vector(prompt, params.kind))
                hits = [output.num_cached_tokens for output in outputs]
                has_hits = params.kind is PoolingKind.LAST and turn == 1
                assert any(hits) == has_hits or not llm.config.enable_prefix_caching


@pytest.fixture(scope="module")
def llm(tiny_model_dir: TinyModelDir) -> Any:
    with make_llm(tiny_model_dir("qwen3")) as made:
        yield made


def test_the_model_s_head_is_not_computed_for_vectors_alone(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    heads = []
    runner = llm._engine.core.executor._runner  # type: ignore[attr-defined]
    compute = runner.model.compute_logits
    monkeypatch.setattr(
        runner.model, "compute_logits", lambda hidden: heads.append(len(hidden)) or compute(hidden)
    )
    for params in KINDS:
        llm.embed(prompts_of((5, 9, 40)), pooling_params=params)
    assert heads == []
    llm.generate([[5, 6, 7]], SamplingParams(max_tokens=2))
    assert heads == [1, 1]


def test_vectors_and_answers_come_from_the_same_steps(llm: LLM) -> None:
    """Neither changes the other."""
    prompts = prompts_of((7, 20, 33), seed=3)
    answers = [llm.generate([p], SamplingParams(temperature=0, max_tokens=6))[0] for p in prompts]
    alone = [llm.embed([p])[0].embedding for p in prompts]
    llm.reset_prefix_cache()
    engine, found, tokens = llm._engine, {}, {}
    greedy = SamplingParams(temperature=0.0, max_tokens=6)
    mixed = 0
    for i, prompt in enumerate(prompts):
        for pooling in (None, llm.model.pooling.params()):
            engine.add(
                engine.input_processor.process(
                    prompt, greedy, request_id=f"{i} {pooling is None}", pooling=pooling
                )
            )
    while engine.has_unfinished:
        deltas = engine.step()
        plan = engine.core._last_plan
        assert plan is not None
        mixed += 0 < plan.num_pooled_rows < plan.num_rows
        for delta in deltas:
            if delta.vector is not None:
                found[delta.request_id] = delta.vector
            else:
                tokens.setdefault(delta.request_id, []).extend(delta.token_ids)
    assert mixed
    for i, answer in enumerate(answers):
        assert tuple(tokens[f"{i} True"]) == tuple(answer.outputs[0].token_ids)
        check(found[f"{i} False"], alone[i])


def test_a_preempted_prompt_is_pooled_from_its_beginning(tiny_model_dir: TinyModelDir) -> None:
    folder = tiny_model_dir("llama")
    reference = Reference(folder)
    prompts = prompts_of((70, 60, 50), seed=4)
    with make_llm(folder, max_num_batched_tokens=16) as llm:
        engine = llm._engine
        for params in KINDS:
            found = {}
            for i, prompt in enumerate(prompts):
                engine.add(
                    engine.input_processor.process(
                        prompt, SamplingParams(), request_id=str(i), pooling=params
                    )
                )
            turn = 0
            while engine.has_unfinished:
                if turn in (2, 5):
                    engine.core.control.reset_prefix_cache(True)
                turn += 1
                for delta in engine.step():
                    found[int(delta.request_id)] = delta.vector
            for i, prompt in enumerate(prompts):
                check(found[i], reference.vector(prompt, params.kind))
        assert engine.core.scheduler.stats.num_preemptions >= 4


def test_with_drafts(tiny_model_dir: TinyModelDir) -> None:
    """Drafts of others stand between the tokens of prompts."""
    folder = tiny_model_dir("llama")
    reference = Reference(folder)
    drafts = json.dumps({"method": "ngram", "num_speculative_tokens": 3})
    prompts = prompts_of((7, 21), seed=5)
    with make_llm(folder, speculative_config=drafts) as llm:
        engine = llm._engine
        repeated = [5, 6, 7, 8] * 6
        engine.add(
            engine.input_processor.process(
                repeated, SamplingParams(temperature=0.0, max_tokens=40), request_id="answer"
            )
        )
        found: list[np.ndarray] = []
        turn = 0
        while engine.has_unfinished:
            if turn % 5 == 4 and turn // 5 < len(KINDS):
                for prompt in prompts:
                    request = engine.input_processor.process(
                        prompt, SamplingParams(), pooling=KINDS[turn // 5]
                    )
                    engine.add(request)
            turn += 1
            found += [d.vector for d in engine.step() if d.vector is not None]
        expected = [reference.vector(p, params.kind) for params in KINDS for p in prompts]
        for vector, right in zip(found, expected, strict=True):
            check(vector, right)


def test_dimensions_and_length_one(llm: LLM) -> None:
    (prompt,) = prompts_of((12,))
    raw = llm.embed([prompt], pooling_params=PoolingParams(normalize=False))[0].embedding
    whole = llm.embed([prompt])[0].embedding
    cut = llm.embed([prompt], dimensions=5)[0].embedding
    assert np.allclose(whole, raw / np.linalg.norm(raw), atol=1e-6)
    assert np.allclose(cut, raw[:5] / np.linalg.norm(raw[:5]), atol=1e-6)
    with pytest.raises(RequestError, match=f"at most {len(raw)}") as caught:
        llm.embed([prompt], dimensions=len(raw) + 1)
    assert caught.value.param == "dimensions"
    with pytest.raises(RequestError, match="at least 1"):
        llm.embed([prompt], dimensions=0)


def test_a_long_prompt_is_refused_or_loses_its_end(llm: LLM) -> None:
    (prompt,) = prompts_of((200,))
    with pytest.raises(RequestError, match=r"at most 128 tokens, and the prompt has 200"):
        llm.embed([prompt])
    (cut,) = llm.embed([prompt], truncate_prompt_tokens=-1)
    assert cut.prompt_token_ids == tuple(prompt[:128])
    (few,) = llm.embed([prompt], truncate_prompt_tokens=9)
    assert np.allclose(few.embedding, llm.embed([prompt[:9]])[0].embedding, atol=1e-6)
    with pytest.raises(RequestError, match="must be at most 128, not 129"):
        llm.embed([prompt], truncate_prompt_tokens=129)


def test_nan_is_an_error_of_its_request_alone(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = llm._engine.core.executor._runner  # type: ignore[attr-defined]
    pool = type(runner.pooler).__call__

    def spoil(*args: Any, **options: Any) -> torch.Tensor:
        vectors = pool(*args, **options)
        vectors[0] = float("nan")
        return vectors

    with monkeypatch.context() as patch:
        patch.setattr(type(runner.pooler), "__call__", spoil)
        with pytest.raises(CorruptedLogitsError):
            llm.embed(prompts_of((20, 30)))
    assert np.isfinite(llm.embed(prompts_of((20, 30)))[0].embedding).all()
    assert llm._engine.core.scheduler.kv.pool.num_used == 0


def test_a_failed_step_is_an_error_of_its_requests(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = llm._engine.core.executor._runner  # type: ignore[attr-defined]

    def fail(*args: Any) -> None:
        raise RuntimeError("out of luck")

    with monkeypatch.context() as patch:
        patch.setattr(runner, "_pass", fail)
        with pytest.raises(EngineError, match="out of luck"):
            llm.embed(prompts_of((20,)))
    assert len(llm.embed(prompts_of((20,)))) == 1


# -- the model's files ---------------------------------------------------------------------


def declare(folder: Path, place: Path, **modes: Any) -> Path:
    """The model of a folder with the files of sentence-transformers."""
    for file in folder.iterdir():
        (place / file.name).symlink_to(file)
    kinds = ["Transformer", "Pooling", *modes.pop("modules", ["Normalize"])]
    modules = [
        {"idx": i, "name": str(i), "path": f"{i}_{kind}" if i else "", "type": f"st.models.{kind}"}
        for i, kind in enumerate(kinds)
    ]
    (place / "modules.json").write_text(json.dumps(modules))
    (place / "1_Pooling").mkdir()
    (place / "1_Pooling" / "config.json").write_text(json.dumps(modes))
    prompts = {"prompts": {"query": "Find: ", "document": ""}, "default_prompt_name": None}
    (place / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    return place


def test_the_files_say_how(tiny_model_dir: TinyModelDir, tmp_path: Path) -> None:
    modes = {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}
    folder = declare(tiny_model_dir("llama"), tmp_path, modules=[], **modes)
    reference = Reference(folder)
    with make_llm(folder) as llm:
        info = llm.model.pooling
        assert (info.kind, info.normalize, info.is_declared) == (PoolingKind.MEAN, False, True)
        found = llm.embed(["some words", "more"])
        for output in found:
            check(output.embedding, reference.vector(output.prompt_token_ids, PoolingKind.MEAN))
        (asked,) = llm.embed("some words", prompt_name="query")
        (spelt,) = llm.embed("Find: some words")
        assert asked.prompt_token_ids == spelt.prompt_token_ids
        with pytest.raises(RequestError, match="no prompt 'other'; they have: document, query"):
            llm.embed("some words", prompt_name="other")


@pytest.mark.parametrize(
    ("modes", "reason"),
    [
        ({"pooling_mode_mean_tokens": True, "modules": ["Dense"]}, "a module 'Dense'"),
        ({"pooling_mode_max_tokens": True}, "asks for pooling_mode_max_tokens"),
        (
            {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True},
            "pooling_mode_cls_token and pooling_mode_mean_tokens",
        ),
        ({"pooling_mode_mean_tokens": True, "include_prompt": False}, "leaves out the tokens"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(
    tiny_model_dir: TinyModelDir, tmp_path: Path, modes: dict[str, Any], reason: str
) -> None:
    folder = declare(tiny_model_dir("llama"), tmp_path, **modes)
    with make_llm(folder) as llm:
        with pytest.raises(RequestError, match=reason):
            llm.embed("some words")
        assert llm.generate("some words", SamplingParams(max_tokens=2))[0].outputs[0].token_ids


def test_broken_files_are_named(tiny_model_dir: TinyModelDir, tmp_path: Path) -> None:
    folder = declare(tiny_model_dir("llama"), tmp_path, pooling_mode_mean_tokens=True)
    (folder / "1_Pooling" / "config.json").write_text("{")
    with pytest.raises(CorruptFileError, match=r"1_Pooling/config\.json"):
        make_llm(folder)


def test_the_default_is_the_last_token_with_length_one() -> None:
    assert PoolingInfo(size=8).params() == PoolingParams(PoolingKind.LAST, normalize=True)


async def test_a_server_answers_with_the_same_vectors(tiny_model_dir: TinyModelDir) -> None:
    folder = tiny_model_dir("qwen3")
    texts = ["some words", "other words", "some words and more"]
    with make_llm(folder) as llm:
        expected = [output.embedding for output in llm.embed(texts)]
    options: dict[str, Any] = {"max_num_seqs": 8, "max_model_len": 128}
    config = EngineConfig(model=str(folder), device="cpu", dtype="float32", **options)
    engine = await AsyncEngine.start(config)
    try:
        async with socket_client(engine) as client:
            answer = await client.post("/v1/embeddings", json={"input": texts})
            chat = {"prompt": "some", "max_tokens": 3}
            assert (await client.post("/v1/completions", json=chat)).status_code == 200
            long = {"input": ["x " * 400], "truncate_prompt_tokens": -1}
            assert (await client.post("/v1/embeddings", json=long)).json()["usage"][
                "prompt_tokens"
            ] == 128
            del long["truncate_prompt_tokens"]
            refused = (await client.post("/v1/embeddings", json=long)).json()["error"]
            assert refused["param"] == "input" and "at most 128 tokens" in refused["message"]
        for one, right in zip(answer.json()["data"], expected, strict=True):
            check(np.asarray(one["embedding"], np.float32), right)
        assert (await engine.snapshot()).num_used_blocks == 0
    finally:
        await engine.shutdown()


def test_files_without_a_head_are_read(tiny_model_dir: TinyModelDir, tmp_path: Path) -> None:
    """Those of Qwen3-Embedding: tensors are named as the body of the model names them."""
    folder = tiny_model_dir("qwen3", tie_word_embeddings=True)
    for file in folder.iterdir():
        if file.suffix != ".safetensors":
            (tmp_path / file.name).symlink_to(file)
    tensors = load_file(folder / "model.safetensors")
    bare = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    assert "embed_tokens.weight" in bare and "lm_head.weight" not in bare
    save_file(bare, tmp_path / "model.safetensors", {"format": "pt"})
    prompts = prompts_of((5, 30))
    with make_llm(folder) as llm, make_llm(tmp_path) as without:
        for one, other in zip(llm.embed(prompts), without.embed(prompts), strict=True):
            check(other.embedding, one.embedding)


def test_a_model_that_runs_through_transformers_embeds(tiny_model_dir: TinyModelDir) -> None:
    folder = tiny_model_dir("llama")
    reference = Reference(folder)
    prompts = prompts_of((5, 30))
    with make_llm(folder, model_impl="transformers", max_num_batched_tokens=20) as llm:
        for params in KINDS:
            for prompt, one in zip(prompts, llm.embed(prompts, pooling_params=params), strict=True):
                check(one.embedding, reference.vector(prompt, params.kind))
