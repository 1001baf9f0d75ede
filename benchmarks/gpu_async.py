"""Does the GPU wait for Python? Random weights, real shapes, times by the device's own clock.

    python benchmarks/gpu_async.py [--parts idle,host,sync,hold]
    python benchmarks/gpu_async.py --device cpu      # a tiny model, to try the command out

idle  time between steps in steady decode, where torch's profiler looks once at the same steps, and
      over 256 requests of 100 to 1024 tokens in and out
host  time of the engine's loop per step, as a line over the batch size: the quickest round of each
      size, because other processes only add to it
sync  tokens/s one step at a time, two in flight, and running ahead
hold  the same while a thread holds the GIL for 20 ms, ten times a second

Compared cases alternate in one run; figures are medians. The engine's loop runs alone, without text
and readers: `screen_cost.py --engine gpu` has front ends in its process.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import async_engine_parts as parts
from gpu_decode import OPTION, engine_options
from machine import gpu_name, machine_facts, parser_of, print_rows, write_report
from made_up_models import MODELS, write_config

from termgen.config import EngineConfig
from termgen.system.cpu_slices import share_lock_quickly

PARTS = ("host", "sync", "hold", "idle")
"""The order matters: once torch's profiler has run, every launch takes five times as long."""


def parse_args() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--rounds", type=int, default=3, help="times every cell is run, in turn")
    parser.add_argument("--seconds", type=float, default=0.4, help="length of a cell")
    parser.add_argument("--run-ahead-ms", type=float, default=20.0)
    parser.add_argument("--option", **OPTION)
    args = parser.parse_args()
    if unknown := set(args.parts.split(",")) - set(PARTS):
        parser.error(f"--parts knows {', '.join(PARTS)}, not {', '.join(unknown)}")
    return args


def engine_config(folder: Path, device: str, options: dict[str, Any]) -> EngineConfig:
    fixed: dict[str, Any] = {
        "load_format": "dummy",
        "device": device,
        "max_num_seqs": 256,
        "max_num_batched_tokens": 16384,
        "enable_prefix_caching": False,
        "async_scheduling": True,
    }
    if device == "cpu":
        fixed |= {"kv_cache_gib": 0.1, "threads": 1, "max_num_seqs": 16}
        fixed |= {"max_num_batched_tokens": 512}
    name = "tiny" if device == "cpu" else "qwen3-0.6b"
    model = write_config(folder, name, vocab=MODELS[name]["vocab_size"])
    return EngineConfig(**{"model": str(model), **fixed, **options})


def sizes_of(args: argparse.Namespace) -> parts.Sizes:
    is_tiny = args.device == "cpu"
    return parts.Sizes(
        batches=(1, 2, 4) if is_tiny else (1, 32, 256),
        host_batches=(1, 2, 4) if is_tiny else (1, 2, 4, 8, 32, 64, 128, 192, 256),
        prompt=16 if is_tiny else 512,
        seconds=args.seconds,
        most_steps=2500,
        rounds=args.rounds,
        job_requests=12 if is_tiny else 256,
        job_tokens=(5, 60) if is_tiny else (100, 1024),
        vocab=MODELS["tiny" if is_tiny else "qwen3-0.6b"]["vocab_size"],
    )


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    sizes, ms = sizes_of(args), args.run_ahead_ms
    options = {"skip_tokenizer_init": True, "max_model_len": 4096, "run_ahead_ms": ms}
    config = engine_config(folder, args.device, options | engine_options(args.option))
    found, policy = {}, parts.depth("ahead", ms)
    with parts.engine_core(config) as core:
        for _ in range(2):  # clocks, allocator
            with parts.Decode(core, min(8, sizes.batches[-1]), sizes, policy) as decode:
                decode.run()
        is_gpu = args.device == "cuda"
        longer = replace(sizes, seconds=max(1.0, sizes.seconds) if is_gpu else 0.3)
        works: dict[str, Callable[[], Any]] = {
            "host": lambda: parts.host(core, sizes, ms),
            "sync": lambda: parts.compare(core, sizes, ms, names=("sync", "two", "ahead")),
            "hold": lambda: parts.compare(core, longer, ms, names=("two", "ahead"), holds=True),
            "idle": lambda: parts.idle(core, sizes, ms, can_profile=is_gpu),
        }
        for part in PARTS:
            if part in args.parts.split(","):
                found[part] = works[part]()
                print_found({part: found[part]})
    return found


def print_found(found: dict[str, Any]) -> None:
    for part, result in found.items():
        print(part)
        if part == "idle":
            print_rows(result["decode"])
            print_rows([result["job"]])
        elif part == "host":
            print_rows(result["cells"])
            print(f"mean = {result['a_us']:.0f} us + {result['b_us']:.2f} us x B")
        else:
            print_rows({"rows": c["batch"], **c["tokens_per_s"]} for c in result)


def main() -> None:
    args = parse_args()
    share_lock_quickly()  # as the command line does
    with tempfile.TemporaryDirectory() as folder:
        results = measure(args, Path(folder))
    gpu = {"gpu": gpu_name()} if args.device == "cuda" else {}
    write_report(args, results, {**machine_facts(), **gpu})


if __name__ == "__main__":
    main()
