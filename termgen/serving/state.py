"""The shared state of one server: engine, metrics, answers under way, process for large bodies."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol, TypeVar

from starlette.requests import Request

from termgen.api.errors import request_aborted, unavailable
from termgen.api.fields import Served, served_names
from termgen.api.ollama.pull import Fetcher
from termgen.client import AdminClient, EngineClient, GenerationClient, GenerationOnly, ModelInfo
from termgen.config import ServerConfig
from termgen.errors import EngineDeadError, EngineError, LoadingError, RequestError
from termgen.serving.access import Caller, KeyRing, Role
from termgen.serving.admission import AdmissionControl, BodyMemory
from termgen.serving.event_hub import SNAPSHOT_TIMEOUT_S, EventHub
from termgen.serving.metrics import ServerMetrics
from termgen.serving.request_metrics import ReportSink, RequestLog, RequestReport
from termgen.system.helper_process import (
    HelperClosed,
    HelperFault,
    HelperProcess,
    no_process,
    refusal,
)
from termgen.vocabulary.events import EventRing

T = TypeVar("T")

EVENT_RING_CAPACITY = 16_384

PROGRAM = Path(__file__).with_name("json_program.py")
PARSE_LIMIT_S = 20.0
"""Limit for one body. On a free core, the slowest body within the limit on values takes a
second."""


class Cancellable(Protocol):
    """An answer under way that can be stopped."""

    caller: Caller | None

    def is_known_as(self, name: str) -> bool: ...

    def fail(self, error: Exception) -> None: ...


class Engines:
    """The engines behind a server, by the names that requests use. The first one answers requests
    without a name."""

    def __init__(self) -> None:
        self._by_name: dict[str, tuple[EngineClient, GenerationOnly]] = {}

    def add(self, names: Sequence[str], engine: EngineClient) -> None:
        self._by_name |= dict.fromkeys(names, (engine, GenerationOnly(engine)))

    def models(self) -> Iterator[tuple[str, ModelInfo]]:
        """Each name and its model."""
        for name, (engine, _) in self._by_name.items():
            yield name, engine.model

    def generation(self, name: str | None = None) -> GenerationClient:
        """The generating half of the engine of this name; None for the first."""
        if name is None:
            name = next(iter(self._by_name))
        return self._by_name[name][1]


class ServerState:
    """The state of one server. Owned by the event loop."""

    def __init__(self, config: ServerConfig) -> None:
        self.config = config
        self.engine: EngineClient | None = None
        self.engines = Engines()
        self.metrics: ServerMetrics | None = None
        self.is_draining = False
        self.loading_phase = ""
        self.loading_progress = 0.0
        """Finished share of the phase, 0 to 1."""
        self.hub: EventHub | None = None
        """Events of the engine, for listeners."""
        self.fetcher: Fetcher | None = None
        """Fetches models for administrators."""
        self.pulling = asyncio.Lock()
        """Held while a model is fetched."""
        self.large_bodies = JSONProcess()
        self.body_memory = BodyMemory(config.max_body_memory)
        self._sinks = _report_sinks(config)
        self.keys = KeyRing(config)
        self.admission = AdmissionControl(
            config, drain_events=self.drain_events, on_refused=self.refused
        )
        self._ring: EventRing | None = None
        self._answers: set[Cancellable] = set()
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    def attach(self, engine: EngineClient) -> None:
        """Begin to serve this engine. Called once."""
        assert self.engine is None, "a server has one engine"
        self.metrics = ServerMetrics(
            self.names_for(engine.model)[0], vllm_names=self.config.metrics_compat == "vllm"
        )
        self.metrics.on_cache(
            block_size=engine.model.block_size, num_blocks=engine.model.num_blocks
        )
        if engine.model.memory is not None:
            self.metrics.on_memory(engine.model.memory)
        self.metrics.on_startup(engine.model.startup)
        self.metrics.on_grammars(engine.grammar_totals)
        self.admission.num_seats = engine.model.max_num_seqs
        self.metrics.run_ahead.set(engine.model.run_ahead_ms / 1e3)
        self._ring = engine.events(EVENT_RING_CAPACITY)
        self.hub = EventHub(engine)
        self.hub.follow()
        self.engines.add(self.names_for(engine.model), engine)
        self.engine = engine

    def on_loading(self, phase: str, fraction: float) -> None:
        """Note the progress of loading. May be called from any thread."""
        self.loading_phase = phase
        self.loading_progress = round(min(max(fraction, 0.0), 1.0), 3)

    @property
    def status_body(self) -> dict[str, Any]:
        """`status`, and the phase while the model loads."""
        if self.status != "loading" or not self.loading_phase:
            return {"status": self.status}
        loading = {"phase": self.loading_phase, "progress": self.loading_progress}
        return {"status": "loading", **loading}

    def detach(self) -> None:
        """Close the engine's events and the process for large bodies."""
        self.end_what_waits()
        if self.engine is not None and self._ring is not None:
            self.engine.close_events(self._ring)
            self._ring = None

    def end_what_waits(self) -> None:
        """End work that is not an answer: bodies that are parsed get 503, and streams of events
        end; later ones do so at once."""
        self.large_bodies.close()
        if self.hub is not None:
            self.hub.close()

    def names_for(self, model: ModelInfo) -> tuple[str, ...]:
        return served_names(model, self.config.served_model_name)

    def served_models(self) -> dict[str, Served]:
        """What parsers need to know of each model, by the names that requests may use."""
        config = self.config
        return {
            name: Served(
                model=name,
                defaults=model.default_params,
                tool_format=model.tool_format,
                trusts_template=config.trust_request_chat_template,
                refuses_images=config.images == "refuse",
                force_include_usage=config.force_include_usage,
                pooling=model.pooling,
                max_model_len=model.max_model_len,
                has_chat_template=model.has_chat_template,
            )
            for name, model in self.engines.models()
        }

    @property
    def status(self) -> str:
        """`ok`, or the reason for refusing new requests: loading, draining, engine_dead, asleep."""
        if self.engine is None:
            return "loading"
        if not self.engine.is_healthy:
            return "engine_dead"
        if self.is_draining:
            return "draining"
        return "asleep" if self.engine.sleep_level else "ok"

    def require_generation(self, name: str | None = None) -> GenerationClient:
        """The generating half of an engine, if it can be given a new request now. name: as for
        `Engines.generation`."""
        self.check_ready()
        return self.engines.generation(name)

    def require_admin(self) -> AdminClient:
        """The administrating half, on the same condition."""
        self.check_ready()
        assert self.engine is not None
        return self.engine

    def check_ready(self) -> None:
        """Raises the error of a request that comes while no new one can be taken."""
        status = self.status
        if status == "loading":
            raise LoadingError(self.loading_phase, self.loading_progress)
        if status == "engine_dead":
            raise EngineDeadError("The engine has stopped or stands still; see the server's log")
        if status == "draining":
            raise unavailable("draining", "The server is shutting down")

    def check_awake(self) -> None:
        """Raises RequestError while the engine sleeps: a new answer would wait for an unknown
        time."""
        if self.status == "asleep":
            raise unavailable("asleep", "The engine sleeps; try again when it has been woken up")

    def require_metrics(self) -> ServerMetrics:
        assert self.metrics is not None, "metrics exist from attach() on"
        return self.metrics

    def require_hub(self) -> EventHub:
        assert self.hub is not None, "there is one from attach() on"
        return self.hub

    def drain_events(self) -> None:
        """Pass the engine's published events to admission and metrics."""
        if self._ring is not None and self.metrics is not None:
            events = self._ring.drain()
            self.admission.on_events(events)
            num_dropped = self._ring.num_dropped + self.require_hub().num_dropped
            self.metrics.on_events(events, num_dropped=num_dropped)

    def refused(self, reason: str) -> None:
        """Count a refused request."""
        if self.metrics is not None:
            self.metrics.rejected(reason)

    async def render_metrics(self) -> bytes:
        """Prometheus text; where the engine does not answer, of its last known state."""
        if self.engine is None or self.metrics is None:
            return b""
        self.drain_events()
        self.metrics.on_sleep_level(self.engine.sleep_level)
        self.metrics.on_gpu(await self.require_hub().gpu.now())
        try:
            async with asyncio.timeout(SNAPSHOT_TIMEOUT_S):
                self.metrics.on_snapshot(await self.engine.snapshot())
        except (TimeoutError, EngineError):
            pass  # the last step record is the newest state there is
        return self.metrics.render()

    @property
    def wants_reports(self) -> bool:
        return bool(self._sinks)

    def report(self, report: RequestReport) -> None:
        for sink in self._sinks:
            sink.add(report)

    def close_reports(self) -> None:
        """Send the remaining reports. Takes a moment: not for the event loop."""
        for sink in self._sinks:
            sink.close()

    # -- answers under way -----------------------------------------------------------------

    def begin(self, answer: Cancellable) -> None:
        self._answers.add(answer)
        self._is_idle.clear()

    def end(self, answer: Cancellable) -> None:
        self._answers.discard(answer)
        if not self._answers:
            self._is_idle.set()

    @property
    def num_answers(self) -> int:
        return len(self._answers)

    async def wait_idle(self, timeout_s: float) -> bool:
        """True if all answers ended in time."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._is_idle.wait()
        except TimeoutError:
            return False
        return True

    def cancel(self, caller: Caller, name: str) -> bool:
        """End this caller's answers of that name, for an admin any caller's; returns whether there
        are any."""
        is_admin = caller.role is Role.ADMIN
        found = [
            answer
            for answer in self._answers
            if answer.is_known_as(name) and (is_admin or answer.caller == caller)
        ]
        for answer in found:
            answer.fail(request_aborted())
        return bool(found)

    def fail_all(self) -> None:
        """End every answer under way: an error frame in streams, 503 elsewhere."""
        for answer in tuple(self._answers):
            answer.fail(unavailable("draining", "The server is shutting down"))


def _report_sinks(config: ServerConfig) -> list[ReportSink]:
    sinks: list[ReportSink] = [RequestLog()] if config.log_requests else []
    if config.otlp_traces_endpoint is not None:
        from termgen.serving.tracing import TraceExporter  # an extra

        sinks.append(TraceExporter(config.otlp_traces_endpoint))
    return sinks


def state_of(request: Request) -> ServerState:
    state: ServerState = request.app.state.server
    return state


# -- large bodies --------------------------------------------------------------------------


class JSONProcess:
    """Parses large bodies, one after the other. Belongs to one event loop.

    Megabytes of JSON, or tens of thousands of values to check, would block every stream of this
    process. `json_program.py` parses and checks them instead, and answers with the request for the
    engine, or a fault; a thread waits for it.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "termgen-json")
        self.helper = HelperProcess(PROGRAM)

    async def parse(self, parts: Sequence[bytes], take: Callable[[dict[str, Any]], T]) -> T:
        """The result of `take` on the JSON object in these parts, computed by the process: a
        function of a module of termgen, or a `partial` of one. Raises `RequestError`."""
        loop = asyncio.get_running_loop()
        if self.helper.is_closed:
            raise _shutting_down()
        try:
            parsing = loop.run_in_executor(self._thread, self._parse, parts, take)
        except RuntimeError:  # the system has no thread left
            raise no_process("request body", "parsed") from None
        return await parsing

    def close(self) -> None:
        """Refuse bodies that are parsed or wait, and later ones."""
        self.helper.close()
        self._thread.shutdown(wait=False)

    def _parse(self, parts: Sequence[bytes], take: Callable[[dict[str, Any]], T]) -> T:
        try:
            taken: T = self.helper.ask(take, parts, limit_s=PARSE_LIMIT_S)
        except HelperClosed:
            raise _shutting_down() from None
        except HelperFault as fault:
            raise refusal(fault, "request body", "parsed") from None
        return taken


def _shutting_down() -> RequestError:
    return unavailable("draining", "The server is shutting down")
