"""`termgen bench serve`, `sweep` and `compare`: the commands, on a plain terminal."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Callable
from typing import Any

from tqdm import tqdm

from termgen.bench import report, sweep
from termgen.bench.options import CompareOptions, ServeOptions, SweepOptions
from termgen.bench.serve import ServeRun
from termgen.commands.bench_run import (
    Subject,
    check_files,
    connected,
    find_subject,
    save_serve,
    save_sweep,
    say,
    step_title,
    tell_serve,
    tell_sweep,
)
from termgen.commands.exit_codes import OK, REGRESSION
from termgen.commands.settings import SettingLayers
from termgen.config import UIConfig
from termgen.library.progress import is_dumb


def run_serve(args: argparse.Namespace, layers: SettingLayers) -> int:
    options = layers.resolve(ServeOptions)
    subject = find_subject(args, layers, options)
    check_files(options)
    if options.watch:
        from termgen.commands.bench_watch import watch_serve

        return watch_serve(options, subject, layers.resolve(UIConfig))
    return asyncio.run(_serve(options, subject))


def run_sweep(args: argparse.Namespace, layers: SettingLayers) -> int:
    options = layers.resolve(SweepOptions)
    subject = find_subject(args, layers, options)
    check_files(options)
    if options.watch:
        from termgen.commands.bench_watch import watch_sweep

        return watch_sweep(options, subject, layers.resolve(UIConfig))
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


def progress_bar(options: ServeOptions, title: str) -> tuple[Any, Callable[[dict[str, Any]], None]]:
    """The bar, and the `on_progress` callback that moves it."""
    disable = True if options.disable_tqdm or is_dumb() else None
    bar = tqdm(total=options.num_prompts, desc=title, leave=False, disable=disable)

    def show(report: dict[str, Any]) -> None:
        bar.update(report["done"] - bar.n)
        bar.set_postfix(running=report["running"], failed=report["failed"])

    return bar, show


async def _serve(options: ServeOptions, subject: Subject) -> int:
    async with connected(subject, options) as server:
        bar, show = progress_bar(options, "serve")
        with bar:
            measured = await server.bench.run(options, seed=subject.seed, on_progress=show)
    tell_serve(measured)
    for line in save_serve(measured, subject):
        say(line)
    return OK


async def _sweep(options: SweepOptions, subject: Subject) -> int:
    async with connected(subject, options) as server:

        async def run_step(step: ServeOptions, seed: int) -> ServeRun:
            bar, show = progress_bar(step, step_title(options, step))
            with bar:
                return await server.bench.run(step, seed=seed, on_progress=show)

        result = await sweep.run_sweep(options, run_step, seed=subject.seed)
    tell_sweep(result)
    for line in save_sweep(result, subject):
        say(line)
    return OK
