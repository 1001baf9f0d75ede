"""JSONL files of prompts: recorded traces, and prompts of the user's own.

A trace is in the format of Mooncake's: `timestamp` in milliseconds, `input_length`,
`output_length`, and optionally `hash_ids`, one for each 512 tokens of the prompt; equal numbers
are equal text. A custom line has a `prompt` or `messages`, and optionally `output_tokens`.
Whatever is wrong is a `ConfigError` with file and line.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NoReturn

import numpy as np

from termgen.bench.prompts import Prompt, Turn
from termgen.errors import ConfigError

TRACE_BLOCK = 512
"""Tokens that one hash of a trace stands for."""
ROLES = ("system", "user", "assistant")
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
    """Line number and object of the first lines that are not empty; at least one."""
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
