"""Measures a device's memory while an engine starts, and sizes the KV cache.

The runner's builder reports what it allocates; this module measures it, gives the KV cache the
memory that is left, and turns a failed allocation into an error that names the setting to change.
The result is a `MemoryLedger`. Knows nothing of models, steps and graphs.

Weights, workspace and KV cache are held permanently. Activations are the allocator's memory that no
tensor uses between steps, measured by running the heaviest possible steps.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from termgen.config import EngineConfig
from termgen.errors import ConfigError, ModelError
from termgen.vocabulary.cache_groups import Window, blocks_of_context, longest_context
from termgen.vocabulary.memory_ledger import GIB, MIB, MemoryLedger, WeightReads, size

CPU_KV_BYTES = GIB
"""Default KV cache on a CPU; grown to hold one full context if memory allows."""

LEAST_BYTES_PER_GRAPH = 2 * MIB
"""Reserve per recording. Recordings share their memory except for the driver's, which is less for
small models but is allocated in pieces of this size."""

ADVICE: dict[str, tuple[str, str]] = {
    "workspace": (
        "max_num_seqs",
        "the buffers of requests and attention: lower max_num_seqs, max_model_len or "
        "max_num_batched_tokens",
    ),
    "activations": (
        "max_num_batched_tokens",
        "the largest step: lower max_num_batched_tokens or max_num_seqs",
    ),
    "graphs": (
        "cudagraph_mode",
        "CUDA graphs: set cudagraph_mode to none, or lower max_num_seqs or gpu_memory_utilization",
    ),
}
"""Part being allocated -> (setting at fault, advice if it does not fit)."""


class MemoryMeter(Protocol):
    """One device, seen from this process."""

    name: str
    """Name for people, such as `GPU memory`."""
    counts_tensors: bool
    """True if `allocated` and `reserved` are meaningful. Otherwise tensors take memory when written
    to, and their sizes are added up instead."""
    segment_bytes: int
    """A large tensor takes a multiple of this."""

    def free_and_total(self) -> tuple[int, int]:
        """Free bytes, and all bytes."""
        ...

    def allocated(self) -> int:
        """Bytes of live tensors."""
        ...

    def reserved(self) -> int:
        """Bytes taken from the device: live tensors and the allocator's cache."""
        ...

    def release(self) -> None:
        """Return the allocator's cache to the device."""
        ...


class CudaMeter:
    """A GPU, and torch's allocator on it."""

    name = "GPU memory"
    counts_tensors = True
    segment_bytes = 2 * 2**20

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def free_and_total(self) -> tuple[int, int]:
        torch.cuda.synchronize(self._device)
        free, total = torch.cuda.mem_get_info(self._device)
        return free, total

    def allocated(self) -> int:
        return torch.cuda.memory_allocated(self._device)

    def reserved(self) -> int:
        return torch.cuda.memory_reserved(self._device)

    def release(self) -> None:
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()


class HostMeter:
    """The machine's own memory."""

    name = "memory"
    counts_tensors = False
    segment_bytes = 0

    def free_and_total(self) -> tuple[int, int]:
        try:
            with open("/proc/meminfo") as meminfo:
                sizes = {
                    name: value for name, _, value in (line.partition(":") for line in meminfo)
                }
            free, total = sizes["MemAvailable"], sizes["MemTotal"]
        except (OSError, KeyError):  # not Linux: half of it is a guess that does no harm
            total_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
            return total_bytes // 2, total_bytes
        return int(free.split()[0]) * 1024, int(total.split()[0]) * 1024

    def allocated(self) -> int:
        return 0

    def reserved(self) -> int:
        return 0

    def release(self) -> None:
        """Make the C library return freed memory, of which it keeps blocks up to 32 MiB."""
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None
        if trim is not None:  # glibc's
            trim(0)


def make_meter(device: torch.device) -> MemoryMeter:
    return CudaMeter(device) if device.type == "cuda" else HostMeter()


@dataclass(frozen=True, slots=True)
class _Taken:
    """What recording graphs took."""

    live: int = 0
    """Tensors that stay."""
    pool: int = 0
    """The allocator's memory, those tensors included."""
    driver: int = 0

    @property
    def total(self) -> int:
        return self.pool + self.driver


class MemoryAccount:
    """The memory of one device during the start of one engine."""

    def __init__(self, meter: MemoryMeter, config: EngineConfig, *, where: str) -> None:
        """where: the device's name in messages. Begins before anything is allocated."""
        self._meter = meter
        self._config = config
        self._where = where
        meter.release()
        self._free_at_start, self.total = meter.free_and_total()
        self._allocated_at_start = meter.allocated()
        share = config.gpu_memory_utilization if meter.counts_tensors else 1.0
        self.limit = int(share * self.total)
        self.weights = 0
        self.reads: WeightReads | None = None
        self.activations = 0
        self.expected_graphs = 0
        self._graphs = _Taken()

    # -- what is made ----------------------------------------------------------------------

    def check_others(self) -> None:
        """Raises ConfigError if other processes use all that gpu_memory_utilization grants."""
        held = self.total - self._free_at_start
        if self._is_sized_by_share and held >= self.limit:
            raise ConfigError(
                f"{self._share_words()}, and other processes and the driver hold {size(held)} "
                "already; free memory there or raise gpu_memory_utilization",
                param="gpu_memory_utilization",
            )

    @contextmanager
    def loading_weights(self, dtype: str) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise ModelError(
                f"the model's weights do not fit on {self._where} in {dtype}: "
                f"{size(self._free_at_start)} of {size(self.total)} were free{self._others()}; "
                "free memory, or choose a smaller model or dtype"
            ) from error
        finally:
            self._meter.release()  # temporary memory of the conversion

    @contextmanager
    def making(self, part: str) -> Iterator[None]:
        """Raises ConfigError with the text of ADVICE if an allocation inside fails."""
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            param, advice = ADVICE[part]
            raise ConfigError(
                f"out of memory on {self._where}, of whose {size(self.total)} "
                f"{size(self._free_at_start)} were free at start, while making {advice}"
                f"{self._others()}",
                param=param,
            ) from error

    def measure_activations(self, run_steps: Callable[[], None]) -> None:
        """run_steps: runs the heaviest steps."""
        with self.making("activations"):
            self._meter.release()
            run_steps()
        self.activations = self._kept()

    def expect_graphs(
        self, record: Callable[[], object], *, num_recorded: int, num_wanted: int
    ) -> None:
        """Estimate the graphs' memory by making the largest ones and dropping them.

        record: makes `num_recorded` of the `num_wanted` graphs and returns them. Called twice with
        one pool: the first call shows the pool's size, the second the driver's memory alone.
        """
        with self.making("graphs"):
            first = record()
            self._meter.release()
            free_after_first, _ = self._meter.free_and_total()
            second = record()
            self._meter.release()
            free_after_second, _ = self._meter.free_and_total()
            del first, second
            self._meter.release()
            free_after, _ = self._meter.free_and_total()
        again = max(LEAST_BYTES_PER_GRAPH * num_recorded, free_after_first - free_after_second)
        pool = max(0, free_after - free_after_first)
        self.expected_graphs = pool + again * num_wanted // num_recorded

    @contextmanager
    def recording_graphs(self) -> Iterator[None]:
        """Measure the recording of all graphs, inside the block."""
        with self.making("graphs"):
            self._meter.release()
            free, _ = self._meter.free_and_total()
            live, reserved = self._meter.allocated(), self._meter.reserved()
            yield
            self._meter.release()
        pool = max(0, self._meter.reserved() - reserved)
        self._graphs = _Taken(
            live=max(0, self._meter.allocated() - live),
            pool=pool,
            driver=max(0, free - self._meter.free_and_total()[0] - pool),
        )

    # -- the KV cache ----------------------------------------------------------------------

    def room_for_kv(self, limit: int, *, kv_bytes: int = 0, num_tensors: int = 0) -> int:
        """Bytes a KV cache may take with no more than `limit` of the device in use.

        kv_bytes: of the present cache, which will be dropped. num_tensors: of the new cache, each
        of which is rounded up.
        """
        free, total = self._meter.free_and_total()
        tensors = max(0, self._meter.allocated() - kv_bytes)
        others = total - free - self._meter.reserved()
        rounding = num_tensors * self._meter.segment_bytes
        return limit - others - tensors - self.activations - self.expected_graphs - rounding

    def num_blocks(
        self,
        *,
        block_size: int,
        bytes_per_block: int,
        max_model_len: int,
        kv_bytes: int,
        num_tensors: int,
        windows: tuple[Window | None, ...] = (None,),
    ) -> int:
        """Number of KV blocks, the null block included. windows: of each group of
        layers, as in `DeviceInfo`.

        Raises ConfigError naming the setting to change if they do not fit.
        """
        config = self._config
        limit = self.limit if self._is_sized_by_share else self.total
        room = self.room_for_kv(limit, kv_bytes=kv_bytes, num_tensors=num_tensors)
        if config.num_gpu_blocks_override is not None:
            num_blocks = config.num_gpu_blocks_override
            self._check_fits("num_gpu_blocks_override", num_blocks * bytes_per_block, room)
            return num_blocks
        if config.kv_cache_gib is not None:
            wanted = int(config.kv_cache_gib * GIB)
            self._check_fits("kv_cache_gib", wanted, room)
        elif self._meter.counts_tensors:
            wanted = room
        else:
            one_context = _blocks_of(max_model_len, block_size, windows) * bytes_per_block
            wanted = min(max(CPU_KV_BYTES, one_context), room // 2)
        if wanted // bytes_per_block < 1 + len(windows):
            raise self._no_room(room, (1 + len(windows)) * bytes_per_block)
        return wanted // bytes_per_block

    @contextmanager
    def making_kv(self, nbytes: int) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            param = self._kv_setting()
            raise ConfigError(
                f"a KV cache of {size(nbytes)} could not be allocated on {self._where}"
                f"{self._others()}; lower {param}",
                param=param,
            ) from error

    def fit_max_model_len(
        self,
        max_model_len: int,
        *,
        num_blocks: int,
        block_size: int,
        bytes_per_block: int,
        windows: tuple[Window | None, ...] = (None,),
    ) -> int:
        """The context a KV cache of this size can hold for one request.

        A longer context from the settings is an error; the model's own is reduced to fit.
        """
        config = self._config
        # The last token's KV is never stored.
        capacity = longest_context(num_blocks - 1, block_size, windows) + 1
        if capacity >= max_model_len:
            return max_model_len
        if config.max_model_len is None:
            return capacity
        needed = _blocks_of(max_model_len, block_size, windows) * bytes_per_block
        setting = self._kv_setting()
        raises = setting if setting != "gpu_memory_utilization" else f"{setting} or kv_cache_gib"
        raise ConfigError(
            f"max_model_len {max_model_len} does not fit: one request of that length needs a KV "
            f"cache of {size(needed)}, and there is one of {size(num_blocks * bytes_per_block)}, "
            f"for {capacity} tokens; lower max_model_len or raise {raises}",
            param="max_model_len",
        )

    # -- the outcome -----------------------------------------------------------------------

    def ledger(
        self, *, kv_bytes: int, kv_tokens: int, are_graphs_made: bool = True
    ) -> MemoryLedger:
        """The current use of memory. kv_bytes: of the allocated KV cache. are_graphs_made: if
        false, the graphs' reserve counts as theirs."""
        free, total = self._meter.free_and_total()
        kept = self._kept()
        activations = max(self.activations, kept)
        tensors = self._meter.allocated() - self._allocated_at_start - self._graphs.live
        workspace = max(0, tensors - self.weights - kv_bytes)
        taken = graphs = self._graphs.total
        if not are_graphs_made:
            graphs = max(taken, self.expected_graphs)
        held = self.weights + workspace + kv_bytes + activations + graphs
        # Not free: activations, graphs to be recorded, and unwritten pages of the KV cache.
        promised = activations - kept + graphs - taken
        promised += 0 if self._meter.counts_tensors else kv_bytes
        free = max(0, min(free - promised, total - held))
        return MemoryLedger(
            name=self._meter.name,
            total_bytes=total,
            limit_bytes=self.limit,
            weights_bytes=self.weights,
            activations_bytes=activations,
            graphs_bytes=graphs,
            workspace_bytes=workspace,
            kv_cache_bytes=kv_bytes,
            kv_cache_tokens=kv_tokens,
            other_bytes=total - held - free,
            free_bytes=free,
            expected_graphs_bytes=self.expected_graphs,
            reads=self.reads,
        )

    def _kept(self) -> int:
        """The allocator's cache for later steps, without the graphs' pool."""
        reserved = self._meter.reserved() - self._graphs.pool
        return max(0, reserved - (self._meter.allocated() - self._graphs.live))

    # -- texts -----------------------------------------------------------------------------

    @property
    def _is_sized_by_share(self) -> bool:
        return self._kv_setting() == "gpu_memory_utilization"

    def _kv_setting(self) -> str:
        """The setting that decides the size of the KV cache."""
        if self._config.num_gpu_blocks_override is not None:
            return "num_gpu_blocks_override"
        by_share = self._config.kv_cache_gib is None and self._meter.counts_tensors
        return "gpu_memory_utilization" if by_share else "kv_cache_gib"

    def _share_words(self) -> str:
        return (
            f"gpu_memory_utilization {self._config.gpu_memory_utilization:g} lets "
            f"{size(self.limit)} of {size(self.total)} be in use on {self._where}"
        )

    def _others(self) -> str:
        held = self.total - self._free_at_start
        if not self._meter.counts_tensors:
            return ""
        return f" (other processes and the driver held {size(held)} at start)"

    def _check_fits(self, param: str, wanted: int, room: int) -> None:
        if wanted <= room:
            return
        value = getattr(self._config, param)
        raise ConfigError(
            f"{param} {value:g} makes a KV cache of {size(wanted)}, and {size(max(0, room))} are "
            f"free for it on {self._where}{self._others()}; lower it",
            param=param,
        )

    def _no_room(self, room: int, least_bytes: int) -> ConfigError:
        if not self._is_sized_by_share:
            return ConfigError(
                f"no room for a KV cache on {self._where}: its smallest size is "
                f"{size(least_bytes)} and {size(max(0, room))} may be used; raise "
                "kv_cache_gib, or free memory",
                param="kv_cache_gib",
            )
        parts = (
            (self.weights, "weights"),
            (self.activations, "activations"),
            (self.expected_graphs, "CUDA graphs"),
            (self.total - self._free_at_start, "other processes and the driver"),
        )
        taken = ", ".join(f"{name} {size(nbytes)}" for nbytes, name in parts if nbytes)
        return ConfigError(
            f"no room for a KV cache: {self._share_words()}, and that is taken ({taken}); raise "
            "gpu_memory_utilization, lower max_num_batched_tokens, or choose a smaller model",
            param="gpu_memory_utilization",
        )


def _blocks_of(num_tokens: int, block_size: int, windows: tuple[Window | None, ...]) -> int:
    """Blocks for one request of this length, and the null block."""
    return blocks_of_context(num_tokens - 1, block_size, windows) + 1


def held_tensors(model: nn.Module) -> list[torch.Tensor]:
    """All tensors of the model's modules, including copies in another layout."""
    held = {
        id(tensor): tensor
        for module in model.modules()
        for store in (vars(module), module._parameters, module._buffers)
        for tensor in store.values()
        if isinstance(tensor, torch.Tensor)
    }
    return list(held.values())


def weight_bytes(model: nn.Module) -> int:
    """Bytes of all tensors that the model's modules hold."""
    return sum(tensor.numel() * tensor.element_size() for tensor in held_tensors(model))


def is_out_of_memory(error: BaseException | None) -> bool:
    """True if this exception, or one that it was chained to, is a failed allocation.

    The CPU's allocator raises a plain RuntimeError, as do libraries with their own allocation.
    """
    while error is not None:
        text = str(error)
        if isinstance(error, (torch.OutOfMemoryError, MemoryError)) or any(
            words in text for words in ("allocate memory", "out of memory", "ALLOC_FAILED")
        ):
            return True
        error = error.__context__
    return False
