"""`termgen bench serve`: a load test of a server, from the prompts to the figures.

Finds the served model, makes the prompts, warms up, runs the load generator in a child process and
compares its counts with the server's. Knows a server only by its URL.
"""

from __future__ import annotations

import dataclasses
import math
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from termgen.bench import report
from termgen.bench.datasets import check_fits, make_prompts, warmup_prompts
from termgen.bench.load import LoadPlan, OnProgress, Stopped, StopSwitch, run_in_process
from termgen.bench.options import ServeOptions
from termgen.bench.prompts import Prompt, RequestMaker
from termgen.bench.serve_result import ServeResult, make_result
from termgen.bench.server_api import ServedModel, ServerApi, choose_model, error_text
from termgen.bench.stream_client import Target
from termgen.errors import EngineError

SALTED_SERVERS = frozenset({"termgen", "vllm"})
"""Owners of models whose servers know `cache_salt`; others may refuse it."""
MOST_CACHED = 0.05
"""Share of prompt tokens above which prompts with nothing in common were sent before."""


@dataclass(frozen=True, slots=True)
class ServeRun:
    """A result, and the server it was measured on."""

    result: ServeResult
    model: ServedModel
    url: str
    seed: int
    can_tokenize: bool
    """Prompts were token ids, so their lengths are exact."""
    server: dict[str, float] | None
    """Increase of the server's own counters during the run; None if it has none."""
    screen_share: float | None = None
    """Share of a core that the watching screen's thread used; None without a screen."""

    def observer(self) -> dict[str, float]:
        """Cost of watching: share of the engine's working time, and of a core for the screen."""
        found = {}
        server = self.server or {}
        if server.get("working_seconds") and "telling_seconds" in server:
            found["engine_share"] = server["telling_seconds"] / server["working_seconds"]
        if self.screen_share is not None:
            found["screen_share"] = self.screen_share
        return found

    def drafts(self) -> dict[str, float]:
        """The share of the guessed tokens that stayed, and how many tokens a step gave a request;
        empty where the server guessed none, or has no counters of it."""
        server = self.server or {}
        drafted, kept = server.get("draft_tokens"), server.get("accepted_tokens")
        if not drafted or kept is None:
            return {}
        return report.draft_figures(drafted, kept, server.get("generation_tokens", 0.0))

    @property
    def cached_share(self) -> float | None:
        """Share of the prompts' tokens that were in the prefix cache, as the server counted."""
        server = self.server or {}
        if "cached_tokens" not in server or not server.get("prompt_tokens"):
            return None
        return server["cached_tokens"] / server["prompt_tokens"]

    def warnings(self) -> list[str]:
        found = self.result.warnings()
        options = self.result.options
        have_common = options.dataset_name != "random" or options.random_prefix_len
        if not have_common and (self.cached_share or 0.0) > MOST_CACHED:
            found.append(
                f"{self.cached_share:.0%} of the prompt tokens were in the server's prefix cache, "
                "though no two prompts begin alike: the server had these prompts before; restart "
                "it or choose another --seed"
            )
        is_whole = not self.result.num_cut_off and not any(self.result.errors)
        if self.server is not None and self.result.is_counted and is_whole:
            for name, ours in (
                ("generation_tokens", self.result.num_output_tokens),
                ("prompt_tokens", self.result.num_input_tokens),
            ):
                theirs = self.server.get(name)
                if theirs is not None and theirs != ours:
                    found.append(
                        f"the server counted {theirs:,.0f} {name.replace('_', ' ')}, the bench "
                        f"{ours:,}: others use it too, or one of both is wrong"
                    )
        return found


class ServeBench:
    """Load tests of one server; several runs share its model and token pool."""

    def __init__(
        self, api: ServerApi, model: ServedModel, token_pool: list[int], options: ServeOptions
    ) -> None:
        self._api = api
        self.model = model
        self._token_pool = token_pool
        self._options = options
        self._salt = ""
        """Keeps the prefixes of this run apart from those of others in the server's cache."""

    @classmethod
    async def connect(
        cls,
        api: ServerApi,
        options: ServeOptions,
        *,
        asked_model: str | None,
        report: Callable[[str, float], None],
        check: Callable[[], None] | None = None,
    ) -> ServeBench:
        """Wait until the server answers; `report` gets its loading phases. Raises `ConfigError`."""
        models = await api.wait_ready(
            report, absent_s=options.ready_timeout_s, limit_s=options.ready_limit_s, check=check
        )
        model = choose_model(models, asked_model)
        pool = [] if options.is_chat else await api.token_pool(model.model_id)
        return cls(api, model, pool, options)

    async def warm_up(
        self, prompts: list[Prompt], *, seed: int, stop: StopSwitch | None = None
    ) -> None:
        """Send the warm-up requests. Raises `EngineError` if one fails."""
        count = self._options.num_warmups
        if not count:
            return
        most = min(count, self._options.max_concurrency or count)
        warmups = warmup_prompts(prompts, count, seed=seed)
        plan = self._plan(warmups, [0.0] * count, max_concurrency=most)
        measured = await run_in_process(plan, stop=stop)
        for answer in measured["answers"]:
            if not answer:
                raise Stopped("the run was stopped in its warm-up")
            if answer["error"]:
                raise EngineError(f"a warm-up request failed: {error_text(answer['error'])}")

    async def run(
        self,
        options: ServeOptions,
        *,
        seed: int,
        on_progress: OnProgress | None = None,
        stop: StopSwitch | None = None,
    ) -> ServeRun:
        """Warm up, then measure. `options` may differ in load and number of prompts between runs.
        Raises `Stopped` if `stop` comes before the first answer."""
        prompts = make_prompts(options, seed=seed)
        check_fits(prompts, self.model.max_model_len)
        self._salt = secrets.token_hex(8)
        await self.warm_up(prompts, seed=seed, stop=stop)
        due = _due(options, prompts, seed=seed)
        before = await self._api.counts()
        plan = self._plan(prompts, due, max_concurrency=options.max_concurrency)
        measured = await run_in_process(plan, on_progress, stop=stop)
        after = await self._api.counts()
        result = make_result(options, measured, [p.num_words for p in prompts])
        if not result.errors:
            raise Stopped("the run was stopped before the first answer")
        if not result.times:
            raise EngineError(
                f"no request succeeded of {len(result.errors)}, the first failed with: "
                f"{error_text(result.errors[0])}"
            )
        return ServeRun(
            result,
            self.model,
            self._api.url,
            seed,
            bool(self._token_pool),
            _difference(before, after),
        )

    def _plan(
        self, prompts: list[Prompt], due: list[float], *, max_concurrency: int | None
    ) -> LoadPlan:
        maker = RequestMaker(
            self.model.model_id, self._options.is_chat, self._token_pool, self._fields()
        )
        return LoadPlan(
            target=target_of(self._api, self._options.path),
            bodies=tuple(maker.body(prompt) for prompt in prompts),
            due_s=tuple(due),
            max_concurrency=max_concurrency,
            timeout_s=self._options.request_timeout,
            keeps_texts=self._options.save_detailed,
            is_watched=self._options.watch,
        )

    def _fields(self) -> dict[str, Any]:
        options = self._options
        fields: dict[str, Any] = {"temperature": options.temperature}
        if options.runs_to_full_length:
            fields["ignore_eos"] = True
        if self.model.owner in SALTED_SERVERS:
            fields["cache_salt"] = self._salt
        return fields | options.extra_fields()


def target_of(api: ServerApi, path: str) -> Target:
    parts = urlsplit(api.url)
    is_tls = parts.scheme == "https"
    port = parts.port or (443 if is_tls else 80)
    headers = tuple(api.headers.items())
    return Target(parts.hostname or "", port, parts.path + path, headers, is_tls)


def document(run: ServeRun, engine_flags: list[str] | None) -> dict[str, Any]:
    """The JSON object: vLLM's keys, then everything needed to repeat the run. `engine_flags`: of a
    server that the bench started, else None."""
    options = dataclasses.asdict(run.result.options)
    options["request_rate"] = run.result.as_json()["request_rate"]
    return {
        "date": time.strftime("%Y%m%d-%H%M%S"),
        "bench": "serve",
        "label": run.result.options.label,
        "model_id": run.model.model_id,
        "tokenizer_id": run.model.model_id,
        **run.result.as_json(),
        "url": run.url,
        "server_owner": run.model.owner,
        "server_counts": run.server,
        "drafts": run.drafts() or None,
        "observer": run.observer(),
        "prompts_are_token_ids": run.can_tokenize,
        "warnings": run.warnings(),
        "seed": run.seed,
        "options": options,
        "engine_flags": engine_flags,
        "machine": report.machine(),
        "versions": report.versions(),
        "git_sha": report.git_sha(),
    }


def file_name(run: ServeRun) -> str:
    """Name of the JSON file, in vLLM's pattern."""
    options = run.result.options
    rate = run.result.as_json()["request_rate"]
    seats = "" if options.max_concurrency is None else f"-concurrency{options.max_concurrency}"
    model = run.model.model_id.rsplit("/", 1)[-1]
    name = (options.label or options.backend).replace("/", "-")
    return f"{name}-{rate}qps{seats}-{model}-{time.strftime('%Y%m%d-%H%M%S')}.json"


def _due(options: ServeOptions, prompts: list[Prompt], *, seed: int) -> list[float]:
    if options.request_rate is None and options.dataset_name == "trace":
        return [p.at_s or 0.0 for p in prompts]
    rate = math.inf if options.request_rate is None else options.request_rate
    return due_times(len(prompts), rate, burstiness=options.burstiness, seed=seed)


def _difference(
    before: dict[str, float] | None, after: dict[str, float] | None
) -> dict[str, float] | None:
    if before is None or after is None:
        return None
    return {name: value - before.get(name, 0.0) for name, value in after.items()}


def due_times(count: int, rate: float, *, burstiness: float, seed: int) -> list[float]:
    """[count] seconds after the start, ascending; all 0 for an infinite rate. Deterministic.

    Intervals between requests follow a gamma distribution with mean 1 / rate. As in vLLM they are
    scaled so that the last request is due after exactly count / rate seconds: short runs of one
    rate stay comparable.
    """
    if math.isinf(rate):
        return [0.0] * count
    rng = np.random.default_rng([seed, 1])
    gaps = rng.gamma(burstiness, 1.0 / (rate * burstiness), size=count)  # [count]
    times = np.cumsum(gaps)
    total = float(times[-1])
    if total > 0:
        times *= count / rate / total
    return [float(t) for t in times]
