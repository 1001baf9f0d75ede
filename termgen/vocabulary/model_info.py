"""What front ends may know about the loaded model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from termgen.vocabulary.memory_ledger import MemoryLedger
from termgen.vocabulary.startup_phases import StartupPhase
from termgen.vocabulary.tool_format import ToolFormat


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """One engine's model, and how it was started."""

    model_id: str
    """The served name."""
    root: str
    """Path or hub id it was loaded from."""
    architecture: str
    dtype: str
    quantization: str | None
    device: str
    device_name: str
    max_model_len: int
    vocab_size: int
    num_blocks: int
    block_size: int
    has_chat_template: bool
    created: int
    """Unix seconds at load."""
    default_params: Mapping[str, Any] = field(default_factory=dict)
    """Sampling defaults from the model's generation_config.json."""
    implementation: str = "termgen"
    """Whose code runs the model: termgen's, or that of transformers."""
    tool_format: ToolFormat = field(default_factory=ToolFormat)
    """How it writes tool calls."""
    memory: MemoryLedger | None = None
    """What the device's memory is taken by; None where only the other end knows."""
    startup: tuple[StartupPhase, ...] = ()
    """What starting the engine took, phase by phase."""
    max_num_seqs: int = 0
    """Completions that may run at once; 0 where only the other end knows."""
    run_ahead_ms: float = 0.0
    """How much work is queued at most while nobody waits; 0 where steps do not run ahead so far."""
    untold_params: tuple[str, ...] = ()
    """Sampling parameters that it cannot be told, as a server elsewhere knows fewer of them."""
    num_threads: int = 0
    """Threads that the model computes with on a CPU; 0 on a GPU, or where it is not known."""
    num_cores: int = 0
    """Processors that the engine's process may run on; 0 where only the other end knows."""
