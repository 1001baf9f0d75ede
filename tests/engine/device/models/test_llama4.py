"""Llama 4 apart from its logits: its files, prefixes that end around the edges of chunks, and what
a request holds."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from paged_model import PagedModel, Row, StateDictCheckpoint, build, load
from reference_model import GreedyReference, load_reference
from safetensors.torch import load_file, save_file

from termgen.config import EngineConfig
from termgen.engine.device.attention.base import CHUNKS
from termgen.engine.device.loader import load_model_config, open_checkpoint
from termgen.engine.device.loader.weights import load_weights
from termgen.engine.device.runner.make_attention import attention_needs
from termgen.engine.loop.engine import SyncEngine
from termgen.engine.schedule.invariants import check_scheduler
from termgen.errors import ConfigError, CorruptFileError
from termgen.vocabulary.cache_groups import CacheGroup
from termgen.vocabulary.request import GenerationRequest
from termgen.vocabulary.sampling_params import SamplingParams

TinyModelDir = Callable[..., Path]
TOKENS = [5, 77, 401, 9, 33, 12, 250, 3, 8, 100, 41, 7, 7, 300, 2, 19, 64]
CHUNK = 12
SIZE = 4
NUM_TOKENS = 64
VISION = {
    "hidden_size": 32,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
    "projector_input_dim": 32,
    "projector_output_dim": 32,
    "vision_output_dim": 32,
}


@pytest.fixture(scope="module")
def folder(tiny_model_dir: TinyModelDir) -> Path:
    return tiny_model_dir("llama4_text")


@pytest.fixture
def engine(folder: Path) -> Iterator[SyncEngine]:
    made = SyncEngine(config_of(folder))
    yield made
    made.shutdown()


def config_of(folder: Path, **options: Any) -> EngineConfig:
    # Room for all blocks of a test, and few enough for `check_scheduler`, which walks them.
    usual = {"dtype": "float32", "device": "cpu", "block_size": SIZE, "kv_cache_gib": 0.002}
    return EngineConfig(model=str(folder), skip_tokenizer_init=True, **{**usual, **options})


def answer(engine: SyncEngine, prompt: list[int], num_tokens: int = NUM_TOKENS) -> list[int]:
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    engine.add(GenerationRequest(request_id="one", prompt_token_ids=tuple(prompt), params=params))
    tokens: list[int] = []
    while engine.has_unfinished:
        for delta in engine.step():
            assert delta.error is None, delta.error
            tokens += delta.token_ids
        check_scheduler(engine.core.scheduler)
    return tokens


def random_tokens(num: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 512, num).tolist()


def test_prefixes_that_end_around_the_edges_of_chunks(engine: SyncEngine, folder: Path) -> None:
    """Hits inside a chunk, on its edge and at both sides of it, in a prompt of five chunks. At
    first all its blocks are cached; then those of the layers that see all, and no others."""
    seed = 31
    print("seed", seed)
    shared = random_tokens(5 * CHUNK, seed)
    ends = [end + more for end in (2 * CHUNK, 4 * CHUNK) for more in (-SIZE, -1, 0, 1, SIZE)]
    prompts, answers = [shared], [answer(engine, shared)]
    kv = engine.core.scheduler.kv
    chunked = [group for group, window in enumerate(kv.windows) if window is not None]
    assert len(chunked) < len(kv.windows), "layers that see all are a group of their own"
    for is_whole in (True, False):
        for end in ends:
            if not is_whole:
                kv.pool.forget(b for b, group in enumerate(kv.block_groups) if group in chunked)
            prompts.append(shared[:end] + random_tokens(3, 2 * end + is_whole))
            hits = engine.snapshot().prefix_hit_tokens
            answers.append(answer(engine, prompts[-1]))
            unit = SIZE if is_whole else CHUNK
            assert engine.snapshot().prefix_hit_tokens - hits == end // unit * unit
    GreedyReference(load_reference(folder), prompts).check(answers, NUM_TOKENS)


@pytest.mark.parametrize("budget", [7, 16, 40])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_prompts_of_many_chunks_in_steps_of_any_size(
    budget: int, asynchronous: bool, folder: Path
) -> None:
    prompts = [random_tokens(num, num) for num in (CHUNK, 3 * CHUNK + 1, 130)]
    options = {"max_num_batched_tokens": budget, "max_num_seqs": 4, "debug": True}
    made = SyncEngine(
        config_of(folder, **options, async_scheduling=asynchronous, enable_prefix_caching=False)
    )
    answers = [answer(made, prompt) for prompt in prompts]
    made.shutdown()
    GreedyReference(load_reference(folder), prompts).check(answers, NUM_TOKENS)


def test_a_request_gives_up_the_chunks_behind_it(engine: SyncEngine) -> None:
    groups = engine.core.scheduler.kv.windows
    held = []
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    request = GenerationRequest(request_id="one", prompt_token_ids=(5, 6, 7), params=params)
    engine.add(request)
    while engine.has_unfinished:
        engine.step()
        kv, slots = engine.core.scheduler.kv, engine.core.scheduler.slots.running
        if len(slots):
            spans = (kv.num_blocks - kv.num_dropped)[:, slots[0]]
            held.append([int(n) for n, window in zip(spans, groups, strict=True) if window])
    assert max(map(max, held)) <= CHUNK // SIZE + 1
    assert min(map(min, held[CHUNK:])) == 1, "one begins with its first block"


def test_the_groups_have_names_for_screens(engine: SyncEngine) -> None:
    names = {group.name: group for group in engine.model.cache_groups}
    assert set(names) == {"full", "chunk 12"}
    assert names["chunk 12"] == CacheGroup(12, names["chunk 12"].num_layers, is_chunk=True)


def test_a_context_within_a_chunk_has_one_group(folder: Path) -> None:
    made = SyncEngine(config_of(folder, max_model_len=CHUNK))
    assert made.core.scheduler.kv.windows == (None,)
    prompts = [[5, 77, 401]]
    answers = [answer(made, prompts[0], CHUNK - 3)]
    made.shutdown()
    GreedyReference(load_reference(folder), prompts).check(answers, CHUNK - 3)


def test_packages_that_know_no_chunks_are_refused(folder: Path) -> None:
    assert attention_needs(load_model_config(folder)) == {CHUNKS}
    for name in ("flashinfer", "flash_attn"):
        with pytest.raises(ConfigError, match=f"attention_backend {name}: ") as error:
            SyncEngine(config_of(folder, attention_backend=name, block_size=256))
        assert error.value.param == "attention_backend"


@pytest.fixture(scope="module")
def folder_with_vision(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> tuple[Path, Any]:
    """A random model of text and images as transformers saves it, and that model."""
    from transformers import Llama4Config, Llama4ForConditionalGeneration, Llama4TextConfig

    to = tmp_path_factory.mktemp("llama4-vision")
    text = Llama4TextConfig.from_pretrained(folder)
    config = Llama4Config(text_config=text, vision_config=VISION, image_token_index=500)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = Llama4ForConditionalGeneration(config).eval()
    model.save_pretrained(to)
    return to, model


def copy_with(folder: Path, to: Path, tensors: dict[str, torch.Tensor]) -> Path:
    shutil.copytree(folder, to, dirs_exist_ok=True)
    save_file(tensors, to / "model.safetensors")
    return to


def test_the_part_that_sees_images_stays_in_the_file(
    folder_with_vision: tuple[Path, Any], tmp_path: Path
) -> None:
    folder, reference = folder_with_vision
    tensors = load_file(folder / "model.safetensors")
    text = {name: t for name, t in tensors.items() if name.startswith("language_model.")}
    seen = {name.split(".")[0] for name in tensors} - {"language_model"}
    assert seen == {"vision_model", "multi_modal_projector"}
    checkpoint = open_checkpoint(folder)
    assert set(checkpoint.names()) == {name.removeprefix("language_model.") for name in text}
    assert checkpoint.nbytes == sum(tensor.nbytes for tensor in text.values())
    checkpoint.close()
    actual = PagedModel(load(folder)).step([Row(0, 0, TOKENS)])[0]
    with torch.inference_mode():
        expected = reference(torch.tensor([TOKENS])).logits[0]
    assert (actual - expected).norm() < 1e-4 * expected.norm()
    # Wrong numbers there do not matter, and neither does it if there are none.
    for name in set(tensors) - set(text):
        tensors[name].fill_(float("nan"))
    for number, kept in enumerate((tensors, text)):
        copied = copy_with(folder, tmp_path / str(number), kept)
        assert torch.equal(PagedModel(load(copied)).step([Row(0, 0, TOKENS)])[0], actual)


@pytest.mark.parametrize(
    "missing",
    [
        "1.feed_forward.shared_expert.up_proj.weight",
        "1.feed_forward.router.weight",
        "2.feed_forward.down_proj.weight",
        "3.feed_forward.experts.gate_up_proj",
    ],
)
def test_a_tensor_that_is_missing_is_named(folder: Path, tmp_path: Path, missing: str) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors[f"model.layers.{missing}"]
    with pytest.raises(CorruptFileError, match=rf"model\.layers\.{missing}"):
        load(copy_with(folder, tmp_path, tensors))


def test_experts_one_by_one_load_alike(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    single: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        path, _, part = name.rpartition(".experts.")
        if not path:
            single[name] = tensor
            continue
        for expert, matrix in enumerate(tensor):
            parts = {"down_proj": matrix}
            if part == "gate_up_proj":
                parts = dict(zip(("gate_proj", "up_proj"), matrix.chunk(2, 1), strict=True))
            for own, values in parts.items():
                single[f"{path}.experts.{expert}.{own}.weight"] = values.T.contiguous()
    assert len(single) > len(tensors)
    config = load_model_config(folder)
    models = build(config), build(config)
    for model, source in zip(models, (tensors, single), strict=True):
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
        load_weights(model, StateDictCheckpoint(source))
    for one, other in zip(*(model.named_parameters() for model in models), strict=True):
        assert one[0] == other[0] and torch.equal(one[1], other[1]), one[0]


@torch.inference_mode()
def test_factors_of_queries_are_those_of_transformers(folder: Path) -> None:
    model = load(folder)
    positions = torch.arange(40)
    carried = model.begin(torch.zeros(40, dtype=torch.int32), positions)
    factors = carried.temperature
    assert factors is not None and factors.shape == (40, 1, 1)
    wanted = torch.log1p(torch.floor((positions.float() + 1.0) / 3)) * 0.3 + 1.0
    assert torch.equal(factors.flatten(), wanted)
    assert factors[0] == factors[1] == 1.0 < factors[2] == factors[4] < factors[5]
