"""The sampling parameters a user sets in the chat, as texts in fields and back.

`SamplingParams` says what is wrong with a value; nothing is checked twice. No Textual.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from termgen.errors import RequestError
from termgen.vocabulary.sampling_params import TABLE, SamplingParams

_LAST = ("max_tokens", "seed", "stop")
"""Fields below those that shape the distribution."""
_PANEL = {name: row.panel for name, row in TABLE.items() if row.panel is not None}
FIELDS = {name: _PANEL[name] for name in (*(n for n in _PANEL if n not in _LAST), *_LAST)}
"""Name -> what it does, in the width of a narrow screen."""

_ESCAPES = {"\\n": "\n", "\\t": "\t", "\\,": ",", "\\\\": "\\"}
_INTEGER = re.compile(r"[+-]?[0-9]{1,30}")


def field_text(params: SamplingParams, name: str) -> str:
    """The text of a value in its field; empty for none."""
    value = getattr(params, name)
    if name == "stop":
        return ",".join(_escaped(text) for text in value)
    if value is None:
        return ""
    return f"{value:g}" if isinstance(value, float) else str(value)


def read_fields(
    texts: Mapping[str, str], *, base: SamplingParams, defaults: SamplingParams
) -> tuple[SamplingParams | None, dict[str, str]]:
    """The parameters, None if any is wrong, and what is wrong by field.

    An empty field means the default. base: where parameters that have no field come from.
    """
    values: dict[str, Any] = {}
    errors: dict[str, str] = {}
    for name in FIELDS:
        values[name] = _value(name, texts[name], getattr(defaults, name))
        try:
            replace(defaults, **{name: values[name]})
        except RequestError as error:
            errors[name] = str(error)
    if errors:
        return None, errors
    try:
        return replace(base, **values), {}
    except RequestError as error:  # two that do not go together
        return None, {error.param if error.param in FIELDS else "max_tokens": str(error)}


def changes(params: SamplingParams, defaults: SamplingParams) -> list[str]:
    """The parameters that differ from the defaults: `T 0.2`, `seed 7`."""
    changed = [name for name in FIELDS if getattr(params, name) != getattr(defaults, name)]
    return [f"{'T' if name == 'temperature' else name} {_shown(params, name)}" for name in changed]


def without(params: SamplingParams, names: Iterable[str]) -> tuple[SamplingParams, tuple[str, ...]]:
    """The parameters with these reset, and the values that this leaves out: `top_k 40`."""
    nothing = SamplingParams()
    left_out = [name for name in names if getattr(params, name) != getattr(nothing, name)]
    if not left_out:
        return params, ()
    fewer = replace(params, **{name: getattr(nothing, name) for name in left_out})
    return fewer, tuple(f"{name} {_shown(params, name)}" for name in left_out)


def _shown(params: SamplingParams, name: str) -> str:
    if name == "stop":
        return f"({len(params.stop)})"
    return field_text(params, name) or "off"


def _value(name: str, text: str, default: Any) -> Any:
    if name == "stop":
        return _stops(text)
    text = text.strip()
    if not text:
        return default
    if _INTEGER.fullmatch(text):
        return int(text)
    try:
        return float(text)
    except ValueError:
        return text  # `SamplingParams` says what it should have been


def _stops(text: str) -> tuple[str, ...]:
    pieces, piece = [], ""
    for part in re.findall(r"\\[nt,\\]|.", text, re.DOTALL):
        if part == ",":
            pieces.append(piece)
            piece = ""
        else:
            piece += _ESCAPES.get(part, part)
    return tuple(p for p in [*pieces, piece] if p)


def _escaped(text: str) -> str:
    for written, meant in reversed(_ESCAPES.items()):
        text = text.replace(meant, written)
    return text
