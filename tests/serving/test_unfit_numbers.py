"""Numbers that JSON or a float cannot hold: the refusal names their field."""

from __future__ import annotations

import pytest

from termgen.api.fields import parse_json
from termgen.errors import RequestError


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999", "9" * 5000])
@pytest.mark.parametrize(
    ("body", "place"),
    [
        ('{"model": "m", "top_k": %s}', "top_k"),
        ('{"a": 1, "messages": [{"x": 2}, {"content": [%s]}]}', "messages[1].content[0]"),
        ('{"tools": {"odd key": {"minimum": %s}}}', "tools"),
        ('{"a": ' + "[" * 900 + "%s" + "]" * 900 + "}", "a" + "[0]" * 67),
    ],
)
def test_a_refused_number_is_named_by_its_place(body: str, number: str, place: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse_json((body % number).encode())
    assert (caught.value.param, caught.value.code) == (place, "invalid_json")
    assert f"(in {place})" in str(caught.value)


@pytest.mark.parametrize("body", ['{"a": NaN, "b": ', '{"a": NaN, "a": 1}', "NaN"])
def test_without_a_place_the_refusal_stands(body: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse_json(body.encode())
    assert (caught.value.param, caught.value.code) == (None, "invalid_json")


def test_the_text_of_a_field_keeps_that_fields_name() -> None:
    with pytest.raises(RequestError) as caught:
        parse_json(b'{"x": NaN}', "arguments", param="messages")
    assert caught.value.param == "messages" and "(in x)" in str(caught.value)
