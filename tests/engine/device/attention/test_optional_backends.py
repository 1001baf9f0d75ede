"""FlashInfer and FlashAttention: when they are chosen, and the errors where they cannot run."""

from __future__ import annotations

import dataclasses
import inspect
import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

import pytest
import stand_ins
import torch
from attention_case import AttentionCase

from termgen.config import EngineConfig
from termgen.engine.device.attention.base import AttentionForm, AttentionShape, kv_cache_view
from termgen.engine.device.attention.registry import EXTRAS, backend_class, make_backends, why_not
from termgen.engine.device.kernels.kv_cache import SCALED
from termgen.engine.device.runner.build import choose_graphs
from termgen.engine.device.runner.resolve import Limits
from termgen.errors import ConfigError

EXTRA = [("flashinfer", "flashinfer"), ("flash_attn", "flash-attn")]


def cuda_shape(**changes: object) -> AttentionShape:
    """A shape that both packages run, on a device that need not exist."""
    usual = {"device": torch.device("cuda"), "dtype": torch.bfloat16, "block_size": 256}
    usual["kv_cache_dtype"] = torch.bfloat16
    return dataclasses.replace(AttentionCase([(0, 1)]).shape, **{**usual, **changes})


def without(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(
        "termgen.engine.device.attention.registry.find_spec",
        lambda package: None if package == name else find_spec(package),
    )


def with_capability(monkeypatch: pytest.MonkeyPatch, *capability: int) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)


@pytest.mark.parametrize(("name", "extra"), EXTRA)
def test_a_missing_package_names_its_extra_and_the_fallback(
    name: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    without(monkeypatch, name)
    with pytest.raises(ConfigError) as caught:
        make_backends(name, [cuda_shape()])
    assert caught.value.param == "attention_backend"
    message = str(caught.value)
    assert f"pip install 'termgen[{extra}]'" in message and "torch_reference runs" in message
    assert "\n" not in message


def test_extras_are_the_ones_of_the_package_itself() -> None:
    import tomllib
    from pathlib import Path

    text = (Path(__file__).parents[4] / "pyproject.toml").read_text()
    extras = tomllib.loads(text)["project"]["optional-dependencies"]
    assert set(EXTRAS.values()) <= set(extras)


@pytest.mark.parametrize("name", EXTRAS)
def test_what_cannot_run_is_refused_before_the_package_is_looked_for(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    without(monkeypatch, name)
    assert why_not(name, cuda_shape(device=torch.device("cpu"))) == "it runs on cuda, not cpu"
    assert "not float32" in why_not(name, cuda_shape(dtype=torch.float32))
    assert "heads of size 260" in why_not(name, cuda_shape(head_dim=260))


@pytest.mark.parametrize("kind", SCALED)
@pytest.mark.parametrize("name", EXTRAS)
def test_a_cache_of_integers_is_refused_by_its_name(
    name: str, kind: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even where the package is installed: it would read the numbers without their scales."""
    stand_ins.install(monkeypatch, name)
    with_capability(monkeypatch, 9, 0)
    shape = cuda_shape(kv_cache_dtype=kind)
    with pytest.raises(ConfigError) as error:
        make_backends(name, [shape])
    assert str(error.value) == (
        f"attention_backend {name}: a KV cache of {SCALED[kind]} is not supported; "
        "torch_reference runs everywhere"
    )
    assert error.value.param == "attention_backend"
    monkeypatch.setattr("termgen.engine.device.attention.registry.why_unusable", no_reason)
    assert why_not("triton", shape) == "", "the default reads it"


def no_reason(device: torch.device, *, dtype: torch.dtype | None = None) -> str:
    return ""


def test_flash_attn_says_which_block_size_it_needs() -> None:
    assert why_not("flash_attn", cuda_shape(block_size=16)) == "block_size must be 256"


@pytest.mark.parametrize("name", EXTRAS)
def test_an_old_gpu_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_ins.install(monkeypatch, name)
    with_capability(monkeypatch, 7, 5)
    assert why_not(name, cuda_shape()) == "it needs compute capability 8.0, not 7.5"
    with_capability(monkeypatch, 9, 0)
    assert why_not(name, cuda_shape()) == ""


def test_installed_packages_are_no_default(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in EXTRAS:
        stand_ins.install(monkeypatch, name)
    with_capability(monkeypatch, 9, 0)
    without(monkeypatch, "triton")
    monkeypatch.setattr(
        "termgen.engine.device.attention.registry.why_unusable",
        lambda device, dtype: "no kernels here",
    )
    assert make_backends(None, [cuda_shape()])[0][0].name == "torch_reference"


@pytest.mark.parametrize("name", EXTRAS)
def test_a_package_that_does_not_load_is_the_users_to_mend(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = ModuleType(name)  # installed, but without this function
    broken.__spec__ = ModuleSpec(name, None)
    monkeypatch.setitem(sys.modules, name, broken)
    with_capability(monkeypatch, 9, 0)
    with pytest.raises(ConfigError, match=f"attention_backend {name}: the package does not load"):
        make_backends(name, [cuda_shape()])


def test_kernels_that_do_not_compile_are_the_users_to_mend(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stand_ins.install(monkeypatch, "flashinfer")

    def plan(*args: object, **kwargs: object) -> None:
        raise RuntimeError("Could not find nvcc\nmore lines")

    monkeypatch.setattr(stand_ins.PrefillWrapper, "plan", plan)
    with pytest.raises(ConfigError, match=r"\(Could not find nvcc\); they need nvcc and ninja"):
        backend_class("flashinfer")(cuda_shape(device=torch.device("cpu")))


def test_flashinfer_plans_once_for_all_layers_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_ins.install(monkeypatch, "flashinfer")
    plans: list[tuple[int, int]] = []
    real = stand_ins.PrefillWrapper.plan

    def plan(self: stand_ins.PrefillWrapper, *args: object, **kwargs: object) -> None:
        bound = inspect.signature(real).bind(self, *args, **kwargs).arguments
        plans.append((len(bound["qo_indptr"]) - 1, bound["window_left"]))
        real(self, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(stand_ins.PrefillWrapper, "plan", plan)
    case = AttentionCase(
        [(9, 1), (4, 1), (0, 3)], backend=backend_class("flashinfer"), windows=(None, 5)
    )
    compiled = len(plans)
    assert sorted(set(plans)) == [(1, -1), (1, 4)] and compiled == 4
    case.backend.prepare(case.metadata)
    for window in (None, 5, None, 5):
        case.backend.forward(
            torch.cat(case.queries), case.cache, case.metadata, AttentionForm(0.1, window)
        )
    assert sorted(plans[compiled:]) == [(1, -1), (1, 4), (2, -1), (2, 4)]
    case.check()
    assert len(plans) == compiled + 6


@pytest.mark.parametrize("name", EXTRAS)
def test_the_cache_lies_as_the_package_reads_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pages = torch.empty(3, 2 * 8 * 2 * 64)
    cache = kv_cache_view(backend_class(name), pages, block_size=8, num_kv_heads=2, head_dim=64)
    assert cache.shape == (3, 8, 2, 2, 64)
    assert cache.permute(0, 2, 3, 1, 4).is_contiguous()


def test_only_what_reads_its_lengths_on_the_device_is_recorded() -> None:
    limits = Limits(max_model_len=128, max_num_seqs=4, max_num_batched_tokens=64)

    def sizes(name: str) -> bool:
        graphs = choose_graphs(
            EngineConfig(),
            limits,
            device_type="cuda",
            attention=backend_class(name),
            model=None,
        )
        return bool(graphs.sizes)

    assert sizes("flash_attn") and not sizes("flashinfer")
