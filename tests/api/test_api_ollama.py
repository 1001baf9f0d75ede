"""Bodies of Ollama's endpoints: any value in any field is taken, or the error names the field."""

from __future__ import annotations

import json
import pickle
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lengths import scaled

from termgen.api.errors import reply_for
from termgen.api.fields import Served
from termgen.api.ollama.body import (
    CHAT_BODY,
    GENERATE_BODY,
    asks_to_unload,
    lasts_for_ever,
    served_name,
    with_tag,
)
from termgen.api.ollama.errors import ERRORS
from termgen.api.ollama.options import AT_START, NAMES, OPTIONS
from termgen.api.ollama.parser import OllamaRequest, parse_chat, parse_generate
from termgen.errors import RequestError
from termgen.vocabulary.sampling_params import COLUMNS
from termgen.vocabulary.tool_format import ToolFormat

SERVED = Served(
    model="m",
    defaults={},
    tool_format=ToolFormat(knows_tools=True),
    trusts_template=False,
    refuses_images=False,
    force_include_usage=False,
    max_model_len=64,
    has_chat_template=True,
)
PARSERS: dict[str, tuple[Any, Any]] = {
    "chat": (parse_chat, CHAT_BODY),
    "generate": (parse_generate, GENERATE_BODY),
}
OTHERS = {"logprobs": {"top_logprobs"}, "suffix": {"system"}, "raw": {"system"}}
"""Fields that an error about another field may name, because the two are incompatible."""

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-3, 140)
    | st.integers(-(2**70), 2**70)
    | st.floats(-3, 3)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=9)
    | st.sampled_from(["x" * 300, "\x00", "json", "5m", "-1", "high", "max"])
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=6), inner),
    max_leaves=8,
)
quick = settings(max_examples=scaled(120), deadline=None, print_blob=True)


def body_of(endpoint: str, **fields: Any) -> dict[str, Any]:
    asked: dict[str, Any] = {"prompt": "x", "system": "s"}
    if endpoint == "chat":
        asked = {"messages": [{"role": "user", "content": "x"}]}
    return json.loads(json.dumps({"model": "m", **asked, **fields}))  # type: ignore[no-any-return]


@pytest.mark.parametrize("endpoint", PARSERS)
@given(data=st.data())
@quick
def test_one_odd_field_is_taken_or_named(endpoint: str, data: st.DataObject) -> None:
    parse, body = PARSERS[endpoint]
    name = data.draw(st.sampled_from(sorted({*body.fields, *body.refused} - {"model"})))
    _check(parse, body_of(endpoint, **{name: data.draw(values)}), {name, *OTHERS.get(name, ())})


@pytest.mark.parametrize("endpoint", PARSERS)
@given(data=st.data())
@quick
def test_one_odd_option_is_taken_or_named(endpoint: str, data: st.DataObject) -> None:
    parse, _ = PARSERS[endpoint]
    name = data.draw(st.sampled_from(sorted({*OPTIONS.fields, *OPTIONS.refused, *AT_START})))
    options = {name: data.draw(values)}
    _check(parse, body_of(endpoint, options=options), {f"options.{name}"})


def _check(parse: Any, body: dict[str, Any], allowed: set[str]) -> None:
    try:
        asked = parse(SERVED, body)
    except RequestError as error:
        reply = ERRORS.reshape(reply_for(error), "id")
        assert reply.status == 400 and reply.body.keys() == {"error"}
        message = reply.body["error"]
        assert any(name in message for name in allowed), (allowed, message)
        assert "\n" not in message and len(message) < 500
    else:
        assert isinstance(asked, OllamaRequest)
        assert pickle.loads(pickle.dumps(asked)) == asked  # bodies are parsed elsewhere too


def test_every_number_of_the_table_is_an_option() -> None:
    assert NAMES.keys() >= COLUMNS.keys()
    assert {"repeat_penalty", "top_k", "min_p", "temperature"} <= OPTIONS.fields.keys()
    for name in COLUMNS:
        assert NAMES[name] in OPTIONS.fields and (NAMES[name] == name or name in OPTIONS.refused)


@pytest.mark.parametrize(
    ("given", "unloads"),
    [
        (None, False),
        *((text, False) for text in ("5m", "1h30m", "1.5s", "-1", "-1m", "300", "10ms", ".5h")),
        *((text, True) for text in (0, 0.0, "0", "0s", "0m0s", "-0s")),
        *((number, False) for number in (-1, 0.5, 300)),
    ],
)
def test_durations(given: Any, unloads: bool) -> None:
    assert asks_to_unload(given) is unloads


@pytest.mark.parametrize("text", ["", "m", "5 m", "5x", "1h30", "five", "1" * 99, "é", "5m\n"])
def test_texts_that_are_no_durations(text: str) -> None:
    with pytest.raises(RequestError, match="^keep_alive must be"):
        asks_to_unload(text)


def test_only_what_is_negative_lasts() -> None:
    assert lasts_for_ever(-1) and lasts_for_ever("-1m")
    assert not lasts_for_ever(300) and not lasts_for_ever("5m")


def test_tags() -> None:
    names = ("small", "org/x", "y:q4", "host:5000/z")
    assert [with_tag(name) for name in names] == [
        *("small:latest", "org/x:latest", "y:q4", "host:5000/z:latest")
    ]
    for name in names:
        assert served_name(name, names) == served_name(with_tag(name), names) == name
    for wrong in ("y", "y:latest", "small:q4", "Small"):
        with pytest.raises(RequestError, match="not found"):
            served_name(wrong, names)
