"""The faster way of recording steps with prompts: --cudagraph-mode under a mixed load.

    python benchmarks/gpu_modes.py [--models qwen3-0.6b llama-3.1-8b] [--modes full ...]

The number of running requests is constant: one that ends is followed by the next, so most steps
hold prompts among decodes. Chat: 32 running, prompts of 32 to 256 tokens, 16 to 64 out. Document:
16 running, prompts of 256 to 1500, 32 to 128 out. Random weights, at most 2048 tokens a step. The
modes alternate, three rounds; medians. A CUDA device is needed, and no tokenizer.
"""

from __future__ import annotations

import gc
import random
import statistics
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from gpu_decode import add, make_engine
from machine import parser_of, write_report
from made_up_models import REAL, write_config

from termgen.engine.loop.engine import SyncEngine
from termgen.vocabulary.events import EventRing, StepRecord

MODES = ("full_and_piecewise", "full", "full_decode_only")
LOADS = {
    "chat": {"running": 32, "prompt": (32, 256), "output": (16, 64), "requests": 400},
    "document": {"running": 16, "prompt": (256, 1500), "output": (32, 128), "requests": 120},
}
ROUNDS = 3
OPTIONS = {
    "enable_prefix_caching": False,
    "max_num_batched_tokens": 2048,
    "max_num_seqs": 64,
    "kv_cache_gib": 6.0,
}


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
    recorded = Counter(s.graph_mode for s in mixed)
    return {
        "tokens_per_s": num_tokens / seconds,
        "ttft_ms": statistics.mean(first[i] - added_at[i] for i in first) * 1e3,
        "mixed_share": len(mixed) / len(steps),
        "tokens_in_mixed": statistics.median(
            s.num_prefill_tokens + s.num_decode_rows for s in mixed
        ),
        "recorded": {mode: n / len(mixed) for mode, n in sorted(recorded.items())},
    }


def run_model(name: str, modes: list[str]) -> list[dict[str, Any]]:
    results = []
    with tempfile.TemporaryDirectory() as folder:
        model, engines = write_config(Path(folder), name), {}
        for mode in modes:
            engines[mode] = make_engine(model, cudagraph_mode=mode, **OPTIONS)
        for load_name, load in LOADS.items():
            rounds: dict[str, list[dict[str, Any]]] = {mode: [] for mode in modes}
            for index in range(ROUNDS + 1):
                for mode in modes:
                    gc.collect()
                    found = run_load(engines[mode], load)
                    if index:  # the first round warms up
                        rounds[mode].append(found)
            for mode, found in rounds.items():
                best = sorted(found, key=lambda f: f["tokens_per_s"])[len(found) // 2]
                results.append({"model": name, "load": load_name, "mode": mode, **best})
                shares = ", ".join(f"{100 * s:.0f}% {m}" for m, s in best["recorded"].items())
                print(
                    f"{name:<13} {load_name:<9} {mode:<19} {best['tokens_per_s']:8,.0f} tokens/s, "
                    f"first token {best['ttft_ms']:6.1f} ms; {100 * best['mixed_share']:.0f}% of "
                    f"steps mixed, of {best['tokens_in_mixed']:.0f} tokens: {shares}",
                    flush=True,
                )
        for engine in engines.values():
            engine.shutdown()
    return results


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--models", nargs="+", choices=REAL, default=["qwen3-0.6b"])
    parser.add_argument("--modes", nargs="+", default=list(MODES))
    args = parser.parse_args()
    write_report(args, [found for name in args.models for found in run_model(name, args.modes)])


if __name__ == "__main__":
    main()
