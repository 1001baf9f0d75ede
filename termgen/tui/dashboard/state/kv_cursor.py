"""Position in the map of KV blocks: cursor, zoom, and the blocks in view. No Textual."""

from __future__ import annotations

from dataclasses import dataclass

MAX_BLOCKS_PER_CELL = 1 << 16
MAX_CELL_HEIGHT = 6


def cell_size(num_blocks: int, width: int, rows: int) -> tuple[int, int]:
    """The largest cell, about square on a screen, with which all blocks find room; (1, 1) when
    they hardly do."""
    best = (1, 1)
    for high in range(1, min(rows, MAX_CELL_HEIGHT) + 1):
        for wide in (2 * high - 1, 2 * high, 2 * high + 1):
            fits = (width // wide) * (rows // high) >= num_blocks
            if fits and wide * high > best[0] * best[1]:
                best = (wide, high)
    return best


@dataclass(slots=True)
class KvCursor:
    """Blocks are counted from 0 without the null block, cells from the top left of the view."""

    block: int = 0
    wanted_per_cell: int | None = None
    """None: as few as let all blocks be seen."""
    num_blocks: int = 0
    width: int = 1
    rows: int = 1
    cell_width: int = 1
    cell_height: int = 1
    """How many characters a cell of the map covers."""
    num_maps: int = 0
    """Maps of the same blocks, one above the other, each with `map_height` rows below a line with
    its name; 0: one map without a name."""
    map_height: int = 1

    @property
    def size(self) -> tuple[int, int]:
        return self.cell_width, self.cell_height

    def fit(self, num_blocks: int, width: int, rows: int, *, num_maps: int = 0) -> None:
        """The map, or each of several, has this many blocks and cells now."""
        self.num_maps, self.map_height = num_maps, max(1, rows)
        wide, high = cell_size(num_blocks, max(1, width), max(1, rows))
        if self.wanted_per_cell is not None:
            wide, high = 1, 1
        self.cell_width, self.cell_height = wide, high
        self.num_blocks = num_blocks
        self.width, self.rows = max(1, width // wide), max(1, rows // high)
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
        """The block after the last one in view."""
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
        """Put the cursor to the cell at a character of the view; False when there is no block."""
        if self.num_maps:
            place, row = divmod(row, self.map_height + 1)
            row -= 1
            if row < 0 or place >= self.num_maps:
                return False
        column, row = column // self.cell_width, row // self.cell_height
        if not (0 <= column < self.width and 0 <= row < self.rows):
            return False
        block = self.first + (row * self.width + column) * self.per_cell
        if block >= self.num_blocks:
            return False
        self.block = block
        return True
