"""Sampling parameters of a request: the one table of them. Vocabulary.

A field of `SamplingParams` declares its `Row`, from which all else derives: `TABLE` has the rows.
A new number that has a column on the device is added here and in the sampler alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, fields
from operator import attrgetter

from termgen.errors import RequestError
from termgen.vocabulary.sampling.row import (
    LLAMA_CPP,
    VLLM,
    Integers,
    Neutral,
    Reals,
    Row,
    check_int,
    is_finite,
    param,
    row_of,
)
from termgen.vocabulary.structured_outputs import StructuredOutputsParams

GREEDY_EPSILON = 1e-5
"""Temperatures below this mean greedy decoding, as in vLLM."""

MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 256
MAX_STOP_TOKEN_IDS = 128
MAX_EOS_IDS = 128
"""Limit of a model's end tokens. The device has a column for each, and for a request's stop ids."""
MAX_N = 128
MAX_LOGIT_BIAS = 1024
MAX_BIAS = 100.0
"""Larger values are clamped, as OpenAI documents this range."""
MAX_BAD_WORDS = 64
MAX_BAD_WORD_CHARS = 256

UNSUPPORTED: Mapping[str, Neutral] = {
    **dict.fromkeys(("mirostat", "dry_multiplier", "xtc_probability", "dynatemp_range")),
    **dict.fromkeys(("no_repeat_ngram_size", "smoothing_factor", "top_a")),
    **dict.fromkeys(("epsilon_cutoff", "eta_cutoff", "penalty_alpha")),
    **dict.fromkeys(("dynamic_temperature", "mirostat_mode", "repetition_decay")),
    **dict.fromkeys(("skew", "temperature_last", "response_prefix")),
    **dict.fromkeys(("diversity_penalty", "sequence_bias", "suppress_tokens")),
    **dict.fromkeys(("typical_p", "tfs_z", "tfs", "num_beams", "guidance_scale"), (1,)),
    **dict.fromkeys(("typical", "cfg_scale", "encoder_repetition_penalty"), (1,)),
    **dict.fromkeys(("dynatemp_low", "dynatemp_high", "dynatemp_exponent"), (0, 1)),
    **dict.fromkeys(("min_temp", "max_temp", "temp_exponent", "rep_pen_slope"), (0, 1)),
    "negative_prompt": None,
    "lora": None,
}
"""Other servers' ways to sample that are not supported here, and their neutral values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of one request; names and meaning follow vLLM.

    Immutable. The constructor checks everything that needs no model; `validate_for` checks what
    depends on the vocabulary. Raises `RequestError` naming the field.
    """

    n: int = param(
        1,
        Row(
            meaning="how many answers. Their prompt is computed once; greedy ones are copies of "
            "one. Those beyond the engine's `--max-num-seqs` wait in its queue",
            range=Integers(1, MAX_N),
            others={"num_return_sequences": (1,)},
        ),
    )
    """Completion `i` of a seeded request uses `seed + i`."""
    temperature: float = param(
        1.0,
        Row(
            meaning=f"divides the logits; below {GREEDY_EPSILON:g} the likeliest token is taken",
            help="how much chance decides, 0 to 2; at 0 the likeliest token is always taken",
            panel="higher is more random; 0: none",
            range=Reals(0.0, 2.0),
            in_gguf="temp",
            column="float32",
        ),
    )
    top_p: float = param(
        1.0,
        Row(
            meaning="the likeliest tokens that make up this probability",
            help="choose only among the likeliest tokens whose probabilities add up to this, above "
            "0 to 1; 1 leaves none out",
            panel="keep the likeliest, up to this",
            range=Reals(0.0, 1.0, is_open=True),
            in_gguf="top_p",
            others={"p": None},
            column="float32",
            part="cut",
        ),
    )
    top_k: int = param(
        0,
        Row(
            meaning="the `top_k` likeliest tokens; 0 or -1: all",
            help="choose only among this many likeliest tokens, 0 or more; 0 leaves none out",
            panel="keep this many tokens; 0: all",
            range=Integers(0),
            off_too=-1,
            origin=VLLM,
            llama_cpp="top_k",
            in_gguf="top_k",
            others={"k": None},
            column="int32",
            part="cut",
        ),
    )
    min_p: float = param(
        0.0,
        Row(
            meaning="tokens of at least this share of the likeliest one's probability",
            help="leave out tokens whose probability is below this share of the likeliest "
            "token's, 0 to 1",
            panel="drop below this part of the top",
            range=Reals(0.0, 1.0),
            origin=VLLM,
            llama_cpp="min_p",
            in_gguf="min_p",
            column="float32",
            part="cut",
        ),
    )
    top_n_sigma: float = param(
        0.0,
        Row(
            meaning="tokens whose logit is at most so many standard deviations of the logits below "
            "the largest, whatever the temperature; 0 or -1: all",
            values="0.001 to 100, or 0 or -1",
            help="leave out tokens whose logit is more than this many standard deviations below "
            "the largest, 0 to 100; 0 leaves none out (default: 0)",
            panel="keep so many deviations; 0: all",
            range=Reals(0.0, 100.0, least=0.001),
            off_too=-1,
            origin=LLAMA_CPP,
            llama_cpp="top_n_sigma",
            others={"nsigma": (-1, 0)},
            column="float32",
            part="cut",
        ),
    )
    seed: int | None = param(
        None,
        Row(
            meaning="a token depends only on the seed, the position and the model's logits, "
            "whatever else the server does. Answer `i` uses `seed + i`",
            values="a 64-bit integer",
            default_words="random",
            panel="same seed, same answer",
            range=Integers(-(2**63), 2**63 - 1),
            others={"random_seed": None, "sampler_seed": (-1,)},
        ),
    )
    """Random numbers depend on (seed, position) only. None: a random seed."""
    repetition_penalty: float = param(
        1.0,
        Row(
            meaning="divides positive and multiplies negative logits of tokens in the prompt or "
            "the answer",
            help="make tokens of the prompt and of the answer so far less likely, above 0 to 10; 1 "
            "changes nothing, below 1 makes them likelier",
            panel="above 1 avoids repeated words",
            range=Reals(0.0, 10.0, is_open=True),
            origin=VLLM,
            llama_cpp="repeat_penalty",
            in_gguf="penalty_repeat",
            others=dict.fromkeys(("repeat_penalty", "rep_pen", "repeat_pen"), (1,)),
            column="float32",
            part="penalty",
        ),
    )
    presence_penalty: float = param(
        0.0,
        Row(
            meaning="subtracted from the logits of tokens that the answer has",
            help="lower the logit of each token that the answer has so far by this, -2 to 2, "
            "however often it occurs (default: 0)",
            panel="penalty on words used, once",
            range=Reals(-2.0, 2.0),
            others=dict.fromkeys(("pres_pen", "presence_pen")),
            column="float32",
            part="penalty",
        ),
    )
    frequency_penalty: float = param(
        0.0,
        Row(
            meaning="the same for each time that a token occurs",
            help="lower the logit of each token that the answer has so far by this for each time "
            "it occurs, -2 to 2 (default: 0)",
            panel="penalty on words, for each use",
            range=Reals(-2.0, 2.0),
            others=dict.fromkeys(("freq_pen", "frequency_pen")),
            column="float32",
            part="penalty",
        ),
    )
    stop: tuple[str, ...] = param(
        (),
        Row(
            group="LENGTH",
            meaning="end before this text, wherever tokens begin and end; `stop_reason` names it",
            values=f"a string or up to {MAX_STOP_STRINGS}, of 1 to {MAX_STOP_STRING_CHARS} "
            "characters",
            help="end the answer before this text; may be repeated, up to 16 times",
            panel="ends the answer; a,b or \\n",
            others=dict.fromkeys(
                ("stop_sequences", "stopping_strings", "stop_sequence", "stop_strings")
            )
            | {"custom_stopping_strings": None},
        ),
    )
    stop_token_ids: tuple[int, ...] = param(
        (),
        Row(
            group="LENGTH",
            meaning="end at these tokens too",
            values=f"up to {MAX_STOP_TOKEN_IDS} token ids",
            help="end the answer at the token with this id; may be repeated, up to 128 times",
            origin=VLLM,
        ),
    )
    ignore_eos: bool = param(
        False,
        Row(
            group="LENGTH",
            meaning="go on past the model's end-of-sequence tokens",
            help="go on when the model ends its answer, up to --max-tokens (default: no)",
            origin=VLLM,
            others=dict.fromkeys(("ban_eos_token", "use_default_badwordsids")),
        ),
    )
    max_tokens: int | None = param(
        None,
        Row(
            group="LENGTH",
            meaning="longest answer, in tokens. More is cut to that, which the response header "
            "`x-termgen-max-tokens` reports; an error with the server's `--no-clamp-max-tokens`",
            values="1 to what the context leaves, or -1 for all of it; on completions 0 too, with "
            "`echo`",
            default_words="what the context leaves; on completions 16",
            help="longest answer in tokens, 1 or more",
            panel="longest answer; empty: no limit",
            range=Integers(1),
            others={
                **dict.fromkeys(("n_predict", "num_predict"), (-1,)),
                **dict.fromkeys(("max_length", "max_new_tokens", "max_output_tokens"), ()),
            },
        ),
    )
    """None: limited by the context only."""
    min_tokens: int = param(
        0,
        Row(
            group="LENGTH",
            meaning="the answer does not end before so many tokens; stop strings have no effect "
            "until then",
            values="0 to `max_tokens`",
            help="shortest answer in tokens: the model cannot end it before (default: 0)",
            is_kept=True,
            range=Integers(0),
            origin=VLLM,
            others=dict.fromkeys(("min_length", "min_new_tokens")),
        ),
    )
    logprobs: int | None = param(
        None,
        Row(
            group="ANSWER",
            meaning="log-probabilities of the answer's tokens, before temperature and all else "
            "that changes them; on completions with so many alternatives",
            values=f"on chat true or false; on completions 0 to {MAX_LOGPROBS}",
            default_words="off",
            help="with --json: the log-probability of each token of the answer, and of this many "
            "likeliest tokens in its place, 0 to 20 (default: none)",
            range=Integers(0, MAX_LOGPROBS),
        ),
    )
    """Most likely tokens to report per position (0: only the sampled one)."""
    skip_special_tokens: bool = param(
        True,
        Row(
            group="ANSWER",
            meaning="leave special tokens out of the text",
            help="leave the tokenizer's special tokens, such as <|im_end|>, out of the text "
            "(default: yes)",
            origin=VLLM,
        ),
    )
    include_stop_str_in_output: bool = param(
        False,
        Row(
            group="LENGTH",
            meaning="keep the stop string, or the text of the stop token, in the answer",
            help="end the answer with the text of --stop that ended it (default: no)",
            origin=VLLM,
        ),
    )
    structured_outputs: StructuredOutputsParams | None = param(
        None,
        Row(
            group="FORM",
            meaning="a form that the answer is constrained to",
            values="an object with one of `json`, `json_object`, `regex`, `choice`, `grammar`",
            origin=VLLM,
        ),
    )
    """Grammar of the answer, which ends where nothing more can follow, whatever `min_tokens`."""
    prompt_logprobs: int | None = param(
        None,
        Row(
            group="ANSWER",
            meaning="log-probabilities of the prompt's tokens, by token id; null for the first. "
            "All of the prompt is computed for it, whatever the prefix cache holds",
            values=f"0 to {MAX_LOGPROBS}; not in a stream",
            default_words="off",
            help="with --json: the log-probability of each token of the prompt, and of this many "
            "likeliest tokens in its place, 0 to 20 (default: none)",
            range=Integers(0, MAX_LOGPROBS),
            origin=VLLM,
        ),
    )
    """Like `logprobs`, for the prompt's tokens. The first has none, as nothing precedes it."""
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = param(
        (),
        Row(
            meaning=f"added to the logits of these tokens; cut to -{MAX_BIAS:g} to {MAX_BIAS:g}",
            values=f"an object of up to {MAX_LOGIT_BIAS} token ids and numbers",
        ),
    )
    """Added to the logits of these ids. Stored as pairs, sorted by id."""
    allowed_token_ids: tuple[int, ...] | None = param(
        None,
        Row(
            meaning="only these tokens are sampled",
            values="one token id or more",
            default_words="all",
            help="choose only among the tokens with these ids; give one, and repeat the flag for "
            "more (default: all)",
            origin=VLLM,
        ),
    )
    """The only ids that may be sampled. None: any."""
    bad_words: tuple[str, ...] = param(
        (),
        Row(
            meaning="texts that are not written, alone or after a space, as the tokenizer spells "
            "them: another spelling of the same text is not seen",
            values=f"a string or up to {MAX_BAD_WORDS}, of 1 to {MAX_BAD_WORD_CHARS} characters",
            help="never write this word; may be repeated, up to 64 times",
            origin=VLLM,
            others=dict.fromkeys(
                ("bad_words_ids", "banned_tokens", "banned_strings", "banned_phrases")
            ),
        ),
    )
    """Texts that must not be generated, matched as token sequences."""
    truncate_prompt_tokens: int | None = param(
        None,
        Row(
            group="PROMPT",
            meaning="keep only so many tokens at the end of the prompt, of a chat after its "
            "template; -1: as many as leave the context room for `max_tokens`, or for one token. "
            "`prompt_tokens` counts those kept. Excludes `echo` and `suffix`",
            values="1 to one less than the context, or -1",
            default_words="all, and an error where they do not fit",
            help="keep only this many tokens at the end of the prompt, -1 or more but not 0; -1 "
            "keeps as many as leave room for --max-tokens (default: a prompt that does not fit is "
            "an error)",
            range=Integers(-1),
            origin=VLLM,
        ),
    )
    """Keep only so many tokens at the end of the prompt; -1: as many as leave the context room for
    `max_tokens`. None: a prompt that does not fit is an error."""

    def __post_init__(self) -> None:
        set_ = object.__setattr__
        for name in ("stop", "bad_words", "stop_token_ids"):
            set_(self, name, _as_tuple(name, getattr(self, name)))
        set_(self, "logit_bias", _bias_pairs(self.logit_bias))
        if self.allowed_token_ids is not None:
            set_(self, "allowed_token_ids", _sorted_ids(self.allowed_token_ids))
        for name, off in _OFF_TOO:
            if getattr(self, name) == off:
                set_(self, name, TABLE[name].default)
        self._check_numbers()
        self._check_stops()
        self._check_words()

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_EPSILON

    @property
    def has_cuts(self) -> bool:
        """True if the tail of the distribution is cut."""
        return _cuts_of(self) != _NEUTRAL_CUTS

    @property
    def has_penalties(self) -> bool:
        return _penalties_of(self) != _NEUTRAL_PENALTIES

    @property
    def bias_pairs(self) -> tuple[tuple[int, float], ...]:
        """`logit_bias` as stored."""
        assert isinstance(self.logit_bias, tuple)
        return self.logit_bias

    @property
    def edits_logits(self) -> bool:
        """True if the logits of single ids are changed or masked before all other sampling."""
        has_limit = self.allowed_token_ids is not None
        return has_limit or bool(self.logit_bias) or bool(self.bad_words)

    def _check_numbers(self) -> None:
        for name, row in TABLE.items():
            value = getattr(self, name)
            if value is not row.default:  # most are, and take no time so
                row.check(value)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens ({self.min_tokens}) exceeds max_tokens ({self.max_tokens})",
                param="min_tokens",
            )
        if self.truncate_prompt_tokens == 0:
            name = "truncate_prompt_tokens"
            raise RequestError(f"{name} must be 1 or more, or -1, not 0", param=name)
        wanted = self.structured_outputs
        if wanted is not None and not isinstance(wanted, StructuredOutputsParams):
            raise RequestError(
                "structured_outputs must be a StructuredOutputsParams", param="structured_outputs"
            )

    def _check_stops(self) -> None:
        if len(self.stop) > MAX_STOP_STRINGS:
            raise RequestError(f"at most {MAX_STOP_STRINGS} stop strings are allowed", param="stop")
        for s in self.stop:
            if not isinstance(s, str) or not s or len(s) > MAX_STOP_STRING_CHARS:
                raise RequestError(
                    f"each stop string must have 1 to {MAX_STOP_STRING_CHARS} characters",
                    param="stop",
                )
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise RequestError(
                f"at most {MAX_STOP_TOKEN_IDS} stop token ids are allowed", param="stop_token_ids"
            )
        for t in self.stop_token_ids:
            check_int("stop_token_ids", t, 0, 2**31 - 1)

    def _check_words(self) -> None:
        if len(self.bad_words) > MAX_BAD_WORDS:
            raise RequestError(f"at most {MAX_BAD_WORDS} bad words are allowed", param="bad_words")
        for word in self.bad_words:
            fits = isinstance(word, str) and 0 < len(word) <= MAX_BAD_WORD_CHARS
            if not fits or not word.strip():
                raise RequestError(
                    f"each bad word must have 1 to {MAX_BAD_WORD_CHARS} characters that are not"
                    " all spaces",
                    param="bad_words",
                )

    def describe(self) -> str:
        """Values that differ from the defaults, for people: `temperature 0.7 max_tokens 64`. Texts
        and lists appear only by their length, as requests are private."""
        parts = []
        for f in fields(self):
            value = getattr(self, f.name)
            if value != f.default:
                parts.append(f"{f.name} {_shown(value)}")
        return " ".join(parts)

    def validate_for(self, *, vocab_size: int) -> None:
        """Check what depends on the model. Raises `RequestError` naming the field."""
        ids_of = {
            "stop_token_ids": self.stop_token_ids,
            "logit_bias": [token_id for token_id, _ in self.bias_pairs],
            "allowed_token_ids": self.allowed_token_ids or (),
        }
        for name, ids in ids_of.items():
            largest = max(ids, default=0)
            if largest >= vocab_size:
                raise RequestError(
                    f"{name}: token id {largest} is outside the vocabulary of {vocab_size}",
                    param=name,
                )


def _shown(value: object) -> str:
    if isinstance(value, StructuredOutputsParams):
        return f"({value.kind})"
    if isinstance(value, float):
        return f"{value:g}"
    return f"({len(value)})" if isinstance(value, Sized) else str(value)


def _bias_pairs(given: object) -> tuple[tuple[int, float], ...]:
    """Pairs from a mapping or pairs, sorted by id, with values clamped to +-MAX_BIAS."""
    name = "logit_bias"
    pairs = given.items() if isinstance(given, Mapping) else () if given is None else given
    if not isinstance(pairs, Iterable) or isinstance(pairs, str):
        raise RequestError(f"{name} must map token ids to numbers", param=name)
    biases: dict[int, float] = {}
    for pair in pairs:
        if not isinstance(pair, Sequence) or isinstance(pair, str) or len(pair) != 2:
            raise RequestError(f"{name} must map token ids to numbers", param=name)
        token_id, bias = pair
        check_int(name, token_id, 0, 2**31 - 1)
        if not is_finite(bias):
            raise RequestError(f"{name} must map token ids to finite numbers", param=name)
        biases[token_id] = max(-MAX_BIAS, min(MAX_BIAS, float(bias)))
    if len(biases) > MAX_LOGIT_BIAS:
        raise RequestError(f"{name} may name at most {MAX_LOGIT_BIAS} token ids", param=name)
    return tuple(sorted(biases.items()))


def _as_tuple(name: str, given: object) -> tuple[object, ...]:
    """A tuple from a list, a single string, or None (empty)."""
    if given is None or isinstance(given, str):
        return () if given is None else (given,)
    if not isinstance(given, Iterable) or isinstance(given, Mapping):
        raise RequestError(f"{name} must be a list, not {given!r:.60}", param=name)
    return tuple(given)


def _sorted_ids(given: object) -> tuple[int, ...]:
    name = "allowed_token_ids"
    if not isinstance(given, Iterable) or isinstance(given, (str, Mapping)):
        raise RequestError(f"{name} must be a list of token ids", param=name)
    ids = set()
    for token_id in given:
        check_int(name, token_id, 0, 2**31 - 1)
        ids.add(token_id)
    if not ids:
        raise RequestError(f"{name} must name at least one token id", param=name)
    return tuple(sorted(ids))


TABLE: Mapping[str, Row] = {f.name: row_of(f) for f in fields(SamplingParams)}
"""The rows, by name, in the order of their fields."""
COLUMNS: Mapping[str, Row] = {name: row for name, row in TABLE.items() if row.column is not None}
"""Those that have a column on the device, and a field of request bodies made from the row."""
CUTS: Mapping[str, float] = {n: row.default for n, row in TABLE.items() if row.part == "cut"}
"""Parameters that cut the tail of the distribution -> the neutral value."""
PENALTIES: Mapping[str, float] = {
    name: row.default for name, row in TABLE.items() if row.part == "penalty"
}
"""Parameters that look at the tokens so far -> the neutral value."""
RECOMMENDED: Mapping[str, str] = {
    name: row.in_gguf for name, row in TABLE.items() if row.in_gguf is not None
}
"""Parameters for which a model's files may recommend a value -> their names in GGUF files."""
_cuts_of, _NEUTRAL_CUTS = attrgetter(*CUTS), tuple(CUTS.values())
_penalties_of, _NEUTRAL_PENALTIES = attrgetter(*PENALTIES), tuple(PENALTIES.values())
_OFF_TOO = tuple((name, row.off_too) for name, row in TABLE.items() if row.off_too is not None)
