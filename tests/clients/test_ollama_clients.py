"""The ollama packages of Python and JavaScript, LangChain's, and Open WebUI's requests."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_engine import FakeEngine, GenerateCall, Script, make_model_info
from server_harness import ANSWER, MESSAGES, serving

from termgen.client import ChatPrompt
from termgen.errors import EngineError
from termgen.vocabulary.tool_format import ToolFormat

ollama = pytest.importorskip("ollama")

NODE = Path(__file__).parents[1] / "node"
MODEL = "fake/model-1"
QUESTION = "Name the capital of France."
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}},
    "required": ["city"],
    "additionalProperties": False,
}


def get_weather(city: str) -> str:
    """The weather in a city.

    Args:
        city: its name
    """
    return f"rain in {city}"


def calls_or_answers(call: GenerateCall) -> Script:
    """A call where tools are shown, unless a result is there already."""
    assert isinstance(call.prompt, ChatPrompt)
    has_result = call.prompt.messages[-1]["role"] == "tool"
    if call.prompt.template_kwargs.get("tools") and not has_result:
        return Script(pieces=[CALL[i : i + 4] for i in range(0, len(CALL), 4)])
    return Script()


def calling_engine() -> FakeEngine:
    tool_format = ToolFormat(knows_tools=True, template_variables=("enable_thinking",))
    return FakeEngine(script=calls_or_answers, model=make_model_info(tool_format=tool_format))


@asynccontextmanager
async def ollama_client(
    engine: FakeEngine, *, key: str | None = None, **config: Any
) -> AsyncGenerator[Any, None]:
    headers = None if key is None else {"authorization": f"Bearer {key}"}
    async with serving(engine, **config) as server:
        async with ollama.AsyncClient(server.url, headers=headers, timeout=20) as client:
            yield client


# -- the Python package --------------------------------------------------------------------


async def test_models() -> None:
    names = ("small", "org/x:q4")
    async with ollama_client(FakeEngine(), served_model_name=names) as client:
        listed = (await client.list()).models
        assert [model.model for model in listed] == ["small:latest", "org/x:q4"]
        assert listed[0].modified_at.year == 2023 and listed[0].details.family == "llama"
        card = await client.show("small")
        assert card.modelinfo["llama.context_length"] == 4096
        assert "completion" in card.capabilities and card.modified_at is not None
        (loaded, _) = (await client.ps()).models
        assert loaded.expires_at.year == 2300 and loaded.context_length == 4096
        with pytest.raises(ollama.ResponseError, match="model 'large' not found") as caught:
            await client.show("large")
    assert caught.value.status_code == 404


async def test_chat() -> None:
    engine = FakeEngine()
    async with ollama_client(engine, api_key=("k",), key="k") as client:
        options = ollama.Options(
            temperature=0.5, top_k=4, seed=3, num_predict=50, num_ctx=2048, stop=["never"]
        )
        ask = {"model": MODEL, "messages": MESSAGES, "options": options, "keep_alive": "10m"}
        answer = await client.chat(**ask)
        parts = [part async for part in await client.chat(**ask, stream=True)]
        made = await client.generate(MODEL, "hi", system="s", options=options)
        loaded = await client.generate(MODEL)
    assert answer.message.content == ANSWER == "".join(p.message.content for p in parts)
    assert (answer.done, answer.done_reason) == (True, "stop")
    assert parts[-1].done and parts[-1].eval_count == answer.eval_count == 11
    assert answer.total_duration >= answer.eval_duration > 0
    assert made.response == ANSWER and loaded.done_reason == "load"
    params = engine.calls[0].params
    assert (params.temperature, params.top_k, params.seed, params.max_tokens) == (0.5, 4, 3, 50)
    assert params.stop == ("never",)


async def test_a_tool_is_called_and_its_result_goes_back() -> None:
    engine = calling_engine()
    async with ollama_client(engine) as client:
        messages: list[Any] = [*MESSAGES]
        answer = await client.chat(MODEL, messages, tools=[get_weather])
        streamed = [
            call
            async for part in await client.chat(MODEL, messages, tools=[get_weather], stream=True)
            for call in part.message.tool_calls or ()
        ]
        (call,) = answer.message.tool_calls
        assert (call.function.name, call.function.arguments) == ("get_weather", {"city": "Paris"})
        assert [c.function.arguments for c in streamed] == [{"city": "Paris"}]
        result = get_weather(**call.function.arguments)
        messages += [
            answer.message,
            {"role": "tool", "tool_name": "get_weather", "content": result},
        ]
        final = await client.chat(MODEL, messages, tools=[get_weather])
    assert final.message.content == ANSWER and not final.message.tool_calls
    prompt = engine.calls[-1].prompt
    assert isinstance(prompt, ChatPrompt)
    shown = prompt.template_kwargs["tools"][0]["function"]
    assert shown["parameters"]["properties"]["city"]["description"] == "its name"
    called, answered = prompt.messages[-2:]
    assert called["tool_calls"][0]["id"] == answered["tool_call_id"]
    assert (answered["name"], answered["content"]) == ("get_weather", "rain in Paris")


async def test_log_probabilities_and_thinking() -> None:
    engine = calling_engine()
    async with ollama_client(engine) as client:
        answer = await client.chat(MODEL, MESSAGES, think=False, logprobs=True, top_logprobs=2)
    assert "".join(entry.token for entry in answer.logprobs) == ANSWER
    assert len(answer.logprobs[0].top_logprobs) == 2
    prompt = engine.calls[0].prompt
    assert isinstance(prompt, ChatPrompt) and prompt.template_kwargs["enable_thinking"] is False


async def test_errors() -> None:
    script = Script(fail_after=2, error=EngineError("the step failed"))
    async with ollama_client(FakeEngine(script=script), api_key=("k",)) as client:
        with pytest.raises(ollama.ResponseError, match="API key") as denied:
            await client.list()
    assert denied.value.status_code == 401
    async with ollama_client(FakeEngine(script=script)) as client:
        for what, status, words in (
            (client.chat("large", MESSAGES), 404, "model 'large' not found"),
            (client.chat(MODEL, MESSAGES), 500, "the step failed"),
            (client.embed(MODEL, "a"), 501, "does not support embeddings"),
            (client.create("mine", from_=MODEL), 501, "store of models"),
            (client.generate(MODEL, keep_alive=0), 400, "keeps its model loaded"),
            (client.chat(MODEL, MESSAGES, options={"mirostat": 1}), 400, "options.mirostat"),
        ):
            with pytest.raises(ollama.ResponseError, match=words) as caught:
                await what
            assert caught.value.status_code == status
        got = []
        with pytest.raises(ollama.ResponseError, match="the step failed"):
            async for part in await client.chat(MODEL, MESSAGES, stream=True):
                got.append(part.message.content)
    assert got == ["Hello", ","]


async def test_pull() -> None:
    async with ollama_client(FakeEngine(), served_model_name=("small",)) as client:
        parts = [part async for part in await client.pull("small", stream=True)]
        assert [part.status for part in parts] == ["success"]
        with pytest.raises(ollama.ResponseError, match="fetches no models"):
            await client.pull("other")


# -- LangChain -----------------------------------------------------------------------------


async def test_langchain() -> None:
    chat_models = pytest.importorskip("langchain_ollama")
    engine = calling_engine()
    async with serving(engine, served_model_name=("small",)) as server:
        made = await asyncio.to_thread(
            chat_models.ChatOllama,
            **{"model": "small", "base_url": server.url, "validate_model_on_init": True},
            **{"temperature": 0.5, "num_predict": 50, "num_ctx": 2048, "num_gpu": 1},
            **{"repeat_penalty": 1.1, "keep_alive": 60, "reasoning": False},
        )
        answer = await made.ainvoke("hi")
        assert answer.content == ANSWER and answer.usage_metadata["output_tokens"] == 11
        assert answer.response_metadata["done_reason"] == "stop"
        parts = [part.content async for part in made.astream("hi")]
        assert "".join(parts) == ANSWER
        called = await made.bind_tools([get_weather]).ainvoke("weather?")
        (call,) = called.tool_calls
        assert (call["name"], call["args"]) == ("get_weather", {"city": "Paris"})
        structured = made.with_structured_output(SCHEMA, method="json_schema")
        with pytest.raises(Exception, match="(?i)json|pars"):  # the scripted answer has no form
            await structured.ainvoke("city?")
        wanted = engine.calls[-1].params.structured_outputs
        assert wanted is not None and json.loads(str(wanted.json)) == SCHEMA
        texts = chat_models.OllamaLLM(model="small", base_url=server.url)
        assert await texts.ainvoke("hi") == ANSWER
        embeds = chat_models.OllamaEmbeddings(model="small", base_url=server.url)
        with pytest.raises(ollama.ResponseError, match="does not support embeddings"):
            await embeds.aembed_query("hi")
        missing = chat_models.ChatOllama(model="large", base_url=server.url)
        with pytest.raises(ollama.ResponseError, match="not found"):
            await missing.ainvoke("hi")
    assert engine.calls[0].params.repetition_penalty == 1.1


# -- Open WebUI ----------------------------------------------------------------------------

WEBUI_HEADERS = {
    "content-type": "application/json",
    "authorization": "Bearer k",
    "x-openwebui-user-name": "A%20User",
    "x-openwebui-user-id": "1",
}


async def test_open_webui() -> None:
    """Its requests in the order of a session: the connection is checked, models are listed and
    shown, a chat has a title made for it."""
    engine = calling_engine()
    async with serving(engine, api_key=("k",), served_model_name=("small",)) as server:
        async with httpx.AsyncClient(base_url=server.url, headers=WEBUI_HEADERS) as client:
            version = (await client.get("/api/version")).json()["version"]
            assert all(part.isdigit() for part in version.split("."))
            listed = (await client.get("/api/tags")).json()["models"]
            loaded = {
                m["name"]: m["expires_at"] for m in (await client.get("/api/ps")).json()["models"]
            }
            (name,) = [model["model"] for model in listed]
            assert name == "small:latest" and name in loaded  # it adds the tag where there is none
            shown = await client.post("/api/show", json={"name": name, "model": name})
            assert shown.status_code == 200 and "completion" in shown.json()["capabilities"]
            chat = {
                "model": name,
                "messages": [
                    {"role": "system", "content": "Be kind."},
                    {"role": "user", "content": "hi", "images": ["aGk="]},
                ],
                "options": {
                    **{"temperature": 0.8, "top_p": 0.9, "num_ctx": 2048, "num_batch": 512},
                    **{"num_keep": 24, "use_mmap": True, "num_thread": 2, "num_gpu": 1},
                    **{"mirostat": 0, "mirostat_eta": 0.1, "tfs_z": 1, "num_predict": 128},
                },
                "stream": True,
                "keep_alive": "5m",
                "think": False,
                "tools": [],
            }
            lines = await _lines(client, chat)
            assert "".join(line["message"]["content"] for line in lines) == ANSWER
            last = lines[-1]
            rate = last["eval_count"] / (last["eval_duration"] / 1e9)
            assert last["done"] and rate > 0 and last["prompt_eval_count"] > 0
            title = await client.post("/api/chat", json={**chat, "stream": False, "format": "json"})
            assert title.json()["message"]["content"] == ANSWER
            done = await client.post("/api/generate", json={"model": name, "prompt": "hi"})
            assert json.loads(done.text.splitlines()[-1])["done"] is True
            wrong = await client.post("/api/chat", json={**chat, "model": "large:latest"})
            assert (wrong.status_code, wrong.json()) == (
                404,
                {"error": "model 'large:latest' not found"},
            )
            unload = await client.post("/api/generate", json={"model": name, "keep_alive": 0})
            assert unload.status_code == 400 and "error" in unload.json()
            pulled = await client.post("/api/pull", json={"model": "other"})
            assert pulled.status_code == 403 and "administrators" in pulled.json()["error"]
            gone = await client.request("DELETE", "/api/delete", json={"model": name})
            assert gone.status_code == 501 and "error" in gone.json()


async def _lines(client: httpx.AsyncClient, body: dict[str, Any]) -> list[Any]:
    """The lines of a stream, read as Open WebUI does."""
    async with client.stream("POST", "/api/chat", json=body) as reply:
        assert reply.status_code == 200
        return [json.loads(line) async for line in reply.aiter_lines() if line]


# -- the command ollama --------------------------------------------------------------------


async def test_the_command() -> None:
    """Its requests for `run`, `show`, `list` and `stop`: Go writes empty fields, too."""
    asked = {"prompt": "", "suffix": "", "system": "", "template": "", "options": None}
    facts = {"system": "", "template": "", "verbose": False, "options": None}
    async with serving(calling_engine(), served_model_name=("small",)) as server:
        async with httpx.AsyncClient(base_url=server.url) as client:
            assert (await client.head("/")).status_code == 200
            for named in ({"model": "small", "name": ""}, {"model": "", "name": "small"}):
                shown = await client.post("/api/show", json={**facts, **named})
                assert shown.json()["details"]["family"] == "llama"
            load = {"model": "small", **asked, "keep_alive": "5m0s"}
            loaded = await client.post("/api/generate", json=load)
            assert loaded.json()["done_reason"] == "load"
            chat = {"model": "small", "messages": MESSAGES, "options": {}}
            lines = await _lines(client, {**chat, "keep_alive": "5m0s"})
            assert "".join(line["message"]["content"] for line in lines) == ANSWER
            once = await client.post("/api/generate", json={**load, "prompt": "hi"})
            assert json.loads(once.text.splitlines()[-1])["eval_count"] == 11
            listed = (await client.get("/api/tags")).json()["models"]
            assert listed[0]["digest"][:12].isalnum()
            stop = await client.post("/api/generate", json={**load, "keep_alive": "0s"})
            assert stop.status_code == 400 and "keeps its model loaded" in stop.json()["error"]
            pull = {"model": "", "name": "small", "username": "", "password": ""}
            assert (await client.post("/api/pull", json=pull)).json() == {"status": "success"}


# -- a real model --------------------------------------------------------------------------


def test_a_real_model(smollm2_url: str) -> None:
    with ollama.Client(smollm2_url, timeout=60) as client:
        messages = [{"role": "user", "content": QUESTION}]
        greedy = {"temperature": 0, "num_predict": 5}
        assert [model.model for model in client.list().models] == ["smollm2:latest"]
        assert client.show("smollm2").details.quantization_level
        assert client.ps().models[0].context_length == 1024
        whole = client.chat("smollm2", messages, options=greedy)
        parts = list(client.chat("smollm2", messages, options=greedy, stream=True))
        assert "".join(p.message.content for p in parts) == whole.message.content
        assert (parts[-1].done_reason, parts[-1].eval_count) == ("length", 5)
        formed = client.chat("smollm2", messages, format=SCHEMA, options={"temperature": 0})
        assert json.loads(formed.message.content).keys() == {"city"}
        with pytest.raises(ollama.ResponseError, match="^format") as caught:
            client.chat("smollm2", messages, format={"type": "nothing"})
        assert caught.value.status_code == 400
        with pytest.raises(ollama.ResponseError, match="maximum context length"):
            client.chat("smollm2", [{"role": "user", "content": "word " * 5000}])


SAMPLED = {"temperature": 0.9, "top_p": 0.9, "top_k": 30, "seed": 11}
PENALTIES = {"presence_penalty": 0.3, "frequency_penalty": 0.2}


def test_the_same_request_gets_the_same_tokens(smollm2_url: str) -> None:
    """Tokens, their log-probabilities and counts are those of OpenAI's endpoints."""
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": QUESTION}]
    with httpx.Client(base_url=smollm2_url, timeout=60) as client:

        def openai(path: str, **body: Any) -> Any:
            given = {"max_tokens": 10, "repetition_penalty": 1.2, **SAMPLED, **PENALTIES, **body}
            return _answer(client.post(path, json=given))

        def ours(path: str, **body: Any) -> Any:
            options = {"num_predict": 10, "repeat_penalty": 1.2, **SAMPLED, **PENALTIES}
            given = {"model": "smollm2", "options": options, "logprobs": True, **body}
            whole = _answer(client.post(path, json={**given, "stream": False}))
            lines = client.post(path, json=given).text.splitlines()
            streamed = [e for one in map(json.loads, lines) for e in one.get("logprobs", ())]
            assert [e["token"] for e in streamed] == [e["token"] for e in whole["logprobs"]]
            return whole

        asked = openai("/v1/chat/completions", messages=messages, logprobs=True)
        answer = ours("/api/chat", messages=messages)
        content = asked["choices"][0]["logprobs"]["content"]
        assert len(content) >= 5
        assert [(e["token"], e["bytes"]) for e in content] == [
            (e["token"], e["bytes"]) for e in answer["logprobs"]
        ]
        assert [e["logprob"] for e in answer["logprobs"]] == pytest.approx(
            [e["logprob"] for e in content], abs=1e-3
        )
        assert answer["message"]["content"] == asked["choices"][0]["message"]["content"]
        assert answer["prompt_eval_count"] == asked["usage"]["prompt_tokens"]
        assert answer["eval_count"] == asked["usage"]["completion_tokens"]
        made = ours("/api/generate", prompt=QUESTION, system="Be brief.")
        assert made["response"] == answer["message"]["content"]
        text = openai("/v1/completions", prompt="Once upon a time", logprobs=0)
        raw = ours("/api/generate", prompt="Once upon a time", raw=True)
        assert raw["response"] == text["choices"][0]["text"]
        assert raw["prompt_eval_count"] == text["usage"]["prompt_tokens"]


def _answer(reply: httpx.Response) -> Any:
    assert reply.status_code == 200, reply.text
    return reply.json()


async def test_node(smollm2_url: str) -> None:
    node = shutil.which("node")
    if node is None or not (NODE / "node_modules" / "ollama").is_dir():
        pytest.skip("needs Node, and `npm install --prefix tests/node`")
    async with serving(calling_engine(), served_model_name=("m",)) as server:
        asked = await asyncio.create_subprocess_exec(
            *(node, str(NODE / "ollama.mjs"), smollm2_url, server.url, QUESTION),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, err = await asyncio.wait_for(asked.communicate(), 60)
    assert asked.returncode == 0, err.decode()
    answered = json.loads(out)
    assert answered["models"] == ["smollm2:latest"]
    assert (
        answered["chat"] == answered["stream"] == answered["generate"]
        and len(answered["chat"]) > 10
    )
    assert (answered["done"], answered["count"]) == ("length", 5)
    assert answered["format"].keys() == {"city"}
    assert (answered["show"], answered["ps"], answered["version"]) == ("llama", [1024], "0.13.0")
    assert answered["error"] == ["ResponseError", 404, "model 'missing' not found"]
    functions = [call["function"] for call in answered["calls"]]
    assert functions == [{"index": 0, "name": "get_weather", "arguments": {"city": "Paris"}}]
