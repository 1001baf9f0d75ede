"""The cost of a grammar on a GPU: tokens/s of free and constrained answers, in turns.

    python benchmarks/gpu_constrained.py [--output-json FILE]
    python benchmarks/gpu_constrained.py --device cpu      # a tiny model, to try the command out

Random weights with the shapes of a real model, and a made-up vocabulary of its size. Sampling at
temperature 1.

free     no request has a grammar
one      one answer is a JSON array of strings, and only the others, which are free, are counted;
         it is a third as long, so that the run never waits for it
json     every answer is a JSON array of strings
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from machine import parser_of, write_report
from made_up_models import MODELS, REAL, write_config

from termgen import LLM, SamplingParams
from termgen.vocabulary.structured_outputs import StructuredOutputsParams

STRINGS = {"type": "array", "items": {"type": "string", "minLength": 8}, "minItems": 4096}
JSON = StructuredOutputsParams(json=STRINGS)


def parse_args() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--model", choices=REAL, default="qwen3-0.6b")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--num-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3, help="medians of so many; one before them")
    return parser.parse_args()


def tokens_per_s(llm: LLM, kind: str, batch: int, num_tokens: int) -> float:
    num_json = {"free": 0, "one": 1, "json": batch}[kind]
    params = [
        SamplingParams(
            temperature=1.0,
            seed=seed,
            max_tokens=num_tokens // 3 if kind == "one" and not seed else num_tokens,
            ignore_eos=True,
            structured_outputs=JSON if seed < num_json else None,
        )
        for seed in range(batch)
    ]
    prompts = [f"once upon a time, in year {year}," for year in range(batch)]
    began = time.perf_counter()
    outputs = llm.generate(prompts, params)
    seconds = time.perf_counter() - began
    lengths = [len(output.outputs[0].token_ids) for output in outputs]
    assert lengths == [sampling.max_tokens for sampling in params], (kind, lengths)
    return sum(length for length in lengths if length == num_tokens) / seconds


def cell(llm: LLM, batch: int, args: argparse.Namespace) -> dict[str, float]:
    kinds = ("free", "one", "json") if batch > 1 else ("free", "json")
    speeds: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in range(args.rounds + 1):
        for kind in kinds:
            speeds[kind].append(tokens_per_s(llm, kind, batch, args.num_tokens))
    return {kind: statistics.median(found[1:]) for kind, found in speeds.items()}


def main() -> None:
    args = parse_args()
    with tempfile.TemporaryDirectory() as folder:
        name = "tiny" if args.device == "cpu" else args.model
        model = write_config(Path(folder), name, vocab=MODELS[name]["vocab_size"])
        options: dict[str, Any] = {"max_model_len": 4096, "max_num_seqs": max(args.batch_sizes)}
        with LLM(str(model), load_format="dummy", device=args.device, **options) as llm:
            cells = []
            for batch in args.batch_sizes:
                found = cell(llm, batch, args)
                cells.append({"batch": batch, "tokens_per_s": found})
                rates = ", ".join(f"{kind} {rate:,.0f}" for kind, rate in found.items())
                print(f"batch {batch}: {rates} tokens/s", flush=True)
    write_report(args, cells)


if __name__ == "__main__":
    main()
