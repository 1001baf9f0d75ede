"""Numbers as the screens show them: short, fixed in width, never scientific."""

from __future__ import annotations

import re

from termgen.client import ModelInfo
from termgen.tui.paint.sanitize import clean_line
from termgen.vocabulary.durations import clock, duration, took

__all__ = ["age", "brief_id", "clock", "count", "duration", "percent", "plural", "rate", "took"]

_MADE_ID = re.compile(r"(?:([a-z]+)[-_])?([0-9a-f]{8})[0-9a-f]{16,}(.*)")
_KINDS = {"chatcmpl": "chat", "cmpl": "text", "resp": "response", "msg": "message"}


def count(value: float) -> str:
    """1234 -> 1.2k; at most five characters below a trillion."""
    if value < 0:
        return "-" + count(-value)
    if value < 999.5:
        return f"{value:.0f}"
    for limit, divisor, unit in ((999.5e3, 1e3, "k"), (999.5e6, 1e6, "M"), (999.5e9, 1e9, "G")):
        if value < limit:
            scaled = value / divisor
            return f"{scaled:.1f}{unit}" if scaled < 99.95 else f"{scaled:.0f}{unit}"
    return f"{value / 1e12:.1f}T"


def rate(value: float) -> str:
    """Tokens per second: one decimal while it means something."""
    return f"{value:.1f}" if 0 < value < 99.95 else count(value)


def age(seconds: float) -> str:
    """How long ago or how old, at most five characters."""
    if seconds < 99.95:
        return f"{seconds:.1f}s"
    if seconds < 5999.5:
        return f"{seconds / 60:.0f}m"
    return f"{seconds / 3600:.0f}h"


def plural(number: int, noun: str) -> str:
    """`1 line`, `3 lines`, `1.2k lines`."""
    return f"{count(number)} {noun}{'' if number == 1 else 's'}"


def percent(share: float | None) -> str:
    """A share of one: 6.8%, 93%; a dash for none."""
    if share is None:
        return "–"
    value = share * 100
    if value < 0.05:
        return "0%"
    return f"{value:.1f}%" if value < 9.95 else f"{value:.0f}%"


def brief_id(request_id: str) -> str:
    """An id as a table shows it: of those that a server made up, `chat 1f0c9a3e`; a client's own
    name as it is."""
    found = _MADE_ID.fullmatch(request_id)
    if found is None:
        return request_id
    kind, digits, rest = found.groups()
    return f"{_KINDS.get(kind, kind)} {digits}{rest}" if kind else digits + rest


def model_words(model: ModelInfo) -> str:
    """`smollm2-135m float32`, with the quantization instead of the type if there is one. The type
    of a remote model may be unknown."""
    return f"{clean_line(model.model_id)} {model.quantization or model.dtype}".rstrip()
