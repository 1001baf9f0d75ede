"""A model's shapes, their measurement, and the runner that uses what was found."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from termgen.config import EngineConfig
from termgen.engine.device.attention.groups import GroupedAttention
from termgen.engine.device.attention.torch_reference import TorchReferenceAttention
from termgen.engine.device.config.model_config import ModelConfig
from termgen.engine.device.kernels.gemm.candidates import Found, Gpu, candidates_by_rows
from termgen.engine.device.kernels.gemm.small_gemm_config import (
    GROUP_BANDS,
    MAX_ROWS,
    ROW_BANDS,
    Shape,
    SmallGemmConfig,
    Weights,
    band_of,
)
from termgen.engine.device.kernels.gemm.tuned_tables import TunedTables
from termgen.engine.device.layers.linear import Linear, VocabEmbedding
from termgen.engine.device.layers.ops import TorchOps
from termgen.engine.device.loader import load_model_config
from termgen.engine.device.loader.weights import load_dummy
from termgen.engine.device.models import registry
from termgen.engine.device.runner import build, tuning
from termgen.engine.device.runner.tuning import (
    linear_shapes,
    make_tables,
    plan,
    shapes_of,
    tune_shape,
)
from termgen.errors import ConfigError, EngineError, UnsupportedModelError
from termgen.library.catalog import tuned_folder

HOPPER = Gpu("Made-up GPU", (9, 0), 132, 50 << 20, 227 * 1024)
TinyModelDir = Callable[..., Path]
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 1024,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 1024,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
}
LLAMA_SHAPES = [Shape(1024, 512), Shape(512, 512), Shape(2048, 512), Shape(512, 1024)]
"""Those of q/k/v and the head, which are alike; output projection; gate and up; down."""


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERMGEN_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def made_up(tmp_path: Path) -> Path:
    """A model without weights."""
    folder = tmp_path / "made-up"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    return folder


def config_for(folder: Path, **options: Any) -> EngineConfig:
    fixed: dict[str, Any] = {"load_format": "dummy", "skip_tokenizer_init": True}
    fixed |= {"max_model_len": 256, "max_num_seqs": 8, "kv_cache_gib": 0.05}
    return EngineConfig(model=str(folder), **fixed, **options)


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("llama", [(128, 64), (64, 64), (224, 64), (64, 112), (512, 64)]),
        ("mistral", [(128, 64), (64, 64), (224, 64), (64, 112), (512, 64)]),
        ("qwen2", [(128, 64), (64, 64), (224, 64), (64, 112), (512, 64)]),
        ("qwen3", [(256, 64), (64, 128), (224, 64), (64, 112), (512, 64)]),
        ("gemma3_text", [(256, 64), (64, 128), (224, 64), (64, 112), (512, 64)]),
        ("qwen3_moe", [(256, 64), (64, 128), (8, 64), (512, 64)]),
        ("mixtral", [(128, 64), (64, 64), (4, 64), (512, 64)]),
    ],
)
def test_the_shapes_of_a_family(
    family: str, expected: list[tuple[int, int]], tiny_model_dir: TinyModelDir
) -> None:
    """Experts have kernels of their own: of them only the router is a linear layer."""
    assert shapes_of(load_model_config(tiny_model_dir(family))) == [Shape(*one) for one in expected]


@pytest.mark.parametrize("quantization", [None, "int8", "q4", "fp8"])
def test_the_shapes_need_no_memory(
    quantization: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "why_unusable", lambda *_, **__: "")
    large = LLAMA | {"num_hidden_layers": 400, "hidden_size": 16384, "intermediate_size": 65536}
    shapes = shapes_of(ModelConfig.from_hf(large), quantization)
    assert (131072, 16384) in {shape[:2] for shape in shapes}, "1.3 TB of weights"


def test_the_shapes_of_a_loaded_model_are_the_same(tiny_llama_dir: Path) -> None:
    config = EngineConfig(model=str(tiny_llama_dir), device="cpu", max_model_len=64)
    runner, info = build.build_runner(config, tiny_llama_dir, lambda phase, share: None)
    assert linear_shapes(runner.model) == shapes_of(runner.config)
    assert info.num_untuned == 0, "a CPU has nothing to measure"


def test_a_width_that_no_kernel_can_load_is_left_out() -> None:
    odd = LLAMA | {"intermediate_size": 1000}
    assert Shape(512, 1000) not in shapes_of(ModelConfig.from_hf(odd))


def test_a_model_of_transformers_has_no_shapes() -> None:
    config = SimpleNamespace(transformers=object(), architecture="FooForCausalLM")
    with pytest.raises(UnsupportedModelError, match="FooForCausalLM runs through transformers"):
        shapes_of(config)  # type: ignore[arg-type]


def made_up_times(
    best: dict[int, SmallGemmConfig | None],
) -> tuple[tuning.Measure, list[tuple[int, SmallGemmConfig | None]]]:
    """A measurement in which these are the fastest for their rows, and what it was asked for."""
    asked: list[tuple[int, SmallGemmConfig | None]] = []

    def measure(shape: Shape, tried: dict[int, list[SmallGemmConfig]]) -> Any:
        n, k, weights = shape
        assert tried == candidates_by_rows(n, k, HOPPER, weights)

        def timer_for(rows: int) -> tuning.Timer:
            def seconds(config: SmallGemmConfig | None) -> float:
                asked.append((rows, config))
                if config is None:
                    return 5e-6
                return 3e-6 if config == best[rows] else 7e-6

            return seconds

        return timer_for

    return measure, asked


def test_a_shape_is_measured_and_kept() -> None:
    n, k = 4096, 1024
    tried = candidates_by_rows(n, k, HOPPER)
    best = {rows: configs[-1] if rows != 64 else None for rows, configs in tried.items()}
    measure, asked = made_up_times(best)
    tables = TunedTables(tuned_folder(), HOPPER)
    assert tables.get(n, k) is None
    done = tune_shape(Shape(n, k), tables, measure)
    assert {rows: found.choice for rows, found in done.found.items()} == best
    assert {rows: found.chosen_seconds for rows, found in done.found.items()} == {
        rows: 5e-6 if rows == 64 else 3e-6 for rows in ROW_BANDS
    }
    assert set(asked) >= {(rows, c) for rows, configs in tried.items() for c in [None, *configs]}
    assert tables.get(n, k) == best
    assert TunedTables(tuned_folder(), HOPPER).get(n, k) == best, "from its file"


def pretend_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda:0")
    monkeypatch.setattr(tuning, "resolve_device", lambda name: cuda)
    monkeypatch.setattr(tuning, "why_unusable", lambda device: "")
    monkeypatch.setattr(Gpu, "of", classmethod(lambda cls, device: HOPPER))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))


def test_only_what_is_missing_is_measured(made_up: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_a_gpu(monkeypatch)
    none_best = dict.fromkeys(ROW_BANDS)
    monkeypatch.setattr(tuning, "measure_on", lambda device, gpu: made_up_times(none_best)[0])
    found = plan(made_up)
    assert found.shapes == found.missing == LLAMA_SHAPES
    first = next(found.run())
    assert first.shape == LLAMA_SHAPES[0], "kept before the next one is measured"
    assert plan(made_up).missing == LLAMA_SHAPES[1:]
    assert [done.shape for done in plan(made_up).run()] == LLAMA_SHAPES[1:]
    assert plan(made_up).missing == [] and plan(made_up, again=True).missing == LLAMA_SHAPES


def test_a_full_gpu_is_a_sentence(made_up: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_a_gpu(monkeypatch)

    def measure_on(device: torch.device, gpu: Gpu) -> tuning.Measure:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")

    monkeypatch.setattr(tuning, "measure_on", measure_on)
    with pytest.raises(EngineError, match="too little free memory"):
        list(plan(made_up).run())


def test_there_must_be_a_gpu(made_up: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "resolve_device", lambda name: torch.device("cpu"))
    with pytest.raises(ConfigError, match="measures on an NVIDIA GPU, and this torch"):
        plan(made_up)
    monkeypatch.setattr(tuning, "resolve_device", lambda name: torch.device("cuda:0"))
    monkeypatch.setattr(tuning, "why_unusable", lambda device: "need compute capability 8.0")
    with pytest.raises(ConfigError, match="nothing to measure here: need compute capability 8.0"):
        plan(made_up)


def test_a_start_reports_what_was_measured(
    made_up: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    tables = TunedTables(tuned_folder(), HOPPER)
    tune_shape(LLAMA_SHAPES[0], tables, made_up_times(dict.fromkeys(ROW_BANDS))[0])
    config = EngineConfig(
        model=str(made_up), load_format="dummy", device="cpu", max_model_len=64, dtype="bfloat16"
    )
    runner, _ = build.build_runner(config, made_up, lambda phase, share: None)
    monkeypatch.setattr(tuning, "can_choose", lambda k, dtype, device: dtype == torch.bfloat16)
    assert tuning.report_tuned(runner.model, torch.bfloat16, tables) == 3
    assert "1 of 4 shapes were measured on this GPU" in caplog.text
    assert tuning.report_tuned(runner.model, torch.float32, tables) == 0
    assert tuning.report_tuned(runner.model, torch.bfloat16, None) == 0


def test_a_start_counts_the_shapes_of_quantised_weights(
    made_up: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Those that the loaded model multiplies, in its forms; and a plan has them, too."""
    pytest.importorskip("triton", reason="triton is not installed")
    from termgen.engine.device.quantization.int8_groups import GroupLinears

    caplog.set_level(logging.INFO)
    pretend_a_gpu(monkeypatch)
    monkeypatch.setattr(registry, "why_unusable", lambda *_, **__: "")
    config = load_model_config(made_up)
    groups = GroupLinears()
    made = registry.make_planned_build(
        config, quantization="q4", device=torch.device("cuda"), ops=TorchOps()
    )
    made = replace(made, device=torch.device("cpu"), method=groups.in_4_bits, table_method=groups)
    attention = GroupedAttention.without_windows(TorchReferenceAttention(), config.layer_caches)
    model = registry.make_model(config, made, attention)
    load_dummy(model, 0)
    model.finalize()
    shapes = [shape._replace(weights="int4") for shape in LLAMA_SHAPES]
    shapes.append(Shape(1024, 512, "int8"))  # the head
    found = plan(made_up, quantization="q4")
    assert sorted(found.shapes) == sorted(linear_shapes(model)) == sorted(shapes)
    monkeypatch.setattr(tuning, "can_choose", lambda k, dtype, device: True)
    none_best: dict[int, SmallGemmConfig | None] = dict.fromkeys(GROUP_BANDS)
    tune_shape(shapes[1], found.tables, made_up_times(none_best)[0])
    tune_shape(LLAMA_SHAPES[2], found.tables, made_up_times(dict.fromkeys(ROW_BANDS))[0])
    assert tuning.report_tuned(model, torch.bfloat16, found.tables) == 4
    assert "1 of 5 shapes were measured on this GPU" in caplog.text
    assert set(plan(made_up, quantization="q4").missing) == {*shapes} - {shapes[1]}
    measure, _ = made_up_times(none_best)
    monkeypatch.setattr(tuning, "measure_on", lambda device, gpu: measure)
    assert len(list(plan(made_up, quantization="q4").run())) == 4
    assert tuning.report_tuned(model, torch.bfloat16, make_tables(torch.device("cuda"))) == 0


# On a GPU.


def linears_of(runner: Any) -> list[Linear]:
    return [module for module in runner.model.modules() if isinstance(module, Linear)]


def check_products(linear: Linear) -> None:
    weight = linear.method.weight  # type: ignore[attr-defined]
    for rows in (1, 2, 3, 8, 11, 16, 32, 33, MAX_ROWS, MAX_ROWS + 1):
        x = torch.randn(rows, linear.in_features, dtype=weight.dtype, device=weight.device)
        expected = F.linear(x.float(), weight.float())
        error = (linear(x).float() - expected).abs().max() / expected.abs().max()
        assert error < 1e-2, (rows, linear.out_features, linear.in_features, float(error))


@pytest.mark.gpu
def test_a_runner_uses_what_was_measured(made_up: Path) -> None:
    device = torch.device("cuda:0")
    config = config_for(made_up, device="cuda", enforce_eager=True)
    _, before = build.build_runner(config, made_up, lambda phase, share: None)
    assert before.num_untuned == len(LLAMA_SHAPES)
    done = list(plan(made_up).run())
    assert [one.shape for one in done] == LLAMA_SHAPES
    for one in done:
        for rows, found in one.found.items():
            print(one.shape, rows, found)
            assert 0 < found.library_seconds < 1e-3 and 0 < found.seconds < 1e-3
    runner, info = build.build_runner(config, made_up, lambda phase, share: None)
    assert info.num_untuned == 0
    tables = tuning.make_tables(device)
    assert tables is not None
    for linear in linears_of(runner):
        by_rows = tables.get(linear.out_features, linear.in_features)
        assert by_rows is not None
        used = linear.method._configs  # type: ignore[attr-defined]
        for rows in range(1, MAX_ROWS + 1):
            assert used.get(rows) == by_rows[band_of(rows)]
        check_products(linear)


@pytest.mark.gpu
def test_every_candidate_that_a_file_may_name_is_right(made_up: Path) -> None:
    """Whatever a measurement finds, a runner computes the same: here each candidate in turn."""
    device = torch.device("cuda:0")
    gpu = Gpu.of(device)
    tables = TunedTables(tuned_folder(), gpu)
    tried = {shape: candidates_by_rows(*shape[:2], gpu) for shape in LLAMA_SHAPES}
    most = max(len(configs) for by_rows in tried.values() for configs in by_rows.values())
    for place in range(0, most, 3):
        for (n, k, _), by_rows in tried.items():
            chosen = {rows: configs[place % len(configs)] for rows, configs in by_rows.items()}
            tables.write(n, k, {rows: Found(c, 1e-6, 2e-6) for rows, c in chosen.items()})
        config = config_for(made_up, device="cuda", enforce_eager=True)
        runner, info = build.build_runner(config, made_up, lambda phase, share: None)
        assert info.num_untuned == 0
        for linear in linears_of(runner)[:4]:
            check_products(linear)


@pytest.mark.gpu
def test_a_candidate_that_is_wrong_or_cannot_run_is_not_timed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from triton.runtime.errors import OutOfResources

    from termgen.engine.device.kernels.gemm import timed_weights, timing

    device = torch.device("cuda:0")
    gpu = Gpu.of(device)
    right, wrong, large = candidates_by_rows(1024, 512, gpu)[1][:3]
    real = timed_weights.small_gemm

    def small_gemm(x: torch.Tensor, weight: torch.Tensor, **options: Any) -> torch.Tensor:
        if options["config"] == large:
            raise OutOfResources(300_000, 200_000, "shared memory")
        out = real(x, weight, **options)
        return out.mul_(1.5) if options["config"] == wrong else out

    monkeypatch.setattr(timed_weights, "small_gemm", small_gemm)
    time = timing.Products(Shape(1024, 512), gpu, device).timer(1, [right, wrong, large])
    assert 0 < time(right) < 1e-3 and 0 < time(None) < 1e-3
    assert time(wrong) == time(large) == math.inf
    assert "is wrong for 1 rows" in caplog.text and "cannot run" in caplog.text


@pytest.mark.gpu
@pytest.mark.parametrize("quantization", ["int8", "q4", "fp8"])
def test_a_runner_of_quantised_weights_uses_what_was_measured(
    made_up: Path, quantization: str
) -> None:
    device = torch.device("cuda:0")
    config = config_for(made_up, device="cuda", enforce_eager=True, quantization=quantization)
    shapes = plan(made_up, quantization=quantization).shapes
    _, before = build.build_runner(config, made_up, lambda phase, share: None)
    assert before.num_untuned == len(shapes)
    assert {shape.weights for shape in shapes} == {
        "int8": {"int8"},
        "q4": {"int4", "int8"},
        "fp8": {"fp8", "half"},
    }[quantization]
    for one in plan(made_up, quantization=quantization).run():
        for rows, found in one.found.items():
            print(one.shape, rows, found)
            assert 0 < found.library_seconds < 1e-3 and 0 < found.seconds < 1e-3
    runner, info = build.build_runner(config, made_up, lambda phase, share: None)
    assert info.num_untuned == 0
    tables = make_tables(device)
    assert tables is not None
    for linear in linears_of(runner):
        method: Any = linear.method
        if isinstance(linear, VocabEmbedding):
            continue
        if [shape.weights for shape in method.shapes()] == ["half"]:
            check_products(linear)
            continue
        used = [run.configs for run in getattr(method, "_runs", [])] or [method._configs]
        assert used == [tables.get(*shape) for shape in method.shapes()]
        weight = method.embed(torch.arange(linear.out_features, device=device)).double()
        for rows in (1, 2, 3, 8, 16, 33, 64, 65, 128, 129):
            x = torch.randn(rows, linear.in_features, dtype=torch.bfloat16, device=device)
            expected = x.double() @ weight.T
            error = (linear(x).double() - expected).abs().max() / expected.abs().max()
            assert error < 1e-2, (rows, linear.out_features, linear.in_features, float(error))


@pytest.mark.gpu
@pytest.mark.parametrize("weights", ["int8", "int4", "fp8", "fp8-blocks"])
@pytest.mark.parametrize(("n", "k"), [(1024, 512), (33 * 16, 1120), (4096, 4096)])
def test_every_candidate_for_quantised_weights_is_right(
    weights: Weights, n: int, k: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Each is checked before it is timed. What a GPU cannot run is left out, but never what is used
    without a measurement."""
    from termgen.engine.device.kernels.gemm.float8_config import float8_cut
    from termgen.engine.device.kernels.gemm.timing import Products

    device = torch.device("cuda:0")
    gpu = Gpu.of(device)
    tried = candidates_by_rows(n, k, gpu, weights)
    products = Products(Shape(n, k, weights), gpu, device)
    products.compile({config for configs in tried.values() for config in configs})
    for rows, configs in tried.items():
        timer = products.timer(rows, configs)
        times = {config: timer(config) for config in configs}
        is_group = weights in ("int8", "int4")
        usual = configs[0] if is_group else float8_cut(rows, n, k, gpu.capability == (9, 0))
        fastest = min(times.values())
        print(weights, n, k, rows, usual, times[usual], fastest, timer(None))
        assert 0 < fastest <= times[usual] < 1e-3
    assert "is wrong" not in caplog.text
