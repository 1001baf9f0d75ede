"""Sources of settings: flags > TERMGEN_* environment variables > config file > defaults.

Flags, variable names and file keys are generated from the config dataclasses, so an option is
declared once. `SettingLayers` checks everything before anything starts: an unknown key, a wrong
type or a value out of range is a `ConfigError` that names the source and the key. Used by the
command line only; other code gets a finished, frozen config.
"""

from __future__ import annotations

import argparse
import difflib
import logging
import math
import re
import tomllib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any, NoReturn, TypeVar, cast

from termgen.config import EngineConfig, ServerConfig, SettingType, UIConfig, setting_types
from termgen.errors import ConfigError
from termgen.tools.server_config import McpServer, read_servers

SECTIONS: dict[str, type] = {"engine": EngineConfig, "server": ServerConfig, "chat": UIConfig}
"""Tables of the config file. Field names are unique across them, as variables have no table."""

ENV_PREFIX = "TERMGEN_"
OTHER_VARIABLES = ("TERMGEN_CONFIG", "TERMGEN_CACHE")
"""Variables that are not settings: the config file's path and the models' folder."""

_SERVICE_LINK = re.compile(
    r"TERMGEN(_[A-Z0-9_]+)?"
    r"(_SERVICE_HOST|_SERVICE_PORT(_[A-Z0-9_]+)?|_PORT_[0-9]+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)"
)
_PORT_LINK = re.compile(r"TERMGEN(_[A-Z0-9_]+)?_PORT")
_PORT_URL = re.compile(r"(tcp|udp|sctp)://\S+")
"""Value of a service link. Kubernetes and Docker set such variables in containers beside a service
named termgen: `TERMGEN_SERVICE_HOST`, `TERMGEN_PORT=tcp://10.0.0.1:8000`, `TERMGEN_PORT_8000_TCP`.
"""

logger = logging.getLogger("termgen.commands.settings")

C = TypeVar("C")

_BOOLEANS = {
    **dict.fromkeys(("1", "true", "yes", "on"), True),
    **dict.fromkeys(("0", "false", "no", "off"), False),
}


class FlagParser(argparse.ArgumentParser):
    """argparse, except that a mistake raises a one-line `ConfigError`."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **kwargs})

    def parse_known_args(  # type: ignore[override]  # the overloads of argparse say no more
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Refuse unknown flags here, where the subcommand's own flags are known."""
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:
            known = [flag for action in self._actions for flag in action.option_strings]
            name = unknown[0].split("=")[0]
            hint = _suggest(name, known) if name.startswith("--") else ""
            self.error(f"unknown argument {name}{hint}")
        return parsed, unknown

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (see `{self.prog} --help`)")


def add_flags(
    parser: argparse.ArgumentParser,
    config_class: type,
    *,
    title: str,
    omit: Collection[str] = (),
    help_texts: Mapping[str, str] | None = None,
) -> None:
    """Add a flag for each field. An absent flag leaves nothing in the parsed namespace.

    `help_texts`: for dataclasses whose fields are not made with `setting`.
    """
    group = parser.add_argument_group(title)
    kinds = setting_types(config_class, omit=frozenset(omit))
    for f in fields(config_class):
        if f.name not in omit:
            text = f.metadata["help"] if help_texts is None else help_texts[f.name]
            _add_flag(group, f, kinds[f.name], text)


def add_server_flags(parser: argparse.ArgumentParser, verb: str) -> None:
    """Add `--url` and its flags, for a command that otherwise starts its own engine."""
    group = parser.add_argument_group("a server elsewhere")
    group.add_argument(
        "--url",
        metavar="URL",
        help=f"{verb} this OpenAI-compatible server instead of an engine of its own; --model "
        "chooses among its models",
    )
    group.add_argument("--api-key", metavar="KEY", help="its key (default: OPENAI_API_KEY)")
    add_wait_flag(group)


def add_wait_flag(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--wait",
        metavar="SECONDS",
        type=_seconds,
        help="longest wait for a server that does not answer yet or still loads its model "
        "(default: while it loads without limit, otherwise 1 second)",
    )


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number of seconds, 0 or more, not {text!r}")
    return seconds


def flag_of(f: Field[Any]) -> str:
    flag: str = f.metadata.get("flag") or "--" + f.name.replace("_", "-")
    return flag


def _add_flag(group: argparse._ArgumentGroup, f: Field[Any], kind: SettingType, text: str) -> None:
    default = f.default if f.default is not MISSING else None
    if "default" not in text and kind.base is not bool and default not in (None, ()):
        text += f" (default: {default})"
    common: dict[str, Any] = {"dest": f.name, "default": argparse.SUPPRESS}
    common["help"] = text.replace("%", "%%")
    if kind.base is bool:
        group.add_argument(flag_of(f), action=argparse.BooleanOptionalAction, **common)
        return
    common["metavar"] = f.metadata.get("metavar", _metavar(f, kind))
    if f.metadata.get("choices"):
        common["choices"] = f.metadata["choices"]
    if kind.many and "nargs" in f.metadata:
        common |= {"action": "extend", "nargs": f.metadata["nargs"]}
    elif kind.many:
        common["action"] = "append"
    group.add_argument(flag_of(f), type=kind.base, **common)


def _metavar(f: Field[Any], kind: SettingType) -> str:
    if f.metadata.get("choices"):
        return "{" + ",".join(f.metadata["choices"]) + "}"
    return {int: "N", float: "X", str: f.name.split("_")[-1].upper()}[kind.base]


class SettingLayers:
    """The three sources, checked once; `resolve` builds a config."""

    def __init__(
        self,
        *,
        flags: Mapping[str, Any],
        environ: Mapping[str, str],
        config_file: Path | None = None,
    ) -> None:
        self._flags = flags
        self._environ = self._read_environ(environ)
        self._path, data = self._read_file(config_file, environ)
        self._tables = _checked_tables(self._path, data)
        self._servers = read_servers(f"{self._path}", data["mcp"]) if "mcp" in data else ()

    @property
    def mcp_servers(self) -> tuple[McpServer, ...]:
        """The tables `[mcp.NAME]` of the config file."""
        return self._servers

    def given(self, name: str) -> Any:
        """The value of a flag on the command line, or None."""
        return self._flags.get(name)

    def resolve(self, config_class: type[C], **defaults: Any) -> C:
        """Build the config; `defaults` replace those of the dataclass."""
        section = next((k for k, v in SECTIONS.items() if v is config_class), None)
        values, origins = dict(defaults), {}
        for f in fields(cast(Any, config_class)):
            name, variable = f.name, ENV_PREFIX + f.name.upper()
            if section is not None and name in self._tables.get(section, {}):
                values[name] = self._tables[section][name]
                origins[name] = f"{self._path}, [{section}]"
            if section is not None and variable in self._environ:
                values[name] = self._environ[variable]
                origins[name] = variable
            if name in self._flags:
                values[name] = self._flags[name]
                origins[name] = flag_of(f)
        try:
            return config_class(**values)
        except ConfigError as error:
            origin = origins.get(error.param or "")
            if origin is None:
                raise
            raise ConfigError(f"{error} (from {origin})", param=error.param) from None

    @staticmethod
    def _read_environ(environ: Mapping[str, str]) -> dict[str, Any]:
        kinds = {
            ENV_PREFIX + name.upper(): kind
            for config_class in SECTIONS.values()
            for name, kind in setting_types(config_class).items()
        }
        values: dict[str, Any] = {}
        for variable, text in environ.items():
            if not variable.startswith(ENV_PREFIX) or variable in OTHER_VARIABLES or not text:
                continue
            if _is_service_link(variable, text):
                logger.debug("%s is the address of a service, not a setting: ignored", variable)
                continue
            if variable not in kinds:
                hint = _suggest(variable, kinds)
                raise ConfigError(f"unknown environment variable {variable}{hint}", param=variable)
            values[variable] = _parse_text(variable, text, kinds[variable])
        return values

    @staticmethod
    def _read_file(given: Path | None, environ: Mapping[str, str]) -> tuple[Path, dict[str, Any]]:
        asked = given or (Path(p) if (p := environ.get("TERMGEN_CONFIG")) else None)
        path = asked or default_config_path()
        try:
            data = tomllib.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            if asked is not None:
                raise ConfigError(f"config file {path} does not exist") from None
            return path, {}
        except OSError as error:
            raise ConfigError(f"config file {path} cannot be read: {error.strerror}") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"config file {path} is not valid TOML: {error}") from None
        return path, data


def _is_service_link(variable: str, text: str) -> bool:
    """True for a service link; `TERMGEN_PORT` is a setting too and differs by its value."""
    if _SERVICE_LINK.fullmatch(variable):
        return True
    is_url = _PORT_URL.fullmatch(text.strip()) is not None
    return is_url and _PORT_LINK.fullmatch(variable) is not None


def default_config_path() -> Path:
    import platformdirs  # only the command line needs it

    return Path(platformdirs.user_config_dir("termgen")) / "config.toml"


def _checked_tables(path: Path, data: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    tables: dict[str, dict[str, Any]] = {}
    for section, table in data.items():
        if section in ("keys", "mcp"):
            continue
        if section not in SECTIONS or not isinstance(table, dict):
            is_setting = any(_key(section) in setting_types(c) for c in SECTIONS.values())
            homes = [s for s, c in SECTIONS.items() if _key(section) in setting_types(c)]
            hint = f": it belongs under [{homes[0]}]" if is_setting else _suggest(section, SECTIONS)
            raise ConfigError(f"{path}: unknown key {section!r}{hint}", param=section)
        known = setting_types(SECTIONS[section])
        tables[section] = {}
        for raw, value in table.items():
            if _key(raw) not in known:
                hint = _suggest(_key(raw), known)
                raise ConfigError(f"{path}: unknown key {raw!r} in [{section}]{hint}", param=raw)
            tables[section][_key(raw)] = value
    if "keys" in data:
        entries = list(_key_entries(path, data["keys"]))
        tables.setdefault("chat", {}).setdefault("keys", entries)
    return tables


def _key_entries(path: Path, table: object, prefix: str = "") -> Iterator[str]:
    """The table `[keys]` as `ID=KEY` entries; TOML reads a dotted name as nested tables."""
    if not isinstance(table, dict):
        raise ConfigError(f"{path}: [keys] must be a table", param="keys")
    for name, value in table.items():
        if isinstance(value, dict):
            yield from _key_entries(path, value, f"{prefix}{name}.")
            continue
        keys = [value] if isinstance(value, str) else value
        if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
            raise ConfigError(
                f"{path}, [keys]: {prefix}{name} must be a key or a list of keys, in quotes",
                param="keys",
            )
        yield f"{prefix}{name}={' '.join(keys)}"


def _key(raw: str) -> str:
    return raw.replace("-", "_")  # a file may spell keys like flags


def _parse_text(variable: str, text: str, kind: SettingType) -> Any:
    def one(item: str) -> Any:
        if kind.base is bool:
            return _BOOLEANS[item.lower()]
        return kind.base(item)

    try:
        if kind.many:
            return tuple(one(item.strip()) for item in text.split(",") if item.strip())
        return one(text.strip())
    except (ValueError, KeyError):
        raise ConfigError(
            f"{variable} must be {kind.words}, not {text!r}", param=variable
        ) from None


def _suggest(word: str, known: Iterable[str]) -> str:
    close: Sequence[str] = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {close[0]}?" if close else ""
