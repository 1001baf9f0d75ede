"""The messages of the memory account when something is short."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from made_up_device import BLOCK, Device, account, num_blocks, refusal

from termgen.engine.device.runner.memory import is_out_of_memory
from termgen.errors import ModelError
from termgen.vocabulary.memory_ledger import GIB


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
    # An explicit size is limited by free memory, not by a share.
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
    # The size in the message is enough, and one block less is not.
    assert fit(257, max_model_len=4096) == 4096
    refusal(lambda: fit(256, max_model_len=4096))
    assert fit(100) == 1585, "a length that nobody asked for is cut"
