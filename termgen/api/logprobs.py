"""Log-probabilities in OpenAI's two shapes: a list of objects for chat, parallel lists for text.

JSON has no infinity: probabilities of zero are reported as -9999, as OpenAI and vLLM do.
"""

from __future__ import annotations

import codecs
import math
from collections.abc import Sequence
from typing import Any

from termgen.client import TokenLogprob

LOWEST = -9999.0


def json_logprob(logprob: float) -> float:
    """A value that JSON can hold: at least `LOWEST`, also for the NaN of a lost row."""
    return max(LOWEST, logprob)  # in this order: a NaN is not larger


def chat_logprobs_object(
    logprobs: Sequence[TokenLogprob], *, tokens_as_ids: bool
) -> dict[str, Any]:
    """The `logprobs` object of a chat choice."""
    content = []
    for lp in logprobs:
        entry = _chat_entry(lp.token_id, lp.token, lp.token_bytes, lp.logprob, tokens_as_ids)
        entry["top_logprobs"] = [_chat_entry(*alternative, tokens_as_ids) for alternative in lp.top]
        content.append(entry)
    return {"content": content, "refusal": None}


def _chat_entry(
    token_id: int, token: str, token_bytes: bytes, logprob: float, tokens_as_ids: bool
) -> dict[str, Any]:
    return {
        "token": f"token_id:{token_id}" if tokens_as_ids else token,
        "logprob": json_logprob(logprob),
        "bytes": list(token_bytes),
    }


def prompt_logprobs_list(logprobs: Sequence[TokenLogprob]) -> list[dict[str, Any] | None]:
    """The `prompt_logprobs` list, in vLLM's shape: candidates by token id, null for the first."""
    return [None if math.isnan(lp.logprob) else _candidates(lp) for lp in logprobs]


def _candidates(lp: TokenLogprob) -> dict[str, Any]:
    found = {str(lp.token_id): _candidate(lp.logprob, lp.rank, lp.token)}
    for rank, (token_id, token, _, logprob) in enumerate(lp.top, start=1):
        found.setdefault(str(token_id), _candidate(logprob, rank, token))
    return found


def _candidate(logprob: float, rank: int, token: str) -> dict[str, Any]:
    return {"logprob": json_logprob(logprob), "rank": rank, "decoded_token": token}


class TextLogprobs:
    """Builds the `logprobs` objects of one text choice, and keeps its running `text_offset`.

    Offsets count characters of the decoded text, so that tokens which are part of a character
    share the offset of that character. The first token of a prompt has null for a probability.
    """

    __slots__ = ("_decoder", "_num_top", "_offset", "_tokens_as_ids")

    def __init__(self, *, num_top: int, tokens_as_ids: bool, offset: int = 0) -> None:
        self._num_top = num_top
        self._tokens_as_ids = tokens_as_ids
        self._offset = offset
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def build_echo(
        self, echo: str, prompt: Sequence[TokenLogprob], generated: Sequence[TokenLogprob]
    ) -> dict[str, Any]:
        """The logprobs of an answer that begins with its prompt, `echo`.

        Special tokens that the tokenizer put before the text are not in it: they share offset 0.
        """
        prompt_bytes = b"".join(lp.token_bytes for lp in prompt)
        self._offset = len(echo) - len(prompt_bytes.decode("utf-8", "replace"))
        return self.build([*prompt, *generated])

    def build(self, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
        offsets: list[int] = []
        tops: list[dict[str, float] | None] = []
        for lp in logprobs:
            offsets.append(max(0, self._offset))
            self._offset += len(self._decoder.decode(lp.token_bytes))
            tops.append(None if math.isnan(lp.logprob) else self._top(lp))
        values = [None if math.isnan(lp.logprob) else json_logprob(lp.logprob) for lp in logprobs]
        return {
            "text_offset": offsets,
            "token_logprobs": values,
            "tokens": [self._name(lp.token_id, lp.token, lp.token_bytes) for lp in logprobs],
            "top_logprobs": tops if self._num_top else None,
        }

    def _top(self, lp: TokenLogprob) -> dict[str, float]:
        top: dict[str, float] = {}
        chosen = (lp.token_id, lp.token, lp.token_bytes, lp.logprob)
        for token_id, token, token_bytes, logprob in (*lp.top, chosen):
            # most likely first: a second token of the same name must not hide the first
            top.setdefault(self._name(token_id, token, token_bytes), json_logprob(logprob))
        return top

    def _name(self, token_id: int, token: str, token_bytes: bytes) -> str:
        """A token's text; pieces of characters, which all read U+FFFD, are named by their bytes."""
        if self._tokens_as_ids:
            return f"token_id:{token_id}"
        if "\ufffd" not in token:
            return token
        try:
            token_bytes.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token_bytes)
        return token
