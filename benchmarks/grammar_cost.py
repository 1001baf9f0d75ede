"""The time that a form adds to the first token, of one source tree or compared with another.

    python benchmarks/grammar_cost.py [--against OTHER_TREE] [--rounds 300] [--output-json FILE]

A made-up model of SmolLM2's vocabulary size behind `termgen serve`, one server for each tree. Every
round asks each server once for free text, for a schema that it has compiled before, and for one
that is new to it, in a random order; so disturbances of the machine hit all of them alike.
Differences are those within a round; their medians are shown with the range in which 19 of 20 such
medians would lie (bootstrap).
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from constrained import PERSON
from machine import machine_facts, write_report
from made_up_model import TINY, write_tiny, write_tokenizer

VOCAB = 49_152
KINDS = ("free", "cached", "new")
START_S = 120.0
BOOTSTRAPS = 1000
ROOT = Path(__file__).parents[1]


@contextlib.contextmanager
def serving(tree: Path, model: Path) -> Iterator[http.client.HTTPConnection]:
    """A connection to a ready server of this tree."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "termgen", "serve", "--model", str(model), "--port", str(port)]
    command += [
        "--device",
        "cpu",
        "--max-model-len",
        "2048",
        "--threads",
        "1",
        "--load-format",
        "dummy",
    ]
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    with subprocess.Popen(
        command, cwd=tree, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as server:
        try:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
            wait_for(connection, server)
            yield connection
        finally:
            server.terminate()


def wait_for(connection: http.client.HTTPConnection, server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and server.poll() is None:
        with contextlib.suppress(OSError, http.client.HTTPException):
            connection.request("GET", "/health")
            response = connection.getresponse()
            response.read()
            if response.status == 200:
                return
        connection.close()
        time.sleep(0.1)
    raise SystemExit("a server did not become ready")


def body_of(kind: str, number: int) -> dict[str, Any]:
    body = {"prompt": f"In the year {number} a", "max_tokens": 2, "stream": True, "seed": number}
    if kind == "free":
        return body
    title = f"seen {number}" if kind == "new" else "cached"
    schema = {**PERSON, "title": title}
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": schema}}
    return {**body, "response_format": form}


def time_to_first_token(connection: http.client.HTTPConnection, body: dict[str, Any]) -> float:
    """Milliseconds from sending to the first frame."""
    data = json.dumps(body)
    start = time.perf_counter()
    connection.request("POST", "/v1/completions", data, {"content-type": "application/json"})
    response = connection.getresponse()
    first = response.readline()
    elapsed = time.perf_counter() - start
    if response.status != 200 or not first.startswith(b"data: {"):
        raise SystemExit(f"{response.status}: {first!r}{response.read(500)!r}")
    response.read()
    return 1e3 * elapsed


def measure(connections: dict[str, http.client.HTTPConnection], rounds: int) -> dict[str, Any]:
    rng = random.Random(0)
    times: dict[tuple[str, str], list[float]] = {
        (tree, kind): [] for tree in connections for kind in KINDS
    }
    warm_up = max(5, rounds // 20)
    for number in range(rounds + warm_up):
        order = list(times)
        rng.shuffle(order)
        for tree, kind in order:
            elapsed = time_to_first_token(connections[tree], body_of(kind, number))
            if number >= warm_up:
                times[tree, kind].append(elapsed)
    found: dict[str, Any] = {
        f"{tree}, {kind}": {"p50_ms": statistics.median(values)}
        for (tree, kind), values in times.items()
    }
    for tree in connections:
        for kind in KINDS[1:]:
            name = f"{tree}, {kind} - free"
            found[name] = difference(times[tree, kind], times[tree, "free"])
    if len(connections) > 1:
        mine, other = connections
        for kind in KINDS:
            name = f"{mine} - {other}, {kind}"
            found[name] = difference(times[mine, kind], times[other, kind])
    return found


def difference(those: list[float], these: list[float]) -> dict[str, float]:
    differences = [a - b for a, b in zip(those, these, strict=True)]
    rng = random.Random(0)
    medians = sorted(
        statistics.median(rng.choices(differences, k=len(differences))) for _ in range(BOOTSTRAPS)
    )
    low, high = medians[BOOTSTRAPS // 40], medians[-BOOTSTRAPS // 40]
    return {"p50_ms": statistics.median(differences), "low_ms": low, "high_ms": high}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--against", type=Path, help="the root of another tree")
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--output-json", type=Path)
    args = parser.parse_args()
    trees = {"this tree": ROOT}
    if args.against is not None:
        trees["other tree"] = args.against.resolve()
        args.against = str(args.against)
    facts = machine_facts()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        model = write_tiny(Path(folder))
        (model / "config.json").write_text(json.dumps({**TINY, "vocab_size": VOCAB}))
        write_tokenizer(model, VOCAB)
        connections = {
            name: stack.enter_context(serving(tree, model)) for name, tree in trees.items()
        }
        found = measure(connections, args.rounds)
    for name, values in found.items():
        text = f"{name:34}{values['p50_ms']:8.2f} ms"
        if "low_ms" in values:
            text += f"  ({values['low_ms']:.2f} to {values['high_ms']:.2f})"
        print(text)
    write_report(args, facts, found)


if __name__ == "__main__":
    main()
