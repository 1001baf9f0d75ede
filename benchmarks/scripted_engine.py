"""An engine with predetermined tokens, so that only the server is measured.

`ScriptedEngine` has an engine thread, a step at fixed intervals and one wake-up of the event loop a
step, like the real one. Each token carries its number and the time when its step ended, so that a
client can detect lost tokens, wrong order and delay.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from termgen.client import Prompt, RequestTimings, TokenDelta
from termgen.engine.loop.engine import DeltaStream
from termgen.vocabulary.request import FinishReason
from termgen.vocabulary.sampling_params import SamplingParams

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "harness"))

from fake_engine import FakeEngine, make_model_info


@dataclass(slots=True)
class _Row:
    request_id: str
    wanted: int
    count: int = 0
    first_ns: int = 0
    arrival_ns: int = field(default_factory=time.perf_counter_ns)
    stream: DeltaStream = field(default_factory=lambda: DeltaStream(1))


class ScriptedEngine(FakeEngine):
    """Every `step_s` each running request gets one token, until `max_tokens` of them."""

    def __init__(self, step_s: float, *, min_running: int = 1) -> None:
        """No request gets a token before `min_running` requests are there."""
        most = {"max_model_len": 2**20, "vocab_size": 2**31, "max_num_seqs": 1024}
        super().__init__(model=make_model_info(model_id="scripted", **most))
        self._step_s = step_s
        self._min_running = min_running
        self.has_begun = False
        self._loop = asyncio.get_running_loop()
        self._rows: dict[str, _Row] = {}
        self._steps: deque[int] = deque()
        self._is_woken = False
        self._is_stopping = threading.Event()
        self.num_tokens = 0
        self.ended_at = 0.0
        self.begun_at = 0.0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._is_stopping.set()
        self._thread.join()

    def _run(self) -> None:
        due = time.perf_counter()
        while not self._is_stopping.is_set():
            due += self._step_s
            time.sleep(max(0.0, due - time.perf_counter()))
            if len(self._rows) < self._min_running and not self.has_begun:
                continue
            self.has_begun = True
            self._steps.append(time.perf_counter_ns())
            if not self._is_woken:
                self._is_woken = True
                self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._is_woken = False
        self.begun_at = self.begun_at or time.perf_counter()
        while self._steps:
            step_ns = self._steps.popleft()
            for row in list(self._rows.values()):
                self._push(row, step_ns)

    def _push(self, row: _Row, step_ns: int) -> None:
        row.first_ns = row.first_ns or step_ns
        number, row.count = row.count, row.count + 1
        is_last = row.count == row.wanted
        row.stream.push(
            TokenDelta(
                request_id=row.request_id,
                index=0,
                text=f"{number} {step_ns};",
                token_ids=(number,),
                logprobs=None,
                finish_reason=FinishReason.LENGTH if is_last else None,
                stop_reason=None,
                num_prompt_tokens=1,
                num_cached_tokens=0,
                num_output_tokens=row.count,
                prompt_token_ids=(1,) if number == 0 else None,
                timings=RequestTimings(row.arrival_ns, row.arrival_ns, row.first_ns, step_ns)
                if is_last
                else None,
            )
        )
        self.num_tokens += 1
        if is_last:
            del self._rows[row.request_id]
            self.ended_at = time.perf_counter()

    async def generate(
        self, prompt: Prompt, params: SamplingParams, *, request_id: str | None = None, **_: Any
    ) -> AsyncGenerator[TokenDelta, None]:
        row = _Row(request_id or str(id(params)), params.max_tokens or 1)
        self._rows[row.request_id] = row
        try:
            async for delta in row.stream:
                yield delta
        finally:
            self._rows.pop(row.request_id, None)

    async def abort(self, request_id: str) -> bool:
        return self._rows.pop(request_id, None) is not None
