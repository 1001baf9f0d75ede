"""A recorded event stream, played again: an `EngineFeed` with a clock one can stop, turn and speed.

The file is what `GET /v1/events` sent, byte for byte. Frames are indexed by their time at the start
and decoded again when played, so that an hour of steps does not fill the memory.
"""

from __future__ import annotations

import bisect
import time
from collections.abc import Callable
from pathlib import Path

from termgen.errors import TermgenError
from termgen.tui.feeds.feed import PASSED_KEPT, StreamFeed
from termgen.tui.paint.formatting import clock
from termgen.vocabulary.engine_history import EngineHistory, HistoryState
from termgen.vocabulary.events import RequestEvent
from termgen.vocabulary.telemetry import (
    Cache,
    Events,
    Frame,
    FrameReader,
    Gpu,
    Message,
    Opening,
    TelemetryError,
    decode,
    encode,
)

LOOK_BACK_NS = 150_000_000_000
"""Time that is replayed before the chosen moment: more than the dashboard's series show."""
CHECKPOINT_NS = 120_000_000_000
PART_EVENTS = 512
"""Played at once, so that keys are answered while minutes are played again."""
MIN_SPEED, MAX_SPEED = 1 / 16, 16.0
READ_BYTES = 1 << 20


class ReplayError(TermgenError):
    """A file that is no recording."""


class ReplayFeed(StreamFeed):
    """Plays one recording from its begin. `advance` is called before each frame of the screen."""

    def __init__(
        self,
        frames: list[tuple[int, Frame]],
        now_ns: Callable[[], int] = time.perf_counter_ns,
        *,
        checkpoints: Checkpoints | None = None,
    ) -> None:
        opening = decode(frames[0][1])
        assert isinstance(opening, Opening)
        super().__init__(opening)
        self._checkpoints = checkpoints
        self._frames = frames
        self._times = [time_ns for time_ns, _ in frames]
        # Where the frames are that tell how something stands.
        self._places: dict[str, list[int]] = {"snapshot": [], "model": [], "cache": []}
        for place, (_, frame) in enumerate(frames):
            if frame.event in self._places:
                self._places[frame.event].append(place)
        self._wall_ns = now_ns
        self._next = 0
        self._at_ns = self._times[0]
        self._since_ns = now_ns()
        self.speed = 1.0
        self.is_stopped = False
        self._next = 1
        self.take(opening)  # the rest is for rings that are yet to come

    @classmethod
    def open(cls, path: Path) -> ReplayFeed:
        """Raises ReplayError for a file that is missing, or none of ours."""
        try:
            checkpoints = Checkpoints()
            return cls(read_frames(path, checkpoints), checkpoints=checkpoints)
        except ReplayError as error:
            raise ReplayError(f"--replay {error}") from error
        except OSError as error:
            raise ReplayError(f"--replay {path}: {error.strerror}") from error

    @property
    def length_ns(self) -> int:
        return self._times[-1] - self._times[0]

    @property
    def words(self) -> str:
        """`0:12/1:40`, with the speed when it is not that of life."""
        speed = "" if self.speed == 1 else f" ×{self.speed:g}"
        return f"{clock(self.position_ns / 1e9)}/{clock(self.length_ns / 1e9)}{speed}"

    @property
    def position_ns(self) -> int:
        """Time since the begin of the recording."""
        return self.now_ns() - self._times[0]

    def now_ns(self) -> int:
        """Time of the recording now; it ends with its last frame."""
        if self.is_stopped:
            return self._at_ns
        elapsed = int((self._wall_ns() - self._since_ns) * self.speed)
        return min(self._at_ns + elapsed, self._times[-1])

    def advance(self) -> bool:
        """Pass on the next part of what has happened by now. Whether there is more.

        Another stream begins a part of its own: its events are not to be taken for older ones.
        """
        now, num_events, num_snapshots = self.now_ns(), 0, 0
        while self._next < len(self._frames) and self._times[self._next] <= now:
            frame = self._frames[self._next][1]
            is_full = num_events >= PART_EVENTS or num_snapshots >= PASSED_KEPT
            if is_full or (num_events and frame.event == "snapshot"):
                return True
            self._next += 1
            message = decode(frame)
            if isinstance(message, Events):
                num_events += len(message.events)
            num_snapshots += isinstance(message, Cache)
            if message is not None:
                self.take(message)
        return False

    def stop(self, stopped: bool) -> None:
        """Hold the clock, or let it run again."""
        self._at_ns, self._since_ns = self.now_ns(), self._wall_ns()
        self.is_stopped = stopped

    def set_speed(self, factor: float) -> None:
        self._at_ns, self._since_ns = self.now_ns(), self._wall_ns()
        self.speed = min(MAX_SPEED, max(MIN_SPEED, self.speed * factor))

    def seek(self, by_ns: int) -> None:
        """Turn the clock. Backwards, what happened before the new moment is played once more."""
        target = min(self._times[-1], max(self._times[0], self.now_ns() + by_ns))
        self._since_ns = self._wall_ns()
        self._at_ns = target
        if by_ns < 0:
            self.epoch += 1
            self._next = bisect.bisect_left(self._times, target - LOOK_BACK_NS)
            if self._checkpoints is not None:
                self._next = self._checkpoints.before(self._next)
            self._restore(self._next)
        self.advance()

    def _restore(self, place: int) -> None:
        """Everything as it stood before a frame, and nothing of what came later."""
        self.stream, self._snapshot, self.begun = "", None, None
        self._passed.clear()
        self._gpu.clear()
        begun = self._last_before(place, "snapshot")
        if begun is None:
            return  # the first frame is played again
        found = [self._last_before(place, kind) for kind in ("model", "cache")]
        for at in (begun, *(at for at in found if at is not None and at > begun)):
            message = decode(self._frames[at][1])
            assert message is not None
            self.take(message)
        self.begun, self._awaits_past = self._snapshot, False
        if self._checkpoints is not None:
            self.take(self._checkpoints.state_at(place))

    def _last_before(self, place: int, kind: str) -> int | None:
        index = bisect.bisect_left(self._places[kind], place) - 1
        return self._places[kind][index] if index >= 0 else None


class Checkpoints:
    """The coarse history of a recording at some of its frames, packed: an hour has about a
    megabyte of them."""

    def __init__(self) -> None:
        self._history = EngineHistory()
        self._stream = ""
        self._due_ns = 0
        self._places = [0]
        """Frames that have a checkpoint before them, and the beginning."""
        self._states: list[Frame] = []

    def add(self, place: int, time_ns: int, message: Message) -> None:
        """Note the next frame of the recording."""
        if isinstance(message, Opening):
            if message.stream != self._stream:
                self._stream, self._history = message.stream, EngineHistory()
            self._due_ns = self._due_ns or time_ns + CHECKPOINT_NS
        elif time_ns >= self._due_ns:
            self._due_ns = time_ns + CHECKPOINT_NS
            self._places.append(place)
            self._states.append(encode(self._history.state(), ""))
        if isinstance(message, Events):
            self._history.add(message.events)
        elif isinstance(message, HistoryState):
            self._history.restore(message)

    def before(self, place: int) -> int:
        """The last frame with a checkpoint, at or before another."""
        return self._places[bisect.bisect_right(self._places, place) - 1]

    def state_at(self, place: int) -> HistoryState:
        """The history before a frame that has a checkpoint."""
        state = decode(self._states[self._places.index(place) - 1])
        assert isinstance(state, HistoryState)
        return state


def read_frames(path: Path, checkpoints: Checkpoints | None = None) -> list[tuple[int, Frame]]:
    """Frames with their times, never falling. A file cut off in the middle of a frame is fine."""
    reader, newest = FrameReader(), 0
    frames: list[tuple[int, Frame]] = []
    with path.open("rb") as file:
        while data := file.read(READ_BYTES):
            try:
                found = [(frame, decode(frame)) for frame in reader.feed(data)]
            except TelemetryError as error:
                raise ReplayError(f"{path}: {error}") from error
            for frame, message in found:
                if message is None:
                    continue
                if not frames and not isinstance(message, Opening):
                    raise ReplayError(f"{path}: it does not begin with a snapshot frame")
                newest = max(newest, _time_of(message, newest))
                if checkpoints is not None:
                    checkpoints.add(len(frames), newest, message)
                frames.append((newest, frame))
    if not frames:
        raise ReplayError(f"{path}: no frame of an event stream in it")
    return frames


def _time_of(message: Message, default: int) -> int:
    if isinstance(message, Opening):
        return message.clock_ns
    if isinstance(message, Cache):
        return message.snapshot.time_ns
    if isinstance(message, Gpu) and message.readings:
        return message.readings[-1].time_ns
    if isinstance(message, Events) and message.events:
        last = message.events[-1]
        return last.time_ns if isinstance(last, RequestEvent) else last.applied_ns
    return default
