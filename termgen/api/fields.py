"""JSON request bodies: parsed, checked against a declaration, and searched for unknown names.

`parse_json` turns bytes into an object. A body is declared as one or two `msgspec.Struct` classes,
whose annotations hold a field's type, its limits and its documentation; `read` converts the object
to such a class, and `openapi` and `document` describe it. `Endpoint` adds the names that are
accepted without effect or refused. `null` means absent. Every fault is a `RequestError`.
"""

from __future__ import annotations

import enum
import functools
import json
import math
import re
import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import get_annotations
from typing import Any, NoReturn, TypeVar, get_type_hints

import msgspec
from msgspec import inspect

from termgen.api.errors import invalid_json, model_not_found, unsupported
from termgen.client import ModelInfo
from termgen.errors import RequestError
from termgen.vocabulary.device.pooling import PoolingInfo
from termgen.vocabulary.tool_format import ToolFormat

MAX_IGNORED_NAMES = 20
MAX_FIELDS = 1000
"""Limit for one object; no endpoint knows a tenth as many."""
MAX_PLACE = 200
"""Approximate limit for the characters of a path in an error."""
_HEADER_SAFE = re.compile(r"[A-Za-z0-9_.\-]{1,64}")

Check = Callable[[Any], bool]
"""True for a harmless value: one that asks for what would happen anyway."""

T = TypeVar("T", bound=msgspec.Struct)
R = TypeVar("R")

_WORDS: Mapping[type[inspect.Type], str] = {
    inspect.BoolType: "true or false",
    inspect.StrType: "a string",
    inspect.IntType: "an integer",
    inspect.FloatType: "a finite number",
    inspect.ListType: "a list",
}


def parse_json(
    raw: bytes, what: str = "The request body", *, param: str | None = None
) -> dict[str, Any]:
    """Decode an object. Stricter than `json.loads`: no NaN, infinities or lone surrogates.

    what: the name of the text in errors. param: the field that holds it.
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
    """Path of the first number that `parse_json` refuses, or None where another fault is the cause.

    The path ends before a key that is not a plain name. The walk keeps its own stack, because the
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


# -- declarations --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Doc:
    """A row of docs/api.md. The texts are Markdown, each of one line."""

    group: Group
    meaning: str
    values: str | None
    """None: those of the type."""
    default: str | None
    """None: the declared one."""
    origin: str
    """OpenAI, vLLM (whose clients send such fields in `extra_body`), another API, or termgen."""


class Group(enum.Enum):
    """Tables of docs/api.md. Calling one documents a field, in its annotation."""

    PROMPT = "The prompt"
    LENGTH = "Length and stop conditions"
    SAMPLING = "How tokens are sampled"
    FORM = "Structured output and tools"
    ANSWER = "Contents of the answer"
    ENGINE = "How the engine treats the request"

    def __call__(
        self,
        meaning: str,
        values: str | None = None,
        default: str | None = None,
        origin: str = "OpenAI",
    ) -> msgspec.Meta:
        return msgspec.Meta(extra={"doc": Doc(self, meaning, values, default, origin)})


PROMPT, LENGTH, SAMPLING, FORM, ANSWER, ENGINE = Group


def wanted(text: str) -> msgspec.Meta:
    """Words of the error for a value of another type, where those of the type do not do."""
    return msgspec.Meta(extra={"wanted": text})


@dataclass(frozen=True, slots=True)
class Declared:
    """One field of a struct, as its annotation declares it."""

    hint: Any
    default: Any
    """`msgspec.NODEFAULT` for a field that must be given."""
    types: tuple[inspect.Type, ...]
    """The types it may have, None aside."""
    wanted: str | None
    doc: Doc | None

    @property
    def is_required(self) -> bool:
        return self.default is msgspec.NODEFAULT

    @property
    def bounds(self) -> tuple[int | None, int | None] | None:
        """Limits of an integer."""
        return next(((t.ge, t.le) for t in self.types if isinstance(t, inspect.IntType)), None)

    @property
    def struct(self) -> type[msgspec.Struct] | None:
        """The declaration of a nested object."""
        return next((t.cls for t in self.types if isinstance(t, inspect.StructType)), None)

    def fault(self, name: str, value: object) -> RequestError:
        if self.wanted is None and value is None:
            return RequestError(f"{name} must be given", param=name)
        if self.bounds is not None and is_int(value):
            return wrong_type(name, "between {} and {}".format(*self.bounds), value)
        return wrong_type(name, self.wanted or " or ".join(map(_words_for, self.types)), value)


@functools.cache
def declared(kind: type[msgspec.Struct]) -> Mapping[str, Declared]:
    """The fields of a struct by name: its own in the order of their declaration, then inherited
    ones."""
    hints = get_type_hints(kind, include_extras=True)
    info = inspect.type_info(kind)
    assert isinstance(info, inspect.StructType)
    found = {}
    for f in info.fields:
        extra: Mapping[str, Any] = getattr(f.type, "extra", None) or {}
        type = f.type.type if isinstance(f.type, inspect.Metadata) else f.type
        types = type.types if isinstance(type, inspect.UnionType) else (type,)
        types = tuple(t for t in types if not isinstance(t, inspect.NoneType))
        default = f.default if f.required or f.default is not msgspec.NODEFAULT else []
        found[f.name] = Declared(
            hints[f.name], default, types, extra.get("wanted"), extra.get("doc")
        )
    names = dict.fromkeys(name for base in kind.__mro__ for name in get_annotations(base))
    return {name: found[name] for name in names if name in found}


def _words_for(type: inspect.Type) -> str:
    """Words of the error for a value that is not of this type."""
    items = type.item_type if isinstance(type, inspect.ListType) else None
    if isinstance(items, inspect.IntType):
        return "a list of integers"
    if isinstance(items, inspect.StrType):
        return "a list of strings"
    return _WORDS.get(type.__class__, "an object")


# -- reading -------------------------------------------------------------------------------


def read(kind: type[T], data: Mapping[str, Any], where: str = "") -> T:
    """The fields of an object that `kind` declares. where: prefix of names in errors
    (`messages[2].`)."""
    given = _given(kind, data, where)
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError:
        raise _first_fault(kind, given, where) from None


def _given(kind: type[msgspec.Struct], data: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The object without its nulls, nested ones included."""
    if len(data) > MAX_FIELDS:
        what = where.rstrip(".")
        raise RequestError(
            f"{what or 'The request body'} has more than {MAX_FIELDS} fields", param=what or None
        )
    given = dict(data)
    if None in data.values():
        given = {name: value for name, value in data.items() if value is not None}
    for name, struct in _nested(kind):
        if isinstance(value := given.get(name), dict):
            given[name] = _given(struct, value, f"{where}{name}.")
    return given


@functools.cache
def _nested(kind: type[msgspec.Struct]) -> tuple[tuple[str, type[msgspec.Struct]], ...]:
    found = ((name, field.struct) for name, field in declared(kind).items())
    return tuple((name, struct) for name, struct in found if struct is not None)


def _first_fault(kind: type[msgspec.Struct], given: Mapping[str, Any], where: str) -> RequestError:
    """The error for the first field, in the order of the declaration, that does not fit."""
    for name, field_ in declared(kind).items():
        value = given.get(name)
        if value is None:
            if field_.is_required:
                return field_.fault(where + name, None)
            continue
        try:
            msgspec.convert(value, field_.hint)
        except msgspec.ValidationError:
            if field_.struct is not None and isinstance(value, dict):
                return _first_fault(field_.struct, value, f"{where}{name}.")
            return field_.fault(where + name, value)
    raise AssertionError(f"{kind.__name__} is refused as a whole and field by field is not")


def strings(value: str | list[str]) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value)


# -- the model -----------------------------------------------------------------------------


def served_names(info: ModelInfo, configured: Sequence[str]) -> tuple[str, ...]:
    """The names that requests may use; the first one is in the answers to requests without a
    name."""
    return tuple(configured) or (info.model_id,)


def resolve_model(value: object, names: Sequence[str]) -> str:
    """The model's name for the answer. Requests may leave it out: the first one is meant."""
    if value is None:
        return names[0]
    if not isinstance(value, str):
        raise wrong_type("model", "a string", value)
    if value not in names:
        raise model_not_found(value)
    return value


@dataclass(frozen=True, slots=True)
class Served:
    """What a parser needs to know of the model that a body asks for, and of the server's settings.
    Can be pickled."""

    model: str
    """The model's name for the answer."""
    defaults: Mapping[str, Any]
    """The model's own sampling."""
    tool_format: ToolFormat
    trusts_template: bool
    refuses_images: bool
    force_include_usage: bool
    max_model_len: int
    has_chat_template: bool
    pooling: PoolingInfo = PoolingInfo()
    """How the model's vectors are made."""

    @property
    def answering(self) -> dict[str, Any]:
        """Arguments of a parser whose answer is generated."""
        return {"model": self.model, "defaults": self.defaults}

    @property
    def conversing(self) -> dict[str, Any]:
        """Arguments of a parser that takes a conversation."""
        return {
            "tool_format": self.tool_format,
            "trusts_template": self.trusts_template,
            "refuses_images": self.refuses_images,
        }


def parse_for_model(
    models: Mapping[str, Served],
    resolve: Callable[[object, Sequence[str]], str],
    parse: Callable[[Served, Mapping[str, Any]], R],
    data: Mapping[str, Any],
) -> tuple[str, R]:
    """The name of the model that a body asks for, and the body, parsed for it. models: those that
    are served, by name."""
    name = resolve(data.get("model"), tuple(models))
    return name, parse(models[name], data)


# -- names that are not declared -----------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Instead:
    """Check for a field of another program that has another name here."""

    word: str
    """The name to use here."""
    is_harmless: Check | None = None
    """None: a value that is false, 0 or empty asks for nothing."""

    def __call__(self, value: Any) -> bool:
        return not value if self.is_harmless is None else self.is_harmless(value)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The body of one endpoint: its declared fields, and the names that have no effect."""

    structs: tuple[type[msgspec.Struct], ...]
    harmless: frozenset[str] = frozenset()
    """Accepted and ignored."""
    refused: Mapping[str, Check] = field(default_factory=dict)
    """Refused, unless the check finds the value harmless."""

    @property
    def fields(self) -> dict[str, Declared]:
        return {name: d for struct in self.structs for name, d in declared(struct).items()}

    def unknown(self, data: Mapping[str, Any]) -> tuple[str, ...]:
        """Names in a body that are not declared, those in nested objects included. Raises
        RequestError for a refused field."""
        known, unknown = _names(self.structs), []
        for name, value in data.items():
            if name in known or name in self.harmless:
                continue
            check = self.refused.get(name)
            if check is None:
                unknown.append(name)
            elif value is not None and not check(value):
                raise unsupported(name, instead_of(name, check))
        for struct in self.structs:
            unknown += _unknown_inside(struct, data)
        return tuple(unknown)


@functools.cache
def _names(structs: tuple[type[msgspec.Struct], ...]) -> frozenset[str]:
    return frozenset(name for struct in structs for name in declared(struct))


def _unknown_inside(struct: type[msgspec.Struct], data: Mapping[str, Any]) -> Iterator[str]:
    for name, inner in _nested(struct):
        value = data.get(name)
        if isinstance(value, dict):
            yield from (f"{name}.{key}" for key in value if key not in declared(inner))
            yield from (f"{name}.{found}" for found in _unknown_inside(inner, value))


def instead_of(name: str, check: Check, names: Mapping[str, str] | None = None) -> str | None:
    """Error text for a field that has another name here. names: the endpoint's own names."""
    if not isinstance(check, Instead):
        return None
    word = (names or {}).get(check.word, check.word)
    return f"{name} is not a field of this server; use {word}"


def ignored_header(names: tuple[str, ...]) -> str:
    """Value of `x-termgen-ignored`: the names that are safe in a header, and not too many."""
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
