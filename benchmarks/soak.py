"""Thousands of requests with random lengths and aborts through one engine, on a CPU.

    python benchmarks/soak.py [--requests 20000] [--output-json FILE]

A tiny model with random weights behind the whole `AsyncEngine`: its thread, text, stop strings,
several completions, and a KV cache so small that requests are preempted. Readers leave in the
middle, while they wait in the queue, or by name. At the end nothing may be held: no block, no slot,
no stream, no text. Prints the process's resident memory (RSS) on the way.
"""

from __future__ import annotations

import asyncio
import random
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from machine import parser_of, resident_mib, write_report
from made_up_models import write_config

from termgen.config import EngineConfig
from termgen.engine.loop.engine import AsyncEngine
from termgen.engine.schedule.invariants import check_scheduler
from termgen.system.cpu_slices import share_lock_quickly
from termgen.vocabulary.sampling_params import SamplingParams

VOCAB = 2048
NUM_PREFIXES = 40
READERS = 40


@dataclass
class Soak:
    """The requests, and their outcomes."""

    engine: AsyncEngine
    seed: int
    endings: Counter[str] = field(default_factory=Counter)
    num_tokens: int = 0

    def __post_init__(self) -> None:
        self._rng = random.Random(self.seed)
        self._prefixes = [self._tokens(self._rng.randrange(20, 90)) for _ in range(NUM_PREFIXES)]

    def _tokens(self, count: int) -> list[int]:
        return [self._rng.randrange(3, VOCAB - 1) for _ in range(count)]

    def draw(self) -> tuple[tuple[int, ...], SamplingParams, str, int]:
        """A prompt, its parameters, how its reader leaves, and at which token."""
        rng = self._rng
        prompt = self._tokens(rng.randrange(1, 60))
        if rng.random() < 0.4:
            prompt = [*rng.choice(self._prefixes), *prompt]
        params = SamplingParams(
            temperature=rng.choice((0.0, 0.8, 1.2)),
            top_p=rng.choice((1.0, 0.9)),
            seed=rng.randrange(10**6),
            max_tokens=rng.randrange(1, 64),
            n=2 if rng.random() < 0.05 else 1,
            stop=(rng.choice(("1", "7 w", "99")),) if rng.random() < 0.2 else (),
            presence_penalty=0.5 if rng.random() < 0.1 else 0.0,
            logprobs=2 if rng.random() < 0.1 else None,
            ignore_eos=rng.random() < 0.5,
        )
        leaves = rng.choices(("stays", "closes", "cancels", "aborts"), (70, 12, 9, 9))[0]
        return tuple(prompt), params, leaves, rng.randrange(0, 30)

    async def ask(self, index: int) -> None:
        """Read one answer to its end, or until its reader leaves."""
        prompt, params, leaves, at = self.draw()
        ending, seen, name = "nothing", 0, f"soak-{index}"
        stream = self.engine.generate(prompt, params, request_id=name)
        try:
            # A reader is cancelled at any time, even in the queue.
            async with asyncio.timeout(at / 1000 if leaves == "cancels" else None):
                async for delta in stream:
                    assert delta.error is None, delta.error
                    seen += len(delta.token_ids)
                    ending = str(delta.finish_reason or ending)
                    if leaves == "closes" and seen > at:
                        await stream.aclose()
                        ending = "closed"
                        break
                    if leaves == "aborts" and seen > at:
                        await self.engine.abort(name)
                        leaves = "stays"
        except TimeoutError:
            ending = "cancelled"
        self.num_tokens += seen
        self.endings[ending] += 1

    async def check_at_rest(self) -> dict[str, int]:
        """Raise AssertionError for anything still held."""
        async with asyncio.timeout(60):
            while (snapshot := await self.engine.snapshot()).num_running or snapshot.num_waiting:
                await asyncio.sleep(0.01)
        core, parts = self.engine.parts.core, self.engine.parts
        scheduler = core.scheduler
        await asyncio.wrap_future(core.call(partial(check_scheduler, scheduler)))
        held = {
            "requests": len(scheduler.requests),
            "blocks": scheduler.kv.pool.num_used,
            "blocks behind the fence": scheduler.fence.num_blocks,
            "slots": scheduler.config.max_num_seqs - len(scheduler.free_slots),
            "texts": len(parts.output_processor),
            "streams": len(self.engine._streams),
            "deliveries": len(self.engine._deliveries),
        }
        assert not any(held.values()), held
        return held


async def soak(
    config: EngineConfig, *, requests: int, at_once: int, seed: int, samples: int
) -> dict[str, Any]:
    engine = await AsyncEngine.start(config)
    try:
        run = Soak(engine, seed)
        numbers = iter(range(requests))
        done, began, memory = 0, time.monotonic(), [(0, resident_mib())]

        async def one_reader() -> None:
            nonlocal done
            for index in numbers:
                await run.ask(index)
                done += 1
                if done % max(1, requests // samples) == 0:
                    memory.append((done, resident_mib()))
                    print(f"{done:7d} requests  RSS {memory[-1][1]:7.1f} MiB", file=sys.stderr)

        await asyncio.gather(*(one_reader() for _ in range(at_once)))
        held = await run.check_at_rest()
        seconds = time.monotonic() - began
        snapshot = await engine.snapshot()
    finally:
        await engine.shutdown()
    return {
        "requests": requests,
        "seconds": seconds,
        "tokens": run.num_tokens,
        "endings": dict(run.endings),
        "preemptions": snapshot.num_preemptions,
        "prefix_hit_tokens": snapshot.prefix_hit_tokens,
        "held": held,
        "rss_mib": memory,
    }


def soak_config(folder: Path, load_format: str = "dummy") -> EngineConfig:
    """16 slots, and blocks for about half of their requests."""
    return EngineConfig(
        model=str(folder),
        load_format=load_format,
        device="cpu",
        threads=1,
        max_num_seqs=16,
        max_num_batched_tokens=128,
        max_model_len=256,
        block_size=16,
        num_gpu_blocks_override=70,
        async_scheduling=True,
    )


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--requests", type=int, default=20_000)
    args = parser.parse_args()
    share_lock_quickly()  # as the command line does
    with tempfile.TemporaryDirectory() as folder:
        config = soak_config(write_config(Path(folder), vocab=VOCAB))
        result = asyncio.run(
            soak(config, requests=args.requests, at_once=READERS, seed=0, samples=20)
        )
    print(
        f"{result['requests']} requests, {result['tokens']} tokens read, "
        f"{result['preemptions']} preemptions, {result['seconds']:.0f} s"
    )
    for name in ("endings", "held"):
        print(f"{name}: " + ", ".join(f"{count} {what}" for what, count in result[name].items()))
    write_report(args, result)


if __name__ == "__main__":
    main()
