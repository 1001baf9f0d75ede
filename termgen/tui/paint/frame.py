"""Frames of panels: rounded boxes where there is room, otherwise a rule with a title."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from termgen.tui.paint.spans import Row, Span, fit, row_width


@dataclass(frozen=True, slots=True)
class Frame:
    """The outer size of a panel, and whether it has a box."""

    width: int
    height: int
    boxed: bool

    @property
    def inner_width(self) -> int:
        return max(1, self.width - (4 if self.boxed else 2))

    @property
    def inner_height(self) -> int:
        return max(0, self.height - (2 if self.boxed else 1))

    def draw(self, title: Sequence[Span], right: Sequence[Span], body: Sequence[Row]) -> list[Row]:
        """Exactly `height` rows of `width` cells; `right` is dropped first when the title needs
        room."""
        edge = "border"
        rows = [self._top(title, right)]
        for index in range(self.inner_height):
            row = fit(body[index] if index < len(body) else (), self.inner_width)
            left, right_edge = ("│ ", " │") if self.boxed else (" ", " ")
            rows.append(((left, edge), *row, (right_edge, edge)))
        if self.boxed:
            rows.append((("╰" + "─" * (self.width - 2) + "╯", edge),))
        return rows[: self.height]

    def _top(self, title: Sequence[Span], right: Sequence[Span]) -> Row:
        left_corner, right_corner = ("╭─", "─╮") if self.boxed else ("─", "─")
        corners = len(left_corner) + len(right_corner)
        room = self.width - corners
        title_cells = row_width(tuple(title)) + 2
        right_cells = row_width(tuple(right)) + 2 if right else 0
        if title_cells + right_cells + 1 > room:
            right, right_cells = (), 0
        if title_cells > room:
            title, title_cells = fit(title, max(0, room - 2)), room
        line = "─" * (room - title_cells - right_cells)
        spans: list[Span] = [(left_corner + " ", "border"), *title, (" " + line, "border")]
        if right:
            spans += [(" ", "border"), *right, (" ", "border")]
        spans.append((right_corner, "border"))
        return fit(spans, self.width, "border")
