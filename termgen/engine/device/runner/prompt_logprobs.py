"""Log-probabilities of a prompt's own tokens. Skip it on a first reading."""

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
    gather: Callable[[torch.Tensor, torch.Tensor, int], LogprobTensors] = gather_logprobs,
) -> LogprobTensors:
    """Log-probabilities of the prompt tokens behind those in the plan's spans, in their order.

    Such a step is never replayed: recordings keep only the hidden states of the rows' last tokens.
    Logits are computed in chunks of at most a step's rows, for which memory is planned.
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
        gather(
            compute_logits(hidden[indices[at : at + chunk_size]]),
            targets[at : at + chunk_size],
            plan.max_prompt_logprobs,
        )
        for at in range(0, len(targets), chunk_size)
    ]
    return LogprobTensors(*(torch.cat(columns) for columns in zip(*chunks, strict=True)))
