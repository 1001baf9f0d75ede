"""One HTTP request's generation: every engine request behind it, merged into one flow of deltas.

A task per engine request reads it as fast as it comes, so the engine never waits for a client; what
the client has not taken yet lies in one list per choice and is merged when taken. That is bounded
by the request itself. Leaving the context closes every engine stream, which aborts what still runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace
from types import TracebackType

from termgen.api.errors import request_aborted
from termgen.api.job import Job
from termgen.client import EngineClient, TokenDelta, TokenLogprob, merge_deltas
from termgen.engine.request import FinishReason
from termgen.errors import EngineError
from termgen.serving.metrics import RequestMeter
from termgen.serving.state import ServerState


class Generation:
    """Use as an async context manager; then `wait`, `take`, until `is_complete`."""

    def __init__(self, state: ServerState, engine: EngineClient, jobs: Sequence[Job]) -> None:
        self._state = state
        self._engine = engine
        self._jobs = jobs
        self._tasks: list[asyncio.Task[None]] = []
        self._pending: dict[int, list[TokenDelta]] = {}
        self._news = asyncio.Event()
        self._error: BaseException | None = None
        self._num_open = sum(job.params.n for job in jobs)
        self.num_choices = self._num_open
        self.num_output_tokens = 0

    async def __aenter__(self) -> Generation:
        self._state.begin(self)
        for position, job in enumerate(self._jobs):
            task = asyncio.create_task(self._pump(position, job))
            task.add_done_callback(self._on_pump_done)
            self._tasks.append(task)
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            for task in self._tasks:
                task.cancel()
            if self._tasks:
                await asyncio.wait(self._tasks)
        finally:
            self._state.end(self)

    @property
    def is_complete(self) -> bool:
        """Every choice has ended and everything was taken."""
        return self._num_open == 0 and not self._pending

    async def wait(self) -> None:
        """Until there is news, an error, the end, or a `wake`."""
        if not self._pending and self._error is None and self._num_open:
            self._news.clear()
            await self._news.wait()

    def wake(self) -> None:
        """Make `wait` return although nothing happened."""
        self._news.set()

    def take(self) -> list[tuple[int, TokenDelta]]:
        """(choice, delta) for every choice with news; raises an error once that is all there is."""
        pending, self._pending = self._pending, {}
        if not pending and self._error is not None:
            raise self._error
        return [(choice, merge_deltas(deltas)) for choice, deltas in pending.items()]

    def fail(self, error: BaseException) -> None:
        """End with this error, unless one came first."""
        if self._error is None:
            self._error = error
        self._news.set()

    async def _pump(self, position: int, job: Job) -> None:
        first_choice = position * job.params.n
        if not job.generates:
            await self._prompt_only(first_choice, job)
            return
        meter = RequestMeter(self._state.require_metrics())
        stream = self._engine.generate(
            job.prompt,
            job.params,
            request_id=job.request_id,
            priority=job.priority,
            cache_salt=job.cache_salt,
        )
        async with aclosing(stream):
            async for delta in stream:
                meter.on_delta(delta)
                self._put(first_choice + delta.index, delta)

    async def _prompt_only(self, first_choice: int, job: Job) -> None:
        """`max_tokens` 0: the counts of a completion without tokens."""
        token_ids = await self._engine.tokenize(job.prompt)
        prompt_logprobs = await self._prompt_logprobs(job)
        for index in range(job.params.n):
            delta = TokenDelta(
                request_id=job.request_id,
                index=index,
                text="",
                token_ids=(),
                logprobs=None,
                finish_reason=FinishReason.LENGTH,
                stop_reason=None,
                num_prompt_tokens=len(token_ids),
                num_cached_tokens=0,
                num_output_tokens=0,
                prompt_token_ids=tuple(token_ids) if index == 0 else None,
                prompt_logprobs=prompt_logprobs if index == 0 else None,
            )
            self._put(first_choice + index, delta)

    async def _prompt_logprobs(self, job: Job) -> tuple[TokenLogprob, ...] | None:
        """By way of one token that nobody sees."""
        if job.params.prompt_logprobs is None:
            return None
        params = replace(job.params, n=1, max_tokens=1, min_tokens=0, logprobs=None)
        found = None
        stream = self._engine.generate(
            job.prompt,
            params,
            request_id=job.request_id,
            priority=job.priority,
            cache_salt=job.cache_salt,
        )
        async with aclosing(stream):
            async for delta in stream:
                found = delta.prompt_logprobs or found
                if delta.finish_reason is FinishReason.ERROR:
                    raise delta.error or EngineError("The engine failed this request")
                if delta.finish_reason is FinishReason.ABORT:
                    raise request_aborted()
        return found

    def _put(self, choice: int, delta: TokenDelta) -> None:
        if self._error is not None:
            return  # what comes after a failure is not part of the answer
        self.num_output_tokens += len(delta.token_ids)
        if delta.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
            # neither is a finish reason of the API: the answer ends with an error instead
            aborted = delta.finish_reason is FinishReason.ABORT
            failure = delta.error or EngineError("The engine failed this request")
            self.fail(request_aborted() if aborted else failure)
            if not delta.text:
                return
            delta = replace(delta, finish_reason=None, error=None, timings=None)
        elif delta.finish_reason is not None:
            self._num_open -= 1
        self._pending.setdefault(choice, []).append(delta)
        self._news.set()

    def _on_pump_done(self, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            return
        error = task.exception()
        if error is not None:
            self.fail(error)
        elif self._num_open and all(t.done() for t in self._tasks):
            self.fail(EngineError("The engine ended the request without a finish reason"))
