"""MCP servers over standard streams: good ones, bad ones, and what is left of them."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from termgen.tools import server_process, server_tools
from termgen.tools.server_config import McpServer
from termgen.tools.server_tools import McpTools
from termgen.tools.toolbox import Toolbox, ToolError

pytest.importorskip("mcp")
HARNESS = Path(__file__).parents[1] / "harness"
GOOD = (sys.executable, str(HARNESS / "mcp_server.py"))


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_process, "CLOSE_S", 0.5)


def raw(*way: str) -> tuple[str, ...]:
    return (sys.executable, str(HARNESS / "mcp_raw_server.py"), *way)


@asynccontextmanager
async def started(
    command: tuple[str, ...] = GOOD, *, timeout_s: float = 20.0, **env: str
) -> AsyncGenerator[McpTools, None]:
    server = McpServer(name="s", command=command, env=env, timeout_s=timeout_s, protocol="legacy")
    tools = McpTools(server)
    try:
        await tools.start()
        yield tools
    finally:
        await tools.close()


async def call(tools: McpTools, tool: str = "call", **arguments: Any) -> str:
    (found,) = [one for one in tools.tools if one.name == tool]
    return await found.call(arguments)


def is_alive(pid: int) -> bool:
    """False for what has ended, whether it was waited for or not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


async def wait_for(condition: Callable[[], bool], limit_s: float = 10.0) -> None:
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, "it never came true"
        await asyncio.sleep(0.01)


async def test_a_good_server() -> None:
    async with started() as tools:
        assert tools.state == "ready"
        names = {one.name for one in tools.tools}
        assert {"echo", "slow", "crash", "big"} <= names
        assert await call(tools, "echo", text="hi") == "echo hi"
        with pytest.raises(ToolError, match="Error executing tool fail"):
            await call(tools, "fail")
        with pytest.raises(ToolError):
            await call(tools, "echo", text=3, more=4)
        with pytest.raises(ToolError):
            await call(tools, "sample")
        assert await call(tools, "echo", text="still") == "echo still"
        (echo,) = [one for one in tools.tools if one.name == "echo"]
        assert echo.description == "Say it again." and "text" in echo.schema["properties"]
    assert tools.state == "ended" and not tools.tools


async def test_it_gets_few_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_KEY", "x")
    monkeypatch.setenv("TERMGEN_TOKEN_OF_TEST", "y")
    async with started(GIVEN="${TERMGEN_TOKEN_OF_TEST}") as tools:
        names = (await call(tools, "variables")).split()
    assert "GIVEN" in names and "PATH" in names
    assert "SECRET_KEY" not in names and "TERMGEN_TOKEN_OF_TEST" not in names


async def test_a_large_result_keeps_the_loop_free() -> None:
    async with started() as tools:
        worst, running = 0.0, True

        async def watch() -> None:
            nonlocal worst
            last = time.perf_counter()
            while running:
                await asyncio.sleep(0.001)
                now = time.perf_counter()
                worst, last = max(worst, now - last), now

        watching = asyncio.create_task(watch())
        assert len(await call(tools, "big", num_chars=1_000_000)) == 1_000_000
        assert len(await call(tools, "big", num_chars=3_000_000)) == 3_000_000
        running = False
        await watching
        assert worst < 0.3, f"the loop stood still for {worst:.3f} s"


async def test_a_hundred_tools() -> None:
    async with started(NUM_TOOLS="100") as tools:
        box = Toolbox([tools])
        numbered = [one for one in box.offered if one.name.startswith("s_tool_")]
        assert len(numbered) == 100 and not box.left_out
        assert await numbered[77].tool.call({}) == "77"


async def test_a_slow_call_times_out_and_another_does_not_wait() -> None:
    async with started(timeout_s=1.0) as tools, started() as other:
        hanging = asyncio.create_task(call(tools, "slow", seconds=60))
        begun = time.monotonic()
        assert await call(other, "echo", text="b") == "echo b"
        assert await call(tools, "echo", text="a") == "echo a"
        assert time.monotonic() - begun < 0.9
        with pytest.raises(ToolError, match="no result came within 1 s"):
            await hanging
        assert await call(tools, "echo", text="c") == "echo c"


async def test_a_cancelled_call_tells_the_server(tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    async with started(SEEN=str(seen)) as tools:
        task = asyncio.create_task(call(tools, "slow", seconds=60))
        await wait_for(lambda: seen.exists() and seen.read_text() == "called")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await wait_for(lambda: seen.read_text() == "cancelled")
        assert await call(tools, "echo", text="on") == "echo on"


async def test_a_server_that_dies_is_started_anew() -> None:
    async with started() as tools, started() as other:
        with pytest.raises(
            ToolError, match="ended during the call: it ended with code 7"
        ) as raised:
            await call(tools, "crash", code=7)
        assert "going down" in str(raised.value)
        assert await call(tools, "echo", text="again") == "echo again"
        assert tools.state == "ready"
        assert await call(other, "echo", text="untouched") == "echo untouched"


async def test_two_calls_after_a_death_start_it_once(tmp_path: Path) -> None:
    async with started(raw("two calls", str(tmp_path / "mark"))) as tools:
        with pytest.raises(ToolError):
            await call(tools)
        assert await asyncio.gather(call(tools), call(tools)) == ["fine", "fine"]


async def test_after_three_deaths_it_stays_off_until_it_is_restarted() -> None:
    async with started(raw("dies")) as tools:
        for _ in range(server_tools.MAX_DEATHS):
            with pytest.raises(ToolError, match="ended during the call"):
                await call(tools)
        with pytest.raises(ToolError, match="/mcp restart s"):
            await call(tools)
        await tools.restart()
        assert tools.state == "ready"


@pytest.mark.parametrize(
    ("way", "words"),
    [
        ("truncated", "no result came within 1 s"),
        ("very deep", "no result came within 1 s"),
        ("shape", "a result of a wrong shape"),
        ("garbage", "20 lines that are no messages"),
        ("long line", "a line over 8 MiB"),
    ],
)
async def test_bad_answers_cost_their_call_only(way: str, words: str) -> None:
    async with started(raw(way), timeout_s=1.0) as tools, started() as good:
        bad = asyncio.create_task(call(tools))
        begun = time.monotonic()
        assert await call(good, "echo", text="b") == "echo b"
        assert time.monotonic() - begun < 0.9
        with pytest.raises(ToolError, match=words):
            await bad
        assert await call(good, "echo", text="c") == "echo c"


async def test_news_without_end_hold_up_no_other_server() -> None:
    async with started(raw("news"), timeout_s=1.0) as tools, started() as good:
        flooded = asyncio.create_task(call(tools))
        await asyncio.sleep(0.3)
        for _ in range(5):
            begun = time.monotonic()
            assert await call(good, "echo", text="b") == "echo b"
            assert time.monotonic() - begun < 0.9
        with pytest.raises(ToolError):
            await flooded


@pytest.mark.parametrize(
    ("way", "text"),
    [("nothing", ""), ("image", "[image image/png, 4 characters, left out]")],
)
async def test_what_is_no_text_is_named(way: str, text: str) -> None:
    async with started(raw(way)) as tools:
        assert await call(tools) == text


async def test_a_nested_result_is_text() -> None:
    async with started(raw("deep")) as tools:
        assert (await call(tools)).startswith('{"x": {"x": ')


async def test_a_result_with_control_codes_is_kept_as_it_is() -> None:
    async with started(raw("codes")) as tools:
        assert await call(tools) == "\x1b]0;t\x07\u202e", "it is escaped where it is shown"


async def test_a_banner_is_passed_over() -> None:
    async with started(raw("banner")) as tools:
        assert await call(tools) == "fine"


async def test_the_protocol_that_a_server_speaks_is_remembered() -> None:
    tools = McpTools(McpServer(name="s", command=raw("banner")))
    await tools.start()
    assert await call(tools) == "fine" and tools._protocol == "legacy"
    await tools.close()


async def test_a_list_that_changes_is_read_again() -> None:
    async with started() as tools:
        assert await call(tools, "grow") == "grown"
        await wait_for(lambda: "grown" in [one.name for one in tools.tools])
        assert await call(tools, "grown") == await call(tools, "process")


async def test_a_list_is_read_again_when_that_is_wanted() -> None:
    async with started(raw("grows")) as tools:
        assert [one.name for one in tools.tools] == ["t1"]
        await tools.refresh()
        assert [one.name for one in tools.tools] == ["t2"]
    await tools.refresh()
    assert not tools.tools, "it has ended"


async def test_pages_without_end_have_one() -> None:
    async with started(raw("pages")) as tools:
        assert len(tools.tools) == server_tools.MAX_PAGES


async def test_a_schema_too_deep_leaves_out_its_tool() -> None:
    async with started(raw("bad schema")) as tools:
        box = Toolbox([tools])
        assert not box.offered and list(box.left_out) == ["s_call"]


@pytest.mark.parametrize(
    ("way", "words"),
    [
        ("exits at start", r"it ended with code 3; it said: no licence\\x1b\[31m found"),
        ("hangs at start", "it did not start within 1 s"),
        ("garbage at start", "20 lines that are no messages"),
    ],
)
async def test_a_server_that_does_not_start_says_why(
    way: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_tools, "START_S", 1.0)
    async with started(raw(way)) as tools:
        assert re.search(words, tools.state), tools.state
        assert not tools.tools


async def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> object:
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(server_tools.importlib, "import_module", missing)
    async with started() as tools:
        assert tools.state == "it needs the package mcp: pip install 'termgen[mcp]'"


async def test_a_program_that_is_missing_is_named() -> None:
    async with started(("no-such-program", "x")) as tools:
        assert tools.state == "there is no program 'no-such-program'"


async def test_a_variable_that_is_missing_is_named() -> None:
    async with started(X="${NO_SUCH_VARIABLE}") as tools:
        assert tools.state == "the variable NO_SUCH_VARIABLE is not set"


async def test_a_server_that_will_not_end_is_killed_with_what_it_left() -> None:
    async with started() as tools:
        child = int(await call(tools, "fork"))
        pid = int(await call(tools, "process"))
        assert is_alive(child) and is_alive(pid)
    assert not is_alive(pid)
    await wait_for(lambda: not is_alive(child))
    async with started(raw("stays")) as tools:
        assert await call(tools) == "fine"
        begun = time.monotonic()
    assert time.monotonic() - begun < 5


async def test_cancelled_starts_leave_nothing() -> None:
    server = McpServer(name="s", command=raw("hangs at start"), protocol="legacy")
    tools = McpTools(server)
    starting = asyncio.create_task(tools.start())
    await asyncio.sleep(0.3)
    starting.cancel()
    await asyncio.wait([starting])
    begun = time.monotonic()
    await tools.close()
    assert time.monotonic() - begun < 4 and tools.state == "ended"


CLIENT = """
import asyncio, sys
from termgen.tools.server_config import McpServer
from termgen.tools.server_tools import McpTools

async def main():
    server = McpServer(name="s", command=tuple(sys.argv[1:]), protocol="legacy")
    tools = McpTools(server)
    await tools.start()
    (one,) = [each for each in tools.tools if each.name == "process"]
    print(await one.call({}), flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


def test_no_orphan_stays_after_a_client_that_was_killed() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", CLIENT, *GOOD], stdout=subprocess.PIPE, text=True
    ) as client:
        assert client.stdout is not None
        pid = int(client.stdout.readline())
        assert is_alive(pid)
        os.kill(client.pid, signal.SIGKILL)
        client.wait()
    end = time.monotonic() + 5
    while is_alive(pid):
        assert time.monotonic() < end, "an orphan"
        time.sleep(0.02)


async def test_standard_error_does_not_reach_the_screen(capfd: pytest.CaptureFixture[str]) -> None:
    async with started() as tools:
        with pytest.raises(ToolError):
            await call(tools, "crash", code=1)
    assert capfd.readouterr() == ("", "")


async def test_a_folder_and_texts_that_are_literal(tmp_path: Path) -> None:
    server = McpServer(
        name="s",
        command=GOOD,
        env={"WORD": "${NOT_SET_ANYWHERE}"},
        protocol="legacy",
        is_literal=True,
        folder=tmp_path,
    )
    tools = McpTools(server)
    try:
        await tools.start()
        assert await call(tools, "place", name="WORD") == f"{tmp_path} ${{NOT_SET_ANYWHERE}}"
    finally:
        await tools.close()
