"""One HTTP request's generation: the engine requests behind it, and who is told of their deltas.

`run` hands every delta to one function, in the task that asks: with a single prompt, no task and no
queue lies between the engine's stream and the client. A function that waits for a slow client holds
up nobody else: the engine's stream merges what comes meanwhile. Leaving the context closes every
engine stream, which aborts what still runs.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from types import TracebackType

from starlette.types import Scope

from termgen.api.errors import error_code, request_aborted
from termgen.api.job import Job
from termgen.client import EngineClient, TokenDelta, merge_deltas
from termgen.errors import EngineError
from termgen.serving.access import REQUEST_ID, Caller, caller_of, client_of, header
from termgen.serving.admission import Ticket
from termgen.serving.request_metrics import RequestMeter, RequestReport, total
from termgen.serving.state import ServerState
from termgen.vocabulary.request import FinishReason
from termgen.vocabulary.sampling_params import SamplingParams

Take = Callable[[int, TokenDelta], Awaitable[None]]
"""Is told (choice, delta)."""


class Generation:
    """Use as an async context manager, and `run` it once within."""

    def __init__(
        self,
        state: ServerState,
        engine: EngineClient,
        jobs: Sequence[Job],
        *,
        answer_id: str,
        prepare: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """answer_id: what the client knows the answer by. prepare: done first of all, once there is
        a place for it. Raises RequestError while the engine sleeps."""
        state.check_awake()
        self._state = state
        self._answer_id = answer_id
        self._prepare = prepare
        self._engine = engine
        self._jobs = jobs
        self._task: asyncio.Task[object] | None = None
        """The one that is in `run`."""
        self._error: BaseException | None = None
        self._num_open = sum(job.params.n for job in jobs)
        self._ticket: Ticket | None = None
        self.caller: Caller | None = None
        """Whose it is; see `bind`."""
        self._scope: Scope = {}
        self._began_ns = time.perf_counter_ns()
        self._meters: list[RequestMeter] = []
        self._room: int | None = None
        """Tokens that the context left of a longer answer."""
        self.num_choices = self._num_open
        self.num_output_tokens = 0

    def bind(self, scope: Scope) -> None:
        """Say which HTTP request it belongs to, before the generation is entered."""
        self.caller = caller_of(scope)
        self._scope = scope

    def is_known_as(self, name: str) -> bool:
        """Whether this is the answer's id, that of one of its prompts, or the `x-request-id` of its
        request."""
        ids = {self._answer_id, self._scope.get(REQUEST_ID), *(j.request_id for j in self._jobs)}
        return name in ids

    async def __aenter__(self) -> Generation:
        assert self.caller is not None, "who asks must be known"
        self._ticket = self._state.admission.admit(self._jobs)
        self._state.begin(self)
        self._ticket.limit_wait(self.fail)
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._num_open:
            self._state.drain_events()  # how far it came is known only while it is
        if self._ticket is not None:
            self._ticket.close()
        self._state.end(self)
        if self._state.wants_reports:
            self._state.report(self._report(exc))

    @property
    def stage(self) -> str:
        """How far it has come: `queue`, `prefill` or `decode`."""
        if self.num_output_tokens:
            return "decode"
        has_begun = self._ticket is not None and self._ticket.has_begun
        return "prefill" if has_begun else "queue"

    @property
    def headers(self) -> Mapping[str, str]:
        """What the engine has changed of the request, once the first delta is there."""
        return {} if self._room is None else {"x-termgen-max-tokens": str(self._room)}

    @property
    def is_complete(self) -> bool:
        """Every choice has ended; true already when the last delta is told."""
        return self._num_open == 0

    async def run(self, take: Take) -> None:
        """Tell every delta until all choices have ended. Raises what ends it before."""
        self._task = asyncio.current_task()
        assert self._task is not None
        num_cancels = self._task.cancelling()
        try:
            if self._error is not None:
                raise self._error
            if self._prepare is not None:
                await self._prepare()
            if len(self._jobs) == 1:
                await self._read(0, self._jobs[0], take)
            else:
                await self._read_all(take)
        except asyncio.CancelledError:
            if self._error is not None and self._task.uncancel() <= num_cancels:
                raise self._error from None
            raise
        finally:
            self._task = None
        if self._num_open:
            raise EngineError("The engine ended the request without a finish reason")

    def fail(self, error: BaseException) -> None:
        """End with this error, unless one came first. Called from outside of `run`."""
        if self._error is None:
            self._error = error
            if self._task is not None:
                self._task.cancel()

    def _report(self, exc: BaseException | None) -> RequestReport:
        if isinstance(exc, asyncio.CancelledError):
            outcome = f"disconnected while in {self.stage}"
        else:
            error = self._error or exc
            outcome = "ok" if error is None else error_code(error)
        meters = self._meters
        return RequestReport(
            request_id=self._scope.get(REQUEST_ID, ""),
            answer_id=self._answer_id,
            path=self._scope["path"],
            model=self._state.names_for(self._engine)[0],
            traceparent=header(self._scope, b"traceparent"),
            num_choices=self.num_choices,
            num_prompt_tokens=total([meter.num_prompt_tokens for meter in meters]),
            num_cached_tokens=total([meter.num_cached_tokens for meter in meters]),
            num_output_tokens=self.num_output_tokens,
            finish_reasons=tuple(r for meter in meters for r in meter.finish_reasons),
            outcome=outcome,
            timings=tuple(m.timings for m in meters if m.timings is not None),
            began_ns=self._began_ns,
            ended_ns=time.perf_counter_ns(),
        )

    async def _read_all(self, take: Take) -> None:
        tasks = [
            asyncio.create_task(self._read(position, job, take))
            for position, job in enumerate(self._jobs)
        ]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            errors = [t.exception() for t in tasks if not t.cancelled()]
        failed = next((error for error in errors if error is not None), None)
        if failed is not None:
            raise failed

    async def _read(self, position: int, job: Job, take: Take) -> None:
        first_choice = position * job.params.n
        assert self._ticket is not None
        meter = RequestMeter(self._state.require_metrics().requests, job)
        self._meters.append(meter)
        ticket, is_new = self._ticket, True
        deltas = self._generate(job, job.params) if job.generates else self._prompt_only(job)
        async with aclosing(deltas) as stream:
            async for delta in stream:
                if is_new:
                    is_new = False
                    self._state.admission.on_prompt(job.prompt, delta.num_prompt_tokens)
                    self._note_room(job, delta.num_prompt_tokens)
                meter.on_delta(delta)
                if ticket.num_waiting:
                    ticket.begin(job.request_id, delta.index)
                self.num_output_tokens += len(delta.token_ids)
                if delta.finish_reason is not None:
                    ticket.end(job.request_id, delta.index)
                    delta = await self._end_choice(first_choice, delta, take)
                await take(first_choice + delta.index, delta)

    def _note_room(self, job: Job, num_prompt_tokens: int) -> None:
        """An engine that does not clamp would have refused what it has no room for."""
        room = self._engine.model.max_model_len - num_prompt_tokens
        if job.max_tokens is not None and job.max_tokens > room:
            self._room = room if self._room is None else min(self._room, room)

    def _generate(self, job: Job, params: SamplingParams) -> AsyncGenerator[TokenDelta, None]:
        assert self.caller is not None
        return self._engine.generate(
            job.prompt,
            params,
            request_id=job.request_id,
            priority=job.priority,
            cache_salt=self.caller.salt(job.cache_salt),
            client=client_of(self._scope),
        )

    async def _end_choice(self, first_choice: int, delta: TokenDelta, take: Take) -> TokenDelta:
        """Neither an abort nor a failure is a finish reason of the API: the answer ends with it."""
        if delta.finish_reason not in (FinishReason.ERROR, FinishReason.ABORT):
            self._num_open -= 1
            return delta
        if delta.text:
            rest = replace(delta, finish_reason=None, error=None, timings=None)
            await take(first_choice + delta.index, rest)
        if delta.finish_reason is FinishReason.ABORT:
            raise request_aborted()
        raise delta.error or EngineError("The engine failed this request")

    async def _prompt_only(self, job: Job) -> AsyncGenerator[TokenDelta, None]:
        """`max_tokens` 0: what is known of the prompt, told by completions without tokens."""
        if job.is_computed:
            known = await self._compute_prompt(job)
        else:
            known = _of_prompt(job, await self._engine.tokenize(job.prompt))
        yield known
        for index in range(1, job.params.n):
            yield replace(known, index=index, prompt_token_ids=None, prompt_logprobs=None)

    async def _compute_prompt(self, job: Job) -> TokenDelta:
        """By way of one token that nobody sees."""
        params = replace(job.params, n=1, max_tokens=1, min_tokens=0, logprobs=None)
        async with aclosing(self._generate(job, params)) as stream:
            deltas = [delta async for delta in stream]
        assert deltas, "a stream ends with a finish reason or an error"
        known = merge_deltas(deltas)
        if known.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
            return known
        return replace(
            known,
            text="",
            token_ids=(),
            num_output_tokens=0,
            finish_reason=FinishReason.LENGTH,
            stop_reason=None,
        )


def _of_prompt(job: Job, token_ids: Sequence[int]) -> TokenDelta:
    return TokenDelta(
        request_id=job.request_id,
        index=0,
        text="",
        token_ids=(),
        logprobs=None,
        finish_reason=FinishReason.LENGTH,
        stop_reason=None,
        num_prompt_tokens=len(token_ids),
        num_cached_tokens=0,
        num_output_tokens=0,
        prompt_token_ids=tuple(token_ids),
    )
