"""Builds a ready model runner from a configuration; `build_runner` is a start from top to bottom.

Resolve, load, compile, measure, allocate, record: the model's files become tensors on one device,
and the memory that is left becomes the KV cache.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from termgen.config import EngineConfig
from termgen.engine.device import native
from termgen.engine.device.attention.base import AttentionShape
from termgen.engine.device.attention.groups import GroupedAttention
from termgen.engine.device.config.head_config import HeadConfig
from termgen.engine.device.config.model_config import ModelConfig
from termgen.engine.device.drafting.base import Drafter
from termgen.engine.device.kernels import why_unusable
from termgen.engine.device.kernels.gemm.tuned_tables import TunedTables
from termgen.engine.device.kernels.kv_cache import FP8
from termgen.engine.device.kernels.recurrent.layout import GatedDeltaShape
from termgen.engine.device.layers.linear import Build
from termgen.engine.device.layers.ops import LayerOps, TorchOps
from termgen.engine.device.loader import as_stored, load_model_config, open_checkpoint
from termgen.engine.device.loader.safetensors_file import FolderCheckpoint
from termgen.engine.device.loader.transformers_weights import (
    build_transformers_model,
    cache_scales_of,
)
from termgen.engine.device.loader.weights import load_dummy, load_weights
from termgen.engine.device.models.decoder import CausalDecoder
from termgen.engine.device.models.pieces import PiecewiseModel
from termgen.engine.device.models.registry import build_model, check_memory, make_build
from termgen.engine.device.models.transformers_backend import TransformersDecoder
from termgen.engine.device.recurrent.base import GatedDeltaNet
from termgen.engine.device.recurrent.torch_delta import TorchGatedDelta
from termgen.engine.device.runner import resolve
from termgen.engine.device.runner.cpu_experts import CpuExperts, choose_cpu_experts
from termgen.engine.device.runner.cuda_graphs import CudaRecorder, FullGraphs, RecordingError
from termgen.engine.device.runner.dispatch import (
    MOST_DRAFTED_TOKENS,
    CudaGraphDispatcher,
    decode_sizes,
    drafted_sizes,
    mixed_sizes,
    most_recorded_tokens,
    piecewise_sizes,
)
from termgen.engine.device.runner.make_attention import make_attention
from termgen.engine.device.runner.make_drafter import (
    DefaultDraftsError,
    LoadedHead,
    WantedDrafts,
    load_head,
    make_drafter,
    read_drafts,
)
from termgen.engine.device.runner.memory import MemoryAccount, MemoryMeter, make_meter, weight_bytes
from termgen.engine.device.runner.model_runner import ModelRunner
from termgen.engine.device.runner.piecewise_graphs import Recorder
from termgen.engine.device.runner.tuning import make_tables, report_tuned
from termgen.engine.device.runner.warm_up import dummy_run, run_largest_steps, warm_up
from termgen.engine.device.runner.weight_reads import weight_reads
from termgen.errors import ConfigError, ModelNotFoundError
from termgen.vocabulary.cache_groups import tokens_held
from termgen.vocabulary.memory_ledger import MemoryLedger
from termgen.vocabulary.model_info import DeviceInfo
from termgen.vocabulary.sampling_params import MAX_EOS_IDS
from termgen.vocabulary.startup_phases import (
    COMPILING_KERNELS,
    LOADING_WEIGHTS,
    READING_CONFIG,
    READY,
    RECORDING_GRAPHS,
    SIZING_CACHE,
)

logger = logging.getLogger(__name__)

Progress = Callable[[str, float], None]
"""Called with a phase and its completed share."""


def build_runner(
    config: EngineConfig,
    path: Path,
    on_progress: Progress,
    *,
    meter_for: Callable[[torch.device], MemoryMeter] = make_meter,
) -> tuple[ModelRunner, DeviceInfo]:
    """Load the model at `path` and size everything around it. Raises ConfigError or ModelError.

    The memory of steps and graphs is measured before the KV cache gets the rest. A model runs
    without its MTP layer if that was not asked for and cannot be loaded.
    """
    try:
        return _build_runner(config, path, on_progress, meter_for)
    except DefaultDraftsError as error:
        why = str(error)
    logger.warning("%s; no tokens are guessed", why)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    without = replace(config, speculative_config="none")
    return _build_runner(without, path, on_progress, meter_for)


def _build_runner(
    config: EngineConfig,
    path: Path,
    on_progress: Progress,
    meter_for: Callable[[torch.device], MemoryMeter],
) -> tuple[ModelRunner, DeviceInfo]:
    on_progress(READING_CONFIG, 0.0)
    device = resolve.resolve_device(config.device)
    if device.type == "cpu":
        torch.set_num_threads(resolve.resolve_threads(config.threads))
    model_config = load_model_config(path, model_impl=config.model_impl)
    limits = resolve.resolve_limits(config, model_config, device)
    model_config = model_config.for_positions(limits.max_model_len)
    dtype = resolve.resolve_dtype(config.dtype, model_config, device)
    quantization = resolve.resolve_quantization(config, model_config, device, path)
    if quantization is not None and config.load_format != "dummy":
        model_config = as_stored(path, model_config, quantization)
    memory = MemoryAccount(meter_for(device), config, where=str(device))
    memory.check_others()
    cpu_experts = choose_cpu_experts(
        config, model_config, limits, device, path, quantization, memory
    )
    is_shared = cpu_experts is not None
    drafts = read_drafts(config, path, model_config, device, is_shared=is_shared)
    head_config = None if drafts is None else drafts.head
    with memory.making("workspace"):
        attention, shape, passed_over = make_attention(
            config,
            model_config,
            limits,
            dtype,
            device,
            head_config,
            max_queries=1 if drafts is None else 1 + drafts.settings.num_drafts,
        )
    if passed_over and device.type == "cuda":  # a CPU has no faster backend
        logger.warning("%s; using %s", passed_over, attention.name)

    def report(phase: str) -> Callable[[float], None]:
        on_progress(phase, 0.0)
        return partial(on_progress, phase)

    progress = report(LOADING_WEIGHTS)
    with memory.loading_weights(str(dtype).removeprefix("torch.")):
        tuned = make_tables(device)
        recurrent = make_recurrent(model_config, limits, device)
        model = load_model(
            *(config, path, model_config, attention, shape, progress, quantization),
            *(tuned, recurrent, cpu_experts, memory),
        )
        make_part = partial(
            make_build,
            model_config,
            dtype=dtype,
            device=device,
            quantization=quantization,
            tuned=tuned,
            keeps_floats=resolve.keeps_floats(config),
        )
        head = _load_drafter(config, path, drafts, model, attention, shape, make_part)
    memory.weights, memory.reads = weight_bytes(model), weight_reads(model, device)
    assert shape.block_size is not None
    is_recurrent, block_size = recurrent is not None, shape.block_size
    drafter = make_drafter(
        *(drafts, head, attention, limits),
        block_size=block_size,
        device=device,
        is_recurrent=is_recurrent,
    )
    if head is not None:
        memory.weights += weight_bytes(head)
    with memory.making("workspace"):
        runner = _make_runner(config, model, model_config, attention, shape, limits, drafter)
        if cpu_experts is not None:
            runner.placement = cpu_experts.placement
        runner.init_kv_cache(2)  # enough for steps that compute nothing
    dispatcher = choose_graphs(
        config,
        limits,
        device_type=device.type,
        attention=attention,
        model=model,
        drafter=drafter,
    )
    at_rest = ExitStack()
    at_rest.enter_context(runner.experts_at_rest())
    if runner.uses_kernels:
        progress = report(COMPILING_KERNELS)
        with memory.making("activations"):
            warm_up(runner, dispatcher, progress)

    report(SIZING_CACHE)
    memory.measure_activations(partial(run_largest_steps, runner))
    dispatcher = dispatcher.up_to(
        most_recorded_tokens(limits.max_num_batched_tokens, memory.activations, memory.total)
    )
    recorder = None
    if not dispatcher.is_empty:
        recorder = CudaRecorder(device)
        dispatcher = expect_recordings(runner, dispatcher, recorder, memory)
    num_blocks, max_model_len = _size_kv_cache(runner, limits.max_model_len, memory)
    kv_bytes = num_blocks * runner.bytes_per_block()
    with memory.making_kv(kv_bytes):
        runner.init_kv_cache(num_blocks)

    if recorder is None or dispatcher.is_empty:
        runner.graphs = runner.make_graphs(dispatcher)
        dummy_run(runner, 1)
    else:
        progress = partial(on_progress, RECORDING_GRAPHS)
        with memory.recording_graphs():
            in_background = config.capture_in_background
            runner.graphs = record_steps(
                runner, dispatcher, recorder, progress, in_background=in_background
            )
        with memory.making("activations"):
            run_largest_steps(runner)  # allocate again what the first real steps need
    log_implementation(runner)
    ledger = memory.ledger(
        kv_bytes=kv_bytes,
        kv_tokens=tokens_held(num_blocks - 1, runner.block_size, attention.windows),
        are_graphs_made=not runner.graphs.num_waiting,
    )
    if runner.placement is not None:
        ledger = replace(ledger, host_experts=runner.placement.facts)
    logger.info("%s", ledger)
    info = _describe(config, runner, limits, ledger, num_blocks, max_model_len, quantization)
    info = replace(info, num_untuned=report_tuned(model, dtype, tuned))
    at_rest.close()
    runner.be_ready()
    on_progress(READY, 1.0)
    return runner, info


def _load_drafter(
    config: EngineConfig,
    path: Path,
    drafts: WantedDrafts | None,
    model: CausalDecoder | TransformersDecoder,
    attention: GroupedAttention,
    shape: AttentionShape,
    make_part: Callable[..., Build],
) -> LoadedHead | CausalDecoder | None:
    """The model that drafts; None without one. make_part: a target's part, from its `ops`."""
    if drafts is None or drafts.head is None:
        return None
    assert isinstance(model, CausalDecoder)
    if drafts.head.method == "draft_model":
        num_before = model.config.num_layers
        return load_draft_model(config, drafts.head, attention, shape, num_before)
    build = make_part(ops=_make_ops(shape))
    return load_head(config, path, drafts, model, build, attention, shape)


def _make_runner(
    config: EngineConfig,
    model: CausalDecoder | TransformersDecoder,
    model_config: ModelConfig,
    attention: GroupedAttention,
    shape: AttentionShape,
    limits: resolve.Limits,
    drafter: Drafter | None,
) -> ModelRunner:
    assert shape.block_size is not None
    return ModelRunner(
        model,
        model_config,
        attention,
        dtype=shape.dtype,
        kv_cache_dtype=shape.kv_cache_dtype,
        device=shape.device,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_model_len=limits.max_model_len,
        block_size=shape.block_size,
        num_eos_ids=MAX_EOS_IDS,
        spins=resolve.resolve_wait(config.device_wait),
        debug=config.debug,
        caches_states=config.enable_prefix_caching,
        drafter=drafter,
    )


def _size_kv_cache(
    runner: ModelRunner, max_model_len: int, memory: MemoryAccount
) -> tuple[int, int]:
    """(number of blocks, longest context that they can hold)."""
    block_size, bytes_per_block = runner.block_size, runner.bytes_per_block()
    num_blocks = memory.num_blocks(
        block_size=block_size,
        bytes_per_block=bytes_per_block,
        max_model_len=max_model_len,
        kv_bytes=2 * bytes_per_block,
        num_tensors=runner.attention.num_tensors,
        windows=runner.attention.windows,
    )
    return num_blocks, memory.fit_max_model_len(
        max_model_len,
        num_blocks=num_blocks,
        block_size=block_size,
        bytes_per_block=bytes_per_block,
        windows=runner.attention.windows,
    )


def _describe(
    config: EngineConfig,
    runner: ModelRunner,
    limits: resolve.Limits,
    memory: MemoryLedger,
    num_blocks: int,
    max_model_len: int,
    quantization: str | None,
) -> DeviceInfo:
    device = runner.device
    drafter = None if runner.drafts is None else runner.drafts.drafter
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
        windows=runner.attention.windows,
        layers=tuple(len(group.layers) for group in runner.attention.groups),
        state_places=runner.num_state_places,
        max_model_len=max_model_len,
        vocab_size=runner.config.vocab_size,
        hidden_size=runner.config.hidden_size,
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
        quantization=quantization,
        num_drafts=0 if drafter is None else drafter.num_tokens,
        most_forced=0 if runner.drafts is None else runner.drafts.most_forced,
        num_drafts_ahead=0 if drafter is None or drafter.model is None else drafter.model.num_ahead,
    )


def load_model(
    config: EngineConfig,
    path: Path,
    model_config: ModelConfig,
    attention: GroupedAttention,
    shape: AttentionShape,
    on_progress: Callable[[float], None],
    quantization: str | None,
    tuned: TunedTables | None = None,
    recurrent: GatedDeltaNet | None = None,
    cpu_experts: CpuExperts | None = None,
    memory: MemoryAccount | None = None,
) -> CausalDecoder | TransformersDecoder:
    """Load a model, with termgen's own code or transformers'. tuned: products measured here.
    recurrent: for models with recurrent layers. memory: for experts that the CPU computes.

    Raises ModelError or ConfigError.
    """
    if model_config.transformers is not None:
        return _load_transformers_model(config, path, model_config, attention, shape)
    with ExitStack() as stack:
        checkpoint = None
        if config.load_format != "dummy":
            # Opened first: it refuses a config.json whose sizes are not those of the tensors,
            # before anything of those sizes is allocated.
            checkpoint = stack.enter_context(closing(open_checkpoint(path)))
        model = build_model(
            model_config,
            dtype=shape.dtype,
            device=shape.device,
            quantization=quantization,
            attention=attention,
            ops=_make_ops(shape, splits=cpu_experts is not None),
            tuned=tuned,
            recurrent=recurrent,
            make_experts=None if cpu_experts is None else cpu_experts.make,
            keeps_floats=resolve.keeps_floats(config),
        )
        if checkpoint is None:
            load_dummy(model, config.seed)
        else:
            load_weights(model, checkpoint, progress=on_progress)
            if shape.kv_cache_dtype == FP8 and isinstance(checkpoint, FolderCheckpoint):
                model.use_cache_scales(checkpoint.cache_scales())
    if cpu_experts is not None:
        cpu_experts.place(model, memory)
    model.finalize()
    return model


def load_draft_model(
    config: EngineConfig,
    draft: HeadConfig,
    attention: GroupedAttention,
    shape: AttentionShape,
    num_layers: int,
) -> CausalDecoder:
    """The model that drafts. attention: of its layers behind `num_layers` of the target's. Raises
    ModelError or ConfigError."""
    assert draft.folder is not None
    quantization = resolve.resolve_quantization(config, draft.layers, shape.device, draft.folder)
    own = attention.behind(num_layers)
    model = load_model(
        *(config, draft.folder, draft.layers, own, shape), lambda done: None, quantization
    )
    assert isinstance(model, CausalDecoder), "one that transformers runs is refused"
    return model


def _load_transformers_model(
    config: EngineConfig,
    path: Path,
    model_config: ModelConfig,
    attention: GroupedAttention,
    shape: AttentionShape,
) -> TransformersDecoder:
    if config.quantization not in ("auto", "none"):
        raise ConfigError(
            f"quantization {config.quantization} is for the models that termgen's own code runs, "
            f"and {model_config.architecture} runs through transformers; leave it out",
            param="quantization",
        )
    is_dummy = config.load_format == "dummy"
    if not is_dummy and not path.is_dir():
        raise ModelNotFoundError(f"{path} describes a model without weights: use load_format=dummy")
    if shape.device.type == "cpu":
        check_memory(model_config.num_parameters * shape.dtype.itemsize)
    model = build_transformers_model(
        model_config,
        folder=None if is_dummy else path,
        dtype=shape.dtype,
        device=shape.device,
        attention=attention,
        ops=_make_ops(shape),
    )
    if is_dummy:
        load_dummy(model, config.seed)
    model.finalize()
    if shape.kv_cache_dtype == FP8 and not is_dummy:
        model.use_cache_scales(cache_scales_of(model, path))
    return model


def make_recurrent(
    model: ModelConfig, limits: resolve.Limits, device: torch.device
) -> GatedDeltaNet | None:
    """What computes a model's recurrent layers; None for a model without any."""
    linear = model.linear
    if linear is None:
        return None
    shape = GatedDeltaShape(
        num_k_heads=linear.num_k_heads,
        num_v_heads=linear.num_v_heads,
        k_dim=linear.k_dim,
        v_dim=linear.v_dim,
    )
    if why_unusable(device):
        return TorchGatedDelta(shape)
    from termgen.engine.device.recurrent.triton_delta import TritonGatedDelta  # may be missing

    rows, tokens = limits.max_num_seqs, limits.max_num_batched_tokens
    return TritonGatedDelta(shape, max_rows=rows, max_tokens=tokens, device=device)


def _make_ops(shape: AttentionShape, *, splits: bool = False) -> LayerOps:
    """splits: for a model with experts that the CPU computes."""
    if shape.device.type == "cpu" and not native.why_unusable():
        from termgen.engine.device.layers.native_ops import NativeOps  # llvmlite may be missing

        return NativeOps()
    if why_unusable(shape.device, dtype=shape.kv_cache_dtype):
        return TorchOps()
    if splits:
        from termgen.engine.device.host_experts.split_ops import SplitOps

        return SplitOps()
    from termgen.engine.device.layers.triton_ops import TritonOps  # triton may be missing elsewhere

    return TritonOps()


# CUDA graphs: the choice of steps to record, their memory, and recording them.


def choose_graphs(
    config: EngineConfig,
    limits: resolve.Limits,
    *,
    device_type: str,
    attention: GroupedAttention,
    model: object,
    drafter: Drafter | None = None,
) -> CudaGraphDispatcher:
    """The sizes of each kind of recording, or the reason for none.

    If attention cannot be part of a recording it runs between recorded pieces, provided that all
    steps were to be recorded.
    """
    mode = config.cudagraph_mode
    graph_modes = attention.capabilities.graph_modes
    has_pieces = "PIECEWISE" in graph_modes and isinstance(model, PiecewiseModel)
    if isinstance(model, CausalDecoder) and not model.can_be_cut:
        has_pieces = False
    if drafter is not None and drafter.model is not None and drafter.model.reads_states:
        has_pieces = False  # which leave the states of each row's last token alone
    seqs, tokens = limits.max_num_seqs, limits.max_num_batched_tokens

    def none(reason: str) -> CudaGraphDispatcher:
        return CudaGraphDispatcher((), disabled_reason=reason)

    def pieces(why_not_full: str = "") -> CudaGraphDispatcher:
        sizes = piecewise_sizes(seqs, tokens)
        return CudaGraphDispatcher(
            (), piecewise=sizes, max_num_seqs=seqs, why_not_full=why_not_full
        )

    if config.enforce_eager:
        return none("--enforce-eager")
    if mode == "none":
        return none("--cudagraph-mode none")
    if device_type != "cuda":
        return none("no CUDA device")
    if isinstance(model, CausalDecoder) and not model.can_be_recorded:
        return none("experts without Triton kernels cannot be recorded")
    if mode == "piecewise":
        return pieces() if has_pieces else none("the model cannot be cut at attention")
    if "FULL" not in graph_modes:
        why = f"{attention.name} attention cannot be recorded"
        return none(why) if mode == "full_decode_only" or not has_pieces else pieces(why)
    is_both = mode == "full_and_piecewise" and has_pieces
    sizes, lengths = decode_sizes(seqs), () if drafter is None else drafter.lengths
    has_idle = drafter is not None and drafter.may_idle
    return CudaGraphDispatcher(
        sizes,
        mixed=mixed_sizes(tokens) if mode == "full" else (),
        piecewise=piecewise_sizes(seqs, tokens) if is_both else (),
        drafted=drafted_sizes(sizes, lengths, min(MOST_DRAFTED_TOKENS, tokens)),
        has_idle=has_idle,
        max_num_seqs=seqs,
    )


def expect_recordings(
    runner: ModelRunner,
    dispatcher: CudaGraphDispatcher,
    recorder: CudaRecorder,
    memory: MemoryAccount,
) -> CudaGraphDispatcher:
    """Make the largest recordings and drop them, so that `memory` knows the size of all.

    Returns the recordings to make: none if transformers' code cannot be recorded, with the reason
    for every step.
    """
    largest = dispatcher.largest()

    def record() -> FullGraphs:
        trial = runner.make_graphs(largest)
        trial.record_all(recorder, lambda done: None)
        return trial

    try:
        memory.expect_graphs(
            record,
            num_recorded=largest.num_recordings,
            num_wanted=dispatcher.num_recordings,
        )
    except RecordingError as error:
        return _without_recordings(runner, error)
    finally:
        recorder.new_pool()
    return dispatcher


def record_steps(
    runner: ModelRunner,
    dispatcher: CudaGraphDispatcher,
    recorder: Recorder,
    on_progress: Callable[[float], None],
    *,
    in_background: bool = False,
) -> FullGraphs:
    """Record the runner's steps; none if transformers' code cannot be recorded.

    in_background: only the most useful now, the others in idle moments.
    """
    graphs = runner.make_graphs(dispatcher)
    record = graphs.record_useful if in_background else graphs.record_all
    try:
        record(recorder, on_progress)
    except RecordingError as error:
        return runner.make_graphs(_without_recordings(runner, error))
    return graphs


def _without_recordings(runner: ModelRunner, error: RecordingError) -> CudaGraphDispatcher:
    if runner.config.implementation == "termgen":
        raise error  # termgen's own code can always be recorded
    reason = f"{runner.config.architecture} cannot be recorded: {error}"
    logger.warning("%s; its steps run without CUDA graphs", reason)
    return CudaGraphDispatcher((), disabled_reason=reason)


def log_implementation(runner: ModelRunner) -> None:
    config, dispatcher = runner.config, runner.graphs.dispatcher
    code = "termgen's own code"
    if config.implementation == "transformers":
        code = "the modelling code of transformers"
    graphs = str(dispatcher.num_recordings)
    if dispatcher.disabled_reason:
        graphs = f"none ({dispatcher.disabled_reason})"
    logger.info(
        "%s runs through %s, %s attention; CUDA graphs: %s",
        config.architecture,
        code,
        runner.attention.name,
        graphs,
    )
