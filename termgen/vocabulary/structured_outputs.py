"""Structured outputs of a request: JSON, a regular expression, a choice or a grammar.

Vocabulary, part of `SamplingParams`. Names follow vLLM. Checks here need no grammar engine: that
one kind is given, and that it is small enough to be compiled in reasonable time.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Any, cast

from termgen.errors import RequestError

MAX_TEXT_BYTES = 65_536
"""Size limit of a schema, a regular expression, all choices together or a grammar."""
MAX_GBNF_BYTES = 8_192
"""Size limit of GBNF, whose conversion to Lark in Python takes seconds for more."""
MAX_SCHEMA_DEPTH = 64
MAX_SCHEMA_PROPERTIES = 1000
MAX_ENUM_VALUES = 5000

_JSON_IN_LARK = re.compile(r"%json\s*(?=\{)")
_LARK_LINE = re.compile(r"%llguidance\b|start\s*:(?!:=)")

MAX_WHOLE_FLOAT = 2**53
"""The largest integer up to which 64-bit floats hold every one."""
MAX_INT64 = 2**63 - 1
MAX_MULTIPLE = (2**32 - 10) // 10
"""Largest `multipleOf` without its decimal point: ten times this plus a digit fits in 32 bits."""
_BOUNDS = {"minimum": -1, "exclusiveMinimum": -1, "maximum": 1, "exclusiveMaximum": 1}
"""Keyword -> sign of the rounding error that would permit values outside the schema."""

KINDS = ("json", "json_object", "regex", "choice", "grammar")


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsParams:
    """Exactly one constraint that the answer must satisfy. Raises `RequestError`."""

    json: str | Mapping[str, Any] | None = None
    """A JSON schema, as text or as an object; stored as text."""
    json_object: bool = False
    """Any JSON object."""
    regex: str | None = None
    """Rust regex syntax: no look-around, no back-references. The whole answer must match."""
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    """A grammar in llguidance's dialect of Lark, or in GBNF (with `::=`)."""
    param: str = "structured_outputs"
    """The request field that errors name."""
    is_own_grammar: bool = False
    """termgen generated the grammar, as for tool calls; only schemas in it come from a client."""
    strict: bool = True
    """Refuse a schema that no grammar enforces in full. False: enforce what can be, and check the
    finished answer against all of it."""

    def __post_init__(self) -> None:
        given = [kind for kind in KINDS if getattr(self, kind) not in (None, False)]
        if len(given) != 1:
            raise self._fault(
                f"give exactly one of {', '.join(KINDS)}, not " + (" and ".join(given) or "none")
            )
        if self.json is not None:
            object.__setattr__(self, "json", self._schema_text(self.json))
        if self.choice is not None:
            object.__setattr__(self, "choice", self._choices(self.choice))
        for name in ("json_object", "strict"):
            if not isinstance(getattr(self, name), bool):
                raise self._fault(f"{name} must be true or false")
        for kind in ("regex", "grammar"):
            text = getattr(self, kind)
            if text is not None:
                if not isinstance(text, str) or not text:
                    raise self._fault(f"{kind} must be a text that is not empty")
                self._check_size(text, kind)
        if self.grammar is not None and is_gbnf(self.grammar):
            self._check_size(self.grammar, "the GBNF grammar", MAX_GBNF_BYTES)
        elif self.grammar is not None:
            for schema in _schemas_in(self.grammar):
                _check_schema(schema, self._fault)

    @property
    def kind(self) -> str:
        """The one that is given."""
        return next(kind for kind in KINDS if getattr(self, kind) not in (None, False))

    @property
    def value(self) -> str | tuple[str, ...] | bool:
        """The constraint itself."""
        found: str | tuple[str, ...] | bool = getattr(self, self.kind)
        return found

    def _schema_text(self, schema: object) -> str:
        if isinstance(schema, str):
            self._check_size(schema, "the schema")  # before it is parsed
            try:
                schema = json.loads(schema)
            except (ValueError, RecursionError):
                raise self._fault("the schema is not valid JSON") from None
        if not isinstance(schema, Mapping):
            raise self._fault("the schema must be a JSON object")
        if is_longer(schema, MAX_TEXT_BYTES):
            raise self._fault(f"the schema has more than {MAX_TEXT_BYTES} bytes")
        _check_schema(schema, self._fault)
        try:
            text = json.dumps(schema, ensure_ascii=False, separators=(",", ":"))
        except (TypeError, ValueError, RecursionError):
            raise self._fault("the schema is not JSON data") from None
        self._check_size(text, "the schema")
        return text

    def _choices(self, choices: object) -> tuple[str, ...]:
        if isinstance(choices, str) or not isinstance(choices, Sequence) or not choices:
            raise self._fault("choice must be a list of texts that is not empty")
        if not all(isinstance(c, str) and c for c in choices):
            raise self._fault("each choice must be a text that is not empty")
        if len(choices) > MAX_ENUM_VALUES:
            raise self._fault(f"at most {MAX_ENUM_VALUES} choices are allowed")
        self._check_size("".join(cast(Sequence[str], choices)), "choice")
        return tuple(cast(Sequence[str], choices))

    def _check_size(self, text: str, what: str, most: int = MAX_TEXT_BYTES) -> None:
        try:
            size = len(text.encode())
        except UnicodeEncodeError:
            raise self._fault(f"{what} contains an unpaired surrogate") from None
        if size > most:
            raise self._fault(f"{what} has {size} bytes; at most {most} are allowed")

    def _fault(self, message: str) -> RequestError:
        return RequestError(f"{self.param}: {message}", param=self.param, code="invalid_schema")


def is_longer(value: Any, most: int) -> bool:
    """True if JSON data is certainly longer than `most` as text; does not serialise all of it."""
    size = 0
    rest = [value]
    while rest and size <= most:
        item = rest.pop()
        if isinstance(item, str):
            size += len(item) + 2
        elif isinstance(item, (Mapping, list, tuple)):
            size += len(item) + 1
            if size <= most:
                rest.extend(item)
                rest.extend(item.values() if isinstance(item, Mapping) else ())
        else:
            size += 1
    return size > most


def is_gbnf(grammar: str) -> bool:
    """True if rules use `::=`, and none is Lark's `start:`."""
    if "::=" not in grammar:
        return False
    return not any(_LARK_LINE.match(line.lstrip()) for line in grammar.splitlines())


def _schemas_in(lark: str) -> Iterator[Any]:
    """The JSON schemas inside a grammar. Invalid JSON is left to llguidance."""
    for found in _JSON_IN_LARK.finditer(lark):
        try:
            yield json.JSONDecoder().raw_decode(lark, found.end())[0]
        except (ValueError, RecursionError):
            continue


def _check_schema(schema: Any, fault: Any) -> None:
    """Check the limits level by level, so that a hostile depth uses no stack."""
    num_properties = num_values = 0
    numbers = _Numbers(fault)
    level = [schema]
    for _ in range(MAX_SCHEMA_DEPTH):
        below: list[Any] = []
        for value in level:
            if isinstance(value, Mapping):
                numbers.add(value)
                properties = value.get("properties")
                num_properties += len(properties) if isinstance(properties, Mapping) else 0
                values = value.get("enum")
                num_values += len(values) if isinstance(values, list) else 0
                below.extend(value.values())
            elif isinstance(value, (list, tuple)):
                below.extend(value)
        if num_properties > MAX_SCHEMA_PROPERTIES:
            raise fault(f"the schema has more than {MAX_SCHEMA_PROPERTIES} properties")
        if num_values > MAX_ENUM_VALUES:
            raise fault(f"the schema has more than {MAX_ENUM_VALUES} enum values")
        if not all(map(math.isfinite, [value for value in below if type(value) is float])):
            raise fault("the schema has a number that is not finite")
        # isinstance of Mapping is slow, so skip scalars first
        inner = [value for value in below if not isinstance(value, (str, int, float))]
        level = [value for value in inner if isinstance(value, (Mapping, list, tuple))]
        if not level:
            numbers.check_together()
            return
    raise fault(f"the schema is nested more than {MAX_SCHEMA_DEPTH} levels deep")


class _Numbers:
    """Refuses numbers whose rounding would permit values outside the schema.

    llguidance stores numbers as 64-bit floats, integers in 64 bits, and `multipleOf` as 32 bits
    and a decimal point.
    """

    _COMBINING = ("allOf", "anyOf", "oneOf", "$ref", "$dynamicRef")

    def __init__(self, fault: Any) -> None:
        self._fault = fault
        self._has_integers = False
        self._combines = False
        self._multiples: set[int | float] = set()
        self._large: dict[str, float] = {}
        """Keyword -> a float that exceeds 64 bits as an integer."""

    def add(self, schema: Mapping[str, Any]) -> None:
        """Check one level of a schema."""
        kind = schema.get("type")
        self._has_integers |= kind == "integer" or (isinstance(kind, list) and "integer" in kind)
        self._combines = self._combines or any(name in schema for name in self._COMBINING)
        for name in ("const", "enum"):
            if name in schema:
                self._add_values(name, schema[name])
        for name, side in _BOUNDS.items():
            self._add_bound(name, side, schema.get(name))
        multiple = schema.get("multipleOf")
        if isinstance(multiple, bool):  # not a JSON number: llguidance refuses it
            return
        if isinstance(multiple, (int, float)) and 0 < multiple < math.inf:
            self._multiples.add(multiple)
            if not _is_exact_multiple(multiple):
                raise self._inexact(f"multipleOf is {_shown(multiple)}")

    def _add_values(self, name: str, values: Any) -> None:
        rest = [values]
        while rest:
            value = rest.pop()
            if type(value) is int and not _is_exact(value):
                what = f"{name} has the integer {_shown(value)}"
                raise self._inexact(what, " Ask for it as a string.")
            if type(value) is float and abs(value) > MAX_INT64:
                self._large[name] = value
            if isinstance(value, Mapping):
                rest.extend(value.values())
            elif isinstance(value, (list, tuple)):
                rest.extend(value)

    def _add_bound(self, name: str, side: int, bound: Any) -> None:
        if type(bound) is int and not _is_exact(bound) and side * _rounding_of(bound) >= 0:
            raise self._inexact(f"{name} is {_shown(bound)}")
        if type(bound) is float and abs(bound) > MAX_INT64 and side * bound < 0:
            self._large[name] = bound

    def check_together(self) -> None:
        """Check bounds of several levels, which may apply to the same number."""
        for name, value in self._large.items():
            if self._has_integers:
                raise self._inexact(f"{name} has {value!r} where integers are asked for")
        if self._combines and len(self._multiples) > 1:
            common = Fraction(1, 10 ** max(map(_num_decimals, self._multiples)))
            lcm = 1
            for multiple in sorted(self._multiples):
                whole = int(Fraction(Decimal(repr(multiple))) / common)
                if lcm * whole > MAX_MULTIPLE:
                    raise self._inexact("what multipleOf asks for together")
                lcm = math.lcm(lcm, whole)

    def _inexact(self, what: str, advice: str = "") -> Exception:
        error: Exception = self._fault(
            f"{what}, which cannot be kept exactly: grammars hold numbers as 64-bit floats, with"
            f" every integer up to {MAX_WHOLE_FLOAT}.{advice}"
        )
        return error


def _is_exact(value: int) -> bool:
    return (
        abs(value) <= MAX_WHOLE_FLOAT
        or value == MAX_INT64
        or (abs(value) < MAX_INT64 and int(float(value)) == value)
    )


def _rounding_of(value: int) -> int:
    """Sign of the rounding error of a bound: larger (1), smaller (-1) or exact (0)."""
    if abs(value) >= MAX_INT64:
        return -1 if value > 0 else 1
    return 1 if int(float(value)) > value else -1


def _is_exact_multiple(value: int | float) -> bool:
    """True if llguidance, which moves the decimal point in the same way, gets this number."""
    if value > MAX_MULTIPLE:
        return False
    moved, num_decimals = float(value), 0
    while moved % 1:
        moved *= 10
        num_decimals += 1
    exact = Fraction(Decimal(repr(value)))
    return moved <= MAX_MULTIPLE and Fraction(int(moved), 10**num_decimals) == exact


def _num_decimals(value: int | float) -> int:
    exponent = Decimal(repr(value)).normalize().as_tuple().exponent
    return max(0, -exponent) if isinstance(exponent, int) else 0


def _shown(value: int | float) -> str:
    """The number, or its length if it is long."""
    bits = value.bit_length() if isinstance(value, int) else 0
    return repr(value) if bits <= 256 else f"of {bits} bits"
