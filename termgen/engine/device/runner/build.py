"""Builds a ready model runner from a configuration: resolve, load, measure, allocate, warm up."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from termgen.config import EngineConfig
from termgen.engine.device.attention.base import AttentionShape
from termgen.engine.device.attention.registry import make_backend
from termgen.engine.device.config.model_config import ModelConfig
from termgen.engine.device.kernels.kv_cache import kv_cache_dtype
from termgen.engine.device.loader import load_model_config
from termgen.engine.device.runner import resolve
from termgen.engine.device.runner.choose_graphs import choose_graphs
from termgen.engine.device.runner.cuda_graphs import CudaRecorder
from termgen.engine.device.runner.largest_steps import dummy_run, run_largest_steps
from termgen.engine.device.runner.load_model import load_model
from termgen.engine.device.runner.memory import MemoryAccount, weight_bytes
from termgen.engine.device.runner.memory_meter import MemoryMeter, make_meter
from termgen.engine.device.runner.model_runner import ModelRunner
from termgen.engine.device.runner.recording import (
    expect_recordings,
    log_implementation,
    record_steps,
)
from termgen.engine.device.runner.warm_up import warm_up
from termgen.vocabulary.memory_ledger import MemoryLedger
from termgen.vocabulary.sampling_params import MAX_EOS_IDS
from termgen.vocabulary.startup_phases import (
    COMPILING_KERNELS,
    LOADING_WEIGHTS,
    READING_CONFIG,
    READY,
    RECORDING_GRAPHS,
    SIZING_CACHE,
)
from termgen.vocabulary.step import DeviceInfo

logger = logging.getLogger(__name__)

Progress = Callable[[str, float], None]
"""Called with a phase and the fraction of it that is done."""


def build_runner(
    config: EngineConfig,
    path: Path,
    on_progress: Progress,
    *,
    meter_for: Callable[[torch.device], MemoryMeter] = make_meter,
) -> tuple[ModelRunner, DeviceInfo]:
    """Load the model at `path` and size everything around it. Raises ConfigError or ModelError."""
    on_progress(READING_CONFIG, 0.0)
    device = resolve.resolve_device(config.device)
    if device.type == "cpu":
        torch.set_num_threads(resolve.resolve_threads(config.threads))
    model_config = load_model_config(path, model_impl=config.model_impl)
    limits = resolve.resolve_limits(config, model_config, device)
    dtype = resolve.resolve_dtype(config.dtype, model_config, device)
    memory = MemoryAccount(meter_for(device), config, where=str(device))
    memory.check_others()
    with memory.making("workspace"):
        attention, shape, passed_over = make_backend(
            config.attention_backend, _attention_shape(config, model_config, limits, dtype, device)
        )
    assert shape.block_size is not None
    if passed_over and device.type == "cuda":  # on a CPU nothing else is expected
        logger.warning("%s; using %s", passed_over, attention.name)
    on_progress(LOADING_WEIGHTS, 0.0)
    with memory.loading_weights(str(dtype).removeprefix("torch.")):
        model = load_model(
            config,
            path,
            model_config,
            attention,
            shape,
            lambda done: on_progress(LOADING_WEIGHTS, done),
        )
    memory.weights = weight_bytes(model)
    with memory.making("workspace"):
        runner = ModelRunner(
            model,
            model_config,
            attention,
            dtype=dtype,
            kv_cache_dtype=shape.kv_cache_dtype,
            device=device,
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            max_model_len=limits.max_model_len,
            block_size=shape.block_size,
            num_eos_ids=MAX_EOS_IDS,
            spins=resolve.resolve_wait(config.device_wait),
            debug=config.debug,
        )
    info = _size_and_warm_up(config, runner, limits, memory, on_progress)
    logger.info("%s", info.memory)
    runner.be_ready()
    on_progress(READY, 1.0)
    return runner, info


def _attention_shape(
    config: EngineConfig,
    model: ModelConfig,
    limits: resolve.Limits,
    dtype: torch.dtype,
    device: torch.device,
) -> AttentionShape:
    return AttentionShape(
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        windows=tuple(dict.fromkeys(model.layer_windows)),
        block_size=config.block_size,
        max_num_seqs=limits.max_num_seqs,
        max_num_tokens=limits.max_num_batched_tokens,
        dtype=dtype,
        kv_cache_dtype=kv_cache_dtype(config.kv_cache_dtype, dtype),
        device=device,
    )


def _size_and_warm_up(
    config: EngineConfig,
    runner: ModelRunner,
    limits: resolve.Limits,
    memory: MemoryAccount,
    on_progress: Progress,
) -> DeviceInfo:
    """What steps and graphs take is measured before the KV cache gets the rest."""
    dispatcher = choose_graphs(
        config,
        limits,
        device_type=runner.device.type,
        attention=runner.attention,
        model=runner.model,
    )
    with memory.making("workspace"):
        runner.init_kv_cache(2)
    if runner.uses_kernels:
        on_progress(COMPILING_KERNELS, 0.0)
        with memory.making("activations"):
            warm_up(runner, dispatcher, lambda done: on_progress(COMPILING_KERNELS, done))
    on_progress(SIZING_CACHE, 0.0)
    memory.measure_activations(partial(run_largest_steps, runner))
    recorder = None
    if not dispatcher.is_empty:
        recorder = CudaRecorder(runner.device)
        dispatcher = expect_recordings(runner, dispatcher, recorder, memory)
    num_blocks, max_model_len = _size_kv_cache(runner, limits.max_model_len, memory)
    kv_bytes = num_blocks * runner.bytes_per_block()
    with memory.making_kv(kv_bytes):
        runner.init_kv_cache(num_blocks)
    if recorder is None or dispatcher.is_empty:
        runner.graphs = runner.make_graphs(dispatcher)
        dummy_run(runner, 1)
    else:
        with memory.recording_graphs():
            runner.graphs = record_steps(
                runner,
                dispatcher,
                recorder,
                lambda done: on_progress(RECORDING_GRAPHS, done),
                in_background=config.capture_in_background,
            )
        with memory.making("activations"):
            run_largest_steps(runner)  # the first real steps find their memory in place again
    log_implementation(runner)
    ledger = memory.ledger(
        kv_bytes=kv_bytes,
        kv_tokens=(num_blocks - 1) * runner.block_size,
        are_graphs_made=not runner.graphs.num_waiting,
    )
    return _describe(config, runner, limits, ledger, num_blocks, max_model_len)


def _size_kv_cache(
    runner: ModelRunner, max_model_len: int, memory: MemoryAccount
) -> tuple[int, int]:
    """Its blocks, and the longest context that they can hold."""
    block_size, bytes_per_block = runner.block_size, runner.bytes_per_block()
    num_blocks = memory.num_blocks(
        block_size=block_size,
        bytes_per_block=bytes_per_block,
        max_model_len=max_model_len,
        kv_bytes=2 * bytes_per_block,
        num_tensors=len(runner.kv_caches),
    )
    return num_blocks, memory.fit_max_model_len(
        max_model_len,
        num_blocks=num_blocks,
        block_size=block_size,
        bytes_per_block=bytes_per_block,
    )


def _describe(
    config: EngineConfig,
    runner: ModelRunner,
    limits: resolve.Limits,
    memory: MemoryLedger,
    num_blocks: int,
    max_model_len: int,
) -> DeviceInfo:
    device = runner.device
    asynchronous = config.async_scheduling
    if asynchronous is None:
        asynchronous = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    return DeviceInfo(
        device=str(device),
        device_name=name,
        dtype=str(runner.dtype).removeprefix("torch."),
        num_blocks=num_blocks,
        block_size=runner.block_size,
        max_model_len=max_model_len,
        vocab_size=runner.config.vocab_size,
        attention_backend=runner.attention.name,
        architecture=runner.config.architecture,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_in_flight=2 if asynchronous else 1,
        eos_token_ids=tuple(runner.config.eos_token_ids),
        memory=memory,
        implementation=runner.config.implementation,
        num_threads=torch.get_num_threads() if device.type == "cpu" else 0,
        num_cores=len(resolve.usable_cpus()),
    )
