"""GGUF checkpoints against their source weights, and against transformers' reading."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf_samples import finish, gguf_name, write_model
from safetensors.torch import load_file

from termgen.engine.device.layers.weight_slot import WeightSlot
from termgen.engine.device.loader import (
    gguf_checkpoint,
    load_generation_config,
    load_model_config,
    open_checkpoint,
)
from termgen.engine.device.loader.gguf_config import llama3_factors
from termgen.engine.device.loader.weights import PartedSource, load_weights
from termgen.errors import CorruptFileError, TermgenError, UnsupportedModelError

ARCHS = [("llama", "llama"), ("mistral", "llama"), ("qwen2", "qwen2"), ("qwen3", "qwen3")]
Q = gguf.GGMLQuantizationType
TinyModelDir = Callable[..., Path]


@pytest.fixture(scope="module")
def llama_folder(tiny_model_dir: TinyModelDir) -> Path:
    return tiny_model_dir("llama")


def _add_window(writer: gguf.GGUFWriter) -> None:
    writer.add_sliding_window(24)


@pytest.mark.parametrize(("family", "arch"), ARCHS)
@pytest.mark.parametrize("tied", [False, True])
def test_equals_the_model_it_was_made_from(
    family: str, arch: str, tied: bool, tiny_model_dir: TinyModelDir, tmp_path: Path
) -> None:
    folder = tiny_model_dir(family, tie_word_embeddings=tied)
    extra = _add_window if family == "mistral" else None
    path = write_model(folder, tmp_path / "m.gguf", arch=arch, extra=extra)
    checkpoint = open_checkpoint(path)
    expected = load_file(folder / "model.safetensors")
    assert sorted(checkpoint.names()) == sorted(expected)
    assert ("lm_head.weight" in expected) is not tied
    for name in checkpoint.names():
        assert torch.equal(checkpoint.tensor(name), expected[name]), name
    original = load_model_config(folder)
    # The file holds single precision where JSON holds double.
    epsilon = checkpoint.config.rms_norm_eps
    assert epsilon == pytest.approx(original.rms_norm_eps, rel=1e-6)
    assert dataclasses.replace(checkpoint.config, rms_norm_eps=original.rms_norm_eps) == original
    assert checkpoint.nbytes == sum(tensor.nbytes for tensor in expected.values())
    assert load_model_config(path) == checkpoint.config
    checkpoint.close()


@pytest.mark.parametrize("quant", [Q.Q8_0, Q.Q4_1, Q.Q5_0, Q.F16, Q.BF16])
def test_quantised_rows_go_back_in_order(
    quant: gguf.GGMLQuantizationType, tiny_model_dir: TinyModelDir, tmp_path: Path
) -> None:
    folder = tiny_model_dir("llama", intermediate_size=128)
    checkpoint = open_checkpoint(
        write_model(folder, tmp_path / "m.gguf", arch="llama", quant=quant)
    )
    for name, weights in load_file(folder / "model.safetensors").items():
        if weights.dim() == 2:
            # Rows are quantised one by one, so permuting before or after makes no difference.
            rounded = gguf.quants.dequantize(gguf.quants.quantize(weights.numpy(), quant), quant)
            result = checkpoint.tensor(name)
            assert result.dtype == torch.float32
            np.testing.assert_array_equal(result.numpy(), rounded, err_msg=name)
    expected = {Q.F16: "float16", Q.BF16: "bfloat16"}.get(quant, "bfloat16")
    assert checkpoint.config.torch_dtype == expected


@pytest.mark.parametrize("quant", [Q.Q8_0, Q.Q4_1, Q.F16, Q.F32])
def test_parts_are_the_rows_of_the_whole(
    quant: gguf.GGMLQuantizationType,
    tiny_model_dir: TinyModelDir,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = tiny_model_dir("llama", intermediate_size=128)
    checkpoint = open_checkpoint(
        write_model(folder, tmp_path / "m.gguf", arch="llama", quant=quant)
    )
    assert isinstance(checkpoint, PartedSource)
    monkeypatch.setattr(gguf_checkpoint, "CHUNK_ELEMENTS", 5 * 128)
    counts = {}
    for name in checkpoint.names():
        parts = list(checkpoint.parts(name))
        assert torch.equal(torch.cat(parts), checkpoint.tensor(name)), name
        assert checkpoint.shape(name) == tuple(checkpoint.tensor(name).shape), name
        counts[name] = len(parts)
    assert counts["model.layers.0.mlp.down_proj.weight"] == -(-checkpoint.config.hidden_size // 5)
    assert counts["model.layers.0.self_attn.q_proj.weight"] == 1, "its rows change places"


def test_a_large_matrix_never_exists_as_a_whole(
    tiny_model_dir: TinyModelDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_model_dir("llama")
    checkpoint = open_checkpoint(write_model(folder, tmp_path / "m.gguf", arch="llama"))
    monkeypatch.setattr(gguf_checkpoint, "CHUNK_ELEMENTS", 64)
    expected = {name: checkpoint.tensor(name) for name in checkpoint.names()}
    filled = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    sizes: list[int] = []

    class Model:
        def weight_slots(self) -> Iterator[WeightSlot]:
            for name, place in filled.items():
                yield WeightSlot(name, tuple(place.shape), "matrix", place.copy_, rows_into(place))

        def ignored_weights(self) -> tuple[str, ...]:
            return ()

        def repeated_weights(self) -> dict[str, str]:
            return {}

    def rows_into(place: torch.Tensor) -> Callable[[torch.Tensor, int], None]:
        def load(rows: torch.Tensor, first: int) -> None:
            place[first : first + len(rows)] = rows
            sizes.append(len(rows))

        return load

    load_weights(Model(), checkpoint)
    assert all(torch.equal(filled[name], tensor) for name, tensor in expected.items())
    assert sizes.count(1) >= len(expected["model.embed_tokens.weight"]), "row by row"


def test_smollm2_equals_transformers_reading(smollm2_gguf: Path, smollm2_reference: Any) -> None:
    checkpoint = open_checkpoint(smollm2_gguf)
    expected = smollm2_reference.state_dict()
    assert set(checkpoint.names()) == set(expected) - {"lm_head.weight"}
    for name in checkpoint.names():
        assert torch.equal(checkpoint.tensor(name), expected[name]), name
    config, reference = checkpoint.config, smollm2_reference.config
    assert config.tie_word_embeddings is reference.tie_word_embeddings is True
    assert config.rope.theta == reference.rope_parameters["rope_theta"] == 100000.0
    assert config.rms_norm_eps == reference.rms_norm_eps
    assert (config.hidden_size, config.num_layers, config.num_heads, config.num_kv_heads) == (
        reference.hidden_size,
        reference.num_hidden_layers,
        reference.num_attention_heads,
        reference.num_key_value_heads,
    )
    assert config.vocab_size == reference.vocab_size
    assert (config.bos_token_id, config.eos_token_ids) == (1, (2,))


def _config_with(folder: Path, path: Path, extra: Callable[[gguf.GGUFWriter], None]) -> Any:
    return load_model_config(write_model(folder, path, arch="llama", extra=extra))


def test_linear_scaling(llama_folder: Path, tmp_path: Path) -> None:
    def extra(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(4.0)

    rope = _config_with(llama_folder, tmp_path / "a.gguf", extra).rope
    assert (rope.type, rope.factor) == ("linear", 4.0)

    old = _config_with(
        llama_folder,
        tmp_path / "b.gguf",
        lambda writer: writer.add_float32("llama.rope.scale_linear", 2.0),
    ).rope
    assert (old.type, old.factor) == ("linear", 2.0)


def test_yarn_scaling(llama_folder: Path, tmp_path: Path) -> None:
    def extra(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(128)

    rope = _config_with(llama_folder, tmp_path / "a.gguf", extra).rope
    assert (rope.type, rope.factor, rope.original_max_position_embeddings) == ("yarn", 4.0, 128)
    assert (rope.beta_fast, rope.beta_slow) == (32.0, 1.0)
    assert rope.attention_factor == pytest.approx(0.1 * np.log(4.0) + 1.0)

    def tuned(writer: gguf.GGUFWriter) -> None:
        extra(writer)
        writer.add_rope_scaling_attn_factors(2.0)
        writer.add_float32("llama.rope.scaling.yarn_beta_fast", 16.0)

    rope = _config_with(llama_folder, tmp_path / "b.gguf", tuned).rope
    assert rope.beta_fast == 16.0
    assert rope.attention_factor == pytest.approx(2.0 * (0.1 * np.log(4.0) + 1.0))


def _llama3_tensor(head_dim: int, theta: float, factor: float) -> np.ndarray:
    """Base frequencies over transformers' scaled ones: what the converter stores."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = LlamaConfig(
        hidden_size=head_dim,
        num_attention_heads=1,
        max_position_embeddings=131072,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": theta,
            "factor": factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    )
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    base = 1.0 / theta ** (torch.arange(0, head_dim, 2).float() / head_dim)
    return (base / scaled).float().numpy()


@pytest.mark.parametrize(("factor", "head_dim"), [(8.0, 128), (32.0, 64)])
def test_llama3_factors_are_what_transformers_uses(factor: float, head_dim: int) -> None:
    expected = _llama3_tensor(head_dim, 500000.0, factor)
    np.testing.assert_allclose(llama3_factors(head_dim, 500000.0, factor), expected, rtol=1e-5)


def test_llama3_scaling_is_recovered_from_its_tensor(
    tiny_model_dir: TinyModelDir, tmp_path: Path
) -> None:
    folder = tiny_model_dir(
        "llama", rope_parameters={"rope_type": "default", "rope_theta": 500000.0}
    )
    tensor = _llama3_tensor(16, 500000.0, 8.0)
    path = tmp_path / "m.gguf"
    write_model(
        folder, path, arch="llama", extra=lambda w: w.add_tensor("rope_freqs.weight", tensor)
    )
    checkpoint = open_checkpoint(path)
    rope = checkpoint.config.rope
    assert (rope.type, rope.factor) == ("llama3", 8.0)
    assert (rope.low_freq_factor, rope.high_freq_factor) == (1.0, 4.0)
    assert rope.original_max_position_embeddings == 8192
    assert not [name for name in checkpoint.names() if "rope" in name]


def test_rope_factors_of_one_change_nothing(llama_folder: Path, tmp_path: Path) -> None:
    ones = np.ones(8, dtype=np.float32)
    config = _config_with(
        llama_folder, tmp_path / "m.gguf", lambda w: w.add_tensor("rope_freqs.weight", ones)
    )
    assert config.rope.type == "default"


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (lambda w: w.add_tensor("rope_freqs.weight", np.full(8, 3, "float32")), "not Llama 3's"),
        (lambda w: w.add_tensor("rope_freqs.weight", np.full(8, np.nan, "float32")), "Llama 3"),
        (lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE), "'longrope'"),
        (lambda w: w.add_rope_dimension_count(8), "rope.dimension_count 8 differs"),
        (lambda w: w.add_expert_count(8), "llama models with experts"),
        (lambda w: w.add_logit_scale(0.0625), "llama.logit_scale 0.0625"),
        (lambda w: w.add_embedding_scale(12.0), "llama.embedding_scale 12.0"),
        (lambda w: w.add_residual_scale(0.22), "llama.residual_scale"),
        (lambda w: w.add_attention_scale(0.0078125), "attention.scale 0.0078125.*, only 0.25"),
        (lambda w: w.add_final_logit_softcapping(30.0), "llama.final_logit_softcapping 30.0"),
        (lambda w: w.add_attn_logit_softcapping(50.0), "llama.attn_logit_softcapping 50.0"),
        (lambda w: w.add_causal_attention(False), "llama.attention.causal False"),
        (lambda w: w.add_clamp_kqv(8.0), "llama.attention.clamp_kqv 8.0"),
        (lambda w: w.add_max_alibi_bias(8.0), "llama.attention.max_alibi_bias 8.0"),
        (lambda w: w.add_parallel_residual(True), "llama.use_parallel_residual True"),
        (lambda w: w.add_key_length_swa(8), "attention.key_length_swa 8 differs"),
        (lambda w: w.add_uint16("split.count", 3), "one of 3 parts"),
        (lambda w: w.add_tensor("blk.0.odd.weight", np.ones(4, "float32")), "'blk.0.odd.weight'"),
        (lambda w: w.add_tensor("blk.2.attn_v.weight", np.ones(4, "float32")), "blk.2.attn_v"),
    ],
)
def test_what_cannot_be_expressed_is_refused(
    extra: Callable[[gguf.GGUFWriter], None], message: str, llama_folder: Path, tmp_path: Path
) -> None:
    path = write_model(llama_folder, tmp_path / "m.gguf", arch="llama", extra=extra)
    with pytest.raises(UnsupportedModelError, match=message) as raised:
        open_checkpoint(path)
    assert "\n" not in str(raised.value) and str(path) in str(raised.value)


def test_keys_that_change_nothing_are_taken(llama_folder: Path, tmp_path: Path) -> None:
    def extra(writer: gguf.GGUFWriter) -> None:
        writer.add_logit_scale(1.0)
        writer.add_attention_scale(0.25)
        writer.add_causal_attention(True)
        writer.add_clamp_kqv(0.0)
        writer.add_parallel_residual(False)

    config = _config_with(llama_folder, tmp_path / "m.gguf", extra)
    assert config.attention_scale == 0.25


def test_unknown_architecture_is_named(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "mamba")
    writer.add_tensor("token_embd.weight", np.ones((4, 4), "float32"))
    finish(writer)
    with pytest.raises(
        UnsupportedModelError, match=r"'mamba'.*llama, qwen2, qwen3, gemma2, .*, qwen3next, gpt-oss"
    ):
        open_checkpoint(tmp_path / "m.gguf")


def test_unsupported_tensor_type_is_found_at_open(llama_folder: Path, tmp_path: Path) -> None:
    raw = np.zeros((2, 66), dtype=np.uint8)
    path = write_model(
        llama_folder,
        tmp_path / "m.gguf",
        arch="llama",
        leave_out=frozenset({"blk.1.ffn_up.weight"}),
        extra=lambda w: w.add_tensor("blk.1.ffn_up.weight", raw, raw_dtype=Q.TQ2_0),
    )
    with pytest.raises(UnsupportedModelError, match=r"blk\.1\.ffn_up\.weight.*TQ2_0"):
        open_checkpoint(path)


def test_a_damaged_block_scale_is_found(tiny_model_dir: TinyModelDir, tmp_path: Path) -> None:
    folder = tiny_model_dir("llama", intermediate_size=128)
    path = write_model(folder, tmp_path / "m.gguf", arch="llama", quant=Q.Q8_0)
    reader = gguf.GGUFReader(path, "r+")
    [damaged] = [t for t in reader.tensors if t.name == "blk.1.ffn_down.weight"]
    damaged.data[3, :2] = 0xFF  # the first block's 16-bit scale: NaN
    reader.data.flush()
    checkpoint = open_checkpoint(path)
    for name in checkpoint.names():
        if name == "model.layers.1.mlp.down_proj.weight":
            with pytest.raises(CorruptFileError, match=r"'blk\.1\.ffn_down\.weight' has values"):
                checkpoint.tensor(name)
        else:
            checkpoint.tensor(name)


def test_missing_and_wrong_metadata_name_the_key(llama_folder: Path, tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_embedding_length(64)
    writer.add_head_count(4)
    writer.add_tensor("token_embd.weight", np.ones((8, 64), "float32"))
    finish(writer)
    with pytest.raises(CorruptFileError, match="llama.feed_forward_length is missing"):
        load_model_config(tmp_path / "m.gguf")
    path = write_model(
        llama_folder,
        tmp_path / "n.gguf",
        arch="llama",
        extra=lambda w: w.add_string("llama.attention.key_length", "sixteen"),
    )
    with pytest.raises(CorruptFileError, match="key_length is sixteen"):
        load_model_config(path)


def test_embedding_must_fit_the_metadata(tmp_path: Path, llama_folder: Path) -> None:
    left_out = frozenset({"token_embd.weight"})
    path = write_model(llama_folder, tmp_path / "m.gguf", arch="llama", leave_out=left_out)
    with pytest.raises(CorruptFileError, match="token_embd.weight is missing"):
        open_checkpoint(path)
    path = write_model(
        llama_folder,
        tmp_path / "n.gguf",
        arch="llama",
        leave_out=left_out,
        extra=lambda w: w.add_tensor("token_embd.weight", np.ones((512, 32), "float32")),
    )
    with pytest.raises(CorruptFileError, match=r"\[512, 32\], but embedding_length is 64"):
        open_checkpoint(path)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("block_count", 1000, r"model\.layers\.999\..* is missing"),
        ("feed_forward_length", 2**30, r"mlp\.up_proj.* asks for \[1073741824, 64\]"),
        ("attention.head_count", 2**20, r"blk\.0\.attn_q\.weight \[64, 64\]: not the sizes"),
        ("attention.key_length", 2**20, r"blk\.0\.attn_\w\.weight .*: not the sizes"),
    ],
)
def test_sizes_must_be_those_of_the_tensors(
    key: str, value: int, message: str, tmp_path: Path, llama_folder: Path
) -> None:
    def extra(writer: gguf.GGUFWriter) -> None:
        for prefix in ("", "attention."):
            writer.kv_data[0].pop(f"llama.{prefix}{key}", None)
        writer.add_uint32(f"llama.{key}", value)
        if key == "attention.head_count":
            writer.add_key_length(16)

    path = write_model(llama_folder, tmp_path / "m.gguf", arch="llama", extra=extra)
    with pytest.raises(CorruptFileError, match=message):
        open_checkpoint(path)


def test_k_rows_that_are_no_heads(tmp_path: Path, llama_folder: Path) -> None:
    path = write_model(
        llama_folder,
        tmp_path / "m.gguf",
        arch="llama",
        extra=lambda w: w.add_tensor("blk.0.attn_k.bias", np.ones(30, "float32")),
    )
    with pytest.raises(CorruptFileError, match=r"blk\.0\.attn_k\.bias \[30\]: not the sizes"):
        open_checkpoint(path)


def test_generation_config_from_metadata(llama_folder: Path, tmp_path: Path) -> None:
    def extra(writer: gguf.GGUFWriter) -> None:
        writer.add_eot_token_id(7)
        writer.add_float32("general.sampling.temp", 0.5)
        writer.add_int32("general.sampling.top_k", 20)

    path = write_model(llama_folder, tmp_path / "m.gguf", arch="llama", extra=extra)
    assert load_generation_config(path) == {
        "eos_token_id": [1, 7],
        "bos_token_id": 0,
        "temperature": 0.5,
        "top_k": 20,
    }


def test_truncated_at_any_tensor_is_one_line(llama_folder: Path, tmp_path: Path) -> None:
    path = write_model(llama_folder, tmp_path / "m.gguf", arch="llama")
    whole = path.read_bytes()
    reader = gguf.GGUFReader(path)
    cuts = [int(t.data_offset) + int(t.n_bytes) - 1 for t in reader.tensors]
    assert gguf_name("model.norm.weight") in {t.name for t in reader.tensors}
    for cut in cuts:
        path = tmp_path / "cut.gguf"
        path.write_bytes(whole[:cut])
        with pytest.raises(TermgenError, match="truncated") as raised:
            open_checkpoint(path)
        assert "\n" not in str(raised.value)
