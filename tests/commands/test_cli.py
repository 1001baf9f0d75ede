"""The command line: output, errors, exit codes."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_harness import (
    ENGINE,
    nobodys_settings,
    one_line_error,
    process,
    run,
)

import termgen
from termgen.commands import cli
from termgen.config import EngineConfig
from termgen.library import catalog
from termgen.tools.toolbox import Toolbox

HEAVY = {"torch", "transformers", "tokenizers", "textual", "starlette", "uvicorn", "numpy", "tqdm"}


@pytest.fixture(autouse=True)
def clean_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    with nobodys_settings(monkeypatch, tmp_path):
        yield


def test_alone_prints_help(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys)
    assert (code, err) == (0, "")
    for command in ("chat", "serve", "generate", "bench", "models", "pull"):
        assert f"    {command} " in out
    code, out, _ = run(capsys, "bench")
    assert code == 0 and "latency" in out and "throughput" in out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"termgen {termgen.__version__}\n"


@pytest.mark.parametrize("argv", [["--help"], ["serve", "--help"], ["generate", "--help"]])
def test_help_imports_nothing_heavy(argv: list[str]) -> None:
    script = (
        "import sys\nfrom termgen.commands.cli import main\n"
        f"try: main({argv!r})\nexcept SystemExit: pass\n"
        f"print('LOADED', sorted({HEAVY!r} & sys.modules.keys()))"
    )
    shown = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr
    assert "usage: termgen" in shown.stdout
    assert shown.stdout.strip().endswith("LOADED []")


def test_flags_that_vllm_has_too(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["serve", "--help"])
    out = capsys.readouterr().out
    for flag in (
        "--model --dtype --max-model-len --max-num-seqs --max-num-batched-tokens "
        "--gpu-memory-utilization --block-size --enforce-eager --no-async-scheduling "
        "--no-enable-prefix-caching --scheduling-policy --seed --host --port --api-key "
        "--served-model-name --device --kv-cache-gib --threads --quantization --load-format"
    ).split():
        assert re.search(rf"{flag}[ ,\n]", out), flag


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["chatt"], "invalid choice: 'chatt'"),
        (["--nope"], "unknown argument --nope"),
        (["serve", "--prt", "1"], "did you mean --port?"),
        (["serve", "--port", "99999"], "port must be between 0 and 65535, not 99999 (from --port)"),
        (["serve", "--port", "x"], "argument --port: invalid int value: 'x'"),
        (["serve", "--theme", "nord"], "--theme needs --dashboard"),
        (["serve", "--config", "/does/not/exist.toml"], "/does/not/exist.toml does not exist"),
        (["serve", "--model", "/does/not/exist"], "no such file or folder: /does/not/exist"),
        (["serve", "--model", "smollm3"], "did you mean smollm"),
        (["generate", "hi", "--model", "/does/not/exist"], "no such file or folder"),
        (["generate", "hi", "--temperature", "9"], "temperature must be in [0, 2], not 9"),
        (["generate", "hi", "--logprobs", "2"], "--logprobs needs --json"),
        (["generate", "hi", "--prompt-logprobs", "2"], "--prompt-logprobs needs --json"),
        (["generate", "hi", "--logit-bias", "5"], "--logit-bias: must be ID=BIAS, not '5'"),
        (["generate", "hi", "--logit-bias=-5=1"], "logit_bias must be between 0 and"),
        (["generate", "hi", "--raw", "--system", "x"], "--raw and --system exclude each other"),
        (["generate", "hi", "--messages", "f"], "give a prompt or --messages, not both"),
        (["generate", "--messages", "/none.json"], "--messages /none.json: No such file"),
        (["generate", "--prompt-token-ids", "1,x"], "must be integers, not '1,x'"),
        (["generate", " "], "the prompt is empty"),
        (["generate", "hi", "--json-schema", "/none.json"], "--json-schema /none.json: No such"),
        (["generate", "hi", "--regex", "a", "--choice", "b"], "not allowed with argument"),
        (["generate", "hi", "--regex", ""], "--regex"),
        (["pull", "nothing-like-it"], "unknown model 'nothing-like-it'"),
        (["pull"], "required: name"),
        (["bench", "latency", "--batch-size", "0"], "batch_size must be between"),
        (
            ["bench", "throughput", "--dataset-name", "job256", "--input-len", "4"],
            "(from --input-len)",
        ),
        (["bench", "latency", "--output-json", "/none/x.json"], "/none/x.json cannot be written"),
    ],
)
def test_mistakes_are_one_line(
    capsys: pytest.CaptureFixture[str], argv: list[str], words: str
) -> None:
    assert words in one_line_error(capsys, *argv)


def test_variables_and_file_reach_the_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TERMGEN_BLOCK_SIZE", "3")
    assert "not 3 (from TERMGEN_BLOCK_SIZE)" in one_line_error(capsys, "generate", "hi")
    monkeypatch.delenv("TERMGEN_BLOCK_SIZE")
    path = tmp_path / "mine.toml"
    path.write_text("[engine]\nmodel = '/from/the/file'\n")
    error = one_line_error(capsys, "generate", "hi", "--config", str(path))
    assert "/from/the/file" in error


@pytest.mark.parametrize(
    ("argv", "in_background"),
    [
        (["chat"], True),
        (["chat", "--no-capture-in-background"], False),
        (["serve"], False),
        (["serve", "--capture-in-background"], True),
    ],
)
def test_only_a_chat_records_graphs_in_the_background_unasked(
    argv: list[str], in_background: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    configs: list[EngineConfig] = []

    def start(config: EngineConfig, *rest: object, **which_chat: object) -> int:
        configs.append(config)
        return 0

    monkeypatch.setattr("termgen.commands.chat.run_chat", start)
    monkeypatch.setattr("termgen.commands.launch.run_serve", start)
    monkeypatch.setattr("termgen.commands.cli._need_terminal", lambda *words: None)
    assert cli.main(argv) == 0
    assert configs[0].capture_in_background is in_background


@pytest.mark.parametrize(
    ("argv", "session", "given"),
    [
        ([], None, {}),
        (["--continue"], "", {}),
        (["--session", "Whales"], "Whales", {}),
        (
            ["--continue", "--temperature", "0.5", "--theme", "termgen-light"],
            "",
            {"temperature": 0.5},
        ),
    ],
)
def test_chat_goes_on_with_the_chat_that_is_named(
    argv: list[str], session: str | None, given: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[dict[str, object]] = []
    monkeypatch.setattr(
        "termgen.commands.chat.run_chat",
        lambda config, ui, _toolbox, **which: calls.append(which) or 0,
    )
    monkeypatch.setattr("termgen.commands.cli._need_terminal", lambda *words: None)
    assert cli.main(["chat", *argv]) == 0
    assert calls == [{"session": session, "given": given}]


@pytest.mark.parametrize("url", [[], ["--url", "http://127.0.0.1:1"]])
def test_chat_gets_the_tools_that_are_set(
    url: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    boxes: list[Toolbox] = []
    monkeypatch.setattr("termgen.commands.cli._need_terminal", lambda *words: None)
    for name in ("chat.run_chat", "remote_command.run_remote_chat"):
        monkeypatch.setattr(
            f"termgen.commands.{name}", lambda _config, _ui, box, **_: boxes.append(box) or 0
        )
    config = tmp_path / "config.toml"
    config.write_text('[chat]\ntools = ["files"]\n[mcp.own]\ncommand = "own"\n')
    assert cli.main(["chat", *url]) == 0
    assert cli.main(["chat", *url, "--tools", "files"]) == 0
    assert cli.main(["chat", *url, "--config", str(config)]) == 0
    names = [[provider.name for provider in box.providers] for box in boxes]
    assert names == [[], ["files"], ["files", "own"]]


def test_one_question_has_no_tools(capsys: pytest.CaptureFixture[str]) -> None:
    error = one_line_error(capsys, "chat", "--inline", "why?", "--tools", "files")
    assert "--tools has no effect with --inline" in error
    assert "shell" in one_line_error(capsys, "chat", "--tools", "shell")


def test_chat_goes_on_with_one_chat_only(capsys: pytest.CaptureFixture[str]) -> None:
    error = one_line_error(capsys, "chat", "--continue", "--session", "x")
    assert "--session" in error and "--continue" in error
    error = one_line_error(capsys, "chat", "--inline", "--continue", "why?")
    assert "keeps no chat" in error
    error = one_line_error(capsys, "chat", "--inline", "--chat-db", "off", "why?")
    assert "--chat-db has no effect" in error
    error = one_line_error(capsys, "chat", "--inline", "--context-policy", "drop", "why?")
    assert "--context-policy has no effect with --inline" in error
    assert "summarise" in one_line_error(capsys, "chat", "--context-policy", "most")


def test_chat_without_a_terminal_points_to_generate(capsys: pytest.CaptureFixture[str]) -> None:
    assert "`termgen chat` needs a terminal; use `termgen generate`" in one_line_error(
        capsys, "chat"
    )
    assert "needs a terminal" in one_line_error(capsys, "serve", "--dashboard")


def test_interrupt_and_broken_pipe(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(args: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setitem(cli.COMMANDS, "models", interrupted)
    code, out, err = run(capsys, "models")
    assert (code, out, err.strip()) == (130, "", "")
    with process("models") as child:
        assert child.stdout is not None
        child.stdout.close()
        assert child.wait(timeout=60) == 141
        assert child.stderr is not None and child.stderr.read() == ""


def test_streams_that_are_closed_are_empty() -> None:
    """Daemons may start jobs this way."""
    program = f"{shlex.quote(sys.executable)} -m termgen"
    for command, code, said in (
        ("models >&-", 0, ""),
        ("models <&-", 0, "smollm2-135m"),
        ("chat --inline <&-", 2, "no question"),
        ("generate <&-", 2, "termgen: error:"),
        ("chat <&-", 2, "`termgen chat` needs a terminal"),
        ("nonsense 2>&-", 2, ""),
    ):
        shown = subprocess.run(
            f"{program} {command}", shell=True, capture_output=True, text=True, timeout=60
        )
        assert shown.returncode == code, (command, shown.stderr)
        assert said in shown.stdout + shown.stderr and "Traceback" not in shown.stderr, command


def test_an_interrupt_while_modules_are_read_leaves_no_traceback() -> None:
    script = """
import sys
class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == "termgen.commands.cli":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupt())
from termgen.__main__ import entry
entry()
"""
    shown = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (shown.returncode, shown.stdout, shown.stderr) == (130, "", "")


def test_output_that_cannot_be_written() -> None:
    with open("/dev/full", "w") as full:
        shown = subprocess.run(
            [sys.executable, "-m", "termgen", "models"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert shown.returncode == 2
    assert shown.stderr == (
        "termgen: error: the output cannot be written: No space left on device\n"
    )


def test_models_lists_the_catalog(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "models")
    assert code == 0 and f"{catalog.DEFAULT_MODEL} (default)" in out
    code, out, _ = run(capsys, "models", "--json")
    listed = json.loads(out)
    known = [entry for entry in listed if entry["store"] is None]
    assert [entry["name"] for entry in known] == list(catalog.CATALOG)
    assert {"path", "size_bytes", "license", "hub_id"} <= listed[0].keys()


def test_models_of_other_programs_are_listed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("TERMGEN_CACHE", str(tmp_path / "termgen"))
    folder = tmp_path / ".lmstudio" / "models" / "org" / "tiny-GGUF"
    folder.mkdir(parents=True)
    for name in ("tiny-Q8_0.gguf", "big-00001-of-00002.gguf", "big-00002-of-00002.gguf"):
        (folder / name).write_bytes(b"GGUF".ljust(2_000_000))
    code, out, _ = run(capsys, "models", "lmstudio")
    rows = [line.split() for line in out.splitlines() if line]
    assert code == 0 and rows[0][0] == "ALSO" and "2 on this machine, 6 MB" in out
    assert rows[1][:4] == ["lmstudio:org/tiny-GGUF/tiny-Q8_0", "Q8_0", "2", "MB"]
    assert rows[2][0] == "lmstudio:org/tiny-GGUF/big" and "it is in 2 parts: join them" in out
    code, out, _ = run(capsys, "models", "--json", "tiny-gguf", "q8")
    (found,) = json.loads(out)
    assert (found["store"], found["size_bytes"], found["problem"]) == ("LM Studio", 2_000_000, None)


def test_a_fetched_model_is_deleted(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERMGEN_CACHE", str(tmp_path))
    file = tmp_path / "models" / "own.gguf"
    file.parent.mkdir()
    file.write_bytes(b"GGUF".ljust(2_000_000))
    assert "with one name" in one_line_error(capsys, "models", "rm")
    assert "with one name" in one_line_error(capsys, "models", "rm", "a", "b")
    assert "no such file" in one_line_error(capsys, "models", "rm", str(tmp_path / "x.gguf"))
    code, out, _ = run(capsys, "models", "rm", str(file))
    assert (code, out) == (0, f"{file}: deleted, 2 MB freed\n") and not file.exists()
    other = tmp_path / "other.gguf"
    other.write_bytes(b"GGUF")
    assert "was not fetched by termgen" in one_line_error(capsys, "models", "rm", str(other))
    assert other.exists()


def test_models_are_found_by_words(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "models", "Qwen3-", "q4_k")
    rows = [line.split() for line in out.splitlines()[1:] if line and "termgen pull" not in line]
    assert code == 0 and [row[0] for row in rows] == ["qwen3-4b-q4", "qwen3-8b-q4"]
    assert all(row[1] == "Q4_K_M" for row in rows)
    code, out, _ = run(capsys, "models", "--json", "gemma", "270m")
    (found,) = json.loads(out)
    assert code == 0 and (found["name"], found["quantization"]) == (
        "gemma-3-270m-base-q4",
        "Q4_K_M",
    )
    assert "no known model has 'none such'" in one_line_error(capsys, "models", "none", "such")
    code, out, _ = run(capsys, "models", "--json", "none")
    assert (code, json.loads(out)) == (0, [])


def test_pull_of_what_is_there_prints_its_path(
    capsys: pytest.CaptureFixture[str], tiny_llama_dir: Path
) -> None:
    code, out, err = run(capsys, "pull", str(tiny_llama_dir))
    assert (code, err) == (0, "") and str(tiny_llama_dir) in out


def test_text_the_locale_cannot_show_is_replaced() -> None:
    script = (
        "from termgen.commands import cli\ncli.main = lambda: print('\\u00e9\\u6f22')\ncli.entry()"
    )
    shown = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        env=os.environ | {"PYTHONIOENCODING": "latin-1"},
    )
    assert (shown.stdout, shown.stderr) == ("\u00e9?\n".encode("latin-1"), b"")


def test_bench_writes_its_figures(
    capsys: pytest.CaptureFixture[str], tiny_llama_dir: Path, tmp_path: Path
) -> None:
    path = tmp_path / "out.json"
    shape = ["--input-len", "5", "--output-len", "4", "--output-json", str(path)]
    engine = ["--model", str(tiny_llama_dir), "--load-format", "dummy", *ENGINE]
    code, out, err = run(capsys, "bench", "throughput", "--num-prompts", "3", *shape, *engine)
    assert code == 0, err
    figures = json.loads(path.read_text())
    assert figures["num_requests"] == 3 and figures["total_num_tokens"] == 27
    assert figures["engine_config"]["enable_prefix_caching"] is False
    assert "output tokens/s" in out
    assert "termgen: memory: weights " in err and "KV cache (" in err
    assert "termgen: ready in " in err and "weights " in err
    iterations = ["--batch-size", "2", "--num-iters", "2", "--num-iters-warmup", "1"]
    code, out, err = run(capsys, "bench", "latency", *iterations, *shape, *engine)
    assert code == 0, err
    figures = json.loads(path.read_text())
    assert len(figures["latencies"]) == 2 and set(figures["percentiles"]) >= {"10", "50", "99"}
    assert figures["model"]["architecture"] and "average latency" in out
