"""Models that a front end may choose from, and how it changes to one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

from termgen.client import EngineClient

Report = Callable[[str, float], None]
"""Called with the present phase and its progress, from any thread."""

Group = Literal["here", "fetch", "hub"]
"""Where a choice is: on this machine, known by name and to be fetched, or found on the hub."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What a model is expected to need on this machine."""

    weights_bytes: int
    """About how much memory its weights take."""
    held_as: str = ""
    """Type of the weights in memory, `int8`: it may differ from that of the file."""
    kv_bytes: int = 0
    """The keys and values of one request with a full context; 0: not known."""
    context: int = 0
    """Tokens of that context."""
    working_bytes: int = 0
    """Memory of the steps."""
    room_bytes: int | None = None
    """Memory that an engine may use here; None: not known."""
    tokens_per_s: float | None = None
    """What one request may get at most, by the rate of the memory; None: not known."""
    main_bytes: int = 0
    """Weights, of experts, that do not fit a GPU and lie in main memory, where the CPU computes
    them."""

    @property
    def fits(self) -> bool | None:
        """False if the weights and the steps' memory exceed the room; None: not known. A context is
        shortened to what is left."""
        if self.room_bytes is None:
            return None
        return self.weights_bytes - self.main_bytes + self.working_bytes <= self.room_bytes

    @property
    def total_bytes(self) -> int:
        return self.weights_bytes + self.kv_bytes + self.working_bytes


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
    needs: Needs | None = None
    title: str = ""
    """What the list shows, where that is not the name."""
    quantization: str = ""
    """Type of the weights in the file."""
    num_weights: int = 0
    """About how many weights it has; 0: not known."""
    problem: str = ""
    """Why it cannot be run; empty if nothing is known against it."""
    is_base: bool = False
    """True if it continues text and has no chat template."""
    is_best: bool = False
    """The best of its group for this machine."""
    is_own: bool = False
    """True if termgen fetched it, and may delete it."""
    is_repository: bool = False
    """A repository of the hub with several files: choosing it lists them."""

    @property
    def group(self) -> Group:
        if self.is_here:
            return "here"
        return "hub" if self.is_repository else "fetch"

    @property
    def shown(self) -> str:
        return self.title or self.name


@dataclass(frozen=True, slots=True)
class Switch:
    """How a change of models has ended: who answers now, and why it is not the one asked for."""

    client: EngineClient
    failure: str | None = None
    name: str = ""
    """What later runs find the model by; empty if it did not change."""
    server: str = ""
    """URL of the server that has it; empty for an engine of the chat's own."""


class OtherModel(EngineClient, Protocol):
    """A model of a server elsewhere, for a while."""

    async def aclose(self) -> None:
        """Close its connections."""
        ...


class OtherModels(Protocol):
    """Models that a chat may ask beside its own."""

    @property
    def names(self) -> list[tuple[str, str]]:
        """Each name, with what it stands for."""
        ...

    async def open(self, wanted: str) -> OtherModel:
        """One by its name, or by `URL [MODEL]`. Raises `TermgenError`."""
        ...


class ModelShelf(Protocol):
    """Source of the models to choose from. Every method may raise `TermgenError`."""

    async def choices(self) -> list[ModelChoice]: ...

    async def look_up(self, name: str) -> ModelChoice:
        """One by its name, listed or not."""
        ...

    @property
    def can_search(self) -> bool:
        """True if `search`, `files` and `remove` are of use here."""
        ...

    async def search(self, words: str) -> list[ModelChoice]:
        """Repositories of the hub with models."""
        ...

    async def files(self, name: str) -> list[ModelChoice]:
        """The models in a repository of the hub."""
        ...

    async def remove(self, name: str) -> int:
        """Delete a model that termgen fetched; returns the bytes freed."""
        ...

    async def offer(self) -> ModelChoice | None:
        """A better model than the default one in use, if this machine can run and fetch it."""
        ...

    async def fetch(self, name: str, report: Report) -> None:
        """Bring it to this machine; cancelling stops that. A later call goes on from there, where
        the source allows it."""
        ...

    async def switch(self, name: str, report: Report) -> Switch:
        """End the present engine and start this model; should that fail, the former one again.

        An error means that there is no engine any more.
        """
        ...
