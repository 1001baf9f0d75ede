"""The OpenAPI description of the server, made of the declarations that check its bodies.

Types and limits of fields are those of the structs. Rules between fields, such as two that exclude
each other, are not described.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from msgspec import json

from termgen.api.anthropic import MESSAGES_PATH
from termgen.api.fields import Endpoint

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
class Operation:
    """A method of a path."""

    path: str
    method: str
    summary: str
    body: Endpoint | None = None
    """Declaration of the JSON body; one without structs stands for any object."""
    hidden: frozenset[str] = frozenset()
    """Fields of the body that this server refuses."""


def describe(operations: Sequence[Operation], *, title: str, version: str) -> dict[str, Any]:
    """The whole document, OpenAPI 3.1."""
    paths: dict[str, dict[str, Any]] = {}
    for operation in operations:
        path = operation.path.replace(":path}", "}")
        paths.setdefault(path, {})[operation.method.lower()] = _described(operation, path)
    return {
        "openapi": "3.1.0",
        "info": {"title": title, "version": version},
        "paths": paths,
        "components": {"schemas": {"Error": ERROR, "AnthropicError": ANTHROPIC_ERROR}},
    }


def _described(operation: Operation, path: str) -> dict[str, Any]:
    name = "AnthropicError" if MESSAGES_PATH.fullmatch(operation.path) else "Error"
    error = {
        "description": "what is wrong, or who is in the way",
        "content": {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}},
    }
    described: dict[str, Any] = {
        "summary": operation.summary,
        "responses": {"200": {"description": "the answer"}, "4XX": error, "5XX": error},
    }
    if operation.path in ("/health", "/ready"):
        status = {"description": "why it is not", "content": {"application/json": {}}}
        described["responses"]["503"] = status
    names = [part[1:-1] for part in path.split("/") if part.startswith("{")]
    if names:
        described["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in names
        ]
    if operation.body is not None:
        schema = body_schema(operation.body, operation.hidden)
        content = {"application/json": {"schema": schema}}
        described["requestBody"] = {"required": True, "content": content}
    return described


def body_schema(body: Endpoint, hidden: frozenset[str] = frozenset()) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object"}
    if not body.structs:
        return schema
    roots, components = json.schema_components(body.structs, ref_template="{name}")
    properties: dict[str, Any] = {}
    required: set[str] = set()
    for root in roots:
        struct = _flat(root, components)
        properties |= struct["properties"]
        required |= set(struct["required"])
    for name in hidden & properties.keys():
        del properties[name]
    for name, field in properties.items():
        if name not in required and "type" in field:
            types = field["type"] if isinstance(field["type"], list) else [field["type"]]
            field["type"] = [*types, *([] if "null" in types else ["null"])]
    return {**schema, "required": sorted(required), "properties": dict(sorted(properties.items()))}


def _flat(schema: dict[str, Any], components: dict[str, Any]) -> dict[str, Any]:
    """A schema without references, defaults and alternatives that differ by their type only."""
    if "$ref" in schema:
        return _flat(components[schema["$ref"]], components)
    flat = {key: value for key, value in schema.items() if key not in ("default", "title")}
    if "properties" in flat:
        flat["properties"] = {k: _flat(v, components) for k, v in flat["properties"].items()}
    if "anyOf" not in flat:
        return flat
    types: list[str] = []
    for choice in flat.pop("anyOf"):
        choice = _flat(choice, components)
        if choice.pop("enum", None) is not None:  # words, which would exclude the other types
            choice["type"] = "string"
        types.append(choice.pop("type"))
        flat |= choice
    return {"type": sorted(types, key="null".__eq__), **flat}  # null last, in every msgspec
