"""Whether what recordings read is still where it was when they were made. For debugging.

A graph holds addresses, not tensors: one that was allocated anew since is read where it used to
lie, without an error. Used with the setting `debug`; the check costs some microseconds a tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Any

import torch

NamedTensor = tuple[str, torch.Tensor]


def tensors_of(owner: str, holder: Any) -> list[NamedTensor]:
    """The tensors among an object's attributes, named `owner.attribute`."""
    return [
        (f"{owner}.{name}", value)
        for name, value in vars(holder).items()
        if isinstance(value, torch.Tensor)
    ]


class AddressCheck:
    """Remembers addresses for each recording. `tensors` gives what recordings read, by name; one
    that does not exist yet when a recording is made is not read by it."""

    def __init__(self, tensors: Callable[[], Iterable[NamedTensor]]) -> None:
        self._tensors = tensors
        self._recorded: dict[Hashable, dict[str, int]] = {}

    def note(self, recording: Hashable) -> None:
        """A recording was just made."""
        self._recorded[recording] = self._addresses()

    def check(self, recording: Hashable) -> None:
        """Before its replay."""
        now = self._addresses()
        recorded = self._recorded[recording]
        moved = [name for name, address in recorded.items() if now.get(name) != address]
        assert not moved, f"moved since {recording} was recorded: {', '.join(moved)}"

    def _addresses(self) -> dict[str, int]:
        return {name: tensor.data_ptr() for name, tensor in self._tensors()}
