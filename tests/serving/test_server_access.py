"""Keys, admins, web pages of other sites, and prefix caches per key."""

from __future__ import annotations

import asyncio
import json
import logging
import os
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import httpx
import pytest
from fake_engine import FakeEngine
from hypothesis import given, settings
from hypothesis import strategies as st
from lengths import scaled
from server_harness import app_client, chat_body, serving, socket_client
from starlette.applications import Starlette
from starlette.routing import Route
from starlette.types import ASGIApp, Message

from termgen.config import ServerConfig
from termgen.errors import ConfigError
from termgen.server import Server, create_app
from termgen.serving.access import Caller, KeyFileWatch, KeyRing, Role


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def error_code(response: httpx.Response) -> str:
    return str(response.json()["error"]["code"])


CLIENT_PATHS = {
    *("/v1/models", "/v1/models/{id:path}", "/v1/chat/completions", "/v1/completions"),
    *("/v1/embeddings", "/v1/messages", "/v1/messages/count_tokens", "/v1/responses"),
    *("/tokenize", "/detokenize", "/tokenizer_info", "/v1/requests/{id}/cancel"),
    *("/health", "/ready", "/load", "/metrics", "/version", "/openapi.json"),
    *("/", "/api/chat", "/api/generate", "/api/version", "/api/tags", "/api/ps", "/api/show"),
    *("/api/embed", "/api/embeddings", "/api/create", "/api/copy", "/api/push", "/api/delete"),
    "/api/blobs/{digest}",
}
"""Paths open to any key. Every other route of the app must be for administrators."""


def admin_paths(app: Starlette) -> list[str]:
    """The app's own routes, so that a new one is tested too."""
    found = [r.path for r in app.routes if isinstance(r, Route) and r.path not in CLIENT_PATHS]
    assert "/pause" in found and "/v1/events" in found and not any("{" in p for p in found)
    return found


def spellings(path: str) -> list[str]:
    """Other spellings of a path, one of which might pass the check and still reach the route."""
    ends: tuple[str, ...] = (
        "%0A",
        "%0a",
        "%0D",
        "%0D%0A",
        "%0A%0A",
        "%00",
        "%0B",
        "%C2%85",
        "%E2%80%A8",
        "%20",
    )
    ends += ("/", "//", "/.", "/..", "/%2e", "%2F", "%5C", ";x", "%3B", "%3F", "%23", "%250A")
    ends += ("?x=1", "%0A?x=1")
    begins = ("/", "/.", "/x/..", "/%2e", "/%2e%2e", "/v1", "/%0A", "%0A", "%2F")
    encoded = f"/%{ord(path[1]):02x}{path[2:]}"
    return [
        *(path + end for end in ends),
        *(begin + path for begin in begins),
        *(path.upper(), path.title(), path.replace("/", "//"), path.replace("/", "%2F")),
        *(encoded, f"{encoded}%0A", path[:2] + "%0A" + path[2:]),
    ]


async def ask_raw(app: ASGIApp, method: str, target: str, key: str | None) -> tuple[int, Any]:
    """Send a target as it is written: clients normalise paths, an attacker does not."""
    path, _, query = target.partition("?")
    headers = [(b"host", b"127.0.0.1")]
    if key is not None:
        headers.append((b"authorization", f"Bearer {key}".encode()))
    scope = {
        **{"type": "http", "http_version": "1.1", "method": method, "scheme": "http"},
        **{"path": unquote(path), "raw_path": path.encode(), "query_string": query.encode()},
        **{"headers": headers, "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80)},
    }
    sent: list[Message] = []

    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Message) -> None:
        sent.append(message)

    async with asyncio.timeout(5):  # a stream of events has no end
        await app(scope, receive, send)
    body = b"".join(message.get("body", b"") for message in sent)
    return sent[0]["status"], json.loads(body) if body else None


async def test_admin_routes_need_the_admin_key_however_they_are_spelt() -> None:
    engine = FakeEngine()
    app = create_app(engine, ServerConfig(api_key=("one",), admin_key=("root",)))
    for path in admin_paths(app):
        for method in ("GET", "POST", "HEAD", "OPTIONS", "PUT", "post"):
            for key, expected in (("one", "admin_only"), (None, "invalid_api_key")):
                status, body = await ask_raw(app, method, path, key)
                assert status == (401 if key is None else 403), (method, path)
                if not path.startswith("/api/"):  # Ollama's errors have no code
                    assert body["error"]["code"] == expected
            assert (await ask_raw(app, method, path, "wrong"))[0] == 401
        for spelt in spellings(path):
            for method in ("GET", "POST", "HEAD", "OPTIONS"):
                status, _ = await ask_raw(app, method, spelt, "one")
                assert status in (403, 404), (method, spelt)
        assert (await ask_raw(app, "PATCH", path, "root"))[0] == 405, "the route is there"
    assert engine.controls == []
    assert (await ask_raw(app, "POST", "/pause", "root"))[0] == 200
    assert engine.controls == ["pause wait"]
    assert (await ask_raw(app, "GET", "/v1/models", "root"))[0] == 200


ROOT = "/llm/tiny.1"


async def test_a_root_path_may_be_there_or_not_and_opens_nothing() -> None:
    engine = FakeEngine()
    config = ServerConfig(api_key=("one",), admin_key=("root",), root_path=ROOT)
    app = create_app(engine, config)
    for path in ("/v1/models", "/metrics", "/openapi.json"):
        for target in (path, ROOT + path):
            assert (await ask_raw(app, "GET", target, None))[0] == 401
            assert (await ask_raw(app, "GET", ROOT + ROOT + path, "one"))[0] == 404
        if path != "/metrics":
            plain, rooted = [await ask_raw(app, "GET", p, "one") for p in (path, ROOT + path)]
            assert plain == rooted and plain[0] == 200
    assert rooted[1]["servers"] == [{"url": ROOT}]
    assert (await ask_raw(app, "GET", f"{ROOT}/health", None))[0] == 200
    for path in admin_paths(app):
        for spelt in (path, *spellings(path)):
            assert (await ask_raw(app, "POST", ROOT + spelt, "one"))[0] in (403, 404), spelt
    for target in (ROOT, f"{ROOT}x/v1/models", "/llm/v1/models", ROOT.upper() + "/v1/models"):
        assert (await ask_raw(app, "GET", target, "one"))[0] == 404, target
    assert engine.controls == []


@pytest.mark.parametrize("path", ["llm", "/", "/llm/", "//llm", "/a b", "/a%20b", "/..", "/a/../b"])
def test_a_root_path_is_a_plain_path(path: str) -> None:
    with pytest.raises(ConfigError, match="root_path must be a path") as caught:
        ServerConfig(root_path=path)
    assert caught.value.param == "root_path"


async def test_without_client_keys_admin_routes_are_shut_all_the_same() -> None:
    configs: list[dict[str, Any]] = [{"admin_key": ("root",)}, {"host": "0.0.0.0"}]
    for config in configs:
        engine = FakeEngine()
        async with app_client(engine, **config) as client:
            for path in ("/pause", "/pause%0A", "/pause/", "/reset_prefix_cache%0A"):
                refused = await client.post(path)
                assert refused.status_code in (401, 403, 404), path
            listening = await client.get("/v1/events%0A")
            assert listening.status_code == 404
        assert engine.controls == []


async def test_nobody_but_an_admin_goes_before_everybody() -> None:
    keys: dict[str, Any] = {"api_key": ("one",), "admin_key": ("root",)}
    shut: dict[str, Any] = {"host": "0.0.0.0", "insecure_no_auth": True}
    for config, headers, is_admin in (
        (keys, bearer("one"), False),
        (keys, bearer("root"), True),
        (shut, {}, False),
        ({}, {}, True),
    ):
        engine = FakeEngine()
        async with app_client(engine, **config) as client:
            for path, body in (
                ("/v1/chat/completions", chat_body()),
                ("/v1/completions", {"prompt": ["x", "y"], "stream": True}),
            ):
                for priority in (-1, 0, 5):
                    engine.calls.clear()
                    body = {**body, "priority": priority}
                    response = await client.post(path, json=body, headers=headers)
                    if priority < 0 and not is_admin:
                        assert response.status_code == 400 and not engine.calls
                        assert response.json()["error"]["param"] == "priority"
                    else:
                        assert response.status_code == 200, response.text
                        assert {call.priority for call in engine.calls} == {priority}


async def test_no_path_with_a_line_break_is_looked_at() -> None:
    async with socket_client(FakeEngine(), api_key=("one",)) as client:
        for path in ("/health%0A", "/v1/models%0A", "/v1/models/fake%0Amodel", "/metrics%0D%0A"):
            for headers in ({}, bearer("one")):
                refused = await client.get(path, headers=headers)
                assert (refused.status_code, error_code(refused)) == (404, "not_found"), path


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
        keys.require_admin(keys.check("/pause", given))
        return
    with pytest.raises(Exception, match="API key|administrators") as caught:
        keys.require_admin(keys.check("/pause", given))
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


def test_a_changed_key_file_is_read_once_it_rests(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    path = tmp_path / "keys"
    path.write_text("first\n")
    config = ServerConfig(api_key=("own",), admin_key=("root",), api_key_file=str(path))
    keys = KeyRing(config)
    watch = KeyFileWatch(keys, str(path))

    def known() -> set[str]:
        names = ("own", "root", "first", "sec", "second", "third")
        return {name for name in names if keys.find(name.encode())}

    for _ in range(3):
        assert not watch.look() and known() == {"own", "root", "first"}
    first = keys.find(b"first")
    path.write_text("first\nsec")  # half of it
    assert not watch.look()
    path.write_text("first\nsecond\n")
    assert not watch.look() and known() == {"own", "root", "first"}
    assert watch.look() and known() == {"own", "root", "first", "second"}
    assert not watch.look()
    again = keys.find(b"first")
    assert first is not None and again is not None and again.salt("x") == first.salt("x")
    other = tmp_path / "other"
    other.write_text("third\n")
    other.replace(path)
    watch.look()
    assert watch.look() and known() == {"own", "root", "third"}
    assert "second" not in caplog.text and "third" not in caplog.text
    for content in (b"", b"# none", b"\xff\xfe\x80", b"root\n", None):
        caplog.clear()
        path.unlink() if content is None else path.write_bytes(content)
        for _ in range(4):
            assert not watch.look()
        assert known() == {"own", "root", "third"}
        [line] = [record.getMessage() for record in caplog.records]
        assert line.startswith("the keys stay as they were: "), content
    path.write_text("second\n")
    watch.look()
    assert watch.look() and known() == {"own", "root", "second"}


def test_a_key_that_replaces_another_does_not_find_its_prompts(tmp_path: Path) -> None:
    keys = KeyRing(ServerConfig(api_key_file=str(write_keys(tmp_path, "old"))))
    old = keys.find(b"old")
    assert old is not None and old.salt(None) is None, "one key has nobody to hide from"
    assert not keys.use(["old"]) and keys.use(["new"])
    new = keys.find(b"new")
    assert keys.find(b"old") is None and new is not None and new.salt(None) is not None
    assert keys.use(["old", "new"]) and keys.find(b"old") == old, "known by its key, not by a salt"


def write_keys(folder: Path, *keys: str) -> Path:
    path = folder / "keys"
    path.write_text("\n".join(keys))
    return path


async def test_a_running_server_takes_new_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("termgen.serving.app.KEY_INTERVAL_S", 0.01)
    path = write_keys(tmp_path, "old")
    async with socket_client(FakeEngine(), api_key_file=str(path)) as client:

        async def statuses() -> list[int]:
            asked = [await client.get("/v1/models", headers=bearer(k)) for k in ("old", "new")]
            return [response.status_code for response in asked]

        assert await statuses() == [200, 401]
        for keys, wanted in ((("old", "new"), [200, 200]), (("new",), [401, 200])):
            write_keys(tmp_path, *keys)
            async with asyncio.timeout(20):
                while await statuses() != wanted:
                    await asyncio.sleep(0.01)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_pipe_of_keys_is_read_once(tmp_path: Path) -> None:
    keys = KeyRing(ServerConfig(api_key=("one",)))
    os.mkfifo(tmp_path / "pipe")
    watch = KeyFileWatch(keys, str(tmp_path / "pipe"))
    assert not any(watch.look() for _ in range(3)), "else it would wait for a writer"


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
        delete = {"access-control-request-method": "DELETE"}
        foreign = {"origin": "https://evil.example"}
        for headers, code in (
            ({**origin, **delete}, "cors_not_allowed"),
            ({**foreign, **asked}, "origin_not_allowed"),
        ):
            refused = await client.options("/v1/chat/completions", headers=headers)
            assert refused.status_code == 403 and error_code(refused) == code
            assert "Origin" in refused.headers["vary"]
        other = {**foreign, **bearer("k")}
        response = await client.get("/v1/models", headers=other)
        assert response.status_code == 403
        assert "access-control-allow-origin" not in response.headers


async def test_pages_of_this_machine_are_allowed_by_one_word() -> None:
    local = [
        "http://localhost:3000",
        "http://127.0.0.1:8080",
        "https://[::1]:1",
        "http://localhost",
    ]
    foreign = ["http://localhost.evil.example", "http://evil.example:3000", "null"]
    foreign += ["http://localhost:3000.evil.example", "ftp://localhost:1"]
    asked = {"access-control-request-method": "POST"}
    async with app_client(FakeEngine(), allowed_origin=("localhost",)) as client:
        for origin in local:
            preflight = await client.options("/v1/models", headers={"origin": origin, **asked})
            response = await client.get("/v1/models", headers={"origin": origin})
            for answer in (preflight, response):
                assert answer.status_code == 200, origin
                assert answer.headers["access-control-allow-origin"] == origin
        for origin in foreign:
            response = await client.get("/v1/models", headers={"origin": origin})
            assert response.status_code == 403, origin
            assert "access-control-allow-origin" not in response.headers


@pytest.mark.parametrize(
    ("origin", "hint"),
    [
        ("http://localhost:3000", "--allowed-origin http://localhost:3000 to allow"),
        ("http://[::1]:8080", "--allowed-origin http://[::1]:8080 to allow"),
        ("null", "see its --allowed-origin"),
        ("http://a; rm -r", "see its --allowed-origin"),
    ],
)
async def test_a_refused_page_is_named_with_the_flag_that_allows_it(origin: str, hint: str) -> None:
    headers = {"origin": origin}
    async with app_client(FakeEngine()) as client:
        refused = await client.get("/v1/models", headers=headers)
        assert refused.status_code == 403 and hint in refused.json()["error"]["message"]
    if hint.endswith("allow"):
        async with app_client(FakeEngine(), allowed_origin=(origin,)) as client:
            assert (await client.get("/v1/models", headers=headers)).status_code == 200


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
            # a stream and another endpoint count as the same caller
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
    from termgen.vocabulary.request import check_cache_salt

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
@settings(max_examples=scaled(60), deadline=None)
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
