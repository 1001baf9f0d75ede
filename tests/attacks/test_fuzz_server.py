"""The fuzzer of `benchmarks/fuzz_server.py`: a short run, and its detection of each kind of
fault."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import fuzz_bodies
import fuzz_server
from fuzz_bodies import Body
from fuzz_server import NO_FIELD, Answer, fault_of

CHAT, MESSAGES, OLLAMA = "/v1/chat/completions", "/v1/messages", "/api/chat"
NO_OBJECT = "refusal without an error object"


def test_a_live_server_stands_some_hundred_of_them(smollm2_gguf: Path, tmp_path: Path) -> None:
    """smollm2_gguf: source of the tokenizer. The fuzzer lowers its own priority, so it has a
    process of its own."""
    options = ["--requests", "400", "--seed", "7", "--alone", "1", "--output", str(tmp_path)]
    options += ["--most-slower", "1000", "--per-second", "0"]
    told = subprocess.run(
        [sys.executable, fuzz_server.__file__, *options], capture_output=True, text=True
    )
    faults = tmp_path / "faults.jsonl"
    assert told.returncode == 0, (
        faults.read_text() if faults.exists() else (told.stdout + told.stderr)[-3000:]
    )
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["sent"] == 400 == sum(report["answers"].values())
    assert report["good_client"]["gaps"] >= 10  # an answer may be whole after the fuzzer's end only


def test_a_seed_is_one_body_and_all_kinds_come() -> None:
    bodies = [fuzz_bodies.body(f"3/{index}") for index in range(600)]
    assert bodies == [fuzz_bodies.body(f"3/{index}") for index in range(600)]
    assert Counter(one.kind for one in bodies).keys() == fuzz_bodies.MAKERS.keys()
    sent = b"".join(one.content for one in bodies)
    for part in (b"9223372036854775808", b"1e309", b"NaN", b"ud800", b"u0000", b'"a":1,"a":2'):
        assert part in sent, part
    assert any(b"r2999: r3000" in one.content for one in bodies)


def error(**fields: Any) -> bytes:
    return json.dumps({"error": {"message": "m", "param": None, "code": "c", **fields}}).encode()


@pytest.mark.parametrize(
    ("path", "content", "answer", "fault"),
    [
        (CHAT, b"{}", Answer(200, b"{}"), None),
        (CHAT, b"{}", Answer(429, b""), None),
        (CHAT, b"{}", Answer(500, error(param="n")), "answer 500"),
        (CHAT, b"{}", Answer(503, b""), "answer 503"),
        (CHAT, b"{}", Answer(400, b"<html>"), "refusal without an error object"),
        (CHAT, b'{"n":0}', Answer(400, error()), NO_FIELD),
        (CHAT, b'{"n":0}', Answer(400, error(param="n")), None),
        (CHAT, b'{"n":0}', Answer(400, error(code="invalid_json")), None),
        (CHAT, b'{"n":', Answer(400, error()), None),
        (MESSAGES, b'{"top_k":0}', Answer(400, error(message="bad")), NO_FIELD),
        (MESSAGES, b'{"top_k":0}', Answer(400, error(message="top_k: too small")), None),
        (OLLAMA, b"[]", Answer(400, b'{"error":"m"}'), None),
        (OLLAMA, b"{}", Answer(400, b'{"error":"model is required"}'), None),
        (OLLAMA, b"{}", Answer(400, b'{"error":{"message":"m"}}'), NO_OBJECT),
        (OLLAMA, b'{"think":0}', Answer(400, b'{"error":"bad"}'), NO_FIELD),
        (OLLAMA, b'{"think":0}', Answer(400, b'{"error":"think must be"}'), None),
        (OLLAMA, b'{"think":1e999}', Answer(400, b'{"error":"The request body is no"}'), None),
        (MESSAGES, b'{"top_k":1e999}', Answer(400, error(message="no (invalid_json)")), None),
    ],
)
def test_what_counts_as_a_fault(
    path: str, content: bytes, answer: Answer, fault: str | None
) -> None:
    assert fault_of(Body("fields", path, content), answer) == fault
