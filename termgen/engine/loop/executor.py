"""Where steps run. `Executor` is the seam between the loop and the device half.

The device half is imported inside `start`, so importing this module costs no torch.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from termgen.config import EngineConfig
from termgen.vocabulary.startup_phases import LOADING_LIBRARIES
from termgen.vocabulary.step import DeviceInfo, GraphStatus, StepPlan, StepResult
from termgen.vocabulary.token_mask import RowMasks

if TYPE_CHECKING:
    from termgen.engine.device.runner.model_runner import ModelRunner
    from termgen.engine.device.runner.sleep import DeepSleep, LightSleep


SPIN_COUNT = "10000"
"""Some tens of microseconds: about the time between two operations of a step."""

NUM_KERNELS = "128"
"""Compiled matrix products that oneDNN keeps, at up to 0.7 MB each. A model needs about five for
each number of rows that its steps have; compiling one takes half a millisecond."""

MAPPED_BYTES = 8 << 20
"""Pieces of memory from this size on are the system's again as soon as they are freed."""
KEPT_BYTES = 64 << 20
"""Free memory at the end of a heap that is kept for what comes next."""
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Parameters of glibc's mallopt."""


class StepHandle(Protocol):
    """A step on its way."""

    def result(self) -> StepResult:
        """Wait for the step, with the GIL released. Raises whatever the step raised."""
        ...


@runtime_checkable
class UnsampledHandle(StepHandle, Protocol):
    """A step that waits for the masks of its constrained rows."""

    def sample(self, masks: RowMasks) -> StepHandle: ...


class Executor(Protocol):
    """Runs plans in the order they are submitted."""

    def start(self, on_progress: Callable[[str, float], None]) -> DeviceInfo: ...

    def submit(self, plan: StepPlan) -> StepHandle:
        """Start a step; with constrained rows all of it but sampling. Never raises for a failure of
        the step itself: `result` does."""
        ...

    def sample(self, step: StepHandle, masks: RowMasks) -> StepHandle:
        """Go on with the newest step, one with constrained rows: sampling waits for their masks.
        Comes once, before another step is submitted. Never raises for a failure of the step."""
        ...

    def idle(self) -> bool:
        """Do one piece of the work that can wait. Only with no step in flight, and short enough for
        a request to wait for it. False when there is none left."""
        ...

    def graph_status(self) -> GraphStatus: ...

    def sleep(self, level: int) -> None:
        """Let go of the KV cache, and of the weights as `SleepLevel` says. No step is in flight.
        When it raises, nothing has changed."""
        ...

    def give_back(self) -> None:
        """Asleep, and garbage collected: return to the device what nothing refers to any more."""
        ...

    def wake_up(self, on_progress: Callable[[str, float], None]) -> None:
        """Be as after `start`, with the same sizes; all rows are forgotten. Raises EngineError, and
        sleeps on, when that is not possible."""
        ...

    def shutdown(self) -> None: ...


def calm_openmp() -> None:
    """Let idle OpenMP threads sleep instead of spin, unless the user chose otherwise.

    Read by the OpenMP runtime when torch is loaded, so it must come before that. Compute threads
    that spin for each other lose whole time slices as soon as anything else wants a core, and the
    screen of this very process does: measured ten times slower (docs/performance.md).
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)


def bound_kernel_caches() -> None:
    """Limit what oneDNN and torch's layer above it keep of compiled kernels, unless the user did.

    Both read their setting with the first product. Either cache keeps 1024 kernels by itself, and
    steps have ever new numbers of rows: memory would grow for hours, by some 700 MB.
    """
    for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(name, NUM_KERNELS)


def keep_heaps_compact() -> None:
    """Keep tensors of a step out of glibc's heaps, unless the user set these limits.

    By itself it learns to take up to 32 MiB from a heap, where a small piece behind a large one
    that was freed keeps it from shrinking: heaps grow with every new pattern of sizes.
    """
    set_by_user = any(name.startswith("MALLOC_") for name in os.environ)
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None and not (set_by_user or "GLIBC_TUNABLES" in os.environ):
        mallopt(_MMAP_THRESHOLD, MAPPED_BYTES)
        mallopt(_TRIM_THRESHOLD, KEPT_BYTES)


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

    def sample(self, masks: RowMasks) -> FailedStep:
        return self

    def result(self) -> StepResult:
        raise self._error


class WorkerStep:
    """A step in the hands of the worker thread."""

    def __init__(self, launched: Future[StepHandle]) -> None:
        self.launched = launched

    def result(self) -> StepResult:
        return self.launched.result().result()


def _sample(step: StepHandle, masks: RowMasks) -> StepHandle:
    """Any step of which this is left; raises what its first part raised."""
    first = step.launched.result() if isinstance(step, WorkerStep) else step
    assert isinstance(first, UnsampledHandle), type(first)
    return first.sample(masks)


class LocalExecutor:
    """One device in this process.

    On CUDA a submitted step is launched at once and runs on the stream. On a CPU with steps in
    flight, a single worker thread stands in for the stream; without, the step runs in `submit`.
    """

    def __init__(self, config: EngineConfig, path: Path) -> None:
        self._config = config
        self._path = path
        self._runner: ModelRunner | None = None
        self._worker: ThreadPoolExecutor | None = None
        self._info: DeviceInfo | None = None
        self._sleep: LightSleep | DeepSleep | None = None

    def start(self, on_progress: Callable[[str, float], None]) -> DeviceInfo:
        """Load the model and size the caches. Raises ConfigError or ModelError."""
        calm_openmp()
        bound_kernel_caches()
        keep_heaps_compact()
        on_progress(LOADING_LIBRARIES, 0.0)
        from termgen.engine.device.runner.build import build_runner  # torch: seconds

        self._runner, info = build_runner(self._config, self._path, on_progress)
        self._info = info
        if info.device == "cpu" and info.max_in_flight > 1:
            self._worker = ThreadPoolExecutor(1, thread_name_prefix="termgen-cpu-stream")
        return info

    def generation_config(self) -> dict[str, Any]:
        """The model's generation_config.json, or what its GGUF file says instead. After `start`."""
        from termgen.engine.device.loader import load_generation_config  # torch: seconds

        return load_generation_config(self._path)

    def submit(self, plan: StepPlan) -> StepHandle:
        assert self._runner is not None, "start() comes first"
        return self._launch(plan.constrained is None, self._runner.execute, plan)

    def sample(self, step: StepHandle, masks: RowMasks) -> StepHandle:
        return self._launch(True, _sample, step, masks)

    def _launch(
        self, is_whole: bool, launch: Callable[..., StepHandle], *arguments: object
    ) -> StepHandle:
        """is_whole: nothing of the step is left to be launched."""
        if self._worker is not None:
            return WorkerStep(self._worker.submit(self._run, is_whole, launch, *arguments))
        try:
            return self._run(is_whole, launch, *arguments)
        except Exception as error:  # the loop reports it with the step's requests
            return FailedStep(error)

    def _run(
        self, is_whole: bool, launch: Callable[..., StepHandle], *arguments: object
    ) -> StepHandle:
        assert self._runner is not None
        step = launch(*arguments)
        is_over = is_whole and self._runner.device.type == "cpu"
        return DoneStep(step.result()) if is_over else step

    def idle(self) -> bool:
        is_awake = self._sleep is None
        return is_awake and self._runner is not None and self._runner.record_next()

    def graph_status(self) -> GraphStatus:
        return self._runner.graphs.status if self._runner is not None else GraphStatus(0, 0)

    def sleep(self, level: int) -> None:
        from termgen.engine.device.runner.sleep import DeepSleep, LightSleep

        assert self._runner is not None and self._info is not None, "start() comes first"
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
        if self._worker is not None:
            self._worker.shutdown(wait=True, cancel_futures=True)
        self._runner = None
