"""What all endpoints take apart alike in a conversation: content in parts, arguments of calls."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from termgen.api.errors import unsupported
from termgen.api.fields import check_depth, parse_json, wrong_type
from termgen.errors import RequestError

TEXT_PARTS: Mapping[str, str] = {"text": "text"}


def parts_of(value: Any, where: str, wanted: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each part of a list with its name. wanted: what a fault says there should be."""
    if not isinstance(value, list):
        raise wrong_type(where, wanted, value)
    for i, part in enumerate(value):
        at = f"{where}[{i}]"
        if not isinstance(part, dict):
            raise wrong_type(at, "an object", part)
        yield at, part


def texts_of(value: Any, where: str, keys: Mapping[str, str] = TEXT_PARTS) -> list[str]:
    """The texts of a string or a list of parts. keys: by type of part, the field with its text."""
    if isinstance(value, str):
        return [value]
    texts = []
    for at, part in parts_of(value, where, "a string or a list of text parts"):
        kind = part.get("type")
        key = keys.get(kind) if isinstance(kind, str) else None
        if key is None:
            raise unsupported_part(kind, at)
        if not isinstance(part.get(key), str):
            raise wrong_type(f"{at}.{key}", "a string", part.get(key))
        texts.append(part[key])
    return texts


def unsupported_part(kind: Any, at: str) -> RequestError:
    return unsupported(
        f"{at}.type", f"{at}: parts of type {str(kind)[:40]!r} are not supported here"
    )


def arguments_of(value: Any, where: str) -> dict[str, Any]:
    """Arguments of a call in the history: an object, or its JSON text."""
    if isinstance(value, str):
        value = parse_json((value or "{}").encode(), where, param=where)
    if not isinstance(value, dict):
        raise wrong_type(where, "a JSON object", value)
    check_depth(where, value)
    return value
