"""Resolves settings that the configuration leaves open, from the model and the machine.

Runs once at start, on the device side. Results are returned, never written back into a config.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import torch

from termgen.config import EngineConfig
from termgen.engine.device import kernels, native
from termgen.engine.device.config.model_config import ModelConfig
from termgen.engine.device.loader import kept_form
from termgen.engine.device.runner.memory import make_meter
from termgen.errors import ConfigError

logger = logging.getLogger(__name__)

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


SPINNING_CPUS = 4
"""From this many CPUs on, one may spin: three are left for the event loop, text and screens."""


WORTH_QUANTIZING = 2**25
"""Parameters of a model whose weights do not fit in a processor's caches."""


STATES_SHARE = 0.25
"""Most of a device's memory that the states of recurrent layers take by default, cached ones
included."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Sizes of a runner."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int


def resolve_device(name: str) -> torch.device:
    """`auto`: a GPU if there is one. Raises ConfigError if CUDA is required but unavailable."""
    if name == "cpu":
        return torch.device("cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the error below says the same in one line
        is_available = torch.cuda.is_available()
    if is_available:
        return torch.device("cuda:0")
    if name == "cuda":
        raise ConfigError(f"device cuda: {why_no_cuda()}; use device cpu", param="device")
    if Path("/dev/nvidia0").exists():
        logger.warning("there is an NVIDIA GPU, but %s; using the CPU", why_no_cuda())
    return torch.device("cpu")


def why_no_cuda() -> str:
    """Torch's reason why it cannot use a GPU, usually a missing or old driver."""
    torch_is = f"this torch ({torch.__version__})"
    if torch.version.cuda is None:
        return f"{torch_is} has no CUDA support"
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        return f"{torch_is} cannot use it: {' '.join(str(error).split())[:300]}"
    return f"{torch_is} finds no usable NVIDIA GPU"


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


def resolve_quantization(
    config: EngineConfig, model: ModelConfig, device: torch.device, path: Path
) -> str | None:
    """`auto`: int8 on a CPU, where a step takes as long as reading the weights does; on a GPU int8
    for files that have their weights in blocks and fp8 for those of 8-bit floats, which stay what
    they are. None where the weights are not quantized."""
    if config.quantization != "auto":
        return None if config.quantization == "none" else config.quantization
    if config.dtype != "auto" or model.transformers is not None:
        return None
    if device.type == "cpu":
        gains = model.num_parameters >= WORTH_QUANTIZING and not native.why_unusable()
        return "int8" if gains else None
    if config.load_format == "dummy" or kernels.why_unusable(device):
        return None
    form = kept_form(path)
    if form == "fp8":
        has_type = not kernels.why_unusable(device, dtype=torch.float8_e4m3fn)
        return form if has_type else None
    return form


def keeps_floats(config: EngineConfig) -> bool:
    """True if 16-bit matrices beside 8-bit floats stay what they are: only what was asked for is
    rounded."""
    return config.quantization == "auto"


def resolve_wait(device_wait: str) -> bool:
    """True if the engine thread spins while it waits for a GPU. After sleeping its core is cold,
    and its part of a step takes twice as long (docs/performance.md)."""
    return device_wait == "spin" or (device_wait == "auto" and len(usable_cpus()) >= SPINNING_CPUS)


def usable_cpus() -> Collection[int]:
    """The CPUs this process may run on."""
    return (
        os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    )


def resolve_threads(threads: int | None) -> int:
    """Threads of the setting or OMP_NUM_THREADS; by default the physical cores this process may
    use, as more threads only contend.
    """
    given = os.environ.get("OMP_NUM_THREADS", "")
    return threads or (int(given) if given.isdecimal() and int(given) else physical_cores())


def physical_cores() -> int:
    """Distinct cores among the CPUs this process may run on (hyper-threads counted once)."""
    cores = set()
    for cpu in usable_cpus():
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


def total_memory(device: torch.device) -> int:
    """Bytes of the device's memory; on a CPU, of the machine's."""
    return make_meter(device).free_and_total()[1]


def seats_for_states(most: int, state_bytes: int, total_bytes: int) -> int:
    """Requests that may run at once where each keeps a state of so many bytes: halved until their
    states take no more than their share of the memory."""
    while most > 1 and most * state_bytes > STATES_SHARE * total_bytes:
        most //= 2
    return most


def resolve_limits(config: EngineConfig, model: ModelConfig, device: torch.device) -> Limits:
    """Raises ConfigError naming the setting that cannot be met."""
    longest = model.max_position_embeddings
    most = model.extended_positions or longest
    if config.max_model_len is not None and config.max_model_len > most:
        raise ConfigError(
            f"max_model_len {config.max_model_len} is more than the model's {most} positions",
            param="max_model_len",
        )
    on_cpu = device.type == "cpu"
    # A step on a CPU takes about a millisecond per token: a small budget keeps it interruptible.
    budget = config.max_num_batched_tokens or (512 if on_cpu else 8192)
    seats = config.max_num_seqs or min(32 if on_cpu else 256, budget)
    if config.max_num_seqs is None and model.linear is not None:
        copies = 2 if config.enable_prefix_caching else 1
        state_bytes = 4 * copies * model.linear.state_numbers
        seats = seats_for_states(seats, state_bytes, total_memory(device))
    return Limits(
        max_num_seqs=seats,
        max_num_batched_tokens=max(budget, seats),
        max_model_len=config.max_model_len or longest,
    )
