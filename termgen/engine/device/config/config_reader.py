"""Reads typed values from a config.json that may be wrong or hostile.

Every value is checked for type and range before it sizes anything; an error is a CorruptFileError
naming the key, with the key's path when it is nested.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any, Final, NoReturn

from termgen.errors import CorruptFileError

_LARGEST_INT: Final = 2**31 - 1


class ConfigReader:
    """A dictionary from a file, read key by key. A null value counts as absent."""

    def __init__(self, values: Mapping[str, Any], prefix: str = "") -> None:
        self.prefix = prefix
        self._values = values

    def fail(self, key: str, problem: str) -> NoReturn:
        raise CorruptFileError(f"config.json: {self._path(key)} {problem}")

    def get(self, key: str) -> Any:
        return self._values.get(key)

    def has(self, key: str) -> bool:
        """True if the key is there, even as a null."""
        return key in self._values

    def present(self) -> dict[str, Any]:
        """The entries that are not null."""
        return {key: value for key, value in self._values.items() if value is not None}

    def values(self) -> Collection[Any]:
        return self._values.values()

    def child(self, key: str) -> ConfigReader | None:
        """A nested dictionary; None when absent or empty."""
        value = self.get(key)
        if value is None or value == {}:
            return None
        if not isinstance(value, Mapping):
            self.fail(key, "must be a dictionary")
        return ConfigReader(value, prefix=self._path(key))

    def integer(
        self, key: str, *, default: int | None = None, least: int = 1, most: int = _LARGEST_INT
    ) -> int:
        value = self._values.get(key)
        if value is None:
            if default is None:
                self.fail(key, "is missing")
            return default
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool):
            self.fail(key, f"must be a whole number, not {value!r}")
        if not least <= value <= most:
            self.fail(key, f"must be between {least} and {most}, not {value}")
        return value

    def optional_integer(self, key: str) -> int | None:
        return None if self.get(key) is None else self.integer(key)

    def number(
        self, key: str, *, default: float | None = None, above: float | None = None
    ) -> float:
        value = self._values.get(key)
        if value is None:
            if default is None:
                self.fail(key, "is missing")
            return default
        if not isinstance(value, int | float) or isinstance(value, bool):
            self.fail(key, f"must be a number, not {value!r}")
        try:
            number = float(value)
        except OverflowError:  # an integer of hundreds of digits
            number = math.inf
        if not math.isfinite(number):
            self.fail(key, f"must be finite, not {value}")
        if above is not None and number <= above:
            self.fail(key, f"must be above {above}, not {value}")
        return number

    def flag(self, key: str, *, default: bool) -> bool:
        value = self._values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.fail(key, f"must be true or false, not {value!r}")
        return value

    def text(self, key: str, *, default: str) -> str:
        value = self._values.get(key)
        if value is None:
            return default
        if not isinstance(value, str):
            self.fail(key, f"must be a string, not {value!r}")
        return value

    def token_id(self, key: str) -> int | None:
        ids = self.token_ids(key)
        return ids[0] if ids else None

    def token_ids(self, key: str) -> tuple[int, ...]:
        """One id, a list of ids, or nothing."""
        value = self._values.get(key)
        if value is None:
            return ()
        ids = value if isinstance(value, list | tuple) else [value]
        for token_id in ids:
            if not isinstance(token_id, int) or isinstance(token_id, bool) or token_id < 0:
                self.fail(key, f"must hold token ids, not {token_id!r}")
        return tuple(ids)

    def _path(self, key: str) -> str:
        return f"{self.prefix}.{key}" if self.prefix else key
