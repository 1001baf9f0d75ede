"""Settles what the configuration left open, from the model and the machine.

Runs once at start, on the device side. Results are returned, never written back into a config.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from termgen.config import EngineConfig
from termgen.engine.models.config import ModelConfig
from termgen.errors import ConfigError

GIB = 2**30
DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
CPU_KV_BYTES = GIB
"""KV cache on a CPU unless told otherwise; grown to hold one full context if memory allows."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Sizes of a runner."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int


def resolve_device(name: str) -> torch.device:
    """`auto` takes a GPU when there is one. Raises ConfigError when CUDA is asked for in vain."""
    if name == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    if name == "cuda" and not torch.cuda.is_available():
        built = f"this torch ({torch.__version__}) " + (
            "finds no usable NVIDIA GPU or driver" if torch.version.cuda else "has no CUDA support"
        )
        raise ConfigError(f"device cuda: {built}; use device cpu", param="device")
    return torch.device("cuda:0" if name == "cuda" else name)


def resolve_dtype(name: str, model: ModelConfig, device: torch.device) -> torch.dtype:
    """`auto`: float32 on a CPU; on a GPU the checkpoint's 16-bit type, else bfloat16.

    Raises ConfigError for float16 where a model's activations would overflow in it.
    """
    if name == "float16" and model.overflows_float16:
        raise ConfigError(
            f"dtype float16: activations of {model.architecture} models exceed its largest number,"
            " 65504; use bfloat16 or float32",
            param="dtype",
        )
    if name != "auto":
        return DTYPES[name]
    if device.type == "cpu":
        return torch.float32
    is_half = model.torch_dtype == "float16" and not model.overflows_float16
    return torch.float16 if is_half else torch.bfloat16


def resolve_threads(threads: int | None) -> int:
    """Physical cores this process may use, unless told otherwise: more threads only contend.

    OMP_NUM_THREADS, the convention of numerical programs, counts as being told.
    """
    told = os.environ.get("OMP_NUM_THREADS", "")
    return threads or (int(told) if told.isdecimal() and int(told) else physical_cores())


def physical_cores() -> int:
    """Distinct cores among the CPUs this process may run on (hyper-threads counted once)."""
    cpus = (
        os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    )
    cores = set()
    for cpu in cpus:
        topology = f"/sys/devices/system/cpu/cpu{cpu}/topology"
        try:
            with (
                open(f"{topology}/physical_package_id") as package,
                open(f"{topology}/core_id") as core,
            ):
                cores.add((package.read().strip(), core.read().strip()))
        except OSError:
            cores.add(("", str(cpu)))
    return max(1, len(cores))


def resolve_limits(config: EngineConfig, model: ModelConfig, device: torch.device) -> Limits:
    """Raises ConfigError naming the setting that cannot be met."""
    longest = model.max_position_embeddings
    if config.max_model_len is not None and config.max_model_len > longest:
        raise ConfigError(
            f"max_model_len {config.max_model_len} is more than the model's {longest} positions",
            param="max_model_len",
        )
    on_cpu = device.type == "cpu"
    # A step on a CPU takes about a millisecond per token: a small budget keeps it interruptible.
    budget = config.max_num_batched_tokens or (512 if on_cpu else 8192)
    seats = config.max_num_seqs or min(32 if on_cpu else 256, budget)
    return Limits(
        max_num_seqs=seats,
        max_num_batched_tokens=max(budget, seats),
        max_model_len=config.max_model_len or longest,
    )


def resolve_num_blocks(
    config: EngineConfig,
    *,
    bytes_per_block: int,
    max_model_len: int,
    device: torch.device,
    free_bytes: int,
) -> int:
    """Number of KV blocks, the null block included.

    free_bytes: memory the KV cache may take, measured after the weights are loaded.
    Raises ConfigError naming what to change when not even a few blocks fit.
    """
    if config.num_gpu_blocks_override is not None:
        return config.num_gpu_blocks_override
    assert config.block_size is not None, "settled with the attention backend"
    one_context = (-(-max_model_len // config.block_size) + 1) * bytes_per_block
    if config.kv_cache_gib is not None:
        wanted = int(config.kv_cache_gib * GIB)
        if wanted > free_bytes:
            raise ConfigError(
                f"kv_cache_gib {config.kv_cache_gib:g} is more than the {free_bytes / GIB:.1f} GiB "
                f"that are free on {device}",
                param="kv_cache_gib",
            )
    elif device.type == "cpu":
        wanted = min(max(CPU_KV_BYTES, one_context), free_bytes // 2)
    else:
        wanted = free_bytes
    num_blocks = wanted // bytes_per_block
    if num_blocks < 2:
        raise ConfigError(
            f"no room for a KV cache: {max(0, free_bytes) / GIB:.2f} GiB free on {device}; raise "
            "gpu_memory_utilization or kv_cache_gib, or choose a smaller model",
            param="kv_cache_gib",
        )
    return num_blocks


def fit_max_model_len(config: EngineConfig, max_model_len: int, num_blocks: int) -> int:
    """The context a KV cache of this size can hold for one request.

    A longer context that was asked for is an error; one taken from the model is cut to fit.
    """
    assert config.block_size is not None, "settled with the attention backend"
    capacity = (num_blocks - 1) * config.block_size + 1  # the last token's KV is never stored
    if capacity >= max_model_len:
        return max_model_len
    if config.max_model_len is not None:
        raise ConfigError(
            f"max_model_len {max_model_len} does not fit a KV cache of "
            f"{capacity - 1} tokens; lower it or raise kv_cache_gib",
            param="max_model_len",
        )
    return capacity


def free_memory_bytes(config: EngineConfig, device: torch.device) -> int:
    """Memory a KV cache may take now, on the CPU or within gpu_memory_utilization."""
    if device.type == "cpu":
        with open("/proc/meminfo") as meminfo:
            for line in meminfo:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
        return 4 * GIB
    free, total = torch.cuda.mem_get_info(device)
    reusable = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(free + reusable - (1.0 - config.gpu_memory_utilization) * total)
