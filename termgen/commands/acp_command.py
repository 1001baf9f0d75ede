"""`termgen acp`: termgen as an agent of the Agent Client Protocol, for editors.

Standard output belongs to the protocol, so the descriptor is taken away first of all: what anything
else prints goes to standard error. The engine starts while the client is answered.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from termgen.commands.arguments import CHAT_ONLY
from termgen.commands.exit_codes import INTERRUPTED, OK, TERMINATED
from termgen.commands.settings import SettingLayers
from termgen.config import EngineConfig, UIConfig
from termgen.errors import ConfigError
from termgen.system.sure_ends import in_daemon_thread

if TYPE_CHECKING:
    from termgen.agent.engine_source import EngineSource
    from termgen.client import EngineClient
    from termgen.tools.server_config import McpServer
    from termgen.vocabulary.model_shelf import Report

NO_PACKAGE = "termgen acp needs a package: pip install 'termgen[acp]'"
TERMINAL_WORDS = (
    "termgen acp reads messages of the Agent Client Protocol here: an editor starts it "
    "(docs/agents.md); Ctrl-D ends it"
)


@dataclass(frozen=True, slots=True)
class Streams:
    """Descriptors of the protocol's streams."""

    reading: int
    writing: int


def take_streams() -> Streams:
    """Take standard input and output away from everything else in this process, and in those that
    it starts: to read gives nothing from here on, and what is printed goes to standard error."""
    sys.stdout.flush()
    streams = Streams(os.dup(0), os.dup(1))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return streams


@dataclass(frozen=True, slots=True)
class AgentSetup:
    """What an agent works with, as the settings say."""

    source: EngineSource
    ui: UIConfig
    given: dict[str, Any]
    """Settings of the command line, which override those of a chat that is loaded."""
    servers: tuple[McpServer, ...]
    """Those of the config file."""


def read_setup(args: argparse.Namespace, layers: SettingLayers) -> AgentSetup:
    """Check the settings; nothing is started yet. Raises `ConfigError`."""
    config = layers.resolve(EngineConfig, capture_in_background=True)
    ui = layers.resolve(UIConfig)
    if args.url is None and args.api_key is not None:
        raise ConfigError("--api-key needs --url: our own engine has no keys", param="api_key")
    if args.url is None and args.wait is not None:
        raise ConfigError("--wait needs --url: it waits for a server", param="wait")
    try:
        import acp  # noqa: F401
    except ImportError:
        raise ConfigError(NO_PACKAGE) from None
    given = {name: getattr(ui, name) for name in CHAT_ONLY if layers.given(name) is not None}
    source = _server(args, layers) if args.url is not None else _own_engine(config)
    return AgentSetup(source, ui, given, layers.mcp_servers)


def run_acp(args: argparse.Namespace, layers: SettingLayers) -> int:
    """Answer the client until it closes standard input."""
    if sys.stdin.isatty():
        print(f"termgen: {TERMINAL_WORDS}", file=sys.stderr)
    streams = take_streams()
    setup = read_setup(args, layers)
    logging.basicConfig(level=logging.WARNING, format="termgen: %(message)s", stream=sys.stderr)
    return asyncio.run(_answer_and_end(setup, streams))


async def _answer_and_end(setup: AgentSetup, streams: Streams) -> int:
    ended_by = await answer_client(setup, streams, signals=(signal.SIGTERM, signal.SIGINT))
    code = OK
    if ended_by is not None:
        code = TERMINATED if ended_by == signal.SIGTERM else INTERRUPTED
    if setup.source.is_starting:
        # its thread is inside torch, and has nothing to save: the end must not wait for it
        sys.stderr.flush()
        os._exit(code)
    await setup.source.stop()
    return code


async def answer_client(
    setup: AgentSetup, streams: Streams, *, signals: Sequence[int] = ()
) -> int | None:
    """Answer the client until it closes its end, or until one of these signals comes, whose number
    is returned. The engine goes on."""
    from termgen.agent.agent import TermgenAgent, serve
    from termgen.tools.configured import make_toolbox
    from termgen.tui.chat.saved.chat_store import ChatStore, store_path

    def toolbox_of(servers: tuple[McpServer, ...], folder: Path) -> Any:
        """The client's servers, and those of the config file that have other names."""
        names = {server.name for server in servers}
        others = [server for server in setup.servers if server.name not in names]
        return make_toolbox(setup.ui, [*others, *servers], folder)

    agent = TermgenAgent(
        setup.source,
        ChatStore(store_path(setup.ui.chat_db)),
        setup.ui,
        given=setup.given,
        make_toolbox=toolbox_of,
    )
    return await serve(agent, streams.reading, streams.writing, signals)


def _own_engine(config: EngineConfig) -> EngineSource:
    """An engine of this process."""
    from termgen.agent.engine_source import EngineSource
    from termgen.commands.launch import EngineHolder
    from termgen.commands.shelf.local_shelf import LocalShelf
    from termgen.library.catalog import ensure_model
    from termgen.library.progress import TerminalProgress

    holder = EngineHolder(config)

    async def start(report: Report) -> EngineClient:
        with TerminalProgress(plain=True) as shown:

            def on_progress(phase: str, share: float) -> None:
                shown(phase, share)
                report(phase, share)

            _, fetched = in_daemon_thread(
                "termgen-fetch", lambda: ensure_model(holder.config.model, on_progress)
            )
            await asyncio.wrap_future(fetched)
            return await holder.start(on_progress)

    return EngineSource(start, holder.stop, LocalShelf(holder))


def _server(args: argparse.Namespace, layers: SettingLayers) -> EngineSource:
    """A server elsewhere."""
    from termgen.agent.engine_source import EngineSource
    from termgen.commands.remote_command import RemoteHolder, read_target

    holder = RemoteHolder(read_target(args.url, args.api_key, layers, wait_s=args.wait))
    return EngineSource(holder.start, holder.stop, holder)
