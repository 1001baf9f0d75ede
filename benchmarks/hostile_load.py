"""The effect of hostile clients on a good one: time between tokens, alone and beside each kind.

    python benchmarks/hostile_load.py [--step-ms 5 10] [--kind KIND ...] [--output-json FILE]

The server has the real engine's host half and SmolLM2's tokenizer, chat template and grammars, on a
simulated device with steps of a given length. Three processes: this one serves; one has the good
streams; one, of low priority, sends the hostile requests on four connections with a pause after
each answer, so that the contents of requests are measured and not the loss of a core. Quiet and
hostile periods alternate, so that other programs disturb both alike. `held` is the CPU time of the
longest single callback on the event loop.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import sys
import time
from asyncio.subprocess import PIPE, Process
from bisect import bisect_left
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hostile_kinds import ALL, KINDS
from machine import machine_facts, write_report
from simulated_gpu import Simulation, installed

from termgen.config import EngineConfig, ServerConfig
from termgen.engine.loop.engine import AsyncEngine
from termgen.library.catalog import resolve_model
from termgen.server import Server
from termgen.system.cpu_slices import share_lock_quickly

HERE = Path(__file__).parent
NUM_STREAMS = 4
SETTLE_S = 0.1
"""Time after a change between quiet and hostile before gaps count."""


@dataclass
class Kind:
    name: str
    windows: dict[bool, list[tuple[int, int]]]
    """(from, to) of each window, by whether the load was hostile."""
    held_ms: float = 0.0
    held_by: str = ""
    answers: dict[str, int] = field(default_factory=dict)
    quiet: dict[str, float] = field(default_factory=dict)
    hostile: dict[str, float] = field(default_factory=dict)


class LoopWatch:
    """The longest callback of the event loop, by its CPU time."""

    def __init__(self) -> None:
        self.longest_ns = 0
        self.longest = ""

    def reset(self) -> None:
        self.longest_ns, self.longest = 0, ""

    @contextmanager
    def watching(self) -> Iterator[None]:
        handle: Any = asyncio.Handle
        run, clock = handle._run, time.thread_time_ns

        def timed(this: Any) -> None:
            before = clock()
            run(this)
            spent = clock() - before
            if spent > self.longest_ns:
                self.longest_ns, self.longest = spent, _name(this)

        handle._run = timed
        try:
            yield
        finally:
            handle._run = run


def _name(handle: Any) -> str:
    """The function in which a task is suspended; for any other handle, its callback."""
    callback = handle._callback
    owner = getattr(callback, "__self__", None)
    if isinstance(owner, asyncio.Task):
        frames = owner.get_stack()
        if frames:
            return f"{frames[-1].f_code.co_name}:{frames[-1].f_lineno}"
        return str(owner.get_coro())
    return str(getattr(callback, "__qualname__", callback))


@asynccontextmanager
async def serving(step_ms: float) -> AsyncGenerator[tuple[AsyncEngine, Server, int], None]:
    model = resolve_model("smollm2-135m", allow_download=True).path
    simulation = Simulation(step_ms, num_blocks=8192, max_num_seqs=64, vocab_size=49_152)
    with installed(simulation):
        config = EngineConfig(model=str(model), max_model_len=8192)
        engine = await AsyncEngine.start(config, prewarm=True)
    server = Server(engine, ServerConfig(port=0))
    task = asyncio.create_task(server.serve())
    await server.started()
    try:
        yield engine, server, int(server.url.rsplit(":", 1)[1])
    finally:
        await server.stop(drain_timeout=0)
        await task
        await engine.shutdown()


async def start(script: str, **flags: Any) -> Process:
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    command = (sys.executable, str(HERE / script), *words)
    return await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE, limit=2**30)


async def end(client: Process) -> bytes:
    assert client.stdin is not None
    client.stdin.close()
    output, _ = await client.communicate()
    return output


async def moment(seconds: float) -> tuple[int, int]:
    await asyncio.sleep(SETTLE_S)
    begun = time.perf_counter_ns()
    await asyncio.sleep(seconds)
    return begun, time.perf_counter_ns()


async def measure(kind: Kind, hostile: Process, watch: LoopWatch, args: argparse.Namespace) -> None:
    assert hostile.stdin is not None and hostile.stdout is not None
    for _ in range(args.rounds):
        kind.windows[False].append(await moment(args.seconds))
        watch.reset()
        hostile.stdin.write(f"{args.seconds + 2 * SETTLE_S} {kind.name}\n".encode())
        kind.windows[True].append(await moment(args.seconds))
        for answer, count in json.loads(await hostile.stdout.readline()).items():
            kind.answers[answer] = kind.answers.get(answer, 0) + count
        if watch.longest_ns > kind.held_ms * 1e6:
            kind.held_ms, kind.held_by = watch.longest_ns / 1e6, watch.longest


def gaps_within(answers: list[list[int]], windows: list[tuple[int, int]]) -> list[int]:
    """Times between tokens of the same answer that lie at least partly in a window."""
    found = []
    for times in answers:
        for begin, end in windows:
            here = times[max(0, bisect_left(times, begin) - 1) : bisect_left(times, end) + 1]
            found += [b - a for a, b in zip(here, here[1:], strict=False)]
    return sorted(found)


def percentiles(gaps: list[int]) -> dict[str, float]:
    if not gaps:
        return dict.fromkeys(("count", "p50", "p99", "max"), float("nan"))

    def at(share: float) -> float:
        return gaps[min(len(gaps) - 1, int(len(gaps) * share))] / 1e6

    return {"count": len(gaps), "p50": at(0.5), "p99": at(0.99), "max": at(1.0)}


async def run_step(step_ms: float, args: argparse.Namespace) -> dict[str, Any]:
    kinds, watch = [Kind(name, {False: [], True: []}) for name in args.kind], LoopWatch()
    async with serving(step_ms) as (engine, server, port):
        good = await start("patient_client.py", port=port, streams=NUM_STREAMS, tokens=4000)
        hostile = await start("hostile_clients.py", port=port, pause=args.pause)
        await asyncio.sleep(1.0)
        with watch.watching():
            for kind in kinds:
                await measure(kind, hostile, watch, args)
        await end(hostile)
        output = await end(good)
        if good.returncode or hostile.returncode:
            raise SystemExit("a client failed")
        answers = json.loads(output)
        left = await left_behind(engine, server)
    rows = []
    for kind in kinds:
        kind.quiet = percentiles(gaps_within(answers, kind.windows[False]))
        kind.hostile = percentiles(gaps_within(answers, kind.windows[True]))
        rows.append({k: v for k, v in asdict(kind).items() if k != "windows"})
    together = {
        name: percentiles(gaps_within(answers, [w for kind in kinds for w in kind.windows[is_on]]))
        for name, is_on in (("quiet", False), ("hostile", True))
    }
    return {"step_ms": step_ms, "kinds": rows, "together": together, "left": left}


async def left_behind(engine: AsyncEngine, server: Server) -> dict[str, int]:
    """Resources that the engine and the server still hold once every client has left."""
    deadline = time.perf_counter() + 10
    while True:
        snapshot = await engine.snapshot()
        left = {
            "requests": snapshot.num_running + snapshot.num_waiting,
            "blocks": snapshot.num_used_blocks,
            "answers": server.num_answers,
        }
        if not any(left.values()) or time.perf_counter() > deadline:
            return left
        await asyncio.sleep(0.05)


def show(result: dict[str, Any]) -> None:
    print(f"\nsteps of {result['step_ms']:g} ms; time between tokens in ms; left: {result['left']}")
    print(f"{'':19}{'quiet':>14}{'hostile':>16}{'p99':>7}{'held':>8}")
    print(f"{'kind':17}{'p50':>8}{'p99':>8}{'p50':>8}{'p99':>8}{'ratio':>7}{'ms':>8}  answers")
    together = {"name": "all of them", **result["together"], "held_ms": 0.0, "answers": {}}
    for row in (*result["kinds"], together):
        quiet, hostile = row["quiet"], row["hostile"]
        ratio = hostile["p99"] / quiet["p99"]
        print(
            f"{row['name']:17}{quiet['p50']:8.1f}{quiet['p99']:8.1f}{hostile['p50']:8.1f}"
            f"{hostile['p99']:8.1f}{ratio:7.2f}{row['held_ms']:8.1f}  "
            + ", ".join(f"{count} x {answer}" for answer, count in row["answers"].items())
            + (f"  [{row['held_by']}]" if row["held_ms"] > 2 else "")
        )


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--step-ms", type=float, nargs="+", default=[5.0, 10.0])
    parser.add_argument("--kind", nargs="+", default=list(ALL), choices=(*ALL, *KINDS))
    parser.add_argument("--seconds", type=float, default=0.5, help="of each moment")
    parser.add_argument("--rounds", type=int, default=1, help="quiet and hostile moments each")
    parser.add_argument("--pause", type=float, default=0.2, help="rest after each hostile answer")
    parser.add_argument("--output-json", type=Path, help="write settings and results here")
    args = parser.parse_args()
    args.kind = [name for kind in args.kind for name in KINDS.get(kind, (kind,))]
    return args


def main() -> None:
    args = parse_args()
    share_lock_quickly()  # as `termgen serve` does
    facts, results = machine_facts(), []
    for step_ms in args.step_ms:
        results.append(asyncio.run(run_step(step_ms, args)))
        show(results[-1])
        gc.collect()
    write_report(args, facts, results)


if __name__ == "__main__":
    main()
