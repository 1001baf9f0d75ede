"""What the formats that stay what they are on a GPU do to the probabilities of the next token,
beside the same weights in a model of float32."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from paged_model import PagedModel, Row, StateDictCheckpoint, build
from safetensors.torch import load_file
from triton_device import DEVICES, require_triton
from weight_formats import FORMATS, Matrix

from termgen.engine.device.attention.groups import GroupedAttention
from termgen.engine.device.attention.torch_reference import TorchReferenceAttention
from termgen.engine.device.layers.linear import Build, FloatLinear, LinearSpec
from termgen.engine.device.layers.ops import TorchOps
from termgen.engine.device.layers.stored_rows import StoredRows
from termgen.engine.device.loader import load_model_config
from termgen.engine.device.loader.weights import load_weights
from termgen.engine.device.models.registry import make_model

require_triton()

from termgen.engine.device.quantization.float8 import Float8Linears  # noqa: E402
from termgen.engine.device.quantization.int8_groups import GroupLinears  # noqa: E402

TinyModelDir = Callable[..., Path]
SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3}
TABLES = ("embed_tokens", "lm_head")
MIXES: dict[str, dict[str, str]] = {
    "Q4_K_M": {"": "Q4_K", "v_proj": "Q6_K", "down_proj": "Q6_K", **dict.fromkeys(TABLES, "Q6_K")},
    "blocks of 32": {
        **{"": "Q4_0", "k_proj": "Q4_1", "v_proj": "Q5_0", "o_proj": "Q5_1", "gate_proj": "Q8_0"},
        **dict.fromkeys(TABLES, "Q8_0"),
    },
    "IQ4": {"": "IQ4_XS", "o_proj": "IQ4_NL", **dict.fromkeys(TABLES, "Q5_K")},
    "GPTQ": {"": "GPTQ, groups of 128", **dict.fromkeys(TABLES, "int8")},
    "AWQ": {"": "AWQ, groups of 64", **dict.fromkeys(TABLES, "int8")},
    "int8": {"": "int8"},
    "q4": {"": "q4", **dict.fromkeys(TABLES, "int8")},
    "fp8": {"": "fp8", **dict.fromkeys(TABLES, "floats")},
}
"""Part of a tensor's name -> its format; the empty one is that of the others."""
ROUNDED = ("int8", "q4", "fp8")
KL, KL_OF_INTEGERS = 1e-4, 1e-3
"""Nats in the mean; where one row is multiplied in integers."""
SAME_TOKEN = 0.995
NEAR_TIE = 0.02
"""Nats between two tokens that float16 may rank otherwise."""
MOST_POSITIONS = 640


class Mixed:
    """The part of a checkpoint that loading needs, with matrices in formats of their own."""

    def __init__(self, tensors: dict[str, torch.Tensor], matrices: dict[str, Matrix]) -> None:
        self.tensors, self.matrices = tensors, matrices

    def names(self) -> list[str]:
        return list(self.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensor(name).shape)

    def tensor(self, name: str) -> torch.Tensor:
        return self.matrices[name].values if name in self.matrices else self.tensors[name]

    def kind(self, name: str) -> str | None:
        stored = self.matrices[name].stored if name in self.matrices else None
        return None if stored is None else stored.kind

    def stored(self, name: str) -> Iterator[StoredRows]:
        stored = self.matrices[name].stored
        assert stored is not None
        yield stored


def format_of(name: str, mix: dict[str, str]) -> str:
    return next((form for part, form in mix.items() if part and part in name), mix[""])


def kept_values(form: str, matrix: Matrix, device: str) -> torch.Tensor:
    """What is multiplied: the file's values, or those that rounding makes of them."""
    if form == "floats":
        return matrix.values.half().float()
    if form not in ROUNDED:
        return matrix.values
    rows, columns = matrix.values.shape
    spec = LinearSpec(columns, rows, torch.float32, torch.device(device), is_looked_up=True)
    groups = GroupLinears()
    layers = {"fp8": Float8Linears(), "q4": groups.in_4_bits}
    method = layers.get(form, groups)(spec)
    matrix.load(method)
    method.finalize()
    return method.embed(torch.arange(rows, device=device)).cpu()


def models(folder: Path, name: str, device: str) -> tuple[PagedModel, PagedModel]:
    """A model with these weights in float16, and its twin in float32."""
    config, mix = load_model_config(folder), MIXES[name]
    tensors = load_file(folder / "model.safetensors")
    matrices, plain = {}, dict(tensors)
    for place, (tensor, values) in enumerate(sorted(tensors.items())):
        if values.dim() != 2:
            continue
        form = format_of(tensor, mix)
        make = FORMATS["int8" if form == "floats" else form][1]
        matrices[tensor] = make(*values.shape, place)
        plain[tensor] = kept_values(form, matrices[tensor], device)
    groups = GroupLinears()
    method, of_tables = {
        "q4": (groups.in_4_bits, groups),
        "fp8": (Float8Linears(), FloatLinear),
    }.get(name, (groups, groups))
    here = torch.device(device)
    made = Build(torch.float16, here, method, TorchOps(), table_method=of_tables)
    attention = GroupedAttention.without_windows(TorchReferenceAttention(), config.layer_caches)
    model, twin = make_model(config, made, attention), build(config, device=here)
    load_weights(model, Mixed(tensors, matrices))
    load_weights(twin, StateDictCheckpoint(plain))
    paged = []
    for one in (model, twin):
        one.finalize()
        paged.append(PagedModel(one, num_blocks=MOST_POSITIONS // 4 + 40, dtype=one.dtype))
    return paged[0], paged[1]


def log_probabilities(model: PagedModel, ids: list[int], chunks: list[int]) -> torch.Tensor:
    """[positions, vocab], read in chunks of these lengths."""
    found, at = [], 0
    for length in chunks:
        found.append(model.step([Row(0, at, ids[at : at + length])])[0])
        at += length
    return torch.cat(found).double().log_softmax(-1)


def compare(folder: Path, name: str, device: str, chunks: list[int], seed: int) -> None:
    """chunks: those of one token come last."""
    print("seed", seed)
    model, twin = models(folder, name, device)
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 512, (sum(chunks),), generator=generator).tolist()
    found, exact = (log_probabilities(one, ids, chunks) for one in (model, twin))
    divergence = (exact.exp() * (exact - found)).sum(-1)
    chosen = found.argmax(-1)
    loss = exact.amax(-1) - exact.gather(-1, chosen[:, None])[:, 0]
    same = float((loss == 0).double().mean())
    near = float((loss < NEAR_TIE).double().mean())
    singles = chunks.count(1)
    of_many, of_one = divergence.split([len(ids) - singles, singles])
    print(f"{name}: {of_many.mean():.1e} nats, of {singles} single rows {of_one.sum():.1e} in all")
    print(f"{same:.2%} have the same token first, {near:.2%} one nearly as likely")
    assert of_many.mean() < KL
    assert not singles or of_one.mean() < KL_OF_INTEGERS
    assert near > SAME_TOKEN


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["Q4_K_M", "fp8"])
def test_a_small_model(name: str, device: str, tiny_model_dir: TinyModelDir) -> None:
    """Without steps of one row, which take seconds where kernels are interpreted."""
    folder = tiny_model_dir("llama", **SIZES | {"num_hidden_layers": 2})
    compare(folder, name, device, [280, 8], seed=1)


@pytest.mark.gpu
@pytest.mark.parametrize("name", MIXES)
@pytest.mark.parametrize("seed", range(2))
def test_some_hundred_positions(name: str, seed: int, tiny_model_dir: TinyModelDir) -> None:
    """Steps that widen weights, steps on the matrix units and steps of one row."""
    folder = tiny_model_dir("llama", **SIZES)
    compare(folder, name, "cuda", [300, 100, 64, 16, 4, *[1] * 100], seed)
