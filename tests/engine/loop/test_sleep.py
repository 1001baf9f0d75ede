"""Sleep and waking up: requests, freed memory, and failures."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_executor import FakeExecutor, make_core
from test_control_faces import TEXTS, config, ended, read_all
from test_core import endings, expected, next_token, outputs, run, submit

from termgen.config import EngineConfig
from termgen.engine.loop.control import check_level
from termgen.engine.loop.core import EngineCore
from termgen.engine.loop.engine import AsyncEngine, SyncEngine
from termgen.engine.loop.sleep import fall_asleep, wake_up
from termgen.engine.schedule.invariants import check_scheduler
from termgen.errors import EngineError, RequestError
from termgen.vocabulary.request import FinishReason, GenerationRequest
from termgen.vocabulary.sampling_params import SamplingParams
from termgen.vocabulary.step import StepDelivery

MIB = 2**20


def resting_core() -> tuple[EngineCore, FakeExecutor, list[StepDelivery]]:
    """A core paused in the middle of two requests, with a third one waiting."""
    executor = FakeExecutor(next_token)
    deliveries: list[StepDelivery] = []
    core = make_core(executor, deliveries, depth=2, max_num_seqs=2)
    for name, prompt in (("a", [5] * 9), ("b", [6] * 14), ("c", [7] * 5)):
        submit(core, name, prompt, max_tokens=30)
    for _ in range(6):
        core.step()
    core.control.pause("keep")
    run(core)
    return core, executor, deliveries


def test_kept_requests_are_computed_again_and_lose_nothing() -> None:
    core, executor, deliveries = resting_core()
    ring = core.bus.subscribe()
    fall_asleep(core, 1)
    assert executor.slept == ["sleep 1", "give back"]
    snapshot = core.copy_state().snapshot()
    assert (snapshot.sleep_level, snapshot.paused) == (1, True)
    assert (snapshot.num_running, snapshot.num_used_blocks, snapshot.num_cached_blocks) == (0, 0, 0)
    reasons = [event.detail for event in ring.drain()]  # type: ignore[union-attr]
    assert reasons == ["the engine sleeps"] * 2
    plans = len(executor.plans)
    submit(core, "d", [8] * 4, max_tokens=5)
    run(core)
    assert not core.has_work and len(executor.plans) == plans, "nothing is planned without a cache"
    wake_up(core)
    assert executor.slept[-1] == "wake up"
    run(core)
    check_scheduler(core.scheduler)
    told = outputs(deliveries)
    for name, prompt in (("a", [5] * 9), ("b", [6] * 14), ("c", [7] * 5)):
        assert told[name] == expected(prompt, 30)
    reasons = {row.reason for row in endings(deliveries).values()}
    assert reasons == {FinishReason.LENGTH}


def test_what_is_refused() -> None:
    for level in (0, 3, True, "1", None):
        with pytest.raises(RequestError, match="level must be 1 or 2"):
            check_level(level)
    core, executor, _ = resting_core()
    core.control.resume()
    with pytest.raises(EngineError, match="resumed before"):
        fall_asleep(core, 1)
    assert not executor.slept
    core.control.pause("abort")
    run(core)
    fall_asleep(core, 2)
    for command in (
        lambda: fall_asleep(core, 1),
        lambda: core.control.pause("wait"),
        core.control.resume,
    ):
        with pytest.raises(RequestError, match="sleeps at level 2") as caught:
            command()
        assert (caught.value.status, caught.value.code) == (409, "asleep")
    wake_up(core)
    wake_up(core)
    assert executor.slept == ["sleep 2", "give back", "wake up"]


def test_failures_leave_the_engine_as_it_was() -> None:
    core, executor, deliveries = resting_core()
    executor.sleep_error = EngineError("no room to keep the weights")
    with pytest.raises(EngineError, match="no room"):
        fall_asleep(core, 1)
    assert core.control.sleep_level == 0 and not core.control.is_paused
    executor.sleep_error = None
    core.control.pause("keep")
    run(core)
    fall_asleep(core, 1)
    executor.sleep_error = EngineError("others took the memory")
    with pytest.raises(EngineError, match="others took"):
        wake_up(core)
    assert core.control.sleep_level == 1, "it can be tried again"
    executor.sleep_error = None
    wake_up(core)
    run(core)
    assert outputs(deliveries)["a"] == expected([5] * 9, 30)


@pytest.mark.parametrize(("level", "kind"), [(1, "auto"), (2, "auto"), (1, "int8"), (2, "int4")])
async def test_a_real_engine_goes_on_where_it_was(
    tiny_llama_dir: Path, level: Any, kind: str
) -> None:
    engine = await AsyncEngine.start(config(tiny_llama_dir, kv_cache_dtype=kind))
    try:
        undisturbed = await ended(await read_all(engine))
        readings = await read_all(engine)
        await engine.sleep(level, "keep")
        assert (await engine.snapshot()).sleep_level == level
        assert engine.is_healthy and await engine.why_unhealthy() is None
        executor = engine.parts.core.executor
        runner = executor._runner  # type: ignore[attr-defined]
        assert runner is None if level == 2 else runner.kv_caches == []
        told = [len(reading.tokens) for reading in readings]
        await asyncio.sleep(0.05)
        assert [len(reading.tokens) for reading in readings] == told
        await engine.wake_up()
        assert await ended(readings) == undisturbed
    finally:
        await engine.shutdown()


async def test_aborted_by_sleep(tiny_llama_dir: Path) -> None:
    engine = await AsyncEngine.start(config(tiny_llama_dir))
    try:
        readings = await read_all(engine)
        with pytest.raises(RequestError, match="level must be"):
            await engine.sleep(5)  # type: ignore[arg-type]
        assert not engine.is_paused
        await engine.sleep()
        await ended(readings)
        assert [reading.reason for reading in readings] == [FinishReason.ABORT] * len(TEXTS)
        await engine.wake_up()
        assert await ended(await read_all(engine))
    finally:
        await engine.shutdown()


def resident_bytes() -> int:
    fields = Path("/proc/self/statm").read_text().split()
    import resource

    return int(fields[1]) * resource.getpagesize()


def generate(engine: SyncEngine, name: str) -> list[int]:
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    engine.add(
        GenerationRequest(request_id=name, prompt_token_ids=tuple(range(9, 50)), params=params)
    )
    tokens: list[int] = []
    while engine.has_unfinished:
        tokens += [token for delta in engine.step() for token in delta.token_ids]
    return tokens


def test_memory_is_given_back_to_the_machine(tiny_model_dir: Any) -> None:
    """Weights of 48 MiB and a touched KV cache of 64 MiB, as the system counts this process's
    memory.

    That counts pages, and the allocator keeps a few: a fifth is allowed for.
    """
    if not Path("/proc/self/statm").exists():
        pytest.skip("only Linux tells")
    folder = tiny_model_dir("llama", hidden_size=512, intermediate_size=4096, num_hidden_layers=2)
    engine = SyncEngine(
        EngineConfig(
            model=str(folder), device="cpu", dtype="float32", kv_cache_gib=1 / 16, threads=1
        )
    )
    told = generate(engine, "before")
    weights = engine.model.memory.weights_bytes  # type: ignore[union-attr]
    kv_bytes = engine.model.memory.kv_cache_bytes  # type: ignore[union-attr]
    assert weights > 40 * MIB and kv_bytes > 60 * MIB
    runner = engine.core.executor._runner  # type: ignore[attr-defined]
    for cache in runner.kv_caches:
        cache.fill_(0)
    dead = [weakref.ref(cache) for cache in runner.kv_caches]
    del cache, runner
    gc.collect()
    awake = resident_bytes()
    engine.sleep(1)
    assert all(ref() is None for ref in dead)
    assert awake - resident_bytes() > 0.8 * kv_bytes
    engine.wake_up()
    assert generate(engine, "after 1") == told
    model = weakref.ref(engine.core.executor._runner.model)  # type: ignore[attr-defined]
    awake = resident_bytes()
    engine.sleep(2)
    assert model() is None
    assert awake - resident_bytes() > 0.8 * weights
    engine.wake_up()
    assert generate(engine, "after 2") == told
    assert generate(engine, "again") == told
    engine.shutdown()


def test_offloaded_weights_come_back_with_all_that_shares_them() -> None:
    import torch

    from termgen.engine.device.runner.sleep import OffloadedWeights

    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = torch.nn.Parameter(torch.arange(12.0).view(3, 4))
            self.head = self.embed
            self.register_buffer("scale", torch.tensor([2.0, 3.0]))
            self.packed = torch.arange(8, dtype=torch.int8)
            self.half = self.packed[4:]
            self.nothing = torch.empty(0)

    model = Tied()
    kept = OffloadedWeights(model)
    tensors = (model.embed, model.scale, model.packed, model.half)
    assert [t.untyped_storage().nbytes() for t in tensors] == [0] * 4
    progress: list[float] = []
    kept.restore(progress.append)
    assert progress == [0.0, 1 / 3, 2 / 3]
    assert model.head.tolist() == torch.arange(12.0).view(3, 4).tolist()
    assert model.scale.tolist() == [2.0, 3.0] and model.half.tolist() == [4, 5, 6, 7]
    assert model.half.data_ptr() == model.packed.data_ptr() + 4


def test_recordings_are_made_again_for_the_new_addresses(
    tiny_llama_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`debug` compares every recording's addresses with the current ones, at each replay."""
    from termgen.engine.device.runner import sleep as device_sleep
    from termgen.engine.device.runner.dispatch import CudaGraphDispatcher

    made = 0

    def recorder(operations: Callable[[], None]) -> Callable[[], None]:
        nonlocal made
        made += 1
        operations()
        return operations

    monkeypatch.setattr(device_sleep, "CudaRecorder", lambda device: recorder)
    engine = SyncEngine(
        EngineConfig(
            model=str(tiny_llama_dir),
            device="cpu",
            threads=1,
            max_num_seqs=2,
            kv_cache_gib=0.01,
            debug=True,
        )
    )
    told = generate(engine, "eager")
    executor: Any = engine.core.executor
    graphs = executor._runner.make_graphs(CudaGraphDispatcher((1, 2), max_num_seqs=2))
    executor._runner.graphs = graphs
    graphs.record_all(recorder, lambda done: None)
    ring = engine.core.bus.subscribe()
    assert generate(engine, "recorded") == told
    num_made, status = made, executor.graph_status()
    assert num_made == 4 and status.num_recorded == 4
    gone = weakref.ref(graphs)
    del graphs
    engine.sleep(1)
    assert gone() is None and executor.graph_status().num_recorded == 0
    assert not executor.idle()
    engine.wake_up()
    assert made == 2 * num_made and executor.graph_status() == status
    ring.drain()
    assert generate(engine, "again") == told
    modes = [event.graph_mode for event in ring.drain() if hasattr(event, "graph_mode")]
    assert "FULL" in modes
    engine.shutdown()


def test_a_sleep_that_fails_leaves_the_engine_as_it_was(
    tiny_llama_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything it needs is allocated before anything is freed."""
    from termgen.engine.device.runner.model_runner import ModelRunner

    config = EngineConfig(model=str(tiny_llama_dir), device="cpu", threads=1, kv_cache_gib=0.01)
    engine = SyncEngine(config)
    told = generate(engine, "before")
    runner: Any = engine.core.executor._runner  # type: ignore[attr-defined]
    caches, graphs = runner.kv_caches, runner.graphs

    def no_room(*args: object) -> None:
        raise MemoryError("no room for that")

    with monkeypatch.context() as patched:
        patched.setattr(ModelRunner, "make_graphs", no_room)
        with pytest.raises(MemoryError):
            engine.sleep(1)
    assert runner.kv_caches is caches and runner.graphs is graphs
    assert engine.core.control.sleep_level == 0
    assert generate(engine, "after") == told
    engine.shutdown()
