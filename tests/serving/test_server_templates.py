"""Requests with a chat template: refused unless trusted, and harmless then."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_engine import FakeEngine, make_model_info
from server_harness import MESSAGES, app_client, chat_body, serving

from termgen.client import ChatPrompt
from termgen.config import EngineConfig
from termgen.engine.loop.engine import AsyncEngine
from termgen.vocabulary.tool_format import ToolFormat

SOURCE = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
LOOPS = "{% for a in range(99999) %}" * 3 + "{% endfor %}" * 3
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": chat_body(),
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 4},
    "/v1/messages/count_tokens": {"messages": MESSAGES},
    "/v1/responses": {"input": "hi"},
    "/tokenize": {"messages": MESSAGES},
}


@pytest.mark.parametrize("path", BODIES)
async def test_every_endpoint_of_chats_takes_one_where_it_is_trusted(path: str) -> None:
    engine = FakeEngine()
    body = {**BODIES[path], "chat_template": SOURCE}
    async with app_client(engine) as client:
        answer = await client.post(path, json=body)
        assert answer.status_code == 400 and "--trust-request-chat-template" in answer.text
        assert (await client.post(path, json={**body, "chat_template": None})).status_code == 200
    engine.calls.clear()
    async with app_client(engine, trust_request_chat_template=True) as client:
        answer = await client.post(path, json=body)
        assert answer.status_code == 200 and "x-termgen-ignored" not in answer.headers
        wrong = await client.post(path, json={**body, "chat_template": 5})
        assert wrong.status_code == 400 and "chat_template must be a string" in wrong.text
    for call in engine.calls:
        assert isinstance(call.prompt, ChatPrompt) and call.prompt.chat_template == SOURCE


@pytest.mark.parametrize("is_trusted", [False, True])
async def test_the_description_has_it_where_it_is_taken(is_trusted: bool) -> None:
    async with app_client(FakeEngine(), trust_request_chat_template=is_trusted) as client:
        described = (await client.get("/openapi.json")).json()
    posted = described["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]
    fields = posted["application/json"]["schema"]["properties"]
    assert ("chat_template" in fields) == is_trusted


async def test_completions_take_none() -> None:
    async with app_client(FakeEngine(), trust_request_chat_template=True) as client:
        body = {"prompt": "x", "chat_template": SOURCE}
        error = (await client.post("/v1/completions", json=body)).json()["error"]
    assert (error["param"], error["code"]) == ("chat_template", "unsupported_parameter")


@pytest.mark.parametrize(("source", "is_variable"), [("{{ tools }}", True), (SOURCE, False)])
async def test_who_shows_tools_is_up_to_the_given_template(source: str, is_variable: bool) -> None:
    model = make_model_info(tool_format=ToolFormat(knows_tools=not is_variable))
    engine = FakeEngine(model=model)
    async with app_client(engine, trust_request_chat_template=True) as client:
        body = chat_body(tools=[TOOL], chat_template=source)
        assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
    prompt = engine.calls[0].prompt
    assert isinstance(prompt, ChatPrompt)
    assert ("tools" in prompt.template_kwargs) == is_variable
    assert (prompt.messages[0]["role"] == "system") != is_variable


async def test_a_template_is_rendered_and_a_hostile_one_holds_up_nobody(
    tiny_llama_dir: Path,
) -> None:
    engine = await AsyncEngine.start(EngineConfig(model=str(tiny_llama_dir), device="cpu"))
    try:
        async with serving(engine, trust_request_chat_template=True) as server:
            async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
                ask = {"messages": MESSAGES, "return_token_strs": True, "chat_template": SOURCE}
                told = (await client.post("/tokenize", json=ask)).json()
                assert "".join(told["token_strs"]) == "[hi]"
                path = "/v1/chat/completions"
                body = chat_body(max_tokens=2, chat_template=SOURCE)
                answer = (await client.post(path, json=body)).json()
                assert answer["usage"]["prompt_tokens"] == told["count"]
                hostile = [
                    asyncio.create_task(
                        client.post(path, json=chat_body(chat_template=LOOPS + str(i)))
                    )
                    for i in range(2)
                ]
                while not any(task.done() for task in hostile):
                    good = await client.post(path, json=chat_body(max_tokens=1))
                    assert good.status_code == 200
                for task in hostile:
                    error = (await task).json()["error"]
                    assert error["param"] == "chat_template" and "too long" in error["message"]
                assert (await engine.snapshot()).num_used_blocks == 0
    finally:
        await engine.shutdown()
