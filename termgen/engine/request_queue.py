"""Requests that wait for a slot: in order of arrival, or by priority."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Protocol

from termgen.engine.request import Request, RequestStatus
from termgen.engine.slot_table import SlotTable


class RequestQueue(Protocol):
    def push(self, request: Request) -> None: ...

    def push_front(self, request: Request) -> None:
        """Put a preempted request back so that it is next among its equals."""
        ...

    def peek(self) -> Request: ...

    def remove(self, request: Request) -> None: ...

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Request]: ...


class FCFSQueue:
    """First come, first served. A request is found by its id, wherever it waits."""

    def __init__(self) -> None:
        self._queue: OrderedDict[str, Request] = OrderedDict()

    def push(self, request: Request) -> None:
        assert request.request_id not in self._queue, "queued twice"
        self._queue[request.request_id] = request

    def push_front(self, request: Request) -> None:
        self.push(request)
        self._queue.move_to_end(request.request_id, last=False)

    def peek(self) -> Request:
        return next(iter(self._queue.values()))

    def remove(self, request: Request) -> None:
        del self._queue[request.request_id]

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._queue.values())


def priority_key(request: Request) -> tuple[int, int, str]:
    """Lower runs first: priority, then arrival, then id so that the order is total."""
    return (request.priority, request.arrival_ns, request.request_id)


class PriorityQueue:
    """Lowest (priority, arrival) first. A preempted request keeps its place by its key."""

    def __init__(self) -> None:
        self._queue: list[Request] = []
        """In order: whoever is not ready is passed over in every step, with no time to sort."""

    def push(self, request: Request) -> None:
        insort(self._queue, request, key=priority_key)

    push_front = push

    def peek(self) -> Request:
        return self._queue[0]

    def remove(self, request: Request) -> None:
        place = bisect_left(self._queue, priority_key(request), key=priority_key)
        assert self._queue[place] is request
        del self._queue[place]

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._queue)


def first_begun(queue: RequestQueue) -> Request | None:
    """The first of those that have run before and wait to go on."""
    return next((r for r in queue if r.status is RequestStatus.PREEMPTED), None)


def candidates(
    queue: RequestQueue, fits: Callable[[Request], bool], *, begun: bool
) -> Iterator[Request]:
    """Those that fit, in order, each looked at once. Whoever asks takes one out of the queue before
    asking for the next. Mostly it is the head, which is found without a copy of the queue.
    begun: only among those that ran before."""

    def may_go(request: Request) -> bool:
        return (not begun or request.status is RequestStatus.PREEMPTED) and fits(request)

    while len(queue):
        if not may_go(head := queue.peek()):
            yield from filter(may_go, list(queue)[1:])
            return
        yield head


def make_queue(policy: str) -> RequestQueue:
    """`fcfs` or `priority`."""
    queues: dict[str, type[FCFSQueue] | type[PriorityQueue]] = {
        "fcfs": FCFSQueue,
        "priority": PriorityQueue,
    }
    return queues[policy]()


def choose_victim(table: SlotTable, policy: str) -> int:
    """The slot to preempt. FCFS: the newest running request. Priority: the least urgent, newest
    first."""
    if policy == "fcfs":
        return int(table.running[-1])
    return max(map(int, table.running), key=lambda s: priority_key(table.request_at(s)))
