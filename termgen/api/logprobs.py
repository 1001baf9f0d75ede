"""Log-probabilities in OpenAI's two shapes: a list of objects for chat, parallel lists for text.

JSON has no infinity: probabilities of zero are reported as -9999, as OpenAI and vLLM do.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

from termgen.client import TokenLogprob

LOWEST = -9999.0


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
        "logprob": max(logprob, LOWEST),
        "bytes": list(token_bytes),
    }


class TextLogprobs:
    """Builds the `logprobs` objects of one text choice, and keeps its running `text_offset`.

    Offsets count characters of the decoded text, so that tokens which are part of a character
    share the offset of that character.
    """

    __slots__ = ("_decoder", "_num_top", "_offset", "_tokens_as_ids")

    def __init__(self, *, num_top: int, tokens_as_ids: bool, offset: int = 0) -> None:
        self._num_top = num_top
        self._tokens_as_ids = tokens_as_ids
        self._offset = offset
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def build(self, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
        offsets: list[int] = []
        tops: list[dict[str, float]] = []
        for lp in logprobs:
            offsets.append(self._offset)
            self._offset += len(self._decoder.decode(lp.token_bytes))
            tops.append(self._top(lp))
        return {
            "text_offset": offsets,
            "token_logprobs": [max(lp.logprob, LOWEST) for lp in logprobs],
            "tokens": [self._name(lp.token_id, lp.token, lp.token_bytes) for lp in logprobs],
            "top_logprobs": tops if self._num_top else None,
        }

    def _top(self, lp: TokenLogprob) -> dict[str, float]:
        top: dict[str, float] = {}
        chosen = (lp.token_id, lp.token, lp.token_bytes, lp.logprob)
        for token_id, token, token_bytes, logprob in (*lp.top, chosen):
            # most likely first: a second token of the same name must not hide the first
            top.setdefault(self._name(token_id, token, token_bytes), max(logprob, LOWEST))
        return top

    def _name(self, token_id: int, token: str, token_bytes: bytes) -> str:
        """A token's text; pieces of characters, which all read U+FFFD, by their bytes."""
        if self._tokens_as_ids:
            return f"token_id:{token_id}"
        try:
            token_bytes.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token_bytes)
        return token
