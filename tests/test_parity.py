"""The engine against transformers, whatever the batching, chunking, caching or preemption.

Greedy decoding in float32. The reference is transformers' own modelling code, one request at a
time, on the CPU; the engine runs on the CPU, and on a GPU where there is one.
"""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from reference_model import GreedyReference, load_reference
from transformers import PreTrainedModel

from termgen.config import EngineConfig
from termgen.engine.loop.engine import SyncEngine
from termgen.engine.schedule.invariants import check_scheduler
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
        check_scheduler(engine.core.scheduler)
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
        "Translate to French: the cat sleeps on the warm roof while it rains. " * 5,
    ]
    chats = [[{"role": "user", "content": text}] for text in conversations]
    texts = ["def fibonacci(n):\n"]
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


FAMILIES = [
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma2",
    "gemma3_text",
    "gemma3n_text",
    "gemma4_text",
    "gemma4_moe",
    "qwen3_moe",
    "mixtral",
    "gpt_oss",
    "llama4_text",
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "qwen3_next",
    "muse_glimmer",
]
WITH_WINDOWS = (
    "gemma3_text",
    "gemma3n_text",
    "gemma4_text",
    "gemma4_moe",
    "gpt_oss",
    "llama4_text",
    "muse_glimmer",
)
"""Families here whose layers with and without a window are groups of their own."""
FEW_BLOCKS = {"num_gpu_blocks_override": 14, "block_size": 16, "max_model_len": 128}
OPTIONS: dict[str, dict[str, object]] = {
    "plain": {},
    "chunked": {"max_num_batched_tokens": 16},
    "async-preempted": {**FEW_BLOCKS, "async_scheduling": True},
    # debug: blocks that are given up are filled with NaN.
    "no-cache": {
        "enable_prefix_caching": False,
        "long_prefill_token_threshold": 10,
        "debug": True,
    },
}
PREEMPTED_IN_TURN = ("llama", "gemma3_text", "llama4_text", "qwen3_next")
"""A family without groups, one with windows, one with chunks and one with states: `preempted`,
without async."""
FAMILY_CASES = [
    *((family, options) for options in OPTIONS for family in FAMILIES),
    *((family, "preempted") for family in PREEMPTED_IN_TURN),
]
FamilyCase = Callable[[str], tuple[Path, list[list[int]], GreedyReference]]


@pytest.fixture(scope="module")
def family_case(tiny_model_dir: Callable[[str], Path]) -> FamilyCase:
    """A family's tiny model, prompts, and transformers' answers to them."""
    seed = 1234

    @functools.cache
    def make(family: str) -> tuple[Path, list[list[int]], GreedyReference]:
        rng = np.random.default_rng(seed)
        folder = tiny_model_dir(family)
        model = load_reference(folder)
        vocab = model.config.get_text_config().vocab_size
        shared = rng.integers(3, vocab, 66).tolist()  # a whole block of any backend's size
        lengths = [1, 15, 16, 17, 63, 64, 65, 100]
        prompts = [rng.integers(3, vocab, n).tolist() for n in lengths]
        prompts += [shared + rng.integers(3, vocab, n).tolist() for n in (1, 9)]
        prompts += [shared + [5]] * 2
        return folder, prompts, GreedyReference(model, prompts)

    return make


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("family", "name"), FAMILY_CASES)
def test_every_family_equals_transformers(
    engines: Engines,
    family_case: FamilyCase,
    family: str,
    name: str,
    device: str,
) -> None:
    options = OPTIONS.get(name, FEW_BLOCKS)
    folder, prompts, expected = family_case(family)
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    if family in WITH_WINDOWS and "num_gpu_blocks_override" in options:
        # A request has some of each group.
        num_blocks = 28 if family == "gemma4_moe" else 24
        options = {**options, "num_gpu_blocks_override": num_blocks}
    engine = engines(folder, device=device, skip_tokenizer_init=True, **options)
    expected.check(run(engine, prompts, params), NUM_TOKENS)
    if "num_gpu_blocks_override" in options:
        assert engine.snapshot().num_preemptions > 0
        return
    hits = engine.snapshot().prefix_hit_tokens
    expected.check(run(engine, prompts, params), NUM_TOKENS)  # over a warm cache
    is_cached = options.get("enable_prefix_caching", True)
    assert (engine.snapshot().prefix_hit_tokens > hits) == is_cached


@pytest.fixture(scope="module")
def float8_case(family_case: FamilyCase, tmp_path_factory: pytest.TempPathFactory) -> FamilyCase:
    """The same of a model whose matrices, but those of embeddings, are 8-bit floats times a power
    of two, in a checkpoint of floats."""
    pytest.importorskip("triton")
    from safetensors.torch import load_file, save_file

    from termgen.engine.device.quantization.float8_rows import round_rows

    @functools.cache
    def make(family: str) -> tuple[Path, list[list[int]], GreedyReference]:
        source, prompts, _ = family_case(family)
        folder = tmp_path_factory.mktemp("float8") / family
        shutil.copytree(source, folder)
        for path in folder.glob("*.safetensors"):
            tensors = load_file(path)
            for name, tensor in tensors.items():
                if tensor.ndim == 2 and "embed" not in name and "head" not in name:
                    numbers, scale = round_rows(tensor)
                    tensors[name] = (numbers.float() * scale[:, None]).to(tensor.dtype)
            save_file(tensors, path, metadata={"format": "pt"})
        return folder, prompts, GreedyReference(load_reference(folder), prompts)

    return make


@pytest.fixture(scope="module")
def group_case(family_case: FamilyCase) -> FamilyCase:
    """The same beside transformers with every matrix as `quantize_rows` rounds it."""
    return _rounded_case(family_case, 8)


@pytest.fixture(scope="module")
def four_bit_case(family_case: FamilyCase) -> FamilyCase:
    """The same with 4 bits for all but tables of embeddings and heads."""
    return _rounded_case(family_case, 4)


def _rounded_case(family_case: FamilyCase, num_bits: int) -> FamilyCase:
    pytest.importorskip("triton")
    from termgen.engine.device.native.int8_blocks import dequantize, quantize_rows

    @functools.cache
    def make(family: str) -> tuple[Path, list[list[int]], GreedyReference]:
        folder, prompts, _ = family_case(family)
        reference = load_reference(folder)
        tables = {reference.get_input_embeddings(), reference.get_output_embeddings()}

        def rounded(weight: torch.Tensor, num_bits: int) -> torch.Tensor:
            columns = weight.shape[1]
            # A GPU divides otherwise than a CPU: a number between two may become the other one.
            padded = F.pad(weight, (0, -columns % 32)).cuda()
            return dequantize(quantize_rows(padded, num_bits))[:, :columns].cpu()

        for module in reference.modules():
            if isinstance(module, torch.nn.Linear | torch.nn.Embedding):
                bits = 8 if module in tables else num_bits
                module.weight.data.copy_(rounded(module.weight.data, bits))
            elif type(module).__name__.endswith("Experts"):
                for experts in (module.gate_up_proj.data, module.down_proj.data):
                    # gpt-oss has them as [inputs, outputs].
                    is_turned = type(module).__name__.startswith("GptOss")
                    for matrix in experts.mT if is_turned else experts:
                        matrix.copy_(rounded(matrix, num_bits))
        return folder, prompts, GreedyReference(reference, prompts)

    return make


@pytest.mark.gpu
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize(
    ("quantization", "case", "layer", "family"),
    [
        (*kind, family)
        for kind in (
            ("fp8", "float8_case", "Float8Linear"),
            ("int8", "group_case", "GroupLinear"),
            ("q4", "four_bit_case", "Group4Linear"),
        )
        for family in ("llama", "gemma3_text", "qwen3_5_text", "qwen3_moe", "gpt_oss")
        if kind[0] != "fp8" or family not in ("qwen3_moe", "gpt_oss")
    ],
)
def test_quantised_weights_equal_their_floats(
    request: pytest.FixtureRequest,
    engines: Engines,
    quantization: str,
    case: str,
    layer: str,
    family: str,
    name: str,
) -> None:
    folder, prompts, expected = request.getfixturevalue(case)(family)
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    options = {"quantization": quantization, "skip_tokenizer_init": True, **OPTIONS[name]}
    if family in WITH_WINDOWS and "num_gpu_blocks_override" in options:
        options["num_gpu_blocks_override"] = 24  # some of each group
    engine = engines(folder, device="cuda", **options)
    model = engine.core.executor._runner.model  # type: ignore[attr-defined]
    # The float model of these weights gives the same tokens: what runs must be the other one.
    assert any(type(module).__name__ == layer for module in model.modules())
    for _ in range(2):  # the second time over a warm cache
        expected.check(run(engine, prompts, params), NUM_TOKENS)
