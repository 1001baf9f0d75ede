"""One row of the table of sampling parameters: everything that is said about a parameter, once.

`SamplingParams` declares a row with each of its fields. Ranges and their errors, fields of request
bodies, docs, flags, the chat's panel, requests to other servers, names in a model's files and the
device's columns are made from the rows. Standard library only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import Field, dataclass, field, replace
from typing import Any, Literal, TypeGuard

from termgen.errors import RequestError

MAX_INT = 2**31 - 1
SMALLEST_POSITIVE = 2.0**-126
"""Smallest normal float32; devices may flush smaller values to 0."""

OPENAI = "OpenAI"
VLLM = "vLLM"
LLAMA_CPP = "llama.cpp"

MODELS_OWN = "the model's own"

Group = Literal["PROMPT", "LENGTH", "SAMPLING", "FORM", "ANSWER"]
"""The table of docs/api.md that has the field; names of `termgen.api.fields.Group`."""

Neutral = tuple[Any, ...] | None
"""Values of another server's parameter that ask for nothing. None: false, 0 and what is empty."""


@dataclass(frozen=True, slots=True)
class Integers:
    """Both ends are allowed."""

    low: int
    high: int = MAX_INT

    def check(self, name: str, value: object) -> None:
        check_int(name, value, self.low, self.high)

    @property
    def words(self) -> str:
        return f"{self.low} or more" if self.high == MAX_INT else f"{self.low} to {self.high}"


@dataclass(frozen=True, slots=True)
class Reals:
    """The high end is allowed, and the low end unless it is open."""

    low: float
    high: float
    is_open: bool = False
    least: float | None = None
    """Smallest value above the low end, where that means off: a smaller one would mean the
    opposite."""

    def check(self, name: str, value: object) -> None:
        if not is_finite(value):
            raise RequestError(f"{name} must be a finite number, not {brief(value)}", param=name)
        if self.least is not None and self.low < value < self.least:
            raise RequestError(
                f"{name} must be {self.low:g} or in [{self.least:g}, {self.high:g}], not {value:g}",
                param=name,
            )
        too_low = value < self.low or (self.is_open and value - self.low < SMALLEST_POSITIVE)
        if value > self.high or too_low:
            bracket = "(" if self.is_open else "["
            raise RequestError(
                f"{name} must be in {bracket}{self.low:g}, {self.high:g}], not {value:g}",
                param=name,
            )

    @property
    def words(self) -> str:
        if self.is_open:
            return f"above {self.low:g}, up to {self.high:g}"
        return f"{self.low:g} to {self.high:g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A parameter. Texts are of one line; those for docs/api.md are Markdown."""

    name: str = ""
    """Filled in, as is the default, from the field that declares the row."""
    default: Any = None
    """The neutral value, which does nothing."""

    # -- what is allowed
    range: Integers | Reals | None = None
    """None: the class has a check of its own for what is no number."""
    off_too: int | None = None
    """Another word for the default, that of other servers."""

    # -- for readers
    group: Group = "SAMPLING"
    meaning: str
    """What it does, for docs/api.md."""
    values: str | None = None
    """None: those of the range, or of the type."""
    default_words: str | None = None
    """None: those of the value."""
    help: str | None = None
    """What its flag of `termgen generate` does; None: it has none of its own."""
    panel: str | None = None
    """What it does, in the width of a narrow screen: the chat's panel has it. None: it has not."""
    is_kept: bool = False
    """Kept with a saved chat though the panel does not have it."""

    # -- other programs
    origin: str = OPENAI
    """The server whose clients send it under this name. One that only llama.cpp has goes to no
    vLLM server."""
    llama_cpp: str | None = None
    """Its name in llama.cpp's API, where that is not OpenAI's."""
    in_gguf: str | None = None
    """Its name under general.sampling in GGUF files. A model's files may recommend a value for
    such a parameter; generation_config.json has it under its own name."""
    others: Mapping[str, Neutral] = field(default_factory=dict)
    """Names in other APIs, refused with the advice to use this one, unless their value is
    neutral."""

    # -- the device
    column: Literal["float32", "int32"] | None = None
    """Type of its column in the device's table of requests, which then has the value itself. Its
    field in request bodies is made from the row."""
    part: Literal["cut", "penalty"] | None = None
    """The part of sampling that reads the column: `engine.device.sampling` has a file of each."""

    @property
    def may_be_recommended(self) -> bool:
        return self.in_gguf is not None

    @property
    def values_words(self) -> str | None:
        """What may be given, for docs/api.md; None: whatever the type has."""
        if self.values is not None or not isinstance(self.range, (Integers, Reals)):
            return self.values
        if self.off_too is not None and isinstance(self.range, Integers):
            return replace(self.range, low=min(self.range.low, self.off_too)).words
        return self.range.words

    @property
    def words_of_default(self) -> str | None:
        """What holds if it is not given, for docs/api.md; None: what the type has."""
        if self.default_words is not None or self.column is None:
            return self.default_words
        value = f"{self.default:g}"
        return f"{MODELS_OWN}, else {value}" if self.may_be_recommended else value

    @property
    def flag_help(self) -> str:
        assert self.help is not None, f"{self.name} has no flag"
        if self.may_be_recommended:
            return f"{self.help} (default: {MODELS_OWN}, or {self.default:g})"
        return self.help

    def check(self, value: object) -> None:
        """Raises `RequestError`. None is allowed where it is the default."""
        if isinstance(self.default, bool):
            if not isinstance(value, bool):
                raise RequestError(f"{self.name} must be true or false", param=self.name)
        elif self.range is not None and not (value is None and self.default is None):
            self.range.check(self.name, value)


def param(default: Any, row: Row) -> Any:
    """A field of the table with its row."""
    return field(default=default, metadata={"row": row})


def row_of(f: Field[Any]) -> Row:
    row: Row = f.metadata["row"]
    return replace(row, name=f.name, default=f.default)


def check_int(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"{name} must be an integer, not {brief(value)}", param=name)
    if not low <= value <= high:
        message = f"{name} must be between {low} and {high}, not {brief(value)}"
        raise RequestError(message, param=name)


def is_finite(value: object) -> TypeGuard[int | float]:
    """True for a number that fits a float; Python's integers are unbounded."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def brief(value: object) -> str:
    """The value for a message; Python refuses to print integers of more than 4,300 digits."""
    try:
        return f"{value!r:.60}"
    except ValueError:
        return "a number of thousands of digits"
