"""When steps began and ended on the device, told in the host's time.

With steps queued, the time of a launch says little about when the device came to it. Two events
around the step's operations say it exactly, but only relative to other events. The runner makes one
clock per engine on CUDA; nothing here waits for the device once the clock is made.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch

REFERENCE_MS = 4096.0
"""After so long another event is the reference: times between events are float32, which
this far apart still counts quarters of a microsecond."""


class TimingEvent(Protocol):
    def record(self, stream: Any) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        """Whether it has happened."""
        ...

    def elapsed_time(self, end: Any, /) -> float:
        """Milliseconds from this event to another of its kind; both have happened."""
        ...


def cuda_event(*, spins: bool = False) -> TimingEvent:
    """spins: the thread that waits for it keeps a core busy instead of going to sleep."""
    return torch.cuda.Event(enable_timing=True, blocking=not spins)  # type: ignore[no-untyped-call]


class DeviceClock:
    """Maps events of the current stream to `time.perf_counter_ns`.

    The host sees an event some time after it happened, never before: the smallest such delay seen
    is taken for zero, so that the two clocks cannot drift apart.
    """

    def __init__(
        self,
        make_event: Callable[[], TimingEvent] = cuda_event,
        now_ns: Callable[[], int] = time.perf_counter_ns,
        stream: Any = None,
    ) -> None:
        """stream: the one that steps are launched on; None for the current one, which torch looks
        up at every mark."""
        self._make_event = make_event
        self._spare: list[TimingEvent] = []
        """Marks that have been read: making an event takes as long as recording it."""
        self._stream = stream
        self._reference = self.mark()
        self._reference.synchronize()
        self._reference_ns = float(now_ns())
        self._least_delay_ns = math.inf
        self._last_end: TimingEvent | None = None

    def mark(self) -> TimingEvent:
        """An event that happens when everything launched so far is done."""
        event = self._spare.pop() if self._spare else self._make_event()
        event.record(self._stream)
        return event

    def start(self) -> DeviceStart:
        return DeviceStart(self, self.mark())

    def end(self) -> TimingEvent:
        """A mark behind the operations of a step."""
        self._last_end = self.mark()
        return self._last_end

    @property
    def is_busy(self) -> bool:
        """Whether a step is on the device still."""
        return self._last_end is not None and not self._last_end.query()

    def read(self, start: TimingEvent, end: TimingEvent, seen_ns: int) -> tuple[int, int]:
        """Host times of two marks that have happened, as the host saw at `seen_ns`.

        They may be used again from now on: to be read once.
        """
        since_ms = self._reference.elapsed_time(end)
        if since_ms > 2 * REFERENCE_MS:  # after a long rest nothing is known of the drift
            self._reference_ns = seen_ns - since_ms * 1e6
        end_ns = self._reference_ns + since_ms * 1e6
        delay_ns = seen_ns - end_ns
        if delay_ns < 0:  # the reference was thought later than it was
            self._reference_ns += delay_ns
            end_ns, delay_ns = float(seen_ns), 0.0
        self._least_delay_ns = min(self._least_delay_ns, delay_ns)
        start_ns = end_ns - start.elapsed_time(end) * 1e6
        self._spare.append(start)
        if since_ms > REFERENCE_MS:
            self._reference = end
            self._reference_ns = end_ns + self._least_delay_ns
            self._least_delay_ns = math.inf
        elif end is not self._last_end:
            self._spare.append(end)
        return round(start_ns), round(end_ns)


class DeviceStart(NamedTuple):
    """Where a step begins in the compute stream, and the clock to read it by."""

    clock: DeviceClock
    mark: TimingEvent
