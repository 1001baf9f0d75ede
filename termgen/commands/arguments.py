"""The command line's flags: what `termgen --help` and each command's `--help` list.

Flags of settings are generated from the fields of the config classes. `args.run` names the chosen
command, which `cli` runs.
"""

from __future__ import annotations

import argparse
from dataclasses import fields
from typing import Any

import termgen
from termgen.bench.options import (
    CompareOptions,
    LatencyOptions,
    ServeOptions,
    SweepOptions,
    ThroughputOptions,
)
from termgen.commands.generate import add_generate_flags
from termgen.commands.settings import FlagParser, add_flags, add_server_flags, add_wait_flag
from termgen.config import QUANTIZATIONS, EngineConfig, ServerConfig, UIConfig

DESCRIPTION = "Chat with, serve and watch a local language model."
EPILOG = """\
settings come from flags, then TERMGEN_* variables (TERMGEN_MAX_MODEL_LEN=4096), then the config
file ([engine], [server] and [chat] tables with the same names; [keys]), then defaults.
"""
POSITIONAL = {"chat": " [--plain | --inline question]", "generate": " [prompt]", "top": " [URL]"}

CHAT_ONLY = (
    "system_prompt",
    "temperature",
    "top_p",
    "max_tokens",
    "chat_db",
    "context_policy",
    "titles",
    "beside",
    "tools",
)
"""Chat settings that `serve` has no flags for, as requests bring their own."""

SCREEN_ONLY = ("theme", "dashboard_hz", "alert", "alert_bell", "keys")
"""Settings of screens, which `acp` has no flags for."""


def build_parser() -> FlagParser:
    parser = FlagParser(
        prog="termgen",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"termgen {termgen.__version__}")
    parser.set_defaults(help_of=parser)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")

    chat = _command(commands, "chat", "chat with a model in the terminal")
    _add_chat_flags(chat)
    add_flags(chat, UIConfig, title="chat")
    chosen = chat.add_argument_group("earlier chats").add_mutually_exclusive_group()
    chosen.add_argument(
        "--continue", dest="continue_last", action="store_true", help="go on with the last chat"
    )
    chosen.add_argument(
        "--session", metavar="ID|TITLE", help="go on with this chat (its title may be shortened)"
    )
    _add_engine_flags(chat)

    acp = _command(commands, "acp", "answer an editor, as an agent of the Agent Client Protocol")
    add_server_flags(acp, "answer with")
    add_flags(acp, UIConfig, title="chat", omit=SCREEN_ONLY)
    _add_engine_flags(acp)

    serve = _command(commands, "serve", "serve a model over HTTP, as OpenAI's API")
    add_flags(serve, ServerConfig, title="server")
    add_flags(serve, UIConfig, title="dashboard", omit=CHAT_ONLY)
    _add_engine_flags(serve)

    generate = _command(commands, "generate", "answer one prompt, for scripts")
    add_generate_flags(generate)
    _add_engine_flags(generate)

    _add_top(commands)
    _add_bench(commands)

    text = "list known models and those on disk"
    models = commands.add_parser("models", help=text, description=text)
    models.add_argument(
        "words",
        nargs="*",
        metavar="WORD",
        help="only those with these words, such as q4 or qwen; `rm NAME` deletes a fetched one",
    )
    models.add_argument("--json", action="store_true", help="print JSON")
    models.set_defaults(run="models")

    _add_themes(commands)
    _add_keys(commands)

    pull = commands.add_parser("pull", help="fetch a model", description="fetch a model")
    pull.add_argument(
        "name", help="name from `termgen models`, a hub id such as org/name, or org/name:Q4_K_M"
    )
    pull.set_defaults(run="pull")

    _add_tune(commands)
    _add_trace(commands)
    return parser


def _add_trace(commands: Any) -> None:
    text = "write a recording of `termgen top --record` as a trace, which Perfetto opens"
    trace = commands.add_parser("trace", help=text, description=text)
    trace.add_argument("recording", metavar="FILE", help="the recording")
    trace.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        help="the trace, gzipped JSON (default: beside the recording, as NAME.trace.json.gz)",
    )
    trace.set_defaults(run="trace")


def _add_tune(commands: Any) -> None:
    text = "measure which kernels multiply fastest for a model on this GPU, for all later starts"
    tune = commands.add_parser("tune", help=text, description=text)
    tune.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="name from `termgen models`, hub id, folder or .gguf file (default: smollm2-135m)",
    )
    tune.add_argument(
        "--again", action="store_true", help="measure also what has been measured before"
    )
    tune.add_argument(
        "--quantization",
        choices=QUANTIZATIONS,
        default="auto",
        help="the setting with which the model is to run (default: auto)",
    )
    tune.add_argument("--background", action="store_true", help=argparse.SUPPRESS)
    tune.set_defaults(run="tune")


def _command(commands: Any, name: str, text: str, *, group: str = "") -> FlagParser:
    usage = f"%(prog)s [options]{POSITIONAL.get(name, '')}"
    parser: FlagParser = commands.add_parser(name, help=text, description=text, usage=usage)
    parser.add_argument(
        "--config", metavar="FILE", help="config file (default: config.toml in the user's folder)"
    )
    parser.set_defaults(run=f"{group} {name}".strip())
    return parser


def _add_engine_flags(parser: argparse.ArgumentParser) -> None:
    add_flags(parser, EngineConfig, title="model and engine")


def _add_chat_flags(chat: argparse.ArgumentParser) -> None:
    chat.add_argument("question", nargs="?", help=argparse.SUPPRESS)
    chat.add_argument(
        "--inline",
        action="store_true",
        help="answer one question here, without a screen; what is piped in goes with it",
    )
    chat.add_argument(
        "--plain",
        action="store_true",
        help="chat in lines of plain text, without a screen, colours or cursor movements: for "
        "screen readers and terminals that cannot draw (chosen by itself if TERM is dumb)",
    )
    chat.add_argument(
        "--web",
        action="store_true",
        help="chat in a browser of this machine: print the address of a page that only its holder "
        "can open",
    )
    chat.add_argument(
        "--web-port", type=int, metavar="PORT", help="port of that page (default: 8001; 0: any)"
    )
    chat.add_argument("--open", action="store_true", help="open that page in the browser")
    add_server_flags(chat, "chat with")


def _add_top(commands: Any) -> None:
    top = _command(commands, "top", "watch a running server, or a recording of one")
    top.add_argument(
        "url",
        nargs="*",
        metavar="URL",
        help="the server, or several on one screen (default: http://127.0.0.1:8000)",
    )
    top.add_argument(
        "--once", action="store_true", help="print the figures of the last second, and end"
    )
    top.add_argument("--json", action="store_true", help="with --once: print them as JSON")
    group = top.add_argument_group("recordings and access")
    group.add_argument("--record", metavar="FILE", help="write all events to a file as they come")
    group.add_argument("--replay", metavar="FILE", help="show such a file instead of a server")
    group.add_argument(
        "--admin-key-file",
        metavar="FILE",
        help="file whose first line is the server's admin key (default: TERMGEN_ADMIN_KEY)",
    )
    add_wait_flag(group)
    add_flags(top, UIConfig, title="dashboard", omit=CHAT_ONLY)


def _add_bench(commands: Any) -> None:
    text = "measure speed"
    bench = commands.add_parser("bench", help=text, description=text)
    bench.set_defaults(help_of=bench)
    kinds = bench.add_subparsers(title="benches", metavar="BENCH")
    for name, options in (
        ("serve", ServeOptions),
        ("sweep", SweepOptions),
        ("latency", LatencyOptions),
        ("throughput", ThroughputOptions),
    ):
        text = (options.__doc__ or "").strip().removesuffix(".")
        text = text[:1].lower() + text[1:]
        parser = _command(kinds, name, text, group="bench")
        parser.set_defaults(bench=name)
        add_flags(parser, options, title=name)
        _add_engine_flags(parser)
    text = "compare two result files, with intervals"
    compare = kinds.add_parser("compare", help=text, description=text)
    compare.add_argument("before", metavar="A", help="result file to compare with")
    compare.add_argument("after", metavar="B", help="result file to judge")
    add_flags(compare, CompareOptions, title="compare", omit=("before", "after"))
    compare.set_defaults(run="bench compare", config=None)


def _add_themes(commands: Any) -> None:
    text = "list, check and begin colour themes"
    themes = commands.add_parser("themes", help=text, description=text)
    themes.set_defaults(run="themes", action="list")
    actions = themes.add_subparsers(title="actions", metavar="ACTION")
    text = "say what is wrong with a theme file, and what is hard to read"
    check = actions.add_parser("check", help=text, description=text)
    check.add_argument("file", metavar="FILE")
    check.set_defaults(action="check")
    text = "write a commented theme file into your config folder"
    new = actions.add_parser("new", help=text, description=text)
    new.add_argument("name", metavar="NAME")
    new.add_argument(
        "--like", metavar="THEME", default="termgen-dark", help="colours to begin with"
    )
    new.set_defaults(action="new")


def _add_keys(commands: Any) -> None:
    keys = _command(commands, "keys", "list every action of the screens and its keys")
    omit = [f.name for f in fields(UIConfig) if f.name != "keys"]
    add_flags(keys, UIConfig, title="keys", omit=omit)
