"""Turns step deliveries into `TokenDelta`s: tokens become text here.

`OutputProcessor` has a front end's state of each running request (`Completion`: its detokenizer,
its counters), and the request of each (slot, epoch). It runs on the front end's thread (the event
loop, or the caller of an offline engine), once per step for all rows, so its cost per row is kept
small. It knows nothing of scheduling; a request ended by a stop string is reported by
`take_aborts`, and later deliveries for it are dropped.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from termgen.client import RequestTimings, TokenDelta, TokenLogprob
from termgen.engine.text.detokenizer import Detokenizer, StopAutomaton
from termgen.engine.text.logprobs import LogprobRows, PromptScores, TokenNames
from termgen.engine.text.request_output import CompletionOutput, RequestOutput, RequestOutputBuilder
from termgen.errors import RequestError
from termgen.vocabulary.request import FinishReason, GenerationRequest
from termgen.vocabulary.step import (
    FinishedRow,
    PromptLogprobs,
    StartedRow,
    StepDelivery,
)

if TYPE_CHECKING:
    from termgen.engine.text.tokenizer import Tokenizer


class Completion:
    """State of one running completion."""

    __slots__ = (
        "arrival_ns",
        "detokenizer",
        "first_scheduled_ns",
        "first_token_ns",
        "index",
        "num_accepted_tokens",
        "num_cached_tokens",
        "num_copies",
        "drafted",
        "num_draft_tokens",
        "num_logprobs",
        "num_output_tokens",
        "num_prompt_tokens",
        "pooling",
        "prompt_logprobs",
        "prompt_token_ids",
        "request_id",
        "row",
        "shown_stop_ids",
        "stop_ids",
        "stream_id",
        "undecided",
    )

    def __init__(
        self,
        request: GenerationRequest,
        *,
        stream_id: str,
        index: int,
        arrival_ns: int,
        eos_token_ids: frozenset[int],
        detokenizer: Detokenizer | None,
    ) -> None:
        params = request.params
        own_stops = frozenset(params.stop_token_ids)
        self.request_id = request.request_id
        self.stream_id = stream_id
        self.index = index
        self.detokenizer = detokenizer
        self.num_logprobs = params.logprobs
        self.stop_ids = own_stops if params.ignore_eos else own_stops | eos_token_ids
        self.shown_stop_ids = own_stops if params.include_stop_str_in_output else frozenset()
        self.num_prompt_tokens = len(request.prompt_token_ids)
        self.prompt_token_ids = request.prompt_token_ids if index == 0 else None
        self.prompt_logprobs: PromptScores | None = None
        """Set until they are delivered."""
        if params.prompt_logprobs is not None:
            self.prompt_logprobs = PromptScores(params.prompt_logprobs, self.num_prompt_tokens)
        self.pooling = request.pooling
        self.num_copies = 1
        """Identical (greedy) completions that this one represents."""
        self.num_output_tokens = 0
        self.num_cached_tokens = 0
        self.num_draft_tokens = self.num_accepted_tokens = 0
        self.drafted: tuple[tuple[int, int], ...] = ()
        """Places of guessed parts in the text pushed last."""
        self.arrival_ns = arrival_ns
        self.first_scheduled_ns = 0
        self.first_token_ns = 0
        self.row: tuple[int, int] | None = None
        self.undecided: int | None = None
        """A stop token whose `FinishedRow` has not arrived; its text is held back until then."""

    def push(
        self, token_ids: Sequence[int], finished: FinishedRow | None, *, num_guessed: int = 0
    ) -> tuple[str, int]:
        """(text that can be shown now, number of tokens that belong to the answer). num_guessed:
        the first tokens that were guessed."""
        detokenizer = self.detokenizer
        if detokenizer is None:
            self.num_output_tokens += len(token_ids)
            return "", len(token_ids)
        text = self._settle(detokenizer)
        begin, last = len(text), len(token_ids) - 1
        for position, token_id in enumerate(token_ids):
            if detokenizer.stop is not None:
                return text, position
            self.num_output_tokens += 1
            if position == last and token_id not in self.shown_stop_ids:
                if finished is None and token_id in self.stop_ids:
                    self.undecided = token_id
                    break
                if finished is not None and finished.stopped_by_token:
                    break
            text += detokenizer.push(token_id)
            if position < num_guessed and len(text) > begin:
                self.drafted = ((begin, len(text)),)
        return text, len(token_ids)

    def finish(self, *, stopped_by_token: bool) -> str:
        """Text held back so far, for an end other than by a stop string."""
        detokenizer = self.detokenizer
        if detokenizer is None or detokenizer.stop is not None:
            return ""
        if stopped_by_token:
            self.undecided = None
        text = self._settle(detokenizer)
        return text + detokenizer.finish()

    def _settle(self, detokenizer: Detokenizer) -> str:
        """Text of a stop token that the engine continued after (min_tokens): an ordinary token."""
        if self.undecided is None:
            return ""
        token_id, self.undecided = self.undecided, None
        return detokenizer.push(token_id)


__all__ = [
    "CompletionOutput",
    "OutputProcessor",
    "RequestOutput",
    "RequestOutputBuilder",
    "fan_out",
]


def fan_out(request: GenerationRequest) -> list[GenerationRequest]:
    """The engine requests for one submitted request: itself, or its `n` children.

    Child `i` has the id `<id>-<i>` and, if the request has a seed, the seed `seed + i`. The prompt
    is computed once, by the first child; the others hit the prefix cache. So only the first reports
    prompt logprobs. Greedy completions are identical: one is run, and the output processor copies
    it.
    """
    params = request.params
    if params.n == 1:
        return [request]
    if params.is_greedy:
        return [replace(request, params=replace(params, n=1))]
    return [
        replace(
            request,
            request_id=f"{request.request_id}-{index}",
            params=replace(
                params,
                n=1,
                seed=_child_seed(params.seed, index),
                prompt_logprobs=params.prompt_logprobs if index == 0 else None,
            ),
        )
        for index in range(params.n)
    ]


def _child_seed(seed: int | None, index: int) -> int | None:
    # wraps around in int64, so that the largest seed has children too
    return None if seed is None else (seed + index + 2**63) % 2**64 - 2**63


class OutputProcessor:
    """Turns the engine's deliveries into deltas. Used by one thread."""

    def __init__(self, tokenizer: Tokenizer | None, eos_token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._names = TokenNames(tokenizer)
        self._eos_token_ids = frozenset(eos_token_ids)
        self._completions: dict[str, Completion] = {}
        self._rows: dict[tuple[int, int], Completion] = {}
        self._children: dict[str, list[str]] = {}
        self._aborts: list[str] = []
        self._lingering: set[str] = set()
        """Requests that ended here but not yet in the engine: deliveries for them are dropped."""

    def __len__(self) -> int:
        """Number of completions that have not ended."""
        return len(self._completions)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._completions or request_id in self._children

    def expect(self, request: GenerationRequest, arrival_ns: int) -> list[GenerationRequest]:
        """Register a submitted request; returns the engine requests to run for it.

        An engine request has the submitted id, unless the engine still knows that id: deliveries
        for the earlier request must not reach this one. All or nothing.
        """
        self._refuse_known(request.request_id)
        completions = [
            replace(completion, request_id=self._unused(completion.request_id))
            for completion in fan_out(request)
        ]
        for index, completion in enumerate(completions):
            is_same = completion.request_id == request.request_id
            parent_id = None if is_same else request.request_id
            self.add(completion, arrival_ns, index=index, parent_id=parent_id)
        if len(completions) < request.params.n:
            self._completions[completions[0].request_id].num_copies = request.params.n
        return completions

    def add(
        self,
        request: GenerationRequest,
        arrival_ns: int,
        index: int = 0,
        parent_id: str | None = None,
    ) -> None:
        """Expect deliveries for this engine request. Its deltas carry `parent_id` and `index`."""
        self._refuse_known(request.request_id)
        completion = Completion(
            request,
            stream_id=parent_id or request.request_id,
            index=index,
            arrival_ns=arrival_ns,
            eos_token_ids=self._eos_token_ids,
            detokenizer=self._detokenizer(request),
        )
        if completion.prompt_logprobs is not None:
            first = request.prompt_token_ids[0]
            entry = TokenLogprob(first, *self._names[first], math.nan, rank=0)
            completion.prompt_logprobs.put(0, [entry])
        self._completions[request.request_id] = completion
        if parent_id is not None:
            self._children.setdefault(parent_id, []).append(request.request_id)

    def process(self, delivery: StepDelivery) -> list[TokenDelta]:
        """One step's deltas, at most one per completion and copy of it, in row order."""
        for started in delivery.started:
            self._start(started)
        for part in delivery.prompt_logprobs:
            self._keep_prompt_logprobs(part)
        finished = {row.request_id: row for row in delivery.finished}
        self._lingering.difference_update(finished)
        deltas: list[TokenDelta] = []
        token_ids: list[int] = delivery.token_ids.tolist()
        logprobs = LogprobRows(delivery.logprobs) if delivery.logprobs is not None else None
        by_token = logprobs is not None and len(logprobs) == len(token_ids)
        start = 0
        rows = zip(
            delivery.slots.tolist(),
            delivery.epochs.tolist(),
            delivery.num_tokens.tolist(),
            strict=True,
        )
        drafted = None if delivery.num_drafted is None else delivery.num_drafted.tolist()
        for row, (slot, epoch, count) in enumerate(rows):
            completion = self._rows.get((slot, epoch))
            if completion is not None and count:
                entries = None
                if logprobs is not None and completion.num_logprobs is not None:
                    first = start if by_token else row
                    entries = logprobs.entries(self._names, first, count, completion.num_logprobs)
                ended = finished.pop(completion.request_id, None)
                tokens = tuple(token_ids[start : start + count])
                num_drafted = drafted[row] if drafted else 0
                delta = self._advance(
                    completion, tokens, entries, ended, delivery.time_ns, num_drafted
                )
                deltas += _copies(delta, completion.num_copies)
            start += count
        for ended in finished.values():
            completion = self._completions.get(ended.request_id)
            if completion is not None:
                delta = self._end(completion, (), None, "", ended, delivery.time_ns)
                deltas += _copies(delta, completion.num_copies)
        return deltas

    def take_aborts(self) -> list[str]:
        """Engine requests ended by a stop string since the last call, for the engine to abort."""
        aborts, self._aborts = self._aborts, []
        return aborts

    def engine_ids(self, request_id: str) -> list[str]:
        """Unfinished engine requests of a submitted request."""
        ids = self._children.get(request_id, [request_id])
        return [i for i in ids if i in self._completions]

    def cancel(self, request_id: str) -> list[str]:
        """Forget a request that is no longer read. Returns the engine requests to abort."""
        ids = self.engine_ids(request_id)
        for engine_id in ids:
            self._forget(self._completions[engine_id])
        self._lingering.update(ids)
        return ids

    def _refuse_known(self, request_id: str) -> None:
        if request_id in self:
            raise RequestError(f"request id {request_id!r} is already in use", param="request_id")

    def _unused(self, wanted: str) -> str:
        names = itertools.chain((wanted,), (f"{wanted}~{i}" for i in itertools.count(2)))
        return next(n for n in names if n not in self and n not in self._lingering)

    def _detokenizer(self, request: GenerationRequest) -> Detokenizer | None:
        if self._tokenizer is None or request.pooling is not None:
            return None
        params = request.params
        return Detokenizer(
            self._tokenizer.token_decoder(skip_special_tokens=params.skip_special_tokens),
            stops=StopAutomaton(params.stop) if params.stop else None,
            include_stop=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
        )

    def _start(self, started: StartedRow) -> None:
        completion = self._completions.get(started.request_id)
        if completion is None:
            return
        if completion.row is not None:  # resumed after a preemption: the old epoch is dead
            self._rows.pop(completion.row, None)
        else:
            completion.num_cached_tokens = started.num_cached_tokens
            completion.first_scheduled_ns = started.first_scheduled_ns
        completion.row = (started.slot, started.epoch)
        self._rows[completion.row] = completion

    def _keep_prompt_logprobs(self, part: PromptLogprobs) -> None:
        completion = self._rows.get((part.slot, part.epoch))
        scores = completion.prompt_logprobs if completion is not None else None
        if completion is None or scores is None:
            return
        rows = LogprobRows(part.logprobs)
        scores.put(part.start, rows.entries(self._names, 0, len(rows), scores.num_top))

    def _advance(
        self,
        completion: Completion,
        token_ids: tuple[int, ...],
        logprobs: tuple[TokenLogprob, ...] | None,
        ended: FinishedRow | None,
        time_ns: int,
        num_drafted: int,
    ) -> TokenDelta:
        if not completion.first_token_ns:
            completion.first_token_ns = time_ns
        num_guessed = len(token_ids) - 1 if num_drafted else 0
        text, used = completion.push(token_ids, ended, num_guessed=num_guessed)
        if num_drafted:
            completion.num_draft_tokens += num_drafted
            completion.num_accepted_tokens += max(0, used - 1)
        detokenizer = completion.detokenizer
        if detokenizer is not None and detokenizer.stop is not None:
            if ended is None:
                self._aborts.append(completion.request_id)
                self._lingering.add(completion.request_id)
            ended = FinishedRow(completion.request_id, FinishReason.STOP, None, False)
            logprobs = logprobs and logprobs[:used]
            return self._end(completion, token_ids[:used], logprobs, text, ended, time_ns)
        if ended is not None:
            return self._end(completion, token_ids, logprobs, text, ended, time_ns)
        return _delta(completion, text, token_ids, logprobs)

    def _end(
        self,
        completion: Completion,
        token_ids: tuple[int, ...],
        logprobs: tuple[TokenLogprob, ...] | None,
        text: str,
        ended: FinishedRow,
        time_ns: int,
    ) -> TokenDelta:
        text += completion.finish(stopped_by_token=ended.stopped_by_token)
        vector = None
        if completion.pooling is not None and ended.vector is not None:
            vector = completion.pooling.finish(ended.vector)
            completion.first_token_ns = time_ns
        detokenizer = completion.detokenizer
        stop = detokenizer.stop if detokenizer is not None else None
        self._forget(completion)
        timings = RequestTimings(
            arrival_ns=completion.arrival_ns,
            first_scheduled_ns=completion.first_scheduled_ns,
            first_token_ns=completion.first_token_ns,
            finished_ns=time_ns,
        )
        reason = FinishReason.STOP if stop is not None else ended.reason
        stop_reason = stop if stop is not None else ended.stop_token_id
        delta = _delta(completion, text, token_ids, logprobs)
        return replace(
            delta,
            finish_reason=reason,
            stop_reason=stop_reason,
            timings=timings,
            error=ended.error,
            vector=vector,
        )

    def _forget(self, completion: Completion) -> None:
        del self._completions[completion.request_id]
        if completion.row is not None:
            self._rows.pop(completion.row, None)
        siblings = self._children.get(completion.stream_id)
        if siblings is not None:
            siblings.remove(completion.request_id)
            if not siblings:
                del self._children[completion.stream_id]


def _copies(delta: TokenDelta, count: int) -> list[TokenDelta]:
    """The same delta for every completion; fields of the prompt only in the first."""
    if count == 1:
        return [delta]
    bare = replace(delta, prompt_token_ids=None, prompt_logprobs=None)
    return [delta, *(replace(bare, index=index) for index in range(1, count))]


def _delta(
    completion: Completion,
    text: str,
    token_ids: tuple[int, ...],
    logprobs: tuple[TokenLogprob, ...] | None,
) -> TokenDelta:
    prompt_token_ids, completion.prompt_token_ids = completion.prompt_token_ids, None
    drafted, completion.drafted = completion.drafted, ()
    scores = completion.prompt_logprobs
    prompt_logprobs = scores.take() if scores is not None else None
    if prompt_logprobs is not None:
        completion.prompt_logprobs = None
    return TokenDelta(
        request_id=completion.stream_id,
        index=completion.index,
        text=text,
        token_ids=token_ids,
        logprobs=logprobs,
        finish_reason=None,
        stop_reason=None,
        num_prompt_tokens=completion.num_prompt_tokens,
        num_cached_tokens=completion.num_cached_tokens,
        num_output_tokens=completion.num_output_tokens,
        num_draft_tokens=completion.num_draft_tokens,
        num_accepted_tokens=completion.num_accepted_tokens,
        drafted=drafted,
        prompt_token_ids=prompt_token_ids,
        prompt_logprobs=prompt_logprobs,
    )
