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
    empty_kv_cache,
)
from termgen.engine.device.attention.torch_reference import TorchReferenceAttention
from termgen.engine.device.config.model_config import ModelConfig
from termgen.engine.device.layers.ops import LayerOps, TorchOps
from termgen.engine.device.loader import open_checkpoint
from termgen.engine.device.loader.weights import load_weights
from termgen.engine.device.models.decoder import CausalDecoder
from termgen.engine.device.models.registry import build_model

CPU = torch.device("cpu")


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
) -> torch.Tensor:
    """One layer's cache, full of NaN."""

    def make(shape: tuple[int, ...]) -> torch.Tensor:
        return torch.full(shape, float("nan"), dtype=dtype, device=device)

    return empty_kv_cache(
        backend,
        make,
        num_blocks=num_blocks,
        block_size=block_size,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
    )


class PagedModel:
    """A model with a cache of NaN and its blocks in random order."""

    def __init__(
        self,
        model: CausalDecoder,
        *,
        num_blocks: int = 128,
        block_size: int = 4,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        config = model.config
        self.model = model
        self.pool = BlockPool(num_blocks, block_size, seed)
        self.kv_caches = [
            nan_cache(
                model.attention,
                num_blocks=num_blocks,
                block_size=block_size,
                num_kv_heads=config.num_kv_heads,
                head_dim=config.head_dim,
                dtype=dtype,
                device=model.device,
            )
            for _ in range(config.num_layers)
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
        device = self.model.device
        metadata, positions = self.pool.metadata(rows, device)
        tokens = [token for row in rows for token in row.tokens]
        ids = torch.tensor(tokens, dtype=torch.int32, device=device)
        self.model.attention.prepare(metadata)
        hidden = self.model(ids, positions, ForwardContext(metadata, self.kv_caches, wanted))
        return self.model.compute_logits(hidden).float()

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
    attention: AttentionBackend | None = None,
    device: torch.device = CPU,
    ops: LayerOps | None = None,
) -> CausalDecoder:
    return build_model(
        config,
        dtype=dtype,
        device=device,
        quantization=quantization,
        attention=attention or TorchReferenceAttention(),
        ops=ops or TorchOps(),
    )


def load(path: Path, *, quantization: str | None = None) -> CausalDecoder:
    """A model in float32 from a folder or a GGUF file, ready to run."""
    checkpoint = open_checkpoint(path)
    model = build(checkpoint.config, quantization=quantization)
    load_weights(model, checkpoint)
    checkpoint.close()
    model.finalize()
    return model
