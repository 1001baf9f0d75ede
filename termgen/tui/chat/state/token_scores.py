"""How likely each token of an answer was, and what else could have stood there.

Made from the engine's log-probabilities, which are those before temperature and all else that
changes them. Compact: some 300 bytes a token. The lens shows it; no Textual here.
"""

from __future__ import annotations

import codecs
import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from termgen.client import TokenLogprob
from termgen.tui.paint.sanitize import clean
from termgen.vocabulary.sampling_params import CUTS, SamplingParams

NUM_ALTERNATIVES = 10
LIKELY = (0.5, 0.2, 0.05)
"""Below each of these a token is one degree more of a surprise."""
UNSEEN_CUTS = CUTS.keys() - {"top_k", "top_p", "min_p"}
"""Where these cut cannot be seen from a few alternatives."""
SURPRISING = 2
"""The degree at which the reader stops."""


@dataclass(frozen=True, slots=True)
class Alternative:
    token_id: int
    data: bytes
    logprob: float
    rank: int
    """1 = most likely."""
    is_taken: bool
    """The one that stands there."""

    @property
    def probability(self) -> float:
        return math.exp(self.logprob)

    @property
    def text(self) -> str:
        """The token for display on one line; part of a character as its bytes."""
        try:
            return f'"{clean_token(self.data.decode())}"'
        except UnicodeDecodeError:
            return f"<{self.data.hex(' ').upper()}>"


class TokenScores:
    """Scores of an answer's tokens; the first `start` of `ids` are the prompt's."""

    def __init__(self, ids: Sequence[int], start: int, entries: Sequence[TokenLogprob]) -> None:
        """entries: one for each id from `start` on."""
        assert len(entries) == len(ids) - start, "an entry for each token"
        self.ids = array("i", ids)
        self.start = start
        self._logprobs = array("d", [entry.logprob for entry in entries])
        self._ranks = array("l", [entry.rank for entry in entries])
        self._tops = [
            (
                array("i", [token_id for token_id, *_ in entry.top]),
                array("f", [logprob for *_, logprob in entry.top]),
            )
            for entry in entries
        ]
        self._bytes = {entry.token_id: entry.token_bytes for entry in entries}
        for entry in entries:
            self._bytes.update((token_id, data) for token_id, _, data, _ in entry.top)
        self.pieces = _pieces([entry.token_bytes for entry in entries])
        """The text shown for each token; a character split over tokens is shown by its last one."""

    def __len__(self) -> int:
        return len(self._logprobs)

    def token_id(self, index: int) -> int:
        return self.ids[self.start + index]

    def probability(self, index: int) -> float:
        return math.exp(self._logprobs[index])

    def surprise(self, index: int) -> int:
        """0 (expected) to 3."""
        probability = self.probability(index)
        return sum(probability < bound for bound in LIKELY)

    def next_surprise(self, index: int, step: int) -> int | None:
        """The nearest token after (step 1) or before (-1) that surprises."""
        stop = len(self) if step > 0 else -1
        found = (i for i in range(index + step, stop, step) if self.surprise(i) >= SURPRISING)
        return next(found, None)

    def alternatives(self, index: int) -> list[Alternative]:
        """Most likely first; what stands there is the last one where it is not among them."""
        taken, (ids, logprobs) = self.token_id(index), self._tops[index]
        found = [
            Alternative(token_id, self._bytes[token_id], logprob, rank, token_id == taken)
            for rank, (token_id, logprob) in enumerate(zip(ids, logprobs, strict=True), 1)
        ]
        if taken not in ids:
            logprob, rank = self._logprobs[index], self._ranks[index]
            found.append(Alternative(taken, self._bytes[taken], logprob, rank, True))
        return found

    def entropy_bits(self, index: int) -> tuple[float, bool]:
        """Entropy of the choice in bits. Second: True if the tokens without a log-probability could
        add much to it."""
        shares = [math.exp(logprob) for logprob in self._tops[index][1]]
        rest = max(0.0, 1.0 - sum(shares))
        parts = [share for share in (*shares, rest) if share > 0]
        return -sum(share * math.log2(share) for share in parts), rest > 0.01

    def cut(self, index: int, params: SamplingParams, vocab_size: int) -> tuple[int, str] | None:
        """Number of the listed tokens that these parameters leave to sample from, and the parameter
        that cuts there. None if the cut is not among them."""
        return num_drawn(self._tops[index][1], params, vocab_size)

    def data(self, index: int, count: int = 1) -> bytes:
        """The bytes of the `count` tokens before `index`."""
        first = max(0, index - count)
        return b"".join(self._bytes[self.token_id(i)] for i in range(first, index))


def num_drawn(
    logprobs: Sequence[float], params: SamplingParams, vocab_size: int
) -> tuple[int, str] | None:
    """logprobs: of the most likely tokens, in order. What the others weigh is known at temperature
    1 only; else it is taken as the most that it can be."""
    if not logprobs:
        return None
    if params.is_greedy:
        return 1, "temperature 0"
    if any(getattr(params, name) != CUTS[name] for name in UNSEEN_CUTS):
        return None
    power = 1 / params.temperature
    weights = [math.exp((logprob - logprobs[0]) * power) for logprob in logprobs]
    total = sum(weights) + _rest_weight(logprobs, power, vocab_size)
    cuts: list[tuple[int, str]] = []
    if params.min_p > 0:
        kept = sum(weight >= params.min_p for weight in weights)
        if kept < len(weights):  # else it cuts further down, if at all
            cuts.append((max(1, kept), f"min-p {params.min_p:g}"))
    if params.top_k:
        cuts.append((params.top_k, f"top-k {params.top_k}"))
    limit = min((kept for kept, _ in cuts), default=len(weights) + 1)
    if limit <= len(weights):  # top-p counts what these leave
        total = sum(weights[:limit])
    if params.top_p < 1:
        reached = 0.0
        for kept, weight in enumerate(weights, 1):
            reached += weight
            if reached >= params.top_p * total:
                cuts.append((kept, f"top-p {params.top_p:g}"))
                break
    narrowest = min(cuts, default=None, key=lambda cut: cut[0])
    return narrowest if narrowest is not None and narrowest[0] < len(weights) else None


def _rest_weight(logprobs: Sequence[float], power: float, vocab_size: int) -> float:
    rest = 1.0 - sum(map(math.exp, logprobs))
    count = max(1, vocab_size - len(logprobs))
    if rest <= 0:
        return 0.0
    # the rest is as few tokens as possible below temperature 1, and evenly spread above it
    each = logprobs[-1] if power >= 1 else math.log(rest / count)
    return rest * math.exp(each * (power - 1) - logprobs[0] * power)


def clean_token(text: str) -> str:
    """Line breaks and tabs are seen, and not done."""
    return clean(text.replace("\n", "↵").replace("\t", "⇥").replace("\u2028", "↵"))


def ends_inside_character(data: bytes) -> bool:
    return codecs.utf_8_decode(data, "replace", False)[1] < len(data)


def _pieces(tokens: Sequence[bytes]) -> list[str]:
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    last = len(tokens) - 1
    return [clean(decoder.decode(token, i == last)) for i, token in enumerate(tokens)]
