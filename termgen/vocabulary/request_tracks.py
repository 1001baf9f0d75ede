"""Times of live requests, collected from their events: when each was queued, scheduled, and had its
first token. Bounded: the longest unfinished ones are forgotten first."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from termgen.vocabulary.events import RequestEvent, RequestEventKind
from termgen.vocabulary.step_figures import QUEUE_MS, TTFT_MS, StepFigures

TRACKED_REQUESTS = 2048


@dataclass(slots=True)
class Track:
    """Facts about one live request."""

    queued_ns: int | None
    """None: it was there before the first event."""
    scheduled_ns: int = 0
    first_token_ns: int = 0
    params: str = ""


class RequestTracks:
    """The live requests, and their waits that ended since `pass_waits`."""

    def __init__(self) -> None:
        self._live: OrderedDict[str, Track] = OrderedDict()
        self._waits: dict[int, list[tuple[int, float]]] = {TTFT_MS: [], QUEUE_MS: []}

    def get(self, request_id: str) -> Track | None:
        return self._live.get(request_id)

    def apply(self, event: RequestEvent) -> Track | None:
        """Note one change. The request's facts, if it is known or new; one that ended is
        forgotten."""
        if event.kind is RequestEventKind.FINISHED:
            return self._live.pop(event.request_id, None)
        track = self._live.get(event.request_id) or self._begin(event)
        if event.kind is RequestEventKind.SCHEDULED and not track.scheduled_ns:
            track.scheduled_ns = event.time_ns
            self._note_wait(QUEUE_MS, event, track)
        elif event.kind is RequestEventKind.FIRST_TOKEN and not track.first_token_ns:
            track.first_token_ns = event.time_ns
            self._note_wait(TTFT_MS, event, track)
        return track

    def pass_waits(self, figures: StepFigures) -> None:
        """Count the waits that ended since the last call."""
        for row, waits in self._waits.items():
            if waits:
                figures.add_waits(row, waits)
                waits.clear()

    def _begin(self, event: RequestEvent) -> Track:
        is_new = event.kind is RequestEventKind.QUEUED
        track = self._live[event.request_id] = Track(event.time_ns if is_new else None)
        track.params = event.detail if is_new else ""
        while len(self._live) > TRACKED_REQUESTS:
            self._live.popitem(last=False)
        return track

    def _note_wait(self, row: int, event: RequestEvent, track: Track) -> None:
        if track.queued_ns is not None:
            took_ms = max(0, event.time_ns - track.queued_ns) / 1e6
            self._waits[row].append((event.time_ns, took_ms))
