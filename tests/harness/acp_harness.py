"""A client of the Agent Client Protocol, and `termgen acp` that it drives: in the test's process,
or as one of its own where its end, its signals or its standard streams matter."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import os
import socket
import sys
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager, redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import acp
from acp.schema import AllowedOutcome, DeniedOutcome, RequestPermissionResponse
from fake_engine import FakeEngine, make_model_info
from fake_script import GenerateCall, Script
from tool_samples import KNOWS_TOOLS

from termgen.commands.acp_command import Streams, answer_client, read_setup
from termgen.commands.arguments import build_parser
from termgen.commands.settings import SettingLayers

HARNESS = Path(__file__).parent
NOISY = (str(HARNESS / "acp_noisy_program.py"),)
"""`program` of an engine that prints."""
LIMIT_S = 30.0
MAX_LINE_BYTES = 64 << 20
ONCE, ALWAYS, REJECT = "allow_once", "allow_always", "reject_once"


class AcpClient:
    """A client that keeps what it is shown, and answers questions with the words it is given."""

    def __init__(self, *words: str | None) -> None:
        """words: ids of options for the questions to come; None never answers, "" cancels."""
        self.words = list(words)
        self.asked: list[Any] = []
        """The calls that it was asked about."""
        self.updates: list[tuple[str, Any]] = []
        """(session id, update)"""
        self._news = asyncio.Event()

    def on_connect(self, agent: Any) -> None:
        """The other side needs no greeting."""

    async def session_update(self, session_id: str, update: Any, **_: Any) -> None:
        self.updates.append((session_id, update))
        self._news.set()

    async def request_permission(
        self, session_id: str, tool_call: Any, options: Sequence[Any], **_: Any
    ) -> RequestPermissionResponse:
        self.asked.append(tool_call)
        self._news.set()
        word = self.words.pop(0)
        if word is None:
            await asyncio.sleep(LIMIT_S)
        if not word:
            return RequestPermissionResponse(outcome=DeniedOutcome(outcome="cancelled"))
        assert word in [option.option_id for option in options]
        outcome = AllowedOutcome(outcome="selected", option_id=word)
        return RequestPermissionResponse(outcome=outcome)

    async def until(self, condition: Callable[[], object]) -> None:
        """Wait until what came makes the condition true."""
        async with asyncio.timeout(LIMIT_S):
            while not condition():
                self._news.clear()
                await self._news.wait()

    def shown(self, session_id: str, kind: str) -> list[Any]:
        """The updates of one kind."""
        return [
            update
            for session, update in self.updates
            if session == session_id and update.session_update == kind
        ]

    def text(self, session_id: str, kind: str = "agent_message_chunk") -> str:
        return "".join(update.content.text for update in self.shown(session_id, kind))

    def story(self, session_id: str) -> list[str]:
        """What a reader sees, pieces of text joined: `answer: ...`, `call: ... -> failed`."""
        lines: list[list[str]] = []
        calls: dict[str, list[str]] = {}
        for session, update in self.updates:
            kind = update.session_update
            if session != session_id:
                continue
            if kind.endswith("_chunk"):
                name = kind.removesuffix("_chunk").removeprefix("agent_")
                if lines and lines[-1][0] == name and name != "user_message":
                    lines[-1][1] += getattr(update.content, "text", "")
                else:
                    lines.append([name, getattr(update.content, "text", "[file]")])
            elif kind == "tool_call":
                calls[update.tool_call_id] = ["call", update.title, update.status]
                lines.append(calls[update.tool_call_id])
            elif kind == "tool_call_update":
                calls[update.tool_call_id].append(update.status)
        return [f"{name}: {' > '.join(rest)}" for name, *rest in lines]


@dataclass(frozen=True)
class Agent:
    """A running `termgen acp`."""

    client: AcpClient
    call: Any
    """The connection: methods of the protocol."""
    folder: Path

    async def session(self, *servers: Any, cwd: Path | None = None) -> str:
        """A new session, its commands shown."""
        answer = await self.call.new_session(cwd=str(cwd or self.folder), mcp_servers=list(servers))
        session_id: str = answer.session_id
        await self.client.until(lambda: self.client.shown(session_id, "available_commands_update"))
        return session_id

    async def ask(self, session_id: str, *blocks: Any) -> Any:
        """A prompt of texts and blocks, answered."""
        given = [acp.text_block(one) if isinstance(one, str) else one for one in blocks]
        return await asyncio.wait_for(
            self.call.prompt(session_id=session_id, prompt=given), LIMIT_S
        )


@dataclass(frozen=True)
class AgentProcess(Agent):
    process: asyncio.subprocess.Process


def environment(folder: Path, **more: str) -> dict[str, str]:
    """Variables without the user's settings; chats and models are kept in the folder."""
    config = folder / "config.toml"
    if not config.exists():
        config.write_text("")
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TERMGEN_")}
    return kept | {
        "TERMGEN_CONFIG": str(config),
        "TERMGEN_CHAT_DB": str(folder / "chats.sqlite3"),
        "TERMGEN_CACHE": str(folder / "cache"),
        "OMP_NUM_THREADS": "1",
        **more,
    }


@asynccontextmanager
async def agent_process(
    folder: Path,
    *argv: str,
    client: AcpClient | None = None,
    program: Sequence[str] = (),
    **env: str,
) -> AsyncGenerator[AgentProcess, None]:
    """A process of `termgen acp` with these arguments, initialized. program: another one that is
    started. env: variables for it."""
    client = client or AcpClient()
    command = [sys.executable, *(program or ("-m", "termgen")), "acp", *argv]
    log = folder / "stderr.txt"
    with log.open("ab") as errors:
        async with acp.spawn_agent_process(
            lambda _: client,
            *command,
            env=environment(folder, **env),
            cwd=folder,
            transport_kwargs={"stderr": errors.fileno(), "shutdown_timeout": LIMIT_S},
        ) as (connection, process):
            await connection.initialize(protocol_version=1)
            yield AgentProcess(client, connection, folder, process)
    check_log(log.read_text(errors="replace"))


def check_log(words: str) -> None:
    assert "Traceback" not in words and "Warning" not in words.replace("UserWarning: noise", "")


@asynccontextmanager
async def local_agent(
    folder: Path, *argv: str, client: AcpClient | None = None
) -> AsyncGenerator[Agent, None]:
    """`termgen acp` with these arguments in this process, initialized."""
    client = client or AcpClient()
    log = io.StringIO()
    async with local_streams(folder, *argv, log=log) as (reader, writer):
        connection = acp.connect_to_agent(client, writer, reader)
        try:
            await connection.initialize(protocol_version=1)
            yield Agent(client, connection, folder)
        finally:
            await connection.close()
    check_log(log.getvalue())


@asynccontextmanager
async def local_streams(
    folder: Path, *argv: str, log: io.StringIO
) -> AsyncGenerator[tuple[asyncio.StreamReader, asyncio.StreamWriter], None]:
    """What `termgen acp` in this process writes and reads. Everything but the signals, the standard
    streams and the end of a process is as there. log: what it writes to standard error."""
    ours, theirs = socket.socketpair()
    args = build_parser().parse_args(["acp", *argv])
    layers = SettingLayers(flags=vars(args), environ=environment(folder), config_file=None)
    setup = read_setup(args, layers)
    streams = Streams(os.dup(theirs.fileno()), theirs.detach())
    handler = logging.StreamHandler(log)
    handler.setLevel(logging.WARNING)
    logging.getLogger().addHandler(handler)
    try:
        with redirect_stderr(log):
            answering = asyncio.create_task(answer_client(setup, streams))
            reader, writer = await asyncio.open_connection(sock=ours, limit=MAX_LINE_BYTES)
            try:
                yield reader, writer
            finally:
                writer.close()
                assert await asyncio.wait_for(answering, LIMIT_S) is None
                await setup.source.stop()
                assert not setup.source.is_starting
    finally:
        logging.getLogger().removeHandler(handler)


class RawAgent:
    """`termgen acp` whose lines are written by hand."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self.lines: list[dict[str, Any]] = []
        """All that came."""

    async def send(self, *lines: Any) -> None:
        """Write lines: bytes as they are, other values as JSON."""
        for line in lines:
            data = line if isinstance(line, bytes) else json.dumps(line).encode()
            self._writer.write(data + b"\n")
        await self._writer.drain()

    async def read(self) -> dict[str, Any]:
        """The next line, which must be a message."""
        line = await asyncio.wait_for(self._reader.readline(), LIMIT_S)
        message: dict[str, Any] = json.loads(line)
        assert message["jsonrpc"] == "2.0"
        self.lines.append(message)
        return message

    async def answer(self, message_id: object) -> dict[str, Any]:
        """Read up to the answer with this id."""
        while True:
            message = await self.read()
            if "method" not in message and message.get("id") == message_id:
                return message

    async def request(self, method: str, message_id: object = 1, **params: Any) -> dict[str, Any]:
        await self.send({"jsonrpc": "2.0", "id": message_id, "method": method, "params": params})
        return await self.answer(message_id)


class RawProcess(RawAgent):
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None and process.stdin is not None
        super().__init__(process.stdout, process.stdin)
        self.process = process


@asynccontextmanager
async def local_raw_agent(folder: Path, *argv: str) -> AsyncGenerator[RawAgent, None]:
    """An agent in this process."""
    async with local_streams(folder, *argv, log=io.StringIO()) as (reader, writer):
        yield RawAgent(reader, writer)


@asynccontextmanager
async def raw_agent(
    folder: Path, *argv: str, program: Sequence[str] = (), **env: str
) -> AsyncGenerator[RawProcess, None]:
    """A process."""
    command = [sys.executable, *(program or ("-m", "termgen")), "acp", *argv]
    process = await asyncio.create_subprocess_exec(
        *command,
        env=environment(folder, **env),
        cwd=folder,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        limit=MAX_LINE_BYTES,
    )
    try:
        yield RawProcess(process)
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


def engine_of(*scripts: str | Script, **model: Any) -> FakeEngine:
    """An engine with these answers, one after the other; each text is one token."""
    left = [Script(pieces=(one,)) if isinstance(one, str) else one for one in scripts]

    def script(_: GenerateCall) -> Script:
        return left.pop(0)

    return FakeEngine(script=script, model=make_model_info(**{"tool_format": KNOWS_TOOLS, **model}))


def is_alive(pid: int) -> bool:
    """False for what has ended, whether it was waited for or not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
