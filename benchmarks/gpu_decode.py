"""Speed of the engine on one GPU: random weights, real shapes.

    python benchmarks/gpu_decode.py [--models NAME ...] [--parts decode job prefill start]
    python benchmarks/gpu_decode.py --option kv_cache_dtype=int8
    python benchmarks/gpu_decode.py --models qwen3-0.6b --parts sampling --batch-sizes 1 32 256
    python benchmarks/gpu_decode.py --models qwen3-0.6b --parts modes

decode    time per step: prompts of 512 tokens, mean over 192 steps in which every row decodes
job       256 requests of 100 to 1024 prompt and output tokens, drawn with seed 0: output tokens/s
prefill   32 prompts of 2048 tokens, one output token each: prompt tokens/s
start     birth of a process to its first token, with no kernel cached and with all
sampling  decode with each kind of sampling, and its tokens/s in percent of those of plain sampling,
          measured in turns with it; not run unless named
modes     --cudagraph-mode under loads of a constant number of running requests, at most 2048 tokens
          a step: one that ends is followed by the next, so most steps hold prompts among decodes.
          Three rounds in turns; medians. To be named alone

Needs a CUDA device and no tokenizer. Each model runs in a process of its own.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import ChainMap
from pathlib import Path
from typing import Any

from machine import gpu_name, machine_facts, parser_of, print_rows, write_report
from made_up_models import LARGE, OTHERS, REAL, write_config

from termgen.config import EngineConfig
from termgen.engine.device.kernels.kv_cache import head_items
from termgen.engine.device.layers.matrix_list import ExpertList
from termgen.engine.loop.engine import SyncEngine
from termgen.vocabulary.events import EventRing, StepRecord
from termgen.vocabulary.request import GenerationRequest
from termgen.vocabulary.sampling_params import SamplingParams

PARTS = ("decode", "job", "prefill", "start", "sampling", "modes")
SAMPLING: dict[str, dict[str, Any]] = {
    "plain": {},
    "repetition_penalty 1.1": {"repetition_penalty": 1.1},
    "presence + frequency": {"presence_penalty": 0.5, "frequency_penalty": 0.5},
    "min_tokens": {"min_tokens": 300, "stop_token_ids": (7, 8, 9)},
    "logit_bias (8 ids)": {"logit_bias": {1000 + 7 * i: 2.5 for i in range(8)}},
    "logprobs 5": {"logprobs": 5},
    "logprobs 20": {"logprobs": 20},
}
SAMPLING["all of these"] = dict(ChainMap(*reversed(SAMPLING.values())))
ROUNDS = 3
MODES = ("full_and_piecewise", "full", "full_decode_only")
LOADS = {
    "chat": {"running": 32, "prompt": (32, 256), "output": (16, 64), "requests": 400},
    "document": {"running": 16, "prompt": (256, 1500), "output": (32, 128), "requests": 120},
}
MODE_OPTIONS = {"max_num_batched_tokens": 2048, "max_num_seqs": 64, "kv_cache_gib": 6.0}
OPTION: dict[str, Any] = {
    "action": "append",
    "default": [],
    "metavar": "FIELD=VALUE",
    "help": "further engine setting, such as cudagraph_mode=piecewise",
}
PROMPT, STEPS, WARM_STEPS = 512, 192, 16
PEAK_BYTES_PER_S = {"H100": 3.35e12, "H200": 4.8e12}
"""Rates of the memory, by the vendor's datasheets."""
MOST_IDS = 100_000
"""Token ids that prompts are drawn from, where the vocabulary is not smaller."""


def parse_args() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--models", nargs="+", choices=(*REAL, *OTHERS, *LARGE), default=list(REAL))
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS[:4]))
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8, 32, 128, 256])
    parser.add_argument("--prompt", type=int, default=PROMPT, help="tokens, of --parts decode")
    parser.add_argument("--option", **OPTION)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--start", nargs=2, metavar=("FOLDER", "BORN"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if "modes" in args.parts and len(args.parts) > 1:
        parser.error("--parts modes: has engines of its own, so name it alone")
    return args


def engine_options(items: list[str]) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for item in items:
        name, _, value = item.partition("=")
        try:
            options[name] = json.loads(value)
        except json.JSONDecodeError:
            options[name] = value
    return options


def make_engine(model: Path, **options: Any) -> SyncEngine:
    """With random weights and no tokenizer."""
    fixed = {"load_format": "dummy", "skip_tokenizer_init": True, "device": "cuda"}
    return SyncEngine(
        EngineConfig(**{"model": str(model), **fixed, "max_model_len": 4096, **options})
    )


FULL = {"max_num_seqs": 256, "max_num_batched_tokens": 16384, "enable_prefix_caching": False}


def request(
    name: int, prompt_tokens: int, output_tokens: int, vocab: int, **params: Any
) -> GenerationRequest:
    """A request of random tokens, the same for the same name and length."""
    rng = random.Random(f"{name} {prompt_tokens}")
    return GenerationRequest(
        request_id=f"{name}",
        prompt_token_ids=tuple(rng.randrange(10, vocab) for _ in range(prompt_tokens)),
        params=SamplingParams(
            max_tokens=output_tokens, temperature=0.0, ignore_eos=True, seed=name, **params
        ),
    )


def add(engine: SyncEngine, name: int, prompt: int, output: int, **params: Any) -> None:
    vocab = min(MOST_IDS, engine.model.vocab_size)
    engine.add(request(name, prompt, output, vocab, **params))


def drain(engine: SyncEngine) -> None:
    while engine.has_unfinished:
        engine.step()


def drain_timed(engine: SyncEngine) -> float:
    """Seconds until all requests are done."""
    started = time.perf_counter()
    drain(engine)
    return time.perf_counter() - started


def decode_cell(
    engine: SyncEngine, batch: int, prompt: int = PROMPT, **params: Any
) -> dict[str, Any]:
    """Milliseconds per step, by the clock of the thread that reads the tokens."""
    for index in range(batch):
        add(engine, index, prompt, STEPS + 3 * WARM_STEPS + 64, **params)
    ring: EventRing = engine.core.bus.subscribe()
    decoding = 0
    while decoding < WARM_STEPS:
        engine.step()
        for record in ring.drain():
            if isinstance(record, StepRecord):
                is_full = record.num_decode_rows == batch and not record.num_prefill_rows
                decoding = decoding + 1 if is_full else 0
    started = time.perf_counter()
    for _ in range(STEPS):
        engine.step()
    seconds = time.perf_counter() - started
    records = [r for r in ring.drain() if isinstance(r, StepRecord)]
    engine.core.bus.unsubscribe(ring)
    assert all(r.num_sampled_tokens == batch for r in records), "a row ended while it was timed"
    for index in range(batch):
        engine.abort(f"{index}")
    drain(engine)
    return {
        "batch": batch,
        "ms": seconds / STEPS * 1e3,
        "graph_share": sum(r.graph_mode != "NONE" for r in records) / len(records),
        "schedule_us": sum(r.schedule_us for r in records) / len(records),
        "apply_us": sum(r.apply_us for r in records) / len(records),
    }


def peak_bytes_per_s() -> float:
    name = gpu_name()
    return next((rate for card, rate in PEAK_BYTES_PER_S.items() if card in name), math.nan)


def step_bytes(engine: SyncEngine, rows: int, context: int) -> float:
    """Bytes that a step of decodes has to move: each weight once, of a mixture those of the experts
    that random tokens choose; the keys and values that rows see; each state in and out."""
    runner = engine.core.executor._runner  # type: ignore[attr-defined]
    config, kv_dtype, moved = runner.config, runner.kv_cache_dtype, 0.0
    num_matrices = {
        weight: len(module)
        for module in runner.model.modules()
        if isinstance(module, ExpertList)
        for weight in module.parameters()
    }
    for name, weight in runner.model.named_parameters():
        size = weight.nbytes
        if "embed" in name and not (config.tie_word_embeddings and "per_layer" not in name):
            size = rows * size / len(weight)
        elif config.moe is not None and (weight in num_matrices or weight.dim() == 3):
            num = num_matrices.get(weight, len(weight))
            if num >= config.moe.num_experts:
                missed = 1 - config.moe.num_experts_per_tok / config.moe.num_experts
                size -= missed**rows * size / num * config.moe.num_experts
        moved += size
    for layer in range(config.num_layers):
        if (spec := config.layer_caches[config.kv_source(layer)]) is not None:
            head = head_items(spec.head_dim, kv_dtype) * kv_dtype.itemsize
            moved += rows * min(context, spec.window or context) * 2 * spec.num_kv_heads * head
    return moved + sum(2 * state.delta[:rows].nbytes for state in runner.states)


def sampling_cells(engine: SyncEngine, batches: list[int]) -> list[dict[str, Any]]:
    """Each kind of sampling at each batch size, the median of some rounds; every kind once in each
    round, since clocks change in the meantime."""
    cells = []
    for batch in batches:
        runs: dict[str, list[dict[str, Any]]] = {kind: [] for kind in SAMPLING}
        for kind in [*SAMPLING] * ROUNDS:
            gc.collect()
            runs[kind].append(decode_cell(engine, batch, **SAMPLING[kind]))
        for kind, found in runs.items():
            middle = sorted(found, key=lambda cell: cell["ms"])[len(found) // 2]
            cells.append({**middle, "kind": kind})
    return cells


def job(engine: SyncEngine) -> float:
    """The 256-request job: output tokens per second."""
    rng = random.Random(0)
    lengths = [(rng.randint(100, 1024), rng.randint(100, 1024)) for _ in range(256)]
    for index, (prompt, output) in enumerate(lengths):
        add(engine, index, prompt, output)
    return sum(output for _, output in lengths) / drain_timed(engine)


def prefill(engine: SyncEngine) -> float:
    """Prompt tokens per second."""
    for index in range(32):
        add(engine, index, 2048, 1)
    return 32 * 2048 / drain_timed(engine)


def run_load(engine: SyncEngine, load: dict[str, Any]) -> dict[str, Any]:
    rng = random.Random(0)
    ring: EventRing = engine.core.bus.subscribe()
    added_at: dict[str, float] = {}
    first: dict[str, float] = {}
    steps: list[StepRecord] = []
    num_tokens = running = started = 0
    begin = time.perf_counter()
    while started < load["requests"] or engine.has_unfinished:
        while running < load["running"] and started < load["requests"]:
            prompt, output = rng.randint(*load["prompt"]), rng.randint(*load["output"])
            added_at[str(started)] = time.perf_counter()
            add(engine, started, prompt, output)
            started, running = started + 1, running + 1
        deltas = engine.step()
        now = time.perf_counter()
        for delta in deltas:
            num_tokens += len(delta.token_ids)
            first.setdefault(delta.request_id, now)
            running -= delta.finish_reason is not None
        steps += [r for r in ring.drain() if isinstance(r, StepRecord)]
    seconds = time.perf_counter() - begin
    engine.core.bus.unsubscribe(ring)
    mixed = [s for s in steps if s.num_prefill_tokens]
    return {
        "tokens_per_s": num_tokens / seconds,
        "ttft_ms": statistics.mean(first[i] - added_at[i] for i in first) * 1e3,
        "mixed_share": len(mixed) / len(steps),
        "tokens_in_mixed": statistics.median(
            s.num_prefill_tokens + s.num_decode_rows for s in mixed
        ),
    }


def modes(model: Path) -> list[dict[str, Any]]:
    """Each mode under each load: the median of some rounds, in turns."""
    fixed = {"enable_prefix_caching": False, **MODE_OPTIONS}
    engines = {mode: make_engine(model, cudagraph_mode=mode, **fixed) for mode in MODES}
    cells = []
    for load_name, load in LOADS.items():
        rounds: dict[str, list[dict[str, Any]]] = {mode: [] for mode in MODES}
        for mode in [*MODES] * (ROUNDS + 1):
            gc.collect()
            rounds[mode].append(run_load(engines[mode], load))
        for mode, found in rounds.items():  # the first round warms up
            middle = sorted(found[1:], key=lambda f: f["tokens_per_s"])[ROUNDS // 2]
            cells.append({"load": load_name, "mode": mode, **middle})
    for engine in engines.values():
        engine.shutdown()
    return cells


def run_model(args: argparse.Namespace, name: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        options, model = engine_options(args.option), write_config(Path(folder), name)
        if args.parts == ["modes"]:
            return {"modes": modes(model)}
        engine = make_engine(model, **{**FULL, **options})
        result: dict[str, Any] = {"model": name, "decode": []}
        for _ in range(2):  # clocks, allocator
            decode_cell(engine, min(8, max(args.batch_sizes)))
        if "decode" in args.parts:
            for batch in args.batch_sizes:
                gc.collect()
                cell = decode_cell(engine, batch, args.prompt)
                context = args.prompt + WARM_STEPS + STEPS // 2
                moved = step_bytes(engine, batch, context)
                cell["GB"] = moved / 1e9
                cell["% of peak"] = 100 * moved / cell["ms"] * 1e3 / peak_bytes_per_s()
                result["decode"].append(cell)
        if "job" in args.parts:
            result["job"] = [job(engine) for _ in range(2)][-1]
        if "prefill" in args.parts:
            result["prefill"] = max(prefill(engine) for _ in range(3))
        if "sampling" in args.parts:
            result["sampling"] = sampling_cells(engine, args.batch_sizes)
        engine.shutdown()
    return result


def start(folder: Path, born: float, options: dict[str, Any]) -> dict[str, Any]:
    """Seconds from the birth of this process, by `time.time`, to its first token."""
    imported = time.time()
    engine = make_engine(folder, **options)
    add(engine, 0, 100, 2)
    while not any(delta.token_ids for delta in engine.step()):
        pass
    first_token = time.time()
    snapshot = engine.snapshot()
    return {
        "imports_s": imported - born,
        "first_token_s": first_token - born,
        "phases": [list(phase) for phase in engine.model.startup],
        "graphs": [snapshot.num_graphs_recorded, snapshot.num_graphs],
    }


def starts(name: str) -> list[dict[str, Any]]:
    """Two starts in fresh processes that share a kernel cache and a bytecode cache, both empty at
    first.

    An installed package comes with its bytecode, but some machines keep packages without it in
    read-only folders, and compile a thousand files at every start.
    """
    found = []
    with tempfile.TemporaryDirectory() as cache, tempfile.TemporaryDirectory() as folder:
        model = write_config(Path(folder), name)
        caches = {"TRITON_CACHE_DIR": cache, "PYTHONPYCACHEPREFIX": f"{cache}/bytecode"}
        for _ in range(2):
            command = [sys.executable, *sys.argv, "--start", str(model), repr(time.time())]
            done = subprocess.run(
                command, env=os.environ | caches, stdout=subprocess.PIPE, text=True, check=True
            )
            found.append(json.loads(done.stdout.splitlines()[-1]))
    return found


def print_result(result: dict[str, Any]) -> None:
    print(result["model"])
    print_rows(result["decode"])
    kinds: dict[str, dict[str, Any]] = {}
    for cell in result.get("sampling", ()):
        row = kinds.setdefault(cell["kind"], {"sampling": cell["kind"]})
        plain_ms = kinds["plain"].get(name := f"{cell['batch']} rows, ms", cell["ms"])
        row |= {name: cell["ms"], f"{cell['batch']}, %": 100 * plain_ms / cell["ms"]}
    print_rows(kinds.values())
    print_rows(
        {"part": part, "tokens/s": result[part]} for part in ("job", "prefill") if part in result
    )
    print_rows(result["start"])
    print_rows(result["modes"])


def main() -> None:
    args = parse_args()
    if args.start:
        folder, born = args.start
        print(json.dumps(start(Path(folder), float(born), engine_options(args.option))))
        return
    if args.child:
        print(json.dumps(run_model(args, args.models[0])))
        return
    results = []
    for name in args.models:
        result: dict[str, Any] = {"model": name, "decode": [], "start": [], "modes": []}
        if set(args.parts) - {"start"}:
            command = [sys.executable, *sys.argv, "--child", "--models", name]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
            if done.returncode:
                print(f"{name}: failed with code {done.returncode}")
                continue
            result |= json.loads(done.stdout.splitlines()[-1])
        if "start" in args.parts:  # after the child has freed the device's memory
            result["start"] = starts(name)
        results.append(result)
        print_result(result)
    write_report(args, results, {**machine_facts(), "gpu": gpu_name()})
    if len(results) < len(args.models):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
