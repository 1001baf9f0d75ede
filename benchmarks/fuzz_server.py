"""Thousands of random requests to one live server, beside a client that does nothing wrong.

    python benchmarks/fuzz_server.py [--requests 20000] [--seed N] [--output FOLDER]
    python benchmarks/fuzz_server.py --replay SEED/INDEX      # one of them again, and its answer

Schemas, regular expressions, grammars, tools and bodies from `fuzz_bodies.py` go to a `termgen
serve` with the tiny model of `memory_soak.py`, 20 in a second. Faults are: the server's end, an
answer of 5xx, a refusal that does not name its field, no answer in time, and a good client whose
99th percentile between tokens more than doubles. Each body at fault is written to the folder, by
its seed. The server's end is that of the run: it is a fault of every body that was under way, and
`--replay` finds which of them it was. Exit status 1 with any fault.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from fuzz_bodies import Body, body
from load_client import Clients, chat_body
from machine import machine_facts, percentiles
from memory_soak import SERVE_OPTIONS, write_model
from servers import ServerProcess, post

ANSWER_TIMEOUT_S = 60.0
AT_ONCE = 8
OPTIONS = (
    *SERVE_OPTIONS,
    *("--kv-cache-gib", "0.1", "--no-log-requests", "--max-num-seqs", "32"),
    # An answer without a limit of its own ends with the context, long before ANSWER_TIMEOUT_S.
    *("--max-model-len", "512"),
)
WHOLE_BODY_CODES = ("invalid_json", "request_too_large", "invalid_http", "invalid_body")
"""Codes of errors about a body as a whole, without a field."""
NO_FIELD = "refusal names no field"


@dataclass(frozen=True)
class Answer:
    status: int
    content: bytes


async def ask(port: int, sent: Body) -> Answer:
    """Raises ConnectionError or IncompleteReadError where the connection ends without an answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(post(sent.path, sent.content))
        answer = await reader.readuntil(b"\r\n\r\n")
        content = await reader.read(-1)
        return Answer(int(answer[9:12]), content)
    finally:
        writer.transport.abort()


def fault_of(sent: Body, answer: Answer) -> str | None:
    """The fault of an answer; None for a good one."""
    if answer.status >= 500:
        return f"answer {answer.status}"
    if answer.status < 400 or answer.status == 429:
        return None
    is_ollamas = sent.path.startswith("/api/")
    try:
        error = json.loads(answer.content)["error"]
        if is_ollamas:  # a text, and nothing else
            error = {"message": error + ""}
        message, code = error["message"], error.get("code")
    except (ValueError, KeyError, TypeError):
        return "refusal without an error object"
    if error.get("param") or code in WHOLE_BODY_CODES:
        return None
    fields = _fields_of(sent.content)
    if fields is None:  # not a JSON object: there is no field to name
        return None
    if is_ollamas:
        is_whole = message.startswith("The request body")
        is_named = any(name and name in message for name in fields)
        return None if is_whole or is_named else NO_FIELD
    if sent.path == "/v1/messages":  # Anthropic's errors have no place for either but the message
        named = [*fields, *(f"({code})" for code in WHOLE_BODY_CODES)]
        return None if any(name and name in message for name in named) else NO_FIELD
    return NO_FIELD


def _fields_of(content: bytes) -> list[str] | None:
    try:
        parsed = json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError):
        return None
    # A missing field's name is in the message, too.
    known = ["messages", "max_tokens", "model"]
    return [*parsed, *known] if isinstance(parsed, dict) else None


async def outcome(server: ServerProcess, sent: Body) -> tuple[str | None, Answer | None]:
    """The fault that a body causes, if any, and its answer, if one comes."""
    try:
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            answer = await ask(server.port, sent)
    except TimeoutError:
        return "no answer in time", None
    except (ConnectionError, asyncio.IncompleteReadError):
        for _ in range(20):  # connections break before the process can be waited for
            if server.ending:
                return f"server ended: {server.ending}", None
            await asyncio.sleep(0.05)
        return "connection cut", None
    return fault_of(sent, answer), answer


class Fuzz:
    def __init__(self, server: ServerProcess, folder: Path) -> None:
        self._server = server
        self._folder = folder
        self.faults: list[dict[str, str]] = []
        self.counts: Counter[str] = Counter()
        self.num_done = 0

    async def run(self, seeds: Iterable[str], per_second: float) -> None:
        waiting = iter(seeds)
        next_s = time.monotonic()

        async def worker() -> None:
            nonlocal next_s
            for seed in waiting:
                delay_s = next_s - time.monotonic()
                # Missed sends are not made up for: a burst would be a different load.
                next_s = max(next_s, time.monotonic()) + (1 / per_second if per_second else 0.0)
                if delay_s > 0:
                    await asyncio.sleep(delay_s)
                if self._server.ending:
                    return
                await self._one(seed)

        await asyncio.gather(*(worker() for _ in range(AT_ONCE)))

    async def _one(self, seed: str) -> None:
        sent = body(seed)
        what, answer = await outcome(self._server, sent)
        if answer:
            self.counts[f"{sent.kind} {answer.status}"] += 1
        if what:
            detail = answer.content[:600].decode(errors="replace") if answer else ""
            fault = {"what": what, "seed": seed, "kind": sent.kind, "path": sent.path}
            self.faults.append({**fault, "detail": detail})
            name = re.sub(r"\W", "-", f"{what} {sent.kind} {seed}")
            (self._folder / f"{name}.json").write_bytes(sent.content)
            with (self._folder / "faults.jsonl").open("a") as lines:
                print(json.dumps(self.faults[-1]), file=lines)
        self.num_done += 1
        if self.num_done % 1000 == 0:
            print(f"{self.num_done} sent, {len(self.faults)} faults", file=sys.stderr, flush=True)


async def fuzz(server: ServerProcess, args: argparse.Namespace) -> bool:
    client = await Clients.start(server.port, [chat_body(60)])
    await asyncio.sleep(args.alone)
    alone = percentiles(gap for answer in await client.stop() for gap in answer.gaps_ms)
    run = Fuzz(server, args.output)
    client = await Clients.start(server.port, [chat_body(60)])
    os.nice(5)  # the server and the good client have precedence: they started earlier
    began = time.monotonic()
    seeds = (f"{args.seed}/{index}" for index in range(args.requests))
    await run.run(seeds, args.per_second)
    seconds = time.monotonic() - began
    answers = await client.stop()
    beside = percentiles(gap for answer in answers for gap in answer.gaps_ms)
    ratio, num_broken = beside["p99"] / alone["p99"], sum(a.error is not None for a in answers)
    report = {
        "machine": machine_facts(),
        "seed": args.seed,
        "sent": run.num_done,
        "per_second": run.num_done / seconds,
        "faults": Counter(f"{fault['what']} ({fault['kind']})" for fault in run.faults),
        "answers": dict(sorted(run.counts.items())),
        "good_client": {
            "p99_ms_alone": alone["p99"],
            "p99_ms_beside": beside["p99"],
            "ratio": ratio,
            "answers": sum(answer.is_whole for answer in answers),
            "gaps": sum(len(answer.gaps_ms) for answer in answers),
            "broken": num_broken,
        },
    }
    (args.output / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report, indent=1))
    is_slow = not ratio <= args.most_slower
    return not (run.faults or num_broken or is_slow)


async def again(server: ServerProcess, args: argparse.Namespace) -> bool:
    """Send one body, and print it with its answer."""
    sent = body(args.replay)
    print(f"{sent.kind} {sent.path}\n{sent.content.decode(errors='replace')[:4000]}")
    what, answer = await outcome(server, sent)
    if answer:
        print(answer.status, answer.content.decode(errors="replace")[:2000])
    print(what or "no fault")
    return what is None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--per-second", type=float, default=20.0, help="0: as many as it answers")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--alone", type=float, default=15.0, help="seconds without the others")
    parser.add_argument("--most-slower", type=float, default=2.0, help="ratio of 99th percentiles")
    parser.add_argument("--output", type=Path, default=Path("fuzz_faults"))
    parser.add_argument("--replay", metavar="SEED/INDEX")
    args = parser.parse_args()
    print(f"seed {args.seed}", flush=True)
    args.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder))
        with ServerProcess(model, OPTIONS, args.output / "server.log") as server:
            task = again if args.replay else fuzz
            return 0 if asyncio.run(task(server, args)) else 1


if __name__ == "__main__":
    sys.exit(main())
