"""Execution of steps. `Executor` is the interface between the loop and the device half.

The device half is imported inside `start`, so importing this module does not import torch.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from termgen.config import EngineConfig
from termgen.system.cpu_settings import prepare_cpu
from termgen.system.idle_process import IdleProcess
from termgen.vocabulary.model_info import DeviceInfo, GraphStatus
from termgen.vocabulary.request import IntArray
from termgen.vocabulary.startup_phases import LOADING_LIBRARIES
from termgen.vocabulary.step import StepPlan, StepResult
from termgen.vocabulary.token_mask import MaskReceiver

if TYPE_CHECKING:
    from termgen.engine.device.runner.model_runner import ModelRunner
    from termgen.engine.device.runner.sleep import DeepSleep, LightSleep

TUNE_AFTER_S = 20.0
"""Rest after which products are measured: a person who reads an answer may be quicker than that."""
PROGRAM = f"""\
import sys
sys.path.insert(0, {str(Path(__file__).parents[3])!r})
from termgen.__main__ import entry
entry()
"""
"""The `termgen` command, independent of the working directory."""

logger = logging.getLogger(__name__)


class StepHandle(Protocol):
    """A submitted step."""

    def result(self) -> StepResult:
        """Wait for the step, with the GIL released. Raises the step's exception."""
        ...


class Executor(MaskReceiver, Protocol):
    """Runs plans in the order they are submitted. Masks of their constrained rows follow."""

    def start(self, on_progress: Callable[[str, float], None]) -> DeviceInfo: ...

    def submit(self, plan: StepPlan) -> StepHandle:
        """Start a step. It waits for the masks that are posted later, each until it comes or for a
        limited time. A failure of the step is raised by `result`, not here."""
        ...

    def idle(self) -> bool:
        """Do one piece of deferred work, short enough for a request to wait for it; False if none
        is left. No step may be in flight."""
        ...

    def graph_status(self) -> GraphStatus: ...

    def expert_counts(self) -> npt.NDArray[np.int64] | None:
        """[layers, experts]: how many tokens went to each expert; None: that is not counted."""
        ...

    def sleep(self, level: int) -> None:
        """Release the KV cache, and the weights according to `SleepLevel`. No step may be in
        flight. If it raises, nothing has changed."""
        ...

    def give_back(self) -> None:
        """Return unreferenced memory to the device, while asleep and after a garbage collection."""
        ...

    def wake_up(self, on_progress: Callable[[str, float], None]) -> None:
        """Restore the state after `start`, with the same sizes and no rows. On failure raises
        EngineError and stays asleep."""
        ...

    def shutdown(self) -> None: ...


class DoneStep:
    """Handle of a step that has run."""

    def __init__(self, result: StepResult) -> None:
        self._result = result

    def result(self) -> StepResult:
        return self._result


class FailedStep:
    """Handle of a step that could not even be launched."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def result(self) -> StepResult:
        raise self._error


class WorkerStep:
    """Handle of a step that the worker thread runs."""

    def __init__(self, launched: Future[StepHandle]) -> None:
        self.launched = launched

    def result(self) -> StepResult:
        return self.launched.result().result()


class LocalExecutor:
    """One device in this process.

    On CUDA a submitted step is launched at once and runs on the stream. On a CPU with async
    scheduling a worker thread takes the place of the stream; else the step runs in `submit`.
    """

    def __init__(self, config: EngineConfig, path: Path) -> None:
        self._config = config
        self._path = path
        self._runner: ModelRunner | None = None
        self._worker: ThreadPoolExecutor | None = None
        self._info: DeviceInfo | None = None
        self._sleep: LightSleep | DeepSleep | None = None
        self._tuner: IdleProcess | None = None

    def start(self, on_progress: Callable[[str, float], None]) -> DeviceInfo:
        """Load the model and size the caches. Raises ConfigError or ModelError."""
        prepare_cpu()
        on_progress(LOADING_LIBRARIES, 0.0)
        from termgen.engine.device.runner.build import build_runner  # torch: seconds

        self._runner, info = build_runner(self._config, self._path, on_progress)
        self._info = info
        if info.device == "cpu" and info.max_in_flight > 1:
            self._worker = ThreadPoolExecutor(1, thread_name_prefix="termgen-cpu-stream")
        if self._config.tune and info.num_untuned:
            self._tuner = make_tuner(self._path, info.num_untuned, info.quantization)
        return info

    def generation_config(self) -> dict[str, Any]:
        """The model's generation_config.json, or what its GGUF file says instead. After `start`."""
        from termgen.engine.device.loader import load_generation_config  # torch: seconds

        return load_generation_config(self._path)

    def submit(self, plan: StepPlan) -> StepHandle:
        if self._tuner is not None:
            self._tuner.busy()
        if self._worker is not None:
            return WorkerStep(self._worker.submit(self._run, plan))
        try:
            return self._run(plan)
        except Exception as error:  # the loop reports it with the step's requests
            return FailedStep(error)

    def _run(self, plan: StepPlan) -> StepHandle:
        assert self._runner is not None, "start() comes first"
        step = self._runner.execute(plan)
        return DoneStep(step.result()) if self._runner.device.type == "cpu" else step

    @property
    def waits_for_masks(self) -> bool:
        assert self._runner is not None, "start() comes first"
        return self._runner.state.masks.is_awaited

    def post_masks(
        self,
        slots: IntArray,
        positions: IntArray,
        bits: IntArray,
        forced: Sequence[Sequence[int]] | None = None,
    ) -> None:
        assert self._runner is not None, "rows have slots while the engine is awake"
        self._runner.state.masks.post(slots, positions, bits, forced)

    def withhold_masks(self, slots: IntArray) -> None:
        if self._runner is not None:
            self._runner.state.masks.withhold(slots)

    def idle(self) -> bool:
        if self._sleep is not None or self._runner is None:
            return False
        if self._runner.record_next():
            return True
        if self._tuner is not None:
            self._tuner.rest()
        return False

    def graph_status(self) -> GraphStatus:
        return self._runner.graphs.status if self._runner is not None else GraphStatus(0, 0)

    def expert_counts(self) -> npt.NDArray[np.int64] | None:
        return self._runner.expert_counts() if self._runner is not None else None

    def sleep(self, level: int) -> None:
        from termgen.engine.device.runner.sleep import DeepSleep, LightSleep

        assert self._runner is not None and self._info is not None, "start() comes first"
        if self._tuner is not None:
            self._tuner.end()  # the GPU is to be free for others
        if level == 1:
            self._sleep = LightSleep(self._runner, self._config, self._info)
        else:
            self._sleep = DeepSleep(self._config, self._path, self._info)
            self._runner = None

    def give_back(self) -> None:
        assert self._sleep is not None, "sleep() comes first"
        self._sleep.give_back()

    def wake_up(self, on_progress: Callable[[str, float], None]) -> None:
        assert self._sleep is not None, "sleep() comes first"
        self._runner = self._sleep.wake_up(on_progress)
        self._sleep = None

    def shutdown(self) -> None:
        if self._tuner is not None:
            self._tuner.close()
        if self._worker is not None:
            self._worker.shutdown(wait=True, cancel_futures=True)
        self._runner = None


def make_tuner(path: Path, num_shapes: int, quantization: str | None) -> IdleProcess:
    """`termgen tune` for the model at `path`, in idle moments. It takes effect with the next start:
    this engine's recordings hold the products that it started with. quantization: the engine's."""

    def tell_start() -> None:
        logger.info(
            "measuring %d products of this model on this GPU while no request runs (--no-tune "
            "leaves it)",
            num_shapes,
        )

    def tell_end(code: int, output: str) -> None:
        last = output.strip().rpartition("\n")[2]
        if code:
            logger.warning("products were not measured: %s", last or f"exit code {code}")
        else:
            logger.info("%s", last)

    options = ["--background", "--quantization", quantization or "none"]
    command = [sys.executable, "-P", "-c", PROGRAM, "tune", *options, str(path)]
    return IdleProcess(command, after_s=TUNE_AFTER_S, on_start=tell_start, on_end=tell_end)
