"""Every attention backend against a float64 oracle, with one test set."""

from __future__ import annotations

import dataclasses
import math
import random
from dataclasses import dataclass, replace

import pytest
import stand_ins
import torch
import triton_device
from attention_case import TOLERANCE, AttentionCase, random_rows

from termgen.config import ATTENTION_BACKENDS
from termgen.engine.device.attention.base import (
    CHUNKS,
    UNEQUAL_LAYERS,
    AttentionBackend,
    AttentionForm,
)
from termgen.engine.device.attention.registry import (
    BACKENDS,
    EXTRAS,
    backend_class,
    make_backends,
    why_not,
)
from termgen.engine.device.kernels.kv_cache import INT4, INT8, SCALED
from termgen.errors import ConfigError
from termgen.vocabulary.cache_groups import Chunk, Window, window_name
from termgen.vocabulary.device.kv_cache_types import LayerScales

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
WINDOWS = (None, 1, 3, 5, 16, 17)
CHUNKED = (*WINDOWS, Chunk(7), Chunk(16))


@dataclass(frozen=True)
class Where:
    """A backend, its device, and the types and sizes to test there; the first of each is the usual
    one."""

    backend: type[AttentionBackend]
    device: torch.device
    dtypes: tuple[torch.dtype, ...]
    head_dims: tuple[int, ...]
    block_sizes: tuple[int, ...]


def on(device: torch.device, *names: str) -> list[object]:
    marks = [pytest.mark.gpu] if device.type == "cuda" else []
    return [pytest.param((name, device), id=f"{name}-{device}", marks=marks) for name in names]


@pytest.fixture(
    params=[*on(CPU, *BACKENDS), *on(CUDA, *(name for name in BACKENDS if name != "native"))]
)
def where(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Where:
    """On a CPU Triton's kernels are interpreted, and stand-ins replace other packages."""
    name, device = request.param
    if name in EXTRAS:
        return where_optional(name, device, monkeypatch)
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    if name == "native":
        dtypes = (torch.float32,)
    if name == "triton":
        triton_device.require_triton()
        if device.type == "cpu" and not triton_device.IS_INTERPRETED:
            pytest.skip("kernels are compiled here")
        if device.type == "cpu":  # the interpreter multiplies no bfloat16
            dtypes = (torch.float32, torch.float16)
    return Where(backend_class(name), device, dtypes, (64, 80, 96, 128), (4, 1, 16))


def where_optional(name: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> Where:
    backend = backend_class(name)
    block_sizes = tuple(backend.capabilities.block_sizes or (16, 1, 4))
    if device.type == "cpu":
        stand_ins.install(monkeypatch, name)
        dtypes = (torch.float32, torch.bfloat16, torch.float16)
        return Where(backend, device, dtypes, (64, 128), block_sizes)
    pytest.importorskip(name)
    # One type and size: FlashInfer compiles kernels for each, for minutes.
    return Where(backend, device, (torch.bfloat16,), (128,), block_sizes)


def make_case(where: Where, rows: list[tuple[int, int]], **sizes: object) -> AttentionCase:
    has_chunks = CHUNKS in where.backend.capabilities.features
    usual = {
        "windows": CHUNKED if has_chunks else WINDOWS,
        "dtype": where.dtypes[0],
        "head_dim": where.head_dims[0],
        "block_size": where.block_sizes[0],
    }
    return AttentionCase(
        rows,
        backend=where.backend,
        device=where.device,
        **{**usual, **sizes},  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("seed", range(12))
def test_random_ragged_batches_match_the_oracle(seed: int, where: Where) -> None:
    print("seed", seed)
    rng = random.Random(seed)
    block_size = rng.choice(where.block_sizes)
    num_kv_heads = rng.choice((1, 2, 3))
    case = make_case(
        where,
        random_rows(rng, min(block_size, 64)),
        num_heads=num_kv_heads * rng.randint(1, 8),
        num_kv_heads=num_kv_heads,
        head_dim=rng.choice(where.head_dims),
        block_size=block_size,
        seed=seed,
    )
    case.check(window=rng.choice(case.shape.windows))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types(dtype: torch.dtype, where: Where) -> None:
    if dtype not in where.dtypes:
        pytest.skip(f"{where.backend.name} is not asked for {dtype} on {where.device}")
    rows = [(15, 1), (16, 1), (17, 1), (0, 9), (16, 5)]
    case = make_case(where, rows, num_heads=6, dtype=dtype)
    case.check()
    case.check(window=5)


def test_a_layer_may_have_a_part_of_every_page(where: Where) -> None:
    """The other parts are NaN, as is what no sequence has."""
    if UNEQUAL_LAYERS not in where.backend.capabilities.features:
        pytest.skip(f"{where.backend.name} reads whole pages")
    rows = [(15, 1), (16, 1), (17, 1), (0, 9), (16, 5)]
    for part in range(3):
        case = make_case(where, rows, num_heads=6, num_parts=3, part=part, block_size=16)
        assert not case.cache.is_contiguous()
        case.check()
        case.check(window=5)


def test_a_backend_has_to_run_every_shape_of_a_model() -> None:
    shape = AttentionCase([(0, 1)]).shape
    odd = replace(shape, head_dim=72)
    both, settled, passed_over = make_backends(None, [shape, odd])
    assert [backend.name for backend in both] == ["torch_reference"] * 2 and both[0] is not both[1]
    assert settled == [shape, odd] and "native" not in passed_over  # triton is the fastest
    with pytest.raises(ConfigError, match="native: heads of size 72"):
        make_backends("native", [shape, odd])
    half = replace(shape, device=CUDA, dtype=torch.bfloat16, kv_cache_dtype=torch.bfloat16)
    unequal = replace(half, needs=frozenset({UNEQUAL_LAYERS}), block_size=256)
    for name in EXTRAS:
        assert why_not(name, unequal) == "layers of unequal sizes are not supported"


FP8 = torch.float8_e4m3fn
ERRORS = [(INT8, 0.002, 0.01), (INT4, 0.03, 0.15)]
"""Relative error of attention to random numbers, at least and at most."""
READS_FP8 = [name for name in BACKENDS if name not in (*EXTRAS, "native")]
with_fp8 = pytest.mark.parametrize(
    "where", [*on(CPU, *READS_FP8), *on(CUDA, *READS_FP8)], indirect=True
)


@with_fp8
@pytest.mark.parametrize("head_dim", [64, 80, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_an_fp8_cache(dtype: torch.dtype, head_dim: int, where: Where) -> None:
    assert FP8 in where.backend.capabilities.kv_cache_dtypes
    if dtype not in where.dtypes:
        pytest.skip(f"{where.backend.name} is not asked for {dtype} on {where.device}")
    rows = [(15, 1), (16, 1), (17, 1), (300, 1), (0, 9), (16, 5), (3, 70)]
    sizes = {"num_heads": 6, "head_dim": head_dim, "block_size": 16}
    case = make_case(where, rows, dtype=dtype, kv_cache_dtype=FP8, **sizes)
    assert case.cache.dtype == FP8
    case.check()
    case.check(window=5)


@with_fp8
def test_an_fp8_cache_with_soft_caps_and_sinks(where: Where) -> None:
    rows = [(15, 1), (300, 1), (0, 9), (3, 70)]
    for dtype in where.dtypes:
        sizes = {"num_heads": 6, "block_size": 16, "scale": 1.0, "dtype": dtype}
        case = make_case(where, rows, kv_cache_dtype=FP8, **sizes, **FORMS["both"])
        case.check()
        case.check(window=16)


@with_fp8
def test_an_fp8_cache_with_scales_of_the_layer(where: Where) -> None:
    rows = [(15, 1), (300, 1), (0, 9), (3, 70)]
    scales = LayerScales(0.375, 6.0)
    for dtype in where.dtypes:
        sizes = {"num_heads": 6, "block_size": 16, "dtype": dtype, "cache_scales": scales}
        case = make_case(where, rows, kv_cache_dtype=FP8, **sizes)
        case.check()
        case.check(window=5)
        make_case(where, rows, kv_cache_dtype=FP8, **sizes, **FORMS["both"]).check(window=16)


@with_fp8
def test_an_fp8_cache_is_near_an_exact_one(where: Where) -> None:
    """The mantissa has three bits: an error of at most 1/16 in each number, 3% or so in the
    mean."""
    rows = [(15, 1), (300, 1), (0, 9), (3, 70)]
    exact = make_case(where, rows).run()
    rounded = make_case(where, rows, kv_cache_dtype=FP8).run()
    error = (rounded - exact).norm() / exact.norm()
    assert 0.01 < error < 0.05


def no_reason(device: torch.device, *, dtype: torch.dtype | None = None) -> str:
    return ""


@pytest.mark.parametrize("kind", SCALED)
@with_fp8
@pytest.mark.parametrize("head_dim", [64, 80, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_cache_with_scales(
    dtype: torch.dtype,
    head_dim: int,
    where: Where,
    kind: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert kind in where.backend.capabilities.kv_cache_dtypes
    if dtype not in where.dtypes:
        pytest.skip(f"{where.backend.name} is not asked for {dtype} on {where.device}")
    if kind == INT4 and head_dim == 80 and where.backend.name == "triton":
        shape = replace(AttentionCase([(0, 1)], head_dim=80).shape, kv_cache_dtype=INT4)
        monkeypatch.setattr("termgen.engine.device.attention.registry.why_unusable", no_reason)
        fault = "heads of size 80 are not supported with a KV cache of int4"
        assert why_not("triton", replace(shape, device=CUDA)) == fault
        with pytest.raises(ConfigError, match=f"kv_cache_dtype int4: {fault}; use .* auto"):
            make_backends(None, [replace(shape, device=CUDA)])
        return
    rows = [(15, 1), (16, 1), (17, 1), (300, 1), (0, 9), (16, 5), (3, 70)]
    for block_size in (16, 64):
        sizes = {"num_heads": 6, "head_dim": head_dim, "block_size": block_size}
        case = make_case(where, rows, dtype=dtype, kv_cache_dtype=kind, **sizes)
        assert case.cache.dtype == kind
        case.check()
        case.check(window=5)
        part = {"num_parts": 2, "part": 1}  # of a page
        make_case(where, rows, dtype=dtype, kv_cache_dtype=kind, **sizes, **part).check()


@pytest.mark.parametrize("kind", SCALED)
@with_fp8
def test_a_cache_with_scales_with_soft_caps_and_sinks(where: Where, kind: torch.dtype) -> None:
    rows = [(15, 1), (300, 1), (0, 9), (3, 70)]
    for dtype in where.dtypes:
        sizes = {"num_heads": 6, "block_size": 16, "scale": 1.0, "dtype": dtype}
        case = make_case(where, rows, kv_cache_dtype=kind, **sizes, **FORMS["both"])
        case.check()
        case.check(window=16)
        chunk = Chunk(40)
        sizes |= {"scale": None, "windows": (chunk,)}
        case = make_case(where, rows, kv_cache_dtype=kind, **sizes)
        case.check(window=chunk)
        before = case.run(window=chunk)
        case.give_up_unseen(chunk)
        assert torch.equal(case.run(window=chunk), before), "blocks before it are not read"


@pytest.mark.parametrize(("kind", "least", "most"), ERRORS)
@with_fp8
def test_a_cache_with_scales_is_near_an_exact_one(
    where: Where, kind: torch.dtype, least: float, most: float
) -> None:
    rows = [(15, 1), (300, 1), (0, 9), (3, 70)]
    exact = make_case(where, rows).run()
    rounded = make_case(where, rows, kv_cache_dtype=kind).run()
    assert least < (rounded - exact).norm() / exact.norm() < most


@pytest.mark.parametrize("kind", SCALED)
@with_fp8
def test_a_row_without_keys_has_no_scales(where: Where, kind: torch.dtype) -> None:
    case = make_case(where, [(9, 1), (0, 1), (3, 6), (0, 2)], kv_cache_dtype=kind)
    for row in (1, 3):
        case.metadata.seq_lens[row] = 0
        case.metadata.slot_mapping[row] = 0
        case.metadata.block_table[row] = 2**30
    for window in (None, 3):
        actual, expected = case.run(window=window), case.expected(window=window)
        real = [0, *range(2, 8)]
        tolerance = TOLERANCE[where.dtypes[0]]
        torch.testing.assert_close(
            actual[real].double(), expected[real], atol=tolerance, rtol=tolerance
        )
        assert not actual.isnan().any()


WITH_ALL = [name for name in BACKENDS if name not in EXTRAS]
on_all = pytest.mark.parametrize(
    "where", [*on(CPU, *WITH_ALL), *on(CUDA, "triton", "torch_reference")], indirect=True
)
CAP = 3.0
SINK_LOGITS = (-2.0, 0.5, 4.0, -30.0, 60.0, 1.0)
"""Six heads: weak and strong ones, one that hides nothing and one that hides all."""
FORMS = {
    "softcap": {"softcap": CAP},
    "sinks": {"sinks": SINK_LOGITS},
    "both": {"softcap": CAP, "sinks": SINK_LOGITS},
}


@on_all
@pytest.mark.parametrize(
    ("form", "group"), [("softcap", 6), ("sinks", 6), ("both", 6), ("both", 1)]
)
def test_soft_caps_and_sinks(form: str, group: int, where: Where) -> None:
    """Scores up to 40 or so, so that the cap bites; contexts below, at and above each window, in a
    mixed step and in one of decodes."""
    rows = [(0, 1), (15, 1), (16, 1), (17, 1), (300, 1), (0, 4), (0, 9), (16, 5), (3, 70)]
    for dtype in where.dtypes:
        sizes = {"num_heads": 6, "num_kv_heads": 6 // group, "scale": 1.0, "dtype": dtype}
        for some in (rows, [row for row in rows if row[1] == 1]):
            case = make_case(where, some, **sizes, **FORMS[form])
            for window in (None, 1, 16, 17) if group > 1 else (17,):
                case.check(window=window)
        plain = make_case(where, some, **sizes).run()
        assert (plain - case.run()).abs().max() > 0.1, "changes nothing"


@on_all
@pytest.mark.parametrize("head_dim", [192, 256, 512])
def test_large_heads(head_dim: int, where: Where) -> None:
    rows = [(0, 1), (16, 1), (70, 1), (0, 9), (3, 40)]
    for dtype in where.dtypes:
        for some in (rows, rows[:3]):
            case = make_case(where, some, head_dim=head_dim, dtype=dtype, **FORMS["softcap"])
            case.check()
            case.check(window=17)


@on_all
def test_a_sink_beside_one_visible_key(where: Where) -> None:
    """A weight is known then: a score of s gets 1 / (1 + exp(sink - s)) of its value."""
    sinks = (-1.0, 0.0, 2.0, 100.0)
    make_case(where, [(0, 1), (20, 1), (0, 3)], sinks=sinks).check(window=1)
    case = make_case(where, [(0, 1), (20, 1)], sinks=sinks)
    case.check(window=1)
    first = case.run(window=1)[0].double()
    q, key, value = (x[0].double() for x in (case.queries[0], case.keys[0], case.values[0]))
    for head, sink in enumerate(sinks):
        score = (q[head] @ key[head // 2]).item() * case.scale
        share = 1.0 / (1.0 + math.exp(sink - score))
        torch.testing.assert_close(first[head], share * value[head // 2], atol=1e-5, rtol=1e-4)


@on_all
def test_padded_rows_have_no_sink(where: Where) -> None:
    case = make_case(where, [(9, 1), (0, 1), (3, 6), (0, 2)], sinks=(1.0, 2.0, 3.0, 4.0))
    for row in (1, 3):
        case.metadata.seq_lens[row] = 0
        case.metadata.slot_mapping[row] = 0
        case.metadata.block_table[row] = 2**30
    for window in (None, 3):
        actual, expected = case.run(window=window), case.expected(window=window)
        real = [0, *range(2, 8)]
        torch.testing.assert_close(actual[real].double(), expected[real], atol=2e-5, rtol=2e-5)
        assert not actual.isnan().any()


@on_all
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("window", [17, 64, Chunk(64), Chunk(40)], ids=window_name)
@pytest.mark.parametrize("rows", [[(63, 1), (300, 1), (129, 1)], [(300, 1), (140, 9), (3, 200)]])
def test_blocks_before_the_window_are_not_read(
    rows: list[tuple[int, int]], window: Window, dtype: torch.dtype, where: Where
) -> None:
    if dtype not in where.dtypes:
        pytest.skip(f"{where.backend.name} is not asked for {dtype} on {where.device}")
    for block_size in (16, 64):
        sizes = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 64, "block_size": block_size}
        case = make_case(where, rows, dtype=dtype, windows=(window,), **sizes)
        case.check(window=window)
        before = case.run(window=window)
        case.give_up_unseen(window)
        assert torch.equal(case.run(window=window), before)


@on_all
@pytest.mark.parametrize(
    ("size", "block_size"), [(1, 4), (7, 4), (16, 4), (16, 64), (64, 64), (1000, 64)]
)
def test_chunks(size: int, block_size: int, where: Where) -> None:
    """Queries on, before and after a chunk's edge; prompts that end in the middle of one and that
    go over several, in a mixed step and in one of decodes."""
    chunk = Chunk(size)
    rows = [(0, 1), (15, 1), (16, 1), (63, 1), (64, 1), (130, 1)]
    rows += [(0, 4), (0, 9), (16, 5), (3, 70), (60, 10), (64, 70), (31, 2)]
    for dtype in where.dtypes:
        for some in (rows, rows[:6]):
            sizes = {"windows": (chunk,), "block_size": block_size, "dtype": dtype}
            make_case(where, some, **sizes, num_heads=6).check(window=chunk)
        make_case(where, rows, **sizes, num_heads=6, **FORMS["both"]).check(window=chunk)


@on_all
def test_padded_rows_see_no_chunk(where: Where) -> None:
    case = make_case(where, [(9, 1), (20, 1), (0, 1), (3, 6), (0, 2)])
    for row in (2, 4):
        case.metadata.seq_lens[row] = 0
        case.metadata.slot_mapping[row] = 0
        case.metadata.block_table[row] = 2**30
    actual, expected = case.run(window=Chunk(7)), case.expected(window=Chunk(7))
    real = [0, 1, *range(3, 9)]
    torch.testing.assert_close(actual[real].double(), expected[real], atol=2e-5, rtol=2e-5)
    assert not actual.isnan().any()


@pytest.mark.parametrize("name", EXTRAS)
def test_packages_without_chunks_say_so(name: str) -> None:
    shape = AttentionCase([(0, 1)], windows=(None, Chunk(64))).shape
    shape = replace(shape, device=CUDA, dtype=torch.bfloat16, kv_cache_dtype=torch.bfloat16)
    missing = "windows that are chunks are not supported"
    with pytest.raises(ConfigError, match=f"attention_backend {name}: {missing}") as error:
        make_backends(name, [replace(shape, block_size=256)])
    assert error.value.param == "attention_backend"


@pytest.mark.parametrize("name", EXTRAS)
def test_packages_without_soft_caps_and_sinks_say_so(name: str) -> None:
    shape = AttentionCase([(0, 1)], softcap=CAP, sinks=(0.0,) * 4).shape
    shape = replace(shape, device=CUDA, dtype=torch.bfloat16, kv_cache_dtype=torch.bfloat16)
    missing = "attention sinks and soft caps of scores are not supported"
    with pytest.raises(ConfigError, match=f"attention_backend {name}: {missing}") as error:
        make_backends(name, [replace(shape, block_size=256)])
    assert error.value.param == "attention_backend"


def test_one_row_of_each_kind(where: Where) -> None:
    for rows in ([(0, 1)], [(31, 1)], [(0, 2)], [(0, 33)], [(7, 26)]):
        make_case(where, rows).check()


@pytest.mark.parametrize("with_prefill", [False, True])
def test_padded_rows_see_nothing_and_spoil_nothing(with_prefill: bool, where: Where) -> None:
    rows = [(9, 1), (20, 1), (0, 1)] + ([(3, 6), (0, 2)] if with_prefill else [])
    case = make_case(where, rows)
    case.metadata.seq_lens[2] = 0
    case.metadata.slot_mapping[2] = 0
    case.metadata.block_table[2] = 2**30
    for window in (None, 3):
        actual = case.run(window=window)
        expected = case.expected(window=window)
        others = [token for token in range(actual.shape[0]) if token != 2]
        tolerance = TOLERANCE[where.dtypes[0]]
        torch.testing.assert_close(
            actual[others].double(), expected[others], atol=tolerance, rtol=tolerance
        )
        assert not actual[2].isnan().any()


@pytest.mark.parametrize("num_decodes", [0, 1, 3, 4])
def test_a_step_whose_split_only_the_device_knows(num_decodes: int, where: Where) -> None:
    """A recorded step has rows without tokens, tokens without rows, and no host count of
    decodes."""
    rows = [(9, 1), (20, 1), (0, 1), (35, 1)][:num_decodes] + [(3, 6), (0, 18), (17, 2)]
    case = make_case(where, rows, max_num_seqs=16, max_num_tokens=64)
    real, total, num_rows = case.metadata, case.metadata.num_tokens, len(rows)
    padded_rows, padded_tokens = 12, total + 7

    def padded(tensor: torch.Tensor, size: int, value: int) -> torch.Tensor:
        more = tensor.new_full((size - len(tensor), *tensor.shape[1:]), value)
        return torch.cat((tensor, more))

    case.metadata = dataclasses.replace(
        real,
        query_start_loc=padded(real.query_start_loc, padded_rows + 1, total),
        seq_lens=padded(real.seq_lens, padded_rows, 0),
        block_table=padded(real.block_table, padded_rows, 2**30),
        slot_mapping=padded(real.slot_mapping, padded_tokens, 0),
        num_rows=padded_rows,
        num_tokens=padded_tokens,
        num_decodes=None,
        max_query_len=padded_tokens,
        max_seq_len=64,
    )
    case.queries.append(torch.full_like(case.queries[0][:1], 3.0).repeat(7, 1, 1))
    assert num_rows < padded_rows
    for window in (window for window in (None, 5, Chunk(7)) if window in case.shape.windows):
        actual = case.run(window=window)[:total]
        expected = case.expected(window=window)
        tolerance = TOLERANCE[where.dtypes[0]]
        torch.testing.assert_close(actual.double(), expected, atol=tolerance, rtol=tolerance)


def test_a_step_of_padding_alone(where: Where) -> None:
    case = make_case(where, [(0, 1), (0, 1)])
    case.metadata.seq_lens.zero_()
    case.metadata.slot_mapping.zero_()
    assert torch.equal(case.run(), torch.zeros_like(torch.cat(case.queries)))


def test_one_backend_serves_step_after_step(where: Where) -> None:
    case = make_case(where, [(33, 1), (2, 1), (0, 40), (7, 3)])
    first = case.run(window=None)
    case.run(window=3)
    assert torch.equal(case.run(window=None), first)


@pytest.mark.parametrize("rows", [[(0, 7)], [(3, 1), (20, 1), (5, 9)]])
def test_the_result_goes_where_it_is_wanted(rows: list[tuple[int, int]], where: Where) -> None:
    case = make_case(where, rows)
    expected = case.run()
    case.backend.prepare(case.metadata)
    out = torch.full_like(expected, float("nan"))
    queries = torch.cat(case.queries)
    form = AttentionForm(case.scale)
    got = case.backend.forward(queries, case.cache, case.metadata, form, out=out)
    assert got.data_ptr() == out.data_ptr()
    assert torch.equal(out, expected)


@pytest.mark.parametrize("where", on(CUDA, "triton", "flash_attn"), indirect=True)
@pytest.mark.parametrize("num_decodes", [3, 1])
def test_a_recording_follows_the_lengths(num_decodes: int, where: Where) -> None:
    """A step planned and computed in a CUDA graph is right for the lengths that the replay
    finds."""
    assert "FULL" in where.backend.capabilities.graph_modes
    decodes = [(9, 1), (700, 1), (33, 1)][:num_decodes]
    rows = decodes + [(20, 9), (0, 300)][: 3 - num_decodes]
    case = make_case(where, rows)
    metadata = case.metadata
    full = metadata.seq_lens.clone()
    windows = [window for window in (None, 17, Chunk(16)) if window in case.shape.windows]
    expected = {window: case.expected(window=window) for window in windows}
    for window in expected:
        metadata.seq_lens.copy_(metadata.query_start_loc.diff())  # no context yet
        case.run(window=window)  # compiles, which cannot be recorded
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            actual = case.run(window=window)
        metadata.seq_lens.copy_(full)
        graph.replay()
        tolerance = TOLERANCE[where.dtypes[0]]
        torch.testing.assert_close(
            actual.double(), expected[window], atol=tolerance, rtol=tolerance
        )


def test_registry_names_are_the_settings_choices() -> None:
    assert tuple(BACKENDS) == ATTENTION_BACKENDS


def test_a_cpu_gets_its_own_kernels_or_the_reference() -> None:
    shape = AttentionCase([(0, 1)]).shape
    (backend,), (settled,), passed_over = make_backends(None, [shape])
    assert backend.name == "native" and "need a CUDA device" in passed_over
    assert settled == shape
    _, (settled,), _ = make_backends(None, [replace(shape, block_size=None)])
    assert settled == replace(shape, block_size=16)
    with pytest.raises(ConfigError, match="attention_backend triton: .*; torch_reference runs"):
        make_backends("triton", [shape])
    half = replace(shape, dtype=torch.bfloat16, kv_cache_dtype=torch.bfloat16)
    for other in (half, replace(shape, head_dim=72), replace(shape, kv_cache_dtype=FP8)):
        assert why_not("native", other)
        assert make_backends(None, [other])[0][0].name == "torch_reference"


def test_a_cpu_without_llvm_gets_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = AttentionCase([(0, 1)]).shape
    monkeypatch.setattr("termgen.engine.device.native.find_spec", lambda name: None)
    assert make_backends(None, [shape])[0][0].name == "torch_reference"
    with pytest.raises(ConfigError, match="native: the package llvmlite is not installed"):
        make_backends("native", [shape])


def test_an_old_processor_gets_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = AttentionCase([(0, 1)]).shape
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    assert make_backends(None, [shape])[0][0].name == "torch_reference"
    with pytest.raises(ConfigError, match="native: the processor has no AVX2"):
        make_backends("native", [shape])


def test_an_fp8_cache_is_refused_where_only_a_slow_backend_reads_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    triton_device.require_triton()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    shape = AttentionCase([(0, 1)], kv_cache_dtype=FP8).shape
    ampere = dataclasses.replace(shape, device=CUDA)
    needs = "8-bit floats need compute capability 8.9, and NVIDIA A100 has 8.0"
    with pytest.raises(ConfigError, match=f"kv_cache_dtype fp8: .*{needs}; use .* auto") as error:
        make_backends(None, [ampere])
    assert error.value.param == "kv_cache_dtype"
    with pytest.raises(ConfigError, match=f"attention_backend triton: .*{needs}"):
        make_backends("triton", [ampere])
    assert make_backends("torch_reference", [ampere])[0][0].name == "torch_reference"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    assert why_not("triton", ampere) == ""
    assert make_backends(None, [shape])[0][0].name == "torch_reference"  # a CPU


@pytest.mark.gpu
def test_a_gpu_gets_triton_unless_the_heads_are_too_large() -> None:
    shape = AttentionCase([(0, 1)], device=CUDA).shape
    assert make_backends(None, [shape])[0][0].name == "triton"
    assert make_backends(None, [replace(shape, block_size=None)])[1][0].block_size == 64
    assert make_backends(None, [replace(shape, head_dim=512)])[0][0].name == "triton"
    large = AttentionCase([(0, 1)], device=CUDA, head_dim=520).shape
    (backend,), _, passed_over = make_backends(None, [large])
    assert backend.name == "torch_reference" and "heads of size 520" in passed_over
    with pytest.raises(ConfigError, match="heads of size 520"):
        make_backends("triton", [large])
