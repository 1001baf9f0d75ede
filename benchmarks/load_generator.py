"""The limits and the accuracy of `termgen bench serve` itself, on an engine with known times.

    python benchmarks/load_generator.py [--output-json FILE]

A scripted engine gives every running request one token each step, behind termgen's own server. The
load generator is a process of its own, as always. The output is its share of a core and the delay
of its wake-ups at rising token rates, and the difference between its time per output token and the
length of the steps.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from pathlib import Path
from typing import Any

from machine import machine_facts
from scripted_engine import ScriptedEngine
from server_load import serving

from termgen.bench.options import ServeOptions
from termgen.bench.serve import ServeBench
from termgen.bench.server_api import ServerApi
from termgen.system.cpu_slices import share_lock_quickly

STEP_S = 0.05
STREAMS = (20, 100, 250, 500, 1000)


async def measure(streams: int, seconds: float) -> dict[str, Any]:
    engine = ScriptedEngine(STEP_S)
    async with serving(engine) as (server, _), ServerApi(server.url, api_key=None) as api:
        options = ServeOptions(
            base_url=server.url,
            num_prompts=streams,
            random_input_len=16,
            random_output_len=int(seconds / STEP_S),
            num_warmups=1,
        )
        bench = await ServeBench.connect(api, options, asked_model=None)
        run = await bench.run(options, seed=0)
    engine.close()
    figures = run.result.as_json()
    tpot_ms = figures["mean_tpot_ms"]
    return {
        "streams": streams,
        "tokens_per_s": figures["output_throughput"],
        "failed": figures["failed"],
        "mean_tpot_ms": tpot_ms,
        "tpot_error": tpot_ms / (STEP_S * 1e3) - 1,
        **run.result.client(),
        "warnings": run.warnings(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--streams", type=int, nargs="+", default=list(STREAMS))
    parser.add_argument("--seconds", type=float, default=10.0, help="length of each stream")
    parser.add_argument("--output-json", type=Path, help="write settings and results here")
    args = parser.parse_args()
    share_lock_quickly()  # as `termgen serve` does
    results = []
    for streams in args.streams:
        result = asyncio.run(measure(streams, args.seconds))
        results.append(result)
        print(
            f"{streams:5} streams: {result['tokens_per_s']:8,.0f} tokens/s,"
            f" {result['failed']} failed, {result['cpu_share']:.0%} of a core,"
            f" woke {result['p99_loop_lag_ms']:.1f} ms late (p99),"
            f" TPOT {result['mean_tpot_ms']:.2f} ms ({result['tpot_error']:+.2%})"
        )
    if args.output_json is not None:
        report = {"machine": machine_facts(), "step_s": STEP_S, "results": results}
        args.output_json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
