"""Sampling parameters of a request. Vocabulary."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, fields
from typing import TypeGuard

from termgen.errors import RequestError
from termgen.vocabulary.structured_outputs import StructuredOutputsParams

GREEDY_EPSILON = 1e-5
"""Temperatures below this mean greedy decoding, as in vLLM."""

SMALLEST_POSITIVE = 2.0**-126
"""Smallest normal float32; devices may flush smaller values to 0."""

MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 256
MAX_STOP_TOKEN_IDS = 128
MAX_EOS_IDS = 128
"""Limit of a model's end tokens. The device has a column for each, and for a request's stop ids."""
MAX_N = 128
MAX_LOGIT_BIAS = 1024
MAX_BIAS = 100.0
"""Larger values are clamped, as OpenAI documents this range."""
MAX_BAD_WORDS = 64
MAX_BAD_WORD_CHARS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of one request; names and meaning follow vLLM.

    Immutable. The constructor checks everything that needs no model; `validate_for` checks what
    depends on the vocabulary. Raises `RequestError` naming the field.
    """

    n: int = 1
    """Number of completions. Completion `i` of a seeded request uses `seed + i`."""
    temperature: float = 1.0
    """0 (or below 1e-5) is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 or -1: no limit."""
    min_p: float = 0.0
    seed: int | None = None
    """Random numbers depend on (seed, position) only. None: a random seed."""
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    max_tokens: int | None = None
    """None: limited by the context only."""
    min_tokens: int = 0
    logprobs: int | None = None
    """Most likely tokens to report per position (0: only the sampled one)."""
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    structured_outputs: StructuredOutputsParams | None = None
    """Grammar of the answer, which ends where nothing more can follow, whatever `min_tokens`."""
    prompt_logprobs: int | None = None
    """Like `logprobs`, for the prompt's tokens. The first has none, as nothing precedes it."""
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()
    """Added to the logits of these ids. Stored as pairs, sorted by id."""
    allowed_token_ids: tuple[int, ...] | None = None
    """The only ids that may be sampled. None: any."""
    bad_words: tuple[str, ...] = ()
    """Texts that must not be generated, matched as token sequences."""
    truncate_prompt_tokens: int | None = None
    """Keep only so many tokens at the end of the prompt; -1: as many as leave the context room for
    `max_tokens`. None: a prompt that does not fit is an error."""

    def __post_init__(self) -> None:
        set_ = object.__setattr__
        for name in ("stop", "bad_words", "stop_token_ids"):
            set_(self, name, _as_tuple(name, getattr(self, name)))
        set_(self, "logit_bias", _bias_pairs(self.logit_bias))
        if self.allowed_token_ids is not None:
            set_(self, "allowed_token_ids", _sorted_ids(self.allowed_token_ids))
        if self.top_k == -1:
            set_(self, "top_k", 0)
        self._check_numbers()
        self._check_stops()
        self._check_words()

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_EPSILON

    @property
    def has_penalties(self) -> bool:
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )

    @property
    def bias_pairs(self) -> tuple[tuple[int, float], ...]:
        """`logit_bias` as stored."""
        assert isinstance(self.logit_bias, tuple)
        return self.logit_bias

    @property
    def edits_logits(self) -> bool:
        """True if the logits of single ids are changed or masked before all other sampling."""
        has_limit = self.allowed_token_ids is not None
        return has_limit or bool(self.logit_bias) or bool(self.bad_words)

    def _check_numbers(self) -> None:
        _check_int("n", self.n, 1, MAX_N)
        _check_float("temperature", self.temperature, 0.0, 2.0)
        _check_float("top_p", self.top_p, 0.0, 1.0, exclusive_low=True)
        _check_int("top_k", self.top_k, 0, 2**31 - 1)
        _check_float("min_p", self.min_p, 0.0, 1.0)
        if self.seed is not None:
            _check_int("seed", self.seed, -(2**63), 2**63 - 1)
        _check_float("repetition_penalty", self.repetition_penalty, 0.0, 10.0, exclusive_low=True)
        _check_float("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_float("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, 1, 2**31 - 1)
        _check_int("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens ({self.min_tokens}) exceeds max_tokens ({self.max_tokens})",
                param="min_tokens",
            )
        if self.logprobs is not None:
            _check_int("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if self.prompt_logprobs is not None:
            _check_int("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS)
        self._check_truncation()
        for name in ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name} must be true or false", param=name)
        wanted = self.structured_outputs
        if wanted is not None and not isinstance(wanted, StructuredOutputsParams):
            raise RequestError(
                "structured_outputs must be a StructuredOutputsParams", param="structured_outputs"
            )

    def _check_truncation(self) -> None:
        name, value = "truncate_prompt_tokens", self.truncate_prompt_tokens
        if value is not None:
            _check_int(name, value, -1, 2**31 - 1)
            if value == 0:
                raise RequestError(f"{name} must be 1 or more, or -1, not 0", param=name)

    def _check_stops(self) -> None:
        if len(self.stop) > MAX_STOP_STRINGS:
            raise RequestError(f"at most {MAX_STOP_STRINGS} stop strings are allowed", param="stop")
        for s in self.stop:
            if not isinstance(s, str) or not s or len(s) > MAX_STOP_STRING_CHARS:
                raise RequestError(
                    f"each stop string must have 1 to {MAX_STOP_STRING_CHARS} characters",
                    param="stop",
                )
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise RequestError(
                f"at most {MAX_STOP_TOKEN_IDS} stop token ids are allowed", param="stop_token_ids"
            )
        for t in self.stop_token_ids:
            _check_int("stop_token_ids", t, 0, 2**31 - 1)

    def _check_words(self) -> None:
        if len(self.bad_words) > MAX_BAD_WORDS:
            raise RequestError(f"at most {MAX_BAD_WORDS} bad words are allowed", param="bad_words")
        for word in self.bad_words:
            fits = isinstance(word, str) and 0 < len(word) <= MAX_BAD_WORD_CHARS
            if not fits or not word.strip():
                raise RequestError(
                    f"each bad word must have 1 to {MAX_BAD_WORD_CHARS} characters that are not"
                    " all spaces",
                    param="bad_words",
                )

    def describe(self) -> str:
        """Values that differ from the defaults, for people: `temperature 0.7 max_tokens 64`. Texts
        and lists appear only by their length, as requests are private."""
        parts = []
        for f in fields(self):
            value = getattr(self, f.name)
            if value != f.default:
                parts.append(f"{f.name} {_shown(value)}")
        return " ".join(parts)

    def validate_for(self, *, vocab_size: int) -> None:
        """Check what depends on the model. Raises `RequestError` naming the field."""
        ids_of = {
            "stop_token_ids": self.stop_token_ids,
            "logit_bias": [token_id for token_id, _ in self.bias_pairs],
            "allowed_token_ids": self.allowed_token_ids or (),
        }
        for name, ids in ids_of.items():
            largest = max(ids, default=0)
            if largest >= vocab_size:
                raise RequestError(
                    f"{name}: token id {largest} is outside the vocabulary of {vocab_size}",
                    param=name,
                )


def _shown(value: object) -> str:
    if isinstance(value, StructuredOutputsParams):
        return f"({value.kind})"
    if isinstance(value, float):
        return f"{value:g}"
    return f"({len(value)})" if isinstance(value, Sized) else str(value)


def _bias_pairs(given: object) -> tuple[tuple[int, float], ...]:
    """Pairs from a mapping or pairs, sorted by id, with values clamped to +-MAX_BIAS."""
    name = "logit_bias"
    pairs = given.items() if isinstance(given, Mapping) else () if given is None else given
    if not isinstance(pairs, Iterable) or isinstance(pairs, str):
        raise RequestError(f"{name} must map token ids to numbers", param=name)
    biases: dict[int, float] = {}
    for pair in pairs:
        if not isinstance(pair, Sequence) or isinstance(pair, str) or len(pair) != 2:
            raise RequestError(f"{name} must map token ids to numbers", param=name)
        token_id, bias = pair
        _check_int(name, token_id, 0, 2**31 - 1)
        if not _is_finite(bias):
            raise RequestError(f"{name} must map token ids to finite numbers", param=name)
        biases[token_id] = max(-MAX_BIAS, min(MAX_BIAS, float(bias)))
    if len(biases) > MAX_LOGIT_BIAS:
        raise RequestError(f"{name} may name at most {MAX_LOGIT_BIAS} token ids", param=name)
    return tuple(sorted(biases.items()))


def _as_tuple(name: str, given: object) -> tuple[object, ...]:
    """A tuple from a list, a single string, or None (empty)."""
    if given is None or isinstance(given, str):
        return () if given is None else (given,)
    if not isinstance(given, Iterable) or isinstance(given, Mapping):
        raise RequestError(f"{name} must be a list, not {given!r:.60}", param=name)
    return tuple(given)


def _sorted_ids(given: object) -> tuple[int, ...]:
    name = "allowed_token_ids"
    if not isinstance(given, Iterable) or isinstance(given, (str, Mapping)):
        raise RequestError(f"{name} must be a list of token ids", param=name)
    ids = set()
    for token_id in given:
        _check_int(name, token_id, 0, 2**31 - 1)
        ids.add(token_id)
    if not ids:
        raise RequestError(f"{name} must name at least one token id", param=name)
    return tuple(sorted(ids))


def _check_int(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"{name} must be an integer, not {_brief(value)}", param=name)
    if not low <= value <= high:
        message = f"{name} must be between {low} and {high}, not {_brief(value)}"
        raise RequestError(message, param=name)


def _is_finite(value: object) -> TypeGuard[int | float]:
    """True for a number that fits a float; Python's integers are unbounded."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def _brief(value: object) -> str:
    """The value for a message; Python refuses to print integers of more than 4,300 digits."""
    try:
        return f"{value!r:.60}"
    except ValueError:
        return "a number of thousands of digits"


def _check_float(
    name: str, value: object, low: float, high: float, *, exclusive_low: bool = False
) -> None:
    if not _is_finite(value):
        raise RequestError(f"{name} must be a finite number, not {_brief(value)}", param=name)
    if value > high or value < low or (exclusive_low and value - low < SMALLEST_POSITIVE):
        bracket = "(" if exclusive_low else "["
        raise RequestError(
            f"{name} must be in {bracket}{low:g}, {high:g}], not {value:g}", param=name
        )
