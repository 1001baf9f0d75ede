"""How much JSON a body may hold, and that counting it agrees with parsing it."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest
from fake_engine import FakeEngine
from hypothesis import given, settings
from hypothesis import strategies as st
from lengths import scaled
from server_harness import app_client

from termgen.errors import RequestError
from termgen.serving import body as module
from termgen.serving.body import check_weight

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text('ab"\\[{,:é\n', max_size=12),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=30,
)


def weight_of(value: Any) -> int:
    """From the parsed value: a comma 1, a string, list or object 3."""
    if isinstance(value, str):
        return 3
    if isinstance(value, dict):
        commas = max(0, len(value) - 1)
        return 3 + commas + sum(3 + weight_of(inner) for inner in value.values())
    if isinstance(value, list):
        return 3 + max(0, len(value) - 1) + sum(map(weight_of, value))
    return 0


@given(value=json_values, ascii_only=st.booleans())
@settings(max_examples=scaled(120), deadline=None)
def test_counting_agrees_with_parsing(value: Any, ascii_only: bool) -> None:
    raw = json.dumps(value, ensure_ascii=ascii_only).encode()
    expected = weight_of(value) + raw.count(b"\\") // 4
    limit, module.MAX_JSON_WEIGHT = module.MAX_JSON_WEIGHT, expected
    try:
        # what follows the last comma or bracket is counted with the next look: pad with none
        asyncio.run(check_weight(raw))
        module.MAX_JSON_WEIGHT = expected - 1
        if expected:
            with pytest.raises(RequestError):
                asyncio.run(check_weight(raw + b" "))
    finally:
        module.MAX_JSON_WEIGHT = limit


@given(raw=st.binary(max_size=200) | st.text('"\\[],{} ', max_size=60).map(str.encode))
@settings(max_examples=scaled(120), deadline=None)
def test_counting_ends_whatever_the_bytes(raw: bytes) -> None:
    asyncio.run(check_weight(raw))


@pytest.mark.parametrize(
    ("content", "status"),
    [
        (b'{"prompt":[' + b"7," * 200_000 + b"7]}", 400),  # longer than the context, but read
        (b'{"prompt":[' + b"7," * 300_000 + b"7]}", 413),
        (b'{"prompt":"x","stop":[' + b'"a",' * 80_000 + b'"a"]}', 413),
        (b'{"prompt":' + b"[]," * 100_000, 413),
        (b'{"prompt":"' + b"a, [b] {c} " * 100_000 + b'"}', 400),
        (b'{"prompt":"' + b'\\"\\\\' * 100_000 + b'","n":0}', 400),
        (b'{"prompt":"' + b"\\" * 1_000_000, 400),
        (b'"' * 500_000, 413),
    ],
    ids=["ids", "many ids", "strings", "lists", "text", "escapes", "backslashes", "quotes"],
)
async def test_bodies_of_many_values_are_refused(content: bytes, status: int) -> None:
    engine = FakeEngine()
    async with app_client(engine) as client:
        headers = {"content-type": "application/json"}
        response = await client.post("/v1/completions", content=content, headers=headers)
        assert response.status_code == status, response.text
        if status == 413:
            assert response.json()["error"]["code"] == "request_too_large"
        assert engine.live == ()


async def test_large_bodies_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """While one is parsed, and as long again, no other is; small ones do not wait."""
    parsing: list[int] = []
    parse = module.parse_json

    def slow(raw: bytes, *args: str) -> dict[str, Any]:
        parsing.append(len(raw))
        time.sleep(0.05 if len(raw) > 2**16 else 0)
        return parse(raw, *args)

    monkeypatch.setattr(module, "parse_json", slow)
    async with app_client(FakeEngine()) as client:

        async def ask(size: int) -> int:
            body = {"prompt": "x", "user": "u" * size}
            return (await client.post("/v1/completions", json=body)).status_code

        large = [asyncio.create_task(ask(100_000)) for _ in range(3)]
        while not parsing:
            await asyncio.sleep(0.001)
        assert await ask(10) == 200
        assert len([size for size in parsing if size > 2**16]) < 3
        assert await asyncio.gather(*large) == [200, 200, 200]


async def test_others_go_on_while_a_body_is_counted() -> None:
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(others())
    await check_weight(b'["' + b'\\"' * 10 + b'","x"' * 30_000 + b"]")
    task.cancel()
    assert turns > 100


async def test_too_many_messages_are_refused() -> None:
    async with app_client(FakeEngine()) as client:
        message = {"role": "user", "content": "x"}
        response = await client.post("/v1/chat/completions", json={"messages": [message] * 4097})
        assert response.status_code == 400
        assert response.json()["error"]["message"] == "at most 4096 messages are allowed"
