"""Where one looks in the map of KV blocks: cursor, zoom, and what is in view. No Textual."""

from __future__ import annotations

from dataclasses import dataclass

MAX_BLOCKS_PER_CELL = 1 << 16


@dataclass(slots=True)
class KvCursor:
    """Blocks are counted from 0 without the null block, cells from the top left of the view."""

    block: int = 0
    wanted_per_cell: int | None = None
    """None: as few as let all blocks be seen."""
    num_blocks: int = 0
    width: int = 1
    rows: int = 1

    def fit(self, num_blocks: int, width: int, rows: int) -> None:
        """The map has this many blocks and cells now."""
        self.num_blocks, self.width, self.rows = num_blocks, max(1, width), max(1, rows)
        self.block = max(0, min(self.block, num_blocks - 1))

    @property
    def least_to_see_all(self) -> int:
        return max(1, -(-self.num_blocks // (self.width * self.rows)))

    @property
    def per_cell(self) -> int:
        wanted = self.wanted_per_cell or self.least_to_see_all
        return min(wanted, self.least_to_see_all)

    @property
    def first(self) -> int:
        """First block in view: whole rows, with the cursor's among them."""
        per_row = self.width * self.per_cell
        total_rows = -(-max(1, self.num_blocks) // per_row)
        row = self.block // per_row
        return max(0, min(row - self.rows // 2, total_rows - self.rows)) * per_row

    @property
    def end(self) -> int:
        """Behind the last block in view."""
        return min(self.num_blocks, self.first + self.width * self.rows * self.per_cell)

    @property
    def cell(self) -> tuple[int, int]:
        """Column and row of the cursor in the view."""
        row, column = divmod((self.block - self.first) // self.per_cell, self.width)
        return column, row

    @property
    def cell_blocks(self) -> range:
        """The blocks of the cell under the cursor."""
        start = self.block - (self.block - self.first) % self.per_cell
        return range(start, min(start + self.per_cell, self.num_blocks))

    def move(self, columns: int = 0, rows: int = 0) -> None:
        target = self.block + (columns + rows * self.width) * self.per_cell
        self.block = max(0, min(target, self.num_blocks - 1))

    def zoom(self, by: int) -> None:
        """Half or twice as many blocks in a cell, from one to what shows all."""
        now = self.per_cell
        self.wanted_per_cell = max(1, now // 2) if by > 0 else min(now * 2, MAX_BLOCKS_PER_CELL)
        if self.wanted_per_cell >= self.least_to_see_all:
            self.wanted_per_cell = None

    def point(self, column: int, row: int) -> bool:
        """Put the cursor to a cell of the view; False when there is no block."""
        if not (0 <= column < self.width and 0 <= row < self.rows):
            return False
        block = self.first + (row * self.width + column) * self.per_cell
        if block >= self.num_blocks:
            return False
        self.block = block
        return True
