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
import os
import sys
import time
from asyncio.subprocess import PIPE, Process
from bisect import bisect_left
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from hostile_kinds import ALL, CONNECTIONS, KINDS, bytes_of
from load_client import Clients, Streamed, chat_body
from machine import LoopWatch, machine_facts, parser_of, percentiles, print_rows, write_report
from servers import left_behind, port_of, serving
from simulated_gpu import Simulation, installed

from termgen.config import EngineConfig
from termgen.engine.loop.engine import AsyncEngine
from termgen.library.catalog import resolve_model
from termgen.server import Server
from termgen.system.cpu_slices import share_lock_quickly, take_long_slices

NUM_STREAMS = 4
"""Good ones, and as many hostile connections."""
PAUSE_S = 0.2
"""Rest of a hostile connection after each answer."""
SETTLE_S = 0.1
"""Time after a change between quiet and hostile before gaps count."""


@dataclass
class Kind:
    name: str
    windows: dict[bool, list[tuple[int, int]]]
    """(from, to) of each window, by whether the load was hostile."""
    held_ms: float = 0.0
    answers: Counter[str] = field(default_factory=Counter)


# -- the attackers, a process of their own ---------------------------------------------------------


async def ask(port: int, sent: bytes) -> str:
    """Status and code of the answer, if one arrives."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(sent)
        answer = await reader.read(4096)
        if b"\r\n\r\n" in answer and not answer.partition(b"\r\n\r\n")[2]:
            answer += await reader.read(4096)
        code = answer.partition(b'"code":')[2].partition(b"}")[0].decode().strip('"')
        return f"{answer[9:12].decode()} {code}".strip() if answer else "closed"
    except ConnectionError:
        return "closed"
    finally:
        writer.transport.abort()


async def attack(port: int, kind: str, seconds: float) -> dict[str, int]:
    """Number of answers of each kind."""
    answers: Counter[str] = Counter()
    begun = int(time.time() * 1000) % 10**7
    end = time.monotonic() + seconds

    async def worker(place: int) -> None:
        await asyncio.sleep(PAUSE_S * place / NUM_STREAMS)
        number = begun + place
        while time.monotonic() < end:
            try:
                async with asyncio.timeout(max(0.1, end - time.monotonic())):
                    if kind in CONNECTIONS:
                        answer = await CONNECTIONS[kind](port)
                    else:
                        answer = await ask(port, bytes_of(kind, number))
            except TimeoutError:
                answer = "none in time"
            answers[answer] += 1
            number += NUM_STREAMS
            await asyncio.sleep(PAUSE_S)

    await asyncio.gather(*(worker(place) for place in range(NUM_STREAMS)))
    return dict(answers)


def attack_on_request(port: int) -> None:
    """Read lines `SECONDS KIND`, and after that time answer each with the number of answers of each
    kind, in JSON."""
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))  # the server has precedence
    os.nice(10)
    take_long_slices()
    for line in sys.stdin:
        seconds, kind = line.strip().split(" ", 1)
        if kind not in CONNECTIONS:
            bytes_of(kind, 0)
        print(json.dumps(asyncio.run(attack(port, kind, float(seconds)))), flush=True)


# -- the measurement -------------------------------------------------------------------------------


@asynccontextmanager
async def started(step_ms: float) -> AsyncGenerator[tuple[AsyncEngine, Server], None]:
    model = resolve_model("smollm2-135m", allow_download=True).path
    simulation = Simulation(step_ms, num_blocks=8192, max_num_seqs=64, vocab_size=49_152)
    with installed(simulation):
        config = EngineConfig(model=str(model), max_model_len=8192)
        engine = await AsyncEngine.start(config, prewarm=True)
    async with serving(engine) as server:
        yield engine, server
    await engine.shutdown()


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
        kind.answers.update(json.loads(await hostile.stdout.readline()))
        kind.held_ms = max(kind.held_ms, watch.longest_ns / 1e6)


def gaps_within(answers: list[Streamed], windows: list[tuple[int, int]]) -> dict[str, float]:
    """Times between tokens of the same answer that lie at least partly in a window, in ms."""
    found: list[float] = []
    for times in (answer.times_ns for answer in answers):
        for begin, end in windows:
            here = times[max(0, bisect_left(times, begin) - 1) : bisect_left(times, end) + 1]
            found += [(b - a) / 1e6 for a, b in zip(here, here[1:], strict=False)]
    return percentiles(found)


async def run_step(step_ms: float, args: argparse.Namespace) -> dict[str, Any]:
    kinds, watch = [Kind(name, {False: [], True: []}) for name in args.kind], LoopWatch()
    async with started(step_ms) as (engine, server):
        port = port_of(server)
        good = await Clients.start(port, [chat_body(4000)] * NUM_STREAMS)
        command = (sys.executable, __file__, "--attack", str(port))
        hostile = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE)
        await asyncio.sleep(1.0)
        with watch.watching():
            for kind in kinds:
                await measure(kind, hostile, watch, args)
        await hostile.communicate(b"")  # closes its input, which ends it
        answers = await good.stop()
        if errors := [answer.error for answer in answers if answer.error]:
            raise SystemExit(f"a good stream failed: {errors[0]}")
        left = await left_behind(engine, server)
    rows = [
        {
            "name": kind.name,
            "held_ms": kind.held_ms,
            "answers": kind.answers,
            "quiet": gaps_within(answers, kind.windows[False]),
            "hostile": gaps_within(answers, kind.windows[True]),
        }
        for kind in kinds
    ]
    together = {
        name: gaps_within(answers, [w for kind in kinds for w in kind.windows[is_on]])
        for name, is_on in (("quiet", False), ("hostile", True))
    }
    return {"step_ms": step_ms, "kinds": rows, "together": together, "left": left}


def show(result: dict[str, Any]) -> None:
    print(f"\nsteps of {result['step_ms']:g} ms; time between tokens in ms; left: {result['left']}")
    together = {"name": "all of them", **result["together"], "held_ms": 0.0, "answers": {}}
    print_rows(
        {
            "kind": row["name"],
            "p50 alone": row["quiet"]["p50"],
            "p99 alone": row["quiet"]["p99"],
            "p50": row["hostile"]["p50"],
            "p99": row["hostile"]["p99"],
            "ratio": row["hostile"]["p99"] / row["quiet"]["p99"],
            "held ms": row["held_ms"],
            "answers": dict(row["answers"]),
        }
        for row in (*result["kinds"], together)
    )


def parse_args() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--step-ms", type=float, nargs="+", default=[5.0, 10.0])
    parser.add_argument("--kind", nargs="+", default=list(ALL), choices=(*ALL, *KINDS))
    parser.add_argument("--seconds", type=float, default=0.5, help="of each moment")
    parser.add_argument("--rounds", type=int, default=1, help="quiet and hostile moments each")
    parser.add_argument("--attack", type=int, metavar="PORT", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.kind = [name for kind in args.kind for name in KINDS.get(kind, (kind,))]
    return args


def main() -> None:
    args = parse_args()
    if args.attack:
        attack_on_request(args.attack)
        return
    share_lock_quickly()  # as `termgen serve` does
    facts, results = machine_facts(), []
    for step_ms in args.step_ms:
        results.append(asyncio.run(run_step(step_ms, args)))
        show(results[-1])
        gc.collect()
    write_report(args, results, facts)


if __name__ == "__main__":
    main()
