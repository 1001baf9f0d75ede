"""`termgen bench serve` as a command: it starts its own server, writes its files, reports
errors."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from argparse import Namespace
from functools import partial
from pathlib import Path

import pytest

from termgen.commands.bench_run import engine_flags
from termgen.commands.cli import main

LOAD = ["--num-prompts", "3", "--random-input-len", "8", "--random-output-len", "4"]


def bench(*argv: str) -> int:
    return main(["bench", *argv])


def test_it_starts_a_server_measures_it_and_writes_files(
    capsys: pytest.CaptureFixture[str], tiny_llama_dir: Path, tmp_path: Path
) -> None:
    path = tmp_path / "a.json"
    engine = ["--model", str(tiny_llama_dir), "--device", "cpu", "--max-num-seqs", "4"]
    page = tmp_path / "a.html"
    files = ["--output-json", str(path), "--output-html", str(page)]
    code = bench("serve", *engine, *LOAD, *files, "--seed", "5")
    out, err = capsys.readouterr()
    assert code == 0, err
    read = json.loads(path.read_text())
    assert read["completed"] == 3 and read["total_output_tokens"] == 12
    assert read["server_counts"]["generation_tokens"] == 12
    assert read["engine_flags"][0] == f"--model={tiny_llama_dir}" and read["seed"] == 5
    assert read["server_owner"] == "termgen" and "3, 0" in out
    assert "termgen: memory: weights " in err and str(path) in err
    assert "<svg" in page.read_text()
    lines = out.splitlines()  # the result is on the first lines, the settings on the last
    assert lines[0] == "termgen bench serve" and lines[2].startswith("requests/s ")
    places = [
        out.index(part)
        for part in ("output tokens/s", "time to first token", "how it was", "seed 5")
    ]
    assert places == sorted(places)


def test_a_sweep_over_a_server_that_is_there(
    capsys: pytest.CaptureFixture[str], smollm2_url: str, tmp_path: Path
) -> None:
    lengths = ["--random-input-len", "6", "--random-output-len", "2", "--num-prompts", "2"]
    files = ["--save-result", "--label", "a/b", "--result-dir", str(tmp_path)]
    page = tmp_path / "s.html"
    limits = ["--goodput", "ttft:60000", "--sweep-to", "2", "--output-html", str(page)]
    code = bench("sweep", "--base-url", smollm2_url, "--seed", "2", *lengths, *files, *limits)
    out, err = capsys.readouterr()
    assert code == 0, err
    (path,) = tmp_path.glob("sweep-a-b-*.json")
    read = json.loads(path.read_text())
    assert [level["load"] for level in read["levels"]] == [1, 2] and read["knee"] == 2
    assert read["levels"][1]["completed"] == 8 and read["engine_flags"] is None
    assert "raise --sweep-to" in out and "<svg" in page.read_text()


def test_the_engines_flags_are_passed_on() -> None:
    given = Namespace(max_num_seqs=3, enforce_eager=True, async_scheduling=False, model="m")
    given.config = "c.toml"
    assert engine_flags(given) == [
        *("--model=m", "--max-num-seqs=3", "--no-async-scheduling", "--enforce-eager"),
        "--config=c.toml",
    ]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["serve", "--base-url", "http://127.0.0.1:9", "--max-num-seqs", "3"], "leave it out, or"),
        (["serve", "--model", "/none/such"], "/none/such"),
        (["serve", "--goodput", "x:1"], "(from --goodput)"),
        (["serve", "--seed", "-1"], "seed must be at least 0 in a bench, not -1"),
        (["latency", "--seed", "-1"], "seed must be at least 0 in a bench, not -1"),
        (
            ["serve", "--base-url", "http://127.0.0.1:9", "--result-filename", "/none/x.json"],
            "result_filename: /none/x.json cannot be written",
        ),
        (
            ["serve", "--base-url", "http://127.0.0.1:9", "--output-json", "/none/x.json"],
            "output_json: /none/x.json cannot be written",
        ),
        (["serve", "--output-json", "a", "--result-filename", "b"], "exclude each other"),
        (["sweep", "--output-json", "a", "--result-dir", "b"], "exclude each other"),
        (
            ["serve", "--base-url", "http://127.0.0.1:9", "--ready-check-timeout-sec", "0"],
            "does not answer",
        ),
    ],
)
def test_what_is_wrong_is_one_line(
    capsys: pytest.CaptureFixture[str], argv: list[str], words: str
) -> None:
    assert bench(*argv) == 2
    err = capsys.readouterr().err
    assert words in err and err.count("\n") == 1, err


def test_a_server_that_cannot_start_is_shown(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["Nothing"]}')
    assert bench("serve", "--model", str(tmp_path), "--device", "cpu", *LOAD) == 2
    err = capsys.readouterr().err
    assert "the server of the bench ended with code 2: " in err and "Traceback" not in err


def test_ctrl_c_leaves_nothing_behind(tiny_llama_dir: Path) -> None:
    argv = ["--model", str(tiny_llama_dir), "--device", "cpu", "--request-rate", "0.1", *LOAD]
    child = subprocess.Popen(
        [sys.executable, "-m", "termgen", "bench", "serve", *argv],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # A shell's jobs in the background ignore the signal, and so do their children.
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )
    assert child.stderr is not None
    for line in child.stderr:
        if "ready in" in line:
            break
    time.sleep(1.0)  # into the run, or its warm-up: it must end cleanly anywhere
    os.killpg(child.pid, signal.SIGINT)
    _, err = child.communicate(timeout=60)
    assert child.returncode == 130 and "Traceback" not in err, err
    with pytest.raises(ProcessLookupError):
        os.killpg(child.pid, 0)
