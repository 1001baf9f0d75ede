"""A client of a remote server, and the events it reads."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

from termgen.client import ChatPrompt, TokenDelta
from termgen.remote.client import RemoteClient
from termgen.vocabulary.sampling_params import SamplingParams

CHAT = ChatPrompt([{"role": "user", "content": "hi"}])
PARAMS = SamplingParams(temperature=0.5)


@asynccontextmanager
async def connected(url: str, **options: Any) -> AsyncGenerator[RemoteClient, None]:
    client = await RemoteClient.connect(url, **options)
    try:
        yield client
    finally:
        await client.aclose()


async def read_all(client: RemoteClient, params: SamplingParams = PARAMS) -> list[TokenDelta]:
    return [delta async for delta in client.generate(CHAT, params)]


def text_of(deltas: list[TokenDelta]) -> str:
    return "".join(delta.text for delta in deltas)
