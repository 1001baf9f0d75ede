"""What Ollama's clients are shown of the models."""

from __future__ import annotations

import json
import socket
from typing import Any

import httpx
import pytest
from fake_engine import FakeEngine, make_memory_ledger, make_model_info
from server_harness import app_client, serving

from termgen import __version__
from termgen.config import ServerConfig
from termgen.errors import ConfigError
from termgen.server import Server
from termgen.vocabulary.tool_format import ToolFormat

DETAILS = {
    *("parent_model", "format", "family", "families", "parameter_size", "quantization_level"),
    "context_length",
}


def error(reply: httpx.Response) -> tuple[int, str]:
    assert reply.json().keys() == {"error"}
    return reply.status_code, reply.json()["error"]


async def test_models_are_listed_with_tags() -> None:
    info = make_model_info(memory=make_memory_ledger(), device="cuda:0", root="/x/model.GGUF")
    engine = FakeEngine(model=info)
    async with app_client(engine, served_model_name=("small", "org/x:q4")) as client:
        listed = (await client.get("/api/tags")).json()["models"]
        loaded = (await client.get("/api/ps")).json()["models"]
        engine.sleep_level = 1
        asleep = (await client.get("/api/ps")).json()
    assert [model["model"] for model in listed] == ["small:latest", "org/x:q4"]
    assert asleep == {"models": []}
    for model in (*listed, *loaded):
        assert model["name"] == model["model"] and len(model["digest"]) == 64
        assert model["size"] == 2 * 2**30 and model["details"].keys() == DETAILS
        assert model["details"]["family"] == "llama" and model["details"]["format"] == "gguf"
        assert model["details"]["quantization_level"] == "F32"
    assert listed[0]["capabilities"] == ["completion", "tools"]
    assert listed[0]["modified_at"] == "2023-11-14T22:13:20Z"
    assert loaded[0]["size_vram"] == loaded[0]["size"] and loaded[0]["context_length"] == 4096
    assert loaded[0]["expires_at"] > "2200"


async def test_a_digest_is_the_models() -> None:
    digests = []
    for info in (make_model_info(), make_model_info(created=5), make_model_info(root="/other")):
        async with app_client(FakeEngine(model=info)) as client:
            digests.append((await client.get("/api/tags")).json()["models"][0]["digest"])
    assert digests[0] == digests[1] != digests[2]


async def test_a_model_is_shown() -> None:
    info = make_model_info(
        default_params={"temperature": 0.2, "repetition_penalty": 1.1},
        tool_format=ToolFormat(template_variables=("enable_thinking",)),
    )
    async with app_client(FakeEngine(model=info), served_model_name=("small",)) as client:
        reply = await client.post("/api/show", json={"model": "small", "verbose": True, "x": 1})
        older = await client.post("/api/show", json={"name": "small:latest"})
    card = reply.json()
    assert card == older.json()
    assert reply.headers["x-termgen-not-used"] == "verbose"
    assert reply.headers["x-termgen-ignored"] == "x"
    assert card["capabilities"] == ["completion", "tools", "thinking"]
    assert card["model_info"]["llama.context_length"] == 4096
    assert card["parameters"].split() == ["temperature", "0.2", "repeat_penalty", "1.1"]
    assert "FROM /models/fake\n" in card["modelfile"] and card["template"] == ""


async def test_a_template_is_shown_where_the_server_shows_it() -> None:
    async with app_client(FakeEngine(), enable_tokenizer_info=True) as client:
        card = (await client.post("/api/show", json={"model": "fake/model-1"})).json()
    assert card["template"] == "{{ messages }}" and "thinking" not in card["capabilities"]


async def test_a_base_model_calls_no_tools() -> None:
    async with app_client(FakeEngine(model=make_model_info(has_chat_template=False))) as client:
        card = (await client.post("/api/show", json={"model": "fake/model-1"})).json()
    assert card["capabilities"] == ["completion"]


async def test_the_version_is_the_apis() -> None:
    async with app_client(FakeEngine()) as client:
        answered = (await client.get("/api/version")).json()
        assert (await client.head("/api/version")).status_code == 200
        assert (await client.head("/api/tags")).status_code == 200
        alive = await client.get("/")
        assert (await client.head("/")).status_code == 200
    assert [int(part) for part in answered["version"].split(".")] >= [0, 12, 11]
    assert answered["termgen"] == __version__
    assert alive.text == "Ollama is running"


@pytest.mark.parametrize("path", ["/api/embed", "/api/embeddings"])
async def test_there_are_no_embeddings(path: str) -> None:
    async with app_client(FakeEngine()) as client:
        body = {"model": "fake/model-1", "input": ["a"], "prompt": "a"}
        answered = error(await client.post(path, json=body))
        assert answered == (501, "this model does not support embeddings")
        answered = error(await client.post(path, json={**body, "model": "other"}))
        assert answered == (404, "model 'other' not found")
        status, message = error(await client.post(path, json={**body, "input": 5}))
        assert status == 400 and "input must be a string or a list of strings" in message


async def test_what_a_show_cannot_be() -> None:
    async with app_client(FakeEngine()) as client:
        for body, answered in (
            ({}, (400, "model is required")),
            ({"model": "other"}, (404, "model 'other' not found")),
            ({"model": 5}, (400, "model must be a string, not 5")),
            (
                {"model": "fake/model-1", "system": "s"},
                (400, "system is not supported by this server"),
            ),
        ):
            assert error(await client.post("/api/show", json=body)) == answered
        plain = await client.post("/api/show", content=json.dumps({"model": "x"}))
        assert error(plain)[0] == 400 and "content-type" in error(plain)[1]


async def test_the_store_of_models_cannot_be_changed() -> None:
    calls: list[tuple[str, str]] = [
        ("POST", p) for p in ("create", "copy", "push", "blobs/sha256:a")
    ]
    async with app_client(FakeEngine()) as client:
        for method, path in (*calls, ("DELETE", "delete")):
            status, message = error(await client.request(method, f"/api/{path}", json={}))
            assert status == 501 and "store of models" in message


@pytest.mark.parametrize("path", ["/api/tags", "/api/ps", "/api/version", "/api/show", "/"])
async def test_a_key_is_needed(path: str) -> None:
    async with app_client(FakeEngine(), api_key=("k",)) as client:
        method = "POST" if path == "/api/show" else "GET"
        assert (await client.request(method, path)).status_code == 401
        headers: dict[str, Any] = {"authorization": "Bearer k"}
        json_body = {"model": "fake/model-1"} if method == "POST" else None
        allowed = await client.request(method, path, headers=headers, json=json_body)
    assert allowed.status_code == 200


async def test_a_server_that_loads_says_so() -> None:
    async with app_client(None) as client:
        for path in ("/api/tags", "/api/ps"):
            assert error(await client.get(path))[0] == 503
        assert error(await client.post("/api/show", json={"model": "x"}))[0] == 503


# -- the second port -----------------------------------------------------------------------


async def test_a_second_port_has_the_same_server() -> None:
    async with serving(FakeEngine(), ollama_port=0) as server:
        assert server.ollama_url is not None and server.ollama_url != server.url
        async with httpx.AsyncClient() as client:
            for url in (server.url, server.ollama_url):
                assert (await client.get(url)).text == "Ollama is running"
                listed = (await client.get(f"{url}/api/tags")).json()["models"]
                assert [model["name"] for model in listed] == ["fake/model-1:latest"]
                body = {"model": "fake/model-1", "prompt": "a"}
                assert (await client.post(f"{url}/v1/completions", json=body)).status_code == 200


async def test_without_it_there_is_one_port() -> None:
    async with serving(FakeEngine()) as server:
        assert server.ollama_url is None


async def test_a_second_port_in_use_is_named_and_the_first_given_back() -> None:
    with socket.socket() as taken, socket.socket() as free:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        server = Server(None, ServerConfig(port=port, ollama_port=taken.getsockname()[1]))
        with pytest.raises(ConfigError, match="cannot listen on") as caught:
            server.bind()
    assert caught.value.param == "ollama_port"
    again = Server(None, ServerConfig(port=port))
    again.bind()
    await again.stop()
