"""Flags of `termgen generate` for what an answer must look like."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from termgen.errors import ConfigError, RequestError
from termgen.vocabulary.structured_outputs import StructuredOutputsParams

KINDS = {
    "json_schema": "json",
    "json_object": "json_object",
    "regex": "regex",
    "choice": "choice",
    "grammar": "grammar",
}
"""Flag -> the field of `StructuredOutputsParams`."""


def add_format_flags(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """The group is returned for what else says which tokens may be written."""
    form = parser.add_argument_group("form of the answer (one of these at most, and --logit-bias)")
    group = form.add_mutually_exclusive_group()
    suppress = argparse.SUPPRESS
    group.add_argument(
        "--json-schema",
        metavar="FILE.json",
        default=suppress,
        help="answer with JSON that this JSON schema accepts",
    )
    group.add_argument(
        "--json-object",
        action="store_true",
        default=suppress,
        help="answer with a JSON object",
    )
    group.add_argument(
        "--regex",
        metavar="TEXT",
        default=suppress,
        help="answer with text that this regular expression matches as a whole",
    )
    group.add_argument(
        "--choice",
        metavar="TEXT",
        action="append",
        default=suppress,
        help="answer with this text; repeat the flag to name several, of which the model takes one",
    )
    group.add_argument(
        "--grammar",
        metavar="FILE",
        default=suppress,
        help="answer with text of this grammar, in Lark's or llama.cpp's (GBNF) notation",
    )
    return form


def read_format(flags: Mapping[str, Any]) -> StructuredOutputsParams | None:
    """From the flags that were given. Raises ConfigError naming the flag."""
    name = next((name for name in KINDS if flags.get(name) is not None), None)
    if name is None:
        return None
    flag, value = "--" + name.replace("_", "-"), flags[name]
    if name in ("json_schema", "grammar"):
        try:
            value = Path(value).read_text(encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{flag} {value}: {error.strerror}") from None
        except UnicodeDecodeError:
            raise ConfigError(f"{flag} {value}: not UTF-8 text") from None
    try:
        return StructuredOutputsParams(**{KINDS[name]: value}, param=flag)
    except RequestError as error:
        raise ConfigError(str(error)) from None
