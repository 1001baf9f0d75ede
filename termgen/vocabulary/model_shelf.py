"""Models that a front end may choose from, and how it changes to one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from termgen.client import EngineClient

Report = Callable[[str, float], None]
"""Called with the present phase and its progress, from any thread."""


@dataclass(frozen=True, slots=True)
class ModelChoice:
    """One line of the list."""

    name: str
    """A name of the catalog, a hub id, a path, or a server's name for it."""
    detail: str = ""
    """Source, or path, of the model."""
    size_bytes: int | None = None
    """Bytes on disk, or to be fetched."""
    is_here: bool = True
    """True if the model is on this machine."""
    is_current: bool = False
    needs_bytes: int | None = None
    """About how much memory its weights take; None: not known."""
    fits: bool | None = None
    held_as: str = ""
    """Type of the weights in memory, `int8`: it may differ from that of the file."""


@dataclass(frozen=True, slots=True)
class Switch:
    """How a change of models has ended: who answers now, and why it is not the one asked for."""

    client: EngineClient
    failure: str | None = None


class ModelShelf(Protocol):
    """Source of the models to choose from. Every method may raise `TermgenError`."""

    async def choices(self) -> list[ModelChoice]: ...

    async def look_up(self, name: str) -> ModelChoice:
        """One by its name, listed or not."""
        ...

    async def fetch(self, name: str, report: Report) -> None:
        """Bring it to this machine; cancelling stops that, and leaves nothing half done."""
        ...

    async def switch(self, name: str, report: Report) -> Switch:
        """End the present engine and start this model; should that fail, the former one again.

        An error means that there is no engine any more.
        """
        ...
