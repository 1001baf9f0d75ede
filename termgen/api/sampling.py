"""Fields of the endpoints that generate: how to sample, when to stop, which form an answer has.

`SharedFields` and `GenerationFields` declare them; `parse_sampling` makes `SamplingParams` of them,
which check the ranges. Defaults come from the model's generation config where the client gives
none. `parse_structured` reads OpenAI's `response_format`, vLLM's `structured_outputs` and its older
`guided_*` fields, of which a request gives one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any

from msgspec import Meta, Struct

from termgen.api.errors import unsupported
from termgen.api.fields import (
    ANSWER,
    ENGINE,
    FORM,
    LENGTH,
    PROMPT,
    SAMPLING,
    Check,
    Instead,
    is_empty,
    is_number,
    is_true,
    never,
    one_of,
    strings,
    wanted,
    wrong_type,
)
from termgen.errors import RequestError
from termgen.vocabulary.request import MAX_PRIORITY
from termgen.vocabulary.sampling_params import (
    GREEDY_EPSILON,
    MAX_BAD_WORD_CHARS,
    MAX_BAD_WORDS,
    MAX_BIAS,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_N,
    MAX_STOP_STRING_CHARS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    SamplingParams,
)
from termgen.vocabulary.structured_outputs import KINDS, StructuredOutputsParams

MAX_INT = 2**31 - 1
MIN_PING_INTERVAL_S = 1
MAX_PING_INTERVAL_S = 3600
_TOKEN_ID = re.compile(r"[0-9]{1,10}")
VLLM = "vLLM"

PositiveInt = Annotated[int, Meta(ge=1, le=MAX_INT)]
TokenLimit = Annotated[int, Meta(ge=-1, le=MAX_INT)]
"""A limit for tokens, or -1 for none, as llama.cpp's clients write it."""
TopK = Annotated[int, Meta(ge=-1, le=MAX_INT)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
NumLogprobs = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]

LOGPROBS_DOC = ANSWER(
    "log-probabilities of the answer's tokens, before temperature and all else that changes them; "
    "on completions with so many alternatives",
    f"on chat true or false; on completions 0 to {MAX_LOGPROBS}",
    "off",
)

NUMBERS = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
"""vLLM's older names of the kinds of `structured_outputs`."""

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
"""Accepted on every endpoint and ignored: none of them can change the answer."""

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
    "bad_words_ids": Instead("bad_words"),
    "num_return_sequences": Instead("n", _NEUTRAL_1),
    "template_vars": Instead("chat_template_kwargs"),
    # KoboldAI, text-generation-webui, Aphrodite
    **dict.fromkeys(("rep_pen", "repeat_pen"), Instead("repetition_penalty", _NEUTRAL_1)),
    **dict.fromkeys(("freq_pen", "frequency_pen"), Instead("frequency_penalty")),
    **dict.fromkeys(("pres_pen", "presence_pen"), Instead("presence_penalty")),
    **dict.fromkeys(
        ("penalty_range", "rep_pen_range", "repetition_penalty_range"),
        Instead("repetition_penalty, which looks at all tokens", one_of(-1, 0)),
    ),
    **dict.fromkeys(("stop_sequence", "stop_strings", "custom_stopping_strings"), Instead("stop")),
    **dict.fromkeys(("ban_eos_token", "use_default_badwordsids"), Instead("ignore_eos")),
    "custom_token_bans": Instead("logit_bias, with -100"),
    **dict.fromkeys(("banned_tokens", "banned_strings", "banned_phrases"), Instead("bad_words")),
    **dict.fromkeys(
        ("sampler_order", "sampler_priority"), Instead("temperature, top_p, top_k and min_p")
    ),
    "sampler_seed": Instead("seed", one_of(-1)),
    "max_context_length": Instead("the option --max-model-len of the server", never),
    # Mistral, Cohere
    "random_seed": Instead("seed"),
    "safe_prompt": is_empty,
    "p": Instead("top_p"),
    "k": Instead("top_k"),
    # ways to sample that are not supported here
    **dict.fromkeys(("mirostat", "dry_multiplier", "xtc_probability", "dynatemp_range"), is_empty),
    **dict.fromkeys(("no_repeat_ngram_size", "smoothing_factor", "top_a"), is_empty),
    **dict.fromkeys(("epsilon_cutoff", "eta_cutoff", "penalty_alpha"), is_empty),
    **dict.fromkeys(("dynamic_temperature", "mirostat_mode", "repetition_decay"), is_empty),
    **dict.fromkeys(("skew", "temperature_last", "response_prefix"), is_empty),
    **dict.fromkeys(("diversity_penalty", "sequence_bias", "suppress_tokens"), is_empty),
    **dict.fromkeys(("typical_p", "tfs_z", "tfs", "num_beams", "guidance_scale"), _NEUTRAL_1),
    **dict.fromkeys(("typical", "cfg_scale", "encoder_repetition_penalty"), _NEUTRAL_1),
    **dict.fromkeys(("dynatemp_low", "dynatemp_high", "dynatemp_exponent"), one_of(0, 1)),
    **dict.fromkeys(("min_temp", "max_temp", "temp_exponent", "rep_pen_slope"), one_of(0, 1)),
    **dict.fromkeys(("top_n_sigma", "nsigma"), one_of(-1, 0)),
    "negative_prompt": is_empty,
    "lora": is_empty,
}
"""Fields of other servers that change an answer. Ignored, they would leave it unconstrained, or
sampled in another way than the client asked for."""

REFUSED: dict[str, Check] = {
    **OTHERS_WORDS,
    "use_beam_search": is_empty,
    "length_penalty": one_of(1, 1.0),
    "truncation_side": one_of("left"),
    "logits_processors": is_empty,
    "kv_transfer_params": is_empty,
}
"""Known fields that would change the answer and are not supported: value check -> harmless?"""


class SharedFields(Struct, frozen=True):
    """Fields of every endpoint that generates."""

    model: Annotated[
        str | None,
        PROMPT(
            "which model; `GET /v1/models` lists the names",
            "a served name",
            "the one that is loaded",
        ),
    ] = None
    stream: Annotated[bool, ANSWER("send the answer as server-sent events")] = False
    sse_ping_interval: Annotated[
        float | None,
        ANSWER(
            "silence in this stream before a comment line that keeps it open; 0: never",
            f"0, or {MIN_PING_INTERVAL_S} to {MAX_PING_INTERVAL_S} seconds; needs `stream`",
            "the server's `--sse-ping-interval`",
            "termgen",
        ),
    ] = None
    temperature: Annotated[
        float | None,
        SAMPLING(
            f"divides the logits; below {GREEDY_EPSILON:g} the likeliest token is taken",
            "0 to 2",
            "the model's own, else 1",
        ),
    ] = None
    top_p: Annotated[
        float | None,
        SAMPLING(
            "the likeliest tokens that make up this probability",
            "above 0, up to 1",
            "the model's own, else 1",
        ),
    ] = None
    top_k: Annotated[
        TopK | None,
        SAMPLING(
            "the `top_k` likeliest tokens; 0 or -1: all",
            "-1 or more",
            "the model's own, else 0",
            VLLM,
        ),
    ] = None
    min_p: Annotated[
        float | None,
        SAMPLING(
            "tokens of at least this share of the likeliest one's probability",
            "0 to 1",
            "the model's own, else 0",
            VLLM,
        ),
    ] = None
    repetition_penalty: Annotated[
        float | None,
        SAMPLING(
            "divides positive and multiplies negative logits of tokens in the prompt or the answer",
            "above 0, up to 10",
            "the model's own, else 1",
            VLLM,
        ),
    ] = None
    presence_penalty: Annotated[
        float | None,
        SAMPLING("subtracted from the logits of tokens that the answer has", "-2 to 2", "0"),
    ] = None
    frequency_penalty: Annotated[
        float | None, SAMPLING("the same for each time that a token occurs", "-2 to 2", "0")
    ] = None
    seed: Annotated[
        Seed | None,
        SAMPLING(
            "a token depends only on the seed, the position and the model's logits, whatever else "
            "the server does. Answer `i` uses `seed + i`",
            "a 64-bit integer",
            "random",
        ),
    ] = None
    logit_bias: Annotated[
        dict[str, Any] | None,
        wanted("an object of token ids and numbers"),
        SAMPLING(
            f"added to the logits of these tokens; cut to -{MAX_BIAS:g} to {MAX_BIAS:g}",
            f"an object of up to {MAX_LOGIT_BIAS} token ids and numbers",
        ),
    ] = None
    allowed_token_ids: Annotated[
        list[int] | None,
        SAMPLING("only these tokens are sampled", "one token id or more", "all", VLLM),
    ] = None
    bad_words: Annotated[
        str | list[str],
        SAMPLING(
            "texts that are not written, alone or after a space, as the tokenizer spells them: "
            "another spelling of the same text is not seen",
            f"a string or up to {MAX_BAD_WORDS}, of 1 to {MAX_BAD_WORD_CHARS} characters",
            origin=VLLM,
        ),
    ] = []
    min_tokens: Annotated[
        int,
        Meta(ge=0, le=MAX_INT),
        LENGTH(
            "the answer does not end before so many tokens; stop strings have no effect until then",
            "0 to `max_tokens`",
            origin=VLLM,
        ),
    ] = 0
    stop_token_ids: Annotated[
        list[int],
        LENGTH("end at these tokens too", f"up to {MAX_STOP_TOKEN_IDS} token ids", origin=VLLM),
    ] = []
    ignore_eos: Annotated[
        bool, LENGTH("go on past the model's end-of-sequence tokens", origin=VLLM)
    ] = False
    structured_outputs: Annotated[
        dict[str, Any] | None,
        FORM(
            "a form that the answer is constrained to",
            "an object with one of `json`, `json_object`, `regex`, `choice`, `grammar`",
            origin=VLLM,
        ),
    ] = None
    priority: Annotated[
        int,
        Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY),
        ENGINE(
            "lower runs first and is preempted last; needs `--scheduling-policy priority`, and is "
            "refused without it. Below 0 is for administrators",
            "an integer of 32 bits",
            origin=VLLM,
        ),
    ] = 0
    cache_salt: Annotated[
        str | None,
        ENGINE(
            "cached prefixes are shared only with requests of the same salt",
            "1 to 128 characters of `A-Z a-z 0-9 _ -`",
            origin=VLLM,
        ),
    ] = None


class StreamOptions(Struct, frozen=True):
    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False
    """Padding against eavesdroppers: never sent."""


class GenerationFields(SharedFields, frozen=True):
    """Fields that /v1/chat/completions and /v1/completions share."""

    max_tokens: Annotated[
        TokenLimit | None,
        LENGTH(
            "longest answer, in tokens. More is cut to that, which the response header "
            "`x-termgen-max-tokens` reports; an error with the server's `--no-clamp-max-tokens`",
            "1 to what the context leaves, or -1 for all of it; on completions 0 too, with `echo`",
            "what the context leaves; on completions 16",
        ),
    ] = None
    stop: Annotated[
        str | list[str],
        LENGTH(
            "end before this text, wherever tokens begin and end; `stop_reason` names it",
            f"a string or up to {MAX_STOP_STRINGS}, of 1 to {MAX_STOP_STRING_CHARS} characters",
        ),
    ] = []
    include_stop_str_in_output: Annotated[
        bool,
        LENGTH("keep the stop string, or the text of the stop token, in the answer", origin=VLLM),
    ] = False
    n: Annotated[
        int,
        Meta(ge=1, le=MAX_N),
        SAMPLING(
            "how many answers. Their prompt is computed once; greedy ones are copies of one. Those "
            "beyond the engine's `--max-num-seqs` wait in its queue",
        ),
    ] = 1
    truncate_prompt_tokens: Annotated[
        TokenLimit | None,
        PROMPT(
            "keep only so many tokens at the end of the prompt, of a chat after its template; -1: "
            "as many as leave the context room for `max_tokens`, or for one token. `prompt_tokens` "
            "counts those kept. Excludes `echo` and `suffix`",
            "1 to one less than the context, or -1",
            "all, and an error where they do not fit",
            VLLM,
        ),
    ] = None
    best_of: Annotated[
        PositiveInt | None, SAMPLING("accepted only with that value", "the value of `n`", "`n`")
    ] = None
    response_format: Annotated[
        dict[str, Any] | None,
        FORM(
            "form of JSON for the answer; see [structured outputs](structured-outputs.md)",
            "`text`, `json_object` or `json_schema` with its schema",
            "text",
        ),
    ] = None
    guided_json: Annotated[
        Any,
        Meta(extra_json_schema={"type": ["object", "string"]}),
        FORM("`structured_outputs` in vLLM's older words", "a schema", origin=VLLM),
    ] = None
    guided_regex: Annotated[
        Any,
        Meta(extra_json_schema={"type": "string"}),
        FORM("`structured_outputs` in vLLM's older words", "a string", origin=VLLM),
    ] = None
    guided_choice: Annotated[
        Any,
        Meta(extra_json_schema={"type": "array"}),
        FORM("`structured_outputs` in vLLM's older words", "a list", origin=VLLM),
    ] = None
    guided_grammar: Annotated[
        Any,
        Meta(extra_json_schema={"type": "string"}),
        FORM("`structured_outputs` in vLLM's older words", "a string", origin=VLLM),
    ] = None
    prompt_logprobs: Annotated[
        NumLogprobs | None,
        ANSWER(
            "log-probabilities of the prompt's tokens, by token id; null for the first. All of the "
            "prompt is computed for it, whatever the prefix cache holds",
            f"0 to {MAX_LOGPROBS}; not in a stream",
            "off",
            VLLM,
        ),
    ] = None
    skip_special_tokens: Annotated[
        bool, ANSWER("leave special tokens out of the text", origin=VLLM)
    ] = True
    return_token_ids: Annotated[
        bool, ANSWER("add `token_ids` and `prompt_token_ids`", origin=VLLM)
    ] = False
    return_tokens_as_token_ids: Annotated[
        bool, ANSWER("name tokens `token_id:N` in log-probabilities", origin=VLLM)
    ] = False
    include_timings: Annotated[
        bool,
        ANSWER(
            "add `termgen.timings`: of each choice the seconds in the queue, to the first token "
            "and in all, and its tokens per second",
            origin="termgen",
        ),
    ] = False
    stream_options: Annotated[
        StreamOptions | None,
        ANSWER(
            "`include_usage`: a last event with the counts; `continuous_usage_stats`: counts with "
            "every event; `include_obfuscation` is accepted, and nothing is padded",
            "an object; needs `stream`",
        ),
    ] = None


def token_limit(name: str, value: int | None) -> int | None:
    """The value of a `TokenLimit`; None for no limit. Raises RequestError for 0."""
    if value == 0:
        raise wrong_type(name, f"between 1 and {MAX_INT}, or -1 for no limit", value)
    return None if value == -1 else value


def parse_sampling(
    body: GenerationFields,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None,
    defaults: Mapping[str, Any],
) -> SamplingParams:
    """The sampling parameters of a body. The keyword arguments are those whose fields differ by
    endpoint."""
    args: dict[str, Any] = {}
    for name in NUMBERS:
        value = getattr(body, name)
        if value is None:
            value = defaults.get(name)
        if value is not None:
            args[name] = value
    if body.best_of is not None and body.best_of != body.n:
        raise unsupported("best_of", "best_of is supported only when it equals n")
    allowed = body.allowed_token_ids
    return SamplingParams(
        n=body.n,
        seed=body.seed,
        top_k=defaults.get("top_k", 0) if body.top_k is None else body.top_k,
        stop=strings(body.stop),
        stop_token_ids=tuple(body.stop_token_ids),
        max_tokens=max_tokens,
        min_tokens=body.min_tokens,
        ignore_eos=body.ignore_eos,
        include_stop_str_in_output=body.include_stop_str_in_output,
        skip_special_tokens=body.skip_special_tokens,
        logprobs=logprobs,
        structured_outputs=parse_structured(body),
        prompt_logprobs=prompt_logprobs,
        logit_bias=_logit_bias(body.logit_bias),
        allowed_token_ids=None if allowed is None else tuple(allowed),
        bad_words=strings(body.bad_words),
        truncate_prompt_tokens=body.truncate_prompt_tokens,
        **args,
    )


def check_prompt_logprobs(body: GenerationFields) -> None:
    if body.prompt_logprobs is not None and body.stream:
        raise RequestError(
            "prompt_logprobs comes with a whole answer only; leave stream out, or use echo with"
            " logprobs on /v1/completions",
            param="prompt_logprobs",
        )


def _logit_bias(value: dict[str, Any] | None) -> dict[int, Any]:
    """The biases by token id; JSON has no integer keys, so ids come as strings."""
    if value is None:
        return {}
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


# -- answers of a given form ---------------------------------------------------------------


def parse_structured(body: GenerationFields) -> StructuredOutputsParams | None:
    """The form that the answer must have; None where any text is allowed."""
    found = [
        params
        for params in (
            _response_format(body.response_format),
            _structured_outputs(body.structured_outputs),
        )
        if params is not None
    ]
    for name, kind in GUIDED.items():
        value = getattr(body, name)
        if value is not None:
            found.append(_structured({kind: value}, name))
    if len(found) > 1:
        raise RequestError(
            f"{found[0].param} and {found[1].param} exclude each other", param=found[1].param
        )
    return found[0] if found else None


def _response_format(value: dict[str, Any] | None) -> StructuredOutputsParams | None:
    name = "response_format"
    kind = value.get("type") if value is not None else "text"
    if value is None or kind == "text":
        return None
    if kind == "json_object":
        schema = value.get("schema")  # as llama.cpp's clients send it
        return _structured({"json_object": True} if schema is None else {"json": schema}, name)
    if kind == "json_schema":
        wrapper = value.get("json_schema")
        if not isinstance(wrapper, dict):
            raise wrong_type(f"{name}.json_schema", "an object", wrapper)
        schema = wrapper.get("schema")
        if not isinstance(schema, dict):
            raise wrong_type(f"{name}.json_schema.schema", "an object", schema)
        return _structured({"json": schema}, name)
    raise unsupported(name, f"{name}.type must be text, json_object or json_schema")


def _structured_outputs(value: dict[str, Any] | None) -> StructuredOutputsParams | None:
    name = "structured_outputs"
    given = {key: item for key, item in (value or {}).items() if item is not None}
    unknown = sorted(given.keys() - set(KINDS))
    if unknown:
        raise unsupported(name, f"{name}.{unknown[0]:.40} is not supported by this server")
    return _structured(given, name) if given else None


def _structured(given: dict[str, Any], name: str) -> StructuredOutputsParams:
    choice = given.get("choice")
    if isinstance(choice, list):
        given = {**given, "choice": tuple(choice)}
    return StructuredOutputsParams(**given, param=name)
