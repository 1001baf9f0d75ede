"""Mutated model files: reading any file works or raises ModelError naming it.

Memory is bounded too: a small file must not make the reader allocate much. Seeds are printed.
"""

from __future__ import annotations

import copy
import json
import random
import struct
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from chat_samples import make_backend
from gguf_samples import finish
from lengths import scaled
from safetensors.torch import save_file

from termgen.engine.device.loader import load_generation_config, load_model_config, open_checkpoint
from termgen.engine.gguf.gguf_file import GGUFFile
from termgen.engine.loop.startup import sampling_defaults
from termgen.engine.text.tokenizer import load_tokenizer
from termgen.errors import ModelError, RequestError
from termgen.library.catalog import LocalModel
from termgen.vocabulary.sampling_params import SamplingParams

MAX_PEAK_BYTES = 16 << 20
LENGTHS = (0, 1, 7, 2**16, 2**31 - 1, 2**31, 2**32, 2**40, 2**62, 2**63, 2**64 - 1, 2**64 - 8)
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 8,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}


@pytest.fixture(scope="module")
def small_gguf(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return write_small(tmp_path_factory.mktemp("gguf") / "m.gguf", "llama")


@pytest.fixture(scope="module")
def small_gemma3_gguf(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return write_small(tmp_path_factory.mktemp("gguf") / "m.gguf", "gemma3")


@pytest.fixture(scope="module")
def small_gemma4_gguf(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return write_small(tmp_path_factory.mktemp("gguf") / "m.gguf", "gemma4")


@pytest.fixture(scope="module")
def small_qwen35moe_gguf(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return write_small(tmp_path_factory.mktemp("gguf") / "m.gguf", "qwen35moe")


DELTA_NET_SIZES = {
    "blk.0.attn_qkv": (64, 32),  # a key head of 16 and two value heads
    "blk.0.attn_gate": (32, 32),
    "blk.0.ssm_out": (32, 32),
    "blk.1.attn_q": (64, 32),
    "blk.1.attn_k": (32, 32),
    **{
        f"blk.{layer}.ffn_{part}": sizes
        for layer in (0, 1)
        for part, sizes in {
            "gate_exps": (2, 32, 32),
            "up_exps": (2, 32, 32),
            "down_exps": (2, 32, 32),
            "up_shexp": (32, 32),
        }.items()
    },
}


def add_delta_net(writer: gguf.GGUFWriter, rng: np.random.Generator) -> None:
    writer.add_ssm_conv_kernel(4)
    writer.add_ssm_state_size(16)
    writer.add_ssm_group_count(1)
    writer.add_ssm_time_step_rank(2)
    writer.add_ssm_inner_size(32)
    writer.add_array("qwen35moe.attention.recurrent_layers", [True, False])
    writer.add_rope_freq_base(1e4)
    writer.add_rope_dimension_count(8)
    writer.add_rope_dimension_sections([2, 1, 1, 0])
    writer.add_expert_count(2)
    writer.add_expert_used_count(1)
    writer.add_expert_feed_forward_length(32)
    writer.add_expert_shared_feed_forward_length(32)
    writer.add_tensor("blk.0.ssm_a", -np.ones(2, dtype=np.float32))
    writer.add_tensor("blk.0.ssm_conv1d.weight", np.ones((64, 4), dtype=np.float32))
    writer.add_tensor("blk.0.ffn_gate_inp_shexp.weight", np.ones(32, dtype=np.float32))
    kind = gguf.GGMLQuantizationType.Q8_0
    for name, sizes in DELTA_NET_SIZES.items():
        values = rng.standard_normal(sizes).astype(np.float32)
        writer.add_tensor(f"{name}.weight", gguf.quants.quantize(values, kind), raw_dtype=kind)


GEMMA4_SIZES = {
    "per_layer_token_embd": (8, 64),
    "blk.0.attn_q": (32, 32),
    "blk.0.attn_k": (16, 32),
    "blk.0.ffn_up": (32, 32),
    "blk.1.attn_q": (64, 32),
    "blk.1.attn_k": (32, 32),
    "blk.1.ffn_up": (32, 32),
}


def add_gemma4(writer: gguf.GGUFWriter, rng: np.random.Generator) -> None:
    writer.add_sliding_window(8)
    writer.add_sliding_window_pattern([True, False])
    writer.add_shared_kv_layers(0)
    writer.add_embedding_length_per_layer_input(32)
    writer.add_rope_freq_base(1e6)
    writer.add_rope_freq_base_swa(1e4)
    writer.add_head_count_kv([1, 1])
    writer.add_feed_forward_length([32, 32])
    for size, suffix in ((32, ""), (16, "_swa")):
        writer.add_uint32(f"gemma4.attention.key_length{suffix}", size)
        writer.add_uint32(f"gemma4.attention.value_length{suffix}", size)
    writer.add_tensor("rope_freqs.weight", np.array([1.0] * 4 + [1e30] * 12, dtype=np.float32))
    kind = gguf.GGMLQuantizationType.Q8_0
    for name, sizes in GEMMA4_SIZES.items():
        values = rng.standard_normal(sizes).astype(np.float32)
        writer.add_tensor(f"{name}.weight", gguf.quants.quantize(values, kind), raw_dtype=kind)


def write_small(path: Path, arch: str) -> bytes:
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(2 if arch in ("qwen35moe", "gemma4") else 1)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_head_count(2)
    writer.add_layer_norm_rms_eps(1e-5)
    if arch != "gemma4":
        writer.add_feed_forward_length(32)
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(2.0)
    if arch == "gemma3":
        writer.add_sliding_window(8)
        writer.add_sliding_window_pattern([True])
        writer.add_rope_freq_base_swa(1e4)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe")
    writer.add_token_list(["<s>", "</s>", "a", "b", "ab", "d", "e", "f"])
    writer.add_token_types([3, 3, 1, 1, 1, 1, 1, 1])
    writer.add_token_merges(["a b"])
    writer.add_chat_template("{{ messages[0].content }}")
    writer.add_float32("general.sampling.temp", 0.5)
    writer.add_array("x.nested", [[1, 2], [3]])
    writer.add_bool("x.flag", True)
    writer.add_eos_token_id(1)
    rng = np.random.default_rng(0)
    if arch in ("qwen35moe", "gemma4"):
        if arch == "gemma4":
            add_gemma4(writer, rng)
        else:
            add_delta_net(writer, rng)
            writer.add_key_length(16)
            writer.add_value_length(16)
        writer.add_tensor("token_embd.weight", np.ones((8, 32), dtype=np.float32))
        finish(writer)
        return path.read_bytes()
    for name, quant in (
        ("token_embd.weight", "F32"),
        ("blk.0.attn_q.weight", "Q4_1"),
        ("blk.0.attn_k.weight", "Q8_0"),
        ("blk.0.attn_v.weight", "F16"),
        ("blk.0.ffn_up.weight", "BF16"),
    ):
        rows = 8 if name.startswith("token") else 32
        kind = gguf.GGMLQuantizationType[quant]
        values = rng.standard_normal((rows, 32)).astype(np.float32)
        writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    finish(writer)
    return path.read_bytes()


@pytest.fixture(scope="module")
def small_safetensors(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("safetensors") / "model.safetensors"
    layer = "model.layers.0."
    weights = {
        "model.embed_tokens.weight": torch.ones(8, 32),
        f"{layer}self_attn.q_proj.weight": torch.ones(32, 32, dtype=torch.float16),
        f"{layer}self_attn.k_proj.weight": torch.ones(32, 32, dtype=torch.float16),
        f"{layer}mlp.up_proj.weight": torch.ones(32, 32, dtype=torch.float16),
        "model.norm.weight": torch.ones(32, dtype=torch.bfloat16),
    }
    save_file(weights, path)
    return path.read_bytes()


def read_all_gguf(path: Path) -> None:
    with GGUFFile.open(path) as file:
        for key in file.metadata:
            file.metadata[key]
        for tensor in file.tensors.values():
            tensor.data.sum()
    sampling_defaults(LocalModel("m", path, "gguf", str(path)), load_generation_config(path))
    load_tokenizer(path).close()
    read_all(path)


def read_all(path: Path) -> None:
    checkpoint = open_checkpoint(path)
    try:
        for name in checkpoint.names():
            checkpoint.tensor(name).sum()
    finally:
        checkpoint.close()


def outcomes(files: Iterator[bytes], path: Path, read: Callable[[], None]) -> tuple[int, int]:
    """(read well, refused). Anything but a one-line TermgenError, or a large allocation, fails."""
    good = bad = 0
    tracemalloc.start()
    try:
        for number, raw in enumerate(files):
            path.write_bytes(raw)
            tracemalloc.reset_peak()
            try:
                read()
                good += 1
            except ModelError as error:
                bad += 1
                said = str(error)
                assert said.isprintable() and len(said) < 1100, f"mutation {number}: {said}"
                assert str(path.parent) in said, f"mutation {number}: {said}"
            peak = tracemalloc.get_traced_memory()[1]
            assert peak < MAX_PEAK_BYTES, f"mutation {number} took {peak} bytes"
    finally:
        tracemalloc.stop()
    return good, bad


def mutations(raw: bytes, header: int, count: int, rng: random.Random) -> Iterator[bytes]:
    for _ in range(count):
        mutated = bytearray(raw)
        for _ in range(rng.choice((1, 1, 1, 3))):
            kind = rng.random()
            at = rng.randrange(min(header, len(mutated)))
            if kind < 0.4:
                mutated[at] ^= 1 << rng.randrange(8)
            elif kind < 0.6:
                mutated[at] = rng.choice((0, 1, 0x7F, 0x80, 0xFF))
            elif kind < 0.9:
                mutated[at : at + 8] = struct.pack("<Q", rng.choice(LENGTHS))
            else:
                del mutated[at : at + rng.randrange(1, 9)]
        yield bytes(mutated)


def data_start(raw: bytes, folder: Path) -> int:
    path = folder / "whole.gguf"
    path.write_bytes(raw)
    with GGUFFile.open(path) as file:
        return min(tensor.offset for tensor in file.tensors.values())


@pytest.mark.parametrize(
    "fixture", ["small_gguf", "small_gemma3_gguf", "small_gemma4_gguf", "small_qwen35moe_gguf"]
)
def test_gguf_mutations(fixture: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    small: bytes = request.getfixturevalue(fixture)
    seed = 1234
    print(f"seed {seed}")
    header = data_start(small, tmp_path)
    path = tmp_path / "m.gguf"
    path.write_bytes(small)
    read_all_gguf(path)
    files = mutations(small, header, scaled(300), random.Random(seed))
    good, bad = outcomes(files, path, lambda: read_all_gguf(path))
    # Both occur: the mutations reach past the first check, and not all of them matter.
    assert good > 10 and bad > 100


def test_gguf_cut_anywhere_is_refused(small_gguf: bytes, tmp_path: Path) -> None:
    header = data_start(small_gguf, tmp_path)
    path = tmp_path / "m.gguf"
    # The writer pads the last tensor: the cut must be longer than that.
    every = 3 if scaled(1) == 1 else 1
    cuts = [*range(0, header, every), *range(header, len(small_gguf) - 32, 97)]
    good, bad = outcomes((small_gguf[:cut] for cut in cuts), path, lambda: read_all_gguf(path))
    assert (good, bad) == (0, len(cuts))


def test_gguf_every_length_field_absurd(small_gguf: bytes, tmp_path: Path) -> None:
    """At every byte position of the header, 8 bytes become an impossible length."""
    header = data_start(small_gguf, tmp_path)
    path = tmp_path / "m.gguf"
    absurd = struct.pack("<Q", 2**63 - 1)
    files = (small_gguf[:at] + absurd + small_gguf[at + 8 :] for at in range(0, header - 8, 3))
    _, bad = outcomes(files, path, lambda: read_all_gguf(path))
    assert bad > 100


def test_safetensors_mutations(small_safetensors: bytes, tmp_path: Path) -> None:
    seed = 4321
    print(f"seed {seed}")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    path = tmp_path / "model.safetensors"
    path.write_bytes(small_safetensors)
    read_all(tmp_path)
    header = 8 + int.from_bytes(small_safetensors[:8], "little")
    files = mutations(small_safetensors, header, scaled(300), random.Random(seed))
    good, bad = outcomes(files, path, lambda: read_all(tmp_path))
    assert good > 0 and bad > 100


def test_safetensors_cut_anywhere_is_refused(small_safetensors: bytes, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    path = tmp_path / "model.safetensors"
    cuts = range(0, len(small_safetensors), 11)
    good, bad = outcomes(
        (small_safetensors[:cut] for cut in cuts), path, lambda: read_all(tmp_path)
    )
    assert (good, bad) == (0, len(cuts))


def test_config_mutations(small_safetensors: bytes, tmp_path: Path) -> None:
    seed = 99
    print(f"seed {seed}")
    raw = json.dumps(CONFIG).encode()
    (tmp_path / "model.safetensors").write_bytes(small_safetensors)
    path = tmp_path / "config.json"
    files = mutations(raw, len(raw), scaled(600), random.Random(seed))
    good, bad = outcomes(files, path, lambda: read_all(tmp_path))
    assert good > 0 and bad > 300


ODD_VALUES: tuple[Any, ...] = (
    *(None, True, -1, 0, 1, 3, 2**31, 2**63, 10**400),
    *(0.5, -1.5, 1e300, float("nan"), float("inf")),
    *("", "x", "\x1b[2J\n", "\ud800", "x" * 5000),
    *([], [[]], [None, -1, "x"], {}, {"x": {}}),
)


def damaged(value: dict[str, Any], count: int, rng: random.Random) -> Iterator[bytes]:
    """Copies of a JSON object with parts of it replaced, removed, doubled or renamed."""
    for _ in range(count):
        root = [copy.deepcopy(value)]
        for _ in range(rng.choice((1, 1, 2, 3))):
            holder, key = rng.choice(list(places(root)))
            kind = rng.random()
            if kind < 0.7 or holder is root:
                holder[key] = copy.deepcopy(rng.choice(ODD_VALUES))
            elif kind < 0.85:
                del holder[key]
            elif isinstance(holder, list):
                holder.insert(key, copy.deepcopy(holder[key]))
            else:
                holder[rng.choice(("x", "", key.upper()))] = holder.pop(key)
        yield json.dumps(root[0]).encode()


def places(holder: Any) -> Iterator[tuple[Any, Any]]:
    """Every value in a JSON value, as its container and the key or index there."""
    for key in list(holder) if isinstance(holder, dict) else range(len(holder)):
        yield holder, key
        if isinstance(holder[key], dict | list):
            yield from places(holder[key])


@pytest.fixture
def rng() -> random.Random:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    return random.Random(seed)


MIXTURE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_key_value_heads": 1,
    "head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "mlp_only_layers": [0],
    "norm_topk_prob": True,
}
WINDOWS = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "num_key_value_heads": 1,
    "head_dim": 16,
    "layer_types": ["sliding_attention"],
    "sliding_window": 16,
    "query_pre_attn_scalar": 16,
    "rope_local_base_freq": 1e4,
}
SCALED = {
    "rope_theta": 1e4,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "eos_token_id": [1],
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": True,
}
FOREIGN = {
    "architectures": ["Cohere2ForCausalLM"],
    "model_type": "cohere2",
    "sliding_window": 16,
    "layer_types": ["sliding_attention"],
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}


@pytest.mark.parametrize(
    ("own", "count"), [(SCALED, 300), (MIXTURE, 200), (WINDOWS, 200), (FOREIGN, 60)]
)
def test_damaged_config(
    own: dict[str, Any], count: int, rng: random.Random, tmp_path: Path
) -> None:
    path = tmp_path / "config.json"
    # The first one imports transformers, whose memory does not count as the file's.
    for whole in (FOREIGN, own):
        path.write_text(json.dumps({**CONFIG, **whole}))
        load_model_config(tmp_path)
    files = damaged({**CONFIG, **own}, scaled(count), rng)
    good, bad = outcomes(files, path, lambda: load_model_config(tmp_path))
    assert good > 0 and bad > 0


def test_damaged_safetensors_header(
    small_safetensors: bytes, rng: random.Random, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    length = int.from_bytes(small_safetensors[:8], "little")
    header, data = small_safetensors[8 : 8 + length], small_safetensors[8 + length :]
    headers = damaged(json.loads(header), scaled(300), rng)
    files = (struct.pack("<Q", len(head)) + head + data for head in headers)
    good, bad = outcomes(files, tmp_path / "model.safetensors", lambda: read_all(tmp_path))
    assert good + bad > 0 and bad > 0


def test_damaged_safetensors_index(
    small_safetensors: bytes, rng: random.Random, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "a.safetensors").write_bytes(small_safetensors)
    length = int.from_bytes(small_safetensors[:8], "little")
    names = json.loads(small_safetensors[8 : 8 + length]).keys() - {"__metadata__"}
    index = {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(names, "a.safetensors")}
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(json.dumps(index))
    read_all(tmp_path)
    files = damaged(index, scaled(200), rng)
    good, bad = outcomes(files, path, lambda: read_all(tmp_path))
    assert good > 0 and bad > 0


def test_damaged_generation_config(rng: random.Random, tmp_path: Path) -> None:
    settings = {
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 20,
        "min_p": 0.0,
        "repetition_penalty": 1.1,
        "eos_token_id": [1, 2],
        "bos_token_id": 0,
        "do_sample": True,
    }
    model = LocalModel("m", tmp_path, "folder", str(tmp_path))

    def read() -> None:
        SamplingParams(**sampling_defaults(model, load_generation_config(tmp_path)))

    files = damaged(settings, scaled(500), rng)
    good, bad = outcomes(files, tmp_path / "generation_config.json", read)
    assert good > 0 and bad > 0


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_damaged_tokenizer(name: str, rng: random.Random, tmp_path: Path) -> None:
    backend = tmp_path / "tokenizer.json"
    make_backend().save(str(backend))
    settings = {
        "bos_token": "<s>",
        "eos_token": {"content": "</s>", "special": True},
        "add_bos_token": True,
        "chat_template": [{"name": "default", "template": "{{ messages[0].content }}"}],
        "extra_special_tokens": {"image_token": "<s>"},
        "response_template": {"x": [{"y": 1}]},
    }
    whole = json.loads(backend.read_text()) if name == backend.name else settings

    def read() -> None:
        tokenizer = load_tokenizer(tmp_path)
        tokenizer.decode(tokenizer.encode("hi <s> there"))
        with suppress(RequestError):
            tokenizer.apply_chat_template([{"role": "user", "content": "hi <|im_end|>"}])
        tokenizer.close()

    files = damaged(whole, scaled(150), rng)
    good, bad = outcomes(files, tmp_path / name, read)
    assert good > 0 and bad > 0
