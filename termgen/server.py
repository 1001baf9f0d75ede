"""The HTTP front end: OpenAI's API over an `EngineClient`, for `termgen serve` and beside the TUI.

Reading order, all in `termgen.serving`: `app` (routes) -> `responses` and `generation` (how an
answer travels) -> `middleware` -> `runner` (sockets, signals, draining); `metrics` and `state` are
shared by them. The engine is seen only as `EngineClient` and events; wire formats live in
`termgen.api`.
"""

from __future__ import annotations

from termgen.serving.app import create_app
from termgen.serving.runner import Server, run_server

__all__ = ["Server", "create_app", "run_server"]
