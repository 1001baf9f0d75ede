"""What the sampler in torch is told of a step's rows, gathered from the device's state of them.

Called by the model runner for steps that kernels do not sample.
"""

from __future__ import annotations

from functools import partial

import torch

from termgen.engine.device.runner.dispatch import SamplingNeeds
from termgen.engine.device.runner.request_state import RequestState
from termgen.engine.device.sampling.metadata import SamplingMetadata


def sampling_metadata(
    state: RequestState,
    slots: torch.Tensor,  # [B] int64
    num_tokens: torch.Tensor,  # [B] int64, not yet counted in num_computed
    needs: SamplingNeeds,
) -> SamplingMetadata:
    output_counts = prompt_mask = None
    if needs.penalties:
        assert state.output_counts is not None and state.prompt_mask is not None
        output_counts, prompt_mask = state.output_counts[slots], state.prompt_mask[slots]
    return SamplingMetadata(
        temperature=state.temperature[slots],
        top_k=state.top_k[slots],
        top_p=state.top_p[slots],
        min_p=state.min_p[slots],
        seeds=state.seeds[slots],
        positions=state.num_computed[slots] + num_tokens,
        repetition_penalty=state.repetition_penalty[slots],
        presence_penalty=state.presence_penalty[slots],
        frequency_penalty=state.frequency_penalty[slots],
        output_counts=output_counts,
        prompt_mask=prompt_mask,
        stop_token_ids=state.stop_ids[slots],
        suppress_stop=state.total_len[slots] < state.min_total[slots],
        all_greedy=needs.all_greedy,
        needs_penalties=needs.penalties,
        needs_top_k_top_p=needs.filters,
        edit=partial(state.edit_logits, slots) if needs.edits else None,
        suppress_any=needs.min_tokens,
        token_masks=state.masks_of(slots) if needs.grammar else None,
        max_logprobs=needs.max_logprobs,
    )
