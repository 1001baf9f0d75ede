"""The HTTP surface, without sockets: shapes, errors, keys, limits, health."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import httpx
import pytest
from fake_engine import FakeEngine, GenerateCall, Script, make_model_info
from server_harness import (
    MESSAGES,
    app_client,
    chat_body,
    chat_text,
    completion_text,
    eventually,
    read_events,
)

from termgen.client import ChatPrompt, FillPrompt
from termgen.config import ServerConfig
from termgen.engine.sampling_params import SamplingParams
from termgen.errors import EngineDeadError, StepError
from termgen.server import create_app

ANSWER = "Hello, world! Ça va? 👋🏽."


def error_of(response: httpx.Response) -> dict[str, Any]:
    """The error object, checked to have OpenAI's shape."""
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    body = response.json()
    assert body.keys() == {"error"}
    error: dict[str, Any] = body["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str) and error["message"]
    assert error["code"] is None or isinstance(error["code"], str)
    return error


async def test_models() -> None:
    async with app_client(FakeEngine(), served_model_name=("org/name", "alias")) as client:
        listed = (await client.get("/v1/models")).json()
        assert listed["object"] == "list"
        assert [m["id"] for m in listed["data"]] == ["org/name", "alias"]
        first = listed["data"][0]
        assert first["root"] == "/models/fake"
        assert first["max_model_len"] == 4096
        assert first["object"] == "model" and isinstance(first["created"], int)
        assert (await client.get("/v1/models/org/name")).json() == first
        assert (await client.get("/v1/models/org%2Fname")).json() == first
        missing = await client.get("/v1/models/other")
        assert missing.status_code == 404
        assert error_of(missing)["code"] == "model_not_found"


async def test_chat() -> None:
    engine = FakeEngine(script=Script(num_cached_tokens=5))
    async with app_client(engine) as client:
        response = await client.post("/v1/chat/completions", json=chat_body(temperature=0, seed=1))
    body = response.json()
    assert body["object"] == "chat.completion"
    assert body["id"].startswith("chatcmpl-")
    assert body["model"] == "fake/model-1"
    (choice,) = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": ANSWER, "refusal": None}
    assert choice["finish_reason"] == "stop"
    usage = body["usage"]
    assert usage["prompt_tokens"] == len("user: hi\nassistant: ")
    assert usage["completion_tokens"] == 11
    assert usage["total_tokens"] == usage["prompt_tokens"] + 11
    assert usage["prompt_tokens_details"] == {"cached_tokens": 5}
    (call,) = engine.calls
    assert call.prompt == ChatPrompt(messages=tuple(MESSAGES))
    assert call.params == SamplingParams(temperature=0, seed=1)
    assert call.request_id == body["id"]
    assert engine.finished == [body["id"]] and engine.live == ()


async def test_chat_stream() -> None:
    async with app_client(FakeEngine()) as client:
        options = {"include_usage": True}
        response = await client.post(
            "/v1/chat/completions", json=chat_body(stream=True, stream_options=options)
        )
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"
    events = read_events(response.content)
    assert {e["object"] for e in events} == {"chat.completion.chunk"}
    assert len({(e["id"], e["created"], e["model"]) for e in events}) == 1
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert chat_text(events) == ANSWER
    assert events[-2]["choices"][0]["finish_reason"] == "stop"
    assert events[-1]["choices"] == [] and events[-1]["usage"]["completion_tokens"] == 11


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"n": 3},
        {"stop": ["rld"]},
        {"stop": "👋", "include_stop_str_in_output": True},
        {"max_tokens": 3},
        {"max_tokens": 1, "n": 2},
    ],
)
async def test_streamed_text_is_the_text(fields: dict[str, Any]) -> None:
    async with app_client(FakeEngine()) as client:
        whole = (await client.post("/v1/chat/completions", json=chat_body(**fields))).json()
        response = await client.post("/v1/chat/completions", json=chat_body(stream=True, **fields))
        events = read_events(response.content)
    for choice in whole["choices"]:
        parts = [c for e in events for c in e["choices"] if c["index"] == choice["index"]]
        streamed = "".join(p["delta"].get("content", "") for p in parts)
        assert streamed.encode() == choice["message"]["content"].encode()
        assert parts[-1]["finish_reason"] == choice["finish_reason"]
        assert parts[-1]["stop_reason"] == choice["stop_reason"]
        assert [p["delta"].get("role") for p in parts].count("assistant") == 1


async def test_completions_of_every_prompt_form() -> None:
    async with app_client(FakeEngine()) as client:
        for prompt, count in (("hi", 1), (["a", "b"], 2), ([104, 105], 1), ([[104], [105]], 2)):
            body = {"prompt": prompt, "max_tokens": 2, "n": 2, "logprobs": 1}
            whole = (await client.post("/v1/completions", json=body)).json()
            assert whole["object"] == "text_completion"
            assert [c["index"] for c in whole["choices"]] == list(range(2 * count))
            assert {c["text"] for c in whole["choices"]} == {"Hello,"}
            assert {c["finish_reason"] for c in whole["choices"]} == {"length"}
            response = await client.post("/v1/completions", json={**body, "stream": True})
            events = read_events(response.content)
            for choice in whole["choices"]:
                parts = [e["choices"][0] for e in events]
                parts = [p for p in parts if p["index"] == choice["index"]]
                assert "".join(p["text"] for p in parts) == choice["text"]
                offsets = [o for p in parts for o in p["logprobs"]["text_offset"]]
                assert offsets == choice["logprobs"]["text_offset"] == [0, 5]


async def test_the_default_length_of_a_completion_is_16() -> None:
    engine = FakeEngine(script=Script(pieces=["x"] * 40))
    async with app_client(engine) as client:
        body = (await client.post("/v1/completions", json={"prompt": "a"})).json()
        assert body["choices"][0]["text"] == "x" * 16
        chat = (await client.post("/v1/chat/completions", json=chat_body())).json()
        assert chat["choices"][0]["message"]["content"] == "x" * 40


@pytest.mark.parametrize("prompt", ["hi", [104, 105]])
async def test_echo(prompt: Any) -> None:
    engine = FakeEngine()
    async with app_client(engine) as client:
        body = {"prompt": prompt, "echo": True, "max_tokens": 1}
        assert (await client.post("/v1/completions", json=body)).json()["choices"][0][
            "text"
        ] == "hiHello"
        response = await client.post("/v1/completions", json={**body, "stream": True})
        assert completion_text(read_events(response.content)) == "hiHello"
        only = (await client.post("/v1/completions", json={**body, "max_tokens": 0})).json()
        assert only["choices"][0]["text"] == "hi"
        assert only["choices"][0]["finish_reason"] == "length"
        assert only["usage"]["prompt_tokens"] == 2
        assert only["usage"]["completion_tokens"] == 0
        assert len(engine.calls) == 2, "nothing is generated for an echo alone"
        out_of_range = {"prompt": [10**6], "echo": True, "max_tokens": 0}
        assert (await client.post("/v1/completions", json=out_of_range)).status_code == 400


async def test_what_was_ignored_is_said() -> None:
    async with app_client(FakeEngine()) as client:
        response = await client.post(
            "/v1/chat/completions", json=chat_body(foo=1, user="u", **{"a\nb": 2})
        )
        assert response.status_code == 200
        assert response.headers["x-termgen-ignored"] == "foo, +1"
        response = await client.post("/v1/chat/completions", json=chat_body(user="u"))
        assert "x-termgen-ignored" not in response.headers
        for path, body in (
            ("/v1/completions", {"prompt": "x"}),
            ("/v1/messages", chat_body(max_tokens=1)),
            ("/v1/messages/count_tokens", chat_body()),
            ("/v1/responses", {"input": "x"}),
            ("/tokenize", {"prompt": "x"}),
            ("/detokenize", {"tokens": [65]}),
        ):
            response = await client.post(path, json={**body, "foo": 1})
            assert response.status_code == 200, response.text
            assert response.headers["x-termgen-ignored"] == "foo", path
        metrics = (await client.get("/metrics")).text
        assert 'termgen_ignored_fields_total{model="fake/model-1"} 8.0' in metrics


@pytest.mark.parametrize("stream", [False, True])
async def test_faults_found_by_the_engine_are_proper_4xx(stream: bool) -> None:
    engine = FakeEngine(model=make_model_info(max_model_len=30))
    async with app_client(engine) as client:
        response = await client.post(
            "/v1/chat/completions", json=chat_body(max_tokens=100, stream=stream)
        )
    assert response.status_code == 400
    error = error_of(response)
    assert error["code"] == "context_length_exceeded"
    assert "maximum context length is 30" in error["message"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_failure_before_the_first_token_is_a_500(stream: bool) -> None:
    script = Script(fail_after=0, error=StepError("step 7 failed", step_id=7))
    async with app_client(FakeEngine(script=script)) as client:
        response = await client.post("/v1/chat/completions", json=chat_body(stream=stream))
    assert response.status_code == 500
    assert error_of(response)["code"] == "engine_error"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("how", ["fail_after", "raise_after"])
async def test_a_failure_in_mid_stream_is_a_frame(path: str, how: str) -> None:
    script = Script(error=EngineDeadError("the engine thread has stopped"), **{how: 2})
    async with app_client(FakeEngine(script=script)) as client:
        response = await client.post(path, json={**chat_body(), "prompt": "x", "stream": True})
        assert response.status_code == 200
        events = read_events(response.content)
        assert events[-1]["error"]["code"] == "engine_dead"
        assert [e for e in events[:-1] if e["choices"][0]["finish_reason"]] == []
        whole = await client.post(path, json={**chat_body(), "prompt": "x"})
        assert whole.status_code == 503
        assert error_of(whole)["code"] == "engine_dead"


async def test_one_failing_prompt_of_several_fails_the_request_and_stops_the_others() -> None:
    def script(call: GenerateCall) -> Script:
        return Script(fail_after=1) if call.prompt == "b" else Script(hold_after=1)

    engine = FakeEngine(script=script)
    async with app_client(engine) as client:
        response = await client.post("/v1/completions", json={"prompt": ["a", "b", "c"]})
    assert response.status_code == 500
    assert engine.live == ()
    assert len(engine.aborted) == 2


@pytest.mark.parametrize("stream", [False, True])
async def test_an_aborted_request_ends_with_an_error(stream: bool) -> None:
    engine = FakeEngine(script=Script(hold_after=2))
    async with app_client(engine) as client:
        asking = asyncio.create_task(
            client.post("/v1/chat/completions", json=chat_body(stream=stream))
        )
        await eventually(lambda: bool(engine.live))
        assert await engine.abort(engine.live[0])
        response = await asking
    if stream:
        assert read_events(response.content)[-1]["error"]["code"] == "aborted"
    else:
        assert response.status_code == 500
        assert response.headers["x-should-retry"] == "false"
        assert error_of(response)["code"] == "aborted"


async def test_a_stream_that_ends_without_a_reason_is_an_error_not_a_hang() -> None:
    async with app_client(FakeEngine(script=Script(pieces=()))) as client:
        response = await client.post("/v1/chat/completions", json=chat_body())
    assert error_of(response)["code"] == "engine_error"


async def test_a_bug_of_ours_is_logged_and_told_as_500(caplog: pytest.LogCaptureFixture) -> None:
    engine = FakeEngine(script=Script(raises=KeyError("secret")))
    async with app_client(engine) as client:
        response = await client.post("/v1/chat/completions", json=chat_body())
    assert response.status_code == 500
    error = error_of(response)
    assert error["code"] == "internal_error" and "secret" not in response.text
    assert "KeyError" in caplog.text


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/", 404, "not_found"),
        ("GET", "/v1/nothing", 404, "not_found"),
        ("GET", "/v1/chat/completions/", 404, "not_found"),
        ("GET", "/v1/chat/completions", 405, "method_not_allowed"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
        ("OPTIONS", "/v1/completions", 405, "method_not_allowed"),
    ],
)
async def test_http_errors_are_json_too(method: str, path: str, status: int, code: str) -> None:
    async with app_client(FakeEngine()) as client:
        response = await client.request(method, path)
    assert response.status_code == status
    assert error_of(response)["code"] == code
    if status == 405:
        assert response.headers["allow"]


@pytest.mark.parametrize("content_type", [None, "text/plain", "application/x-www-form-urlencoded"])
async def test_bodies_must_say_that_they_are_json(content_type: str | None) -> None:
    headers = {"content-type": content_type} if content_type else {}
    async with app_client(FakeEngine()) as client:
        content = json.dumps(chat_body())
        response = await client.post("/v1/chat/completions", content=content, headers=headers)
        assert response.status_code == 400
        assert error_of(response)["param"] == "content-type"
        headers = {"content-type": "application/json; charset=utf-8"}
        response = await client.post("/v1/chat/completions", content=content, headers=headers)
        assert response.status_code == 200


async def test_unknown_model_is_a_404() -> None:
    async with app_client(FakeEngine(), served_model_name=("a", "b")) as client:
        for path in ("/v1/chat/completions", "/v1/completions"):
            body = {**chat_body(), "prompt": "x"}
            missing = await client.post(path, json={**body, "model": "gpt-4"})
            assert missing.status_code == 404
            assert error_of(missing)["code"] == "model_not_found"
            assert error_of(missing)["param"] == "model"
            wrong = await client.post(path, json={**body, "model": 5})
            assert wrong.status_code == 400
            assert (await client.post(path, json={**body, "model": "b"})).json()["model"] == "b"
            assert (await client.post(path, json=body)).json()["model"] == "a"


async def test_body_limit() -> None:
    async def endless(chunks: int) -> Any:
        for _ in range(chunks):
            yield b" " * 500

    headers = {"content-type": "application/json"}
    async with app_client(FakeEngine(), max_body_bytes=2000) as client:
        announced = await client.post("/v1/completions", content=b" " * 2001, headers=headers)
        arriving = await client.post("/v1/completions", content=endless(10), headers=headers)
        for response in (announced, arriving):
            assert response.status_code == 413
            assert error_of(response)["code"] == "request_too_large"
        fits = await client.post(
            "/v1/completions", content=b'{"prompt":"x"}' + b" " * 1900, headers=headers
        )
        assert fits.status_code == 200


async def test_keys_guard_everything_but_health() -> None:
    keys = ("secret-one", "sécret-two")
    good = [
        {"authorization": "Bearer secret-one"},
        {"authorization": "bearer  secret-one"},
        {"x-api-key": "secret-one"},
    ]
    bad: list[dict[str, str]] = [
        {},
        {"authorization": ""},
        {"authorization": "Bearer"},
        {"authorization": "Bearer "},
        {"authorization": "Bearer secret"},
        {"authorization": "Bearer secret-one-more"},
        {"authorization": "Basic secret-one"},
        {"authorization": "secret-one"},
        {"x-api-key": "secret"},
        {"authorization": "Bearer wrong", "x-api-key": "secret-one"},
    ]
    async with app_client(FakeEngine(), api_key=keys) as client:
        assert (await client.get("/health")).status_code == 200
        for path in ("/v1/models", "/metrics", "/ready", "/version", "/nothing", "//health"):
            for headers in bad:
                response = await client.get(path, headers=headers)
                assert response.status_code == 401, (path, headers)
                assert error_of(response)["code"] == "invalid_api_key"
                assert response.headers["www-authenticate"] == "Bearer"
        for headers in good:
            assert (await client.get("/v1/models", headers=headers)).status_code == 200
        response = await client.get("/nothing", headers=good[0])
        assert response.status_code == 404, "with a key, a missing page is a missing page"


async def test_a_crafted_host_header_opens_nothing() -> None:
    """Frameworks that rebuild the URL from the Host header can be talked into another path."""
    config = {"api_key": ("k",), "allowed_host": ("*",)}
    async with app_client(FakeEngine(), **config) as client:
        for host in ("x/health?", "x/health#", "127.0.0.1/health", "health"):
            response = await client.get("/v1/models", headers={"host": host})
            assert response.status_code == 401, host


async def test_host_check_on_loopback() -> None:
    def hosts(*names: str) -> list[dict[str, str]]:
        return [{"host": name} for name in names]

    good = hosts("localhost", "localhost:8000", "127.0.0.1:1", "[::1]:80", "127.1.2.3", "LOCALHOST")
    bad = hosts("evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.nip.io")
    async with app_client(FakeEngine()) as client:
        for headers in good:
            assert (await client.get("/v1/models", headers=headers)).status_code == 200, headers
        for headers in bad:
            response = await client.get("/v1/models", headers=headers)
            assert response.status_code == 403, headers
            assert error_of(response)["type"] == "permission_error"
    async with app_client(FakeEngine(), allowed_host=("box.lan",)) as client:
        assert (await client.get("/health", headers={"host": "box.lan:8000"})).status_code == 200
        assert (await client.get("/health", headers=bad[0])).status_code == 403
    async with app_client(FakeEngine(), host="0.0.0.0") as client:
        assert (await client.get("/health", headers=bad[0])).status_code == 200


async def test_request_ids() -> None:
    async with app_client(FakeEngine()) as client:
        response = await client.get("/health", headers={"x-request-id": "job-7:a.b_c"})
        assert response.headers["x-request-id"] == "job-7:a.b_c"
        generated = set()
        for bad in ("", "a b", "x" * 129, "a,b", '"q"'):
            response = await client.get("/health", headers={"x-request-id": bad})
            generated.add(response.headers["x-request-id"])
            assert response.headers["x-request-id"] != bad
        assert len(generated) == 5


async def test_a_clients_request_id_is_never_the_engines() -> None:
    engine = FakeEngine()
    async with app_client(engine) as client:
        for _ in range(2):
            await client.post(
                "/v1/chat/completions", json=chat_body(), headers={"x-request-id": "same"}
            )
    assert len({call.request_id for call in engine.calls} | {"same"}) == 3


async def test_health_tells_the_truth() -> None:
    engine = FakeEngine()
    async with app_client(engine) as client:
        assert (await client.get("/health")).json() == {"status": "ok"}
        assert (await client.get("/ready")).status_code == 200
        engine.healthy = False
        for path in ("/health", "/ready"):
            response = await client.get(path)
            assert response.status_code == 503
            assert response.json()["status"] == "engine_dead"
        response = await client.post("/v1/chat/completions", json=chat_body())
        assert response.status_code == 503
        assert error_of(response)["code"] == "engine_dead"


async def test_while_the_model_loads() -> None:
    async with app_client(None) as client:
        for path in ("/health", "/ready"):
            response = await client.get(path)
            assert response.status_code == 503 and response.json() == {"status": "loading"}
        response = await client.post("/v1/chat/completions", json=chat_body())
        assert response.status_code == 503
        assert error_of(response)["code"] == "loading"
        assert response.headers["retry-after"]
        assert (await client.get("/version")).status_code == 200
        assert (await client.get("/metrics")).status_code == 200


async def test_usage_can_be_forced_on_streams() -> None:
    async with app_client(FakeEngine(), force_include_usage=True) as client:
        response = await client.post("/v1/chat/completions", json=chat_body(stream=True))
    assert read_events(response.content)[-1]["usage"]["completion_tokens"] == 11


async def test_a_silent_stream_is_pinged_and_only_a_silent_one() -> None:
    engine = FakeEngine(script=Script(hold_after=1))
    async with app_client(engine, sse_ping_interval=0.05) as client:
        asking = asyncio.create_task(
            client.post("/v1/chat/completions", json=chat_body(stream=True))
        )
        await eventually(lambda: bool(engine.live))
        await asyncio.sleep(0.2)
        engine.release.set()
        response = await asking
    assert b": ping\n\n" in response.content
    assert chat_text(read_events(response.content)) == ANSWER
    async with app_client(FakeEngine(), sse_ping_interval=15) as client:
        response = await client.post("/v1/chat/completions", json=chat_body(stream=True))
        assert b"ping" not in response.content


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", chat_body()),
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/messages", chat_body(max_tokens=20)),
        ("/v1/responses", {"input": "x"}),
    ],
)
async def test_a_request_says_when_its_stream_is_pinged(path: str, body: dict[str, Any]) -> None:
    engine = FakeEngine(script=Script(first_delay_s=1.2))
    body = {**body, "stream": True}

    async def answered(config_s: float, asked_s: float) -> bytes:
        async with app_client(engine, sse_ping_interval=config_s) as client:
            response = await client.post(path, json={**body, "sse_ping_interval": asked_s})
            assert response.status_code == 200
            assert "x-termgen-ignored" not in response.headers
            return response.content

    pinged, silent = await asyncio.gather(answered(0, 1), answered(0.05, 0))
    ping = b'{"type":"ping"}' if path == "/v1/messages" else b": ping\n\n"
    assert pinged.count(ping) == 1 and b"ping" not in silent
    assert len(pinged) > len(silent) > 100
    async with app_client(engine) as client:
        for wrong in (
            {"sse_ping_interval": 0.5},
            {"sse_ping_interval": -1},
            {"sse_ping_interval": 10**9},
            {"sse_ping_interval": "1"},
            {"sse_ping_interval": 1, "stream": False},
        ):
            response = await client.post(path, json={**body, **wrong})
            assert response.status_code == 400
            error = response.json()["error"]
            assert error["message"].startswith("sse_ping_interval ")
            assert error.get("param", "sse_ping_interval") == "sse_ping_interval"


async def test_pings_bridge_a_long_wait_for_the_first_token() -> None:
    engine = FakeEngine(script=Script(hold_after=0))
    async with app_client(engine, sse_ping_interval=0.05) as client:
        asking = asyncio.create_task(
            client.post("/v1/chat/completions", json=chat_body(stream=True))
        )
        await eventually(lambda: bool(engine.live))
        await asyncio.sleep(0.15)
        engine.release.set()
        content = (await asking).content
    assert content.startswith(b": ping\n\n")
    events = read_events(content)
    assert events[0]["choices"][0]["delta"]["role"] == "assistant", "the role waits for a token"
    assert chat_text(events) == ANSWER


async def test_one_access_line_per_request_without_prompts(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "termgen.server.access")
    secret = "a very secret prompt"
    async with app_client(FakeEngine(), api_key=("k3y",)) as client:
        headers = {"authorization": "Bearer k3y", "x-request-id": "r1"}
        body = {"messages": [{"role": "user", "content": secret}]}
        await client.post("/v1/chat/completions?key=k3y", json=body, headers=headers)
        await client.get("/nope%0d%0aforged", headers=headers)
    lines = [r.getMessage() for r in caplog.records if r.name == "termgen.server.access"]
    assert len(lines) == 2
    assert '"POST /v1/chat/completions" 200' in lines[0] and lines[0].endswith("r1")
    assert '"GET /nope%0D%0Aforged" 404' in lines[1]
    assert secret not in caplog.text and "k3y" not in caplog.text


async def test_two_servers_in_one_process_share_nothing() -> None:
    first, second = FakeEngine(), FakeEngine(model=make_model_info(model_id="other"))
    async with app_client(first) as one, app_client(second) as two:
        await one.post("/v1/completions", json={"prompt": "x"})
        assert (await two.get("/v1/models")).json()["data"][0]["id"] == "other"
        text = (await two.get("/metrics")).text
        assert 'termgen_generation_tokens_total{model="other"} 0.0' in text
        assert "fake/model-1" not in text
    assert len(first.calls) == 1 and second.calls == []


def test_an_app_can_be_made_outside_a_loop() -> None:
    assert create_app(None, ServerConfig()).routes


async def test_a_prompt_with_a_gap_reaches_the_engine() -> None:
    engine = FakeEngine()
    async with app_client(engine) as client:
        body = {"prompt": "def f():", "suffix": "return x", "max_tokens": 3}
        whole = (await client.post("/v1/completions", json=body)).json()
        streamed = await client.post("/v1/completions", json={**body, "stream": True})
        assert completion_text(read_events(streamed.content)) == whole["choices"][0]["text"]
        refused = await client.post("/v1/completions", json={**body, "echo": True})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "suffix"
    assert [call.prompt for call in engine.calls] == [FillPrompt("def f():", "return x")] * 2
