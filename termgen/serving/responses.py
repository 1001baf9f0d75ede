"""An HTTP request's generation, and how its answer travels: one JSON body or a stream of events.

`Generation.run` passes every delta to one function, in the task of the request: with a single
prompt, no task and no queue lies between the engine's stream and the client. A function that waits
for a slow client delays no other request: the engine's stream merges what comes meanwhile. Leaving
the context closes every engine stream, which aborts what still runs.

The responses are ASGI callables that watch the client while the engine works: a disconnect cancels
the generation at once. A stream's status line waits for the first token, so that everything wrong
with a request is still a proper 4xx, but not longer than the ping interval.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Coroutine,
    Iterable,
    Mapping,
    Sequence,
)
from contextlib import aclosing, suppress
from dataclasses import replace
from types import TracebackType
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from termgen.api import sse
from termgen.api.errors import ErrorReply, error_code, request_aborted
from termgen.api.job import Job
from termgen.api.rows import ChunkStream, TextFrames
from termgen.client import GenerationClient, TokenDelta, merge_deltas
from termgen.errors import EngineError, TermgenError
from termgen.serving.access import REQUEST_ID, Caller, caller_of, client_of, header
from termgen.serving.admission import Ticket
from termgen.serving.connection import WRITE_CHUNK
from termgen.serving.request_metrics import RequestMeter, RequestReport, total
from termgen.serving.state import ServerState
from termgen.vocabulary.request import FinishReason
from termgen.vocabulary.sampling_params import SamplingParams

logger = logging.getLogger("termgen.server")

T = TypeVar("T")
Headers = Mapping[str, str]
Take = Callable[[int, TokenDelta], Awaitable[None]]
"""Called with (choice, delta)."""


class Generation:
    """An async context manager; `run` it once within."""

    def __init__(
        self,
        state: ServerState,
        engine: GenerationClient,
        jobs: Sequence[Job],
        *,
        answer_id: str,
        operation: str,
        prepare: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """answer_id: the client's name of the answer. operation: its name in traces. prepare: work
        that is done first, after admission. Raises RequestError while the engine sleeps."""
        state.check_awake()
        self._state = state
        self._answer_id = answer_id
        self._operation = operation
        self._prepare = prepare
        self._engine = engine
        self._jobs = jobs
        self._task: asyncio.Task[object] | None = None
        """The task that is in `run`."""
        self._error: BaseException | None = None
        self._num_open = sum(job.params.n for job in jobs)
        self._ticket: Ticket | None = None
        self.caller: Caller | None = None
        """Set by `bind`."""
        self._scope: Scope = {}
        self._began_ns = time.perf_counter_ns()
        self._meters: list[RequestMeter] = []
        self._room: int | None = None
        """Tokens that the context left for a longer answer."""
        self.num_choices = self._num_open
        self.num_output_tokens = 0

    def bind(self, scope: Scope) -> None:
        """Set the HTTP request that this belongs to, before the generation is entered."""
        self.caller = caller_of(scope)
        self._scope = scope

    def is_known_as(self, name: str) -> bool:
        """True for the answer's id, that of one of its prompts, and the `x-request-id` of its
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
            self._state.drain_events()  # its stage is known only while it runs
        if self._ticket is not None:
            self._ticket.close()
        self._state.end(self)
        if self._state.wants_reports:
            self._state.report(self._report(exc))

    @property
    def stage(self) -> str:
        """Progress: `queue`, `prefill` or `decode`."""
        if self.num_output_tokens:
            return "decode"
        has_begun = self._ticket is not None and self._ticket.has_begun
        return "prefill" if has_begun else "queue"

    @property
    def headers(self) -> Mapping[str, str]:
        """Headers about changes that the engine made, once the first delta is there."""
        return {} if self._room is None else {"x-termgen-max-tokens": str(self._room)}

    @property
    def is_complete(self) -> bool:
        """True once every choice has ended; already when the last delta is passed on."""
        return self._num_open == 0

    async def run(self, take: Take) -> None:
        """Pass every delta to `take` until all choices have ended. Raises the error that ends it
        before."""
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
            operation=self._operation,
            model=self._state.names_for(self._engine.model)[0],
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
                    if job.params.truncate_prompt_tokens is None:
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
        """An engine that does not clamp would have refused an answer that does not fit."""
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
            pooling=job.pooling,
        )

    async def _end_choice(self, first_choice: int, delta: TokenDelta, take: Take) -> TokenDelta:
        """Raise the error of a choice that was aborted or failed: neither is a finish reason of the
        API."""
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
        """The deltas for `max_tokens` 0: the prompt's data, and completions without tokens."""
        if job.is_computed:
            known = await self._compute_prompt(job)
        else:
            known = _of_prompt(job, await self._engine.tokenize(job.prompt))
        yield known
        for index in range(1, job.params.n):
            yield replace(known, index=index, prompt_token_ids=None, prompt_logprobs=None)

    async def _compute_prompt(self, job: Job) -> TokenDelta:
        """Compute the prompt, with one token that is not part of the answer."""
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


# -- how answers travel --------------------------------------------------------------------


class ClientDisconnected(Exception):
    """The client left: there is no answer to send."""


class JSONReply(Response):
    """A JSON body, compact and strict."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return content if isinstance(content, bytes) else sse.dumps(content)


def error_response(reply: ErrorReply) -> JSONReply:
    return JSONReply(reply.body, status_code=reply.status, headers=dict(reply.headers))


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`; cancelled with ClientDisconnected when the client leaves first.

    `work` has ended, clean-up included, when this returns or raises.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnected
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.wait((task, gone))
        for future in (task, gone):
            if not future.cancelled():
                future.exception()  # retrieved, or asyncio complains


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _while_connected(
    state: ServerState,
    generation: Generation,
    scope: Scope,
    receive: Receive,
    work: Coroutine[Any, Any, None],
) -> None:
    generation.bind(scope)
    try:
        await until_disconnect(receive, work)
    except ClientDisconnected:
        state.require_metrics().disconnected(generation.stage)
        raise


class CompleteResponse:
    """Collects the whole answer, then sends `build(answers)`, one merged delta per choice."""

    def __init__(
        self,
        state: ServerState,
        generation: Generation,
        headers: Headers,
        *,
        build: Callable[[list[TokenDelta]], dict[str, Any] | bytes],
    ) -> None:
        self._state = state
        self._generation = generation
        self._headers = headers
        self._build = build

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = self._run(scope, receive, send)
        await _while_connected(self._state, self._generation, scope, receive, work)

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._generation as generation:
            parts: list[list[TokenDelta]] = [[] for _ in range(generation.num_choices)]

            async def keep(choice: int, delta: TokenDelta) -> None:
                parts[choice].append(delta)

            await generation.run(keep)
        body = self._build([merge_deltas(deltas) for deltas in parts])
        headers = {**self._headers, **generation.headers}
        await JSONReply(body, headers=headers)(scope, receive, send)


class EventStreamResponse:
    """Streams chunks as they come. While a slow client delays a write, the engine's stream merges
    the deltas that follow into one."""

    def __init__(
        self,
        state: ServerState,
        generation: Generation,
        headers: Headers,
        *,
        chunks: ChunkStream,
        ping_interval_s: float | None = None,
    ) -> None:
        """ping_interval_s: None for the server's default."""
        self._state = state
        self._generation = generation
        self._chunks = chunks
        self._wire = chunks.wire
        self._headers = {**self._wire.headers, **headers}
        default_s = state.config.sse_ping_interval
        self._ping_interval_s = default_s if ping_interval_s is None else ping_interval_s
        self._fast = chunks.frame if isinstance(chunks, TextFrames) else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = self._run(scope, send)
        await _while_connected(self._state, self._generation, scope, receive, work)

    async def _run(self, scope: Scope, send: Send) -> None:
        write_chunk = scope.get("extensions", {}).get(WRITE_CHUNK)
        async with self._generation as generation:
            writer = EventWriter(
                send,
                self._headers,
                ping_interval_s=self._ping_interval_s,
                write_chunk=write_chunk,
                ping=self._wire.ping,
            )

            async def write(choice: int, delta: TokenDelta) -> None:
                data = self._data(choice, delta)
                if not writer.has_started:
                    writer.headers = {**self._headers, **generation.headers}
                if generation.is_complete:
                    data += self._frames(self._chunks.end()) + self._wire.done
                    await writer.write(data, is_last=True)
                elif data:
                    await writer.write(data)

            try:
                await generation.run(write)
            except ClientDisconnected:
                raise
            except Exception as error:
                if not writer.has_started:
                    raise  # still a plain error response
                if not isinstance(error, TermgenError):
                    logger.exception("a stream failed")  # the client gets no details
                await writer.write(self._wire.error_frames(error), is_last=True)
            finally:
                writer.close()

    def _data(self, choice: int, delta: TokenDelta) -> bytes:
        if self._fast is not None:
            data = self._fast(choice, delta)
            if data is not None:
                return data
        return self._frames(self._chunks.feed(choice, delta))

    def _frames(self, chunks: Iterable[dict[str, Any]]) -> bytes:
        return b"".join(self._wire.frame(chunk) for chunk in chunks)


class EventWriter:
    """Writes to the client, and a ping into long silences.

    One timer per stream looks at a time stamp now and then, so that a token costs no timer.
    """

    def __init__(
        self,
        send: Send,
        headers: Headers,
        *,
        ping_interval_s: float,
        write_chunk: Callable[[bytes], bool] | None,
        ping: bytes = sse.PING,
    ) -> None:
        self._send = send
        self._write_chunk = write_chunk
        self._ping_frame = ping
        self.headers = headers
        """No effect once the response has started."""
        self._ping_interval_s = ping_interval_s
        self._loop = asyncio.get_running_loop()
        self._wrote_at = self._loop.time()
        self._is_blocked = False
        self._is_over = False
        self.has_started = False
        self._ping: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        if ping_interval_s:
            self._timer = self._loop.call_later(ping_interval_s, self._look)

    async def write(self, data: bytes, *, is_last: bool = False) -> None:
        self._wrote_at = self._loop.time()
        quickly = self._write_chunk if self.has_started and not is_last else None
        if quickly is not None and not self._is_blocked and quickly(data):
            return
        self._is_blocked = True
        self._is_over = self._is_over or is_last
        try:
            if not self.has_started:
                await self._start()
            await self._send({"type": "http.response.body", "body": data, "more_body": not is_last})
        except OSError:
            raise ClientDisconnected from None  # how newer ASGI servers report it
        self._is_blocked = False
        self._wrote_at = self._loop.time()

    def close(self) -> None:
        self._is_over = True
        if self._timer is not None:
            self._timer.cancel()
        if self._ping is not None:
            self._ping.cancel()

    async def _start(self) -> None:
        self.has_started = True
        raw = [(k.encode("latin-1"), v.encode("latin-1")) for k, v in self.headers.items()]
        await self._send({"type": "http.response.start", "status": 200, "headers": raw})

    def _look(self) -> None:
        silence_s = self._loop.time() - self._wrote_at
        if silence_s >= self._ping_interval_s and not self._is_blocked:
            self._ping = self._loop.create_task(self._write_ping())
        wait_s = self._ping_interval_s - silence_s
        self._timer = self._loop.call_later(
            wait_s if wait_s > 0 else self._ping_interval_s, self._look
        )

    async def _write_ping(self) -> None:
        if not self._is_over:
            with suppress(ClientDisconnected):  # the next write raises it again
                await self.write(self._ping_frame)
