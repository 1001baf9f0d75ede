"""Matchers of random grammars, driven by random tokens: allowed ones, forbidden ones, and back.

A crash of the library ends the whole test run, which is what this file is for. More of them:
TERMGEN_MATCHER_FUZZ_S=600 pytest -s tests/engine/grammar/test_matcher_fuzz.py, of one seed with
TERMGEN_MATCHER_FUZZ_SEED.
"""

from __future__ import annotations

import json
import math
import os
import random
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from generated_schemas import generate

from termgen.engine.grammar.grammar import Grammar, GrammarCompiler, Matcher
from termgen.engine.text.tokenizer import Tokenizer, load_tokenizer
from termgen.errors import OverloadedError, RequestError
from termgen.vocabulary.structured_outputs import StructuredOutputsParams

NUM_GRAMMARS = 120
SECONDS = float(os.environ.get("TERMGEN_MATCHER_FUZZ_S", "0"))
"""Time limit that replaces the number of grammars."""
SEED = os.environ.get("TERMGEN_MATCHER_FUZZ_SEED")
VOCAB = 600
"""More rows than the tokenizer has tokens, as in real models."""
EOS = 1
MAX_TOKENS = 120
WORDS = ("a", "yes", "no ", "<x>", "größe", "日本", '"', "\\", "0", "12", "e", "\n", "🎉")


class Fuzz:
    """Generates random grammars; the same seed gives the same ones."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)

    def wanted(self) -> dict[str, Any]:
        """One field of `StructuredOutputsParams`."""
        kinds = ["json", "json", "regex", "regex", "lark", "lark", "gbnf", "choice", "deep"]
        kind = self.rng.choice(kinds)
        if kind == "deep":
            return {"grammar": self.late_depth()}
        if kind == "json":
            return {"json": self.schema()}
        if kind == "regex":
            return {"regex": self.regex(4)}
        if kind == "choice":
            return {"choice": tuple(self.words() for _ in range(self.rng.randint(1, 40)))}
        text = self.gbnf() if kind == "gbnf" else self.lark()
        return {"grammar": self.mutated(text) if self.rng.random() < 0.3 else text}

    def words(self) -> str:
        return "".join(self.rng.choices(WORDS, k=self.rng.randint(1, 6)))

    def schema(self) -> dict[str, Any]:
        schema = generate(self.rng.randrange(10**6))
        if self.rng.random() < 0.3:
            return schema
        free: list[dict[str, Any]] = [
            {"type": "number"},
            {"type": "integer"},
            {"type": "string"},
            {},
            {"type": "object", "additionalProperties": {"type": "number"}},
            {"type": "array", "items": {"anyOf": [{"type": "number"}, schema]}},
            {"allOf": [schema, {"title": "t"}]},
            {"$ref": "#/$defs/n", "$defs": {"n": {"items": {"$ref": "#/$defs/n"}}}},
        ]
        return self.rng.choice(free)

    def regex(self, depth: int) -> str:
        rng = self.rng
        if not depth or rng.random() < 0.2:
            atoms = ["a", "b", "[a-f]", "[^a]", "0", r"\.", "[0-9]", "ü", "x{0,3}", ".", "🎉", "1e"]
            return rng.choice(atoms)
        inner = [self.regex(depth - 1) for _ in range(rng.randint(1, 3))]
        shape = rng.randrange(5)
        if shape == 0:
            return "(" + "|".join(inner) + ")"
        if shape == 1:
            low = rng.randint(0, 3)
            high = low + rng.choice([0, 1, 5, 50])
            return f"({''.join(inner)}){{{low},{high}}}"
        if shape == 2:
            return f"({''.join(inner)})" + rng.choice("*+?")
        return "".join(inner)

    def lark(self) -> str:
        rng = self.rng
        names = [f"r{i}" for i in range(rng.randint(1, 6))]
        terminals = [f"T{i}" for i in range(rng.randint(1, 4))]
        lines = [f"start: {self.expansion(names + terminals)}"]
        for name in names:
            attribute = rng.choice(["", "", "", "[max_tokens=4]", "[capture]", "[temperature=0.5]"])
            several = " | ".join(self.expansion(names + terminals) for _ in range(2))
            lines.append(f"{name}{attribute}: {several}")
        if rng.random() < 0.3:
            attribute = rng.choice(["lazy", 'stop="x"', 'suffix="y"'])
            lines.append(f"lazy[{attribute}]: /[a-y]+/")
            lines[0] += " lazy"
        for name in terminals:
            operator = rng.choice(["", "", f" & /{self.slashed(2)}/", f" | {self.quoted()}"])
            lines.append(f"{name}: /{self.slashed(3)}/{operator}")
        if rng.random() < 0.2:
            lines.append("%ignore /[ \\n]+/")
        return "\n".join(lines)

    def expansion(self, names: list[str]) -> str:
        rng = self.rng
        parts = []
        for _ in range(rng.randint(1, 3)):
            part = rng.choice([*names, *names, self.quoted(), self.rare()])
            parts.append(part + rng.choice(["", "", "", "?", "{1,3}", "*", "+"]))
        return " ".join(parts)

    def rare(self) -> str:
        return self.rng.choice(
            [
                "<[5-9]>",
                "<[*]>",
                "<[^7]>",
                "<s>",
                '"a".."f"',
                '"yes"i',
                '%regex {"substring_chars": "abcabd"}',
                "%json " + json.dumps(self.schema()),
                '%lark { start: "in" | "" }',
                "/" + self.slashed(2) + "/",
            ]
        )

    def slashed(self, depth: int) -> str:
        return self.regex(depth).replace("/", r"\/")

    def quoted(self) -> str:
        return json.dumps(self.words(), ensure_ascii=self.rng.random() < 0.5)

    def late_depth(self) -> str:
        """A grammar that goes deep only after some tokens: the proof did not get that far."""
        rng = self.rng
        many = int(2 ** rng.uniform(3, 11))
        inner = rng.choice(
            [
                "/" + "(" * min(many, 240) + self.slashed(1) + "|b)" * min(many, 240) + "/",
                "/" + f"({self.slashed(2)})?" * many + "/",
                "/(" + "|".join(f"{'ab' * (i % 7)}{i}" for i in range(many)) + "){1,9}/",
                "(" * min(many, 240) + self.quoted() + ' | "b")' * min(many, 240),
                "%json " + json.dumps({"enum": [[i] * (i % 9) for i in range(many)]}),
                "%json " + json.dumps(self.nested_schema(min(many, 29))),
            ]
        )
        chain = "\n".join(
            f"r{i}: {rng.choice(['', '', self.quoted()])} r{i + 1}" for i in range(many)
        )
        return f"start: {self.quoted()} r0 {self.quoted()}\n{chain}\nr{many}: {inner} r{many}?"

    def nested_schema(self, depth: int) -> dict[str, Any]:
        schema = self.schema()
        for i in range(depth):
            names = {"properties": {f"p{i}": schema}, "required": [f"p{i}"]}
            schema = self.rng.choice([{"items": schema}, names, {"anyOf": [schema, names]}])
        return schema

    def gbnf(self) -> str:
        rng = self.rng
        names = [f"rule{i}" for i in range(rng.randint(1, 4))]
        lines = ["root ::= " + " ".join(rng.choices(names, k=2))]
        for name in names:
            choices = []
            for _ in range(rng.randint(1, 3)):
                atoms = [*names, '"yes"', "[a-z0-9]", '("ja" | "nein")', '"\\n"', '"<x>"']
                parts = rng.choices(atoms, k=rng.randint(1, 3))
                choices.append(
                    " ".join(part + rng.choice(["", "", "*", "+", "?"]) for part in parts)
                )
            lines.append(f"{name} ::= " + " | ".join([*choices, '"."']))
        return "\n".join(lines)

    def mutated(self, text: str) -> str:
        rng = self.rng
        for _ in range(rng.randint(1, 3)):
            at = rng.randrange(len(text) + 1)
            end = min(len(text), at + rng.randint(0, 4))
            text = (
                text[:at] + rng.choice(["", text[at:end] * 3, *WORDS, "(", "{", "~"]) + text[end:]
            )
        return text or "start: /a/"


class Drive:
    """Drives the matchers of one grammar."""

    def __init__(
        self,
        grammar: Grammar,
        tokenizer: Tokenizer,
        rng: random.Random,
        bytes_of: Sequence[bytes],
        *,
        has_stop: bool,
    ) -> None:
        """has_stop: a lexeme ends at a text that tokens may go beyond."""
        self.grammar = grammar
        self.tokenizer = tokenizer
        self.rng = rng
        self.bytes_of = bytes_of
        self.has_stop = has_stop
        self.counts: Counter[str] = Counter()

    def matcher(self) -> Matcher:
        return self.grammar.start(ends_at_eos=self.rng.random() < 0.8)

    def bits(self, matcher: Matcher, *, together: bool = False) -> np.ndarray[Any, Any]:
        """The next mask. Raises RequestError."""
        if not together:
            bits = np.full(matcher.num_words, -1, np.int32)
            matcher.fill(bits)
            self.counts["masks"] += 1
            return bits
        many = [matcher, self.copied(matcher), self.copied(matcher)]
        masks = np.full((3, matcher.num_words), -1, np.int32)
        for fault in Matcher.fill_all(many, masks, in_this_thread=self.rng.random() < 0.5):
            if fault is not None:
                raise fault
        self.counts["masks"] += 3
        assert (masks[0] == masks[1]).all() and (masks[0] == masks[2]).all()
        return masks[0]

    def copied(self, matcher: Matcher) -> Matcher:
        copy = Matcher(
            matcher._matcher.deep_copy(),
            matcher._executor,
            matcher.num_words,
            matcher._withheld,
            numbers=matcher._numbers,
        )
        copy._number = matcher._number
        return copy

    def raw(self, matcher: Matcher) -> set[int]:
        """Tokens that the library allows."""
        bits = np.zeros(matcher.num_words, np.int32)
        matcher._matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        return allowed(bits)

    def walk(self) -> str | None:
        """Write an answer; None if it did not reach its end."""
        self.counts["walks"] += 1
        matcher = self.matcher()
        masks: list[set[int]] = []
        ids: list[int] = []
        try:
            while len(ids) < MAX_TOKENS:
                bits = self.bits(matcher, together=bool(ids) and self.rng.random() < 0.1)
                may = allowed(bits)
                assert may, "something may always follow"
                assert max(may) < VOCAB
                masks.append(may)
                act = self.rng.random()
                if act < 0.02:
                    self.break_one(self.copied(matcher), may)
                elif act < 0.06 and ids:
                    self.go_back(matcher, masks, len(ids))
                near_end = len(ids) > MAX_TOKENS // 2
                if EOS in may and (near_end or len(may) == 1 or self.rng.random() < 0.1):
                    assert matcher.accept(EOS)
                    self.counts["answers"] += 1
                    return self.tokenizer.decode(ids)
                token = self.rng.choice(sorted(may - {EOS}))
                if not matcher.accept(token):  # the mask allowed it
                    why = matcher._matcher.get_error()
                    is_limit = "too many" in why.lower() or "max is" in why
                    # Faults of the library end this answer and no other: a panic that it catches,
                    # or, where a limit cut its lexer short, a token of its own mask.
                    is_fault = why.startswith("panic: ") or "doesn't satisfy the grammar" in why
                    assert is_limit or is_fault, why
                    self.counts["limits reached" if is_limit else "faults"] += 1
                    return None
                ids.append(token)
                self.counts["tokens"] += 1
                if matcher.is_ended:
                    self.counts["answers"] += 1
                    return self.tokenizer.decode(ids)
        except RequestError as error:  # a limit was reached
            assert error.code == "invalid_schema"
            self.counts["limits reached"] += 1
        return None

    def break_one(self, matcher: Matcher, may: set[int]) -> None:
        """Take in a token that is not allowed: no other matcher may notice."""
        raw = self.raw(matcher)
        forbidden = sorted(set(range(VOCAB)) - raw - may - self.shorter(raw))
        if not forbidden:
            return
        self.counts["forbidden tokens"] += 1
        is_taken = matcher.accept(self.rng.choice(forbidden))
        if is_taken and self.has_stop:  # text beyond the stop is cut off
            self.counts["tokens beyond a stop"] += 1
            return
        assert not is_taken
        with pytest.raises(RequestError):
            self.bits(matcher)
        assert not matcher.accept(self.rng.choice(sorted(may)))

    def shorter(self, may: set[int]) -> set[int]:
        """Tokens that are prefixes of the only allowed one: where the text is fixed, the mask has
        the token that the tokenizer would choose, and the grammar accepts its parts as well."""
        if len(may) != 1:
            return set()
        text = self.bytes_of[next(iter(may))]
        return {i for i, part in enumerate(self.bytes_of) if part and text.startswith(part)}

    def go_back(self, matcher: Matcher, masks: list[set[int]], num_tokens: int) -> None:
        """Go back some tokens and on again from there, in a copy."""
        other = self.copied(matcher)
        here = self.raw(other)
        count = self.rng.randint(1, num_tokens)
        if not other._matcher.rollback(count):
            assert other._matcher.is_error()
            self.counts["refused rollbacks"] += 1
            return
        self.counts["rollbacks"] += 1
        before = self.raw(other)
        assert masks[num_tokens - count] <= before, "of the same place"
        other._matcher.consume_token(self.rng.choice(sorted(before)))
        assert self.raw(matcher) == here, "a copy went back"


def allowed(bits: np.ndarray[Any, Any]) -> set[int]:
    flags = np.unpackbits(bits.view(np.uint8), bitorder="little")
    return set(np.flatnonzero(flags).tolist())


@pytest.fixture(scope="module")
def tokenizer(tiny_model_dir: Callable[[str], Path]) -> Tokenizer:
    return load_tokenizer(tiny_model_dir("llama"))


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(tokenizer, vocab_size=VOCAB, eos_token_ids=(EOS,))
    yield compiler
    compiler.close()


def test_random_grammars_are_followed_whatever_comes(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    seed = int(SEED) if SEED else random.randrange(10**9)
    print(f"seed {seed}", flush=True)
    counts: Counter[str] = Counter()
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline if SECONDS else counts["grammars"] < NUM_GRAMMARS:
        one_seed = seed + counts["grammars"]
        counts["grammars"] += 1
        fuzz = Fuzz(one_seed)
        wanted = fuzz.wanted()
        try:
            drive_one(compiler, tokenizer, fuzz, wanted, counts)
        except BaseException:
            print(f"TERMGEN_MATCHER_FUZZ_SEED={one_seed}: {wanted}", flush=True)
            raise
    print(dict(counts))
    assert counts["faults"] <= 0.01 * counts["walks"], counts
    assert counts["tokens"] > 5 * counts["grammars"], "most of them are grammars"
    assert counts["answers"] > counts["grammars"] / 2


def drive_one(
    compiler: GrammarCompiler,
    tokenizer: Tokenizer,
    fuzz: Fuzz,
    wanted: dict[str, Any],
    counts: Counter[str],
) -> None:
    try:
        grammar = compiler.compile(StructuredOutputsParams(**wanted, param="tools"))
    except OverloadedError:
        counts["waited"] += 1
        return
    except RequestError as error:
        assert (error.status, error.code, error.param) == (400, "invalid_schema", "tools")
        counts["refused"] += 1
        return
    bytes_of = [compiler._vocabulary.decode_bytes([i]) for i in range(VOCAB)]
    drive = Drive(grammar, tokenizer, fuzz.rng, bytes_of, has_stop="stop=" in str(wanted))
    first = grammar._first_mask.copy()
    for _ in range(3):
        answer = drive.walk()
        if answer is not None:
            check(wanted, answer)
    assert (drive.bits(grammar.start(ends_at_eos=True)) == first).all(), "the prototype stayed"
    counts.update(drive.counts)


def check(wanted: dict[str, Any], answer: str) -> None:
    """Check that the answer satisfies the request, by independent validators."""
    if "regex" in wanted:
        assert re.fullmatch(wanted["regex"], answer), answer
    elif "choice" in wanted:
        assert answer in wanted["choice"], answer
    elif "json" in wanted:
        value = json.loads(answer)
        assert not list(jsonschema.Draft202012Validator(wanted["json"]).iter_errors(value)), answer
        assert all(map(math.isfinite, numbers_in(value))), answer


def numbers_in(value: Any) -> Iterator[float]:
    if isinstance(value, (int, float)):
        yield float(value)
    elif isinstance(value, list):
        for item in value:
            yield from numbers_in(item)
    elif isinstance(value, dict):
        yield from numbers_in(list(value.values()))
