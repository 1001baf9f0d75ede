"""Speed with drafts on one GPU that are right as often as asked: random weights, real shapes.

    python benchmarks/gpu_drafts.py --model llama-3.1-8b --method eagle3 --drafts 3 5
    python benchmarks/gpu_drafts.py --model qwen3.6-27b --method mtp --acceptance .84 .60 .39
    python benchmarks/gpu_drafts.py --model llama-3.1-8b --method dflash --drafts 7 15

Random weights guess nothing rightly. So the matrix of the head is set to zero, by which every draw
is token 0; and when the drafter has done its work in full, its drafts are replaced by token 0 or by
another, by chance. --acceptance: how often a draft and all before it are right, by position; one
number is that of each draft behind right ones. Heads are made up, too: see made_up_heads.py.

A cell without drafts comes first; then all rows have all drafts in every step, whatever they cost,
or as many as the engine chooses (--choose), which it learns while the cell warms up.
Rows begin with prompts of 512 tokens; mean over 150 steps (--steps). Needs a CUDA device.
"""

from __future__ import annotations

import gc
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from gpu_decode import PROMPT, add, drain, make_engine
from machine import gpu_name, machine_facts, parser_of, print_rows, write_report
from made_up_heads import HEADS
from made_up_models import write_config

from termgen.engine.device.drafting.base import DraftModel, TargetStates
from termgen.engine.device.drafting.on_device import DeviceDrafter
from termgen.engine.device.runner import build
from termgen.engine.device.runner.make_drafter import make_drafter
from termgen.engine.loop.engine import SyncEngine
from termgen.vocabulary.events import StepRecord

WARM_STEPS = 20
LEARNING_STEPS = 400
"""With --choose, before a cell is timed."""


@triton.jit
def _coin_kernel(
    slots_ptr,
    counter_ptr,
    shares_ptr,
    finished_ptr,
    total_len_ptr,
    token_ids_ptr,
    num_drafts_ptr,
    token_stride,
    NUM_DRAFTS: tl.constexpr,
):
    """One program for each row: one kernel, so that the coin costs next to nothing itself."""
    row = tl.program_id(0)
    throw = tl.load(counter_ptr + row)
    tl.store(counter_ptr + row, throw + 1)
    chance = tl.rand(row, throw)
    slot = tl.load(slots_ptr + row)
    place = slot * token_stride + tl.load(total_len_ptr + slot)
    for i in tl.static_range(NUM_DRAFTS):
        is_right = chance < tl.load(shares_ptr + i)
        tl.store(token_ids_ptr + place + i, tl.where(is_right, 0, 1))
    is_finished = tl.load(finished_ptr + slot)
    tl.store(num_drafts_ptr + slot, tl.where(is_finished, 0, NUM_DRAFTS))


class Coin:
    """A `DraftModel` that runs another one, and replaces its drafts."""

    def __init__(self, model: DraftModel) -> None:
        self._model = model
        self.kept_layers, self.reads_states = model.kept_layers, model.reads_states
        self.num_ahead, self.is_lookup = model.num_ahead, model.is_lookup
        self.shares = torch.zeros(16, device="cuda")
        self.counters = torch.zeros(4096, dtype=torch.int32, device="cuda")

    def draft(
        self, batch: Any, states: TargetStates, kv_caches: Any, rows: Any, num_drafts: int
    ) -> None:
        self._model.draft(batch, states, kv_caches, rows, num_drafts)
        slots = batch.slots
        _coin_kernel[(len(slots),)](
            slots,
            self.counters,
            self.shares,
            rows.finished,
            rows.total_len,
            rows.token_ids,
            rows.num_drafts,
            rows.token_ids.stride(0),
            NUM_DRAFTS=num_drafts,
        )


class CoinDrafts(DeviceDrafter):
    """Has as many drafts as pay."""

    def __init__(self, coin: Coin, num_tokens: int, num_slots: int) -> None:
        super().__init__(coin, num_tokens, num_slots=num_slots)
        self.coin = coin


class AllDrafts(CoinDrafts):
    """Has every row compute all drafts."""

    def __init__(self, coin: Coin, num_tokens: int, num_slots: int) -> None:
        super().__init__(coin, num_tokens, num_slots)
        self.lengths = [num_tokens]

    def places(self, plan: Any, state: Any, lengths: Any) -> Any:
        return plan.num_draft_tokens * 0 + max(lengths, default=0)


def replace_drafters(made: type[CoinDrafts]) -> None:
    """Have engines throw the coin."""

    def make_coin(wanted: Any, head: Any, attention: Any, limits: Any, **sizes: Any) -> CoinDrafts:
        model = make_drafter(wanted, head, attention, limits, **sizes).model
        assert model is not None
        return made(Coin(model), wanted.settings.num_drafts, limits.max_num_seqs)

    vars(build)["make_drafter"] = make_coin


def cell(
    engine: SyncEngine, batch: int, num_drafts: int, warm_steps: int, steps: int
) -> dict[str, Any]:
    for index in range(batch):
        add(engine, index, PROMPT, (steps + warm_steps + 80) * (1 + num_drafts))
    ring = engine.core.bus.subscribe()
    decoding = 0
    while decoding < warm_steps:
        engine.step()
        for record in ring.drain():
            if isinstance(record, StepRecord):
                is_full = record.num_decode_rows == batch and not record.num_prefill_rows
                decoding = decoding + 1 if is_full else 0
    began = time.perf_counter()
    num_tokens = sum(len(delta.token_ids) for _ in range(steps) for delta in engine.step())
    seconds = time.perf_counter() - began
    records = [r for r in ring.drain() if isinstance(r, StepRecord)]
    engine.core.bus.unsubscribe(ring)
    for index in range(batch):
        engine.abort(f"{index}")
    drain(engine)
    return {
        "drafts": num_drafts,
        "batch": batch,
        "ms": seconds / steps * 1e3,
        "tokens a step": num_tokens / steps / batch,
        "tokens/s": num_tokens / seconds,
        "drafts a row": (records[-1].num_draft_tokens - records[0].num_draft_tokens)
        / (len(records) - 1)
        / batch,
        "graph_share": sum(r.graph_mode != "NONE" for r in records) / len(records),
        "schedule_us": sum(r.schedule_us for r in records) / len(records),
        "apply_us": sum(r.apply_us for r in records) / len(records),
    }


def run(
    model: Path,
    method: str,
    num_drafts: int,
    batches: list[int],
    acceptance: list[list[float]],
    **steps: int,
) -> list[dict[str, Any]]:
    """num_drafts: 0 for an engine without any."""
    options: dict[str, Any] = {"max_num_seqs": max(batches)}
    if num_drafts:
        chosen: dict[str, Any] = {"method": method, "num_speculative_tokens": num_drafts}
        if method in HEADS:
            chosen["model"] = str(model.parent / "head")
        options["speculative_config"] = json.dumps(chosen)
    engine = make_engine(model, **options)
    runner = engine.core.executor._runner  # type: ignore[attr-defined]
    with torch.inference_mode():
        for tensor in (*runner.model.head.parameters(), *runner.model.head.buffers()):
            tensor.zero_()
    rows = []
    for batch in batches:
        for shares in acceptance if num_drafts else [[0.0]]:
            if num_drafts:
                powers = [shares[0] ** (1 + i) for i in range(num_drafts)]
                by_place = powers if len(shares) == 1 else shares[:num_drafts]
                with torch.inference_mode():
                    coin = runner.drafts.drafter.coin
                    coin.shares[: len(by_place)] = torch.tensor(by_place, device="cuda")
            name = " ".join(f"{share:g}" for share in shares) if num_drafts else ""
            rows.append({"acceptance": name, **cell(engine, batch, num_drafts, **steps)})
            print(json.dumps(rows[-1]), flush=True)
    engine.shutdown()
    del engine, runner
    gc.collect()
    torch.cuda.empty_cache()
    return rows


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--model", default="llama-3.1-8b")
    parser.add_argument("--method", choices=("ngram", "mtp", *HEADS), default="ngram")
    parser.add_argument("--drafts", type=int, nargs="+", default=[3])
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--choose", action="store_true")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--acceptance", type=float, nargs="+", action="append")
    args = parser.parse_args()
    acceptance = args.acceptance or [[0.7]]
    steps = {"warm_steps": LEARNING_STEPS if args.choose else WARM_STEPS, "steps": args.steps}
    with tempfile.TemporaryDirectory() as folder:
        model = write_config(Path(folder), args.model)
        if args.method in HEADS:
            HEADS[args.method](model, Path(folder) / "head")
        rows = run(model, args.method, 0, args.batch_sizes, acceptance, **steps)
        replace_drafters(CoinDrafts if args.choose else AllDrafts)
        for number in args.drafts:
            rows += run(model, args.method, number, args.batch_sizes, acceptance, **steps)
    print_rows(rows)
    write_report(args, {"gpu": gpu_name(), "rows": rows}, machine_facts())


if __name__ == "__main__":
    main()
