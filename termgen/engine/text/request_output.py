"""A finished answer or vector as one value, in vLLM's format, and its builder from deltas.

For callers that want the whole answer instead of a stream. No torch, no tokenizer: the text is the
deltas' text, joined.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from termgen.client import RequestTimings, TokenDelta, TokenLogprob
from termgen.errors import EngineError, TermgenError
from termgen.vocabulary.device.pooling import FloatVector
from termgen.vocabulary.request import FinishReason


@dataclass(frozen=True, slots=True)
class Logprob:
    """One candidate token at one position."""

    logprob: float
    rank: int
    """1 = most likely."""
    decoded_token: str


def candidates(entry: TokenLogprob) -> dict[int, Logprob]:
    """The sampled token first, then the most likely ones, best first."""
    found = {entry.token_id: Logprob(entry.logprob, entry.rank, entry.token)}
    for rank, (token_id, token, _, logprob) in enumerate(entry.top, start=1):
        found.setdefault(token_id, Logprob(logprob, rank, token))
    return found


def prompt_candidates(
    entries: Sequence[TokenLogprob] | None,
) -> list[dict[int, Logprob] | None] | None:
    """Candidates for every prompt token; None for the first, which has no probability."""
    return None if entries is None else [None, *map(candidates, entries[1:])]


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One of a request's `n` answers."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    """Sum over `logprobs`; None unless requested."""
    logprobs: list[dict[int, Logprob]] | None
    """For each token: candidates by token id, the sampled one first."""
    finish_reason: FinishReason | None
    """None while it is still being generated."""
    stop_reason: int | str | None
    timings: RequestTimings | None = None
    error: TermgenError | None = None
    schema_errors: tuple[str, ...] | None = None
    """What a whole answer does not satisfy of a schema that was given with `strict` false, one line
    each. None: it was not checked, as the schema is enforced in full, or the answer was cut off."""

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A request and its answers, ordered by index."""

    request_id: str
    prompt: str | None
    """The prompt as text, if the caller gave text."""
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int
    """Prefix-cache hits, in tokens, of the answer with the most."""
    timings: RequestTimings | None = None
    """Times of the answer that finished last."""
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    """For each token of the prompt: candidates by token id, the prompt's own first. The first
    token has none."""


class _CompletionParts:
    """What has arrived of one answer."""

    __slots__ = ("last", "logprobs", "texts", "token_ids")

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprob] | None = None
        self.last: TokenDelta | None = None

    def add(self, delta: TokenDelta) -> None:
        self.texts.append(delta.text)
        self.token_ids.extend(delta.token_ids)
        if delta.logprobs is not None:
            self.logprobs = [] if self.logprobs is None else self.logprobs
            self.logprobs.extend(delta.logprobs)
        self.last = delta

    def build(self, index: int) -> CompletionOutput:
        last, logprobs = self.last, self.logprobs
        return CompletionOutput(
            index=index,
            text="".join(self.texts),
            token_ids=list(self.token_ids),
            cumulative_logprob=None if logprobs is None else sum(e.logprob for e in logprobs),
            logprobs=None if logprobs is None else list(map(candidates, logprobs)),
            finish_reason=last.finish_reason if last else None,
            stop_reason=last.stop_reason if last else None,
            timings=last.timings if last else None,
            error=last.error if last else None,
        )


class RequestOutputBuilder:
    """Collects the deltas of one request; `build` may be called at any time."""

    def __init__(
        self,
        request_id: str,
        *,
        prompt: str | None = None,
        prompt_token_ids: Sequence[int] = (),
        n: int = 1,
    ) -> None:
        self.request_id = request_id
        self._prompt = prompt
        self._prompt_token_ids = tuple(prompt_token_ids)
        self._parts = [_CompletionParts() for _ in range(n)]
        self._prompt_logprobs: tuple[TokenLogprob, ...] | None = None
        self._num_cached_tokens = 0
        self._num_unfinished = n

    @property
    def finished(self) -> bool:
        """All answers have ended."""
        return self._num_unfinished == 0

    def add(self, delta: TokenDelta) -> None:
        assert delta.request_id == self.request_id, "delta of another request"
        self._parts[delta.index].add(delta)
        self._num_cached_tokens = max(self._num_cached_tokens, delta.num_cached_tokens)
        if delta.prompt_token_ids is not None:
            self._prompt_token_ids = delta.prompt_token_ids
        if delta.prompt_logprobs is not None:
            self._prompt_logprobs = delta.prompt_logprobs
        if delta.finish_reason is not None:
            self._num_unfinished -= 1

    def build(self) -> RequestOutput:
        outputs = [parts.build(index) for index, parts in enumerate(self._parts)]
        timings = [o.timings for o in outputs if o.timings is not None]
        return RequestOutput(
            request_id=self.request_id,
            prompt=self._prompt,
            prompt_token_ids=list(self._prompt_token_ids),
            outputs=outputs,
            finished=self.finished,
            num_cached_tokens=self._num_cached_tokens,
            timings=max(timings, key=lambda t: t.finished_ns, default=None),
            prompt_logprobs=prompt_candidates(self._prompt_logprobs),
        )


class OutputBuilder(Protocol):
    """Collects the deltas of one request."""

    @property
    def finished(self) -> bool: ...

    def add(self, delta: TokenDelta) -> None: ...


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """A prompt and its vector."""

    prompt_token_ids: tuple[int, ...]
    embedding: FloatVector = field(repr=False)
    """float32"""
    num_cached_tokens: int = 0
    timings: RequestTimings | None = None


class EmbeddingOutputBuilder:
    """An `OutputBuilder` of an `EmbeddingOutput`."""

    def __init__(self, prompt_token_ids: tuple[int, ...]) -> None:
        self._prompt = prompt_token_ids
        self._last: TokenDelta | None = None

    @property
    def finished(self) -> bool:
        return self._last is not None

    def add(self, delta: TokenDelta) -> None:
        self._last = delta

    def build(self) -> EmbeddingOutput:
        """Raises the error of a request that the engine failed."""
        last = self._last
        assert last is not None, "the engine has answered"
        if last.vector is None:
            raise last.error or EngineError("the request was aborted")
        return EmbeddingOutput(self._prompt, last.vector, last.num_cached_tokens, last.timings)
