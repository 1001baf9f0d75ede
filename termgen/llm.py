"""`LLM`: the offline engine as a Python object. Prompts in, finished outputs back, in order.

Shapes and names follow vLLM's offline class. Engine steps run in the calling thread; an `LLM` is
not thread-safe. Every prompt of a call is checked before any of them runs.
"""

from __future__ import annotations

import difflib
import itertools
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from types import TracebackType
from typing import Any, TypeGuard, cast

from tqdm import tqdm

from termgen.client import ChatPrompt, Message, ModelInfo, Prompt, SleepLevel
from termgen.config import EngineConfig
from termgen.engine.loop.engine import SyncEngine
from termgen.engine.text.request_output import (
    EmbeddingOutput,
    EmbeddingOutputBuilder,
    OutputBuilder,
    RequestOutput,
    RequestOutputBuilder,
)
from termgen.engine.text.tokenizer import Tokenizer
from termgen.errors import ConfigError, EngineError, RequestError
from termgen.library.catalog import ensure_model
from termgen.library.progress import TerminalProgress
from termgen.system.cpu_slices import quick_lock
from termgen.vocabulary.device.pooling import PoolingParams
from termgen.vocabulary.request import GenerationRequest, is_whole
from termgen.vocabulary.sampling_params import SamplingParams

PromptInput = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, or a dict with `prompt` or `prompt_token_ids`, and optionally `cache_salt`."""

Params = SamplingParams | Sequence[SamplingParams] | None
PROMPT_KEYS = frozenset({"prompt", "prompt_token_ids", "cache_salt"})


class LLM:
    """A loaded model for batches of prompts. A context manager; or call `shutdown`.

    `options` are the fields of `EngineConfig`. The default model is fetched on first use; any
    other must be on this machine (`termgen pull`).
    """

    def __init__(self, model: str | os.PathLike[str] | None = None, **options: Any) -> None:
        config = _engine_config(None if model is None else os.fspath(model), options)
        with TerminalProgress() as progress:
            ensure_model(config.model, progress)
        self.config = config
        self._engine = SyncEngine(config)
        self._ids = itertools.count()
        self._is_open = True

    @property
    def model(self) -> ModelInfo:
        return self._engine.model

    def generate(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        sampling_params: Params = None,
        *,
        use_tqdm: bool = False,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Complete each prompt; results are in the order of the prompts.

        One `SamplingParams` applies to all prompts, a list has one for each; None: the model's own
        defaults. `priority` has one number per prompt, lower runs first; it needs
        `scheduling_policy="priority"`. Raises `RequestError` for a bad prompt before anything runs.
        A request that the engine failed has `finish_reason` ERROR and its cause in `error`; a
        warning counts them.
        """
        inputs = [_read_prompt(prompt) for prompt in _as_list(prompts)]
        if priority is not None:
            if len(priority) != len(inputs):
                raise RequestError(
                    f"priority has {len(priority)} entries for {len(inputs)} prompts",
                    param="priority",
                )
            inputs = [replace(i, priority=p) for i, p in zip(inputs, priority, strict=True)]
        return self._run(inputs, sampling_params, use_tqdm=use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: Params = None,
        *,
        use_tqdm: bool = False,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        chat_template: str | None = None,
    ) -> list[RequestOutput]:
        """Answer one or several conversations, rendered with `chat_template` or the model's own."""
        conversations = [messages] if _is_conversation(messages) else messages
        inputs = [
            _Input(
                ChatPrompt(
                    cast(Sequence[Message], conversation),
                    add_generation_prompt=add_generation_prompt,
                    continue_final_message=continue_final_message,
                    template_kwargs=dict(chat_template_kwargs or {}),
                    chat_template=chat_template,
                )
            )
            for conversation in conversations
        ]
        return self._run(inputs, sampling_params, use_tqdm=use_tqdm)

    def embed(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        *,
        dimensions: int | None = None,
        prompt_name: str | None = None,
        pooling_params: PoolingParams | None = None,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool = False,
    ) -> list[EmbeddingOutput]:
        """A vector of each prompt, as the model's files say; in the order of the prompts.

        dimensions: keep so many numbers of each. prompt_name: one of the texts in the model's files
        that go in front. pooling_params: other than what the files say. truncate_prompt_tokens: cut
        longer prompts; -1: to what fits. Raises `RequestError` for a bad prompt before anything
        runs, and the cause of a request that the engine failed.
        """
        info = self.model.pooling
        pooling = pooling_params or info.params(dimensions)
        if pooling_params is not None and dimensions is not None:
            raise RequestError("pooling_params has its own dimensions", param="dimensions")
        front = info.text(prompt_name)
        params = SamplingParams(truncate_prompt_tokens=truncate_prompt_tokens)
        inputs = [_read_prompt(prompt) for prompt in _as_list(prompts)]
        if front:
            inputs = [
                replace(i, prompt=front + i.prompt) if isinstance(i.prompt, str) else i
                for i in inputs
            ]
        inputs = [replace(i, pooling=pooling) for i in inputs]
        self._check_open()
        requests = [self._request(i, given, params) for i, given in enumerate(inputs)]
        builders = {r.request_id: EmbeddingOutputBuilder(r.prompt_token_ids) for r in requests}
        self._run_all(requests, builders, use_tqdm=use_tqdm)
        return [builder.build() for builder in builders.values()]

    def get_tokenizer(self) -> Tokenizer:
        """The tokenizer. Raises `ConfigError` if there is none."""
        if self._engine.tokenizer is None:
            raise ConfigError("there is no tokenizer: skip_tokenizer_init is set")
        return self._engine.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """The model's recommended sampling, from its generation_config.json."""
        return SamplingParams(**self.model.default_params)

    def reset_prefix_cache(self) -> bool:
        """Drop every cached prefix. False if a running request uses some, never while idle."""
        return self._engine.reset_prefix_cache()

    def sleep(self, level: SleepLevel = 1) -> None:
        """Release memory until `wake_up`: the KV cache, and at level 1 GPU weights, which move to
        main memory; at level 2 all weights, which are read from disk again."""
        self._engine.sleep(level)

    def wake_up(self) -> None:
        """Allocate the memory again. On failure raises `EngineError` and stays asleep."""
        self._engine.wake_up()

    def shutdown(self) -> None:
        """Free the model. Idempotent; no other method may be called afterwards."""
        if self._is_open:
            self._is_open = False
            self._engine.shutdown()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.shutdown()

    def _run(
        self, inputs: Sequence[_Input], sampling_params: Params, *, use_tqdm: bool
    ) -> list[RequestOutput]:
        self._check_open()
        params = self._params_for(len(inputs), sampling_params)
        requests = [self._request(i, inputs[i], params[i]) for i in range(len(inputs))]
        builders = {
            request.request_id: RequestOutputBuilder(
                request.request_id,
                prompt=given.prompt if isinstance(given.prompt, str) else None,
                prompt_token_ids=request.prompt_token_ids,
                n=request.params.n,
            )
            for request, given in zip(requests, inputs, strict=True)
        }
        self._run_all(requests, builders, use_tqdm=use_tqdm)
        outputs = [_checked(builders[request.request_id].build(), request) for request in requests]
        _warn_of_failures(outputs)
        return outputs

    def _check_open(self) -> None:
        if not self._is_open:
            raise EngineError("this LLM has been shut down")
        if self._engine.sleep_level:
            raise EngineError("this LLM sleeps; call wake_up first")

    def _run_all(
        self,
        requests: Sequence[GenerationRequest],
        builders: Mapping[str, OutputBuilder],
        *,
        use_tqdm: bool,
    ) -> None:
        try:
            for request in requests:
                self._engine.add(request)
            with quick_lock():
                self._step_until_done(builders, use_tqdm=use_tqdm)
        except BaseException:
            # Ctrl-C or a failure: leave no request of this call running
            for request in requests:
                self._engine.abort(request.request_id)
            raise

    def _params_for(self, count: int, given: Params) -> Sequence[SamplingParams]:
        if given is None:
            given = self.get_default_sampling_params()
        if isinstance(given, SamplingParams):
            return [given] * count
        if not isinstance(given, Sequence):
            raise _wrong_params(given)
        if len(given) != count:
            raise RequestError(
                f"sampling_params has {len(given)} entries for {count} prompts; "
                "give one for all or one each",
                param="sampling_params",
            )
        for params in given:
            if not isinstance(params, SamplingParams):
                raise _wrong_params(params)
        return given

    def _request(self, index: int, given: _Input, params: SamplingParams) -> GenerationRequest:
        try:
            return self._engine.input_processor.process(
                given.prompt,
                params,
                request_id=str(next(self._ids)),
                priority=given.priority,
                cache_salt=given.cache_salt,
                pooling=given.pooling,
            )
        except RequestError as error:
            error.add_note(f"in prompt {index}")
            raise

    def _step_until_done(self, builders: Mapping[str, OutputBuilder], *, use_tqdm: bool) -> None:
        num_tokens = 0
        with tqdm(total=len(builders), desc="requests", disable=not use_tqdm) as bar:
            while self._engine.has_unfinished:
                for delta in self._engine.step():
                    builder = builders.get(delta.request_id)
                    if builder is None:  # a late delta of an interrupted call
                        continue
                    builder.add(delta)
                    num_tokens += len(delta.token_ids)
                    if builder.finished:
                        bar.update()
                if use_tqdm:
                    bar.set_postfix_str(f"{num_tokens} tokens", refresh=False)
        assert all(b.finished for b in builders.values()), "the engine lost a request"


def _checked(output: RequestOutput, request: GenerationRequest) -> RequestOutput:
    """The output with what its answers do not satisfy of their form."""
    check = None if request.grammar is None else request.grammar.check
    if check is None:
        return output
    answers = [
        replace(answer, schema_errors=check.errors(answer.text))
        if is_whole(answer.finish_reason, answer.stop_reason)
        else answer
        for answer in output.outputs
    ]
    return replace(output, outputs=answers)


@dataclass(frozen=True, slots=True)
class _Input:
    prompt: Prompt
    cache_salt: str | None = None
    priority: int = 0
    pooling: PoolingParams | None = None


def _engine_config(model: str | None, options: Mapping[str, Any]) -> EngineConfig:
    known = {f.name for f in fields(EngineConfig)} - {"model"}
    for name in options:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise ConfigError(f"unknown engine option {name!r}{hint}", param=name)
    return EngineConfig(model=model, **options)


def _is_token_ids(value: object) -> TypeGuard[Sequence[int]]:
    return (
        isinstance(value, Sequence)
        and not isinstance(value, str)
        and len(value) > 0
        and isinstance(value[0], int)
    )


def _wrong_params(given: object) -> RequestError:
    return RequestError(
        f"sampling_params must be SamplingParams, not {type(given).__name__}",
        param="sampling_params",
    )


def _as_list(prompts: PromptInput | Sequence[PromptInput]) -> Sequence[PromptInput]:
    """Prompts as a list; text, a dict and a flat list of ids are a single prompt."""
    if isinstance(prompts, (str, Mapping)) or _is_token_ids(prompts):
        return [prompts]
    if not isinstance(prompts, Sequence):
        raise RequestError(
            f"prompts must be text, token ids or a list of them, not {type(prompts).__name__}",
            param="prompts",
        )
    return cast(Sequence[PromptInput], prompts)


def _read_prompt(given: PromptInput) -> _Input:
    if not isinstance(given, Mapping):
        return _Input(given)
    if unknown := given.keys() - PROMPT_KEYS:
        raise RequestError(
            f"unknown key {min(unknown)!r} in a prompt: it may have "
            f"{', '.join(sorted(PROMPT_KEYS))}",
            param=min(unknown),
        )
    # token ids take precedence over text, as in vLLM
    prompt = given.get("prompt_token_ids", given.get("prompt"))
    if prompt is None:
        raise RequestError("a prompt needs `prompt` or `prompt_token_ids`", param="prompt")
    return _Input(prompt, given.get("cache_salt"))


def _is_conversation(
    messages: Sequence[Message] | Sequence[Sequence[Message]],
) -> TypeGuard[Sequence[Message]]:
    return len(messages) > 0 and isinstance(messages[0], Mapping)


def _warn_of_failures(outputs: Sequence[RequestOutput]) -> None:
    errors = [o.error for output in outputs for o in output.outputs if o.error is not None]
    if errors:
        warnings.warn(
            f"{len(errors)} of {len(outputs)} requests failed: {errors[0]}",
            RuntimeWarning,
            stacklevel=4,
        )
