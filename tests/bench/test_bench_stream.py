"""The load generator's reader against arbitrary bytes: no exception, one clear message."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from typing import Any

import pytest

from termgen.bench.load import LoadPlan, run_load
from termgen.bench.stream_client import Answer, Connector, Target

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"


def event(value: Any) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def text(piece: str, **more: Any) -> bytes:
    return event({"choices": [{"text": piece, **more}]})


USAGE = {"prompt_tokens": 3, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 2}}
WHOLE = (
    HEAD
    + b": ping\n\n"
    + text("")
    + text("Grü")
    + text("ße", finish_reason="length")
    + event({"choices": [], "usage": USAGE})
    + b"data: [DONE]\n\n"
)


async def asked(
    answer: bytes, *, piece: int = 0, timeout_s: float = 5.0, close: bool = True
) -> Answer:
    """The reader's result for these bytes, sent in pieces of `size`."""

    open_writers: list[asyncio.StreamWriter] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        open_writers.append(writer)
        if not await reader.read(1):  # the connection that resolves the address
            writer.close()
            return
        size = piece or max(1, len(answer))
        for at in range(0, len(answer), size):
            writer.write(answer[at : at + size])
            await writer.drain()
            await asyncio.sleep(0)
        if close:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    try:
        connector = await Connector.find(Target("127.0.0.1", port, "/v1/completions"))
        return await connector.ask(b"{}", timeout_s=timeout_s)
    finally:
        server.close()
        for writer in open_writers:
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()


@pytest.mark.parametrize("piece", [0, 1, 7])
async def test_a_stream_is_read_however_it_is_cut(piece: int) -> None:
    answer = await asked(WHOLE, piece=piece)
    assert answer.error is None and answer.has_ended
    assert "".join(answer.texts) == "Grüße" and answer.num_chunks == 2 and len(answer.gaps) == 1
    counts = answer.num_prompt_tokens, answer.num_output_tokens, answer.num_cached_tokens
    assert counts == (3, 5, 2)
    assert answer.began < answer.first <= answer.last
    assert answer.last - answer.first == pytest.approx(answer.gaps[0])


async def test_a_chat_begins_with_its_first_text_not_with_its_role() -> None:
    def delta(**fields: Any) -> bytes:
        return event({"choices": [{"delta": fields, "finish_reason": None}]})

    parts = delta(role="assistant", content=""), delta(reasoning_content="Hm"), delta(content="Yes")
    answer = await asked(HEAD + b"".join(parts) + b"data: [DONE]\n\n", piece=11)
    assert answer.texts == ["Hm", "Yes"] and answer.error is None and len(answer.gaps) == 1


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"", "closed without an answer"),
        (
            b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\ndata:",
            "the answer broke off",
        ),
        (HEAD + text("a"), "the answer broke off"),
        (HEAD + b"data: [DONE]\n\n", "the answer had no tokens"),
        (HEAD + event({"error": {"message": "no memory"}}) + b"data: [DONE]\n\n", "no memory"),
        (HEAD + b"data: {]\n\ndata: [DONE]\n\n", "an event is not a JSON object"),
        (HEAD + b"data: 7\n\ndata: [DONE]\n\n", "an event is not a JSON object"),
        (b"SSH-2.0-OpenSSH_9.6\r\n\r\n", "this is not HTTP"),
        (
            b'HTTP/1.1 429 Busy\r\ncontent-length: 18\r\n\r\n{"error": "later"}',
            'status 429: {"error": "later"}',
        ),
        (
            b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
            "this is not HTTP",
        ),
    ],
)
async def test_what_is_wrong_is_said(raw: bytes, words: str) -> None:
    answer = await asked(raw)
    assert answer.error is not None and words in answer.error


async def test_silence_ends_with_the_timeout() -> None:
    answer = await asked(HEAD + text("a"), timeout_s=0.2, close=False)
    assert answer.error == "no end after 0.2 s" and answer.texts == ["a"]


async def test_no_server_is_an_error_of_each_request() -> None:
    plan = LoadPlan(
        target=Target("127.0.0.1", 9, "/v1/completions"),
        bodies=({}, {}),
        due_s=(0.0, 0.01),
        max_concurrency=1,
        timeout_s=1.0,
    )
    assert LoadPlan.from_json(plan.as_json()).target == plan.target
    measured = await run_load(plan)
    errors = [answer["error"] for answer in measured["answers"]]
    assert len(errors) == 2 and all("no connection to 127.0.0.1:9" in e for e in errors)
    assert len(measured["lateness_s"]) == 1
