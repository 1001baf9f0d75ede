"""What other threads ask of the engine's thread: it reads its mail between two steps."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from random import Random
from typing import Any

from termgen.vocabulary.request import GenerationRequest, Request


@dataclass(frozen=True, slots=True)
class Submit:
    request: GenerationRequest
    arrival_ns: int

    def to_request(self, max_model_len: int, eos: frozenset[int], seeds: Random) -> Request:
        """As the scheduler takes it. seeds: for one that brings none."""
        submitted, params = self.request, self.request.params
        num_prompt = len(submitted.prompt_token_ids)
        stops = frozenset(params.stop_token_ids)
        room = max_model_len - num_prompt
        return Request(
            request_id=submitted.request_id,
            token_ids=submitted.prompt,
            num_prompt_tokens=num_prompt,
            params=params,
            seed=params.seed if params.seed is not None else seeds.getrandbits(63),
            max_total_tokens=num_prompt + min(room, params.max_tokens or room),
            stop_token_ids=stops if params.ignore_eos else stops | eos,
            priority=submitted.priority,
            arrival_ns=self.arrival_ns,
            cache_salt=submitted.cache_salt,
            grammar=submitted.start_grammar(),
            bad_token_ids=submitted.bad_token_ids,
            block_hashes=list(submitted.block_hashes),
        )


@dataclass(frozen=True, slots=True)
class Abort:
    request_id: str


@dataclass(frozen=True, slots=True)
class Call:
    function: Callable[[], Any]
    future: Future[Any]


Mail = Submit | Abort | Call
