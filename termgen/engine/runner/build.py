"""Builds a ready model runner from a configuration: resolve, load, measure, allocate, warm up."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

import torch

from termgen.config import EngineConfig
from termgen.engine.attention.base import AttentionBackend, AttentionShape
from termgen.engine.attention.registry import make_backend
from termgen.engine.kernels import why_unusable
from termgen.engine.layers.ops import LayerOps, TorchOps
from termgen.engine.loader import load_model_config, open_checkpoint
from termgen.engine.loader.dummy import load_dummy
from termgen.engine.loader.weights import load_weights
from termgen.engine.models.config import ModelConfig
from termgen.engine.models.decoder import CausalDecoder
from termgen.engine.models.registry import build_model
from termgen.engine.runner import resolve
from termgen.engine.runner.cuda_graphs import CudaRecorder
from termgen.engine.runner.dispatch import CudaGraphDispatcher, decode_sizes, mixed_sizes
from termgen.engine.runner.model_runner import ModelRunner
from termgen.engine.runner.warm_up import warm_up
from termgen.engine.startup_phases import (
    COMPILING_KERNELS,
    LOADING_WEIGHTS,
    READING_CONFIG,
    READY,
    RECORDING_GRAPHS,
    SIZING_CACHE,
)
from termgen.engine.step import DeviceInfo
from termgen.errors import ModelError

logger = logging.getLogger(__name__)

Progress = Callable[[str, float], None]
"""Called with a phase and the fraction of it that is done."""

MAX_EOS_IDS = 8

GRAPH_OVERHEAD_BYTES = 2 * 2**20
"""What one more recording takes besides the memory that all share."""


def build_runner(
    config: EngineConfig, path: Path, on_progress: Progress
) -> tuple[ModelRunner, DeviceInfo]:
    """Load the model at `path` and size everything around it. Raises ConfigError or ModelError."""
    started = time.perf_counter()
    on_progress(READING_CONFIG, 0.0)
    device = resolve.resolve_device(config.device)
    if device.type == "cpu":
        torch.set_num_threads(resolve.resolve_threads(config.threads))
    model_config = load_model_config(path)
    limits = resolve.resolve_limits(config, model_config, device)
    dtype = resolve.resolve_dtype(config.dtype, model_config, device)
    attention, passed_over = make_backend(
        config.attention_backend,
        _attention_shape(model_config, limits, config.block_size, dtype, device),
    )
    if passed_over and device.type == "cuda":  # on a CPU nothing else is expected
        logger.warning("%s; using %s", passed_over, attention.name)
    on_progress(LOADING_WEIGHTS, 0.0)
    try:
        model, model_bytes = _load_model(
            config, path, model_config, attention, dtype, device, on_progress
        )
    except RuntimeError as error:
        if not _is_out_of_memory(error):
            raise
        raise ModelError(
            f"the model's weights do not fit on {device} in {str(dtype).removeprefix('torch.')}; "
            "free memory, or choose a smaller model or dtype"
        ) from error
    runner = ModelRunner(
        model,
        model_config,
        attention,
        dtype=dtype,
        device=device,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_model_len=limits.max_model_len,
        block_size=config.block_size,
        num_eos_ids=MAX_EOS_IDS,
    )
    info = _size_and_warm_up(config, runner, limits, on_progress)
    runner.be_ready()
    on_progress(READY, 1.0)
    load_seconds = time.perf_counter() - started
    return runner, replace(info, load_seconds=load_seconds, model_bytes=model_bytes)


def _load_model(
    config: EngineConfig,
    path: Path,
    model_config: ModelConfig,
    attention: AttentionBackend,
    dtype: torch.dtype,
    device: torch.device,
    on_progress: Progress,
) -> tuple[CausalDecoder, int]:
    """The model, ready to run, and the bytes of its weights."""
    with ExitStack() as stack:
        checkpoint = None
        if config.load_format != "dummy":
            # Opened first: it refuses a config.json whose sizes are not those of the tensors,
            # before anything of those sizes is allocated.
            checkpoint = stack.enter_context(closing(open_checkpoint(path)))
        model = build_model(
            model_config,
            dtype=dtype,
            device=device,
            quantization=config.quantization,
            attention=attention,
            ops=_make_ops(device),
        )
        if checkpoint is None:
            load_dummy(model, config.seed)
        else:
            load_weights(
                model, checkpoint, progress=lambda done: on_progress(LOADING_WEIGHTS, done)
            )
    model_bytes = sum(p.nbytes for p in model.parameters())
    model.finalize()
    return model, model_bytes


def _attention_shape(
    model: ModelConfig,
    limits: resolve.Limits,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> AttentionShape:
    return AttentionShape(
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        windows=tuple(dict.fromkeys(model.layer_windows)),
        block_size=block_size,
        max_num_seqs=limits.max_num_seqs,
        max_num_tokens=limits.max_num_batched_tokens,
        dtype=dtype,
        device=device,
    )


def _make_ops(device: torch.device) -> LayerOps:
    if why_unusable(device):
        return TorchOps()
    from termgen.engine.kernels.ops import TritonOps  # triton may be missing elsewhere

    return TritonOps()


def _is_out_of_memory(error: RuntimeError) -> bool:
    # The CPU's allocator raises a plain RuntimeError.
    return isinstance(error, torch.OutOfMemoryError) or "allocate memory" in str(error)


def _size_and_warm_up(
    config: EngineConfig, runner: ModelRunner, limits: resolve.Limits, on_progress: Progress
) -> DeviceInfo:
    device = runner.device
    dispatcher = _make_dispatcher(config, runner, limits)
    runner.init_kv_cache(2)
    if runner.uses_kernels:
        on_progress(COMPILING_KERNELS, 0.0)
        warm_up(runner, dispatcher, lambda done: on_progress(COMPILING_KERNELS, done))
    on_progress(SIZING_CACHE, 0.0)
    runner.dummy_run(limits.max_num_batched_tokens if device.type == "cuda" else 32)
    free = resolve.free_memory_bytes(config, device) - _graph_bytes(runner, dispatcher)
    num_blocks = resolve.resolve_num_blocks(
        config,
        bytes_per_block=runner.bytes_per_block(),
        max_model_len=limits.max_model_len,
        device=device,
        free_bytes=free,
    )
    max_model_len = resolve.fit_max_model_len(config, limits.max_model_len, num_blocks)
    runner.init_kv_cache(num_blocks)
    runner.dummy_run(1)
    runner.graphs = runner.make_graphs(dispatcher)
    if dispatcher.sizes:
        in_background = config.capture_in_background
        record = runner.graphs.record_useful if in_background else runner.graphs.record_all
        record(CudaRecorder(device), lambda done: on_progress(RECORDING_GRAPHS, done))
    return _describe(config, runner, limits, num_blocks=num_blocks, max_model_len=max_model_len)


def _make_dispatcher(
    config: EngineConfig, runner: ModelRunner, limits: resolve.Limits
) -> CudaGraphDispatcher:
    return choose_graphs(config, limits, device_type=runner.device.type, attention=runner.attention)


def choose_graphs(
    config: EngineConfig,
    limits: resolve.Limits,
    *,
    device_type: str,
    attention: AttentionBackend,
) -> CudaGraphDispatcher:
    """Which steps to record, or why none."""
    if config.enforce_eager or config.cudagraph_mode == "none":
        reason = "--enforce-eager" if config.enforce_eager else "--cudagraph-mode none"
    elif device_type != "cuda":
        reason = "no CUDA device"
    elif "FULL" not in attention.capabilities.graph_modes:
        reason = f"{attention.name} attention cannot be recorded"
    else:
        is_all = config.cudagraph_mode == "full"
        return CudaGraphDispatcher(
            decode_sizes(limits.max_num_seqs),
            mixed=mixed_sizes(limits.max_num_batched_tokens) if is_all else (),
            max_num_seqs=limits.max_num_seqs,
        )
    return CudaGraphDispatcher((), disabled_reason=reason)


def _graph_bytes(runner: ModelRunner, dispatcher: CudaGraphDispatcher) -> int:
    """Memory that recordings take, measured on the largest ones; the others share it."""
    if not dispatcher.sizes:
        return 0
    device = runner.device
    torch.cuda.synchronize(device)
    before, _ = torch.cuda.mem_get_info(device)
    trial = runner.make_graphs(dispatcher.largest())
    trial.record_all(CudaRecorder(device), lambda done: None)
    after, _ = torch.cuda.mem_get_info(device)
    del trial
    torch.cuda.empty_cache()
    return max(0, before - after) + GRAPH_OVERHEAD_BYTES * len(dispatcher.descriptors())


def _describe(
    config: EngineConfig,
    runner: ModelRunner,
    limits: resolve.Limits,
    *,
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
        block_size=config.block_size,
        max_model_len=max_model_len,
        vocab_size=runner.config.vocab_size,
        model_bytes=0,
        kv_cache_bytes=num_blocks * runner.bytes_per_block(),
        load_seconds=0.0,
        attention_backend=runner.attention.name,
        architecture=runner.config.architecture,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_in_flight=2 if asynchronous else 1,
        eos_token_ids=tuple(runner.config.eos_token_ids),
    )
