"""The account of a device's memory: what it adds up to, and what it says when something is short.

A device made of numbers stands in for the GPU, so the arithmetic and every refusal run on a CPU.
`test_memory_gpu` holds the same account to a real device.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from termgen.config import EngineConfig
from termgen.engine.engine import SyncEngine
from termgen.engine.memory_ledger import GIB, MIB, MemoryLedger, size
from termgen.engine.runner.build import build_runner
from termgen.engine.runner.largest_steps import heaviest_run
from termgen.engine.runner.memory import MemoryAccount, is_out_of_memory, weight_bytes
from termgen.engine.runner.memory_meter import HostMeter
from termgen.engine.runner.model_runner import ModelRunner
from termgen.engine.step import DeviceInfo
from termgen.errors import ConfigError, ModelError

BLOCK = 2 * MIB
"""KV bytes of one block of 16 tokens."""


class Device:
    """A GPU made of numbers, with an allocator that keeps what is freed."""

    name = "GPU memory"
    counts_tensors = True
    segment_bytes = 2 * MIB

    def __init__(self, total: int = 80 * GIB, others: int = GIB // 2) -> None:
        self.total, self.others = total, others
        self.live = self.kept = self.driver = 0

    def free_and_total(self) -> tuple[int, int]:
        return self.total - self.others - self.driver - self.live - self.kept, self.total

    def allocated(self) -> int:
        return self.live

    def reserved(self) -> int:
        return self.live + self.kept

    def release(self) -> None:
        self.kept = 0

    def allocate(self, nbytes: int) -> None:
        if nbytes > self.kept + self.free_and_total()[0]:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")
        self.kept -= min(nbytes, self.kept)
        self.live += nbytes

    def free(self, nbytes: int) -> None:
        self.live -= nbytes
        self.kept += nbytes

    def run_steps(self, nbytes: int) -> None:
        self.allocate(nbytes)
        self.free(nbytes)


class Graphs:
    """Recordings on such a device, until they are forgotten."""

    def __init__(self, device: Device, *, pool: int, driver: int) -> None:
        self._device, self._pool, self._driver = device, pool, driver
        device.allocate(pool)
        device.driver += driver

    def __del__(self) -> None:
        self._device.live -= self._pool
        self._device.driver -= self._driver


def account(device: Device | HostMeter, **settings: object) -> MemoryAccount:
    return MemoryAccount(device, EngineConfig(**settings), where="cuda:0")  # type: ignore[arg-type]


def num_blocks(memory: MemoryAccount, *, max_model_len: int = 1024, kv_bytes: int = 0) -> int:
    return memory.num_blocks(
        block_size=16,
        bytes_per_block=BLOCK,
        max_model_len=max_model_len,
        kv_bytes=kv_bytes,
        num_tensors=4,
    )


def start(device: Device, memory: MemoryAccount, scale: int = MIB) -> MemoryLedger:
    """What a builder does, with sizes of its own, all of them multiples of `scale`."""
    earlier = device.live
    with memory.loading_weights("bfloat16"):
        device.allocate(1000 * scale)
    memory.weights = 1000 * scale
    with memory.making("workspace"):
        device.allocate(200 * scale)
    trial_kv = 2 * BLOCK
    device.allocate(trial_kv)

    def steps() -> None:
        device.run_steps(900 * scale)

    memory.measure_activations(steps)
    pools = iter((300 * scale, 0))
    memory.expect_graphs(
        lambda: Graphs(device, pool=next(pools), driver=20 * scale), num_recorded=4, num_wanted=40
    )
    assert device.live == earlier + 1200 * scale + trial_kv, "the trial is forgotten"
    kv_bytes = num_blocks(memory, kv_bytes=trial_kv) * BLOCK
    device.free(trial_kv)
    with memory.making_kv(kv_bytes):
        device.allocate(kv_bytes)
    with memory.recording_graphs():
        graphs = Graphs(device, pool=310 * scale, driver=180 * scale)
        device.run_steps(50 * scale)  # on the recorder's own stream
    steps()
    ledger = memory.ledger(kv_bytes=kv_bytes, kv_tokens=kv_bytes // BLOCK * 16)
    device.graphs = graphs  # type: ignore[attr-defined]
    return ledger


def test_the_parts_are_what_was_taken_and_add_up() -> None:
    device = Device()
    ledger = start(device, account(device))
    assert sum(ledger.parts().values()) == ledger.total_bytes == 80 * GIB
    assert ledger.weights_bytes == 1000 * MIB
    assert ledger.workspace_bytes == 200 * MIB
    assert ledger.activations_bytes == 900 * MIB
    assert ledger.graphs_bytes == 490 * MIB
    assert ledger.expected_graphs_bytes == 320 * MIB + 10 * 20 * MIB
    assert ledger.other_bytes == GIB // 2
    assert ledger.free_bytes == device.free_and_total()[0]
    # All that gpu_memory_utilization grants went to the KV cache, but for what the graphs did not
    # need in the end, a block, and the rounding of its four tensors.
    assert 0 <= ledger.free_below_limit_bytes - 30 * MIB < BLOCK + 4 * 2 * MIB + 1
    assert ledger.free_above_limit_bytes == ledger.total_bytes - ledger.limit_bytes
    assert ledger.limit_bytes == int(0.9 * 80 * GIB)


def test_graphs_left_for_idle_moments_have_their_memory() -> None:
    device = Device()
    memory = account(device)
    memory.expect_graphs(
        lambda: Graphs(device, pool=0, driver=20 * MIB), num_recorded=4, num_wanted=40
    )
    with memory.recording_graphs():
        device.driver += 60 * MIB
    made = memory.ledger(kv_bytes=0, kv_tokens=0)
    assert made.graphs_bytes == 60 * MIB
    later = memory.ledger(kv_bytes=0, kv_tokens=0, are_graphs_made=False)
    assert later.graphs_bytes == memory.expected_graphs == 220 * MIB
    assert made.free_bytes - later.free_bytes == 160 * MIB
    assert later.other_bytes == made.other_bytes
    assert sum(later.parts().values()) == later.total_bytes


def test_any_sizes_add_up_within_the_limit() -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    for _ in range(50):
        device = Device(total=rng.randrange(6 * GIB, 90 * GIB), others=rng.randrange(0, GIB))
        memory = account(device, gpu_memory_utilization=rng.uniform(0.8, 1.0))
        ledger = start(device, memory, scale=rng.randrange(4096, MIB))
        assert sum(ledger.parts().values()) == ledger.total_bytes
        assert min(ledger.parts().values()) >= 0
        assert ledger.total_bytes - ledger.free_bytes <= ledger.limit_bytes
        assert ledger.other_bytes == device.others


def test_memory_that_steps_gave_back_is_not_free() -> None:
    device = Device()
    memory = account(device)
    memory.measure_activations(lambda: device.run_steps(GIB))
    held = memory.ledger(kv_bytes=0, kv_tokens=0)
    device.release()
    given_back = memory.ledger(kv_bytes=0, kv_tokens=0)
    assert given_back == held
    assert held.free_bytes == 80 * GIB - GIB // 2 - GIB


def test_graphs_for_which_the_driver_keeps_nothing_visible_still_count() -> None:
    device = Device()
    memory = account(device)
    memory.expect_graphs(lambda: Graphs(device, pool=0, driver=0), num_recorded=2, num_wanted=30)
    assert memory.expected_graphs == 30 * 2 * MIB


def test_an_earlier_engine_of_the_process_is_somebody_else() -> None:
    device = Device()
    device.allocate(5 * GIB)
    device.run_steps(GIB)
    ledger = start(device, account(device))
    assert ledger.other_bytes == GIB // 2 + 5 * GIB
    assert ledger.workspace_bytes == 200 * MIB
    assert sum(ledger.parts().values()) == ledger.total_bytes


# -- what is short ---------------------------------------------------------------------------


def refusal(call: Callable[[], object]) -> tuple[str, str | None]:
    with pytest.raises(ConfigError) as caught:
        call()
    return str(caught.value), caught.value.param


def run_out(*_: object) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")


def test_weights_that_do_not_fit() -> None:
    memory = account(Device(total=80 * GIB, others=60 * GIB))
    with pytest.raises(ModelError) as caught, memory.loading_weights("bfloat16"):
        run_out()
    assert str(caught.value) == (
        "the model's weights do not fit on cuda:0 in bfloat16: 20.0 GiB of 80.0 GiB were free "
        "(other processes and the driver held 60.0 GiB at start); free memory, or choose a smaller "
        "model or dtype"
    )


def test_others_hold_what_the_utilization_grants() -> None:
    memory = account(Device(others=45 * GIB), gpu_memory_utilization=0.5)
    message, param = refusal(memory.check_others)
    assert param == "gpu_memory_utilization"
    assert "gpu_memory_utilization 0.5 lets 40.0 GiB of 80.0 GiB be in use on cuda:0" in message
    assert "other processes and the driver hold 45.0 GiB already" in message
    account(Device(others=39 * GIB), gpu_memory_utilization=0.5).check_others()
    # A size given outright is held to what is free, and not to a share.
    account(Device(others=45 * GIB), gpu_memory_utilization=0.5, kv_cache_gib=1).check_others()


@pytest.mark.parametrize(
    ("part", "param", "words"),
    [
        ("workspace", "max_num_seqs", ("max_num_seqs", "max_model_len")),
        ("activations", "max_num_batched_tokens", ("max_num_batched_tokens", "max_num_seqs")),
        ("graphs", "cudagraph_mode", ("cudagraph_mode", "max_num_seqs")),
    ],
)
def test_running_out_names_the_setting(part: str, param: str, words: tuple[str, ...]) -> None:
    memory = account(Device(others=3 * GIB))

    def make() -> None:
        with memory.making(part):
            run_out()

    calls: list[Callable[[], object]] = [make]
    if part == "activations":
        calls.append(lambda: memory.measure_activations(run_out))
    if part == "graphs":
        calls.append(lambda: memory.expect_graphs(run_out, num_recorded=1, num_wanted=1))
    for call in calls:
        message, named = refusal(call)
        assert named == param
        assert all(word in message for word in words), message
        assert "80.0 GiB" in message and "3.0 GiB" in message
    with pytest.raises(ZeroDivisionError), memory.making(part):
        raise ZeroDivisionError


def test_running_out_is_known_by_any_name() -> None:
    for error in (
        torch.OutOfMemoryError("x"),
        MemoryError(),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
    ):
        assert is_out_of_memory(error)
    ended = RuntimeError("CUDA error: operation failed due to a previous error during capture")
    assert not is_out_of_memory(ended)
    ended.__context__ = torch.OutOfMemoryError("CUDA out of memory")
    assert is_out_of_memory(ended), "ending a recording that ran out fails in its own way"


def test_no_room_for_a_kv_cache_says_what_took_it() -> None:
    device = Device(total=8 * GIB, others=GIB)
    memory = account(device, gpu_memory_utilization=0.5)
    device.allocate(4 * GIB)
    memory.weights = 4 * GIB
    message, param = refusal(lambda: num_blocks(memory))
    assert param == "gpu_memory_utilization"
    assert "lets 4.0 GiB of 8.0 GiB be in use" in message
    assert "weights 4.0 GiB, other processes and the driver 1.0 GiB" in message


def test_a_kv_cache_of_a_given_size_is_held_to_what_is_free() -> None:
    device = Device(total=8 * GIB, others=GIB)
    memory = account(device, kv_cache_gib=5, gpu_memory_utilization=0.1)
    assert num_blocks(memory) * BLOCK == 5 * GIB, "not to gpu_memory_utilization"
    memory.measure_activations(lambda: device.run_steps(3 * GIB))
    message, param = refusal(lambda: num_blocks(memory))
    assert param == "kv_cache_gib"
    assert "kv_cache_gib 5 makes a KV cache of 5.0 GiB, and 4.0 GiB are free" in message
    memory = account(device, num_gpu_blocks_override=4096)
    message, param = refusal(lambda: num_blocks(memory))
    assert param == "num_gpu_blocks_override" and "8.0 GiB" in message
    message, param = refusal(lambda: num_blocks(account(device, kv_cache_gib=1e-4)))
    assert param == "kv_cache_gib" and "4.0 MiB" in message


def test_a_kv_cache_that_cannot_be_allocated() -> None:
    def make(**settings: object) -> Callable[[], None]:
        def call() -> None:
            with account(Device(), **settings).making_kv(9 * GIB):
                run_out()

        return call

    message, param = refusal(make(gpu_memory_utilization=1.0))
    assert param == "gpu_memory_utilization" and "lower gpu_memory_utilization" in message
    assert refusal(make(kv_cache_gib=9))[1] == "kv_cache_gib"


def test_one_request_that_does_not_fit_says_both_sizes() -> None:
    def fit(blocks: int, **settings: object) -> int:
        memory = account(Device(), **settings)
        return memory.fit_max_model_len(
            4096, num_blocks=blocks, block_size=16, bytes_per_block=BLOCK
        )

    message, param = refusal(lambda: fit(100, max_model_len=4096))
    assert param == "max_model_len"
    assert "max_model_len 4096 does not fit" in message
    assert "needs a KV cache of 514 MiB, and there is one of 200 MiB, for 1585 tokens" in message
    assert "lower max_model_len or raise gpu_memory_utilization or kv_cache_gib" in message
    message, _ = refusal(lambda: fit(100, max_model_len=4096, kv_cache_gib=0.2))
    assert message.endswith("lower max_model_len or raise kv_cache_gib")
    # The size that the message asks for is enough, and one block less is not.
    assert fit(257, max_model_len=4096) == 4096
    refusal(lambda: fit(256, max_model_len=4096))
    assert fit(100) == 1585, "a length that nobody asked for is cut"


# -- whole starts ----------------------------------------------------------------------------


def build(
    folder: Path, device: Device | None = None, **settings: object
) -> tuple[ModelRunner, DeviceInfo]:
    config = EngineConfig(
        model=str(folder),
        device="cpu",
        threads=1,
        **{"max_num_seqs": 4, **settings},  # type: ignore[arg-type]
    )
    if device is None:
        return build_runner(config, folder, lambda phase, done: None)
    return build_runner(config, folder, lambda phase, done: None, meter_for=lambda _: device)


def test_a_start_refuses_a_full_device_before_it_loads(tiny_llama_dir: Path) -> None:
    device = Device(total=10 * GIB, others=6 * GIB)
    message, param = refusal(lambda: build(tiny_llama_dir, device, gpu_memory_utilization=0.5))
    assert param == "gpu_memory_utilization" and "6.0 GiB already" in message
    build(tiny_llama_dir, device, gpu_memory_utilization=0.61)


def test_a_start_gives_the_kv_cache_what_is_left(tiny_llama_dir: Path) -> None:
    device = Device(total=GIB, others=900 * MIB)
    runner, info = build(tiny_llama_dir, device, gpu_memory_utilization=0.9)
    room = int(0.9 * GIB) - 900 * MIB - len(runner.kv_caches) * device.segment_bytes
    assert info.num_blocks == room // runner.bytes_per_block()
    message, param = refusal(lambda: build(tiny_llama_dir, device, kv_cache_gib=0.2))
    assert param == "kv_cache_gib" and "205 MiB" in message


def test_the_machines_memory_has_a_ledger_too(tiny_llama_dir: Path) -> None:
    config = EngineConfig(model=str(tiny_llama_dir), device="cpu", threads=1, kv_cache_gib=0.01)
    parts = SyncEngine(config)._parts
    ledger, info = parts.model.memory, parts.info
    assert ledger == info.memory
    runner = parts.core.executor._runner  # type: ignore[attr-defined]
    assert ledger.weights_bytes == weight_bytes(runner.model) > 0
    assert ledger.kv_cache_bytes == sum(cache.nbytes for cache in runner.kv_caches)
    assert ledger.kv_cache_tokens == (info.num_blocks - 1) * info.block_size
    assert ledger.limit_bytes == ledger.total_bytes == HostMeter().free_and_total()[1]
    assert sum(ledger.parts().values()) == ledger.total_bytes
    assert ledger.free_bytes > 0 and ledger.other_bytes > 0 and ledger.graphs_bytes == 0
    assert str(ledger).startswith("memory: weights ") and "graphs" not in str(ledger)


def test_the_heaviest_step_leaves_no_trace(tiny_llama_dir: Path) -> None:
    runner, _ = build(tiny_llama_dir, num_gpu_blocks_override=8)
    state = runner.state
    before = {name: value.clone() for name, value in tensors(state).items()}
    seen: list[tuple[int, ...]] = []
    forward = runner.sampler

    def sampler(logits: torch.Tensor, meta: object) -> object:
        seen.append(tuple(logits.shape))
        assert state.output_counts is not None
        return forward(logits, meta)  # type: ignore[arg-type]

    runner.sampler = sampler  # type: ignore[assignment]
    heaviest_run(runner)
    assert seen == [(4, runner.config.vocab_size)], "as many rows as may run at once"
    after = tensors(state)
    assert after.keys() == before.keys(), "the penalties' tables are gone again"
    assert all(torch.equal(after[name], value) for name, value in before.items())


def tensors(state: object) -> dict[str, torch.Tensor]:
    return {name: v for name, v in vars(state).items() if isinstance(v, torch.Tensor)}


# -- words -----------------------------------------------------------------------------------


def test_the_ledger_is_one_line_for_people() -> None:
    ledger = MemoryLedger(
        name="GPU memory",
        total_bytes=80 * GIB,
        limit_bytes=72 * GIB,
        weights_bytes=int(1.1 * GIB),
        activations_bytes=2 * GIB,
        graphs_bytes=310 * MIB,
        workspace_bytes=100 * MIB,
        kv_cache_bytes=60 * GIB,
        kv_cache_tokens=560_000,
        other_bytes=GIB // 2,
        free_bytes=16 * GIB,
        expected_graphs_bytes=400 * MIB,
    )
    assert str(ledger) == (
        "GPU memory: weights 1.1 GiB, activations 2.0 GiB, graphs (400 MiB expected) 310 MiB, "
        "workspace 100 MiB, KV cache (560,000 tokens) 60.0 GiB, others 512 MiB, free 16.0 GiB of "
        "80.0 GiB (8.0 GiB of it above gpu_memory_utilization)"
    )
    assert ledger.free_below_limit_bytes == 8 * GIB
    over = replace(ledger, limit_bytes=60 * GIB)
    assert over.free_below_limit_bytes == 0 and over.free_above_limit_bytes == 16 * GIB
    assert [size(n) for n in (0, 400 * 1024, 12 * MIB, 1020 * MIB, 12 * GIB)] == [
        *("0.0 MiB", "0.4 MiB", "12 MiB", "1.0 GiB", "12.0 GiB")
    ]
