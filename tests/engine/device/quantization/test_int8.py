from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import torch.nn.functional as F
from paged_model import CPU, PagedModel, Row, build, load
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from weight_formats import blocks

from termgen.engine.device import native
from termgen.engine.device.layers.linear import Build, Linear, LinearSpec
from termgen.engine.device.layers.ops import TorchOps
from termgen.engine.device.layers.stored_rows import StoredRows
from termgen.engine.device.loader import load_model_config, open_checkpoint
from termgen.engine.device.loader.weights import load_weights
from termgen.engine.device.native import int8_blocks
from termgen.engine.device.native.int8_blocks import Int8Blocks, dequantize, quantize_rows
from termgen.engine.device.quantization import int8
from termgen.engine.device.quantization.int8 import Int8Linear, Q4Linear
from termgen.engine.device.runner.memory import weight_bytes
from termgen.engine.text.tokenizer import load_tokenizer

TinyModelDir = Callable[..., Path]
NUM_READ, NUM_WRITTEN = 80, 10
NEAR_TIE = 0.02
"""Nats between two tokens that rounding may rank otherwise."""


def random_matrix(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    scales = torch.logspace(-3, 3, rows)[:, None]
    return torch.randn(rows, columns, generator=generator) * scales


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_rows", [0, 1, 3, 48, 49])
@pytest.mark.parametrize("columns", [64, 72])
@pytest.mark.parametrize("how", ["kernels", "torch"])
def test_products_are_those_of_the_quantized_matrix(
    dtype: torch.dtype, num_rows: int, columns: int, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few rows and many, with and without kernels, and columns that are not whole blocks."""
    monkeypatch.setattr(int8, "_CHUNK_NUMBERS", 40 * columns)  # several chunks, the last one short
    monkeypatch.setattr(int8, "_memory", threading.local())
    if how == "torch":
        monkeypatch.setattr(native, "find_spec", lambda name: None)
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
    tolerance = 1e-6 if dtype is torch.float32 else 1 / 128
    assert ((actual.double() - expected).abs() <= magnitude * tolerance + 1e-6).all()


@pytest.mark.parametrize("kind", ["8 bits", "4 bits"])
def test_parts_of_a_matrix_are_quantized_like_the_whole(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    matrix = random_matrix(150, 96)
    if kind == "4 bits":
        matrix = (matrix / matrix.abs().amax(1, keepdim=True) * 7).round()
        matrix[:, ::32], matrix[:, 1::32] = -7, 8
    whole = Int8Blocks(quantize_rows(matrix))
    assert [run.num_bits for run in whole.runs] == [int(kind[0])]
    monkeypatch.setattr(Int8Linear, "part_numbers", 96 * 20)
    monkeypatch.setattr(int8_blocks, "_PART_NUMBERS", 96 * 40)
    method = quantized(matrix)
    assert torch.equal(method.tiles, whole.tiles)
    assert torch.equal(method.row_scale, whole.row_scale)


class Operations(TorchDispatchMode):
    """Names of torch's operations that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.skipif(bool(native.why_unusable()), reason="no kernels here")
def test_a_product_of_few_rows_runs_nothing_but_its_kernel() -> None:
    """A step has a hundred of them, and each torch operation costs as much as a tenth of one."""
    method = quantized(random_matrix(64, 96))
    for num_rows in (48, 1, 3):
        x = random_matrix(num_rows, 96, seed=num_rows)
        expected = method.multiply(x, None)
        with Operations() as seen:
            actual = method.multiply(x, None)
        assert seen.names == ["aten.empty.memory_format"], "for the result"
        assert torch.equal(actual, expected)


@pytest.mark.skipif(bool(native.why_unusable()), reason="no kernels here")
def test_products_of_threads_do_not_share_their_memory() -> None:
    methods = [quantized(random_matrix(64, 96, seed=seed)) for seed in range(4)]
    x = random_matrix(40, 96, seed=9)
    expected = [method.multiply(x, None) for method in methods]
    with ThreadPoolExecutor(len(methods)) as pool:
        for _ in range(20):
            found = pool.map(lambda method: method.multiply(x, None), methods)
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_large_steps_leave_the_precision_of_the_process_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The setting is the process's: the products of a float engine in another thread would follow
    it. And rows of a large step must be those of a small one."""
    settings = torch.backends.mkldnn.matmul
    before = settings.fp32_precision
    seen = set()
    multiply = torch.mm

    def mm(*args: torch.Tensor, **kwargs: torch.Tensor) -> torch.Tensor:
        seen.add(settings.fp32_precision)
        return multiply(*args, **kwargs)

    monkeypatch.setattr(torch, "mm", mm)
    method = quantized(random_matrix(64, 96))
    x = random_matrix(100, 96, seed=1)
    whole = method.multiply(x, None)
    rows = torch.cat([method.multiply(row[None], None) for row in x])
    assert seen == {before}
    magnitude = x.abs() @ random_matrix(64, 96).abs().T
    assert ((whole - rows).abs() <= magnitude * 1e-6).all()


def quantized(matrix: torch.Tensor) -> Int8Linear:
    rows, columns = matrix.shape
    method = Int8Linear(LinearSpec(columns, rows, torch.float32, CPU, True))
    method.load_rows(matrix, 0)
    method.finalize()
    return method


@pytest.mark.parametrize("levels", [16, 256])
def test_looking_rows_up_reads_only_those(levels: int) -> None:
    """A tile holds 32 rows; widening all of them for each token takes gigabytes in a long
    prompt."""
    generator = torch.Generator().manual_seed(3)
    matrix = torch.randint(0, levels, (90, 256), generator=generator).float()
    matrix[:, ::32], matrix[:, 1::32] = 0, levels - 1  # every block uses all levels
    method = quantized(matrix)
    assert method._blocks is not None
    assert [run.num_bits for run in method._blocks.runs] == [4 if levels == 16 else 8]
    ids = torch.randint(0, 90, (500,), generator=generator)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        rows = method.embed(ids)
    expected = dequantize(quantize_rows(matrix))[ids]
    torch.testing.assert_close(rows, expected, rtol=0, atol=0)
    largest = max(event.cpu_memory_usage for event in profiled.events())
    assert largest <= 2 * rows.nbytes


def test_rows_are_looked_up_in_the_quantized_matrix() -> None:
    method = Int8Linear(LinearSpec(16, 30, torch.float32, CPU, True))
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
@pytest.mark.parametrize(
    "family",
    [
        "llama",
        "qwen2",
        "qwen3",
        "muse_glimmer",
        "gemma2",
        "gemma3n_text",
        "gemma4_text",
        "qwen3_5_text",
    ],
)
def test_logits_stay_near_the_float_model(
    family: str, tied: bool, tiny_model_dir: TinyModelDir
) -> None:
    is_deep = family in ("gemma2", "gemma3n_text", "gemma4_text", "qwen3_5_text")
    sizes, limit = ({}, 0.06) if is_deep else ({"num_hidden_layers": 2}, 0.03)
    folder = tiny_model_dir(family, tie_word_embeddings=tied, **sizes)
    tokens = list(range(3, 60))
    expected = PagedModel(load(folder)).step([Row(0, 0, tokens)])[0]
    paged = PagedModel(load(folder, quantization="int8"))
    whole = paged.step([Row(0, 0, tokens)])[0]
    error = (whole - expected).std() / expected.std()
    assert error < limit
    # One token at a time takes the other path.
    single = torch.cat([paged.step([Row(1, i, [token])])[0] for i, token in enumerate(tokens)])
    assert (single - expected).std() / expected.std() < limit


def test_the_float_model_is_not_kept(tiny_model_dir: TinyModelDir) -> None:
    folder = tiny_model_dir("llama", tie_word_embeddings=True)
    quantized = weight_bytes(load(folder, quantization="int8"))
    floats = sum(p.nbytes for p in build(load_model_config(folder)).parameters())
    assert 0.28 * floats < quantized < 0.34 * floats


def test_tables_of_embeddings_are_quantized_too(tiny_model_dir: TinyModelDir) -> None:
    """One apart from the head, and the second one of small Gemma 4 models, half of them all."""
    for family, name in (("llama", "embedding"), ("gemma4_text", "inputs.table")):
        folder = tiny_model_dir(family)
        exact = load(folder).get_submodule(name)
        table = load(folder, quantization="int8").get_submodule(name)
        assert isinstance(table.method, Int8Linear)
        assert weight_bytes(table) < 0.34 * weight_bytes(exact)
        ids = torch.tensor([7, 0, 411, 7], dtype=torch.int32)
        rows, wanted = table(ids), exact(ids)
        assert ((rows - wanted).abs() <= wanted.abs().amax(1, keepdim=True) / 200).all()
        assert exact.method._packed is None, "nothing multiplies it"


def test_few_matrices_exist_in_both_forms_while_a_model_is_loaded(
    tiny_model_dir: TinyModelDir,
) -> None:
    folder = tiny_model_dir("llama", tie_word_embeddings=True)
    checkpoint = open_checkpoint(folder)
    model = build(checkpoint.config, quantization="int8")
    layers = [module for module in model.modules() if isinstance(module, Int8Linear)]
    most = 0

    def count(_: float) -> None:
        nonlocal most
        most = max(most, sum(layer._gathered._parts is not None for layer in layers))

    load_weights(model, checkpoint, progress=count)
    checkpoint.close()
    # The files are in alphabetical order: of two fused matrices, parts are still to come.
    assert 1 <= most <= 2 < len(layers) and all(layer._gathered._parts is None for layer in layers)
    with pytest.raises(AssertionError, match="not all rows"):
        build(load_model_config(folder), quantization="int8").finalize()


@functools.cache
def log_probabilities(model: Path, tokenizer: Path, quantization: str | None) -> torch.Tensor:
    """[90, vocab] of the README's beginning: `NUM_READ` tokens as a prompt, the others one by
    one."""
    text = (Path(__file__).parents[4] / "README.md").read_text()[:1200]
    ids = list(load_tokenizer(tokenizer).encode(text))[: NUM_READ + NUM_WRITTEN]
    paged = PagedModel(load(model, quantization=quantization))
    prompt = paged.step([Row(0, 0, ids[:NUM_READ])])[0]
    singles = [paged.step([Row(0, i, [ids[i]])])[0] for i in range(NUM_READ, len(ids))]
    return torch.cat([prompt, *singles]).double().log_softmax(-1)


def divergences(model: Path, tokenizer: Path, kept: str = "int8") -> torch.Tensor:
    """[90] of the next-token probabilities from those of the float32 model, in nats."""
    exact, quantized = (log_probabilities(model, tokenizer, form) for form in (None, kept))
    found = (exact.exp() * (exact - quantized)).sum(-1)
    print(f"mean {found.mean():.1e}, p99 {found.quantile(0.99):.1e}, largest {found.max():.1e}")
    return found


@pytest.fixture(scope="module", autouse=True)
def _few_kept() -> Iterator[None]:
    """Probabilities are 60 MB a model: they go with the module."""
    yield
    log_probabilities.cache_clear()


def test_a_real_model_answers_as_its_float_weights_do(smollm2_gguf: Path) -> None:
    """8 bits with one scale for a whole row, as other programs use them, are at 6e-3."""
    found = divergences(smollm2_gguf, smollm2_gguf)
    assert len(found) == NUM_READ + NUM_WRITTEN
    assert found[:NUM_READ].mean() < 1e-4 and found[NUM_READ:].mean() < 1e-4
    assert part_of_equal_tops(smollm2_gguf) > 0.995


def test_a_real_model_of_mixed_blocks_does_too(gemma_gguf: Path) -> None:
    """Q8_0 tables, and layers in Q4_K, Q5_0, Q6_K."""
    found = divergences(gemma_gguf, gemma_gguf)
    assert found[:NUM_READ].mean() < 1e-4 and found[NUM_READ:].mean() < 1e-4
    assert part_of_equal_tops(gemma_gguf) > 0.995


def part_of_equal_tops(model: Path) -> float:
    """Part of the positions with the same most likely token; two that the float32 model has nearly
    as likely count as one."""
    exact, quantized = (log_probabilities(model, model, form) for form in (None, "int8"))
    chosen = exact.gather(-1, quantized.argmax(-1, keepdim=True))[:, 0]
    return float((exact.amax(-1) - chosen < NEAR_TIE).double().mean())


@pytest.fixture(scope="module")
def noisy_model(smollm2_reference: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file's weights lie on a grid of 4 bits, which 8 bits keep exactly. Most models' do not:
    4% of noise takes them off it."""
    noisy, seed, folder = copy.deepcopy(smollm2_reference), 17, tmp_path_factory.mktemp("noisy")
    print("seed", seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in noisy.parameters():
            noise = torch.randn(weight.shape, generator=generator)
            weight.add_(noise * (0.04 * weight.std() if weight.ndim > 1 else 0.0))
    noisy.save_pretrained(folder)
    return folder


def test_a_real_model_of_other_weights_does_too(smollm2_gguf: Path, noisy_model: Path) -> None:
    assert divergences(noisy_model, smollm2_gguf).mean() < 3e-3


def test_a_real_model_in_four_bits(smollm2_gguf: Path, noisy_model: Path) -> None:
    """A file in 4 bits stays what it is, but for its table."""
    assert divergences(smollm2_gguf, smollm2_gguf, "q4").mean() < 1e-3
    assert divergences(noisy_model, smollm2_gguf, "q4").mean() < 0.2


def test_layers_take_four_bits_and_tables_eight(tiny_model_dir: TinyModelDir) -> None:
    for family in ("llama", "gemma4_text", "qwen3_moe"):
        model = load(tiny_model_dir(family), quantization="q4")
        bits: dict[type, set[int]] = {}
        for module in model.modules():
            if isinstance(module, Int8Linear):
                assert module._blocks is not None
                bits.setdefault(type(module), set()).update(r.num_bits for r in module._blocks.runs)
        assert bits == {Q4Linear: {4}, Int8Linear: {8}}, family
    experts = load(tiny_model_dir("qwen3_moe"), quantization="q4").get_submodule("layers.0.mlp")
    assert any(type(module) is Q4Linear for module in experts.modules())


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0"])
def test_a_file_of_four_bits_keeps_its_numbers(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Int8Linear, "part_numbers", 96 * 20)  # more than one part
    values = random_matrix(64, 96)
    form = gguf.GGMLQuantizationType[kind]
    packed = gguf.quants.quantize(values.numpy(), form)
    wanted = torch.from_numpy(gguf.quants.dequantize(packed, form).copy())
    method = Q4Linear(LinearSpec(96, 64, torch.float32, CPU, True))
    method.load_stored(StoredRows(kind, torch.from_numpy(packed.reshape(64, 3, -1).copy())), 0)
    assert method._blocks is not None and [r.num_bits for r in method._blocks.runs] == [4]
    kept = method.embed(torch.arange(64))
    if kind == "Q8_0":
        wanted = dequantize(quantize_rows(wanted, 4))
    assert ((kept - wanted).abs() <= 2**-9 * wanted.abs().amax(1, keepdim=True)).all()


@pytest.mark.parametrize("step", [64, 20])
def test_a_file_of_six_bits_keeps_its_numbers(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside rows of another type, as in the matrix of q, k and v; q4 takes no more than 8 bits."""
    monkeypatch.setattr(Int8Linear, "part_numbers", 512 * step)
    made = [blocks(kind)(rows, 512, 3) for kind, rows in (("Q4_K", 96), ("Q6_K", 64))]
    wanted = torch.cat([matrix.values for matrix in made])
    spec = LinearSpec(512, 160, torch.float32, CPU, True)
    for method, bits in ((Int8Linear(spec), [4, 6]), (Q4Linear(spec), [4])):
        for matrix, first_row in zip(reversed(made), (96, 0), strict=True):
            matrix.load(method, first_row)
        assert [run.num_bits for run in method.blocks.runs] == bits
        assert method.tiles.nbytes == 512 * (96 * 5 + 64 * (7 if 6 in bits else 5)) // 8
        kept = method.embed(torch.arange(160))
        error = (kept - wanted).abs().amax(1) / wanted.abs().amax(1)
        assert (error[:96] < 2**-9).all() and (error[96:] < (2**-9 if 6 in bits else 0.2)).all()
        x = random_matrix(3, 512)
        torch.testing.assert_close(method.multiply(x, None), x @ kept.T, rtol=1e-4, atol=1e-4)
