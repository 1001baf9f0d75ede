"""Parsing JSON bodies: fields refused, ignored and read."""

from __future__ import annotations

from typing import Annotated, Any

import pytest
from msgspec import Meta, Struct

from termgen.api.errors import ErrorReply, http_reply, reply_for
from termgen.api.fields import (
    MAX_FIELDS,
    Endpoint,
    check_depth,
    declared,
    ignored_header,
    is_empty,
    is_number,
    never,
    parse_json,
    read,
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


class Inner(Struct):
    i: Annotated[int, Meta(ge=0, le=1)] | None = None


class Body(Struct):
    string: str | None = None
    boolean: bool = False
    is_on: bool = True
    number: float | None = None
    integer: Annotated[int, Meta(ge=0, le=10)] | None = None
    object: Inner | None = None
    anything: Any = None


def test_values_keep_their_types_and_null_means_absent() -> None:
    given = {"string": "x", "integer": 3, "number": 0.5, "boolean": True, "object": {"i": 1}}
    body = read(Body, given)
    assert body.string == "x"
    assert body.integer == 3
    assert body.number == 0.5
    assert read(Body, {"number": 3}).number == 3
    assert body.boolean is True
    assert body.object is not None and body.object.i == 1
    nulls = read(Body, {**dict.fromkeys(declared(Body)), "object": {"i": None}})
    for empty in (nulls, read(Body, {})):
        assert empty.string is empty.number is empty.integer is empty.anything is None
        assert empty.is_on is True and empty.boolean is False
    assert nulls.object is not None and nulls.object.i is None


@pytest.mark.parametrize(
    ("name", "value"),
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
def test_wrong_types_name_the_field(name: str, value: Any) -> None:
    with pytest.raises(RequestError) as caught:
        read(Body, {name: value}, "outer.")
    assert caught.value.param == f"outer.{name}"
    assert caught.value.code == "invalid_value"
    with pytest.raises(RequestError, match="object.i must be an integer, not 'x'"):
        read(Body, {"object": {"i": "x"}})


@pytest.mark.parametrize("value", [True, 1.0, "1", 11, -1, [1], 2**70])
def test_integers_are_integers_within_their_range(value: Any) -> None:
    with pytest.raises(RequestError) as caught:
        read(Body, {"integer": value})
    wanted = "between 0 and 10" if value in (11, -1, 2**70) else "an integer"
    assert str(caught.value) == f"integer must be {wanted}, not {value!r}"


def test_messages_show_only_the_beginning_of_a_huge_value() -> None:
    deep: list[Any] = []
    for _ in range(900):
        deep = [deep]
    for value in ("x" * 10**6, deep, list(range(10**5))):
        with pytest.raises(RequestError) as caught:
            read(Body, {"number": value})
        assert len(str(caught.value)) < 120


@pytest.mark.parametrize(("data", "param"), [({}, None), ({"object": {}}, "object")])
def test_an_object_of_too_many_fields_is_refused(data: dict[str, Any], param: str | None) -> None:
    many = data["object"] if param else data
    many |= {f"name{i}": None for i in range(MAX_FIELDS + 1)}
    with pytest.raises(RequestError, match="has more than 1000 fields") as caught:
        read(Body, data)
    assert caught.value.param == param


def test_what_is_known_is_refused_and_what_is_not_is_named() -> None:
    endpoint = Endpoint((Body,), frozenset({"user"}), {"tools": is_empty, "audio": never})
    body = {"string": 1, "user": "u", "tools": [], "audio": None, "foo": 1, "bar": None}
    assert endpoint.unknown(body) == ("foo", "bar")
    assert endpoint.unknown({"object": {"i": 1, "j": 2}}) == ("object.j",)
    for data in ({"tools": [{}]}, {"audio": {}}):
        with pytest.raises(RequestError) as caught:
            endpoint.unknown(data)
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
