"""Steps that take as much as any can: what they need is measured before the KV cache is sized.

Run by `build` and after sleep. They compute for nobody and write the null block alone.
"""

from __future__ import annotations

import torch

from termgen.engine.device.attention.base import AttentionMetadata
from termgen.engine.device.runner.dispatch import EVERYTHING
from termgen.engine.device.runner.input_batch import InputBatch
from termgen.engine.device.runner.model_runner import ModelRunner


def run_largest_steps(runner: ModelRunner) -> None:
    """Shows what steps take at most. A CPU is only warmed up: nobody measures there."""
    if runner.device.type == "cpu":
        dummy_run(runner, 32)
    else:
        dummy_run(runner, len(runner.buffers.input_ids))
        heaviest_run(runner)


@torch.inference_mode()
def dummy_run(runner: ModelRunner, num_tokens: int) -> None:
    """One forward and one greedy draw of one row, which is the most for attention."""
    buffers, block_size, device = runner.buffers, runner.block_size, runner.device
    size = min(num_tokens, runner.max_model_len, len(buffers.input_ids))
    ids = buffers.input_ids[:size].zero_()
    positions = buffers.arange[:size]
    blocks = -(-size // block_size)
    metadata = AttentionMetadata(
        query_start_loc=torch.tensor([0, size], dtype=torch.int32, device=device),
        seq_lens=torch.tensor([size], dtype=torch.int32, device=device),
        block_table=torch.zeros((1, blocks), dtype=torch.int32, device=device),
        slot_mapping=positions % block_size,
        num_rows=1,
        num_tokens=size,
        num_decodes=int(size == 1),
        max_query_len=size,
        max_seq_len=size,
        block_size=block_size,
    )
    last = torch.tensor([size - 1], device=device)
    one = torch.ones(1, dtype=torch.int64, device=device)
    logits = runner.forward(InputBatch(one, one, ids, positions, last, metadata))
    logits.argmax(dim=-1)


@torch.inference_mode()
def heaviest_run(runner: ModelRunner) -> None:
    """As many rows and tokens as a step may have, with a sampler asked for all it can do. Every
    row is padding."""
    state, buffers, device = runner.state, runner.buffers, runner.device
    size = len(buffers.seq_lens)
    tokens_per_row = min(len(buffers.input_ids) // size, runner.max_model_len)
    slots = torch.full((size,), state.pad_row, dtype=torch.int64, device=device)
    ones = torch.ones_like(slots)
    # For the block table of decodes, which is made when first used and then kept.
    buffers.prepare_decode(slots, ones, state, max_seq_len=runner.max_model_len)
    batch = buffers.prepare_ragged(
        slots,
        ones * tokens_per_row,
        state,
        total=size * tokens_per_row,
        num_decodes=size if tokens_per_row == 1 else 0,
        max_query_len=tokens_per_row,
        max_seq_len=tokens_per_row,
    )
    state.make_penalty_tables()
    state.make_edit_tables()
    try:
        metadata = state.sampling_metadata(slots, batch.num_tokens, EVERYTHING)
        runner.sampler(runner.forward(batch).float(), metadata)
    finally:
        state.drop_tables()
