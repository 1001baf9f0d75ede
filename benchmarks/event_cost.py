"""The cost of feeding a screen in another process, in processor time of each thread.

    python benchmarks/event_cost.py

The simulated engine of `screen_cost.py`: steps of 1 ms, 64 requests, 100,000 KV blocks. One second
of it, sent at 4 Hz over `/v1/events`: the work of the engine's thread, of the server's loop, and of
`termgen top` before it draws. Processor time is nearly the same on a busy machine, where the wall
times of `screen_cost.py` mostly show other processes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from async_screen_parts import FrontSizes, reading
from machine import machine_facts
from screen_cost import READ_EVERY_S, VOCAB, config_of
from simulated_gpu import Simulation, installed

from termgen.engine.loop.engine import AsyncEngine
from termgen.engine.loop.snapshot import StateCopy
from termgen.serving.metrics import ServerMetrics
from termgen.system.cpu_slices import share_lock_quickly
from termgen.vocabulary.events import EngineEvent
from termgen.vocabulary.telemetry import (
    TOPICS,
    decode,
    encode_cache,
    encode_events,
    encode_snapshot,
)

HZ = 4
STREAMS = 64
TIMES = 25
SETTLE_S = 2.0


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--output-json", type=Path, help="write machine and results here")
    return parser.parse_args()


def cpu_ms(work: Callable[[], object]) -> float:
    """Processor time of this thread for one call."""
    took = []
    for _ in range(TIMES):
        began = time.thread_time()
        work()
        took.append(1e3 * (time.thread_time() - began))
    return statistics.median(took)


async def busy_second(folder: Path) -> tuple[list[EngineEvent], StateCopy, float]:
    """(events of one second, the engine's state, time to copy it)."""
    sizes = FrontSizes(
        streams=STREAMS, prompt=32, seconds=1, rounds=1, max_tokens=24_000, vocab=VOCAB
    )
    settings = argparse.Namespace(engine="simulated", run_ahead_ms=20.0)
    engine = await AsyncEngine.start(config_of(settings, folder))
    try:
        core, ring = engine.parts.core, engine.events(200_000)
        async with reading(engine, sizes, every_s=READ_EVERY_S):
            await asyncio.sleep(SETTLE_S)
            ring.drain()
            await asyncio.sleep(1.0)
            events = ring.drain()
            copying = await asyncio.wrap_future(core.call(lambda: cpu_ms(core.copy_state)))
            state = await asyncio.wrap_future(core.call(core.copy_state))
        return events, state, copying
    finally:
        await engine.shutdown()


def costs(events: list[EngineEvent], state: StateCopy) -> dict[str, float]:
    """Milliseconds for one second: the server's loop, then `termgen top`."""
    part = len(events) // HZ
    told: dict[str, Any] = {"stream": "s", "first": 1, "dropped": 0, "topics": frozenset(TOPICS)}
    snapshot, metrics = state.snapshot(), ServerMetrics("m")
    encoded = encode_snapshot(snapshot)
    (*steps,) = encode_events(events[:part], **told)
    cache = encode_cache(encoded, dropped=0, frame_id="s-1")
    return {
        "loop: steps as bytes": HZ * cpu_ms(lambda: [*encode_events(events[:part], **told)]),
        "loop: the map of the blocks": HZ * cpu_ms(state.snapshot),
        "loop: state as bytes": HZ * cpu_ms(lambda: encode_snapshot(snapshot)),
        "loop: metrics of the steps": cpu_ms(lambda: metrics.on_events(events)),
        "top: steps of bytes": HZ * cpu_ms(lambda: [decode(frame) for frame in steps]),
        "top: state of bytes": HZ * cpu_ms(lambda: decode(cache)),
    }


def main() -> None:
    args = parse_args()
    share_lock_quickly()  # as the command line does
    with (
        tempfile.TemporaryDirectory() as folder,
        installed(Simulation(1.0, 100_001, STREAMS, VOCAB)),
    ):
        events, state, copying = asyncio.run(busy_second(Path(folder)))
    results = {"engine: copying its state": HZ * copying, **costs(events, state)}
    print(f"{len(events)} events in a second; ms of processor time for them, told at {HZ} Hz")
    for name, took in results.items():
        print(f"{name:>30}{took:8.2f}")
    if args.output_json:
        report = {"machine": machine_facts(), "events": len(events), "ms_per_s": results}
        args.output_json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
