"""Cost and robustness of the HTTP server, and the limits of `termgen bench serve` itself.

    python benchmarks/server_load.py [--part stream drop] [--output-json FILE]
    python benchmarks/server_load.py --part generator --seconds 6

stream     every client has to get every token of a scripted engine once and in order, at a given
           rate. CPU time is that of the server's process less what the same engine costs without
           HTTP; the delay is from the end of an engine step to the arrival in a client, which is a
           process of its own. The first second of each stream does not count: all of them begin in
           one step.
drop       thousands of clients connect and drop, anywhere between the connection and the last
           token, on a real engine with a tiny random model. Afterwards no request, task,
           connection, file or block may be left.
generator  `termgen bench serve` on a scripted engine that gives every request a token each step:
           its share of a core and the delay of its wake-ups at rising token rates, and the
           difference between its time per output token and the length of the steps. Not run unless
           named.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import gc
import json
import os
import random
import tempfile
import time
from pathlib import Path
from typing import Any

from load_client import Clients, Streamed, chat_body
from machine import machine_facts, parser_of, percentiles, print_rows, write_report
from made_up_models import write_config
from scripted_engine import ScriptedEngine
from servers import left_behind, port_of, post, serving

from termgen.bench.options import ServeOptions
from termgen.bench.serve import ServeBench
from termgen.bench.server_api import ServerApi
from termgen.config import EngineConfig
from termgen.engine.loop.engine import AsyncEngine
from termgen.system.cpu_slices import share_lock_quickly
from termgen.vocabulary.sampling_params import SamplingParams

GENERATOR_STEP_S = 0.05
GENERATOR_STREAMS = (20, 100, 250, 500, 1000)
STREAMED = ("asked to stream", "reading", "read for a while")
MOMENTS = ("connected", "in the head", "in the body", "asked", *STREAMED, "two requests")
DROPPED_AT_ONCE = 40


# -- stream --------------------------------------------------------------------------------


async def engine_alone(args: argparse.Namespace, num_tokens: int) -> float:
    """CPU seconds per token of the scripted engine and an idle reader."""
    engine = ScriptedEngine(args.streams / args.rate, min_running=args.streams)

    async def read() -> None:
        async for _ in engine.generate("x", SamplingParams(max_tokens=num_tokens)):
            pass

    before = time.process_time()
    await asyncio.gather(*(read() for _ in range(args.streams)))
    spent = time.process_time() - before
    engine.close()
    return spent / engine.num_tokens


def delays_ms(answer: Streamed, skipped: int) -> list[float]:
    """From the end of each token's step to its arrival; raises ValueError if one is missing."""
    found = []
    tokens = [
        (token.split(" "), arrived_ns)
        for text, arrived_ns in zip(answer.texts, answer.times_ns, strict=True)
        for token in text.split(";")[:-1]
    ]
    for due, ((number, step_ns), arrived_ns) in enumerate(tokens):
        if int(number) != due:
            raise ValueError(f"token {number} came where {due} was due")
        found.append((arrived_ns - int(step_ns)) / 1e6)
    if answer.error:
        raise ValueError(answer.error)
    return found[skipped:]


async def stream_round(args: argparse.Namespace) -> dict[str, Any]:
    num_tokens = int(args.seconds * args.rate / args.streams)
    alone_s = await engine_alone(args, max(1, num_tokens // 4))
    engine = ScriptedEngine(args.streams / args.rate, min_running=args.streams)
    async with serving(engine, max_queue=0) as server:
        bodies = [{**chat_body(num_tokens), "stream_options": None}] * args.streams
        clients = await Clients.start(port_of(server), bodies, repeats=False, keeps_texts=True)
        while not engine.has_begun and not clients.has_ended:
            await asyncio.sleep(0.01)
        before = time.process_time()
        answers = await clients.stop()
        spent = time.process_time() - before
    engine.close()
    delays, failures = [], []
    for answer in answers:
        try:
            delays += delays_ms(answer, args.rate // args.streams)
        except ValueError as error:
            failures.append(str(error))
    num_came = sum(text.count(";") for answer in answers for text in answer.texts)
    return {
        "tokens_per_s": engine.num_tokens / (engine.ended_at - engine.begun_at),
        "num_tokens": num_came,
        "num_lost": num_tokens * args.streams - num_came,
        "num_failed": len(failures),
        "failures": failures[:3],
        "cpu_us_per_token": (spent / engine.num_tokens - alone_s) * 1e6,
        "chunks_per_token": sum(len(answer.texts) for answer in answers) / max(1, num_came),
        "delay_ms": percentiles(delays),
    }


async def stream_part(args: argparse.Namespace) -> dict[str, Any]:
    rounds = [await stream_round(args) for _ in range(args.rounds)]
    rounds.sort(key=lambda r: r["delay_ms"]["p99"])
    print_rows({**{k: v for k, v in r.items() if k != "delay_ms"}, **r["delay_ms"]} for r in rounds)
    print(f"median round: p99 delay {rounds[len(rounds) // 2]['delay_ms']['p99']:.1f} ms")
    return {"rounds": rounds}


# -- drop ----------------------------------------------------------------------------------


async def drop(port: int, moment: str, rng: random.Random) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    prompt = [rng.randrange(2, 512) for _ in range(rng.choice((1, 8, 100)))]
    body = {"prompt": prompt, "max_tokens": 300, "ignore_eos": True, "n": rng.choice((1, 1, 3))}
    encoded = json.dumps({**body, "stream": moment in STREAMED}).encode()
    whole = post("/v1/completions", encoded, close=False)
    sent = {"connected": b"", "in the head": whole[:40], "in the body": whole[:-5]}
    writer.write(sent.get(moment, whole) + (whole if moment == "two requests" else b""))
    if moment.startswith("read"):
        # a stream may be refused or wait long, and this client waits for neither
        try:
            async with asyncio.timeout(rng.random()):
                await reader.readuntil(b"data: ")
                if moment == "read for a while":
                    await asyncio.sleep(0.2 * rng.random())
        except (TimeoutError, asyncio.IncompleteReadError):
            pass
    elif rng.random() < 0.5:
        await asyncio.sleep(0.02 * rng.random())
    if rng.random() < 0.5:
        writer.transport.abort()
    else:
        writer.close()


async def drop_all(port: int, args: argparse.Namespace) -> dict[str, int]:
    """Returns how many clients dropped at each stage."""
    rng = random.Random(0)
    counts: collections.Counter[str] = collections.Counter()
    numbers = iter(range(args.clients))

    async def worker() -> None:
        for _ in numbers:
            moment = rng.choice(MOMENTS)
            counts[moment] += 1
            await drop(port, moment, rng)

    await asyncio.gather(*(worker() for _ in range(DROPPED_AT_ONCE)))
    return dict(counts)


def num_files() -> int:
    return len(os.listdir("/proc/self/fd"))


async def drop_part(args: argparse.Namespace) -> dict[str, Any]:
    options = {"load_format": "dummy", "skip_tokenizer_init": True, "device": "cpu", "threads": 1}
    with tempfile.TemporaryDirectory() as folder:
        model = str(write_config(Path(folder), vocab_size=512))
        engine = await AsyncEngine.start(
            EngineConfig(model=model, max_num_seqs=16, max_model_len=512, **options)
        )
    async with serving(engine, max_queue=0) as server:
        await asyncio.sleep(0.2)
        connections = server._uvicorn.server_state.connections
        tasks, files = len(asyncio.all_tasks()), num_files()
        begun = time.perf_counter()
        counts = await drop_all(port_of(server), args)
        wall_s = time.perf_counter() - begun
        left = await left_behind(
            engine,
            server,
            lambda: {
                "connections": len(connections),
                "tasks": len(asyncio.all_tasks()) - tasks,
                "files": num_files() - files,
            },
        )
        metrics = (await server._state.render_metrics()).decode()
    await engine.shutdown()
    print(f"{args.clients} clients dropped in {wall_s:.1f} s: {counts}")
    print("left behind:", left)
    print(*(line for line in metrics.splitlines() if "termgen_client_disc" in line), sep="\n")
    return {"dropped": counts, "left": left, "wall_s": wall_s}


# -- generator -----------------------------------------------------------------------------


async def generator_round(streams: int, seconds: float) -> dict[str, Any]:
    engine = ScriptedEngine(GENERATOR_STEP_S)
    async with serving(engine, max_queue=0) as server, ServerApi(server.url, api_key=None) as api:
        options = ServeOptions(
            base_url=server.url,
            num_prompts=streams,
            random_input_len=16,
            random_output_len=int(seconds / GENERATOR_STEP_S),
            num_warmups=1,
        )
        bench = await ServeBench.connect(
            api, options, asked_model=None, report=lambda phase, share: None
        )
        run = await bench.run(options, seed=0)
    engine.close()
    figures, client = run.result.as_json(), run.result.client()
    kept = {name: figures[name] for name in ("output_throughput", "failed", "mean_tpot_ms")}
    found = {"streams": streams, **kept, **client}
    print_rows([found])
    return {**found, "warnings": run.warnings()}


async def generator_part(args: argparse.Namespace) -> list[dict[str, Any]]:
    return [await generator_round(streams, args.seconds) for streams in GENERATOR_STREAMS]


PARTS = {"stream": stream_part, "drop": drop_part, "generator": generator_part}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--part", nargs="+", choices=PARTS, default=["stream", "drop"])
    parser.add_argument("--streams", type=int, default=500, help="of the part `stream`")
    parser.add_argument("--rate", type=int, default=20_000, help="tokens per second, all streams")
    parser.add_argument("--seconds", type=float, default=10.0, help="length of each stream")
    parser.add_argument("--rounds", type=int, default=3, help="of the part `stream`")
    parser.add_argument("--clients", type=int, default=10_000, help="that drop")
    args = parser.parse_args()
    share_lock_quickly()  # as `termgen serve` does
    gc.collect()
    gc.freeze()
    facts = machine_facts()
    results: dict[str, Any] = {part: asyncio.run(PARTS[part](args)) for part in args.part}
    write_report(args, results, facts)


if __name__ == "__main__":
    main()
