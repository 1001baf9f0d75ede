"""CPU speed of termgen beside transformers and llama.cpp: same machine, same run, same weights.

    python benchmarks/cpu_decode.py [--model NAME_OR_GGUF] [--output-json FILE]

Measures decode tokens/s at batch 1 and 8 and the time a 256-token prompt takes to its first token.
The contestants take turns, round after round (A-B-C-A-B-C), each in a process of its own that
sleeps while another one works, so that a change in the machine's mood hits all of them. Decode
speed is the time of n+1 tokens less the time of one token, for all alike. transformers reads the
same GGUF file, dequantised to float32; llama.cpp gets its weights quantised again to Q8_0.

A contestant whose packages are missing is left out with a line that says so. They may live in
another environment: `--peer-python /path/to/bin/python`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from contestants import CONTESTANTS, MAX_BATCH
from machine import machine_facts

from termgen.errors import TermgenError
from termgen.library.catalog import resolve_model

OURS = "termgen float32"
PEER = "transformers float32"
ID_RANGE = (1000, 20_000)  # plain words in any vocabulary


@dataclass(frozen=True)
class Measure:
    name: str
    batch_size: int
    prompt_tokens: int
    decode_tokens: int
    """0: time to the first token, in seconds. Otherwise tokens/s after the first one."""

    @property
    def unit(self) -> str:
        return "tokens/s" if self.decode_tokens else "s"


class Contestant:
    """A `contestants.py` process."""

    def __init__(self, name: str, python: str, model: Path, threads: int) -> None:
        self.name = name
        environment = dict(os.environ, OMP_NUM_THREADS=str(threads))
        self._process = subprocess.Popen(
            [
                python,
                str(Path(__file__).with_name("contestants.py")),
                name,
                str(model),
                str(threads),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        )

    def read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            return {"missing": f"its process ended with code {self._process.wait()}"}
        reply: dict[str, Any] = json.loads(line)
        return reply

    def generate(self, prompts: list[list[int]], num_tokens: int) -> tuple[float, list[list[int]]]:
        assert self._process.stdin is not None
        command = {"prompts": prompts, "num_tokens": num_tokens}
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        reply = self.read()
        if "seconds" not in reply:
            raise SystemExit(f"{self.name} failed: {reply['missing']}")
        return reply["seconds"], reply["token_ids"]

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()


@dataclass
class Series:
    """All values of one contestant in one measure."""

    values: list[float] = field(default_factory=list)
    tokens: list[list[list[int]]] = field(default_factory=list)

    def summary(self, unit: str) -> dict[str, Any]:
        best = max(self.values) if unit == "tokens/s" else min(self.values)
        return {"best": best, "median": statistics.median(self.values), "values": self.values}


Results = dict[str, dict[str, Series]]  # by measure, then by contestant


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--model", help="catalog name or .gguf file (default: smollm2-135m)")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--decode-tokens", type=int, default=48, help="timed tokens a round")
    parser.add_argument("--prompt-tokens", type=int, default=256, help="prompt of the prefill")
    parser.add_argument("--only", nargs="+", choices=CONTESTANTS, help="leave out the others")
    parser.add_argument("--peer-python", default=sys.executable, help="Python that has the peers")
    parser.add_argument("--output-json", type=Path, help="write machine and results here")
    args = parser.parse_args()
    if min(args.threads, args.rounds, args.decode_tokens, args.prompt_tokens) < 1:
        parser.error("every number must be at least 1")
    return args


def start_contestants(
    args: argparse.Namespace, model: Path
) -> tuple[list[Contestant], dict[str, str]]:
    """The contestants that run here, loaded one after another, and why each of the others does
    not."""
    running, missing = [], {}
    for name in args.only or CONTESTANTS:
        python = sys.executable if name.startswith("termgen") else args.peer_python
        contestant = Contestant(name, python, model, args.threads)
        reply = contestant.read()
        if "missing" in reply:
            missing[name] = reply["missing"]
            print(f"{name}: left out, {reply['missing']}", file=sys.stderr)
            continue
        print(f"{name}: loaded in {reply['ready']['load_seconds']:.1f} s", file=sys.stderr)
        running.append(contestant)
    return running, missing


def run_once(
    contestant: Contestant, measure: Measure, prompts: list[list[int]], series: Series
) -> None:
    first_s, tokens = contestant.generate(prompts, 1)
    if not measure.decode_tokens:
        series.values.append(first_s)
    else:
        all_s, tokens = contestant.generate(prompts, 1 + measure.decode_tokens)
        timed = measure.batch_size * measure.decode_tokens
        series.values.append(timed / (all_s - first_s))
    series.tokens.append(tokens)


def run(contestants: list[Contestant], measures: list[Measure], rounds: int) -> Results:
    results: Results = {m.name: {c.name: Series() for c in contestants} for m in measures}
    rng = np.random.default_rng(0)
    for contestant in contestants:  # warm up: allocators, thread pools, page cache
        contestant.generate(rng.integers(*ID_RANGE, (MAX_BATCH, 32)).tolist(), 4)
    for index in range(rounds):
        for measure in measures:
            shape = (measure.batch_size, measure.prompt_tokens)
            prompts = rng.integers(*ID_RANGE, shape).tolist()
            for contestant in contestants:
                run_once(contestant, measure, prompts, results[measure.name][contestant.name])
        print(f"round {index + 1} of {rounds} done", file=sys.stderr)
    return results


def comparisons(results: Results) -> dict[str, float]:
    """Ratios of medians, and the share of rounds in which two engines gave the same tokens."""

    def median(measure: str, contestant: str) -> float:
        return statistics.median(results[measure][contestant].values)

    names = list(next(iter(results.values())))
    found: dict[str, float] = {}
    if OURS in names and PEER in names:
        for measure, by_name in results.items():
            ratio = median(measure, OURS) / median(measure, PEER)
            faster = ratio if measure.startswith("decode") else 1.0 / ratio
            found[f"{measure}: {OURS} over {PEER}"] = faster
            same = [a == b for a, b in zip(by_name[OURS].tokens, by_name[PEER].tokens, strict=True)]
            found[f"{measure}: rounds with equal tokens"] = sum(same) / len(same)
    if OURS in names:
        found["batch 8 over batch 1"] = median("decode, batch 8", OURS) / median(
            "decode, batch 1", OURS
        )
    return found


def main() -> None:
    args = parse_args()
    try:
        local = resolve_model(args.model)
    except TermgenError as error:
        raise SystemExit(f"error: {error}") from None
    if local.kind != "gguf":
        raise SystemExit(f"error: {local.path} is not a GGUF file, which every contestant can read")
    measures = [
        Measure("decode, batch 1", 1, 16, args.decode_tokens),
        Measure("decode, batch 8", MAX_BATCH, 16, args.decode_tokens),
        Measure(f"{args.prompt_tokens}-token prompt", 1, args.prompt_tokens, 0),
    ]
    before = machine_facts()
    contestants, missing = start_contestants(args, local.path)
    if not contestants:
        raise SystemExit("error: no contestant can run here")
    results = run(contestants, measures, args.rounds)
    for contestant in contestants:
        contestant.close()
    report = {
        "machine": {**before, "load_average_after": os.getloadavg()},
        "settings": {
            "model": local.path.name,
            "threads": args.threads,
            "rounds": args.rounds,
            "decode_tokens": args.decode_tokens,
            "prompt_tokens": args.prompt_tokens,
        },
        "missing": missing,
        "results": [
            {"measure": m.name, "unit": m.unit, "contestant": name, **series.summary(m.unit)}
            for m in measures
            for name, series in results[m.name].items()
        ],
        "comparisons": comparisons(results),
    }
    print_report(report)
    if args.output_json:
        args.output_json.write_text(json.dumps(report, indent=2) + "\n")


def print_report(report: dict[str, Any]) -> None:
    machine = report["machine"]
    load = ", ".join(f"{x:.1f}" for x in machine["load_average"])
    print(f"{machine['cpu']}, {machine['cpus']} CPUs, load average before: {load}")
    print(f"{'measure':<18} {'contestant':<22} {'best':>8} {'median':>8}  unit")
    for r in report["results"]:
        print(
            f"{r['measure']:<18} {r['contestant']:<22} {r['best']:>8.2f} {r['median']:>8.2f}"
            f"  {r['unit']}"
        )
    for name, value in report["comparisons"].items():
        print(f"{name}: {value:.2f}")
    for name, why in report["missing"].items():
        print(f"{name}: not measured, {why}")


if __name__ == "__main__":
    main()
