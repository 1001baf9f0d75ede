"""`RemoteClient`: an `EngineClient` over HTTP, for any OpenAI-compatible server.

Created by `termgen chat --url`; imports no torch. A method that the server has no endpoint for
raises an `EngineError` that says so. The event stream of a termgen server is read by `tui.attach`.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import httpx

from termgen.client import (
    ChatPrompt,
    FillPrompt,
    ModelInfo,
    PauseMode,
    Prompt,
    SleepLevel,
    TokenDelta,
    TokenizerInfo,
)
from termgen.config import is_loopback
from termgen.errors import ConfigError, EngineError, RequestError, TermgenError
from termgen.remote.failures import failure_of, short
from termgen.remote.models import (
    RemoteModel,
    model_info,
    normal_url,
    read_models,
    read_object,
)
from termgen.remote.stream import AnswerReader
from termgen.remote.wire import Call, Dialect, build_call, dialect_of, prompt_fields
from termgen.system.waiting import NotYet, read_loading, wait_for_server, why_unreachable
from termgen.vocabulary.device.pooling import PoolingParams
from termgen.vocabulary.events import EngineSnapshot, EventRing
from termgen.vocabulary.grammar_times import GrammarTotals
from termgen.vocabulary.sampling_params import SamplingParams

CONNECT_S = 5.0
ANSWER_S = 10.0
"""Timeout of every request that runs no model."""
SILENCE_S = 600.0
"""Read timeout of a generation: prefilling a long prompt on a slow machine takes minutes."""
MAX_ERROR_BYTES = 65_536
KEPT_FACTS = ("model_id", "reads_calls", "holds_calls", "counts_tokens")
"""Facts of a model that hold for this client, whatever the server says of its engine."""


def _say_nothing(phase: str, progress: float) -> None:
    """Progress callback that shows nothing."""


@dataclass(slots=True)
class _Running:
    """A running request: the task that reads its answer, and the queue of its deltas."""

    reading: asyncio.Task[None]
    inbox: asyncio.Queue[TokenDelta | TermgenError | None]


class RemoteClient:
    """An `EngineClient` for the server at a URL. Use it on one event loop."""

    def __init__(
        self, url: str, models: Sequence[RemoteModel], *, api_key: str | None, admin_key: str | None
    ) -> None:
        assert models, "there is a model to talk to"
        self.url = url
        self.models = tuple(models)
        self._api_key = api_key
        self._admin_key = admin_key
        self._http = _http_client(url)
        self._running: dict[str, _Running] = {}
        self._ids = itertools.count(1)
        self._paused = False
        self._sleep_level = 0
        self.given: Collection[str] | None = None
        """Sampling parameters to send, the server's own defaults apply to the others. None: all."""
        self.use_model(models[0].model_id)

    @classmethod
    async def connect(
        cls,
        url: str,
        *,
        api_key: str | None = None,
        admin_key: str | None = None,
        model: str | None = None,
        report: Callable[[str, float], None] = _say_nothing,
        wait_s: float | None = None,
    ) -> RemoteClient:
        """Find the server and the model. Raises `ConfigError`, `RequestError`, `EngineError`.

        Waits while the server loads its model, at most `wait_s` seconds if given, and passes its
        phases to `report`. Without `wait_s` a server that does not listen gets only a moment.
        """
        url = normal_url(url)
        if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
            raise ConfigError("api_key must be ASCII letters, digits and signs", param="api_key")
        async with _http_client(url) as http:

            async def ask() -> httpx.Response:
                try:
                    reply = await http.get(
                        "/v1/models", headers=_headers(api_key), timeout=ANSWER_S
                    )
                except httpx.ConnectError as error:
                    hint = "start one with `termgen serve`, or wait for it with --wait SECONDS"
                    raise NotYet(EngineError(f"{_unreachable(url, error)}; {hint}")) from error
                except httpx.HTTPError as error:
                    raise _unreachable(url, error) from error
                loading = read_loading(reply.status_code, reply.content, reply.headers)
                if loading is not None:
                    failure = _failure(url, "/v1/models", reply, reply.content, api_key)
                    raise NotYet(failure, loading)
                return reply

            reply = await wait_for_server(ask, report, limit_s=wait_s)
        if reply.status_code == 404 and model is not None:  # not every server lists its models
            return cls(url, [RemoteModel(model, "", 0)], api_key=api_key, admin_key=admin_key)
        if reply.status_code != 200:
            raise _failure(url, "/v1/models", reply, reply.content, api_key)
        client = cls(url, read_models(url, reply.content), api_key=api_key, admin_key=admin_key)
        if model is not None:
            try:
                client.use_model(model)
            except TermgenError:
                await client.aclose()
                raise
        return client

    async def aclose(self) -> None:
        """Cancel running requests and close the connections."""
        for running in list(self._running.values()):
            running.reading.cancel()
        await self._http.aclose()

    async def refresh_models(self) -> tuple[RemoteModel, ...]:
        """Query the server's models again."""
        reply = await self._send("GET", "/v1/models", key=self._api_key)
        self.models = tuple(read_models(self.url, reply.content))
        return self.models

    def use_model(self, model_id: str) -> None:
        """Choose the model of further requests. Raises `ConfigError` if it is not served."""
        found = next((m for m in self.models if m.model_id == model_id), None)
        if found is None:
            names = ", ".join(m.model_id for m in self.models[:8])
            more = ", …" if len(self.models) > 8 else ""
            raise ConfigError(
                f"model: {self.url} has no {model_id!r}, only {names}{more}", param="model"
            )
        self.dialect = dialect_of(found.owner)
        self.model = model_info(self.url, found)

    def learn(self, model: ModelInfo) -> None:
        """Take the model's description from a termgen server's event stream, except its name."""
        kept = {name: getattr(self.model, name) for name in KEPT_FACTS}
        self.model = replace(model, memory=None, **kept)

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
        if pooling is not None:
            raise RequestError("embeddings are not asked of another server", param="pooling")
        call = build_call(
            prompt,
            params,
            model=self.model.model_id,
            dialect=self.dialect,
            priority=priority,
            cache_salt=cache_salt,
            given=self.given,
        )
        request_id = request_id or f"remote-{next(self._ids)}"
        answer = AnswerReader(request_id, params.n, call.is_chat, time.perf_counter_ns())
        inbox: asyncio.Queue[TokenDelta | TermgenError | None] = asyncio.Queue()
        reading = asyncio.create_task(self._read(call, answer, inbox))
        self._running[request_id] = _Running(reading, inbox)
        try:
            while (item := await inbox.get()) is not None:
                if isinstance(item, TermgenError):
                    raise item
                yield item
            if reading.done() and not reading.cancelled():
                reading.result()  # raises an unexpected exception
            else:
                for delta in answer.abort():
                    yield delta
        finally:
            del self._running[request_id]
            if not reading.cancelling():  # a second cancellation would interrupt the closing
                reading.cancel()  # closes the connection, which aborts the request
            await asyncio.gather(reading, return_exceptions=True)

    async def abort(self, request_id: str) -> bool:
        running = self._running.get(request_id)
        if running is None:
            return False
        running.reading.cancel()
        running.inbox.put_nowait(None)
        return True

    async def tokenize(self, prompt: Prompt, *, add_special_tokens: bool = True) -> list[int]:
        if isinstance(prompt, FillPrompt):
            raise RequestError("a server cannot tell the tokens of a gap", param="suffix")
        if not isinstance(prompt, (str, ChatPrompt)):
            return list(prompt)
        body = {"model": self.model.model_id, **prompt_fields(prompt, self.dialect)}
        if isinstance(prompt, str):
            body["add_special_tokens"] = add_special_tokens
        return [int(token_id) for token_id in await self._ask("/tokenize", body, "tokens")]

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        body = {"model": self.model.model_id, "tokens": list(token_ids)}
        return str(await self._ask("/detokenize", body, "prompt"))

    async def token_texts(self, token_ids: Sequence[int]) -> list[str]:
        return list(await asyncio.gather(*(self.detokenize([each]) for each in token_ids)))

    @property
    def tokenizer_info(self) -> TokenizerInfo:
        self._cannot("tell of its tokenizer")

    def grammar_totals(self) -> GrammarTotals:
        """Zeros: grammars are compiled by the server."""
        return GrammarTotals()

    async def snapshot(self) -> EngineSnapshot:
        self._cannot("show its engine through this client")

    def events(self, capacity: int = 4096) -> EventRing:
        self._cannot("show its engine through this client")

    def close_events(self, ring: EventRing) -> None:
        self._cannot("show its engine through this client")

    async def pause(self, mode: PauseMode = "wait") -> None:
        await self._control("/pause", mode=mode)
        self._paused = True

    async def resume(self) -> None:
        await self._control("/resume")
        self._paused = False

    async def reset_prefix_cache(self, *, force: bool = False) -> bool:
        options = {"force": "true"} if force else {}
        reply = await self._control("/reset_prefix_cache", **options)
        return not reply.content or bool(read_object(self.url, reply.content).get("reset", True))

    async def sleep(self, level: SleepLevel = 1, mode: PauseMode = "abort") -> None:
        await self._control("/sleep", level=str(level), mode=mode)
        self._sleep_level = level

    async def wake_up(self) -> None:
        await self._control("/wake_up")
        self._sleep_level = 0

    @property
    def is_paused(self) -> bool:
        """True if this client has paused the server."""
        return self._paused

    @property
    def sleep_level(self) -> int:
        """The level set by this client; 0: awake."""
        return self._sleep_level

    @property
    def is_healthy(self) -> bool:
        """True: a server that was unreachable may be back, as the next request will show."""
        return True

    async def why_unhealthy(self) -> str | None:
        try:
            await self._send("GET", "/health", key=self._api_key)
        except TermgenError as error:
            return str(error)
        return None

    async def _read(
        self,
        call: Call,
        answer: AnswerReader,
        inbox: asyncio.Queue[TokenDelta | TermgenError | None],
    ) -> None:
        """Fill the inbox; None marks its end."""
        try:
            await self._stream(call, answer, inbox)
        except TermgenError as error:
            inbox.put_nowait(error)
        except httpx.HTTPError as error:
            inbox.put_nowait(_unreachable(self.url, error))
        finally:
            inbox.put_nowait(None)

    async def _stream(
        self,
        call: Call,
        answer: AnswerReader,
        inbox: asyncio.Queue[TokenDelta | TermgenError | None],
    ) -> None:
        content = json.dumps(call.body).encode()
        headers = _headers(self._api_key) | {"content-type": "application/json"}
        async with self._http.stream("POST", call.path, content=content, headers=headers) as reply:
            if reply.status_code != 200:
                raise _failure(self.url, call.path, reply, await _read_some(reply), self._api_key)
            kind = reply.headers.get("content-type", "")
            if not kind.startswith("text/event-stream"):
                raise EngineError(f"{self.url} does not stream: it sent {kind or 'nothing'}")
            async for data in reply.aiter_bytes():
                for delta in answer.feed(data):
                    inbox.put_nowait(delta)
                if answer.is_done:
                    break
        for delta in answer.end():
            inbox.put_nowait(delta)

    async def _ask(self, path: str, body: Mapping[str, Any], field: str) -> Any:
        reply = await self._send("POST", path, key=self._api_key, json=body)
        value = read_object(self.url, reply.content).get(field)
        if value is None:
            raise EngineError(f"{self.url}{path} sent no {field}: {short(reply.content)}")
        return value

    async def _control(self, path: str, **options: str) -> httpx.Response:
        # No read timeout: a pause waits for running requests, a sleep for copying the weights.
        is_ours = self.dialect is Dialect.TERMGEN  # only termgen servers get the admin key
        key = (self._admin_key if is_ours else None) or self._api_key
        return await self._send("POST", path, key=key, params=options, timeout=SILENCE_S)

    async def _send(
        self, method: str, path: str, *, key: str | None, timeout: float = ANSWER_S, **options: Any
    ) -> httpx.Response:
        try:
            reply = await self._http.request(
                method, path, headers=_headers(key), timeout=timeout, **options
            )
        except httpx.HTTPError as error:
            raise _unreachable(self.url, error) from error
        if reply.status_code != 200:
            raise _failure(self.url, path, reply, reply.content, key)
        return reply

    def _cannot(self, what: str) -> NoReturn:
        raise EngineError(f"{self.url} cannot {what}")


def _http_client(url: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        base_url=url,
        timeout=httpx.Timeout(CONNECT_S, read=SILENCE_S),
        trust_env=not is_loopback(httpx.URL(url).host),  # a proxy cannot reach this machine
    )


def _headers(key: str | None) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"} if key else {}


async def _read_some(reply: httpx.Response) -> bytes:
    """The first bytes of an error's body, enough for its message."""
    raw = b""
    async for data in reply.aiter_bytes():
        raw += data
        if len(raw) > MAX_ERROR_BYTES:
            break
    return raw


def _failure(
    url: str, path: str, reply: httpx.Response, raw: bytes, key: str | None
) -> TermgenError:
    return failure_of(url, path, reply.status_code, raw, reply.headers, sent_key=key is not None)


def _unreachable(url: str, error: httpx.HTTPError) -> EngineError:
    if isinstance(error, httpx.ConnectTimeout):
        return EngineError(f"no server at {url}: no answer within {CONNECT_S:g} s")
    if isinstance(error, httpx.ConnectError):
        return EngineError(f"no server at {url}: {why_unreachable(error)}")
    if isinstance(error, httpx.TimeoutException):
        return EngineError(f"{url} has gone silent")
    why = str(error) or type(error).__name__
    return EngineError(f"the connection to {url} was lost: {why}")
