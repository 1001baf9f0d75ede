"""Numbers three rows high."""

from __future__ import annotations

from textual.renderables.digits import DIGITS, DIGITS3X3_BOLD

DIGIT_HEIGHT, DIGIT_WIDTH = 3, 3
POINT = "•"
"""The decimal point: textual's table has none."""


def large_number(text: str) -> tuple[str, ...]:
    """The rows of a number of digits and a point, of one width."""
    rows = [""] * DIGIT_HEIGHT
    for sign in text:
        at = DIGIT_HEIGHT * DIGITS.find(sign)
        for row in range(DIGIT_HEIGHT):
            is_foot = row == DIGIT_HEIGHT - 1
            if at >= 0:
                rows[row] += DIGITS3X3_BOLD[at + row].ljust(DIGIT_WIDTH)
            else:
                rows[row] += (POINT if sign == "." else sign) if is_foot else " "
    return tuple(rows)
