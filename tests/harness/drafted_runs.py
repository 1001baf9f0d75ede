"""Runs of a real engine whose drafts are a model's: what it says, and every draft that it wrote."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from termgen.config import EngineConfig
from termgen.engine.loop.engine import SyncEngine
from termgen.engine.schedule.invariants import check_scheduler
from termgen.vocabulary.request import GenerationRequest
from termgen.vocabulary.sampling_params import SamplingParams

NUM_TOKENS, VOCAB = 24, 512
NUM_BLOCKS = 512
"""Each is checked after every step; a tiny model would have 100,000 by default."""
KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.9, "seed": 3, "top_p": 0.95},
    {"temperature": 0.0, "logprobs": 2, "min_tokens": 20},
    {"temperature": 0.7, "seed": 4, "presence_penalty": 0.5},
    {"temperature": 0.0, "prompt_logprobs": 1},
)

Written = list[tuple[list[int], list[int]]]
"""A row's text, and the drafts behind it."""


def engine_of(folder: Path, **options: Any) -> SyncEngine:
    """Without drafts unless some are asked for."""
    fixed: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_num_seqs": 8}
    fixed |= {"skip_tokenizer_init": True, "speculative_config": "none"}
    fixed["num_gpu_blocks_override"] = NUM_BLOCKS
    return SyncEngine(EngineConfig(model=str(folder), block_size=16, **(fixed | options)))


def prompts(seed: int = 7) -> list[list[int]]:
    """One token, fewer than a block, the ends of two, which share a place in the null block, and
    several blocks."""
    rng = np.random.default_rng(seed)
    return [rng.integers(3, VOCAB, n).tolist() for n in (1, 9, 32, 48, 70)]


def run(
    engine: SyncEngine,
    texts: Sequence[list[int]] | None = None,
    *,
    kinds: Sequence[dict[str, Any]] = KINDS,
    disturb: Callable[[SyncEngine, int], None] = lambda engine, turn: None,
) -> list[list[int]]:
    """What follows each text. disturb: called before each step with its number."""
    texts = prompts() if texts is None else texts
    for i, (prompt, kind) in enumerate(zip(texts, kinds, strict=True)):
        params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, **kind)
        engine.add(
            GenerationRequest(request_id=str(i), prompt_token_ids=tuple(prompt), params=params)
        )
    found: list[list[int]] = [[] for _ in texts]
    turn = 0
    while engine.has_unfinished:
        disturb(engine, turn)
        turn += 1
        for delta in engine.step():
            assert delta.error is None, delta.error
            found[int(delta.request_id)] += delta.token_ids
        check_scheduler(engine.core.scheduler)
    return found


def runner_of(engine: SyncEngine) -> Any:
    return engine.core.executor._runner  # type: ignore[attr-defined]


def note_drafts(engine: SyncEngine) -> Written:
    """Have every row get all drafts, and note them."""
    drafter, written = runner_of(engine).drafts.drafter, Written()
    drafter._payoff.choose = lambda slots, num_found, kinds, num_rows: num_found
    ended = drafter.step_ended

    def step_ended(plan: Any, took_ns: int, state: Any) -> None:
        for slot in plan.slots.tolist():
            length, count = int(state.total_len[slot]), int(state.num_drafts[slot])
            ids = state.token_ids[slot].tolist()
            if count:
                written.append((ids[:length], ids[length : length + count]))
        ended(plan, took_ns, state)

    drafter.step_ended = step_ended
    return written
