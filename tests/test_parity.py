"""The engine against transformers, whatever the batching, chunking, caching or preemption.

Greedy decoding in float32. The reference is transformers' own modelling code, one request at a
time, on the CPU; the engine runs on the CPU, and on a GPU where there is one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from termgen.config import EngineConfig
from termgen.engine.loop.engine import SyncEngine
from termgen.vocabulary.request import GenerationRequest
from termgen.vocabulary.sampling_params import SamplingParams

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
NUM_TOKENS = 24
NUM_REAL_TOKENS = 16
"""Tokens from the real model, whose steps are slow; still more than one block."""

Engines = Callable[..., SyncEngine]


@pytest.fixture
def engines() -> Iterator[Engines]:
    """Makes engines, and shuts them down."""
    made: list[SyncEngine] = []

    def make(model: Path, **options: object) -> SyncEngine:
        # A few hundred blocks: `check_integrity` walks them all after every step.
        gib = 0.5 if model.is_file() else 0.008
        options = {"dtype": "float32", "max_num_seqs": 16, "kv_cache_gib": gib, **options}
        if "num_gpu_blocks_override" in options:
            del options["kv_cache_gib"]
        made.append(SyncEngine(EngineConfig(model=str(model), **options)))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for engine in made:
        engine.shutdown()


def run(
    engine: SyncEngine, prompts: Sequence[Sequence[int]], params: SamplingParams
) -> list[list[int]]:
    """Output tokens of all prompts, submitted at once."""
    for i, prompt in enumerate(prompts):
        engine.add(
            GenerationRequest(request_id=str(i), prompt_token_ids=tuple(prompt), params=params)
        )
    outputs: list[list[int]] = [[] for _ in prompts]
    while engine.has_unfinished:
        for delta in engine.step():
            assert delta.error is None, delta.error
            outputs[int(delta.request_id)] += delta.token_ids
        engine.core.scheduler.check_integrity()
    assert engine.snapshot().num_used_blocks == 0
    return outputs


def reference(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    num_tokens: int,
    eos: Sequence[int],
) -> list[list[int]]:
    outputs = []
    for prompt in prompts:
        ids = torch.tensor([list(prompt)])
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=num_tokens,
            eos_token_id=list(eos) or None,
            pad_token_id=0,
        )
        outputs.append(out[0, len(prompt) :].tolist())
    return outputs


GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_REAL_TOKENS)


# -- the real model ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def smollm2_prompts(smollm2_gguf: Path) -> list[list[int]]:
    from termgen.engine.text.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(smollm2_gguf)
    conversations = [
        "What is the capital of France?",
        "Write a haiku about the sea.",
        "List three uses of copper wire, each with one short sentence of explanation, please.",
        "Translate to French: the cat sleeps on the warm roof while it rains. " * 5,
    ]
    chats = [[{"role": "user", "content": text}] for text in conversations]
    texts = ["Once upon a time", "def fibonacci(n):\n"]
    return [
        *(tokenizer.apply_chat_template(chat) for chat in chats),
        *(tokenizer.encode(text) for text in texts),
    ]


@pytest.fixture(scope="module")
def smollm2_expected(
    smollm2_reference: PreTrainedModel, smollm2_prompts: list[list[int]]
) -> list[list[int]]:
    return reference(smollm2_reference, smollm2_prompts, NUM_REAL_TOKENS, eos=[2])


@pytest.mark.parametrize("device", DEVICES)
def test_smollm2_one_request_at_a_time(
    engines: Engines,
    smollm2_gguf: Path,
    smollm2_prompts: list[list[int]],
    smollm2_expected: list[list[int]],
    device: str,
) -> None:
    engine = engines(smollm2_gguf, device=device, enable_prefix_caching=False)
    got = [run(engine, [prompt], GREEDY)[0] for prompt in smollm2_prompts]
    assert got == smollm2_expected


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_smollm2_all_at_once_and_again_from_the_prefix_cache(
    engines: Engines,
    smollm2_gguf: Path,
    smollm2_prompts: list[list[int]],
    smollm2_expected: list[list[int]],
    device: str,
    asynchronous: bool,
) -> None:
    engine = engines(smollm2_gguf, device=device, async_scheduling=asynchronous)
    assert run(engine, smollm2_prompts, GREEDY) == smollm2_expected
    hits = engine.snapshot().prefix_hit_tokens
    assert run(engine, smollm2_prompts, GREEDY) == smollm2_expected
    assert engine.snapshot().prefix_hit_tokens > hits + 64, "the second pass should hit the cache"


@pytest.mark.parametrize("device", DEVICES)
def test_smollm2_in_chunks_of_16_tokens(
    engines: Engines,
    smollm2_gguf: Path,
    smollm2_prompts: list[list[int]],
    smollm2_expected: list[list[int]],
    device: str,
) -> None:
    engine = engines(smollm2_gguf, device=device, max_num_batched_tokens=16)
    assert max(map(len, smollm2_prompts)) > 64, "some prompt must take several chunks"
    assert run(engine, smollm2_prompts, GREEDY) == smollm2_expected


@pytest.mark.parametrize("device", DEVICES)
def test_smollm2_with_a_cache_so_small_that_requests_are_preempted(
    engines: Engines,
    smollm2_gguf: Path,
    smollm2_prompts: list[list[int]],
    smollm2_expected: list[list[int]],
    device: str,
) -> None:
    # The longest prompt and its answer just fit; all of them together do not.
    longest = max(map(len, smollm2_prompts)) + NUM_REAL_TOKENS
    blocks = longest // 16 + 6
    engine = engines(smollm2_gguf, device=device, num_gpu_blocks_override=blocks, block_size=16)
    assert run(engine, smollm2_prompts, GREEDY) == smollm2_expected
    assert engine.snapshot().num_preemptions > 0


# -- tiny random models of every family ----------------------------------------------------


FAMILIES = ["llama", "mistral", "qwen2", "qwen3", "gemma3_text", "qwen3_moe", "mixtral"]
FamilyCase = Callable[[str], tuple[Path, list[list[int]], list[list[int]]]]


@pytest.fixture(scope="module")
def family_case(tiny_model_dir: Callable[[str], Path]) -> FamilyCase:
    """A family's tiny model, prompts, and what transformers answers, which is asked once."""
    seed = 1234

    @functools.cache
    def make(family: str) -> tuple[Path, list[list[int]], list[list[int]]]:
        rng = np.random.default_rng(seed)
        folder = tiny_model_dir(family)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        vocab = model.config.vocab_size
        shared = rng.integers(3, vocab, 66).tolist()  # a whole block of any backend's size
        lengths = [1, 15, 16, 17, 63, 64, 65, 100]
        prompts = [rng.integers(3, vocab, n).tolist() for n in lengths]
        prompts += [shared + rng.integers(3, vocab, n).tolist() for n in (1, 9)]
        prompts += [shared + [5]] * 2
        return folder, prompts, reference(model, prompts, NUM_TOKENS, eos=[])

    return make


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 16},
        {"num_gpu_blocks_override": 14, "block_size": 16, "max_model_len": 128},
        {
            "async_scheduling": True,
            "num_gpu_blocks_override": 14,
            "block_size": 16,
            "max_model_len": 128,
        },
        {"enable_prefix_caching": False, "long_prefill_token_threshold": 10},
    ],
    ids=["plain", "chunked", "preempted", "async-preempted", "no-cache"],
)
def test_every_family_equals_transformers(
    engines: Engines,
    family_case: FamilyCase,
    family: str,
    options: dict[str, object],
    device: str,
) -> None:
    folder, prompts, expected = family_case(family)
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    engine = engines(folder, device=device, skip_tokenizer_init=True, **options)
    assert run(engine, prompts, params) == expected
    if "num_gpu_blocks_override" in options:
        assert engine.snapshot().num_preemptions > 0
    hits = engine.snapshot().prefix_hit_tokens
    assert run(engine, prompts, params) == expected, "a second pass over a warm cache"
    is_cached = options.get("enable_prefix_caching", True)
    assert (engine.snapshot().prefix_hit_tokens > hits) == is_cached
