"""Grammars that compile and grammars refused, with the real grammar engine on a small tokenizer."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from constrained_harness import fill_each

from termgen.engine.grammar import grammar as grammar_module
from termgen.engine.grammar.grammar import GrammarCompiler
from termgen.engine.text.tokenizer import Tokenizer, load_tokenizer
from termgen.errors import RequestError
from termgen.vocabulary.sampling_params import SamplingParams
from termgen.vocabulary.structured_outputs import (
    MAX_ENUM_VALUES,
    MAX_SCHEMA_DEPTH,
    MAX_SCHEMA_PROPERTIES,
    MAX_TEXT_BYTES,
    StructuredOutputsParams,
)
from termgen.vocabulary.token_mask import TokenMatcher

EOS = 1
VOCAB = 600
"""More rows than the tokenizer has tokens, as in real models."""


@pytest.fixture(scope="module")
def tokenizer(tiny_model_dir: Callable[[str], Path]) -> Tokenizer:
    return load_tokenizer(tiny_model_dir("llama"))


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, vocab_size=VOCAB, eos_token_ids=(EOS,))


def allowed(matcher: TokenMatcher) -> set[int]:
    bits = np.zeros(matcher.num_words, np.int32)
    matcher.fill(bits)
    flags = np.unpackbits(bits.view(np.uint8), bitorder="little")
    return set(np.flatnonzero(flags).tolist())


def fits(compiler: GrammarCompiler, tokenizer: Tokenizer, text: str, **wanted: Any) -> bool:
    """True if a text is a whole answer, and each of its tokens was allowed at its position."""
    matcher = compiler.compile(StructuredOutputsParams(**wanted)).start(ends_at_eos=True)
    for token in tokenizer.encode(text, add_special_tokens=False):
        may_follow = allowed(matcher)
        if token not in may_follow:
            return False
        assert max(may_follow) < tokenizer.vocab_size
        assert matcher.accept(token)
    return matcher.is_ended or EOS in allowed(matcher)


@pytest.mark.parametrize(
    ("wanted", "good", "bad"),
    [
        ({"json": {"type": "integer"}}, "-12", "1.5"),
        ({"json": '{"enum": ["a", {"b": []}]}'}, '{"b":[]}', '"b"'),
        ({"json_object": True}, '{"x":[1,{"y":null}]}', "[1]"),
        ({"json_object": True}, '{"Grüße":"🎉"}', '{"x":1'),
        ({"regex": r"[a-c]{2}\d+"}, "ab12", "ab"),
        ({"regex": "(ja|nein)!?"}, "nein!", "nein!!"),
        ({"choice": ("Paris", 'say "hi"\n')}, 'say "hi"\n', "Pari"),
        ({"grammar": 'start: "x" num\nnum: /[0-9]+/'}, "x07", "07"),
        ({"grammar": 'root ::= "yes" | "no" [0-9]'}, "no4", "no"),
        ({"grammar": '\n \nroot ::= starter\nstarter ::= "a" [0-9]\n\n'}, "a1", "a"),
        ({"grammar": "\n" * 60_000 + '  start : "a::=" /[0-9]/'}, "a::=1", "a1"),
    ],
)
def test_answers_are_what_was_asked_for(
    compiler: GrammarCompiler, tokenizer: Tokenizer, wanted: dict[str, Any], good: str, bad: str
) -> None:
    assert fits(compiler, tokenizer, good, **wanted)
    assert not fits(compiler, tokenizer, bad, **wanted)


@pytest.mark.parametrize(
    ("wanted", "why"),
    [
        ({"json": {"type": "strung"}}, "strung"),
        ({"json": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
        ({"json": {"$ref": "#/nowhere"}}, "nowhere"),
        ({"json": {"$ref": "http://127.0.0.1/schema"}}, "does not fetch"),
        ({"json": {"type": "string", "pattern": "(["}}, "regex"),
        ({"regex": "(["}, "unclosed"),
        ({"regex": "(?=a)b"}, "look-around"),
        ({"grammar": "start: nothing"}, "nothing"),
        ({"grammar": 'root ::= "x'}, "string|expected|end"),
    ],
)
def test_what_cannot_be_compiled_is_refused_naming_the_field(
    compiler: GrammarCompiler, wanted: dict[str, Any], why: str
) -> None:
    for param in ("response_format", "tools"):  # the second time from the cache
        with pytest.raises(RequestError, match=f"(?is)^{param}: .*({why})") as refusal:
            compiler.compile(StructuredOutputsParams(**wanted, param=param))
        error = refusal.value
        assert (error.param, error.code, error.status) == (param, "invalid_schema", 400)
        assert len(str(error)) < 400


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"not": schema}
    return schema


@pytest.mark.parametrize(
    ("wanted", "why"),
    [
        ({}, "exactly one"),
        ({"regex": "a", "json_object": True}, "exactly one"),
        ({"json": "[1"}, "not valid JSON"),
        ({"json": "[1]"}, "JSON object"),
        ({"json": 5}, "JSON object"),
        ({"json": {"x": object()}}, "not JSON data"),
        ({"json": nested(MAX_SCHEMA_DEPTH + 1)}, "nested"),
        ({"json": nested(100_000)}, "bytes"),
        ({"json": "[" * 60_000}, "not valid JSON"),
        ({"json": {"properties": dict.fromkeys(map(str, range(1001)), {})}}, "properties"),
        ({"json": {"enum": list(range(MAX_ENUM_VALUES + 1))}}, "enum"),
        ({"json": {"description": "x" * MAX_TEXT_BYTES}}, "bytes"),
        ({"regex": "x" * (MAX_TEXT_BYTES + 1)}, "bytes"),
        ({"regex": ""}, "not empty"),
        ({"regex": 5}, "not empty"),
        ({"regex": "\ud800"}, "surrogate"),
        ({"choice": ()}, "not empty"),
        ({"choice": ("a", "")}, "not empty"),
        ({"choice": "ab"}, "list"),
        ({"choice": ("x" * 40_000, "y" * 40_000)}, "bytes"),
        ({"json_object": "yes"}, "true or false"),
        ({"grammar": "\n" * 60_000 + 'root ::= "x"'}, "GBNF grammar has .* at most 8192"),
    ],
)
def test_what_is_malformed_or_too_large_never_reaches_the_compiler(
    wanted: dict[str, Any], why: str
) -> None:
    with pytest.raises(RequestError, match=why) as refusal:
        StructuredOutputsParams(**wanted, param="response_format")
    assert refusal.value.param == "response_format"
    assert MAX_SCHEMA_PROPERTIES < 1001


def test_params_of_another_type_are_refused() -> None:
    with pytest.raises(RequestError, match="StructuredOutputsParams"):
        SamplingParams(structured_outputs={"regex": "a"})  # type: ignore[arg-type]


def test_end_tokens_come_only_where_the_answer_may_end(compiler: GrammarCompiler) -> None:
    grammar = compiler.compile(StructuredOutputsParams(regex="a+"))
    for ends_at_eos in (True, False):
        matcher = grammar.start(ends_at_eos=ends_at_eos)
        assert EOS not in allowed(matcher)
        assert matcher.accept(min(allowed(matcher)))
        assert (EOS in allowed(matcher)) == ends_at_eos
    empty = compiler.compile(StructuredOutputsParams(regex="()")).start(ends_at_eos=False)
    assert allowed(empty) == {EOS}, "something must be left to sample"


def test_a_matcher_stays_broken_and_others_of_its_grammar_go_on(compiler: GrammarCompiler) -> None:
    grammar = compiler.compile(StructuredOutputsParams(choice=("aa", "bb")))
    good, bad = grammar.start(ends_at_eos=True), grammar.start(ends_at_eos=True)
    (wrong,) = set(range(3, 4)) - allowed(bad)
    assert not bad.accept(wrong) and not bad.accept(min(allowed(good)))
    assert good.accept(min(allowed(good))) and not good.is_ended


def test_a_limit_reached_in_a_mask_is_an_error_and_no_end_of_the_answer(
    compiler: GrammarCompiler,
) -> None:
    wanted = StructuredOutputsParams(regex="(([a-z]{1,1000}){1,1000}){1,1000}")
    matcher = compiler.compile(wanted).start(ends_at_eos=True)
    with pytest.raises(RequestError, match="too complex"):
        for _ in range(10):
            assert matcher.accept(max(allowed(matcher) - {EOS}))
    assert not matcher.accept(EOS), "a broken matcher takes nothing"


@pytest.mark.parametrize("in_this_thread", [False, True])
def test_masks_filled_at_once_are_those_of_each_alone(
    compiler: GrammarCompiler, in_this_thread: bool
) -> None:
    """The batch has several grammars, with and without an end; one reaches a limit on the way."""
    wanted: list[dict[str, Any]] = [
        {"json_object": True},
        {"regex": "[ab]*"},
        {"regex": "(([a-z]{1,1000}){1,1000}){1,1000}"},
        {"choice": ("aa", "bbb")},
    ]
    grammars = [compiler.compile(StructuredOutputsParams(**each)) for each in wanted]
    ends = [i % 2 == 0 for i in range(8)]
    alone, together = (
        [grammars[i // 2].start(ends_at_eos=ends[i]) for i in range(8)] for _ in range(2)
    )
    goes_on, refused = [True] * 8, 0
    for _ in range(10):
        places = [i for i in range(8) if goes_on[i]]
        expected = np.full((len(places), alone[0].num_words), -7, np.int32)
        bits = np.full_like(expected, 5)
        wrong = fill_each([alone[i] for i in places], expected)
        matchers = [together[i] for i in places]
        faults = together[0].fill_all(matchers, bits, in_this_thread=in_this_thread)
        for i, a, b, fault, own in zip(places, expected, bits, faults, wrong, strict=True):
            if fault or own:  # what counts towards the limit is common to a grammar's matchers
                goes_on[i], refused = False, refused + (fault is not None)
                assert i in (4, 5) and "too complex" in str(fault or own)
                continue
            assert np.array_equal(a, b)
            token = int(np.flatnonzero(np.unpackbits(a.view(np.uint8), bitorder="little"))[-1])
            accepted = alone[i].accept(token), together[i].accept(token)
            goes_on[i] = accepted == (True, True) and not alone[i].is_ended
    assert refused and any(goes_on)


def test_the_largest_that_are_taken_can_be_followed(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    """The answers are followed from their first token to their last."""
    choices = tuple(f"c{i:05}" for i in range(MAX_ENUM_VALUES))
    assert fits(compiler, tokenizer, choices[4321], choice=choices)
    assert not fits(compiler, tokenizer, "c", choice=choices)
    properties = {f"p{i}": {"type": "string"} for i in range(MAX_SCHEMA_PROPERTIES)}
    schema = {"type": "object", "properties": properties}
    assert fits(compiler, tokenizer, '{"p7":"x","p998":""}', json=schema)
    required = {**schema, "required": list(properties)}
    assert not fits(compiler, tokenizer, '{"p0":"x"}', json=required)


@pytest.mark.parametrize("kind", ["alternatives", "rules"])
def test_what_goes_on_in_too_many_ways_is_refused_before_it_begins(
    compiler: GrammarCompiler, tokenizer: Tokenizer, kind: str
) -> None:
    """Taking in one of these tokens would hold the GIL for half a second."""
    texts = map(tokenizer.token_text, range(2, tokenizer.vocab_size))
    letter = next(t[0] for t in texts if len(t) == 2 and t[0] == t[1] and t.isalpha())
    if kind == "alternatives":
        grammar = f'start: a*\na: {"|".join(["b"] * 3000)}\nb: a a | "{letter}"\n'
    else:
        rules = [f'r{i}: r{i + 1} r{i + 1} | "{letter}"\n' for i in range(1500)]
        grammar = f'start: r0\n{"".join(rules)}r1500: "y"\n'
    with pytest.raises(RequestError, match="^tools: the grammar is too complex: .*limit 8000"):
        compiler.compile(StructuredOutputsParams(grammar=grammar, param="tools"))


def test_the_first_mask_is_filled_once(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_module, "SLOW_S", 60.0)  # other programs may run meanwhile
    grammar = compiler.compile(StructuredOutputsParams(regex="[ab]c|"))
    (one, other), strict = (
        (grammar.start(ends_at_eos=True) for _ in range(2)),
        grammar.start(ends_at_eos=False),
    )
    first = allowed(one)
    assert first == allowed(one) == allowed(other) == allowed(strict) | {EOS} != {EOS}
    assert one.accept(min(first - {EOS})) and allowed(one) != first
    assert allowed(other) == first and other.accept(min(first - {EOS}))
    assert grammar.is_slow is False


def test_grammars_are_kept_up_to_a_number(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_module, "MAX_CACHED", 3)
    compiler = GrammarCompiler(tokenizer, vocab_size=VOCAB, eos_token_ids=(EOS,))
    first = compiler.compile(StructuredOutputsParams(regex="a0"))
    assert compiler.compile(StructuredOutputsParams(regex="a0", param="other")) is first
    for i in range(1, 4):
        compiler.compile(StructuredOutputsParams(regex=f"a{i}"))
    assert compiler.compile(StructuredOutputsParams(regex="a0")) is not first
    assert len(compiler._cache) == 3


def test_what_took_long_is_kept_longer(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_one = GrammarCompiler._compile

    def timed(self: GrammarCompiler, job: Any) -> Any:
        kind, number = str(job.wanted.value).split("_")
        time.sleep({"quick": 0.0, "long": 0.05 + 0.05 * int(number)}[kind])
        return compile_one(self, job)

    monkeypatch.setattr(GrammarCompiler, "_compile", timed)
    monkeypatch.setattr(grammar_module, "MAX_CACHED", 4)
    compiler = GrammarCompiler(tokenizer, vocab_size=VOCAB, eos_token_ids=(EOS,))

    def cached(*regexes: str) -> set[str]:
        for regex in regexes:
            compiler.compile(StructuredOutputsParams(regex=regex))
        assert len(compiler._cache) <= 4
        return {str(value) for _, value, *_ in compiler._cache}

    compiler._warm_up()  # the start of the prover program is not part of a grammar's time
    assert cached("long_0", *(f"quick_{i}" for i in range(9))) >= {"long_0", "quick_8"}
    assert cached("long_1", "long_2", "long_3") == {f"long_{i}" for i in range(4)}
    assert cached("long_4") == {f"long_{i}" for i in range(1, 5)}, "none for ever"


def test_schemas_with_every_separator_are_written_compactly(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    schema = {"type": "object", "x-guidance": {"whitespace_flexible": True}}
    text = json.dumps({"a": [1, 2]}, separators=(",", ":"))
    assert fits(compiler, tokenizer, text, json=schema)
    assert not fits(compiler, tokenizer, json.dumps({"a": [1, 2]}), json=schema)


def test_compilations_are_timed_and_counted_once(tokenizer: Tokenizer) -> None:
    """A grammar from the cache costs nothing, and a refused one has a reason."""
    compiler = GrammarCompiler(tokenizer, vocab_size=VOCAB, eos_token_ids=(EOS,))
    for _ in range(3):
        compiler.compile(StructuredOutputsParams(regex="a+"))
        with pytest.raises(RequestError):
            compiler.compile(StructuredOutputsParams(regex="a("))
    totals = compiler.times.totals()
    assert sum(totals.counts) == 2 and totals.seconds > 0
    assert totals.failures == {"invalid_schema": 1}
