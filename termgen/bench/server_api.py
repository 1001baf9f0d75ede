"""The bench's requests beside the load: readiness, models, tokenizer and counters of the server.

Works with any OpenAI server; `/tokenize` and `/metrics`, of termgen and vLLM, may be missing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx

from termgen.bench.prompts import WORDS
from termgen.errors import ConfigError
from termgen.system.waiting import NotYet, read_loading, wait_for_server, why_unreachable

TIMEOUT_S = 10.0
COUNTS = {
    "prompt_tokens": ("termgen_prompt_tokens_total", "vllm:prompt_tokens_total"),
    "generation_tokens": ("termgen_generation_tokens_total", "vllm:generation_tokens_total"),
    "cached_tokens": ("termgen_prompt_tokens_cached_total", "vllm:prefix_cache_hits_total"),
    "preemptions": ("termgen_num_preemptions_total", "vllm:num_preemptions_total"),
    "draft_tokens": (
        "termgen_spec_decode_num_draft_tokens_total",
        "vllm:spec_decode_num_draft_tokens_total",
    ),
    "accepted_tokens": (
        "termgen_spec_decode_num_accepted_tokens_total",
        "vllm:spec_decode_num_accepted_tokens_total",
    ),
    "requests": ("termgen_request_success_total", "vllm:request_success_total"),
    "request_seconds": (
        "termgen_e2e_request_latency_seconds_sum",
        "vllm:e2e_request_latency_seconds_sum",
    ),
    "first_token_seconds": (
        "termgen_time_to_first_token_seconds_sum",
        "vllm:time_to_first_token_seconds_sum",
    ),
    "telling_seconds": ("termgen_engine_telling_seconds_total",),
    "working_seconds": ("termgen_engine_device_seconds_total",),
}
"""Counter -> its names in /metrics of termgen and vLLM."""
_SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{.*\})? ([^ ]+)")


@dataclass(frozen=True, slots=True)
class ServedModel:
    model_id: str
    owner: str
    max_model_len: int | None


class ServerApi:
    """One server. Use as an async context manager."""

    def __init__(self, url: str, *, api_key: str | None) -> None:
        self.url = url
        self.headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        # no proxies: the load generator uses none, and both must reach the same server
        self._http = httpx.AsyncClient(
            base_url=url, headers=self.headers, timeout=TIMEOUT_S, trust_env=False
        )

    async def __aenter__(self) -> ServerApi:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def wait_ready(
        self,
        report: Callable[[str, float], None],
        *,
        absent_s: float,
        limit_s: float | None = None,
        check: Callable[[], None] | None = None,
    ) -> list[dict[str, Any]]:
        """Wait for the server and return its models. `check` may raise to give up earlier.

        Waits without limit while it reports loading and `absent_s` while it does not answer;
        `limit_s` replaces both. A refusal ends the wait at once. Raises `ConfigError`.
        """

        async def ask() -> list[dict[str, Any]]:
            try:
                reply = await self._http.get("/v1/models")
            except httpx.HTTPError as error:
                why = why_unreachable(error)
                raise NotYet(self._refusal(f"does not answer: {why}")) from error
            if reply.status_code == 200:
                return self._models(reply)
            loading = read_loading(reply.status_code, reply.content, reply.headers)
            reason = f"answers /v1/models with status {reply.status_code}"
            if reply.status_code in (401, 403):
                reason += "; put its key into OPENAI_API_KEY"
            if loading is not None:
                reason = f"is still loading: {loading.words}"
            if reply.status_code == 503:
                raise NotYet(self._refusal(reason), loading)
            raise self._refusal(reason)

        return await wait_for_server(ask, report, absent_s=absent_s, limit_s=limit_s, check=check)

    def _refusal(self, reason: str) -> ConfigError:
        return ConfigError(f"base_url: {self.url} {reason}", param="base_url")

    def _models(self, reply: httpx.Response) -> list[dict[str, Any]]:
        try:
            models = [m for m in reply.json()["data"] if isinstance(m["id"], str)]
        except (ValueError, KeyError, TypeError):
            models = []
        if not models:
            raise ConfigError(
                f"base_url: {self.url}/v1/models is not the list of an OpenAI server",
                param="base_url",
            )
        return models

    async def token_pool(self, model: str) -> list[int]:
        """Token ids of common words, no special tokens; empty if the server cannot tokenise."""
        prompt = " ".join(WORDS)
        body = {"model": model, "prompt": prompt, "add_special_tokens": False}
        try:
            reply = await self._http.post("/tokenize", json=body)
            ids = reply.json()["tokens"] if reply.status_code == 200 else []
        except (httpx.HTTPError, ValueError, KeyError, TypeError):
            return []
        return sorted({i for i in ids if isinstance(i, int)}) if isinstance(ids, list) else []

    async def counts(self) -> dict[str, float] | None:
        """The server's counters since its start; None if it has none."""
        try:
            reply = await self._http.get("/metrics")
        except httpx.HTTPError:
            return None
        return read_counts(reply.text) if reply.status_code == 200 else None


def read_counts(text: str) -> dict[str, float] | None:
    """Known counters of a Prometheus text, summed over labels; None if there are none."""
    sums: dict[str, float] = {}
    for line in text.splitlines():
        match = _SAMPLE.match(line)
        if match:
            try:
                sums[match[1]] = sums.get(match[1], 0.0) + float(match[2])
            except ValueError:
                continue  # not Prometheus text
    found = {}
    for count, names in COUNTS.items():
        known = next((name for name in names if name in sums), None)
        if known is not None:
            found[count] = sums[known]
    return found or None


def choose_model(models: list[dict[str, Any]], asked: str | None) -> ServedModel:
    """The model asked for, or the first. Raises `ConfigError`."""
    chosen = next((m for m in models if asked in (None, m["id"])), None)
    if chosen is None:
        names = ", ".join(m["id"] for m in models)
        raise ConfigError(f"model: the server has no {asked!r}, only {names}", param="model")
    limit = chosen.get("max_model_len")
    owner = str(chosen.get("owned_by") or "unknown")
    return ServedModel(chosen["id"], owner, limit if isinstance(limit, int) else None)


def error_text(raw: str) -> str:
    """The message of an error body in OpenAI's format; else the raw text."""
    _, _, body = raw.partition(": ")
    try:
        message = json.loads(body)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return raw
    return f"{raw.partition(': ')[0]}: {message}"
