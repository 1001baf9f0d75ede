"""Parsing JSON bodies: fields refused, ignored and read."""

from __future__ import annotations

from typing import Any

import pytest

from termgen.api.errors import ErrorReply, http_reply, reply_for
from termgen.api.fields import (
    Fields,
    check_depth,
    ignored_header,
    is_empty,
    is_number,
    never,
    parse_json,
)
from termgen.api.sse import DONE, error_frames, frame
from termgen.errors import (
    ContextLengthError,
    EngineDeadError,
    EngineError,
    ModelError,
    RequestError,
    StepError,
)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[]",
        b'"text"',
        b"null",
        b"\xff\xfe",
        b'{"a": NaN}',
        b'{"a": Infinity}',
        b'{"a": -Infinity}',
        b'{"a": 1e999}',
        b'{"a": ' + b"9" * 5000 + b"}",
        b'{"a": "\\ud83d"}',
        b'{"\\udc4b": 1}',
        b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"a": ' + b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b"}",
    ],
)
def test_bad_json_is_a_400_with_its_own_code(raw: bytes) -> None:
    with pytest.raises(RequestError) as caught:
        parse_json(raw)
    assert (caught.value.status, caught.value.code) == (400, "invalid_json")
    assert "\n" not in str(caught.value)


def test_good_json_is_read_as_it_is() -> None:
    body = parse_json('{"a": "\\ud83d\\udc4b ü", "b": [1, -2.5e3, true, null]}'.encode())
    assert body == {"a": "👋 ü", "b": [1, -2500.0, True, None]}


def test_values_keep_their_types_and_null_means_absent() -> None:
    body = Fields({"s": "x", "i": 3, "f": 0.5, "b": True, "o": {"i": 1}, "null": None})
    assert body.string("s") == "x"
    assert body.integer("i", low=0, high=5) == 3
    assert body.number("f") == 0.5
    assert body.number("i") == 3
    assert body.boolean("b") is True
    inner = body.object("o")
    assert inner is not None and inner.integer("i", low=0, high=1) == 1
    for read in (body.string, body.number, body.object, body.take):
        assert read("null") is None
        assert read("absent") is None
    assert body.boolean("null", True) is True
    assert body.integer("null", low=0, high=1) is None


@pytest.mark.parametrize(
    ("method", "value"),
    [
        ("string", 1),
        ("string", ["x"]),
        ("boolean", 1),
        ("boolean", "true"),
        ("number", True),
        ("number", "1"),
        ("number", 10**400),
        ("object", [1]),
        ("object", "x"),
    ],
)
def test_wrong_types_name_the_field(method: str, value: Any) -> None:
    with pytest.raises(RequestError) as caught:
        getattr(Fields({"field": value}, "outer."), method)("field")
    assert caught.value.param == "outer.field"
    assert caught.value.code == "invalid_value"


@pytest.mark.parametrize("value", [True, 1.0, "1", 11, -1, [1]])
def test_integers_are_integers_within_their_range(value: Any) -> None:
    with pytest.raises(RequestError):
        Fields({"field": value}).integer("field", low=0, high=10)


def test_messages_show_only_the_beginning_of_a_huge_value() -> None:
    deep: list[Any] = []
    for _ in range(900):
        deep = [deep]
    for value in ("x" * 10**6, deep, list(range(10**5))):
        with pytest.raises(RequestError) as caught:
            Fields({"f": value}).number("f")
        assert len(str(caught.value)) < 120


def test_finish_refuses_what_is_known_and_names_what_is_not() -> None:
    refused = {"tools": is_empty, "audio": never}
    body = Fields({"seen": 1, "user": "u", "tools": [], "audio": None, "foo": 1, "bar": None})
    body.take("seen")
    names = body.finish(harmless=frozenset({"user"}), refused=refused)
    assert names == ("foo", "bar")
    for data in ({"tools": [{}]}, {"audio": {}}):
        with pytest.raises(RequestError) as caught:
            Fields(data).finish(harmless=frozenset(), refused=refused)
        assert caught.value.code == "unsupported_parameter"
        assert caught.value.param == next(iter(data))


def test_the_ignored_header_is_safe_and_short() -> None:
    assert ignored_header(("foo", "b-r_2")) == "foo, b-r_2"
    assert ignored_header(("a\r\nset-cookie: x", "ü", "ok")) == "ok, +2"
    many = ignored_header(tuple(f"name{i}" for i in range(500)))
    assert len(many) < 400 and many.endswith("+480")


def test_depth_is_limited() -> None:
    value: Any = "leaf"
    for _ in range(31):
        value = [value]
    check_depth("x", value)
    check_depth("x", {"a": [{"b": 1}], "c": "text"})
    for _ in range(1000):
        value = {"k": value}
    with pytest.raises(RequestError) as caught:
        check_depth("x", value)
    assert caught.value.param == "x"


def test_numbers_are_finite_and_no_booleans() -> None:
    assert is_number(1) and is_number(-1.5)
    assert not any(map(is_number, (True, float("nan"), float("inf"), 10**400, "1", None)))


@pytest.mark.parametrize(
    ("error", "status", "type", "code", "param"),
    [
        (RequestError("m", param="p"), 400, "invalid_request_error", "invalid_value", "p"),
        (
            ContextLengthError("m"),
            400,
            "invalid_request_error",
            "context_length_exceeded",
            "messages",
        ),
        (EngineError("m"), 500, "server_error", "engine_error", None),
        (StepError("m", step_id=3), 500, "server_error", "engine_error", None),
        (EngineDeadError("m"), 503, "server_error", "engine_dead", None),
        (ModelError("m"), 500, "server_error", "internal_error", None),
    ],
)
def test_error_bodies(
    error: Exception, status: int, type: str, code: str, param: str | None
) -> None:
    reply = reply_for(error)
    assert reply.status == status
    assert reply.body == {"error": {"message": "m", "type": type, "param": param, "code": code}}


def test_replies_carry_the_headers_clients_act_on() -> None:
    unauthorized = reply_for(RequestError("m", status=401, type="authentication_error"))
    assert unauthorized.headers["www-authenticate"] == "Bearer"
    assert "retry-after" in reply_for(EngineDeadError("m")).headers
    assert "retry-after" in reply_for(RequestError("m", status=503)).headers
    assert http_reply(405, "d", {"allow": "GET"}).headers == {"allow": "GET"}


def test_bugs_of_ours_tell_clients_nothing() -> None:
    reply: ErrorReply = reply_for(KeyError("secret"))
    assert reply.status == 500
    assert "secret" not in str(reply.body)


def test_frames_are_one_line_of_json() -> None:
    data = frame({"text": "a\nb\u2028ü"})
    assert data.startswith(b"data: {") and data.endswith(b"}\n\n")
    assert data.count(b"\n") == 2
    with pytest.raises(ValueError):
        frame({"x": float("nan")})
    ended = error_frames(EngineError("m"))
    assert ended.startswith(b'data: {"error":{"message":"m"') and ended.endswith(b"\n\n" + DONE)
