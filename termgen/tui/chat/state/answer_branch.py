"""Goes on with an answer from one of its tokens: another is put there, all before it is kept.

The engine is given token ids and no text, so the prompt is exactly the tokens kept and the one
chosen, whatever a tokenizer would make of their text. No Textual.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, replace

from termgen.client import EngineClient, TokenDelta
from termgen.tui.chat.state.thoughts import (
    AnswerNews,
    PlainReader,
    Reader,
    joined,
    open_reader,
    reading_params,
)
from termgen.tui.chat.state.token_scores import TokenScores, ends_inside_character
from termgen.vocabulary.request import FinishReason
from termgen.vocabulary.sampling_params import SamplingParams

NUM_TAIL_TOKENS = 8
"""Before the seam; a character has at most four."""
MAX_SEAM_TOKENS = 8
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True, slots=True)
class Branch:
    prompt_ids: tuple[int, ...]
    kept_ids: tuple[int, ...]
    """The beginning of the answer."""
    token_id: int
    """The token to put at the branch."""
    is_partial: bool
    """True if the text with this token ends inside a character."""
    is_whole: bool
    """The answer begins where the model began, before its thoughts."""


def branch_at(
    scores: TokenScores, index: int, token_id: int, data: bytes, *, whole: bool
) -> Branch:
    """The branch that has this token, with these bytes, in place of the answer's token at
    `index`."""
    at = scores.start + index
    return Branch(
        prompt_ids=tuple(scores.ids[: scores.start]),
        kept_ids=tuple(scores.ids[scores.start : at]),
        token_id=token_id,
        is_partial=ends_inside_character(scores.data(index, 3) + data),
        is_whole=whole,
    )


async def read_branch(
    client: EngineClient, branch: Branch, params: SamplingParams, *, request_id: str
) -> AsyncGenerator[AnswerNews, None]:
    """Stream the branch: first the kept text, as news without a token, then the answer. Closing it
    aborts the request."""
    params = replace(params, structured_outputs=None)  # its grammar would begin anew
    reader: Reader = PlainReader()
    if branch.is_whole:
        params = reading_params(client, params)
        reader = await open_reader(client, params, branch.prompt_ids)
    ends = await _ends(client, branch, params)
    kept = list(branch.kept_ids) if ends else [*branch.kept_ids, branch.token_id]
    text = await _settled(client, kept, is_partial=branch.is_partial and not ends)
    pieces = reader.feed(text)
    if ends:
        pieces = joined([pieces, reader.finish()])
    yield AnswerNews(_kept_delta(request_id, branch, text, ends=ends), pieces)
    if ends:
        return
    seam = _Seam(client, kept[-NUM_TAIL_TOKENS:], is_partial=branch.is_partial)
    stream = client.generate([*branch.prompt_ids, *kept], params, request_id=request_id)
    async with contextlib.aclosing(stream) as deltas:
        async for delta in deltas:
            pieces = reader.feed(await seam.text_of(delta))
            if delta.finish_reason is not None:
                pieces = joined([pieces, reader.finish()])
            yield AnswerNews(replace(delta, prompt_token_ids=None), pieces)


async def _ends(client: EngineClient, branch: Branch, params: SamplingParams) -> bool:
    """True if the token ends an answer. Only the engine knows, so the engine is made to draw it. A
    stop string in it does not end the answer: the user has chosen it."""
    params = replace(
        params,
        allowed_token_ids=(branch.token_id,),
        bad_words=(),
        max_tokens=1,
        min_tokens=0,
        stop=(),
    )
    reason = None
    stream = client.generate([*branch.prompt_ids, *branch.kept_ids], params)
    async with contextlib.aclosing(stream) as deltas:
        async for delta in deltas:
            if delta.error is not None:
                raise delta.error
            reason = delta.finish_reason or reason
    return reason is FinishReason.STOP


def _kept_delta(request_id: str, branch: Branch, text: str, *, ends: bool) -> TokenDelta:
    return TokenDelta(
        request_id=request_id,
        index=0,
        text=text,
        token_ids=(*branch.kept_ids, branch.token_id),
        logprobs=None,
        finish_reason=FinishReason.STOP if ends else None,
        stop_reason=None,
        num_prompt_tokens=len(branch.prompt_ids) + len(branch.kept_ids),
        num_cached_tokens=0,
        num_output_tokens=int(ends),
        prompt_token_ids=branch.prompt_ids,
    )


async def _settled(client: EngineClient, ids: Sequence[int], *, is_partial: bool) -> str:
    """Their text without the character that is not complete."""
    text = await client.detokenize(ids) if ids else ""
    return text.removesuffix(_REPLACEMENT) if is_partial else text


class _Seam:
    """The stream's text begins as a text of its own does: with half characters for the end of one
    that the kept tokens began, or without a leading space. Here it is joined to what is kept."""

    def __init__(self, client: EngineClient, tail: Sequence[int], *, is_partial: bool) -> None:
        self._client = client
        self._tail = list(tail)
        self._is_partial = is_partial
        self._ids: list[int] = []
        self._text = ""
        self._is_past = False

    async def text_of(self, delta: TokenDelta) -> str:
        if self._is_past:
            return delta.text
        self._ids += delta.token_ids
        self._text += delta.text
        is_last = delta.finish_reason is not None or len(self._ids) >= MAX_SEAM_TOKENS
        if not self._text.strip(_REPLACEMENT) and not is_last:
            return ""
        self._is_past = True
        if not self._ids:
            return self._text
        before = await _settled(self._client, self._tail, is_partial=self._is_partial)
        both = await self._client.detokenize([*self._tail, *self._ids])
        alone = await self._client.detokenize(self._ids)
        # What the stream holds back, or has cut off at a stop, is not shown here either.
        return both[len(before) : len(both) - (len(alone) - len(self._text))]
