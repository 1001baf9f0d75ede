"""GGUF files of families with experts or delta nets against their source weights, and against
transformers."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf_experts import Arrays, packed_mxfp4, write_experts
from gguf_samples import check_tensors, rounded, text_weights
from paged_model import PagedModel, Row, load
from reference_model import load_reference
from transformers import AutoModelForCausalLM

from termgen.engine.device.loader import gguf_checkpoint, load_model_config, open_checkpoint
from termgen.engine.device.loader.checkpoint import load_generation_config
from termgen.engine.device.quantization.mxfp4 import dequantize
from termgen.errors import CorruptFileError, ModelError, UnsupportedModelError

Q = gguf.GGMLQuantizationType
MORE_V_HEADS = {"linear_num_value_heads": 6}  # three of a key head: their order shows
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3moe": ("qwen3_moe", {"moe_intermediate_size": 32}),
    "qwen35": ("qwen3_5_text", {**MORE_V_HEADS, "intermediate_size": 96}),
    "qwen35moe": (
        "qwen3_5_moe_text",
        {
            **MORE_V_HEADS,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 64,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3next": (
        "qwen3_next",
        {**MORE_V_HEADS, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64},
    ),
    # No key of a file holds the limit of the clamp.
    "gpt-oss": ("gpt_oss", {"intermediate_size": 96, "swiglu_limit": 7.0}),
}
all_archs = pytest.mark.parametrize("arch", CASES)
Folder = Callable[[str], Path]


@pytest.fixture(scope="module")
def folder_of(tiny_model_dir: Callable[..., Path]) -> Folder:
    return lambda arch: tiny_model_dir(CASES[arch][0], **CASES[arch][1])


@all_archs
@pytest.mark.parametrize("quant", [Q.F32, Q.Q8_0])
def test_equals_the_model_it_was_made_from(
    arch: str,
    quant: gguf.GGMLQuantizationType,
    folder_of: Folder,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = folder_of(arch)
    checkpoint = open_checkpoint(write_experts(folder, tmp_path / "m.gguf", arch, quant=quant))
    expected = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    if checkpoint.config.tie_word_embeddings:
        del expected["lm_head.weight"]
    monkeypatch.setattr(gguf_checkpoint, "CHUNK_ELEMENTS", 5 * 64)
    # Norms had one added and decays were exponents, in single precision.
    check_tensors(checkpoint, expected, quant, loose=("norm.weight", "A_log"))
    if quant is Q.F32:
        assert rounded(checkpoint.config) == rounded(load_model_config(folder))
    checkpoint.close()


@all_archs
def test_logits_equal_transformers(arch: str, folder_of: Folder, tmp_path: Path) -> None:
    reference = load_reference(folder_of(arch))
    rng = random.Random(30)
    tokens = [rng.randrange(512) for _ in range(60)]
    with torch.inference_mode():
        expected = reference(torch.tensor([tokens])).logits[0]
    path = write_experts(folder_of(arch), tmp_path / "m.gguf", arch)
    actual = PagedModel(load(path)).step([Row(0, 0, tokens)])[0]
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


def test_experts_in_mxfp4(folder_of: Folder, tmp_path: Path) -> None:
    """The same numbers in a checkpoint's bytes and in a file's, whose nibbles have other places."""
    generator = torch.Generator().manual_seed(5)
    sizes = {"gate_up": (2 * 96, 64), "down": (64, 96)}
    expected: dict[str, torch.Tensor] = {}
    packed: Arrays = {}
    for layer in range(3):
        for kind, (rows, columns) in sizes.items():
            shape = (6, rows, columns // 32)
            blocks = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
            scales = torch.randint(119, 123, shape, generator=generator, dtype=torch.uint8)
            name = f"model.layers.{layer}.mlp.experts.{kind}_proj"
            expected[name] = dequantize(blocks, scales).transpose(1, 2).float()
            made, prefix = packed_mxfp4(blocks, scales), f"blk.{layer}.ffn"
            if kind == "down":
                packed[f"{prefix}_down_exps.weight"] = made
            else:
                packed[f"{prefix}_gate_exps.weight"] = made[:, ::2]
                packed[f"{prefix}_up_exps.weight"] = made[:, 1::2]

    def extra(writer: gguf.GGUFWriter) -> None:
        for name, rows in packed.items():
            writer.add_tensor(name, np.ascontiguousarray(rows), raw_dtype=Q.MXFP4)

    path = write_experts(
        folder_of("gpt-oss"),
        tmp_path / "m.gguf",
        "gpt-oss",
        change=lambda tensors: [tensors.pop(name) for name in packed] and None,
        extra=extra,
    )
    checkpoint = open_checkpoint(path)
    for name, values in expected.items():
        assert torch.equal(checkpoint.tensor(name), values), name
    tensors = {name: checkpoint.tensor(name).clone() for name in checkpoint.names()}
    checkpoint.close()
    reference = load_reference(folder_of("gpt-oss"))
    reference.load_state_dict(tensors)
    with torch.inference_mode():
        wanted = reference(torch.tensor([[5, 77, 401, 9, 33]])).logits[0]
    actual = PagedModel(load(path)).step([Row(0, 0, [5, 77, 401, 9, 33])])[0]
    torch.testing.assert_close(actual, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("arch", ["qwen35moe", "gpt-oss"])
def test_gate_and_up_in_one_tensor(arch: str, folder_of: Folder, tmp_path: Path) -> None:
    def fuse(tensors: Arrays) -> None:
        for kind in ("weight", "bias"):
            for name in [name for name in tensors if name.endswith(f"ffn_gate_exps.{kind}")]:
                up = tensors.pop(name.replace("gate", "up"))
                both = np.concatenate([tensors.pop(name), up], 1)
                tensors[name.replace("gate", "gate_up")] = both

    apart, fused = (
        open_checkpoint(write_experts(folder_of(arch), tmp_path / f"{i}.gguf", arch, change=change))
        for i, change in enumerate((None, fuse))
    )
    assert sorted(apart.names()) == sorted(fused.names())
    assert len(fused.names()) > 0 and fused.nbytes == apart.nbytes
    for name in apart.names():
        assert torch.equal(apart.tensor(name), fused.tensor(name)), name


def test_an_older_file_with_one_projection_into_a_delta_net(
    folder_of: Folder, tmp_path: Path
) -> None:
    weights = text_weights(folder_of("qwen3next"))

    def change(tensors: Arrays) -> None:
        for layer in range(3):
            del tensors[f"blk.{layer}.attn_qkv.weight"], tensors[f"blk.{layer}.attn_gate.weight"]
            name = f"model.layers.{layer}.linear_attn.in_proj_qkvz.weight"
            tensors[f"blk.{layer}.ssm_in.weight"] = weights[name]

    new, old = (
        open_checkpoint(write_experts(folder_of("qwen3next"), path, "qwen3next", change=how))
        for path, how in ((tmp_path / "new.gguf", None), (tmp_path / "old.gguf", change))
    )
    assert sorted(old.names()) == sorted(new.names())
    name = "model.layers.2.linear_attn.in_proj_qkvz.weight"
    assert torch.equal(old.tensor(name), new.tensor(name))


def test_a_draft_head_is_left_in_the_file(folder_of: Folder, tmp_path: Path) -> None:
    """Its blocks are counted among the model's. A list of layers counts, rather than an interval,
    and the gate of the shared expert may have lost its first axis."""

    def change(tensors: Arrays) -> None:
        for name, values in list(tensors.items()):
            if name.startswith("blk.3."):
                tensors[name.replace("blk.3", "blk.4")] = values
            if "ffn_gate_inp_shexp" in name:
                tensors[name] = values[0]
        tensors["blk.4.nextn.eh_proj.weight"] = np.ones((64, 128), "float32")
        tensors["blk.4.nextn.shared_head_norm.weight"] = np.ones(64, "float32")

    path = write_experts(
        folder_of("qwen35moe"),
        tmp_path / "m.gguf",
        "qwen35moe",
        change=change,
        keys={
            "block_count": 5,
            "nextn_predict_layers": 1,
            "full_attention_interval": 2,
            "attention.recurrent_layers": [True, True, True, False, False],
        },
    )
    plain = open_checkpoint(write_experts(folder_of("qwen35moe"), tmp_path / "p.gguf", "qwen35moe"))
    checkpoint = open_checkpoint(path)
    assert checkpoint.config == plain.config and checkpoint.names() == plain.names()
    assert checkpoint.nbytes == plain.nbytes
    gate = "model.layers.0.mlp.shared_expert_gate.weight"
    assert torch.equal(checkpoint.tensor(gate), plain.tensor(gate))


@pytest.mark.parametrize("arch", ["qwen35", "qwen35moe", "qwen3next"])
def test_an_mtp_layer_is_that_of_the_checkpoint(
    folder_of: Folder, tmp_path: Path, arch: str
) -> None:
    """Its block is the model's last one with attention, and the names around it are llama.cpp's."""
    around = {
        "mtp.fc.weight": ("eh_proj", (64, 128)),
        "mtp.pre_fc_norm_embedding.weight": ("enorm", (64,)),
        "mtp.pre_fc_norm_hidden.weight": ("hnorm", (64,)),
        "mtp.norm.weight": ("shared_head_norm", (64,)),
    }
    drawn = np.random.default_rng(5)
    values = {name: drawn.normal(size=s).astype("float32") for name, (_, s) in around.items()}

    def change(tensors: Arrays) -> None:
        for name, tensor in list(tensors.items()):
            if name.startswith("blk.3."):
                tensors[name.replace("blk.3", "blk.4")] = tensor
        for name, (part, _) in around.items():
            added = values[name] + 1 if "norm" in part else values[name]
            tensors[f"blk.4.nextn.{part}.weight"] = added

    keys = {"block_count": 5, "nextn_predict_layers": 1}
    path = write_experts(folder_of(arch), tmp_path / "m.gguf", arch, change=change, keys=keys)
    layer, model = open_checkpoint(path, mtp=True), open_checkpoint(path)
    of_last = {n.removeprefix("model.layers.3."): n for n in model.names() if ".layers.3." in n}
    assert set(layer.names()) == {*around, *(f"mtp.layers.0.{part}" for part in of_last)}
    for part, name in of_last.items():
        assert torch.equal(layer.tensor(f"mtp.layers.0.{part}"), model.tensor(name))
    for name, expected in values.items():
        assert layer.tensor(name).numpy() == pytest.approx(expected, abs=1e-6)


def test_an_unknown_part_of_an_mtp_layer_is_named(folder_of: Folder, tmp_path: Path) -> None:
    def change(tensors: Arrays) -> None:
        tensors["blk.4.nextn.embed_tokens.weight"] = np.ones((512, 64), "float32")

    keys = {"block_count": 5, "nextn_predict_layers": 1}
    path = write_experts(
        folder_of("qwen35"), tmp_path / "m.gguf", "qwen35", change=change, keys=keys
    )
    assert open_checkpoint(path).names()
    with pytest.raises(UnsupportedModelError, match=r"blk\.4\.nextn\.embed_tokens\.weight"):
        open_checkpoint(path, mtp=True)


def test_the_end_of_a_message_is_not_that_of_an_answer(folder_of: Folder, tmp_path: Path) -> None:
    path = write_experts(
        folder_of("gpt-oss"), tmp_path / "m.gguf", "gpt-oss", extra=lambda w: w.add_eot_token_id(7)
    )
    assert load_generation_config(path)["eos_token_id"] == [1]


def without(*names: str) -> Callable[[Arrays], None]:
    return lambda tensors: [tensors.pop(name) for name in names] and None


def setting(name: str, values: np.ndarray) -> Callable[[Arrays], None]:
    return lambda tensors: tensors.update({name: values})


ONES = np.ones(64, "float32")


@pytest.mark.parametrize(
    ("arch", "options", "error", "said"),
    [
        (
            "qwen3moe",
            {"keys": {"expert_used_count": 9}},
            CorruptFileError,
            "expert_used_count is 9",
        ),
        ("qwen3moe", {"keys": {"expert_count": None}}, CorruptFileError, "expert_count is missing"),
        (
            "qwen3moe",
            {"keys": {"expert_count": 4}},
            CorruptFileError,
            r"experts\.gate_up_proj is \[8, 64, 64\], but .* \[4, 64, 64\]",
        ),
        ("qwen3moe", {"keys": {"expert_gating_func": 2}}, UnsupportedModelError, "gating_func 2"),
        (
            "qwen3moe",
            {"change": without("blk.1.ffn_up_exps.weight")},
            CorruptFileError,
            r"blk\.1\.ffn_up_exps\.weight is missing, which belongs to blk\.1\.ffn_gate_exps",
        ),
        (
            "qwen3moe",
            {"change": without("blk.1.ffn_gate_inp.weight")},
            CorruptFileError,
            r"lacks tensor model\.layers\.1\.mlp\.gate\.weight",
        ),
        (
            "qwen3moe",
            {"change": setting("blk.0.ffn_gate_up_exps.weight", np.ones((8, 64, 64), "float32"))},
            CorruptFileError,
            r"has .*ffn_\w+_exps.weight and .*ffn_\w+_exps.weight for one tensor",
        ),
        (
            "qwen3moe",
            {"change": setting("blk.0.attn_sinks.weight", ONES)},
            UnsupportedModelError,
            r"'blk\.0\.attn_sinks\.weight' belongs to no supported part",
        ),
        (
            "qwen3moe",
            {"keys": {"nextn_predict_layers": 1}},
            UnsupportedModelError,
            "nextn_predict_layers 1",
        ),
        (
            "qwen35",
            {"keys": {"ssm.group_count": 4}},
            CorruptFileError,
            "time_step_rank is 6, no mul",
        ),
        ("qwen35", {"keys": {"ssm.inner_size": 97}}, CorruptFileError, "inner_size is 97, no mul"),
        ("qwen35", {"keys": {"ssm.conv_kernel": 3}}, UnsupportedModelError, "ssm.conv_kernel 3"),
        (
            "qwen35",
            {"keys": {"ssm.state_size": 8}},
            CorruptFileError,
            r"blk\.0\.\w+\.weight \[160, \d+\]: not the sizes",
        ),
        (
            "qwen35",
            {"keys": {"rope.freq_base": None}},
            CorruptFileError,
            "rope.freq_base is missing",
        ),
        (
            "qwen35",
            {"keys": {"rope.dimension_count": 34}},
            CorruptFileError,
            "dimension_count is 34",
        ),
        (
            "qwen35",
            {"keys": {"rope.dimension_sections": [4, 4, 4, 4]}},
            UnsupportedModelError,
            "dimension_sections",
        ),
        (
            "qwen35",
            {"keys": {"nextn_predict_layers": 4}},
            CorruptFileError,
            "nextn_predict_layers is 4, but qwen35.block_count is 4",
        ),
        (
            "qwen35",
            {"keys": {"full_attention_interval": 5}},
            UnsupportedModelError,
            "full_attention_interval leaves all of 4 layers of one kind",
        ),
        (
            "qwen35",
            {"keys": {"attention.recurrent_layers": [True, False]}},
            CorruptFileError,
            "recurrent_layers is not a list of 4 truth values",
        ),
        (
            "qwen35",
            {"keys": {"attention.sliding_window": 128}},
            UnsupportedModelError,
            "sliding_window 128",
        ),
        (
            "qwen35",
            {"change": setting("blk.1.ssm_a", np.arange(6, dtype="float32") - 5)},
            CorruptFileError,
            r"'blk\.1\.ssm_a' has values that are not below 0",
        ),
        (
            "qwen35",
            {"change": setting("blk.4.attn_norm.weight", ONES)},
            UnsupportedModelError,
            r"'blk\.4\.attn_norm\.weight'",
        ),
        (
            "qwen35moe",
            {"keys": {"expert_shared_count": 2}},
            UnsupportedModelError,
            "expert_shared_count 2",
        ),
        (
            "gpt-oss",
            {"keys": {"rope.freq_base_swa": 5e5}},
            UnsupportedModelError,
            "rope.freq_base_swa 500000.0",
        ),
        (
            "gpt-oss",
            {"keys": {"attention.sliding_window": None}},
            CorruptFileError,
            "sliding_window is missing",
        ),
        (
            "gpt-oss",
            {"change": without("blk.2.attn_sinks.weight")},
            CorruptFileError,
            r"lacks tensor model\.layers\.2\.self_attn\.sinks",
        ),
    ],
)
def test_what_cannot_be_run_is_named(
    arch: str,
    options: dict[str, Any],
    error: type[ModelError],
    said: str,
    folder_of: Folder,
    tmp_path: Path,
) -> None:
    with pytest.raises(error, match=said) as raised:
        load(write_experts(folder_of(arch), tmp_path / "m.gguf", arch, **options))
    assert "\n" not in str(raised.value)


def test_what_a_file_without_keys_means(folder_of: Folder, tmp_path: Path) -> None:
    """What llama.cpp takes it to be."""
    keys = {
        "expert_feed_forward_length": None,
        "expert_shared_feed_forward_length": None,
        "full_attention_interval": None,
        "feed_forward_length": 96,
        "rope.dimension_count": None,
    }
    path = write_experts(folder_of("qwen35moe"), tmp_path / "m.gguf", "qwen35moe", keys=keys)
    config = load_model_config(path)
    assert config.moe is not None and config.linear is not None
    assert config.moe.intermediate_size == 96 // 3
    assert config.moe.shared_intermediate_size == 96
    assert config.linear.layers == (0, 1, 2) and config.rope.partial_rotary_factor == 1.0
    keys = {"rope.scaling.type": None}
    plain = write_experts(folder_of("gpt-oss"), tmp_path / "g.gguf", "gpt-oss", keys=keys)
    assert load_model_config(plain).rope.type == "default"
