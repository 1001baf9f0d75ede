"""The HTTP surface, without sockets: shapes, prompts, request ids, health."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import httpx
import pytest
from fake_engine import FakeEngine, Script, make_model_info
from server_harness import (
    ANSWER,
    MESSAGES,
    app_client,
    chat_body,
    chat_text,
    completion_text,
    error_of,
    eventually,
    read_events,
    socket_client,
)

from termgen.client import ChatPrompt, FillPrompt
from termgen.config import ServerConfig
from termgen.server import create_app
from termgen.serving.app import build_app
from termgen.serving.middleware import MAX_REPEATED, QUIET_S, RepeatedLines
from termgen.serving.state import ServerState
from termgen.vocabulary.sampling_params import SamplingParams
from termgen.vocabulary.tool_format import ToolFormat


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


@pytest.mark.parametrize(
    ("model", "capabilities"),
    [
        ({"has_chat_template": False}, {"chat": False, "tools": None}),
        ({"tool_format": ToolFormat()}, {"chat": True, "tools": "system_message"}),
        (
            {"tool_format": ToolFormat(knows_tools=True)},
            {"chat": True, "tools": "template"},
        ),
    ],
)
async def test_models_say_how_they_are_told_of_tools(
    model: dict[str, Any], capabilities: dict[str, Any]
) -> None:
    async with app_client(FakeEngine(model=make_model_info(**model))) as client:
        shown = (await client.get("/v1/models")).json()["data"][0]["capabilities"]
        assert shown == {**capabilities, "embeddings": True}


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


async def test_load_counts_the_requests_under_way() -> None:
    engine = FakeEngine(script=Script(hold_after=1))
    async with socket_client(engine) as client:

        async def load() -> Any:
            return (await client.get("/load")).json()

        assert await load() == {"server_load": 0}
        bodies = [chat_body(n=2), chat_body(stream=True)]
        asking = [
            asyncio.create_task(client.post("/v1/chat/completions", json=body)) for body in bodies
        ]
        await eventually(lambda: len(engine.live) == 2)
        assert await load() == {"server_load": 2}
        asking[0].cancel()
        await eventually(lambda: len(engine.live) == 1)
        assert await load() == {"server_load": 1}
        engine.release.set()
        assert (await asking[1]).status_code == 200
        assert await load() == {"server_load": 0}


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


async def test_while_the_model_loads_the_phase_is_told() -> None:
    state = ServerState(ServerConfig())
    app = build_app(state)
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://127.0.0.1"
    ) as client:
        state.on_loading("loading weights", 0.4251)
        told = {"phase": "loading weights", "progress": 0.425}
        for path in ("/health", "/ready"):
            response = await client.get(path)
            assert response.status_code == 503 and response.headers["retry-after"]
            assert response.json() == {"status": "loading", **told}
        for method, path in (("GET", "/v1/models"), ("GET", "/v1/events"), ("POST", "/tokenize")):
            response = await client.request(method, path, json={"prompt": "x"})
            assert response.status_code == 503 and response.headers["retry-after"]
            error = error_of(response)
            assert error["code"] == "loading" and "(loading weights, 42%)" in error["message"]
            assert {name: error[name] for name in told} == told
        state.attach(FakeEngine())
        assert (await client.get("/health")).json() == {"status": "ok"}
        state.detach()


async def test_what_a_client_asks_again_and_again_is_one_line_a_minute(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "termgen.server.access")

    def lines() -> list[str]:
        found = [r.getMessage() for r in caplog.records if r.name == "termgen.server.access"]
        caplog.clear()
        return found

    async with app_client(None) as client:
        for _ in range(20):
            await client.get("/v1/models")
            await client.post("/v1/chat/completions", json=chat_body())
        found = lines()
        assert len(found) == 2 and " 503 " in found[0] and " 503 " in found[1]
    async with app_client(FakeEngine(), api_key=("k",)) as client:
        for _ in range(20):
            await client.get("/v1/models", headers={"authorization": "Bearer wrong"})
        assert len(lines()) == 1
        for _ in range(3):
            await client.get("/v1/models", headers={"authorization": "Bearer k"})
            await client.get("/v1/nothing", headers={"authorization": "Bearer k"})
        assert len(lines()) == 6  # answers do not repeat each other


def test_a_repeated_line_is_written_again_after_a_minute() -> None:
    now = 100.0
    repeated = RepeatedLines(clock=lambda: now)
    assert repeated.is_new("a", 503) and not repeated.is_new("a", 503)
    assert repeated.is_new("b", 503) and repeated.is_new("a", 429)
    now += QUIET_S - 1
    assert not repeated.is_new("a", 503)
    now += 1
    assert repeated.is_new("a", 503) and not repeated.is_new("a", 503)
    for i in range(1000):
        assert repeated.is_new(i)
    assert len(repeated._last) == MAX_REPEATED


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
