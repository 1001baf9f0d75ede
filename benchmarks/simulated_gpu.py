"""An executor that computes nothing and takes a GPU's time, so that only the host is measured.

A simulated device runs the steps one after the other, as a stream does. Launching one releases the
GIL several times, as launching on a real device does. Tokens are made up: the last one that the
grammar allows. `installed` replaces the real executor by it.
"""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from termgen.config import EngineConfig
from termgen.engine.loop import startup
from termgen.vocabulary.memory_ledger import MemoryLedger
from termgen.vocabulary.model_info import DeviceInfo, GraphStatus
from termgen.vocabulary.step import StepPlan, StepResult
from termgen.vocabulary.token_mask import IDLE_PATIENCE_S, WITHHELD, IntArray

SIZES = [field.name for field in fields(MemoryLedger) if field.name.endswith("_bytes")]
GIL_RELEASES = 8
"""GIL releases in launching a step."""
_WORK = bytes(16_384)
"""A checksum of this takes some microseconds without the GIL."""


@dataclass(frozen=True, slots=True)
class Simulation:
    step_ms: float
    num_blocks: int
    max_num_seqs: int
    vocab_size: int


class SimulatedGpu:
    """Replaces `LocalExecutor` in `build_engine`."""

    def __init__(self, simulation: Simulation, config: EngineConfig, path: Path) -> None:
        self._simulation = simulation
        self._config = config
        self._free_ns = 0
        """Time at which the device will have run all steps launched so far."""
        rows = simulation.max_num_seqs
        self._masks: dict[int, tuple[int, IntArray]] = {}
        """Slot -> (position, mask)."""
        self._news = threading.Condition()
        self._known, self._computed = np.zeros(rows, np.int64), np.zeros(rows, np.int64)

    def start(self, on_progress: Callable[[str, float], None]) -> DeviceInfo:
        simulation, config = self._simulation, self._config
        return DeviceInfo(
            device="simulated",
            device_name="a simulated GPU",
            dtype="none",
            num_blocks=simulation.num_blocks,
            block_size=16,
            windows=(None,),
            max_model_len=config.max_model_len or 32_768,
            vocab_size=simulation.vocab_size,
            attention_backend="none",
            architecture="none",
            max_num_seqs=simulation.max_num_seqs,
            max_num_batched_tokens=16_384,
            max_in_flight=2 if config.async_scheduling is not False else 1,
            eos_token_ids=(),
            memory=MemoryLedger(
                name="memory",
                kv_cache_tokens=16 * (simulation.num_blocks - 1),
                **dict.fromkeys(SIZES, 0),
            ),
        )

    def generation_config(self) -> dict[str, Any]:
        return {}

    def submit(self, plan: StepPlan) -> SimulatedStep:
        for _ in range(GIL_RELEASES):
            zlib.crc32(_WORK)
        return SimulatedStep(self, plan, time.perf_counter_ns())

    def run(self, plan: StepPlan, submitted_ns: int) -> StepResult:
        """Wait until the device has run a step, with the GIL released. Called in their order."""
        for row in plan.added:
            self._known[row.slot] = len(row.token_ids)
            self._computed[row.slot] = row.num_computed_tokens
        start_ns = max(self._free_ns, submitted_ns)
        self._free_ns = start_ns + round(self._simulation.step_ms * 1e6)
        while (left_ns := self._free_ns - time.perf_counter_ns()) > 0:
            time.sleep(left_ns / 1e9)
        self._computed[plan.slots] += plan.num_tokens
        tokens = 300 + (plan.slots + plan.step_id) % 1000
        for row in () if plan.constrained is None else plan.constrained.tolist():
            tokens[row] = self._last_allowed(int(plan.slots[row]))
        self._computed[plan.slots[tokens < 0]] -= 1
        is_sampled = (self._computed[plan.slots] >= self._known[plan.slots]) & (tokens >= 0)
        self._known[plan.slots] += is_sampled
        return StepResult(
            plan.step_id,
            is_sampled.astype(np.int32),
            tokens[is_sampled].astype(np.int32),
            None,
            start_ns,
            self._free_ns,
            graph_mode="FULL",
            seen_ns=time.perf_counter_ns(),
        )

    def _last_allowed(self, slot: int) -> int:
        """The last token that a row's mask allows, or -1. Waiting for it leaves the device idle."""
        wanted = (int(self._known[slot]), WITHHELD)
        with self._news:
            if not self._news.wait_for(lambda: self._masks[slot][0] in wanted, IDLE_PATIENCE_S):
                return -1
            self._free_ns = max(self._free_ns, time.perf_counter_ns())
            position, mask = self._masks[slot]
        if position == WITHHELD:
            return -1
        word = int(mask.nonzero()[0][-1])
        return 32 * word + (int(mask[word]) & 0xFFFFFFFF).bit_length() - 1

    waits_for_masks = True

    def post_masks(
        self,
        slots: IntArray,
        positions: IntArray,
        bits: IntArray,
        forced: Sequence[Sequence[int]] | None = None,
    ) -> None:
        with self._news:
            for slot, position, mask in zip(slots.tolist(), positions.tolist(), bits, strict=True):
                self._masks[slot] = position, mask.copy()
            self._news.notify_all()

    def withhold_masks(self, slots: IntArray) -> None:
        with self._news:
            self._masks.update(dict.fromkeys(slots.tolist(), (WITHHELD, slots)))
            self._news.notify_all()

    def idle(self) -> bool:
        return False

    def graph_status(self) -> GraphStatus:
        return GraphStatus(0, 0)

    def shutdown(self) -> None:
        """There is nothing to free."""


@dataclass(frozen=True, slots=True)
class SimulatedStep:
    gpu: SimulatedGpu
    plan: StepPlan
    submitted_ns: int

    def result(self) -> StepResult:
        return self.gpu.run(self.plan, self.submitted_ns)


@contextmanager
def installed(simulation: Simulation) -> Iterator[None]:
    """Run engines built in this context on a simulated device."""
    real = startup.LocalExecutor
    startup.LocalExecutor = lambda config, path: SimulatedGpu(simulation, config, path)  # type: ignore[assignment,misc]
    try:
        yield
    finally:
        startup.LocalExecutor = real  # type: ignore[misc]
