"""Keys and the Host header guard the server, without sockets."""

from __future__ import annotations

from fake_engine import FakeEngine
from server_harness import app_client, error_of


async def test_keys_guard_everything_but_health() -> None:
    keys = ("secret-one", "sécret-two")
    good = [
        {"authorization": "Bearer secret-one"},
        {"authorization": "bearer  secret-one"},
        {"x-api-key": "secret-one"},
    ]
    bad: list[dict[str, str]] = [
        {},
        {"authorization": ""},
        {"authorization": "Bearer"},
        {"authorization": "Bearer "},
        {"authorization": "Bearer secret"},
        {"authorization": "Bearer secret-one-more"},
        {"authorization": "Basic secret-one"},
        {"authorization": "secret-one"},
        {"x-api-key": "secret"},
        {"authorization": "Bearer wrong", "x-api-key": "secret-one"},
    ]
    async with app_client(FakeEngine(), api_key=keys) as client:
        assert (await client.get("/health")).status_code == 200
        for path in ("/v1/models", "/metrics", "/ready", "/version", "/nothing", "//health"):
            for headers in bad:
                response = await client.get(path, headers=headers)
                assert response.status_code == 401, (path, headers)
                assert error_of(response)["code"] == "invalid_api_key"
                assert response.headers["www-authenticate"] == "Bearer"
        for headers in good:
            assert (await client.get("/v1/models", headers=headers)).status_code == 200
        response = await client.get("/nothing", headers=good[0])
        assert response.status_code == 404, "with a key, a missing page is a missing page"


async def test_a_crafted_host_header_opens_nothing() -> None:
    """Frameworks that rebuild the URL from the Host header can be led to another path."""
    config = {"api_key": ("k",), "allowed_host": ("*",)}
    async with app_client(FakeEngine(), **config) as client:
        for host in ("x/health?", "x/health#", "127.0.0.1/health", "health"):
            response = await client.get("/v1/models", headers={"host": host})
            assert response.status_code == 401, host


async def test_host_check_on_loopback() -> None:
    def hosts(*names: str) -> list[dict[str, str]]:
        return [{"host": name} for name in names]

    good = hosts("localhost", "localhost:8000", "127.0.0.1:1", "[::1]:80", "127.1.2.3", "LOCALHOST")
    bad = hosts("evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.nip.io")
    async with app_client(FakeEngine()) as client:
        for headers in good:
            assert (await client.get("/v1/models", headers=headers)).status_code == 200, headers
        for headers in bad:
            response = await client.get("/v1/models", headers=headers)
            assert response.status_code == 403, headers
            assert error_of(response)["type"] == "permission_error"
    async with app_client(FakeEngine(), allowed_host=("box.lan",)) as client:
        assert (await client.get("/health", headers={"host": "box.lan:8000"})).status_code == 200
        assert (await client.get("/health", headers=bad[0])).status_code == 403
    async with app_client(FakeEngine(), host="0.0.0.0") as client:
        assert (await client.get("/health", headers=bad[0])).status_code == 200
