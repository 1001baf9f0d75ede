"""The batch page and the inspector, for requests with scripted events."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import replace

import pytest
from fake_engine import make_snapshot
from tui_harness import (
    MS,
    NOW_NS,
    SECOND,
    FrozenApp,
    busy_snapshot,
    chat_engine,
    ready,
    request_view,
    step,
)

from termgen.tui.dashboard.pages import inspector
from termgen.tui.dashboard.pages.inspector import inspector_page
from termgen.tui.dashboard.pages.lanes import batch_page, budget_panel, lanes_panel
from termgen.tui.dashboard.state import request_history as lanes_module
from termgen.tui.dashboard.state.request_history import Doing, History, RequestHistory
from termgen.tui.dashboard.state.store import DashboardStore, DashboardView
from termgen.tui.paint.canvas import Canvas
from termgen.tui.paint.frame import Frame
from termgen.tui.paint.palette import COLOUR_GLYPHS, PLAIN_GLYPHS
from termgen.tui.paint.spans import Row, row_text, row_width
from termgen.vocabulary.events import (
    EngineEvent,
    HitLimit,
    PrefixHit,
    RequestEvent,
    RequestEventKind,
    StepRecord,
)

KINDS = RequestEventKind
START = NOW_NS - 2 * SECOND


def text(rows: list[Row]) -> str:
    return "\n".join(row_text(row) for row in rows)


def event(
    kind: RequestEventKind, name: str, at_ms: float, output: int = 0, why: str = ""
) -> RequestEvent:
    return RequestEvent(START + round(at_ms * MS), name, kind, 1000, output, 200, why)


def record(step_id: int, **fields: object) -> StepRecord:
    """Step n ends 10 ms times n after the start, and lands then."""
    end = START + step_id * 10 * MS
    return step(step_id, end_ns=end, ms=10.0, landed_ns=end, **fields)


def life() -> list[EngineEvent]:
    """`long` is computed in three chunks, decodes, is preempted, resumes, and ends; `short` decodes
    all along."""
    out: list[EngineEvent] = [
        event(KINDS.QUEUED, "short", 0),
        event(KINDS.SCHEDULED, "short", 1),
        record(1, prefill_ids=("short",), prefill_tokens=(800,)),
        event(KINDS.FIRST_TOKEN, "short", 10, 1),
        event(KINDS.QUEUED, "long", 5, why="temperature 0.7 max_tokens 9"),
        record(2),
        event(KINDS.SCHEDULED, "long", 25),
    ]
    for i in (3, 4, 6):
        out.append(record(i, prefill_ids=("long",), prefill_tokens=(256,)))
        if i == 4:
            out.append(record(5))
    out += [event(KINDS.FIRST_TOKEN, "long", 60, 1), record(7), record(8)]
    out += [event(KINDS.PREEMPTED, "long", 85, 3, "out of KV blocks"), record(9), record(10)]
    out += [event(KINDS.SCHEDULED, "long", 101)]
    out += [record(11, prefill_ids=("long",), prefill_tokens=(303,)), record(12), record(13)]
    out += [event(KINDS.FINISHED, "long", 130, 5, "length"), record(14, num_decode_rows=1)]
    return out


def fed(events: list[EngineEvent]) -> tuple[DashboardStore, DashboardView]:
    store = DashboardStore(started_ns=START)
    store.apply(events)
    snapshot = replace(busy_snapshot(), waiting_reason="all places taken")
    store.set_snapshot(snapshot)
    return store, store.view(NOW_NS)


def lane(rows: list[Row], name: str) -> str:
    return next(row_text(row) for row in rows if name in row_text(row))


def test_lanes_follow_the_events() -> None:
    store, view = fed(life())
    history = store.history.get("long")
    assert history is not None
    signs = {Doing.PREFILL: "P", Doing.DECODE: "D", Doing.PREEMPTED: "x", Doing.BETWEEN: "-"}
    told = "".join(signs.get(doing, " ") * n for doing, n in history.lane(range(1, 15)))
    assert told == "  PP-PDDxxPDD "
    for ids in ([2, 4, 7], [5], [13, 20], []):  # as after lost steps
        each = [history.doing(step_id) for step_id in ids]
        assert [doing for doing, n in history.lane(ids) for _ in range(n)] == each
    rows = lanes_panel(
        view.steps, store.history, Frame(60, 12, True), PLAIN_GLYPHS, selected="long"
    )
    assert "▸ long" in text(rows)
    assert "██·█▒▒✂✂█▒▒" in lane(rows, "long")
    assert "█▒▒▒▒▒▒▒▒▒▒▒▒▒     +1" in lane(rows, "short")
    back = lanes_panel(view.steps, store.history, Frame(60, 12, True), PLAIN_GLYPHS, cursor=3)
    assert lane(back, "long").rstrip(" │").endswith("+303")


def test_the_budget_is_a_bar() -> None:
    store, view = fed([record(1, num_decode_rows=16, num_prefill_tokens=112, num_padded_tokens=8)])
    rows = budget_panel(view, Frame(68, 3, True), PLAIN_GLYPHS)  # 64 cells for 256 tokens
    assert row_text(rows[1])[2:-2] == "▒" * 4 + "█" * 28 + "─" * 32
    assert "16 decode + 112 prefill of 256  pad 8" in text(rows)


def test_who_waits_and_why() -> None:
    store, view = fed(life())
    page = text(batch_page(view, store.history, 120, 38, COLOUR_GLYPHS, boxed=True))
    assert "waiting · 2" in page and "behind 1" in page
    first = next(line for line in page.splitlines() if "chatcmpl-c1" in line)
    assert "all places taken" in first and "640 tokens" in first and "0.3s" in first


def test_a_selected_request_is_kept_in_view() -> None:
    events: list[EngineEvent] = []
    for i in range(30):
        events += [event(KINDS.SCHEDULED, f"r{i:02}", 0), event(KINDS.FIRST_TOKEN, f"r{i:02}", 1)]
    store, view = fed([*events, record(1), record(2)])
    rows = text(lanes_panel(view.steps, store.history, Frame(60, 8, True), COLOUR_GLYPHS))
    assert "r00" in rows and "r20" not in rows
    rows = text(
        lanes_panel(view.steps, store.history, Frame(60, 8, True), COLOUR_GLYPHS, selected="r20")
    )
    assert "▸ r20" in rows and "r00" not in rows


def test_requests_from_before_are_known_by_the_snapshot() -> None:
    store = DashboardStore(started_ns=START)
    store.set_snapshot(busy_snapshot())
    store.apply([record(5), record(6)])
    chat, waiting = store.history.get("chat-1"), store.history.get("chatcmpl-c1")
    assert chat is not None and chat.doing(6) is Doing.DECODE
    assert waiting is not None and waiting.doing(6) is Doing.WAITING
    page = inspector_page(
        chat, store.view(NOW_NS).steps, NOW_NS, 100, 30, COLOUR_GLYPHS, boxed=True
    )
    assert "it was there before this screen" in text(page) and "before this screen" in text(page)


def test_histories_stay_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes_module, "MAX_REQUESTS", 50)
    book = RequestHistory()
    book.add_event(event(KINDS.QUEUED, "alive", 0))
    for i in range(200):
        book.add_event(event(KINDS.QUEUED, f"r{i}", 0))
        book.add_step(record(i, prefill_ids=(f"r{i}",), prefill_tokens=(5,)))
        book.add_event(event(KINDS.FINISHED, f"r{i}", 1, 1, "stop"))
    assert len(list(book)) == 50 and book.get("alive") is not None
    history = book.get("alive")
    assert history is not None
    for i in range(3 * lanes_module.MAX_RUNS):
        history.turn(1000 + i, Doing.DECODE if i % 2 else Doing.BETWEEN)
    assert len(history.run_starts) <= lanes_module.MAX_RUNS
    assert history.state is Doing.DECODE


def test_the_inspector_tells_a_whole_life() -> None:
    store, view = fed(life())
    page = text(
        inspector_page(
            store.history.get("long"), view.steps, NOW_NS, 110, 34, COLOUR_GLYPHS, boxed=True
        )
    )
    assert "request long" in page and "finished: length · 125 ms" in page
    for fact in (
        "queue       20 ms",
        "cache       200 of 1.0k prompt tokens found",
        "256 + 256 + 256 + 303 tokens in 4 chunks, steps 3 to 11, 40.0 ms",
        "first token 55 ms after arrival",
        "decode      5 tokens · 57.1 tok/s",
        "max 40.0 ms",
        "preempted   1 time: out of KV blocks",
        "finish      length",
        "parameters  temperature 0.7 max_tokens 9",
    ):
        assert fact in page, fact
    assert "max 40.0 ms" in page and "✂" in page and "q" in page


@pytest.mark.parametrize("width", [80, 110])
def test_the_inspector_says_what_was_found_and_why_no_more(width: int) -> None:
    ends = (("full", 1008), ("window 1,024", 1008), ("states", 200))
    hit = PrefixHit(200, HitLimit.STATES, 1008, ends=ends)
    store, view = fed(
        [
            event._replace(detail=str(hit)) if event.kind is RequestEventKind.SCHEDULED else event
            for event in life()
            if isinstance(event, RequestEvent)
        ]
    )
    history = store.history.get("long")
    rows = inspector_page(history, view.steps, NOW_NS, width, 21, COLOUR_GLYPHS, boxed=False)
    page = " ".join(text(rows).split())
    assert "200 of 1.0k prompt tokens found · full up to 1,008, window 1,024 up to 1,008," in page
    assert "states up to 200" in page
    assert "why no more no copy of the states between tokens 200 and 1,008" in page


def test_the_inspector_shows_the_drafts_of_a_request_while_it_runs_and_when_it_has_ended() -> None:
    store, view = fed(life())

    def page() -> str:
        history = store.history.get("long")
        return text(
            inspector_page(history, view.steps, NOW_NS, 110, 34, COLOUR_GLYPHS, boxed=False)
        )

    assert "drafts" not in page()
    running = request_view(
        "long", "decode", num_output_tokens=40, num_draft_tokens=120, num_accepted_tokens=30
    )
    store.set_snapshot(make_snapshot(requests=(running,), num_running=1))
    assert "drafts      30 of 120 kept, 25% · 4.0 tokens a step" in page()
    lost = event(KINDS.PREEMPTED, "long", 900, output=8)
    store.apply([lost._replace(num_draft_tokens=20, num_accepted_tokens=6)])
    assert "30 of 120 kept" in page(), "the snapshot was newer"
    ended = event(KINDS.FINISHED, "long", 990, output=60)
    store.apply([ended._replace(num_draft_tokens=160, num_accepted_tokens=40)])
    assert "drafts      40 of 160 kept, 25% · 3.0 tokens a step" in page()


def test_times_of_tokens_are_those_of_the_steps_in_which_it_decodes() -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng, history, at = random.Random(seed), History("r"), 40
    kinds = [kind for kind in Doing if kind is not Doing.OVER]
    for _ in range(30):
        history.turn(at, rng.choice(kinds))
        at += rng.randrange(1, 9)
    history.first_token_ns = 7
    for first, count in ((0, 300), (60, 40), (at, 5), (0, 0)):
        kept = tuple(step(i, end_ns=NOW_NS + i, landed_ns=i) for i in range(first, first + count))
        expected = [7, *(s.landed_ns for s in kept if history.doing(s.step_id) is Doing.DECODE)]
        assert lanes_module.token_times(history, kept) == expected


def test_the_inspector_looks_through_the_steps_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """There are a thousand steps, and it is drawn several times a second."""
    store, view = fed(life())
    looked: list[str] = []

    def token_times(history: History, steps: Sequence[StepRecord]) -> list[int]:
        looked.append(history.request_id)
        return lanes_module.token_times(history, steps)

    monkeypatch.setattr(inspector, "token_times", token_times)
    history = store.history.get("long")
    page = inspector_page(history, view.steps, NOW_NS, 110, 34, COLOUR_GLYPHS, boxed=True)
    assert "max 40.0 ms" in text(page) and looked == ["long"]


@pytest.mark.parametrize("size", [(30, 6), (80, 21), (120, 37), (200, 57)])
@pytest.mark.parametrize("boxed", [True, False])
def test_pages_fill_their_size(size: tuple[int, int], boxed: bool) -> None:
    width, height = size
    for events in (life(), []):
        store, view = fed(events)
        history = store.history.get("long")
        for rows in (
            batch_page(view, store.history, width, height, COLOUR_GLYPHS, boxed=boxed),
            inspector_page(history, view.steps, NOW_NS, width, height, COLOUR_GLYPHS, boxed=boxed),
        ):
            assert {row_width(row) for row in rows} == {width} and len(rows) <= height


async def test_on_the_screen() -> None:
    app = FrozenApp(chat_engine(), start_screen="dashboard")
    async with app.run_test(size=(80, 24)) as pilot:
        await ready(app, pilot)
        app.engine.scripted_snapshot = busy_snapshot()
        for one in life():
            app.engine.bus.publish(one)
        await app.dashboard.refresh_view()
        page = app.screen.query_one("#page", Canvas)
        await pilot.press("b")
        await pilot.pause()
        assert "token budget" in page.text and "short" in page.text
        await pilot.press("enter")
        await pilot.pause()
        assert "request chat-1" in page.text
        last = app.dashboard.view.requests[-1].request_id
        for _ in range(20):
            await pilot.press("down")
        assert last == "long" and "request long" in page.text and "finished: length" in page.text


def test_what_was_not_seen_of_a_request_is_not_made_up() -> None:
    kinds, store = RequestEventKind, DashboardStore(started_ns=0)
    store.apply([RequestEvent(2 * SECOND, "r", kinds.QUEUED, 9, 0, 0)])
    store.apply([RequestEvent(3 * SECOND, "r", kinds.FIRST_TOKEN, 9, 1, 0)])
    store.set_snapshot(make_snapshot(requests=(request_view("old", "decode"),), num_running=1))
    pages = [
        text(
            inspector_page(
                store.history.get(name), (), 5 * SECOND, 80, 30, COLOUR_GLYPHS, boxed=False
            )
        )
        for name in ("r", "old")
    ]
    assert "queue       not seen" in pages[0] and "parameters  the defaults" in pages[0]
    assert re.search(r"queue +━.* 1\.00 s", pages[0]), "until its first token at most"
    assert "parameters  sent before this screen opened" in pages[1]
