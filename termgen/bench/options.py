"""Options of each bench. Flags are generated from them; names and defaults follow vLLM.

Imports nothing heavy, as `termgen --help` imports it.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, fields
from typing import Any
from urllib.parse import urlsplit

from termgen.config import MAX_INT, check_settings, setting
from termgen.errors import ConfigError

DATASETS = ("random", "prefix-repetition", "synthetic-chat", "trace", "custom")
BACKENDS = ("openai", "openai-chat")
ENDPOINTS = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}
METRICS = ("ttft", "tpot", "itl", "e2el")
"""Time to first token, per output token after it, between two chunks, of the whole request."""
SETTINGS_OF = {"random": "random_", "prefix-repetition": "prefix_repetition_", "custom": "custom_"}
"""Dataset -> prefix of its settings; the others have none."""
GOODPUT_METRICS = ("ttft", "tpot", "e2el")
READY_S = 10.0
OWN_READY_S = 600.0

OVER = ("concurrency", "rate")


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyOptions:
    """Time one batch of equal requests, repeatedly."""

    input_len: int = setting(32, "prompt tokens of each request", minimum=1, maximum=MAX_INT)
    output_len: int = setting(128, "tokens each request generates", minimum=1, maximum=MAX_INT)
    batch_size: int = setting(8, "requests in the batch", minimum=1, maximum=65536)
    num_iters_warmup: int = setting(10, "batches before measuring", minimum=0, maximum=MAX_INT)
    num_iters: int = setting(30, "batches measured", minimum=1, maximum=MAX_INT)
    output_json: str | None = setting(None, "also write the figures to this file", metavar="FILE")

    def __post_init__(self) -> None:
        check_settings(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputOptions:
    """Time many requests that are submitted at once."""

    dataset_name: str = setting(
        "random",
        "random: --num-prompts prompts of about --input-len tokens; "
        "job256: 256 prompts, input and output lengths uniform in 100..1024",
        choices=("random", "job256"),
    )
    num_prompts: int | None = setting(
        None, "number of requests (default: 1000)", minimum=1, maximum=MAX_INT
    )
    input_len: int | None = setting(
        None, "prompt tokens of each request (default: 512)", minimum=1, maximum=MAX_INT
    )
    output_len: int | None = setting(
        None, "tokens each request generates (default: 128)", minimum=1, maximum=MAX_INT
    )
    random_range_ratio: float | None = setting(
        None,
        "lengths are uniform in length * (1 - X) .. length * (1 + X) (default: 0)",
        minimum=0.0,
        maximum=1.0,
    )
    output_json: str | None = setting(None, "also write the figures to this file", metavar="FILE")

    def __post_init__(self) -> None:
        check_settings(self)
        if self.dataset_name != "random":
            for name in ("num_prompts", "input_len", "output_len", "random_range_ratio"):
                if getattr(self, name) is not None:
                    raise ConfigError(
                        f"{name} cannot be changed: dataset {self.dataset_name} fixes it",
                        param=name,
                    )


def check_seed(seed: int) -> None:
    """Refuse a negative seed, which the prompts' generator does not take. Raises `ConfigError`."""
    if seed < 0:
        raise ConfigError(f"seed must be at least 0 in a bench, not {seed}", param="seed")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """Send requests to a server as its users would, and time the answers."""

    base_url: str | None = setting(
        None,
        "server to measure, such as http://127.0.0.1:8000 (default: one is started for the bench, "
        "with the settings below). A key for it is read from OPENAI_API_KEY",
        metavar="URL",
    )
    host: str | None = setting(None, "with --port, instead of --base-url")
    port: int | None = setting(None, "with --host, instead of --base-url", minimum=1, maximum=65535)
    backend: str = setting(
        "openai",
        "openai: completions of token ids, or of text where the server cannot tokenise; "
        "openai-chat: chat messages",
        choices=BACKENDS,
    )
    endpoint: str | None = setting(None, "path of the URL (default: that of the backend)")
    dataset_name: str = setting(
        "random",
        "random: prompts without a common prefix; prefix-repetition: a few prefixes, many "
        "suffixes; synthetic-chat: growing conversations; trace: recorded times and lengths; "
        "custom: your own prompts",
        choices=(*DATASETS, "prefix_repetition"),
    )
    dataset_path: str | None = setting(
        None, "JSONL file of the datasets trace and custom", metavar="FILE"
    )
    num_prompts: int = setting(1000, "number of requests", minimum=1, maximum=MAX_INT)
    request_rate: float | None = setting(
        None,
        "requests per second; inf: all at once (default: inf, or the times of a trace)",
        above=0.0,
        infinite=True,
    )
    burstiness: float = setting(
        1.0,
        "shape of the gamma distribution of the times between requests; 1: Poisson, less: "
        "burstier, more: more even",
        above=0.0,
    )
    max_concurrency: int | None = setting(
        None, "most requests running at once", minimum=1, maximum=65536
    )
    random_input_len: int = setting(1024, "prompt tokens", minimum=1, maximum=MAX_INT)
    random_output_len: int = setting(128, "tokens to generate", minimum=1, maximum=MAX_INT)
    random_range_ratio: float = setting(
        0.0, "lengths are uniform in length * (1 - X) .. length * (1 + X)", minimum=0.0, maximum=1.0
    )
    random_prefix_len: int = setting(
        0, "tokens of a common prefix, added to all prompts", minimum=0, maximum=MAX_INT
    )
    prefix_repetition_prefix_len: int = setting(
        256, "tokens of a prefix", minimum=1, maximum=MAX_INT
    )
    prefix_repetition_suffix_len: int = setting(
        256, "tokens that follow it", minimum=1, maximum=MAX_INT
    )
    prefix_repetition_num_prefixes: int = setting(
        10, "number of prefixes", minimum=1, maximum=MAX_INT
    )
    prefix_repetition_output_len: int = setting(
        128, "tokens to generate", minimum=1, maximum=MAX_INT
    )
    custom_output_len: int = setting(
        256, "tokens to generate where a line does not say", minimum=1, maximum=MAX_INT
    )
    num_warmups: int = setting(
        4, "warm-up requests, which are not measured", minimum=0, maximum=MAX_INT
    )
    ignore_eos: bool | None = setting(
        None,
        "generate the full length; servers other than termgen and vLLM may not support it "
        "(default: yes, but not for custom prompts)",
    )
    temperature: float = setting(0.0, "randomness", minimum=0.0, maximum=2.0)
    extra_body: str | None = setting(
        None, "further fields of each request, as a JSON object", metavar="JSON"
    )
    request_timeout: float = setting(600.0, "seconds a request may take", above=0.0)
    ready_check_timeout_sec: float | None = setting(
        None,
        "seconds the server may take until it answers (default: 10, without limit while it "
        "reports loading, 600 for a server that the bench starts)",
        minimum=0.0,
    )
    goodput: tuple[str, ...] = setting(
        (),
        "latency limits of a good request in milliseconds, such as ttft:200 tpot:50 e2el:5000",
        metavar="NAME:MS",
        nargs="+",
    )
    percentile_metrics: str = setting(
        "ttft,tpot,itl,e2el", "times to report, separated by commas", metavar="NAMES"
    )
    metric_percentiles: str = setting(
        "50,90,99", "percentiles to report, separated by commas", metavar="NUMBERS"
    )
    label: str | None = setting(None, "name of this run in files and reports")
    save_result: bool = setting(False, "write a JSON file")
    save_detailed: bool = setting(
        False, "write every time between tokens and every text to it as well"
    )
    result_dir: str | None = setting(None, "folder of the JSON file", metavar="FOLDER")
    result_filename: str | None = setting(
        None, "name of the JSON file (default: made of rate, model and time)", metavar="FILE"
    )
    output_json: str | None = setting(
        None, "write the figures as JSON to this file (a whole path)", metavar="FILE"
    )
    output_html: str | None = setting(None, "write a report with charts", metavar="FILE")
    disable_tqdm: bool = setting(False, "no progress bar")
    watch: bool = setting(
        False,
        "show the run on a screen, then its report, which is written as an HTML file too",
    )

    def __post_init__(self) -> None:
        check_settings(self)
        _spell_dataset(self)
        self._check_server()
        self._check_dataset()
        if self.burstiness != 1.0 and not self.has_rate:
            raise ConfigError(
                "burstiness is of arrivals at a rate: give --request-rate as well",
                param="burstiness",
            )
        self.slo_ms()
        self.metrics()
        self.percentiles()
        self.extra_fields()
        if self.watch and self.disable_tqdm:
            raise ConfigError("watch shows a progress bar: leave --disable-tqdm out", param="watch")
        if self.output_json is not None:
            for name in ("result_dir", "result_filename"):
                if getattr(self, name) is not None:
                    raise ConfigError(
                        f"output_json and {name} exclude each other: both say where the JSON file "
                        "goes",
                        param="output_json",
                    )
        if self.result_dir is not None and not self.saves and not self.watch:
            raise ConfigError("result_dir needs --save-result", param="result_dir")

    def _check_server(self) -> None:
        if self.host is not None or self.port is not None:
            if self.base_url is not None:
                raise ConfigError("base_url and host or port exclude each other", param="base_url")
            if self.host is None or self.port is None:
                missing, given = ("host", "port") if self.host is None else ("port", "host")
                raise ConfigError(f"{given} needs --{missing}", param=given)
        url = self.url
        if url is not None:
            if not _is_url(url):
                raise ConfigError(
                    f"base_url must be like http://127.0.0.1:8000, not {url!r}", param="base_url"
                )
        if self.endpoint is not None and not self.endpoint.startswith("/"):
            raise ConfigError("endpoint must begin with /", param="endpoint")

    def _check_dataset(self) -> None:
        needs_file = self.dataset_name in ("trace", "custom")
        if needs_file and self.dataset_path is None:
            raise ConfigError(
                f"dataset {self.dataset_name} needs --dataset-path", param="dataset_name"
            )
        if not needs_file and self.dataset_path is not None:
            raise ConfigError(f"dataset {self.dataset_name} reads no file", param="dataset_path")
        for dataset, prefix in SETTINGS_OF.items():
            for f in fields(self) if dataset != self.dataset_name else ():
                if f.name.startswith(prefix) and getattr(self, f.name) != f.default:
                    raise ConfigError(
                        f"{f.name} is for dataset {dataset}, not {self.dataset_name}", param=f.name
                    )

    @property
    def has_rate(self) -> bool:
        """True if arrival times are random: not all at once, not from a trace."""
        return self.request_rate is not None and math.isfinite(self.request_rate)

    @property
    def url(self) -> str | None:
        """Base URL of the server, without a trailing slash or `/v1`; None: start one."""
        if self.host is not None:
            return f"http://{self.host}:{self.port}"
        return None if self.base_url is None else self.base_url.rstrip("/").removesuffix("/v1")

    @property
    def ready_timeout_s(self) -> float:
        """How long to wait for a server that does not answer."""
        if self.ready_check_timeout_sec is not None:
            return self.ready_check_timeout_sec
        return OWN_READY_S if self.url is None else READY_S

    @property
    def ready_limit_s(self) -> float | None:
        """How long to wait for a server that reports loading; None: without limit."""
        return None if self.ready_check_timeout_sec is None and self.url else self.ready_timeout_s

    @property
    def path(self) -> str:
        return self.endpoint or ENDPOINTS[self.backend]

    @property
    def is_chat(self) -> bool:
        return self.backend == "openai-chat"

    @property
    def runs_to_full_length(self) -> bool:
        return self.dataset_name != "custom" if self.ignore_eos is None else self.ignore_eos

    @property
    def saves(self) -> bool:
        named = self.output_json is not None or self.result_filename is not None
        return self.save_result or self.save_detailed or named

    def slo_ms(self) -> dict[str, float]:
        """Metric -> limit in milliseconds. Raises `ConfigError`."""
        limits = {}
        for item in self.goodput:
            name, _, text = item.partition(":")
            limit = _number(text)
            if name not in GOODPUT_METRICS or limit is None or limit <= 0:
                raise ConfigError(
                    f"goodput takes {', '.join(GOODPUT_METRICS)} with milliseconds, such as "
                    f"ttft:200, not {item!r}",
                    param="goodput",
                )
            limits[name] = limit
        return limits

    def metrics(self) -> tuple[str, ...]:
        names = tuple(name.strip() for name in self.percentile_metrics.split(","))
        wrong = [name for name in names if name not in METRICS]
        if wrong:
            raise ConfigError(
                f"percentile_metrics must be of {', '.join(METRICS)}, not {wrong[0]!r}",
                param="percentile_metrics",
            )
        return names

    def percentiles(self) -> tuple[float, ...]:
        found = []
        for text in self.metric_percentiles.split(","):
            value = _number(text)
            if value is None or not 0 <= value <= 100:
                raise ConfigError(
                    f"metric_percentiles must be numbers from 0 to 100, not {text!r}",
                    param="metric_percentiles",
                )
            found.append(value)
        return tuple(found)

    def extra_fields(self) -> dict[str, Any]:
        if self.extra_body is None:
            return {}
        try:
            fields = json.loads(self.extra_body)
        except ValueError as error:
            raise ConfigError(f"extra_body is not JSON: {error}", param="extra_body") from None
        if not isinstance(fields, dict):
            raise ConfigError("extra_body must be a JSON object", param="extra_body")
        return fields


def _spell_dataset(options: ServeOptions) -> None:
    # vLLM spells it prefix_repetition
    object.__setattr__(options, "dataset_name", options.dataset_name.replace("_", "-"))


def _is_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # the port is not a number in range
        return False


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepOptions(ServeOptions):
    """Raise the load on a server step by step until it can take no more."""

    num_prompts: int = setting(
        32,
        "fewest requests of a step; it has at least 4 per client, or 10 seconds of them",
        minimum=1,
        maximum=MAX_INT,
    )
    sweep_over: str = setting(
        "concurrency",
        "concurrency: clients that wait for their answers; rate: requests per second, which needs "
        "--goodput",
        choices=OVER,
    )
    sweep_from: float = setting(1.0, "load of the first step, doubled from step to step", above=0.0)
    sweep_to: float = setting(1024.0, "most load of a step", above=0.0)
    sweep_attainment: float = setting(
        90.0,
        "with --goodput: percent of requests that must be within the limits",
        above=0.0,
        maximum=100.0,
    )
    sweep_gain: float = setting(
        5.0,
        "without --goodput: percent of throughput that a doubled load must add",
        minimum=0.0,
        maximum=100.0,
    )
    sweep_refine: int = setting(
        2, "with --goodput: further steps that narrow down the knee", minimum=0, maximum=20
    )

    def __post_init__(self) -> None:
        ServeOptions.__post_init__(self)
        if self.request_rate is not None:
            raise ConfigError(
                "request_rate is what a sweep changes; use --sweep-over rate", param="request_rate"
            )
        if self.sweep_over == "concurrency":
            if self.max_concurrency is not None:
                raise ConfigError(
                    "max_concurrency is what this sweep changes; use --sweep-to",
                    param="max_concurrency",
                )
            if self.sweep_from < 1:
                raise ConfigError("sweep_from must be at least 1 client", param="sweep_from")
        elif not self.goodput:
            raise ConfigError("sweep_over rate needs --goodput", param="sweep_over")
        self._check_limits()
        if self.sweep_to < self.sweep_from:
            raise ConfigError("sweep_to is less than sweep_from", param="sweep_to")
        if self.save_detailed:
            raise ConfigError(
                "save_detailed is for `bench serve`: a sweep keeps figures of its steps only",
                param="save_detailed",
            )

    @property
    def has_rate(self) -> bool:
        return self.sweep_over == "rate"

    def _check_limits(self) -> None:
        """A step passes by latency limits or by throughput gain: refuse options of the other."""
        needs, of = (
            ("goes without", ("sweep_gain",))
            if self.goodput
            else ("needs", ("sweep_attainment", "sweep_refine"))
        )
        for f in fields(self):
            if f.name in of and getattr(self, f.name) != f.default:
                raise ConfigError(f"{f.name} {needs} --goodput", param=f.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareOptions:
    """Compare two result files, with intervals."""

    before: str = setting("", "result file to compare with", metavar="A")
    after: str = setting("", "result file to judge", metavar="B")
    fail_on_regression: bool = setting(False, "exit with code 1 if anything is worse")
    threshold: float = setting(
        2.0, "smallest change that counts, in percent", minimum=0.0, maximum=1000.0
    )
    confidence: float = setting(
        95.0, "percent of draws that the interval holds", above=0.0, maximum=99.99
    )
    resamples: int = setting(2000, "number of draws", minimum=100, maximum=1_000_000)
    seed: int = setting(0, "seed of the draws", minimum=0, maximum=MAX_INT)
    output_json: str | None = setting(None, "also write the figures to this file", metavar="FILE")

    def __post_init__(self) -> None:
        check_settings(self)
