"""A request as submitted, and the scheduler's record of it. Vocabulary: no torch, no scheduler."""

from __future__ import annotations

import enum
import hashlib
import re
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from termgen.errors import RequestError
from termgen.vocabulary.device.pooling import PoolingParams
from termgen.vocabulary.events import DraftCounts, PrefixHit
from termgen.vocabulary.sampling_params import SamplingParams
from termgen.vocabulary.token_mask import GrammarState, TokenGrammar

IntArray = npt.NDArray[np.int32]

MAX_PRIORITY = 2**31 - 1
MAX_BAD_SEQUENCES = 128
"""Token sequences behind a request's bad words: each word alone and after a space."""
MAX_BAD_SEQUENCE_TOKENS = 32
_CACHE_SALT = re.compile(r"[A-Za-z0-9_-]{1,128}")


class RequestStatus(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


class FinishReason(enum.StrEnum):
    STOP = "stop"
    """An end-of-sequence token, a stop token or a stop string."""
    LENGTH = "length"
    """max_tokens or the model's context was reached."""
    ABORT = "abort"
    ERROR = "error"


class TurnEnds(NamedTuple):
    """Numbers of tokens at the start of a chat's prompt that prompts of other turns may share; 0:
    not known. A prompt without a chat has none."""

    last: int = 0
    """Up to the last message's end: without what asks for the answer, which is often not in the
    next prompt."""
    question: int = 0
    """Up to the end of the last message of a user, behind which an answer's thoughts and tool calls
    follow: thoughts are often not in the prompt of the next question."""
    previous: int = 0
    """Up to the end of the message before the last: what another last message shares."""
    system: int = 0
    """The system prompt and the tools: what another conversation shares."""


def is_whole(finish_reason: FinishReason | None, stop_reason: int | str | None) -> bool:
    """True for an answer that has ended by itself, and was not cut off by its length, a stop word
    or a stop token."""
    return finish_reason is FinishReason.STOP and stop_reason is None


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One request as a front end submits it, already tokenised and validated."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams = field(default_factory=SamplingParams)
    priority: int = 0
    """Lower runs first; only the priority policy looks at it."""
    cache_salt: str | None = None
    """Prefix-cache entries are shared only between requests with the same salt."""
    grammar: TokenGrammar | None = field(default=None, compare=False)
    """The compiled `params.structured_outputs`."""
    bad_token_ids: tuple[tuple[int, ...], ...] = ()
    """Token sequences of `params.bad_words`; the last id of a sequence is forbidden right after
    the others."""
    block_hashes: tuple[bytes, ...] = field(default=(), repr=False, compare=False)
    """Prefix-cache hashes of the prompt's first full blocks, computed here to save time on the
    engine thread, which computes the rest."""
    turn_ends: TurnEnds = TurnEnds()
    """Known for chats with models whose states are copied there."""
    pooling: PoolingParams | None = None
    """A vector of the prompt is wanted, and no token."""
    prompt: IntArray = field(init=False, repr=False, compare=False)
    """The ids as an array, built here to save time on the engine thread."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "prompt", np.asarray(self.prompt_token_ids, np.int32))

    def start_grammar(self) -> GrammarState | None:
        """A new grammar state, or None without a grammar. Its matcher is created later."""
        if self.grammar is None:
            return None
        return GrammarState(self.grammar, ends_at_eos=not self.params.ignore_eos)


def check_cache_salt(salt: object) -> None:
    """Raise `RequestError` for an invalid salt. None must not be passed."""
    if not isinstance(salt, str) or not _CACHE_SALT.fullmatch(salt):
        raise RequestError(
            "cache_salt must have 1 to 128 characters of A-Z, a-z, 0-9, _ and -",
            param="cache_salt",
        )


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """The scheduler's record of one request. Owned by the engine thread.

    Token history while the request runs lives in the scheduler's slot table, not here:
    `token_ids` is the prompt until the first preemption or the end, when it is brought up to date.
    """

    request_id: str
    token_ids: IntArray
    """All known tokens: the prompt, plus the output when the slot was last released."""
    num_prompt_tokens: int
    params: SamplingParams
    seed: int
    max_total_tokens: int
    """prompt + max_tokens, capped by the model's context."""
    stop_token_ids: frozenset[int]
    """Ids that end the request: end-of-sequence ids unless ignored, and its own stop ids."""
    priority: int
    arrival_ns: int
    cache_salt: str | None
    bad_token_ids: tuple[tuple[int, ...], ...] = ()
    status: RequestStatus = RequestStatus.WAITING
    slot: int = -1
    epoch: int = -1
    block_hashes: list[bytes] = field(default_factory=list)
    turn_ends: TurnEnds = TurnEnds()
    num_cached_tokens: int = 0
    """Prefix-cache hits, in tokens, when the request was first scheduled."""
    hit: PrefixHit = PrefixHit()
    """What it found when it was last given a slot."""
    drafts: DraftCounts = DraftCounts()
    """Up to when the slot was last released, as `token_ids`."""
    num_preemptions: int = 0
    first_scheduled_ns: int = 0
    finish_reason: FinishReason | None = None
    grammar: GrammarState | None = None
    """Grammar state after the tokens that have landed."""
    pooling: PoolingParams | None = None
    stop_reason: int | str | None = None
    """The stop token id or stop string that ended it; None for end-of-sequence and length."""

    @property
    def may_draft(self) -> bool:
        """Its next tokens may be guessed: no mask of the host is needed for each. What a grammar
        forces is known, and no guess."""
        return self.grammar is None and self.pooling is None

    @property
    def owes_prompt_logprobs(self) -> bool:
        """Prompt logprobs are requested and not complete, so the whole prompt must be computed.

        They come with the prefill steps, so they are complete once a token has been generated.
        """
        wanted = self.params.prompt_logprobs is not None
        return wanted and len(self.token_ids) == self.num_prompt_tokens


def hash_blocks(token_ids: IntArray, block_size: int, chain: list[bytes], salt: str | None) -> None:
    """Extend `chain` with the hashes of every full block of `token_ids` that it lacks.

    hash(block) = SHA-256(hash(previous block) + int32 token bytes); the chain starts from the
    salt, so requests with different salts never share a block.
    """
    tokens = np.ascontiguousarray(token_ids, dtype="<i4")
    for i in range(len(chain), len(tokens) // block_size):
        parent = chain[i - 1] if i else hashlib.sha256(f"termgen:{salt or ''}".encode()).digest()
        block = tokens[i * block_size : (i + 1) * block_size].tobytes()
        chain.append(hashlib.sha256(parent + block).digest())
