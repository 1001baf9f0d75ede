"""What the load generator tells of answers while they come, for whoever watches the run.

It looks at them when it tells, a few times a second, and lets the event loop read between them:
the times that are measured are not those of the watching.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from termgen.bench.live_times import LiveTimes
from termgen.bench.stream_client import Answer

GAPS_AT_ONCE = 256
"""A small part of a millisecond: so long what arrives may wait."""


@dataclass(slots=True)
class _Open:
    answer: Answer
    has_first: bool = False
    num_gaps: int = 0


class AnswerWatch:
    """`begin` and `end` are told of each request; `take` has what is new since its last call."""

    def __init__(self) -> None:
        self._open: dict[int, _Open] = {}
        self._ended: list[_Open] = []
        self._first = LiveTimes()
        self._gaps = LiveTimes()

    def begin(self, index: int, answer: Answer) -> None:
        self._open[index] = _Open(answer)

    def end(self, index: int) -> None:
        self._ended.append(self._open.pop(index))

    async def take(self) -> dict[str, Any]:
        """`first` and `gaps` as `LiveTimes.take` tells them; of each request that was answered
        `finished` has seconds to the first and the last chunk, chunks and tokens."""
        ended, self._ended = self._ended, []
        finished = []
        for seen in [*ended, *self._open.values()]:
            await self._look(seen)
        for seen in ended:
            answer = seen.answer
            if answer.error is None:
                first = (answer.first or answer.last) - answer.began
                tokens = answer.num_output_tokens
                finished.append(
                    [
                        first,
                        answer.last - answer.began,
                        answer.num_chunks,
                        answer.num_chunks if tokens is None else tokens,
                    ]
                )
        return {
            "first": self._first.take(),
            "gaps": self._gaps.take(),
            "finished": finished,
        }

    async def _look(self, seen: _Open) -> None:
        answer = seen.answer
        if answer.first and not seen.has_first:
            seen.has_first = True
            self._first.add(answer.first - answer.began)
        while seen.num_gaps < len(answer.gaps):
            end = min(len(answer.gaps), seen.num_gaps + GAPS_AT_ONCE)
            for i in range(seen.num_gaps, end):
                self._gaps.add(answer.gaps[i])
            seen.num_gaps = end
            if end < len(answer.gaps):
                await asyncio.sleep(0)
