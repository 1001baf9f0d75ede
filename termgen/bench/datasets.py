"""The datasets of `termgen bench serve`: prompts by dataset name. Seeded, no network.

Two datasets are JSONL files. A trace has Mooncake's format: `timestamp` in milliseconds,
`input_length`, `output_length`, and optionally `hash_ids`, one for each 512 tokens of the prompt;
equal numbers are equal text. A custom line has a `prompt` or `messages`, and optionally
`output_tokens`. A wrong line is a `ConfigError` with file and line number.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import numpy as np

from termgen.bench.options import ServeOptions
from termgen.bench.prompts import Prompt, Turn
from termgen.errors import ConfigError

NUM_WORD_NUMBERS = 2**20
"""Word numbers are drawn from this range; a `RequestMaker` takes them modulo its vocabulary."""

OPEN_CHATS = 32
"""Conversations that are interleaved."""
MOST_TURNS = 8
USER_TOKENS = (60.0, 1.1, 1024)
"""Log-normal message length: median tokens, sigma, maximum. Typical of people's chats."""
ANSWER_TOKENS = (200.0, 0.8, 1024)

TRACE_BLOCK = 512
"""Tokens per hash of a trace."""
ROLES = ("system", "user", "assistant")


def make_prompts(options: ServeOptions, *, seed: int) -> list[Prompt]:
    """[num_prompts], or fewer if the file is shorter. Raises `ConfigError`."""
    rng = np.random.default_rng([seed, 0])
    makers: dict[str, Callable[[ServeOptions, np.random.Generator], list[Prompt]]] = {
        "random": _random,
        "prefix-repetition": _prefix_repetition,
        "synthetic-chat": _synthetic_chat,
        "trace": _trace,
        "custom": _custom,
    }
    return makers[options.dataset_name](options, rng)


def warmup_prompts(prompts: list[Prompt], count: int, *, seed: int) -> list[Prompt]:
    """Prompts of the median length with other words, so that they leave no prefix-cache hits."""
    rng = np.random.default_rng([seed, 2])
    length = int(np.median([p.num_words for p in prompts])) or 32
    output = int(np.median([p.output_len for p in prompts]))
    return [Prompt((Turn("user", _words(rng, length)),), output) for _ in range(count)]


def check_fits(prompts: list[Prompt], max_model_len: int | None) -> None:
    """Refuse prompts that the model's context cannot hold. Raises `ConfigError`."""
    longest = max(p.num_words + p.output_len for p in prompts)
    if max_model_len is not None and longest > max_model_len:
        raise ConfigError(
            f"prompt plus answer are up to {longest} tokens, but the server's context holds "
            f"{max_model_len}; choose shorter lengths (such as --random-input-len)"
        )


def _words(rng: np.random.Generator, count: int) -> tuple[int, ...]:
    return tuple(rng.integers(0, NUM_WORD_NUMBERS, size=count).tolist())


def _random(options: ServeOptions, rng: np.random.Generator) -> list[Prompt]:
    prefix = _words(rng, options.random_prefix_len)
    ratio, prompts = options.random_range_ratio, []
    for _ in range(options.num_prompts):
        size = _around(rng, options.random_input_len, ratio)
        output = _around(rng, options.random_output_len, ratio)
        prompts.append(Prompt((Turn("user", prefix + _words(rng, size)),), output))
    return prompts


def _around(rng: np.random.Generator, length: int, ratio: float) -> int:
    low, high = int(length * (1 - ratio)), int(length * (1 + ratio))
    return max(1, int(rng.integers(low, high + 1)))


def _prefix_repetition(options: ServeOptions, rng: np.random.Generator) -> list[Prompt]:
    size = options.prefix_repetition_prefix_len
    prefixes = [_words(rng, size) for _ in range(options.prefix_repetition_num_prefixes)]
    prompts = [
        Prompt(
            (
                Turn(
                    "user",
                    prefixes[i % len(prefixes)] + _words(rng, options.prefix_repetition_suffix_len),
                ),
            ),
            options.prefix_repetition_output_len,
        )
        for i in range(options.num_prompts)
    ]
    order = rng.permutation(len(prompts))
    return [prompts[i] for i in order]


def _synthetic_chat(options: ServeOptions, rng: np.random.Generator) -> list[Prompt]:
    """Conversations whose earlier answers are made up beforehand, so that every run asks the same.

    A number of them take turns; each request carries all turns before it.
    """
    chats: list[list[Turn]] = []
    left: list[int] = []
    prompts: list[Prompt] = []
    while len(prompts) < options.num_prompts:
        if len(chats) < OPEN_CHATS:
            chats.append([])
            left.append(int(min(MOST_TURNS, rng.geometric(0.35))))
        at = int(rng.integers(len(chats)))
        chat, answer = chats[at], _length(rng, ANSWER_TOKENS)
        chat.append(Turn("user", _words(rng, _length(rng, USER_TOKENS))))
        prompts.append(Prompt(tuple(chat), answer, is_chat=True))
        chat.append(Turn("assistant", _words(rng, answer)))
        left[at] -= 1
        if not left[at]:
            del chats[at], left[at]
    return prompts


def _length(rng: np.random.Generator, shape: tuple[float, float, int]) -> int:
    median, spread, most = shape
    return int(np.clip(rng.lognormal(np.log(median), spread), 4, most))


def _trace(options: ServeOptions, rng: np.random.Generator) -> list[Prompt]:
    assert options.dataset_path is not None
    return read_trace(options.dataset_path, options.num_prompts, rng)


def _custom(options: ServeOptions, rng: np.random.Generator) -> list[Prompt]:
    assert options.dataset_path is not None
    return read_custom(
        options.dataset_path, options.num_prompts, output_len=options.custom_output_len
    )


Line = tuple[int, dict[str, Any]]


def read_trace(path: str, most: int, rng: np.random.Generator) -> list[Prompt]:
    prompts: list[Prompt] = []
    seed, first, before = int(rng.integers(2**31)), None, 0.0
    for line, row in _rows(path, most):
        at = _count(path, line, row, "timestamp", low=0, whole=False)
        if at < before:
            _fail(path, line, "timestamp is earlier than that of the line before")
        before = at
        first = at if first is None else first
        size = int(_count(path, line, row, "input_length"))
        output = int(_count(path, line, row, "output_length"))
        hashes = row.get("hash_ids", [])
        if not isinstance(hashes, list) or not all(
            isinstance(h, int) and not isinstance(h, bool) and h >= 0 for h in hashes
        ):
            _fail(path, line, "hash_ids must be a list of integers from 0")
        words = _trace_words(hashes, size, seed=seed, line=line)
        prompts.append(Prompt((Turn("user", words),), output, at_s=(at - first) / 1000))
    return prompts


def _trace_words(hashes: list[int], size: int, *, seed: int, line: int) -> tuple[int, ...]:
    words: list[int] = []
    for number in hashes:
        if len(words) >= size:
            break
        block = np.random.default_rng([seed, 0, number])
        words += block.integers(0, 2**20, size=TRACE_BLOCK).tolist()
    if len(words) < size:
        rest = np.random.default_rng([seed, 1, line])
        words += rest.integers(0, 2**20, size=size - len(words)).tolist()
    return tuple(words[:size])


def read_custom(path: str, most: int, *, output_len: int) -> list[Prompt]:
    prompts: list[Prompt] = []
    for line, row in _rows(path, most):
        wanted = output_len
        if "output_tokens" in row:
            wanted = int(_count(path, line, row, "output_tokens"))
        has_prompt = "prompt" in row
        if has_prompt == ("messages" in row):
            _fail(path, line, "needs either prompt or messages")
        if has_prompt:
            turns: tuple[Turn, ...] = (Turn("user", text=_text(path, line, row["prompt"])),)
        else:
            turns = _messages(path, line, row["messages"])
        prompts.append(Prompt(turns, wanted, is_chat=not has_prompt))
    return prompts


def _messages(path: str, line: int, messages: object) -> tuple[Turn, ...]:
    if not isinstance(messages, list) or not messages:
        _fail(path, line, "messages must be a list with at least one message")
    turns = []
    for message in messages:
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            _fail(path, line, f"each message needs a role of {', '.join(ROLES)}")
        turns.append(Turn(message["role"], text=_text(path, line, message.get("content"))))
    return tuple(turns)


def _text(path: str, line: int, value: object) -> str:
    if not isinstance(value, str) or not value:
        _fail(path, line, "prompts and contents must be text and not empty")
    return value


def _rows(path: str, most: int) -> Iterator[Line]:
    """(line number, object) of the first non-empty lines; at least one."""
    found = 0
    try:
        with open(path, encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if found == most:
                    return
                if line.strip():
                    found += 1
                    yield number, _parse(path, number, line)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(
            f"dataset_path: {path} cannot be read: {reason}", param="dataset_path"
        ) from None
    if not found:
        raise ConfigError(f"dataset_path: {path} has no prompts", param="dataset_path")


def _parse(path: str, number: int, line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:
        _fail(path, number, f"is not JSON: {error}")
    if not isinstance(row, dict):
        _fail(path, number, "must be a JSON object")
    return row


def _count(
    path: str, line: int, row: dict[str, Any], name: str, *, low: int = 1, whole: bool = True
) -> float:
    value = row.get(name)
    kinds = int if whole else (int, float)
    if not isinstance(value, kinds) or isinstance(value, bool) or not low <= value < 2**53:
        what = "an integer" if whole else "a number"
        _fail(path, line, f"{name} must be {what} from {low}, not {value!r}")
    return float(value)


def _fail(path: str, line: int, what: str) -> NoReturn:
    raise ConfigError(f"dataset_path: {path}, line {line}: {what}", param="dataset_path")
