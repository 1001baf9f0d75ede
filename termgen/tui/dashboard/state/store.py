"""DashboardStore: reduces engine events and snapshots to what the dashboard shows.

Pure bookkeeping: no Textual, no clock of its own (every call gets `now_ns` in perf_counter time).
The dashboard screen feeds it and passes the resulting `DashboardView` to the renderers.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, NamedTuple, Protocol

import numpy as np

from termgen.tui.dashboard.state.log import LogBook
from termgen.tui.dashboard.state.request_history import RequestHistory
from termgen.vocabulary.alerts import AlertLimits
from termgen.vocabulary.engine_history import WIDTH_NS, EngineHistory
from termgen.vocabulary.events import (
    EngineEvent,
    EngineSnapshot,
    RequestEvent,
    RequestEventKind,
    StepRecord,
)
from termgen.vocabulary.request_tracks import RequestTracks, Track
from termgen.vocabulary.step_figures import (
    BUCKET_NS,
    QUEUE_MS,
    TTFT_MS,
    Series,
    StepFigures,
    Values,
)
from termgen.vocabulary.time_spread import LongTimes, Spread

MAX_SIZES = 512
"""Sizes and reasons kept apart; an engine records far fewer."""
_KIND = attrgetter(
    "graph_mode", "graph_reason", "num_decode_rows", "num_prefill_tokens", "num_padded_tokens"
)

HISTORY_BUCKETS = 480
RATE_BUCKETS = 4
"""Rates are averages over the last full second."""
STEP_HISTORY = 1024
STEP_WINDOW_S = 30
HOST_READ_S = 0.9
"""Processor time over less than this says little."""
KEPT_S = HISTORY_BUCKETS * BUCKET_NS // 1_000_000_000
"""How far back times are known: of steps and gaps, 30 s of it are shown unless one asks for more;
of what comes but once a request, all."""
COARSE_S = 3600
FINISHED_KEPT = 64
SNAPSHOT_BYTES = 32 * 2**20
"""Memory for past snapshots, to step back through."""
ROW_BYTES = 64 * 1024
"""Allowance for the requests of a snapshot."""
STEP_TOKENS = attrgetter("num_prefill_tokens", "num_decode_rows", "num_padded_tokens")
_MODE = attrgetter("graph_mode")


@dataclass(frozen=True, slots=True)
class SizeFigures:
    """One recorded size in one mode."""

    mode: str
    size: int
    """Tokens of the recording: those of the step and its padding."""
    hits: int
    tokens: int
    padded: int

    @property
    def waste(self) -> float:
        """Share of the computed tokens that were padding."""
        total = self.tokens + self.padded
        return self.padded / total if total else 0.0


@dataclass(frozen=True, slots=True)
class GraphFigures:
    """Counts so far; the tuples have the most frequent first."""

    num_steps: int = 0
    modes: tuple[tuple[str, int], ...] = ()
    """Steps by mode: FULL, PIECEWISE, NONE."""
    sizes: tuple[SizeFigures, ...] = ()
    reasons: tuple[tuple[str, str, int], ...] = ()
    """Mode the step had to run in, why, and how often."""

    @property
    def share_recorded(self) -> float | None:
        """Steps run from a recording, whole or in pieces."""
        without = dict(self.modes).get("NONE", 0)
        return (self.num_steps - without) / self.num_steps if self.num_steps else None


class GraphStats:
    """Counts steps. `figures` is cheap to ask for again while nothing was counted."""

    def __init__(self) -> None:
        self._modes: Counter[str] = Counter()
        self._sizes: dict[tuple[str, int], list[int]] = {}
        self._reasons: Counter[tuple[str, str]] = Counter()
        self._figures: GraphFigures | None = GraphFigures()

    def add(self, steps: Sequence[StepRecord], *, sign: int = 1) -> None:
        """Many steps are alike: those are counted at once. sign: -1 takes them out again."""
        self._figures = None
        for (mode, reason, decode, prefill, padded), count in Counter(map(_KIND, steps)).items():
            number = sign * count
            self._modes[mode] += number
            if reason:
                self._count_reason(mode, reason, number)
            tokens = decode + prefill
            key = (mode, tokens + padded)
            if mode == "NONE" or (key not in self._sizes and len(self._sizes) >= MAX_SIZES):
                continue
            counts = self._sizes.setdefault(key, [0, 0, 0])
            for i, more in enumerate((1, tokens, padded)):
                counts[i] += number * more

    def _count_reason(self, mode: str, reason: str, number: int) -> None:
        key = (mode, reason)
        self._reasons[
            key if key in self._reasons or len(self._reasons) < MAX_SIZES else (mode, "other")
        ] += number

    @property
    def figures(self) -> GraphFigures:
        if self._figures is None:
            known = {key: c for key, c in self._sizes.items() if c[0]}
            sizes = [SizeFigures(mode, size, *c) for (mode, size), c in known.items()]
            self._figures = GraphFigures(
                num_steps=sum(self._modes.values()),
                modes=tuple((mode, n) for mode, n in self._modes.most_common() if n),
                sizes=tuple(sorted(sizes, key=lambda s: (-s.hits, s.mode, s.size))),
                reasons=tuple((m, why, n) for (m, why), n in self._reasons.most_common() if n),
            )
        return self._figures


def graphs_before(figures: GraphFigures, later: Sequence[StepRecord]) -> GraphFigures:
    """The counts without those of later steps."""
    stats = GraphStats()
    stats._modes = Counter(dict(figures.modes))
    stats._sizes = {(s.mode, s.size): [s.hits, s.tokens, s.padded] for s in figures.sizes}
    stats._reasons = Counter({(mode, why): number for mode, why, number in figures.reasons})
    stats.add(later, sign=-1)
    return stats.figures


class HostReading(NamedTuple):
    """Resources that the engine's process uses."""

    cores: float
    """Cores that it kept busy since the reading before."""
    resident_bytes: int
    time_ns: int = 0


class RequestRow(NamedTuple):
    """One request of the table."""

    request_id: str
    state: str
    """waiting, prefill, decode, unread, preempted, or its finish reason."""
    prompt: int
    cached: int
    computed: int
    output: int
    step_tokens: int
    blocks: int
    age_s: float
    rate: float | None
    """Output tokens per second since its first token."""
    preemptions: int
    finished: bool = False
    params: str = ""
    """Sampling parameters, where they are known."""


@dataclass(frozen=True, slots=True, eq=False)
class DashboardView:
    """Everything a frame of the dashboard needs."""

    now_ns: int
    uptime_s: float
    decode_rate: float
    prefill_rate: float
    decode_series: Values
    """Tokens generated per second, in points of `BUCKET_NS` whatever the window is."""
    series: Series
    step: Spread
    gap: Spread
    """Time between two tokens of a request."""
    ttft: Spread
    queue: Spread
    """Time from a request's arrival until it had a slot."""
    queued: LongTimes
    """Requests that had a slot within the window of `queue`."""
    num_running: int
    num_waiting: int
    num_finished: int
    num_preemptions: int
    num_used_blocks: int
    num_cached_blocks: int
    num_free_blocks: int
    prefix_hit_rate: float | None
    prefix_hit_tokens: int
    generation_tokens: int
    prompt_tokens: int
    steps: tuple[StepRecord, ...]
    """Oldest first."""
    requests: tuple[RequestRow, ...]
    """Running, then waiting, then the newest finished ones."""
    snapshot: EngineSnapshot | None
    num_dropped: int
    max_num_seqs: int | None
    max_num_batched_tokens: int | None
    graphs: GraphFigures
    on_cpu: bool = False
    """There is no GPU: nothing of CUDA graphs is shown, and of the processor instead."""
    host: tuple[HostReading, ...] = ()
    """The newest last, about one a second."""
    num_cores: int = 0
    """Processors that the engine may run on; 0 where it is not known."""
    window_s: int | None = None
    """How far back the series go; None: as many of their points as there is room for. Beyond
    `KEPT_S` their points are those of the coarse history."""
    preemption_rate: float = 0.0
    """Preemptions in the last full second."""
    alert_limits: AlertLimits = ()
    known_s: int = 0
    """How far back the coarse history goes, an hour at most."""
    is_past: bool = False
    """The figures are those of an earlier step; `steps` has the later ones too."""
    snapshot_off: int = 0
    """Steps from the marked one to the snapshot of a past view; 0: it was taken at that step."""

    @property
    def is_coarse(self) -> bool:
        """The series have a point for ten seconds, and percentiles are right to within 5%."""
        return self.window_s is not None and self.window_s > KEPT_S

    @property
    def beyond(self) -> frozenset[str]:
        """Names of the limits that are exceeded."""
        if not self.alert_limits:
            return frozenset()
        values = {
            "ttft_p95_ms": self.ttft.p95,
            "itl_p99_ms": self.gap.p99,
            "waiting": self.num_waiting,
            "kv_use": self.kv_usage,
            "preemptions_per_s": self.preemption_rate,
        }
        return frozenset(name for name, limit in self.alert_limits if (values[name] or 0.0) > limit)

    @property
    def num_blocks(self) -> int:
        return self.num_used_blocks + self.num_cached_blocks + self.num_free_blocks

    @property
    def kv_usage(self) -> float:
        return self.num_used_blocks / self.num_blocks if self.num_blocks else 0.0

    @property
    def is_idle(self) -> bool:
        return self.num_running == 0 and self.num_waiting == 0

    @property
    def has_run(self) -> bool:
        """True if the engine has computed anything, also before the dashboard was opened."""
        snapshot = self.snapshot
        seen_before = snapshot is not None and (snapshot.step or snapshot.generation_tokens)
        return bool(self.steps or seen_before)

    @property
    def steps_so_far(self) -> tuple[StepRecord, ...]:
        """The steps up to the time of this view."""
        if not self.is_past:
            return self.steps
        return self.steps[: bisect_right(self.steps, self.now_ns, key=attrgetter("applied_ns"))]

    @property
    def last_step(self) -> StepRecord | None:
        return self.steps[-1] if self.steps else None


class Kept(NamedTuple):
    """Copies of what the store keeps of the past."""

    figures: StepFigures
    coarse: StepFigures | None
    snapshots: tuple[EngineSnapshot, ...]
    """Oldest first."""
    finished: tuple[tuple[int, RequestRow], ...]
    """(time, row), the newest first."""


class Facts(Protocol):
    """What a row needs to know of a request beside its snapshot."""

    @property
    def first_token_ns(self) -> int:
        """0 or 1 where it is not known."""
        ...

    @property
    def params(self) -> str: ...


class DashboardStore:
    """Feed it with `apply` and `set_snapshot`, read it with `view`."""

    def __init__(
        self,
        *,
        started_ns: int,
        on_cpu: bool = False,
        num_cores: int = 0,
        history: EngineHistory | None = None,
    ) -> None:
        """history: for lengths of time beyond those of the live series; fed elsewhere."""
        self.started_ns = started_ns
        self.on_cpu = on_cpu
        self.num_cores = num_cores
        self._host: deque[HostReading] = deque(maxlen=KEPT_S)
        self._host_read: tuple[int, float] | None = None
        """(time, processor time) of the last reading."""
        self._coarse = history
        self.num_dropped = 0
        self._steps: deque[StepRecord] = deque(maxlen=STEP_HISTORY)
        self._figures = StepFigures(kept_buckets=2 * HISTORY_BUCKETS, kept_times=2 * KEPT_S)
        self._tracks = RequestTracks()
        self._finished: deque[tuple[int, RequestRow]] = deque(maxlen=FINISHED_KEPT)
        self._num_preempted: dict[str, int] = {}
        """How often each request of the last snapshot was."""
        self._num_finished = 0
        self._graphs = GraphStats()
        self.history = RequestHistory()
        """Activity of each request in the kept steps."""
        self.log = LogBook()
        self._snapshot: EngineSnapshot | None = None
        self._snapshots: deque[EngineSnapshot] = deque()
        """The last ones, of at most `SNAPSHOT_BYTES`."""

    def apply(self, events: Iterable[EngineEvent]) -> None:
        """Steps are counted together; only events of requests are applied one by one."""
        steps: list[StepRecord] = []
        num_passed = 0  # steps that lanes and log have
        for event in events:
            if isinstance(event, StepRecord):
                steps.append(event)
                continue
            if num_passed < len(steps):  # in the order in which they came
                self._pass_on(steps[num_passed:])
                num_passed = len(steps)
            self._apply_request(event)
        if num_passed < len(steps):
            self._pass_on(steps[num_passed:])
        if steps:
            self._steps.extend(steps)
            self._graphs.add(steps)
            self._figures.add(steps)
        self._tracks.pass_waits(self._figures)

    def _pass_on(self, steps: Sequence[StepRecord]) -> None:
        self.history.add_steps(steps)
        self.log.add_steps(steps)

    def set_snapshot(self, snapshot: EngineSnapshot) -> None:
        self._snapshot = snapshot
        self.keep_snapshot(snapshot)
        self._read_host(snapshot)
        self.history.add_snapshot(snapshot)
        self._num_preempted = {r.request_id: r.num_preemptions for r in snapshot.requests}

    def keep_snapshot(self, snapshot: EngineSnapshot) -> None:
        """Keep it for looking back, once."""
        if self._snapshots and self._snapshots[-1].time_ns == snapshot.time_ns:
            return
        self._snapshots.append(snapshot)
        arrays = (snapshot.block_states, snapshot.block_owners, snapshot.block_groups)
        size = sum(array.nbytes for array in arrays) + ROW_BYTES
        while len(self._snapshots) > max(2, SNAPSHOT_BYTES // size):
            self._snapshots.popleft()

    def _read_host(self, snapshot: EngineSnapshot) -> None:
        if not snapshot.cpu_s:
            return
        if self._host_read is not None:
            elapsed_s = (snapshot.time_ns - self._host_read[0]) / 1e9
            if elapsed_s < HOST_READ_S:
                return
            cores = max(0.0, snapshot.cpu_s - self._host_read[1]) / elapsed_s
            self._host.append(HostReading(cores, snapshot.resident_bytes, snapshot.time_ns))
        self._host_read = (snapshot.time_ns, snapshot.cpu_s)

    def _apply_request(self, event: RequestEvent) -> None:
        self.history.add_event(event)
        self.log.add_event(event)
        track = self._tracks.apply(event)
        if event.kind is RequestEventKind.FINISHED:
            self._finish(event, track)

    def _finish(self, event: RequestEvent, track: Track | None) -> None:
        self._num_finished += 1
        rate = None
        if track is not None and track.first_token_ns:
            rate = _rate(event.num_output_tokens, event.time_ns - track.first_token_ns)
        row = RequestRow(
            request_id=event.request_id,
            state=event.detail or "finished",
            prompt=event.num_prompt_tokens,
            cached=event.num_cached_tokens,
            computed=event.num_prompt_tokens + event.num_output_tokens,
            output=event.num_output_tokens,
            step_tokens=0,
            blocks=0,
            age_s=0.0,
            rate=rate,
            preemptions=self._num_preempted.get(event.request_id, 0),
            finished=True,
            params=track.params if track is not None else "",
        )
        self._finished.appendleft((event.time_ns, row))

    def view(self, now_ns: int, *, window_s: int | None = None) -> DashboardView:
        """The state at `now_ns`, ready to be drawn. Percentiles are those of the window."""
        step, snapshot = (self._steps[-1] if self._steps else None), self._snapshot
        newer = step if step and (not snapshot or step.applied_ns > snapshot.time_ns) else None
        counters: StepRecord | EngineSnapshot | None = newer or snapshot
        view = DashboardView(
            now_ns=now_ns,
            uptime_s=(now_ns - self.started_ns) / 1e9,
            **figures_of(
                self._figures,
                self._coarse_figures if (window_s or 0) > KEPT_S else None,
                now_ns,
                window_s,
            ),
            num_running=0,
            num_waiting=0,
            num_finished=max(self._num_finished, snapshot.num_finished if snapshot else 0),
            num_preemptions=0,
            num_used_blocks=0,
            num_cached_blocks=0,
            num_free_blocks=0,
            prefix_hit_rate=None,
            prefix_hit_tokens=0,
            generation_tokens=snapshot.generation_tokens if snapshot else 0,
            prompt_tokens=snapshot.prompt_tokens if snapshot else 0,
            steps=tuple(self._steps),
            requests=request_rows(snapshot, self._finished, self._tracks.get, now_ns),
            snapshot=snapshot,
            num_dropped=self.num_dropped,
            max_num_seqs=snapshot.max_num_seqs if snapshot else None,
            max_num_batched_tokens=snapshot.max_num_batched_tokens if snapshot else None,
            graphs=self._graphs.figures,
            window_s=window_s,
            known_s=self._known_s(now_ns),
            on_cpu=self.on_cpu,
            host=tuple(self._host),
            num_cores=self.num_cores,
        )
        return view if counters is None else with_counters(view, counters)

    def kept(self) -> Kept:
        return Kept(
            deepcopy(self._figures),
            deepcopy(self._coarse_figures),
            tuple(self._snapshots),
            tuple(self._finished),
        )

    @property
    def _coarse_figures(self) -> StepFigures | None:
        return self._coarse.figures if self._coarse is not None else None

    def _known_s(self, now_ns: int) -> int:
        if self._coarse is None or not self._coarse.since_ns:
            return 0
        return min(COARSE_S, max(0, now_ns - self._coarse.since_ns) // 1_000_000_000)


def figures_of(
    figures: StepFigures, coarse: StepFigures | None, now_ns: int, window_s: int | None
) -> dict[str, Any]:
    """Fields of a view: series up to `now_ns`, rates, and percentiles of the window. coarse: the
    figures of a longer time."""
    series = figures.series(now_ns, HISTORY_BUCKETS)
    rates: dict[str, Any] = {
        "decode_rate": float(series.decode[-RATE_BUCKETS:].mean()),
        "decode_series": series.decode,
        "prefill_rate": float(series.prefill[-RATE_BUCKETS:].mean()),
        "preemption_rate": float(series.preempted[-RATE_BUCKETS:].sum()),
    }
    short, long = window_s or STEP_WINDOW_S, window_s or KEPT_S
    if long > KEPT_S and coarse is not None:
        figures = coarse
        series = coarse.series(now_ns, long * 1_000_000_000 // WIDTH_NS)
    return rates | {
        "series": series,
        "step": figures.step_times.spread(now_ns, short),
        "gap": figures.gaps.spread(now_ns, short),
        "ttft": figures.waits[TTFT_MS].spread(now_ns, long),
        "queue": figures.waits[QUEUE_MS].spread(now_ns, long),
        "queued": figures.waits[QUEUE_MS].num_long(now_ns, long),
    }


def request_rows(
    snapshot: EngineSnapshot | None,
    finished: Collection[tuple[int, RequestRow]],
    facts_of: Callable[[str], Facts | None],
    now_ns: int,
) -> tuple[RequestRow, ...]:
    """The snapshot's requests, then the finished ones."""
    gone = {row.request_id for _, row in finished}
    live = [] if snapshot is None else _live_rows(snapshot, facts_of, now_ns)
    rows = [row for row in live if row.request_id not in gone]
    rows += [row._replace(age_s=max(0, now_ns - ended_ns) / 1e9) for ended_ns, row in finished]
    return tuple(rows)


def _live_rows(
    snapshot: EngineSnapshot, facts_of: Callable[[str], Facts | None], now_ns: int
) -> list[RequestRow]:
    elapsed = (now_ns - snapshot.time_ns) / 1e9
    rows = []
    for view in snapshot.requests:
        facts = facts_of(view.request_id)
        rate = None
        if facts is not None and facts.first_token_ns > 1:
            rate = _rate(view.num_output_tokens, snapshot.time_ns - facts.first_token_ns)
        rows.append(
            RequestRow(  # by place, as its fields are: 64 of them in a frame
                view.request_id,
                "unread" if view.is_unread and view.status == "decode" else view.status,
                view.num_prompt_tokens,
                view.num_cached_tokens,
                view.num_computed_tokens,
                view.num_output_tokens,
                view.num_scheduled_tokens,
                view.num_blocks,
                max(0.0, view.age_s + elapsed),
                rate,
                view.num_preemptions,
                False,
                facts.params if facts is not None else "",
            )
        )
    return rows


def with_counters(view: DashboardView, source: StepRecord | EngineSnapshot) -> DashboardView:
    """The counters that both kinds carry, from the newer of the two."""
    queries = source.prefix_query_tokens
    return replace(
        view,
        num_running=source.num_running,
        num_waiting=source.num_waiting,
        num_preemptions=source.num_preemptions,
        num_used_blocks=source.num_used_blocks,
        num_cached_blocks=source.num_cached_blocks,
        num_free_blocks=source.num_free_blocks,
        prefix_hit_rate=source.prefix_hit_tokens / queries if queries else None,
        prefix_hit_tokens=source.prefix_hit_tokens,
    )


def windowed(values: Sequence[float] | Values, window_s: int | None, points: int) -> list[float]:
    """The last seconds of a series in so many points, each the highest of what it covers; without
    a window its last points. A series of fewer points is the coarse one, cut to the window."""
    count = len(values) if window_s is None else window_s * 1_000_000_000 // BUCKET_NS
    tail = np.asarray(values[max(0, len(values) - max(1, count)) :], np.float64)
    if window_s is not None and points > 0 and len(tail):
        tail = np.maximum.reduceat(tail, np.arange(points) * len(tail) // points)
    found: list[float] = tail[max(0, len(tail) - max(0, points)) :].tolist()
    return found


def step_ms(step: StepRecord) -> float:
    """How long the step ran on the device."""
    return max(0, step.ended_ns - step.started_ns) / 1e6


def step_tokens(step: StepRecord) -> tuple[int, int, int]:
    """Tokens of prefill, of decode and of padding in a step."""
    tokens: tuple[int, int, int] = STEP_TOKENS(step)
    return tokens


def mode_shares(steps: Sequence[StepRecord]) -> dict[str, float]:
    """Share of the steps that ran in each graph mode."""
    counts: Counter[str] = Counter()
    for mode, number in Counter(map(_MODE, steps)).items():
        counts[mode_letter(mode)] += number
    return {mode: n / len(steps) for mode, n in counts.items()}


def padding_share(steps: Sequence[StepRecord]) -> float:
    padded = total = 0
    for tokens, number in Counter(map(STEP_TOKENS, steps)).items():  # many are alike
        padded += number * tokens[2]
        total += number * sum(tokens)
    return padded / total if total else 0.0


def mode_letter(mode: str) -> str:
    """F full graph, P piecewise, N none."""
    return mode[:1].upper() or "N"


def _rate(tokens: int, elapsed_ns: int) -> float | None:
    """Tokens after the first, per second."""
    return (tokens - 1) / (elapsed_ns / 1e9) if tokens > 1 and elapsed_ns > 0 else None
