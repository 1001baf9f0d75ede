"""Log-probabilities of a prompt's own tokens, from the hidden states that a step computes.

Called by the model runner for plans that have spans. Such a step is never a replay: recordings keep
the hidden states of each row's last token alone.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from termgen.engine.device.runner.request_state import RequestState
from termgen.engine.device.sampling.logprobs import LogprobTensors, gather_logprobs
from termgen.vocabulary.step import StepPlan


def prompt_logprobs(
    plan: StepPlan,
    hidden: torch.Tensor,  # [T, H]
    state: RequestState,
    compute_logits: Callable[[torch.Tensor], torch.Tensor],  # [N, H] -> [N, V]
) -> LogprobTensors:
    """Of the tokens behind those in the plan's spans, in the spans' order.

    Never more rows of logits are in memory than a step may have rows: memory is planned for those.
    """
    chunk_size = state.pad_row
    ends = np.cumsum(plan.num_tokens)
    parts = []
    for row, start, count in plan.prompt_spans:
        steps = np.arange(count, dtype=np.int64)
        indices = ends[row] - plan.num_tokens[row] + steps
        parts.append(np.stack((indices, np.full(count, plan.slots[row]), start + 1 + steps)))
    indices, slots, positions = state.upload(np.concatenate(parts, axis=1).astype(np.int64))
    targets = state.token_ids[slots, positions].long()
    chunks = [
        gather_logprobs(
            compute_logits(hidden[indices[at : at + chunk_size]]).float(),
            targets[at : at + chunk_size],
            plan.max_prompt_logprobs,
        )
        for at in range(0, len(targets), chunk_size)
    ]
    return LogprobTensors(*(torch.cat(columns) for columns in zip(*chunks, strict=True)))
