"""Tokenising and detokenising count in the queue, and end with their client."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from fake_engine import FakeEngine
from server_harness import app_client, chat_body, eventually, socket_client

from termgen.client import Prompt


class SlowTokenizer(FakeEngine):
    """Tokenises and detokenises when it is released."""

    def __init__(self) -> None:
        super().__init__()
        self.num_working = 0

    async def tokenize(self, prompt: Prompt, *, add_special_tokens: bool = True) -> list[int]:
        await self._work()
        return await super().tokenize(prompt, add_special_tokens=add_special_tokens)

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        await self._work()
        return await super().detokenize(token_ids)

    async def _work(self) -> None:
        self.num_working += 1
        try:
            await self.release.wait()
        finally:
            self.num_working -= 1


ON_TOKENS: list[tuple[str, dict[str, Any]]] = [
    ("/tokenize", {"prompt": "x" * 40}),
    ("/tokenize", chat_body(tools=[{"type": "function", "function": {"name": "f" * 30}}])),
    ("/detokenize", {"tokens": [65] * 10}),
    ("/v1/messages/count_tokens", chat_body(system="x" * 40)),
    ("/v1/completions", {"prompt": [[65] * 5, [66] * 5], "echo": True, "max_tokens": 1}),
    ("/v1/completions", {"prompt": "x" * 40, "echo": True, "max_tokens": 0}),
]


@pytest.mark.parametrize(("path", "body"), ON_TOKENS)
async def test_nothing_is_tokenised_for_those_who_may_not_queue(
    path: str, body: dict[str, Any]
) -> None:
    engine = SlowTokenizer()
    async with app_client(engine, max_queue=2) as client:
        first = [asyncio.create_task(client.post(path, json=body))]
        await eventually(lambda: engine.num_working == 1)
        num_places = 2 if isinstance(body.get("prompt"), list) else 1
        if num_places == 1:
            first.append(asyncio.create_task(client.post(path, json=body)))
            await eventually(lambda: engine.num_working == 2)
        assert (await client.get("/ready")).json() == {"status": "queue_full"}
        for late in (*dict(ON_TOKENS), "/v1/chat/completions"):
            refused = await client.post(late, content=b"not even read")
            assert refused.status_code == 429 and refused.headers["retry-after"], late
        assert engine.num_working == len(first) and not engine.calls
        engine.release.set()
        assert [(await answer).status_code for answer in first] == [200] * len(first)
        assert (await client.get("/ready")).status_code == 200
        assert (await client.post(path, json=body)).status_code == 200


@pytest.mark.parametrize(("path", "body"), ON_TOKENS)
async def test_work_on_tokens_ends_with_its_client(path: str, body: dict[str, Any]) -> None:
    engine = SlowTokenizer()
    async with socket_client(engine, max_queue=1) as client:
        asking = asyncio.create_task(client.post(path, json=body))
        await eventually(lambda: engine.num_working == 1)
        asking.cancel()
        await eventually(lambda: engine.num_working == 0)
        engine.release.set()
        assert (await client.post(path, json=body)).status_code == 200, "the place is free"
    assert not engine.live


async def test_an_echo_can_be_cancelled_before_it_is_read() -> None:
    engine = SlowTokenizer()
    async with app_client(engine) as client:
        body = {"prompt": [65, 66], "echo": True, "max_tokens": 4, "stream": True}
        headers = {"x-request-id": "mine"}
        asking = asyncio.create_task(client.post("/v1/completions", json=body, headers=headers))
        await eventually(lambda: engine.num_working == 1)
        assert (await client.post("/v1/requests/mine/cancel")).status_code == 200
        assert (await asking).json()["error"]["code"] == "aborted"
    assert engine.num_working == 0 and not engine.calls
