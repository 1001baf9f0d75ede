"""Phases of start-up, from the reports that name them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from termgen.config import EngineConfig
from termgen.engine.loop import startup
from termgen.engine.loop.engine import SyncEngine
from termgen.errors import ConfigError, CorruptFileError
from termgen.library.catalog import LocalModel
from termgen.vocabulary.cache_groups import CacheGroup
from termgen.vocabulary.sampling_params import MAX_EOS_IDS
from termgen.vocabulary.startup_phases import (
    COMPILING_KERNELS,
    LOADING_TOKENIZER,
    LOADING_WEIGHTS,
    READY,
    RECORDING_GRAPHS,
    PhaseClock,
    StartupPhase,
    describe_startup,
)


def test_a_phase_lasts_until_the_next_one_is_named() -> None:
    now = 10.0
    seen: list[tuple[str, float]] = []
    clock = PhaseClock(lambda phase, fraction: seen.append((phase, fraction)), lambda: now)
    for seconds, phase, fraction in (
        (0.25, LOADING_TOKENIZER, 0.0),
        (1.0, LOADING_WEIGHTS, 0.0),
        (0.5, LOADING_WEIGHTS, 0.7),
        (3.0, COMPILING_KERNELS, 0.0),
        (1.0, RECORDING_GRAPHS, 0.0),
        (0.5, LOADING_WEIGHTS, 1.0),
        (9.0, READY, 1.0),
    ):
        clock(phase, fraction)
        now += seconds
    phases = clock.stop()
    assert phases == (
        StartupPhase("tokenizer", 0.25),
        StartupPhase("weights", 2.0),
        StartupPhase("kernels", 3.0),
        StartupPhase("graphs", 1.0),
    )
    assert seen[2] == (LOADING_WEIGHTS, 0.7) and len(seen) == 7
    assert clock.stop() == phases


def test_small_phases_are_added_up() -> None:
    phases = [
        StartupPhase("config", 0.1),
        StartupPhase("weights", 1.2),
        StartupPhase("kernels", 3.0),
        StartupPhase("KV cache", 0.2),
        StartupPhase("graphs", 1.4),
    ]
    assert describe_startup(phases) == (
        "ready in 5.9 s: weights 1.2, kernels 3.0, graphs 1.4, other 0.3"
    )
    assert describe_startup(phases[1:2]) == "ready in 1.2 s: weights 1.2"
    tiny = StartupPhase("config", 0.01)
    assert describe_startup([tiny, phases[1]]) == "ready in 1.2 s: weights 1.2"
    assert describe_startup(()) == "ready in 0.0 s"


def test_more_end_tokens_than_the_device_has_columns_for_are_refused() -> None:
    info = SimpleNamespace(eos_token_ids=(0,), vocab_size=10_000)
    most = {"eos_token_id": list(range(MAX_EOS_IDS))}
    assert len(startup._eos_token_ids(info, None, most)) == MAX_EOS_IDS  # type: ignore[arg-type]
    beyond = {"eos_token_id": list(range(MAX_EOS_IDS + 1))}
    with pytest.raises(ConfigError, match=f"name {MAX_EOS_IDS + 1} end tokens"):
        startup._eos_token_ids(info, None, beyond)  # type: ignore[arg-type]


def test_end_tokens_beyond_the_vocabulary_are_ignored_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    info: Any = SimpleNamespace(eos_token_ids=(0,), vocab_size=100)
    assert startup._eos_token_ids(info, None, {"eos_token_id": [1, 100, 2**63]}) == {0, 1}
    assert "end tokens 100, 9223372036854775808 are ignored" in caplog.text


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("temperature", -0.5),
        ("temperature", float("nan")),
        ("temperature", 1e9),
        ("top_p", 0.0),
        ("top_p", float("inf")),
        ("top_k", -7),
        ("top_k", 2**31),
        ("top_k", 0.5),
        ("min_p", 1.5),
        ("repetition_penalty", 10**400),
    ],
)
def test_recommended_sampling_that_no_request_may_ask_for_is_refused(
    tmp_path: Path, key: str, value: float
) -> None:
    good = {"temperature": 0.5, "top_k": 20}
    model = LocalModel("m", tmp_path, "folder", str(tmp_path))
    assert startup.sampling_defaults(model, good) == good
    with pytest.raises(CorruptFileError, match=f"the recommended {key} must be") as error:
        startup.sampling_defaults(model, {**good, key: value})
    assert str(tmp_path / "generation_config.json") in str(error.value)


def test_the_model_tells_its_groups_of_layers(tiny_model_dir: Callable[..., Path]) -> None:
    folder = tiny_model_dir("gemma3_text")
    config = EngineConfig(model=str(folder), device="cpu", dtype="float32", kv_cache_gib=0.01)
    engine = SyncEngine(config)
    groups = engine.model.cache_groups
    engine.shutdown()
    assert groups[0] == CacheGroup(None, 1), "one layer of four sees everything"
    assert sum(group.num_layers for group in groups[1:]) == 3
    assert {group.window for group in groups[1:]} == {8}
