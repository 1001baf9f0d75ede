"""Mutated model files: whatever a file holds, opening and reading it raises TermgenError or works.

Memory is bounded too: a small file must not make the reader ask for much. Seeds are printed.
"""

from __future__ import annotations

import json
import random
import struct
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf_samples import finish
from lengths import scaled
from safetensors.torch import save_file

from termgen.engine.gguf_file import GGUFFile
from termgen.engine.loader import load_generation_config, open_checkpoint
from termgen.errors import TermgenError

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


def write_small(path: Path, arch: str) -> bytes:
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(32)
    writer.add_head_count(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
    writer.add_rope_scaling_factor(2.0)
    if arch == "gemma3":
        writer.add_sliding_window(8)
        writer.add_sliding_window_pattern([True])
        writer.add_rope_freq_base_swa(1e4)
    writer.add_token_list(["<s>", "</s>", "a", "b", "c", "d", "e", "f"])
    writer.add_token_types([3, 3, 1, 1, 1, 1, 1, 1])
    writer.add_array("x.nested", [[1, 2], [3]])
    writer.add_bool("x.flag", True)
    writer.add_eos_token_id(1)
    rng = np.random.default_rng(0)
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
    load_generation_config(path)
    read_all(path)


def read_all(path: Path) -> None:
    checkpoint = open_checkpoint(path)
    try:
        for name in checkpoint.names():
            checkpoint.tensor(name).sum()
    finally:
        checkpoint.close()


def outcomes(files: Iterator[bytes], path: Path, read: Callable[[], None]) -> tuple[int, int]:
    """(read well, refused). Anything but a one-line TermgenError, or much memory, fails."""
    good = bad = 0
    tracemalloc.start()
    try:
        for number, raw in enumerate(files):
            path.write_bytes(raw)
            tracemalloc.reset_peak()
            try:
                read()
                good += 1
            except TermgenError as error:
                bad += 1
                assert "\n" not in str(error), f"mutation {number}: {error}"
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


@pytest.mark.parametrize("fixture", ["small_gguf", "small_gemma3_gguf"])
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
    # Both happen: the mutations reach past the first check, and not all of them matter.
    assert good > 10 and bad > 100


def test_gguf_cut_anywhere_is_refused(small_gguf: bytes, tmp_path: Path) -> None:
    header = data_start(small_gguf, tmp_path)
    path = tmp_path / "m.gguf"
    # The writer pads the last tensor: what is cut off must be more than that.
    every = 3 if scaled(1) == 1 else 1
    cuts = [*range(0, header, every), *range(header, len(small_gguf) - 32, 97)]
    good, bad = outcomes((small_gguf[:cut] for cut in cuts), path, lambda: read_all_gguf(path))
    assert (good, bad) == (0, len(cuts))


def test_gguf_every_length_field_absurd(small_gguf: bytes, tmp_path: Path) -> None:
    """At every byte position of the header, 8 bytes become a length no file can have."""
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
