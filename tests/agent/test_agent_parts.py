"""The parts of `termgen acp` by themselves: lines, questions, updates, servers, the engine."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

acp = pytest.importorskip("acp")

from acp.schema import McpServerStdio, TextContentBlock  # noqa: E402
from fake_engine import FakeEngine  # noqa: E402

from termgen.agent.engine_source import EngineSource  # noqa: E402
from termgen.agent.outbox import Outbox  # noqa: E402
from termgen.agent.questions import question_of, servers_of  # noqa: E402
from termgen.agent.stdio import BadLine, as_line, read_message, with_clear_error  # noqa: E402
from termgen.agent.updates import MAX_TITLE_CHARS, ShownCalls  # noqa: E402
from termgen.errors import EngineError, ModelError  # noqa: E402
from termgen.tools.calls import CallState, ToolCall  # noqa: E402
from termgen.tui.chat.state.conversation import Turn  # noqa: E402
from termgen.tui.chat.state.tool_rounds import ToolRound  # noqa: E402
from termgen.vocabulary.model_shelf import ModelChoice, Switch  # noqa: E402

FOLDER = Path("/home/ann/cats")


@pytest.mark.parametrize("value", [1, "a", None])
def test_messages_and_ids_that_the_package_can_take(value: object) -> None:
    line = json.dumps({"jsonrpc": "2.0", "id": value, "method": "m"}).encode()
    assert read_message(line) == json.loads(line)


@pytest.mark.parametrize("value", [True, 1.5, [1], {"a": 1}])
def test_ids_that_would_end_its_loop(value: object) -> None:
    found = read_message(json.dumps({"id": value, "result": 1}).encode())
    assert isinstance(found, BadLine) and found.words.startswith("id must be")


def test_a_line_is_json_whatever_a_model_wrote() -> None:
    raw = {"params": {"x": [float("nan"), float("inf"), 1.5]}, "text": "\ud800"}
    line = as_line({"id": 1, **raw})

    def refuse(word: str) -> None:
        raise AssertionError(word)

    found = json.loads(line, parse_constant=refuse)
    assert found["params"]["x"] == ["nan", "inf", 1.5] and line.endswith(b"\n")
    assert json.loads(as_line({"id": 1, "x": 1.5}))["x"] == 1.5


def test_an_error_of_parameters_names_the_field() -> None:
    errors = [{"loc": ("prompt", 0, "text"), "msg": "Field required", "input": {"a": object()}}]
    answer = {"id": 1, "error": {"code": -32602, "message": "Invalid", "data": {"errors": errors}}}
    found = with_clear_error(answer)["error"]
    assert found == {"code": -32602, "message": "prompt[0].text: Field required"}
    assert with_clear_error({"id": 1, "result": 1}) == {"id": 1, "result": 1}


def turn_with(call: ToolCall) -> Turn:
    return Turn("q", rounds=[ToolRound("", calls=[call])])


def test_a_call_is_shown_once_and_then_as_it_changes() -> None:
    call = ToolCall("files_read", '{"path": "a/b.py"}')
    shown, turn = ShownCalls(FOLDER), turn_with(call)
    (start,) = shown.news(turn)
    assert (start.title, start.status) == ('files_read {"path": "a/b.py"}', "pending")
    assert start.kind == "read" and start.locations[0].path == "/home/ann/cats/a/b.py"
    assert list(shown.news(turn)) == []
    call.state = CallState.ASKED  # is pending still
    assert list(shown.news(turn)) == []
    call.state = CallState.RUNNING
    assert [update.status for update in shown.news(turn)] == ["in_progress"]
    call.end(CallState.DONE, "x = 1\x1b")
    (done,) = shown.news(turn)
    assert (done.status, done.content[0].content.text) == ("completed", "x = 1\\x1b")


@pytest.mark.parametrize(
    "arguments",
    ["not JSON", '{"x": NaN}', '{"x": "\\ud800"}', '{"path": "\\u0000"}', '{"path": 7}', "[]", ""],
)
def test_arguments_of_any_kind_can_be_shown(arguments: str) -> None:
    call = ToolCall("files_read", arguments + "\n" + " " * 300 + "end")
    shown = ShownCalls(FOLDER)
    (start,) = shown.news(turn_with(call))
    asked = shown.question(call)
    for update in (start, asked):
        as_line({"id": 1, "params": update.model_dump(mode="json", by_alias=True)})
    assert len(start.title) < MAX_TITLE_CHARS + 20 and "\n" not in start.title


def text(words: str) -> TextContentBlock:
    return TextContentBlock(type="text", text=words)


def test_files_below_the_folder_have_short_names(tmp_path: Path) -> None:
    for name in ("in.py", "sub/in.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    blocks = [text("Look at ")]
    links = [(tmp_path / "in.py").as_uri(), str(tmp_path / "sub" / "in.py"), tmp_path.as_uri()]
    blocks += [acp.resource_link_block("n", uri) for uri in links]
    question, files = question_of(blocks, tmp_path)
    assert question == f"Look at @in.py@sub/in.pyn ({tmp_path.as_uri()})"
    assert [(file.name, file.text) for file in files] == [("in.py",) * 2, ("sub/in.py",) * 2]
    _, (file,) = question_of(blocks[:2], tmp_path / "sub")
    assert file.name == str(tmp_path / "in.py")


def test_too_many_files_are_refused(tmp_path: Path) -> None:
    blocks = [
        acp.resource_block(acp.embedded_text_resource(f"file:///{number}", "x"))
        for number in range(21)
    ]
    with pytest.raises(acp.RequestError, match="prompt: 21 files"):
        question_of(blocks, tmp_path)


def test_servers_get_names_of_their_own() -> None:
    def server(name: str) -> McpServerStdio:
        return McpServerStdio(name=name, command="x", args=["y"], env=[])

    names = ["a b", "a!b", "files", "", "é" * 50, "x" * 50, "x" * 60]
    found = servers_of([server(name) for name in names], FOLDER)
    assert [one.name for one in found] == [
        *("a_b", "a_b_2", "files_2", "server", "server_2", "x" * 32, "x" * 30 + "_2")
    ]
    assert {one.command for one in found} == {("x", "y")}
    assert all(one.is_literal and one.folder == FOLDER for one in found)


async def test_pieces_that_wait_for_the_client_become_one() -> None:
    sent: list[Any] = []
    may_send = asyncio.Event()

    async def send(update: Any) -> None:
        await may_send.wait()
        sent.append(update)

    outbox = Outbox(send)
    for piece in ("a", "b", "", "c\ud800"):
        outbox.say(piece)
        await asyncio.sleep(0)
    outbox.think("t")
    outbox.say("d")
    may_send.set()
    await outbox.flush()
    assert [update.content.text for update in sent] == ["a", "bc\\ud800", "t", "d"]
    await outbox.flush()  # nothing waits


async def test_an_answer_waits_for_a_client_that_is_slow() -> None:
    may_send = asyncio.Event()

    async def send(update: Any) -> None:
        await may_send.wait()

    outbox = Outbox(send)
    outbox.say("x" * 200_000)
    waiting = asyncio.create_task(outbox.room())
    await asyncio.sleep(0.01)
    outbox.say("x" * 200_000)
    held = asyncio.create_task(outbox.room())
    await asyncio.sleep(0.01)
    assert not held.done()
    may_send.set()
    await asyncio.gather(waiting, held)


async def test_updates_for_a_client_that_has_gone_are_dropped() -> None:
    async def send(update: Any) -> None:
        raise ConnectionError

    outbox = Outbox(send)
    outbox.say("a")
    outbox.think("b")
    await outbox.flush()


class Shelf:
    """Models of which one does not start."""

    async def choices(self) -> list[ModelChoice]:
        return [ModelChoice("here"), ModelChoice("to fetch", is_here=False)]

    async def look_up(self, name: str) -> ModelChoice:
        return ModelChoice(name)

    async def fetch(self, name: str, report: Any) -> None:
        raise AssertionError("nothing is fetched")

    async def switch(self, name: str, report: Any) -> Switch:
        return Switch(FakeEngine(), "it is too large" if name == "large" else None)


async def test_an_engine_that_did_not_start_is_started_again() -> None:
    failures: list[Exception] = [ModelError("torn"), RuntimeError("a bug")]
    engine = FakeEngine()

    async def start(report: Any) -> FakeEngine:
        report("reading", 0.5)
        await asyncio.sleep(0)
        if failures:
            raise failures.pop(0)
        return engine

    async def stop() -> None:
        """Nothing is to be ended."""

    source = EngineSource(start, stop, Shelf())
    assert source.ready is None and not source.is_starting
    with pytest.raises(ModelError, match="torn"):
        await source.client()
    with pytest.raises(EngineError, match="did not start: RuntimeError: a bug"):
        await source.client()
    assert source.ready is None and source.phase == "reading"
    # one start for all who wait, which goes on though one of them does not
    first, second = [asyncio.create_task(source.client()) for _ in range(2)]
    await asyncio.sleep(0)
    assert source.is_starting
    first.cancel()
    assert await second is engine and source.ready is engine
    assert [choice.name for choice in await source.models()] == ["here"]
    with pytest.raises(EngineError, match="large did not start: it is too large; the former"):
        await source.switch("large")
    changed = await source.switch("small")
    assert changed is not engine and source.ready is changed
    await source.stop()
