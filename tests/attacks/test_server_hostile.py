"""Any bytes from a client get a documented 4xx or an answer, never a 500, and the server goes
on."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_engine import FakeEngine, Script
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from server_harness import (
    app_client,
    chat_body,
    completion_text,
    eventually,
    read_events,
    serving,
)

from termgen.config import EngineConfig
from termgen.engine.loop.engine import AsyncEngine

FIELDS = [
    *("model", "messages", "prompt", "stream", "stream_options", "max_tokens", "n", "stop"),
    *("max_completion_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "logprobs"),
    *("top_logprobs", "presence_penalty", "frequency_penalty", "repetition_penalty", "echo"),
    *("min_tokens", "ignore_eos", "stop_token_ids", "skip_special_tokens", "best_of", "suffix"),
    *("include_stop_str_in_output", "logit_bias", "tools", "tool_choice", "response_format"),
    *("structured_outputs", "priority", "cache_salt", "chat_template_kwargs", "user"),
    *("add_generation_prompt", "continue_final_message", "include_timings", "reasoning_effort"),
    *("return_token_ids", "return_tokens_as_token_ids", "prompt_logprobs", "metadata"),
    *("sse_ping_interval", "input", "dimensions", "encoding_format", "prompt_name"),
    *("truncate_prompt_tokens", "input_type", "normalize"),
]

PATHS = ["/v1/chat/completions", "/v1/completions", "/v1/embeddings"]

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20)
    | st.sampled_from(["user", "assistant", "system", "text", "auto", "fake/model-1", "\x00", "�"])
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=8), inner, max_size=4)
        | st.fixed_dictionaries({"role": scalars, "content": inner})
        | st.fixed_dictionaries({"type": scalars, "text": inner})
    ),
    max_leaves=12,
)
USER = b'"messages":[{"role":"user","content":"x"}]}'
bodies = st.dictionaries(st.sampled_from(FIELDS) | st.text(max_size=8), values, max_size=6)
relaxed = settings(
    max_examples=100,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)


async def post(path: str, content: bytes) -> tuple[int, bytes]:
    engine = FakeEngine(script=Script(pieces=("a", "b")))
    async with app_client(engine) as client:
        headers = {"content-type": "application/json"}
        response = await client.post(path, content=content, headers=headers)
        assert engine.live == (), "nothing is left running"
        return response.status_code, response.content


def check(status: int, content: bytes) -> None:
    if status == 200:
        if content.startswith(b"data: "):
            read_events(content)
        else:
            kinds = ("chat.completion", "text_completion", "list")
            assert json.loads(content)["object"] in kinds
        return
    assert status in (400, 404, 413), content
    error = json.loads(content)["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert "\n" not in error["message"] and len(error["message"]) < 500


@pytest.mark.parametrize("path", PATHS)
@given(body=bodies)
@relaxed
def test_any_json_body(path: str, body: dict[str, Any]) -> None:
    check(*asyncio.run(post(path, json.dumps(body).encode())))


@pytest.mark.parametrize("path", PATHS)
@given(field=st.sampled_from(FIELDS), value=values)
@relaxed
def test_a_good_body_with_one_odd_field(path: str, field: str, value: Any) -> None:
    body: dict[str, Any] = {**chat_body(), "prompt": "x"}
    body = {**({"input": "x"} if path == "/v1/embeddings" else body), field: value}
    check(*asyncio.run(post(path, json.dumps(body).encode())))


@given(content=st.binary(max_size=200))
@relaxed
def test_any_bytes(content: bytes) -> None:
    check(*asyncio.run(post("/v1/completions", content)))


@given(content=st.text(alphabet='{}[]":,0123456789.eE+-ntfau\\ ', max_size=60))
@relaxed
def test_almost_json(content: str) -> None:
    check(*asyncio.run(post("/v1/completions", content.encode())))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "content",
    [
        b"[" * 100_000,
        b'{"prompt":' + b"[" * 500 + b"]" * 500 + b"}",
        b'{"messages":' + b"[" * 900 + b"]" * 900 + b"}",
        b'{"chat_template_kwargs":{"a":' + b"[" * 900 + b"]" * 900 + b'},"prompt":5,' + USER,
        b'{"prompt":"x","stop":["\\ud800"]}',
        b'{"prompt":"x","n":' + b"9" * 4000 + b"}",
        b'{"prompt":"x","temperature":1e400}',
        b'{"prompt":"x","seed":1e400}',
        b'{"prompt":' + json.dumps(["x"] * 100_000).encode() + b"}",
        b'{"prompt":' + json.dumps([[1]] * 100_000).encode() + b"}",
        b'{"prompt":"x","stop":' + json.dumps(["x"] * 100_000).encode() + b"," + USER,
        b'{"prompt":"x","logit_bias":' + json.dumps(dict.fromkeys(range(10**5), 1)).encode() + b"}",
        b'{"prompt":"x","n":128,"n":129}',
        b'\xef\xbb\xbf{"prompt":"x"}',
        '{"prompt":"x"}'.encode("utf-16"),
    ],
    ids=lambda content: f"{content[:24]}, {len(content)} bytes",
)
async def test_known_nastiness(path: str, content: bytes) -> None:
    status, answer = await post(path, content)
    assert status in (400, 413), answer
    check(status, answer)


async def test_odd_headers_do_no_harm() -> None:
    async with app_client(FakeEngine(), api_key=("k",)) as client:
        for headers in (
            {"authorization": b"Bearer \xff\xfe\x80"},
            {"authorization": b"Bearer " + b"x" * 8000},
            {"authorization": b"Bearer k", "content-length": "-1"},
            {"authorization": b"Bearer k", "content-length": "9" * 400},
            {"authorization": b"Bearer k", "content-length": "\xb2"},
            {"authorization": b"Bearer k", "content-type": b"application/\xff"},
            {"authorization": b"Bearer k", "x-request-id": b"\xff"},
        ):
            raw = {
                key: value if isinstance(value, bytes) else value.encode("latin-1")
                for key, value in headers.items()
            }
            response = await client.post("/v1/completions", content=b"{}", headers=raw)
            assert response.status_code in (400, 401, 413), headers
            assert response.json()["error"]["message"]


async def test_a_good_stream_beside_hostile_clients(tiny_llama_dir: Path) -> None:
    """A real engine: the good client gets what it gets alone, and no block is left."""
    config = EngineConfig(model=str(tiny_llama_dir), device="cpu", max_model_len=256)
    engine = await AsyncEngine.start(config)
    try:
        async with serving(engine) as server:
            async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
                await hostile_hour(client)
            await eventually(lambda: not engine.parts.core.has_work)
            snapshot = await engine.snapshot()
            assert snapshot.num_used_blocks == 0 and snapshot.requests == ()
            assert server.num_answers == 0
    finally:
        await engine.shutdown()


async def hostile_hour(client: httpx.AsyncClient) -> None:
    good = {"prompt": "Hello", "max_tokens": 120, "ignore_eos": True, "stream": True, "seed": 1}

    async def stream() -> str:
        answer = await client.post("/v1/completions", json=good)
        return completion_text(read_events(answer.content))

    alone = await stream()
    beside = asyncio.create_task(stream())
    headers = {"content-type": "application/json"}
    nasty = [
        b'{"prompt":' + b"[" * 200_000,
        b'{"prompt":"x","n":' + b"9" * 4000 + b"}",
        b'{"prompt":"x","temperature":NaN}',
        b'{"prompt":"x","logit_bias":{"99999999":1}}',
        b'{"prompt":"x","stop":' + json.dumps(["x"] * 20_000).encode() + b"}",
        b'{"prompt":' + json.dumps([[1]] * 20_000).encode() + b"}",
        b'{"prompt":"' + b"a" * 100_000 + b'"}',
        b'{"prompt":[99999999]}',
        b'{"prompt":"x","n":128,"max_tokens":0}',
        b'{"prompt":"x","cache_salt":"\\u0000"}',
        b'{"prompt":"x","min_tokens":300}',
    ]
    while not beside.done():
        for content in nasty:
            answer = await client.post("/v1/completions", content=content, headers=headers)
            check(answer.status_code, answer.content)
            assert answer.status_code != 200, content[:60]
    assert await beside == alone
