"""The waiting queues against plain lists."""

from __future__ import annotations

import numpy as np
import pytest
from scheduler_harness import make_request

from termgen.engine.request import Request, RequestStatus
from termgen.engine.request_queue import candidates, make_queue, priority_key


def test_first_come_first_served() -> None:
    queue = make_queue("fcfs")
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
        make_queue("random")


@pytest.mark.parametrize("seed", range(10))
def test_priority_queue_stays_in_order_under_removal(seed: int) -> None:
    print(f"seed={seed}")
    rng = np.random.default_rng(seed)
    queue = make_queue("priority")
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
@pytest.mark.parametrize("fitting", ["", "a", "abcd", "db", "ac", "acd"])
def test_those_that_fit_are_found_in_the_order_of_the_queue(policy: str, fitting: str) -> None:
    for begun in ("", "c", "ad", "abcd"):
        queue = make_queue(policy)
        requests = [make_request(name, [1], arrival_ns=i) for i, name in enumerate("abcd")]
        for request in requests:
            queue.push(request)
            if request.request_id in begun:
                request.status = RequestStatus.PREEMPTED
        looked_at: list[str] = []

        def fits(request: Request, looked_at: list[str] = looked_at) -> bool:
            looked_at.append(request.request_id)
            return request.request_id in fitting

        found = []
        for request in candidates(queue, fits, begun=bool(begun)):
            queue.remove(request)
            found.append(request.request_id)
        assert found == [name for name in "abcd" if name in fitting and name in (begun or "abcd")]
        assert looked_at == [name for name in "abcd" if name in (begun or "abcd")]
        assert [r.request_id for r in queue] == [name for name in "abcd" if name not in found]


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_taking_one_out_of_many_looks_at_few(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Aborting all that wait, from the middle and the ends, must not cost their number squared."""
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
    monkeypatch.setattr("termgen.engine.request_queue.priority_key", key)
    queue = make_queue(policy)
    requests = [make_request(f"r{i}", [1], arrival_ns=i) for i in range(2000)]
    for request in requests:
        queue.push(request)
    order = np.random.default_rng(3).permutation(len(requests))
    num_looks = 0
    for i in order:
        queue.remove(requests[i])
    assert not len(queue)
    assert num_looks <= 14 * len(requests)
