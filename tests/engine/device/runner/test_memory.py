"""The memory account of a device: its sums, and its messages when memory is short.

A simulated device replaces the GPU, so the arithmetic and every refusal run on a CPU.
`test_memory_gpu` compares the same account with a real device.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import torch
from made_up_device import BLOCK, Device, Graphs, account, refusal, start

from termgen.config import EngineConfig
from termgen.engine.device.runner.build import build_runner
from termgen.engine.device.runner.memory import HostMeter, weight_bytes
from termgen.engine.device.runner.model_runner import ModelRunner
from termgen.engine.device.runner.warm_up import heaviest_run
from termgen.engine.loop.engine import SyncEngine
from termgen.vocabulary.memory_ledger import GIB, MIB, HostExperts, MemoryLedger, size
from termgen.vocabulary.model_info import DeviceInfo


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
    # All that gpu_memory_utilization grants went to the KV cache, except what the graphs did not
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
        return forward(logits, meta)  # type: ignore[arg-type]

    runner.sampler = sampler  # type: ignore[assignment]
    heaviest_run(runner)
    assert seen == [(4, runner.config.vocab_size)], "as many rows as may run at once"
    after = tensors(state)
    assert after.keys() == before.keys(), "nothing is made for it"
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
    with_experts = replace(ledger, host_experts=HostExperts(10, 64, 3 * GIB))
    assert str(with_experts) == (
        f"{ledger}; the CPU computes 54 of 64 experts of each layer, out of 3.0 GiB of main memory"
    )
    assert ledger.free_below_limit_bytes == 8 * GIB
    over = replace(ledger, limit_bytes=60 * GIB)
    assert over.free_below_limit_bytes == 0 and over.free_above_limit_bytes == 16 * GIB
    assert [size(n) for n in (0, 400 * 1024, 12 * MIB, 1020 * MIB, 12 * GIB)] == [
        *("0.0 MiB", "0.4 MiB", "12 MiB", "1.0 GiB", "12.0 GiB")
    ]
