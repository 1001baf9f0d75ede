"""`FakeEngine`: an `EngineClient` with scripted answers, for tests of the server and the screens.

It has no model, threads or torch. Prompts are "tokenised" to UTF-8 bytes, and a chat is rendered as
`role: content` lines. A `Script` describes a request's answer; `FakeEngine(script=...)` takes one
script for every request or a function `(GenerateCall) -> Script`. Everything that happened is in
`calls`, `aborted` and `finished`.

    engine = FakeEngine(script=Script(pieces=("Hel", "lo"), delay_s=0.01))
    engine.bus.publish(make_step_record(num_decode_rows=3))     # reaches every events() ring
    engine.scripted_snapshot = make_snapshot(num_running=1)     # what snapshot() returns
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from fake_script import GenerateCall, Script, either, play

from termgen.client import (
    ChatPrompt,
    FillPrompt,
    ModelInfo,
    PauseMode,
    Prompt,
    SleepLevel,
    TokenDelta,
    TokenizerInfo,
)
from termgen.errors import ContextLengthError, EngineDeadError, RequestError
from termgen.vocabulary.device.pooling import PoolingInfo, PoolingParams
from termgen.vocabulary.events import (
    BlockState,
    EngineSnapshot,
    EventBus,
    EventRing,
    RequestEvent,
    RequestEventKind,
    RequestView,
    StepRecord,
)
from termgen.vocabulary.grammar_times import GrammarTotals
from termgen.vocabulary.memory_ledger import GIB, MemoryLedger
from termgen.vocabulary.sampling_params import SamplingParams


def make_model_info(**overrides: Any) -> ModelInfo:
    info = ModelInfo(
        model_id="fake/model-1",
        root="/models/fake",
        architecture="LlamaForCausalLM",
        dtype="float32",
        quantization=None,
        device="cpu",
        device_name="test CPU",
        max_model_len=4096,
        vocab_size=50_000,
        num_blocks=64,
        block_size=16,
        has_chat_template=True,
        created=1_700_000_000,
        pooling=PoolingInfo(size=8),
    )
    return replace(info, **overrides)


def make_memory_ledger(**overrides: Any) -> MemoryLedger:
    """A GPU of 80 GiB, mostly KV cache; bytes not given count as `other_bytes`."""
    ledger = MemoryLedger(
        name="GPU memory",
        total_bytes=80 * GIB,
        limit_bytes=72 * GIB,
        weights_bytes=2 * GIB,
        activations_bytes=GIB,
        graphs_bytes=GIB // 2,
        workspace_bytes=GIB // 4,
        kv_cache_bytes=60 * GIB,
        kv_cache_tokens=560_000,
        other_bytes=0,
        free_bytes=8 * GIB,
    )
    ledger = replace(ledger, **overrides)
    return replace(ledger, other_bytes=ledger.total_bytes - sum(ledger.parts().values()))


def make_step_record(**overrides: Any) -> StepRecord:
    """One decode step of 4 ms with one row; override what the test depends on."""
    now = time.perf_counter_ns()
    record = StepRecord(
        step_id=1,
        planned_ns=now - 4_500_000,
        submitted_ns=now - 4_400_000,
        started_ns=now - 4_300_000,
        ended_ns=now - 300_000,
        applied_ns=now,
        schedule_us=100.0,
        apply_us=200.0,
        num_decode_rows=1,
        num_prefill_rows=0,
        num_prefill_tokens=0,
        num_sampled_tokens=1,
        num_padded_tokens=0,
        graph_mode="NONE",
        num_running=1,
        num_waiting=0,
        num_used_blocks=4,
        num_cached_blocks=2,
        num_free_blocks=57,
        prefix_query_tokens=0,
        prefix_hit_tokens=0,
        num_preemptions=0,
    )
    return record._replace(**overrides)


def make_snapshot(**overrides: Any) -> EngineSnapshot:
    """An idle engine with 64 free blocks; override what the test depends on."""
    states = np.zeros(64, dtype=np.uint8)
    states[0] = BlockState.NULL
    snapshot = EngineSnapshot(
        time_ns=time.perf_counter_ns(),
        step=None,
        requests=(),
        num_running=0,
        num_waiting=0,
        block_states=states,
        block_owners=np.full(64, -1, dtype=np.int32),
        num_used_blocks=0,
        num_cached_blocks=0,
        num_free_blocks=63,
        prefix_query_tokens=0,
        prefix_hit_tokens=0,
        num_preemptions=0,
        num_finished=0,
        prompt_tokens=0,
        generation_tokens=0,
        max_num_seqs=16,
        max_num_batched_tokens=512,
        last_progress_ns=time.perf_counter_ns(),
    )
    return replace(snapshot, **overrides)


def render(prompt: Prompt) -> list[int]:
    """Token ids of a prompt: UTF-8 bytes."""
    if isinstance(prompt, str):
        return list(prompt.encode())
    if isinstance(prompt, ChatPrompt):
        text = "".join(f"{m['role']}: {m['content'] or ''}\n" for m in prompt.messages)
        if prompt.add_generation_prompt:
            text += "assistant: "
        return list(text.encode())
    if isinstance(prompt, FillPrompt):
        return list(f"{prompt.prefix}_{prompt.suffix}".encode())
    return list(prompt)


class FakeEngine:
    """Implements `EngineClient`. Use it on one event loop."""

    def __init__(
        self,
        *,
        script: Script | Callable[[GenerateCall], Script] | None = None,
        model: ModelInfo | None = None,
        clamps_max_tokens: bool = True,
    ) -> None:
        self._clamps_max_tokens = clamps_max_tokens
        self._script = script if script is not None else Script()
        self._model = model or make_model_info()
        self._ids = itertools.count()
        self._live: dict[str, asyncio.Event] = {}
        self.calls: list[GenerateCall] = []
        self.aborted: list[str] = []
        """Requests closed, cancelled or aborted before their end."""
        self.finished: list[str] = []
        self.controls: list[str] = []
        """Pauses, resumes and resets; they have no other effect here."""
        self.release = asyncio.Event()
        self.bus = EventBus()
        self.scripted_snapshot: EngineSnapshot | None = None
        self.scripted_grammars = GrammarTotals()
        self.healthy = True
        self.is_paused = False
        self.sleep_level = 0

    @property
    def model(self) -> ModelInfo:
        return self._model

    @property
    def is_healthy(self) -> bool:
        return self.healthy

    @property
    def live(self) -> tuple[str, ...]:
        """Ids of requests that are still running."""
        return tuple(self._live)

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        client: str = "",
        pooling: PoolingParams | None = None,
    ) -> AsyncGenerator[TokenDelta, None]:
        request_id = request_id or f"fake-{next(self._ids)}"
        call = GenerateCall(
            prompt=prompt,
            params=params,
            request_id=request_id,
            priority=priority,
            cache_salt=cache_salt,
            pooling=pooling,
        )
        self.calls.append(call)
        script = self._script if isinstance(self._script, Script) else self._script(call)
        if not self.healthy:
            raise EngineDeadError("the engine thread has stopped")
        if script.raises is not None:
            raise script.raises
        prompt_ids = self._checked_prompt(prompt, params)
        stop = self._live[request_id] = asyncio.Event()
        self._event(RequestEventKind.QUEUED, request_id, len(prompt_ids), 0)
        done = False
        try:
            if script.waits_in_queue:
                await either(self.release, stop)
            self._event(RequestEventKind.SCHEDULED, request_id, len(prompt_ids), 0)
            async for delta in play(script, call, prompt_ids, stop, self.release):
                if delta.num_output_tokens == 1 and delta.index == 0:
                    self._event(RequestEventKind.FIRST_TOKEN, request_id, len(prompt_ids), 1)
                done = delta.finish_reason is not None and delta.index == params.n - 1
                yield delta
            done = not stop.is_set()
        finally:
            del self._live[request_id]
            (self.finished if done else self.aborted).append(request_id)
            self._event(RequestEventKind.FINISHED, request_id, len(prompt_ids), 0)

    async def abort(self, request_id: str) -> bool:
        stop = self._live.get(request_id)
        if stop is None:
            return False
        stop.set()
        return True

    async def tokenize(self, prompt: Prompt, *, add_special_tokens: bool = True) -> list[int]:
        await asyncio.sleep(0)
        return render(prompt) if add_special_tokens else render(prompt)[1:]

    async def token_texts(self, token_ids: Sequence[int]) -> list[str]:
        return [chr(token_id % 256) for token_id in token_ids]

    @property
    def tokenizer_info(self) -> TokenizerInfo:
        return TokenizerInfo({"eos_token": "</s>"}, "{{ messages }}")

    def grammar_totals(self) -> GrammarTotals:
        return self.scripted_grammars

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        await asyncio.sleep(0)
        for token_id in token_ids:
            if not 0 <= token_id < self._model.vocab_size:
                raise RequestError(f"token id {token_id} is outside the vocabulary", param="prompt")
        return bytes(t % 256 for t in token_ids).decode(errors="replace")

    async def snapshot(self) -> EngineSnapshot:
        await asyncio.sleep(0)
        return self.scripted_snapshot or self._live_snapshot()

    def events(self, capacity: int = 4096) -> EventRing:
        return self.bus.subscribe(capacity)

    def close_events(self, ring: EventRing) -> None:
        self.bus.unsubscribe(ring)

    async def pause(self, mode: PauseMode = "wait") -> None:
        self.controls.append(f"pause {mode}")
        self.is_paused = True

    async def resume(self) -> None:
        self.controls.append("resume")
        self.is_paused = False

    async def reset_prefix_cache(self, *, force: bool = False) -> bool:
        self.controls.append("reset_prefix_cache force" if force else "reset_prefix_cache")
        return force or not self._live

    async def sleep(self, level: SleepLevel = 1, mode: PauseMode = "abort") -> None:
        self.controls.append(f"sleep {level} {mode}")
        self.sleep_level = level

    async def wake_up(self) -> None:
        self.controls.append("wake_up")
        self.sleep_level = 0

    async def why_unhealthy(self) -> str | None:
        return None if self.healthy else "the engine thread has stopped"

    def _checked_prompt(self, prompt: Prompt, params: SamplingParams) -> list[int]:
        ids = render(prompt)
        params.validate_for(vocab_size=self._model.vocab_size)
        if not ids:
            raise RequestError("the prompt is empty", param="prompt")
        if max(ids) >= self._model.vocab_size:
            raise RequestError(f"token id {max(ids)} is outside the vocabulary", param="prompt")
        limit = self._model.max_model_len
        wanted = len(ids) + (1 if self._clamps_max_tokens else params.max_tokens or 1)
        if wanted > limit:
            raise ContextLengthError(
                f"This model's maximum context length is {limit} tokens. However, you requested "
                f"{wanted} tokens. Please reduce the length of the messages. "
                "(context_length_exceeded)"
            )
        return ids

    def _event(self, kind: RequestEventKind, request_id: str, prompt: int, output: int) -> None:
        event = RequestEvent(time.perf_counter_ns(), request_id, kind, prompt, output, 0)
        self.bus.publish(event)

    def _live_snapshot(self) -> EngineSnapshot:
        views = tuple(
            RequestView(
                request_id=request_id,
                status="decode",
                num_prompt_tokens=8,
                num_cached_tokens=0,
                num_computed_tokens=9,
                num_output_tokens=1,
                num_blocks=1,
                num_scheduled_tokens=1,
                age_s=0.1,
                num_preemptions=0,
                priority=0,
            )
            for request_id in self._live
        )
        return make_snapshot(
            requests=views, num_running=len(views), num_finished=len(self.finished)
        )
