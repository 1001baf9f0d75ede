"""Every field of a request body, described once: what it takes, what it does, where it differs.

`document` turns this into the tables of docs/api.md, and a test compares it with the names that the
parsers ask for, so a field cannot be added without a line here. Limits are those of the code that
checks them. A field that an endpoint refuses or ignores is not described: the parsers' own tables
name those.
"""

from __future__ import annotations

from termgen.api.chat_prompt import MAX_TEMPLATE_KWARGS_BYTES
from termgen.api.completions import DEFAULT_MAX_TOKENS, MAX_CHOICES, MAX_PROMPTS
from termgen.api.hints import EFFORTS
from termgen.api.job import MAX_PING_INTERVAL_S, MIN_PING_INTERVAL_S
from termgen.api.parameter_types import BOTH, CHAT, COMPLETIONS, Group, Parameter
from termgen.api.tools import MAX_TOOLS
from termgen.client import MAX_CHAT_TEMPLATE_CHARS
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
)

EFFORT_WORDS = ", ".join(f"`{word}`" for word in EFFORTS)
HINT = "A hint: what the template does not read is named in `x-termgen-not-used`"
_VLLM = "vLLM"
_OWN = "termgen"

PROMPT = Group(
    "The prompt",
    (
        Parameter(
            "model",
            "a served name",
            "which model; `GET /v1/models` lists the names",
            "the one that is loaded",
        ),
        Parameter(
            "messages",
            "a list of messages",
            "the conversation. Roles `system`, `developer` (the same), `user`, `assistant`, "
            "`tool`; content is a string or a list of `text` parts; `name`, `tool_calls`, "
            "`tool_call_id` and `reasoning_content` (or `reasoning`) go to the template",
            "required",
            (CHAT,),
        ),
        Parameter(
            "prompt",
            "a string, a list of strings, token ids, or a list of those",
            f"up to {MAX_PROMPTS} texts to continue; times `n` at most {MAX_CHOICES} choices",
            "required",
            (COMPLETIONS,),
        ),
        Parameter(
            "echo",
            "true, false",
            "begin the answer with the prompt; with `logprobs`, those of the prompt too",
            endpoints=(COMPLETIONS,),
        ),
        Parameter(
            "suffix",
            "a string; the prompt must be text",
            "what stands behind the answer, for models whose tokenizer has tokens for that "
            "(fill-in-the-middle), and refused for others; excludes `echo`",
            "none",
            (COMPLETIONS,),
        ),
        Parameter(
            "add_generation_prompt",
            "true, false",
            "end the prompt with the beginning of an answer",
            "on",
            (CHAT,),
            _VLLM,
        ),
        Parameter(
            "continue_final_message",
            "true, false",
            "go on with the last message, which must be the assistant's; excludes "
            "`add_generation_prompt`, which is then off",
            endpoints=(CHAT,),
            origin=_VLLM,
        ),
        Parameter(
            "chat_template_kwargs",
            f"an object of at most {MAX_TEMPLATE_KWARGS_BYTES} bytes",
            "variables of the chat template; one that it does not read is refused, unless it is "
            "a hint about thinking",
            "none",
            (CHAT,),
            _VLLM,
        ),
        Parameter(
            "chat_template",
            f"a Jinja template of at most {MAX_CHAT_TEMPLATE_CHARS} characters",
            "used instead of the model's; refused unless the server has "
            "`--trust-request-chat-template`",
            "the model's own",
            (CHAT,),
            _VLLM,
        ),
        Parameter(
            "reasoning_effort",
            EFFORT_WORDS,
            "the template variable of this name; `none` also sets `enable_thinking` to false. "
            f"{HINT}",
            "none",
            (CHAT,),
        ),
        Parameter(
            "reasoning",
            "an object with `effort`, `enabled` or `max_tokens`",
            f"the same, whether to think, and for how many tokens. {HINT}",
            "none",
            (CHAT,),
            "OpenRouter",
        ),
        Parameter(
            "thinking",
            "true, false, or an object: `type` is `enabled`, `disabled` or `adaptive`, "
            "`budget_tokens` a number",
            f"the template variables `enable_thinking`, `thinking` and `thinking_budget`. {HINT}",
            "the template's own",
            (CHAT,),
            "Anthropic",
        ),
        Parameter(
            "enable_thinking",
            "true, false",
            f"the same in Qwen's words. {HINT}",
            "the template's own",
            (CHAT,),
            "Qwen",
        ),
        Parameter(
            "thinking_budget",
            "a number of tokens",
            f"the template variable of this name. {HINT}",
            "none",
            (CHAT,),
            "Qwen",
        ),
        Parameter(
            "think",
            f"true, false, {EFFORT_WORDS}",
            f"the same in Ollama's words. {HINT}",
            "the template's own",
            (CHAT,),
            "Ollama",
        ),
    ),
)

LENGTH = Group(
    "Length and ends",
    (
        Parameter(
            "max_completion_tokens",
            "1 to what the context leaves",
            "longest answer, in tokens. More is an error, or is cut to that with the server's "
            "`--clamp-max-tokens`, which the response header `x-termgen-max-tokens` tells",
            "what the context leaves",
            (CHAT,),
        ),
        Parameter(
            "max_tokens",
            "the same; on completions 0 too, with `echo`",
            "its older name; the newer one wins",
            f"on completions {DEFAULT_MAX_TOKENS}",
        ),
        Parameter(
            "min_tokens",
            "0 to `max_tokens`",
            "no end before so many tokens; stop strings do not count until then",
            "0",
            origin=_VLLM,
        ),
        Parameter(
            "stop",
            f"a string or up to {MAX_STOP_STRINGS}, of 1 to {MAX_STOP_STRING_CHARS} characters",
            "end before this text, wherever tokens begin and end; `stop_reason` names it",
            "none",
        ),
        Parameter(
            "stop_token_ids",
            f"up to {MAX_STOP_TOKEN_IDS} token ids",
            "end at these tokens too",
            "none",
            origin=_VLLM,
        ),
        Parameter(
            "include_stop_str_in_output",
            "true, false",
            "keep the stop string, or the text of the stop token, in the answer",
            origin=_VLLM,
        ),
        Parameter(
            "ignore_eos",
            "true, false",
            "go on past the model's end-of-sequence tokens",
            origin=_VLLM,
        ),
    ),
)

SAMPLING = Group(
    "How tokens are drawn",
    (
        Parameter(
            "n",
            f"1 to {MAX_N}",
            "how many answers. Their prompt is computed once; greedy ones are copies of one. Those "
            "beyond the engine's `--max-num-seqs` wait in its queue",
            "1",
        ),
        Parameter("best_of", "the value of `n`", "nothing but that", "`n`"),
        Parameter(
            "seed",
            "a 64-bit integer",
            "a draw depends on the seed, the position and the model's numbers alone, whatever else "
            "the server does. Answer `i` uses `seed + i`",
            "random",
        ),
        Parameter(
            "temperature",
            "0 to 2",
            f"divides the logits; below {GREEDY_EPSILON:g} the likeliest token is taken",
            "the model's own, else 1",
        ),
        Parameter(
            "top_p",
            "above 0, up to 1",
            "the likeliest tokens that make up this probability",
            "the model's own, else 1",
        ),
        Parameter(
            "top_k",
            "-1 or more",
            "the `top_k` likeliest tokens; 0 or -1: all",
            "the model's own, else 0",
            origin=_VLLM,
        ),
        Parameter(
            "min_p",
            "0 to 1",
            "tokens of at least this share of the likeliest one's probability",
            "the model's own, else 0",
            origin=_VLLM,
        ),
        Parameter(
            "presence_penalty",
            "-2 to 2",
            "taken from the logits of tokens that the answer has",
            "0",
        ),
        Parameter(
            "frequency_penalty",
            "-2 to 2",
            "the same for each time they occur",
            "0",
        ),
        Parameter(
            "repetition_penalty",
            "above 0, up to 10",
            "divides positive and multiplies negative logits of tokens in the prompt or the answer",
            "the model's own, else 1",
            origin=_VLLM,
        ),
        Parameter(
            "logit_bias",
            f"an object of up to {MAX_LOGIT_BIAS} token ids and numbers",
            f"added to the logits of these tokens; cut to -{MAX_BIAS:g} to {MAX_BIAS:g}",
            "none",
        ),
        Parameter(
            "allowed_token_ids",
            "one token id or more",
            "no other token is drawn",
            "all",
            origin=_VLLM,
        ),
        Parameter(
            "bad_words",
            f"a string or up to {MAX_BAD_WORDS}, of 1 to {MAX_BAD_WORD_CHARS} characters",
            "texts that are not written, alone or after a space, as the tokenizer spells them: "
            "another spelling of the same text is not seen",
            "none",
            origin=_VLLM,
        ),
    ),
)

CONSTRAINTS = Group(
    "Answers of a given form",
    (
        Parameter(
            "response_format",
            "`text`, `json_object` or `json_schema` with its schema",
            "JSON that the answer is held to; see [structured outputs](structured-outputs.md)",
            "text",
        ),
        Parameter(
            "structured_outputs",
            "an object with one of `json`, `json_object`, `regex`, `choice`, `grammar`",
            "a form that the answer is held to",
            "none",
            origin=_VLLM,
        ),
        Parameter("guided_json", "a schema", "the same in vLLM's older words", "none", BOTH, _VLLM),
        Parameter("guided_regex", "a string", "likewise", "none", BOTH, _VLLM),
        Parameter("guided_choice", "a list", "likewise", "none", BOTH, _VLLM),
        Parameter("guided_grammar", "a string", "likewise", "none", BOTH, _VLLM),
        Parameter(
            "tools",
            f"up to {MAX_TOOLS} functions",
            "what the model may call; see [tool calls](structured-outputs.md#tool-calls)",
            "none",
            (CHAT,),
        ),
        Parameter(
            "tool_choice",
            "`none`, `auto`, `required` or a function",
            "whether it must; calls that must come are enforced",
            "auto",
            (CHAT,),
        ),
        Parameter(
            "parallel_tool_calls",
            "true, false",
            "whether several calls may come at once",
            "on",
            (CHAT,),
        ),
    ),
)

ANSWER = Group(
    "What the answer tells",
    (
        Parameter(
            "logprobs",
            f"on chat true or false; on completions 0 to {MAX_LOGPROBS}",
            "log-probabilities of the answer's tokens, before temperature and all else that "
            "changes them; on completions with so many alternatives",
        ),
        Parameter(
            "top_logprobs",
            f"0 to {MAX_LOGPROBS}; needs `logprobs`",
            "so many alternatives for each token",
            "0",
            (CHAT,),
        ),
        Parameter(
            "prompt_logprobs",
            f"0 to {MAX_LOGPROBS}; not in a stream",
            "the same for the tokens of the prompt, by token id; null for the first. All of the "
            "prompt is computed for it, whatever the prefix cache holds",
            origin=_VLLM,
        ),
        Parameter(
            "skip_special_tokens",
            "true, false",
            "leave special tokens out of the text",
            "on",
            origin=_VLLM,
        ),
        Parameter(
            "return_token_ids",
            "true, false",
            "add `token_ids` and `prompt_token_ids`",
            origin=_VLLM,
        ),
        Parameter(
            "return_tokens_as_token_ids",
            "true, false",
            "name tokens `token_id:N` in log-probabilities",
            origin=_VLLM,
        ),
        Parameter(
            "include_timings",
            "true, false",
            "add `termgen.timings`: of each choice the seconds in the queue, to the first token "
            "and in all, and its tokens per second",
            origin=_OWN,
        ),
        Parameter("stream", "true, false", "send the answer as server-sent events"),
        Parameter(
            "stream_options",
            "an object; needs `stream`",
            "`include_usage`: a last event with the counts; `continuous_usage_stats`: counts with "
            "every event; `include_obfuscation` is taken, and nothing is padded",
            "none",
        ),
        Parameter(
            "sse_ping_interval",
            f"0, or {MIN_PING_INTERVAL_S} to {MAX_PING_INTERVAL_S} seconds; needs `stream`",
            "silence in this stream before a comment line that keeps it open; 0: never",
            "the server's `--sse-ping-interval`",
            origin=_OWN,
        ),
    ),
)

ENGINE = Group(
    "How the engine treats the request",
    (
        Parameter(
            "priority",
            "an integer of 32 bits",
            "lower runs first and is preempted last; needs `--scheduling-policy priority`, and is "
            "refused without it. Below 0 is for administrators",
            "0",
            origin=_VLLM,
        ),
        Parameter(
            "cache_salt",
            "1 to 128 characters of `A-Z a-z 0-9 _ -`",
            "cached prefixes are shared only with requests of the same salt",
            "none",
            origin=_VLLM,
        ),
    ),
)

GROUPS = (PROMPT, LENGTH, SAMPLING, CONSTRAINTS, ANSWER, ENGINE)


def described(endpoint: str) -> dict[str, Parameter]:
    """Fields of an endpoint by name, those included that it does not take yet."""
    found = (p for group in GROUPS for p in group.parameters)
    return {p.name: p for p in found if endpoint in p.endpoints}
