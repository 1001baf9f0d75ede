"""The waiting queues against plain lists."""

from __future__ import annotations

import numpy as np
import pytest
from scheduler_harness import make_request

from termgen.engine.schedule.request_queue import RequestQueue, priority_key
from termgen.vocabulary.request import Request


def test_first_come_first_served() -> None:
    queue = RequestQueue("fcfs")
    a, b, c = (make_request(name, [1], priority=-i) for i, name in enumerate("abc"))
    for request in (a, b, c):
        queue.push(request)
    assert queue.peek() is a
    queue.remove(a)
    queue.push_front(a)
    queue.remove(b)
    assert list(queue) == [a, c] and len(queue) == 2


def test_an_unknown_policy_is_an_error() -> None:
    with pytest.raises(KeyError):
        RequestQueue("random")


@pytest.mark.parametrize("seed", range(10))
def test_priority_queue_stays_in_order_under_removal(seed: int) -> None:
    print(f"seed={seed}")
    rng = np.random.default_rng(seed)
    queue = RequestQueue("priority")
    held: list[Request] = []
    for i in range(200):
        action = rng.random()
        if action < 0.6 or not held:
            request = make_request(
                f"r{i}", [1], priority=int(rng.integers(5)), arrival_ns=int(rng.integers(5))
            )
            held.append(request)
            (queue.push if rng.random() < 0.5 else queue.push_front)(request)
        elif action < 0.8:
            queue.remove(held.pop(int(rng.integers(len(held)))))
        else:
            held.sort(key=priority_key)
            assert queue.peek() is held[0]
            queue.remove(held.pop(0))
        assert list(queue) == sorted(held, key=priority_key)
        assert len(queue) == len(held)
    held.sort(key=priority_key)
    for request in held:
        assert queue.peek() is request
        queue.remove(request)
    assert not len(queue)


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("seed", range(5))
def test_what_is_set_aside_comes_back_to_its_place(policy: str, seed: int) -> None:
    """Compare with a sorted list, with requests set aside from the head as the scheduler does
    it."""
    print(f"seed={seed}")
    rng = np.random.default_rng(seed)
    queue = RequestQueue(policy)
    line: list[Request] = []
    aside: list[Request] = []
    places: dict[str, int] = {}

    def place(request: Request) -> tuple[int, ...] | tuple[int, int, str]:
        return priority_key(request) if policy == "priority" else (places[request.request_id],)

    for i in range(400):
        action = rng.random()
        if action < 0.4:
            request = make_request(f"r{i}", [1], priority=int(rng.integers(3)), arrival_ns=i)
            is_first = rng.random() < 0.2
            (queue.push_front if is_first else queue.push)(request)
            places[request.request_id] = -i if is_first else i
            line.append(request)
        elif action < 0.6 and line:
            queue.set_aside(line[0])
            aside.append(line.pop(0))
        elif action < 0.8 and aside:
            request = aside.pop(int(rng.integers(len(aside))))
            queue.take_back(request)
            queue.take_back(request)  # once is enough
            line.append(request)
        elif line or aside:
            held = aside if not line or (aside and rng.random() < 0.5) else line
            request = held.pop(int(rng.integers(len(held))))
            queue.remove(request)
            queue.take_back(request)  # it has left the queue
        line.sort(key=place)
        assert queue.peek() is (line[0] if line else None)
        assert list(queue) == [*aside, *line] and len(queue) == len(line) + len(aside)
        assert queue.num_aside == len(aside)


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_requests_leave_while_the_queue_is_gone_through(policy: str) -> None:
    queue = RequestQueue(policy)
    requests = [make_request(name, [1], arrival_ns=i) for i, name in enumerate("abcde")]
    for request in requests:
        queue.push(request)
    a, b, c, d, e = requests
    seen = []
    for request in queue.queued():
        seen.append(request)
        if request in (a, e):
            queue.remove(request)
        elif request is c:
            queue.set_aside(request)
    assert seen == requests and list(queue.queued()) == [b, d] and list(queue) == [c, b, d]


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_taking_one_out_of_many_looks_at_few(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Aborting all waiting requests, from the middle and the ends, must not take quadratic time."""
    num_looks = 0

    def equal(self: Request, other: object) -> bool:
        nonlocal num_looks
        num_looks += 1
        return self is other

    def key(request: Request) -> tuple[int, int, str]:
        nonlocal num_looks
        num_looks += 1
        return priority_key(request)

    monkeypatch.setattr(Request, "__eq__", equal)
    monkeypatch.setattr("termgen.engine.schedule.request_queue.priority_key", key)
    queue = RequestQueue(policy)
    requests = [make_request(f"r{i}", [1], arrival_ns=i) for i in range(2000)]
    for request in requests:
        queue.push(request)
    order = np.random.default_rng(3).permutation(len(requests))
    num_looks = 0
    for i in order:
        queue.remove(requests[i])
    assert not len(queue)
    assert num_looks <= 14 * len(requests)
