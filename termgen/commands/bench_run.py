"""The parts that `bench serve` and `bench sweep` share, with and without `--watch`.

Finds or starts the server to measure, waits until it answers, prints and writes the results. Engine
settings apply to a server that is started here; with an existing one only the model's name and the
seed (of the prompts) are used.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from termgen.bench import html_report, report, serve_report, sweep
from termgen.bench.options import ServeOptions, SweepOptions, check_seed
from termgen.bench.serve import ServeBench, ServeRun, document, file_name
from termgen.bench.server_api import ServerApi
from termgen.commands.settings import SettingLayers, flag_of
from termgen.config import EngineConfig
from termgen.errors import ConfigError, EngineError
from termgen.library.progress import TerminalProgress

API_KEY_VARIABLE = "OPENAI_API_KEY"
FOR_ANY_SERVER = ("model", "seed")
HOST = "127.0.0.1"
STOP_S = 15.0
SHOWN_LINES = 3
OTHERS_KEYS = ("TERMGEN_API_KEY", "TERMGEN_ADMIN_KEY", "TERMGEN_API_KEY_FILE")


@dataclass(frozen=True, slots=True)
class Subject:
    """The server to measure, as the command line names it."""

    url: str | None
    """None: start one."""
    engine_flags: tuple[str, ...]
    model: str | None
    seed: int


def find_subject(args: argparse.Namespace, layers: SettingLayers, options: ServeOptions) -> Subject:
    config = layers.resolve(EngineConfig)
    check_seed(config.seed)
    if options.url is not None:
        for f in fields(EngineConfig):
            if f.name not in FOR_ANY_SERVER and layers.given(f.name) is not None:
                raise ConfigError(
                    f"{flag_of(f)} is for a server that the bench starts; leave it out, or the URL",
                    param=f.name,
                )
        return Subject(options.url, (), layers.given("model"), config.seed)
    from termgen.library.catalog import ensure_model

    with TerminalProgress() as progress:  # report a bad model here, not in the server's log
        ensure_model(config.model, progress)
    return Subject(None, tuple(engine_flags(args)), None, config.seed)


def engine_flags(args: argparse.Namespace) -> list[str]:
    """The engine settings given as flags; the server reads environment variables itself."""
    given, flags = vars(args), []
    for f in fields(EngineConfig):
        if f.name not in given:
            continue
        value, flag = given[f.name], flag_of(f)
        if isinstance(value, bool):
            flags.append(flag if value else flag.replace("--", "--no-", 1))
        else:
            flags.append(f"{flag}={value}")
    if given.get("config") is not None:
        flags.append(f"--config={given['config']}")
    return flags


def check_files(options: ServeOptions) -> None:
    """Check before measuring that the results can be written. Raises `ConfigError`."""
    if options.output_json is not None:
        report.check_writable(options.output_json)
    elif options.result_filename is not None:
        path = str(Path(options.result_dir or "") / options.result_filename)
        report.check_writable(path, name="result_filename")
    elif options.saves or (options.watch and options.output_html is None):
        report.check_writable(str(Path(options.result_dir or "") / "x"), name="result_dir")
    report.check_writable(options.output_html, name="output_html")


@dataclass(frozen=True, slots=True)
class OwnServer:
    url: str
    api_key: str
    admin_key: str
    """Key for watching its engine."""
    process: subprocess.Popen[bytes]
    log: Path

    def check(self) -> None:
        """Raise `EngineError` with its last log lines if the server has ended."""
        code = self.process.poll()
        if code is not None:
            said = self.log.read_text(errors="replace").strip().splitlines()[-SHOWN_LINES:]
            raise EngineError(f"the server of the bench ended with code {code}: {' / '.join(said)}")

    def start_lines(self) -> list[str]:
        """The log lines on its memory and its start-up."""
        said = self.log.read_text(errors="replace").splitlines()
        return [line for line in said if " memory: " in line or " ready in " in line]


@contextmanager
def own_server(flags: Sequence[str]) -> Generator[OwnServer, None, None]:
    """Start `termgen serve` with `flags` on a free port, and end it on exit. It is still loading
    then: wait with `ServerApi.wait_ready`."""
    port, key, admin_key = _free_port(), secrets.token_urlsafe(16), secrets.token_urlsafe(16)
    address = ("--host", HOST, "--port", str(port), "--drain-timeout", "0", "--max-queue", "0")
    with tempfile.NamedTemporaryFile(prefix="termgen-bench-", suffix=".log") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "termgen", "serve", *address, *flags],
            env=_environment(os.environ, key, admin_key),
            stdout=subprocess.DEVNULL,
            stdin=subprocess.DEVNULL,
            stderr=log,
        )
        try:
            yield OwnServer(f"http://{HOST}:{port}", key, admin_key, process, Path(log.name))
        finally:
            process.terminate()
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _environment(environ: Mapping[str, str], key: str, admin_key: str) -> dict[str, str]:
    kept = {name: value for name, value in environ.items() if name not in OTHERS_KEYS}
    # not as flags, which other users of the machine can see
    return kept | {"TERMGEN_API_KEY": key, "TERMGEN_ADMIN_KEY": admin_key}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


@dataclass(frozen=True, slots=True)
class Connection:
    bench: ServeBench
    url: str
    admin_key: str | None
    """Admin key of a server that the bench started; None for an existing one."""


def _say_nothing(phase: str, share: float) -> None:
    """Progress callback that shows nothing."""


def say(line: str) -> None:
    print(f"termgen: {line}", file=sys.stderr)


@contextlib.asynccontextmanager
async def connected(
    subject: Subject,
    options: ServeOptions,
    say: Callable[[str], object] = say,
    report: Callable[[str, float], None] | None = None,
) -> AsyncGenerator[Connection, None]:
    """Connect to the server, and start one first if `subject` has no URL. `say` gets the lines of
    its start, `report` the loading phases; without `report` they go to standard error."""
    with contextlib.ExitStack() as stack:
        url, key, check = subject.url, os.environ.get(API_KEY_VARIABLE), None
        server: OwnServer | None = None
        if url is None:
            say("starting a server")
            server = stack.enter_context(own_server(subject.engine_flags))
            url, key, check = server.url, server.api_key, server.check
        async with ServerApi(url, api_key=key) as api:
            with TerminalProgress() as progress:
                # in a log, a server started here has its phases printed when it is ready
                is_shown = subject.url is not None or sys.stderr.isatty()
                bench = await ServeBench.connect(
                    api,
                    options,
                    asked_model=subject.model,
                    report=report or (progress.of_server if is_shown else _say_nothing),
                    check=check,
                )
            for line in server.start_lines() if server is not None else ():
                say(line.partition(" ")[2])
            yield Connection(bench, url, server.admin_key if server is not None else None)


def step_title(options: SweepOptions, step: ServeOptions) -> str:
    if options.sweep_over == "concurrency":
        return sweep.load_words(options, step.max_concurrency or 0)
    return f"{step.request_rate:g}/s"


def tell_serve(measured: ServeRun) -> None:
    print(serve_report.summary(measured))
    for warning in measured.warnings():
        say(f"warning: {warning}")


def tell_sweep(result: sweep.SweepResult) -> None:
    print(sweep.summary(result))
    for step in result.steps:
        for warning in step.run.warnings():
            say(f"warning: at {step.load:g}: {warning}")


def save_serve(measured: ServeRun, subject: Subject) -> list[str]:
    """Write the files that the options ask for; one line of text per file."""
    options = measured.result.options
    flags = list(subject.engine_flags) if subject.url is None else None
    name = file_name(measured)
    said = _write_result(options, document(measured, flags), name)
    return said + _write_page(options, lambda: html_report.serve_page(measured), name)


def save_sweep(result: sweep.SweepResult, subject: Subject) -> list[str]:
    flags = list(subject.engine_flags) if subject.url is None else None
    content = sweep.document(result, result.steps[0].run, flags)
    name = f"sweep-{file_name(result.steps[0].run)}"
    said = _write_result(result.options, content, name)
    return said + _write_page(result.options, lambda: html_report.sweep_page(result), name)


def _write_result(options: ServeOptions, content: dict[str, Any], default_name: str) -> list[str]:
    if not options.saves:
        return []
    path = options.output_json
    if path is None:
        path = str(Path(options.result_dir or "") / (options.result_filename or default_name))
    report.write(
        path, content, name="result_filename" if options.result_filename else "output_json"
    )
    return [f"result written to {path}"]


def _write_page(options: ServeOptions, page: Callable[[], str], json_name: str) -> list[str]:
    """Write the HTML report: with `--watch` always, by default named after the JSON file."""
    path = options.output_html
    if path is None and options.watch:
        name = options.output_json or options.result_filename or json_name
        path = str(Path(options.result_dir or "") / Path(name).with_suffix(".html"))
    if path is None:
        return []
    report.write_text(path, page(), name="output_html")
    return [f"report written to {path}"]
