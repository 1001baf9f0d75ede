"""/v1/embeddings over a scripted engine: bodies, answers, errors, and who may leave."""

from __future__ import annotations

import asyncio
import base64
import logging
from typing import Any

import numpy as np
import pytest
from fake_engine import FakeEngine, GenerateCall, Script, make_model_info
from server_harness import app_client, error_of, eventually, socket_client

from termgen.errors import ContextLengthError
from termgen.vocabulary.device.pooling import PoolingInfo, PoolingKind, PoolingParams

PATH = "/v1/embeddings"


@pytest.mark.parametrize(
    ("given", "prompts"),
    [
        ("one", ["one"]),
        (["one", "two"], ["one", "two"]),
        ([1, 2, 3], [(1, 2, 3)]),
        ([[1, 2], [3]], [(1, 2), (3,)]),
    ],
)
async def test_every_form_of_input(given: Any, prompts: list[Any]) -> None:
    engine = FakeEngine(script=Script(num_cached_tokens=1))
    async with app_client(engine) as client:
        answer = (await client.post(PATH, json={"input": given})).json()
    assert sorted(call.prompt for call in engine.calls) == sorted(prompts)
    assert {call.pooling for call in engine.calls} == {PoolingParams(PoolingKind.LAST)}
    assert (answer["object"], answer["model"]) == ("list", "fake/model-1")
    assert [one["index"] for one in answer["data"]] == list(range(len(prompts)))
    for one in answer["data"]:
        assert one["object"] == "embedding" and np.linalg.norm(one["embedding"]) == pytest.approx(1)
    num = sum(len(p) for p in prompts)
    cached = {"cached_tokens": len(prompts)}
    expected = {"prompt_tokens": num, "total_tokens": num, "prompt_tokens_details": cached}
    assert answer["usage"] == expected


async def test_answers_are_in_the_order_of_the_inputs() -> None:
    async with app_client(FakeEngine()) as client:
        texts = [f"text {i}" for i in range(20)]
        many = (await client.post(PATH, json={"input": texts})).json()["data"]
        for text, one in zip(texts, many, strict=True):
            alone = (await client.post(PATH, json={"input": text})).json()["data"][0]
            assert one["embedding"] == alone["embedding"]


async def test_base64_has_the_same_numbers() -> None:
    async with app_client(FakeEngine()) as client:
        body = {"input": "text"}
        plain = (await client.post(PATH, json=body)).json()["data"][0]["embedding"]
        coded = await client.post(PATH, json={**body, "encoding_format": "base64"})
    found = np.frombuffer(base64.b64decode(coded.json()["data"][0]["embedding"]), "<f4")
    assert found.tolist() == plain


async def test_what_is_asked_for_reaches_the_engine() -> None:
    info = PoolingInfo(PoolingKind.MEAN, True, 8, {"query": "Find: "})
    engine = FakeEngine(model=make_model_info(pooling=info))
    fields = {
        "input": ["a", "b"],
        "dimensions": 4,
        "prompt_name": "query",
        "truncate_prompt_tokens": 7,
        "priority": 3,
        "cache_salt": "s",
        "user": "u",
    }
    async with app_client(engine) as client:
        answer = await client.post(PATH, json=fields)
        assert "x-termgen-ignored" not in answer.headers
        assert [len(one["embedding"]) for one in answer.json()["data"]] == [4, 4]
        odd = await client.post(PATH, json={"input": "a", "colour": "red"})
        assert odd.headers["x-termgen-ignored"] == "colour"
    for call in engine.calls[:2]:
        assert call.prompt in ("Find: a", "Find: b")
        assert call.pooling == PoolingParams(PoolingKind.MEAN, True, 4)
        assert (call.params.truncate_prompt_tokens, call.priority) == (7, 3)
        assert call.cache_salt is not None and call.cache_salt.endswith("s")


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({}, "input", "input must be a string, a list of strings, token ids"),
        ({"input": []}, "input", "input must not be empty"),
        ({"input": ["a", 1]}, "input", "input must be a string, a list of strings, token ids"),
        ({"input": [[1], []]}, "input", "must not hold an empty list"),
        ({"input": ["a"] * 2049}, "input", "at most 2048 inputs"),
        ({"input": "a", "dimensions": 9}, "dimensions", "at most 8, the size of this model's"),
        ({"input": "a", "dimensions": 0}, "dimensions", "between 1 and"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format", '"float" or "base64"'),
        ({"input": "a", "prompt_name": "x"}, "prompt_name", "no prompt 'x'; they have: none"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "1 or more"),
        ({"input": "a", "input_type": "query"}, "input_type", "use prompt_name"),
        ({"input": "a", "normalize": False}, "normalize", "normalize"),
        ({"input": "a", "stream": True}, "stream", "stream"),
        ({"messages": [], "input": "a"}, "messages", "messages"),
        ({"input": "a", "model": "other"}, "model", "other"),
    ],
)
async def test_errors_name_the_field(fields: dict[str, Any], param: str, message: str) -> None:
    engine = FakeEngine()
    async with app_client(engine) as client:
        answer = await client.post(PATH, json=fields)
    assert answer.status_code in (400, 404)
    assert error_of(answer)["param"] == param and message in error_of(answer)["message"]
    assert engine.calls == []


async def test_a_model_whose_vectors_cannot_be_made_says_why() -> None:
    info = PoolingInfo(size=8, refusal="modules.json has a module 'Dense'")
    async with app_client(FakeEngine(model=make_model_info(pooling=info))) as client:
        answer = await client.post(PATH, json={"input": "a"})
        assert answer.status_code == 400 and "Dense" in error_of(answer)["message"]
        listed = (await client.get("/v1/models")).json()["data"][0]
        assert listed["capabilities"]["embeddings"] is False


async def test_too_long_an_input_is_named_by_its_field() -> None:
    error = ContextLengthError("at most 8 tokens", param="prompt")

    def script(call: GenerateCall) -> Script:
        return Script(raises=error if len(str(call.prompt)) > 8 else None)

    engine = FakeEngine(script=script)
    async with app_client(engine) as client:
        answer = await client.post(PATH, json={"input": ["ok", "much too long"]})
        assert answer.status_code == 400 and error_of(answer)["param"] == "input"
        assert engine.live == ()


async def test_an_engine_s_error_is_the_answer_to_all_inputs() -> None:
    def script(call: GenerateCall) -> Script:
        return Script(fail_after=0 if call.prompt == "bad" else None)

    engine = FakeEngine(script=script)
    async with app_client(engine) as client:
        answer = await client.post(PATH, json={"input": ["good", "bad", "good"]})
        assert answer.status_code == 500 and error_of(answer)["message"] == "the step failed"
        assert engine.live == ()


async def test_a_client_that_leaves_ends_all_its_requests() -> None:
    engine = FakeEngine(script=Script(waits_in_queue=True))
    async with socket_client(engine) as client:
        asking = asyncio.create_task(client.post(PATH, json={"input": ["a", "b", "c"]}))
        await eventually(lambda: len(engine.live) == 3)
        asking.cancel()
        await eventually(lambda: not engine.live)
    assert len(engine.aborted) == 3


async def test_metrics_and_description() -> None:
    async with app_client(FakeEngine()) as client:
        await client.post(PATH, json={"input": ["abc", "de"]})
        metrics = (await client.get("/metrics")).text
        described = (await client.get("/openapi.json")).json()["paths"][PATH]["post"]
    assert 'termgen_prompt_tokens_total{model="fake/model-1"} 5.0' in metrics
    assert 'finished_reason="stop"' in metrics
    assert 'termgen_generation_tokens_total{model="fake/model-1"} 0.0' in metrics
    schema = described["requestBody"]["content"]["application/json"]["schema"]
    assert schema["required"] == ["input"] and "dimensions" in schema["properties"]


async def test_a_line_of_the_log_per_request(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "termgen")
    async with app_client(FakeEngine(), log_requests=True) as client:
        await client.post(PATH, json={"input": ["abc", "de"]})
    (line,) = [r.getMessage() for r in caplog.records if r.name == "termgen.server.requests"]
    assert "/v1/embeddings: 5 prompt tokens (0 cached), 2 choices, 0 tokens, stop;" in line
    assert line.endswith("; ok") and "abc" not in line
