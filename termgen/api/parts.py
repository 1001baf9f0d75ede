"""What all endpoints take apart alike in a conversation: content in parts, arguments of calls."""

from __future__ import annotations

import contextlib
import json
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


NOT_TEXT = frozenset(
    {
        *("image", "image_url", "input_image", "document", "file", "input_file"),
        *("audio", "input_audio", "tool_reference"),
    }
)
"""Types of parts that a tool may give back, and that no model here can read."""

INVALID_JSON = "INVALID_JSON"
"""The key of what is no JSON object, as Anthropic's documentation has it."""


def result_text(value: Any, where: str, keys: Mapping[str, str] = TEXT_PARTS) -> str:
    """What a tool gave back. A part that is no text is replaced by a line that says so: the tool
    has run, and a refusal would end the agent's work."""
    if value is None:
        return ""
    return "\n".join(texts_of(value, where, keys, replaced=NOT_TEXT))


def texts_of(
    value: Any,
    where: str,
    keys: Mapping[str, str] = TEXT_PARTS,
    replaced: frozenset[str] = frozenset(),
) -> list[str]:
    """The texts of a string or a list of parts. keys: by type of part, the field with its text.
    replaced: types for which a line stands that says what is left out."""
    if isinstance(value, str):
        return [value]
    texts = []
    for at, part in parts_of(value, where, "a string or a list of text parts"):
        kind = part.get("type")
        key = keys.get(kind) if isinstance(kind, str) else None
        if key is None and isinstance(kind, str) and kind in replaced:
            texts.append(f"[{kind} left out: this model reads text only]")
            continue
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
    """Arguments of a call in the history: an object, or any text.

    Templates want an object. Text that is none, such as arguments that were cut off, becomes the
    one value of an object, so that the model sees what it wrote.
    """
    if isinstance(value, str):
        try:
            parsed = parse_json((value or "{}").encode(), where)
            check_depth(where, parsed)
        except RequestError:
            return {INVALID_JSON: value}
        return parsed
    if not isinstance(value, dict):
        raise wrong_type(where, "a JSON object", value)
    try:
        check_depth(where, value)
    except RequestError:
        with contextlib.suppress(RecursionError):
            return {INVALID_JSON: json.dumps(value)}
        raise
    return value
