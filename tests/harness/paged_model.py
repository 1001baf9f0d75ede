"""Drives a model through a paged cache by hand, so that model tests need no scheduler or runner.

Blocks are handed out in random order, and those outside all sequences are NaN: a read outside a
row's sequence shows in the result.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from termgen.engine.device.attention.base import (
    AttentionBackend,
    AttentionMetadata,
    ForwardContext,
    kv_cache_view,
)
from termgen.engine.device.attention.groups import GroupedAttention
from termgen.engine.device.attention.torch_reference import TorchReferenceAttention
from termgen.engine.device.config.model_config import ModelConfig
from termgen.engine.device.kernels.kv_cache import fill_with_nan, head_items
from termgen.engine.device.kernels.recurrent.layout import GatedDeltaShape
from termgen.engine.device.layers.linear import MakeExperts
from termgen.engine.device.layers.ops import LayerOps, TorchOps
from termgen.engine.device.loader import open_checkpoint
from termgen.engine.device.loader.weights import load_weights
from termgen.engine.device.models.decoder import CausalDecoder
from termgen.engine.device.models.registry import build_model
from termgen.engine.device.recurrent.base import (
    GatedDeltaNet,
    GatedDeltaState,
    RecurrentMetadata,
    RecurrentStep,
    empty_state,
)
from termgen.engine.device.recurrent.torch_delta import TorchGatedDelta
from termgen.engine.device.runner.cpu_experts import CpuExperts

CPU = torch.device("cpu")
NUM_SLOTS = 12
"""Slots for the states of recurrent layers."""


class StateDictCheckpoint:
    """The part of a checkpoint that loading needs, backed by tensors in memory."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = tensors

    def names(self) -> list[str]:
        return list(self.tensors)

    def tensor(self, name: str) -> torch.Tensor:
        return self.tensors[name]


@dataclass
class Row:
    """One row of a step: tokens of sequence `key` from position `computed` on."""

    key: int
    computed: int
    tokens: list[int]


class BlockPool:
    """Blocks in random order, and each sequence's table."""

    def __init__(self, num_blocks: int, block_size: int, seed: int) -> None:
        self.block_size = block_size
        self.tables: dict[int, list[int]] = {}
        self._free = list(range(1, num_blocks))
        random.Random(seed).shuffle(self._free)

    def metadata(
        self, rows: Sequence[Row], device: torch.device = CPU
    ) -> tuple[AttentionMetadata, torch.Tensor]:
        """The step's metadata, and its positions. Rows of one token must come first."""
        size = self.block_size
        positions, slots, starts, seq_lens = [], [], [0], []
        for row in rows:
            table = self.tables.setdefault(row.key, [])
            end = row.computed + len(row.tokens)
            while len(table) * size < end:
                table.append(self._free.pop())
            for position in range(row.computed, end):
                positions.append(position)
                slots.append(table[position // size] * size + position % size)
            starts.append(len(positions))
            seq_lens.append(end)
        tables = [self.tables[row.key] for row in rows]
        width = max(len(table) for table in tables)
        # Beyond a row's blocks the table holds invalid ids, which must not be read.
        padded = [table + [2**30] * (width - len(table)) for table in tables]
        num_queries = [len(row.tokens) for row in rows]
        num_decodes = next((i for i, n in enumerate(num_queries) if n > 1), len(rows))
        metadata = AttentionMetadata(
            query_start_loc=torch.tensor(starts, dtype=torch.int32, device=device),
            seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=device),
            block_table=torch.tensor(padded, dtype=torch.int32, device=device),
            slot_mapping=torch.tensor(slots, dtype=torch.int64, device=device),
            num_rows=len(rows),
            num_tokens=len(positions),
            num_decodes=num_decodes,
            max_query_len=max(num_queries),
            max_seq_len=max(seq_lens),
            block_size=size,
        )
        return metadata, torch.tensor(positions, dtype=torch.int64, device=device)


def nan_cache(
    backend: AttentionBackend,
    *,
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    num_parts: int = 1,
    part: int = 0,
) -> torch.Tensor:
    """One layer's cache, full of NaN, which has a part of each page."""

    numbers = num_parts * 2 * block_size * num_kv_heads * head_items(head_dim, dtype)
    pages = torch.zeros((num_blocks, numbers), dtype=dtype, device=device)
    cache = kv_cache_view(
        backend,
        pages,
        block_size=block_size,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        part=part,
    )
    fill_with_nan(cache, torch.arange(num_blocks, device=device))
    return cache


def delta_shape(config: ModelConfig) -> GatedDeltaShape | None:
    """The heads of the recurrent layers; None for a model without."""
    linear = config.linear
    if linear is None:
        return None
    return GatedDeltaShape(
        num_k_heads=linear.num_k_heads,
        num_v_heads=linear.num_v_heads,
        k_dim=linear.k_dim,
        v_dim=linear.v_dim,
    )


class StatePool:
    """States of recurrent layers, of NaN at first, and each sequence's slot, in random order."""

    def __init__(self, model: CausalDecoder, num_slots: int, seed: int, dtype: torch.dtype) -> None:
        linear, shape = model.config.linear, delta_shape(model.config)
        assert linear is not None and shape is not None

        def make(size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            return torch.full(size, float("nan"), dtype=dtype, device=model.device)

        self.states: list[GatedDeltaState] = [
            empty_state(make, shape, num_slots=num_slots, dtype=dtype) for _ in linear.layers
        ]
        self.slots: dict[int, int] = {}
        self._free = list(range(1, num_slots))
        random.Random(seed).shuffle(self._free)

    def metadata(self, rows: Sequence[Row], of_step: AttentionMetadata) -> RecurrentMetadata:
        for row in rows:
            if row.key not in self.slots:
                self.slots[row.key] = self._free.pop()
        device = of_step.seq_lens.device
        computed = [row.computed for row in rows]
        slots = [self.slots[row.key] for row in rows]
        return RecurrentMetadata(
            query_start_loc=of_step.query_start_loc,
            slots=torch.tensor(slots, dtype=torch.int32, device=device),
            positions=torch.tensor(computed, dtype=torch.int32, device=device),
            has_state=torch.tensor([position > 0 for position in computed], device=device),
            num_rows=of_step.num_rows,
            num_tokens=of_step.num_tokens,
            num_decodes=of_step.num_decodes,
            max_query_len=of_step.max_query_len,
        )


class PagedModel:
    """A model with a cache of NaN and its blocks in random order; so are states."""

    def __init__(
        self,
        model: CausalDecoder,
        *,
        num_blocks: int = 128,
        block_size: int = 4,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        state_dtype: torch.dtype | None = None,
    ) -> None:
        """dtype: of the cache, and of states, unless they have their own."""
        config = model.config
        self.model = model
        self.pool = BlockPool(num_blocks, block_size, seed)
        of_states = state_dtype or dtype
        self.states = StatePool(model, NUM_SLOTS, seed, of_states) if config.linear else None
        caches = [
            (layer, spec) for layer, spec in enumerate(config.layer_caches) if spec is not None
        ]
        self.kv_caches = [
            nan_cache(
                model.attention.backend_of(layer),
                num_blocks=num_blocks,
                block_size=block_size,
                num_kv_heads=spec.num_kv_heads,
                head_dim=spec.head_dim,
                dtype=dtype,
                device=model.device,
            )
            for layer, spec in caches
        ]

    @torch.inference_mode()
    def step(self, rows: Sequence[Row]) -> list[torch.Tensor]:
        """Logits of every token, [len(row.tokens), vocab_size] for each row."""
        logits = self._logits(rows, None)
        return list(logits.split([len(row.tokens) for row in rows]))

    @torch.inference_mode()
    def last_logits(self, rows: Sequence[Row]) -> torch.Tensor:
        """Logits [len(rows), vocab_size] of each row's last token only."""
        ends = torch.tensor([len(row.tokens) for row in rows]).cumsum(0)
        return self._logits(rows, (ends - 1).to(self.model.device))

    def _logits(self, rows: Sequence[Row], wanted: torch.Tensor | None) -> torch.Tensor:
        ids, positions, ctx = self.inputs(rows, wanted)
        return self.model.compute_logits(self.model(ids, positions, ctx)).float()

    def inputs(
        self, rows: Sequence[Row], wanted: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, ForwardContext]:
        """A step's tokens, positions and context, for which everything is prepared."""
        device = self.model.device
        metadata, positions = self.pool.metadata(rows, device)
        tokens = [token for row in rows for token in row.tokens]
        ids = torch.tensor(tokens, dtype=torch.int32, device=device)
        of_groups = (metadata,) * len(self.model.attention.groups)
        self.model.attention.prepare(of_groups)
        step = None
        if self.states is not None:
            assert self.model.recurrent is not None
            step = RecurrentStep(self.states.metadata(rows, metadata), self.states.states)
            self.model.recurrent.prepare(step.metadata)
        return ids, positions, ForwardContext(of_groups, self.kv_caches, wanted, step)

    def greedy(self, prompt: list[int], num_tokens: int) -> list[int]:
        logits = self.step([Row(0, 0, prompt)])[0][-1]
        tokens = [int(logits.argmax())]
        while len(tokens) < num_tokens:
            computed = len(prompt) + len(tokens) - 1
            tokens.append(int(self.step([Row(0, computed, tokens[-1:])])[0][-1].argmax()))
        return tokens


def build(
    config: ModelConfig,
    *,
    dtype: torch.dtype = torch.float32,
    quantization: str | None = None,
    attention: AttentionBackend | GroupedAttention | None = None,
    device: torch.device = CPU,
    ops: LayerOps | None = None,
    recurrent: GatedDeltaNet | None = None,
    make_experts: MakeExperts | None = None,
    keeps_floats: bool = False,
) -> CausalDecoder:
    """recurrent: for a model with recurrent layers; None: the form in torch."""
    if recurrent is None and (shape := delta_shape(config)) is not None:
        recurrent = TorchGatedDelta(shape)
    if not isinstance(attention, GroupedAttention):
        backend = attention or TorchReferenceAttention()
        attention = GroupedAttention.without_windows(backend, config.layer_caches)
    return build_model(
        config,
        dtype=dtype,
        device=device,
        quantization=quantization,
        attention=attention,
        ops=ops or TorchOps(),
        recurrent=recurrent,
        make_experts=make_experts,
        keeps_floats=keeps_floats,
    )


def load(
    path: Path,
    *,
    quantization: str | None = None,
    ops: LayerOps | None = None,
    cpu_experts: CpuExperts | None = None,
    keeps_floats: bool = False,
) -> CausalDecoder:
    """A model in float32 from a folder or a GGUF file, ready to run. cpu_experts: with a number."""
    checkpoint = open_checkpoint(path)
    model = build(
        checkpoint.config,
        quantization=quantization,
        ops=ops,
        make_experts=None if cpu_experts is None else cpu_experts.make,
        keeps_floats=keeps_floats,
    )
    load_weights(model, checkpoint)
    checkpoint.close()
    if cpu_experts is not None:
        cpu_experts.place(model, None)
    model.finalize()
    return model
