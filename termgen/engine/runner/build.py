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
from termgen.engine.models.registry import build_model, check_memory
from termgen.engine.models.transformers_backend import (
    TransformersDecoder,
    build_transformers_model,
)
from termgen.engine.quantization.kv_cache import kv_cache_dtype
from termgen.engine.runner import resolve
from termgen.engine.runner.choose_graphs import choose_graphs
from termgen.engine.runner.cuda_graphs import CudaRecorder, FullGraphs, RecordingError
from termgen.engine.runner.dispatch import CudaGraphDispatcher
from termgen.engine.runner.model_runner import ModelRunner
from termgen.engine.runner.piecewise_graphs import Recorder
from termgen.engine.step import DeviceInfo
from termgen.errors import ConfigError, ModelError, ModelNotFoundError

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
    device = resolve.resolve_device(config.device)
    if device.type == "cpu":
        torch.set_num_threads(resolve.resolve_threads(config.threads))
    model_config = load_model_config(path, model_impl=config.model_impl)
    limits = resolve.resolve_limits(config, model_config, device)
    dtype = resolve.resolve_dtype(config.dtype, model_config, device)
    attention, shape, passed_over = make_backend(
        config.attention_backend, _attention_shape(config, model_config, limits, dtype, device)
    )
    assert shape.block_size is not None
    config = replace(config, block_size=shape.block_size)
    if passed_over and device.type == "cuda":  # on a CPU nothing else is expected
        logger.warning("%s; using %s", passed_over, attention.name)
    on_progress("loading weights", 0.0)
    try:
        model, model_bytes = _load_model(
            config, path, model_config, attention, _make_ops(shape), dtype, device, on_progress
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
        kv_cache_dtype=shape.kv_cache_dtype,
        device=device,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_model_len=limits.max_model_len,
        block_size=shape.block_size,
        num_eos_ids=MAX_EOS_IDS,
        debug=config.debug,
    )
    on_progress("warming up", 0.0)
    info = _size_and_warm_up(config, runner, limits, on_progress)
    on_progress("ready", 1.0)
    load_seconds = time.perf_counter() - started
    return runner, replace(info, load_seconds=load_seconds, model_bytes=model_bytes)


def _load_model(
    config: EngineConfig,
    path: Path,
    model_config: ModelConfig,
    attention: AttentionBackend,
    ops: LayerOps,
    dtype: torch.dtype,
    device: torch.device,
    on_progress: Progress,
) -> tuple[CausalDecoder | TransformersDecoder, int]:
    """The model, ready to run, and the bytes of its weights."""
    if model_config.transformers is not None:
        return _load_transformers_model(config, path, model_config, attention, dtype, device)
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
            ops=ops,
        )
        if checkpoint is None:
            load_dummy(model, config.seed)
        else:
            load_weights(
                model, checkpoint, progress=lambda done: on_progress("loading weights", done)
            )
    model_bytes = sum(p.nbytes for p in model.parameters())
    model.finalize()
    return model, model_bytes


def _load_transformers_model(
    config: EngineConfig,
    path: Path,
    model_config: ModelConfig,
    attention: AttentionBackend,
    shape: AttentionShape,
) -> tuple[TransformersDecoder, int]:
    if config.quantization is not None:
        raise ConfigError(
            f"quantization {config.quantization} is for the models that termgen's own code runs, "
            f"and {model_config.architecture} runs through transformers; leave it out",
            param="quantization",
        )
    is_dummy = config.load_format == "dummy"
    if not is_dummy and not path.is_dir():
        raise ModelNotFoundError(f"{path} describes a model without weights: use load_format=dummy")
    if device.type == "cpu":
        check_memory(model_config.num_parameters * dtype.itemsize)
    model = build_transformers_model(
        model_config,
        folder=None if is_dummy else path,
        dtype=dtype,
        device=device,
        attention=attention,
        ops=_make_ops(device),
    )
    if is_dummy:
        load_dummy(model, config.seed)
    model.finalize()
    return model, sum(p.nbytes for p in model.parameters())


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


def _make_ops(shape: AttentionShape) -> LayerOps:
    if why_unusable(shape.device, dtype=shape.kv_cache_dtype):
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
    dispatcher = choose_graphs(
        config, limits, device_type=device.type, attention=runner.attention, model=runner.model
    )
    runner.init_kv_cache(2)
    runner.dummy_run(limits.max_num_batched_tokens if device.type == "cuda" else 32)
    on_progress("warming up", 0.5)
    dispatcher, graph_bytes = _try_recording(runner, dispatcher)
    free = resolve.free_memory_bytes(config, device) - graph_bytes
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
    if not dispatcher.is_empty:
        recorder = CudaRecorder(device)
        runner.graphs = record_steps(
            runner, dispatcher, recorder, lambda done: on_progress("recording graphs", done)
        )
    _log_implementation(runner)
    return _describe(config, runner, limits, num_blocks=num_blocks, max_model_len=max_model_len)


def _try_recording(
    runner: ModelRunner, dispatcher: CudaGraphDispatcher
) -> tuple[CudaGraphDispatcher, int]:
    """What to record after all, and the memory that takes, measured on the largest recordings; the
    others share it."""
    if not dispatcher.sizes:
        return dispatcher, 0
    device = runner.device
    torch.cuda.synchronize(device)
    before, _ = torch.cuda.mem_get_info(device)
    trial = record_steps(runner, dispatcher.largest(), CudaRecorder(device), lambda done: None)
    after, _ = torch.cuda.mem_get_info(device)
    settled = dispatcher if trial.dispatcher.sizes else trial.dispatcher
    del trial
    torch.cuda.empty_cache()
    if not settled.sizes:
        after, _ = torch.cuda.mem_get_info(device)  # what a failed capture did not give back
        return settled, max(0, before - after)
    overhead = GRAPH_OVERHEAD_BYTES * len(dispatcher.descriptors())
    return settled, max(0, before - after) + overhead


def record_steps(
    runner: ModelRunner,
    dispatcher: CudaGraphDispatcher,
    recorder: Recorder,
    on_progress: Callable[[float], None],
) -> FullGraphs:
    """Recordings of the runner's steps. Code of transformers that cannot be recorded runs without:
    then there are none, and the reason is every step's."""
    graphs = runner.make_graphs(dispatcher)
    try:
        graphs.record_all(recorder, on_progress)
    except RecordingError as error:
        if runner.config.implementation == "termgen":
            raise
        reason = f"{runner.config.architecture} cannot be recorded: {error}"
        logger.warning("%s; its steps run without CUDA graphs", reason)
        return runner.make_graphs(CudaGraphDispatcher((), disabled_reason=reason))
    return graphs


def _log_implementation(runner: ModelRunner) -> None:
    config, dispatcher = runner.config, runner.graphs.dispatcher
    code = "termgen's own code"
    if config.implementation == "transformers":
        code = "the modelling code of transformers"
    graphs = dispatcher.disabled_reason or f"{len(dispatcher.descriptors())} recordings"
    logger.info(
        "%s runs through %s, %s attention; CUDA graphs: %s",
        config.architecture,
        code,
        runner.attention.name,
        graphs,
    )


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
        block_size=runner.block_size,
        max_model_len=max_model_len,
        vocab_size=runner.config.vocab_size,
        model_bytes=0,
        kv_cache_bytes=num_blocks * runner.bytes_per_block(),
        load_seconds=0.0,
        attention_backend=runner.attention.name,
        architecture=runner.config.architecture,
        implementation=runner.config.implementation,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_in_flight=2 if asynchronous else 1,
        eos_token_ids=tuple(runner.config.eos_token_ids),
    )
