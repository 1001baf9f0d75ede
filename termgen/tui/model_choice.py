"""What the model picker knows: the models to choose from, and who changes to one. No Textual."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from termgen.client import EngineClient

Report = Callable[[str, float], None]
"""What is being done and the share of it that is done; from any thread."""


@dataclass(frozen=True, slots=True)
class ModelChoice:
    """One line of the list."""

    name: str
    """A name of the catalog, a hub id, a path, or a server's name for it."""
    detail: str = ""
    """Where it comes from, or lies."""
    size_bytes: int | None = None
    """On disk, or to be fetched."""
    is_here: bool = True
    """It need not be fetched."""
    is_current: bool = False
    needs_bytes: int | None = None
    """About how much memory its weights take; None: not known."""
    fits: bool | None = None


@dataclass(frozen=True, slots=True)
class Switch:
    """How a change of models has ended: who answers now, and why it is not the one asked for."""

    client: EngineClient
    failure: str | None = None


class ModelShelf(Protocol):
    """Where models are chosen from. Everything may raise `TermgenError`."""

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
