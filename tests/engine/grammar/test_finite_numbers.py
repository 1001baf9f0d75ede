"""Numbers in an answer under a schema are finite for any reader of JSON."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from termgen.engine.grammar.grammar import GrammarCompiler, NumberTokens
from termgen.engine.text.tokenizer import Tokenizer, load_tokenizer
from termgen.vocabulary.structured_outputs import StructuredOutputsParams

EOS = 1


@pytest.fixture(scope="module")
def tokenizer(tiny_model_dir: Callable[[str], Path]) -> Tokenizer:
    return load_tokenizer(tiny_model_dir("llama"))


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(tokenizer, vocab_size=tokenizer.vocab_size, eos_token_ids=(EOS,))
    yield compiler
    compiler.close()


@pytest.fixture(scope="module")
def texts(tokenizer: Tokenizer) -> list[str]:
    return [tokenizer.decode([i]) for i in range(tokenizer.vocab_size)]


def write(compiler: GrammarCompiler, texts: list[str], chance: Any, **wanted: Any) -> str:
    """The answer of a model that prefers digits and exponents."""
    matcher = compiler.compile(StructuredOutputsParams(**wanted)).start(ends_at_eos=True)
    bits = np.zeros(matcher.num_words, np.int32)
    ids: list[int] = []
    while len(ids) < 400 and not matcher.is_ended:
        matcher.fill(bits)
        flags = np.unpackbits(bits.view(np.uint8), bitorder="little")
        allowed = [int(i) for i in np.flatnonzero(flags)]
        loved = [i for i in allowed if set(texts[i]) & set("0123456789eE")]
        limit = 330 if chance.random() < 0.5 else 20
        end = [i for i in allowed if i == EOS or set(texts[i]) & set(",}]")]
        choice = loved if loved and len(ids) < limit else end or allowed
        token = chance.choice(choice)
        if token == EOS:
            break
        assert matcher.accept(token)
        ids.append(token)
    return "".join(texts[i] for i in ids)


@pytest.mark.parametrize(
    "wanted",
    [
        {"json": {"type": "number"}},
        {"json": {"type": "integer"}},
        {"json": {"type": "array", "items": {"type": "number"}, "minItems": 2}},
        {"json": {"properties": {"n": {"type": "number"}}, "required": ["n"]}},
        {"grammar": 'start: "<call>" %json {"type": "number"} "</call>"'},
    ],
    ids=str,
)
def test_numbers_are_finite_whatever_the_model_writes(
    compiler: GrammarCompiler, texts: list[str], wanted: dict[str, Any]
) -> None:
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    chance = random.Random(seed)
    num_exponents = 0
    for _ in range(6):
        text = write(compiler, texts, chance, **wanted)
        text = text.removeprefix("<call>").removesuffix("</call>")
        num_exponents += "e" in text.lower()
        for number in _numbers(text):
            assert math.isfinite(float(number)), text
    if wanted.get("json") != {"type": "integer"}:
        assert num_exponents, "the model has tried"


def _numbers(text: str) -> list[str]:
    try:
        value = json.loads(text, parse_float=str, parse_int=str)
    except ValueError:  # cut off; its numbers are complete but for the last
        return [
            part for part in text.replace("[", ",").split(",")[:-1] if part and part[0].isdigit()
        ]
    rest, found = [value], []
    while rest:
        item = rest.pop()
        if isinstance(item, str):
            found.append(item)
        elif isinstance(item, dict):
            rest.extend(item.values())
        elif isinstance(item, list):
            rest.extend(item)
    return found


def test_texts_and_expressions_may_have_any_digits(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    digits = "1e" + "9" * 40
    for wanted, text in (
        ({"json": {"type": "string"}}, json.dumps(digits)),
        ({"regex": "[0-9]{300}"}, "7" * 300),
        ({"regex": r"1e[0-9]{40}"}, digits),
        ({"json": {"type": "string", "pattern": "^[0-9]{300}$"}}, json.dumps("7" * 300)),
    ):
        matcher = compiler.compile(StructuredOutputsParams(**wanted)).start(ends_at_eos=True)
        bits = np.zeros(matcher.num_words, np.int32)
        for token in tokenizer.encode(text, add_special_tokens=False):
            matcher.fill(bits)
            assert int(bits[token // 32]) >> token % 32 & 1, text
            assert matcher.accept(token)


def test_long_tokens_of_digits_are_counted_whole() -> None:
    tokens = [b"1", b"e", b"+", b"e99", b"e+999", b"000", b"00", b"0", b",", b'"', b".5e1234", b"."]
    numbers = NumberTokens(tokens)

    def left(text: list[bytes]) -> set[bytes]:
        number = b""
        for token in text:
            number = numbers.follow(number, tokens.index(token))
        bits = np.full(1, -1, np.int32)
        bits &= ~(1 << tokens.index(b'"'))
        if number:
            numbers.keep_finite(number, bits)
        return {token for i, token in enumerate(tokens) if int(bits[0]) >> i & 1}

    everything = set(tokens) - {b'"'}
    assert left([b","]) == everything
    assert left([b"1"]) == everything - {b"e+999", b".5e1234"}
    assert left([b"1", b"e"]) == everything - {b"000"}
    assert left([b"1", b"e", b"+", b"0"]) == everything - {b"000", b"00"}
    assert left([b"1", b"e99"]) == everything - {b"1", b"0", b"00", b"000"}
    assert left([b"1", b"e99", b","]) == everything
    assert b"0" in left([b"000"] * 66) and b"0" not in left([b"000"] * 67)
    assert b"0" in left([b"1", b"."] + [b"000"] * 100), "digits behind the point do no harm"
