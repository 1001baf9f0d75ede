"""Descriptions of the loaded model and of its device, for schedulers and front ends."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from termgen.vocabulary.cache_groups import CacheGroup, Window
from termgen.vocabulary.device.pooling import PoolingInfo
from termgen.vocabulary.memory_ledger import MemoryLedger
from termgen.vocabulary.startup_phases import StartupPhase
from termgen.vocabulary.tool_format import ToolFormat


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """An engine's model and start-up facts."""

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
    """The code that runs the model: `termgen` or `transformers`."""
    tool_format: ToolFormat = field(default_factory=ToolFormat)
    """Syntax of the model's tool calls."""
    memory: MemoryLedger | None = None
    """Use of the device's memory; None for a remote server."""
    startup: tuple[StartupPhase, ...] = ()
    """Times of the start-up phases."""
    max_num_seqs: int = 0
    """Completions that may run at once; 0: unknown (a remote server)."""
    run_ahead_ms: float = 0.0
    """Longest pause of the process that queued steps may cover; 0: never more than two steps."""
    unsent_params: tuple[str, ...] = ()
    """Sampling parameters that a remote server does not support."""
    num_threads: int = 0
    """CPU threads that run the model; 0 on a GPU, or if unknown."""
    num_cores: int = 0
    """Cores that the engine's process may use; 0: unknown."""
    cache_groups: tuple[CacheGroup, ...] = ()
    """Groups of layers with a block table each; empty: unknown (a remote server)."""
    reads_calls: bool = False
    """A remote server takes `tools` as they are, and tool calls out of the text."""
    holds_calls: bool = False
    """That server holds the arguments of `strict` tools to their schemas."""
    counts_tokens: bool = True
    """The tokens of a text can be asked for before it is sent: a server on another machine is not
    shown it for that, and not every server counts."""
    num_drafts: int = 0
    """Most tokens of a request that are guessed in a step; 0 for a remote server, too."""
    pooling: PoolingInfo = field(default_factory=PoolingInfo)
    """How its vectors are made."""


class GraphStatus(NamedTuple):
    """Progress of recording CUDA graphs."""

    num_recorded: int
    num_graphs: int
    """Recorded graphs and those still to be recorded in idle moments."""


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """Facts the executor found or decided at start-up, for the scheduler and screens."""

    device: str
    """`cpu` or `cuda:0`."""
    device_name: str
    dtype: str
    num_blocks: int
    block_size: int
    windows: tuple[Window | None, ...]
    """Per group of layers with a block table of its own, what it keeps of a context; None: all."""
    max_model_len: int
    vocab_size: int
    attention_backend: str
    architecture: str
    max_num_seqs: int
    max_num_batched_tokens: int
    max_in_flight: int
    """Steps that may be planned before the oldest one's result is read; 1: synchronous."""
    eos_token_ids: tuple[int, ...]
    """End-of-sequence ids from the model's config.json."""
    memory: MemoryLedger
    implementation: str = "termgen"
    """The code that runs the model: one of config.MODEL_IMPLS."""
    num_threads: int = 0
    """CPU threads that run the model; 0 on a GPU."""
    num_cores: int = 0
    """Cores that this process may use."""
    quantization: str | None = None
    """How the weights are stored; None: in the dtype."""
    state_places: int = 0
    """Copies of the states of recurrent layers that the device has room for, behind those of its
    rows; 0 for models without such layers."""
    layers: tuple[int, ...] = ()
    """Number of layers of each group."""
    num_drafts: int = 0
    """Most tokens of a row that are guessed in a step."""
    most_forced: int = 0
    """Most tokens of a row that a step computes because a grammar forces them."""
    num_drafts_ahead: int = 0
    """Positions behind those of a step that its drafter computes."""
    hidden_size: int = 0
    """Numbers of a token's hidden state."""
    num_untuned: int = 0
    """Shapes of weights whose products were not measured on this GPU, and can be."""
