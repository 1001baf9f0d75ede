"""Compiles every kernel variant that a step of this runner can reach, before the first request.

Called by `build` while all rows are free. Real steps run over them, through the code that serves:
rows without a request access the null block only and sample nothing. The steps run twice: the first
run launches nothing and collects the missing kernels; these are compiled in parallel; then the
steps load and run them.

Choice of steps: kernels select variants only by the next power of two of a count (see `kernels`),
so one count per power of two suffices. Row counts and token counts select in different kernels, so
no pairs are needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial

import numpy as np
import torch

from termgen.engine.device.attention.base import AttentionMetadata
from termgen.engine.device.models.mlp import SparseMoe
from termgen.engine.device.models.rehearsal import one_layer_of_each_kind, weights_of
from termgen.engine.device.recurrent.base import RecurrentMetadata
from termgen.engine.device.runner.cuda_graphs import FullGraphs
from termgen.engine.device.runner.dispatch import (
    EVERYTHING,
    BatchDescriptor,
    CudaGraphDispatcher,
    SamplingVariant,
)
from termgen.engine.device.runner.input_batch import InputBatch
from termgen.engine.device.runner.model_runner import ModelRunner
from termgen.engine.device.runner.piecewise_graphs import PiecewiseGraphs
from termgen.vocabulary.request import IntArray
from termgen.vocabulary.step import PromptSpan, SamplingNeeds, StepPlan

MOST_TOKENS = 2048
"""Above the last count at which any kernel except those of experts selects a variant."""
LONG_PROMPT = 65
"""Tokens of a long prompt; attention tiles short prompts differently."""

_FIRST_ROW: IntArray = np.zeros(1, np.int32)

Step = Callable[[], object]


def warm_up(
    runner: ModelRunner, dispatcher: CudaGraphDispatcher, on_progress: Callable[[float], None]
) -> None:
    """Compile and load all kernels, for a runner that has a KV cache of any size."""
    from termgen.engine.device.kernels.compilation import collect_missing, compile_all

    steps = list(warm_up_steps(runner, dispatcher))
    with collect_missing() as missing:
        run_steps(runner, steps)
    compile_all(missing, runner.device, on_progress)
    run_steps(runner, steps)


@torch.inference_mode()
def run_steps(runner: ModelRunner, steps: Iterable[Step]) -> None:
    """Run steps over free rows, which are free again at the end."""
    with one_layer_of_each_kind(runner.model):
        for step in steps:
            step()
            runner.state.num_computed.zero_()
    if runner.device.type == "cuda":
        torch.cuda.synchronize(runner.device)


def size_classes(limit: int) -> list[int]:
    """One count of each class up to `limit`: the powers of two, and the limit itself."""
    return sorted({1 << power for power in range(limit.bit_length())} | {limit})


def warm_up_steps(runner: ModelRunner, dispatcher: CudaGraphDispatcher) -> Iterator[Step]:
    """One step of every kind that can reach a variant of its own."""
    yield from _expert_steps(runner)
    graphs = runner.make_graphs(dispatcher)
    yield from _recorded_steps(graphs, dispatcher)
    yield from _recorded_pieces(graphs.pieces)
    most_rows = runner.state.pad_row
    recorded_rows = max(dispatcher.sizes, default=0)
    for num_rows in size_classes(most_rows):
        if num_rows > recorded_rows or num_rows in (1, most_rows):
            yield partial(_execute, runner, [1] * num_rows)
            yield partial(_execute, runner, [1] * num_rows, filters=True)
    yield partial(_execute, runner, [1], logprobs=True)
    yield partial(_execute, runner, [1], logprobs=True, filters=True)  # of logits before masks
    if min(len(runner.buffers.input_ids), runner.max_model_len) > 1:
        yield partial(_execute, runner, [2], of_prompts=True)
    yield from _prompt_steps(runner)


def _expert_steps(runner: ModelRunner) -> Iterator[Step]:
    """Runs of the experts alone, which select variants by counts up to the largest step."""
    kinds: dict[object, SparseMoe] = {}
    for module in runner.model.modules():
        if isinstance(module, SparseMoe):
            kinds.setdefault((type(module), weights_of(module)), module)
    for moe in kinds.values():
        for num_tokens in size_classes(len(runner.buffers.input_ids)):
            yield partial(_run_experts, runner, moe, num_tokens)


def _run_experts(runner: ModelRunner, moe: SparseMoe, num_tokens: int) -> None:
    shape = (num_tokens, runner.config.hidden_size)
    moe(torch.zeros(shape, dtype=runner.dtype, device=runner.device))


def _recorded_steps(graphs: FullGraphs, dispatcher: CudaGraphDispatcher) -> Iterator[Step]:
    """One of each kind and class of the steps that will be recorded."""
    by_class: dict[tuple[object, ...], BatchDescriptor] = {}
    for d in dispatcher.descriptors():
        size = d.num_tokens
        is_power = size & (size - 1) == 0  # of the class above, or first of the one it begins
        by_class.setdefault((d.is_decode, d.num_drafts, d.sampling, size.bit_length(), is_power), d)
    for descriptor in by_class.values():
        if descriptor.is_decode or descriptor.sampling is SamplingVariant.PLAIN:
            yield partial(graphs.run_padding, descriptor)


def _recorded_pieces(pieces: PiecewiseGraphs) -> Iterator[Step]:
    """Those of one size of each class; attention between them is that of the steps below."""
    by_class = {(n.bit_length(), n & (n - 1) == 0): n for n in pieces.sizes}
    for size in by_class.values():
        yield partial(pieces.record, size, lambda operations: operations)


def _prompt_steps(runner: ModelRunner) -> Iterator[Step]:
    """Steps with prompts that no recording holds: by tokens, by rows, with rows that decode."""
    most_rows, most_tokens = runner.state.pad_row, len(runner.buffers.input_ids)
    longest = runner.max_model_len
    for num_tokens in size_classes(min(most_tokens, most_rows * longest, MOST_TOKENS)):
        if num_tokens > 1:
            num_rows = -(-num_tokens // longest)
            spread = [num_tokens // num_rows] * num_rows
            spread[0] += num_tokens - sum(spread)
            if max(spread) <= longest:
                yield partial(_execute, runner, spread)
    long = min(LONG_PROMPT, longest)
    for num_rows in size_classes(most_rows):
        for first in (2, long):
            if first + 2 * (num_rows - 1) <= most_tokens and 2 <= longest:
                yield partial(_execute, runner, [first] + [2] * (num_rows - 1))
    if most_rows > 1 and most_tokens > 2 and longest > 1:
        yield partial(_execute, runner, [1, 2])
        yield partial(_execute, runner, [1, 2], filters=True)


def _execute(runner: ModelRunner, num_tokens: list[int], **needs: bool) -> None:
    """A step that is not recorded, over rows that belong to no request."""
    runner.execute(_plan(num_tokens, **needs)).result()


def _plan(
    num_tokens: list[int],
    *,
    filters: bool = False,
    logprobs: bool = False,
    of_prompts: bool = False,
) -> StepPlan:
    nothing: IntArray = np.zeros(0, np.int32)
    none_each = np.zeros(len(num_tokens), np.int32)
    return StepPlan(
        step_id=-1,
        slots=np.arange(len(num_tokens), dtype=np.int32),
        epochs=none_each,
        num_tokens=np.asarray(num_tokens, np.int32),
        num_draft_tokens=none_each,
        num_computed=none_each,
        num_decode_rows=0,
        released_slots=(),
        added=(),
        block_slots=nothing,
        block_positions=nothing,
        block_ids=nothing,
        sampling=SamplingNeeds(
            filters=filters,
            grammar=filters,
            max_logprobs=1 if logprobs else None,
        ),
        constrained=_FIRST_ROW if filters else None,
        prompt_spans=(PromptSpan(0, 0, 1),) if of_prompts else (),
    )


# The largest steps, whose memory is measured before the KV cache is sized. They have no requests
# and write to the null block only.


def run_largest_steps(runner: ModelRunner) -> None:
    """Take as much memory as any step can. A CPU is only warmed up: nothing is measured there."""
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
        slot_mapping=positions % block_size,  # in the null block, as all groups' tokens
        num_rows=1,
        num_tokens=size,
        num_decodes=int(size == 1),
        max_query_len=size,
        max_seq_len=size,
        block_size=block_size,
    )
    last = torch.tensor([size - 1], device=device)
    one = torch.ones(1, dtype=torch.int64, device=device)
    of_groups = (metadata,) * len(runner.attention.groups)
    recurrent = None
    if runner.recurrent is not None:
        recurrent = RecurrentMetadata(
            query_start_loc=metadata.query_start_loc,
            slots=torch.full((1,), runner.state.pad_row, dtype=torch.int32, device=device),
            positions=torch.zeros(1, dtype=torch.int32, device=device),
            has_state=torch.zeros(1, dtype=torch.bool, device=device),
            num_rows=1,
            num_tokens=size,
            num_decodes=metadata.num_decodes,
            max_query_len=size,
        )
        if runner.drafts is not None:
            recurrent.num_pending = torch.zeros(1, dtype=torch.int32, device=device)
            recurrent.num_drafts = torch.zeros(1, dtype=torch.int32, device=device)
    logits = runner.forward(InputBatch(one, one, ids, positions, last, of_groups, recurrent))
    logits.argmax(dim=-1)


@torch.inference_mode()
def heaviest_run(runner: ModelRunner) -> None:
    """Run as many rows and tokens as a step may have, with a sampler asked for all it can do. Every
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
    logits = runner.forward(batch)
    if runner.fused_sampler is not None:
        runner.fused_sampler(logits, slots, batch.num_tokens, state, EVERYTHING)
    else:
        runner.sampler(logits.float(), state.sampling_metadata(slots, batch.num_tokens, EVERYTHING))
