"""Models that an administrator fetches with /api/pull."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from fake_engine import FakeEngine
from server_harness import eventually, serving

from termgen.commands.launch import CatalogFetcher
from termgen.config import ServerConfig
from termgen.errors import DownloadError, ModelNotFoundError
from termgen.library import catalog
from termgen.server import create_app

PULL = "/api/pull"


class FakeFetcher:
    """Fetches nothing, in the steps of a script."""

    def __init__(self, *, total: int | None = 1000, error: BaseException | None = None) -> None:
        self._total = total
        self._error = error
        self.names: list[str] = []
        self.go_on = threading.Event()
        self.waits = False
        self.left: BaseException | None = None

    def num_bytes(self, name: str) -> int | None:
        return self._total

    def fetch(self, name: str, report: Callable[[str, float], None]) -> None:
        self.names.append(name)
        try:
            report("fetching it", 0.0)
            while self.waits and not self.go_on.wait(0.01):
                report("fetching it", 0.5)
            report("fetching it", 0.5)
            if self._error is not None:
                raise self._error
            report("fetching it", 1.0)
            report("unpacking it", 1.0)
        except BaseException as error:
            self.left = error
            raise


def client_of(fetcher: FakeFetcher | None, **config: Any) -> httpx.AsyncClient:
    app = create_app(FakeEngine(), ServerConfig(**config))
    app.state.server.fetcher = fetcher
    transport = httpx.ASGITransport(app=app)
    return httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1")


def lines_of(reply: httpx.Response) -> list[Any]:
    assert reply.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in reply.text.splitlines()]


async def test_progress_comes_line_by_line() -> None:
    fetcher = FakeFetcher()
    async with client_of(fetcher) as client:
        lines = lines_of(await client.post(PULL, json={"model": "hf.co/org/x:latest"}))
        whole = await client.post(PULL, json={"name": "other", "stream": False, "insecure": True})
    assert fetcher.names == ["org/x", "other"]
    assert [line["status"] for line in lines] == [
        "pulling manifest",
        *["fetching it"] * 3,
        *("unpacking it", "success"),
    ]
    counts = [(line["completed"], line["total"]) for line in lines if "digest" in line]
    assert counts == [(0, 1000), (500, 1000), (1000, 1000), (1000, 1000)]
    assert len({line["digest"] for line in lines if "digest" in line}) == 2
    assert whole.json() == {"status": "success"}


async def test_without_a_size_the_share_is_in_words() -> None:
    async with client_of(FakeFetcher(total=None)) as client:
        lines = lines_of(await client.post(PULL, json={"model": "x"}))
    assert {"status": "fetching it 50%"} in lines and not any("digest" in line for line in lines)


@pytest.mark.parametrize(
    ("error", "status", "words"),
    [
        (ModelNotFoundError("unknown model 'x'"), 404, "unknown model 'x'"),
        (DownloadError("no network"), 500, "no network"),
        (ZeroDivisionError("secret"), 500, "Internal server error"),
    ],
)
async def test_what_cannot_be_fetched(error: Exception, status: int, words: str) -> None:
    async with client_of(FakeFetcher(error=error)) as client:
        lines = lines_of(await client.post(PULL, json={"model": "x"}))
        whole = await client.post(PULL, json={"model": "x", "stream": False})
    assert lines[-1].keys() == {"error"} and words in lines[-1]["error"]
    assert whole.status_code == status and words in whole.json()["error"]
    assert "secret" not in json.dumps(lines) + whole.text


async def test_a_served_model_is_here() -> None:
    fetcher = FakeFetcher()
    async with client_of(fetcher, served_model_name=("small",)) as client:
        assert lines_of(await client.post(PULL, json={"model": "small:latest"})) == [
            {"status": "success"}
        ]
    assert fetcher.names == []


@pytest.mark.parametrize(
    "name", ["/etc", "~/x", "./x", "../x", "a/../b", "x.json", "a b", "a\nb", "", "x" * 300, 5]
)
async def test_names_only(name: Any) -> None:
    fetcher = FakeFetcher()
    async with client_of(fetcher) as client:
        reply = await client.post(PULL, json={"model": name})
    assert reply.status_code == 400 and "model" in reply.json()["error"]
    assert fetcher.names == []


async def test_only_administrators_fetch() -> None:
    fetcher = FakeFetcher()
    async with client_of(fetcher, api_key=("k",), admin_key=("a",)) as client:
        for key, status in (("k", 403), ("wrong", 401), ("a", 200)):
            headers = {"authorization": f"Bearer {key}"}
            reply = await client.post(PULL, json={"model": "x"}, headers=headers)
            assert reply.status_code == status
    assert fetcher.names == ["x"]


async def test_a_server_that_fetches_nothing_says_so() -> None:
    async with client_of(None) as client:
        reply = await client.post(PULL, json={"model": "x"})
    assert reply.status_code == 501 and "fetches no models" in reply.json()["error"]


async def test_a_client_that_leaves_ends_it_and_the_next_one_begins() -> None:
    fetcher = FakeFetcher()
    fetcher.waits = True
    async with serving(FakeEngine()) as server:
        server._state.fetcher = fetcher
        async with httpx.AsyncClient(base_url=server.url, timeout=20) as client:
            async with client.stream("POST", PULL, json={"model": "x"}) as reply:
                lines = reply.aiter_lines()
                while "digest" not in await anext(lines):
                    pass
                second = asyncio.create_task(client.post(PULL, json={"model": "y"}))
                await asyncio.sleep(0.05)
                assert fetcher.names == ["x"]
            await eventually(lambda: fetcher.left is not None)
            assert str(fetcher.left) == "the client has left"
            fetcher.go_on.set()
            assert lines_of(await second)[-1] == {"status": "success"}
    assert fetcher.names == ["x", "y"]


def test_the_catalog_is_what_is_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    fetcher = CatalogFetcher()
    assert fetcher.num_bytes("SmolLM2-135m") == catalog.CATALOG["smollm2-135m"].download_bytes
    assert fetcher.num_bytes("org/x") is None
    answered: list[Any] = []
    monkeypatch.setattr(catalog, "pull", lambda *given: answered.append(given))
    fetcher.fetch("org/x", print)
    assert answered == [("org/x", print)]
