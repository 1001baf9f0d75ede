"""Sleep and wake-up of an idle engine: the host half and the executor, in the right order.

Both functions run on the engine thread and block it.
"""

from __future__ import annotations

import gc
import time

from termgen.engine.loop.core import EngineCore


def fall_asleep(core: EngineCore, level: int) -> None:
    """Put a paused engine to sleep. Requests kept by the pause are recomputed after waking up."""
    core.control.lie_down(level)
    try:
        core.executor.sleep(level)
    except BaseException:
        core.control.get_up()  # the executor has restored its state
        raise
    # Objects of the start-up are frozen, and frozen reference cycles are never freed.
    gc.unfreeze()
    gc.collect()
    core.executor.give_back()


def wake_up(core: EngineCore) -> None:
    """Wake the engine; a no-op if awake. After a failure it stays asleep and can be woken again."""
    if not core.control.sleep_level:
        return

    def on_progress(phase: str, fraction: float) -> None:
        core.last_progress_ns = time.perf_counter_ns()  # reading large weights is not a stall

    try:
        core.executor.wake_up(on_progress)
    except BaseException:
        gc.collect()
        core.executor.give_back()
        raise
    gc.collect()
    gc.freeze()
    core.control.get_up()
