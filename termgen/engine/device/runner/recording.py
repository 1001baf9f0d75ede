"""Chooses the steps to record as CUDA graphs, sizes them beforehand and records them."""

from __future__ import annotations

import logging
from collections.abc import Callable

from termgen.config import EngineConfig
from termgen.engine.device.attention.base import AttentionBackend
from termgen.engine.device.models.decoder import CausalDecoder
from termgen.engine.device.models.pieces import PiecewiseModel
from termgen.engine.device.runner.cuda_graphs import CudaRecorder, FullGraphs, RecordingError
from termgen.engine.device.runner.dispatch import (
    CudaGraphDispatcher,
    decode_sizes,
    mixed_sizes,
    piecewise_sizes,
)
from termgen.engine.device.runner.memory import MemoryAccount
from termgen.engine.device.runner.model_runner import ModelRunner
from termgen.engine.device.runner.piecewise_graphs import Recorder
from termgen.engine.device.runner.resolve import Limits


def choose_graphs(
    config: EngineConfig,
    limits: Limits,
    *,
    device_type: str,
    attention: AttentionBackend,
    model: object,
) -> CudaGraphDispatcher:
    """The sizes of each kind of recording, or why there are none.

    Attention that cannot be part of a recording can still run between two: where all steps were to
    be recorded, they are recorded in pieces then.
    """
    mode = config.cudagraph_mode
    graph_modes = attention.capabilities.graph_modes
    has_pieces = "PIECEWISE" in graph_modes and isinstance(model, PiecewiseModel)
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
    return CudaGraphDispatcher(
        decode_sizes(seqs),
        mixed=mixed_sizes(tokens) if mode == "full" else (),
        piecewise=piecewise_sizes(seqs, tokens) if is_both else (),
        max_num_seqs=seqs,
    )


logger = logging.getLogger(__name__)


def expect_recordings(
    runner: ModelRunner,
    dispatcher: CudaGraphDispatcher,
    recorder: CudaRecorder,
    memory: MemoryAccount,
) -> CudaGraphDispatcher:
    """Makes the largest recordings and forgets them, so that `memory` knows what all will take.

    What to record after all: code of transformers that cannot be recorded runs without, and the
    reason is every step's.
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
    """Recordings of the runner's steps; none, as above, of code that cannot be recorded.

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
        raise error  # our own code can be recorded
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
