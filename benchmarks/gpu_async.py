"""Does the GPU wait for Python? Random weights, real shapes, times by the device's own clock.

    python benchmarks/gpu_async.py [--parts idle,host,sync,hold,dashboard,terminal,sse]
    python benchmarks/gpu_async.py --device cpu      # a tiny model, to try the command out

idle       time between steps in steady decode, where torch's profiler looks once at the same
           steps, and over 256 requests of 100 to 1024 tokens in and out
host       time of the engine's loop per step, as a line over the batch size: the quickest round
           of each size, because other processes only add to it
sync       tokens/s one step at a time, two in flight, and running ahead
hold       the same while a thread holds the GIL for 20 ms, ten times a second
dashboard  tokens/s with the dashboard drawing at 10 Hz in the same process, against without
terminal   the same on a terminal that is not read
sse        tokens/s with 64 streams through the server, read by another process, against tasks that
           read in this one

Compared cases alternate in one run; figures are medians. The last three have an event loop, a
tokenizer and text; the others run the engine's loop alone. `dashboard` and `terminal` need textual;
`sse` needs starlette, uvicorn and prometheus_client. Each of the two groups runs in a process of
its own.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpu_decode import OPTION, engine_options
from machine import gpu_name, machine_facts, parser_of, print_rows, write_report
from made_up_models import MODELS, REAL, write_config
from servers import serving

from termgen.config import EngineConfig
from termgen.engine.loop.engine import AsyncEngine
from termgen.system.cpu_slices import share_lock_quickly

if TYPE_CHECKING:
    from front_ends import FrontSizes

ENGINE_PARTS = ("host", "sync", "hold", "idle")
"""The order matters: once torch's profiler has run, every launch takes five times as long."""
SCREEN_PARTS = ("dashboard", "terminal", "sse")
NEEDED = {
    "dashboard": ("textual",),
    "terminal": ("textual",),
    "sse": ("textual", "starlette", "uvicorn", "prometheus_client"),
}


def parse_args() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--model", choices=REAL, default="qwen3-0.6b")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--parts", default=",".join((*ENGINE_PARTS, *SCREEN_PARTS)))
    parser.add_argument("--batch-sizes", type=int, nargs="+")
    parser.add_argument("--streams", type=int, help="requests beside a front end (default: 64)")
    parser.add_argument("--rounds", type=int, default=3, help="times every cell is run, in turn")
    parser.add_argument("--seconds", type=float, default=0.4, help="length of a cell")
    parser.add_argument("--screen-seconds", type=float, default=2.0, help="the same with a screen")
    parser.add_argument("--run-ahead-ms", type=float, default=20.0)
    parser.add_argument("--option", **OPTION)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.parts = args.parts.split(",")
    unknown = set(args.parts) - {*ENGINE_PARTS, *SCREEN_PARTS}
    if unknown:
        parser.error(f"--parts knows {', '.join((*ENGINE_PARTS, *SCREEN_PARTS))}, not {unknown}")
    is_tiny = args.device == "cpu"
    args.model = "tiny" if is_tiny else args.model
    args.vocab = MODELS[args.model]["vocab_size"]
    args.prompt = 16 if is_tiny else 512
    args.batch_sizes = args.batch_sizes or ([1, 2, 4] if is_tiny else [1, 32, 256])
    args.streams = args.streams or (4 if is_tiny else 64)
    return args


def engine_config(args: argparse.Namespace, folder: Path, *, has_tokenizer: bool) -> EngineConfig:
    options: dict[str, Any] = {
        "load_format": "dummy",
        "skip_tokenizer_init": not has_tokenizer,
        "device": args.device,
        "max_num_seqs": max(256, *args.batch_sizes, args.streams),
        "max_num_batched_tokens": 16384,
        "max_model_len": 16384 if has_tokenizer else 4096,
        "enable_prefix_caching": False,
        "async_scheduling": True,
        "run_ahead_ms": args.run_ahead_ms,
    }
    if args.device == "cpu":
        options |= {"kv_cache_gib": 0.1, "threads": 1, "max_num_seqs": 16}
        options |= {"max_num_batched_tokens": 512}
    model = write_config(folder, args.model, vocab=args.vocab if has_tokenizer else 0)
    return EngineConfig(**{"model": str(model), **options, **engine_options(args.option)})


def attempt(works: dict[str, Callable[[], Any]]) -> dict[str, Any]:
    """The result of each part. A failure is reported with the figures of the others, which took
    minutes."""
    found: dict[str, Any] = {}
    for part, work in works.items():
        try:
            found[part] = work()
        except Exception as error:
            found[part] = {"failed": repr(error)}
    return found


def run_child(args: argparse.Namespace) -> dict[str, Any]:
    """One group of parts."""
    share_lock_quickly()  # as the command line does
    with tempfile.TemporaryDirectory() as folder:
        if set(args.parts) <= set(SCREEN_PARTS):
            return run_screens(args, Path(folder))
        return run_engine(args, Path(folder))


def run_engine(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    import async_engine_parts as parts

    is_tiny, ms = args.device == "cpu", args.run_ahead_ms
    most = max(args.batch_sizes)
    sizes = parts.Sizes(
        batches=tuple(args.batch_sizes),
        host_batches=tuple(b for b in (1, 2, 4, 8, 32, 64, 128, 192, 256) if b <= most),
        prompt=args.prompt,
        seconds=args.seconds,
        most_steps=2500,
        rounds=args.rounds,
        job_requests=12 if is_tiny else 256,
        job_tokens=(5, 60) if is_tiny else (100, 1024),
        vocab=args.vocab,
    )
    with parts.engine_core(engine_config(args, folder, has_tokenizer=False)) as core:
        for _ in range(2):  # clocks, allocator
            with parts.Decode(core, min(8, most), sizes, parts.depth("ahead", ms)) as decode:
                decode.run()
        longer = replace(sizes, seconds=max(1.0, sizes.seconds) if not is_tiny else 0.3)
        works: dict[str, Callable[[], Any]] = {
            "idle": lambda: parts.idle(core, sizes, ms, can_profile=not is_tiny),
            "host": lambda: parts.host(core, sizes, ms),
            "sync": lambda: parts.compare(core, sizes, ms, names=("sync", "two", "ahead")),
            "hold": lambda: parts.compare(core, longer, ms, names=("two", "ahead"), holds=True),
        }
        return attempt({part: works[part] for part in args.parts})


def run_screens(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    from front_ends import FrontSizes

    sizes = FrontSizes(
        streams=args.streams,
        prompt=args.prompt,
        seconds=args.screen_seconds,
        rounds=args.rounds,
        max_tokens=15_000,
        vocab=args.vocab,
    )
    config = engine_config(args, folder, has_tokenizer=True)
    with asyncio.Runner() as runner:
        engine = runner.run(AsyncEngine.start(config))
        try:
            return attempt(
                {p: partial(runner.run, screen_part(p, engine, sizes)) for p in args.parts}
            )
        finally:
            runner.run(engine.shutdown())


async def screen_part(part: str, engine: AsyncEngine, sizes: FrontSizes) -> list[dict[str, Any]]:
    from front_ends import STALLED_S, Terminal, clients, dashboard, in_turns, stalled

    if part == "sse":
        async with serving(engine) as server:
            return await in_turns(engine, sizes, partial(clients, server, sizes), sends=True)
    with Terminal(48, 160) as terminal:
        if part == "terminal":
            front = partial(stalled, engine, terminal)
            return await in_turns(engine, sizes, front, settle_s=STALLED_S)
        return await in_turns(engine, sizes, partial(dashboard, engine, terminal))


def failed(found: dict[str, Any]) -> list[str]:
    return [part for part, result in found.items() if "failed" in result]


def missing_for(part: str) -> list[str]:
    return [name for name in NEEDED.get(part, ()) if importlib.util.find_spec(name) is None]


def print_found(found: dict[str, Any]) -> None:
    for part, result in found.items():
        print(part)
        if part in failed(found):
            print(f"failed: {result['failed']}")
        elif part == "idle":
            print_rows(result["decode"])
            print_rows([result["job"]])
        elif part == "host":
            print_rows(result["cells"])
            print(f"mean = {result['a_us']:.0f} us + {result['b_us']:.2f} us x B")
        elif part in ENGINE_PARTS:
            print_rows({"rows": c["batch"], **c["tokens_per_s"]} for c in result)
        else:
            from front_ends import print_turns

            print_turns(part, result)


def main() -> None:
    args = parse_args()
    if args.child:
        print(json.dumps(run_child(args)))
        return
    results: dict[str, Any] = {}
    is_complete = True
    for group in (ENGINE_PARTS, SCREEN_PARTS):
        parts = []
        for part in (p for p in group if p in args.parts):
            missing = missing_for(part)
            if missing:
                print(f"{part}: not run, because {', '.join(missing)} is not installed")
                is_complete = False
            else:
                parts.append(part)
        if not parts:
            continue
        command = [sys.executable, *sys.argv, "--child", "--parts", ",".join(parts)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            print(f"{', '.join(parts)}: failed with code {done.returncode}")
            is_complete = False
            continue
        found = json.loads(done.stdout.splitlines()[-1])
        print_found(found)
        is_complete = is_complete and not failed(found)
        results |= found
    gpu = {"gpu": gpu_name()} if args.device == "cuda" else {}
    write_report(args, results, {**machine_facts(), **gpu})
    if not is_complete:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
