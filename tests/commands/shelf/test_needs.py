"""What a model needs on a machine, and which is the best for it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from termgen.commands.shelf.model_facts import OF_TRANSFORMERS, ModelFacts
from termgen.commands.shelf.needs import Machine, mark_best, mark_best_file
from termgen.config import EngineConfig
from termgen.vocabulary.model_shelf import ModelChoice, Needs

GB = 10**9
FACTS = ModelFacts(
    num_parameters=8 * GB,
    active_share=0.75,
    four_bit_share=0.5,
    is_in_blocks=True,
    kv_layers=((16, 128, 0),) * 10,
    context=8192,
)


def machine(device: str = "cpu", **config: object) -> Machine:
    settings = EngineConfig(**config)  # type: ignore[arg-type]
    return Machine(settings, device, 20 * GB, working_bytes=GB // 10, bytes_per_s=30 * GB)


def test_the_parts_add_up() -> None:
    needs = machine().needs(FACTS, Path("m-Q4_K_M.gguf"), 5 * GB)
    assert needs.weights_bytes == 8 * GB * (0.5 * 5 + 0.5 * 9) / 8 == 7 * GB
    assert needs.held_as == "int8" and needs.context == 8192
    assert needs.kv_bytes == 10 * 2048 * 8192 * 4, "32-bit floats on a CPU"
    assert needs.working_bytes == int(0.7 * GB), "a tenth of the weights, as that is more"
    assert needs.total_bytes == needs.weights_bytes + needs.kv_bytes + needs.working_bytes
    assert needs.tokens_per_s == pytest.approx(30 * GB / (7 * GB * 0.75))
    assert needs.fits
    assert not replace(needs, room_bytes=7 * GB).fits
    assert replace(needs, room_bytes=None).fits is None


@pytest.mark.parametrize(
    ("device", "config", "weights", "kv"),
    [
        ("cpu", {}, 7.0, 4),
        ("cpu", {"dtype": "bfloat16"}, 16.0, 2),
        ("cpu", {"quantization": "none"}, 32.0, 4),
        ("cuda:0", {}, 7.0, 2),
        ("cuda:0", {"kv_cache_dtype": "fp8"}, 7.0, 1),
        ("cuda:0", {"kv_cache_dtype": "fp8_e4m3"}, 7.0, 1),
        ("cuda:0", {"kv_cache_dtype": "int8"}, 7.0, 130 / 128),
        ("cuda:0", {"kv_cache_dtype": "int4"}, 7.0, 68 / 128),
        ("cuda:0", {"quantization": "q4"}, 5.5, 2),
        ("cuda:0", {"quantization": "none"}, 16.0, 2),
    ],
)
def test_settings_count(device: str, config: dict[str, str], weights: float, kv: float) -> None:
    needs = machine(device, **config).needs(FACTS, Path("m.gguf"), 5 * GB)
    assert needs.weights_bytes == int(weights * GB)
    assert needs.kv_bytes == 10 * 2048 * 8192 * kv


@pytest.mark.parametrize(
    ("device", "has_float8", "config", "held_as", "weights"),
    [
        ("cuda:0", True, {}, "fp8", 8 * 0.9 + 16 * 0.1),
        ("cuda:0", False, {}, "16-bit floats", 16),
        ("cuda:0", True, {"dtype": "bfloat16"}, "16-bit floats", 16),
        ("cuda:0", True, {"quantization": "none"}, "16-bit floats", 16),
        ("cuda:0", True, {"quantization": "int8"}, "int8", 9),
        ("cpu", False, {}, "int8", 9),
    ],
)
def test_8_bit_floats_stay_so_where_a_gpu_has_them(
    device: str, has_float8: bool, config: dict[str, str], held_as: str, weights: float
) -> None:
    facts = replace(FACTS, is_in_blocks=False, four_bit_share=0, layers_share=0.9, are_float8=True)
    one = replace(machine(device, **config), has_float8=has_float8)
    needs = one.needs(facts, Path("folder"), 5 * GB)
    assert needs.held_as == held_as and needs.weights_bytes == int(8 * GB * weights / 8)
    asked = replace(machine("cuda:0", quantization="fp8"), has_float8=True)
    plain = asked.needs(replace(facts, are_float8=False), Path("folder"), 5 * GB)
    assert plain.held_as == "fp8" and plain.weights_bytes == int(GB * (8 * 0.9 + 16 * 0.1))
    assert asked.needs(None, None, 16).weights_bytes == 9


def test_a_cpu_rounds_some_4_bits_to_8() -> None:
    facts = replace(FACTS, four_bit_share=0.9, is_rounded_on_cpu=True)
    bits = {
        device: machine(device).needs(facts, Path("folder"), 5 * GB).weights_bytes * 8 / (8 * GB)
        for device in ("cpu", "cuda:0")
    }
    assert bits == {"cpu": 9, "cuda:0": pytest.approx(0.9 * 5 + 0.1 * 9)}


def test_a_cpu_keeps_6_bits() -> None:
    facts = replace(FACTS, four_bit_share=0.6, six_bit_share=0.3)
    bits = {
        device: machine(device).needs(facts, Path("m.gguf"), 5 * GB).weights_bytes * 8 / (8 * GB)
        for device in ("cpu", "cuda:0")
    }
    assert bits == {
        "cpu": pytest.approx(0.6 * 5 + 0.3 * 7 + 0.1 * 9),
        "cuda:0": pytest.approx(0.6 * 5 + 0.4 * 9),
    }


def test_a_shorter_context_and_no_facts() -> None:
    needs = machine(max_model_len=100).needs(FACTS, Path("m.gguf"), 5 * GB)
    assert needs.context == 100 and needs.kv_bytes == 10 * 2048 * 100 * 4
    unknown = machine().needs(None, Path("m-Q8_0.gguf"), 860)
    assert (unknown.weights_bytes, unknown.kv_bytes, unknown.context) == (900, 0, 0)
    assert replace(machine(), bytes_per_s=None).needs(FACTS, None, GB).tokens_per_s is None
    assert machine().needs(None, None, 0).tokens_per_s is None


@pytest.mark.parametrize(
    ("device", "config", "held_as", "weights"),
    [
        ("cpu", {}, "float32", 10 * GB),
        ("cpu", {"dtype": "bfloat16"}, "16-bit floats", 5 * GB),
        ("cuda:0", {}, "16-bit floats", 5 * GB),
        ("cuda:0", {"dtype": "float32"}, "float32", 10 * GB),
    ],
)
def test_what_the_code_of_transformers_runs_stays_floats(
    device: str, config: dict[str, str], held_as: str, weights: int
) -> None:
    for facts in (None, ModelFacts(note=OF_TRANSFORMERS)):
        needs = machine(device, **config).needs(facts, None, 5 * GB, of_transformers=True)
        assert (needs.held_as, needs.weights_bytes) == (held_as, weights)
    assert machine().needs(None, None, 5 * GB).held_as == "int8"


def choice(
    name: str,
    billions: float,
    rate: float,
    *,
    size: float = 1,
    here: bool = True,
    fits: bool = True,
) -> ModelChoice:
    needs = Needs(weights_bytes=GB, room_bytes=2 * GB if fits else 1, tokens_per_s=rate)
    return ModelChoice(
        name, "", int(size * GB), is_here=here, needs=needs, num_weights=int(billions * GB)
    )


def best(*choices: ModelChoice) -> list[str]:
    return [c.name for c in mark_best(choices) if c.is_best]


def test_the_best_is_the_largest_that_is_quick_enough_and_fits() -> None:
    small, good = choice("small", 0.1, 200), choice("good", 4, 12)
    slow, huge = choice("slow", 8, 9.9), choice("huge", 70, 50, fits=False)
    assert best(small, good, slow, huge) == ["good"]
    assert best(slow, huge) == []
    assert best(small, replace(good, problem="why")) == ["small"]
    assert best(small, replace(good, is_base=True)) == ["small"]
    assert best(small, replace(good, needs=None)) == ["small"]
    assert best(choice("16 bit", 4, 12, size=8), choice("q4", 4.0001, 30, size=2.5)) == ["q4"]


def test_one_to_fetch_is_marked_only_if_it_is_larger() -> None:
    small, good = choice("small", 0.1, 200), choice("good", 4, 12, here=False)
    assert best(small, good) == ["small", "good"]
    assert best(choice("same", 4, 12), good) == ["same"]
    assert best(good) == ["good"]
    unknown = replace(small, needs=Needs(weights_bytes=GB))
    assert best(unknown) == [], "where the memory or its rate is not known, none is"


def test_the_best_file_of_one_model() -> None:
    def best_of(*files: ModelChoice) -> list[str]:
        return [c.name for c in mark_best_file(files) if c.is_best]

    q4, q8 = choice("m-Q4_K_M.gguf", 4, 20, size=2.5), choice("m-Q8_0.gguf", 4, 11, size=4.3)
    f16 = choice("m-F16.gguf", 4, 10.5, size=8)
    assert best_of(q4, q8, f16) == ["m-Q8_0.gguf"]
    assert best_of(q4, replace(q8, problem="in 2 parts")) == ["m-Q4_K_M.gguf"]
    slow = replace(q4, needs=Needs(weights_bytes=GB, room_bytes=2 * GB, tokens_per_s=3))
    assert best_of(slow, choice("m-Q8_0.gguf", 4, 2, size=4.3)) == ["m-Q4_K_M.gguf"]
    assert best_of(choice("m-Q4_0.gguf", 4, 20, fits=False)) == []


def test_experts_that_do_not_fit_a_gpu_lie_in_main_memory() -> None:
    facts = replace(FACTS, num_parameters=40 * GB, experts_share=0.8)
    path = Path("m-Q4_K_M.gguf")
    beside = replace(machine("cuda:0"), main_bytes=30 * GB)
    needs = beside.needs(facts, path, 22 * GB)
    assert needs.weights_bytes == 35 * GB and needs.working_bytes == int(3.5 * GB)
    assert needs.main_bytes == 38.5 * GB - 20 * GB and needs.fits
    assert needs.tokens_per_s is None, "the CPU decides"
    for other in (
        replace(beside, main_bytes=27 * GB),
        replace(beside, room_bytes=10 * GB),
        replace(beside, device="cpu"),
        replace(beside, config=EngineConfig(cpu_experts="0")),
        replace(beside, config=EngineConfig(quantization="none")),
    ):
        found = other.needs(facts, path, 22 * GB)
        assert not found.main_bytes and not found.fits
    assert not beside.needs(replace(facts, experts_share=0.0), path, 22 * GB).fits
    assert replace(beside, room_bytes=50 * GB).needs(facts, path, 22 * GB).main_bytes == 0
