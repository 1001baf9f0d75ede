"""How many values some JSON has, counted without parsing it.

Imports little: it is part of the program that parses large bodies, which has to start quickly.

Parsing goes by the number of values, not of bytes: eight megabytes of `[],` take a second and half
a gigabyte, the same as one text some milliseconds.
"""

from __future__ import annotations

from termgen.errors import RequestError

MAX_JSON_WEIGHT = 2**18
"""Numbers count one, everything else four: a prompt of a quarter million token ids fits."""
OTHER_WEIGHT = 3
"""Beside the comma that is counted anyway."""

ESCAPES_PER_WEIGHT = 4

PIECE_BYTES = 2**18
"""Between two looks at the limit: what is far beyond it is not counted to the end."""


def check_weight(raw: bytes) -> None:
    """Refuse JSON of too many values. Other faults are for the parser to find."""
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
    """`weight` and what lies between two strings."""
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
    """Whether what follows belongs to a backslash at the end of this."""
    return (len(run) - len(run.rstrip(b"\\"))) % 2 == 1
