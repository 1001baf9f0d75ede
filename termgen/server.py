"""The HTTP front end: OpenAI's API over an `EngineClient`, for `termgen serve` and beside the TUI.

Reading order, all in `termgen.serving`: `table` (the endpoints) -> `app` -> `handlers` and
`responses` (an answer) -> `middleware` -> `runner` (sockets, signals, draining); they share
`metrics` and `state`. They see the engine only as `EngineClient` and events; wire formats are in
`termgen.api`.
"""

from __future__ import annotations

from termgen.serving.app import create_app
from termgen.serving.runner import Server, run_server

__all__ = ["Server", "create_app", "run_server"]
