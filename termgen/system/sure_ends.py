"""Work that a cancelled caller must not leave half done, and work that must not hold up an exit."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


async def to_its_end(ending: Coroutine[Any, Any, None]) -> None:
    """Await a coroutine in a task of its own, to its end also when the caller is cancelled
    meanwhile."""
    task, cancelled = asyncio.create_task(ending), False
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            cancelled = True
    task.result()
    if cancelled:
        raise asyncio.CancelledError


def in_daemon_thread(name: str, call: Callable[[], T]) -> tuple[threading.Thread, Future[T]]:
    """Call in a daemon thread: a hanging connection must not keep the program from ending."""
    done: Future[T] = Future()

    def work() -> None:
        if not done.set_running_or_notify_cancel():
            return  # cancelled before it began
        try:
            done.set_result(call())
        except BaseException as error:  # top of the thread: the awaiting task gets it
            done.set_exception(error)

    thread = threading.Thread(target=work, name=name, daemon=True)
    thread.start()
    return thread, done
