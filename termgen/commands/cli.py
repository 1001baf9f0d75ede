"""The `termgen` command: the composition root, which builds configs, engine and front end.

Subcommands import what they need when they run: `termgen --help` loads neither torch nor the
libraries of screens and server. A `TermgenError` is one line on standard error and exit code 2;
Ctrl-C exits with 130, SIGTERM with 143.
"""

from __future__ import annotations

import argparse
import errno
import io
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn

from termgen.bench.options import (
    LatencyOptions,
    ServeOptions,
    SweepOptions,
    ThroughputOptions,
    check_seed,
)
from termgen.commands.arguments import CHAT_ONLY, build_parser
from termgen.commands.exit_codes import BROKEN_PIPE, INTERRUPTED, OK, TERMINATED, USAGE_ERROR
from termgen.commands.settings import SettingLayers, flag_of
from termgen.config import EngineConfig, ServerConfig, UIConfig
from termgen.errors import ConfigError, TermgenError
from termgen.system.cpu_slices import share_lock_quickly
from termgen.system.terminal_echo import hide_typing, show_typing

ENGINE_THREAD = "termgen-engine"
"""Name of the thread that `AsyncEngine` starts."""

DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""Errors of writing standard output to a file."""


def entry() -> NoReturn:
    """Run the command line this process was started with."""
    _open_missing_streams()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # the locale may lack characters of an answer
            stream.reconfigure(errors="replace")
    try:
        code = main()
    except SystemExit as stop:
        assert stop.code is None or isinstance(stop.code, int)
        code = stop.code or OK
    if any(thread.name == ENGINE_THREAD for thread in threading.enumerate()):
        # Quit while a model loads: the thread is inside torch, and Python's shutdown around it
        # would abort the process. It has nothing to save.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _open_missing_streams() -> None:
    """Open /dev/null for standard streams that the parent process closed, so that no file or
    socket gets their descriptors."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    try:
        code = _run(sys.argv[1:] if argv is None else argv)
        sys.stdout.flush()
        return code
    except TermgenError as error:
        # file names, model names and servers' messages may hold control characters
        line = "".join(c if c.isprintable() else "\ufffd" for c in " ".join(str(error).split()))
        print(f"termgen: error: {line}", file=sys.stderr)
        return USAGE_ERROR
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        _silence_output()
        return BROKEN_PIPE
    except OSError as error:
        if error.errno not in DISK_ERRORS or error.filename is not None:
            raise
        _silence_output()
        print(f"termgen: error: the output cannot be written: {error.strerror}", file=sys.stderr)
        return USAGE_ERROR
    finally:
        show_typing()


def _silence_output() -> None:
    """Discard buffered output that cannot be written, or the final flush would fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(argv: Sequence[str]) -> int:
    parser = build_parser()
    args = parser.parse_args(argv)
    name = getattr(args, "run", None)
    if name is None:
        args.help_of.print_help()
        return OK
    signal.signal(signal.SIGTERM, _terminate)
    return COMMANDS[name](args)


def _terminate(signum: int, frame: object) -> NoReturn:
    raise SystemExit(TERMINATED)  # unwinds through every `finally`


def _layers(args: argparse.Namespace) -> SettingLayers:
    return SettingLayers(
        flags=vars(args),
        environ=os.environ,
        config_file=Path(args.config) if args.config is not None else None,
    )


# Each command imports inside: torch takes over a second, Textual and Starlette tenths of one.


def chat_command(args: argparse.Namespace) -> int:
    layers = _layers(args)
    # a single user leaves idle moments for the captures, and waits for the start
    plain = args.plain or (not (args.inline or args.web) and _is_dumb_terminal())
    is_screen = not (args.inline or plain)
    config = layers.resolve(EngineConfig, capture_in_background=is_screen)
    ui = layers.resolve(UIConfig)
    if args.url is None and args.api_key is not None:
        raise ConfigError("--api-key needs --url: our own engine has no keys", param="api_key")
    if args.url is None and args.wait is not None:
        raise ConfigError("--wait needs --url: it waits for a server", param="wait")
    if args.inline and args.plain:
        raise ConfigError("--inline and --plain exclude each other", param="plain")
    if args.web:
        return _web_chat(args, layers, config, ui)
    for name in ("web_port", "open"):
        if getattr(args, name):
            raise ConfigError(f"--{name.replace('_', '-')} needs --web", param=name)
    if args.inline:
        return _inline_chat(args, layers, config, ui)
    if args.question is not None:
        what = "a question on the command line needs --inline; a model is named with --model"
        raise ConfigError(what, param="question")
    if plain:
        return _plain_chat(args, layers, config, ui)
    _need_terminal(
        "termgen chat",
        "use `termgen generate` for scripts and pipes, --inline for one question, or --plain for a "
        "chat in lines",
    )
    from termgen.tools.configured import make_toolbox

    wanted = "" if args.continue_last else args.session
    toolbox = make_toolbox(ui, layers.mcp_servers)
    given = {name: getattr(ui, name) for name in CHAT_ONLY if layers.given(name) is not None}
    if args.url is not None:
        from termgen.commands.remote_command import read_target, run_remote_chat

        target = read_target(args.url, args.api_key, layers, wait_s=args.wait)
        return run_remote_chat(target, ui, toolbox, session=wanted, given=given)
    from termgen.commands.chat import run_chat

    share_lock_quickly()
    return run_chat(config, ui, toolbox, session=wanted, given=given)


def _web_chat(
    args: argparse.Namespace, layers: SettingLayers, config: EngineConfig, ui: UIConfig
) -> int:
    from termgen.commands.web_command import run_web

    if args.inline or args.plain or args.question is not None:
        raise ConfigError(
            "--web shows a screen in a browser: leave --inline, --plain and the question out",
            param="web",
        )
    if args.web_port is not None and not 0 <= args.web_port <= 65535:
        raise ConfigError("--web-port must be a port: 0 to 65535", param="web_port")
    target = None
    if args.url is not None:
        from termgen.commands.remote_command import read_target

        target = read_target(args.url, args.api_key, layers, wait_s=args.wait)
    return run_web(args, config, ui, target)


def _inline_chat(
    args: argparse.Namespace, layers: SettingLayers, config: EngineConfig, ui: UIConfig
) -> int:
    from termgen.commands.inline_command import (
        check_flags,
        read_question,
        run_inline,
        run_remote_inline,
    )

    check_flags(layers, "--inline")
    if args.continue_last or args.session is not None:
        raise ConfigError(
            "--inline asks one question and keeps no chat: leave --continue and --session out"
        )
    if args.url is not None:
        from termgen.commands.remote_command import read_target

        target = read_target(args.url, args.api_key, layers, wait_s=args.wait)
        return run_remote_inline(read_question(args.question), target, ui)
    return run_inline(read_question(args.question), config, ui)


def _plain_chat(
    args: argparse.Namespace, layers: SettingLayers, config: EngineConfig, ui: UIConfig
) -> int:
    from termgen.commands.inline_command import (
        check_flags,
        names_set,
        own_engine,
        server_elsewhere,
    )
    from termgen.commands.plain_chat import run_plain
    from termgen.tools.configured import make_toolbox

    check_flags(layers, "--plain")
    if args.continue_last or args.session is not None:
        raise ConfigError("--plain keeps no chat: leave --continue and --session out")
    toolbox = make_toolbox(ui, layers.mcp_servers)
    if args.url is not None:
        from termgen.commands.remote_command import RemoteHolder, read_target

        target = read_target(args.url, args.api_key, layers, wait_s=args.wait)
        sent_names = names_set(ui)
        server = RemoteHolder(target, given=sent_names)
        start, stop = server_elsewhere(server, plain=True)
        return run_plain(start, stop, ui, server, toolbox=toolbox, sent_names=sent_names)
    from termgen.commands.launch import EngineHolder
    from termgen.commands.shelf.local_shelf import LocalShelf

    holder = EngineHolder(config)
    start, stop = own_engine(holder, plain=True)
    return run_plain(start, stop, ui, LocalShelf(holder), toolbox=toolbox)


def acp_command(args: argparse.Namespace) -> int:
    from termgen.commands.acp_command import run_acp

    share_lock_quickly()
    return run_acp(args, _layers(args))


def serve_command(args: argparse.Namespace) -> int:
    layers = _layers(args)
    config, server = layers.resolve(EngineConfig), layers.resolve(ServerConfig)
    ui = layers.resolve(UIConfig)
    if server.dashboard:
        _need_terminal("termgen serve --dashboard", "leave --dashboard out")
    else:
        for f in fields(UIConfig):
            if layers.given(f.name) is not None:
                raise ConfigError(f"{flag_of(f)} needs --dashboard", param=f.name)
    from termgen.commands.launch import run_serve

    share_lock_quickly()
    return run_serve(config, server, ui)


def generate_command(args: argparse.Namespace) -> int:
    from termgen.commands import generate

    layers = _layers(args)
    return generate.run(args, layers, layers.resolve(EngineConfig))


def top_command(args: argparse.Namespace) -> int:
    ui = _layers(args).resolve(UIConfig)
    if args.replay is not None:
        for name in ("url", "record", "admin_key_file", "wait"):
            if getattr(args, name) not in (None, []):
                flag = "URL" if name == "url" else "--" + name.replace("_", "-")
                raise ConfigError(f"--replay FILE needs no {flag}: leave one out", param=name)
    if args.json and not args.once:
        raise ConfigError("--json needs --once", param="json")
    if args.once:
        for name in ("replay", "record"):
            if getattr(args, name) is not None:
                raise ConfigError(f"--once has no use for --{name}: leave one out", param=name)
        from termgen.commands.remote_command import read_key
        from termgen.commands.top_once import run_once

        key = read_key(args.admin_key_file)
        return run_once(args.url, key=key, as_json=args.json, wait_s=args.wait)
    for name in ("record", "wait"):  # several servers are waited for in any case
        if len(args.url) > 1 and getattr(args, name) is not None:
            raise ConfigError(f"--{name} is for one server: leave it out", param=name)
    _need_terminal("termgen top", "use `termgen top --once`, or read a server's /metrics")
    from termgen.commands.top_command import run_fleet, run_replay, run_top

    if args.replay is not None:
        return run_replay(Path(args.replay), ui)
    if len(args.url) > 1:
        return run_fleet(args.url, ui, key_file=args.admin_key_file)
    url = args.url[0] if args.url else None
    return run_top(url, ui, record=args.record, key_file=args.admin_key_file, wait_s=args.wait)


def bench_command(args: argparse.Namespace) -> int:
    layers = _layers(args)
    options_class: type[Any] = {"latency": LatencyOptions, "throughput": ThroughputOptions}[
        args.bench
    ]
    options = layers.resolve(options_class)
    # each batch repeats the same prompts: prefix-cache hits would skip the prefill
    config = layers.resolve(EngineConfig, enable_prefix_caching=False)
    check_seed(config.seed)
    from termgen.commands.launch import run_bench

    return run_bench(args.bench, options, config)


def load_test_command(args: argparse.Namespace) -> int:
    from termgen.commands import bench_command

    is_serve, layers = args.bench == "serve", _layers(args)
    if (layers.resolve(ServeOptions) if is_serve else layers.resolve(SweepOptions)).watch:
        _need_terminal(f"termgen bench {args.bench} --watch", "leave --watch out in scripts")
    return (bench_command.run_serve if is_serve else bench_command.run_sweep)(args, layers)


def compare_command(args: argparse.Namespace) -> int:
    from termgen.commands import bench_command

    return bench_command.run_compare(_layers(args))


def models_command(args: argparse.Namespace) -> int:
    from termgen.commands.models_command import list_models, remove_model

    if args.words[:1] == ["rm"]:
        if len(args.words) != 2 or args.json:
            raise ConfigError("say `termgen models rm NAME`, with one name", param="words")
        return remove_model(args.words[1])
    return list_models(as_json=args.json, words=" ".join(args.words))


def themes_command(args: argparse.Namespace) -> int:
    from termgen.tui.themes import themes_command

    if args.action == "check":
        themes_command.check_theme(args.file)
    elif args.action == "new":
        themes_command.new_theme(args.name, like=args.like)
    else:
        themes_command.list_themes()
    return OK


def keys_command(args: argparse.Namespace) -> int:
    ui = _layers(args).resolve(UIConfig)
    from termgen.tui.app import list_keys

    list_keys(ui)
    return OK


def pull_command(args: argparse.Namespace) -> int:
    from termgen.commands.models_command import pull_model

    return pull_model(args.name)


def tune_command(args: argparse.Namespace) -> int:
    from termgen.commands.tune_command import tune_model

    return tune_model(
        args.model,
        again=args.again,
        in_background=args.background,
        quantization=args.quantization,
    )


def trace_command(args: argparse.Namespace) -> int:
    from termgen.commands.trace_command import run_trace

    return run_trace(Path(args.recording), Path(args.output) if args.output else None)


def _need_terminal(command: str, instead: str) -> None:
    if os.environ.get("TEXTUAL_DRIVER"):
        return  # textual-serve shows the screen in a browser and connects to it by pipes
    # Textual reads standard input and draws on standard error
    if not all(stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr)):
        raise ConfigError(f"`{command}` needs a terminal; {instead}")
    if _is_dumb_terminal():
        raise ConfigError(
            f"`{command}` draws a screen, which this terminal (TERM=dumb) cannot show; {instead}"
        )
    hide_typing()


def _is_dumb_terminal() -> bool:
    return os.environ.get("TERM") == "dumb" and sys.stdin.isatty()


COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "chat": chat_command,
    "acp": acp_command,
    "serve": serve_command,
    "generate": generate_command,
    "top": top_command,
    "bench serve": load_test_command,
    "bench sweep": load_test_command,
    "bench latency": bench_command,
    "bench throughput": bench_command,
    "bench compare": compare_command,
    "models": models_command,
    "pull": pull_command,
    "tune": tune_command,
    "trace": trace_command,
    "themes": themes_command,
    "keys": keys_command,
}
