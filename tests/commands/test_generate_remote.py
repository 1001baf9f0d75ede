"""`termgen generate --url`: the same command with a remote server."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from io import BytesIO, TextIOWrapper
from pathlib import Path
from typing import Any

import pytest
from cli_harness import nobodys_settings, one_line_error, process, run
from fake_engine import FakeEngine, Script, make_model_info
from foreign_server import chunk, done, foreign_server
from server_harness import ANSWER, serving

from termgen.commands.settings import flag_of
from termgen.config import EngineConfig


@pytest.fixture(autouse=True)
def clean_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with nobodys_settings(monkeypatch, tmp_path):
        yield


@contextmanager
def in_thread(make: Callable[[], AbstractAsyncContextManager[Any]]) -> Iterator[str]:
    """A server on a loop of its own, while the command blocks this thread. Yields its URL."""
    loop, ready, ended = asyncio.new_event_loop(), threading.Event(), asyncio.Event()
    urls: list[str] = []

    async def serve() -> None:
        async with make() as server:
            urls.append(server if isinstance(server, str) else server.url)
            ready.set()
            await ended.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    try:
        assert ready.wait(10)
        yield urls[0]
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join(10)
        loop.close()


def test_text_comes_as_from_an_own_engine(capsys: pytest.CaptureFixture[str]) -> None:
    engine = FakeEngine()
    with in_thread(lambda: serving(engine)) as url:
        code, out, err = run(capsys, "generate", "--url", url, "Hi", "--seed", "7", "--top-k", "3")
        assert (code, out, err) == (0, ANSWER + "\n", "")
        call = engine.calls[-1]
        assert call.params.seed == 7 and call.params.top_k == 3 and call.params.max_tokens == 512
        assert [dict(m) for m in call.prompt.messages] == [{"role": "user", "content": "Hi"}]
        code, out, _ = run(capsys, "generate", "--url", url, "--raw", "Hi", "--max-tokens", "4")
        assert code == 0 and engine.calls[-1].prompt == "Hi"
        assert engine.calls[-1].params.max_tokens == 4
        run(capsys, "generate", "--url", url, "--prompt-token-ids", "5,6")
        assert tuple(engine.calls[-1].prompt) == (5, 6)


def test_json_has_the_same_fields(capsys: pytest.CaptureFixture[str]) -> None:
    with in_thread(lambda: serving(FakeEngine())) as url:
        code, out, err = run(
            capsys, "generate", "--url", url, "Hi", "--json", "--logprobs", "2", "--system", "Be"
        )
    assert (code, err) == (0, "") and out.count("\n") == 1
    found = json.loads(out)
    assert found["text"] == ANSWER and found["finish_reason"] == "stop"
    assert found["model"] and found["token_ids"]
    usage = found["usage"]
    assert usage["completion_tokens"] == len(found["token_ids"]) > 0
    assert usage["prompt_tokens"] > 0
    assert len(found["logprobs"]) == len(found["token_ids"])
    assert found["timings"]["e2e_s"] >= 0


def test_a_key_is_sent_and_a_wrong_one_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    with in_thread(lambda: serving(FakeEngine(), api_key=("k",))) as url:
        assert "give --api-key" in one_line_error(capsys, "generate", "--url", url, "Hi")
        wrong = one_line_error(capsys, "generate", "--url", url, "--api-key", "x", "Hi")
        assert "refuses the API key" in wrong
        code, out, _ = run(capsys, "generate", "--url", url, "--api-key", "k", "Hi")
        assert code == 0 and out == ANSWER + "\n"


@pytest.mark.parametrize(
    "name", [f for f in EngineConfig.__dataclass_fields__ if f not in ("model", "seed")]
)
def test_every_flag_of_an_engine_is_refused_by_name(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    field = EngineConfig.__dataclass_fields__[name]
    default = field.default
    flag = flag_of(field)
    if isinstance(default, bool) or "bool" in str(field.type):
        argv = [flag]
    elif field.metadata.get("choices"):
        argv = [flag, field.metadata["choices"][0]]
    else:
        values = {"gpu_memory_utilization": "1", "speculative_config": "ngram"}
        argv = [flag, values.get(name, "2")]
    error = one_line_error(capsys, "generate", "--url", "http://127.0.0.1:9", *argv, "Hi")
    assert flag in error and "has no effect with --url" in error


def test_what_cannot_be_asked_of_a_server_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for flag in ("--api-key", "--wait"):
        assert f"{flag} needs --url" in one_line_error(capsys, "generate", flag, "1", "Hi")
    assert "no server at http://127.0.0.1:9" in one_line_error(
        capsys, "generate", "--url", "http://127.0.0.1:9", "--wait", "0", "Hi"
    )
    with in_thread(lambda: serving(FakeEngine())) as url:
        given = ("--json", "--prompt-logprobs", "1")
        error = one_line_error(capsys, "generate", "--url", url, *given, "Hi")
        assert "prompt_logprobs cannot be streamed" in error
        error = one_line_error(capsys, "generate", "--url", url, "--model", "other", "Hi")
        assert "has no 'other', only" in error


def test_another_server_is_told_what_is_openais_and_nothing_else(
    capsys: pytest.CaptureFixture[str],
) -> None:
    @asynccontextmanager
    async def foreign() -> AsyncGenerator[str, None]:
        async with foreign_server(chunk("Good "), chunk("day", finish="stop"), done()) as server:
            yield server.url

    with in_thread(foreign) as url:
        code, out, err = run(capsys, "generate", "--url", url, "Hi", "--temperature", "0")
        assert code == 0, err
        assert out == "Good day\n"
        error = one_line_error(capsys, "generate", "--url", url, "Hi", "--top-k", "3")
        assert "top_k is not part of OpenAI's API" in error


def test_ctrl_c_keeps_what_has_come() -> None:
    import signal

    engine = FakeEngine(script=Script(pieces=["x"] * 10_000, delay_s=0.005))
    with in_thread(lambda: serving(engine)) as url:
        with process("generate", "--url", url, "--max-tokens", "4000", "Hi") as child:
            assert child.stdout is not None and child.stderr is not None
            first = child.stdout.read(8)
            child.send_signal(signal.SIGINT)
            rest = child.stdout.read()
            assert child.wait(timeout=60) == 130, child.stderr.read()
            assert first == "x" * 8 and rest.endswith("\n")
            assert child.stderr.read() == ""


@asynccontextmanager
async def loading_until_asked(engine: FakeEngine) -> AsyncGenerator[str, None]:
    """The model is ready once a client has seen two answers that it is loading."""
    async with serving(None) as server:
        server.on_loading("loading weights", 0.5)

        async def attach() -> None:
            while server._uvicorn.server_state.total_requests < 2:
                await asyncio.sleep(0.02)
            server.attach(engine)

        attaching = asyncio.create_task(attach())
        yield server.url
        await attaching


def test_a_loading_server_is_waited_for_in_plain_lines() -> None:
    with in_thread(lambda: loading_until_asked(FakeEngine())) as url:
        with process("generate", "--url", url, "Hi") as child:
            out, err = child.communicate(timeout=60)
    assert (child.returncode, out) == (0, ANSWER + "\n")
    assert err == "termgen: the server: loading weights\n"


COMMANDS: dict[str, tuple[str, ...]] = {
    "generate": ("generate", "Hi"),
    "inline": ("chat", "--inline", "Hi"),
    "plain": ("chat", "--plain"),
}


@pytest.mark.parametrize("argv", COMMANDS.values(), ids=COMMANDS)
def test_the_servers_defaults_apply_to_what_was_not_set(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, argv: tuple[str, ...]
) -> None:
    own = {"temperature": 0.2, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.1}
    engine = FakeEngine(model=make_model_info(default_params=own))
    piped = "Hi\n" if "--plain" in argv else ""
    with in_thread(lambda: serving(engine)) as url:
        for flags, changed in (
            ((), {}),
            (("--temperature", "0.5"), {"temperature": 0.5}),
            (("--top-p", "1"), {"top_p": 1.0}),
        ):
            monkeypatch.setattr("sys.stdin", TextIOWrapper(BytesIO(piped.encode())))
            code, _, err = run(capsys, *argv, "--url", url, *flags)
            assert (code, err) == (0, "")
            params = engine.calls[-1].params
            assert {name: getattr(params, name) for name in own} == own | changed
