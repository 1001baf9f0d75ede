"""Sleep and waking up of an engine at rest: its host half and its executor, in the right order.

Both functions run on the engine's thread, and block it: nothing else is to be done meanwhile.
"""

from __future__ import annotations

import gc
import time

from termgen.engine.loop.core import EngineCore


def fall_asleep(core: EngineCore, level: int) -> None:
    """After a pause. Requests that it kept are computed again after waking up."""
    core.control.lie_down(level)
    try:
        core.executor.sleep(level)
    except BaseException:
        core.control.get_up()  # the executor has taken back what it had given
        raise
    # What start-up made was frozen, and frozen objects that refer to each other are never freed.
    gc.unfreeze()
    gc.collect()
    core.executor.give_back()


def wake_up(core: EngineCore) -> None:
    """Does nothing when awake. When it fails, the engine sleeps on and can be woken again."""
    if not core.control.sleep_level:
        return

    def on_progress(phase: str, fraction: float) -> None:
        core.last_progress_ns = time.perf_counter_ns()  # reading large weights is no stall

    try:
        core.executor.wake_up(on_progress)
    except BaseException:
        gc.collect()
        core.executor.give_back()
        raise
    gc.collect()
    gc.freeze()
    core.control.get_up()
