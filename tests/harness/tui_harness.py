"""An app on a `FakeEngine` with a clock that only tests move."""

from __future__ import annotations

import random
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_engine import FakeEngine, Script, make_model_info, make_snapshot, make_step_record
from textual import on
from textual.pilot import Pilot

from termgen.client import EngineClient, RequestTimings, TokenDelta
from termgen.config import UIConfig
from termgen.tui.app import TermgenApp
from termgen.tui.chat.chat_screen import ChatScreen
from termgen.tui.chat.widgets.messages import PromptSubmitted
from termgen.tui.dashboard.dashboard import DashboardScreen
from termgen.tui.paint import markdown
from termgen.vocabulary.events import (
    BlockState,
    DraftChoice,
    EngineSnapshot,
    RequestEvent,
    RequestEventKind,
    RequestView,
    StepRecord,
)

NOON = datetime(2026, 3, 14, 12).timestamp()
"""The current time, for lists of chats."""
MS = 1_000_000
SECOND = 1_000_000_000
NOW_NS = 1_000 * SECOND
TOKEN_S = 0.025
"""Time of one token on the frozen clock."""
PATIENCE_S = 60.0
"""Time for a condition to come true on a machine that does much else."""

MODEL = make_model_info(
    model_id="smollm2-135m",
    device="cuda:0",
    device_name="test GPU",
    max_model_len=2048,
    num_blocks=601,
)
ANSWER = """Long prompts used to block **every decode**. With a token budget:

```python
for request in running:  # decodes first
    take(request, 1)
```

- the step time is bounded
- `TTFT` grows a little
"""


class TimedEngine(FakeEngine):
    """Moves its clock by `TOKEN_S` with every token and reports times of that clock."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.now_s = 100.0

    async def generate(self, *args: Any, **kwargs: Any) -> AsyncGenerator[TokenDelta, None]:
        async for delta in super().generate(*args, **kwargs):
            self.now_s += TOKEN_S
            if delta.timings is not None:
                delta = replace(delta, timings=RequestTimings(1, 2, 1 + 142 * MS, 2 * SECOND))
            yield delta


class CountingChat(ChatScreen):
    """Counts what is sent: a key has come to its end only when its messages have, and under load
    that takes longer than `Pilot` waits."""

    num_submitted = 0

    @on(PromptSubmitted)
    def _count_submitted(self) -> None:
        self.num_submitted += 1


class FrozenApp(TermgenApp):
    """Chat and dashboard use the test's clock; the dashboard is drawn when the test calls for
    it."""

    def __init__(self, engine: FakeEngine, **kwargs: Any) -> None:
        self.engine = engine
        self.stopped = 0
        self.now_ns = NOW_NS
        kwargs.setdefault("ui", UIConfig())
        kwargs.setdefault("theme_folders", (shipped_themes(),))
        super().__init__(self._give, stop_engine=self._count_stop, **kwargs)

    async def _give(self, _report: Callable[[str, float], None]) -> EngineClient:
        return self.engine

    async def _count_stop(self) -> None:
        self.stopped += 1

    def make_chat(self, client: EngineClient) -> ChatScreen:
        engine = self.engine
        clock = (lambda: engine.now_s) if isinstance(engine, TimedEngine) else (lambda: 100.0)
        return CountingChat(
            client,
            self.ui,
            chats=self.chats,
            resume=self.resume,
            toolbox=self.toolbox,
            others=self.others,
            clock=clock,
            wall_clock=lambda: NOON,
        )

    def make_dashboard(self, client: EngineClient) -> DashboardScreen:
        options = self.dashboard_options | {"hz": 4.0}
        return DashboardScreen(client, now_ns=lambda: self.now_ns, cpu_ns=lambda: 0, **options)

    @property
    def chat(self) -> ChatScreen:
        assert isinstance(self.screen, ChatScreen)
        return self.screen

    @property
    def dashboard(self) -> DashboardScreen:
        assert isinstance(self.screen, DashboardScreen)
        return self.screen


def shipped_themes() -> Path:
    return Path(__file__).resolve().parents[2] / "themes"


def pieces(text: str, size: int = 4) -> tuple[str, ...]:
    return tuple(text[i : i + size] for i in range(0, len(text), size))


def chat_engine(
    script: Script | Callable[[Any], Script] | None = None, **model: Any
) -> TimedEngine:
    """`model`: fields that differ from `MODEL`."""
    return TimedEngine(
        script=script or Script(pieces=pieces(ANSWER)), model=replace(MODEL, **model)
    )


def in_pieces(source: str, rng: random.Random, *, longest: int) -> Iterator[str]:
    """The text in pieces as a model might stream it."""
    at = 0
    while at < len(source):
        size = rng.randrange(1, longest)
        yield source[at : at + size]
        at += size


async def wait_until(pilot: Pilot[Any], condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, "the condition never came true"
        await pilot.pause(0.01)


async def ready(app: FrozenApp, pilot: Pilot[Any]) -> None:
    """Wait until the engine is there and its first screen is shown."""
    await wait_until(pilot, lambda: isinstance(app.screen, ChatScreen | DashboardScreen))
    await pilot.pause()


async def type_text(pilot: Pilot[Any], text: str) -> None:
    names = {" ": "space", "?": "question_mark", "/": "slash", "\n": "ctrl+j", "-": "minus"}
    await pilot.press(*(names.get(char, char) for char in text))


async def ask(app: FrozenApp, pilot: Pilot[Any], text: str, *, wait: bool = True) -> None:
    """Put `text` into the prompt at once (`type_text` presses keys) and send it."""
    chat = app.chat
    assert isinstance(chat, CountingChat)
    chat.prompt.insert(text)
    before = chat.num_submitted
    await pilot.press("enter")
    await wait_until(pilot, lambda: chat.num_submitted > before)
    if wait:
        await wait_until(pilot, lambda: not app.chat.is_streaming)
    await pilot.pause()


def step(index: int, *, end_ns: int, ms: float = 20.0, **overrides: Any) -> StepRecord:
    end = end_ns
    start = end - int(ms * MS)
    return make_step_record(
        step_id=index,
        planned_ns=start - MS,
        submitted_ns=start,
        started_ns=start,
        ended_ns=end,
        applied_ns=end + 100_000,
        **overrides,
    )


def steps(count: int, *, now_ns: int = NOW_NS, first_id: int = 182_000) -> list[StepRecord]:
    """A plausible run: decodes, every ninth step with a prefill chunk, some padding."""
    records = []
    for i in range(count):
        end = now_ns - (count - i) * 40 * MS
        chunk = 256 if i % 9 == 4 else 0
        decode = 2 + i % 4
        records.append(
            step(
                first_id + i,
                end_ns=end,
                ms=34.0 if chunk else 18.0 + i % 5,
                num_decode_rows=decode,
                num_prefill_rows=1 if chunk else 0,
                num_prefill_tokens=chunk,
                num_sampled_tokens=decode,
                num_padded_tokens=2 if decode == 2 and not chunk else 0,
                graph_mode="PIECEWISE" if chunk else "NONE" if i % 31 == 0 else "FULL",
                num_running=4,
                num_waiting=2,
                num_used_blocks=215,
                num_cached_blocks=110,
                num_free_blocks=275,
                prefix_query_tokens=10_000,
                prefix_hit_tokens=6_340,
                num_preemptions=1,
            )
        )
    return records


def drafted_steps(count: int, *, choice: DraftChoice | None) -> list[StepRecord]:
    """The same run with four guessed tokens for each request, of which the first two stay."""
    records, rows = [], 0
    for record in steps(count):
        rows += record.num_decode_rows
        records.append(
            record._replace(
                num_sampled_tokens=3 * record.num_decode_rows,
                num_draft_tokens=4 * rows,
                num_accepted_tokens=2 * rows,
                num_drafts=rows,
                drafted_per_pos=(rows, rows, rows, rows),
                accepted_per_pos=(rows, rows, 0, 0),
                draft_choice=choice,
            )
        )
    return records


def request_view(request_id: str, status: str, **overrides: Any) -> RequestView:
    view = RequestView(
        request_id=request_id,
        status=status,
        num_prompt_tokens=100,
        num_cached_tokens=0,
        num_computed_tokens=0,
        num_output_tokens=0,
        num_blocks=0,
        num_scheduled_tokens=0,
        age_s=1.0,
        num_preemptions=0,
        priority=0,
    )
    return replace(view, **overrides)


def busy_snapshot(now_ns: int = NOW_NS) -> EngineSnapshot:
    """Four running requests, two waiting, 600 blocks of which 215 are used."""
    states = np.zeros(601, dtype=np.uint8)
    owners = np.full(601, -1, dtype=np.int32)
    states[0] = BlockState.NULL
    bounds = ((1, 65, BlockState.SHARED, 0), (65, 120, BlockState.ACTIVE, 0))
    bounds += ((120, 180, BlockState.ACTIVE, 1), (190, 226, BlockState.ACTIVE, 3))
    for first, last, state, owner in bounds:
        states[first:last], owners[first:last] = state, owner
    states[240:350] = BlockState.CACHED
    requests = (
        request_view(
            "chat-1",
            "decode",
            num_prompt_tokens=1800,
            num_cached_tokens=1024,
            num_computed_tokens=1904,
            num_output_tokens=105,
            num_blocks=119,
            num_scheduled_tokens=1,
            age_s=4.2,
        ),
        request_view(
            "chatcmpl-3f9a01",
            "decode",
            num_prompt_tokens=900,
            num_computed_tokens=959,
            num_output_tokens=60,
            num_blocks=60,
            num_scheduled_tokens=1,
            age_s=2.5,
        ),
        request_view("cmpl-77", "decode", num_output_tokens=3, num_computed_tokens=102),
        request_view(
            "chatcmpl-b20c44",
            "prefill",
            num_prompt_tokens=1500,
            num_computed_tokens=576,
            num_blocks=36,
            num_scheduled_tokens=256,
            age_s=0.4,
            num_preemptions=1,
        ),
        request_view("chatcmpl-c1", "waiting", num_prompt_tokens=640, age_s=0.3),
        request_view("chatcmpl-c2", "waiting", num_prompt_tokens=64, age_s=0.1),
    )
    return make_snapshot(
        time_ns=now_ns,
        requests=requests,
        num_running=4,
        num_waiting=2,
        block_states=states,
        block_owners=owners,
        num_used_blocks=215,
        num_cached_blocks=110,
        num_free_blocks=275,
        prefix_query_tokens=10_000,
        prefix_hit_tokens=6_340,
        num_preemptions=1,
        num_finished=37,
        prompt_tokens=31_000,
        generation_tokens=9_000,
        max_num_seqs=8,
        max_num_batched_tokens=256,
        last_progress_ns=now_ns,
    )


def request_events(now_ns: int = NOW_NS) -> list[RequestEvent]:
    """Three requests that have finished, and the beginnings of two live ones."""
    kinds = RequestEventKind
    events = []
    for i, reason in enumerate(("stop", "length", "abort")):
        name, queued = f"chatcmpl-done{i}", now_ns - (30 - i) * SECOND
        first = queued + (100 + 50 * i) * MS
        events.append(RequestEvent(queued, name, kinds.QUEUED, 400, 0, 0))
        events.append(RequestEvent(first, name, kinds.FIRST_TOKEN, 400, 1, 128))
        end = first + 2 * SECOND
        events.append(RequestEvent(end, name, kinds.FINISHED, 400, 81, 128, reason))
    for name in ("chat-1", "chatcmpl-3f9a01"):
        queued = now_ns - 4 * SECOND
        events.append(RequestEvent(queued, name, kinds.QUEUED, 1800, 0, 0))
        events.append(RequestEvent(queued + 200 * MS, name, kinds.FIRST_TOKEN, 1800, 1, 1024))
    return events


async def feed_dashboard(
    app: FrozenApp, pilot: Pilot[Any], records: Sequence[StepRecord] = ()
) -> None:
    """Publish a busy engine's events and draw them once. records: other steps than the usual."""
    engine = app.engine
    engine.scripted_snapshot = busy_snapshot()
    for event in [*request_events(), *(records or steps(300))]:
        engine.bus.publish(event)
    await app.dashboard.refresh_view()
    await pilot.pause()


RunBefore = Callable[[Pilot[Any]], Awaitable[None]]


def tell_parses(monkeypatch: pytest.MonkeyPatch, note: Callable[[str], None]) -> None:
    """Call `note` with each piece of markdown before it is parsed."""

    def telling(parse: Callable[..., Any]) -> Callable[..., Any]:
        def told(source: str, *args: Any) -> Any:
            note(source)
            return parse(source, *args)

        return told

    for parser in (markdown.parser, markdown._blocks):
        monkeypatch.setattr(parser, "parse", telling(parser.parse))
