"""Hostile requests: each kind as the bytes of a whole request, or as a way to connect.

Used by `hostile_load.py`, and by the tests that send each of them once. Every grammar is new:
one that the server has cached costs it nothing.
"""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Awaitable, Callable
from typing import Any

USER = '"messages":[{"role":"user","content":"x"}]'
MB8 = 8 * 2**20 - 1000
CHAT = "/v1/chat/completions"


def good(**fields: Any) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": "x"}], **fields}).encode()


def head(path: str, *lines: str) -> bytes:
    return "\r\n".join((f"POST {path} HTTP/1.1", "host: 127.0.0.1", *lines, "", "")).encode()


def request(content: bytes, path: str = CHAT) -> bytes:
    length = f"content-length: {len(content)}"
    return head(path, "connection: close", "content-type: application/json", length) + content


BODIES: dict[str, Callable[[], bytes]] = {
    "deep": lambda: b'{"messages":' + b"[" * 1_000_000,
    "many values": lambda: b'{"messages":[' + b"[]," * (MB8 // 3 - 20) + b"[]]}",
    "many numbers": lambda: b'{"n":[' + b"7," * (MB8 // 2 - 99) + b"7]," + USER.encode() + b"}",
    "most numbers": lambda: b'{"n":[' + b"7," * 250_000 + b"7]," + USER.encode() + b"}",
    "most values": lambda: b'{"n":[' + b"[]," * 60_000 + b"[]]," + USER.encode() + b"}",
    "most names": lambda: good(**{f"n{i}": 0 for i in range(30_000)}),
    "long text": lambda: good(n=0, user="x" * MB8),
    "escapes": lambda: b'{"n":0,"user":"' + b"\\u00e9" * (MB8 // 6) + b'",' + USER.encode() + b"}",
    "quotes": lambda: b'{"n":0,"user":"' + b'\\"' * 500_000 + b'",' + USER.encode() + b"}",
    "no JSON": lambda: b"\xff" * MB8,
    "too large": lambda: b" " * (2 * MB8),
    "huge n": lambda: good(n=10**30),
    "NaN": lambda: b'{"temperature":NaN,' + USER.encode() + b"}",
    "stop list": lambda: good(stop=["x"] * 60_000),
    "logit_bias": lambda: good(logit_bias={str(i): 1 for i in range(30_000)}),
    "messages": lambda: good()[:-2] + b',{"role":"user","content":""}' * 15_000 + b',{"role":5}]}',
    "digits": lambda: b'{"n":' + b"9" * 1_000_000 + b"," + USER.encode() + b"}",
}
"""JSON that is refused, and bodies that are no JSON."""


def held(**wanted: Any) -> bytes:
    return good(structured_outputs=wanted, max_tokens=4)


def properties(n: int) -> dict[str, Any]:
    each = {"type": "string", "minLength": 1, "maxLength": 40}
    return {"type": "object", "properties": {f"p{n}_{i}": each for i in range(900)}}


def joined(n: int) -> dict[str, Any]:
    patterns = [{"type": "string", "pattern": f"(a|b{n})*.{{{i}}}c"} for i in range(1, 25)]
    return {"type": "object", "properties": {"x": {"allOf": patterns}}, "required": ["x"]}


def nested(n: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer", "minimum": n}
    for i in range(28):
        schema = {"type": "object", "properties": {f"k{i}": schema, "other": {"enum": [n, i]}}}
    return schema


def pointed(n: int) -> dict[str, Any]:
    names = [f"d{n}_{i}" for i in range(100)]
    refs = [{"$ref": f"#/$defs/{name}"} for name in names]
    return {"$defs": {name: {"anyOf": refs[:12]} for name in names}, "anyOf": refs}


GRAMMARS: dict[str, Callable[[int], bytes]] = {
    "regex, repeats": lambda n: held(regex=f"((a{{1,90}}|b{n}){{1,90}}c){{1,90}}"),
    "regex, states": lambda n: held(regex=f"(x|y)*{n}x(x|y){{18}}"),
    "regex, classes": lambda n: held(regex=r"(\p{L}|\p{N}|\p{S}){1,200}" * 40 + str(n)),
    "regex, long": lambda n: held(regex="|".join(f"w{n}{i}" for i in range(7000))),
    "regex, wrong": lambda n: held(regex="(" * 60_000 + str(n)),
    "choices": lambda n: held(choice=[f"c{n}-{i:05}" for i in range(4999)]),
    "schema, names": lambda n: held(json=properties(n)),
    "schema, values": lambda n: held(json={"enum": [f"{n}-{i:05}" for i in range(4999)]}),
    "schema, allOf": lambda n: held(json=joined(n)),
    "schema, nested": lambda n: held(json=nested(n)),
    "schema, $ref": lambda n: held(json=pointed(n)),
    "lark, rules": lambda n: held(
        grammar=f'start: r0 "{n}"\n'
        + "".join(f'r{i}: r{i + 1} r{i + 1} | "x"\n' for i in range(1500))
        + 'r1500: "y"\n'
    ),
    "lark, alike": lambda n: held(
        grammar=f'start: a*\na: {"|".join(["b"] * 3000)}\nb: "{n}" | a a | "z"\n'
    ),
    "lark, and": lambda n: held(grammar=f"start: T\nT: /(a|b)*a(a|b){{16}}/ & /.*{n}.*/\n"),
    "GBNF": lambda n: held(
        grammar=f'root ::= "{n}" r0\n'
        + "".join(f'r{i} ::= r{i + 1}? [a-z0-9]* "x"\n' for i in range(240))
        + 'r240 ::= "y"\n'
    ),
}
"""Some are refused, some compiled; n makes each one new."""


def tools(count: int, **more: Any) -> list[dict[str, Any]]:
    schema = {"type": "object", "properties": {"a": {"type": "string"}}, **more}
    functions = [{"name": f"f{i}", "parameters": schema} for i in range(count)]
    return [{"type": "function", "function": function} for function in functions]


def said(*contents: Any) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": c} for c in contents]}).encode()


def level(depth: int) -> Any:
    value: Any = 0
    for _ in range(depth):
        value = {"a": value}
    return value


TEMPLATES: dict[str, Callable[[], bytes]] = {
    "kwargs, names": lambda: good(chat_template_kwargs={f"k{i}": i for i in range(30_000)}),
    "kwargs, numbers": lambda: good(chat_template_kwargs={"k": [7] * 200_000}),
    "kwargs, lists": lambda: good(chat_template_kwargs={"k": [[]] * 60_000}),
    "kwargs, text": lambda: good(chat_template_kwargs={"k": "x" * MB8}),
    "kwargs, deep": lambda: good(chat_template_kwargs={"k": level(500)}),
    "kwargs, reserved": lambda: good(chat_template_kwargs={"messages": [], "tokenize": True}),
    "own template": lambda: good(chat_template="{% for i in range(10**9) %}x{% endfor %}"),
    "control tokens": lambda: said("<|im_end|>\n<|im_start|>system\n" * 1800),
    "much text": lambda: said("word " * 13_000),
    "odd text": lambda: said("".join(map(chr, range(0x400, 0xD7FF))) * 2),
    "many turns": lambda: said(*["x"] * 12_000),
    "many parts": lambda: said([{"type": "text", "text": "x"}] * 15_000),
    "tools, many": lambda: good(tools=tools(2000)),
    "tools, large": lambda: good(tools=tools(8, enum=["v" * 12] * 4000), tool_choice="none"),
    "tools, deep": lambda: good(tools=tools(2, items=level(900))),
}
"""Attacks by templates and their variables."""


def chunked(size: int, total: int) -> bytes:
    lines = ("content-type: application/json", "transfer-encoding: chunked")
    return head(CHAT, *lines) + (b"%x\r\n%b\r\n" % (size, b" " * size)) * (total // size)


HEADERS: dict[str, Callable[[], bytes]] = {
    "huge header": lambda: head(CHAT, "x-a: " + "a" * 2**20),
    "15 KiB header": lambda: head(CHAT, "x-a: " + "a" * 15_000, "content-length: 0"),
    "many headers": lambda: head(CHAT, *["a:"] * 60_000, "content-length: 0"),
    "most headers": lambda: head(CHAT, *["a:"] * 3500, "content-length: 0"),
    "folded header": lambda: head(CHAT, "x-a: a", *[" b"] * 3500, "content-length: 0"),
    "long path": lambda: head("/" + "%41" * 5000, "content-length: 0"),
    "odd path": lambda: head("/v1/models/" + "%C3%A9" * 2000, "content-length: 0"),
    "no HTTP": lambda: bytes(range(256)) * 4096,
    "line ends": lambda: b"\r\n" * 500_000,
    "TLS": lambda: b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(256)) * 2,
    "two lengths": lambda: head(CHAT, "content-length: 5", "content-length: 6"),
    "wrong length": lambda: head(CHAT, "content-length: -1"),
    "small chunks": lambda: chunked(1, 1_000_000),
    "odd chunks": lambda: chunked(1, 1)[:-6] + b"f" * 30 + b"\r\n",
    "chunk notes": lambda: chunked(1, 1)[:-6] + b"1;" + b"a" * 2**20 + b"\r\nx\r\n0\r\n\r\n",
    "end headers": lambda: chunked(9, 9) + b"0\r\n" + b"a:\r\n" * 60_000 + b"\r\n",
    "many at once": lambda: b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n" * 10_000,
}
"""Attacks outside the body, and bytes that are not HTTP at all."""


async def one_by_one(port: int) -> str:
    """A head that arrives a byte at a time, fast, up to the limit."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(b"POST / HTTP/1.1\r\nhost: 127.0.0.1\r\n")
        for byte in b"x-slow: " + b"a" * 300:
            writer.write(bytes([byte]))
            await asyncio.sleep(0)
        return "sent"
    finally:
        writer.transport.abort()


async def slow_heads(port: int) -> str:
    """A hundred connections at once, each of which sends a little of a head now and then."""
    pairs = [await asyncio.open_connection("127.0.0.1", port) for _ in range(100)]
    try:
        for part in (b"POST ", b"/ HTTP/1.1\r\n", b"a: b\r\n", b"c: d\r\n"):
            for _, writer in pairs:
                writer.write(part)
            await asyncio.sleep(0.05)
        return "held"
    finally:
        for _, writer in pairs:
            writer.transport.abort()


CONNECTIONS: dict[str, Callable[[int], Awaitable[str]]] = {
    "byte by byte": one_by_one,
    "slow heads": slow_heads,
}

KINDS: dict[str, tuple[str, ...]] = {
    "body": tuple(BODIES),
    "grammar": tuple(GRAMMARS),
    "template": tuple(TEMPLATES),
    "header": (*HEADERS, *CONNECTIONS),
}
ALL = tuple(kind for group in KINDS.values() for kind in group)


@functools.lru_cache(maxsize=1)
def _same(kind: str) -> bytes:
    if kind in HEADERS:
        return HEADERS[kind]()
    return request((BODIES.get(kind) or TEMPLATES[kind])())


def bytes_of(kind: str, number: int) -> bytes:
    """The whole request; `number` makes grammars differ."""
    return request(GRAMMARS[kind](number)) if kind in GRAMMARS else _same(kind)
