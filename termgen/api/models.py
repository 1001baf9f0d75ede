"""/v1/models: what is served, and which names a request may use for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from termgen.api.errors import model_not_found
from termgen.api.fields import wrong_type
from termgen.client import ModelInfo

T = TypeVar("T")


def served_names(info: ModelInfo, configured: Sequence[str]) -> tuple[str, ...]:
    """The first one is what responses say when a request named none."""
    return tuple(configured) or (info.model_id,)


def resolve_model(value: object, names: Sequence[str]) -> str:
    """The name a response carries. Optional in requests: one model is loaded."""
    if value is None:
        return names[0]
    if not isinstance(value, str):
        raise wrong_type("model", "a string", value)
    if value not in names:
        raise model_not_found(value)
    return value


def parse_for_model(data: Mapping[str, Any], *, names: Sequence[str], parse: Callable[..., T]) -> T:
    """What `parse` makes of a body; it is told by which of its names the model was asked for."""
    return parse(data, model=resolve_model(data.get("model"), names))


def parse_beside_model(
    data: Mapping[str, Any], *, names: Sequence[str], parse: Callable[..., T]
) -> T:
    """The same for an answer that does not name the model."""
    resolve_model(data.get("model"), names)
    return parse(data)


def model_object(info: ModelInfo, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": info.created,
        "owned_by": "termgen",
        "root": info.root,
        "parent": None,
        "max_model_len": info.max_model_len,
        "permission": [],
        "capabilities": _capabilities(info),
    }


def _capabilities(info: ModelInfo) -> dict[str, Any]:
    """What goes by the model's files. A model whose template knows no tools is told of them in
    words, and what it then calls is no more than a try unless calls are enforced."""
    shown = "template" if info.tool_format.knows_tools else "system_message"
    return {
        "chat": info.has_chat_template,
        "tools": shown if info.has_chat_template else None,
    }


def model_list(info: ModelInfo, names: Sequence[str]) -> dict[str, Any]:
    return {"object": "list", "data": [model_object(info, name) for name in names]}
