"""Read GGUF files with the gguf package, minus the work that it repeats."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest


@contextmanager
def each_part_once() -> Iterator[None]:
    """Cache a file's fields and tensor names across reads of the same files."""
    import gguf
    import numpy as np

    memmap = np.memmap

    def plain_array(*args: Any, **options: Any) -> Any:
        # A million pieces are cut from it, and each would run `__array_finalize__`.
        return np.asarray(memmap(*args, **options))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf, "GGUFReader", functools.cache(gguf.GGUFReader))
        patch.setattr(gguf, "get_tensor_name_map", functools.cache(gguf.get_tensor_name_map))
        patch.setattr(np, "memmap", plain_array)
        yield
