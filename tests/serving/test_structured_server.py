"""Structured outputs over a socket from a random model: streams, n, stops, bad requests among good
ones.

More of the requests that are sent both ways:
    TERMGEN_BOTH_WAYS=200 pytest tests/serving/test_structured_server.py -k equal
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import string
import threading
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
from generated_schemas import generate
from server_harness import MESSAGES, chat_text, read_events, serving

from termgen.config import EngineConfig
from termgen.engine.grammar import grammar, grammar_source
from termgen.engine.loop.engine import AsyncEngine
from termgen.engine.text import input_processor
from termgen.vocabulary import structured_outputs
from termgen.vocabulary.events import RequestEventKind
from termgen.vocabulary.structured_outputs import StructuredOutputsParams

FINISHED = RequestEventKind.FINISHED
NUM_BOTH_WAYS = int(os.environ.get("TERMGEN_BOTH_WAYS", "15"))

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "word": {"type": "string", "maxLength": 6},
        "list": {"type": "array", "items": {"enum": ["é", "😀", 1]}, "maxItems": 3},
    },
    "required": ["word", "list"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": SCHEMA, "strict": True}}
    for name in ("write", "read.all")
]


@pytest.fixture(scope="session")
def long_llama_dir(tiny_model_dir: Callable[..., Path]) -> Path:
    """A model whose tokenizer knows few words, so tools take many tokens."""
    return tiny_model_dir("llama", max_position_embeddings=1536)


@asynccontextmanager
async def tiny_server(
    folder: Path, **server_config: Any
) -> AsyncGenerator[tuple[httpx.AsyncClient, AsyncEngine], None]:
    config = EngineConfig(
        model=str(folder),
        device="cpu",
        max_model_len=1536,
        max_num_seqs=8,
        num_gpu_blocks_override=800,
        async_scheduling=True,
    )
    engine = await AsyncEngine.start(config)
    try:
        async with serving(engine, **server_config) as server:
            async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
                yield client, engine
        async with asyncio.timeout(20):
            while (snapshot := await engine.snapshot()).num_running or snapshot.num_waiting:
                await asyncio.sleep(0.01)
        assert snapshot.num_used_blocks == 0 and engine.is_healthy
    finally:
        await engine.shutdown()


async def post(client: httpx.AsyncClient, **fields: Any) -> httpx.Response:
    return await client.post("/v1/chat/completions", json={"messages": MESSAGES, **fields})


def calls_in(events: list[Any], index: int) -> list[list[str]]:
    """Name and arguments of each call of a choice, as a client assembles them."""
    calls: list[list[str]] = []
    for choice in (c for event in events for c in event["choices"] if c["index"] == index):
        for call in choice["delta"].get("tool_calls", ()):
            if call["index"] == len(calls):
                calls.append([call["function"]["name"], ""])
            else:
                calls[call["index"]][1] += call["function"]["arguments"]
    return calls


async def ask_both_ways(client: httpx.AsyncClient, body: dict[str, Any]) -> None:
    whole = await post(client, **body)
    assert whole.status_code == 200, whole.text
    events = read_events((await post(client, **body, stream=True)).content)
    for choice in whole.json()["choices"]:
        index, message = choice["index"], choice["message"]
        mine = [c for e in events for c in e["choices"] if c["index"] == index]
        content = "".join(c["delta"].get("content") or "" for c in mine)
        assert content == (message["content"] or ""), body
        calls = [c["function"] for c in message.get("tool_calls", ())]
        assert calls_in(events, index) == [[c["name"], c["arguments"]] for c in calls], body
        assert mine[-1]["finish_reason"] == choice["finish_reason"], body
        if body.get("tool_choice") == "required":
            is_cut = choice["finish_reason"] == "length"  # possibly before the name of a call
            assert is_cut or (calls and not content and choice["finish_reason"] == "tool_calls")
        for i, call in enumerate(calls):
            if i < len(calls) - 1 or choice["finish_reason"] == "tool_calls":
                jsonschema.validate(json.loads(call["arguments"]), SCHEMA)


async def test_streamed_calls_and_json_equal_whole_ones(long_llama_dir: Path) -> None:
    seed = random.randrange(10**6)
    print("seed", seed)
    rng = random.Random(seed)
    async with tiny_server(long_llama_dir) as (client, _):
        bodies: list[dict[str, Any]] = []
        for i in range(NUM_BOTH_WAYS):
            body: dict[str, Any] = {
                "seed": rng.randrange(10**6),
                "temperature": 1.5,
                "max_tokens": rng.choice([25, 120, 300]),
                "n": rng.choice([1, 2]),
            }
            if i % 3 != 1:
                body["stop"] = rng.sample(["é", "😀", '",', "th", "ü", "}}"], k=rng.randrange(3))
            if i % 3 < 2:
                body["tools"] = TOOLS
                body["tool_choice"] = "required" if i % 3 else "auto"
                body["parallel_tool_calls"] = i % 2 == 0
                if body["tool_choice"] == "required" and i % 2:
                    body["response_format"] = {"type": "json_object"}
            else:
                form = {"type": "json_schema", "json_schema": {"schema": generate(i)}}
                body["response_format"] = form
            bodies.append(body)
        await asyncio.gather(*(ask_both_ways(client, body) for body in bodies))


async def test_json_ends_at_stop_strings_and_limits_like_any_text(long_llama_dir: Path) -> None:
    async with tiny_server(long_llama_dir) as (client, _):
        form = {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}
        answer = (await post(client, **form, seed=1, max_tokens=200)).json()["choices"][0]
        jsonschema.validate(json.loads(answer["message"]["content"]), SCHEMA)
        assert answer["finish_reason"] == "stop"
        stopped = await post(client, **form, seed=1, stop=['"list'])
        choice = stopped.json()["choices"][0]
        text = answer["message"]["content"]
        assert choice["message"]["content"] == text[: text.index('"list')]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", '"list')
        cut = (await post(client, **form, seed=1, max_tokens=3)).json()["choices"][0]
        assert cut["finish_reason"] == "length" and text.startswith(cut["message"]["content"])
        long = (await post(client, **form, seed=1, min_tokens=150, ignore_eos=True)).json()
        assert long["choices"][0]["message"]["content"] == text, "nothing may follow"
        events = read_events((await post(client, **form, seed=1, stream=True)).content)
        assert chat_text(events) == text


async def test_calls_are_enforced_in_the_words_of_other_endpoints_too(long_llama_dir: Path) -> None:
    async with tiny_server(long_llama_dir) as (client, _):
        tool = {"name": "write", "input_schema": SCHEMA}
        body = {"max_tokens": 300, "messages": MESSAGES, "tools": [tool]}
        reply = await client.post("/v1/messages", json={**body, "tool_choice": {"type": "any"}})
        calls = [part for part in reply.json()["content"] if part["type"] == "tool_use"]
        assert calls[0]["name"] == "write"
        jsonschema.validate(calls[0]["input"], SCHEMA)
        given = {"type": "function", "name": "write", "parameters": SCHEMA}
        body = {
            "input": "hi",
            "max_output_tokens": 300,
            "tools": [given],
            "tool_choice": "required",
            "parallel_tool_calls": False,
        }
        reply = await client.post("/v1/responses", json=body)
        (item,) = reply.json()["output"]
        assert (item["type"], item["name"]) == ("function_call", "write")
        jsonschema.validate(json.loads(item["arguments"]), SCHEMA)


BAD: list[dict[str, Any]] = [
    {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}},
    {"response_format": {"type": "json_object", "schema": {"$ref": "#/definitions/none"}}},
    {"structured_outputs": {"regex": "(" * 2000}},
    {"structured_outputs": {"regex": "(a|b"}},
    {"structured_outputs": {"grammar": "start: " + "a " * 500}},
    {"structured_outputs": {"choice": [""]}},
    {"guided_json": {"properties": {str(i): {} for i in range(1001)}}},
    {"tools": [{"function": {"name": "f", "parameters": {"not": {}}}}], "tool_choice": "required"},
]


async def test_bad_grammars_among_good_requests_harm_nobody(long_llama_dir: Path) -> None:
    async with tiny_server(long_llama_dir) as (client, _):
        good = {"seed": 3, "max_tokens": 200, "ignore_eos": True, "temperature": 0}
        alone = (await post(client, **good)).json()["choices"][0]["message"]
        replies = await asyncio.gather(
            post(client, **good),
            *(post(client, **bad, stream=i % 2 == 0) for i, bad in enumerate(BAD * 3)),
            post(client, **good),
        )
        first, *bad_ones, last = replies
        assert (
            first.json()["choices"][0]["message"] == alone == last.json()["choices"][0]["message"]
        )
        for reply, bad in zip(bad_ones, BAD * 3, strict=True):
            assert reply.status_code == 400, (bad, reply.text)
            error = reply.json()["error"]
            assert error["type"] == "invalid_request_error"
            assert error["param"].startswith(next(iter(bad))), error
            assert len(error["message"]) < 500
        failures = "termgen_grammar_compile_failures_total{"
        assert failures in (await client.get("/metrics")).text, "their reasons are counted"


LEAST = -(2**63)
ENDLESS = {
    "type": "string",
    "allOf": [{"pattern": f"^x|{letter}$"} for letter in string.ascii_letters[:29]],
}
"""Expanded, the patterns have 2 ** 29 parts."""


def chain(length: int) -> str:
    rules = "\n".join(f"r{i}: r{i + 1}" for i in range(length))
    return f'start: r0\n{rules}\nr{length}: "x"'


def nested(depth: int, value: str) -> str:
    return "[" * depth + value + "]" * depth


HOSTILE = [
    *(
        f'{{"response_format": {{"type": "json_schema", "json_schema": {{"schema": {schema}}}}}}}'
        for number in (LEAST, LEAST + 1, LEAST + 2, 2**63, 2**64 + 1, -(10**30))
        for schema in (f'{{"const": {number}}}', f'{{"items": {{"enum": ["a", {number}]}}}}')
    ),
    *(
        f'{{"structured_outputs": {{"json": {{"{key}": {number}}}}}}}'
        for key in ("title", "const", "default", "minLength", "multipleOf")
        for number in ("1e309", "-1e400", "1e999999")
    ),
    *(f'{{"guided_json": {{"const": {nested(depth, "1")}}}}}' for depth in (70, 3000, 100_000)),
    *(
        json.dumps({"structured_outputs": wanted})
        for wanted in (
            *({"grammar": chain(length)} for length in (1999, 3000, 4600)),
            *({"grammar": "start: " + "(" * n + '"a"' + ")" * n} for n in (100, 3000, 30_000)),
            *({"grammar": 'root ::= "x" ' + "(" * n + '"a"' + ")?" * n} for n in (50, 1000, 2000)),
            *({"regex": "(" * n + "a" + ")" * n} for n in (100, 3000, 30_000)),
            *({"regex": "(a|" * n + "b" + ")*" * n} for n in (30, 300, 10_000)),
            *({"choice": ["a" * n, "b"]} for n in (10, 60_000, 70_000)),
        )
    ),
    *(
        json.dumps(
            {
                "tools": [{"function": {"name": "f", "parameters": {"properties": {"a": schema}}}}],
                "tool_choice": "required",
            }
        )
        for schema in ({"const": LEAST}, {"enum": [LEAST + 1]}, {"pattern": "(" * 400})
    ),
]
"""Deep schemas, and bounds at the edge of 64 bits, three times each."""


async def test_what_is_deep_or_at_an_edge_is_answered_or_refused_by_name(
    long_llama_dir: Path,
) -> None:
    async with tiny_server(long_llama_dir) as (client, _):
        statuses = set()
        for body in HOSTILE:
            field = body.split('"', 2)[1]
            content = (
                f'{{"messages": [{{"role": "user", "content": "x"}}], "max_tokens": 5, {body[1:]}'
            )
            headers = {"content-type": "application/json"}
            reply = await client.post("/v1/chat/completions", content=content, headers=headers)
            statuses.add(reply.status_code)
            if reply.status_code != 200:
                error = reply.json()["error"]
                assert error["type"] == "invalid_request_error", (body[:100], error)
                named = (error["param"] or "") + error["message"]
                of_body = reply.status_code == 413 and "request body" in named
                assert field in named or "nested" in named or of_body, (body[:100], error)
        assert statuses == {200, 400, 413}
        good = await post(client, structured_outputs={"choice": ["good"]})
        assert good.json()["choices"][0]["message"]["content"] == "good"


CRASHING = {"const": LEAST}
"""llguidance 1.9 overflows its stack at this, whatever its size."""
DEEP_CRASHING = {"properties": {"a": {"items": CRASHING}}, "required": ["a"]}
LARK_CRASHING = {"structured_outputs": {"grammar": f"start: %json {json.dumps(CRASHING)}"}}
FORM = {"type": "json_schema", "name": "n", "schema": CRASHING}
CHAT, COMPLETIONS, RESPONSES, ANTHROPIC = (
    ("/v1/chat/completions", {"messages": MESSAGES}),
    ("/v1/completions", {"prompt": "hi"}),
    ("/v1/responses", {"input": "hi"}),
    ("/v1/messages", {"messages": MESSAGES, "max_tokens": 50}),
)
FUNCTION = {"type": "function", "name": "f", "parameters": DEEP_CRASHING}
CRASHES: list[tuple[tuple[str, dict[str, Any]], dict[str, Any], str]] = [
    *(
        (endpoint, body, field)
        for endpoint in (CHAT, COMPLETIONS)
        for body, field in (
            (
                {"response_format": {"type": "json_schema", "json_schema": {"schema": CRASHING}}},
                "response_format",
            ),
            ({"structured_outputs": {"json": DEEP_CRASHING}}, "structured_outputs"),
            (LARK_CRASHING, "structured_outputs"),
            ({"guided_json": CRASHING}, "guided_json"),
            ({"guided_grammar": LARK_CRASHING["structured_outputs"]["grammar"]}, "guided_grammar"),
        )
    ),
    (CHAT, {"tools": [{"type": "function", "function": FUNCTION}], "tool_choice": "required"}, ""),
    (RESPONSES, {"text": {"format": FORM}}, "text.format"),
    (RESPONSES, {"tools": [FUNCTION], "tool_choice": "required"}, ""),
    (
        ANTHROPIC,
        {"tools": [{"name": "f", "input_schema": DEEP_CRASHING}], "tool_choice": {"type": "any"}},
        "",
    ),
    (ANTHROPIC, {"output_config": {"format": FORM}}, "output_config.format"),
]
"""Endpoint, fields, and the field that the error names; empty: tools."""


async def test_a_crash_of_the_library_is_a_refusal_and_the_next_is_served(
    long_llama_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(structured_outputs, "_is_exact", lambda value: True)  # let it through
    async with tiny_server(long_llama_dir) as (client, engine):

        async def ask(at: int) -> httpx.Response:
            (path, fields), body, _ = CRASHES[at]
            return await client.post(path, json={**fields, **body})

        good = [post(client, structured_outputs={"regex": f"[ab]{{3}}{i}"}) for i in range(4)]
        several = [*range(len(CRASHES))] * 2
        replies = await asyncio.gather(*map(ask, several), *good)
        for at, reply in zip(several, replies, strict=False):
            error = reply.json()["error"]
            told = (CRASHES[at], reply.text)
            assert reply.status_code == 400, told
            assert "SIGSEGV" in error["message"] or "SIGABRT" in error["message"], told
            assert (CRASHES[at][2] or "tools") in (error.get("param") or error["message"]), told
        assert [reply.status_code for reply in replies[len(several) :]] == [200] * 4
        assert (await client.get("/health")).status_code == 200
        metrics = (await client.get("/metrics")).text
    totals = engine.grammar_totals()
    assert 0 < totals.failures["invalid_schema"] < sum(totals.counts)
    assert f'reason="invalid_schema"}} {float(totals.failures["invalid_schema"])}' in metrics


async def test_rules_that_refer_to_the_next_are_followed_or_refused_on_each_endpoint(
    long_llama_dir: Path,
) -> None:
    async with tiny_server(long_llama_dir) as (client, _):
        for length in (1000, 2500, 4600):
            for path, fields in (CHAT, COMPLETIONS):
                for name, value in (
                    ("structured_outputs", {"grammar": chain(length)}),
                    ("guided_grammar", chain(length)),
                ):
                    body = {**fields, name: value, "max_tokens": 3}
                    reply = await client.post(path, json=body)
                    assert reply.status_code in (200, 400), reply.text
                    if reply.status_code == 400:
                        assert reply.json()["error"]["param"].startswith(name), reply.text
        good = await post(client, structured_outputs={"choice": ["good"]})
        assert good.json()["choices"][0]["message"]["content"] == "good"


@pytest.mark.parametrize("hostile", ["first", "second"])
async def test_slow_grammars_of_one_key_delay_its_own(
    long_llama_dir: Path, monkeypatch: pytest.MonkeyPatch, hostile: str
) -> None:
    monkeypatch.setattr(grammar, "QUICK_CPU_S", 0.1)
    monkeypatch.setattr(grammar, "SLOW_CPU_S", 0.4)
    monkeypatch.setattr(input_processor, "COMPILE_TIMEOUT_S", 4)
    async with tiny_server(long_llama_dir, api_key=("first", "second")) as (client, _):

        async def ask(key: str, wanted: dict[str, Any]) -> httpx.Response:
            body = {"messages": MESSAGES, "structured_outputs": wanted, "max_tokens": 4}
            headers = {"authorization": f"Bearer {key}"}
            return await client.post("/v1/chat/completions", json=body, headers=headers)

        good = "second" if hostile == "first" else "first"
        assert (await ask(good, {"regex": "warm"})).status_code == 200
        slow = [
            asyncio.create_task(ask(hostile, {"json": {**ENDLESS, "title": str(i)}}))
            for i in range(16)
        ]
        await asyncio.sleep(0.1)
        for i in range(5):
            reply = await ask(good, {"regex": f"[ab]{{2}}{i}"})
            assert reply.status_code == 200, reply.text
        assert not all(task.done() for task in slow), "it did not wait for them"
        replies = await asyncio.gather(*slow)
        for reply in replies:
            error = reply.json()["error"]
            assert error["param"].startswith("structured_outputs"), error
            if reply.status_code == 429:
                assert int(reply.headers["retry-after"]) > 0
                assert error["code"] == "grammar_queue_full"
            else:
                assert (reply.status_code, error["code"]) == (400, "invalid_schema"), error
        statuses = [reply.status_code for reply in replies]
        assert 429 in statuses, "all of them take longer than one may wait"
        monkeypatch.setattr(input_processor, "COMPILE_TIMEOUT_S", 20)
        headers = {"authorization": f"Bearer {good}"}
        metrics = (await client.get("/metrics", headers=headers)).text
        name = "termgen_rejected_total{"
        lines = [line for line in metrics.splitlines() if line.startswith(name)]
        (counted,) = [line for line in lines if 'reason="grammar_queue_full"' in line]
        assert float(counted.rpartition(" ")[2]) == statuses.count(429)
        late = {**ENDLESS, "title": str(statuses.index(429))}
        reply = await ask(good, {"json": late})
        assert reply.json()["error"]["code"] == "invalid_schema", "having waited is no verdict"


async def test_a_prover_that_is_killed_under_load_is_replaced(long_llama_dir: Path) -> None:
    async with tiny_server(long_llama_dir) as (client, engine):
        provers = engine.parts.input_processor._need_grammars(
            StructuredOutputsParams(regex="a")
        )._provers

        async def ask(at: int) -> int:
            wanted = {"regex": f"[ab]{{2}}{at}"}
            for _ in range(20):
                reply = await post(client, structured_outputs=wanted, max_tokens=4)
                if reply.status_code == 200:
                    return 200
                error = reply.json()["error"]
                told = (reply.status_code, error["code"], error["param"])
                assert told == (429, "no_process", "structured_outputs"), error
                assert int(reply.headers["retry-after"]) > 0
                await asyncio.sleep(0.05)
            return reply.status_code

        assert await ask(0) == 200
        killed = set()
        for first in (1, 101, 201):
            asked = [asyncio.create_task(ask(first + i)) for i in range(30)]
            await asyncio.sleep(0.02)
            for prover in provers:
                child = prover._child
                if child is not None and child.process.poll() is None:
                    killed.add(child.process.pid)
                    child.process.kill()
            assert await asyncio.gather(*asked) == [200] * 30
        assert len(killed) >= 3
        assert (await client.get("/health")).status_code == 200


async def test_parameters_that_leave_the_grammar_nothing_are_named(long_llama_dir: Path) -> None:
    word = {"structured_outputs": {"regex": "[ab]"}, "temperature": 0}
    async with tiny_server(long_llama_dir) as (client, _):
        good = {"seed": 3, "max_tokens": 40, "ignore_eos": True, "temperature": 0}
        alone = (await post(client, **good)).json()["choices"][0]["message"]
        letters = [
            (await client.post("/tokenize", json={"prompt": letter})).json()["tokens"][-1]
            for letter in "ab"
        ]
        bad: dict[str, dict[str, Any]] = {
            "allowed_token_ids": {"allowed_token_ids": [5]},
            "bad_words": {"bad_words": ["a", "b"]},
            "min_tokens": {"min_tokens": 3, "stop_token_ids": letters},
        }
        for stream in (False, True):
            first, *others = await asyncio.gather(
                post(client, **good),
                *(post(client, **word, **fields, stream=stream) for fields in bad.values()),
            )
            assert first.json()["choices"][0]["message"] == alone
            for reply, name in zip(others, bad, strict=True):
                assert reply.status_code == 400, (name, reply.text)
                error = reply.json()["error"]
                assert error["param"] == name and error["type"] == "invalid_request_error", error
        fits = await post(client, **word, allowed_token_ids=[5, letters[1]])
        assert fits.json()["choices"][0]["message"]["content"] == "b"


async def test_a_request_whose_grammar_is_being_compiled_holds_nobody_up(
    long_llama_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_go_on = threading.Event()
    compile_source = grammar_source.compile_source

    def slowly(source: str, kind: str, vocabulary: Any) -> Any:
        assert kind != "regex" or may_go_on.wait(30)
        return compile_source(source, kind, vocabulary)

    monkeypatch.setattr("termgen.engine.grammar.grammar.compile_source", slowly)
    async with tiny_server(long_llama_dir) as (client, engine):
        slow = [
            asyncio.create_task(post(client, structured_outputs={"regex": f"[a-z]{{{n}}}"}))
            for n in (3, 4, 5)  # more than compile at once
        ]
        other = await post(client, max_tokens=5)
        assert other.status_code == 200 and not any(task.done() for task in slow)
        assert (await engine.snapshot()).num_waiting == 0
        may_go_on.set()
        replies = await asyncio.gather(*slow)
        texts = [reply.json()["choices"][0]["message"]["content"] for reply in replies]
        assert list(map(len, texts)) == [3, 4, 5]


async def test_a_client_that_leaves_a_constrained_stream(long_llama_dir: Path) -> None:
    async with tiny_server(long_llama_dir) as (client, engine):
        body = {"messages": MESSAGES, "stream": True, "max_tokens": 400, "ignore_eos": True}
        body["structured_outputs"] = {"regex": "[a-z]{300,}"}
        ring = engine.events()
        async with client.stream("POST", "/v1/chat/completions", json=body) as reply:
            async for line in reply.aiter_lines():
                if "content" in line:
                    break
        ended: list[str] = []
        async with asyncio.timeout(20):
            while not ended:  # reported a moment after a snapshot shows it
                ended += [e.detail for e in ring.drain() if getattr(e, "kind", None) is FINISHED]
                await asyncio.sleep(0.01)
        assert ended == ["abort"], "it did not run to its end for nobody"
        assert (await engine.snapshot()).num_running == 0


async def test_without_a_tokenizer_there_is_nothing_to_constrain(tiny_llama_dir: Path) -> None:
    from termgen import LLM, SamplingParams
    from termgen.errors import RequestError

    settings: dict[str, Any] = {"device": "cpu", "max_model_len": 64, "skip_tokenizer_init": True}
    with LLM(tiny_llama_dir, **settings) as llm:
        wanted = StructuredOutputsParams(regex="a")
        with pytest.raises(RequestError, match="structured outputs need a tokenizer"):
            llm.generate([5, 6], SamplingParams(structured_outputs=wanted))


TWO_KINDS: dict[str, Any] = {"type": "array", "items": {"enum": ["a", "b"]}, "uniqueItems": True}
"""Three of its items cannot all differ."""


def of_schema(schema: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, **more}}


@pytest.mark.parametrize("path", ["chat/completions", "completions"])
async def test_what_no_grammar_enforces_is_checked(long_llama_dir: Path, path: str) -> None:
    wrong, right = ({**TWO_KINDS, "minItems": n, "maxItems": n} for n in (3, 1))
    start = {"messages": MESSAGES} if "chat" in path else {"prompt": "x"}

    async with tiny_server(long_llama_dir) as (client, _):

        async def ask(**fields: Any) -> list[dict[str, Any]]:
            body = {**start, "seed": 5, "n": 2, "max_tokens": 60, **fields}
            whole = await client.post(f"/v1/{path}", json=body)
            assert whole.status_code == 200, whole.text
            streamed = await client.post(f"/v1/{path}", json={**body, "stream": True})
            ends = [
                choice
                for event in read_events(streamed.content)
                for choice in (event["choices"] if isinstance(event, dict) else ())
                if choice["finish_reason"]
            ]
            choices: list[dict[str, Any]] = whole.json()["choices"]
            for end in ends:
                assert end.get("finish_details") == choices[end["index"]].get("finish_details")
            assert len(ends) == len(choices) == 2
            return choices

        for choice in await ask(response_format=of_schema(wrong)):
            (line,) = choice["finish_details"]["schema_errors"]
            assert choice["finish_reason"] == "stop" and "non-unique" in line
        for form in (
            {"response_format": of_schema(right, strict=False)},
            {"response_format": {"type": "json_object", "schema": right}},
            {"structured_outputs": {"json": right, "strict": False}},
            {"guided_json": right},
        ):
            for choice in await ask(**form):
                assert choice["finish_details"] == {"schema_errors": []}
        for choice in await ask(response_format=of_schema(wrong), max_tokens=2):
            assert choice["finish_reason"] == "length" and "finish_details" not in choice
        for choice in await ask(response_format=of_schema(SCHEMA)):
            assert "finish_details" not in choice, "its grammar enforces all of it"


async def test_a_strict_schema_is_enforced_in_full_or_refused(long_llama_dir: Path) -> None:
    odd = {"type": "string", "format": "phone number", "maxLength": 3}
    async with tiny_server(long_llama_dir) as (client, _):
        for fields in (
            {"response_format": of_schema(TWO_KINDS, strict=True)},
            {"structured_outputs": {"json": TWO_KINDS, "strict": True}},
        ):
            refused = await post(client, **fields)
            assert refused.status_code == 400, refused.text
            error = refused.json()["error"]
            assert error["code"] == "invalid_schema" and "uniqueItems" in error["message"]
            assert error["param"] == next(iter(fields))
        taken = await post(client, response_format=of_schema(odd, strict=True), max_tokens=30)
        assert taken.status_code == 200, "a format is an annotation"
        bad = await post(client, response_format=of_schema(odd, strict="yes"))
        assert bad.status_code == 400 and "strict" in bad.json()["error"]["message"]
        fetching = {"not": {"$ref": "https://example.com/schema.json"}}
        refused = await post(client, response_format=of_schema(fetching))
        assert refused.status_code == 400 and "not fetched" in refused.json()["error"]["message"]
        form = {"type": "json_schema", "name": "n", "schema": TWO_KINDS}
        whole = await client.post("/v1/responses", json={"input": "x", "text": {"format": form}})
        assert whole.status_code == 400, "its answers have no place for what is not satisfied"


async def test_ollamas_last_line_has_the_errors(long_llama_dir: Path) -> None:
    schema = {**TWO_KINDS, "minItems": 3, "maxItems": 3}
    async with tiny_server(long_llama_dir) as (client, engine):
        body = {"model": engine.model.model_id, "messages": MESSAGES, "format": schema}
        body["options"] = {"seed": 5, "num_predict": 60}
        whole = (await client.post("/api/chat", json={**body, "stream": False})).json()
        lines = (await client.post("/api/chat", json=body)).text.splitlines()
    for last in (whole, json.loads(lines[-1])):
        assert last["done"] and "non-unique" in last["schema_errors"][0]
    assert not any("schema_errors" in line for line in lines[:-1])
