"""`AsyncEngine`, the in-process `EngineClient`; `SyncEngine` steps in the caller's thread instead.

The engine thread does no text work: it hands one delivery per step to the event loop, with one
wake-up, and the loop turns tokens into text.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

from termgen.client import (
    ModelInfo,
    PauseMode,
    Prompt,
    SleepLevel,
    TokenDelta,
    TokenizerInfo,
    merge_deltas,
)
from termgen.config import EngineConfig
from termgen.engine.grammar.schema_check import with_checks
from termgen.engine.loop.control import EngineControl, check_level
from termgen.engine.loop.core import EngineCore
from termgen.engine.loop.sleep import fall_asleep, wake_up
from termgen.engine.loop.snapshot import StateCopy
from termgen.engine.loop.startup import EngineParts, Progress, build_engine
from termgen.engine.loop.sync_engine import Settled, SyncEngine
from termgen.engine.text.text_process import PromptThreads
from termgen.engine.text.tokenizer import Tokenizer
from termgen.errors import EngineDeadError, EngineError, RequestError
from termgen.system.cpu_slices import take_short_slices
from termgen.vocabulary.device.pooling import PoolingParams
from termgen.vocabulary.events import EngineSnapshot, EventRing
from termgen.vocabulary.grammar_times import GrammarTotals
from termgen.vocabulary.request import GenerationRequest
from termgen.vocabulary.sampling_params import SamplingParams
from termgen.vocabulary.step import StepDelivery

# A request's deltas on their way to one reader, merged while the reader is behind.

MERGE_AT = 64
"""Deltas that wait before they are merged, as merging copies all their tokens."""

UNREAD_S = 3.0
"""Deltas that wait this long for a reader mark their request as unread: it runs only while no
other request waits."""

COLLECT_SECONDS = 30.0
"""Interval of collecting young garbage while busy; automatic collection is off then."""

FULL_COLLECTIONS = 20
"""Every n-th of these collections is a full one, or old garbage would accumulate."""

MOST_BEHIND = 1000
"""Limit of deliveries that the event loop has not processed; the engine waits beyond it."""
HOLD_S = 0.001

STALL_SECONDS = 60.0
"""With work queued and no step landed for this long, the engine counts as stuck."""

ANSWER_SECONDS = 0.5
"""Timeout of a probe; a step in flight goes first, and may take longer."""


class DeltaStream:
    """Unbounded queue of a request's deltas, which are merged while the reader is behind.

    `push` never waits: a slow reader gets larger deltas and delays no other. The request itself
    limits the size. Event loop only.
    """

    def __init__(
        self, num_completions: int, on_unread: Callable[[bool], None] = lambda is_unread: None
    ) -> None:
        """on_unread: called with True when deltas have waited for `UNREAD_S`, with False when one
        is taken again."""
        self._on_unread = on_unread
        self._is_unread = False
        self._waits_since = 0.0
        """Time of the reader's last sign, while deltas wait."""
        self._waiting: dict[int, list[TokenDelta]] = {}
        """Keyed by completion."""
        self._open = num_completions
        self._news = asyncio.Event()
        self._error: EngineDeadError | None = None

    def push(self, delta: TokenDelta) -> None:
        now = time.monotonic()
        if not self._waiting:
            self._waits_since = now
        elif not self._is_unread and now - self._waits_since > UNREAD_S:
            self._is_unread = True
            self._on_unread(True)
        waiting = self._waiting.setdefault(delta.index, [])
        waiting.append(delta)
        if len(waiting) >= MERGE_AT:
            waiting[:] = [merge_deltas(waiting)]
        self._news.set()

    def fail(self, error: EngineDeadError) -> None:
        """End the stream with an error, after the deltas that still wait."""
        self._error = error
        self._news.set()

    def __aiter__(self) -> DeltaStream:
        return self

    async def __anext__(self) -> TokenDelta:
        while not self._waiting:
            if not self._open:
                raise StopAsyncIteration
            if self._error is not None:
                raise self._error.again()
            self._news.clear()
            await self._news.wait()
        if self._is_unread:
            self._is_unread = False
            self._on_unread(False)
        index = next(iter(self._waiting))
        delta = merge_deltas(self._waiting.pop(index))
        if self._waiting:
            self._waits_since = time.monotonic()
        if delta.finish_reason is not None:
            self._open -= 1
        return delta


__all__ = ["AsyncEngine", "SyncEngine"]


T = TypeVar("T")


class AsyncEngine:
    """The in-process `EngineClient`: an engine thread behind one asyncio loop."""

    def __init__(
        self, config: EngineConfig, on_progress: Progress | None, prewarm: bool = False
    ) -> None:
        """Use `start`. All coroutines belong to the event loop that is running now."""
        self._build = partial(build_engine, config, prewarm=prewarm, is_live=True)
        self._loop = asyncio.get_running_loop()
        self._on_progress = on_progress
        self._deliveries: deque[StepDelivery] = deque()
        self._is_woken = False
        """A wake-up of the event loop is scheduled and has not run yet."""
        self._streams: dict[str, DeltaStream] = {}
        self._ids = itertools.count()
        self._ready: Future[None] = Future()
        self._parts: EngineParts | None = None
        self._stopping = False
        self._death: EngineDeadError | None = None
        self._health = Health()
        self._prompt_threads = PromptThreads()
        self._thread = threading.Thread(target=self._run, name="termgen-engine", daemon=True)

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        *,
        on_progress: Progress | None = None,
        prewarm: bool = False,
    ) -> AsyncEngine:
        """Load the model on the engine thread. `on_progress` is called on the event loop.

        prewarm: see `build_engine`. Raises ConfigError or ModelError.
        """
        engine = cls(config, on_progress, prewarm)
        engine._thread.start()
        try:
            await asyncio.wrap_future(engine._ready)
        except asyncio.CancelledError:
            engine._stop()  # loading ends at its next progress report
            raise
        engine._shorten_slices()
        return engine

    def _shorten_slices(self) -> None:
        """Shorten this thread's scheduler slices (engine thread and event loop)."""
        if self.model.device != "cpu":
            take_short_slices()

    async def shutdown(self) -> None:
        """Stop the engine thread; running and waiting requests end with `EngineDeadError`."""
        self._stop()
        self._prompt_threads.shutdown()
        await asyncio.to_thread(self._thread.join)
        self._end(EngineDeadError("the engine was shut down"))

    def _stop(self) -> None:
        self._stopping = True
        if self._parts is not None:
            self._parts.core.wake()

    # -- EngineClient ----------------------------------------------------------------------

    @property
    def parts(self) -> EngineParts:
        assert self._parts is not None, "the engine has not started"
        return self._parts

    @property
    def model(self) -> ModelInfo:
        return self.parts.model

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        client: str = "",
        pooling: PoolingParams | None = None,
    ) -> AsyncGenerator[TokenDelta, None]:
        """See `EngineClient.generate`."""
        arrival_ns = time.perf_counter_ns()
        processor = self.parts.input_processor
        prepare = partial(
            processor.prepare,
            prompt,
            params,
            request_id=request_id or self._new_id(),
            priority=priority,
            cache_salt=cache_salt,
            pooling=pooling,
        )
        prepared = await self._tokenising(prompt, prepare)
        request = await processor.add_grammar(prepared, client=client)
        stream: AsyncIterator[TokenDelta] = self._open(request, arrival_ns)
        if request.grammar is not None and request.grammar.check is not None:
            stream = with_checks(stream, request.grammar.check)
        try:
            async for delta in stream:
                yield delta
        finally:
            self._close(request.request_id)

    async def _tokenising(self, prompt: Prompt, work: Callable[[], T]) -> T:
        elsewhere = self.parts.input_processor.renders_elsewhere(prompt)
        return await self._prompt_threads.run(prompt, work, renders_elsewhere=elsewhere)

    def _new_id(self) -> str:
        while (request_id := f"req-{next(self._ids)}") in self._streams:
            continue  # a caller has chosen this id
        return request_id

    def _open(self, request: GenerationRequest, arrival_ns: int) -> DeltaStream:
        if self._death is not None:
            raise self._death.again()
        for completion in self.parts.output_processor.expect(request, arrival_ns):
            self.parts.core.submit(completion, arrival_ns)
        on_unread = partial(self._note_unread, request.request_id)
        stream = self._streams[request.request_id] = DeltaStream(request.params.n, on_unread)
        return stream

    def _note_unread(self, request_id: str, is_unread: bool) -> None:
        core, ids = self.parts.core, self.parts.output_processor.engine_ids(request_id)
        core.call(partial(core.scheduler.set_unread, ids, is_unread))

    def _close(self, request_id: str) -> None:
        """Forget a request whose reader is done or gone, and abort the rest of it."""
        self._streams.pop(request_id, None)
        for engine_id in self.parts.output_processor.cancel(request_id):
            self.parts.core.abort(engine_id)

    async def abort(self, request_id: str) -> bool:
        ids = self.parts.output_processor.engine_ids(request_id)
        for engine_id in ids:
            self.parts.core.abort(engine_id)
        return bool(ids)

    async def tokenize(self, prompt: Prompt, *, add_special_tokens: bool = True) -> list[int]:
        tokenize = self.parts.input_processor.tokenize
        work = partial(tokenize, prompt, add_special_tokens=add_special_tokens)
        return await self._tokenising(prompt, work)

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        def decode() -> str:
            return self._tokenizer_for(token_ids).decode(token_ids, skip_special_tokens=False)

        return await asyncio.to_thread(decode)

    async def token_texts(self, token_ids: Sequence[int]) -> list[str]:
        def texts() -> list[str]:
            tokenizer = self._tokenizer_for(token_ids)
            return [tokenizer.token_text(token_id) for token_id in token_ids]

        return await asyncio.to_thread(texts)

    @property
    def tokenizer_info(self) -> TokenizerInfo:
        tokenizer = self.parts.tokenizer
        return TokenizerInfo() if tokenizer is None else tokenizer.info

    def grammar_totals(self) -> GrammarTotals:
        return self.parts.grammar_times.totals()

    def _tokenizer_for(self, token_ids: Sequence[int]) -> Tokenizer:
        tokenizer = self.parts.tokenizer
        if tokenizer is None:
            raise RequestError("the engine runs without a tokenizer", param="tokens")
        size = self.model.vocab_size
        for token_id in token_ids:
            if not 0 <= token_id < size:
                raise RequestError(
                    f"token id {token_id} is outside the vocabulary of {size}", param="tokens"
                )
        return tokenizer

    async def snapshot(self) -> EngineSnapshot:
        if self._death is not None:
            raise self._death.again()
        core = self.parts.core
        state: StateCopy = await asyncio.wrap_future(core.call(core.copy_state))
        return state.snapshot()

    def events(self, capacity: int = 4096) -> EventRing:
        return self.parts.core.bus.subscribe(capacity)

    def close_events(self, ring: EventRing) -> None:
        self.parts.core.bus.unsubscribe(ring)

    async def pause(self, mode: PauseMode = "wait") -> None:
        """See `EngineClient.pause`."""
        await self._settled(lambda control: control.pause(mode))

    async def resume(self) -> None:
        """See `EngineClient.resume`."""
        core = self.parts.core
        await asyncio.wrap_future(core.call(core.control.resume))

    async def reset_prefix_cache(self, *, force: bool = False) -> bool:
        """See `EngineClient.reset_prefix_cache`."""
        return await self._settled(lambda control: control.reset_prefix_cache(force))

    async def _settled(self, command: Callable[[EngineControl], Future[Settled]]) -> Settled:
        """Run a command on the engine thread and wait until it has taken effect."""
        core = self.parts.core
        settled: Future[Settled]
        settled = await asyncio.wrap_future(core.call(lambda: command(core.control)))
        return await asyncio.wrap_future(settled)

    async def sleep(self, level: SleepLevel = 1, mode: PauseMode = "abort") -> None:
        """See `EngineClient.sleep`."""
        check_level(level)
        await self.pause(mode)
        core = self.parts.core
        await asyncio.wrap_future(core.call(lambda: fall_asleep(core, level)))

    async def wake_up(self) -> None:
        """See `EngineClient.wake_up`."""
        core = self.parts.core
        await asyncio.wrap_future(core.call(lambda: wake_up(core)))

    @property
    def is_paused(self) -> bool:
        return self.parts.core.control.is_paused

    @property
    def sleep_level(self) -> int:
        return self.parts.core.control.sleep_level

    @property
    def is_healthy(self) -> bool:
        return self._why_dead() is None and self._health.why_stuck(self.parts.core) is None

    async def why_unhealthy(self) -> str | None:
        """See `EngineClient.why_unhealthy`."""
        return self._why_dead() or await self._health.probe(self.parts.core)

    def _why_dead(self) -> str | None:
        if self._death is not None:
            return str(self._death)
        return None if self._thread.is_alive() else "the engine's thread has ended"

    # -- engine thread ---------------------------------------------------------------------

    def _run(self) -> None:
        try:
            parts = self._build(on_delivery=self._hand_over, on_progress=self._report)
        except BaseException as error:  # raised by start()
            if self._ready.set_running_or_notify_cancel():
                self._ready.set_exception(error)
            return
        if not self._ready.set_running_or_notify_cancel():
            parts.input_processor.close()
            parts.core.executor.shutdown()
            return
        gc.collect()
        gc.freeze()  # objects of the start-up are permanent: collections can skip them
        self._parts = parts
        self._shorten_slices()
        self._ready.set_result(None)
        death = EngineDeadError("the engine was shut down")
        try:
            self._serve(parts)
            parts.core.drain()
        except BaseException as cause:  # top of the thread: ends every stream, as unhealthy
            death = _death_of(cause)
        finally:
            gc.enable()
            parts.core.close(death)
            parts.input_processor.close()
            self._post(lambda: self._end(death))
            parts.core.executor.shutdown()

    def _serve(self, parts: EngineParts) -> None:
        """Step while there is work, else do deferred work, else sleep without using CPU."""
        core = parts.core
        collected = time.monotonic()
        num_collections = 0
        while not self._stopping:
            if core.step():
                # A collection inside a step would stall it, so collect in idle time.
                gc.disable()
                if time.monotonic() - collected > COLLECT_SECONDS:
                    num_collections += 1
                    gc.collect(1 if num_collections % FULL_COLLECTIONS else 2)
                    collected = time.monotonic()
            elif not core.has_work and not core.use_idle_time():
                gc.enable()
                core.wait_for_work()

    def _report(self, phase: str, fraction: float) -> None:
        if self._stopping:
            raise EngineDeadError("the engine was stopped while it was starting")
        on_progress = self._on_progress
        if on_progress is not None:
            self._post(lambda: on_progress(phase, fraction))

    def _hand_over(self, delivery: StepDelivery) -> None:
        """Queue a delivery with at most one wake-up of the event loop, none if one is pending.

        This thread appends before it reads the flag, and the loop clears the flag before it takes:
        in any order of the two, a delivery is either taken or followed by a wake-up.
        """
        self._deliveries.append(delivery)
        self._wake_loop()
        while len(self._deliveries) > MOST_BEHIND and not self._nobody_listens:
            time.sleep(HOLD_S)  # the event loop is too far behind

    @property
    def _nobody_listens(self) -> bool:
        return self._stopping or self._loop.is_closed()

    def _wake_loop(self) -> None:
        if not self._is_woken:
            self._is_woken = True
            self._post(self._take_deliveries)

    def _post(self, function: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed, with no reader left
            self._loop.call_soon_threadsafe(function)

    # -- event loop ------------------------------------------------------------------------

    def _take_deliveries(self) -> None:
        self._is_woken = False
        try:
            self._process_deliveries()
        except Exception as cause:  # a bug in text processing: fail all streams, hang none
            self._end(_death_of(cause))
            self._stop()
            raise

    def _process_deliveries(self) -> None:
        """Process the deliveries queued now; later ones wait, so that other tasks can run."""
        processor, core = self.parts.output_processor, self.parts.core
        for _ in range(len(self._deliveries)):
            for delta in processor.process(self._deliveries.popleft()):
                stream = self._streams.get(delta.request_id)
                if stream is not None:
                    stream.push(delta)
        for request_id in processor.take_aborts():
            core.abort(request_id)
        if self._deliveries:
            self._wake_loop()

    def _end(self, death: EngineDeadError) -> None:
        """Fail all open streams and later requests: no step follows. The first error counts."""
        if self._death is None:
            self._death = death
            for stream in list(self._streams.values()):
                stream.fail(death)


def _death_of(cause: BaseException) -> EngineDeadError:
    death = EngineDeadError(f"the engine stopped: {type(cause).__name__}: {cause}")
    death.__cause__ = cause
    return death


# The engine's health, probed from the event loop.
#
# A busy engine is healthy while steps land. An idle one gets a no-op call to run between two steps;
# if it does not answer, that counts as work without progress.


class Health:
    """Health of one engine, with at most one open probe at a time."""

    def __init__(self) -> None:
        self._question: Future[None] | None = None

    def why_stuck(self, core: EngineCore) -> str | None:
        """The reason the engine is stuck, if known without a probe."""
        silent_s = (time.perf_counter_ns() - core.last_progress_ns) / 1e9
        is_asked = self._question is not None and not self._question.done()
        if not (core.has_work or is_asked) or silent_s < STALL_SECONDS:
            return None
        return f"the engine stands still: nothing has come of its work for {silent_s:.0f} s"

    async def probe(self, core: EngineCore) -> str | None:
        """The reason the engine cannot serve; None if it answers, or has made progress lately."""
        if self._question is None or self._question.done():
            self._question = core.call(lambda: None)
        answer = asyncio.wrap_future(self._question)
        await asyncio.wait((answer,), timeout=ANSWER_SECONDS)
        if not answer.done():
            answer.add_done_callback(lambda late: late.cancelled() or late.exception())
            return self.why_stuck(core)
        error = None if answer.cancelled() else answer.exception()
        return str(error) if isinstance(error, EngineError) else None
