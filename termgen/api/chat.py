"""/v1/chat/completions: a body to one `Job`, deltas to chunks, deltas to a whole response."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

from termgen.api.chat_prompt import Conversation, parse_prompt, texts_of
from termgen.api.fields import (
    ANSWER,
    LENGTH,
    PROMPT,
    Endpoint,
    Instead,
    Served,
    is_empty,
    never,
    one_of,
    read,
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
from termgen.api.logprobs import chat_logprobs_object, prompt_logprobs_list
from termgen.api.rows import GeneratingRow
from termgen.api.sampling import (
    HARMLESS,
    REFUSED,
    GenerationFields,
    NumLogprobs,
    TokenLimit,
    check_prompt_logprobs,
    doc,
    parse_sampling,
    token_limit,
)
from termgen.api.sse import CHAT_WIRE
from termgen.api.tool_calls import CallParser, delta_of, message_fields
from termgen.api.tools import Tools, constrain, new_parser
from termgen.client import ChatPrompt, TokenDelta
from termgen.errors import RequestError
from termgen.vocabulary.request import FinishReason
from termgen.vocabulary.sampling_params import MAX_LOGPROBS
from termgen.vocabulary.tool_format import ToolFormat


class ChatFields(GenerationFields, frozen=True):
    """The body of /v1/chat/completions, beside its `Conversation`."""

    max_completion_tokens: Annotated[
        TokenLimit | None,
        LENGTH(
            "the newer name of `max_tokens`, which it wins over",
            "as `max_tokens`",
            "what the context leaves",
        ),
    ] = None
    prediction: Annotated[
        dict[str, Any] | None,
        PROMPT(
            "text that the answer is expected to have: a hint that could make it quicker, which is "
            "accepted and named in `x-termgen-not-used`",
            "an object of the type `content`",
        ),
    ] = None
    logprobs: Annotated[bool, doc("logprobs")] = False
    top_logprobs: Annotated[
        NumLogprobs | None,
        ANSWER(
            "so many alternatives for each token", f"0 to {MAX_LOGPROBS}; needs `logprobs`", "0"
        ),
    ] = None


CHAT = Endpoint(
    (ChatFields, Conversation),
    harmless=HARMLESS,
    refused={
        **REFUSED,
        "functions": is_empty,
        "function_call": one_of("none"),
        "audio": never,
        "modalities": one_of(["text"]),
        "web_search_options": never,
        "documents": is_empty,
        "echo": is_empty,
        "add_special_tokens": is_empty,
        "mm_processor_kwargs": is_empty,
        "input": Instead("messages"),
        "instructions": Instead("a message of the role system"),
        "output_config": Instead("response_format and reasoning_effort"),
        "system": Instead("a message of the role system"),
    },
)


@dataclass(frozen=True, slots=True)
class ChatRequest:
    job: Job
    options: ResponseOptions
    ignored: tuple[str, ...]
    tools: Tools
    not_used: tuple[str, ...] = ()
    """Fields that were understood and have no effect: hints, and tools of other servers."""

    @property
    def jobs(self) -> tuple[Job]:
        return (self.job,)

    @property
    def begins_answers(self) -> bool:
        """The prompt ends with the beginning of an answer."""
        prompt = self.job.prompt
        if not isinstance(prompt, ChatPrompt):
            return False
        return prompt.add_generation_prompt or prompt.continue_final_message


def parse_chat(
    data: Mapping[str, Any],
    *,
    model: str,
    defaults: Mapping[str, Any],
    force_include_usage: bool = False,
    tool_format: ToolFormat = ToolFormat(knows_tools=True),  # noqa: B008 frozen
    strict_tools: bool = False,
    trusts_template: bool = False,
    refuses_images: bool = False,
) -> ChatRequest:
    """Check a body. `model` is the resolved served name, `defaults` the model's own sampling.

    strict_tools: functions that do not say are strict. trusts_template: the body may bring a chat
    template. refuses_images: parts that are not text are errors, where a line could replace them.
    """
    body, conversation = read(ChatFields, data), read(Conversation, data)
    options = parse_options(
        body, id_prefix="chatcmpl", model=model, force_include_usage=force_include_usage
    )
    check_prompt_logprobs(body)
    max_tokens = token_limit("max_tokens", body.max_tokens)
    if body.max_completion_tokens is not None:
        max_tokens = token_limit("max_completion_tokens", body.max_completion_tokens)
    params = parse_sampling(
        body,
        max_tokens=max_tokens,
        logprobs=_logprobs(body),
        prompt_logprobs=body.prompt_logprobs,
        defaults=defaults,
    )
    prompt, tools, not_used = parse_prompt(
        conversation,
        tool_format,
        strict_tools=strict_tools,
        trusts_template=trusts_template,
        refuses_images=refuses_images,
    )
    if body.prediction is not None:
        _check_prediction(body.prediction)
        not_used = (*not_used, "prediction")
    if tools.must_call and params.structured_outputs is not None:
        not_used = (*not_used, params.structured_outputs.param)
    wanted = constrain(tools, params.structured_outputs)
    tools = replace(tools, is_formed=tools.may_call and wanted is not None)
    if not tools.may_call and (wanted is not None or prompt.continue_final_message):
        tools = Tools()  # the client gives the text its form, or its beginning, not the model
    params = replace(
        params,
        structured_outputs=wanted,
        skip_special_tokens=params.skip_special_tokens and not tools.needs_special_tokens,
    )
    job = Job(
        prompt=prompt,
        params=params,
        request_id=options.id,
        priority=body.priority,
        cache_salt=body.cache_salt,
    )
    return ChatRequest(job, options, CHAT.unknown(data), tools, not_used)


def _check_prediction(value: dict[str, Any]) -> None:
    if value.get("type") != "content":
        raise wrong_type("prediction.type", "content", value.get("type"))
    texts_of(value.get("content"), "prediction.content")


def _logprobs(body: ChatFields) -> int | None:
    """`logprobs: true` with `top_logprobs: k` -> k; None when not asked for."""
    if body.logprobs:
        return body.top_logprobs or 0
    if body.top_logprobs:
        raise RequestError("top_logprobs needs logprobs: true", param="top_logprobs")
    return None


class _Choice(Choice):
    parser: CallParser | None = None
    """Set with the first delta, where the text is more than content."""


class ChatStream(AnswerStream[_Choice]):
    """Turns deltas into `chat.completion.chunk` objects."""

    wire = CHAT_WIRE

    def __init__(self, request: ChatRequest) -> None:
        params = request.job.params
        self._tools = request.tools
        self._wants_logprobs = params.logprobs is not None
        super().__init__(
            "chat.completion.chunk",
            request.options,
            [_Choice() for _ in range(params.n)],
            params.n,
            is_text=not (self._wants_logprobs or request.tools.needs_parser),
        )
        self._prompt_token_ids: tuple[int, ...] | None = None
        """The prompt's ids, until a chunk has carried them."""
        self._begun_by: Sequence[int] | None = None if request.tools.needs_prompt else ()
        """The prompt, where it may have begun the answers; None until it is known."""
        self._begins_answers = request.begins_answers
        self._held: list[tuple[int, TokenDelta]] = []
        """Deltas that came before the prompt was known."""

    def feed(self, index: int, delta: TokenDelta) -> list[dict[str, Any]]:
        if self._begun_by is not None:
            return self._feed(index, delta)
        self._held.append((index, delta))
        if index:
            return []  # the first delta of the first choice has the prompt
        self._begun_by = (delta.prompt_token_ids or ()) if self._begins_answers else ()
        held, self._held = self._held, []
        return [chunk for later in held for chunk in self._feed(*later)]

    def _feed(self, index: int, delta: TokenDelta) -> list[dict[str, Any]]:
        choice = self._choices[index]
        if choice.parser is None and self._tools.needs_parser:
            choice.parser = new_parser(self._tools, self._begun_by or ())
        self._tally.add(index, delta)
        choice.logprobs.extend(delta.logprobs or ())
        if self._options.return_token_ids:
            choice.token_ids.extend(delta.token_ids)
            self._prompt_token_ids = delta.prompt_token_ids or self._prompt_token_ids
        parts = _deltas_of(choice.parser, delta)
        wants_news = bool(parts) or self._options.return_token_ids
        if not wants_news and delta.finish_reason is None:
            return []
        chunks = []
        if not choice.started:
            choice.started = True
            chunks.append(self._role_chunk(index))
        if not parts and (choice.logprobs or choice.token_ids):
            parts = [{"content": ""}]
        chunks += [self._content_chunk(index, part) for part in parts]
        if delta.finish_reason is not None:
            chunks.append(self._finish_chunk(index, delta))
        return chunks

    def _text_chunk(self, index: int, text: str) -> dict[str, Any]:
        return self._content_chunk(index, {"content": text})

    def _delta_chunk(
        self, index: int, delta: dict[str, Any], finish_reason: str | None = None
    ) -> dict[str, Any]:
        return self._chunk(
            {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        )

    def _role_chunk(self, index: int) -> dict[str, Any]:
        chunk = self._delta_chunk(index, {"role": "assistant", "content": ""})
        if self._prompt_token_ids is not None:
            chunk["prompt_token_ids"] = self._prompt_token_ids
            self._prompt_token_ids = None
        return chunk

    def _content_chunk(self, index: int, part: dict[str, Any]) -> dict[str, Any]:
        choice, chunk = self._choices[index], self._delta_chunk(index, part)
        if self._wants_logprobs:
            chunk["choices"][0]["logprobs"] = chat_logprobs_object(
                choice.logprobs, tokens_as_ids=self._options.tokens_as_ids
            )
        if self._options.return_token_ids:
            chunk["choices"][0]["token_ids"] = choice.token_ids
        choice.logprobs, choice.token_ids = [], []
        return chunk

    def _finish_chunk(self, index: int, delta: TokenDelta) -> dict[str, Any]:
        parser = self._choices[index].parser
        chunk = self._delta_chunk(index, {}, _finish_reason_of(delta, parser, self._tools))
        self._finish(chunk, delta)
        return chunk


def chat_response(request: ChatRequest, answers: list[TokenDelta]) -> dict[str, Any]:
    """The whole response. `answers[i]` is choice i as one merged delta."""
    o, params, tools = request.options, request.job.params, request.tools
    tally = Tally(params.n)
    begun_by = (answers[0].prompt_token_ids or ()) if request.begins_answers else ()
    choices = []
    for index, answer in enumerate(answers):
        tally.add(index, answer)
        parser = new_parser(tools, begun_by) if tools.needs_parser else None
        fields: dict[str, Any] = {"content": answer.text}
        if parser is not None:
            fields = message_fields(parser, answer.text)
        choice: dict[str, Any] = {
            "index": index,
            "message": {"role": "assistant", **fields, "refusal": None},
            "logprobs": None,
            "finish_reason": _finish_reason_of(answer, parser, tools),
            **end_fields(answer),
        }
        if params.logprobs is not None:
            choice["logprobs"] = chat_logprobs_object(
                answer.logprobs or (), tokens_as_ids=o.tokens_as_ids
            )
        if o.return_token_ids:
            choice["token_ids"] = answer.token_ids
        choices.append(choice)
    response: dict[str, Any] = {
        **o.head("chat.completion"),
        "choices": choices,
        "usage": tally.usage(),
    }
    if o.return_token_ids:
        response["prompt_token_ids"] = answers[0].prompt_token_ids
    if params.prompt_logprobs is not None:
        response["prompt_logprobs"] = prompt_logprobs_list(answers[0].prompt_logprobs or ())
    if o.include_timings:
        response["termgen"] = tally.timings()
    return response


def _deltas_of(parser: CallParser | None, delta: TokenDelta) -> list[dict[str, Any]]:
    """The `delta` objects for the text of a delta; without a parser all of it is content."""
    if parser is None:
        return [{"content": delta.text}] if delta.text else []
    parts = parser.feed(delta.text)
    if delta.finish_reason is not None:
        parts += parser.finish()
    return [delta_of(part) for part in parts]


def _finish_reason_of(delta: TokenDelta, parser: CallParser | None, tools: Tools) -> str:
    """The finish reason. As with OpenAI and vLLM, a call that the client named does not make it
    `tool_calls`; nor does one that a stop string cut off, which is incomplete."""
    if parser is None or not parser.num_calls or parser.is_cut or tools.choice == "named":
        return str(delta.finish_reason)
    return "tool_calls" if delta.finish_reason is FinishReason.STOP else str(delta.finish_reason)


def _parse(served: Served, data: Mapping[str, Any]) -> ChatRequest:
    return parse_chat(
        data,
        force_include_usage=served.force_include_usage,
        **served.answering,
        **served.conversing,
    )


ROW = GeneratingRow(
    path="/v1/chat/completions",
    summary="chat completions",
    body=CHAT,
    parse=_parse,
    stream=ChatStream,
    whole=chat_response,
)
