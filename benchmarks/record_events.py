"""Records an engine's events under a mixed load, for `termgen top --replay`.

    python benchmarks/record_events.py /tmp/h200.events            # qwen3-0.6b's shapes on a GPU
    python benchmarks/record_events.py /tmp/cpu.events --tiny      # a tiny model on the CPU

Random weights and no tokenizer. The load keeps a changing number of requests open: few at first,
then enough to fill the batch, then more than the KV cache holds, so that requests wait and are
preempted. Prompts are short, share a prefix, or are longer than a step's token budget; sampling is
greedy or one of several kinds. The file holds the frames that `GET /v1/events` sends.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from made_up_models import write_config
from servers import serving

from termgen.config import EngineConfig
from termgen.engine.loop.engine import AsyncEngine
from termgen.tui.feeds.attach import RemoteFeed
from termgen.vocabulary.sampling_params import SamplingParams

HZ = 4.0
CAPTURE_S = 120.0
"""Time allowed for capturing graphs before the recording begins."""
TURNS = ((0.15, 0.12), (0.2, 0.5), (0.2, 2.0), (0.15, 0.35), (0.15, 0.0), (1.0, 0.8))
"""(share of the time, number of open requests as a multiple of `max_num_seqs`) of each phase."""
GPU = {
    "device": "cuda",
    "max_num_seqs": 64,
    "max_num_batched_tokens": 2048,
    "max_model_len": 4096,
    "kv_cache_gib": 4.0,
}
CPU = {
    "device": "cpu",
    "threads": 1,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 512,
    "max_model_len": 2048,
    "kv_cache_gib": 0.0025,
}
SAMPLING: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.8, "top_p": 0.95},
    {"temperature": 1.0, "top_k": 40},
    {"temperature": 0.7, "min_p": 0.05, "repetition_penalty": 1.1},
    {"temperature": 0.0, "logprobs": 5},
    {"temperature": 1.0, "presence_penalty": 0.5, "logit_bias": {7: 2.0}},
)


class Load:
    """Requests with the same prompts and parameters for the same seed."""

    def __init__(self, engine: AsyncEngine, seconds: float, seed: int) -> None:
        self._engine = engine
        self._seconds = seconds
        self._rng = random.Random(seed)
        self._limit = engine.model.max_model_len
        top = min(engine.model.vocab_size, 100_000)
        self._prefixes = [
            [self._rng.randrange(10, top) for _ in range(size * self._limit // 4096)]
            for size in (320, 720, 1200)
        ]
        self._top = top
        self._open: set[asyncio.Task[None]] = set()
        self.num_sent = 0

    async def run(self) -> None:
        """Keep the current number of requests open; a new one follows one that ends."""
        begun = time.perf_counter()
        while (now := time.perf_counter() - begun) < self._seconds:
            wanted = round(_level(now / self._seconds) * self._engine.model.max_num_seqs)
            for _ in range(min(4, wanted - len(self._open))):
                task = asyncio.create_task(self._send())
                self._open.add(task)
                task.add_done_callback(self._open.discard)
            await asyncio.sleep(self._rng.uniform(0.002, 0.03))

    async def stop(self) -> None:
        for task in self._open:
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)

    async def _send(self) -> None:
        number = self.num_sent = self.num_sent + 1
        rng = self._rng
        kind = rng.random()
        prompt = list(rng.choice(self._prefixes)) if kind < 0.5 else []
        size = rng.randint(16, 400) if kind < 0.93 else rng.randint(2200, 3200)
        prompt += [rng.randrange(10, self._top) for _ in range(max(4, size * self._limit // 4096))]
        params = SamplingParams(
            **rng.choice(SAMPLING),
            seed=number,
            ignore_eos=True,
            max_tokens=rng.randint(40, 800) * self._limit // 4096,
        )
        async for _ in self._engine.generate(prompt, params, request_id=f"request-{number}"):
            pass


def _level(at: float) -> float:
    end = 0.0
    for share, level in TURNS:
        end += share
        if at < end:
            return level
    return TURNS[-1][1]


async def record(target: Path, *, tiny: bool, seconds: float, seed: int) -> str:
    """Record to `target`. Returns a one-line summary."""
    name = "tiny" if tiny else "qwen3-0.6b"
    with tempfile.TemporaryDirectory() as folder:
        config = EngineConfig(
            model=str(write_config(Path(folder), name)),
            load_format="dummy",
            skip_tokenizer_init=True,
            **(CPU if tiny else GPU),
        )
        engine = await AsyncEngine.start(config)
        # The recording names no folder of this machine.
        engine._parts = replace(engine.parts, model=replace(engine.model, root=name))
        try:
            await _warm_up(engine)
            with target.open("xb") as file:
                async with serving(engine) as server:
                    feed = await RemoteFeed.connect(server.url, hz=HZ, record=file)
                    load = Load(engine, seconds, seed)
                    await load.run()
                    await asyncio.sleep(1 / HZ)
                    await feed.close()
                    await load.stop()
            after = await engine.snapshot()
        finally:
            await engine.shutdown()
    step = after.step
    return (
        f"{target}: {target.stat().st_size / 1e6:.2f} MB, {step.step_id if step else 0} steps, "
        f"{load.num_sent} requests, {after.num_preemptions} preemptions, "
        f"{after.prefix_hit_tokens} prefix tokens found, {feed.num_dropped} events lost"
    )


async def _warm_up(engine: AsyncEngine) -> None:
    """Run the first requests and the remaining graph captures before the recording."""
    for options in SAMPLING:
        params = SamplingParams(**options, max_tokens=8, ignore_eos=True)
        async for _ in engine.generate([11] * 64, params):
            pass
    deadline = time.monotonic() + CAPTURE_S
    while time.monotonic() < deadline:
        snapshot = await engine.snapshot()
        if snapshot.num_graphs_recorded >= snapshot.num_graphs:
            break
        await asyncio.sleep(0.5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("target", type=Path, help="a file that does not exist yet")
    parser.add_argument("--tiny", action="store_true", help="a tiny model on the CPU")
    parser.add_argument("--seconds", type=float, default=14.0)
    parser.add_argument("--seed", type=int, default=0)
    print(asyncio.run(record(**vars(parser.parse_args()))), flush=True)


if __name__ == "__main__":
    main()
