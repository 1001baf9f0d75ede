"""Cost and robustness of the HTTP server: many streams, clients that drop.

    python benchmarks/server_load.py [--part stream drop] [--output-json FILE]

stream   every client has to get every token of a scripted engine once and in order, at a given
         rate. CPU time is that of the server's process less what the same engine costs without
         HTTP; the delay is from the end of an engine step to the arrival in a client, which is a
         process of its own and of low priority. The first second of each stream does not count:
         all of them begin in one step.
drop     thousands of clients connect and drop, anywhere between the connection and the last token,
         on a real engine with a tiny random model. Afterwards no request, task, connection, file
         or block may be left.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import random
import resource
import sys
import tempfile
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from drop_clients import drop_all
from machine import machine_facts, write_report
from scripted_engine import ScriptedEngine

from termgen.client import EngineClient
from termgen.config import EngineConfig, ServerConfig
from termgen.server import Server
from termgen.system.cpu_slices import share_lock_quickly
from termgen.vocabulary.sampling_params import SamplingParams

HERE = Path(__file__).parent
TINY_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "torch_dtype": "float32",
}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parts = ("stream", "drop")
    parser.add_argument("--part", nargs="+", choices=parts, default=list(parts))
    parser.add_argument("--streams", type=int, default=500)
    parser.add_argument("--rate", type=int, default=20_000, help="tokens per second, all streams")
    parser.add_argument("--seconds", type=float, default=10.0, help="length of each stream")
    parser.add_argument("--rounds", type=int, default=3, help="the table shows the median round")
    parser.add_argument("--clients", type=int, default=10_000, help="that drop")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output-json", type=Path, help="write settings and results here")
    return parser.parse_args()


def cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


@asynccontextmanager
async def serving(engine: EngineClient) -> AsyncGenerator[tuple[Server, int], None]:
    server = Server(engine, ServerConfig(port=0, max_queue=0))
    task = asyncio.create_task(server.serve())
    await server.started()
    try:
        yield server, int(server.url.rsplit(":", 1)[1])
    finally:
        await server.stop(drain_timeout=0)
        await task


async def child(script: str, **flags: Any) -> asyncio.subprocess.Process:
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    return await asyncio.create_subprocess_exec(
        sys.executable, str(HERE / script), *words, stdout=asyncio.subprocess.PIPE
    )


async def outcome(process: asyncio.subprocess.Process) -> dict[str, Any]:
    output, _ = await process.communicate()
    if process.returncode:
        raise SystemExit(f"the client failed with code {process.returncode}")
    result: dict[str, Any] = json.loads(output)
    return result


# -- stream --------------------------------------------------------------------------------


async def engine_alone(args: argparse.Namespace, num_tokens: int) -> float:
    """CPU seconds per token of the scripted engine and an idle reader."""
    engine = ScriptedEngine(args.streams / args.rate, min_running=args.streams)

    async def read() -> None:
        async for _ in engine.generate("x", SamplingParams(max_tokens=num_tokens)):
            pass

    before = cpu_s()
    await asyncio.gather(*(read() for _ in range(args.streams)))
    spent = cpu_s() - before
    engine.close()
    return spent / engine.num_tokens


async def stream_round(args: argparse.Namespace) -> dict[str, Any]:
    num_tokens = int(args.seconds * args.rate / args.streams)
    alone_s = await engine_alone(args, max(1, num_tokens // 4))
    engine = ScriptedEngine(args.streams / args.rate, min_running=args.streams)
    async with serving(engine) as (_, port):
        skip = args.rate // args.streams  # the first second, in which all streams begin at once
        flags = {"port": port, "streams": args.streams, "tokens": num_tokens, "skip": skip}
        process = await child("load_client.py", **flags)
        while not engine.has_begun and process.returncode is None:
            await asyncio.sleep(0.01)
        before = cpu_s()
        result = await outcome(process)
        spent = cpu_s() - before
    engine.close()
    result["wall_s"] = engine.ended_at - engine.begun_at
    result["tokens_per_s"] = engine.num_tokens / result["wall_s"]
    result["cpu_us_per_token"] = (spent / engine.num_tokens - alone_s) * 1e6
    result["chunks_per_token"] = result["num_chunks"] / result["num_tokens"]
    wanted = num_tokens * args.streams
    result["num_lost"] = wanted - result["num_tokens"]
    return result


async def stream_part(args: argparse.Namespace) -> dict[str, Any]:
    rounds = [await stream_round(args) for _ in range(args.rounds)]
    for result in rounds:
        delay = result["delay_ms"]
        print(
            f"{args.streams} streams: {result['tokens_per_s']:,.0f} tokens/s,"
            f" {result['num_lost']} lost, {result['num_failed']} streams wrong,"
            f" {result['cpu_us_per_token']:.1f} us of CPU per token,"
            f" {result['chunks_per_token']:.2f} chunks per token,"
            f" delay p50 {delay['p50']:.1f}, p99 {delay['p99']:.1f} ms"
        )
        for failure in result["failures"]:
            print("   ", failure)
    ordered = sorted(rounds, key=lambda r: r["delay_ms"]["p99"])
    median = ordered[len(ordered) // 2]
    print(f"median round: p99 delay {median['delay_ms']['p99']:.1f} ms")
    return {"rounds": rounds, "load_average": os.getloadavg()}


# -- drop ----------------------------------------------------------------------------------


@asynccontextmanager
async def tiny_engine() -> AsyncGenerator[Any, None]:
    from termgen.engine.loop.engine import AsyncEngine

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(TINY_CONFIG))
        engine = await AsyncEngine.start(
            EngineConfig(
                model=folder,
                load_format="dummy",
                skip_tokenizer_init=True,
                device="cpu",
                max_num_seqs=16,
                threads=1,
            )
        )
        try:
            yield engine
        finally:
            await engine.shutdown()


def num_files() -> int:
    return len(os.listdir("/proc/self/fd"))


async def drop_part(args: argparse.Namespace) -> dict[str, Any]:
    async with tiny_engine() as engine, serving(engine) as (server, port):
        await asyncio.sleep(0.2)
        connections = server._uvicorn.server_state.connections
        tasks, files = len(asyncio.all_tasks()), num_files()
        begun = time.perf_counter()
        counts = await drop_all(port, args.clients, random.Random(args.seed))
        wall_s = time.perf_counter() - begun
        deadline = time.perf_counter() + 30
        while time.perf_counter() < deadline:
            snapshot = await engine.snapshot()
            left = {
                "requests": snapshot.num_running + snapshot.num_waiting,
                "blocks": snapshot.num_used_blocks,
                "answers": server.num_answers,
                "connections": len(connections),
                "tasks": len(asyncio.all_tasks()) - tasks,
                "files": num_files() - files,
            }
            if not any(left.values()):
                break
            await asyncio.sleep(0.05)
        settle_s = time.perf_counter() - begun - wall_s
        metrics = (await server._state.render_metrics()).decode()
    stages = [line for line in metrics.splitlines() if line.startswith("termgen_client_disc")]
    print(f"{args.clients} clients dropped in {wall_s:.1f} s: {counts}")
    print("left behind:", left, f"(after {settle_s:.2f} s)")
    print("\n".join(stages))
    return {"dropped": counts, "left": left, "wall_s": wall_s, "settle_s": settle_s}


async def run(args: argparse.Namespace) -> dict[str, Any]:
    parts = {"stream": stream_part, "drop": drop_part}
    return {name: await parts[name](args) for name in args.part}


def main() -> None:
    args = parse_args()
    share_lock_quickly()  # as `termgen serve` does
    gc.collect()
    gc.freeze()
    facts = machine_facts()
    results = asyncio.run(run(args))
    write_report(args, facts, results)


if __name__ == "__main__":
    main()
