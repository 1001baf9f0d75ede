"""Records a runner's steps at start, and finds out before what the recordings will take."""

from __future__ import annotations

import logging
from collections.abc import Callable

from termgen.engine.device.runner.cuda_graphs import CudaRecorder, FullGraphs, RecordingError
from termgen.engine.device.runner.dispatch import CudaGraphDispatcher
from termgen.engine.device.runner.memory import MemoryAccount
from termgen.engine.device.runner.model_runner import ModelRunner
from termgen.engine.device.runner.piecewise_graphs import Recorder

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
