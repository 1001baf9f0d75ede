"""What `speculative_config` says: how tokens are guessed, and how many."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from typing import Any

from termgen.errors import ConfigError

METHODS = ("ngram", "mtp", "eagle3", "dflash", "assistant", "draft_model", "none")
WITH_MODEL = ("eagle3", "dflash", "assistant", "draft_model")
"""Methods whose drafts come from files of their own."""
DEFAULT_DRAFTS = {
    "ngram": 8,
    "mtp": 3,
    "eagle3": 4,
    "dflash": 7,
    "assistant": 3,
    "draft_model": 4,
}
MAX_DRAFTS = 16
MAX_LOOKUP = 32
FIELD = "speculative_config"


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """Names and meanings are those of vLLM's JSON."""

    method: str | None = None
    """None: what the files of `model` are for; ngram without any."""
    model: str | None = None
    """A drafter's own files: a folder, or a .gguf file."""
    num_speculative_tokens: int | None = None
    """Most drafts of a request in a step; None: what suits the method."""
    prompt_lookup_min: int = 2
    """Tokens at the end of a text that must have stood somewhere before."""
    prompt_lookup_max: int = 8
    """Tokens of the end that are compared, at most."""

    def __post_init__(self) -> None:
        if self.method is None and self.model is None:
            object.__setattr__(self, "method", "ngram")
        if self.method is not None and self.method not in METHODS:
            raise _error(f"method must be one of {', '.join(METHODS)}, not {self.method!r}")
        if self.model is not None and not (isinstance(self.model, str) and self.model):
            raise _error(f"model must be the place of a drafter, not {self.model!r:.80}")
        if self.method in WITH_MODEL and self.model is None:
            raise _error(f"method {self.method} needs model, the place of its files")
        if self.method not in (None, *WITH_MODEL) and self.model is not None:
            raise _error(f"model is for {', '.join(WITH_MODEL)}; {self.method} has none")
        if self.num_speculative_tokens is not None:
            _check_number("num_speculative_tokens", self.num_speculative_tokens, MAX_DRAFTS)
        _check_number("prompt_lookup_min", self.prompt_lookup_min, MAX_LOOKUP)
        _check_number("prompt_lookup_max", self.prompt_lookup_max, MAX_LOOKUP)
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise _error(
                f"prompt_lookup_min ({self.prompt_lookup_min}) is more than prompt_lookup_max "
                f"({self.prompt_lookup_max})"
            )

    @property
    def num_drafts(self) -> int:
        """Most drafts of a row in a step. `method` must be known."""
        assert self.method is not None
        if self.method == "none":
            return 0
        return self.num_speculative_tokens or DEFAULT_DRAFTS[self.method]


def parse_speculative_config(text: str) -> SpeculativeConfig:
    """From JSON, or the name of a method alone. Raises ConfigError."""
    if text in METHODS and text not in WITH_MODEL:
        return SpeculativeConfig(method=text)
    try:
        given: Any = json.loads(text)
    except ValueError:
        given = None
    if not isinstance(given, dict):
        raise _error(f"must be a JSON object or one of {', '.join(METHODS)}, not {text!r:.80}")
    known = [field.name for field in fields(SpeculativeConfig)]
    unknown = [name for name in given if name not in known]
    if unknown:
        raise _error(f"{unknown[0]!r:.80} is not known; what is: {', '.join(known)}")
    return SpeculativeConfig(**given)


def _check_number(name: str, value: object, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise _error(f"{name} must be an integer between 1 and {most}, not {value!r:.80}")


def _error(words: str) -> ConfigError:
    return ConfigError(f"{FIELD}: {words}", param=FIELD)
