"""Queues of requests that wait for a slot: by arrival or by priority."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable, Iterator
from itertools import takewhile

from termgen.engine.schedule.slot_table import SlotTable
from termgen.vocabulary.request import Request, RequestStatus


class RequestQueue(ABC):
    """Queued requests, and requests set aside until they can run (e.g. until a mask is filled).

    A request set aside costs nothing until it is taken back, at its former place.
    """

    def __init__(self) -> None:
        self._aside: dict[str, Request] = {}
        """Request id -> request, in the order of setting aside."""

    @abstractmethod
    def push(self, request: Request) -> None: ...

    @abstractmethod
    def push_front(self, request: Request) -> None:
        """Put a preempted request back, first among its equals."""
        ...

    def peek(self) -> Request | None:
        """The first queued request; None if the queue is empty or all are set aside."""
        return next(self._line(), None)

    def remove(self, request: Request) -> None:
        if self._aside.pop(request.request_id, None) is None:
            self._leave(request)

    def set_aside(self, request: Request) -> None:
        """Take a waiting request out of the queue for now."""
        self._leave(request)
        self._aside[request.request_id] = request

    def take_back(self, request: Request) -> None:
        """Return a request to its former place. A no-op if it is not set aside."""
        if self._aside.get(request.request_id) is request:
            del self._aside[request.request_id]
            self._return(request)

    @property
    def num_aside(self) -> int:
        return len(self._aside)

    def __iter__(self) -> Iterator[Request]:
        """Requests set aside, then the queue."""
        yield from self._aside.values()
        yield from self._line()

    @abstractmethod
    def __len__(self) -> int:
        """Queued requests and those set aside."""
        ...

    @abstractmethod
    def _line(self) -> Iterator[Request]: ...

    @abstractmethod
    def _leave(self, request: Request) -> None: ...

    @abstractmethod
    def _return(self, request: Request) -> None: ...


class FCFSQueue(RequestQueue):
    """First come, first served. Any request is found by its id."""

    def __init__(self) -> None:
        super().__init__()
        self._queue: OrderedDict[str, Request] = OrderedDict()
        self._places: dict[str, int] = {}
        """Request id -> sort key of its place."""
        self._first, self._last = 0, 0

    def push(self, request: Request) -> None:
        assert request.request_id not in self._places, "queued twice"
        self._last += 1
        self._places[request.request_id] = self._last
        self._queue[request.request_id] = request

    def push_front(self, request: Request) -> None:
        self.push(request)
        self._first -= 1
        self._places[request.request_id] = self._first
        self._queue.move_to_end(request.request_id, last=False)

    def remove(self, request: Request) -> None:
        super().remove(request)
        del self._places[request.request_id]

    def _line(self) -> Iterator[Request]:
        return iter(self._queue.values())

    def __len__(self) -> int:
        return len(self._aside) + len(self._queue)

    def _leave(self, request: Request) -> None:
        del self._queue[request.request_id]

    def _return(self, request: Request) -> None:
        # All earlier requests have got a slot or were set aside, except the few that were preempted
        # or taken back since.
        place = self._places[request.request_id]
        before = list(takewhile(lambda name: self._places[name] < place, self._queue))
        self._queue[request.request_id] = request
        for name in (request.request_id, *reversed(before)):
            self._queue.move_to_end(name, last=False)


def priority_key(request: Request) -> tuple[int, int, str]:
    """Sort key, lower first: priority, then arrival, then id, so that the order is total."""
    return (request.priority, request.arrival_ns, request.request_id)


class PriorityQueue(RequestQueue):
    """Lowest (priority, arrival) first. A preempted request keeps its place by its key."""

    def __init__(self) -> None:
        super().__init__()
        self._queue: list[Request] = []
        """Sorted."""

    def push(self, request: Request) -> None:
        insort(self._queue, request, key=priority_key)

    push_front = _return = push

    def _line(self) -> Iterator[Request]:
        return iter(self._queue)

    def __len__(self) -> int:
        return len(self._aside) + len(self._queue)

    def _leave(self, request: Request) -> None:
        place = bisect_left(self._queue, priority_key(request), key=priority_key)
        assert self._queue[place] is request
        del self._queue[place]


def first_begun(
    queue: RequestQueue, may_go: Callable[[Request], bool] = lambda request: True
) -> Request | None:
    """The first waiting request that has run before and may run now."""
    begun = (request for request in queue if request.status is RequestStatus.PREEMPTED)
    return next(filter(may_go, begun), None)


def make_queue(policy: str) -> RequestQueue:
    """The queue of a policy, `fcfs` or `priority`."""
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
