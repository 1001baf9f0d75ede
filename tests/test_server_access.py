"""Keys, admins, web pages of other sites, and whose prefix cache is whose."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_engine import FakeEngine
from hypothesis import given, settings
from hypothesis import strategies as st
from server_harness import app_client, chat_body, serving

from termgen.config import ServerConfig
from termgen.errors import ConfigError
from termgen.server import Server
from termgen.serving.access import ADMIN_PATHS, Caller, KeyRing, Role


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def error_code(response: httpx.Response) -> str:
    return str(response.json()["error"]["code"])


async def test_admin_paths_need_the_admin_key() -> None:
    config: dict[str, Any] = {"api_key": ("one",), "admin_key": ("root",)}
    async with app_client(FakeEngine(), **config) as client:
        for path in sorted(ADMIN_PATHS):
            refused = await client.post(path, headers=bearer("one"))
            assert (refused.status_code, error_code(refused)) == (403, "admin_only"), path
            for headers in ({}, bearer("wrong")):
                nobody = await client.post(path, headers=headers)
                assert (nobody.status_code, error_code(nobody)) == (401, "invalid_api_key"), path
        assert (await client.get("/v1/models", headers=bearer("root"))).status_code == 200


@pytest.mark.parametrize(
    ("config", "key", "allowed"),
    [
        ({}, None, True),
        ({"host": "0.0.0.0"}, None, False),
        ({"api_key": ("one",)}, "one", False),
        ({"admin_key": ("root",)}, None, False),
        ({"admin_key": ("root",)}, "root", True),
        ({"admin_key": ("root",), "host": "0.0.0.0"}, "root", True),
    ],
)
def test_who_is_an_admin(config: dict[str, Any], key: str | None, allowed: bool) -> None:
    keys = KeyRing(ServerConfig(**config))
    given = key.encode() if key else None
    if allowed:
        assert keys.check("/pause", given).role is Role.ADMIN
        return
    with pytest.raises(Exception, match="API key|administrators") as caught:
        keys.check("/pause", given)
    assert caught.value.status in (401, 403)  # type: ignore[attr-defined]


def test_keys_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# laptop\nfirst\n\n  second  \n")
    keys = KeyRing(ServerConfig(api_key=("third",), api_key_file=str(path)))
    assert keys.has_client_keys
    for key in (b"first", b"second", b"third"):
        assert keys.check("/v1/models", key).role is Role.CLIENT
    for wrong in (b"# laptop", b"", b"  second  "):
        assert keys.find(wrong) is None
    for content, words in (("", "holds no key"), ("\n# x\n", "holds no key")):
        path.write_text(content)
        with pytest.raises(ConfigError, match=words) as caught:
            KeyRing(ServerConfig(api_key_file=str(path)))
        assert caught.value.param == "api_key_file"
    path.write_bytes(b"\xff\xfe\x80")
    with pytest.raises(ConfigError, match="is not text"):
        KeyRing(ServerConfig(api_key_file=str(path)))
    with pytest.raises(ConfigError, match="No such file"):
        KeyRing(ServerConfig(api_key_file=str(tmp_path / "missing")))
    with pytest.raises(ConfigError, match="must differ"):
        KeyRing(ServerConfig(api_key=("same",), admin_key=("same",)))


async def test_keys_are_in_no_log_and_no_text_about_the_config(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    config = ServerConfig(api_key=("s3cret",), admin_key=("r00t",))
    assert "s3cret" not in repr(config) and "r00t" not in repr(config)
    async with app_client(FakeEngine(), api_key=("s3cret",), admin_key=("r00t",)) as client:
        for key in ("s3cret", "r00t", "guess-17"):
            for path in ("/v1/models", "/pause", f"/v1/models?key={key}"):
                response = await client.get(path, headers=bearer(key))
                assert key not in response.text
        await client.get("/v1/models", headers={"x-api-key": "guess-18"})
    ours = "\n".join(r.getMessage() for r in caplog.records if r.name.startswith("termgen"))
    assert ours
    for key in ("s3cret", "r00t", "guess-17", "guess-18"):
        assert key not in ours
    with pytest.raises(ConfigError) as caught:
        ServerConfig(api_key=(1234567,))  # type: ignore[arg-type]
    assert "1234567" not in str(caught.value)


async def test_pages_of_other_sites_are_refused() -> None:
    own = ["http://127.0.0.1", "HTTP://127.0.0.1"]
    foreign = ["https://evil.example", "http://127.0.0.1:9000", "null", "http://", "http://[", ""]
    async with app_client(FakeEngine()) as client:
        for origin in own:
            response = await client.post(
                "/v1/chat/completions", json=chat_body(), headers={"origin": origin}
            )
            assert response.status_code == 200, origin
        for origin in foreign:
            for path in ("/v1/chat/completions", "/health", "/pause"):
                response = await client.post(path, json=chat_body(), headers={"origin": origin})
                assert response.status_code == 403, origin
                assert error_code(response) == "origin_not_allowed"
                assert not any(h.startswith("access-control") for h in response.headers)
        preflight = await client.options(
            "/v1/chat/completions",
            headers={"origin": foreign[0], "access-control-request-method": "POST"},
        )
        assert preflight.status_code == 403


async def test_allowed_pages_may_read_answers_and_errors() -> None:
    origin = {"origin": "https://chat.example"}
    config: dict[str, Any] = {"allowed_origin": ("https://chat.example/",), "api_key": ("k",)}
    async with app_client(FakeEngine(), **config) as client:
        asked = {"access-control-request-method": "POST"}
        asked["access-control-request-headers"] = "authorization, content-type"
        preflight = await client.options("/v1/chat/completions", headers={**origin, **asked})
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == origin["origin"]
        assert "authorization" in preflight.headers["access-control-allow-headers"]
        for headers, status in ((bearer("k"), 200), ({}, 401)):
            response = await client.post(
                "/v1/chat/completions", json=chat_body(), headers={**origin, **headers}
            )
            assert response.status_code == status
            assert response.headers["access-control-allow-origin"] == origin["origin"]
        other = {"origin": "https://evil.example", **bearer("k")}
        response = await client.get("/v1/models", headers=other)
        assert response.status_code == 403
        assert "access-control-allow-origin" not in response.headers


async def test_each_key_has_a_prefix_cache_of_its_own() -> None:
    engine = FakeEngine()

    async def salts(*keys: str, salt: str | None = None, **config: Any) -> list[str | None]:
        engine.calls.clear()
        async with app_client(engine, **config) as client:
            for key in keys:
                body = chat_body() if salt is None else chat_body(cache_salt=salt)
                answer = await client.post(
                    "/v1/chat/completions", json=body, headers=bearer(key) if key else {}
                )
                assert answer.status_code == 200
            # a stream and another endpoint are the same caller
            await client.post(
                "/v1/completions",
                json={"prompt": "x", "stream": True, **({"cache_salt": salt} if salt else {})},
                headers=bearer(keys[-1]) if keys[-1] else {},
            )
        return [call.cache_salt for call in engine.calls]

    two: dict[str, Any] = {"api_key": ("a", "b")}
    engine.calls.clear()
    async with app_client(engine, **two) as client:
        body = {"prompt": "x", "echo": True, "logprobs": 1, "max_tokens": 0}
        for key in ("a", "b"):
            await client.post("/v1/completions", json=body, headers=bearer(key))
    assert len({call.cache_salt for call in engine.calls} - {None}) == 2, "nor by an echo"
    first, again, other, streamed = await salts("a", "a", "b", **two)
    assert first == again and other == streamed and first != other
    assert first is not None and "a" != first and len(first) == 64
    assert (await salts("a", **two))[0] != first, "a new server, a new secret"
    salted = await salts("a", "b", salt="mine", **two)
    assert len({*salted, first, "mine"}) == 4
    assert await salts("a", "b", **two, share_prefix_cache=True) == [None] * 3
    assert await salts("a", "b", salt="s", **two, share_prefix_cache=True) == ["s"] * 3
    assert await salts("a", api_key=("a",)) == [None] * 2, "one key has nobody to hide from"
    assert await salts("", salt="s") == ["s"] * 2


def test_a_salt_is_one_the_engine_takes() -> None:
    from termgen.engine.request import check_cache_salt

    check_cache_salt(Caller(Role.CLIENT, salt_key=b"k" * 32).salt("ß"))


async def test_an_open_address_needs_a_key_or_a_word(caplog: pytest.LogCaptureFixture) -> None:
    for host in ("0.0.0.0", "::"):
        with pytest.raises(ConfigError, match="--insecure-no-auth") as caught:
            Server(FakeEngine(), ServerConfig(host=host, port=0)).bind()
        assert caught.value.param == "host"
    async with serving(FakeEngine(), host="0.0.0.0", insecure_no_auth=True) as server:
        assert "anyone who reaches 0.0.0.0 can use this server" in caplog.text
        port = server.url.rsplit(":", 1)[1]
        async with httpx.AsyncClient() as client:
            assert (await client.get(f"http://127.0.0.1:{port}/v1/models")).status_code == 200
    async with serving(FakeEngine(), host="0.0.0.0", api_key=("k",)) as server:
        assert server.url


async def test_refusals_are_counted_by_reason() -> None:
    async with app_client(FakeEngine(), api_key=("k",), max_body_bytes=1024) as client:
        await client.get("/v1/models")
        await client.get("/v1/models", headers={**bearer("k"), "origin": "https://evil.example"})
        await client.get("/v1/models", headers={**bearer("k"), "host": "evil.example"})
        await client.post("/pause", headers=bearer("k"))
        headers = {**bearer("k"), "content-type": "application/json"}
        await client.post("/v1/completions", content=b"x" * 2000, headers=headers)
        text = (await client.get("/metrics", headers=bearer("k"))).text
    for reason in (
        "invalid_api_key",
        "origin_not_allowed",
        "host_not_allowed",
        "admin_only",
        "request_too_large",
    ):
        assert f'termgen_rejected_total{{model="fake/model-1",reason="{reason}"}} 1.0' in text


HEADERS = (
    *("authorization", "x-api-key", "origin", "host", "x-request-id", "traceparent", "accept"),
    *("content-type", "content-length", "access-control-request-method", "x-forwarded-for"),
)
odd_values = st.binary(max_size=40) | st.sampled_from(
    [b"Bearer", b"Bearer k", b"bearer  k ", b"http://", b"http://[", b"http://a:b", b"null", b"*"]
    + [b"00-" + b"0" * 32 + b"-" + b"0" * 16 + b"-01", b"[::1", b"127.0.0.1:x", b"\xe9"]
)


@given(
    headers=st.dictionaries(st.sampled_from(HEADERS), odd_values, max_size=5),
    path=st.sampled_from(["/v1/models", "/pause", "/health", "/v1/completions", "/nothing"]),
)
@settings(max_examples=150, deadline=None)
def test_any_header_is_answered_with_reason(headers: dict[str, bytes], path: str) -> None:
    config: dict[str, Any] = {"api_key": ("k",), "log_requests": True}
    config["allowed_origin"] = ("https://chat.example",)

    async def ask(method: str) -> httpx.Response:
        engine = FakeEngine()
        async with app_client(engine, **config) as client:
            body = b'{"prompt":"x"}' if method == "POST" else b""
            response = await client.request(method, path, content=body, headers=headers)
            assert engine.live == ()
            return response

    for method in ("GET", "POST", "OPTIONS"):
        response = asyncio.run(ask(method))
        assert response.status_code < 500
        has_key = any(b"k" in headers.get(h, b"") for h in ("authorization", "x-api-key"))
        is_open = path == "/health" or method == "OPTIONS"
        assert response.status_code >= 400 or has_key or is_open
