"""Limits on the JSON of a body, the agreement of counting with parsing, and the parsing process."""

from __future__ import annotations

import asyncio
import json
import operator
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import httpx
import pytest
from fake_engine import FakeEngine
from hypothesis import given, settings
from hypothesis import strategies as st
from lengths import scaled
from process_resources import no_process, no_thread, resources
from server_harness import ANSWER, app_client, error_of, eventually, serving

import termgen.api.chat as chat
from termgen.api.fields import parse_json
from termgen.errors import OverloadedError, RequestError
from termgen.serving import json_program as module
from termgen.serving import state
from termgen.serving.connection import Connection
from termgen.serving.json_program import check_weight
from termgen.serving.state import JSONProcess
from termgen.system import helper_process

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text('ab"\\[{,:é\n', max_size=12),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=30,
)


def weight_of(value: Any) -> int:
    """The weight of a parsed value: a comma 1, a string, list or object 3."""
    if isinstance(value, str):
        return 3
    if isinstance(value, dict):
        commas = max(0, len(value) - 1)
        return 3 + commas + sum(3 + weight_of(inner) for inner in value.values())
    if isinstance(value, list):
        return 3 + max(0, len(value) - 1) + sum(map(weight_of, value))
    return 0


@given(value=json_values, ascii_only=st.booleans())
@settings(max_examples=scaled(120), deadline=None)
def test_counting_agrees_with_parsing(value: Any, ascii_only: bool) -> None:
    raw = json.dumps(value, ensure_ascii=ascii_only).encode()
    expected = weight_of(value) + raw.count(b"\\") // 4
    limit, module.MAX_JSON_WEIGHT = module.MAX_JSON_WEIGHT, expected
    try:
        # text after the last comma or bracket counts with the next scan: pad with none
        check_weight(raw)
        module.MAX_JSON_WEIGHT = expected - 1
        if expected:
            with pytest.raises(RequestError):
                check_weight(raw + b" ")
    finally:
        module.MAX_JSON_WEIGHT = limit


@given(raw=st.binary(max_size=200) | st.text('"\\[],{} ', max_size=60).map(str.encode))
@settings(max_examples=scaled(120), deadline=None)
def test_counting_ends_whatever_the_bytes(raw: bytes) -> None:
    check_weight(raw)


@pytest.mark.parametrize(
    ("content", "status"),
    [
        (b'{"prompt":[' + b"7," * 200_000 + b"7]}", 400),  # longer than the context, but read
        (b'{"prompt":[' + b"7," * 300_000 + b"7]}", 413),
        (b'{"prompt":"x","stop":[' + b'"a",' * 80_000 + b'"a"]}', 413),
        (b'{"prompt":' + b"[]," * 100_000, 413),
        (b'{"prompt":"' + b"a, [b] {c} " * 100_000 + b'"}', 400),
        (b'{"prompt":"' + b'\\"\\\\' * 100_000 + b'","n":0}', 400),
        (b'{"prompt":"' + b"\\" * 1_000_000, 400),
        (b'"' * 500_000, 413),
    ],
    ids=["ids", "many ids", "strings", "lists", "text", "escapes", "backslashes", "quotes"],
)
async def test_bodies_of_many_values_are_refused(content: bytes, status: int) -> None:
    engine = FakeEngine()
    async with app_client(engine) as client:
        headers = {"content-type": "application/json"}
        response = await client.post("/v1/completions", content=content, headers=headers)
        assert response.status_code == status, response.text
        if status == 413:
            assert response.json()["error"]["code"] == "request_too_large"
        assert engine.live == ()


@pytest.fixture
def process() -> Iterator[JSONProcess]:
    process = JSONProcess()
    yield process
    process.close()


async def test_the_process_returns_what_json_says(process: JSONProcess) -> None:
    values: list[Any] = [{}, {"a": [1, -2.5, 1e300, 10**40, None, True, "é\n🎉", {"": []}]}]
    values.append({"prompt": list(range(100_000)), "text": "x" * 10**6})
    values.append(json.loads('{"a":' + '{"a":' * 400 + "1" + "}" * 401))
    for value in values:
        raw = json.dumps(value).encode()
        assert await process.parse([raw[:3], b"", raw[3:]], dict) == value


async def test_faults_come_from_the_process_as_they_are(process: JSONProcess) -> None:
    for raw in (b'{"n":NaN}', b"[]", b"\xff" * 50_000, b"[" * 50_000, b'{"a":"\\ud800"}'):
        with pytest.raises(RequestError) as here:
            parse_json(raw)
        with pytest.raises(RequestError) as there:
            await process.parse([raw], dict)
        assert str(there.value) == str(here.value) and there.value.code == here.value.code
        assert there.value.status == 400


async def test_a_process_that_dies_costs_one_request(process: JSONProcess) -> None:
    """The process is stopped in the middle of a body, as by a system short of memory."""
    assert await process.parse([b'{"a":1}'], dict) == {"a": 1}
    child = process.helper.start()
    child.send_signal(signal.SIGSTOP)
    waiting = asyncio.create_task(process.parse([b'{"a":2}'], dict))
    await asyncio.sleep(0.05)
    child.kill()
    with pytest.raises(RequestError, match="too much memory") as failed:
        await waiting
    assert failed.value.status == 413
    assert await process.parse([b'{"a":3}'], dict) == {"a": 3}


async def test_a_body_without_end_is_given_up(
    process: JSONProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    process.helper.start().send_signal(signal.SIGSTOP)
    with monkeypatch.context() as patch:
        patch.setattr(helper_process, "MAX_START_S", 0.05)
        with pytest.raises(OverloadedError, match="no process left"):
            await process.parse([b'{"a":1}'], dict)
    assert await process.parse([b'{"a":2}'], dict) == {"a": 2}
    process.helper.start().send_signal(signal.SIGSTOP)
    with monkeypatch.context() as patch:
        patch.setattr(state, "PARSE_LIMIT_S", 0.05)
        with pytest.raises(RequestError, match="too much time to be parsed") as failed:
            await process.parse([b'{"a":3}'], dict)
    assert (failed.value.status, failed.value.code) == (413, "request_too_large")
    assert await process.parse([b'{"a":4}'], dict) == {"a": 4}


LARGE = {"prompt": "x", "user": "u" * 100_000}


async def test_without_a_process_or_a_thread_a_body_is_to_come_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with app_client(FakeEngine()) as client:
        for place, name, refuse in (
            (threading.Thread, "start", no_thread),
            (subprocess, "Popen", no_process),
        ):
            with monkeypatch.context() as patch:
                patch.setattr(place, name, refuse)
                answer = await client.post("/v1/completions", json=LARGE)
            assert answer.status_code == 429 and error_of(answer)["code"] == "no_process"
            assert int(answer.headers["retry-after"]) > 0 < int(answer.headers["retry-after-ms"])
        assert (
            'rejected_total{model="fake/model-1",reason="no_process"} 2.0'
            in (await client.get("/metrics")).text
        )
        assert (await client.post("/v1/completions", json=LARGE)).status_code == 200


async def test_bodies_that_are_parsed_at_shutdown_get_what_others_get_then() -> None:
    async with serving(FakeEngine()) as server, httpx.AsyncClient(base_url=server.url) as client:
        assert (await client.post("/v1/completions", json=LARGE)).status_code == 200
        bodies = server._state.large_bodies
        bodies.helper.start().send_signal(signal.SIGSTOP)  # one never ends, others wait
        asked = [asyncio.create_task(client.post("/v1/completions", json=LARGE)) for _ in range(3)]
        while bodies._thread._work_queue.qsize() < 2:
            await asyncio.sleep(0.005)
        await server.stop(drain_timeout=0)
        for answer in await asyncio.gather(*asked):
            assert answer.status_code == 503 and error_of(answer)["code"] == "draining"
        with pytest.raises(RequestError, match="shutting down"):
            await bodies.parse([b"{}"], dict)


async def test_who_leaves_while_a_large_body_waits_leaves_nothing(process: JSONProcess) -> None:
    async with serving(FakeEngine()) as server:
        bodies = server._state.large_bodies
        async with httpx.AsyncClient(base_url=server.url) as client:
            assert (await client.post("/v1/completions", json=LARGE)).status_code == 200
            child = bodies.helper.start()
            child.send_signal(signal.SIGSTOP)
            asked = [asyncio.create_task(client.post("/v1/completions", json=LARGE)) for _ in "abc"]
            while bodies._thread._work_queue.qsize() < 2:
                await asyncio.sleep(0.005)
            for task in asked:
                task.cancel()
            await asyncio.wait(asked)
        async with httpx.AsyncClient(base_url=server.url) as client:
            await eventually(lambda: not server._uvicorn.server_state.tasks)
            child.send_signal(signal.SIGCONT)
            assert (await client.post("/v1/completions", json=LARGE)).status_code == 200


async def test_fifty_large_bodies_at_once_while_the_process_is_killed() -> None:
    """Each gets the right answer or a refusal, and nothing is left."""
    before, num_threads = resources(), threading.active_count()
    statuses: Counter[int] = Counter()
    engine = FakeEngine()
    limits = httpx.Limits(max_connections=100)
    async with serving(engine) as server:
        async with httpx.AsyncClient(base_url=server.url, limits=limits, timeout=30) as client:

            async def ask(i: int) -> None:
                prompt = f"{i}:" + "x" * 2000
                body = {"prompt": prompt, "user": "u" * 2**18, "echo": True}
                answer = await client.post("/v1/completions", json=body)
                statuses[answer.status_code] += 1
                if answer.status_code == 200:
                    assert answer.json()["choices"][0]["text"] == prompt + ANSWER
                else:
                    assert error_of(answer)["code"] in ("request_too_large", "no_process")

            asked = [asyncio.create_task(ask(i)) for i in range(50)]
            for _ in range(3):
                await asyncio.sleep(0.15)
                child = server._state.large_bodies.helper._child
                if child is not None:
                    child.process.kill()
            await asyncio.gather(*asked)
            assert engine.live == ()
    print(statuses)
    assert statuses.keys() <= {200, 413, 429} and statuses[200] > 20
    await eventually(lambda: threading.active_count() <= num_threads)
    assert resources() <= before and len(asyncio.all_tasks()) == 1


async def test_small_bodies_do_not_wait_for_large_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    parse = JSONProcess._parse

    def slow(self: JSONProcess, parts: Sequence[bytes], take: Any) -> Any:
        time.sleep(0.3)
        return parse(self, parts, take)

    monkeypatch.setattr(JSONProcess, "_parse", slow)
    async with app_client(FakeEngine()) as client:

        async def ask(size: int) -> int:
            body = {"prompt": "x", "user": "u" * size}
            return (await client.post("/v1/completions", json=body)).status_code

        large = [asyncio.create_task(ask(100_000)) for _ in range(2)]
        await asyncio.sleep(0.01)
        assert await ask(10) == 200
        assert not any(task.done() for task in large)
        assert await asyncio.gather(*large) == [200, 200]


async def test_large_bodies_are_checked_in_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tools of 400 KB take long to check, value by value. Errors come back as errors."""
    parse, num_here = chat.parse_options, 0

    def noting(*args: Any, **options: Any) -> Any:
        nonlocal num_here
        num_here += 1
        return parse(*args, **options)

    monkeypatch.setattr(chat, "parse_options", noting)
    async with app_client(FakeEngine()) as client:
        message = {"role": "user", "content": "x"}
        for size, temperature in ((10, 1), (100_000, 1), (100_000, -1)):
            body = {"messages": [message], "user": "u" * size, "temperature": temperature}
            response = await client.post("/v1/chat/completions", json=body)
            assert response.status_code == (200 if temperature == 1 else 400)
        assert response.json()["error"]["param"] == "temperature"
    assert num_here == 1


async def test_functions_that_only_exist_here_come_back(process: JSONProcess) -> None:
    """A model's own answer parser returns such functions, as part of checking a body."""

    def local() -> str:
        return "here"

    taken: dict[str, Any] = await process.parse(
        [b'{"a":1}'], partial(dict, first=local, again=[local], b=len)
    )
    assert taken == {"a": 1, "first": local, "again": [local], "b": len}


async def test_a_bug_over_there_is_shown_here(process: JSONProcess) -> None:
    with pytest.raises(RuntimeError, match="KeyError in a helper"):
        await process.parse([b"{}"], operator.itemgetter("missing"))
    assert await process.parse([b"{}"], dict) == {}, "it goes on"


async def test_objects_of_too_many_fields_are_refused() -> None:
    """The refusal comes before they are checked one by one."""
    async with app_client(FakeEngine()) as client:
        fields = {f"n{i}": 0 for i in range(30_000)}
        small = {f"n{i}": 0 for i in range(1001)}
        for body, param in (
            ({"prompt": "x", **fields}, None),
            ({"prompt": "x", **small}, None),
            ({"prompt": "x", "stream": True, "stream_options": small}, "stream_options"),
        ):
            answer = await client.post("/v1/completions", json=body)
            assert answer.status_code == 400
            error = answer.json()["error"]
            assert "more than 1000 fields" in error["message"] and error["param"] == param


async def test_large_bodies_come_in_small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """The event loop copies each piece."""
    receive, sizes = Connection.data_received, list[int]()

    def noting(self: Connection, data: bytes) -> None:
        sizes.append(len(data))
        receive(self, data)

    monkeypatch.setattr(Connection, "data_received", noting)
    async with serving(FakeEngine()) as server, httpx.AsyncClient(base_url=server.url) as client:
        body = {"prompt": "x", "user": "u" * 2**21}
        assert (await client.post("/v1/completions", json=body)).status_code == 200
    assert max(sizes) <= 2**17 and sum(sizes) > 2**21


async def test_the_process_ends_with_the_server() -> None:
    async with serving(FakeEngine()) as server:
        body = {"prompt": "x", "user": "u" * 100_000}
        async with httpx.AsyncClient(base_url=server.url) as client:
            assert (await client.post("/v1/completions", json=body)).status_code == 200
        child = server._state.large_bodies.helper.start()
    assert child.poll() is not None


async def test_too_many_messages_are_refused() -> None:
    async with app_client(FakeEngine()) as client:
        message = {"role": "user", "content": "x"}
        response = await client.post("/v1/chat/completions", json={"messages": [message] * 4097})
        assert response.status_code == 400
        assert response.json()["error"]["message"] == "at most 4096 messages are allowed"


FUNCTION = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"enum": [1]}}}}
TOOL = {"type": "function", "function": FUNCTION}
HELLO = [{"role": "user", "content": "hello"}]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": HELLO, "tools": [TOOL], "stop": ["x"]}),
        ("/v1/chat/completions", {"messages": HELLO, "response_format": {"type": "json_object"}}),
        ("/v1/completions", {"prompt": ["a", "b"], "logit_bias": {"3": 1}, "seed": 1}),
        ("/v1/completions", {"prompt": "a", "suffix": "b"}),
        ("/v1/messages", {"messages": HELLO, "max_tokens": 5, "system": "be brief"}),
        ("/v1/messages", {"messages": HELLO, "max_tokens": 5, "tools": [{"name": "f"}]}),
        ("/v1/messages/count_tokens", {"messages": HELLO}),
        ("/v1/responses", {"input": "hello", "metadata": {"a": "b"}, "tools": []}),
        ("/tokenize", {"prompt": "hello"}),
        ("/tokenize", {"messages": HELLO}),
        ("/detokenize", {"tokens": [1, 2]}),
    ],
)
async def test_large_bodies_get_what_small_ones_get(path: str, body: dict[str, Any]) -> None:
    """Their contents cross from one process to the other, on every endpoint."""
    async with app_client(FakeEngine()) as client:
        small = await client.post(path, json=body)
        large = await client.post(
            path,
            content=json.dumps(body).encode() + b" " * 50_000,
            headers={"content-type": "application/json"},
        )
    assert large.status_code == small.status_code, large.text
    told, expected = large.json(), small.json()
    for answer in (told, expected):
        for name in ("id", "created", "created_at", "completed_at", "output"):
            answer.pop(name, None)
    if small.status_code == 200:
        assert told == expected
    else:
        assert told["error"]["param"] == expected["error"]["param"], told
