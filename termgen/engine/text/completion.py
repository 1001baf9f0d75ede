"""What the output processor remembers of one running completion: its text, counts and stamps."""

from __future__ import annotations

from collections.abc import Sequence

from termgen.client import TokenLogprob
from termgen.engine.text.detokenizer import Detokenizer
from termgen.vocabulary.delivery import FinishedRow
from termgen.vocabulary.request import GenerationRequest


class PromptScores:
    """Log-probabilities of a prompt's tokens as its chunks are computed.

    A prompt that is preempted is computed again from its start: what comes twice is the same.
    """

    __slots__ = ("_entries", "_num_missing", "num_top")

    def __init__(self, num_top: int, num_prompt_tokens: int) -> None:
        self.num_top = num_top
        self._entries: list[TokenLogprob | None] = [None] * num_prompt_tokens
        self._num_missing = num_prompt_tokens

    def put(self, start: int, entries: Sequence[TokenLogprob]) -> None:
        for position, entry in enumerate(entries, start):
            self._num_missing -= self._entries[position] is None
            self._entries[position] = entry

    def take(self) -> tuple[TokenLogprob, ...] | None:
        """All of them, once they are there."""
        if self._num_missing:
            return None
        return tuple(entry for entry in self._entries if entry is not None)


class Completion:
    """From the request to its last delta."""

    __slots__ = (
        "arrival_ns",
        "detokenizer",
        "first_scheduled_ns",
        "first_token_ns",
        "index",
        "num_cached_tokens",
        "num_copies",
        "num_logprobs",
        "num_output_tokens",
        "num_prompt_tokens",
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
        """Until they are out."""
        if params.prompt_logprobs is not None:
            self.prompt_logprobs = PromptScores(params.prompt_logprobs, self.num_prompt_tokens)
        self.num_copies = 1
        """Completions that this one stands for."""
        self.num_output_tokens = 0
        self.num_cached_tokens = 0
        self.arrival_ns = arrival_ns
        self.first_scheduled_ns = 0
        self.first_token_ns = 0
        self.row: tuple[int, int] | None = None
        self.undecided: int | None = None
        """A stop token whose `FinishedRow` has not come yet: its text waits for that."""

    def push(self, token_ids: Sequence[int], finished: FinishedRow | None) -> tuple[str, int]:
        """Text that can be shown now, and how many of the tokens belong to the answer."""
        detokenizer = self.detokenizer
        if detokenizer is None:
            self.num_output_tokens += len(token_ids)
            return "", len(token_ids)
        text = self._settle(detokenizer)
        last = len(token_ids) - 1
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
        return text, len(token_ids)

    def finish(self, *, stopped_by_token: bool) -> str:
        """Text held back until now, at an end that no stop string made."""
        detokenizer = self.detokenizer
        if detokenizer is None or detokenizer.stop is not None:
            return ""
        if stopped_by_token:
            self.undecided = None
        text = self._settle(detokenizer)
        return text + detokenizer.finish()

    def _settle(self, detokenizer: Detokenizer) -> str:
        """The engine went on past a stop token (min_tokens): it was an ordinary token after all."""
        if self.undecided is None:
            return ""
        token_id, self.undecided = self.undecided, None
        return detokenizer.push(token_id)
