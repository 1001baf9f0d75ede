"""Random request bodies, most of them wrong: the input of `fuzz_server.py`. One seed, one body.

A body is bytes: a JSON value cannot express everything that a client can send, such as numbers
beyond a float, lone surrogates, NaN and duplicate names.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "harness"))

from generated_schemas import generate

Rng = random.Random
MESSAGES = [{"role": "user", "content": "x"}]
VALID: dict[str, dict[str, Any]] = json.loads("""
{
    "/v1/chat/completions": {
        "model": "tiny",
        "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "x"}],
        "max_tokens": 2, "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "n": 1,
        "seed": 1, "stop": ["x"], "stop_token_ids": [5], "logit_bias": {"5": 1}, "logprobs": true,
        "top_logprobs": 1, "presence_penalty": 0.1, "frequency_penalty": 0.1,
        "repetition_penalty": 1.1, "stream": false, "stream_options": {"include_usage": true},
        "tools": [
            {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
        ],
        "tool_choice": "auto", "parallel_tool_calls": true, "response_format": {"type": "text"},
        "chat_template_kwargs": {"a": 1}, "user": "u", "metadata": {"a": "b"}, "ignore_eos": false,
        "min_tokens": 0, "priority": 0, "echo": false, "add_generation_prompt": true,
        "continue_final_message": false, "reasoning_effort": "low", "cache_salt": "s",
        "bad_words": ["no"], "allowed_token_ids": [5, 6, 7]
    },
    "/v1/completions": {
        "model": "tiny", "prompt": "x", "max_tokens": 2, "temperature": 0.0, "n": 1, "best_of": 1,
        "logprobs": 1, "echo": true, "suffix": null, "stop": "x", "seed": 3, "stream": false,
        "logit_bias": {"5": -1}, "truncate_prompt_tokens": 5, "add_special_tokens": true,
        "skip_special_tokens": true
    },
    "/v1/responses": {
        "model": "tiny",
        "input": [{"role": "user", "content": [{"type": "input_text", "text": "x"}]}],
        "instructions": "i", "max_output_tokens": 2, "temperature": 0.1,
        "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}],
        "tool_choice": "auto", "text": {"format": {"type": "text"}},
        "reasoning": {"effort": "low"}, "store": false, "metadata": {}, "include": [],
        "truncation": "disabled", "stream": false
    },
    "/v1/messages": {
        "model": "tiny", "max_tokens": 2, "system": [{"type": "text", "text": "s"}],
        "messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}],
        "tools": [{"name": "f", "input_schema": {"type": "object"}}],
        "tool_choice": {"type": "auto"}, "stop_sequences": ["x"], "temperature": 0.1, "top_k": 4,
        "thinking": {"type": "disabled"}, "metadata": {"user_id": "u"}, "stream": false
    },
    "/api/chat": {
        "model": "tiny:latest", "stream": true, "think": false, "format": "", "keep_alive": "5m",
        "messages": [
            {"role": "user", "content": "x", "images": ["aGk="]},
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]},
            {"role": "tool", "tool_name": "f", "content": "y"}
        ],
        "tools": [
            {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
        ],
        "options": {
            "num_predict": 2, "temperature": 0.5, "top_k": 5.0, "top_p": 0.9, "min_p": 0.1,
            "seed": -1, "stop": ["x"], "repeat_penalty": 1.1, "repeat_last_n": -1, "num_ctx": 64,
            "presence_penalty": 0.1, "mirostat": 0, "num_gpu": 1, "num_keep": 4, "typical_p": 1.0
        },
        "logprobs": true, "top_logprobs": 1, "truncate": false, "shift": false
    },
    "/api/generate": {
        "model": "tiny", "prompt": "x", "system": "s", "stream": false, "raw": false,
        "suffix": "", "template": "", "context": [], "images": [], "keep_alive": -1,
        "options": {"num_predict": 2, "seed": 3}, "logprobs": false
    },
    "/api/show": {"model": "tiny", "verbose": false},
    "/tokenize": {"prompt": "x", "add_special_tokens": true, "return_token_strs": true},
    "/detokenize": {"tokens": [5, 6]}
}
""")
"""A body of each endpoint that is accepted, with as many of its fields as go together."""


class Raw(str):
    """JSON text to be sent as it is."""


NUMBERS = [
    *(str(n) for n in (-(2**63), 2**63 - 1, -(2**63) - 1, 2**64)),
    *("1e308", "1e309", "-1e309", "1e-400", "-0.0", "0", "-1", "4e888269132", "0.1e1", "1" * 400),
    *("2147483648", "-2147483649", "NaN", "Infinity", "-Infinity", "1e5000", "3.0", "1.5"),
]
TEXTS = [
    *('""', '"\\u0000"', '"\\ud800"', '"\\udc00\\ud800"', '"\\uffff"', '"<|im_end|>"', '"é日本😀"'),
    *('"x' + "y" * n + '"' for n in (300, 70_000)),
    *('"auto"', '"none"', '"required"', '"true"', '"1"', '"tiny"', '"file:///etc/passwd"'),
]
EMPTY = ["null", "true", "false", "[]", "{}", "[[]]", "[null]", '{"":null}', '{"a":1,"a":2}']


def odd(rng: Rng) -> Raw:
    """A value that is seldom valid for a field."""
    kind = rng.random()
    if kind < 0.35:
        return Raw(rng.choice(NUMBERS))
    if kind < 0.6:
        return Raw(rng.choice(TEXTS))
    if kind < 0.85:
        return Raw(rng.choice(EMPTY))
    depth = rng.choice((3, 30, 70, 200, 1000))
    left, right = rng.choice((("[", "]"), ('{"a":', "}"), ('[{"type":', "}]")))
    return Raw(left * depth + rng.choice(NUMBERS[:8]) + right * depth)


def dumps(value: Any) -> str:
    """JSON in which `Raw` parts are kept as they are. `Raw` can hold duplicate names."""
    if isinstance(value, Raw):
        return str(value)
    if isinstance(value, dict):
        return "{" + ",".join(f"{json.dumps(k)}:{dumps(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(dumps, value)) + "]"
    return json.dumps(value)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths of every part of a body."""
    found = [path] if path else []
    items = value.items() if isinstance(value, dict) else ()
    if isinstance(value, list):
        items = enumerate(value)
    return found + [place for key, part in items for place in places(part, (*path, key))]


def changed(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    copy = value.copy()
    copy[path[0]] = changed(value[path[0]], path[1:], new)
    return copy


def mutated(rng: Rng, value: Any) -> Any:
    """A copy with one part, seldom two or three, replaced, removed or renamed."""
    for _ in range(rng.choices((1, 2, 3), (8, 2, 1))[0]):
        where = places(value)
        if not where:
            return odd(rng)
        path = rng.choice(where)
        if rng.random() < 0.85:
            value = changed(value, path, odd(rng))
            continue
        holder = value
        for key in path[:-1]:
            holder = holder[key]
        copy = holder.copy()
        part = copy.pop(path[-1])
        if isinstance(copy, dict) and rng.random() < 0.5:
            copy[rng.choice(("x", "", "type", "$ref", str(path[-1]).upper()))] = part
        value = changed(value, path[:-1], copy)
    return value


# -- schemas and grammars ----------------------------------------------------------------------

KEYWORDS = (
    *("const", "enum", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    *("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"),
    *("type", "properties", "required", "items", "prefixItems", "additionalProperties", "format"),
    *("pattern", "anyOf", "oneOf", "allOf", "not", "if", "$ref", "$defs", "default", "title"),
    *("patternProperties", "propertyNames", "contains", "uniqueItems", "dependentRequired"),
)
PATTERNS = (
    *("a*", "(a?){0,200}", "[", "(", "(?=a)b", "(?i)a", "\\1", "a{9999999999}", "\\p{L}+", "^$"),
    *("(a|b)*a(a|b){18}", "[^\\x00-\\x7f]", "\\ud800", "\x00", ".", "(a*)*b", "a{3,1}"),
    "\\u{110000}",
    *("(?P<x>a)", "\\b", "$^", "[[:alpha:]]", "[a-\\d]", "(?#x)", "((((((((((x))))))))))"),
)


def schema(rng: Rng) -> Any:
    kind = rng.random()
    if kind < 0.35:
        return mutated(rng, generate(rng.randrange(10**6)))
    if kind < 0.45:
        return generate(rng.randrange(10**6))
    if kind < 0.65:
        made = {key: odd(rng) for key in rng.sample(KEYWORDS, rng.randrange(1, 4))}
        return {"type": rng.choice(("object", "integer", "number", "string", "array")), **made}
    if kind < 0.75:
        return {"type": "string", "pattern": rng.choice(PATTERNS) * rng.choice((1, 1, 2, 50))}
    if kind < 0.9:
        value: Any = odd(rng)
        for _ in range(rng.choice((1, 5, 40, 100))):
            wrapped = ({"anyOf": [value]}, {"properties": {"a": value}}, {"items": value})
            value = rng.choice((*wrapped, {"allOf": [value, {}]}, {"not": value}))
        return value
    loop = [{"$ref": "#"}, {"$ref": "#/$defs/a"}, {"$ref": "#/a/b"}, {"$ref": "http://x/y"}]
    return {"$defs": {"a": rng.choice(loop), "b": odd(rng)}, "anyOf": rng.sample(loop, 2)}


def lark(rng: Rng) -> str:
    if rng.random() < 0.15:
        depth = rng.choice((10, 500, 1000, 2000, 3000, 4500))
        chain = "".join(f"r{i}: r{i + 1}\n" for i in range(depth))
        return f'start: r0\n{chain}r{depth}: "{rng.randrange(10**6)}"\n'
    parts = ["start", "a", "B", ":", "|", "*", "+", "?", "(", ")", "[", "]", '"x"', "/a+/", "~ 3"]
    parts += ["\n", "\n", " ", "%ignore", "%import", "%json", "{", "}", "&", "..", '"', "\x00", "é"]
    parts += ["[lazy]", "[stop=/x/]", "{0,99999}", "<|im_end|>", "<[5]>", '%json {"const":1e309}']
    body = " ".join(rng.choices(parts, k=rng.randrange(1, 40)))
    return rng.choice(("start: ", "start: a\na: ", "")) + body


def gbnf(rng: Rng) -> str:
    if rng.random() < 0.15:
        depth = rng.choice((10, 240, 1000, 3000))
        chain = "".join(f"r{i} ::= r{i + 1}\n" for i in range(depth))
        return f'root ::= r0\n{chain}r{depth} ::= "{rng.randrange(10**6)}"\n'
    parts = ["root", "a", "::=", "|", "*", "+", "?", "(", ")", '"x"', "[a-z]", "[^\\n]", "\n", "#"]
    parts += ["{2,3}", "{99999}", "[", "]", '"', "\\x00", "é", "[z-a]", '"\\u1"', "."]
    return "root ::= " + " ".join(rng.choices(parts, k=rng.randrange(1, 40)))


def regex(rng: Rng) -> str:
    made = "".join(rng.choices((*PATTERNS, "a", "|", "?", "*", "{2,}"), k=rng.randrange(1, 6)))
    return made * rng.choice((1, 1, 1, 3, 100))


def structural_tag(rng: Rng) -> Any:
    tag = {"begin": "<f>", "schema": schema(rng), "end": "</f>"}
    whole = {"type": "structural_tag", "structures": [tag], "triggers": ["<f"]}
    return mutated(rng, whole) if rng.random() < 0.7 else whole


# -- bodies ------------------------------------------------------------------------------------


NEEDED = ("model", "messages", "prompt", "input", "max_tokens", "max_output_tokens", "tokens")


@dataclass(frozen=True)
class Body:
    kind: str
    path: str
    content: bytes


def _chat(kind: str, **fields: Any) -> Body:
    body = {"messages": MESSAGES, "max_tokens": 3, **fields}
    return Body(kind, "/v1/chat/completions", dumps(body).encode())


def _structured(kind: str, **wanted: Any) -> Body:
    return _chat(kind, structured_outputs=wanted)


def _schema_body(rng: Rng) -> Body:
    made, kind = schema(rng), "schema"
    where = rng.randrange(4)
    if where == 0:
        return _structured(kind, json=made)
    if where == 1:
        wanted = {"format": {"type": "json_schema", "name": "a", "schema": made}}
        body = {"input": "x", "max_output_tokens": 3, "text": wanted}
        return Body(kind, "/v1/responses", dumps(body).encode())
    if where == 2:
        ask = {"model": "tiny", "messages": MESSAGES, "options": {"num_predict": 3}}
        return Body(kind, "/api/chat", dumps({**ask, "format": made}).encode())
    wanted = {"type": "json_schema", "json_schema": {"name": "a", "schema": made}}
    return _chat(kind, response_format=wanted)


def _choices(rng: Rng) -> Body:
    texts = ["a", "é", "", "a" * 3000, Raw('"\\u0000"'), Raw('"\\ud800"'), '"', "\\", odd(rng)]
    return _structured("choices", choice=rng.choices(texts, k=rng.choice((0, 1, 3, 200))))


def _tools(rng: Rng) -> Body:
    tools = []
    for _ in range(rng.choice((1, 1, 2, 20))):
        name = rng.choice(("f", "g", "", "f" * 100, "a b", "é", Raw('"\\u0000"')))
        tools.append({"type": "function", "function": {"name": name, "parameters": schema(rng)}})
    choice = rng.choice(("auto", "required", {"type": "function", "function": {"name": "f"}}))
    whole = {"tools": tools, "tool_choice": choice}
    return _chat("tools", **(mutated(rng, whole) if rng.random() < 0.3 else whole))


def _fields(rng: Rng) -> Body:
    path = rng.choice(tuple(VALID))
    valid = VALID[path]
    kept = {key: valid[key] for key in valid if rng.random() < 0.5 or key in NEEDED}
    return Body("fields", path, dumps(mutated(rng, kept)).encode())


def _bytes(rng: Rng) -> Body:
    """Valid JSON with some bytes changed, cut or doubled."""
    path = rng.choice(tuple(VALID))
    content = bytearray(dumps(VALID[path]).encode())
    for _ in range(rng.randrange(1, 4)):
        at = rng.randrange(len(content))
        kind = rng.randrange(4)
        if kind == 0:
            content[at] = rng.randrange(256)
        elif kind == 1:
            del content[at : at + rng.randrange(1, 9)]
        elif kind == 2:
            content[at:at] = rng.choice((b"\x00", b"\xff", b'"', b"{", b",", b"\\u", b"9" * 50))
        else:
            content[at:at] = content[at : at + rng.randrange(1, 60)]
    return Body("bytes", path, bytes(content))


MAKERS: dict[str, tuple[int, Callable[[Rng], Body]]] = {
    "schema": (30, _schema_body),
    "regex": (8, lambda rng: _structured("regex", regex=regex(rng))),
    "Lark": (8, lambda rng: _structured("Lark", grammar=lark(rng))),
    "GBNF": (6, lambda rng: _structured("GBNF", grammar=gbnf(rng))),
    "choices": (4, _choices),
    "tag": (6, lambda rng: _chat("tag", response_format=structural_tag(rng))),
    "tools": (10, _tools),
    "fields": (22, _fields),
    "bytes": (6, _bytes),
}


def body(seed: str) -> Body:
    """The same seed gives the same body."""
    rng = Rng(seed)
    weights = [weight for weight, _ in MAKERS.values()]
    return MAKERS[rng.choices(tuple(MAKERS), weights)[0]][1](rng)
