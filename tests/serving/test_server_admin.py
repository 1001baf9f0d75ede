"""Tokenising, health, and the control of the engine, over a socket."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_engine import FakeEngine, Script
from real_server import serving_tiny
from server_harness import app_client, chat_body, eventually, read_events, serving, socket_client

from termgen.engine.loop import engine as engine_module
from termgen.engine.loop.engine import AsyncEngine

COUNTING = {"prompt": [5, 6, 7, 8], "max_tokens": 40, "temperature": 0, "ignore_eos": True}


async def settles(client: httpx.AsyncClient, path: str) -> dict[str, Any]:
    answer = await client.post(path)
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


async def test_tokens_and_back(tiny_llama_dir: Path) -> None:
    async with serving_tiny(tiny_llama_dir) as (client, engine):

        async def ids(**body: Any) -> list[int]:
            answer = (await client.post("/tokenize", json=body)).json()
            assert answer["count"] == len(answer["tokens"]) and answer["max_model_len"] == 256
            tokens: list[int] = answer["tokens"]
            return tokens

        text = "Grüße, 你好 👋"
        whole = await ids(model="tiny", prompt=text)
        assert whole == await engine.tokenize(text)
        bare = await ids(prompt=text, add_special_tokens=False)
        assert bare == whole[1:]
        back = await client.post("/detokenize", json={"model": "tiny", "tokens": bare})
        assert back.json() == {"prompt": text}
        texts = await client.post("/tokenize", json={"prompt": "a word", "return_token_strs": True})
        assert texts.json()["token_strs"] == ["<s>", *texts.json()["token_strs"][1:]]
        assert "".join(texts.json()["token_strs"][1:]) == "a word"
        chat = [{"role": "user", "content": "hi"}]
        with_turn = await ids(messages=chat)
        usage = (await client.post("/v1/chat/completions", json=chat_body(max_tokens=1))).json()
        assert len(with_turn) == usage["usage"]["prompt_tokens"]
        without = await ids(messages=chat, add_generation_prompt=False)
        assert with_turn[: len(without)] == without and len(without) < len(with_turn)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": []}, "messages"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"prompt": "a", "add_special_tokens": 1}, "add_special_tokens"),
        ("/tokenize", {**chat_body(), "add_special_tokens": True}, "add_special_tokens"),
        ("/tokenize", {**chat_body(), "tools": [{}]}, "tools[0].function"),
        ("/tokenize", {"prompt": "a", "model": "other"}, "model"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens"),
        ("/detokenize", {"tokens": [True]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [10**6]}, "prompt"),
    ],
)
async def test_wrong_questions_about_tokens(path: str, body: dict[str, Any], param: str) -> None:
    async with socket_client(FakeEngine()) as client:
        answer = await client.post(path, json=body)
    assert answer.status_code in (400, 404), answer.text
    assert answer.json()["error"]["param"] == param


async def test_what_the_tokenizer_is_must_be_allowed(tiny_llama_dir: Path) -> None:
    async with socket_client(FakeEngine()) as client:
        assert (await client.get("/tokenizer_info")).status_code == 404
    async with socket_client(FakeEngine(), enable_tokenizer_info=True) as client:
        info = (await client.get("/tokenizer_info")).json()
    assert info["eos_token"] == "</s>" and info["chat_template"] == "{{ messages }}"
    assert info["model_max_length"] == 4096
    engine = await AsyncEngine.start(_tiny(tiny_llama_dir))
    try:
        assert engine.tokenizer_info.named_tokens["bos_token"] == "<s>"
        assert "add_generation_prompt" in (engine.tokenizer_info.chat_template or "")
    finally:
        await engine.shutdown()


def _tiny(folder: Path) -> Any:
    from termgen.config import EngineConfig

    return EngineConfig(model=str(folder), device="cpu", max_model_len=256, kv_cache_gib=0.01)


async def test_health_is_the_engines(tiny_llama_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "ANSWER_SECONDS", 0.05)
    async with serving_tiny(tiny_llama_dir) as (client, engine):
        assert (await client.get("/health")).json() == {"status": "ok"}
        free = threading.Event()
        core = engine.parts.core
        held = core.call(lambda: free.wait(20))  # idle, and it does not answer the probe
        try:
            for _ in range(3):  # a slow step looks the same: no alarm yet
                assert (await client.get("/health")).status_code == 200
            assert len(core._inbox) <= 1, "one question is open, however often it is asked"
            monkeypatch.setattr(engine_module, "STALL_SECONDS", 0.0)
            stuck = await client.get("/health")
            assert stuck.status_code == 503
            assert stuck.json()["status"] == "engine_dead"
            assert "stands still" in stuck.json()["reason"]
        finally:
            free.set()
        await asyncio.wrap_future(held)
        assert (await client.get("/health")).status_code == 200
        await engine.shutdown()
        dead = await client.get("/health")
        assert dead.status_code == 503 and "shut down" in dead.json()["reason"]


async def test_cancel_by_the_answers_id_and_by_the_request_id() -> None:
    engine = FakeEngine(script=Script(hold_after=3))
    async with socket_client(engine) as client:
        async with client.stream("POST", "/v1/chat/completions", json=chat_body(stream=True)) as r:
            lines = r.aiter_lines()
            first = await anext(lines)
            answer_id = read_events(first + "\n\ndata: [DONE]\n\n")[0]["id"]
            cancelled = await client.post(f"/v1/requests/{answer_id}/cancel")
            assert cancelled.status_code == 200
            assert cancelled.json()["status"] == "cancelled"
            rest = [line async for line in lines if line]
        assert '"code":"aborted"' in rest[-2] and rest[-1] == "data: [DONE]"

        name = {"x-request-id": "mine-1"}
        waiting = asyncio.create_task(
            client.post("/v1/chat/completions", json=chat_body(), headers=name)
        )
        await eventually(lambda: len(engine.live) == 1)
        assert (await client.post("/v1/requests/mine-1/cancel")).status_code == 200
        answer = await waiting
        assert answer.status_code == 500 and answer.json()["error"]["code"] == "aborted"
        assert answer.headers["x-should-retry"] == "false"
        assert len(engine.aborted) == 2 and not engine.live
        gone = await client.post("/v1/requests/mine-1/cancel")
        assert gone.status_code == 404 and gone.json()["error"]["code"] == "not_found"


async def test_only_a_whole_name_cancels() -> None:
    """A common prefix of several ids is no id."""
    engine = FakeEngine(script=Script(hold_after=1))
    async with app_client(engine) as client:

        async def cancel(name: str) -> int:
            return (await client.post(f"/v1/requests/{name}/cancel")).status_code

        for path, body in (
            ("/v1/chat/completions", chat_body()),
            ("/v1/completions", {"prompt": "x"}),
            ("/v1/completions", {"prompt": ["x", "y"], "n": 2}),
            ("/v1/messages", chat_body(max_tokens=9)),
            ("/v1/responses", {"input": "x"}),
        ):
            num_jobs = 2 if isinstance(body.get("prompt"), list) else 1
            waiting = asyncio.create_task(client.post(path, json=body))
            await eventually(lambda n=num_jobs: len(engine.live) == n)  # type: ignore[misc]
            job_id = engine.live[-1]
            answer_id = job_id.removesuffix("-1") if num_jobs > 1 else job_id
            begin = answer_id.partition("-")[0].partition("_")[0]
            for name in (begin, f"{begin}-", answer_id[:-1], f"{answer_id}-", f"{answer_id}-9"):
                assert await cancel(name) == 404, name
            assert len(engine.live) == num_jobs and not waiting.done()
            assert await cancel(answer_id) == 200, path
            assert (await waiting).json()["error"], path
            assert not engine.live
        waiting = asyncio.create_task(client.post("/v1/completions", json={"prompt": ["x", "y"]}))
        await eventually(lambda: len(engine.live) == 2)
        assert await cancel(engine.live[1]) == 200, "one of its prompts"
        assert (await waiting).status_code == 500 and not engine.live


async def test_nobody_cancels_for_others() -> None:
    engine = FakeEngine(script=Script(hold_after=1))
    async with serving(engine, api_key=("a", "b"), admin_key=("admin",)) as server:
        async with httpx.AsyncClient(base_url=server.url) as client:

            async def cancel(headers: dict[str, str]) -> int:
                return (await client.post("/v1/requests/r/cancel", headers=headers)).status_code

            key = {"authorization": "Bearer a"}
            body = chat_body()
            waiting = asyncio.create_task(
                client.post("/v1/chat/completions", json=body, headers={**key, "x-request-id": "r"})
            )
            await eventually(lambda: len(engine.live) == 1)
            assert await cancel({}) == 401
            assert await cancel({"authorization": "Bearer b"}) == 404
            assert len(engine.live) == 1
            assert await cancel({"x-api-key": "a"}) == 200
            assert (await waiting).status_code == 500

            other = {"authorization": "Bearer b", "x-request-id": "r"}
            waiting = asyncio.create_task(
                client.post("/v1/chat/completions", json=body, headers=other)
            )
            await eventually(lambda: len(engine.live) == 1)
            assert (await client.post("/pause", headers=other)).status_code == 403
            assert await cancel({"authorization": "Bearer admin"}) == 200, "an admin may"
            assert (await waiting).status_code == 500


async def test_pause_reset_and_sleep_of_a_real_engine(tiny_llama_dir: Path) -> None:
    async with serving_tiny(tiny_llama_dir) as (client, engine):

        async def count() -> Any:
            answer = await client.post("/v1/completions", json=COUNTING)
            assert answer.status_code == 200, answer.text
            return answer.json()["choices"][0]["text"]

        undisturbed = await count()
        assert await settles(client, "/pause?mode=keep") == {"status": "paused", "mode": "keep"}
        ready = await client.get("/ready")
        assert ready.status_code == 503 and ready.json()["status"] == "paused"
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/is_paused")).json() == {"is_paused": True}
        waiting = asyncio.create_task(count())
        await eventually(lambda: engine.parts.core.scheduler.has_requests)
        assert await settles(client, "/reset_prefix_cache?force=true") == {"reset": True}
        await settles(client, "/resume")
        assert await waiting == undisturbed

        for level in (1, 2):
            reading = asyncio.create_task(count())
            await eventually(lambda: engine.parts.core.scheduler.num_running > 0)
            await settles(client, f"/sleep?level={level}&mode=keep")
            assert not reading.done()
            asleep = (await client.get("/is_sleeping")).json()
            assert asleep == {"is_sleeping": True, "level": level}
            refused = await client.post("/v1/completions", json=COUNTING)
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "asleep" and refused.headers["retry-after"]
            ready = await client.get("/ready")
            assert (ready.status_code, ready.json()) == (503, {"status": "asleep"})
            assert (await client.get("/health")).status_code == 200
            for path in ("/sleep", "/pause", "/resume"):
                twice = await client.post(path)
                assert twice.status_code == 409 and twice.json()["error"]["code"] == "asleep"
            await settles(client, "/wake_up")
            assert await reading == undisturbed, level
            assert await count() == undisturbed
        assert (await client.get("/ready")).status_code == 200
        assert await settles(client, "/wake_up") == {"status": "awake"}


async def test_wrong_options_change_nothing() -> None:
    engine = FakeEngine()
    async with socket_client(engine) as client:
        for path, param in (
            ("/pause?mode=hard", "mode"),
            ("/sleep?level=3", "level"),
            ("/sleep?level=1&mode=x", "mode"),
            ("/reset_prefix_cache?force=yes", "force"),
            ("/pause?mood=wait", "mood"),
            ("/resume?mode=wait", "mode"),
            ("/wake_up?tags=weights", "tags"),  # vLLM's option, which wakes a part of the engine
        ):
            answer = await client.post(path)
            assert answer.status_code == 400 and answer.json()["error"]["param"] == param
        assert (await client.get("/pause")).status_code == 405
    assert engine.controls == []
