"""/v1/completions: a body to one `Job` per prompt, deltas to chunks, deltas to a whole response.

Choice `p * n + i` is completion i of prompt p.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from msgspec import Meta

from termgen.api.fields import (
    PROMPT,
    Endpoint,
    Served,
    is_empty,
    is_int,
    is_true,
    never,
    read,
    wanted,
    wrong_type,
)
from termgen.api.job import (
    AnswerStream,
    Choice,
    Job,
    ResponseOptions,
    Tally,
    end_fields,
    parse_options,
)
from termgen.api.logprobs import TextLogprobs, prompt_logprobs_list
from termgen.api.rows import GeneratingRow
from termgen.api.sampling import (
    HARMLESS,
    REFUSED,
    GenerationFields,
    NumLogprobs,
    check_prompt_logprobs,
    doc,
    parse_sampling,
    token_limit,
)
from termgen.api.sse import CHAT_WIRE
from termgen.client import FillPrompt, GenerationClient, Prompt, TokenDelta, TokenLogprob
from termgen.errors import RequestError
from termgen.vocabulary.sampling.row import MAX_INT

MAX_PROMPTS = 128
MAX_CHOICES = 1024
"""Limit for prompts times `n`."""
DEFAULT_MAX_TOKENS = 16

PROMPT_TYPES = "a string, a list of strings, token ids, or a list of lists of token ids"


class CompletionFields(GenerationFields, frozen=True, kw_only=True):
    """The body of /v1/completions."""

    prompt: Annotated[
        str | list[Any],
        wanted(PROMPT_TYPES),
        PROMPT(
            f"up to {MAX_PROMPTS} texts to continue; times `n` at most {MAX_CHOICES} choices",
            "a string, a list of strings, token ids, or a list of those",
        ),
    ]
    echo: Annotated[
        bool, PROMPT("begin the answer with the prompt; with `logprobs`, those of the prompt too")
    ] = False
    suffix: Annotated[
        str | None,
        PROMPT(
            "text after the answer, for models whose tokenizer has tokens for that "
            "(fill-in-the-middle), and refused for others; excludes `echo`",
            "a string; the prompt must be text",
        ),
    ] = None
    logprobs: Annotated[NumLogprobs | None, doc("logprobs")] = None


class EchoFields(CompletionFields, frozen=True, kw_only=True):
    """The body with `echo`: the answer may be the prompt alone."""

    max_tokens: Annotated[int, Meta(ge=-1, le=MAX_INT)] = DEFAULT_MAX_TOKENS


COMPLETIONS = Endpoint(
    (CompletionFields,),
    harmless=HARMLESS,
    refused={
        **REFUSED,
        "add_special_tokens": is_true,
        "prompt_embeds": is_empty,
        "chat_template": never,
    },
)


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    jobs: tuple[Job, ...]
    options: ResponseOptions
    echo: bool
    ignored: tuple[str, ...]
    wants_prompt_logprobs: bool = False
    """True: they come as a list of their own, besides those of an echo."""
    not_used: tuple[str, ...] = ()
    echoes: list[str] = field(default_factory=list)
    """The text of each prompt, "" without `echo`; `prepare` fills the list."""

    @property
    def n(self) -> int:
        return self.jobs[0].params.n

    @property
    def num_choices(self) -> int:
        return self.n * len(self.jobs)

    @property
    def num_top(self) -> int:
        return self.jobs[0].params.logprobs or 0

    @property
    def echoes_logprobs(self) -> bool:
        return self.echo and self.wants_logprobs

    @property
    def wants_logprobs(self) -> bool:
        return self.jobs[0].params.logprobs is not None


def parse_completion(
    data: Mapping[str, Any],
    *,
    model: str,
    defaults: Mapping[str, Any],
    force_include_usage: bool = False,
) -> CompletionRequest:
    """Check a body. `model` is the resolved served name, `defaults` the model's own sampling."""
    body = read(EchoFields if data.get("echo") is True else CompletionFields, data)
    options = parse_options(
        body, id_prefix="cmpl", model=model, force_include_usage=force_include_usage
    )
    prompts: Sequence[Prompt] = parse_prompts(body.prompt)
    if body.suffix:
        prompts = _with_gap(prompts, body.suffix, echo=body.echo)
    if body.echo and body.truncate_prompt_tokens is not None:
        name = "truncate_prompt_tokens"
        raise RequestError(f"{name} and echo exclude each other", param=name)
    check_prompt_logprobs(body)
    prompt_logprobs = body.prompt_logprobs
    if body.echo and body.logprobs is not None:  # the answer, and so its logprobs, has the prompt
        prompt_logprobs = max(body.logprobs, prompt_logprobs or 0)
    max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    if not max_tokens and not body.echo:
        token_limit("max_tokens", max_tokens)
    if body.min_tokens and not max_tokens:
        raise RequestError(
            f"min_tokens ({body.min_tokens}) exceeds max_tokens (0)", param="min_tokens"
        )
    # nothing to generate: the parameters are still checked, with a length that is allowed
    params = parse_sampling(
        body,
        max_tokens=token_limit("max_tokens", max_tokens or 1),
        logprobs=body.logprobs,
        prompt_logprobs=prompt_logprobs,
        defaults=defaults,
    )
    if len(prompts) * params.n > MAX_CHOICES:
        raise RequestError(
            f"{len(prompts)} prompts times n={params.n} exceeds {MAX_CHOICES} completions",
            param="n",
        )
    jobs = tuple(
        Job(
            prompt=prompt,
            params=params,
            request_id=options.id if len(prompts) == 1 else f"{options.id}-{i}",
            priority=body.priority,
            cache_salt=body.cache_salt,
            generates=max_tokens != 0,
        )
        for i, prompt in enumerate(prompts)
    )
    return CompletionRequest(
        jobs,
        options,
        echo=body.echo,
        ignored=COMPLETIONS.unknown(data),
        wants_prompt_logprobs=body.prompt_logprobs is not None,
    )


def parse_prompts(
    value: str | list[Any], *, param: str = "prompt", most: int = MAX_PROMPTS
) -> Sequence[str | tuple[int, ...]]:
    """str | [str] | [int] | [[int]] -> a list of prompts. param: the name of the field."""
    if isinstance(value, str):
        return [value]
    if not value:
        raise RequestError(f"{param} must not be empty", param=param)
    if _is_token_list(value):
        return [tuple(value)]
    if len(value) > most:
        raise RequestError(f"at most {most} {param}s are allowed at once", param=param)
    if all(isinstance(item, str) for item in value):
        return value
    if not all(isinstance(item, list) and _is_token_list(item) for item in value):
        raise wrong_type(param, PROMPT_TYPES, value)
    if not all(value):
        raise RequestError(f"{param} must not hold an empty list", param=param)
    return [tuple(item) for item in value]


def _with_gap(prompts: Sequence[Prompt], suffix: str, *, echo: bool) -> Sequence[Prompt]:
    """Pair each prompt with the suffix."""
    if echo:
        raise RequestError("suffix and echo exclude each other", param="suffix")
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    if len(texts) < len(prompts):
        raise RequestError("suffix needs a prompt of text, not of token ids", param="suffix")
    return [FillPrompt(text, suffix) for text in texts]


def _is_token_list(value: list[Any]) -> bool:
    return all(is_int(token) and 0 <= token <= MAX_INT for token in value)


class _Choice(Choice):
    def __init__(self, text_logprobs: TextLogprobs) -> None:
        super().__init__()
        self.sent_echo = False
        self.text_logprobs = text_logprobs


class CompletionStream(AnswerStream[_Choice]):
    """Turns deltas into `text_completion` chunks. `echoes[p]` is the text of prompt p, "" without
    echo; it must be there when the first delta comes."""

    wire = CHAT_WIRE

    def __init__(self, request: CompletionRequest, echoes: Sequence[str]) -> None:
        super().__init__(
            "text_completion",
            request.options,
            [_Choice(_text_logprobs(request)) for _ in range(request.num_choices)],
            request.n,
            is_text=not request.wants_logprobs,
        )
        self._request = request
        self._echoes = echoes
        self._prompt_token_ids: dict[int, tuple[int, ...]] = {}
        """Ids of the prompts by choice, until a chunk has carried them."""
        self._prompt_logprobs: dict[int, tuple[TokenLogprob, ...]] = {}
        """Logprobs of the prompts, for an echo; they come with the first choice of a prompt."""
        self._held: dict[int, list[tuple[int, TokenDelta]]] = {}
        """Deltas by prompt that came before the prompt's logprobs."""

    def feed(self, index: int, delta: TokenDelta) -> list[dict[str, Any]]:
        if not self._request.echoes_logprobs:
            return self._feed(index, delta)
        prompt = index // self._request.n
        if delta.prompt_logprobs is not None:
            self._prompt_logprobs[prompt] = delta.prompt_logprobs
        held = self._held.setdefault(prompt, [])
        held.append((index, delta))
        if prompt not in self._prompt_logprobs:
            return []
        self._held[prompt] = []
        return [chunk for later in held for chunk in self._feed(*later)]

    def _feed(self, index: int, delta: TokenDelta) -> list[dict[str, Any]]:
        choice = self._choices[index]
        self._tally.add(index, delta)
        choice.logprobs.extend(delta.logprobs or ())
        if self._options.return_token_ids:
            choice.token_ids.extend(delta.token_ids)
            if delta.prompt_token_ids is not None:
                self._prompt_token_ids[index] = delta.prompt_token_ids
        text = delta.text
        if not choice.started:
            echo = self._echoes[index // self._request.n]
            choice.started, text = bool(text or echo), echo + text
        wants_news = bool(text) or self._options.return_token_ids
        if not wants_news and delta.finish_reason is None:
            return []
        return [self._delta_chunk(index, text, delta)]

    def _text_chunk(self, index: int, text: str) -> dict[str, Any]:
        return self._delta_chunk(index, text, None)

    def _delta_chunk(self, index: int, text: str, delta: TokenDelta | None) -> dict[str, Any]:
        state = self._choices[index]
        choice: dict[str, Any] = {
            "index": index,
            "text": text,
            "logprobs": None,
            "finish_reason": delta.finish_reason if delta is not None else None,
        }
        if self._request.wants_logprobs:
            choice["logprobs"] = self._logprobs(index)
        if self._options.return_token_ids:
            choice["token_ids"] = state.token_ids
            if index in self._prompt_token_ids:
                choice["prompt_token_ids"] = self._prompt_token_ids.pop(index)
        state.logprobs, state.token_ids = [], []
        chunk = self._chunk(choice)
        if delta is not None and delta.finish_reason is not None:
            self._finish(chunk, delta)
        return chunk

    def _logprobs(self, index: int) -> dict[str, Any]:
        """The `logprobs` of one chunk; those of the first chunk of an echo include the prompt."""
        state = self._choices[index]
        if not self._request.echoes_logprobs or state.sent_echo:
            return state.text_logprobs.build(state.logprobs)
        state.sent_echo = True
        prompt = index // self._request.n
        of_prompt = _shown(self._prompt_logprobs[prompt], self._request.num_top)
        return state.text_logprobs.build_echo(self._echoes[prompt], of_prompt, state.logprobs)


def completion_response(
    request: CompletionRequest, answers: Sequence[TokenDelta], echoes: Sequence[str]
) -> dict[str, Any]:
    """The whole response. `answers[i]` is choice i as one merged delta."""
    o, tally = request.options, Tally(request.n)
    choices = []
    for index, answer in enumerate(answers):
        tally.add(index, answer)
        echo = echoes[index // request.n]
        # the data of a prompt comes with its first choice
        of_prompt = answers[index - index % request.n].prompt_logprobs or ()
        choice: dict[str, Any] = {
            "index": index,
            "text": echo + answer.text,
            "logprobs": None,
            "finish_reason": answer.finish_reason,
            **end_fields(answer),
        }
        if request.wants_logprobs:
            shown = _shown(of_prompt, request.num_top) if request.echo else ()
            choice["logprobs"] = _text_logprobs(request).build_echo(
                echo, shown, answer.logprobs or ()
            )
        if request.wants_prompt_logprobs:
            choice["prompt_logprobs"] = prompt_logprobs_list(of_prompt)
        if o.return_token_ids:
            choice["token_ids"] = answer.token_ids
            if answer.prompt_token_ids is not None:
                choice["prompt_token_ids"] = answer.prompt_token_ids
        choices.append(choice)
    response = {**o.head("text_completion"), "choices": choices, "usage": tally.usage()}
    if o.include_timings:
        response["termgen"] = tally.timings()
    return response


def _shown(entries: Sequence[TokenLogprob], num_top: int) -> list[TokenLogprob]:
    """The entries with as many alternatives as `logprobs` asks for: `prompt_logprobs` may ask for
    more."""
    return [replace(entry, top=entry.top[:num_top]) for entry in entries]


def _text_logprobs(request: CompletionRequest) -> TextLogprobs:
    return TextLogprobs(num_top=request.num_top, tokens_as_ids=request.options.tokens_as_ids)


def _parse(served: Served, data: Mapping[str, Any]) -> CompletionRequest:
    return parse_completion(
        data, force_include_usage=served.force_include_usage, **served.answering
    )


async def prepare(request: CompletionRequest, engine: GenerationClient) -> None:
    """Fill in the echoes."""
    for job in request.jobs:
        prompt = job.prompt
        if not request.echo:
            request.echoes.append("")
        elif isinstance(prompt, str):
            request.echoes.append(prompt)
        else:
            assert isinstance(prompt, tuple), "completions take text or token ids"
            request.echoes.append(await engine.detokenize(prompt))


ROW = GeneratingRow(
    path="/v1/completions",
    summary="completions",
    body=COMPLETIONS,
    parse=_parse,
    stream=lambda asked: CompletionStream(asked, asked.echoes),
    whole=lambda asked, answers: completion_response(asked, answers, asked.echoes),
    prepare=prepare,
    operation="text_completion",
)
