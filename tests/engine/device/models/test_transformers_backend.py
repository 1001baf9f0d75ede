"""Models that run through transformers' code: parity with transformers itself, and refusals.

Small random models in float32, greedy, one request at a time in the reference. The families here
differ in aspects that matter to the backend: learned positions, partial rotation, layers without
any, scaled logits, windows in some layers, heads shared by all queries, experts.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from termgen.config import EngineConfig
from termgen.engine.device.loader import load_model_config
from termgen.engine.device.models.transformers_config import build_empty
from termgen.engine.device.runner.build import record_steps
from termgen.engine.device.runner.cuda_graphs import RecordingError
from termgen.engine.device.runner.dispatch import CudaGraphDispatcher
from termgen.engine.loop.engine import SyncEngine
from termgen.engine.schedule.invariants import check_scheduler
from termgen.errors import (
    ConfigError,
    CorruptFileError,
    ModelNotFoundError,
    UnsupportedModelError,
)
from termgen.vocabulary.events import StepRecord
from termgen.vocabulary.request import GenerationRequest
from termgen.vocabulary.sampling_params import SamplingParams

Overrides = dict[str, Any]
MakeModel = Callable[..., Path]
NUM_TOKENS = 12
PROMPT_LENGTHS = (1, 16, 17, 41, 70)

FAMILIES: dict[str, Overrides] = {
    "gpt2": {},
    "phi3": {},
    "granite": {"logits_scaling": 4.0, "residual_multiplier": 0.5, "attention_multiplier": 0.2},
    "cohere2": {"num_hidden_layers": 4, "sliding_window": 24},
    "gpt_neox": {},
    "smollm3": {"num_hidden_layers": 4},
    "opt": {"ffn_dim": 112, "word_embed_proj_dim": 64},
    "gpt_bigcode": {},
    "olmoe": {"num_experts": 8, "num_experts_per_tok": 2},
}
FEW_BLOCKS = {"cohere2": 26}
"""Blocks of a cache that is too small for all prompts; 9 where all layers are one group."""
OPTIONS: dict[str, Overrides] = {
    "plain": {},
    "chunked": {"max_num_batched_tokens": 16},
    "preempted": {"max_model_len": 128},
    "async-no-cache": {"async_scheduling": True, "enable_prefix_caching": False},
}


@pytest.fixture(scope="module")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> MakeModel:
    made: dict[str, Path] = {}

    def make(model_type: str, **overrides: Any) -> Path:
        key = repr((model_type, overrides))
        if key not in made:
            made[key] = tmp_path_factory.mktemp(model_type)
            save_model(made[key], model_type, overrides)
        return made[key]

    return make


def tiny_config(model_type: str, overrides: Overrides) -> Any:
    settings: Overrides = {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 112,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": None,
        "initializer_range": 0.15,
    }
    return AutoConfig.for_model(
        model_type, **{**settings, **FAMILIES.get(model_type, {}), **overrides}
    )


def save_model(folder: Path, model_type: str, overrides: Overrides) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(20)
        config = tiny_config(model_type, overrides)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                # Zeros and ones at first, which would hide an omission.
                if name.endswith("bias"):
                    parameter.normal_(std=0.3)
                elif parameter.dim() == 1:
                    parameter.uniform_(0.6, 1.4)
    model.save_pretrained(folder)


@pytest.fixture
def engines() -> Iterator[Callable[..., SyncEngine]]:
    """Makes engines, and shuts them down."""
    made: list[SyncEngine] = []

    def make(folder: Path, **options: Any) -> SyncEngine:
        settings: Overrides = {
            "device": "cpu",
            "dtype": "float32",
            "threads": 1,
            "max_num_seqs": 8,
            "num_gpu_blocks_override": 100,
            "skip_tokenizer_init": True,
            **options,
        }
        made.append(SyncEngine(EngineConfig(model=str(folder), **settings)))
        return made[-1]

    yield make
    for engine in made:
        engine.shutdown()


def run(engine: SyncEngine, prompts: list[list[int]]) -> list[list[int]]:
    """Greedy tokens of all prompts, submitted at once."""
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    for i, prompt in enumerate(prompts):
        request = GenerationRequest(
            request_id=str(i), prompt_token_ids=tuple(prompt), params=params
        )
        engine.add(request)
    outputs: list[list[int]] = [[] for _ in prompts]
    while engine.has_unfinished:
        for delta in engine.step():
            assert delta.error is None, delta.error
            outputs[int(delta.request_id)] += delta.token_ids
        check_scheduler(engine.core.scheduler)
    return outputs


def random_prompts() -> list[list[int]]:
    seed = 5
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    return [rng.integers(3, 500, n).tolist() for n in PROMPT_LENGTHS]


def reference(folder: Path, prompts: list[list[int]]) -> list[list[int]]:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    outputs = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = model.eval().generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=NUM_TOKENS,
            eos_token_id=None,
            pad_token_id=0,
        )
        outputs.append(out[0, len(prompt) :].tolist())
    return outputs


@pytest.mark.parametrize("model_type", FAMILIES)
def test_parity_with_transformers(
    make_model: MakeModel, engines: Callable[..., SyncEngine], model_type: str
) -> None:
    folder, prompts = make_model(model_type), random_prompts()
    expected = reference(folder, prompts)
    for name, options in OPTIONS.items():
        if name == "preempted":
            options = options | {"num_gpu_blocks_override": FEW_BLOCKS.get(model_type, 9)}
        engine = engines(folder, **options)
        assert run(engine, prompts) == expected, name
        if name == "preempted":
            assert engine.snapshot().num_preemptions > 0
        if name == "plain":
            assert run(engine, prompts) == expected, "again, from the prefix cache"
            assert engine.snapshot().prefix_hit_tokens > 0


@pytest.mark.parametrize(("kind", "least"), [("int8", 0.95), ("int4", 0.85)])
def test_a_cache_of_integers(
    make_model: MakeModel, engines: Callable[..., SyncEngine], kind: str, least: float
) -> None:
    """Queries go to the cache's basis with the keys, though the model's own code rotates them."""
    folder, prompts = make_model("gpt2"), random_prompts()
    expected = reference(folder, prompts)
    given = [p + e[:i] for p, e in zip(prompts, expected, strict=True) for i in range(len(e))]
    engine = engines(folder, kv_cache_dtype=kind, num_gpu_blocks_override=400)
    found = [tokens[0] for tokens in run(engine, given)]
    agreed = np.mean(np.array(found) == np.concatenate(expected))
    print(kind, agreed)
    assert agreed > least


SCALE_NAMES = {
    "phi3": ("model.layers.{}.self_attn.k_scale", "model.layers.{}.self_attn.attn.v_scale"),
    "gpt2": ("transformer.h.{}.attn.k_scale", "h.{}.attn.v_scale"),
    "opt": ("model.decoder.layers.{}.self_attn.k_proj.k_scale",) * 2,
}


def with_scales(folder: Path, to: Path, scales: dict[str, float]) -> Path:
    shutil.copytree(folder, to, dirs_exist_ok=True)
    weights = load_file(to / "model.safetensors")
    weights |= {name: torch.tensor(scale) for name, scale in scales.items()}
    save_file(weights, to / "model.safetensors", metadata={"format": "pt"})
    return to


@pytest.mark.parametrize("model_type", SCALE_NAMES)
def test_scales_of_an_fp8_cache_count(
    make_model: MakeModel, engines: Callable[..., SyncEngine], model_type: str, tmp_path: Path
) -> None:
    """Powers of two change no bit of an fp8 number, but of those next to zero."""
    folder, prompts = make_model(model_type), random_prompts()

    def answers(key: float, value: float, kind: str) -> list[list[int]]:
        names = zip(SCALE_NAMES[model_type], (key, value), strict=True)
        named = {name.format(i): scale for name, scale in names for i in range(2)}
        made = with_scales(folder, tmp_path, named)
        return run(engines(made, kv_cache_dtype=kind), prompts)

    plain = run(engines(folder, kv_cache_dtype="fp8"), prompts)
    assert answers(0.5, 0.5 if model_type == "opt" else 2.0, "fp8") == plain
    # Everything becomes zero, or next to it.
    assert answers(1e6, 1e6, "fp8") != plain
    assert answers(1e6, 1e6, "auto") == run(engines(folder), prompts), "left in the files"


@pytest.mark.parametrize(
    ("name", "scale", "fault"),
    [
        ("model.layers.2.self_attn.k_scale", 2.0, "is a scale for an fp8 KV cache of no layer"),
        ("model.layers.0.mlp.kv_scale", 2.0, "is a scale for an fp8 KV cache of no layer"),
        ("model.layers.1.self_attn.v_scale", -2.0, "is -2, and a scale must be above 0"),
    ],
)
def test_a_scale_that_cannot_count_is_refused(
    make_model: MakeModel,
    engines: Callable[..., SyncEngine],
    tmp_path: Path,
    name: str,
    scale: float,
    fault: str,
) -> None:
    folder = with_scales(make_model("phi3"), tmp_path, {name: scale})
    with pytest.raises(CorruptFileError, match=f"tensor {name} {fault}") as error:
        engines(folder, kv_cache_dtype="fp8")
    assert "\n" not in str(error.value)
    assert engines(folder, kv_cache_dtype="int8")


def test_both_implementations_of_a_family_give_the_same_tokens(
    make_model: MakeModel, engines: Callable[..., SyncEngine]
) -> None:
    """Two engines at once in one process, from the same files and from the same random weights."""
    prompts = random_prompts()
    for load_format in ("auto", "dummy"):
        folder = make_model("llama")
        pair = [
            engines(folder, model_impl=impl, load_format=load_format)
            for impl in ("auto", "transformers")
        ]
        infos = [engine.model.implementation for engine in pair]
        assert infos == ["termgen", "transformers"]
        ours, theirs = (run(engine, prompts) for engine in pair)
        assert ours == theirs
        assert run(pair[0], prompts) == ours


def test_what_the_engine_must_know_is_measured(make_model: MakeModel) -> None:
    config = load_model_config(make_model("cohere2"))
    assert config.implementation == "transformers"
    assert config.layer_windows == (24, 24, 24, None) and config.sliding_window == 24
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (4, 2, 16)
    assert (config.vocab_size, config.hidden_size, config.eos_token_ids) == (512, 64, (1,))
    assert load_model_config(make_model("gpt_bigcode")).num_kv_heads == 1
    tied = load_model_config(make_model("gpt2"))
    model = AutoModelForCausalLM.from_pretrained(make_model("gpt2"))
    assert tied.num_parameters == sum(p.numel() for p in model.parameters())


def test_rotary_frequencies_do_not_change_with_other_requests(
    make_model: MakeModel, engines: Callable[..., SyncEngine], caplog: pytest.LogCaptureFixture
) -> None:
    factors = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, **factors}
    folder = make_model(
        "phi3",
        rope_parameters=rope,
        max_position_embeddings=512,
        original_max_position_embeddings=96,
    )
    with caplog.at_level(logging.WARNING):
        config = load_model_config(folder)
    assert (config.max_position_embeddings, config.extended_positions) == (96, 512)
    assert "limited to 96 of 512 positions" in caplog.text
    assert "max_model_len above 96" in caplog.text
    prompts = random_prompts()
    assert run(engines(folder), prompts) == reference(folder, prompts)
    # In a longer context all requests have the frequencies of long texts, those of 97 tokens on.
    long = [prompt * (100 // len(prompt) + 1) for prompt in prompts]
    assert run(engines(folder, max_model_len=512), long) == reference(folder, long)
    with pytest.raises(ConfigError, match="max_model_len 513 is more than the model's 512 posit"):
        engines(folder, max_model_len=513)


def test_frequencies_that_follow_the_length_become_those_of_the_longest_context() -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    config = LlamaConfig(
        hidden_size=32, num_attention_heads=2, num_hidden_layers=1, vocab_size=9,
        intermediate_size=8, max_position_embeddings=64, rope_parameters=rope,
    )  # fmt: skip
    options = {"dtype": torch.float32, "device": torch.device("cpu")}
    short = build_empty(config, **options).model.rotary_emb
    long = build_empty(config, length=100, **options).model.rotary_emb
    reference = LlamaRotaryEmbedding(config)
    x = torch.zeros(1, 1, 1)
    for module, length in ((short, 64), (long, 100)):
        positions = torch.arange(length)[None]
        for found, expected in zip(module(x, positions), reference(x, positions), strict=True):
            torch.testing.assert_close(found, expected)
    assert not torch.equal(short.inv_freq, long.inv_freq)


def test_nor_do_those_of_each_type_of_layer(
    make_model: MakeModel, engines: Callable[..., SyncEngine]
) -> None:
    """A text of 100 tokens beside one of 400, on both sides of the length that frequencies follow
    in transformers."""
    factors = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    longrope = {"rope_type": "longrope", "rope_theta": 10000.0, **factors}
    longrope["original_max_position_embeddings"] = 96
    ropes = {
        "full_attention": longrope,
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    folder = make_model(
        "modernbert-decoder", rope_parameters=ropes, max_position_embeddings=512, pad_token_id=0
    )
    assert load_model_config(folder).max_position_embeddings == 96
    prompts = random_prompts()
    assert run(engines(folder), prompts) == reference(folder, prompts)


REFUSED: dict[str, tuple[Overrides, str]] = {
    "bloom": ({}, "0 of its 2 layers call attention"),
    "falcon": ({}, "chooses its attention from a list of its own"),
    "gptj": ({}, "chooses its attention from a list of its own"),
    "mamba": ({}, "layers of type 'linear_attention'"),
    "recurrent_gemma": ({}, "layers of type|a state besides keys and values"),
    "bert": ({}, "not causal"),
    "bart": ({}, "an encoder and a decoder"),
    "vaultgemma": ({"head_dim": 16}, "needs softcap"),
    "moshi": ({"head_dim": 16}, "sliding windows that it does not pass to its attention"),
    "diffllama": ({}, "more than once"),
    "reformer": ({}, "its code fails in a trial run"),
}


@pytest.mark.parametrize("model_type", REFUSED)
def test_what_cannot_run_is_refused_with_the_reason(tmp_path: Path, model_type: str) -> None:
    overrides, said = REFUSED[model_type]
    config = tiny_config(model_type, overrides)
    architecture = AutoModelForCausalLM._model_mapping[type(config)].__name__
    raw = {**json.loads(config.to_json_string(use_diff=False)), "architectures": [architecture]}
    source = tmp_path / "config.json"
    source.write_text(json.dumps(raw))
    with pytest.raises(UnsupportedModelError, match=said) as error:
        load_model_config(source)
    assert architecture in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (
            {"architectures": ["WonderForCausalLM"], "model_type": "wonder"},
            "no model_type 'wonder'",
        ),
        (
            {"architectures": ["W"], "model_type": "w", "auto_map": {"AutoModel": "w.W"}},
            "code from its own folder, which is never run",
        ),
        ({"architectures": ["GPT2Model"], "model_type": "gpt2"}, "no language model"),
        (
            {
                "architectures": ["GPT2LMHeadModel"],
                "model_type": "gpt2",
                "quantization_config": {"quant_method": "gptq"},
            },
            "quantization_config asks for gptq",
        ),
        (
            {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_layer": 10**9},
            "1000000000 layers",
        ),
    ],
)
def test_a_config_that_names_no_usable_model(
    tmp_path: Path, raw: dict[str, Any], said: str
) -> None:
    source = tmp_path / "config.json"
    source.write_text(json.dumps(raw))
    with pytest.raises(UnsupportedModelError, match=said):
        load_model_config(source)


@pytest.mark.parametrize(
    "model_type",
    ["roberta", "camembert", "xlm-roberta", "data2vec-text", "roberta-prelayernorm"],
)
def test_a_model_whose_positions_begin_elsewhere_is_refused(
    make_model: MakeModel, engines: Callable[..., SyncEngine], model_type: str
) -> None:
    folder = make_model(model_type, is_decoder=True, pad_token_id=2)
    with pytest.raises(UnsupportedModelError, match="positions do not begin at 0"):
        engines(folder)


def test_code_that_mixes_tokens_or_ignores_positions_is_found(
    make_model: MakeModel, engines: Callable[..., SyncEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.gpt2.modeling_gpt2 import GPT2MLP, GPT2Model

    forward = GPT2MLP.forward
    with monkeypatch.context() as patch:
        patch.setattr(GPT2MLP, "forward", lambda self, x: forward(self, x + x.roll(1, 1)))
        with pytest.raises(UnsupportedModelError, match="mixes tokens outside attention"):
            engines(make_model("gpt2"))
    whole = GPT2Model.forward

    def without_positions(self: Any, **kwargs: Any) -> Any:
        return whole(self, **{**kwargs, "position_ids": None})

    monkeypatch.setattr(GPT2Model, "forward", without_positions)
    with pytest.raises(UnsupportedModelError, match="does not go by their positions"):
        engines(make_model("gpt2"))


def test_settings_that_do_not_go_with_it(
    make_model: MakeModel, engines: Callable[..., SyncEngine], tmp_path: Path
) -> None:
    folder = make_model("gpt2")
    with pytest.raises(ConfigError, match="quantization int8 .* GPT2LMHeadModel"):
        engines(folder, quantization="int8")
    for quantization in ("int8", "q4", "fp8"):
        with pytest.raises(ConfigError, match=f"{quantization} .*model_impl transformers"):
            EngineConfig(quantization=quantization, model_impl="transformers")
    with pytest.raises(
        UnsupportedModelError, match="no code of its own .*'GPT2LMHeadModel'.*leave model_impl"
    ):
        engines(folder, model_impl="termgen")
    gguf = tmp_path / "model.gguf"
    gguf.write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match="needs a folder with safetensors"):
        load_model_config(gguf, model_impl="transformers")
    with pytest.raises(ModelNotFoundError, match="load_format=dummy"):
        engines(folder / "config.json")


def test_weights_that_are_not_those_of_the_config(
    make_model: MakeModel, engines: Callable[..., SyncEngine], tmp_path: Path
) -> None:
    from safetensors.torch import load_file, save_file

    folder = make_model("gpt_neox")
    config, weights = (folder / "config.json").read_text(), load_file(folder / "model.safetensors")
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(ModelNotFoundError, match=r"no model\.safetensors"):
        engines(tmp_path)
    name = "gpt_neox.layers.1.attention.dense.weight"
    for tensors, said in (
        ({k: v for k, v in weights.items() if k != name}, "lacks tensor .*1.attention.dense"),
        ({**weights, name: torch.zeros(64, 32)}, "attention.dense.weight|shape|size"),
    ):
        save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(CorruptFileError, match=said):
            engines(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\x00" * 7)
    with pytest.raises(CorruptFileError, match="truncated"):
        engines(tmp_path)


def test_a_model_that_cannot_be_recorded_runs_without_graphs(
    make_model: MakeModel, engines: Callable[..., SyncEngine]
) -> None:
    engine = engines(make_model("gpt2"))
    runner = engine.core.executor._runner  # type: ignore[attr-defined]
    prompts = random_prompts()
    expected = run(engine, prompts)
    sizes = CudaGraphDispatcher((1, 2, 4, 8), mixed=(16, 64), max_num_seqs=8)
    ring = engine.core.bus.subscribe()

    def steps() -> set[tuple[str, str]]:
        return {(r.graph_mode, r.graph_reason) for r in ring.drain() if isinstance(r, StepRecord)}

    runner.graphs = record_steps(runner, sizes, lambda operations: operations, lambda done: None)
    assert run(engine, prompts) == expected
    assert ("FULL", "") in steps()

    def fail(operations: Callable[[], None]) -> Callable[[], None]:
        operations()
        raise RecordingError("operation not permitted")

    runner.graphs = record_steps(runner, sizes, fail, lambda done: None)
    assert run(engine, prompts) == expected
    assert steps() == {("NONE", "GPT2LMHeadModel cannot be recorded: operation not permitted")}
    runner = engines(make_model("llama")).core.executor._runner  # type: ignore[attr-defined]
    with pytest.raises(RecordingError):  # in termgen's own code that is a fault
        record_steps(runner, sizes, fail, lambda done: None)
