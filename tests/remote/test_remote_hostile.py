"""Harmful data from a server: endless numbers, control characters, half characters."""

from __future__ import annotations

import json
from typing import Any

import pytest

from termgen.commands import cli
from termgen.commands.remote_command import RemoteTarget
from termgen.errors import ConfigError, EngineError
from termgen.remote.client import RemoteClient
from termgen.remote.failures import failure_of, frame_failure
from termgen.remote.models import RemoteModel
from termgen.remote.stream import AnswerReader

EVIL = "a\x1b]0;title\x07b\x9bc\u202e"


def reader() -> AnswerReader:
    return AnswerReader("r", 1, True, 0)


@pytest.mark.parametrize(
    "event",
    [
        '{"usage": {"completion_tokens": 1e999}}',
        '{"termgen": {"timings": [{"index": 0, "queue_s": 1e999, "ttft_s": 0, "e2e_s": 0}]}}',
        '{"timings": {"prompt_ms": 1e999}}',
        '{"choices": [{"delta": {"content": "x"}, "logprobs": {"content": '
        '[{"token": "x", "logprob": 0, "bytes": 10000000000000}]}}]}',
    ],
)
def test_an_event_with_numbers_beyond_all_is_an_error(event: str) -> None:
    with pytest.raises(EngineError, match="no event of a chat"):
        reader().feed(f"data: {event}\n\n".encode())


def test_half_a_pair_of_code_units_is_replaced() -> None:
    event: dict[str, Any] = {"choices": [{"delta": {"content": "a\ud83db"}}]}
    (delta,) = reader().feed(f"data: {json.dumps(event)}\n\n".encode())
    assert delta.text == "a?b"


def test_what_a_server_says_is_fit_for_a_terminal() -> None:
    raw = json.dumps({"error": {"message": EVIL}}).encode()
    for error in (
        failure_of("http://x", "/v1/models", 500, raw, {}, sent_key=False),
        failure_of("http://x", "/v1/models", 302, b"", {"location": EVIL}, sent_key=False),
        frame_failure({"message": EVIL}),
    ):
        assert str(error).isprintable() and "]0;title" in str(error)


async def test_names_of_models_are_printed_without_harm(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    models = [RemoteModel(EVIL, "", 0)]
    client = RemoteClient("http://x", models, api_key=None, admin_key=None)
    with pytest.raises(ConfigError) as caught:
        client.use_model("other")
    await client.aclose()

    def fail(_argv: object) -> int:
        raise caught.value

    monkeypatch.setattr(cli, "_run", fail)
    assert cli.main([]) == 2
    line = capsys.readouterr().err.rstrip("\n")
    assert "]0;title" in line and line.isprintable()


def test_a_key_is_not_in_what_is_printed_of_a_target() -> None:
    assert "sk-secret" not in repr(RemoteTarget("http://x", "sk-secret"))
