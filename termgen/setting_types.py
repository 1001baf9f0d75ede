"""How a setting is written down and checked: for the config dataclasses and their like.

A field made by `setting` carries its help text, choices and range; `check_settings` holds a whole
dataclass to them. Standard library only.
"""

from __future__ import annotations

import math
import types
import typing
from dataclasses import Field, dataclass, field, fields
from typing import Any

from termgen.errors import ConfigError


def setting(default: Any, help: str, **metadata: Any) -> Any:
    """A dataclass field with its help text.

    metadata: `choices`; `minimum` and `maximum` (inclusive) or `above` (exclusive low end);
    `flag` when it differs from the field's name; `metavar`; `nargs` of a flag that takes several
    values at once (without it, a list's flag is repeated); `secret` for what is never shown;
    `infinite` for a number that may be infinity.
    """
    shown = not metadata.get("secret", False)
    return field(default=default, repr=shown, metadata={"help": help, **metadata})


@dataclass(frozen=True, slots=True)
class SettingType:
    """A field's annotation, taken apart."""

    base: type
    """bool, int, float or str; for a tuple, the type of its items."""
    optional: bool
    many: bool
    """A tuple of any length."""

    @property
    def words(self) -> str:
        """For messages: what a value must be."""
        one = {bool: "true or false", int: "an integer", float: "a number", str: "text"}[self.base]
        if not self.many:
            return one
        return "a list of integers" if self.base is int else "a list of text"


def setting_types(config_class: type, omit: frozenset[str] = frozenset()) -> dict[str, SettingType]:
    """Field name -> type, for a dataclass whose fields are made with `setting`."""
    hints = typing.get_type_hints(config_class)
    names = [f.name for f in fields(config_class) if f.name not in omit]
    return {name: _setting_type(hints[name]) for name in names}


def _setting_type(hint: Any) -> SettingType:
    optional = False
    if isinstance(hint, types.UnionType):
        rest = [arg for arg in typing.get_args(hint) if arg is not types.NoneType]
        assert len(rest) == 1, f"a setting has one type or None, not {hint}"
        hint, optional = rest[0], True
    many = typing.get_origin(hint) is tuple
    base = typing.get_args(hint)[0] if many else hint
    assert base in (bool, int, float, str), f"settings of type {hint} are not supported"
    return SettingType(base, optional, many)


def check_settings(config: Any) -> None:
    """Check types, choices and ranges of every field, and normalise lists to tuples.

    Called by `__post_init__`, so an out-of-range config cannot exist. Raises `ConfigError`.
    """
    kinds = setting_types(type(config))
    for f in fields(config):
        value = getattr(config, f.name)
        kind = kinds[f.name]
        if value is None and kind.optional:
            continue
        if kind.many and isinstance(value, kind.base):
            value = (value,)
        if kind.many and isinstance(value, (list, tuple)):
            items = tuple(_convert(kind, f, item) for item in value)
            object.__setattr__(config, f.name, items)
        else:
            items = (_convert(kind, f, value),)
            object.__setattr__(config, f.name, items[0])
        for item in items:
            _check_range(f.name, item, f.metadata)


def _convert(kind: SettingType, f: Field[Any], value: object) -> object:
    if kind.base is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    # bool is an int in Python; here it is not one
    is_right = isinstance(value, kind.base) and (kind.base is bool or not isinstance(value, bool))
    if isinstance(value, float) and not math.isfinite(value):
        is_right = bool(f.metadata.get("infinite")) and not math.isnan(value)
    if not is_right:
        shown = "" if f.metadata.get("secret") else f", not {value!r}"
        raise ConfigError(f"{f.name} must be {kind.words}{shown}", param=f.name)
    return value


def _check_range(name: str, value: Any, metadata: typing.Mapping[str, Any]) -> None:
    choices = metadata.get("choices")
    if choices is not None and value not in choices:
        raise ConfigError(f"{name} must be one of {', '.join(choices)}, not {value!r}", param=name)
    low, high, above = (metadata.get(key) for key in ("minimum", "maximum", "above"))
    too_low = (low is not None and value < low) or (above is not None and value <= above)
    if not too_low and (high is None or value <= high):
        return
    if above is not None:
        wanted = f"greater than {above:g}" + ("" if high is None else f" and at most {high:g}")
    elif high is None:
        wanted = f"at least {low}"
    else:
        wanted = f"between {low} and {high}"
    raise ConfigError(f"{name} must be {wanted}, not {value}", param=name)
