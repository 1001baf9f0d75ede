"""Rows of a matrix as a file stores them, for linear methods that keep them so."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class StoredRows:
    """Some whole rows, in blocks along each row."""

    kind: str
    """Name of the block type, as GGUF has it."""
    blocks: torch.Tensor  # [rows, blocks of a row, bytes of a block] uint8
    order: torch.Tensor | None = None  # [columns] int64
    """The column of the matrix that each stored one is, where they are in another order."""
