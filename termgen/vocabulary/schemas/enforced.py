"""The part of a JSON schema that a grammar can enforce.

`enforced` leaves out what asks for nothing: a `format` that is no format of strings known to the
grammar library is an annotation, as JSON Schema has it, and `uniqueItems: false` allows all. With
`relaxed` it leaves out as well what no grammar can hold an answer to while it is written, such as
`not` or `uniqueItems`: the answer is then to be checked when it is finished. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

FORMATS = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
    + ("unknown",)
)
"""Formats that the grammar library enforces."""
CHECKED = frozenset(
    ("not", "if", "then", "else", "uniqueItems", "contains", "minContains", "maxContains")
    + ("dependentRequired", "dependentSchemas", "dependencies", "propertyNames")
    + ("unevaluatedProperties", "unevaluatedItems")
)
"""Keywords that no grammar enforces."""
_COUNTS = ("minProperties", "maxProperties")
_MAPS = frozenset(("properties", "patternProperties", "$defs", "definitions"))
"""Keywords whose values have a schema for each of their keys."""
_LISTS = frozenset(("allOf", "anyOf", "oneOf", "prefixItems", "items"))
_SINGLE = frozenset(("items", "additionalProperties", "additionalItems"))

Schema = Mapping[str, Any]


class Enforced(NamedTuple):
    """A schema that every answer satisfies."""

    schema: Schema
    is_whole: bool
    """It says all that the schema says; False: an answer that satisfies it is to be checked."""


def enforced(schema: Schema, *, relaxed: bool = False) -> Enforced:
    """relaxed: leave out as well what is to be checked afterwards."""
    left_out = list[str]()
    found = _walk(schema, left_out.append if relaxed else None)
    return Enforced(found, not left_out)


def _walk(schema: Any, leave_out: Callable[[str], None] | None) -> Any:
    if not isinstance(schema, Mapping):
        return schema
    made: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "format" and value not in FORMATS:
            continue
        if key in CHECKED:
            if _asks_for_nothing(key, value, schema):
                continue
            if leave_out is not None:
                leave_out(key)
                continue
        made[key] = _inner(key, value, leave_out)
    if leave_out is not None:
        _relax(made, schema, leave_out)
    return made


def _inner(key: str, value: Any, leave_out: Callable[[str], None] | None) -> Any:
    if key in _MAPS and isinstance(value, Mapping):
        return {name: _walk(schema, leave_out) for name, schema in value.items()}
    if key in _LISTS and isinstance(value, Sequence) and not isinstance(value, str):
        return [_walk(schema, leave_out) for schema in value]
    return _walk(value, leave_out) if key in _SINGLE else value


def _asks_for_nothing(key: str, value: Any, schema: Schema) -> bool:
    if key == "uniqueItems":
        return value is False
    if key == "if":
        return not schema.keys() & {"then", "else"}
    if key in ("then", "else"):
        return "if" not in schema
    if key in ("minContains", "maxContains"):
        return "contains" not in schema
    return key not in ("not", "contains") and (value is True or value == {})


def _relax(made: dict[str, Any], schema: Schema, leave_out: Callable[[str], None]) -> None:
    """Allow answers that several alternatives of `oneOf` allow, and any number of properties where
    some may be left out."""
    if "oneOf" in made:
        leave_out("oneOf")
        alternatives = {"anyOf": made.pop("oneOf")}
        if "anyOf" in made:
            given = made.get("allOf")
            made["allOf"] = [*(given if isinstance(given, list) else ()), alternatives]
        else:
            made |= alternatives
    named, required = schema.get("properties"), schema.get("required")
    names = named.keys() if isinstance(named, Mapping) else frozenset()
    if names - set(required if isinstance(required, list) else ()):
        for key in _COUNTS:
            if key in made:
                leave_out(key)
                del made[key]
