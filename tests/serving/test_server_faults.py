"""Faults over HTTP: in the engine, before and in mid-stream, in paths and in bodies."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from fake_engine import FakeEngine, GenerateCall, Script, make_model_info
from server_harness import app_client, chat_body, error_of, eventually, read_events

from termgen.errors import EngineDeadError, StepError


@pytest.mark.parametrize("stream", [False, True])
async def test_faults_found_by_the_engine_are_proper_4xx(stream: bool) -> None:
    engine = FakeEngine(model=make_model_info(max_model_len=30), clamps_max_tokens=False)
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
        ("GET", "/nothing", 404, "not_found"),
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
