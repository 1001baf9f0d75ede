"""Every causal language model in transformers runs with transformers' tokens or is refused.

Each architecture gets a tiny random model. A run of the suite takes a random sample; all of them
take half a minute:
TEST_LENGTH=100 pytest tests/engine/device/models/test_every_architecture.py
"""

from __future__ import annotations

import json
import random
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from lengths import scaled
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from termgen.config import EngineConfig
from termgen.engine.device.loader import load_model_config
from termgen.engine.loop.engine import SyncEngine
from termgen.errors import ModelError
from termgen.vocabulary.request import GenerationRequest
from termgen.vocabulary.sampling_params import SamplingParams

SAMPLE = 40
MIN_RUNNING = 60
"""The least number of architectures that must run."""
MOST_PARAMETERS = 50_000_000
PROMPT_LENGTHS = (3, 40)
NUM_TOKENS = 6
MOST_BEHIND = 2e-3
"""Most that the chosen token's logit may be below the largest: nearly equal ones may swap."""

TINY: dict[str, Any] = {
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
EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
}
"""Set where a config has such a key, so that a model with hundreds of experts is tiny too."""
HEAD_DIM = {"head_dim": 16}
QWEN3_5: dict[str, Any] = {
    **HEAD_DIM,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}
SMALL: dict[str, dict[str, Any]] = {
    "codegen": {"rotary_dim": 8},
    "dots1": {
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "n_group": 1,
        "topk_group": 1,
    },
    "ernie4_5_moe": {"moe_k": 2},
    "gemma2": HEAD_DIM,
    "gemma3": {
        "text_config": {**TINY, **HEAD_DIM},
        "vision_config": {
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
        },
    },
    "gemma3n_text": {
        **HEAD_DIM,
        "num_kv_shared_layers": 0,
        "vocab_size_per_layer_input": 512,
        "hidden_size_per_layer_input": 16,
    },
    "gemma4_assistant": {
        "text_config": {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
    },
    "glm4_moe_lite": {"num_key_value_heads": 4},
    "helium": HEAD_DIM,
    "hunyuan_v1_dense": HEAD_DIM,
    "hunyuan_v1_moe": {**HEAD_DIM, "num_experts": 4, "moe_topk": 2},
    "lfm2_moe": {"layer_types": ["full_attention"] * 2, "num_dense_layers": 1},
    "ministral": HEAD_DIM,
    "modernbert-decoder": {"pad_token_id": 2},
    "opt": {"ffn_dim": 112, "word_embed_proj_dim": 64},
    "phi4_multimodal": {
        "vision_config": {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1},
        "audio_config": {"hidden_size": 32, "intermediate_size": 32, "num_blocks": 1},
    },
    **dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"), QWEN3_5),
    **dict.fromkeys(
        ("camembert", "data2vec-text", "roberta", "xlm-roberta", "xmod"),
        {"is_decoder": True, "pad_token_id": 2},
    ),
}
RAW = re.compile(
    r"\b\w+Error\b|Traceback|object has no attribute|positional argument|unsupported operand"
    r"|object is not|unexpected keyword|termgen_paged|out of range"
)
"""Phrases of exceptions that Python or a library raised for programmers, not for users."""


def make_config(model_type: str) -> Any | None:
    """A tiny config, or the default one if tiny sizes are refused; None if both are."""
    kind = CONFIG_MAPPING[model_type]
    small = SMALL.get(model_type, {})
    with suppress(Exception):
        has = kind(**{**TINY, **small}).to_dict()
        experts = {key: value for key, value in EXPERTS.items() if has.get(key)}
        return kind(**{**TINY, **experts, **small})
    with suppress(Exception):
        return kind(**small)
    return None


def save_model(folder: Path, config: Any) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("bias"):
                    parameter.normal_(std=0.3)
                elif parameter.dim() == 1:
                    parameter.uniform_(0.6, 1.4)
                elif not bool(parameter.any()):
                    parameter.normal_(std=0.15)
    model.save_pretrained(folder)


def generate(engine: SyncEngine, prompts: list[list[int]]) -> list[list[int]]:
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    for i, prompt in enumerate(prompts):
        ids = tuple(prompt)
        engine.add(GenerationRequest(request_id=str(i), prompt_token_ids=ids, params=params))
    found: list[list[int]] = [[] for _ in prompts]
    while engine.has_unfinished:
        for delta in engine.step():
            assert delta.error is None, delta.error
            found[int(delta.request_id)] += delta.token_ids
    return found


def compare(folder: Path, seed: int) -> None:
    """Check that each token of the engine has the largest logit in transformers."""
    engine = SyncEngine(
        EngineConfig(
            model=str(folder),
            device="cpu",
            dtype="float32",
            threads=1,
            max_num_seqs=2,
            num_gpu_blocks_override=16,
            max_model_len=128,
            skip_tokenizer_init=True,
        )
    )
    rng = random.Random(seed)
    prompts = [[rng.randrange(3, 500) for _ in range(length)] for length in PROMPT_LENGTHS]
    try:
        answers = generate(engine, prompts)
    finally:
        engine.shutdown()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for prompt, answer in zip(prompts, answers, strict=True):
        assert len(answer) == NUM_TOKENS
        with torch.inference_mode():
            ids = torch.tensor([prompt + answer])
            logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
        behind = logits.max(-1).values - logits[torch.arange(NUM_TOKENS), torch.tensor(answer)]
        assert float(behind.max()) <= MOST_BEHIND, (prompt, answer, behind)


def outcome(folder: Path, model_type: str, seed: int) -> str:
    """The outcome for one architecture: "runs", or the reason why not."""
    config = make_config(model_type)
    if config is None:
        return "not tried: transformers refuses its default config"
    architecture = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]
    raw = {**json.loads(config.to_json_string(use_diff=False)), "architectures": [architecture]}
    (folder / "config.json").write_text(json.dumps(raw))
    try:
        measured = load_model_config(folder)
        if measured.num_parameters > MOST_PARAMETERS:
            return f"accepted, not compared: {measured.num_parameters} parameters"
        save_model(folder, config)
        compare(folder, seed)
    except ModelError as error:
        message = str(error)
        assert architecture in message and "\n" not in message, message
        assert not RAW.search(message), message
        return message
    return "runs"


@pytest.fixture(scope="module")
def seed() -> int:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    return seed


def test_each_runs_as_in_transformers_or_is_refused_in_plain_words(
    tmp_path_factory: pytest.TempPathFactory, seed: int
) -> None:
    known = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    count = min(scaled(SAMPLE), len(known))
    sample = sorted(random.Random(seed).sample(known, count))
    running = 0
    for model_type in sample:
        said = outcome(tmp_path_factory.mktemp("walk"), model_type, seed)
        print(f"{model_type}: {said}")
        running += said == "runs"
    assert running >= (MIN_RUNNING if count == len(known) else 1)


def test_gpt2_runs(tmp_path: Path, seed: int) -> None:
    assert outcome(tmp_path, "gpt2", seed) == "runs"
