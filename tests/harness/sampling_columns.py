"""Columns of the cuts of the tail, neutral but for those that are given."""

from __future__ import annotations

from typing import Any

import torch

from termgen.engine.device.sampling.top_k_top_p import Cuts
from termgen.vocabulary.sampling_params import COLUMNS, CUTS

DTYPES = {"float32": torch.float32, "int32": torch.int32}


def make_cuts(num_rows: int, *, device: str | torch.device = "cpu", **given: Any) -> Cuts:
    """given: a value for all rows, or one for each."""
    assert given.keys() <= CUTS.keys(), given
    columns = {
        name: torch.as_tensor(
            given.get(name, neutral), dtype=DTYPES[COLUMNS[name].column or ""], device=device
        )
        for name, neutral in CUTS.items()
    }
    return Cuts(**{name: column.expand(num_rows).clone() for name, column in columns.items()})


def asks(cuts: Cuts) -> bool:
    """True if some row is to be cut."""
    return any(bool((getattr(cuts, name) != neutral).any()) for name, neutral in CUTS.items())
