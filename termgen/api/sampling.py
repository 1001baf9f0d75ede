"""Body fields that say how tokens are drawn -> `SamplingParams`. The one place for all endpoints.

Ranges are checked by `SamplingParams` itself; here are names, types, defaults and what is refused.
Defaults come from the model's generation config where the client says nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from termgen.api.errors import unsupported
from termgen.api.fields import (
    Check,
    Fields,
    Instead,
    is_empty,
    is_number,
    is_true,
    never,
    one_of,
    wrong_type,
)
from termgen.api.structured import parse_structured
from termgen.errors import RequestError
from termgen.vocabulary.sampling_params import MAX_LOGIT_BIAS, MAX_LOGPROBS, MAX_N, SamplingParams

MAX_INT = 2**31 - 1
_TOKEN_ID = re.compile(r"[0-9]{1,10}")

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

_NEUTRAL_1 = one_of(1)

OTHERS_WORDS: dict[str, Check] = {
    # llama.cpp
    "grammar": Instead("structured_outputs.grammar"),
    "grammar_lazy": Instead("tool_choice"),
    "json_schema": Instead("response_format"),
    "n_predict": Instead("max_tokens", one_of(-1)),
    "n_probs": Instead("top_logprobs"),
    "repeat_penalty": Instead("repetition_penalty", _NEUTRAL_1),
    "repeat_last_n": Instead("repetition_penalty, which looks at all tokens", one_of(-1)),
    "samplers": Instead("temperature, top_p, top_k and min_p"),
    # Ollama
    "format": Instead("response_format"),
    "num_ctx": Instead("the option --max-model-len of the server", never),
    "num_predict": Instead("max_tokens", one_of(-1)),
    "options": Instead("its fields themselves, at the top of the body"),
    # SGLang, TGI, TabbyAPI, transformers
    "ebnf": Instead("structured_outputs.grammar"),
    "grammar_string": Instead("structured_outputs.grammar"),
    "max_length": Instead("max_tokens", never),
    "max_new_tokens": Instead("max_tokens", never),
    "min_length": Instead("min_tokens"),
    "min_new_tokens": Instead("min_tokens"),
    "regex": Instead("structured_outputs.regex"),
    "regex_pattern": Instead("structured_outputs.regex"),
    "do_sample": Instead("temperature: 0 for greedy", is_true),
    "stop_sequences": Instead("stop"),
    "stopping_strings": Instead("stop"),
    "max_output_tokens": Instead("max_tokens", never),
    "structural_tag": Instead("tools"),
    "guided_whitespace_pattern": Instead("structured_outputs.regex"),
    # ways to draw tokens that are not done here
    **dict.fromkeys(("mirostat", "dry_multiplier", "xtc_probability", "dynatemp_range"), is_empty),
    **dict.fromkeys(("no_repeat_ngram_size", "smoothing_factor", "top_a"), is_empty),
    **dict.fromkeys(("epsilon_cutoff", "eta_cutoff", "penalty_alpha"), is_empty),
    **dict.fromkeys(("typical_p", "tfs_z", "tfs", "num_beams", "guidance_scale"), _NEUTRAL_1),
    "top_n_sigma": one_of(-1, 0),
    "negative_prompt": is_empty,
    "lora": is_empty,
}
"""Fields of other servers that change an answer. Taken without effect they would leave it
unconstrained, or drawn otherwise than was asked."""

REFUSED: dict[str, Check] = {
    **OTHERS_WORDS,
    "use_beam_search": is_empty,
    "length_penalty": one_of(1, 1.0),
    "truncate_prompt_tokens": never,
    "logits_processors": is_empty,
    "kv_transfer_params": is_empty,
}
"""Known fields that would change the answer and are not done yet: value check -> harmless?"""


def parse_sampling(
    body: Fields,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None,
    defaults: Mapping[str, Any],
) -> SamplingParams:
    """What is spelled differently by each endpoint is an argument."""
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
    n = body.integer("n", low=1, high=MAX_N)
    best_of = body.integer("best_of", low=1, high=MAX_INT)
    if best_of is not None and best_of != (n or 1):
        raise unsupported("best_of", "best_of is supported only when it equals n")
    return SamplingParams(
        n=n or 1,
        seed=body.integer("seed", low=-(2**63), high=2**63 - 1),
        stop=body.strings("stop"),
        stop_token_ids=body.token_ids("stop_token_ids") or (),
        max_tokens=max_tokens,
        min_tokens=body.integer("min_tokens", low=0, high=MAX_INT) or 0,
        logprobs=logprobs,
        structured_outputs=parse_structured(body),
        prompt_logprobs=prompt_logprobs,
        logit_bias=_logit_bias(body),
        allowed_token_ids=body.token_ids("allowed_token_ids"),
        bad_words=body.strings("bad_words"),
        **args,
    )


def parse_prompt_logprobs(body: Fields, *, stream: bool) -> int | None:
    wanted = body.integer("prompt_logprobs", low=0, high=MAX_LOGPROBS)
    if wanted is not None and stream:
        raise RequestError(
            "prompt_logprobs comes with a whole answer only; leave stream out, or use echo with"
            " logprobs on /v1/completions",
            param="prompt_logprobs",
        )
    return wanted


def chat_logprobs(body: Fields) -> int | None:
    """`logprobs: true` with `top_logprobs: k` -> k; None when not asked for."""
    wanted = body.boolean("logprobs")
    top = body.integer("top_logprobs", low=0, high=MAX_LOGPROBS)
    if wanted:
        return top or 0
    if top:
        raise RequestError("top_logprobs needs logprobs: true", param="top_logprobs")
    return None


def _logit_bias(body: Fields) -> dict[int, Any]:
    """JSON has no integer keys: token ids come as strings."""
    value = body.take("logit_bias")
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise wrong_type("logit_bias", "an object of token ids and numbers", value)
    if len(value) > MAX_LOGIT_BIAS:
        raise RequestError(
            f"logit_bias may name at most {MAX_LOGIT_BIAS} token ids", param="logit_bias"
        )
    biases = {}
    for key, bias in value.items():
        if not _TOKEN_ID.fullmatch(key):
            raise wrong_type("logit_bias", "an object whose keys are token ids", key)
        if not is_number(bias):
            raise wrong_type("logit_bias", "an object whose values are finite numbers", bias)
        biases[int(key)] = bias
    return biases
