"""The drafter of a row's own text, beside a search in plain Python."""

from __future__ import annotations

import random

import numpy as np
import pytest

from termgen.engine.device.drafting.ngram import NgramDrafter


def drafter(num_tokens: int = 4, shortest: int = 2, longest: int = 5) -> NgramDrafter:
    return NgramDrafter(num_tokens, num_slots=4, shortest=shortest, longest=longest)


def guess(maker: NgramDrafter, text: str) -> str:
    tokens = np.frombuffer(text.encode(), np.uint8).astype(np.int32)
    return bytes(maker.guess(tokens)[0].tolist()).decode()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("the cat sat on the cat", " sat"),  # behind the longest part that stood before
        ("abX. abY. ab", "Y. a"),  # the newest of two
        ("xabX zabY xab", "X za"),  # but the longer one goes before
        ("abcdef", ""),
        ("a", ""),
        ("xa", ""),
        ("aa", ""),  # one token is too little
        ("aaa", "aaaa"),  # a guess goes on with itself
        ("abcabca", "bcab"),
    ],
)
def test_what_stood_behind_the_end(text: str, expected: str) -> None:
    assert guess(drafter(), text) == expected


def by_hand(text: str, num_tokens: int, shortest: int, longest: int) -> str:
    for size in range(longest, shortest - 1, -1):
        end = text[-size:]
        # Not the end itself, but whatever overlaps it.
        at = text.rfind(end, 0, len(text) - 1) if size < len(text) else -1
        if at >= 0:
            found = text[at + size :]
            return (found * num_tokens)[:num_tokens]
    return ""


def test_it_finds_what_a_plain_search_finds() -> None:
    seed = random.randrange(10**6)
    print("seed", seed)
    rng = random.Random(seed)
    num_found = 0
    for _ in range(2000):
        text = "".join(rng.choice("abc" if rng.random() < 0.8 else "de") for _ in range(40))
        text = text[: rng.randrange(1, 41)]
        shortest = rng.randint(1, 4)
        longest, num_tokens = rng.randint(shortest, 7), rng.randint(1, 6)
        expected = by_hand(text, num_tokens, shortest, longest)
        assert guess(drafter(num_tokens, shortest, longest), text) == expected, text
        num_found += bool(expected)
    assert 500 < num_found < 2000


@pytest.mark.parametrize(
    ("text", "matched"),
    [("abXab", 2), ("abcdXabcd", 4), ("abcdefXabcdef", 5), ("ab", 0), ("aa", 0)],
)
def test_it_says_how_much_stood_before(text: str, matched: int) -> None:
    tokens = np.frombuffer(text.encode(), np.uint8).astype(np.int32)
    assert drafter().guess(tokens)[1] == matched
