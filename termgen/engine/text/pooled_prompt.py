"""The prompt of a request that wants a vector: how long it may be, what is cut, and the request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from termgen.errors import ContextLengthError, RequestError
from termgen.vocabulary.device.pooling import PoolingParams
from termgen.vocabulary.request import GenerationRequest
from termgen.vocabulary.sampling_params import SamplingParams

if TYPE_CHECKING:
    from termgen.client import Prompt
    from termgen.engine.text.tokenizer import Tokenizer

KEEP_ALL = 2**62
"""Tokens to keep of a prompt that `cut_to_pool` cuts."""


def cut_to_pool(
    ids: list[int],
    prompt: Prompt,
    params: SamplingParams,
    longest: int,
    tokenizer: Tokenizer | None,
) -> list[int]:
    """A prompt's ids, at most `longest`. Too long a prompt is refused, or loses its end, but not
    the tokens that the tokenizer puts behind every text."""
    name, keep = "truncate_prompt_tokens", params.truncate_prompt_tokens
    if keep is not None and keep > longest:
        raise RequestError(f"{name} must be at most {longest}, not {keep}", param=name)
    keep = longest if keep == -1 else keep
    if keep is None and len(ids) > longest:
        raise ContextLengthError(
            f"This model's embeddings are of at most {longest} tokens, and the prompt has"
            f" {len(ids)}. Send less, or truncate_prompt_tokens to cut it."
            " (context_length_exceeded)",
            param="prompt",
        )
    if keep is None or len(ids) <= keep:
        return ids
    num_last = tokenizer.num_last_tokens if tokenizer and isinstance(prompt, str) else 0
    if num_last >= keep:
        raise RequestError(
            f"{name} must be at least {num_last + 1}: this model's tokenizer ends each text with"
            f" {num_last}",
            param=name,
        )
    return [*ids[: keep - num_last], *ids[len(ids) - num_last :]]


def request_to_pool(
    ids: Sequence[int],
    pooling: PoolingParams,
    request_id: str,
    priority: int,
    cache_salt: str | None,
    block_hashes: tuple[bytes, ...],
) -> GenerationRequest:
    return GenerationRequest(
        request_id=request_id,
        prompt_token_ids=tuple(ids),
        params=SamplingParams(temperature=0.0, max_tokens=1),
        priority=priority,
        cache_salt=cache_salt,
        block_hashes=block_hashes,
        pooling=pooling,
    )
