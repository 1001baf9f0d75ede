"""Tabs of `termgen chat --web`: each is a program, which ends with it."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import aiohttp
import psutil
import pytest
from fake_engine import FakeEngine, Script
from server_harness import ANSWER
from web_harness import chat_page, tab, visitor

from termgen.web import web_server

ECHO = (
    sys.executable,
    "-c",
    """
import os, sys  # --url: a program that returns what it gets, as the driver of Textual does
os.write(1, b"__GANGLION__\\n")
while (kind := sys.stdin.buffer.read(1)):
    data = sys.stdin.buffer.read(int.from_bytes(sys.stdin.buffer.read(4), "big"))
    if b"quit" in data and kind == b"M":
        break
    os.write(1, b"D" + len(data).to_bytes(4, "big") + data)
""",
)


def programs() -> list[psutil.Process]:
    """Chats below this process."""
    found = psutil.Process().children(recursive=True)
    return [child for child in found if "--url" in " ".join(child.cmdline())]


async def none_runs() -> None:
    async with asyncio.timeout(20):
        while programs():
            await asyncio.sleep(0.02)


async def test_a_question_is_asked_and_an_answer_stopped(tmp_path: Path) -> None:
    endless = Script(pieces=tuple(f"word{i} " for i in range(100_000)), delay_s=0.01)
    scripts = iter((Script(pieces=(ANSWER,)), endless))
    engine = FakeEngine(script=lambda _: next(scripts))
    async with chat_page(tmp_path, engine) as page, visitor(page) as session:
        async with tab(session, page, width=100, height=30) as chat:
            await chat.read_until(lambda: "Ask anything" in chat.plain)
            await chat.socket.send_json(["resize", {"width": 110, "height": 32}])
            await chat.type("who is there?\r")
            await chat.read_until(lambda: ANSWER.split()[0] in chat.plain)
            await chat.read_until(lambda: "TTFT" in chat.plain)
            await chat.type("more\r")
            await chat.read_until(lambda: "word9" in chat.plain)
            await chat.type("\x1b")
            await chat.read_until(lambda: "stopped" in chat.plain)
            assert len(programs()) == page.num_visits == 1
            assert "secret" not in " ".join(programs()[0].cmdline())
        await none_runs()
    assert [call.prompt.messages[-1]["content"] for call in engine.calls] == [
        "who is there?",
        "more",
    ]


async def test_a_program_that_ends_closes_its_tab(tmp_path: Path) -> None:
    async with chat_page(tmp_path) as page, visitor(page) as session:
        async with tab(session, page) as chat:
            await chat.read_until(lambda: "Ask anything" in chat.plain)
            await chat.type("\x11")  # ctrl+q
            async with asyncio.timeout(20):
                while (await chat.socket.receive()).type is not aiohttp.WSMsgType.CLOSE:
                    pass
        await none_runs()


async def test_more_tabs_than_allowed_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web_server, "MAX_VISITS", 2)
    async with chat_page(tmp_path) as page, visitor(page) as session:
        page._argv = ECHO
        async with tab(session, page), tab(session, page):
            with pytest.raises(aiohttp.WSServerHandshakeError, match="503"):
                async with tab(session, page):
                    pass
        async with asyncio.timeout(20):
            while page.num_visits:
                await asyncio.sleep(0.02)
        async with tab(session, page) as chat:
            await chat.type("room")
            await chat.read_until(lambda: "room" in chat.plain)


@pytest.mark.parametrize(
    "message",
    ["[]", "{}", "7", "nonsense", '["stdin"]', '["stdin", 7]', '["resize", {}]', '["other", 1]'],
)
async def test_messages_without_sense_close_their_tab_only(tmp_path: Path, message: str) -> None:
    async with chat_page(tmp_path) as page, visitor(page) as session:
        page._argv = ECHO
        async with tab(session, page) as chat, tab(session, page) as other:
            await chat.socket.send_str(message)
            async with asyncio.timeout(20):
                while (await chat.socket.receive()).type is not aiohttp.WSMsgType.CLOSE:
                    pass
            await other.type("well")
            await other.read_until(lambda: "well" in other.plain)


async def test_sizes_are_cut_to_what_a_terminal_has(tmp_path: Path) -> None:
    async with chat_page(tmp_path) as page, visitor(page) as session:
        async with tab(session, page, width="1000000000", height="-3") as chat:
            (program,) = programs()
            assert (program.environ()["COLUMNS"], program.environ()["ROWS"]) == ("500", "5")
            wide = {"width": 10**9, "height": "x"}
            await chat.socket.send_json(["resize", wide])
            await chat.read_until(lambda: "Message" in chat.plain)


async def test_a_program_that_does_not_quit_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("termgen.web.visit.QUIT_S", 0.3)
    program = "import time; time.sleep(1000)  # --url"
    async with chat_page(tmp_path) as page, visitor(page) as session:
        page._argv = (sys.executable, "-c", program)
        async with tab(session, page):
            async with asyncio.timeout(20):
                while not programs():
                    await asyncio.sleep(0.02)
        await none_runs()


async def test_the_end_of_the_server_ends_all_tabs(tmp_path: Path) -> None:
    async with chat_page(tmp_path) as page, visitor(page) as session:
        page._argv = ECHO
        async with tab(session, page) as chat, tab(session, page):
            await chat.type("up")
            await chat.read_until(lambda: "up" in chat.plain)
            await page.aclose()
            assert not programs() and page.num_visits == 0
            async with asyncio.timeout(20):
                while not (await chat.socket.receive()).type.name.startswith("CLOS"):
                    pass


@pytest.mark.skipif(sys.platform != "linux", reason="needs PR_SET_PDEATHSIG")
async def test_no_program_outlives_a_server_that_is_killed(tmp_path: Path) -> None:
    script = (
        "import asyncio, sys; sys.path[:0] = sys.argv[2].split(':')\n"
        "from pathlib import Path; from web_harness import chat_page, tab, visitor\n"
        "async def main():\n"
        "    async with chat_page(Path(sys.argv[1])) as page, visitor(page) as session:\n"
        "        async with tab(session, page) as chat:\n"
        "            await chat.read_until(lambda: 'Ask anything' in chat.plain)\n"
        "            print('up', flush=True); await asyncio.sleep(1000)\n"
        "asyncio.run(main())\n"
    )
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", script, str(tmp_path), ":".join(sys.path)),
        stdout=asyncio.subprocess.PIPE,
    )
    assert child.stdout is not None
    async with asyncio.timeout(60):
        assert await child.stdout.readline() == b"up\n"
    (program,) = programs()
    os.kill(child.pid, signal.SIGKILL)
    await child.wait()
    gone, alive = await asyncio.to_thread(psutil.wait_procs, [program], 20)
    assert gone and not alive
