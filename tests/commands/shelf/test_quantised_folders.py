"""What folders of quantised weights are said to take, beside what an engine holds of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from quantized_weights import (
    Write,
    awq,
    fp8_blocks,
    gptq,
    modelopt_nvfp4,
    nvfp4,
    packed,
    quantize_folder,
    scaled,
)

from termgen.commands.shelf.model_facts import model_facts
from termgen.commands.shelf.needs import FOUR_BIT_BITS, INT8_BITS, Machine
from termgen.config import EngineConfig
from termgen.engine.device.loader import kept_form
from termgen.engine.loop.engine import SyncEngine

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False}
CT = {"quant_method": "compressed-tensors"}


def integers(**weights: object) -> dict[str, Any]:
    usual = {"num_bits": 4, "type": "int", "group_size": 32, "strategy": "group"}
    return {
        **CT,
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": {**usual, **weights}}},
    }


FOUR, EIGHT = FOUR_BIT_BITS, INT8_BITS
CASES: dict[str, tuple[dict[str, Any], Write, float, float]] = {
    "GPTQ": (GPTQ, gptq(4, 32), FOUR, FOUR),
    "GPTQ, 8 bits": ({**GPTQ, "bits": 8, "group_size": 64}, gptq(8, 64), EIGHT, EIGHT),
    "GPTQ, 2 bits": ({**GPTQ, "bits": 2}, gptq(2, 32), FOUR, FOUR),
    "GPTQ, groups in disorder": (
        {**GPTQ, "desc_act": True},
        gptq(4, 32, in_order=False),
        EIGHT,
        FOUR,
    ),
    "GPTQ, small groups": ({**GPTQ, "group_size": 16}, gptq(4, 16), EIGHT, 16),
    "AWQ": (
        {"quant_method": "awq", "w_bit": 4, "q_group_size": 64, "version": "gemm"},
        awq(64),
        FOUR,
        FOUR,
    ),
    "4 bits": (integers(), packed(4, group=32), FOUR, FOUR),
    "3 bits": (integers(num_bits=3), packed(3, group=32), FOUR, FOUR),
    "4 bits, a group a row": (
        integers(group_size=None, strategy="channel"),
        packed(4),
        FOUR,
        FOUR,
    ),
    "4 bits, groups in disorder": (
        integers(actorder="group"),
        packed(4, group=32, in_order=False),
        EIGHT,
        FOUR,
    ),
    "8 bits packed": (integers(num_bits=8), packed(8, group=32), EIGHT, EIGHT),
    "8 bits": (
        {**integers(num_bits=8, group_size=None, strategy="channel"), "format": "int-quantized"},
        scaled("int", strategy="channel"),
        EIGHT,
        EIGHT,
    ),
    "NVFP4": ({**CT, "format": "nvfp4-pack-quantized"}, nvfp4, EIGHT, FOUR),
    "NVFP4 of ModelOpt": (
        {"quant_method": "modelopt", "quant_algo": "NVFP4"},
        modelopt_nvfp4,
        EIGHT,
        FOUR,
    ),
    "fp8": (
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
        fp8_blocks(128, 128),
        EIGHT,
        8,
    ),
}
"""Name -> config.json's part, the tensors, and the bits of a layer's number on a CPU and a GPU."""
SIZES = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "tie_word_embeddings": False,
}
TinyModelDir = Callable[..., Path]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERMGEN_CACHE", str(tmp_path / "cache"))


def machine(device: str, **config: Any) -> Machine:
    return Machine(EngineConfig(**config), device, room_bytes=None, has_float8=device != "cpu")


@pytest.mark.parametrize("name", CASES)
def test_the_bits_of_a_folder(name: str, tmp_path: Path, tiny_model_dir: TinyModelDir) -> None:
    config, write, on_cpu, on_gpu = CASES[name]
    folder, _ = quantize_folder(tiny_model_dir("llama", **SIZES), tmp_path / "m", config, write)
    facts = model_facts(folder)
    assert not facts.problem
    tables = round(facts.num_parameters * (1 - facts.layers_share))
    layers = facts.num_parameters - tables
    assert layers > tables
    # What the tensors say decides.
    form = kept_form(folder)
    assert (form == "int8") == facts.is_in_blocks and (form == "fp8") == facts.are_float8
    of_tables = 16.0 if form in (None, "fp8") else EIGHT
    needs = machine("cuda").needs(facts, folder, 10**6)
    assert needs.weights_bytes == pytest.approx(
        (layers * on_gpu + tables * of_tables) / 8, rel=0.01
    )
    assert needs.held_as == {"int8": "int8", "fp8": "fp8", None: "16-bit floats"}[form]
    needs = machine("cpu").needs(facts, folder, 10**6)
    expected = (layers * on_cpu + tables * EIGHT) / 8
    assert needs.weights_bytes == pytest.approx(expected, rel=0.01)
    asked = machine("cuda", quantization="none").needs(facts, folder, 10**6)
    assert asked.weights_bytes == 2 * facts.num_parameters

    engine = SyncEngine(
        EngineConfig(
            model=str(folder),
            device="cpu",
            quantization="int8",
            kv_cache_gib=0.004,
            skip_tokenizer_init=True,
        )
    )
    ledger = engine.model.memory
    assert ledger is not None
    print(name, form, ledger.weights_bytes, needs.weights_bytes)
    assert needs.weights_bytes == pytest.approx(ledger.weights_bytes, rel=0.1)
    engine.shutdown()
