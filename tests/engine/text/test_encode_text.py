"""Long texts give the same tokens, and other threads run meanwhile."""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from termgen.engine.text.chat_encoding import LONG_TEXT_CHARS, encode_ids, encode_text

WORDS = "the model reads 👋🏽 a prompt, Grüße 你好 \n and <s> writes".split(" ")


@pytest.fixture(scope="module")
def backend() -> Any:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<s>"],
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator([" ".join(WORDS) * 5], trainer)
    return tokenizer


def test_both_ways_give_the_same_encoding(backend: Any) -> None:
    seed = random.randrange(10**6)
    print("seed", seed)
    rng = random.Random(seed)
    for length in (0, 10, LONG_TEXT_CHARS - 1, LONG_TEXT_CHARS, 5000):
        text = " ".join(rng.choice(WORDS) for _ in range(length))[:length]
        found = encode_text(backend, text, add_special_tokens=False)
        expected = backend.encode(text, add_special_tokens=False)
        assert found.ids == expected.ids
        assert found.offsets == expected.offsets
        assert encode_ids(backend, text, add_special_tokens=False) == expected.ids


def test_python_goes_on_while_a_long_text_is_encoded(backend: Any) -> None:
    text = " ".join(WORDS) * 4000
    begun, done = threading.Event(), threading.Event()

    def encode() -> None:
        begun.set()
        encode_text(backend, text, add_special_tokens=False)
        done.set()

    thread = threading.Thread(target=encode)
    thread.start()
    begun.wait()
    num_turns = 0
    while not done.is_set():
        num_turns += 1
        done.wait(0.001)
    thread.join()
    assert num_turns > 5, "with the lock held there would be one turn or two"
