"""Reading a GGUF file with other people's packages, without what they do over and over."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest


@contextmanager
def each_part_once() -> Iterator[None]:
    """For reads of the same files: a file's fields and the names of its tensors are found once."""
    import gguf
    import numpy as np

    memmap = np.memmap

    def plain_array(*args: Any, **options: Any) -> Any:
        # A million pieces are cut from it, and each would be told of the file it is from.
        return np.asarray(memmap(*args, **options))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf, "GGUFReader", functools.cache(gguf.GGUFReader))
        patch.setattr(gguf, "get_tensor_name_map", functools.cache(gguf.get_tensor_name_map))
        patch.setattr(np, "memmap", plain_array)
        yield
