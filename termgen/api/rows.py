"""The row of an endpoint: where it is, what its body is, how it answers, what its errors look like.

A dialect is a module or a folder with rows, and `termgen.serving.table` lists the rows of all. The
server makes its routes, its error replies, its description and the names of operations in traces
from them, and has no other place that knows a path. Rows with a handler of their own are in
`termgen.serving.routes`.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

from termgen.api.errors import OPENAI_ERRORS, ErrorShape
from termgen.api.fields import Endpoint, Served, resolve_model
from termgen.api.job import Job, ResponseOptions
from termgen.api.sse import Wire
from termgen.client import GenerationClient, Prompt, TokenDelta


class Asked(Protocol):
    """A parsed body."""

    @property
    def ignored(self) -> tuple[str, ...]:
        """Names without effect that no endpoint knows."""
        ...

    @property
    def not_used(self) -> tuple[str, ...]:
        """Fields that were understood and have no effect."""
        ...


class AskedAnswer(Asked, Protocol):
    """A parsed body that asks for an answer."""

    @property
    def jobs(self) -> Sequence[Job]: ...

    @property
    def options(self) -> ResponseOptions: ...


class ChunkStream(Protocol):
    """Converts the deltas of one answer to chunks."""

    @property
    def wire(self) -> Wire:
        """The bytes of a chunk, of a ping and of a failure."""
        ...

    def feed(self, index: int, delta: TokenDelta) -> list[dict[str, Any]]: ...

    def end(self) -> list[dict[str, Any]]: ...


@runtime_checkable
class TextFrames(Protocol):
    """A `ChunkStream` with a shorter way for deltas that are only text."""

    def frame(self, index: int, delta: TokenDelta) -> bytes | None:
        """The encoded form of what `feed` would return; None where `feed` must be used."""
        ...


A = TypeVar("A", bound=Asked)
G = TypeVar("G", bound=AskedAnswer)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    path: str
    summary: str
    methods: tuple[str, ...] = ("GET",)
    body: Endpoint | None = None
    """Declaration of the JSON body; one without structs stands for any object."""
    errors: ErrorShape = OPENAI_ERRORS
    is_described: bool = True
    """Part of /openapi.json."""
    tells_status: bool = False
    """503 is an answer of this endpoint, not an error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AskingRow(Row, Generic[A]):
    """An endpoint whose body asks the engine for something."""

    methods: tuple[str, ...] = ("POST",)
    resolve: Callable[[object, Sequence[str]], str] = resolve_model
    """(the `model` of a body, the served names) -> the served name that is meant; a function of a
    module, as `parse` is."""
    parse: Callable[[Served, Mapping[str, Any]], A]
    """A function of a module: another process calls it for large bodies, and its result is pickled.
    Raises RequestError."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratingRow(AskingRow[G]):
    """An endpoint whose answer the model writes."""

    stream: Callable[[G], ChunkStream] | None = None
    """None: no answer is streamed, and the parsed body never asks for it."""
    whole: Callable[[G, list[TokenDelta]], dict[str, Any] | bytes]
    """The answer that is not streamed, from one merged delta for each choice; from none where a
    body asks for no generation. Bytes are JSON."""
    prepare: Callable[[G, GenerationClient], Coroutine[Any, Any, None]] | None = None
    """Work that these two need, done after admission and before the first delta."""
    names: Mapping[str, str] = field(default_factory=dict)
    """The endpoint's names of a chat's fields, for errors of the engine."""
    operation: str = "chat"
    """OpenTelemetry's name of what it does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRow(AskingRow[A]):
    """An endpoint that makes tokens of text, or text of tokens. Its work has a place in the queue
    like any other request, and ends when the client leaves."""

    measured: Callable[[A], Prompt]
    """The text or the tokens that the queue counts."""
    work: Callable[[A, GenerationClient], Coroutine[Any, Any, dict[str, Any]]]
    """Makes the answer."""
