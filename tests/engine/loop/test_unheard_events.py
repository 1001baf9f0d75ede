"""Events without a subscriber are not built."""

from __future__ import annotations

from typing import NoReturn

import pytest
from core_harness import CoreDriver

from termgen.vocabulary.events import RequestEvent, RequestEventKind, StepRecord


def run(driver: CoreDriver) -> None:
    for i in range(4):
        driver.submit(str(i), [3, i, *range(8)], max_tokens=12)
    driver.run()
    assert driver.scheduler.stats.num_preemptions > 0
    driver.assert_reference()


def test_without_a_listener_no_event_of_a_request_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> NoReturn:
        raise AssertionError("an event for nobody")

    monkeypatch.setattr("termgen.engine.loop.event_publisher.RequestEvent", refuse)
    run(CoreDriver(depth=2, num_blocks=16, block_size=2))


def test_a_listener_hears_of_every_change() -> None:
    driver = CoreDriver(depth=2, num_blocks=16, block_size=2)
    ring = driver.core.bus.subscribe()
    run(driver)
    events = ring.drain()
    kinds = [event.kind for event in events if isinstance(event, RequestEvent)]
    for kind in RequestEventKind:
        assert kinds.count(kind) == 4 or kind in ("preempted", "scheduled"), kind
    assert kinds.count(RequestEventKind.SCHEDULED) == 4 + kinds.count(RequestEventKind.PREEMPTED)
    assert any(isinstance(event, StepRecord) for event in events)
