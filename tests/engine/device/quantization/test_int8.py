from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from paged_model import CPU, PagedModel, Row, load

from termgen.engine.device import native
from termgen.engine.device.layers.linear import Build, Linear, LinearSpec
from termgen.engine.device.layers.ops import TorchOps
from termgen.engine.device.native.int8_blocks import dequantize, quantize_rows
from termgen.engine.device.quantization import int8
from termgen.engine.device.quantization.int8 import Int8Linear
from termgen.engine.text.tokenizer import load_tokenizer

TinyModelDir = Callable[..., Path]


def random_matrix(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    scales = torch.logspace(-3, 3, rows)[:, None]
    return torch.randn(rows, columns, generator=generator) * scales


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_rows", [0, 1, 3, 48, 49])
@pytest.mark.parametrize("columns", [64, 72])
@pytest.mark.parametrize("how", ["kernels", "no bfloat16", "torch"])
def test_products_are_those_of_the_quantized_matrix(
    dtype: torch.dtype, num_rows: int, columns: int, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few rows and many, with and without kernels, and columns that are not whole blocks."""
    monkeypatch.setattr(int8, "_CHUNK_NUMBERS", 40 * columns)  # several chunks, the last one short
    monkeypatch.setattr(int8, "_memory", threading.local())
    if how == "torch":
        monkeypatch.setattr(native, "find_spec", lambda name: None)
    if how == "no bfloat16":
        monkeypatch.setattr(int8, "can_pack", lambda dtype, device: False)
    layer = Linear(
        columns, {"proj": 70}, bias=True, build=Build(dtype, CPU, Int8Linear, TorchOps())
    )
    matrix, bias = random_matrix(70, columns), torch.linspace(-5, 5, 70)
    for slot in layer.weight_slots(""):
        slot.load(matrix if slot.role == "matrix" else bias)
    layer.finalize()
    x = random_matrix(max(num_rows, 1), columns, seed=1)[:num_rows].to(dtype)
    padded = F.pad(matrix, (0, -columns % 32))
    dequantized = dequantize(quantize_rows(padded))[:, :columns].double()
    expected = x.double() @ dequantized.T + bias.to(dtype).double()
    actual = layer(x)
    assert actual.shape == (num_rows, 70) and actual.dtype is dtype
    # bfloat16 keeps 8 bits: sums of magnitude m are off by up to m / 128 after their roundings.
    magnitude = x.double().abs() @ dequantized.abs().T + bias.abs().double()
    is_exact = dtype is torch.float32 and (
        how == "no bfloat16" or (how == "kernels" and num_rows <= 48)
    )
    tolerance = 1e-6 if is_exact else 1 / 128
    assert ((actual.double() - expected).abs() <= magnitude * tolerance + 1e-6).all()


def test_products_of_other_code_keep_their_precision() -> None:
    """The setting for bfloat16 factors is left as it was, also by an error."""
    settings = torch.backends.mkldnn.matmul
    before = settings.fp32_precision
    with pytest.raises(KeyError), int8._bfloat16_factors():
        assert settings.fp32_precision == "bf16"
        raise KeyError
    assert settings.fp32_precision == before


def test_two_engines_leave_the_setting_as_it_was() -> None:
    settings = torch.backends.mkldnn.matmul
    before = settings.fp32_precision
    is_inside, may_end = threading.Event(), threading.Event()

    def first() -> None:
        with int8._bfloat16_factors():
            is_inside.set()
            may_end.wait(10.0)

    def second() -> None:
        """Ends after the first, whether it may begin before that or not."""
        with int8._bfloat16_factors():
            threads[0].join(10.0)

    threads = [threading.Thread(target=first), threading.Thread(target=second)]
    threads[0].start()
    assert is_inside.wait(10.0)
    threads[1].start()
    threads[1].join(0.1)
    may_end.set()
    for thread in threads:
        thread.join(10.0)
    assert settings.fp32_precision == before


def test_rows_are_looked_up_in_the_quantized_matrix() -> None:
    spec = LinearSpec(16, 30, torch.float32, CPU, True)
    method = Int8Linear(spec)
    matrix = random_matrix(30, 16)
    method.load_rows(matrix[:10], 0)
    method.load_rows(matrix[10:], 10)
    method.finalize()
    ids = torch.tensor([29, 0, 12, 12], dtype=torch.int32)
    rows = method.embed(ids)
    assert rows.dtype is torch.float32 and rows.shape == (4, 16)
    wanted = matrix[ids.long()]
    assert ((rows - wanted).abs() <= wanted.abs().amax(1, keepdim=True) / 200).all()


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_logits_stay_near_the_float_model(
    family: str, tied: bool, tiny_model_dir: TinyModelDir
) -> None:
    folder = tiny_model_dir(family, tie_word_embeddings=tied)
    tokens = list(range(3, 60))
    expected = PagedModel(load(folder)).step([Row(0, 0, tokens)])[0]
    paged = PagedModel(load(folder, quantization="int8"))
    whole = paged.step([Row(0, 0, tokens)])[0]
    error = (whole - expected).std() / expected.std()
    assert error < 0.03
    # One token at a time takes the other path.
    single = torch.cat([paged.step([Row(1, i, [token])])[0] for i, token in enumerate(tokens)])
    assert (single - expected).std() / expected.std() < 0.03


def test_the_float_model_is_not_kept(tiny_model_dir: TinyModelDir) -> None:
    folder = tiny_model_dir("llama", tie_word_embeddings=True)
    sizes = {
        quantization: sum(p.nbytes for p in load_unfinalized(folder, quantization).parameters())
        for quantization in (None, "int8")
    }
    assert sizes["int8"] < 0.33 * sizes[None]


def load_unfinalized(folder: Path, quantization: str | None) -> torch.nn.Module:
    from paged_model import build

    from termgen.engine.device.loader import load_model_config

    return build(load_model_config(folder), quantization=quantization)


def test_a_real_model_answers_as_its_float_weights_do(smollm2_gguf: Path) -> None:
    """The mean divergence of its next tokens from those of the float32 model, in nats. 8 bits with
    one scale for a whole row, as other programs use them, are at 6e-3."""
    text = (Path(__file__).parents[4] / "README.md").read_text()[:1200]
    ids = list(load_tokenizer(smollm2_gguf).encode(text))[:240]
    half = len(ids) // 2

    def log_probabilities(quantization: str | None) -> torch.Tensor:
        paged = PagedModel(load(smollm2_gguf, quantization=quantization))
        prompt = paged.step([Row(0, 0, ids[:half])])[0]
        singles = [paged.step([Row(0, i, [ids[i]])])[0] for i in range(half, len(ids))]
        return torch.cat([prompt, *singles]).double().log_softmax(-1)

    exact, quantized = log_probabilities(None), log_probabilities("int8")
    divergence = (exact.exp() * (exact - quantized)).sum(-1)
    print(f"mean {divergence.mean():.2e}, largest {divergence.max():.2e}")
    assert divergence[:half].mean() < 1e-3 and divergence[half:].mean() < 1e-3
