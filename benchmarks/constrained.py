"""The cost of structured outputs: compiling, masks, and tokens/s beside free text.

    python benchmarks/constrained.py [--model NAME_OR_PATH] [--parts compile,masks,decode]
        [--output-json FILE]

compile: one grammar at a time, without the cache; medians. The first one of an engine also waits
for the vocabulary. masks: time from requesting the masks of a step until all are there, and to
consume its tokens, while 1 or 32 answers go through the same document, each from a position of its
own. decode: tokens/s of the same prompts, alternating between free text and a grammar that allows
as many tokens, on this CPU; and the processor time of a token, which is more reliable on a busy
machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from machine import machine_facts

from termgen import LLM, SamplingParams
from termgen.engine.grammar.grammar import GrammarCompiler
from termgen.engine.grammar.mask_filler import MaskFiller
from termgen.engine.text.tokenizer import load_tokenizer
from termgen.library.catalog import resolve_model
from termgen.vocabulary.structured_outputs import StructuredOutputsParams
from termgen.vocabulary.token_mask import GrammarState

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "email": {"type": "string", "format": "email"},
        "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 5},
        "address": {
            "type": "object",
            "properties": {"street": {"type": "string"}, "zip": {"type": "string"}},
            "required": ["street", "zip"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "age", "email", "tags", "address"],
    "additionalProperties": False,
}
DOCUMENT = json.dumps(
    {
        "name": "Ada Lovelace, who wrote programs before there were machines to run them",
        "age": 36,
        "email": "ada@example.org",
        "tags": ["mathematics", "poetry", "first of all programmers"],
        "address": {"street": "12 St James's Square, London, near the library", "zip": "SW1Y"},
    },
    separators=(",", ":"),
)
NULLABLE = {"type": ["string", "null"], "maxLength": 50}
KINDS: dict[str, dict[str, Any]] = {
    "5 properties, one nested": {"json": PERSON},
    "any JSON object": {"json_object": True},
    "60 nullable strings of at most 50 characters": {
        "json": {"type": "object", "properties": {f"p{i}": NULLABLE for i in range(60)}}
    },
    "1000 properties": {
        "json": {"type": "object", "properties": {f"p{i}": {} for i in range(1000)}}
    },
    "enum of 5000 values": {"json": {"enum": [f"value{i}" for i in range(5000)]}},
    "regex [a-z]{1,100000}": {"regex": "[a-z]{1,100000}"},
    "choice of 3": {"choice": ("yes", "no", "maybe")},
    "Lark, 3 rules": {"grammar": "start: pair+\npair: key /[0-9]+/\nkey: /[a-z]+=/"},
}
PROMPTS = [f"Once upon a time, in year {year}," for year in range(8)]


def seconds(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def make_compiler(model: Path) -> tuple[GrammarCompiler, Any, int]:
    tokenizer = load_tokenizer(model)
    eos = tokenizer.eos_token_ids or (0,)
    compiler = GrammarCompiler(tokenizer, vocab_size=tokenizer.vocab_size, eos_token_ids=eos)
    return compiler, tokenizer, tokenizer.vocab_size


def measure_compile(model: Path) -> dict[str, Any]:
    compiler, _, vocab_size = make_compiler(model)
    first_s = seconds(lambda: compiler.compile(StructuredOutputsParams(choice=("a",))))
    kinds = {}
    for name, given in KINDS.items():
        wanted = StructuredOutputsParams(**given)
        times = [seconds(lambda: compiler._compile(wanted)) for _ in range(7)]  # noqa: B023
        kinds[name] = {"median_ms": 1e3 * statistics.median(times), "max_ms": 1e3 * max(times)}
    return {"vocab_size": vocab_size, "vocabulary_s": first_s, "kinds": kinds}


def measure_masks(model: Path) -> dict[str, Any]:
    compiler, tokenizer, _ = make_compiler(model)
    tokens = tokenizer.encode(DOCUMENT, add_special_tokens=False)
    grammar = compiler.compile(StructuredOutputsParams(json=PERSON))
    found = {}
    filler = MaskFiller()

    def fill(rows: list[GrammarState]) -> None:
        filler.begin(rows)
        filler.wait(rows, 10.0)

    for batch in (1, 32):
        fill_us: list[float] = []
        accept_us: list[float] = []
        for repeat in range(3 if batch > 1 else 12):
            places = [(i * len(tokens)) // batch for i in range(batch)]
            answers = [GrammarState(grammar, ends_at_eos=True) for _ in range(batch)]
            fill(answers)
            for answer, place in zip(answers, places, strict=True):
                for token in tokens[:place]:
                    answer.accept(token)
            for _ in range(len(tokens)):
                fill_s = seconds(lambda: fill(answers))  # noqa: B023
                start = time.perf_counter()
                for i in range(batch):
                    answers[i].accept(tokens[places[i]])
                    places[i] += 1
                    if places[i] == len(tokens):  # the next answer takes its slot
                        answers[i], places[i] = GrammarState(grammar, ends_at_eos=True), 0
                accept_s = time.perf_counter() - start
                if repeat:  # the first pass fills the grammar's own caches
                    fill_us.append(1e6 * fill_s)
                    accept_us.append(1e6 * accept_s)
                if not all(places):
                    fill([answers[i] for i in range(batch) if not places[i]])
        found[str(batch)] = {"fill_us": spread(fill_us), "accept_us": spread(accept_us)}
    return found


def spread(values: list[float]) -> dict[str, float]:
    return {
        "median": statistics.median(values),
        "p99": float(np.percentile(values, 99)),
        "max": max(values),
    }


def measure_decode(model: str, num_tokens: int, rounds: int, threads: int) -> dict[str, Any]:
    """Free text and constrained text of the same length, alternating."""
    json_text = {"type": "array", "items": {"type": "string", "minLength": 4 * num_tokens}}
    kinds = {
        "free": None,
        "regex": StructuredOutputsParams(regex=f"[a-z ]{{{20 * num_tokens},}}"),
        "json": StructuredOutputsParams(json={**json_text, "minItems": 1}),
    }
    found: dict[str, Any] = {}
    settings: dict[str, Any] = {"max_model_len": 1024, "num_gpu_blocks_override": 700}
    with LLM(model, device="cpu", threads=threads or None, **settings) as llm:
        for batch in (1, 8):
            speeds: dict[str, list[float]] = {name: [] for name in kinds}
            works: dict[str, list[float]] = {name: [] for name in kinds}
            for _ in range(rounds + 1):
                for name, wanted in kinds.items():
                    params = SamplingParams(
                        temperature=1.0,
                        seed=1,
                        max_tokens=num_tokens,
                        ignore_eos=True,
                        structured_outputs=wanted,
                    )
                    start, began = time.perf_counter(), time.process_time()
                    outputs = llm.generate(PROMPTS[:batch], params)
                    elapsed = time.perf_counter() - start
                    work = time.process_time() - began
                    count = sum(len(output.outputs[0].token_ids) for output in outputs)
                    assert count == batch * num_tokens, (name, count)
                    speeds[name].append(count / elapsed)
                    works[name].append(1e3 * work / count)
            found[str(batch)] = {
                name: {
                    "tokens_per_s": statistics.median(speeds[name][1:]),
                    "cpu_ms_per_token": statistics.median(works[name][1:]),
                }
                for name in kinds
            }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--parts", default="compile,masks,decode")
    parser.add_argument("--num-tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=0, help="0: as termgen chooses")
    parser.add_argument("--output-json", type=Path)
    args = parser.parse_args()
    path = resolve_model(args.model, allow_download=True).path
    report: dict[str, Any] = {"machine": machine_facts(), "model": args.model}
    if "compile" in args.parts:
        report["compile"] = measure_compile(path)
    if "masks" in args.parts:
        report["masks"] = measure_masks(path)
    if "decode" in args.parts:
        report["decode"] = measure_decode(args.model, args.num_tokens, args.rounds, args.threads)
    text = json.dumps(report, indent=1)
    print(text)
    if args.output_json is not None:
        args.output_json.write_text(text + "\n")


if __name__ == "__main__":
    main()
