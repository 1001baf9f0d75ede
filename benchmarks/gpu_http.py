"""A whole server on one GPU under the loads of its users, vLLM's measured figures beside.

    python benchmarks/gpu_http.py [--models qwen3-0.6b llama-3.1-8b] [--loads NAME ...]
    python benchmarks/gpu_http.py --models llama-3.1-8b --loads 12/s --serve "" "--run-ahead-ms 0"
    python benchmarks/gpu_http.py --device cpu                # a tiny model, to try the command out

A server with random weights and real shapes, and `termgen bench serve` in a process of its own.

256    512 requests of 512 prompt tokens and 256 output tokens, 256 of them open at any time
1      8 of them, one after the other
N/s    Poisson arrivals, N a second for 16 seconds, of 512 prompt tokens and 128 output tokens

With several --serve, one server after the other runs with those settings. --steps prints what the
engine did meanwhile: the device time of steps with prompts and without, its share of idle time,
and how many steps were replayed from a recording.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import quantiles
from typing import Any

import httpx
from gpu_shapes import MODELS, write_config
from machine import machine_facts
from made_up_model import TINY, write_tiny, write_tokenizer

from termgen.vocabulary.events import StepRecord
from termgen.vocabulary.telemetry import Events, FrameReader, decode

LOADS = {"qwen3-0.6b": ("256", "40/s", "1"), "llama-3.1-8b": ("256", "12/s", "30/s", "1")}
FIGURES = ("output_throughput", "p50_ttft_ms", "p99_ttft_ms", "p50_itl_ms", "p99_itl_ms")
VLLM: dict[tuple[str, str], tuple[float | None, ...]] = {
    # vLLM 0.33.0 on one H200, same client
    ("qwen3-0.6b", "256"): (22_937, 319, 648, 8.9, 27.7),
    ("qwen3-0.6b", "40/s"): (None, 33.7, 89.1, 2.2, 26.7),
    ("qwen3-0.6b", "1"): (576, 12.1, None, 1.67, None),
    ("llama-3.1-8b", "256"): (10_109, 942, 3_022, 13.9, 188),
    ("llama-3.1-8b", "12/s"): (None, 26.1, 50, 5.2, 15.2),
    ("llama-3.1-8b", "1"): (206, 18.2, None, 4.8, None),
}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(LOADS))
    parser.add_argument("--loads", nargs="+", help="256, 1 or N/s (default: those of the tables)")
    parser.add_argument("--serve", nargs="+", default=[""], help="settings of a server, one string")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--steps", action="store_true", help="print the engine's steps as well")
    parser.add_argument("--output-json", type=Path)
    return parser.parse_args()


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


@contextmanager
def server(folder: Path, device: str, settings: str) -> Iterator[str]:
    """URL of a server that is ready."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [
        *(sys.executable, "-m", "termgen", "serve", "--model", str(folder), "--port", str(port)),
        *("--load-format", "dummy", "--device", device, "--no-log-requests"),
        *shlex.split(settings),
    ]
    url = f"http://127.0.0.1:{port}"
    process = subprocess.Popen(command)
    try:
        while not is_ready(url):
            if process.poll() is not None:
                raise SystemExit(f"the server ended with code {process.returncode}")
            time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        process.wait(60)


def is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


class StepWatch:
    """Records the steps of a server while it is entered."""

    def __init__(self, url: str) -> None:
        self.steps: list[StepRecord] = []
        self._url = url
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._read)

    def _read(self) -> None:
        reader = FrameReader()
        with httpx.stream("GET", f"{self._url}/v1/events?hz=4", timeout=60, trust_env=False) as r:
            for data in r.iter_bytes():
                for frame in reader.feed(data):
                    message = decode(frame)
                    if isinstance(message, Events):
                        self.steps += [e for e in message.events if isinstance(e, StepRecord)]
                if self._ends.is_set():
                    return

    def __enter__(self) -> StepWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        time.sleep(0.5)  # the last frames
        self._ends.set()
        self._thread.join()


def summarise(steps: list[StepRecord]) -> dict[str, Any]:
    """Device times in ms by kind of step, and what the device waited for."""
    kinds = {
        "prompts": [s for s in steps if s.num_prefill_rows],
        "decode": [s for s in steps if not s.num_prefill_rows],
    }
    found: dict[str, Any] = {}
    for kind, chosen in kinds.items():
        if len(chosen) < 2:
            continue
        times = quantiles([(s.ended_ns - s.started_ns) / 1e6 for s in chosen], n=100)
        found[kind] = {
            "steps": len(chosen),
            "p50_ms": times[49],
            "p99_ms": times[98],
            "tokens": sum(s.num_prefill_tokens for s in chosen) / len(chosen),
            "rows": sum(s.num_decode_rows for s in chosen) / len(chosen),
            "idle_ms": sum(s.idle_us for s in chosen) / 1e3 / len(chosen),
            "launch_ms": sum(s.launch_us for s in chosen) / 1e3 / len(chosen),
            "queue": sum(s.queue_depth for s in chosen) / len(chosen),
            "graphs": dict(Counter(s.graph_mode for s in chosen)),
        }
    return found


def measure(url: str, load: str, args: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [
            *(sys.executable, "-m", "termgen", "bench", "serve", "--base-url", url),
            *("--output-json", str(report), "--disable-tqdm", "--temperature", "0"),
            *load_options(load, 1.0 if args.device == "cuda" else 0.1),
        ]
        httpx.post(f"{url}/reset_prefix_cache", trust_env=False).raise_for_status()
        client = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=client)
        figures = json.loads(report.read_text())
    assert not figures["failed"], f"{figures['failed']} requests failed"
    return {name: figures[name] for name in (*FIGURES, "client")}


def print_cell(cell: dict[str, Any]) -> None:
    values = "".join(f"{cell[name]:11,.1f}" for name in FIGURES)
    client = cell["client"]
    busy = f"client {client['cpu_share']:.0%}, late {client['p99_loop_lag_ms']:.0f} ms"
    print(f"{cell['model']:<13} {cell['load']:>5} {values}  {busy}  {cell['serve']}")
    peer = VLLM.get((cell["model"], cell["load"]))
    if peer:
        values = "".join(f"{'' if v is None else f'{v:,.1f}':>11}" for v in peer)
        print(f"{'vLLM 0.33.0':>19} {values}")
    for kind, found in cell.get("steps", {}).items():
        print(f"    {kind}: " + ", ".join(f"{k} {_short(v)}" for k, v in found.items()))
    sys.stdout.flush()


def _short(value: Any) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def main() -> None:
    args = parse_args()
    names = args.models if args.device == "cuda" else ["tiny"]
    print(f"{'':13} {'load':>5} {'tok/s':>11}{'ttft p50':>11}{'p99':>11}{'itl p50':>11}{'p99':>11}")
    cells = []
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            is_tiny = name == "tiny"
            path = write_tiny(Path(folder)) if is_tiny else write_config(Path(folder), name)
            write_tokenizer(path, (TINY if is_tiny else MODELS[name])["vocab_size"])
            for settings in args.serve:
                with server(path, args.device, settings) as url:
                    for load in args.loads or LOADS.get(name, ("256", "40/s", "1")):
                        cell: dict[str, Any] = {"model": name, "load": load, "serve": settings}
                        if args.steps:
                            with StepWatch(url) as watch:
                                cell |= measure(url, load, args)
                            cell["steps"] = summarise(watch.steps)
                        else:
                            cell |= measure(url, load, args)
                        cells.append(cell)
                        print_cell(cell)
    if args.output_json:
        report = {"machine": machine_facts(), "results": cells}
        args.output_json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
