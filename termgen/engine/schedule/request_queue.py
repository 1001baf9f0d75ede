"""The queue of requests that wait for a slot, by arrival or by priority."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Iterator
from typing import Any

from termgen.engine.schedule.slot_table import SlotTable
from termgen.vocabulary.request import Request


def priority_key(request: Request) -> tuple[int, int, str]:
    """Sort key, lower first: priority, then arrival, then id, so that the order is total."""
    return (request.priority, request.arrival_ns, request.request_id)


class RequestQueue:
    """Queued requests, and requests set aside until they can run (e.g. until a mask is filled).

    A request set aside costs nothing until it is taken back, at its former place. Policy `fcfs`:
    first come, first served, preempted requests before all others. `priority`: lowest (priority,
    arrival) first; a preempted request has its place by the same key.
    """

    def __init__(self, policy: str) -> None:
        self._key: Callable[[Request], Any] = {"fcfs": self._place_of, "priority": priority_key}[
            policy
        ]
        self._line: list[Request] = []
        """Sorted by key."""
        self._aside: dict[str, Request] = {}
        """Request id -> request, in the order of setting aside."""
        self._places: dict[str, int] = {}
        """Request id -> place in the order of arrival, of all requests here."""
        self._first = self._last = 0

    def push(self, request: Request) -> None:
        self._last += 1
        self._push_at(self._last, request)

    def push_front(self, request: Request) -> None:
        """Put a preempted request back, first among its equals."""
        self._first -= 1
        self._push_at(self._first, request)

    def peek(self) -> Request | None:
        """The first queued request; None if the queue is empty or all are set aside."""
        return self._line[0] if self._line else None

    def queued(self) -> Iterator[Request]:
        """The queue in order, without those set aside. Before the next one is asked for, the latest
        may be removed or set aside."""
        index = 0
        while index < len(self._line):
            request = self._line[index]
            yield request
            index += index < len(self._line) and self._line[index] is request

    def remove(self, request: Request) -> None:
        if self._aside.pop(request.request_id, None) is None:
            self._leave(request)
        del self._places[request.request_id]

    def set_aside(self, request: Request) -> None:
        """Take a waiting request out of the queue for now."""
        self._leave(request)
        self._aside[request.request_id] = request

    def take_back(self, request: Request) -> None:
        """Return a request to its former place. A no-op if it is not set aside."""
        if self._aside.get(request.request_id) is request:
            del self._aside[request.request_id]
            insort(self._line, request, key=self._key)

    @property
    def num_aside(self) -> int:
        return len(self._aside)

    def __iter__(self) -> Iterator[Request]:
        """Requests set aside, then the queue."""
        yield from self._aside.values()
        yield from self._line

    def __len__(self) -> int:
        """Queued requests and those set aside."""
        return len(self._aside) + len(self._line)

    def _place_of(self, request: Request) -> int:
        return self._places[request.request_id]

    def _push_at(self, place: int, request: Request) -> None:
        assert request.request_id not in self._places, "queued twice"
        self._places[request.request_id] = place
        insort(self._line, request, key=self._key)

    def _leave(self, request: Request) -> None:
        index = bisect_left(self._line, self._key(request), key=self._key)
        assert self._line[index] is request
        del self._line[index]


def choose_victim(table: SlotTable, policy: str, unread: Collection[str] = ()) -> int:
    """The slot to preempt. FCFS: the newest running request. Priority: the least urgent, newest
    first. Requests whose ids are in `unread` come before all others."""
    slots: list[int] = table.running.tolist()
    if unread:
        slots = [s for s in slots if table.request_at(s).request_id in unread] or slots
    if policy == "fcfs":
        return slots[-1]
    return max(slots, key=lambda slot: priority_key(table.request_at(slot)))
