"""The OpenAPI description of the server, made of the declarations that check its bodies.

Types and limits of fields are those of the structs. Rules between fields, such as two that exclude
each other, are not described.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import json

from termgen.api.fields import Endpoint
from termgen.api.rows import Row


def describe(
    rows: Sequence[Row],
    *,
    title: str,
    version: str,
    hidden: frozenset[str] = frozenset(),
    root_path: str = "",
) -> dict[str, Any]:
    """The whole document, OpenAPI 3.1. hidden: fields of bodies that this server refuses.
    root_path: the path under which clients find the server."""
    paths: dict[str, dict[str, Any]] = {}
    schemas: dict[str, Any] = {}
    for row in rows:
        if not row.is_described:
            continue
        schemas[row.errors.name] = row.errors.schema
        path = row.path.replace(":path}", "}")
        for method in row.methods:
            paths.setdefault(path, {})[method.lower()] = _described(row, path, hidden)
    return {
        "openapi": "3.1.0",
        "info": {"title": title, "version": version},
        **({"servers": [{"url": root_path}]} if root_path else {}),
        "paths": paths,
        "components": {"schemas": schemas},
    }


def _described(row: Row, path: str, hidden: frozenset[str]) -> dict[str, Any]:
    schema = {"$ref": f"#/components/schemas/{row.errors.name}"}
    error = {
        "description": "what is wrong, or who is in the way",
        "content": {"application/json": {"schema": schema}},
    }
    described: dict[str, Any] = {
        "summary": row.summary,
        "responses": {"200": {"description": "the answer"}, "4XX": error, "5XX": error},
    }
    if row.tells_status:
        status = {"description": "why it is not", "content": {"application/json": {}}}
        described["responses"]["503"] = status
    names = [part[1:-1] for part in path.split("/") if part.startswith("{")]
    if names:
        described["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in names
        ]
    if row.body is not None:
        content = {"application/json": {"schema": body_schema(row.body, hidden)}}
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
