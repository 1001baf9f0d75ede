"""Random JSON schemas with short answers: everything in them is bounded."""

from __future__ import annotations

import random
import string
from typing import Any

Schema = dict[str, Any]
WORDS = ("id", "name", "größe", "tags", "is_ok", "a b", "日本", 'say "hi"', "x" * 12)


def generate(seed: int) -> Schema:
    """The same seed gives the same schema."""
    rng = random.Random(seed)
    schema = _object(rng, 3) if rng.random() < 0.8 else _any(rng, 2)
    if rng.random() < 0.3:
        schema = {
            "type": "object",
            "properties": {"first": {"$ref": "#/$defs/thing"}, "rest": _any(rng, 1)},
            "required": ["first"],
            "additionalProperties": False,
            "$defs": {"thing": schema},
        }
    return schema


def _any(rng: random.Random, depth: int) -> Schema:
    makers = [_string, _string, _integer, _number, _fixed, _enum]
    if depth:
        makers += [_object, _object, _array, _array, _choice]
    return rng.choice(makers)(rng, depth - 1)


def _string(rng: random.Random, depth: int) -> Schema:
    low = rng.randint(0, 3)
    if rng.random() < 0.4:
        letters = "".join(rng.sample(string.ascii_letters, 3))
        return {"type": "string", "pattern": rf"^[{letters}\d]{{{low},{low + 3}}}(-z)?$"}
    if rng.random() < 0.2:
        return {"type": "string", "format": rng.choice(["date", "ipv4", "uuid"])}
    return {"type": "string", "minLength": low, "maxLength": low + rng.randint(0, 6)}


def _integer(rng: random.Random, depth: int) -> Schema:
    low = rng.randint(-2000, 2000)
    schema: Schema = {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 500)}
    if rng.random() < 0.2:
        schema = {"type": "integer", "exclusiveMinimum": low, "exclusiveMaximum": low + 9}
    return schema


def _number(rng: random.Random, depth: int) -> Schema:
    return {"type": "number", "minimum": 0, "maximum": rng.randint(1, 50), "multipleOf": 0.25}


def _fixed(rng: random.Random, depth: int) -> Schema:
    return rng.choice([{"type": "boolean"}, {"type": "null"}, {"type": ["boolean", "null"]}])


def _enum(rng: random.Random, depth: int) -> Schema:
    values: list[Any] = [*rng.sample(WORDS, 3), None, True, -7, [1, {"z": ""}]]
    return {"enum": rng.sample(values, rng.randint(1, 4))}


def _object(rng: random.Random, depth: int) -> Schema:
    names = rng.sample(WORDS, rng.randint(0, 4))
    schema: Schema = {
        "type": "object",
        "properties": {name: _any(rng, max(depth, 0)) for name in names},
        "required": [name for name in names if rng.random() < 0.6],
        "additionalProperties": False,
    }
    if rng.random() < 0.1:
        keys = {"type": "object", "patternProperties": {"^[ab]$": _any(rng, 0)}}
        schema = {**keys, "additionalProperties": False, "maxProperties": 2}
    return schema


def _array(rng: random.Random, depth: int) -> Schema:
    low = rng.randint(0, 2)
    if rng.random() < 0.25:
        items = [_any(rng, max(depth, 0)) for _ in range(2)]
        return {"type": "array", "prefixItems": items, "items": False, "minItems": 2}
    most = low + rng.randint(0, 2)
    return {"type": "array", "items": _any(rng, max(depth, 0)), "minItems": low, "maxItems": most}


def _choice(rng: random.Random, depth: int) -> Schema:
    return {"anyOf": [_any(rng, max(depth, 0)) for _ in range(2)]}
