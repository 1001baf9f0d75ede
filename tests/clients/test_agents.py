"""Coding agents, as users install them, edit a file with the help of a scripted engine.

Each runs in an empty home with only the server's address and a key set. Its output, and its
requests to the server, are in the summary of the tests.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_engine import FakeEngine, make_model_info
from fake_script import GenerateCall, Script
from server_harness import serving

from termgen.client import ChatPrompt
from termgen.vocabulary.tool_format import ToolFormat

BIN = Path(__file__).parents[1] / "node" / "node_modules" / ".bin"
TIMEOUT_S = 60
KEY = "sk-local"
MODEL = "local-model"
QUESTION = "In greeting.txt, replace the word world by termgen."
DONE = "The word is replaced."


def agent(name: str) -> str:
    found = BIN / name
    if shutil.which("node") is None or not found.exists():
        pytest.skip(f"needs Node and {name}: `npm install --prefix tests/node`")
    return str(found)


def call(name: str, **arguments: Any) -> str:
    text = json.dumps({"name": name, "arguments": arguments})
    return f"I will use {name}.\n<tool_call>\n{text}\n</tool_call>"


def scripted(*turns: Callable[[ChatPrompt], str]) -> FakeEngine:
    """Answers the n-th turn with the n-th text, by the number of calls in the chat so far."""

    def script(asked: GenerateCall) -> Script:
        prompt = asked.prompt
        assert isinstance(prompt, ChatPrompt)
        if "tools" not in prompt.template_kwargs:  # a title for the session, for example
            return Script(pieces=('{"title": "Greeting"}',))
        done = sum(len(message.get("tool_calls") or ()) for message in prompt.messages)
        text = turns[done](prompt) if done < len(turns) else DONE
        return Script(pieces=[text[at : at + 7] for at in range(0, len(text), 7)])

    format_ = ToolFormat(knows_tools=True, template_variables=("messages", "tools"))
    return FakeEngine(
        script=script,
        model=make_model_info(tool_format=format_, max_model_len=100_000, model_id=MODEL),
    )


async def run_agent(
    command: list[str], folder: Path, environment: dict[str, str]
) -> tuple[int | None, str]:
    """Returns the exit status and the whole output."""
    home = folder.parent / "home"
    home.mkdir()
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=folder,
        env={"PATH": os.environ["PATH"], "HOME": str(home), **environment},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        printed, _ = await asyncio.wait_for(process.communicate(), TIMEOUT_S)
    except TimeoutError:
        pytest.fail(f"{command[0]} did not end within {TIMEOUT_S} s")
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
    return process.returncode, printed.decode(errors="replace")


def transcript(printed: str, engine: FakeEngine) -> str:
    """The dialogue of both sides, for the tests' summary."""
    lines = [f"{len(engine.calls)} requests; the last conversation, the end of each message:"]
    prompts = [asked.prompt for asked in engine.calls if isinstance(asked.prompt, ChatPrompt)]
    longest = max(prompts, key=lambda prompt: len(prompt.messages))
    for message in longest.messages:
        calls = [c["function"] for c in message.get("tool_calls") or ()]
        lines.append(f"[{message['role']}] {str(message['content'])[-160:]!r} {calls or ''}")
    return "\n".join([*lines, "what the agent printed:", printed.strip()])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "greeting.txt").write_text("Hello, world!\n")
    return folder


def results_of(engine: FakeEngine) -> list[str]:
    """Tool results in the longest conversation."""
    prompts = [asked.prompt for asked in engine.calls if isinstance(asked.prompt, ChatPrompt)]
    longest = max(prompts, key=lambda prompt: len(prompt.messages))
    return [str(m["content"]) for m in longest.messages if m["role"] == "tool"]


async def test_claude_code_edits_a_file(
    folder: Path, record_property: Callable[[str, object], None]
) -> None:
    path = str(folder / "greeting.txt")
    engine = scripted(
        lambda _: call("Read", file_path=path),
        lambda _: call("Edit", file_path=path, old_string="world", new_string="termgen"),
    )
    claude = agent("claude")
    async with serving(engine, api_key=(KEY,)) as server:
        status, printed = await run_agent(
            [claude, "-p", QUESTION, "--permission-mode", "acceptEdits", "--model", MODEL],
            folder,
            {"ANTHROPIC_BASE_URL": server.url, "ANTHROPIC_API_KEY": KEY},
        )
    record_property("transcript", transcript(printed, engine))
    assert (folder / "greeting.txt").read_text() == "Hello, termgen!\n"
    assert status == 0 and DONE in printed
    read, edited = results_of(engine)
    assert "Hello, world!" in read and "updated" in edited


async def test_codex_edits_a_file(
    folder: Path, record_property: Callable[[str, object], None]
) -> None:
    patch = "sed -i s/world/termgen/ greeting.txt && cat greeting.txt"
    engine = scripted(
        lambda _: call("multi_agent_v1__close_agent", target="nobody"),
        lambda _: call("exec_command", cmd=patch),
    )
    codex = agent("codex")
    async with serving(engine, api_key=(KEY,)) as server:
        provider = (
            f'{{name="termgen", base_url="{server.url}/v1", env_key="OPENAI_API_KEY",'
            ' wire_api="responses"}'
        )
        status, printed = await run_agent(
            [
                *(codex, "exec", "--skip-git-repo-check", "--model", MODEL),
                "--dangerously-bypass-approvals-and-sandbox",  # which needs further privileges
                *("-c", f"model_providers.termgen={provider}", "-c", "model_provider=termgen"),
                QUESTION,
            ],
            folder,
            {"OPENAI_API_KEY": KEY},
        )
    record_property("transcript", transcript(printed, engine))
    assert (folder / "greeting.txt").read_text() == "Hello, termgen!\n"
    assert status == 0 and DONE in printed
    closed, edited = results_of(engine)
    assert "unsupported call" not in closed, "a function of a namespace is not found by its name"
    assert "Hello, termgen!" in edited
