"""From the row of an endpoint to its route; rows with a handler of their own."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial

from starlette.requests import Request
from starlette.routing import Route
from starlette.types import ASGIApp

from termgen.api.errors import ErrorShape
from termgen.api.rows import GeneratingRow, Row, TokenRow
from termgen.serving import handlers
from termgen.serving.access import AdminRoute

Handler = Callable[[Request], Awaitable[ASGIApp]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainRow(Row):
    """An endpoint that shows or changes the state of the server or the engine."""

    handler: Handler
    is_admin: bool = False
    """For administrators, whatever the method."""
    is_open: bool = False
    """Needs no key."""
    is_probe: bool = False
    """Machines poll it every few seconds: its access lines are logged at debug level."""


def route_of(row: Row) -> Route:
    handler: Handler
    kind = Route
    if isinstance(row, GeneratingRow):
        handler = partial(handlers.generate, row)
    elif isinstance(row, TokenRow):
        handler = partial(handlers.work_on_tokens, row)
    else:
        assert isinstance(row, PlainRow), f"{row.path} has no handler"
        handler, kind = row.handler, AdminRoute if row.is_admin else Route
    return kind(row.path, handler, methods=list(row.methods), name=row.summary)


def paths_of(rows: Sequence[Row], chosen: Callable[[PlainRow], bool]) -> frozenset[str]:
    """Paths of the chosen ones of the plain rows."""
    return frozenset(row.path for row in rows if isinstance(row, PlainRow) and chosen(row))


def shapes_of(rows: Sequence[Row]) -> tuple[ErrorShape, ...]:
    """The shapes of errors, each once."""
    return tuple({row.errors.name: row.errors for row in rows}.values())
