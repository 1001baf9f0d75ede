"""What is left out of a schema that a grammar is to enforce."""

from __future__ import annotations

from typing import Any

import pytest

from termgen.vocabulary.schemas.enforced import CHECKED, FORMATS, enforced

LLGuidance = pytest.importorskip("llguidance")
STRING = {"type": "string"}


def refusal(schema: dict[str, Any]) -> str:
    """Why the library does not compile it; empty if it does."""
    made = LLGuidance.LLMatcher.grammar_from_json_schema(schema)
    vocabulary = LLGuidance.LLTokenizer("byte")
    return str(LLGuidance.LLMatcher(vocabulary, made, log_level=0).get_error())


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_formats_are_those_of_the_library(name: str) -> None:
    schema = {"type": "string", "format": name}
    assert not refusal(schema) and enforced(schema) == (schema, True)


@pytest.mark.parametrize("name", ["int32", "uri-reference", "regex", "Topic", ""])
def test_other_formats_are_annotations(name: str) -> None:
    schema = {"type": "string", "format": name, "maxLength": 3}
    assert "Unknown format" in refusal(schema)
    assert enforced(schema) == ({"type": "string", "maxLength": 3}, True)


@pytest.mark.parametrize("keyword", sorted(CHECKED))
def test_the_library_enforces_none_of_these(keyword: str) -> None:
    value: Any = {"uniqueItems": True, "minContains": 1, "maxContains": 2}.get(keyword, STRING)
    if keyword in ("dependentRequired", "dependentSchemas", "dependencies"):
        value = {"a": ["b"]} if keyword != "dependentSchemas" else {"a": STRING}
    others: dict[str, Any] = {"if": STRING, "then": STRING, "contains": STRING}
    schema = {**others, keyword: value}
    assert keyword in refusal({keyword: value})
    assert enforced(schema).schema == schema, "not without being asked"
    assert enforced(schema, relaxed=True) == ({}, False)


@pytest.mark.parametrize(
    "nothing",
    [
        {"uniqueItems": False},
        {"if": STRING},
        {"then": STRING},
        {"else": False},
        {"minContains": 2},
        {"maxContains": 0},
        {"dependentRequired": {}},
        {"dependencies": {}},
        {"propertyNames": True},
        {"unevaluatedProperties": True},
        {"unevaluatedItems": {}},
    ],
)
def test_what_asks_for_nothing_is_left_out_always(nothing: dict[str, Any]) -> None:
    for relaxed in (False, True):
        assert enforced({"type": "object", **nothing}, relaxed=relaxed) == (
            {"type": "object"},
            True,
        )


@pytest.mark.parametrize("asking", [{"not": {}}, {"not": True}, {"contains": True}])
def test_what_looks_like_nothing_is_kept(asking: dict[str, Any]) -> None:
    assert enforced(asking) == (asking, True)
    assert enforced(asking, relaxed=True) == ({}, False)


def test_alternatives_may_overlap() -> None:
    one, two = {"multipleOf": 2}, {"minimum": 3}
    found = enforced({"type": "integer", "oneOf": [one, two]}, relaxed=True)
    assert found == ({"type": "integer", "anyOf": [one, two]}, False)
    both = enforced({"anyOf": [one], "oneOf": [two], "allOf": [STRING]}, relaxed=True)
    assert both == ({"anyOf": [one], "allOf": [STRING, {"anyOf": [two]}]}, False)


def test_numbers_of_properties_hold_where_all_are_required() -> None:
    schema = {"properties": {"a": {}, "b": {}}, "required": ["a", "b"], "minProperties": 3}
    assert enforced(schema, relaxed=True) == (schema, True) and not refusal(schema)
    schema["required"] = ["a"]
    assert refusal(schema)
    found = enforced(schema, relaxed=True)
    assert found == ({"properties": {"a": {}, "b": {}}, "required": ["a"]}, False)
    assert not refusal(dict(found.schema))
    assert enforced({"maxProperties": 2}, relaxed=True).is_whole


def test_every_part_of_a_schema_is_looked_at_and_no_data() -> None:
    odd = {"type": "string", "format": "odd", "not": {"const": "x"}}
    clean = {"type": "string"}
    places: dict[str, Any] = {
        "properties": {"not": odd, "format": odd, "const": odd},
        "patternProperties": {"^a": odd},
        "$defs": {"d": odd},
        "definitions": {"d": odd},
        "allOf": [odd],
        "anyOf": [odd, True],
        "prefixItems": [odd],
        "items": odd,
        "additionalProperties": odd,
    }
    found = enforced(places, relaxed=True).schema
    for name, value in places.items():
        if isinstance(value, list):
            assert found[name] == [clean, *value[1:]], name
        elif name in ("items", "additionalProperties"):
            assert found[name] == clean, name
        else:
            assert found[name] == dict.fromkeys(value, clean), name
    assert enforced({"items": [odd, False]}, relaxed=True).schema == {"items": [clean, False]}
    data = {"const": odd, "enum": [odd], "default": odd, "examples": [odd], "x-own": odd}
    assert enforced(data, relaxed=True) == (data, True)
    assert places["items"] is odd and "not" in odd, "the schema itself is not changed"
