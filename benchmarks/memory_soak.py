"""Does a server's memory stay flat? Streaming clients for an hour, on a CPU.

    python benchmarks/memory_soak.py [--minutes 60] [--clients 200] [--output FILE]

Starts a real `termgen serve` with a tiny model of random weights that has SmolLM2's tokenizer and
chat template: its answers are noise, and everything around the model is real. Clients ask for
chats, completions, Responses and Messages, mostly as streams; a fifth of them with JSON schemas,
more different ones than the server caches; some with tools, log-probabilities, several answers or
stop strings. Some leave in the middle. Every few seconds a line of JSON records the resident memory
of the server and of its helpers; at the end comes a verdict about the second half. Exit status 1 if
that has grown by `--most-growth` per cent or more.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from machine import descendants, machine_facts, print_rows, resident_by_kind, resident_kib
from made_up_models import write_config
from servers import ServerProcess, post

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "harness"))

from generated_schemas import generate

WORDS = (
    "the a of river house light stone runs sees green seven over under story model token".split()
)
POPULAR_SCHEMAS = 30
ALL_SCHEMAS = 100_000
SCHEMA_SHARE = 0.2
LEAVES_SHARE = 0.15
KINDS = {"chat": 60, "completion": 20, "responses": 10, "messages": 10}
SERVE_OPTIONS = ("--device", "cpu", "--threads", "1", "--served-model-name", "tiny")
TAIL_BYTES = 1 << 16
"""The kept end of an answer, which shows how it ended."""
ANSWER_TIMEOUT_S = 300.0
"""Limit for a whole answer; a slower one counts as a fault."""


# -- what is asked -----------------------------------------------------------------------------


@dataclass
class Asked:
    path: str
    body: dict[str, Any]
    leaves_after: int | None
    """Deltas after which the client leaves; None: it stays."""


class Requests:
    """Random requests. The same seed gives the same ones."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._systems = [self._words(60) for _ in range(20)]

    def _words(self, most: int) -> str:
        rng = self._rng
        return " ".join(rng.choices(WORDS, k=rng.randrange(2, most))) + f" {rng.randrange(10**6)}"

    def draw(self) -> Asked:
        rng = self._rng
        kind = rng.choices(tuple(KINDS), tuple(KINDS.values()))[0]
        is_stream = rng.random() < 0.9
        leaves = rng.randrange(0, 40) if rng.random() < LEAVES_SHARE else None
        path, body = getattr(self, f"_{kind}")()
        return Asked(path, {**body, "stream": is_stream}, leaves)

    def _wants_schema(self) -> bool:
        """Messages cannot have a schema, so the other kinds have proportionally more."""
        return self._rng.random() < SCHEMA_SHARE / (1 - KINDS["messages"] / sum(KINDS.values()))

    def _chat(self) -> tuple[str, dict[str, Any]]:
        rng = self._rng
        body: dict[str, Any] = {"messages": self._talk(), "max_tokens": rng.randrange(4, 60)}
        body |= self._sampling()
        drawn = rng.random()
        if self._wants_schema():
            schema = {"name": "answer", "schema": self._schema(), "strict": True}
            body["response_format"] = {"type": "json_schema", "json_schema": schema}
        elif drawn < 0.1:
            function = {"name": f"f{rng.randrange(50)}", "parameters": self._schema(popular=True)}
            body["tools"] = [{"type": "function", "function": function}]
            body["tool_choice"] = rng.choice(("auto", "required"))
        elif drawn < 0.16:
            body |= {"logprobs": True, "top_logprobs": rng.randrange(6)}
        elif drawn < 0.2:
            body["n"] = 2
        return "/v1/chat/completions", body

    def _completion(self) -> tuple[str, dict[str, Any]]:
        rng = self._rng
        body: dict[str, Any] = {"prompt": self._words(200), "max_tokens": rng.randrange(1, 60)}
        body |= self._sampling()
        if self._wants_schema():
            body["structured_outputs"] = {"json": self._schema()}
        if rng.random() < 0.1:
            body["logprobs"] = 2
        return "/v1/completions", body

    def _responses(self) -> tuple[str, dict[str, Any]]:
        body: dict[str, Any] = {"input": self._words(60), "max_output_tokens": 40}
        if self._wants_schema():
            wanted = {"type": "json_schema", "name": "answer", "schema": self._schema()}
            body["text"] = {"format": wanted}
        return "/v1/responses", body

    def _messages(self) -> tuple[str, dict[str, Any]]:
        system, *talk = self._talk()
        body = {"system": system["content"], "messages": talk, "max_tokens": 40, "model": "tiny"}
        return "/v1/messages", body

    def _talk(self) -> list[dict[str, Any]]:
        rng = self._rng
        messages = [{"role": "system", "content": rng.choice(self._systems)}]
        for _ in range(rng.randrange(0, 3)):
            messages.append({"role": "user", "content": self._words(40)})
            messages.append({"role": "assistant", "content": self._words(40)})
        return [*messages, {"role": "user", "content": self._words(60)}]

    def _sampling(self) -> dict[str, Any]:
        rng = self._rng
        wanted: dict[str, Any] = {"temperature": rng.choice((0, 0.7, 1.0))}
        if rng.random() < 0.1:
            wanted["seed"] = rng.randrange(10**6)
        if rng.random() < 0.1:
            wanted["stop"] = [rng.choice(WORDS), "\n\n"]
        if rng.random() < 0.1:
            wanted["user"] = f"user {rng.randrange(10**6)}"
        return wanted

    def _schema(self, *, popular: bool = False) -> dict[str, Any]:
        """A schema: popular ones are asked for repeatedly, most others once."""
        rng = self._rng
        is_popular = popular or rng.random() < 0.4
        return generate(rng.randrange(POPULAR_SCHEMAS if is_popular else ALL_SCHEMAS))


# -- clients -----------------------------------------------------------------------------------


@dataclass
class Clients:
    port: int
    requests: Requests
    endings: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)

    async def run(self, count: int, until: float) -> None:
        await asyncio.gather(*(self._client(until) for _ in range(count)))

    async def _client(self, until: float) -> None:
        while time.monotonic() < until:
            asked = self.requests.draw()
            try:
                async with asyncio.timeout(ANSWER_TIMEOUT_S):
                    ending = await self._ask(asked)
            except TimeoutError:
                ending = "no answer in time"
            except (ConnectionError, asyncio.IncompleteReadError) as error:
                ending = f"cut: {type(error).__name__}"
                await asyncio.sleep(1.0)
            self.endings[ending] += 1
            if not ending.startswith(("whole", "left", "429")) and len(self.faults) < 20:
                self.faults.append(f"{ending}: {json.dumps(asked.body)[:2000]}")

    async def _ask(self, asked: Asked) -> str:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            writer.write(post(asked.path, json.dumps(asked.body).encode()))
            if asked.leaves_after == 0:
                return "left at once"
            answer = await reader.readuntil(b"\r\n\r\n")
            status = answer[9:12].decode()
            tail, pieces = b"", 0
            while piece := await reader.read(1 << 16):
                tail = (tail + piece)[-TAIL_BYTES:]
                pieces += 1
                if status == "200" and pieces == asked.leaves_after:
                    return "left in the middle"
            if status != "200":
                return f"{status} {tail.decode(errors='replace')[:300]}"
            return "whole" if _is_whole(asked, tail) else f"not whole: {tail[-300:]!r}"
        finally:
            writer.transport.abort()


def _is_whole(asked: Asked, tail: bytes) -> bool:
    if not asked.body["stream"]:
        return tail.rstrip().endswith(b"}")
    ends = {"/v1/responses": b"event: response.", "/v1/messages": b"event: message_stop"}
    return ends.get(asked.path, b"data: [DONE]") in tail and b"event: error" not in tail


# -- the server and its memory ------------------------------------------------------------------


def write_model(folder: Path) -> Path:
    """The tokenizer and chat template of SmolLM2 on a model that computes next to nothing."""
    from termgen.engine.text.tokenizer import load_tokenizer
    from termgen.library.catalog import resolve_model

    tokenizer = load_tokenizer(resolve_model("smollm2-135m", allow_download=True).path)
    model = write_config(folder, vocab_size=tokenizer.vocab_size, max_position_embeddings=2048)
    (model / "tokenizer.json").write_text(tokenizer.to_json())
    named = {"eos_token": "<|im_end|>", "chat_template": tokenizer.chat_templates["default"]}
    (model / "tokenizer_config.json").write_text(json.dumps(named))
    return model


def sample(pid: int, began: float, clients: Clients) -> dict[str, Any]:
    helpers = [kib for child in descendants(pid) if (kib := resident_kib(child))]
    server = resident_kib(pid)
    return {
        "seconds": round(time.monotonic() - began, 1),
        "total_kib": server.get("rss", 0) + sum(kib["rss"] for kib in helpers),
        "server": {**server, **resident_by_kind(pid)},
        "helpers": {"count": len(helpers), "rss": sum(kib["rss"] for kib in helpers)},
        "answers": sum(clients.endings.values()),
    }


async def watch(
    pid: int, began: float, clients: Clients, every_s: float, output: Path
) -> list[dict[str, Any]]:
    """Record until it is cancelled."""
    samples: list[dict[str, Any]] = []
    with output.open("a") as lines, contextlib.suppress(asyncio.CancelledError):
        for number in itertools.count(1):
            await asyncio.sleep(began + number * every_s - time.monotonic())
            samples.append(sample(pid, began, clients))
            print(json.dumps(samples[-1]), file=lines, flush=True)
    return samples


def growth(samples: Sequence[dict[str, Any]], value: Any) -> dict[str, float]:
    """Growth over the second half, in per cent: along a least-squares line, and from the median of
    its first third to that of its last."""
    half = samples[len(samples) // 2 :]
    times, sizes = [one["seconds"] for one in half], [value(one) for one in half]
    if len(half) < 3 or not sizes[0]:
        raise SystemExit("too few samples for a verdict")
    line = statistics.linear_regression(times, sizes)
    begin = line.intercept + line.slope * times[0]
    third = len(sizes) // 3
    early, late = statistics.median(sizes[:third]), statistics.median(sizes[-third:])
    return {
        "line_per_cent": 100 * line.slope * (times[-1] - times[0]) / begin,
        "medians_per_cent": 100 * (late - early) / early,
        "begin_mib": begin / 1024,
        "end_mib": (line.intercept + line.slope * times[-1]) / 1024,
    }


def verdict(samples: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    return {
        "server and helpers": growth(samples, lambda one: one["total_kib"]),
        "server": growth(samples, lambda one: one["server"]["rss"]),
    }


def is_flat(result: dict[str, dict[str, float]], most_per_cent: float) -> bool:
    grown = result["server and helpers"]
    return max(grown["line_per_cent"], grown["medians_per_cent"]) < most_per_cent


async def soak(server: ServerProcess, args: argparse.Namespace) -> bool:
    clients, began = Clients(server.port, Requests(args.seed)), time.monotonic()
    watching = asyncio.create_task(watch(server.pid, began, clients, args.every, args.output))
    await clients.run(args.clients, began + 60 * args.minutes)
    watching.cancel()
    samples = await watching
    is_alive = server.ending is None
    result = verdict([one for one in samples if one["seconds"] <= 60 * args.minutes])
    flat = is_flat(result, args.most_growth)
    summary = {
        "verdict": result,
        "is_flat": flat,
        "is_alive": is_alive,
        "endings": dict(clients.endings.most_common(20)),
        "faults": clients.faults,
        "answers_per_s": sum(clients.endings.values()) / (time.monotonic() - began),
        "seed": args.seed,
        "machine": machine_facts(),
    }
    with args.output.open("a") as lines:
        print(json.dumps(summary), file=lines)
    show(samples, summary)
    return flat and is_alive and not clients.faults


def show(samples: Sequence[dict[str, Any]], summary: dict[str, Any]) -> None:
    kinds = ("rss", "heap", "arenas", "blocks", "files")
    print_rows(
        {
            "minute": one["seconds"] / 60,
            "answers": one["answers"],
            **{f"{kind}, MiB": one["server"].get(kind, 0) // 1024 for kind in kinds},
            "helpers": one["helpers"]["rss"] // 1024,
        }
        for one in samples[:: max(1, len(samples) // 20)]
    )
    print(json.dumps(summary, indent=1))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--every", type=float, default=5.0, help="seconds between samples")
    parser.add_argument("--most-growth", type=float, default=1.0, help="per cent, second half")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--output", type=Path, default=Path("memory_soak.jsonl"))
    parser.add_argument("serve_options", nargs="*", help="behind --: further ones of the server")
    args = parser.parse_args()
    print(f"seed {args.seed}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        model, options = write_model(Path(folder)), (*SERVE_OPTIONS, *args.serve_options)
        with ServerProcess(model, options, args.output.with_suffix(".log")) as server:
            return 0 if asyncio.run(soak(server, args)) else 1


if __name__ == "__main__":
    sys.exit(main())
