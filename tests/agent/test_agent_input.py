"""What `termgen acp` makes of bad input, and that its output is the protocol and nothing else."""

from __future__ import annotations

import asyncio
import base64
import json
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

acp = pytest.importorskip("acp")

from acp_harness import (  # noqa: E402
    NOISY,
    RawAgent,
    engine_of,
    environment,
    local_raw_agent,
    raw_agent,
)
from fake_engine import FakeEngine  # noqa: E402
from server_harness import serving  # noqa: E402

PROMPT = [{"type": "text", "text": "hi"}]
IMAGE = {"type": "image", "data": "AAAA", "mimeType": "image/png"}


async def opened(agent: RawAgent, folder: Path) -> str:
    """The id of a new session."""
    await agent.request("initialize", protocolVersion=1)
    answer = await agent.request("session/new", 2, cwd=str(folder), mcpServers=[])
    session: str = answer["result"]["sessionId"]
    return session


async def test_lines_that_are_no_messages(tmp_path: Path) -> None:
    async with (
        serving(engine_of("Hello.")) as server,
        raw_agent(tmp_path, "--url", server.url) as agent,
    ):
        session = await opened(agent, tmp_path)
        request = {"jsonrpc": "2.0", "id": 3, "method": "session/list", "params": {}}
        bad: list[tuple[Any, int, str]] = [
            (b"garbage", -32700, "not JSON"),
            (b"\xff\xfe", -32700, "not JSON"),
            (b"[" * 100_000, -32700, "not JSON"),
            ([request], -32600, "not an array"),
            ([], -32600, "not an array"),
            (7, -32600, "one message"),
            ({}, -32600, "method is missing"),
            ({"id": [1], "method": "session/list"}, -32600, "id must be"),
            ({"id": 3, "method": {"a": 1}}, -32600, "method must be"),
            ({"id": 3, "error": "text"}, -32600, "error must be"),
        ]
        for line, code, words in bad:
            await agent.send(line)
            is_request = isinstance(line, dict) and type(line.get("id")) is int and "method" in line
            answer = await agent.answer(line["id"] if is_request else None)
            assert answer["error"]["code"] == code and words in answer["error"]["message"], line
        await agent.send({"method": "$/cancel_request", "params": {"requestId": 99}})
        await agent.send(b"", b"   ", {"id": 99, "result": 1}, {"id": {}, "result": 1})
        assert (await agent.answer(None))["error"]["message"].startswith("id must be")
        answer = await agent.request("session/prompt", 4, sessionId=session, prompt=PROMPT)
        assert answer["result"]["stopReason"] == "end_turn"
        assert agent.process.stdin is not None and agent.process.stderr is not None
        agent.process.stdin.close()
        assert await asyncio.wait_for(agent.process.stderr.read(), 20) == b""


async def test_a_line_that_is_too_long_is_skipped(tmp_path: Path) -> None:
    async with (
        serving(engine_of()) as server,
        local_raw_agent(tmp_path, "--url", server.url) as agent,
    ):
        await agent.send(b" " * (51 << 20))
        assert "over 50 MiB" in (await agent.answer(None))["error"]["message"]
        assert (await agent.request("initialize", protocolVersion=1))["result"]


async def test_parameters_that_cannot_be_used(tmp_path: Path) -> None:
    stdio = {"name": "s", "command": "x", "args": [], "env": []}
    blob = base64.b64encode(b"\0").decode()
    (tmp_path / "binary").write_bytes(b"\0\0")
    engine = engine_of("Hello.")
    async with (
        serving(engine) as server,
        local_raw_agent(tmp_path, "--url", server.url) as agent,
    ):
        session = await opened(agent, tmp_path)

        def new(**fields: Any) -> tuple[str, dict[str, Any]]:
            return "session/new", {"cwd": str(tmp_path), "mcpServers": [], **fields}

        def ask(*blocks: Any) -> tuple[str, dict[str, Any]]:
            return "session/prompt", {"sessionId": session, "prompt": list(blocks)}

        def server_of(**fields: Any) -> tuple[str, dict[str, Any]]:
            return new(mcpServers=[{**stdio, **fields}])

        plain = "http://example.org/mcp"
        bad: list[tuple[tuple[str, dict[str, Any]], int, str]] = [
            (("session/prompt", {"sessionId": "?", "prompt": PROMPT}), -32002, "sessionId: no ses"),
            (("session/prompt", {"prompt": PROMPT}), -32602, "sessionId: Field required"),
            (("session/close", {"sessionId": "?"}), -32002, "sessionId"),
            (("session/load", new()[1] | {"sessionId": "?"}), -32002, "there is no chat '?'"),
            (("session/load", new()[1] | {"sessionId": "\ud800"}), -32002, "there is no chat"),
            (("session/fork", {"sessionId": session, "cwd": "/"}), -32601, "Method not found"),
            (("session/set_mode", {"sessionId": session, "modeId": "x"}), -32601, "Method not"),
            (("no/such", {}), -32601, "Method not found"),
            (ask(), -32602, "prompt: it has no text"),
            (ask({"type": "text", "text": "  "}), -32602, "prompt: it has no text"),
            (ask(*PROMPT, IMAGE), -32602, "prompt[1]: image: no model here reads it"),
            (ask({"type": "audio", "data": "", "mimeType": "a/b"}), -32602, "prompt[0]: audio"),
            (ask({"type": "video"}), -32602, "prompt[0]: Input tag 'video'"),
            (ask({"type": "text"}), -32602, "prompt[0].text.text: Field required"),
            (
                ask({"type": "resource", "resource": {"uri": "file:///x", "blob": blob}}),
                -32602,
                "prompt[0]: resource: 'file:///x' is binary",
            ),
            (
                ask({"type": "resource_link", "name": "b", "uri": (tmp_path / "binary").as_uri()}),
                -32602,
                "prompt[0]: resource_link:",
            ),
            (new(cwd="relative"), -32602, "cwd: 'relative' is not an absolute path"),
            (new(cwd=str(tmp_path / "none")), -32602, "is not a folder"),
            (new(cwd="/\0"), -32602, "cwd:"),
            (new(additionalDirectories=["/"]), -32602, "additionalDirectories:"),
            (server_of(args="text"), -32602, "mcpServers[0].args: Input should be"),
            (new(mcpServers=[stdio, 7]), -32602, "mcpServers[1]: Input should be"),
            (new(mcpServers=[{"type": "x"}]), -32602, "mcpServers[0].type: there is no 'x'"),
            (server_of(command=""), -32602, "mcpServers[0], [mcp.s]: command"),
            (server_of(env=[{"name": "A=B", "value": ""}]), -32602, "env: 'A=B' cannot be set"),
            (
                new(mcpServers=[{"type": "http", "name": "s", "url": plain, "headers": []}]),
                -32602,
                "http is for this machine only",
            ),
            (
                new(mcpServers=[{"type": "sse", "name": "s", "url": plain, "headers": []}]),
                -32602,
                "mcpServers[0]: sse",
            ),
        ]
        for number, ((method, params), code, words) in enumerate(bad, 10):
            answer = await agent.request(method, number, **params)
            error = answer["error"]
            assert error["code"] == code and words in error["message"], (params, answer)
            assert "\n" not in error["message"]
        assert not engine.calls
        answer = await agent.request("session/prompt", 9, sessionId=session, prompt=PROMPT)
        assert answer["result"]["stopReason"] == "end_turn"


async def test_nothing_but_the_protocol_is_written(tmp_path: Path) -> None:
    """The engine, its children and its warnings print; `RawAgent.read` takes messages only."""
    async with raw_agent(tmp_path, program=NOISY) as agent:
        session = await opened(agent, tmp_path)
        answer = await agent.request("session/prompt", 4, sessionId=session, prompt=PROMPT)
        assert answer["result"]["stopReason"] == "end_turn"
        assert agent.process.stdin is not None and agent.process.stdout is not None
        agent.process.stdin.close()
        rest = await asyncio.wait_for(agent.process.stdout.read(), 20)
        for line in rest.splitlines():
            assert json.loads(line)["jsonrpc"] == "2.0"
        assert agent.process.stderr is not None
        errors = (await agent.process.stderr.read()).decode()
    said = [
        line["params"]["update"]["content"]["text"]
        for line in agent.lines
        if line.get("params", {}).get("update", {}).get("sessionUpdate") == "agent_message_chunk"
    ]
    assert "".join(said) == "Hello, world! Ça va? 👋🏽."
    assert errors.count("noise on standard output") > 20
    assert "Traceback" not in errors


async def test_a_start_does_not_hold_up_the_first_answer(tmp_path: Path) -> None:
    async with raw_agent(tmp_path, program=NOISY, START_S="600") as agent:
        answer = (await agent.request("initialize", protocolVersion=99))["result"]
        assert answer["protocolVersion"] == 1 and answer["agentInfo"]["name"] == "termgen"
        capabilities = answer["agentCapabilities"]
        assert capabilities["loadSession"] and capabilities["promptCapabilities"]["embeddedContext"]
        started = time.monotonic()
        assert (await agent.request("session/list", 2))["result"] == {"sessions": []}
        assert time.monotonic() - started < 10


def test_answers_to_input_that_ends_at_once(tmp_path: Path) -> None:
    """Something piped in by hand is answered before the end."""
    line = b'{"jsonrpc":"2.0","id":1,"method":"initialize","params":{"protocolVersion":1}}'
    done = subprocess.run(
        [sys.executable, *NOISY, "acp"],
        input=line,
        capture_output=True,
        env=environment(tmp_path),
        timeout=30,
    )
    assert done.returncode == 0 and json.loads(done.stdout)["result"]["protocolVersion"] == 1


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("--api-key", "k"), "--api-key needs --url"),
        (("--url", "ftp://x"), "ftp://x"),
        (("--temperature", "9"), "temperature"),
        (("--theme", "nord"), "unknown argument --theme"),
    ],
)
def test_flags_that_cannot_be_used(tmp_path: Path, argv: tuple[str, ...], words: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "termgen", "acp", *argv],
        input=b"",
        capture_output=True,
        env=environment(tmp_path),
        timeout=30,
    )
    errors = done.stderr.decode()
    assert (done.returncode, done.stdout) == (2, b"")
    assert errors.startswith("termgen: error: ") and words in errors and errors.count("\n") == 1


def test_without_the_package_it_says_what_to_install(tmp_path: Path) -> None:
    script = "import sys; sys.modules['acp'] = None\nfrom termgen.commands import cli\ncli.entry()"
    done = subprocess.run(
        [sys.executable, "-c", script, "acp"],
        input=b"",
        capture_output=True,
        env=environment(tmp_path),
        timeout=30,
    )
    line = "termgen: error: termgen acp needs a package: pip install 'termgen[acp]'\n"
    assert (done.returncode, done.stdout, done.stderr.decode()) == (2, b"", line)


async def test_what_a_client_notes_for_itself_changes_no_parameter(tmp_path: Path) -> None:
    async with (
        serving(engine_of("Hello.")) as server,
        local_raw_agent(tmp_path, "--url", server.url) as agent,
    ):
        session = await opened(agent, tmp_path)
        notes = {"self": 1, "session_id": "another", "prompt": [], "cwd": "nowhere"}
        answer = await agent.request(
            "session/prompt", 3, sessionId=session, prompt=PROMPT, _meta=notes
        )
        assert answer["result"]["stopReason"] == "end_turn"
        answer = await agent.request("session/close", 4, sessionId=session, _meta=notes)
        assert "error" not in answer


def mangled(value: Any, rng: random.Random) -> Any:
    """The value with something in it that is not what it was."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        name = rng.choice(list(value))
        return {**value, name: mangled(value[name], rng)}
    if isinstance(value, list) and value and rng.random() < 0.7:
        place = rng.randrange(len(value))
        return [*value[:place], mangled(value[place], rng), *value[place + 1 :]]
    odd = [None, True, -1, 2**70, 1.5, "", "x", "\ud800", "\0", [], {}, [[]], {"type": "text"}]
    return rng.choice(odd)


async def test_requests_of_any_shape_are_answered(tmp_path: Path) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    server = {"name": "s", "command": "true", "args": ["a"], "env": [{"name": "A", "value": "b"}]}
    engine = FakeEngine()
    async with (
        serving(engine) as target,
        local_raw_agent(tmp_path, "--url", target.url) as agent,
    ):
        session = await opened(agent, tmp_path)
        folder = {"cwd": str(tmp_path), "mcpServers": [server]}
        blocks = [*PROMPT, {"type": "resource", "resource": {"uri": "file:///x", "text": "y"}}]
        methods: list[tuple[str, dict[str, Any]]] = [
            ("initialize", {"protocolVersion": 1, "clientCapabilities": {"fs": {}}}),
            ("session/new", folder),
            ("session/load", {**folder, "sessionId": session}),
            ("session/list", {"cwd": "/", "cursor": None}),
            ("session/prompt", {"sessionId": session, "prompt": blocks}),
            (
                "session/set_config_option",
                {"sessionId": session, "configId": "a", "value": "x"},
            ),
            ("session/close", {"sessionId": session, "_meta": {"self": 1}}),
            ("session/cancel", {"sessionId": session}),
        ]
        for number in range(150):
            method, params = rng.choice(methods)
            message = {"jsonrpc": "2.0", "id": number, "method": method, "params": params}
            message = mangled(message, rng)
            message_id = message.get("id") if isinstance(message, dict) else None
            await agent.send(message)
            is_request = isinstance(message, dict) and message.get("method") is not None
            if is_request and "id" in message and type(message_id) in (int, str, type(None)):
                await agent.answer(message_id)
        await agent.request("session/list", "last")
