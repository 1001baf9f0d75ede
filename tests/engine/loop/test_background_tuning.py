"""Products are measured while an engine has nothing to do, and never while it has."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from termgen.config import EngineConfig
from termgen.engine.device.runner import build, sleep
from termgen.engine.loop import executor as executor_module
from termgen.engine.loop.engine import AsyncEngine
from termgen.engine.loop.executor import LocalExecutor
from termgen.system.idle_process import IdleProcess
from termgen.vocabulary.sampling_params import SamplingParams

LIMIT_S = 200.0
"""For a process that imports torch and compiles some hundred kernels."""


class Tuner:
    """An IdleProcess that notes what is said to it."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    def rest(self) -> None:
        self.heard.append("rest")

    def busy(self) -> None:
        self.heard.append("busy")

    def end(self) -> None:
        self.heard.append("end")

    def close(self) -> None:
        self.heard.append("close")


class Runner:
    """A runner with recordings left to make."""

    device = SimpleNamespace(type="cuda")

    def __init__(self, num_waiting: int) -> None:
        self.num_waiting = num_waiting

    def record_next(self) -> bool:
        self.num_waiting -= 1
        return self.num_waiting >= 0

    def execute(self, plan: object) -> object:
        return plan


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[LocalExecutor, Tuner]]:
    """An executor that has started on a made-up GPU, and its tuner."""

    def start(num_untuned: int = 3, num_waiting: int = 0, **config: Any) -> Any:
        tuner = Tuner()
        info = SimpleNamespace(
            device="cuda:0", max_in_flight=2, num_untuned=num_untuned, quantization=None
        )

        def build_runner(*_: object) -> Any:
            return Runner(num_waiting), info

        monkeypatch.setattr(build, "build_runner", build_runner)
        monkeypatch.setattr(
            executor_module, "make_tuner", lambda path, num_shapes, quantization: tuner
        )
        executor = LocalExecutor(EngineConfig(**config), Path("model"))
        executor.start(lambda phase, share: None)
        return executor, tuner

    return start


def test_it_rests_after_the_recordings_and_stops_before_a_step(started: Any) -> None:
    executor, tuner = started(num_waiting=1)
    assert executor.idle() and tuner.heard == [], "recordings come first"
    assert not executor.idle() and tuner.heard == ["rest"]
    executor.submit(SimpleNamespace(constrained=None))
    assert tuner.heard == ["rest", "busy"]
    executor.shutdown()
    assert tuner.heard == ["rest", "busy", "close"]


def test_it_stops_when_the_engine_falls_asleep(
    started: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor, tuner = started()
    monkeypatch.setattr(sleep, "DeepSleep", lambda *_: None)
    executor.sleep(2)
    assert tuner.heard == ["end"]
    assert not executor.idle()
    assert tuner.heard == ["end"]


@pytest.mark.parametrize(("num_untuned", "config"), [(3, {"tune": False}), (0, {})])
def test_there_may_be_nothing_to_do(started: Any, num_untuned: int, config: dict[str, Any]) -> None:
    executor, tuner = started(num_untuned, **config)
    assert not executor.idle()
    executor.submit(SimpleNamespace(constrained=None))
    executor.shutdown()
    assert tuner.heard == []


def test_it_is_on_by_default() -> None:
    assert EngineConfig().tune


def run_tuner(monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    """Run this program in the place of `termgen`, until it has ended."""
    monkeypatch.setattr(executor_module, "PROGRAM", program)
    monkeypatch.setattr(executor_module, "TUNE_AFTER_S", 0.0)
    tuner = executor_module.make_tuner(Path("some-model"), 5, "int8")
    assert isinstance(tuner, IdleProcess)
    tuner.rest()
    deadline = time.monotonic() + 30
    while not tuner.is_over and time.monotonic() < deadline:
        time.sleep(0.01)
    assert tuner.is_over
    tuner.close()


def test_its_result_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    run_tuner(monkeypatch, "import sys; print('one\\n' + ' '.join(sys.argv[1:]))")
    first, last = (record.message for record in caplog.records)
    assert first.startswith("measuring 5 products of this model on this GPU while no request runs")
    assert last == "tune --background --quantization int8 some-model"


def test_its_failure_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run_tuner(monkeypatch, "raise SystemExit('termgen: error: no memory')")
    (record,) = caplog.records
    assert record.message == "products were not measured: termgen: error: no memory"
    assert record.levelno == logging.WARNING


def test_the_command_is_termgens_own(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """From any folder; here without the GPU that it asks for."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    run_tuner(monkeypatch, executor_module.PROGRAM)
    (record,) = caplog.records
    assert record.message.startswith("products were not measured: termgen: error: ")
    assert "some-model" in record.message


# On a GPU.

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 1024,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
}


@pytest.mark.gpu
async def test_an_idle_engine_measures_and_the_next_one_uses_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Requests in between are answered with the same tokens, each time after a kill."""
    caplog.set_level(logging.INFO)
    monkeypatch.setenv("TERMGEN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(executor_module, "TUNE_AFTER_S", 0.5)
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    config = EngineConfig(
        model=str(tmp_path),
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=256,
        max_num_seqs=8,
        kv_cache_gib=0.05,
        cudagraph_mode="full_decode_only",
        seed=3,
    )
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)

    async def tokens(engine: AsyncEngine) -> list[int]:
        return [t async for delta in engine.generate([5, 6, 7], params) for t in delta.token_ids]

    engine = await AsyncEngine.start(config)
    try:
        expected = await tokens(engine)
        for _ in range(2):
            await asyncio.sleep(3.0)  # in the middle of its imports
            assert await tokens(engine) == expected
        deadline = time.monotonic() + LIMIT_S
        while "engines that start from now on" not in caplog.text:
            assert "were not measured" not in caplog.text and time.monotonic() < deadline
            await asyncio.sleep(0.2)
        assert await tokens(engine) == expected
    finally:
        await engine.shutdown()
    caplog.clear()
    again = await AsyncEngine.start(config)
    try:
        assert "4 of 4 shapes were measured on this GPU" in caplog.text
        assert len(await tokens(again)) == 16
        await asyncio.sleep(1.0)
        assert "measuring" not in caplog.text
    finally:
        await again.shutdown()
