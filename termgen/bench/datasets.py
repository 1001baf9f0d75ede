"""The prompts of `termgen bench serve`, by the name of a dataset. Seeded, no network.

Files are read by `prompt_files`; how a prompt becomes a request is the business of `prompts`.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from termgen.bench.prompt_files import read_custom, read_trace
from termgen.bench.prompts import Prompt, Turn
from termgen.bench.serve_options import ServeOptions
from termgen.errors import ConfigError

NUM_WORD_NUMBERS = 2**20
"""Word numbers are drawn from as many; each maker of requests folds them to what it has."""

OPEN_CHATS = 32
"""Conversations that take turns at once."""
MOST_TURNS = 8
USER_TOKENS = (60.0, 1.1, 1024)
"""Median, spread (of the logarithm) and most tokens of a message; about as people chat."""
ANSWER_TOKENS = (200.0, 0.8, 1024)


def make_prompts(options: ServeOptions, *, seed: int) -> list[Prompt]:
    """[num_prompts], or fewer where a file has no more. Raises `ConfigError`."""
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
    """Of the median length, but of other words: they must leave nothing useful in a cache."""
    rng = np.random.default_rng([seed, 2])
    length = int(np.median([p.num_words for p in prompts])) or 32
    output = int(np.median([p.output_len for p in prompts]))
    return [Prompt((Turn("user", _words(rng, length)),), output) for _ in range(count)]


def check_fits(prompts: list[Prompt], max_model_len: int | None) -> None:
    """Refuse before starting what the model's context cannot hold. Raises `ConfigError`."""
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
