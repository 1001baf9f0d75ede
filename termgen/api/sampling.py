"""Fields of the endpoints that generate: how to sample, when to stop, which form an answer has.

`SharedFields` and `GenerationFields` declare them, with the words of the table of sampling
parameters; numbers of the device's columns are made from its rows. `parse_sampling` makes
`SamplingParams` of them, which check the ranges. Defaults come from the model's generation config
where the client gives none. `parse_structured` reads OpenAI's `response_format`, vLLM's
`structured_outputs` and its older `guided_*` fields, of which a request gives one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

from msgspec import Meta, Struct, defstruct

from termgen.api.errors import unsupported
from termgen.api.fields import (
    ANSWER,
    ENGINE,
    FORM,
    PROMPT,
    SAMPLING,
    Check,
    Group,
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
from termgen.vocabulary.sampling.row import MAX_INT, VLLM, Integers, Neutral, Row
from termgen.vocabulary.sampling_params import (
    COLUMNS,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_N,
    TABLE,
    UNSUPPORTED,
    SamplingParams,
)
from termgen.vocabulary.structured_outputs import KINDS, StructuredOutputsParams

MIN_PING_INTERVAL_S = 1
MAX_PING_INTERVAL_S = 3600
_TOKEN_ID = re.compile(r"[0-9]{1,10}")

PositiveInt = Annotated[int, Meta(ge=1, le=MAX_INT)]
TokenLimit = Annotated[int, Meta(ge=-1, le=MAX_INT)]
"""A limit for tokens, or -1 for none, as llama.cpp's clients write it."""
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
NumLogprobs = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]

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


def doc(name: str) -> Meta:
    """The words of a parameter's row, for docs/api.md."""
    row = TABLE[name]
    group = Group[row.group]
    return group(row.meaning, row.values_words, row.words_of_default, row.origin)


def _harmless(neutral: Neutral) -> Check:
    """Check for values that ask for nothing."""
    if neutral is None:
        return is_empty
    return one_of(*neutral) if neutral else never


def number_field(row: Row) -> tuple[str, Any, None]:
    """The field of a body for a number that has a column, None where it is not given. Limits of a
    real number are checked by `SamplingParams`."""
    kind: Any = float
    if isinstance(row.range, Integers):
        low = min(row.range.low, row.range.low if row.off_too is None else row.off_too)
        kind = Annotated[int, Meta(ge=low, le=row.range.high)]
    return row.name, Annotated[kind | None, doc(row.name)], None


OTHERS_WORDS: dict[str, Check] = {
    # llama.cpp
    "grammar": Instead("structured_outputs.grammar"),
    "grammar_lazy": Instead("tool_choice"),
    "json_schema": Instead("response_format"),
    "n_probs": Instead("top_logprobs"),
    "repeat_last_n": Instead("repetition_penalty, which looks at all tokens", one_of(-1)),
    "samplers": Instead("temperature, top_p, top_k and min_p"),
    # Ollama
    "format": Instead("response_format"),
    "num_ctx": Instead("the option --max-model-len of the server", never),
    "options": Instead("its fields themselves, at the top of the body"),
    # SGLang, TGI, TabbyAPI, transformers
    "ebnf": Instead("structured_outputs.grammar"),
    "grammar_string": Instead("structured_outputs.grammar"),
    "regex": Instead("structured_outputs.regex"),
    "regex_pattern": Instead("structured_outputs.regex"),
    "do_sample": Instead("temperature: 0 for greedy", is_true),
    "structural_tag": Instead("tools"),
    "guided_whitespace_pattern": Instead("structured_outputs.regex"),
    "template_vars": Instead("chat_template_kwargs"),
    # KoboldAI, text-generation-webui, Aphrodite
    **dict.fromkeys(
        ("penalty_range", "rep_pen_range", "repetition_penalty_range"),
        Instead("repetition_penalty, which looks at all tokens", one_of(-1, 0)),
    ),
    "custom_token_bans": Instead("logit_bias, with -100"),
    **dict.fromkeys(
        ("sampler_order", "sampler_priority"), Instead("temperature, top_p, top_k and min_p")
    ),
    "max_context_length": Instead("the option --max-model-len of the server", never),
    # Mistral
    "safe_prompt": is_empty,
    **{
        word: Instead(row.name, _harmless(neutral))
        for row in TABLE.values()
        for word, neutral in row.others.items()
    },
    **{word: _harmless(neutral) for word, neutral in UNSUPPORTED.items()},
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


class ConstraintFields(Struct, frozen=True):
    """Parameters whose fields have a shape or a default of their own, on every endpoint that
    generates, and how the engine treats the request."""

    seed: Annotated[Seed | None, doc("seed")] = None
    logit_bias: Annotated[
        dict[str, Any] | None,
        wanted("an object of token ids and numbers"),
        doc("logit_bias"),
    ] = None
    allowed_token_ids: Annotated[list[int] | None, doc("allowed_token_ids")] = None
    bad_words: Annotated[str | list[str], doc("bad_words")] = []
    min_tokens: Annotated[int, Meta(ge=0, le=MAX_INT), doc("min_tokens")] = 0
    stop_token_ids: Annotated[list[int], doc("stop_token_ids")] = []
    ignore_eos: Annotated[bool, doc("ignore_eos")] = False
    structured_outputs: Annotated[dict[str, Any] | None, doc("structured_outputs")] = None
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


if TYPE_CHECKING:
    NumberFields = ConstraintFields
else:
    NumberFields = defstruct(
        "NumberFields",
        map(number_field, COLUMNS.values()),
        bases=(ConstraintFields,),
        namespace={"__doc__": "Numbers of the device's columns, made from their rows."},
        module=__name__,
        frozen=True,
    )


class SharedFields(NumberFields, frozen=True):
    """Fields of every endpoint that generates, with those of its bases."""

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


class StreamOptions(Struct, frozen=True):
    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False
    """Padding against eavesdroppers: never sent."""


class GenerationFields(SharedFields, frozen=True):
    """Fields that /v1/chat/completions and /v1/completions share."""

    max_tokens: Annotated[TokenLimit | None, doc("max_tokens")] = None
    stop: Annotated[str | list[str], doc("stop")] = []
    include_stop_str_in_output: Annotated[bool, doc("include_stop_str_in_output")] = False
    n: Annotated[int, Meta(ge=1, le=MAX_N), doc("n")] = 1
    truncate_prompt_tokens: Annotated[TokenLimit | None, doc("truncate_prompt_tokens")] = None
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
    prompt_logprobs: Annotated[NumLogprobs | None, doc("prompt_logprobs")] = None
    skip_special_tokens: Annotated[bool, doc("skip_special_tokens")] = True
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
    numbers: dict[str, Any] = {}
    for name in COLUMNS:
        value = getattr(body, name)
        if value is None:
            value = defaults.get(name)
        if value is not None:
            numbers[name] = value
    if body.best_of is not None and body.best_of != body.n:
        raise unsupported("best_of", "best_of is supported only when it equals n")
    allowed = body.allowed_token_ids
    return SamplingParams(
        n=body.n,
        seed=body.seed,
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
        **numbers,
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
        strict = wrapper.get("strict") or False
        if not isinstance(strict, bool):
            raise wrong_type(f"{name}.json_schema.strict", "true or false", strict)
        return _structured({"json": schema, "strict": strict}, name)
    raise unsupported(name, f"{name}.type must be text, json_object or json_schema")


def _structured_outputs(value: dict[str, Any] | None) -> StructuredOutputsParams | None:
    name = "structured_outputs"
    given = {key: item for key, item in (value or {}).items() if item is not None}
    unknown = sorted(given.keys() - {*KINDS, "strict"})
    if unknown:
        raise unsupported(name, f"{name}.{unknown[0]:.40} is not supported by this server")
    return _structured(given, name) if given else None


def _structured(given: dict[str, Any], name: str) -> StructuredOutputsParams:
    choice = given.get("choice")
    if isinstance(choice, list):
        given = {**given, "choice": tuple(choice)}
    return StructuredOutputsParams(**{"strict": False, **given}, param=name)
