"""Settings, frozen. A setting is defined once, here; flags, config file and environment follow.

Each field's metadata carries its help text, its flag when that differs from the field's name, and
its choices. Names follow vLLM where vLLM has the setting.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

DTYPES = ("auto", "float32", "bfloat16", "float16")
DEVICES = ("auto", "cpu", "cuda")
LOAD_FORMATS = ("auto", "dummy")
QUANTIZATIONS = ("int8",)
SCHEDULING_POLICIES = ("fcfs", "priority")


def setting(default: Any, help: str, **metadata: Any) -> Any:
    """A dataclass field with its help text. metadata: flag, choices, metavar, negative_flag."""
    return field(default=default, metadata={"help": help, **metadata})


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """How the engine runs. `None` means: decided from the model and the machine."""

    model: str | None = setting(
        None, "name from `termgen models`, hub id, folder or .gguf file (default: smollm2-135m)"
    )
    tokenizer: str | None = setting(None, "folder or hub id of another tokenizer")
    load_format: str = setting(
        "auto", "dummy: random weights from config.json alone", choices=LOAD_FORMATS
    )
    skip_tokenizer_init: bool = setting(False, "no tokenizer: token ids in, token ids out")
    device: str = setting("auto", "where to run", choices=DEVICES)
    dtype: str = setting("auto", "type of weights and activations", choices=DTYPES)
    quantization: str | None = setting(
        None, "int8: 8-bit weights, on the CPU", choices=QUANTIZATIONS
    )
    threads: int | None = setting(None, "CPU threads (default: physical cores)")
    max_model_len: int | None = setting(None, "longest prompt plus answer, in tokens")
    max_num_seqs: int | None = setting(None, "requests that may run at once")
    max_num_batched_tokens: int | None = setting(None, "token budget of one step")
    long_prefill_token_threshold: int = setting(
        0, "most prompt tokens of one request in one step; 0: no limit"
    )
    block_size: int = setting(16, "tokens in one KV block")
    gpu_memory_utilization: float = setting(0.9, "share of GPU memory the engine may use")
    kv_cache_gib: float | None = setting(None, "size of the KV cache in GiB")
    num_gpu_blocks_override: int | None = setting(None, "number of KV blocks, for experiments")
    enable_prefix_caching: bool = setting(True, "reuse the KV of shared prompt prefixes")
    scheduling_policy: str = setting(
        "fcfs",
        "who runs first: arrival order, or lower priority value",
        choices=SCHEDULING_POLICIES,
    )
    async_scheduling: bool | None = setting(
        None, "plan the next step while one runs (default: on a GPU)"
    )
    enforce_eager: bool = setting(False, "never use CUDA graphs")
    seed: int = setting(0, "seed of random weights and of requests without one")
