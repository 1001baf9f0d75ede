"""The program that parses and checks large request bodies, for `state.py`.

The cost of parsing goes by the number of values, not of bytes: eight megabytes of `[],` take a
second and half a gigabyte, the same as one text some milliseconds. So the values are counted first.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # wherever this process was started

from termgen.api.fields import parse_json
from termgen.errors import RequestError
from termgen.system.helper_process import answer_questions

MAX_JSON_WEIGHT = 2**18
"""Numbers count one, other values four: a prompt of a quarter million token ids fits."""
OTHER_WEIGHT = 3
"""Weight of other values, beside the comma that is counted anyway."""

ESCAPES_PER_WEIGHT = 4

PIECE_BYTES = 2**18
"""Bytes between two checks: a body far beyond the limit is not counted to the end."""


def check_weight(raw: bytes) -> None:
    """Refuse JSON of too many values. The parser finds other faults."""
    position = 0
    weight = _weigh_escapes(raw)
    is_inside = False
    while True:
        quote = raw.find(b'"', position)
        end = len(raw) if quote < 0 else quote
        if not is_inside:
            weight = _weigh(raw, position, end, weight + OTHER_WEIGHT * (quote >= 0))
            is_inside = True
        elif not _is_escaped(raw[position:end]):
            is_inside = False
        if quote < 0:
            return
        position = quote + 1


def _weigh_escapes(raw: bytes) -> int:
    num_escapes = 0
    for begin in range(0, len(raw), PIECE_BYTES):
        num_escapes += raw.count(b"\\", begin, begin + PIECE_BYTES)
        _check(num_escapes // ESCAPES_PER_WEIGHT)
    return num_escapes // ESCAPES_PER_WEIGHT


def _weigh(raw: bytes, position: int, end: int, weight: int) -> int:
    """`weight` and that of the bytes between two strings."""
    for begin in range(position, end, PIECE_BYTES):
        piece = begin, min(end, begin + PIECE_BYTES)
        weight += raw.count(b",", *piece)
        weight += OTHER_WEIGHT * (raw.count(b"[", *piece) + raw.count(b"{", *piece))
        _check(weight)
    _check(weight)
    return weight


def _check(weight: int) -> None:
    if weight > MAX_JSON_WEIGHT:
        raise RequestError(
            "The request body has too many values; see the limits in the documentation",
            code="request_too_large",
            status=413,
        )


def _is_escaped(run: bytes) -> bool:
    """True if an odd number of backslashes ends this text."""
    return (len(run) - len(run.rstrip(b"\\"))) % 2 == 1


def answer(take: Callable[[dict[str, Any]], object], raw: bytes) -> object:
    """The result of `take` on this JSON. Raises RequestError."""
    check_weight(raw)
    return take(parse_json(raw))


if __name__ == "__main__":
    answer_questions(answer)
