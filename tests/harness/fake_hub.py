"""A server that answers as the hub does: search, a repository's files, and downloads in ranges."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

COMMIT = "c0ffee" + "0" * 34


@dataclass
class FakeRepository:
    files: dict[str, bytes]
    downloads: int = 7
    gguf: dict[str, Any] | None = None
    gated: bool = False
    said: dict[str, str] = field(default_factory=dict)
    """Checksums that are announced instead of the files' own."""

    def sha256(self, name: str) -> str:
        return self.said.get(name) or hashlib.sha256(self.files[name]).hexdigest()


class FakeHub:
    """Its repositories, and what it was asked for."""

    def __init__(self) -> None:
        self.repositories: dict[str, FakeRepository] = {}
        self.requests: list[tuple[str, str]] = []
        """(path, range) of each file that was asked for."""
        self.queries: list[dict[str, list[str]]] = []
        self.break_after: int | None = None
        """Bytes after which one transfer breaks off."""
        self.url = ""

    def find(self, words: str) -> list[dict[str, Any]]:
        found = [
            {"id": name, "downloads": r.downloads, "gguf": r.gguf, "gated": r.gated}
            for name, r in self.repositories.items()
            if all(word in name.lower() for word in words.lower().split())
        ]
        return sorted(found, key=lambda entry: -entry["downloads"])

    def describe(self, name: str) -> dict[str, Any]:
        repository = self.repositories[name]
        siblings = []
        for file, content in repository.files.items():
            lfs = {"sha256": repository.sha256(file), "size": len(content), "pointerSize": 134}
            is_large = file.endswith((".gguf", ".safetensors"))
            entry: dict[str, Any] = {"rfilename": file, "size": len(content), "blobId": "0" * 40}
            siblings.append({**entry, "lfs": lfs} if is_large else entry)
        return {"id": name, "sha": COMMIT, "siblings": siblings, "private": False}

    def tree(self, name: str) -> list[dict[str, Any]]:
        """The files of a commit, as the hub's client asks for them before it fetches some."""
        files = []
        for entry in self.describe(name)["siblings"]:
            file = {"type": "file", "path": entry["rfilename"], "size": entry["size"]}
            file["oid"] = entry["blobId"]
            if (lfs := entry.get("lfs")) is not None:
                pointer = lfs["pointerSize"]
                file["lfs"] = {"oid": lfs["sha256"], "size": lfs["size"], "pointerSize": pointer}
            files.append(file)
        return files


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, hub: FakeHub) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.hub = hub


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    @property
    def _hub(self) -> FakeHub:
        assert isinstance(self.server, _Server)
        return self.server.hub

    def log_message(self, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        url = urlsplit(self.path)
        path = unquote(url.path)
        if path == "/api/models":
            query = parse_qs(url.query)
            self._hub.queries.append(query)
            self._json(self._hub.find(query.get("search", [""])[0]))
        elif path.startswith("/api/models/"):
            name = "/".join(path.removeprefix("/api/models/").split("/")[:2])
            if "/tree/" in path and name in self._hub.repositories:
                self._json(self._hub.tree(name))
            elif name in self._hub.repositories:
                self._json(self._hub.describe(name))
            else:
                self._refuse("RepoNotFound")
        else:
            owner, model, _, _, file = path.lstrip("/").split("/", 4)
            self._file(self._hub.repositories[f"{owner}/{model}"], file)

    def _json(self, value: object) -> None:
        content = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _refuse(self, code: str) -> None:
        self.send_response(404)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _file(self, repository: FakeRepository, file: str) -> None:
        content, sent = repository.files[file], self.headers.get("Range", "")
        first = int(sent.removeprefix("bytes=").rstrip("-")) if sent else 0
        self.send_response(206 if sent else 200)
        self.send_header("ETag", f'"{repository.sha256(file)}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Content-Length", str(len(content) - first))
        if sent:
            last = len(content) - 1
            self.send_header("Content-Range", f"bytes {first}-{last}/{len(content)}")
        self.end_headers()
        if self.command == "HEAD":
            return
        self._hub.requests.append((file, sent))
        if self._hub.break_after is not None:
            self.wfile.write(content[first : first + self._hub.break_after])
            self.wfile.flush()
            self.close_connection = True
            return
        self.wfile.write(content[first:])


@contextmanager
def fake_hub(monkeypatch: pytest.MonkeyPatch, cache: str) -> Iterator[FakeHub]:
    """Run the server, with the hub's client turned to it and to this cache."""
    from huggingface_hub import constants

    hub = FakeHub()
    server = _Server(hub)
    thread = threading.Thread(
        target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
    )
    hub.url = f"http://127.0.0.1:{server.server_port}"
    template = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", cache)
    monkeypatch.setenv("HF_HUB_CACHE", cache)
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
