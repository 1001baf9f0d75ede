"""gpt-oss apart from its logits: experts in four bits, sinks, what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from paged_model import PagedModel, Row, load
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from termgen.config import EngineConfig
from termgen.engine.device.attention.torch_reference import TorchReferenceAttention
from termgen.engine.device.layers.matrix_list import MatrixList
from termgen.engine.device.loader import open_checkpoint
from termgen.engine.loop.engine import SyncEngine
from termgen.errors import CorruptFileError, ModelError, UnsupportedModelError
from termgen.vocabulary.request import GenerationRequest
from termgen.vocabulary.sampling_params import SamplingParams

TinyModelDir = Callable[..., Path]
TOKENS = [5, 77, 401, 9, 33, 12, 250, 3, 8, 100, 41, 7, 7, 300, 2, 19, 64]


@pytest.fixture(scope="module")
def folder(tiny_model_dir: TinyModelDir) -> Path:
    """Sizes that blocks of 32 divide."""
    return tiny_model_dir("gpt_oss", intermediate_size=96)


@pytest.fixture(scope="module")
def packed(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, torch.Tensor]]:
    """The model with random experts in four bits, and transformers' reading of these."""
    made = tmp_path_factory.mktemp("mxfp4")
    shutil.copytree(folder, made, dirs_exist_ok=True)
    tensors = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(4)
    experts: dict[str, torch.Tensor] = {}
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        num_experts, size_in, size_out = tensors.pop(name).shape
        shape = (num_experts, size_out, size_in // 32)
        blocks = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(121, 125, shape, generator=generator, dtype=torch.uint8)
        tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = blocks, scales
        experts[name] = convert_moe_packed_tensors(blocks, scales)
    assert len(experts) == 2 * 3
    save_file(tensors, made / "model.safetensors")
    edit_config(made, quantization_config={"quant_method": "mxfp4"}, dtype=None)
    return made, experts


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


def logits_of(folder: Path) -> torch.Tensor:
    return PagedModel(load(folder)).step([Row(0, 0, TOKENS)])[0]


def test_experts_in_four_bits(packed: tuple[Path, dict[str, torch.Tensor]], folder: Path) -> None:
    made, experts = packed
    checkpoint = open_checkpoint(made)
    assert set(checkpoint.names()) == set(load_file(folder / "model.safetensors"))
    for name, expected in experts.items():
        assert torch.equal(checkpoint.tensor(name), expected)
    # Four bits and a quarter: 4.25 bits a number, and everything else.
    numbers = sum(tensor.numel() for tensor in experts.values())
    others = sum(
        tensor.nbytes
        for name, tensor in load_file(folder / "model.safetensors").items()
        if name not in experts
    )
    assert checkpoint.nbytes == numbers * 17 // 32 + others
    assert checkpoint.config.torch_dtype == "bfloat16"
    checkpoint.close()

    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    parameters = dict(reference.named_parameters())
    with torch.inference_mode():
        for name, expected in experts.items():
            parameters[name].copy_(expected)
        wanted = reference(torch.tensor([TOKENS])).logits[0]
    torch.testing.assert_close(logits_of(made), wanted, atol=1e-4, rtol=1e-4)


def test_experts_in_four_bits_keep_their_values_where_others_are_rounded(
    packed: tuple[Path, dict[str, torch.Tensor]],
) -> None:
    """`--quantization int8`, which rounds other weights."""
    made, experts = packed
    model = load(made, quantization="int8")
    for name, values in experts.items():
        parts = name.removeprefix("model.").removesuffix("_proj").replace("mlp.experts", "mlp")
        expected = values.mT.float()
        if parts.endswith("gate_up"):
            expected = torch.cat((expected[:, ::2], expected[:, 1::2]), 1)
        matrices = model.get_submodule(parts)
        assert isinstance(matrices, MatrixList)
        rows = torch.arange(expected.shape[1])
        kept = torch.stack([method.embed(rows) for method in matrices._methods])
        assert torch.equal(kept, expected)


@pytest.mark.gpu
def test_a_gpu_gives_what_a_cpu_does(packed: tuple[Path, dict[str, torch.Tensor]]) -> None:
    """With the experts in four bits, and all else rounded alike."""
    tokens: dict[str, dict[str, list[int]]] = {}
    for device in ("cpu", "cuda"):
        options: dict[str, Any] = {"quantization": "int8", "dtype": "float32"}
        # Few blocks, beside the engines of other tests.
        options |= {"skip_tokenizer_init": True, "num_gpu_blocks_override": 80}
        engine = SyncEngine(
            EngineConfig(model=str(packed[0]), device=device, max_model_len=128, **options)
        )
        params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
        found: dict[str, list[int]] = {}
        for name, prompt in enumerate((TOKENS, TOKENS[3:], TOKENS[::-1])):
            request = GenerationRequest(
                request_id=str(name), prompt_token_ids=tuple(prompt), params=params
            )
            engine.add(request)
        while engine.has_unfinished:
            for delta in engine.step():
                found.setdefault(delta.request_id, []).extend(delta.token_ids)
        tokens[device] = found
        engine.shutdown()
    assert len(tokens["cpu"]) == 3
    assert tokens["cpu"] == tokens["cuda"]


def test_no_layer_of_experts_is_ever_whole(
    packed: tuple[Path, dict[str, torch.Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    from termgen.engine.device.loader import safetensors_file

    sizes: list[int] = []
    real = safetensors_file.dequantize

    def dequantize(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        sizes.append(scales.dim())
        return real(blocks, scales)

    monkeypatch.setattr(safetensors_file, "dequantize", dequantize)
    load(packed[0])
    assert sizes == [2] * (3 * 2 * 6)  # one expert at a time


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        (lambda t, n: t.pop(f"{n}_scales"), ModelError, "gate_up_proj"),
        (
            lambda t, n: t.update({f"{n}_scales": t[f"{n}_scales"][:, :, :1].contiguous()}),
            CorruptFileError,
            "gate_up_proj_blocks' is .* but its scales are",
        ),
        (
            lambda t, n: t[f"{n}_scales"].fill_(255),
            CorruptFileError,
            "NaN or infinite",
        ),
        (
            lambda t, n: t.update({f"{n}_blocks": t[f"{n}_blocks"].to(torch.int16)}),
            UnsupportedModelError,
            "has the type I16",
        ),
    ],
)
def test_damaged_blocks_are_refused(
    change: Callable[[dict[str, torch.Tensor], str], object],
    error: type[Exception],
    said: str,
    packed: tuple[Path, dict[str, torch.Tensor]],
    tmp_path: Path,
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(packed[0], broken)
    tensors = load_file(broken / "model.safetensors")
    change(tensors, "model.layers.0.mlp.experts.gate_up_proj")
    save_file(tensors, broken / "model.safetensors")
    with pytest.raises(error, match=said) as raised:
        load(broken)
    assert "\n" not in str(raised.value)


def test_other_quantizations_are_refused(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    edit_config(other, quantization_config={"quant_method": "quanto"})
    with pytest.raises(UnsupportedModelError, match="quantization_config asks for quanto"):
        open_checkpoint(other)


def test_sinks_and_clamps_matter(folder: Path) -> None:
    model = load(folder)
    expected = PagedModel(model).step([Row(0, 0, TOKENS)])[0]
    layers: Any = model.layers
    with torch.no_grad():
        for layer in layers:
            layer.sinks.fill_(-1e4)
    without_sinks = PagedModel(model).step([Row(0, 0, TOKENS)])[0]
    assert (without_sinks - expected).abs().max() > 0.5
    changed = load_with(folder, swiglu_limit=7.0)
    assert (changed - expected).abs().max() > 0.5


def load_with(folder: Path, **changes: Any) -> torch.Tensor:
    from paged_model import build

    from termgen.engine.device.config.model_config import ModelConfig
    from termgen.engine.device.loader.weights import load_weights

    raw = json.loads((folder / "config.json").read_text())
    model = build(ModelConfig.from_hf({**raw, **changes}), attention=TorchReferenceAttention())
    checkpoint = open_checkpoint(folder)
    load_weights(model, checkpoint)
    checkpoint.close()
    model.finalize()
    return PagedModel(model).step([Row(0, 0, TOKENS)])[0]
