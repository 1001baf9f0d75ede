"""The served description is true, and requests generated from it do no harm."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Generator
from typing import Any

import httpx
import pytest
from fake_engine import FakeEngine, Script
from hypothesis import HealthCheck, settings
from lengths import scaled
from server_harness import app_client, read_events

from termgen.config import ServerConfig
from termgen.server import Server

schemathesis = pytest.importorskip("schemathesis")


class ThreadedServer:
    """A server on a loop of its own, for clients that block."""

    def __init__(self) -> None:
        self.engine = FakeEngine(script=Script(pieces=("a", "b")))
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))
        self._thread.start()
        self._started.wait()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.engine.release = asyncio.Event()
        self.server = Server(self.engine, ServerConfig(port=0, max_body_bytes=2**20))
        task = asyncio.create_task(self.server.serve())
        await self.server.started()
        self.url = self.server.url
        self._started.set()
        await task

    def stop(self) -> None:
        stopping = self.server.stop(drain_timeout=0)
        asyncio.run_coroutine_threadsafe(stopping, self._loop).result(10)
        self._thread.join()


@pytest.fixture(scope="module")
def served() -> Generator[ThreadedServer, None, None]:
    server = ThreadedServer()
    yield server
    server.stop()


@pytest.fixture
def api(served: ThreadedServer) -> Any:
    return schemathesis.openapi.from_url(f"{served.url}/openapi.json")


schema = schemathesis.pytest.from_fixture("api").exclude(
    path=["/sleep", "/api/pull"]  # nothing else would answer; there is nothing that fetches
)


@schema.parametrize()
@settings(
    max_examples=scaled(4),
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize=False,
)
def test_whatever_the_description_allows_or_forbids(case: Any, served: ThreadedServer) -> None:
    response = case.call()
    case.validate_response(
        response,
        checks=(
            schemathesis.checks.not_a_server_error,
            _check("status_code_conformance"),
            _check("response_schema_conformance"),
        ),
    )
    assert response.headers["x-request-id"]
    if response.status_code != 200:
        error = response.json()["error"]
        if "/api/" in response.request.url:  # Ollama's
            assert response.json().keys() == {"error"} and isinstance(error, str)
            return
        is_anthropic = "/v1/messages" in response.request.url
        keys = {"message", "type"} if is_anthropic else {"message", "type", "param", "code"}
        assert error.keys() == keys
    elif response.content.startswith(b"data: "):  # streams have other ids
        read_events(response.content)
    for _ in range(200):  # the client may see the end of an answer before the server does
        if served.engine.live == () and served.server.num_answers == 0:
            return
        time.sleep(0.01)
    raise AssertionError(f"left behind: {served.engine.live}")


def _check(name: str) -> Any:
    schemathesis.checks.load_all_checks()
    return schemathesis.checks.CHECKS.get_one(name)


async def test_the_description_is_what_parsers_accept() -> None:
    async with app_client(FakeEngine()) as client:
        document = (await client.get("/openapi.json")).json()
        again = (await client.get("/openapi.json")).json()
    assert document == again
    assert document["openapi"].startswith("3.1")
    chat = document["paths"]["/v1/chat/completions"]["post"]["requestBody"]
    fields = chat["content"]["application/json"]["schema"]
    assert fields["required"] == ["messages"]
    properties = fields["properties"]
    assert properties["temperature"] == {"type": ["number", "null"]}
    assert properties["n"] == {"type": ["integer", "null"], "minimum": 1, "maximum": 128}
    assert properties["seed"]["minimum"] == -(2**63)
    assert properties["stop"]["type"] == ["string", "array", "null"]
    assert properties["stream_options"]["type"] == ["object", "null"], "needs stream: true"
    assert properties["model"]["type"] == ["string", "null"]
    assert properties["messages"] == {"type": "array"}
    assert "get" in document["paths"]["/v1/models/{id}"]


async def test_values_at_the_limits_are_taken_and_beyond_are_not() -> None:
    async with app_client(FakeEngine()) as client:
        document = (await client.get("/openapi.json")).json()
        post = document["paths"]["/v1/completions"]["post"]["requestBody"]
        properties = post["content"]["application/json"]["schema"]["properties"]
        checked = 0
        for name, schema in properties.items():
            for key, beyond in (("minimum", -1), ("maximum", 1)):
                if key not in schema:
                    continue
                body = {"prompt": "x", name: schema[key] + beyond}
                answer = await client.post("/v1/completions", json=body)
                assert answer.status_code == 400 and answer.json()["error"]["param"] == name
                checked += 1
        assert checked >= 10


def test_the_server_still_answers(served: ThreadedServer) -> None:
    assert httpx.get(f"{served.url}/health").json() == {"status": "ok"}
    body = {"prompt": "x"}
    answer = httpx.post(f"{served.url}/v1/completions", json=body).json()
    assert answer["choices"][0]["text"] == "ab", json.dumps(answer)
