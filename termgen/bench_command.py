"""`termgen bench serve`, `sweep` and `compare`: the commands. Finds or starts the server.

Called by `cli`. The settings of the engine are for the server that is started; of one that is
there already only its model's name is taken, and the seed, which is that of the prompts.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from tqdm import tqdm

from termgen.bench import html_report, report, serve_report, sweep
from termgen.bench.compare_options import CompareOptions
from termgen.bench.own_server import OwnServer, own_server
from termgen.bench.serve import ServeBench, ServeRun, document, file_name
from termgen.bench.serve_options import ServeOptions
from termgen.bench.server_api import ServerApi
from termgen.bench.sweep_options import SweepOptions
from termgen.config import EngineConfig
from termgen.errors import ConfigError
from termgen.exit_codes import OK, REGRESSION
from termgen.settings import SettingLayers, flag_of

API_KEY_VARIABLE = "OPENAI_API_KEY"
FOR_ANY_SERVER = ("model", "seed")


@dataclass(frozen=True, slots=True)
class Subject:
    """The server to measure, as the command line names it."""

    url: str | None
    """None: start one."""
    engine_flags: tuple[str, ...]
    model: str | None
    seed: int


def run_serve(args: argparse.Namespace, layers: SettingLayers) -> int:
    options = layers.resolve(ServeOptions)
    subject = find_subject(args, layers, options)
    check_files(options)
    return asyncio.run(_serve(options, subject))


def run_sweep(args: argparse.Namespace, layers: SettingLayers) -> int:
    options = layers.resolve(SweepOptions)
    subject = find_subject(args, layers, options)
    check_files(options)
    return asyncio.run(_sweep(options, subject))


def run_compare(layers: SettingLayers) -> int:
    from termgen.bench import compare

    options = layers.resolve(CompareOptions)
    report.check_writable(options.output_json)
    found = compare.compare(options)
    print("\n".join(found.lines()))
    for difference in found.differences:
        print(f"termgen: warning: not alike: {difference}", file=sys.stderr)
    if options.output_json is not None:
        report.write(options.output_json, found.as_json())
    return REGRESSION if options.fail_on_regression and found.regressions else OK


def find_subject(args: argparse.Namespace, layers: SettingLayers, options: ServeOptions) -> Subject:
    config = layers.resolve(EngineConfig)
    if options.url is not None:
        for f in fields(EngineConfig):
            if f.name not in FOR_ANY_SERVER and layers.given(f.name) is not None:
                raise ConfigError(
                    f"{flag_of(f)} is for a server that the bench starts; leave it out, or the URL",
                    param=f.name,
                )
        return Subject(options.url, (), layers.given("model"), config.seed)
    from termgen.launch import find_model
    from termgen.progress import TerminalProgress

    with TerminalProgress() as progress:
        find_model(config, progress)  # what is wrong with it is one line here, not the server's
    return Subject(None, tuple(engine_flags(args)), None, config.seed)


def engine_flags(args: argparse.Namespace) -> list[str]:
    """What was given for the engine, as flags again; the server reads the variables itself."""
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
    """Before the measurement, not after it. Raises `ConfigError`."""
    if options.result_filename is not None:
        path = str(Path(options.result_dir or "") / options.result_filename)
        report.check_writable(path, name="result_filename")
    elif options.saves:
        report.check_writable(str(Path(options.result_dir or "") / "x"), name="result_dir")
    report.check_writable(options.output_html, name="output_html")


@contextlib.asynccontextmanager
async def connected(subject: Subject, options: ServeOptions) -> AsyncGenerator[ServeBench, None]:
    """A `ServeBench` on the server, which is started first if there is none."""
    with contextlib.ExitStack() as stack:
        url, key, check = subject.url, os.environ.get(API_KEY_VARIABLE), None
        server: OwnServer | None = None
        if url is None:
            print("termgen: starting a server", file=sys.stderr)
            server = stack.enter_context(own_server(subject.engine_flags))
            url, key, check = server.url, server.api_key, server.check
        async with ServerApi(url, api_key=key) as api:
            bench = await ServeBench.connect(api, options, asked_model=subject.model, check=check)
            for line in server.start_lines() if server is not None else ():
                print(f"termgen: {line.partition(' ')[2]}", file=sys.stderr)
            yield bench


def progress_bar(options: ServeOptions, title: str) -> tuple[Any, Callable[[dict[str, Any]], None]]:
    """The bar, and what moves it."""
    disable = True if options.disable_tqdm else None
    bar = tqdm(total=options.num_prompts, desc=title, leave=False, disable=disable)

    def show(told: dict[str, Any]) -> None:
        bar.update(told["done"] - bar.n)
        bar.set_postfix(running=told["running"], failed=told["failed"])

    return bar, show


async def _serve(options: ServeOptions, subject: Subject) -> int:
    async with connected(subject, options) as bench:
        bar, show = progress_bar(options, "serve")
        with bar:
            measured = await bench.run(options, seed=subject.seed, on_progress=show)
    print(serve_report.summary(measured))
    for warning in measured.warnings():
        print(f"termgen: warning: {warning}", file=sys.stderr)
    save(measured, subject)
    return OK


async def _sweep(options: SweepOptions, subject: Subject) -> int:
    async with connected(subject, options) as bench:

        async def run_step(step: ServeOptions, seed: int) -> ServeRun:
            clients = f"{step.max_concurrency} clients"
            title = clients if options.sweep_over == "concurrency" else f"{step.request_rate:g}/s"
            bar, show = progress_bar(step, title)
            with bar:
                return await bench.run(step, seed=seed, on_progress=show)

        result = await sweep.run_sweep(options, run_step, seed=subject.seed)
    print(sweep.summary(result))
    for step in result.steps:
        for warning in step.run.warnings():
            print(f"termgen: warning: at {step.load:g}: {warning}", file=sys.stderr)
    flags = list(subject.engine_flags) if subject.url is None else None
    content = sweep.document(result, result.steps[0].run, flags)
    name = f"sweep-{file_name(result.steps[0].run)}"
    _write_result(options, content, name)
    if options.output_html is not None:
        _write_page(options.output_html, html_report.sweep_page(result))
    return OK


def save(measured: ServeRun, subject: Subject) -> None:
    options = measured.result.options
    flags = list(subject.engine_flags) if subject.url is None else None
    _write_result(options, document(measured, flags), file_name(measured))
    if options.output_html is not None:
        _write_page(options.output_html, html_report.serve_page(measured))


def _write_result(options: ServeOptions, content: dict[str, Any], default_name: str) -> None:
    if options.saves:
        name = options.result_filename or default_name
        path = str(Path(options.result_dir or "") / name)
        report.write(path, content, name="result_filename")
        print(f"termgen: result written to {path}", file=sys.stderr)


def _write_page(path: str, page: str) -> None:
    report.write_text(path, page, name="output_html")
    print(f"termgen: report written to {path}", file=sys.stderr)
