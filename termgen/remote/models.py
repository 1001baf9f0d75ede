"""A server's address, and the entries of its `/v1/models`. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from termgen.client import ModelInfo
from termgen.config import is_loopback
from termgen.errors import ConfigError, EngineError
from termgen.remote.failures import short
from termgen.remote.wire import Dialect, dialect_of, unsent_params


@dataclass(frozen=True, slots=True)
class RemoteModel:
    """One entry of `/v1/models`."""

    model_id: str
    owner: str
    max_model_len: int
    """Context length; 0: unknown."""


def normal_url(text: str) -> str:
    """The base URL, to which `/v1/...` is appended. Raises `ConfigError`."""
    scheme, _, rest = text.strip().rpartition("://")
    rest = rest.rstrip("/")
    for end in ("/chat/completions", "/v1"):
        rest = rest.removesuffix(end)
    url = f"{scheme or 'http'}://{rest}"
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise ConfigError(f"url: {error}", param="url") from None
    is_host = re.fullmatch(r"[\w.:-]+", parsed.host) is not None
    if parsed.scheme not in ("http", "https") or not is_host:
        raise ConfigError(f"url must be like http://127.0.0.1:8000, not {text!r}", param="url")
    if parsed.userinfo:
        raise ConfigError("url: leave user and password out; --api-key is a key", param="url")
    return url


def read_object(url: str, raw: bytes) -> dict[str, Any]:
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError):
        body = None
    if not isinstance(body, dict):
        raise EngineError(f"{url} sent no JSON object: {short(raw)}")
    return body


def read_models(url: str, raw: bytes) -> list[RemoteModel]:
    listed = read_object(url, raw).get("data")
    models = [
        RemoteModel(entry["id"], str(entry.get("owned_by") or ""), _context_length(entry))
        for entry in (listed if isinstance(listed, list) else ())
        if isinstance(entry, dict) and isinstance(entry.get("id"), str)
    ]
    if not models:
        raise EngineError(f"{url}/v1/models lists no model: is it an OpenAI-compatible server?")
    return models


def _context_length(entry: Mapping[str, Any]) -> int:
    value = entry.get("max_model_len")
    return value if isinstance(value, int) and value > 0 else 0


def model_info(url: str, model: RemoteModel) -> ModelInfo:
    """A `ModelInfo` with the little that `/v1/models` reports."""
    parsed = httpx.URL(url)
    return ModelInfo(
        model_id=model.model_id,
        root=url,
        architecture="",
        dtype="",
        quantization=None,
        device="remote",
        device_name=parsed.netloc.decode(),
        max_model_len=model.max_model_len,
        vocab_size=0,
        num_blocks=0,
        block_size=0,
        has_chat_template=True,
        created=0,
        unsent_params=unsent_params(dialect_of(model.owner)),
        reads_calls=True,
        holds_calls=dialect_of(model.owner) is Dialect.TERMGEN,
        counts_tokens=dialect_of(model.owner).knows_all and is_loopback(httpx.URL(url).host),
    )
