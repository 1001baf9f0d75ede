"""Thousands of random requests to one live server, beside a client that does nothing wrong.

    python benchmarks/fuzz_server.py [--requests 20000] [--seed N] [--output FOLDER]
    python benchmarks/fuzz_server.py --replay SEED/INDEX      # one of them again, and its answer

Schemas, regular expressions, grammars, tools and bodies from `fuzz_bodies.py` go to a `termgen
serve` with the tiny model of `memory_soak.py`, 20 in a second. Faults are: the server's end, an
answer of 5xx, a refusal that does not name its field, no answer in time, and a good client whose
99th percentile between tokens more than doubles. Each body at fault is written to the folder, by
its seed. After a death, what was under way is sent again one by one to find which it was. Exit
status 1 with any fault.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
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
MOST_DEATHS = 30
OPTIONS = (
    *SERVE_OPTIONS,
    *("--kv-cache-gib", "0.1", "--no-log-requests", "--max-num-seqs", "32"),
    # An answer without a limit of its own ends with the context, long before ANSWER_TIMEOUT_S.
    *("--max-model-len", "512"),
)
WHOLE_BODY_CODES = ("invalid_json", "request_too_large", "invalid_http", "invalid_body")
"""Codes of errors about a body as a whole, without a field."""
DIED = "server died"
NO_FIELD = "refusal names no field"


@dataclass(frozen=True)
class Answer:
    status: int
    content: bytes


@dataclass
class Fault:
    what: str
    seed: str
    kind: str
    path: str
    detail: str


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
    try:
        error = json.loads(answer.content)["error"]
        message, code = error["message"], error.get("code")
    except (ValueError, KeyError, TypeError):
        return "refusal without an error object"
    if error.get("param") or code in WHOLE_BODY_CODES:
        return None
    fields = _fields_of(sent.content)
    if fields is None:  # not a JSON object: there is no field to name
        return None
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


# -- the server, which may die -----------------------------------------------------------------


class LiveServer:
    """A server that is started again after its death."""

    def __init__(self, model: Path, log: Path) -> None:
        self._model, self._log = model, log
        self.num_starts = 0
        self.start()

    def start(self) -> None:
        self.num_starts += 1
        log = self._log.with_suffix(f".{self.num_starts}.log")
        self.process = ServerProcess(self._model, OPTIONS, log)
        self.port = self.process.port

    async def has_died(self) -> bool:
        """Wait a moment: connections break before the process can be waited for."""
        for _ in range(20):
            if self.process.ending:
                return True
            await asyncio.sleep(0.05)
        return False


# -- fuzzing -----------------------------------------------------------------------------------


class Fuzz:
    def __init__(self, server: LiveServer, folder: Path) -> None:
        self._server = server
        self._folder = folder
        self._under_way: set[str] = set()
        self._mending = asyncio.Lock()
        self.faults: list[Fault] = []
        self.counts: Counter[str] = Counter()
        self.num_deaths = 0
        self.num_done = 0

    async def run(self, seeds: Iterable[str], at_once: int, per_second: float) -> None:
        waiting = iter(seeds)
        next_s = time.monotonic()

        async def worker() -> None:
            nonlocal next_s
            for seed in waiting:
                if self.num_deaths >= MOST_DEATHS:
                    return
                delay_s = next_s - time.monotonic()
                # Missed sends are not made up for: a burst would be a different load.
                next_s = max(next_s, time.monotonic()) + (1 / per_second if per_second else 0.0)
                if delay_s > 0:
                    await asyncio.sleep(delay_s)
                await self._one(seed)

        await asyncio.gather(*(worker() for _ in range(at_once)))

    async def _one(self, seed: str) -> None:
        async with self._mending:
            number = self._server.num_starts
        self._under_way.add(seed)
        ended = await self._send(seed)
        if ended is None and await self._mend(number):
            return  # all requests that were in flight have been tried again
        self._under_way.discard(seed)
        if ended is None:
            self._add("connection cut", seed, "the server lives on")
        self.num_done += 1
        if self.num_done % 1000 == 0:
            print(f"{self.num_done} sent, {len(self.faults)} faults", file=sys.stderr, flush=True)

    async def _send(self, seed: str) -> Answer | None:
        """None if the connection broke."""
        sent = body(seed)
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                answer = await ask(self._server.port, sent)
        except TimeoutError:
            self._add("no answer in time", seed, "")
            return Answer(0, b"")
        except (ConnectionError, asyncio.IncompleteReadError):
            return None
        self.counts[f"{sent.kind} {answer.status}"] += 1
        if what := fault_of(sent, answer):
            self._add(what, seed, answer.content[:600].decode(errors="replace"))
        return answer

    async def _mend(self, number: int) -> bool:
        """Restart after a death, and find the body that caused it. False: none did."""
        async with self._mending:
            if self._server.num_starts != number:
                return True
            if not await self._server.has_died():
                return False
            suspects, self._under_way = sorted(self._under_way), set()
            print(
                f"{DIED} ({self._server.process.ending}); {len(suspects)} suspects", file=sys.stderr
            )
            self._server.start()
            found = False
            for seed in suspects:
                if await self._send(seed) is None and await self._server.has_died():
                    found = True
                    self.num_deaths += 1
                    self._add(DIED, seed, self._server.process.ending)
                    self._server.start()
            self.num_done += len(suspects)
            if not found:
                self.num_deaths += 1
                self._add(DIED, suspects[0], f"by none alone of {suspects}")
            return True

    def _add(self, what: str, seed: str, detail: str) -> None:
        sent = body(seed)
        self.faults.append(Fault(what, seed, sent.kind, sent.path, detail))
        name = f"{what} {sent.kind} {seed}".replace(" ", "-").replace("/", "-")
        (self._folder / f"{name}.json").write_bytes(sent.content)
        with (self._folder / "faults.jsonl").open("a") as lines:
            print(json.dumps(vars(self.faults[-1])), file=lines)


async def fuzz(server: LiveServer, args: argparse.Namespace) -> bool:
    client = await Clients.start(server.port, [chat_body(60)])
    await asyncio.sleep(args.alone)
    alone = percentiles(gap for answer in await client.stop() for gap in answer.gaps_ms)
    run = Fuzz(server, args.output)
    client = await Clients.start(server.port, [chat_body(60)])
    os.nice(5)  # the server and the good client have precedence: they started earlier
    began = time.monotonic()
    seeds = (f"{args.seed}/{index}" for index in range(args.requests))
    await run.run(seeds, args.at_once, args.per_second)
    seconds = time.monotonic() - began
    answers = await client.stop()
    beside = percentiles(gap for answer in answers for gap in answer.gaps_ms)
    ratio, num_broken = beside["p99"] / alone["p99"], sum(a.error is not None for a in answers)
    report = {
        "machine": machine_facts(),
        "seed": args.seed,
        "sent": run.num_done,
        "per_second": run.num_done / seconds,
        "deaths": run.num_deaths,
        "faults": Counter(f"{fault.what} ({fault.kind})" for fault in run.faults),
        "answers": dict(sorted(run.counts.items())),
        "good_client": {
            "p99_ms_alone": alone["p99"],
            "p99_ms_beside": beside["p99"],
            "ratio": ratio,
            "answers": sum(answer.is_whole for answer in answers),
            "broken": num_broken,
        },
    }
    (args.output / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report, indent=1))
    is_slow = not ratio <= args.most_slower
    return not (run.faults or num_broken or is_slow)


# -- one body again ----------------------------------------------------------------------------


async def outcome(server: LiveServer, sent: Body) -> str | None:
    """The fault that this body causes; the server runs again afterwards."""
    try:
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            return fault_of(sent, await ask(server.port, sent))
    except TimeoutError:
        return "no answer in time"
    except (ConnectionError, asyncio.IncompleteReadError):
        if not await server.has_died():
            return "connection cut"
        server.start()
        return DIED


async def again(server: LiveServer, args: argparse.Namespace) -> bool:
    sent = body(args.replay)
    print(f"{sent.kind} {sent.path}\n{sent.content.decode(errors='replace')[:4000]}")
    what = await outcome(server, sent)
    if what != DIED:
        answer = await ask(server.port, sent)
        print(answer.status, answer.content.decode(errors="replace")[:2000])
    print(what or "no fault")
    return what is None


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--at-once", type=int, default=8)
    parser.add_argument(
        "--per-second",
        type=float,
        default=20.0,
        help="requests begun in a second; 0: as many as are answered, which takes both cores",
    )
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--alone", type=float, default=15.0, help="seconds without the others")
    parser.add_argument("--most-slower", type=float, default=2.0, help="ratio of 99th percentiles")
    parser.add_argument("--output", type=Path, default=Path("fuzz_faults"))
    parser.add_argument("--replay", metavar="SEED/INDEX")
    return parser.parse_args()


def main() -> int:
    args = parse_args()
    print(f"seed {args.seed}", flush=True)
    args.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        server = LiveServer(write_model(Path(folder)), args.output / "server.log")
        try:
            task = again if args.replay else fuzz
            return 0 if asyncio.run(task(server, args)) else 1
        finally:
            server.process.stop()


if __name__ == "__main__":
    sys.exit(main())
