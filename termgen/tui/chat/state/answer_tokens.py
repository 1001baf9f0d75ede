"""The token ids of answers of this run: what an answer really was, which its text does not tell.

The dialogue fills it as deltas arrive, and forgets it when another model answers. Bounded; saved
chats do not hold it. No Textual.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from termgen.client import ChatPrompt, EngineClient, Prompt, TokenDelta, TokenLogprob
from termgen.errors import EngineError, RequestError
from termgen.tui.chat.state.token_scores import NUM_ALTERNATIVES, TokenScores
from termgen.vocabulary.request import FinishReason
from termgen.vocabulary.sampling_params import SamplingParams

MAX_IDS = 250_000
"""Ids kept over all answers; the newest answer is kept whatever its length."""

_UNKNOWN_TO_SERVERS = frozenset(
    ("prompt_logprobs", "add_generation_prompt", "continue_final_message")
)


@dataclass(frozen=True, slots=True)
class WrittenTokens:
    prompt_ids: Sequence[int]
    answer_ids: list[int] = field(default_factory=list)
    """Every token that the model wrote, thoughts and the final token included."""

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.answer_ids)


class AnswerTokens:
    def __init__(self, max_ids: int = MAX_IDS) -> None:
        self._max_ids = max_ids
        self._written: OrderedDict[str, WrittenTokens] = OrderedDict()

    def take(self, turn_id: str, delta: TokenDelta) -> None:
        """Keep the tokens of an answer, if the server sends its prompt's ids too."""
        if delta.prompt_token_ids is not None:
            self._written[turn_id] = WrittenTokens(delta.prompt_token_ids)
            self._make_room()
        written = self._written.get(turn_id)
        if written is not None:
            written.answer_ids.extend(delta.token_ids)

    def get(self, turn_id: str) -> WrittenTokens | None:
        return self._written.get(turn_id)

    def clear(self) -> None:
        self._written.clear()

    def _make_room(self) -> None:
        num_ids = sum(map(len, self._written.values()))
        while num_ids > self._max_ids and len(self._written) > 1:
            num_ids -= len(self._written.popitem(last=False)[1])


async def score_written(client: EngineClient, written: WrittenTokens) -> TokenScores:
    """Score the very tokens that the model wrote. Raises RequestError, EngineError."""
    prompt_ids = list(written.prompt_ids)
    ids = prompt_ids + written.answer_ids
    if client.model.max_model_len:  # a request needs room for a token of its own
        ids = ids[: client.model.max_model_len - 1]
    _, entries = await _read_again(client, ids)
    return await asyncio.to_thread(_scores, ids, max(1, len(prompt_ids)), entries)


async def score_text(client: EngineClient, prompt: ChatPrompt, answer: str) -> TokenScores:
    """Score the tokens that the tokenizer makes of an answer, where the written ones are unknown.

    prompt: ends with the answer. Raises RequestError, EngineError.
    """
    ids, entries = await _read_again(client, prompt)
    wanted = answer.strip().encode()
    lengths = [len(entry.token_bytes) for entry in entries]
    begin = b"".join(entry.token_bytes for entry in entries).rfind(wanted)
    if begin < 0 or not wanted:
        raise EngineError("the chat template of this model does not show this answer as it is")
    start = 0
    while begin >= lengths[start]:
        begin -= lengths[start]
        start += 1
    return await asyncio.to_thread(_scores, ids, max(1, start), entries)


def _scores(ids: Sequence[int], start: int, entries: Sequence[TokenLogprob]) -> TokenScores:
    if len(ids) <= start:
        raise EngineError("there is no token to look at")
    return TokenScores(ids, start, entries[start:])


async def _read_again(
    client: EngineClient, prompt: Prompt
) -> tuple[Sequence[int], Sequence[TokenLogprob]]:
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=NUM_ALTERNATIVES)
    ids: Sequence[int] | None = None
    entries: Sequence[TokenLogprob] | None = None
    try:
        async with contextlib.aclosing(client.generate(prompt, params)) as deltas:
            async for delta in deltas:
                ids = delta.prompt_token_ids or ids
                entries = delta.prompt_logprobs or entries
                if delta.finish_reason is FinishReason.ERROR:
                    raise delta.error or EngineError("the engine failed this request")
    except RequestError as error:
        if error.param in _UNKNOWN_TO_SERVERS:
            raise EngineError(
                "a server elsewhere cannot tell how likely the tokens of a written answer were;"
                " termgen chat with a model of its own can"
            ) from error
        raise
    if ids is None or entries is None or len(ids) != len(entries):
        raise EngineError("the engine did not tell how likely the tokens were")
    return ids, entries
