"""One tensor of a checkpoint and where it goes.

Layers describe themselves as a list of these; `loader.weights` fills them and knows nothing else
about a model. A fused parameter is several slots, each loading its own rows, so fusing and
quantizing happen while a tensor is read and no second copy of the model ever exists.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch

from termgen.engine.device.layers.stored_rows import StoredRows


@dataclass(frozen=True, slots=True)
class WeightSlot:
    name: str
    """The tensor's name in a Hugging Face checkpoint."""
    shape: tuple[int, ...]
    role: Literal["matrix", "bias", "norm"]
    load: Callable[[torch.Tensor], None]
    """Takes the whole tensor, of `shape` and any floating type, on any device."""
    load_rows: Callable[[torch.Tensor, int], None] | None = None
    """Takes some whole rows and the number of the first; None where all have to come at once."""
    kinds: frozenset[str] = frozenset()
    """Kinds of stored blocks that `load_stored` takes in the place of numbers."""
    load_stored: Callable[[StoredRows, int], None] | None = None
    """Takes some whole rows as a file has them, and the number of the first."""
    offset: float = 0.0
    """Added by `load`: this family's values lie around zero, those of others around this."""
    pieces: tuple[WeightSlot, ...] = ()
    """Slots with the same values together, for a checkpoint that lacks `name`."""


def parameter_slot(
    name: str, parameter: torch.Tensor, role: Literal["matrix", "bias", "norm"]
) -> WeightSlot:
    """A slot that is one whole parameter."""

    def load(tensor: torch.Tensor) -> None:
        parameter.copy_(tensor)

    return WeightSlot(name, tuple(parameter.shape), role, load)


def rows_slot(name: str, matrix: torch.Tensor, *pieces: WeightSlot) -> WeightSlot:
    """A slot that is one whole parameter and takes some rows of it at a time, too."""

    def load_rows(rows: torch.Tensor, first: int) -> None:
        matrix[first : first + len(rows)].copy_(rows)

    return replace(parameter_slot(name, matrix, "matrix"), load_rows=load_rows, pieces=pieces)


def empty_parameter(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.nn.Parameter:
    """Storage for a parameter that the loader will fill; nothing is initialised twice."""
    tensor = torch.empty(shape, dtype=dtype, device=device)
    return torch.nn.Parameter(tensor, requires_grad=False)
