"""Host time of one decode step: `Scheduler.schedule` plus `Scheduler.apply`, without a device.

    python benchmarks/host_time.py [--drafts 4] [--output-json FILE]

Every batch size runs at every context length, with the prefix cache on and made-up results (each
row samples one token). Once in a block's length a row takes a new block and publishes a full one,
so times are means over windows of that many steps; the table shows the median window. Only the rows
that take a block add time: batch 256 costs at most 4 times batch 1 on a quiet machine, and the
context length does not matter. With drafts every row has as many in each step, and keeps from none
to all of them, in turn. Needs no model and no torch.
"""

from __future__ import annotations

import gc
import time

import numpy as np
import numpy.typing as npt
from machine import parser_of, print_rows, write_report

from termgen.engine.schedule.kv_cache import KVCacheManager
from termgen.engine.schedule.scheduler import Scheduler, SchedulerConfig
from termgen.vocabulary.request import Request
from termgen.vocabulary.sampling_params import SamplingParams
from termgen.vocabulary.step import StepPlan, StepResult

BLOCK_SIZE = 16
PREFILL_TOKENS = 65_536
CASES = [(batch, context) for batch in (1, 8, 64, 256) for context in (1024, 4096, 16384)]
Times = npt.NDArray[np.float64]


def make_scheduler(batch_size: int, context: int, steps: int, drafts: int) -> Scheduler:
    """A scheduler whose `batch_size` requests have all landed their prompt of `context` tokens."""
    # The first row decodes while the last one's prompt is read; no request may finish meanwhile.
    max_tokens = 2 * steps * (1 + drafts) + batch_size * context // PREFILL_TOKENS
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
        num_speculative_tokens=drafts,
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
    kept = (plan.step_id + np.arange(plan.num_rows)) % (1 + plan.num_draft_tokens)
    num_sampled = (samples * (1 + kept)).astype(np.int32)
    return StepResult(
        step_id=plan.step_id,
        num_sampled=num_sampled,
        token_ids=np.full(int(num_sampled.sum()), 5, np.int32),
        logprobs=None,
        started_ns=0,
        ended_ns=0,
    )


def time_windows(batch_size: int, context: int, windows: int, drafts: int) -> Times:
    """[windows, 2] mean microseconds of `schedule` and of `apply`."""
    steps = (1 + windows) * BLOCK_SIZE  # the first window warms up
    scheduler = make_scheduler(batch_size, context, steps, drafts)
    times_ns = np.zeros((steps, 2))
    gc.collect()
    gc.freeze()
    for step in range(steps):
        start = time.perf_counter_ns()
        plan = scheduler.schedule()
        times_ns[step, 0] = time.perf_counter_ns() - start
        assert plan is not None and plan.num_rows == batch_size
        assert plan.total_tokens == batch_size * (1 + drafts)
        result = made_up_result(scheduler, plan)
        start = time.perf_counter_ns()
        scheduler.apply(plan, result)
        times_ns[step, 1] = time.perf_counter_ns() - start
    gc.unfreeze()
    windows_us: Times = times_ns.reshape(-1, BLOCK_SIZE, 2).mean(axis=1) / 1e3
    return windows_us[1:]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--windows", type=int, default=25, help="timed windows of 16 steps a case")
    parser.add_argument("--rounds", type=int, default=3, help="times every case is run, in turn")
    parser.add_argument("--drafts", type=int, default=0, help="of every row in every step")
    args = parser.parse_args()
    times: dict[tuple[int, int], list[Times]] = {case: [] for case in CASES}
    for _ in range(args.rounds):
        for case in CASES:
            times[case].append(time_windows(*case, args.windows, args.drafts))
    results = []
    for (batch, context), rounds in times.items():
        windows = np.concatenate(rounds)
        total = windows.sum(axis=1)
        schedule_us, apply_us = np.median(windows, axis=0).tolist()
        found = {"schedule_us": schedule_us, "apply_us": apply_us}
        found |= {"step_us": float(np.median(total)), "step_best_us": float(total.min())}
        results.append({"batch_size": batch, "context": context, **found})
    print_rows(results)
    write_report(args, results)


if __name__ == "__main__":
    main()
