"""Shorthands for the tests of the output processor: requests and deliveries in one line each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from termgen.client import TokenDelta
from termgen.engine.text.output import OutputProcessor
from termgen.errors import StepError
from termgen.vocabulary.request import FinishReason, GenerationRequest
from termgen.vocabulary.sampling_params import SamplingParams
from termgen.vocabulary.step import FinishedRow, StartedRow, StepDelivery, StepLogprobs

EOS = 2


def request(
    request_id: str = "r", *, prompt: Sequence[int] = (7, 8, 9), **params: Any
) -> GenerationRequest:
    return GenerationRequest(
        request_id=request_id,
        prompt_token_ids=tuple(prompt),
        params=SamplingParams(**{"max_tokens": 100, **params}),
    )


def delivery(
    rows: Sequence[tuple[int, int, Sequence[int]]] = (),
    *,
    started: Sequence[StartedRow] = (),
    finished: Sequence[FinishedRow] = (),
    logprobs: StepLogprobs | None = None,
    time_ns: int = 1000,
    drafted: Sequence[int] | None = None,
) -> StepDelivery:
    """rows: (slot, epoch, token ids)."""
    as_array = lambda values: np.array(values, dtype=np.int32)  # noqa: E731
    return StepDelivery(
        step_id=1,
        time_ns=time_ns,
        started=tuple(started),
        slots=as_array([r[0] for r in rows]),
        epochs=as_array([r[1] for r in rows]),
        num_tokens=as_array([len(r[2]) for r in rows]),
        token_ids=as_array([t for r in rows for t in r[2]]),
        logprobs=logprobs,
        finished=tuple(finished),
        num_drafted=None if drafted is None else as_array(drafted),
    )


def start(request_id: str = "r", slot: int = 0, epoch: int = 0, cached: int = 0) -> StartedRow:
    return StartedRow(request_id, slot, epoch, cached, first_scheduled_ns=500)


def finish(
    request_id: str = "r",
    reason: FinishReason = FinishReason.LENGTH,
    *,
    token: int | None = None,
    by_token: bool = False,
    error: StepError | None = None,
) -> FinishedRow:
    return FinishedRow(request_id, reason, token, by_token, error)


def feed(
    processor: OutputProcessor, ids: Sequence[int], *, end: FinishedRow | None
) -> list[TokenDelta]:
    """Feed one token a step for request "r" in slot 0, epoch 0; the last with `end`."""
    deltas = processor.process(delivery(started=[start()]))
    for position, token_id in enumerate(ids):
        last = position == len(ids) - 1
        deltas += processor.process(
            delivery([(0, 0, [token_id])], finished=[end] if last and end else [])
        )
    return deltas


def text_of(deltas: Sequence[TokenDelta]) -> str:
    return "".join(d.text for d in deltas)
