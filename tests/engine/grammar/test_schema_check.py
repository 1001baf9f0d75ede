"""Finished answers beside schemas that no grammar enforces, in a process of their own."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import AsyncGenerator, Iterator
from concurrent.futures import Future
from typing import Any

import jsonschema
import pytest

from termgen.client import TokenDelta
from termgen.engine.grammar import schema_check
from termgen.engine.grammar.schema_check import SchemaChecker, with_checks
from termgen.errors import EngineDeadError, RequestError
from termgen.vocabulary.request import FinishReason


@pytest.fixture(scope="module")
def checker() -> Iterator[SchemaChecker]:
    made = SchemaChecker()
    yield made
    made.close()


def errors(checker: SchemaChecker, schema: dict[str, Any], answer: Any) -> tuple[str, ...]:
    return checker.check_of(json.dumps(schema)).errors(json.dumps(answer))


def test_each_error_has_its_place(checker: SchemaChecker) -> None:
    schema = {
        "properties": {"tags": {"uniqueItems": True}, "n": {"not": {"const": 3}}},
        "dependentRequired": {"n": ["m"]},
    }
    assert errors(checker, schema, {"tags": [1, 2]}) == ()
    found = errors(checker, schema, {"tags": [1, 1], "n": 3})
    assert sorted(line.split(":")[0] for line in found) == ["$", "$['n']", "$['tags']"]
    assert any('"m" is a required property' in line for line in found)


def test_old_words_and_own_dialects_are_understood(checker: SchemaChecker) -> None:
    schema: dict[str, Any] = {"dependencies": {"a": ["b"]}}
    for dialect in ("http://json-schema.org/draft-07/schema#", "https://example.com/own", None):
        wanted = {**schema, "$schema": dialect} if dialect else schema
        assert errors(checker, wanted, {"a": 1, "b": 2}) == ()
        assert len(errors(checker, wanted, {"a": 1})) == 1


def test_what_is_no_json_is_said(checker: SchemaChecker) -> None:
    check = checker.check_of('{"not": {"type": "null"}}')
    for answer in ("", '{"a": 1', "[" * 100_000):
        (line,) = check.errors(answer)
        assert line.startswith("is not JSON") and len(line) <= 200


def test_long_and_many_errors_are_cut(checker: SchemaChecker) -> None:
    found = errors(checker, {"items": {"not": {"type": "string"}}}, ["x" * 5000] * 50)
    assert len(found) == 8 and all(len(line) < 220 for line in found)


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"not": {"$ref": "https://example.com/other.json"}}, "not fetched"),
        ({"not": {"$ref": "#/nowhere"}}, "nowhere"),
        ({"not": {"pattern": "(?=a)"}}, "regex"),
        ({"not": {"type": "strin"}}, "strin"),
    ],
)
def test_a_schema_that_cannot_be_checked_is_refused(
    checker: SchemaChecker, schema: dict[str, Any], words: str
) -> None:
    with pytest.raises(RequestError, match=words) as caught:
        checker.check_of(json.dumps(schema))
    assert caught.value.code == "invalid_schema" and len(str(caught.value)) <= 220


def test_patterns_take_linear_time(checker: SchemaChecker) -> None:
    schema = {"not": {"pattern": "^(a+)+$"}}
    assert errors(checker, schema, "a" * 50_000 + "b") == ()
    assert len(errors(checker, schema, "a" * 50_000)) == 1


def test_a_schema_that_refers_to_itself(checker: SchemaChecker) -> None:
    schema = {"not": {"$ref": "#/$defs/a"}, "$defs": {"a": {"items": {"$ref": "#"}}}}
    assert isinstance(errors(checker, schema, [[1], 2]), tuple)


def test_a_schema_that_is_too_slow_holds_others_up_once(
    checker: SchemaChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each definition is looked at twice by the one before it."""
    chain = {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(40)}
    schema = json.dumps({"not": {"$ref": "#/$defs/d0"}, "$defs": {**chain, "d40": {}}})
    check = checker.check_of(schema)
    began = time.monotonic()
    assert check.errors("1") == (schema_check.TOO_SLOW,)
    assert time.monotonic() - began > schema_check.CHECK_S
    monkeypatch.setattr(checker._helper, "ask", None)
    assert check.errors("2") == (schema_check.TOO_SLOW,)
    with pytest.raises(RequestError, match="too much time"):
        checker.check_of(schema)
    monkeypatch.undo()
    other = checker.check_of('{"not": {"const": 1}}')
    assert other.errors("2") == () and len(other.errors("1")) == 1


def test_a_process_that_ends_is_said_and_the_next_one_works(checker: SchemaChecker) -> None:
    check = checker.check_of('{"not": {"const": 1}}')
    child = checker._helper.start()
    child.kill()
    child.wait()
    assert len(check.errors("1")) == 1


def test_a_client_that_has_gone_is_not_waited_for(checker: SchemaChecker) -> None:
    check, hold = checker.check_of('{"not": {"const": 1}}'), threading.Event()

    def wait() -> tuple[str, ...]:
        hold.wait(10)
        return ()

    first = checker.submit(wait)
    gone, stays = check.submit("1"), check.submit("1")
    assert gone.cancel()
    hold.set()
    assert first.result(10) == () and len(stays.result(10)) == 1


def test_after_the_end_nothing_is_checked() -> None:
    checker = SchemaChecker()
    checker.close()
    with pytest.raises(EngineDeadError):
        checker.check_of("{}")


@pytest.mark.parametrize("seed", range(3))
def test_it_agrees_with_another_library(checker: SchemaChecker, seed: int) -> None:
    rng = random.Random(seed)
    print("seed", seed)

    def value(depth: int = 0) -> Any:
        if depth > 2 or rng.random() < 0.5:
            return rng.choice([None, True, 0, 1, 2.5, "", "a", "ab"])
        if rng.random() < 0.5:
            return [value(depth + 1) for _ in range(rng.randrange(4))]
        return {rng.choice("abc"): value(depth + 1) for _ in range(rng.randrange(4))}

    def schema(depth: int = 0) -> dict[str, Any]:
        if depth > 2:
            return {"type": rng.choice(["string", "number", "array", "object", "null"])}
        inner = schema(depth + 1)
        return rng.choice(
            [
                {"not": inner},
                {"uniqueItems": True, "items": inner},
                {"contains": inner, "maxContains": rng.randrange(1, 3)},
                {"if": inner, "then": schema(depth + 1), "else": schema(depth + 1)},
                {"dependentRequired": {"a": ["b"]}, "additionalProperties": inner},
                {"propertyNames": {"enum": ["a", "b"]}},
                {"oneOf": [inner, schema(depth + 1)]},
                {"minProperties": 1, "properties": {"a": inner}},
            ]
        )

    for _ in range(40):
        wanted = schema()
        theirs, check = (
            jsonschema.Draft202012Validator(wanted),
            checker.check_of(json.dumps(wanted)),
        )
        for _ in range(5):
            answer = value()
            assert bool(check.errors(json.dumps(answer))) != theirs.is_valid(answer), wanted


class _Odd:
    """Finds even lengths at fault."""

    def errors(self, answer: str) -> tuple[str, ...]:
        return () if len(answer) % 2 else (answer,)

    def submit(self, answer: str) -> Future[tuple[str, ...]]:
        future: Future[tuple[str, ...]] = Future()
        future.set_result(self.errors(answer))
        return future


async def test_only_answers_that_ended_by_themselves_are_checked() -> None:
    def delta(index: int, text: str, reason: FinishReason | None = None, stop: Any = None) -> Any:
        return TokenDelta("r", index, text, (), None, reason, stop, 1, 0, 1)

    async def deltas() -> AsyncGenerator[TokenDelta, None]:
        for part in (
            delta(0, "ab"),
            delta(1, "abc"),
            delta(0, "cd", FinishReason.STOP),
            delta(1, "", FinishReason.STOP),
            delta(2, "ab", FinishReason.LENGTH),
            delta(3, "ab", FinishReason.STOP, "stop word"),
            delta(4, "", FinishReason.ABORT),
        ):
            yield part

    found = [one async for one in with_checks(deltas(), _Odd()) if one.finish_reason]
    assert [one.schema_errors for one in found] == [("abcd",), (), None, None, None]
