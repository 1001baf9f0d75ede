"""A whole server on one GPU under the loads of its users.

    python benchmarks/gpu_http.py [--models qwen3-0.6b llama-3.1-8b] [--loads NAME ...]
    python benchmarks/gpu_http.py --models llama-3.1-8b --loads 12/s --serve "" "--run-ahead-ms 0"
    python benchmarks/gpu_http.py --models tiny               # on a CPU, to try the command out

A server with random weights and real shapes, and `termgen bench serve` in a process of its own.

256    512 requests of 512 prompt tokens and 256 output tokens, 256 of them open at any time
1      8 of them, one after the other
N/s    Poisson arrivals, N a second for 16 seconds, of 512 prompt tokens and 128 output tokens

With several --serve, one server after the other runs with those settings.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from machine import parser_of, print_rows, write_report
from made_up_models import MODELS, write_config
from servers import ServerProcess

LOADS = {"qwen3-0.6b": ("256", "40/s", "1"), "llama-3.1-8b": ("256", "12/s", "30/s", "1")}
FIGURES = ("output_throughput", "p50_ttft_ms", "p99_ttft_ms", "p50_itl_ms", "p99_itl_ms")


def load_options(load: str, scale: float) -> list[str]:
    """The client's options. scale: share of the requests and of their lengths."""
    shape = {"256": (512, 256), "1": (8, 256)}
    count, output = shape.get(load, (16 * float(load.removesuffix("/s") or 1), 128))
    options = {
        "--num-prompts": max(1, round(count * scale)),
        "--random-input-len": round(512 * scale),
        "--random-output-len": round(output * scale),
    }
    rate = {"--max-concurrency": load} if load in shape else {"--request-rate": load[:-2]}
    return [str(item) for pair in (options | rate).items() for item in pair]


def measure(server: ServerProcess, load: str, scale: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [
            *(sys.executable, "-m", "termgen", "bench", "serve", "--base-url", server.url),
            *("--output-json", str(report), "--disable-tqdm", "--temperature", "0"),
            *load_options(load, scale),
        ]
        server.request("POST", "/reset_prefix_cache")
        client = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=client)
        figures = json.loads(report.read_text())
    assert not figures["failed"], f"{figures['failed']} requests failed"
    return {name: figures[name] for name in FIGURES} | figures["client"]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(LOADS))
    parser.add_argument("--loads", nargs="+", help="256, 1 or N/s (default: those of the tables)")
    parser.add_argument("--serve", nargs="+", default=[""], help="settings of a server, one string")
    args = parser.parse_args()
    cells = []
    with tempfile.TemporaryDirectory() as folder:
        for name in args.models:
            device, scale = ("cpu", 0.1) if name == "tiny" else ("cuda", 1.0)
            path = write_config(Path(folder), name, vocab=MODELS[name]["vocab_size"])
            for settings in args.serve:
                options = ["--device", device, "--no-log-requests", *shlex.split(settings)]
                with ServerProcess(path, options) as server:
                    for load in args.loads or LOADS.get(name, ("256", "40/s", "1")):
                        found = measure(server, load, scale)
                        cells.append({"model": name, "load": load, "serve": settings, **found})
                        print_rows(cells[-1:])
    write_report(args, cells)


if __name__ == "__main__":
    main()
