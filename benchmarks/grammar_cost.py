"""The time that a form adds to the first token, of one source tree or compared with another.

    python benchmarks/grammar_cost.py [--against OTHER_TREE] [--rounds 300] [--output-json FILE]

A made-up model of SmolLM2's vocabulary size behind `termgen serve`, one server for each tree. Every
round asks each server once for free text, for a schema that it has compiled before, and for one
that is new to it, in a random order; so disturbances of the machine hit all of them alike.
Differences are those within a round; their medians are shown with the range in which 19 of 20 such
medians would lie (bootstrap).
"""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from constrained import PERSON
from machine import machine_facts, parser_of, print_rows, write_report
from made_up_models import write_config
from servers import ROOT, ServerProcess

OPTIONS = ("--device", "cpu", "--max-model-len", "2048", "--threads", "1")
VOCAB = 49_152
KINDS = ("free", "cached", "new")
BOOTSTRAPS = 1000


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
    parser = parser_of(__doc__)
    parser.add_argument("--against", type=Path, help="the root of another tree")
    parser.add_argument("--rounds", type=int, default=300)
    args = parser.parse_args()
    trees = {"this tree": ROOT}
    if args.against is not None:
        trees["other tree"] = args.against.resolve()
    facts = machine_facts()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        model = write_config(Path(folder), vocab=VOCAB)
        connections = {}
        for name, tree in trees.items():
            server = stack.enter_context(ServerProcess(model, OPTIONS, tree=tree))
            connections[name] = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        found = measure(connections, args.rounds)
    heads = {"time to first token": "", "p50_ms": "", "low_ms": "", "high_ms": ""}
    print_rows({**heads, "time to first token": name, **found[name]} for name in found)
    write_report(args, found, facts)


if __name__ == "__main__":
    main()
