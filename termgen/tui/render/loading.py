"""The loading screen: finished phases, the current one, and its progress."""

from __future__ import annotations

from collections.abc import Sequence

from termgen.tui.formatting import percent
from termgen.tui.render.series import bar
from termgen.tui.sanitize import clean_line
from termgen.tui.spans import Row, cut, row_width

BLOCK_WIDTH = 46
_NAME_WIDTH = 20


def loading_rows(
    phases: Sequence[tuple[str, float]], elapsed_s: float, width: int, height: int, *, quit_key: str
) -> list[Row]:
    """`phases` in the order they began, with the share done; the last is the current one."""
    rows: list[Row] = [(("▍", "accent"), ("termgen", "accent/b")), ()]
    if not phases:
        rows.append((("● ", "accent"), ("starting", "text")))
    for index, (name, share) in enumerate(phases):
        rows.append(phase_row(name, share, last=index == len(phases) - 1))
    rows += [(), ((f"{elapsed_s:.1f} s", "muted"), (f"   {quit_key} quits", "faint"))]
    block = min(BLOCK_WIDTH, width)
    left = " " * max(0, (width - block) // 2)
    above: list[Row] = [()] * max(0, (height - len(rows)) // 2 - 1)
    return [*above, *(((left, "text"), *row) if row_width(row) else () for row in rows)]


def phase_row(name: str, share: float, *, last: bool) -> Row:
    label = cut(clean_line(name), _NAME_WIDTH).ljust(_NAME_WIDTH)
    if not last or share >= 1:
        return (("✓ ", "good"), (label, "muted"))
    room = BLOCK_WIDTH - _NAME_WIDTH - 2 - 5
    return (
        ("● ", "accent"),
        (label, "text"),
        *bar(share, room, role="accent"),
        (percent(share).rjust(5), "muted"),
    )
