"""Use of a device's memory, measured when the engine is ready. Vocabulary: no torch.

The runner's `MemoryAccount` fills it in; shown at start, on the dashboard and in /metrics.
"""

from __future__ import annotations

from dataclasses import dataclass

GIB = 2**30
MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightReads:
    """The part of the weights that a step reads: each once, but for rows of tables that are only
    looked up, and for experts that no token goes to."""

    always_bytes: int
    """Read by every step."""
    experts_bytes: int = 0
    """Weights of experts that a router picks."""
    experts_share: float = 1.0
    """Part of these experts that one token goes to."""
    bytes_per_s: float = 0.0
    """The most that the device's memory moves, by its clock and width; 0: not known."""

    def of_step(self, num_rows: int) -> float:
        """Bytes that a step of so many decodes reads, where a router picks all experts alike."""
        missed = (1.0 - self.experts_share) ** num_rows
        return self.always_bytes + (1.0 - missed) * self.experts_bytes


@dataclass(frozen=True, slots=True)
class HostExperts:
    """Experts of a mixture in main memory, beside a GPU that has copies of some of each layer."""

    num_on_card: int
    num_experts: int
    nbytes: int
    """Main memory that all of them take."""

    def __str__(self) -> str:
        away = self.num_experts - self.num_on_card
        return f"the CPU computes {away} of {self.num_experts} experts of each layer"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLedger:
    """The memory of one device, in parts that add up to `total_bytes`."""

    name: str
    """`GPU memory`, or `memory` on a machine without a GPU."""
    total_bytes: int
    limit_bytes: int
    """Limit of use by all processes: gpu_memory_utilization of the total."""
    weights_bytes: int
    activations_bytes: int
    """Peak temporary memory of a step, freed at its end."""
    graphs_bytes: int
    """CUDA graphs: their pool and the driver's memory for them; while some are still to be
    recorded, the reserve for all."""
    workspace_bytes: int
    """Permanent buffers: request rows, inputs, plans and scratch of attention, GEMMs, sampling."""
    kv_cache_bytes: int
    kv_cache_tokens: int
    other_bytes: int
    """Other processes and the driver with its loaded kernels; without a GPU everything that is
    neither weights nor KV cache."""
    free_bytes: int
    expected_graphs_bytes: int = 0
    """Reserve for CUDA graphs when the KV cache was sized."""
    reads: WeightReads | None = None
    host_experts: HostExperts | None = None

    @property
    def free_below_limit_bytes(self) -> int:
        used = self.total_bytes - self.free_bytes
        return min(self.free_bytes, max(0, self.limit_bytes - used))

    @property
    def free_above_limit_bytes(self) -> int:
        """Free memory that gpu_memory_utilization leaves to other processes."""
        return self.free_bytes - self.free_below_limit_bytes

    def parts(self) -> dict[str, int]:
        """Kind -> bytes, adding up to the total; the kinds are labels in /metrics."""
        return {
            "weights": self.weights_bytes,
            "activations": self.activations_bytes,
            "cuda_graphs": self.graphs_bytes,
            "workspace": self.workspace_bytes,
            "kv_cache": self.kv_cache_bytes,
            "other": self.other_bytes,
            "free_below_limit": self.free_below_limit_bytes,
            "free_above_limit": self.free_above_limit_bytes,
        }

    def __str__(self) -> str:
        """One line for people, without parts that are zero."""
        graphs = "graphs"
        if self.expected_graphs_bytes:
            graphs = f"graphs ({size(self.expected_graphs_bytes)} expected)"
        named = (
            ("weights", self.weights_bytes),
            ("activations", self.activations_bytes),
            (graphs, self.graphs_bytes),
            ("workspace", self.workspace_bytes),
            (f"KV cache ({self.kv_cache_tokens:,} tokens)", self.kv_cache_bytes),
            ("others", self.other_bytes),
        )
        taken = ", ".join(f"{name} {size(nbytes)}" for name, nbytes in named if nbytes)
        free = f"free {size(self.free_bytes)} of {size(self.total_bytes)}"
        if above := self.free_above_limit_bytes:
            free += f" ({size(above)} of it above gpu_memory_utilization)"
        line = f"{self.name}: {taken}, {free}"
        if (experts := self.host_experts) is not None:
            line += f"; {experts}, out of {size(experts.nbytes)} of main memory"
        return line


def size(nbytes: int) -> str:
    """12.3 GiB, 310 MiB, 0.4 MiB."""
    if nbytes >= 0.995 * GIB:
        return f"{nbytes / GIB:.1f} GiB"
    return f"{nbytes / MIB:.0f} MiB" if nbytes >= 10 * MIB else f"{nbytes / MIB:.1f} MiB"
