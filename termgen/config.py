"""Settings as frozen dataclasses; flags, config-file keys and variables are generated from them.

Each field's metadata has its help text, choices and range; names follow vLLM where it has the
setting. Constructing a config checks it: `ConfigError` names the field. `commands.settings` knows
where a value came from. Standard library only.
"""

from __future__ import annotations

import ipaddress
import math
import re
import types
import typing
from dataclasses import Field, dataclass, field, fields
from typing import Any

from termgen.errors import ConfigError
from termgen.vocabulary.alerts import MOST as ALERTS
from termgen.vocabulary.alerts import parse_alerts
from termgen.vocabulary.device.kv_cache_types import KV_CACHE_DTYPES
from termgen.vocabulary.device.speculation import parse_speculative_config

DTYPES = ("auto", "float32", "bfloat16", "float16")
DEVICES = ("auto", "cpu", "cuda")
LOAD_FORMATS = ("auto", "dummy")
MODEL_IMPLS = ("termgen", "transformers")
IMAGE_MODES = ("note", "refuse")
QUANTIZATIONS = ("auto", "none", "int8", "q4", "fp8")
SCHEDULING_POLICIES = ("fcfs", "priority")
ATTENTION_BACKENDS = ("triton", "native", "torch_reference", "flashinfer", "flash_attn")
TOOLS = ("files",)
CONTEXT_POLICIES = ("ask", "drop", "ends", "summarise")
DEVICE_WAITS = ("auto", "spin", "sleep")
CUDAGRAPH_MODES = ("none", "piecewise", "full_decode_only", "full", "full_and_piecewise")
MAX_INT = 2**31 - 1
_ROOT_PATH = re.compile(r"(/[A-Za-z0-9_~-][A-Za-z0-9._~-]*)+")


def setting(default: Any, help: str, **metadata: Any) -> Any:
    """A dataclass field with its help text.

    metadata: `choices`; `minimum` and `maximum` (inclusive) or `above` (exclusive low end);
    `flag` when it differs from the field's name; `metavar`; `nargs` of a flag that takes several
    values at once (without it, a list's flag is repeated); `secret` for what is never shown;
    `infinite` for a number that may be infinity.
    """
    shown = not metadata.get("secret", False)
    return field(default=default, repr=shown, metadata={"help": help, **metadata})


@dataclass(frozen=True, slots=True)
class SettingType:
    """A field's annotation, taken apart."""

    base: type
    """bool, int, float or str; for a tuple, the type of its items."""
    optional: bool
    many: bool
    """A tuple of any length."""

    @property
    def words(self) -> str:
        """Description of a valid value, for messages."""
        one = {bool: "true or false", int: "an integer", float: "a number", str: "text"}[self.base]
        if not self.many:
            return one
        return "a list of integers" if self.base is int else "a list of text"


def setting_types(config_class: type, omit: frozenset[str] = frozenset()) -> dict[str, SettingType]:
    """Field name -> type, for a dataclass whose fields are made with `setting`."""
    hints = typing.get_type_hints(config_class)
    names = [f.name for f in fields(config_class) if f.name not in omit]
    return {name: _setting_type(hints[name]) for name in names}


def _setting_type(hint: Any) -> SettingType:
    optional = False
    if isinstance(hint, types.UnionType):
        rest = [arg for arg in typing.get_args(hint) if arg is not types.NoneType]
        assert len(rest) == 1, f"a setting has one type or None, not {hint}"
        hint, optional = rest[0], True
    many = typing.get_origin(hint) is tuple
    base = typing.get_args(hint)[0] if many else hint
    assert base in (bool, int, float, str), f"settings of type {hint} are not supported"
    return SettingType(base, optional, many)


def check_settings(config: Any) -> None:
    """Check types, choices and ranges of every field, and normalise lists to tuples.

    Called by `__post_init__`, so an out-of-range config cannot exist. Raises `ConfigError`.
    """
    kinds = setting_types(type(config))
    for f in fields(config):
        value = getattr(config, f.name)
        kind = kinds[f.name]
        if value is None and kind.optional:
            continue
        if kind.many and isinstance(value, kind.base):
            value = (value,)
        if kind.many and isinstance(value, (list, tuple)):
            items = tuple(_convert(kind, f, item) for item in value)
            object.__setattr__(config, f.name, items)
        else:
            items = (_convert(kind, f, value),)
            object.__setattr__(config, f.name, items[0])
        for item in items:
            _check_range(f.name, item, f.metadata)


def _convert(kind: SettingType, f: Field[Any], value: object) -> object:
    if kind.base is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    # bool is a subclass of int
    is_right = isinstance(value, kind.base) and (kind.base is bool or not isinstance(value, bool))
    if isinstance(value, float) and not math.isfinite(value):
        is_right = bool(f.metadata.get("infinite")) and not math.isnan(value)
    if not is_right:
        shown = "" if f.metadata.get("secret") else f", not {value!r}"
        raise ConfigError(f"{f.name} must be {kind.words}{shown}", param=f.name)
    return value


def _check_range(name: str, value: Any, metadata: typing.Mapping[str, Any]) -> None:
    choices = metadata.get("choices")
    if choices is not None and value not in choices:
        raise ConfigError(f"{name} must be one of {', '.join(choices)}, not {value!r}", param=name)
    low, high, above = (metadata.get(key) for key in ("minimum", "maximum", "above"))
    too_low = (low is not None and value < low) or (above is not None and value <= above)
    if not too_low and (high is None or value <= high):
        return
    if above is not None:
        wanted = f"greater than {above:g}" + ("" if high is None else f" and at most {high:g}")
    elif high is None:
        wanted = f"at least {low}"
    else:
        wanted = f"between {low} and {high}"
    raise ConfigError(f"{name} must be {wanted}, not {value}", param=name)


def parse_cpu_experts(value: str) -> int | None:
    """None for auto. Raises ConfigError."""
    if value == "auto":
        return None
    if not (value.isascii() and value.isdigit()) or int(value) > MAX_INT:
        raise ConfigError(
            f"cpu_experts must be auto or a number of experts, not {value!r}", param="cpu_experts"
        )
    return int(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Settings of the engine. `None`: decided from the model and the machine."""

    model: str | None = setting(
        None, "name from `termgen models`, hub id, folder or .gguf file (default: smollm2-135m)"
    )
    tokenizer: str | None = setting(None, "folder or hub id of another tokenizer")
    load_format: str = setting(
        "auto", "dummy: random weights from config.json alone", choices=LOAD_FORMATS
    )
    model_impl: str = setting(
        "auto",
        "whose code runs the model; auto: termgen's where it has any, else that of transformers",
        choices=("auto", *MODEL_IMPLS),
    )
    skip_tokenizer_init: bool = setting(False, "no tokenizer: token ids in, token ids out")
    device: str = setting("auto", "where to run; auto: on a GPU if there is one", choices=DEVICES)
    dtype: str = setting(
        "auto",
        "type of weights and activations; auto: float32 on a CPU, a 16-bit type on a GPU",
        choices=DTYPES,
    )
    quantization: str = setting(
        "auto",
        "how weights are stored. int8: in 8 bits, or the 4 of a GGUF file; q4: layers in 4 bits, "
        "tables and heads in 8; fp8: layers in 8-bit floats, on a GPU of compute capability 8.9 or "
        "more; none: in the dtype; auto: if no dtype is given, int8 on a CPU for models large "
        "enough to gain by it, and on a GPU for files of quantised weights, which stay so",
        choices=QUANTIZATIONS,
    )
    threads: int | None = setting(
        None, "CPU threads (default: physical cores)", minimum=1, maximum=1024
    )
    cpu_experts: str = setting(
        "auto",
        "experts of each layer of a mixture that are not kept on the GPU, but computed by the CPU "
        "out of main memory: a number, or auto for as many as do not fit; with int8 and q4",
        metavar="N",
    )
    max_model_len: int | None = setting(
        None,
        "longest prompt plus answer, in tokens (default: the model's, if the KV cache holds it)",
        minimum=2,
        maximum=MAX_INT,
    )
    clamp_max_tokens: bool | None = setting(
        None,
        "cut max_tokens to what the context leaves instead of refusing a request that asks for "
        "more (default: in a server and a chat)",
    )
    max_num_seqs: int | None = setting(
        None,
        "requests that may run at once (default: 256 on a GPU, 32 on a CPU)",
        minimum=1,
        maximum=65536,
    )
    max_num_batched_tokens: int | None = setting(
        None,
        "most tokens that one step computes (default: 8192 on a GPU, 512 on a CPU)",
        minimum=1,
        maximum=MAX_INT,
    )
    long_prefill_token_threshold: int = setting(
        0,
        "most prompt tokens of one request in one step; 0: no limit",
        minimum=0,
        maximum=MAX_INT,
    )
    adaptive_prefill: bool | None = setting(
        None,
        "while requests generate, cut prompts so that a step computes no more of them than takes "
        "the time of two steps without prompts, or of as many as there are prompts that fit now; "
        "those that end within their part come first (default: in a server and a chat)",
    )
    block_size: int | None = setting(
        None,
        "tokens in one KV block, a power of two "
        "(default: 64 with triton attention, 256 with flash_attn, else 16)",
        minimum=1,
        maximum=256,
    )
    gpu_memory_utilization: float = setting(
        0.9, "share of GPU memory in use at most, other processes included", above=0.0, maximum=1.0
    )
    kv_cache_gib: float | None = setting(
        None,
        "size of the KV cache in GiB (default: what gpu_memory_utilization leaves; on a CPU 1, or "
        "more for one full context)",
        above=0.0,
    )
    kv_cache_dtype: str = setting(
        "auto",
        "type of keys and values; auto: that of the activations; int8, with a scale for each head "
        "of a token, and fp8 (e4m3): half the bytes of a 16-bit type, less exact; int4: about a "
        "quarter, far less exact",
        choices=KV_CACHE_DTYPES,
    )
    num_gpu_blocks_override: int | None = setting(
        None,
        "number of KV blocks, each of one group of layers, for experiments",
        minimum=2,
        maximum=MAX_INT,
    )
    enable_prefix_caching: bool = setting(
        True,
        "reuse the KV of shared prompt prefixes (default: yes, but not in `bench latency` and "
        "`bench throughput`)",
    )
    scheduling_policy: str = setting(
        "fcfs",
        "which requests run first: fcfs: those that arrived first; priority: those with the lower "
        "priority value",
        choices=SCHEDULING_POLICIES,
    )
    async_scheduling: bool | None = setting(
        None, "plan the next step while one runs (default: on a GPU)"
    )
    speculative_config: str | None = setting(
        None,
        "guess several tokens of an answer at once and keep those that the model would have "
        'written: ngram, mtp, none, or JSON as {"method": "ngram", "num_speculative_tokens": 4} or '
        '{"method": "eagle3", "model": "FOLDER"}; the answer is the same '
        "(default: mtp if the model's files have an MTP layer, else none)",
    )
    run_ahead_ms: float = setting(
        20.0,
        "with async scheduling: longest pause of this process, in milliseconds, that steps queued "
        "on the device cover. As many are queued as the pauses of the last seconds need, two while "
        "there are none; a new request waits for them. 0: never more than two",
        minimum=0.0,
        maximum=1000.0,
    )
    device_wait: str = setting(
        "auto",
        "how the engine's thread waits for a GPU. spin: keeps a CPU core busy while there is work, "
        "and continues sooner; sleep: leaves the core to others; auto: spin with four cores or "
        "more",
        choices=DEVICE_WAITS,
    )
    attention_backend: str | None = setting(
        None,
        "attention implementation (default: triton on a GPU, native on a CPU, torch_reference "
        "where neither runs)",
        choices=ATTENTION_BACKENDS,
    )
    cudagraph_mode: str = setting(
        "full",
        "what a GPU records as CUDA graphs. full: whole steps; full_decode_only: whole steps, "
        "those without prompts; piecewise: steps cut at attention; full_and_piecewise: steps "
        "without prompts whole, others cut at attention; none: nothing",
        choices=CUDAGRAPH_MODES,
    )
    capture_in_background: bool = setting(
        False,
        "record most CUDA graphs in idle moments, to start sooner (default: in a chat)",
    )
    tune: bool = setting(
        True,
        "in a server or a chat on a GPU: while no request runs, measure which kernels multiply "
        "fastest for this model, once, in a process of its own. Later starts use what was found "
        "(`termgen tune` does the same at once)",
    )
    enforce_eager: bool = setting(False, "no CUDA graphs, as --cudagraph-mode none")
    debug: bool = setting(
        False,
        "for debugging: check at each replay of a CUDA graph that nothing it reads has moved, and "
        "fill the KV blocks that a request gives up with NaN",
    )
    seed: int = setting(
        0,
        "seed of random weights and of requests without one",
        minimum=-(2**63),
        maximum=2**63 - 1,
    )

    def __post_init__(self) -> None:
        check_settings(self)
        if self.block_size is not None and self.block_size & (self.block_size - 1):
            raise ConfigError(
                f"block_size must be a power of two, not {self.block_size}", param="block_size"
            )
        budget, seats = self.max_num_batched_tokens, self.max_num_seqs
        if budget is not None and seats is not None and budget < seats:
            raise ConfigError(
                f"max_num_batched_tokens ({budget}) is less than max_num_seqs ({seats}): "
                "every running request needs at least one token of the budget",
                param="max_num_batched_tokens",
            )
        parse_cpu_experts(self.cpu_experts)
        if self.speculative_config is not None:
            parse_speculative_config(self.speculative_config)
        if self.kv_cache_gib is not None and self.num_gpu_blocks_override is not None:
            raise ConfigError(
                "kv_cache_gib and num_gpu_blocks_override both size the KV cache; give one",
                param="num_gpu_blocks_override",
            )
        if self.quantization == "fp8" and self.device == "cpu":
            raise ConfigError(
                "quantization fp8 runs on a GPU only; use int8, or device cuda",
                param="quantization",
            )
        if self.quantization in ("int8", "q4", "fp8") and self.model_impl == "transformers":
            raise ConfigError(
                f"quantization {self.quantization} is for the models that termgen's own code runs; "
                "leave model_impl transformers or the quantization out",
                param="quantization",
            )
        if self.skip_tokenizer_init and self.tokenizer is not None:
            raise ConfigError(
                "tokenizer and skip_tokenizer_init exclude each other", param="tokenizer"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Settings of `termgen serve`: address, access, limits."""

    host: str = setting("127.0.0.1", "address to listen on")
    port: int = setting(8000, "port to listen on; 0: any free one", minimum=0, maximum=65535)
    ollama_port: int | None = setting(
        None,
        "second port to listen on, for clients that expect Ollama: 11434 is where they look; 0: "
        "any free one (default: --port only, which answers them too)",
        minimum=0,
        maximum=65535,
    )
    api_key: tuple[str, ...] = setting(
        (),
        "key that clients must send; several are allowed (default: none needed). Other users of "
        "this machine can see flags: TERMGEN_API_KEY or --api-key-file hide them",
        metavar="KEY",
        nargs="+",
        secret=True,
    )
    api_key_file: str | None = setting(
        None, "file with further keys, one a line; changes hold without a restart"
    )
    admin_key: tuple[str, ...] = setting(
        (),
        "key for pausing, resetting and watching the engine, and for everything else; with keys "
        "for clients but none for admins, it is refused (default: any user of this machine may)",
        metavar="KEY",
        nargs="+",
        secret=True,
    )
    insecure_no_auth: bool = setting(
        False, "listen on an address that other machines can reach, without any key"
    )
    share_prefix_cache: bool = setting(
        False,
        "let clients with different keys reuse each other's cached prompts; the time to first "
        "token can then reveal what others have asked",
    )
    served_model_name: tuple[str, ...] = setting(
        (),
        "name clients know the model by; further names are aliases (default: the model's name)",
        metavar="NAME",
        nargs="+",
    )
    dashboard: bool = setting(False, "show the engine dashboard in this terminal")
    allowed_host: tuple[str, ...] = setting(
        (),
        "further Host header to accept when listening on a loopback address; `*`: any",
        metavar="NAME",
        nargs="+",
    )
    allowed_origin: tuple[str, ...] = setting(
        (),
        "origin of web pages that may use this server, such as https://chat.example or "
        "http://localhost:3000; `localhost`: those of this machine at any port; `*`: any "
        "(default: none)",
        metavar="ORIGIN",
        nargs="+",
    )
    root_path: str = setting(
        "",
        "path under which a proxy shows this server, such as /llm: requests are taken with it and "
        "without it (default: none)",
        metavar="PATH",
    )
    max_body_bytes: int = setting(8 * 2**20, "largest request body in bytes", minimum=1024)
    max_body_memory: int = setting(
        2**28,
        "most bytes that request bodies over 32 KiB may take together until they are parsed; "
        "further ones are refused with 429. 0: no limit",
        minimum=0,
        maximum=2**62,
    )
    max_queue: int = setting(
        2048,
        "most completions that may wait in the queue, beyond those that can start at once; further "
        "requests are refused with 429 and a Retry-After. 0: no limit",
        minimum=0,
        maximum=MAX_INT,
    )
    max_queue_tokens: int = setting(
        2**22,
        "most prompt tokens that may wait, estimated from the size of the text; 0: no limit",
        minimum=0,
        maximum=2**62,
    )
    max_queue_time: float = setting(
        0.0,
        "seconds that a request may wait in the queue before it ends with 429; 0: no limit",
        minimum=0.0,
    )
    sse_ping_interval: float = setting(
        15.0, "seconds of silence in a stream before a keep-alive comment; 0: never", minimum=0.0
    )
    force_include_usage: bool = setting(
        False, "end every stream with its token counts, asked for or not"
    )
    enable_tokenizer_info: bool = setting(
        False, "answer /tokenizer_info, which shows the chat template"
    )
    images: str = setting(
        "note",
        "pictures, documents and recordings in messages, which no model reads here. note: a line "
        "of text takes their place; refuse: the request is an error",
        choices=IMAGE_MODES,
    )
    trust_request_chat_template: bool = setting(
        False,
        "let requests bring a `chat_template`; it is rendered in a separate process with limits "
        "of time and memory",
    )
    metrics_compat: str = setting(
        "none", "vllm: show metrics under vLLM's names too", choices=("none", "vllm")
    )
    log_requests: bool = setting(
        False, "log a line per request: tokens, times and how it ended; never its text"
    )
    otlp_traces_endpoint: str | None = setting(
        None,
        "send a trace of each request there, such as http://127.0.0.1:4318/v1/traces (needs the "
        "extra `otel`)",
        metavar="URL",
    )
    drain_timeout: float = setting(
        30.0, "seconds that running requests get to finish when the server stops", minimum=0.0
    )

    def __post_init__(self) -> None:
        check_settings(self)
        if not self.host:
            raise ConfigError("host must not be empty", param="host")
        for name in ("api_key", "admin_key", "served_model_name", "allowed_origin"):
            if any(not value.strip() for value in getattr(self, name)):
                raise ConfigError(f"{name} must not be empty", param=name)
        if self.root_path and not _ROOT_PATH.fullmatch(self.root_path):
            raise ConfigError(
                f"root_path must be a path such as /llm, without a / at its end, not "
                f"{self.root_path!r}",
                param="root_path",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class UIConfig:
    """Settings of the terminal screens, and defaults of a chat."""

    theme: str | None = setting(None, "name of a colour theme (default: termgen-dark)")
    system_prompt: str | None = setting(
        None, "instructions given to the model before the conversation", flag="--system"
    )
    temperature: float | None = setting(
        None,
        "how much chance decides, 0 to 2; at 0 the likeliest token is always taken (default: the "
        "model's own, or 0.7)",
        minimum=0.0,
        maximum=2.0,
    )
    max_tokens: int | None = setting(
        None,
        "longest answer in tokens (default: what the context leaves)",
        minimum=1,
        maximum=MAX_INT,
    )
    top_p: float | None = setting(
        None,
        "choose only among the likeliest tokens whose probabilities add up to this, above 0 to 1 "
        "(default: the model's own)",
        above=0.0,
        maximum=1.0,
    )
    chat_db: str | None = setting(
        None,
        "file that chats are kept in, `off` for none (default: chats.sqlite3 in the user's folder)",
        metavar="PATH|off",
    )
    context_policy: str = setting(
        "ask",
        "when a chat has filled its context. ask: say so; drop: leave out the oldest turns; ends: "
        "keep the first turn and the last ones; summarise: the same, and a summary of the others",
        choices=CONTEXT_POLICIES,
    )
    titles: str = setting(
        "words",
        "what chats are named after. words: the beginning of the first question; model: a short "
        "title that the model writes when the chat and the engine are idle",
        choices=("words", "model"),
    )
    beside: tuple[str, ...] = setting(
        (),
        "a server that /beside asks by its name; may be repeated. The variable has its key",
        metavar="NAME=URL [MODEL] [key=VARIABLE]",
    )
    tools: tuple[str, ...] = setting(
        (),
        "let the model of a chat use tools, each call after you approve it. files: list, read and "
        "search text files below the working folder (MCP servers: the tables [mcp.NAME] of the "
        "config file)",
        choices=TOOLS,
    )
    dashboard_hz: float = setting(
        4.0, "redraws of the dashboard per second", above=0.0, maximum=10.0
    )
    alert: tuple[str, ...] = setting(
        (),
        "mark a figure of the dashboard that is above a limit; may be repeated. Names: "
        f"{', '.join(ALERTS)}",
        metavar="NAME=VALUE",
    )
    alert_bell: bool = setting(
        False, "ring the terminal's bell while a figure is above its limit, once a minute at most"
    )
    keys: tuple[str, ...] = setting(
        (),
        "give an action other keys; may be repeated, and is the table [keys] of the config file "
        "(`termgen keys` lists the actions)",
        metavar="ID=KEY",
    )

    def __post_init__(self) -> None:
        check_settings(self)
        parse_alerts(self.alert)


def is_loopback(host: str) -> bool:
    """True if only this machine can reach the address."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
