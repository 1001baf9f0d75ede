"""`termgen chat --web`: the chat in a browser of this machine. Called by `cli` only.

The engine and its server run in this process, on a port of loopback and with keys that nothing else
knows; each tab is a `termgen chat --url` of its own. With `--url` that server is used instead.
"""

from __future__ import annotations

import argparse
import asyncio
import secrets
import signal
import sys
from contextlib import suppress
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from termgen.commands.exit_codes import OK
from termgen.commands.launch import EngineHolder, ServedEngine
from termgen.commands.settings import flag_of
from termgen.config import EngineConfig, ServerConfig, UIConfig
from termgen.errors import ConfigError
from termgen.system.remembered import Remembered

if TYPE_CHECKING:
    from termgen.commands.remote_command import RemoteTarget
    from termgen.web.web_server import WebServer

DEFAULT_PORT = 8001
KEY_BYTES = 24
STOP_S = 3.0
"""Time for answers under way when the command is ended."""


def run_web(
    args: argparse.Namespace, config: EngineConfig, ui: UIConfig, target: RemoteTarget | None
) -> int:
    """Serve the page until SIGINT or SIGTERM. target: the server of the chat; None: an own one."""
    try:
        from termgen.web.web_server import WebServer
    except ImportError as missing:
        raise ConfigError(
            f"--web needs the package textual-serve: pip install 'termgen[web]' ({missing})",
            param="web",
        ) from None
    from termgen.tui.app import TermgenApp

    TermgenApp.check_settings(ui)
    port = DEFAULT_PORT if args.web_port is None else args.web_port
    if target is not None:
        keys = {} if target.api_key is None else {"OPENAI_API_KEY": target.api_key}
        page = WebServer(chat_argv(args, target.url), keys, port=port, title="termgen chat")
        return asyncio.run(_serve(page, None, opens=args.open))
    from termgen.commands.chat import with_last_model
    from termgen.commands.launch import _progress
    from termgen.library.catalog import ensure_model
    from termgen.server import Server

    key, admin_key = secrets.token_urlsafe(KEY_BYTES), secrets.token_urlsafe(KEY_BYTES)
    server = Server(None, ServerConfig(port=0, api_key=(key,), admin_key=(admin_key,)))
    server.bind()
    environ = {"OPENAI_API_KEY": key, "TERMGEN_ADMIN_KEY": admin_key}
    page = WebServer(chat_argv(args, server.url), environ, port=port, title="termgen chat")
    config, _, notice = with_last_model(config, Remembered.of_user())
    if notice:
        print(f"termgen: {notice}", file=sys.stderr)
    with _progress() as progress:
        ensure_model(config.model, progress)
    served = ServedEngine(EngineHolder(config, prewarm=True), server, drain_s=STOP_S)
    return asyncio.run(_serve(page, served, opens=args.open))


def chat_argv(args: argparse.Namespace, url: str) -> list[str]:
    """The command of a tab: this one's chat settings, with that server."""
    argv = [sys.executable, "-m", "termgen", "chat", "--url", url]
    for name, flag in (("config", "--config"), ("session", "--session")):
        if (value := getattr(args, name, None)) is not None:
            argv += [flag, value]
    if args.continue_last:
        argv.append("--continue")
    for f in fields(UIConfig):
        if f.name in vars(args):
            argv += _flag(flag_of(f), getattr(args, f.name))
    return argv


def _flag(flag: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        return [flag if value else flag.replace("--", "--no-", 1)]
    return [flag, *map(str, value if isinstance(value, list | tuple) else (value,))]


async def _serve(page: WebServer, served: ServedEngine | None, *, opens: bool) -> int:
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopped.set)
    loading = asyncio.create_task(_start(served))
    waiting = asyncio.create_task(stopped.wait())
    try:
        await page.start()
        print(f"The chat is at {page.access.url}\nCtrl-C ends it.", flush=True)
        if opens:
            await asyncio.to_thread(_open_browser, page.access.url)
        await asyncio.wait((loading, waiting), return_when=asyncio.FIRST_COMPLETED)
        if loading.done():
            loading.result()  # raises why the engine did not start
        await waiting
    finally:
        for task in (loading, waiting):
            task.cancel()
        await page.aclose()
        with suppress(asyncio.CancelledError):
            await asyncio.gather(loading, return_exceptions=True)
        if served is not None:
            await served.stop()
    return OK


async def _start(served: ServedEngine | None) -> None:
    if served is not None:
        await served.start(lambda phase, fraction: None)


def _open_browser(url: str) -> None:
    import webbrowser

    if not webbrowser.open(url):
        print("termgen: no browser was found to open it with", file=sys.stderr)
