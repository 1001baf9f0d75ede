"""CPU speed of termgen beside transformers and llama.cpp: same machine, same run, same weights.

    python benchmarks/cpu_decode.py [--model NAME_OR_GGUF] [--output-json FILE]

Measures decode tokens/s at batch 1 and 8 and the time a 256-token prompt takes to its first token.
The contestants take turns, round after round (A-B-C-A-B-C), each in a process of its own that
sleeps while another one works, so that a change in the machine's mood hits all of them. Decode
speed is the time of n+1 tokens less the time of one token, for all alike. transformers reads the
same GGUF file, dequantised to float32; llama.cpp gets its weights quantised again to Q8_0.

A contestant whose packages are missing is left out with a line that says so.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import sys
import time
from collections import defaultdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from contestants import CONTESTANTS, MAX_BATCH, Missing, Prompts
from machine import machine_facts, parser_of, print_rows, write_report

from termgen.library.catalog import resolve_model

SAME = ("termgen float32", "transformers float32")
"""The two that do the same arithmetic: the rounds in which their tokens are equal are counted."""
ID_RANGE = (1000, 20_000)  # plain words in any vocabulary


def serve(name: str, model: Path, threads: int, pipe: Connection) -> None:
    """Answer (prompts, number of tokens) with (seconds, token ids) until the pipe ends."""
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)
    start = time.perf_counter()
    try:
        generate = CONTESTANTS[name](model, threads)
    except Missing as error:
        pipe.send(str(error))
        return
    pipe.send(time.perf_counter() - start)
    while (command := pipe.recv()) is not None:
        start = time.perf_counter()
        token_ids = generate(*command)
        pipe.send((time.perf_counter() - start, token_ids))


class Contestant:
    """One engine in its process."""

    def __init__(self, name: str, model: Path, threads: int) -> None:
        self.name = name
        spawn = multiprocessing.get_context("spawn")
        self._pipe, pipe = spawn.Pipe()
        self._process = spawn.Process(target=serve, args=(name, model, threads, pipe), daemon=True)
        self._process.start()
        pipe.close()

    def started(self) -> float | str:
        """Seconds of loading, or why it cannot run."""
        try:
            return self._pipe.recv()
        except EOFError:
            return "its process ended"

    def generate(self, prompts: Prompts, num_tokens: int) -> tuple[float, Prompts]:
        self._pipe.send((prompts, num_tokens))
        seconds, token_ids = self._pipe.recv()
        return seconds, token_ids

    def close(self) -> None:
        self._pipe.send(None)
        self._process.join(20.0)


def run_once(contestant: Contestant, prompts: Prompts, decoded: int) -> tuple[float, Prompts]:
    """Tokens/s after the first token, or for `decoded` = 0 seconds to it; and the tokens."""
    first_s, tokens = contestant.generate(prompts, 1)
    if not decoded:
        return first_s, tokens
    all_s, tokens = contestant.generate(prompts, 1 + decoded)
    return len(prompts) * decoded / (all_s - first_s), tokens


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--model", help="catalog name or .gguf file (default: smollm2-135m)")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--decode-tokens", type=int, default=48, help="timed tokens a round")
    parser.add_argument("--prompt-tokens", type=int, default=256, help="prompt of the prefill")
    parser.add_argument("--only", nargs="+", choices=CONTESTANTS, help="leave out the others")
    args = parser.parse_args()
    local = resolve_model(args.model)
    if local.kind != "gguf":
        parser.error(f"{local.path} is not a GGUF file, which every contestant can read")
    facts = machine_facts()
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    contestants = []
    for name in args.only or CONTESTANTS:  # loaded one after another
        contestant = Contestant(name, local.path, args.threads)
        if isinstance(loaded := contestant.started(), str):
            print(f"{name}: left out, {loaded}", file=sys.stderr)
        else:
            print(f"{name}: loaded in {loaded:.1f} s", file=sys.stderr)
            contestants.append(contestant)
    rng = np.random.default_rng(0)
    for contestant in contestants:  # warm up: allocators, thread pools, page cache
        contestant.generate(rng.integers(*ID_RANGE, (MAX_BATCH, 32)).tolist(), 4)
    measures = {  # (batch size, prompt tokens, decoded tokens)
        "decode, batch 1, tokens/s": (1, 16, args.decode_tokens),
        "decode, batch 8, tokens/s": (MAX_BATCH, 16, args.decode_tokens),
        f"{args.prompt_tokens}-token prompt, s": (1, args.prompt_tokens, 0),
    }
    values: dict[tuple[str, str], list[float]] = defaultdict(list)
    num_equal: dict[str, int] = dict.fromkeys(measures, 0)
    for index in range(args.rounds):
        for measure, (batch, prompt, decoded) in measures.items():
            prompts = rng.integers(*ID_RANGE, (batch, prompt)).tolist()
            tokens = {}
            for contestant in contestants:
                value, tokens[contestant.name] = run_once(contestant, prompts, decoded)
                values[measure, contestant.name].append(value)
            num_equal[measure] += tokens.get(SAME[0], 0) == tokens.get(SAME[1], 1)
        print(f"round {index + 1} of {args.rounds} done", file=sys.stderr)
    for contestant in contestants:
        contestant.close()
    results: list[dict[str, Any]] = []
    for (measure, name), found in values.items():
        middle = statistics.median(found)
        results.append({"measure": measure, "contestant": name, "median": middle, "values": found})
    print_rows({name: row[name] for name in ("measure", "contestant", "median")} for row in results)
    print(f"rounds in which {' and '.join(SAME)} gave the same tokens: {[*num_equal.values()]}")
    write_report(args, {"values": results, "rounds_with_equal_tokens": num_equal}, facts)


if __name__ == "__main__":
    main()
