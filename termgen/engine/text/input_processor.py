"""Tokenises and checks a front end's prompt and parameters; the result is a `GenerationRequest`.

All requests of all front ends are validated here. The result fits the model: ids in the vocabulary,
room for at least one new token, `max_tokens` filled in. Every fault is a `RequestError` naming the
field. Thread-safe.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypedDict, Unpack

import numpy as np

from termgen.client import ChatPrompt, FillPrompt, Prompt, prompt_chars
from termgen.engine.grammar.grammar import COMPILE_TIMEOUT_S, GrammarCompiler, named, too_busy
from termgen.engine.text.pooled_prompt import KEEP_ALL, cut_to_pool, request_to_pool
from termgen.engine.text.text_process import TextProcess, is_long
from termgen.engine.text.tokenizer import Tokenizer, check_encodable
from termgen.errors import ContextLengthError, RequestError
from termgen.vocabulary.device.pooling import PoolingParams
from termgen.vocabulary.request import (
    MAX_BAD_SEQUENCE_TOKENS,
    MAX_PRIORITY,
    GenerationRequest,
    TurnEnds,
    check_cache_salt,
    hash_blocks,
)
from termgen.vocabulary.sampling_params import MAX_STOP_TOKEN_IDS, SamplingParams
from termgen.vocabulary.structured_outputs import StructuredOutputsParams

MAX_REQUEST_ID_CHARS = 256
OPTIONS = ("add_generation_prompt", "chat_template", "continue_final_message")
"""Keys of a chat prompt that are not variables of its template."""


class RequestOptions(TypedDict, total=False):
    """Options of `prepare` beside the prompt and the parameters."""

    request_id: str | None
    priority: int
    cache_salt: str | None
    pooling: PoolingParams | None


class InputProcessor:
    """Checks and tokenises for one model."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        max_model_len: int,
        vocab_size: int,
        *,
        eos_token_ids: Collection[int] = (),
        has_priorities: bool = True,
        clamps_max_tokens: bool = False,
        grammars: GrammarCompiler | None = None,
        hash_block_size: int | None = None,
        marks_turns: bool = False,
        max_pooled_len: int | None = None,
    ) -> None:
        """has_priorities: the scheduler uses them. clamps_max_tokens: to what the context leaves,
        instead of an error. hash_block_size: tokens per block of the prefix cache, whose hashes are
        computed here; None without one. marks_turns: note where a chat's turns end, which takes a
        few percent of the time of tokenising. max_pooled_len: tokens of the longest prompt that a
        vector can be made of; None: the whole context, as no token follows."""
        self._tokenizer = tokenizer
        self._grammars = grammars
        self._max_model_len = max_model_len
        self._vocab_size = vocab_size
        self._eos_token_ids = frozenset(eos_token_ids)
        self._has_priorities = has_priorities
        self._clamps_max_tokens = clamps_max_tokens
        self._hash_block_size = hash_block_size
        self._marks_turns = marks_turns
        self._max_pooled_len = max_pooled_len or max_model_len
        self._long_texts: TextProcess | None = None

    def prewarm(self, texts: TextProcess | None = None) -> None:
        """Build now what the first message that spells a control token and the first grammar need:
        each holds the GIL for a third of a second. From now on `texts` tokenises long prompts."""
        if texts is not None and self._tokenizer is not None and texts.start():
            self._long_texts = texts
        if self._tokenizer is not None:
            self._tokenizer.prewarm()
        if self._grammars is not None:
            self._grammars.prewarm()

    def close(self) -> None:
        """End the helper processes and threads; no request may follow."""
        if self._tokenizer is not None:
            self._tokenizer.close()
        if self._long_texts is not None:
            self._long_texts.close()
        if self._grammars is not None:
            self._grammars.close()

    def process(
        self, prompt: Prompt, params: SamplingParams, **options: Unpack[RequestOptions]
    ) -> GenerationRequest:
        """The request to submit. Raises RequestError before anything is queued."""
        request = self.prepare(prompt, params, **options)
        wanted = params.structured_outputs
        if wanted is None:
            return request
        return replace(request, grammar=self._need_grammars(wanted).compile(wanted))

    def prepare(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        pooling: PoolingParams | None = None,
    ) -> GenerationRequest:
        """The request without its grammar, for callers that await it with `add_grammar`."""
        _check_options(request_id, priority, cache_salt)
        self._check_priority(priority)
        if pooling is not None:
            ids, _ = self.read(prompt, keep=KEEP_ALL)
            ids = cut_to_pool(ids, prompt, params, self._max_pooled_len, self._tokenizer)
            hashes = () if pooling.needs_all else self._hash(ids, cache_salt)
            request_id = request_id or f"req-{uuid.uuid4().hex}"
            return request_to_pool(ids, pooling, request_id, priority, cache_salt, hashes)
        if isinstance(prompt, FillPrompt):
            params = self._stop_behind_gap(params)
        params.validate_for(vocab_size=self._vocab_size)
        if params.stop and self._tokenizer is None:
            raise RequestError(
                "stop strings need a tokenizer, and this engine runs without one;"
                " use stop_token_ids",
                param="stop",
            )
        if params.structured_outputs is not None:
            self._need_grammars(params.structured_outputs)
        bad_token_ids = self._bad_token_ids(params)
        self._check_allowed(params, bad_token_ids)
        ids, turn_ends = self.read(
            prompt,
            has_to_fit=True,
            marks_turns=self._marks_turns,
            keep=self._num_kept(prompt, params),
        )
        params = self._complete(params, num_prompt=len(ids), param=_param_of(prompt))
        return GenerationRequest(
            request_id=request_id or f"req-{uuid.uuid4().hex}",
            prompt_token_ids=tuple(ids),
            params=params,
            priority=priority,
            cache_salt=cache_salt,
            bad_token_ids=bad_token_ids,
            block_hashes=self._hash(ids, cache_salt),
            turn_ends=turn_ends,
        )

    def _check_priority(self, priority: int) -> None:
        if priority and not self._has_priorities:
            raise RequestError(
                "priority has no effect on this engine, which runs requests in order of arrival;"
                " start it with --scheduling-policy priority",
                param="priority",
                code="unsupported_parameter",
            )

    def _num_kept(self, prompt: Prompt, params: SamplingParams) -> int | None:
        """Tokens to keep of a prompt that is truncated."""
        name, wanted = "truncate_prompt_tokens", params.truncate_prompt_tokens
        if wanted is None:
            return None
        if isinstance(prompt, FillPrompt):
            raise RequestError(f"{name} and suffix exclude each other", param=name)
        limit = self._max_model_len - 1
        if wanted == -1:
            reserved = max(params.max_tokens or 1, params.min_tokens)
            wanted = self._max_model_len - reserved
            if wanted < 1:
                raise RequestError(
                    f"{name} -1 keeps what the answer leaves of the context of"
                    f" {self._max_model_len} tokens, and an answer of {reserved} leaves nothing",
                    param=name,
                )
        if wanted > limit:
            raise RequestError(
                f"{name} must be at most {limit}, which leaves a token of the context for the"
                f" answer, not {wanted}",
                param=name,
            )
        return wanted

    def _hash(self, ids: Sequence[int], cache_salt: str | None) -> tuple[bytes, ...]:
        """The prefix cache's hashes of the prompt's full blocks."""
        hashes: list[bytes] = []
        if self._hash_block_size is not None:
            hash_blocks(np.asarray(ids, np.int32), self._hash_block_size, hashes, cache_salt)
        return tuple(hashes)

    def _stop_behind_gap(self, params: SamplingParams) -> SamplingParams:
        """Add the tokens that models write after filling a gap, which may not be end-of-sequence
        tokens, to the stop ids."""
        fill = self._tokenizer.fill_tokens if self._tokenizer is not None else None
        if fill is None or params.ignore_eos:
            return params
        ends = (token_id for token_id in fill.ends if token_id < self._vocab_size)
        own = dict.fromkeys((*params.stop_token_ids, *ends))
        return replace(params, stop_token_ids=tuple(own)[:MAX_STOP_TOKEN_IDS])

    def _bad_token_ids(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """Token sequences of each bad word: at the start of a text, and after a space."""
        if not params.bad_words:
            return ()
        if self._tokenizer is None:
            raise RequestError(
                "bad words need a tokenizer, and this engine runs without one; use logit_bias",
                param="bad_words",
            )
        sequences: dict[tuple[int, ...], None] = {}
        for word in params.bad_words:
            for text in (word, " " + word.lstrip()):
                check_encodable(text, param="bad_words")
                ids = tuple(self._tokenizer.encode(text, add_special_tokens=False))
                if not 0 < len(ids) <= MAX_BAD_SEQUENCE_TOKENS:
                    raise RequestError(
                        f"the bad word {word!r:.60} has {len(ids)} tokens; 1 to"
                        f" {MAX_BAD_SEQUENCE_TOKENS} are allowed",
                        param="bad_words",
                    )
                self._check_range(ids, "bad_words")
                sequences[ids] = None
        return tuple(sequences)

    def _check_allowed(self, params: SamplingParams, bad: tuple[tuple[int, ...], ...]) -> None:
        """Refuse allowed ids that other parameters may all forbid: none would be left to sample."""
        if params.allowed_token_ids is None:
            return
        left = set(params.allowed_token_ids) - {ids[-1] for ids in bad}
        if params.min_tokens:
            left -= {*params.stop_token_ids, *(() if params.ignore_eos else self._eos_token_ids)}
        if not left:
            raise RequestError(
                "bad_words and min_tokens leave none of allowed_token_ids to be drawn",
                param="allowed_token_ids",
            )

    def renders_elsewhere(self, prompt: Prompt) -> bool:
        """True if a helper process renders the prompt's template, for which a thread waits."""
        if not isinstance(prompt, ChatPrompt) or self._tokenizer is None:
            return False
        return prompt.chat_template is not None or self._tokenizer.runs_template_elsewhere

    async def add_grammar(
        self, request: GenerationRequest, *, client: str = ""
    ) -> GenerationRequest:
        """Compile the grammar of a prepared request and add it; the wait occupies no thread.

        client: whose turn it counts as in the compiler. Raises RequestError."""
        wanted = request.params.structured_outputs
        if wanted is None:
            return request
        compiler = self._need_grammars(wanted)
        compiled = compiler.submit(wanted, client=client)
        waiting = asyncio.wrap_future(compiled)
        waiting.add_done_callback(_retrieve)
        try:
            grammar = await asyncio.wait_for(asyncio.shield(waiting), COMPILE_TIMEOUT_S)
        except TimeoutError:
            raise too_busy(wanted) from None
        except RequestError as error:
            raise named(error, wanted) from None
        finally:
            compiler.leave(compiled)
        # Not on the event loop, as a long prompt is copied.
        return await asyncio.to_thread(replace, request, grammar=grammar)

    def _need_grammars(self, wanted: StructuredOutputsParams) -> GrammarCompiler:
        """The grammar compiler. Raises RequestError if the engine has no tokenizer."""
        if self._grammars is None:
            raise RequestError(
                "structured outputs need a tokenizer, and this engine runs without one",
                param=wanted.param,
            )
        return self._grammars

    def tokenize(
        self, prompt: Prompt, *, add_special_tokens: bool = True, has_to_fit: bool = False
    ) -> list[int]:
        """The ids `process` would submit for this prompt.

        add_special_tokens: for raw text only; chat templates write their own. has_to_fit: refuse a
        prompt that is longer than the context.
        """
        return self.read(prompt, add_special_tokens=add_special_tokens, has_to_fit=has_to_fit)[0]

    def read(
        self,
        prompt: Prompt,
        *,
        add_special_tokens: bool = True,
        has_to_fit: bool = False,
        marks_turns: bool = False,
        keep: int | None = None,
    ) -> tuple[list[int], TurnEnds]:
        """The ids of `tokenize`; and with marks_turns where a chat's turns end. keep: drop all but
        so many ids at the end."""
        if keep is None and self._tokenizer is not None:
            self._check_size(prompt)
        if self._long_texts is not None and is_long(prompt):
            return self._long_texts.read(
                prompt,
                add_special_tokens=add_special_tokens,
                has_to_fit=has_to_fit,
                marks_turns=marks_turns,
                keep=keep,
            )
        turn_ends = TurnEnds()
        if isinstance(prompt, ChatPrompt):
            ids, turn_ends = self._encode_chat(prompt, marks_turns)
        else:
            ids = self._tokenize(prompt, add_special_tokens)
        if not ids:
            raise RequestError("the prompt is empty", param=_param_of(prompt))
        if keep is not None and len(ids) > keep:
            # without their beginning, prompts of different turns have no common start
            ids, turn_ends = ids[-keep:], TurnEnds()
        if has_to_fit and len(ids) >= self._max_model_len:
            raise self._too_long(f"{len(ids)} tokens", _param_of(prompt))
        # A tokenizer may know more tokens than the model has rows.
        self._check_range(ids, _param_of(prompt))
        return ids, turn_ends

    def _tokenize(
        self, prompt: str | FillPrompt | Sequence[int], add_special_tokens: bool
    ) -> list[int]:
        if isinstance(prompt, str):
            return self._encode_text(prompt, add_special_tokens)
        if isinstance(prompt, FillPrompt):
            return self._encode_fill(prompt)
        return self._check_ids(prompt)

    def _encode_text(self, text: str, add_special_tokens: bool) -> list[int]:
        tokenizer = self._need_tokenizer("prompt")
        return tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def _encode_fill(self, prompt: FillPrompt) -> list[int]:
        tokenizer = self._need_tokenizer("suffix")
        return tokenizer.encode_fill(prompt.prefix, prompt.suffix)

    def _encode_chat(self, prompt: ChatPrompt, marks_turns: bool) -> tuple[list[int], TurnEnds]:
        tokenizer = self._need_tokenizer("messages")
        variables = _template_variables(prompt.template_kwargs)
        encoded = tokenizer.encode_chat(
            prompt.messages,
            add_generation_prompt=prompt.add_generation_prompt,
            continue_final_message=prompt.continue_final_message,
            variables=variables,
            chat_template=prompt.chat_template,
            marks_turns=marks_turns,
        )
        if variables:
            tokenizer.refuse_unread_variables(variables, prompt.chat_template)
        return encoded

    def _check_ids(self, prompt: Sequence[int]) -> list[int]:
        if not isinstance(prompt, Sequence):
            raise RequestError(
                f"the prompt must be text, token ids or messages, not {type(prompt).__name__}",
                param="prompt",
            )
        for token_id in prompt:
            if isinstance(token_id, bool) or not isinstance(token_id, int):
                raise RequestError(
                    f"prompt token ids must be integers, not {token_id!r}", param="prompt"
                )
        return list(prompt)

    def _check_range(self, ids: Sequence[int], param: str) -> None:
        low, high = min(ids), max(ids)
        if low < 0 or high >= self._vocab_size:
            raise RequestError(
                f"{param}: token id {low if low < 0 else high} is outside the vocabulary of"
                f" {self._vocab_size}",
                param=param,
            )

    def _need_tokenizer(self, param: str) -> Tokenizer:
        if self._tokenizer is None:
            raise RequestError(
                "this engine runs without a tokenizer: send the prompt as token ids", param=param
            )
        return self._tokenizer

    def _check_size(self, prompt: Prompt) -> None:
        """Refuse text that cannot fit in any tokenisation, before spending time on it."""
        if not isinstance(prompt, (str, ChatPrompt, FillPrompt)):
            return  # ids are counted
        assert self._tokenizer is not None, "text needs it"
        num_chars = prompt_chars(prompt)
        if num_chars < self._max_model_len:
            return  # even with a token for each: the longest token need not be looked for
        least = -(-num_chars // self._tokenizer.max_token_chars)
        if least >= self._max_model_len:
            raise self._too_long(f"at least {least} tokens", _param_of(prompt))

    def _complete(self, params: SamplingParams, *, num_prompt: int, param: str) -> SamplingParams:
        """Fill in max_tokens and run the checks that depend on it."""
        room = self._max_model_len - num_prompt
        assert room >= 1, "`tokenize` has checked that it fits"
        max_tokens = room if params.max_tokens is None else params.max_tokens
        if max_tokens > room and self._clamps_max_tokens:
            max_tokens = room
        if max_tokens > room:
            where = "messages" if param == "messages" else "prompt"
            raise ContextLengthError(
                f"This model's maximum context length is {self._max_model_len} tokens. However,"
                f" you requested {num_prompt + max_tokens} tokens ({num_prompt} in the {where},"
                f" {max_tokens} in the completion). Please reduce the length of the {where} or"
                " completion. (context_length_exceeded)",
                param=param,
            )
        if params.min_tokens > max_tokens:
            raise RequestError(
                f"min_tokens ({params.min_tokens}) exceeds the {max_tokens} tokens that max_tokens"
                " and the context leave",
                param="min_tokens",
            )
        return params if params.max_tokens == max_tokens else replace(params, max_tokens=max_tokens)

    def _too_long(self, amount: str, param: str) -> ContextLengthError:
        where = "messages" if param == "messages" else "prompt"
        return ContextLengthError(
            f"This model's maximum context length is {self._max_model_len} tokens. However, you"
            f" requested {amount} in the {where}, which leaves no room for a completion. Please"
            f" reduce the length of the {where}. (context_length_exceeded)",
            param=param,
        )


def _retrieve(future: asyncio.Future[Any]) -> None:
    """Retrieve the exception: asyncio logs those never read, and the waiter may be gone."""
    if not future.cancelled():
        future.exception()


def _check_options(request_id: str | None, priority: int, cache_salt: str | None) -> None:
    if request_id is not None and not (
        isinstance(request_id, str) and 0 < len(request_id) <= MAX_REQUEST_ID_CHARS
    ):
        raise RequestError(
            f"request_id must have 1 to {MAX_REQUEST_ID_CHARS} characters", param="request_id"
        )
    if isinstance(priority, bool) or not isinstance(priority, int):
        raise RequestError(f"priority must be an integer, not {priority!r}", param="priority")
    if abs(priority) > MAX_PRIORITY:
        raise RequestError(
            f"priority must be between -{MAX_PRIORITY} and {MAX_PRIORITY}", param="priority"
        )
    if cache_salt is not None:
        check_cache_salt(cache_salt)


def _param_of(prompt: Prompt) -> str:
    return "messages" if isinstance(prompt, ChatPrompt) else "prompt"


def _template_variables(variables: Mapping[str, Any]) -> dict[str, Any]:
    for name in variables:
        if not isinstance(name, str) or name in OPTIONS:
            raise RequestError(
                f"{name!r} cannot be set as a chat template variable", param="chat_template_kwargs"
            )
    return dict(variables)
