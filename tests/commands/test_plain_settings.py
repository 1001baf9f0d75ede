"""`termgen chat --plain`: parameters, forms, other models and tools in lines."""

from __future__ import annotations

import io
import json
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cli_harness import nobodys_settings
from fake_engine import FakeEngine, Script, make_model_info
from fake_script import GenerateCall
from server_harness import serving
from test_generate_remote import in_thread
from test_plain_chat import DumbTerminal, chat
from tool_samples import KNOWS_TOOLS, ListedTools, hermes, make_tool
from tui_harness import pieces

from termgen.commands.cli import main
from termgen.errors import ModelNotFoundError
from termgen.tools.toolbox import Toolbox
from termgen.vocabulary.model_shelf import ModelChoice, Switch


@pytest.fixture(autouse=True)
def clean_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with nobodys_settings(monkeypatch, tmp_path):
        yield


def engine_of(*texts: str) -> FakeEngine:
    left = list(texts)

    def script(_: GenerateCall) -> Script:
        return Script(pieces=pieces(left.pop(0)))

    return FakeEngine(script=script, model=make_model_info(tool_format=KNOWS_TOOLS))


class Shelf:
    """Two models; `slow` has to be fetched, `broken` does not start."""

    def __init__(self, engines: dict[str, FakeEngine]) -> None:
        self._engines = engines
        self.fetched: list[str] = []

    async def choices(self) -> list[ModelChoice]:
        return [await self.look_up(name) for name in self._engines]

    async def look_up(self, name: str) -> ModelChoice:
        if name not in self._engines:
            raise ModelNotFoundError(f"there is no model {name}")
        is_first = name == next(iter(self._engines))
        return ModelChoice(
            name, size_bytes=3 << 30, is_here=name != "slow", is_current=is_first, is_best=is_first
        )

    async def fetch(self, name: str, report: Any) -> None:
        self.fetched.append(name)

    async def switch(self, name: str, report: Any) -> Switch:
        if name == "broken":
            return Switch(next(iter(self._engines.values())), "out of memory")
        return Switch(self._engines[name], name=name)


def test_parameters_are_shown_set_and_sent(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = FakeEngine()
    typed = (
        "one\n/sampling temperature 0.25\n/sampling stop a,b\n/sampling top_p 7\n/sampling heat 1\n"
        "two\n/sampling temperature\nthree\n/sampling off\nfour\n/sampling\n"
    )
    shown = chat(engine, typed, monkeypatch, capsys)
    sent = [(call.params.temperature, call.params.stop) for call in engine.calls]
    usual = sent[0][0]
    assert sent == [(usual, ()), (0.25, ("a", "b")), (usual, ("a", "b")), (usual, ())]
    assert "temperature: 0.25, set\nstop: a,b, set\n" in shown
    assert "Not set: top_p must be" in shown and "Not set: there is no heat: temperature," in shown
    assert f"temperature: {usual:g}\ntop_p: " in shown and "seed: none" in shown


def test_answers_follow_a_form(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = engine_of("yes", "maybe", "{}", "free")
    typed = (
        "/choice yes|no\none\ntwo\n/schema {]\n"
        '/schema {"type": "object"}\nthree\n/schema off\nfour\n/regex\n'
    )
    shown = chat(engine, typed, monkeypatch, capsys)
    forms = [call.params.structured_outputs for call in engine.calls]
    assert [form and form.choice for form in forms] == [("yes", "no"), ("yes", "no"), None, None]
    assert forms[2] is not None and forms[2].kind == "json" and forms[3] is None
    assert "Answers now follow it: one of 2. /choice off ends that." in shown
    assert "yes\none of 2: complete.\n" in shown and "maybe\none of 2: not complete.\n" in shown
    assert "{}\nJSON schema: complete.\n" in shown and shown.count("Not set: ") >= 1
    assert shown.endswith("Answers may look like anything.\n")


def test_another_model_answers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first, slow = FakeEngine(), FakeEngine(model=make_model_info(model_id="slow-1b"))
    shelf = Shelf({"here": first, "slow": slow, "broken": first})
    typed = "/sampling seed 7\none\n/model\n/model gone\n/model broken\ntwo\n/model slow\nthree\n"
    shown = chat(first, typed, monkeypatch, capsys, shelf=shelf)
    assert "here, answers now, best for this machine, 3.0 GiB\nslow, 3.0 GiB, to be" in shown
    assert "The model is not changed: there is no model gone" in shown
    assert "broken did not start: out of memory" in shown and "slow-1b answers now." in shown
    assert len(first.calls) == 2 and shelf.fetched == ["slow"]
    (asked,) = slow.calls
    prompt: Any = asked.prompt
    assert [m["content"] for m in prompt.messages if m["role"] == "user"] == ["one", "two", "three"]
    assert asked.params.seed == 7, "what the user set stays"


def test_a_server_gets_what_is_set_and_has_its_own_for_the_rest(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = FakeEngine()
    with in_thread(lambda: serving(engine)) as url:
        typed = (
            "one\n/sampling top_k 5\ntwo\n/sampling\n/sampling off\nthree\n/model\n/model gone\n"
        )
        monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
        assert main(["chat", "--plain", "--url", url]) == 0
    shown = capsys.readouterr().out
    own = engine.calls[0].params.top_k
    assert [call.params.top_k for call in engine.calls] == [own, 5, own] and own != 5
    assert "temperature: the server's own" in shown and "top_k: 5, set" in shown
    assert f"{engine.model.model_id}, answers now" in shown
    assert "The model is not changed: the server has no 'gone'" in shown


def test_calls_of_piped_chats_are_not_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    called: list[dict[str, Any]] = []

    async def record(arguments: dict[str, Any]) -> str:
        called.append(arguments)
        return "x"

    engine = engine_of(hermes("own_echo", '{"text": "\\u001b[31mhi"}'), "As you like.")
    toolbox = Toolbox([ListedTools("own", [make_tool(call=record)])])
    typed = "call\n/mcp\n/mcp restart own\n/mcp restart none\n"
    shown = chat(engine, typed, monkeypatch, capsys, toolbox=toolbox)
    assert not called and "1 tool; /mcp lists them." in shown
    assert "own_echo is not run: calls are approved on a terminal only." in shown
    assert "own_echo was not run.\nAs you like.\n" in shown
    assert shown.count("own: ready\n  own_echo\n") == 2 and "restarts one: own\n" in shown
    prompt: Any = engine.calls[-1].prompt
    assert prompt.messages[-1]["content"] == "The user denied this call."


def test_calls_are_approved_by_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("needle\n")
    read = hermes("files_read", '{"path": "a.txt"}')
    engine = engine_of(read, "First.", read, "Second.", read, read, "Third.", read, "Never.")
    with in_thread(lambda: serving(engine)) as url:
        terminal = DumbTerminal("chat", "--plain", "--url", url, "--tools", "files")
        terminal.wait_for(rb"3 tools; /mcp lists them\.\r\nYou: $")
        terminal.type("one\n")
        terminal.wait_for(rb'The model calls files_read: {"path": "a.txt"}\r\nRun it\? .*: $')
        terminal.type("perhaps\n")
        terminal.wait_for(rb"Run it\? [^\n]*: perhaps\r\nRun it\? [^\n]*: $")
        terminal.type("y\n")
        terminal.wait_for(
            rb"files_read runs\.\r\nfiles_read is done: .*, \d+ characters\.\r\nAnswer:\r\nFirst\."
        )
        terminal.wait_for(rb"You: $")
        terminal.type("two\n")
        terminal.wait_for(rb"Run it\? [^\n]*: $")
        terminal.type("n\n")
        terminal.wait_for(rb"files_read was not run\.\r\nAnswer:\r\nSecond\.\r\nYou: $")
        terminal.type("three\n")
        terminal.wait_for(rb"Run it\? [^\n]*: $")
        terminal.type("a\n")
        terminal.wait_for(rb"Third\.\r\nYou: $")
        assert terminal.shown.count(b"Run it?") == 4, "the second call of the third was not asked"
        terminal.type("\x04")
        assert terminal.end() == 0
    denied: Any = engine.calls[3].prompt
    assert denied.messages[-1]["content"] == "The user denied this call."
    assert engine.calls[1].prompt.messages[-1]["content"].strip().endswith("needle")  # type: ignore[union-attr]


def test_ctrl_c_ends_a_call_and_the_chat_goes_on(tmp_path: Path) -> None:
    engine = engine_of(hermes("files_list", "{}"), "After that.")
    with in_thread(lambda: serving(engine)) as url:
        terminal = DumbTerminal("chat", "--plain", "--url", url, "--tools", "files")
        terminal.wait_for(rb"You: $")
        terminal.type("one\n")
        terminal.wait_for(rb"Run it\? [^\n]*: $")
        terminal.child.send_signal(signal.SIGINT)
        terminal.wait_for(rb"Stopped\.\r\nYou: $")
        terminal.type("two\n")
        terminal.wait_for(rb"After that\.\r\nYou: $")
        terminal.type("\x04")
        assert terminal.end() == 0
    assert len(engine.calls) == 2


def test_a_line_typed_before_a_call_approves_nothing(tmp_path: Path) -> None:
    engine = FakeEngine(
        script=lambda call: Script(
            pieces=pieces("Yes: " + call.prompt.messages[-1]["content"])  # type: ignore[union-attr]
            if call.prompt.messages[-1]["content"] != "one"  # type: ignore[union-attr]
            else pieces(hermes("files_list", "{}")),
            first_delay_s=1.0,
        ),
        model=make_model_info(tool_format=KNOWS_TOOLS),
    )
    with in_thread(lambda: serving(engine)) as url:
        terminal = DumbTerminal("chat", "--plain", "--url", url, "--tools", "files")
        terminal.wait_for(rb"You: $")
        terminal.type("one\n")
        terminal.type("y\n")
        terminal.wait_for(rb"Run it\? [^\n]*: $")
        assert b"files_list runs" not in terminal.shown
        terminal.type("n\n")
        terminal.wait_for(rb"denied this call\.\r\nYou: y\r\nAnswer:\r\nYes: y\r\nYou: $")
        terminal.type("\x04")
        assert terminal.end() == 0


def test_servers_of_tools_serve_a_chat_in_lines(tmp_path: Path) -> None:
    pytest.importorskip("mcp")
    from test_tools_terminal import SERVER, is_alive

    config = tmp_path / "config.toml"
    command = json.dumps([sys.executable, str(SERVER)])
    config.write_text(f'[mcp.own]\ncommand = {command}\nprotocol = "legacy"\n')
    engine = engine_of(
        hermes("own_process", "{}"), "One.", hermes("own_echo", '{"text": "x"}'), "Two."
    )
    with in_thread(lambda: serving(engine)) as url:
        terminal = DumbTerminal("chat", "--plain", "--url", url, "--config", str(config))
        terminal.wait_for(rb"\d+ tools; /mcp lists them\.\r\nYou: $")
        terminal.type("one\n")
        terminal.wait_for(rb"The model calls own_process: {}\r\nRun it\? [^\n]*: $")
        terminal.type("y\n")
        terminal.wait_for(rb"own_process is done: [^\n]*\r\nAnswer:\r\nOne\.\r\nYou: $")
        time.sleep(1.0)  # nothing reads what the server writes meanwhile
        terminal.type("two\n")
        terminal.wait_for(rb"own_echo: [^\n]*\r\nRun it\? [^\n]*: $")
        terminal.type("y\n")
        terminal.wait_for(rb"own_echo is done: [^\n]*\r\nAnswer:\r\nTwo\.\r\nYou: $")
        terminal.type("\x04")
        assert terminal.end() == 0
    results: list[Any] = [call.prompt for call in engine.calls]
    assert results[-1].messages[-1]["content"] == "echo x"
    assert not is_alive(int(results[1].messages[-1]["content"]))
