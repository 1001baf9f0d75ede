"""An independent reader of Chrome traces, which checks what viewers demand of them."""

from __future__ import annotations

import gzip
import json
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any


class Trace:
    """A file that is well formed: slices of a track nest, spans of a request open and close in
    turn, and each arrow begins and ends inside a slice."""

    def __init__(self, path: Path) -> None:
        whole = json.loads(gzip.decompress(path.read_bytes()))
        self.about: dict[str, str] = whole["otherData"]
        self.events: list[dict[str, Any]] = whole["traceEvents"]
        self.tracks: dict[tuple[int, int], str] = {}
        self.processes: dict[int, str] = {}
        self.durations_ns: Counter[tuple[str, str]] = Counter()
        """(kind of track, name of slice) -> time."""
        self.slices: dict[tuple[int, int], list[tuple[int, int, dict[str, Any]]]]
        self.slices = defaultdict(list)
        self.spans: dict[str, list[tuple[str, int, int]]] = defaultdict(list)
        """Request -> (name, begin, end), in the order of their ends."""
        self.counters: dict[str, list[tuple[int, dict[str, int]]]] = defaultdict(list)
        self.arrows: dict[int, dict[str, dict[str, Any]]] = defaultdict(dict)
        for event in self.events:
            if event["ph"] == "M":
                self._take_name(event)
        open_spans: dict[tuple[int, str], list[tuple[str, int]]] = defaultdict(list)
        for event in self.events:
            self._take(event, open_spans)
        assert not any(open_spans.values()), open_spans
        for key, slices in self.slices.items():
            assert key in self.tracks
            check_nesting(slices)
        for ends in self.arrows.values():
            assert ends.keys() == {"s", "f"}
            assert all(self._is_inside_a_slice(event) for event in ends.values()), ends

    def _take_name(self, event: dict[str, Any]) -> None:
        if event["name"] == "process_name":
            self.processes[event["pid"]] = event["args"]["name"]
        elif event["name"] == "thread_name":
            self.tracks[event["pid"], event["tid"]] = event["args"]["name"]

    def _take(
        self, event: dict[str, Any], open_spans: dict[tuple[int, str], list[tuple[str, int]]]
    ) -> None:
        if event["ph"] == "M":
            return
        at = round(event["ts"] * 1000)
        assert at >= 0
        if event["ph"] == "X":
            key, length = (event["pid"], event["tid"]), round(event["dur"] * 1000)
            assert length >= 0
            self.slices[key].append((at, at + length, event))
            self.durations_ns[self.tracks[key].split()[0], event["name"]] += length
        elif event["ph"] in ("s", "f"):
            self.arrows[event["id"]][event["ph"]] = event
        elif event["ph"] == "C":
            self.counters[event["name"]].append((at, event["args"]))
        elif event["ph"] == "b":
            open_spans[event["pid"], event["id"]].append((event["name"], at))
        else:
            assert event["ph"] == "e", event
            name, begin = open_spans[event["pid"], event["id"]].pop()
            assert name == event["name"] and begin <= at
            self.spans[event["id"]].append((name, begin, at))

    def _is_inside_a_slice(self, event: dict[str, Any]) -> bool:
        at = round(event["ts"] * 1000)
        slices = self.slices[event["pid"], event["tid"]]
        return any(begin <= at <= end for begin, end, _ in slices)


def check_nesting(slices: list[tuple[int, int, dict[str, Any]]]) -> None:
    """Raises AssertionError for two slices of which neither lies in the other."""
    stack: list[int] = []
    for begin, end, event in sorted(slices, key=lambda s: (s[0], -s[1])):
        while stack and stack[-1] <= begin:
            stack.pop()
        assert not stack or end <= stack[-1], event
        stack.append(end)
