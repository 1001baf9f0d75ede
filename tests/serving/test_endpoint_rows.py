"""A dialect is rows: one that is made up here is served without a change anywhere else."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx
import msgspec
import pytest
from fake_engine import FakeEngine, Script, make_model_info
from server_harness import MESSAGES, app_client

from termgen.api import sse
from termgen.api.errors import ErrorReply, ErrorShape
from termgen.api.fields import Endpoint, Served, read
from termgen.api.job import Job, ResponseOptions
from termgen.api.rows import GeneratingRow, Row, TokenRow
from termgen.client import (
    AdminClient,
    EngineClient,
    GenerationClient,
    GenerationOnly,
    Prompt,
    TokenDelta,
)
from termgen.config import ServerConfig
from termgen.serving.app import build_app, create_app
from termgen.serving.request_metrics import RequestReport
from termgen.serving.state import ServerState
from termgen.serving.table import ENDPOINTS
from termgen.vocabulary.sampling_params import SamplingParams

PATH = "/telegraph/send"
SEEN: list[GenerationClient] = []
"""The engines that the made-up dialect was given."""


class TelegramFields(msgspec.Struct, frozen=True, kw_only=True):
    model: str | None = None
    text: str
    words: int = 16
    live: bool = False


TELEGRAM = Endpoint((TelegramFields,), harmless=frozenset({"colour"}))


@dataclass(frozen=True, slots=True)
class Telegram:
    jobs: tuple[Job, ...]
    options: ResponseOptions
    ignored: tuple[str, ...]
    not_used: tuple[str, ...] = ()


def parse(served: Served, data: Mapping[str, Any]) -> Telegram:
    body = read(TelegramFields, data)
    job = Job(
        prompt=body.text,
        params=SamplingParams(max_tokens=body.words),
        request_id="telegram-1",
        priority=0,
        cache_salt=None,
    )
    options = ResponseOptions(
        id="telegram-1",
        model=served.model,
        created=0,
        stream=body.live,
        include_usage=False,
        continuous_usage=False,
        include_timings=False,
        return_token_ids=False,
        tokens_as_ids=False,
    )
    return Telegram((job,), options, TELEGRAM.unknown(data))


def line(value: dict[str, Any]) -> bytes:
    return sse.dumps(value) + b"\n"


class Ticker:
    """Lines of JSON, as some APIs stream."""

    wire = sse.Wire(
        frame=line,
        done=b"",
        error_frames=lambda exc: line({"fault": str(exc)}),
        headers={"content-type": "application/x-ndjson"},
    )

    def __init__(self, asked: Telegram) -> None:
        self._model = asked.options.model

    def feed(self, index: int, delta: TokenDelta) -> list[dict[str, Any]]:
        return [{"word": delta.text}] if delta.text else []

    def end(self) -> list[dict[str, Any]]:
        return [{"stop": self._model}]


def whole(asked: Telegram, answers: list[TokenDelta]) -> dict[str, Any]:
    return {"from": asked.options.model, "message": answers[0].text}


async def prepare(asked: Telegram, engine: GenerationClient) -> None:
    SEEN.append(engine)


def text_of(asked: Telegram) -> Prompt:
    return asked.jobs[0].prompt


async def count(asked: Telegram, engine: GenerationClient) -> dict[str, Any]:
    SEEN.append(engine)
    return {"letters": len(await engine.tokenize(text_of(asked)))}


def reshape(reply: ErrorReply, request_id: str) -> ErrorReply:
    fault = reply.body["error"]
    body = {"fault": fault["message"], "field": fault["param"], "wire": request_id}
    return ErrorReply(reply.status, body, reply.headers)


FAULTS = ErrorShape(
    "Fault",
    {"type": "object", "required": ["fault", "field", "wire"]},
    reshape,
    paths=re.compile(r"/telegraph/.*"),
    id_header="x-wire",
)
SEND: GeneratingRow[Telegram] = GeneratingRow(
    path=PATH,
    summary="send a telegram",
    body=TELEGRAM,
    parse=parse,
    stream=Ticker,
    whole=whole,
    prepare=prepare,
    errors=FAULTS,
    names={"max_tokens": "words", "prompt": "text"},
    operation="telegraphy",
)
COUNT: TokenRow[Telegram] = TokenRow(
    path="/telegraph/count",
    summary="count",
    parse=parse,
    measured=text_of,
    work=count,
    errors=FAULTS,
)


def client_of(engine: EngineClient, **config: Any) -> httpx.AsyncClient:
    app = create_app(engine, ServerConfig(**config), endpoints=(*ENDPOINTS, SEND, COUNT))
    transport = httpx.ASGITransport(app=app)
    return httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1")


@pytest.fixture(autouse=True)
def nothing_seen() -> None:
    SEEN.clear()


async def test_a_made_up_dialect_answers_whole() -> None:
    engine = FakeEngine(script=Script(pieces=("stop ", "stop")))
    async with client_of(engine) as client:
        reply = await client.post(PATH, json={"text": "hi", "words": 2, "colour": 1, "ink": 1})
        counted = await client.post("/telegraph/count", json={"text": "hello"})
    assert reply.json() == {"from": "fake/model-1", "message": "stop stop"}
    assert reply.headers["x-termgen-ignored"] == "ink"
    assert reply.headers["x-wire"] == reply.headers["x-request-id"]
    assert counted.json() == {"letters": 5}
    (call,) = engine.calls
    assert (call.prompt, call.params.max_tokens) == ("hi", 2)


async def test_it_streams_in_its_own_frames() -> None:
    async with client_of(FakeEngine(script=Script(pieces=("a", "b")))) as client:
        reply = await client.post(PATH, json={"text": "hi", "live": True})
    assert reply.headers["content-type"] == "application/x-ndjson"
    lines = [json.loads(text) for text in reply.text.splitlines()]
    assert lines == [{"word": "a"}, {"word": "b"}, {"stop": "fake/model-1"}]


async def test_a_stream_that_fails_ends_with_its_own_error() -> None:
    script = Script(pieces=("a", "b"), raise_after=1)
    async with client_of(FakeEngine(script=script)) as client:
        reply = await client.post(PATH, json={"text": "hi", "live": True})
    *_, last = [json.loads(text) for text in reply.text.splitlines()]
    assert reply.status_code == 200 and last.keys() == {"fault"}


@pytest.mark.parametrize(
    ("body", "status", "field"),
    [
        ({}, 400, "text"),
        ({"text": 1}, 400, "text"),
        ({"text": "hi", "model": "other"}, 404, "model"),
        ({"text": ""}, 400, "text"),  # the engine's error, which it gives for `prompt`
    ],
)
async def test_its_errors_have_its_shape_and_its_names(
    body: dict[str, Any], status: int, field: str
) -> None:
    async with client_of(FakeEngine()) as client:
        reply = await client.post(PATH, json=body)
    assert reply.status_code == status
    fault = reply.json()
    assert fault.keys() == {"fault", "field", "wire"}
    assert (fault["field"], fault["wire"]) == (field, reply.headers["x-request-id"])


async def test_errors_around_it_have_its_shape_and_those_elsewhere_do_not() -> None:
    async with client_of(FakeEngine(), api_key=("key",)) as client:
        refused = await client.post(PATH, json={"text": "hi"})
        client.headers["authorization"] = "Bearer key"
        missing = await client.get("/telegraph/nowhere")
        wrong = await client.get(PATH)
        other = await client.get("/nowhere")
        messages = await client.get("/v1/messages/nowhere")
    assert [r.status_code for r in (refused, missing, wrong)] == [401, 404, 405]
    assert all("fault" in r.json() for r in (refused, missing, wrong))
    assert other.json().keys() == {"error"} and "x-wire" not in other.headers
    assert messages.json()["type"] == "error"


async def test_it_is_described_and_named_in_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    reports: list[RequestReport] = []
    monkeypatch.setattr(ServerState, "report", lambda self, report: reports.append(report))
    async with client_of(FakeEngine(), log_requests=True) as client:
        await client.post(PATH, json={"text": "hi"})
        await client.post("/v1/completions", json={"prompt": "hi"})
        await client.post("/v1/chat/completions", json={"messages": MESSAGES})
        document = (await client.get("/openapi.json")).json()
    assert [r.operation for r in reports] == ["telegraphy", "text_completion", "chat"]
    post = document["paths"][PATH]["post"]
    assert post["summary"] == "send a telegram"
    schema = post["requestBody"]["content"]["application/json"]["schema"]
    assert schema["required"] == ["text"]
    error = post["responses"]["4XX"]["content"]["application/json"]["schema"]
    assert error == {"$ref": "#/components/schemas/Fault"}
    shapes = {"Error", "AnthropicError", "OllamaError", "Fault"}
    assert document["components"]["schemas"].keys() == shapes


async def test_without_its_rows_it_is_not_there() -> None:
    async with app_client(FakeEngine()) as client:
        assert (await client.post(PATH, json={"text": "hi"})).status_code == 404


# -- the halves of an engine ---------------------------------------------------------------


def members(half: type) -> set[str]:
    return {name for name in vars(half) if not name.startswith("_")}


def test_the_halves_share_the_model_and_are_the_whole() -> None:
    assert members(GenerationClient) & members(AdminClient) == {"model"}
    assert members(EngineClient) == set()
    assert {"sleep", "wake_up", "pause", "resume", "reset_prefix_cache"} <= members(AdminClient)
    assert members(GenerationOnly) == members(GenerationClient)


async def test_generating_endpoints_cannot_reach_administration() -> None:
    engine = FakeEngine()
    async with client_of(engine) as client:
        await client.post(PATH, json={"text": "hi"})
        await client.post("/telegraph/count", json={"text": "hi"})
    assert len(SEEN) == 2
    for seen in SEEN:
        for name in members(AdminClient) - members(GenerationClient):
            assert hasattr(engine, name) and not hasattr(seen, name), name
        with pytest.raises(AttributeError):
            seen.sleep_level = 1  # type: ignore[attr-defined]


# -- engines by name -----------------------------------------------------------------------


async def test_the_model_of_a_body_chooses_the_engine() -> None:
    """Endpoints look an engine up: a second one answers to its own name only."""
    first = FakeEngine(script=Script(pieces=("one",)))
    second = FakeEngine(script=Script(pieces=("two",)), model=make_model_info(model_id="second"))
    state = ServerState(ServerConfig())
    state.attach(first)
    state.engines.add(("second",), second)
    transport = httpx.ASGITransport(app=build_app(state))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        texts = {}
        for name in (None, "fake/model-1", "second", "third"):
            reply = await client.post("/v1/completions", json={"prompt": "x", "model": name})
            body = reply.json()
            texts[name] = body["choices"][0]["text"] if reply.is_success else body["error"]["code"]
            if reply.is_success:
                assert body["model"] == name or name is None
        counted = await client.post("/tokenize", json={"prompt": "x", "model": "second"})
        listed = [m["id"] for m in (await client.get("/v1/models")).json()["data"]]
    assert texts == {
        None: "one",
        "fake/model-1": "one",
        "second": "two",
        "third": "model_not_found",
    }
    assert counted.status_code == 200 and listed == ["fake/model-1", "second"]
    assert len(first.calls) == 2 and len(second.calls) == 1
    state.detach()


def test_paths_are_unique() -> None:
    places = [(row.path, method) for row in ENDPOINTS for method in row.methods]
    assert len(places) == len(set(places)) > 20


def test_a_row_of_no_known_kind_is_refused() -> None:
    with pytest.raises(AssertionError, match="/odd has no handler"):
        create_app(None, ServerConfig(), endpoints=(Row(path="/odd", summary="odd"),))
