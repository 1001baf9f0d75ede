"""`termgen generate` on a tiny model: output, refusals, interruption."""

from __future__ import annotations

import gc
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from cli_harness import (
    ENGINE,
    nobodys_settings,
    one_line_error,
    process,
    run,
)

from termgen.commands import generate
from termgen.errors import RequestError
from termgen.vocabulary.sampling_params import SamplingParams


@pytest.fixture(autouse=True)
def clean_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    with nobodys_settings(monkeypatch, tmp_path):
        yield


def test_every_sampling_field_has_a_flag() -> None:
    described = set(generate.SAMPLING_HELP) | set(generate.OMITTED)
    assert described == {f.name for f in fields(SamplingParams)}


def test_no_garbage_is_looked_for_while_an_engine_starts() -> None:
    assert gc.isenabled()
    before = gc.get_freeze_count()
    try:
        with generate.collections_put_off():
            assert not gc.isenabled()
        assert gc.isenabled() and gc.get_freeze_count() > before
        with pytest.raises(RequestError), generate.collections_put_off():
            raise RequestError("a start that fails")
        assert gc.isenabled()
    finally:
        gc.unfreeze()


@pytest.mark.parametrize("name", [n for n in generate.SAMPLING_HELP if "logprobs" not in n])
def test_the_help_of_a_number_tells_the_range_that_is_checked(name: str) -> None:
    text = generate.SAMPLING_HELP[name]
    kind = next(str(f.type) for f in fields(SamplingParams) if f.name == name)
    if not kind.startswith(("float", "int")):
        assert not re.search(r"\d to \d", text)
        return
    number = r"-?\d+"
    found = re.search(rf"(above )?({number}) to ({number})|({number}) or more|default: 0\)", text)
    assert found is not None, text
    above, low, high, least = found.groups()
    bounds = {"low": int(low or least or 0), "high": int(high) if high else None}
    SamplingParams(**{name: bounds["low"] + (0.01 if above else 0)})
    with pytest.raises(RequestError):
        SamplingParams(**{name: bounds["low"] - (0 if above else 2)})  # -1 is vLLM's top_k of all
    if bounds["high"] is not None:
        SamplingParams(**{name: bounds["high"]})
        with pytest.raises(RequestError):
            SamplingParams(**{name: bounds["high"] + 1})


def test_a_prompt_that_is_not_text() -> None:
    for argv, given in ((["generate"], b"\xff\xfe\x00"), ([b"generate", b"\xff\xfe"], b"")):
        shown = subprocess.run(
            [sys.executable, "-m", "termgen", *argv],
            input=given,
            capture_output=True,
            env=os.environ | {"PYTHONUTF8": "1", "LC_ALL": "C.UTF-8"},
        )
        assert shown.returncode == 2
        assert shown.stderr.endswith(b"is not UTF-8 text\n") and shown.stderr.count(b"\n") == 1


# -- generate, over a tiny random model ----------------------------------------------------


def answer(capsys: pytest.CaptureFixture[str], folder: Path, *argv: str) -> dict[str, Any]:
    code, out, err = run(capsys, "generate", "--model", str(folder), "--json", *ENGINE, *argv)
    assert code == 0, err
    found: dict[str, Any] = json.loads(out)
    assert out.count("\n") == 1, "one object, one line"
    return found


def test_generate_json_has_every_field(
    capsys: pytest.CaptureFixture[str], tiny_llama_dir: Path
) -> None:
    flags = ["--temperature", "0", "--max-tokens", "6", "--ignore-eos", "--logprobs", "2"]
    found = answer(capsys, tiny_llama_dir, "Hello, how are you", *flags)
    assert len(found["token_ids"]) == 6 and found["finish_reason"] == "length"
    assert found["usage"] == {
        "prompt_tokens": len(found["prompt_token_ids"]),
        "completion_tokens": 6,
        "total_tokens": len(found["prompt_token_ids"]) + 6,
        "cached_tokens": 0,
    }
    assert [entry["token_id"] for entry in found["logprobs"]] == found["token_ids"]
    for entry in found["logprobs"]:
        assert entry["logprob"] <= 0 and len(entry["top_logprobs"]) == 2
        assert entry["top_logprobs"][0]["logprob"] == entry["logprob"], "greedy takes the likeliest"
    timings = found["timings"]
    assert timings["e2e_s"] >= timings["ttft_s"] > 0
    rate = 5 / (timings["e2e_s"] - timings["ttft_s"])
    assert timings["decode_tokens_per_second"] == pytest.approx(rate)
    again = answer(capsys, tiny_llama_dir, "Hello, how are you", *flags)
    assert again["text"] == found["text"] and again["token_ids"] == found["token_ids"]


def test_generate_takes_what_changes_single_logits(
    capsys: pytest.CaptureFixture[str], tiny_llama_dir: Path
) -> None:
    flags = ["--temperature", "0", "--max-tokens", "4", "--ignore-eos", "Hello"]
    only = ["--allowed-token-ids", "40", "--allowed-token-ids", "41", "--prompt-logprobs", "1"]
    found = answer(capsys, tiny_llama_dir, *flags, *only)
    assert set(found["token_ids"]) <= {40, 41}
    of_prompt = found["prompt_logprobs"]
    assert of_prompt[0] is None
    assert [e["token_id"] for e in of_prompt[1:]] == found["prompt_token_ids"][1:]
    biased = answer(capsys, tiny_llama_dir, *flags, "--logit-bias", "77=100")
    assert biased["token_ids"] == [77] * 4 and biased["prompt_logprobs"] is None
    plain = answer(capsys, tiny_llama_dir, *flags)["text"]
    assert answer(capsys, tiny_llama_dir, *flags, "--bad-words", plain[:2])["text"] != plain


def test_generate_prints_the_text_alone(
    capsys: pytest.CaptureFixture[str], tiny_llama_dir: Path
) -> None:
    flags = ["--temperature", "0", "--max-tokens", "6", "--ignore-eos", "Hello"]
    expected = answer(capsys, tiny_llama_dir, *flags)["text"]
    code, out, _ = run(capsys, "generate", "--model", str(tiny_llama_dir), *ENGINE, *flags)
    assert (code, out) == (0, expected + "\n")


def test_generate_renders_messages_as_it_renders_a_prompt(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tiny_llama_dir: Path,
    tmp_path: Path,
) -> None:
    flags = ["--temperature", "0", "--max-tokens", "3"]
    plain = answer(capsys, tiny_llama_dir, *flags, "Hello", "--system", "Be brief.")
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello"},
    ]
    path = tmp_path / "messages.json"
    path.write_text(json.dumps(messages))
    from_file = answer(capsys, tiny_llama_dir, *flags, "--messages", str(path))
    ids = plain["prompt_token_ids"]
    assert from_file["prompt_token_ids"] == ids
    by_ids = answer(capsys, tiny_llama_dir, *flags, "--prompt-token-ids", ",".join(map(str, ids)))
    assert by_ids["prompt_token_ids"] == ids and by_ids["token_ids"] == plain["token_ids"]
    raw = answer(capsys, tiny_llama_dir, *flags, "--raw", "Hello")
    assert len(raw["prompt_token_ids"]) < len(ids)
    with (tmp_path / "piped").open("w+") as file:
        file.write("Hello")
        file.seek(0)
        monkeypatch.setattr("sys.stdin", file)
        piped = answer(capsys, tiny_llama_dir, *flags, "--raw")
    assert piped["prompt_token_ids"] == raw["prompt_token_ids"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "not valid JSON"),
        ("[]", "expected a list of messages"),
        ('{"a": 1}', "expected a list of messages"),
        ('[{"content": "x"}]', "message 0 has no role"),
        ('[{"role": "user", "content": "x"}, {"role": "user"}]', "message 1 has no content"),
    ],
)
def test_a_bad_messages_file_is_refused_before_loading(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, content: str, words: str
) -> None:
    path = tmp_path / "messages.json"
    path.write_text(content)
    assert words in one_line_error(capsys, "generate", "--messages", str(path))


def test_generate_refuses_what_the_context_cannot_hold(
    capsys: pytest.CaptureFixture[str], tiny_llama_dir: Path
) -> None:
    ids = ",".join(["5"] * 300)
    argv = ("generate", "--model", str(tiny_llama_dir), *ENGINE, "--prompt-token-ids", ids)
    code, out, err = run(capsys, *argv)
    assert (code, out) == (2, "")
    assert "maximum context length is 256 tokens" in err.splitlines()[-1]


def test_generate_without_a_length_takes_what_the_context_leaves(
    capsys: pytest.CaptureFixture[str], tiny_llama_dir: Path
) -> None:
    found = answer(capsys, tiny_llama_dir, "--raw", "Hello", "--ignore-eos")
    assert found["usage"]["total_tokens"] == 256, "the default of 512 is no demand"
    assert found["finish_reason"] == "length"
    argv = ("--model", str(tiny_llama_dir), *ENGINE, "--raw", "Hello", "--max-tokens", "512")
    code, out, err = run(capsys, "generate", *argv)
    assert (code, out) == (2, "") and "512 in the completion" in err


def test_generate_stops_at_a_stop_string(
    capsys: pytest.CaptureFixture[str], tiny_llama_dir: Path
) -> None:
    flags = ["--temperature", "0", "--max-tokens", "12", "--ignore-eos", "Hello"]
    text = answer(capsys, tiny_llama_dir, *flags)["text"]
    stop = text[4:6]
    found = answer(capsys, tiny_llama_dir, *flags, "--stop", stop)
    assert found["text"] == text[: text.index(stop)]
    assert (found["finish_reason"], found["stop_reason"]) == ("stop", stop)


def test_ctrl_c_ends_the_answer_and_prints_what_there_is(tiny_model_dir: Any) -> None:
    folder = tiny_model_dir("llama", max_position_embeddings=8192)
    flags = ["--max-tokens", "8000", "--ignore-eos", "--temperature", "0", "--raw", "Hello"]
    engine = ["--device", "cpu", "--dtype", "float32", "--threads", "1"]
    with process("generate", "--model", str(folder), *engine, *flags) as child:
        assert child.stdout is not None and child.stderr is not None
        first = child.stdout.read(8)
        child.send_signal(signal.SIGINT)
        rest = child.stdout.read()
        assert child.wait(timeout=60) == 130, child.stderr.read()
        assert len(first) == 8 and rest.endswith("\n")
        assert "Traceback" not in child.stderr.read()


def test_sigterm_ends_cleanly(tiny_model_dir: Any) -> None:
    folder = tiny_model_dir("llama", max_position_embeddings=8192)
    flags = ["--max-tokens", "8000", "--ignore-eos", "--temperature", "0", "--raw", "Hello"]
    with process("generate", "--model", str(folder), "--device", "cpu", *flags) as child:
        assert child.stdout is not None and child.stderr is not None
        child.stdout.read(4)
        child.terminate()
        started = time.monotonic()
        assert child.wait(timeout=60) == 143
        assert "Traceback" not in child.stderr.read(), f"after {time.monotonic() - started:.1f} s"


def test_generate_gives_the_form_that_is_asked_for(
    capsys: pytest.CaptureFixture[str], tiny_llama_dir: Path, tmp_path: Path
) -> None:
    flags = ["--temperature", "1", "--max-tokens", "60", "Hello"]
    chosen = answer(capsys, tiny_llama_dir, *flags, "--choice", "yes", "--choice", "no")
    assert chosen["text"] in ("yes", "no") and chosen["finish_reason"] == "stop"
    assert re.fullmatch(
        "[ab]{3}", answer(capsys, tiny_llama_dir, *flags, "--regex", "[ab]{3}")["text"]
    )
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "integer", "minimum": 10, "maximum": 99}')
    number = answer(capsys, tiny_llama_dir, *flags, "--json-schema", str(schema))["text"]
    assert 10 <= json.loads(number) <= 99
