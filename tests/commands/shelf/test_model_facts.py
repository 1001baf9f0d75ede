"""Facts about models, from the metadata of their files alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
from gguf_samples import write_model
from safetensors.torch import load_file
from tiny_heads import add_mtp, quiet_target

from termgen.commands.shelf import model_facts as facts_module
from termgen.commands.shelf.model_facts import OF_TRANSFORMERS, ModelFacts, model_facts

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
MIXTRAL = {
    **LLAMA,
    "architectures": ["MixtralForCausalLM"],
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "tie_word_embeddings": True,
}
MISTRAL = {**LLAMA, "architectures": ["MistralForCausalLM"], "sliding_window": 128}
QKVO = 64 * (2 * 64 + 2 * 32)
"""The numbers of one layer's attention."""


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERMGEN_CACHE", str(tmp_path / "cache"))


def put(folder: Path, config: object) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_a_folder(tmp_path: Path) -> None:
    facts = model_facts(put(tmp_path / "m", LLAMA))
    layers, table = 2 * (QKVO + 3 * 64 * 128), 64 * 1000
    assert facts.num_parameters == layers + 2 * table
    assert facts.active_share == pytest.approx((layers + table) / (layers + 2 * table))
    assert facts.context == 512 and facts.quantization == "bfloat16" and not facts.problem
    assert facts.kv_bytes(100, lambda size: size + 2) == 2 * 2 * 2 * 18 * 100
    assert facts.is_base
    (tmp_path / "m" / "chat_template.jinja").write_text("x")
    put(tmp_path / "m", {**LLAMA, "vocab_size": 1001})
    assert not model_facts(tmp_path / "m").is_base


def test_experts_and_windows(tmp_path: Path) -> None:
    facts = model_facts(put(tmp_path / "experts", MIXTRAL))
    expert, table, router = 3 * 64 * 128, 64 * 1000, 64 * 8
    total = table + 2 * (QKVO + 8 * expert + router)
    assert facts.num_parameters == total
    active = total - 2 * 6 * expert
    assert facts.active_share == pytest.approx(active / total)
    assert facts.experts_share == pytest.approx(2 * 8 * expert / total)
    windows = model_facts(put(tmp_path / "windows", MISTRAL))
    assert windows.kv_bytes(500, int) == windows.kv_bytes(128, int) < windows.kv_bytes(128, int) * 2


@pytest.mark.parametrize("family", ["qwen3_5_text", "qwen3_5_moe_text"])
def test_an_mtp_layer_is_counted(
    tiny_model_dir: Callable[..., Path], tmp_path: Path, family: str
) -> None:
    kinds = ["full_attention"] * 2
    made = tiny_model_dir(family, num_hidden_layers=2, layer_types=kinds)
    without = model_facts(made)
    folder = quiet_target(made, tmp_path / "with")
    add_mtp(folder)
    found = model_facts(folder)
    assert found.kv_layers == (*without.kv_layers, without.kv_layers[-1])
    weights = load_file(folder / "model.safetensors")
    of_layer = sum(w.numel() for name, w in weights.items() if name.startswith("mtp."))
    assert found.num_parameters - without.num_parameters == pytest.approx(of_layer, rel=0.01)
    read = [facts.active_share * facts.num_parameters for facts in (without, found)]
    assert read[0] < read[1] <= read[0] + of_layer


def test_what_a_gguf_file_holds(tiny_llama_dir: Path, tmp_path: Path) -> None:
    kind = gguf.GGMLQuantizationType
    path = write_model(
        *(tiny_llama_dir, tmp_path / "m.gguf"),
        arch="llama",
        quants={"embed": kind.Q8_0, "lm_head": kind.Q8_0, "up_proj": kind.Q4_0},
    )
    blob = path.rename(tmp_path / ("sha256-" + "a" * 64))
    facts = model_facts(blob)
    assert not facts.problem and facts.is_in_blocks and facts.is_base
    assert facts.quantization in ("Q8_0", "Q4_0") and 0.1 < facts.four_bit_share < 0.9
    assert facts.num_parameters > 0 and facts.context > 0


def test_a_real_file_of_mixed_blocks(gemma_gguf: Path) -> None:
    facts = model_facts(gemma_gguf)
    assert facts.four_bit_share == pytest.approx(0.088, abs=5e-4)
    assert facts.six_bit_share == pytest.approx(0.044, abs=5e-4)


def test_why_a_file_cannot_run(tiny_llama_dir: Path, tmp_path: Path) -> None:
    def unlike(writer: gguf.GGUFWriter) -> None:
        writer.add_float32("llama.attention.clamp_kqv", 8.0)

    path = write_model(tiny_llama_dir, tmp_path / "a.gguf", arch="llama", extra=unlike)
    assert model_facts(path).problem == "llama.attention.clamp_kqv 8.0 is not supported"
    other = gguf.GGUFWriter(tmp_path / "b.gguf", "bert")
    other.write_header_to_file()
    other.write_kv_data_to_file()
    other.write_tensors_to_file()
    other.close()
    assert model_facts(tmp_path / "b.gguf").problem.startswith("the architecture 'bert' is not")
    (tmp_path / "c.gguf").write_bytes(b"GGUF" + bytes(20))
    assert "version 0" in model_facts(tmp_path / "c.gguf").problem or "big-endian" in (
        model_facts(tmp_path / "c.gguf").problem
    )
    (tmp_path / "d.gguf").write_bytes(b"GGUF")
    assert model_facts(tmp_path / "d.gguf").problem.startswith("truncated")
    assert model_facts(tmp_path / "none.gguf").problem.startswith("cannot be read")
    assert (
        "num_attention_heads"
        in model_facts(put(tmp_path / "e", {**LLAMA, "num_key_value_heads": 3})).problem
    )


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{", '{"architectures": 3}', "[" * 100_000],
    ids=["empty", "list", "cut", "number", "deep"],
)
def test_a_damaged_config_is_a_problem(tmp_path: Path, content: str) -> None:
    put(tmp_path / "m", {})
    (tmp_path / "m" / "config.json").write_text(content)
    assert model_facts(tmp_path / "m").problem


@pytest.mark.parametrize(
    ("config", "stored", "found"),
    [
        (LLAMA, {"quant_method": "fp8", "weight_block_size": [128, 128]}, True),
        (LLAMA, {"quant_method": "fp8"}, True),
        (LLAMA, {"quant_method": "fp8", "weight_block_size": [128, 96]}, False),
        (LLAMA, {"quant_method": "fbgemm_fp8"}, True),
        (LLAMA, {"quant_method": "modelopt", "quant_algo": "FP8"}, True),
        (LLAMA, {"quant_method": "modelopt", "quant_algo": "NVFP4"}, False),
        (LLAMA, {"quant_method": "compressed-tensors", "format": "float-quantized"}, True),
        (LLAMA, {"quant_method": "compressed-tensors", "format": "pack-quantized"}, False),
        (LLAMA, {"quant_method": "awq", "version": "gemm"}, False),
        (MIXTRAL, {"quant_method": "fp8"}, True),
    ],
)
def test_folders_of_8_bit_floats(
    tmp_path: Path, config: dict[str, Any], stored: dict[str, Any], found: bool
) -> None:
    facts = model_facts(put(tmp_path / "m", {**config, "quantization_config": stored}))
    assert facts.are_float8 == found and not facts.problem
    tables = 64 * 1000 * (1 if config["tie_word_embeddings"] else 2)
    assert facts.layers_share == pytest.approx(1 - tables / facts.num_parameters)


def groups(bits: int, size: int | None = 128, **options: Any) -> dict[str, Any]:
    weights = {"num_bits": bits, "group_size": size, **options}
    return {"config_groups": {"group_0": {"weights": weights}}}


COMPRESSED = {"quant_method": "compressed-tensors", "format": "pack-quantized"}


@pytest.mark.parametrize(
    ("stored", "bits", "is_rounded"),
    [
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, 4, False),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": True}, 4, True),
        ({"quant_method": "gptq", "bits": 8, "group_size": -1}, 8, False),
        ({"quant_method": "gptq", "bits": 4, "group_size": 16}, None, False),
        ({"quant_method": "gptq", "bits": 4, "group_size": "32"}, None, False),
        ({"quant_method": "gptq", "bits": True, "group_size": 32}, None, False),
        ({"quant_method": "awq", "bits": 4, "group_size": 64}, 4, False),
        ({"quant_method": "awq", "version": "gemm"}, 4, False),
        ({"quant_method": "awq", "w_bit": 4, "q_group_size": 128}, 4, False),
        ({**COMPRESSED, **groups(4)}, 4, False),
        ({**COMPRESSED, **groups(4, actorder="group")}, 4, True),
        ({**COMPRESSED, **groups(4, actorder="dynamic")}, 4, True),
        ({**COMPRESSED, **groups(4, actorder="static")}, 4, False),
        ({**COMPRESSED, **groups(4, type="float")}, None, False),
        ({**COMPRESSED, "format": "mixed-precision", **groups(8)}, 8, False),
        ({**COMPRESSED, **groups(8, None)}, 8, False),
        ({**COMPRESSED, **groups(4, 24)}, None, False),
        ({**COMPRESSED, "config_groups": [1]}, None, False),
        ({**COMPRESSED, "format": "int-quantized", **groups(8, None)}, 8, False),
        ({**COMPRESSED, "format": "nvfp4-pack-quantized"}, 4, True),
        ({**COMPRESSED, "format": "mxfp4-pack-quantized"}, 4, False),
        ({**COMPRESSED, "format": "float-quantized"}, None, False),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, 4, True),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, None, False),
    ],
)
@pytest.mark.parametrize("config", [LLAMA, MIXTRAL], ids=["dense", "mixture"])
def test_folders_of_groups(
    tmp_path: Path,
    config: dict[str, Any],
    stored: dict[str, Any],
    bits: int | None,
    is_rounded: bool,
) -> None:
    facts = model_facts(put(tmp_path / "m", {**config, "quantization_config": stored}))
    assert not facts.problem
    assert facts.is_in_blocks == (bits is not None)
    assert facts.four_bit_share == (facts.layers_share if bits == 4 else 0)
    assert facts.is_rounded_on_cpu == is_rounded


def test_other_architectures_are_left_to_transformers(tmp_path: Path) -> None:
    facts = model_facts(put(tmp_path / "m", {"architectures": ["GPT2LMHeadModel"]}))
    assert facts == ModelFacts(note=OF_TRANSFORMERS, quantization="16 bit", is_base=True)


def test_facts_are_kept_until_the_file_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = put(tmp_path / "m", LLAMA)
    first, reads = model_facts(folder), 0
    read = facts_module._read

    def counted(path: Path, source: Path) -> ModelFacts:
        nonlocal reads
        reads += 1
        return read(path, source)

    monkeypatch.setattr(facts_module, "_read", counted)
    assert model_facts(folder) == first and reads == 0
    put(folder, {**LLAMA, "num_hidden_layers": 12})
    assert model_facts(folder).num_parameters > first.num_parameters and reads == 1
    for entry in (tmp_path / "cache" / "model-facts").iterdir():
        entry.write_bytes(b"damaged")
    assert model_facts(folder).num_parameters > 0 and reads == 2
