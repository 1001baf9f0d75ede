"""The OpenAPI description of the server, found out from the code that answers.

The fields of a body are those its parser asks for, their types and limits those it accepts: the
parser is tried with values of every type. So the description cannot differ from what the server
does. What a parser checks beyond that, such as two fields that exclude each other, is not told.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from termgen.api.anthropic import is_messages_path
from termgen.errors import RequestError

Parser = Callable[[Mapping[str, Any]], object]

SAMPLES: Mapping[str, tuple[Any, ...]] = {
    "boolean": (True, False),
    "integer": (1, 0, 2),
    "number": (0.5, 1.5),
    "string": ("x", "auto", "none"),
    "array": ([], ["x"], [1], [{"role": "user", "content": "x"}]),
    "object": ({}, {"type": "text"}),
}
MODES: tuple[Mapping[str, Any], ...] = ({}, {"stream": True}, {"logprobs": True})
"""Some fields are taken only together with another one."""

HIGHEST = 2**66

ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}

ANTHROPIC_ERROR = {
    "type": "object",
    "required": ["type", "error", "request_id"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
        },
        "request_id": {"type": "string"},
    },
}


@dataclass(frozen=True, slots=True)
class Body:
    """A JSON body and the parser that checks it."""

    parse: Parser | None = None
    """None: any object is described."""
    example: Mapping[str, Any] = field(default_factory=dict)
    """The smallest body that is accepted: what it holds is required."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    path: str
    method: str
    summary: str
    body: Body | None = None


def describe(endpoints: Sequence[Endpoint], *, title: str, version: str) -> dict[str, Any]:
    """The whole document, OpenAPI 3.1."""
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in endpoints:
        path = endpoint.path.replace(":path}", "}")
        paths.setdefault(path, {})[endpoint.method.lower()] = _operation(endpoint, path)
    return {
        "openapi": "3.1.0",
        "info": {"title": title, "version": version},
        "paths": paths,
        "components": {"schemas": {"Error": ERROR, "AnthropicError": ANTHROPIC_ERROR}},
    }


def _operation(endpoint: Endpoint, path: str) -> dict[str, Any]:
    name = "AnthropicError" if is_messages_path(endpoint.path) else "Error"
    error = {
        "description": "what is wrong, or who is in the way",
        "content": {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}},
    }
    operation: dict[str, Any] = {
        "summary": endpoint.summary,
        "responses": {"200": {"description": "the answer"}, "4XX": error, "5XX": error},
    }
    if endpoint.path in ("/health", "/ready"):
        status = {"description": "why it is not", "content": {"application/json": {}}}
        operation["responses"]["503"] = status
    names = [part[1:-1] for part in path.split("/") if part.startswith("{")]
    if names:
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in names
        ]
    if endpoint.body is not None:
        schema = body_schema(endpoint.body)
        content = {"application/json": {"schema": schema}}
        operation["requestBody"] = {"required": True, "content": content}
    return operation


def body_schema(body: Body) -> dict[str, Any]:
    if body.parse is None:
        return {"type": "object"}
    names = _Asked(body.example)
    body.parse(names)
    properties = {
        name: _field_schema(body, name) for name in sorted(names.asked | set(body.example))
    }
    return {
        "type": "object",
        "required": sorted(body.example),
        "properties": {name: schema for name, schema in properties.items() if schema is not None},
    }


class _Asked(Mapping[str, Any]):
    """A body that remembers which fields were asked for."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values
        self.asked: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self.asked.add(name)
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


def _field_schema(body: Body, name: str) -> dict[str, Any] | None:
    """None for a field that is asked for and never accepted."""
    types = [
        kind
        for kind, samples in SAMPLES.items()
        if any(_is_accepted(body, name, value) for value in samples)
    ]
    if "number" in types and "integer" in types:
        types.remove("integer")
    if not types:
        return None
    if name not in body.example:
        types.append("null")
    schema: dict[str, Any] = {"type": types if len(types) > 1 else types[0]}
    if "integer" in types:
        low, high = _limits(body, name)
        schema |= {} if low is None else {"minimum": low}
        schema |= {} if high is None else {"maximum": high}
    return schema


def _is_accepted(body: Body, name: str, value: Any) -> bool:
    assert body.parse is not None
    for mode in MODES:
        try:
            body.parse({**body.example, **mode, name: value})
        except RequestError as error:
            if not (error.param or "").startswith(name):
                continue  # the mode is at fault
        else:
            return True
    return False


def _limits(body: Body, name: str) -> tuple[int | None, int | None]:
    """The least and the greatest integer that is accepted, where there is one."""
    begin = next((v for v in SAMPLES["integer"] if _is_accepted(body, name, v)), None)
    if begin is None:
        return None, None
    return _limit(body, name, begin, -HIGHEST), _limit(body, name, begin, HIGHEST)


def _limit(body: Body, name: str, good: int, bad: int) -> int | None:
    if _is_accepted(body, name, bad):
        return None
    while abs(good - bad) > 1:
        middle = (good + bad) // 2
        if _is_accepted(body, name, middle):
            good = middle
        else:
            bad = middle
    return good
