"""A JSON request body, taken apart field by field with its types checked.

`parse_json` turns bytes into an object; `Fields` hands out typed values and remembers which names
were asked for, so that at the end `finish` can refuse what is known but not supported and name what
is unknown. `null` always means absent, as clients send it. Every fault is a `RequestError`.
"""

from __future__ import annotations

import json
import math
import re
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from termgen.api.errors import invalid_json, unsupported
from termgen.errors import RequestError

MAX_IGNORED_NAMES = 20
MAX_FIELDS = 1000
"""Of one object; no endpoint knows a tenth as many."""
MAX_PLACE = 200
"""Characters of a path in an error, about."""
_HEADER_SAFE = re.compile(r"[A-Za-z0-9_.\-]{1,64}")

Check = Callable[[Any], bool]
"""Says whether a value is harmless: it asks for what would happen anyway."""


def parse_json(
    raw: bytes, what: str = "The request body", *, param: str | None = None
) -> dict[str, Any]:
    """Decode an object. Stricter than `json.loads`: no NaN, infinities or lone surrogates.

    what: how a fault calls it. param: the field it is the text of.
    """
    try:
        value = json.loads(
            raw.decode("utf-8"), parse_constant=_refuse_constant, parse_float=_finite_float
        )
    except RecursionError:
        raise invalid_json(f"{what} is nested too deeply", param) from None
    except ValueError as exc:  # includes JSONDecodeError, UnicodeDecodeError and huge integers
        place = _place_of_unfit_number(raw)
        message = f"{what} is not valid JSON: {exc}" + (f" (in {place})" if place else "")
        raise invalid_json(message, param or place) from None
    if not isinstance(value, dict):
        raise invalid_json(f"{what} must be a JSON object", param)
    if b"\\ud" in raw or b"\\uD" in raw:
        # half of a surrogate pair is legal JSON, but no tokenizer or response can encode it
        try:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError:
            raise invalid_json(f"{what} has half of a surrogate pair in a string", param) from None
        except RecursionError:
            raise invalid_json(f"{what} is nested too deeply", param) from None
    return value


def _place_of_unfit_number(raw: bytes) -> str | None:
    """Path of the first number that `parse_json` refuses, or None where another fault is to blame.

    The path ends before a key that is no plain name. The walk keeps its own stack, because the
    decoder accepts deeper values than a recursive Python function could visit.
    """
    unfit = object()

    def number(read: Callable[[str], Any]) -> Callable[[str], Any]:
        def checked(text: str) -> Any:
            try:
                return read(text)
            except ValueError:
                return unfit

        return checked

    try:
        value = json.loads(
            raw.decode("utf-8"),
            parse_constant=lambda _: unfit,
            parse_float=number(_finite_float),
            parse_int=number(int),
        )
    except (ValueError, RecursionError):
        return None
    # Each entry: a value, its path, and whether the path may still be extended.
    stack: list[tuple[Any, str, bool]] = [(value, "", True)]
    while stack:
        node, path, plain = stack.pop()
        if node is unfit:
            return path or None
        if isinstance(node, dict):
            for key, child in reversed(node.items()):
                named = plain and bool(_HEADER_SAFE.fullmatch(key))
                dot = "." if path else ""
                # A long path would copy itself at each level of a deep value.
                longer = named and len(path) < MAX_PLACE
                stack.append((child, f"{path}{dot}{key}" if longer else path, longer))
        elif isinstance(node, list):
            longer = plain and len(path) < MAX_PLACE
            for index in reversed(range(len(node))):
                stack.append((node[index], f"{path}[{index}]" if longer else path, longer))
    return None


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _finite_float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:40]} is out of range")
    return value


def is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    """A finite number that fits a float; `true` is not one."""
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**1000


def wrong_type(name: str, wanted: str, value: object) -> RequestError:
    # reprlib: what clients send may be megabytes long or nested to the recursion limit
    shown = reprlib.repr(value)
    shown = shown if len(shown) <= 60 else shown[:57] + "..."
    return RequestError(f"{name} must be {wanted}, not {shown}", param=name)


def check_depth(name: str, value: object, limit: int = 32) -> None:
    """Refuse values so deep that a template or a JSON writer would run out of stack."""
    level = [value]
    for _ in range(limit):
        children: list[object] = []
        for item in level:
            if isinstance(item, dict):
                children.extend(item.values())
            elif isinstance(item, list):
                children.extend(item)
        if not children:
            return
        level = children
    raise RequestError(f"{name} is nested more than {limit} levels deep", param=name)


@dataclass(frozen=True, slots=True)
class Instead:
    """A check of a field that another program has and that has another name here."""

    word: str
    """What is to be said instead."""
    is_harmless: Check | None = None
    """None: a value that is false, 0 or empty asks for nothing."""

    def __call__(self, value: Any) -> bool:
        return not value if self.is_harmless is None else self.is_harmless(value)


class Fields:
    """Typed access to one JSON object; `where` prefixes names in messages (`messages[2].`)."""

    __slots__ = ("_children", "_data", "_seen", "_where")

    def __init__(self, data: Mapping[str, Any], where: str = "") -> None:
        if len(data) > MAX_FIELDS:
            what = where.rstrip(".") or "The request body"
            raise RequestError(
                f"{what} has more than {MAX_FIELDS} fields", param=where.rstrip(".") or None
            )
        self._data = data
        self._seen: set[str] = set()
        self._children: list[tuple[str, Fields]] = []
        self._where = where

    def take(self, name: str) -> Any:
        """The raw value, None if absent or null; the field then counts as handled."""
        self._seen.add(name)
        return self._data.get(name)

    def string(self, name: str) -> str | None:
        value = self.take(name)
        if value is not None and not isinstance(value, str):
            raise wrong_type(self._where + name, "a string", value)
        return value

    def boolean(self, name: str, default: bool = False) -> bool:
        value = self.take(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise wrong_type(self._where + name, "true or false", value)
        return value

    def integer(self, name: str, *, low: int, high: int) -> int | None:
        value = self.take(name)
        if value is None:
            return None
        if not is_int(value):
            raise wrong_type(self._where + name, "an integer", value)
        if not low <= value <= high:
            raise wrong_type(self._where + name, f"between {low} and {high}", value)
        return int(value)

    def number(self, name: str) -> float | int | None:
        """A finite number; its range is for the caller to check."""
        value = self.take(name)
        if value is None:
            return None
        if not is_number(value):
            raise wrong_type(self._where + name, "a finite number", value)
        assert isinstance(value, (int, float))
        return value

    def object(self, name: str) -> Fields | None:
        value = self.take(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise wrong_type(self._where + name, "an object", value)
        child = Fields(value, f"{self._where}{name}.")
        self._children.append((name, child))
        return child

    def token_ids(self, name: str) -> tuple[int, ...] | None:
        value = self.take(name)
        if value is None:
            return None
        if not isinstance(value, list) or not all(is_int(token) for token in value):
            raise wrong_type(self._where + name, "a list of integers", value)
        return tuple(value)

    def strings(self, name: str) -> tuple[str, ...]:
        """A string or a list of them; () if absent."""
        value = self.take(name)
        if value is None or isinstance(value, str):
            return () if value is None else (value,)
        if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
            raise wrong_type(self._where + name, "a string or a list of strings", value)
        return tuple(value)

    def finish(self, *, harmless: frozenset[str], refused: Mapping[str, Check]) -> tuple[str, ...]:
        """Refuse fields in `refused` unless their value changes nothing; return unknown names,
        those inside objects too."""
        unknown = []
        for name, value in self._data.items():
            if name in self._seen or name in harmless:
                continue
            if name not in refused:
                unknown.append(name)
            elif value is not None and not refused[name](value):
                raise unsupported(name, instead_of(name, refused[name]))
        for name, child in self._children:
            names = child.finish(harmless=frozenset(), refused={})
            unknown += [f"{name}.{inner}" for inner in names]
        return tuple(unknown)


def instead_of(name: str, check: Check, names: Mapping[str, str] | None = None) -> str | None:
    """What is said of a field that is called otherwise here. names: of the endpoint's own."""
    if not isinstance(check, Instead):
        return None
    word = (names or {}).get(check.word, check.word)
    return f"{name} is not a field of this server; use {word}"


def ignored_header(names: tuple[str, ...]) -> str:
    """Value of `x-termgen-ignored`: only what is safe in a header, and not too much of it."""
    safe = [name for name in names if _HEADER_SAFE.fullmatch(name)][:MAX_IGNORED_NAMES]
    hidden = len(names) - len(safe)
    return ", ".join([*safe, f"+{hidden}"] if hidden else safe)


# Values that ask for nothing, for the `refused` tables.


def never(value: Any) -> bool:
    return False


def is_empty(value: Any) -> bool:
    """false, 0, "", [] or {}."""
    return not value


def is_true(value: Any) -> bool:
    return value is True


def one_of(*values: Any) -> Check:
    def check(value: Any) -> bool:
        return value in values

    return check
