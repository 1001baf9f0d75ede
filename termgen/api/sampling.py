"""Body fields that say how tokens are drawn -> `SamplingParams`. The one place for all endpoints.

Ranges are checked by `SamplingParams` itself; here are names, types, defaults and what is refused.
Defaults come from the model's generation config where the client says nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from termgen.api.errors import unsupported
from termgen.api.fields import Check, Fields, is_empty, is_int, never, one_of, wrong_type
from termgen.api.structured import parse_structured
from termgen.engine.sampling_params import MAX_LOGPROBS, SamplingParams
from termgen.errors import RequestError

MAX_INT = 2**31 - 1

NUMBERS = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
FLAGS = {"ignore_eos": False, "include_stop_str_in_output": False, "skip_special_tokens": True}

HARMLESS = frozenset(
    {
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "verbosity",
        "spaces_between_special_tokens",
    }
)
"""Accepted on every endpoint although they do nothing: none of them can change the answer."""

REFUSED: dict[str, Check] = {
    "logit_bias": is_empty,
    "allowed_token_ids": is_empty,
    "bad_words": is_empty,
    "prompt_logprobs": never,
    "use_beam_search": is_empty,
    "length_penalty": one_of(1, 1.0),
    "truncate_prompt_tokens": never,
    "logits_processors": is_empty,
    "kv_transfer_params": is_empty,
    "chat_template": never,
}
"""Known fields that would change the answer and are not done yet: value check -> harmless?"""


def parse_sampling(
    body: Fields,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    defaults: Mapping[str, Any],
) -> SamplingParams:
    """`max_tokens` and `logprobs` are spelled differently by each endpoint, hence arguments."""
    args: dict[str, Any] = {}
    for name in NUMBERS:
        value = body.number(name)
        if value is None:
            value = defaults.get(name)
        if value is not None:
            args[name] = value
    top_k = body.integer("top_k", low=-1, high=MAX_INT)
    args["top_k"] = defaults.get("top_k", 0) if top_k is None else top_k
    for name, default in FLAGS.items():
        args[name] = body.boolean(name, default)
    n = body.integer("n", low=1, high=128)
    best_of = body.integer("best_of", low=1, high=MAX_INT)
    if best_of is not None and best_of != (n or 1):
        raise unsupported("best_of", "best_of is supported only when it equals n")
    return SamplingParams(
        n=n or 1,
        seed=body.integer("seed", low=-(2**63), high=2**63 - 1),
        stop=_stop(body),
        stop_token_ids=_stop_token_ids(body),
        max_tokens=max_tokens,
        min_tokens=body.integer("min_tokens", low=0, high=MAX_INT) or 0,
        logprobs=logprobs,
        structured_outputs=parse_structured(body),
        **args,
    )


def chat_logprobs(body: Fields) -> int | None:
    """`logprobs: true` with `top_logprobs: k` -> k; None when not asked for."""
    wanted = body.boolean("logprobs")
    top = body.integer("top_logprobs", low=0, high=MAX_LOGPROBS)
    if wanted:
        return top or 0
    if top:
        raise RequestError("top_logprobs needs logprobs: true", param="top_logprobs")
    return None


def _stop(body: Fields) -> tuple[str, ...]:
    value = body.take("stop")
    if value is None:
        return ()
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list) or not all(isinstance(s, str) for s in value):
        raise wrong_type("stop", "a string or a list of strings", value)
    return tuple(value)


def _stop_token_ids(body: Fields) -> tuple[int, ...]:
    value = body.take("stop_token_ids")
    if value is None:
        return ()
    if not isinstance(value, list) or not all(is_int(t) for t in value):
        raise wrong_type("stop_token_ids", "a list of integers", value)
    return tuple(value)
