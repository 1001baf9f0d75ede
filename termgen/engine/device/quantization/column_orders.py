"""Which rows of a layer have their columns in an order of their own, or a scale for every 16."""

from __future__ import annotations

from itertools import groupby

import torch


class ColumnOrders:
    """Filled while rows are loaded. Order 0 is that of x. Rows whose 16 columns share a scale have
    this order, too, and are counted as -4 or -8, by the bits of a number."""

    def __init__(self) -> None:
        self.orders: list[torch.Tensor | None] = [None]
        self._ordered: list[tuple[int, int, int]] = []
        """(first row, end, order) of rows with another order than 0."""

    def note(self, order: torch.Tensor, first_row: int, num_rows: int) -> int | None:
        """Note rows and their order [columns]; returns its number if it is a new one."""
        for number, known in enumerate(self.orders):
            if known is not None and torch.equal(known, order):
                self._ordered.append((first_row, first_row + num_rows, number))
                return None
        number = len(self.orders)
        self.orders.append(order)
        self._ordered.append((first_row, first_row + num_rows, number))
        return number

    def note_halved(self, num_bits: int, first_row: int, num_rows: int) -> None:
        """Note rows with a scale for every 16 columns."""
        self._ordered.append((first_row, first_row + num_rows, -num_bits))

    def runs(self, num_rows: int) -> list[tuple[int, int, int]]:
        """Runs (first row, end, order) of all rows, of neighbours with one order."""
        return in_one_order(self._ordered, num_rows)


def in_one_order(ordered: list[tuple[int, int, int]], num_rows: int) -> list[tuple[int, int, int]]:
    """Runs (first row, end, order) of all rows, of neighbours with one order. ordered: those with
    another order than 0, in parts."""
    parts, done = [], 0
    for first, end, order in sorted(ordered):
        parts += [(done, first, 0)] if done < first else []
        parts.append((first, end, order))
        done = end
    parts += [(done, num_rows, 0)] if done < num_rows else []
    runs = []
    for order, group in groupby(parts, key=lambda part: part[2]):
        alike = list(group)
        runs.append((alike[0][0], alike[-1][1], order))
    return runs
