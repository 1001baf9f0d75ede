"""Host time of one decode step: `Scheduler.schedule` plus `Scheduler.apply`, without a device.

    python benchmarks/host_time.py [--output-json FILE]

Every batch size runs at every context length, with the prefix cache on and made-up results (each
row samples one token). Once in a block's length a row takes a new block and publishes a full one,
so times are means over windows of that many steps; the table shows the median window. Only the rows
that take a block add time: batch 256 costs at most 4 times batch 1 on a quiet machine, and the
context length does not matter. Needs no model and no torch.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from machine import machine_facts

from termgen.engine.schedule.kv_cache import KVCacheManager
from termgen.engine.schedule.scheduler import Scheduler, SchedulerConfig
from termgen.vocabulary.request import Request
from termgen.vocabulary.sampling_params import SamplingParams
from termgen.vocabulary.step import StepPlan, StepResult

BLOCK_SIZE = 16
PREFILL_TOKENS = 65_536
Times = npt.NDArray[np.float64]


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 4096, 16384])
    parser.add_argument("--windows", type=int, default=25, help="timed windows of 16 steps a case")
    parser.add_argument("--rounds", type=int, default=3, help="times every case is run, in turn")
    parser.add_argument("--output-json", type=Path, help="write settings and results here")
    args = parser.parse_args()
    if min(args.windows, args.rounds, *args.batch_sizes, *args.contexts) < 1:
        parser.error("every number must be at least 1")
    return args


def make_scheduler(batch_size: int, context: int, steps: int) -> Scheduler:
    """A scheduler whose `batch_size` requests have all landed their prompt of `context` tokens."""
    # The first row decodes while the last one's prompt is read; no request may finish meanwhile.
    max_tokens = 2 * steps + batch_size * context // PREFILL_TOKENS
    max_model_len = context + max_tokens
    kv = KVCacheManager(
        num_blocks=1 + batch_size * -(-max_model_len // BLOCK_SIZE),
        block_size=BLOCK_SIZE,
        max_num_seqs=batch_size,
        max_model_len=max_model_len,
        enable_prefix_caching=True,
    )
    config = SchedulerConfig(
        max_num_seqs=batch_size,
        max_num_batched_tokens=PREFILL_TOKENS,
        max_model_len=max_model_len,
    )
    scheduler = Scheduler(config, kv)
    rng = np.random.default_rng(0)
    for i in range(batch_size):
        scheduler.add_request(
            Request(
                request_id=f"request-{i}",
                token_ids=rng.integers(0, 32_000, context).astype(np.int32),
                num_prompt_tokens=context,
                params=SamplingParams(max_tokens=max_tokens, temperature=0.0),
                seed=0,
                max_total_tokens=max_model_len,
                stop_token_ids=frozenset((2,)),
                priority=0,
                arrival_ns=i,
                cache_salt=None,
            )
        )
    while any(request.slot < 0 for request in scheduler.requests.values()) or prefilling(scheduler):
        plan = scheduler.schedule()
        assert plan is not None
        scheduler.apply(plan, made_up_result(scheduler, plan))
    return scheduler


def prefilling(scheduler: Scheduler) -> bool:
    table = scheduler.slots
    running = table.running
    return bool((table.num_tokens[running] == table.num_prompt[running]).any())


def made_up_result(scheduler: Scheduler, plan: StepPlan) -> StepResult:
    """The device's answer: rows that reached their newest token sample token 5."""
    table = scheduler.slots
    samples = table.num_computed[plan.slots] >= table.num_tokens[plan.slots]
    return StepResult(
        step_id=plan.step_id,
        num_sampled=samples.astype(np.int32),
        token_ids=np.full(int(samples.sum()), 5, np.int32),
        logprobs=None,
        started_ns=0,
        ended_ns=0,
    )


def time_windows(batch_size: int, context: int, windows: int) -> Times:
    """[windows, 2] mean microseconds of `schedule` and of `apply`."""
    steps = (1 + windows) * BLOCK_SIZE  # the first window warms up
    scheduler = make_scheduler(batch_size, context, steps)
    times_ns = np.zeros((steps, 2))
    gc.collect()
    gc.freeze()
    for step in range(steps):
        start = time.perf_counter_ns()
        plan = scheduler.schedule()
        times_ns[step, 0] = time.perf_counter_ns() - start
        assert plan is not None and plan.num_rows == plan.total_tokens == batch_size
        result = made_up_result(scheduler, plan)
        start = time.perf_counter_ns()
        scheduler.apply(plan, result)
        times_ns[step, 1] = time.perf_counter_ns() - start
    gc.unfreeze()
    windows_us: Times = times_ns.reshape(-1, BLOCK_SIZE, 2).mean(axis=1) / 1e3
    return windows_us[1:]


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    cases = [(batch, context) for batch in args.batch_sizes for context in args.contexts]
    times: dict[tuple[int, int], list[Times]] = {case: [] for case in cases}
    for _ in range(args.rounds):
        for case in cases:
            times[case].append(time_windows(*case, args.windows))
    results = []
    for (batch, context), rounds in times.items():
        windows = np.concatenate(rounds)
        total = windows.sum(axis=1)
        results.append(
            {
                "batch_size": batch,
                "context": context,
                "schedule_us": float(np.median(windows[:, 0])),
                "apply_us": float(np.median(windows[:, 1])),
                "step_us": float(np.median(total)),
                "step_best_us": float(total.min()),
                "step_p90_us": float(np.percentile(total, 90)),
            }
        )
    return results


def ratios(results: list[dict[str, Any]]) -> dict[str, float]:
    """Largest batch over smallest (worst context), longest context over shortest (worst batch)."""
    step = {(r["batch_size"], r["context"]): r["step_us"] for r in results}
    batches = sorted({batch for batch, _ in step})
    contexts = sorted({context for _, context in step})
    return {
        f"batch {batches[-1]} / batch {batches[0]}": max(
            step[batches[-1], c] / step[batches[0], c] for c in contexts
        ),
        f"context {contexts[-1]} / context {contexts[0]}": max(
            step[b, contexts[-1]] / step[b, contexts[0]] for b in batches
        ),
    }


def main() -> None:
    args = parse_args()
    results = measure(args)
    compared = ratios(results)
    print("median host time of a decode step, microseconds")
    columns = ("batch", "context", "schedule", "apply", "step", "best", "p90")
    print("".join(f"{name:>9}" for name in columns))
    for r in results:
        figures = ("schedule_us", "apply_us", "step_us", "step_best_us", "step_p90_us")
        cells = "".join(f"{r[figure]:>9.1f}" for figure in figures)
        print(f"{r['batch_size']:>9}{r['context']:>9}{cells}")
    for name, ratio in compared.items():
        print(f"{name}: {ratio:.2f}x at worst")
    if args.output_json:
        report = {
            "machine": machine_facts(),
            "settings": {"windows": args.windows, "rounds": args.rounds, "block_size": BLOCK_SIZE},
            "results": results,
            "ratios": compared,
        }
        args.output_json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
