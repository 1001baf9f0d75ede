"""Folders of quantised weights: what is read is what other packages say it is."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from paged_model import PagedModel, Row, load
from quantized_weights import (
    Write,
    awq,
    edit_config,
    fp8_blocks,
    fp8_whole,
    gptq,
    modelopt_nvfp4,
    mxfp4,
    nvfp4,
    packed,
    quantize_folder,
    scaled,
)
from safetensors.torch import load_file, save_file

from termgen.config import EngineConfig
from termgen.engine.device.config.stored_weights import StoredWeights
from termgen.engine.device.loader import open_checkpoint, quantized_tensors
from termgen.engine.device.loader.quantized_tensors import QuantizedTensors, StoredTensor
from termgen.engine.device.quantization.int8 import Int8Linear, Q4Linear
from termgen.engine.device.quantization.stored_matrices import unpack
from termgen.engine.loop.engine import SyncEngine
from termgen.errors import CorruptFileError, ModelError, UnsupportedModelError
from termgen.vocabulary.device.kv_cache_types import LayerScales
from termgen.vocabulary.request import GenerationRequest
from termgen.vocabulary.sampling_params import SamplingParams

TinyModelDir = Callable[..., Path]
PACKED = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
FLOATS = {"quant_method": "compressed-tensors", "format": "float-quantized"}
INTEGERS = {"quant_method": "compressed-tensors", "format": "int-quantized"}
MXFP4 = {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"}
NVFP4 = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}
BLOCKS = {"quant_method": "fp8", "weight_block_size": [48, 48], "activation_scheme": "dynamic"}
GPTQ = {"quant_method": "gptq", "bits": 4, "desc_act": False}
FORMATS: dict[str, tuple[dict[str, Any], Write]] = {
    "fp8 by blocks": (BLOCKS, fp8_blocks(48, 48)),
    "fp8 by even blocks": ({"quant_method": "fp8"}, fp8_blocks(16, 16)),
    "fp8 whole": ({"quant_method": "modelopt", "quant_algo": "FP8"}, fp8_whole),
    "fp8 by rows": (FLOATS, scaled("float", strategy="channel")),
    "fp8 whole, one number": (FLOATS, scaled("float", strategy="tensor")),
    "8 bits": (INTEGERS, scaled("int", strategy="channel")),
    "8 bits, zero points": (INTEGERS, scaled("int", strategy="channel", symmetric=False)),
    "4 bits": (PACKED, packed(4, group=16)),
    "4 bits, zero points": (PACKED, packed(4, group=16, symmetric=False)),
    "4 bits, groups in disorder": (PACKED, packed(4, group=16, in_order=False)),
    "4 bits, a group a row": (PACKED, packed(4)),
    "3 bits across words": (PACKED, packed(3, group=16, symmetric=False)),
    "8 bits packed": (PACKED, packed(8)),
    "GPTQ": (GPTQ, gptq(4, 16)),
    "GPTQ, groups in disorder": ({**GPTQ, "desc_act": True}, gptq(4, 16, in_order=False)),
    "GPTQ, 8 bits": ({**GPTQ, "bits": 8}, gptq(8, 16)),
    "GPTQ, 2 bits": ({**GPTQ, "bits": 2}, gptq(2, 16)),
    "GPTQ, second format": (
        {**GPTQ, "checkpoint_format": "gptq_v2"},
        gptq(4, 16, first_format=False),
    ),
    "AWQ": ({"quant_method": "awq", "bits": 4, "version": "gemm"}, awq(16)),
    "MXFP4": (MXFP4, mxfp4),
    "NVFP4": (NVFP4, nvfp4),
    "NVFP4 of ModelOpt": ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, modelopt_nvfp4),
}


@pytest.fixture(scope="module")
def quantized(
    tiny_model_dir: TinyModelDir, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., tuple[Path, Path]]:
    def make(name: str, family: str = "llama") -> tuple[Path, Path]:
        config, write = FORMATS[name]
        folder = tmp_path_factory.mktemp("quantized") / "model"
        sizes = {"intermediate_size": 128} if name == "MXFP4" else {}  # whole blocks of 32
        return quantize_folder(tiny_model_dir(family, **sizes), folder, config, write)

    return make


def changed(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> Path:
    """The folder, with other tensors in its file."""
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("name", FORMATS)
def test_the_numbers_are_those_of_the_format(
    name: str, quantized: Callable[..., tuple[Path, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantized_tensors, "PART_NUMBERS", 64 * 11)  # parts of odd lengths
    folder, twin = quantized(name)
    ours, plain = open_checkpoint(folder), open_checkpoint(twin)
    assert sorted(ours.names()) == sorted(plain.names())
    assert ours.nbytes < plain.nbytes
    for tensor in plain.names():
        expected = plain.tensor(tensor)
        assert ours.shape(tensor) == expected.shape, tensor  # type: ignore[attr-defined]
        found = ours.tensor(tensor)
        torch.testing.assert_close(found.float(), expected.float(), rtol=1e-6, atol=1e-7)
    ours.close()
    plain.close()


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("fp8 by blocks", "qwen3_moe"),
        ("4 bits, zero points", "qwen3"),
        ("AWQ", "llama"),
        ("GPTQ, groups in disorder", "llama"),
    ],
)
def test_a_model_of_them_computes_as_its_twin(
    name: str, family: str, quantized: Callable[..., tuple[Path, Path]]
) -> None:
    """Fused matrices and experts are filled part by part."""
    folder, twin = quantized(name, family)
    seed = 5
    print("seed", seed)
    tokens = [random.Random(seed).randrange(512) for _ in range(20)]
    found, expected = (PagedModel(load(f)).step([Row(0, 0, tokens)])[0] for f in (folder, twin))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("config", "write", "bits"),
    [
        (PACKED, packed(4, group=32), 4),
        (PACKED, packed(4, group=32, symmetric=False), 4),
        (PACKED, packed(3, group=32, symmetric=False), 4),
        (PACKED, packed(8, group=32), 8),
        (GPTQ, gptq(4, 32), 4),
        ({"quant_method": "awq"}, awq(32), 4),
        ({**GPTQ, "desc_act": True}, gptq(4, 32, in_order=False), 8),
    ],
    ids=["sym", "zero points", "3 bits", "8 bits", "GPTQ", "AWQ", "in disorder"],
)
def test_on_a_cpu_integers_stay_what_they_are(
    config: dict[str, Any],
    write: Write,
    bits: int,
    tiny_model_dir: TinyModelDir,
    tmp_path: Path,
) -> None:
    """Where their groups are whole blocks; others are rounded again."""
    source = tiny_model_dir("llama", intermediate_size=128)
    folder, twin = quantize_folder(source, tmp_path / "model", config, write)
    model, checkpoint = load(folder, quantization="int8"), open_checkpoint(twin)
    method = model.get_submodule("layers.1.mlp.down_proj").method
    assert isinstance(method, Int8Linear) and method._blocks is not None
    assert [run.num_bits for run in method._blocks.runs] == [bits]
    values = checkpoint.tensor("model.layers.1.mlp.down_proj.weight")
    error = (method.embed(torch.arange(64)) - values).abs().max() / values.abs().max()
    assert error < (2e-2 if config.get("desc_act") else 1e-3)
    checkpoint.close()


@pytest.mark.parametrize(
    ("write", "config"), [(awq(32), {"quant_method": "awq"}), (gptq(8, 64), {**GPTQ, "bits": 8})]
)
def test_in_four_bits_groups_of_16_levels_stay(
    write: Write, config: dict[str, Any], tiny_model_dir: TinyModelDir, tmp_path: Path
) -> None:
    source = tiny_model_dir("llama", intermediate_size=128)
    folder, twin = quantize_folder(source, tmp_path / "model", config, write)
    model, checkpoint = load(folder, quantization="q4"), open_checkpoint(twin)
    method = model.get_submodule("layers.1.mlp.down_proj").method
    assert isinstance(method, Q4Linear) and method._blocks is not None
    assert [run.num_bits for run in method._blocks.runs] == [4]
    values = checkpoint.tensor("model.layers.1.mlp.down_proj.weight")
    error = (method.embed(torch.arange(64)) - values).abs().max() / values.abs().max()
    assert bool(error < 1e-3) == (config["quant_method"] == "awq")
    assert error < 0.1
    checkpoint.close()


def test_on_a_cpu_they_are_rounded_to_8_bits_like_others(
    quantized: Callable[..., tuple[Path, Path]],
) -> None:
    folder, twin = quantized("fp8 by blocks")
    tokens = list(range(5, 25))
    found, expected = (
        PagedModel(load(f, quantization="int8")).step([Row(0, 0, tokens)])[0]
        for f in (folder, twin)
    )
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


def test_older_exports_of_modelopt_have_a_file_of_their_own(
    quantized: Callable[..., tuple[Path, Path]],
) -> None:
    folder, twin = quantized("fp8 whole")
    edit_config(folder, quantization_config=None)
    with pytest.raises(UnsupportedModelError, match="has the type F8_E4M3"):
        open_checkpoint(folder)
    beside = folder / "hf_quant_config.json"
    beside.write_text('{"quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}}')
    assert sorted(open_checkpoint(folder).names()) == sorted(open_checkpoint(twin).names())
    beside.write_text('{"quantization": {"quant_algo": "W4A8_AWQ"}}')
    with pytest.raises(UnsupportedModelError, match="'W4A8_AWQ'"):
        open_checkpoint(folder)
    beside.write_text('{"quantization": 8}')
    with pytest.raises(CorruptFileError, match="hf_quant_config.json: quantization must be"):
        open_checkpoint(folder)


def test_scales_of_activations_and_caches_are_left_in_the_files(
    quantized: Callable[..., tuple[Path, Path]],
) -> None:
    folder, twin = quantized("fp8 whole")
    layer = "model.layers.0.self_attn"
    changed(
        folder,
        lambda w: w.update(
            {
                f"{layer}.k_scale": torch.tensor(1.0),
                f"{layer}.v_scale": torch.tensor(1.0),
                f"{layer}.q_proj.activation_scale": torch.tensor(1.0),
            }
        ),
    )
    assert sorted(open_checkpoint(folder).names()) == sorted(open_checkpoint(twin).names())


NAMES = [
    ("k_scale", "v_scale"),
    ("attn.k_scale", "attn.v_scale"),
    ("k_proj.k_scale", "v_proj.v_scale"),
    ("k_proj.output_scale", "v_proj.output_scale"),
    ("kv_scale",),
]


@pytest.mark.parametrize("names", NAMES)
def test_scales_of_an_fp8_cache(
    names: tuple[str, ...], quantized: Callable[..., tuple[Path, Path]]
) -> None:
    folder, _ = quantized("fp8 whole")
    layer = "model.layers.1.self_attn."

    def put(*scales: torch.Tensor) -> dict[int, LayerScales]:
        named = zip((layer + name for name in names), scales, strict=False)
        changed(folder, lambda w: w.update(named))
        return open_checkpoint(folder).cache_scales()

    assert open_checkpoint(folder).cache_scales() == {}
    found = put(torch.tensor(0.5), torch.tensor([2.0], dtype=torch.bfloat16))
    assert found == {1: LayerScales(0.5, 2.0 if len(names) == 2 else 0.5)}
    assert put(torch.tensor(1.0), torch.tensor(1.0)) == {}, "nothing to do"
    for bad in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(
            CorruptFileError, match=f"tensor {layer}{names[0]} is .*above 0"
        ) as error:
            put(torch.tensor(bad))
        assert "\n" not in str(error.value)
    with pytest.raises(CorruptFileError, match=f"tensor {layer}{names[0]} has shape .2.,"):
        put(torch.ones(2))


def test_two_scales_that_differ_are_refused(quantized: Callable[..., tuple[Path, Path]]) -> None:
    folder, _ = quantized("fp8 whole")
    layer = "model.layers.0.self_attn"
    scales = {f"{layer}.kv_scale": torch.tensor(2.0), f"{layer}.v_scale": torch.tensor(3.0)}
    changed(folder, lambda w: w.update(scales))
    with pytest.raises(CorruptFileError, match=r"v_scale is 3, but .*kv_scale is 2"):
        open_checkpoint(folder).cache_scales()


def test_scales_of_a_cache_count_for_an_fp8_cache_alone(
    quantized: Callable[..., tuple[Path, Path]],
) -> None:
    """Powers of two change no bit of an fp8 number, but of those next to zero."""
    folder, _ = quantized("fp8 whole")

    def answers(kind: str, key: float, value: float) -> list[float]:
        layers = [f"model.layers.{i}.self_attn" for i in range(2)]
        scales = {f"{layer}.k_scale": torch.tensor(key) for layer in layers}
        scales |= {f"{layer}.v_scale": torch.tensor(value) for layer in layers}
        changed(folder, lambda w: w.update(scales))
        config = EngineConfig(
            model=str(folder),
            device="cpu",
            dtype="float32",
            quantization="none",
            kv_cache_dtype=kind,
            kv_cache_gib=0.004,
            skip_tokenizer_init=True,
        )
        engine = SyncEngine(config)
        params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=0)
        engine.add(
            GenerationRequest(request_id="", prompt_token_ids=tuple(range(5, 40)), params=params)
        )
        found = []
        while engine.has_unfinished:
            for delta in engine.step():
                assert delta.error is None, delta.error
                found += [entry.logprob for entry in delta.logprobs or ()]
        assert len(found) == 12
        return found

    plain = answers("fp8", 2**-3, 2**-3)
    exact = answers("auto", 1.0, 1.0)
    assert answers("fp8", 2**-4, 2**-2) == pytest.approx(plain, abs=2e-3) != exact
    for key, value in ((1.3 * 2**-3, 2**-3), (2**-3, 1.3 * 2**-3)):
        other = answers("fp8", key, value)
        assert other != plain and other[:1] == pytest.approx(exact[:1], abs=0.4)
    assert answers("int8", 1.3, 0.7) == answers("int8", 1.0, 1.0)
    assert answers("auto", 1.3, 0.7) == exact


@pytest.mark.parametrize("scales", [(3,), (3, 1, 1), (3, 20, 1), (3, 2, 3)])
def test_matrices_of_experts_may_be_stacked(scales: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(1)
    numbers = torch.randn(3, 20, 40, generator=generator).to(torch.float8_e4m3fn)
    scale = torch.rand(scales, generator=generator)
    files = {"experts.up": numbers, "experts.up_scale_inv": scale}
    headers = {
        "experts.up": StoredTensor((3, 20, 40), "F8_E4M3"),
        "experts.up_scale_inv": StoredTensor(scales, "F32"),
    }
    found = QuantizedTensors(headers, StoredWeights("fp8", block=(16, 16)), files.__getitem__)
    (tensor,) = found.found.values()
    parts = list(tensor.parts(files.__getitem__))
    assert tensor.shape == (3, 20, 40) and [part.shape for part in parts] == [(1, 20, 40)] * 3
    *_, rows, columns = (1, 1, *scales[1:])
    blocks = [-(-20 // rows) if rows > 2 else 16, 16] if columns == 3 else [20 // rows, 40]
    wide = scale.view(3, rows, columns).repeat_interleave(blocks[0], 1)[:, :20]
    wide = wide.repeat_interleave(blocks[1], 2)[:, :, :40]
    torch.testing.assert_close(torch.cat(parts), numbers.float() * wide)


@pytest.mark.parametrize("bits", range(1, 9))
def test_numbers_of_any_width_are_unpacked(bits: int) -> None:
    rng = random.Random(bits)
    numbers = [[rng.randrange(2**bits) for _ in range(45)] for _ in range(3)]
    rows = []
    for row in numbers:
        whole = sum(number << (bits * i) for i, number in enumerate(row))
        words = [(whole >> (32 * i)) & 0xFFFFFFFF for i in range(-(-45 * bits // 32))]
        rows.append([word - 2**32 if word >= 2**31 else word for word in words])
    assert unpack(torch.tensor(rows, dtype=torch.int32), bits, 45).tolist() == numbers


# -- what cannot be right ------------------------------------------------------------------

LAYER = "model.layers.1.mlp.up_proj"
Weights = dict[str, torch.Tensor]


def without(end: str) -> Callable[[Weights], Any]:
    return lambda weights: weights.pop(f"{LAYER}.{end}")


def resized(end: str, *shape: int) -> Callable[[Weights], Any]:
    def change(weights: Weights) -> None:
        name = f"{LAYER}.{end}"
        weights[name] = torch.zeros(shape, dtype=weights[name].dtype)

    return change


def filled(end: str, value: float) -> Callable[[Weights], Any]:
    return lambda weights: weights[f"{LAYER}.{end}"].fill_(value)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("fp8 by blocks", without("weight_scale_inv"), "has no scale"),
        ("fp8 by blocks", resized("weight_scale_inv", 9, 9), "does not fit"),
        ("fp8 by rows", resized("weight_scale", 5, 1), "does not fit"),
        ("8 bits, zero points", resized("weight_zero_point", 5, 1), "does not fit"),
        ("4 bits", without("weight_scale"), "has no .*weight_scale"),
        ("4 bits", without("weight_shape"), "has no .*weight_shape"),
        ("4 bits", resized("weight_shape", 2), "does not fit"),
        ("4 bits", resized("weight_packed", 112, 9), "does not fit 64 columns"),
        ("4 bits", resized("weight_scale", 112, 5), "does not fit"),
        ("4 bits, zero points", resized("weight_zero_point", 3, 4), "does not fit"),
        ("4 bits, groups in disorder", resized("weight_g_idx", 63), "does not fit"),
        ("GPTQ", without("scales"), "has no .*scales"),
        ("GPTQ", resized("qzeros", 4, 20), "has 5 bits a number"),
        ("GPTQ", resized("scales", 4, 0), "has 0 bits a number"),
        ("GPTQ", resized("g_idx", 7), "does not fit"),
        ("AWQ", resized("qweight", 64, 13), "does not fit"),
        ("AWQ", resized("qzeros", 5, 14), "does not fit"),
        ("NVFP4", without("weight_global_scale"), "has no scale"),
        ("NVFP4", resized("weight_scale", 112, 3), "does not fit"),
    ],
)
def test_tensors_that_do_not_fit_are_named(
    name: str,
    change: Callable[[Weights], Any],
    message: str,
    quantized: Callable[..., tuple[Path, Path]],
) -> None:
    folder = changed(quantized(name)[0], change)
    with pytest.raises(ModelError, match=message) as refusal:
        open_checkpoint(folder)
    assert LAYER in str(refusal.value) and str(folder) in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("name", "end", "value"),
    [
        ("fp8 by blocks", "weight_scale_inv", float("nan")),
        ("4 bits", "weight_scale", float("inf")),
        ("NVFP4", "weight_global_scale", 0.0),
    ],
)
def test_scales_that_are_no_numbers_are_found(
    name: str, end: str, value: float, quantized: Callable[..., tuple[Path, Path]]
) -> None:
    folder = changed(quantized(name)[0], filled(end, value))
    with pytest.raises(CorruptFileError, match=f"{LAYER}.*has NaN or infinite values"):
        load(folder)


@pytest.mark.parametrize(
    ("name", "end"),
    [("4 bits, groups in disorder", "weight_g_idx"), ("GPTQ", "g_idx")],
)
@pytest.mark.parametrize("value", [-1, 4])
def test_groups_that_are_not_there_are_named(
    name: str, end: str, value: int, quantized: Callable[..., tuple[Path, Path]]
) -> None:
    folder = changed(quantized(name)[0], filled(end, value))
    with pytest.raises(CorruptFileError, match=f"{LAYER}.{end}' names groups beyond the 4"):
        load(folder)


def test_a_matrix_that_is_there_twice_is_named(
    quantized: Callable[..., tuple[Path, Path]],
) -> None:
    folder = changed(
        quantized("AWQ")[0], lambda w: w.update({f"{LAYER}.weight": torch.zeros(112, 64)})
    )
    with pytest.raises(CorruptFileError, match=f"{LAYER}.weight' is in the files twice"):
        open_checkpoint(folder)


def test_types_without_a_meaning_are_refused(
    quantized: Callable[..., tuple[Path, Path]],
) -> None:
    folder = changed(
        quantized("AWQ")[0],
        lambda w: w.update({"model.norm.weight": torch.ones(64, dtype=torch.int32)}),
    )
    with pytest.raises(UnsupportedModelError, match=r"'model\.norm\.weight' has the type I32"):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "bitsandbytes"}, "asks for bitsandbytes.*supported are awq"),
        ({}, "asks for an unknown method"),
        ({"quant_method": "awq", "version": "gemv"}, "awq in the format 'gemv'"),
        ({"quant_method": "gptq", "checkpoint_format": "marlin"}, "in the format 'marlin'"),
        ({**PACKED, "format": "marlin-24"}, "in the format 'marlin-24'"),
        ({**PACKED, "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config is not"),
        ({**PACKED, "transform_config": {"config_groups": {"u": 1}}}, "transform_config is not"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "'W4A8_AWQ'"),
        ({**BLOCKS, "weight_block_size": [128]}, "weight_block_size must be two"),
        ({**BLOCKS, "weight_block_size": [128, 0]}, "weight_block_size must be two"),
        ({"quant_method": "awq", "version": 4}, "version must be a string"),
    ],
)
def test_what_a_config_may_not_ask_for(
    config: dict[str, Any],
    message: str,
    tiny_llama_dir: Path,
    tmp_path: Path,
) -> None:
    import shutil

    folder = tmp_path / "model"
    shutil.copytree(tiny_llama_dir, folder)
    edit_config(folder, quantization_config=config)
    with pytest.raises(ModelError, match=message):
        open_checkpoint(folder)
