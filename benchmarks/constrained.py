"""The cost of structured outputs: compiling, masks, and tokens/s beside free text.

    python benchmarks/constrained.py [--model NAME_OR_PATH] [--parts compile masks decode]
    python benchmarks/constrained.py --parts gpu                # qwen3-0.6b's shapes on a GPU
    python benchmarks/constrained.py --parts gpu --device cpu   # a tiny model, to try it out

compile  one grammar at a time, without the cache; medians. The first one of an engine also waits
         for the vocabulary
masks    time from requesting the masks of a step until all are there, and to consume its tokens,
         while 1 or 32 answers go through the same document, each from a position of its own
decode   tokens/s of the same prompts, alternating between free text and a grammar that allows as
         many tokens, on this CPU; and the processor time of a token, which is more reliable on a
         busy machine
gpu      the same with random weights and a made-up vocabulary of the model's size. one: one answer
         is JSON, and only the others, which are free, are counted; it is a third as long, so that
         the run never waits for it. Not run unless named
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from machine import machine_facts, parser_of, percentiles, write_report
from made_up_models import MODELS, write_config

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


def seconds(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def make_compiler(args: argparse.Namespace) -> tuple[GrammarCompiler, Any, int]:
    tokenizer = load_tokenizer(resolve_model(args.model, allow_download=True).path)
    eos = tokenizer.eos_token_ids or (0,)
    compiler = GrammarCompiler(tokenizer, vocab_size=tokenizer.vocab_size, eos_token_ids=eos)
    return compiler, tokenizer, tokenizer.vocab_size


def measure_compile(args: argparse.Namespace) -> dict[str, Any]:
    compiler, _, vocab_size = make_compiler(args)
    first_s = seconds(lambda: compiler.compile(StructuredOutputsParams(choice=("a",))))
    kinds = {}
    for name, given in KINDS.items():
        wanted, times = StructuredOutputsParams(**given), []
        for _ in range(7):
            compiler._cache.clear()
            times.append(1e3 * seconds(lambda: compiler.compile(wanted)))  # noqa: B023
        kinds[name] = {"median_ms": statistics.median(times), "max_ms": max(times)}
    return {"vocab_size": vocab_size, "vocabulary_s": first_s, "kinds": kinds}


def measure_masks(args: argparse.Namespace) -> dict[str, Any]:
    compiler, tokenizer, _ = make_compiler(args)
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
        found[str(batch)] = {"fill_us": percentiles(fill_us), "accept_us": percentiles(accept_us)}
    return found


Request = Callable[[int], tuple[int, StructuredOutputsParams | None]]
"""Number of tokens and grammar of one row of a batch."""


def measure_kinds(
    llm: LLM, batch: int, kinds: dict[str, Request], counted: int, rounds: int
) -> dict[str, dict[str, float]]:
    """Medians of each kind, in turns. counted: length of the answers whose tokens count."""
    speeds: dict[str, list[float]] = {name: [] for name in kinds}
    works: dict[str, list[float]] = {name: [] for name in kinds}
    prompts = [f"Once upon a time, in year {year}," for year in range(batch)]
    for _ in range(rounds + 1):
        for name, request in kinds.items():
            params = [
                SamplingParams(
                    temperature=1.0,
                    seed=seed,
                    max_tokens=request(seed)[0],
                    ignore_eos=True,
                    structured_outputs=request(seed)[1],
                )
                for seed in range(batch)
            ]
            start, began = time.perf_counter(), time.process_time()
            outputs = llm.generate(prompts, params)
            elapsed, work = time.perf_counter() - start, time.process_time() - began
            lengths = [len(output.outputs[0].token_ids) for output in outputs]
            assert lengths == [sampling.max_tokens for sampling in params], (name, lengths)
            speeds[name].append(sum(n for n in lengths if n == counted) / elapsed)
            works[name].append(1e3 * work / sum(lengths))
    return {
        name: {
            "tokens_per_s": statistics.median(speeds[name][1:]),
            "cpu_ms_per_token": statistics.median(works[name][1:]),
        }
        for name in kinds
    }


def strings(*, min_length: int, min_items: int) -> StructuredOutputsParams:
    item = {"type": "string", "minLength": min_length}
    return StructuredOutputsParams(json={"type": "array", "items": item, "minItems": min_items})


def measure_decode(args: argparse.Namespace) -> dict[str, Any]:
    num = args.num_tokens or 48
    text = StructuredOutputsParams(regex=f"[a-z ]{{{20 * num},}}")
    json_text = strings(min_length=4 * num, min_items=1)
    kinds: dict[str, Request] = {
        "free": lambda row: (num, None),
        "regex": lambda row: (num, text),
        "json": lambda row: (num, json_text),
    }
    options: dict[str, Any] = {"max_model_len": 1024, "num_gpu_blocks_override": 700}
    with LLM(args.model, device="cpu", threads=args.threads or None, **options) as llm:
        return {b: measure_kinds(llm, b, kinds, num, args.rounds) for b in (1, 8)}


def measure_gpu(args: argparse.Namespace) -> dict[str, Any]:
    num = args.num_tokens or 128
    many = strings(min_length=8, min_items=4096)
    kinds: dict[str, Request] = {
        "free": lambda row: (num, None),
        "one": lambda row: (num, None) if row else (num // 3, many),
        "json": lambda row: (num, many),
    }
    name = "qwen3-0.6b" if args.device == "cuda" else "tiny"
    options: dict[str, Any] = {"max_model_len": 4096, "max_num_seqs": 32, "device": args.device}
    with tempfile.TemporaryDirectory() as folder:
        model = write_config(Path(folder), name, vocab=MODELS[name]["vocab_size"])
        with LLM(str(model), load_format="dummy", **options) as llm:
            found = {b: measure_kinds(llm, b, kinds, num, args.rounds) for b in (8, 32)}
            del kinds["one"]
            return {1: measure_kinds(llm, 1, kinds, num, args.rounds), **found}


PARTS = {
    "compile": measure_compile,
    "masks": measure_masks,
    "decode": measure_decode,
    "gpu": measure_gpu,
}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS)[:3])
    parser.add_argument("--num-tokens", type=int, help="of an answer (default: 48; gpu: 128)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=0, help="0: as termgen chooses")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="of the part gpu")
    args = parser.parse_args()
    facts, results = machine_facts(), {}
    for part in args.parts:
        results[part] = PARTS[part](args)
        print(json.dumps({part: results[part]}, indent=1), flush=True)
    write_report(args, results, facts)


if __name__ == "__main__":
    main()
