"""Pictures of the screens. Look at the SVG files when they change, then `--snapshot-update`."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from fake_engine import Script, make_memory_ledger
from textual.pilot import Pilot
from textual.widgets import Input
from tool_samples import KNOWS_TOOLS, box_of, hermes
from tui_harness import (
    ANSWER,
    NOON,
    NOW_NS,
    SECOND,
    FrozenApp,
    TimedEngine,
    ask,
    busy_snapshot,
    chat_engine,
    drafted_steps,
    feed_dashboard,
    pieces,
    ready,
    steps,
    wait_until,
)

from termgen.config import UIConfig
from termgen.tui.chat.approval_panel import ApprovalPanel
from termgen.tui.chat.beside_screen import BesideScreen
from termgen.tui.chat.chat_screen import ChatScreen
from termgen.tui.chat.context_panel import ContextPanel
from termgen.tui.chat.lists.find_panel import FindPanel
from termgen.tui.chat.lists.tree_panel import TreePanel
from termgen.tui.chat.state.attachments import Attachment
from termgen.tui.chat.state.conversation import Conversation
from termgen.tui.chat.state.labels import Labels
from termgen.tui.chat.widgets.prompt import Prompt
from termgen.tui.dashboard.dashboard import DashboardScreen
from termgen.tui.dashboard.dashboard_keys import PAGES
from termgen.tui.paint.canvas import Canvas
from termgen.vocabulary.device.expert_load import ExpertLoad
from termgen.vocabulary.device.gpu_reading import GpuHistory, GpuReading
from termgen.vocabulary.events import DraftChoice, DraftReason
from termgen.vocabulary.memory_ledger import WeightReads

SIZES = [(80, 24), (120, 40), (200, 60)]
THEMES = ["termgen-dark", "termgen-light"]
SOURCE = "\nFrom [the paper](https://arxiv.org/abs/2308.16369).\n"
Compare = Callable[..., bool]


def app_of(pilot: Pilot[Any]) -> FrozenApp:
    assert isinstance(pilot.app, FrozenApp)
    return pilot.app


async def begin(pilot: Pilot[Any]) -> FrozenApp:
    app = app_of(pilot)
    await ready(app, pilot)
    for prompt in app.screen.query(Prompt):
        prompt.cursor_blink = False
    return app


async def talk(pilot: Pilot[Any]) -> None:
    """A question with a file, answered twice, with thoughts."""
    app = await begin(pilot)
    app.chat.files.attach((Attachment("scheduler.py", "x" * 410),))
    await ask(app, pilot, "Why does chunked prefill help?")
    await pilot.press("alt+r")
    await wait_until(pilot, lambda: "‹2/2›" in app.chat.transcript.plain_text)
    await wait_until(pilot, lambda: not app.chat.is_streaming)
    await pilot.pause()


async def stop_midway(pilot: Pilot[Any]) -> None:
    app = await begin(pilot)
    await ask(app, pilot, "Why?", wait=False)
    await wait_until(pilot, lambda: app.chat.conversation.turns[0].stats.output_tokens == 20)
    await pilot.press("escape")
    await pilot.pause()


async def busy(pilot: Pilot[Any]) -> None:
    app = await begin(pilot)
    await feed_dashboard(app, pilot)


async def help_shown(pilot: Pilot[Any]) -> None:
    await begin(pilot)
    await pilot.press("f1")
    await pilot.pause()


@pytest.mark.parametrize("size", SIZES[:2], ids=str)
def test_chat_empty(snap_compare: Compare, size: tuple[int, int]) -> None:
    assert snap_compare(FrozenApp(chat_engine()), terminal_size=size, run_before=begin)


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_chat_answer(snap_compare: Compare, size: tuple[int, int], theme: str) -> None:
    script = Script(pieces=pieces(f"<think>Each step has a budget.</think>{ANSWER}{SOURCE}"))
    app = FrozenApp(chat_engine(script), ui=UIConfig(theme=theme))
    assert snap_compare(app, terminal_size=size, run_before=talk)


def test_chat_stopped(snap_compare: Compare) -> None:
    engine = chat_engine(Script(pieces=pieces(ANSWER), hold_after=20, num_cached_tokens=8))
    assert snap_compare(FrozenApp(engine), terminal_size=(80, 24), run_before=stop_midway)


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_dashboard_busy(snap_compare: Compare, size: tuple[int, int], theme: str) -> None:
    app = FrozenApp(chat_engine(), start_screen="dashboard", ui=UIConfig(theme=theme))
    assert snap_compare(app, terminal_size=size, run_before=busy)


@pytest.mark.parametrize("page", ["o", "g"])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_dashboard_gpu(
    snap_compare: Compare, monkeypatch: pytest.MonkeyPatch, size: tuple[int, int], page: str
) -> None:
    async def with_gpu(pilot: Pilot[Any]) -> None:
        app = await begin(pilot)
        await feed_dashboard(app, pilot)
        app.now_ns += SECOND  # steps of which the energy is known
        monkeypatch.setattr(DashboardScreen, "_gpu_history", lambda screen: gpu_readings(app))
        app.engine.bus.publish(steps(1, now_ns=app.now_ns, first_id=300)[0])
        await app.dashboard.refresh_view()
        await pilot.press(page)
        await pilot.pause()

    app = FrozenApp(chat_engine(), start_screen="dashboard")
    assert snap_compare(app, terminal_size=size, run_before=with_gpu)


def gpu_readings(app: FrozenApp) -> GpuHistory:
    """Two minutes: idle at first, then at the cap of its power."""
    return tuple(
        GpuReading(
            time_ns=app.now_ns - age * SECOND,
            busy=0.02 if age > 20 else 0.9 + age % 3 / 100,
            used_bytes=71 * 2**30,
            total_bytes=79 * 2**30,
            power_w=78.0 + age % 2 if age > 20 else 683.0 - age % 5,
            power_limit_w=685.0,
            energy_j=1e6 - 680.0 * age,
            sm_mhz=1605 if age <= 20 else 345,
            max_sm_mhz=1980,
            memory_mhz=3201,
            temperature_c=71,
            clock_reasons=("idle",) if age > 20 else ("power cap",),
        )
        for age in range(119, -1, -1)
    )


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_dashboard_experts(snap_compare: Compare, size: tuple[int, int], device: str) -> None:
    rng = np.random.default_rng(0)
    counts = rng.poisson(rng.gamma(0.7, 60.0, (48, 128)))

    async def with_experts(pilot: Pilot[Any]) -> None:
        app = await begin(pilot)
        await feed_dashboard(app, pilot)
        app.now_ns += SECOND
        load = ExpertLoad.of(counts) if device == "cpu" else None
        app.engine.scripted_snapshot = replace(busy_snapshot(app.now_ns), experts=load)
        await app.dashboard.refresh_view()
        await pilot.press("g")
        await pilot.pause()

    memory = make_memory_ledger(reads=WeightReads(always_bytes=10**9, experts_bytes=10**10))
    app = FrozenApp(chat_engine(memory=memory, device=device), start_screen="dashboard")
    assert snap_compare(app, terminal_size=size, run_before=with_experts)


@pytest.mark.parametrize("size", [(80, 24), (120, 40)], ids=str)
def test_dashboard_hour(snap_compare: Compare, size: tuple[int, int]) -> None:
    async def an_hour(pilot: Pilot[Any]) -> None:
        app = await begin(pilot)
        watch = app.dashboard._event_reader._watch
        assert watch is not None
        for minute in range(50, 0, -1):
            until = NOW_NS - minute * 60 * SECOND
            records = steps(100 * (1 + minute % 7), now_ns=until, first_id=minute * 10_000)
            watch.history.add(r._replace(num_preemptions=(50 - minute) // 9) for r in records)
        await feed_dashboard(app, pilot)
        watch.read()
        await pilot.press("w", "w", "w", "w", "w")
        await pilot.pause()

    app = FrozenApp(chat_engine(), start_screen="dashboard")
    assert snap_compare(app, terminal_size=size, run_before=an_hour)


@pytest.mark.parametrize("size", [(80, 24), (120, 40)], ids=str)
def test_dashboard_alerts(snap_compare: Compare, size: tuple[int, int]) -> None:
    ui = UIConfig(alert=("ttft_p95_ms=150", "waiting=1", "kv_use=0.3"))
    app = FrozenApp(chat_engine(), start_screen="dashboard", ui=ui)
    assert snap_compare(app, terminal_size=size, run_before=busy)


def test_dashboard_idle(snap_compare: Compare) -> None:
    app = FrozenApp(chat_engine(), start_screen="dashboard")
    assert snap_compare(app, terminal_size=(80, 24), run_before=begin)


@pytest.mark.parametrize("theme", ["termgen-contrast", "termgen-colourblind"])
def test_dashboard_themes(snap_compare: Compare, theme: str) -> None:
    app = FrozenApp(chat_engine(), start_screen="dashboard", ui=UIConfig(theme=theme))
    assert snap_compare(app, terminal_size=(120, 40), run_before=busy)


def test_dashboard_without_colours(snap_compare: Compare, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    app = FrozenApp(chat_engine(), start_screen="dashboard")
    assert snap_compare(app, terminal_size=(80, 24), run_before=busy)


@pytest.mark.parametrize(
    ("size", "theme"), [(size, THEMES[i % 2]) for i, size in enumerate(SIZES)], ids=str
)
@pytest.mark.parametrize("key", [page.key for page in PAGES[1:]])
def test_dashboard_pages(
    snap_compare: Compare, key: str, size: tuple[int, int], theme: str
) -> None:
    async def turn_to(pilot: Pilot[Any]) -> None:
        await busy(pilot)
        await pilot.press("down", key)
        await pilot.pause()

    app = FrozenApp(chat_engine(), start_screen="dashboard", ui=UIConfig(theme=theme))
    assert snap_compare(app, terminal_size=size, run_before=turn_to)


@pytest.mark.parametrize("theme", THEMES)
def test_chat_guessed(snap_compare: Compare, theme: str) -> None:
    """An answer of which five pieces of nine were guessed."""

    async def tint(pilot: Pilot[Any]) -> None:
        app = await begin(pilot)
        generate, number = app.engine.generate, itertools.count()

        async def guessing(*args: Any, **options: Any) -> Any:
            async for delta in generate(*args, **options):
                is_guess = next(number) % 9 > 3
                yield replace(delta, drafted=((0, len(delta.text)),) if is_guess else ())

        app.engine.generate = guessing  # type: ignore[method-assign]
        await pilot.press("alt+h")
        await ask(app, pilot, "Why does chunked prefill help?")
        app.clear_notifications()
        await pilot.pause()

    app = FrozenApp(chat_engine(num_drafts=4), ui=UIConfig(theme=theme))
    assert snap_compare(app, terminal_size=(120, 40), run_before=tint)


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_dashboard_drafts(snap_compare: Compare, size: tuple[int, int], theme: str) -> None:
    async def guess(pilot: Pilot[Any]) -> None:
        app = await begin(pilot)
        choice = DraftChoice(4, 7, DraftReason.BEST, 4, 1315.0, 812.0, 0.5)
        await feed_dashboard(app, pilot, drafted_steps(300, choice=choice))
        await pilot.press("b")
        await pilot.pause()

    app = FrozenApp(chat_engine(), start_screen="dashboard", ui=UIConfig(theme=theme))
    assert snap_compare(app, terminal_size=size, run_before=guess)


async def list_chats(pilot: Pilot[Any]) -> None:
    app = await begin(pilot)
    for age, question in ((40, "Paged attention"), (3, "A haiku about GPUs"), (1, "Log lines")):
        talk = Conversation()
        talk.ask(question, now_s=0.0, model_id="smollm2-135m").answer = "About that, much."
        app.chat.autosave.save_all(talk, app.chat.settings.params)
        used_s, session_id = NOON - age * 86_400, talk.session_id
        await app.chats.read(
            lambda database, values=(used_s, session_id): database._connection.execute(
                "UPDATE sessions SET updated_s = ? WHERE session_id = ?", values
            )
        )
    await pilot.press("ctrl+b", "slash", *"abou")
    await wait_until(pilot, lambda: "About that" in app.chat.panel.session_list.text)
    await pilot.press("down", "down")
    app.chat.panel.search.cursor_blink = False
    await pilot.pause()


@pytest.mark.parametrize("size", [(80, 24), (120, 40)], ids=str)
def test_chat_list(snap_compare: Compare, size: tuple[int, int]) -> None:
    assert snap_compare(FrozenApp(chat_engine()), terminal_size=size, run_before=list_chats)


async def list_pins_and_tags(pilot: Pilot[Any]) -> None:
    app = await begin(pilot)
    for question, tags, is_pinned in (
        ("Which GPU shall I buy for a model of eight billion weights?", ("hardware",), True),
        ("A haiku about GPUs", (), False),
        ("Log lines", ("work", "urgent", "python"), False),
    ):
        talk = Conversation()
        talk.ask(question, now_s=0.0, model_id="smollm2-135m").answer = "About that, much."
        talk.labels = Labels(is_pinned, tags)
        app.chat.autosave.save_all(talk, app.chat.settings.params)
        used = (NOON, talk.session_id)
        await app.chats.read(
            lambda database, used=used: database._connection.execute(
                "UPDATE sessions SET updated_s = ? WHERE session_id = ?", used
            )
        )
    await pilot.press("ctrl+b")
    await wait_until(pilot, lambda: "#work" in app.chat.panel.session_list.text)
    await pilot.press("home")
    await pilot.pause()


@pytest.mark.parametrize("size", [(80, 24), (120, 40)], ids=str)
def test_chat_list_with_pins_and_tags(snap_compare: Compare, size: tuple[int, int]) -> None:
    assert snap_compare(FrozenApp(chat_engine()), terminal_size=size, run_before=list_pins_and_tags)


@pytest.mark.parametrize("size", [(80, 24), (120, 40)], ids=str)
def test_chat_found(snap_compare: Compare, size: tuple[int, int]) -> None:
    async def find_words(pilot: Pilot[Any]) -> None:
        app = await begin(pilot)
        await ask(app, pilot, "Why does chunked prefill help each decode?")
        await ask(app, pilot, "/find decode token", wait=False)
        await wait_until(pilot, lambda: isinstance(app.screen, FindPanel))
        await pilot.press("enter")
        await wait_until(pilot, lambda: isinstance(app.screen, ChatScreen))
        await pilot.pause()

    assert snap_compare(FrozenApp(chat_engine()), terminal_size=size, run_before=find_words)


@pytest.mark.parametrize("size", [(80, 24), (120, 40)], ids=str)
def test_chat_tree(snap_compare: Compare, size: tuple[int, int]) -> None:
    async def show_tree(pilot: Pilot[Any]) -> None:
        app = await begin(pilot)
        await ask(app, pilot, "Why does chunked prefill help?")
        await ask(app, pilot, "And what does it cost?")
        await pilot.press("alt+r")
        await wait_until(pilot, lambda: len(app.chat.conversation.turns[0].children) == 2)
        await wait_until(pilot, lambda: not app.chat.is_streaming)
        await ask(app, pilot, "Is it worth that?")
        app.chat.dialogue.mark(app.chat.conversation.turns[1])
        await pilot.press("alt+e")
        app.chat.prompt.text = "And what does it cost on a small GPU?"
        await pilot.press("enter")
        await wait_until(pilot, lambda: len(app.chat.conversation.turns[0].children) == 3)
        await wait_until(pilot, lambda: not app.chat.is_streaming)
        await pilot.press("alt+d")
        await wait_until(pilot, lambda: isinstance(app.screen, TreePanel))
        app.screen.query_one(Input).cursor_blink = False
        await pilot.press("up")
        await pilot.pause()

    assert snap_compare(FrozenApp(chat_engine()), terminal_size=size, run_before=show_tree)


class OtherEngine(TimedEngine):
    """A server beside the engine, whose answer is half written."""

    names: tuple[tuple[str, str], ...] = ()

    async def open(self, _wanted: str) -> OtherEngine:
        return self

    async def aclose(self) -> None:
        return


@pytest.mark.parametrize("size", [(80, 24), (120, 40)], ids=str)
def test_chat_beside(snap_compare: Compare, size: tuple[int, int]) -> None:
    other = OtherEngine(
        script=Script(pieces=pieces(ANSWER), hold_after=30),
        model=chat_engine(model_id="qwen3-8b").model,
    )

    async def compare(pilot: Pilot[Any]) -> None:
        app = await begin(pilot)
        await ask(app, pilot, "Why does chunked prefill help?")
        await ask(app, pilot, "/beside http://gpu-box:8000", wait=False)
        await wait_until(pilot, lambda: isinstance(app.screen, BesideScreen))
        assert isinstance(app.screen, BesideScreen)
        small, large = app.screen.columns
        await wait_until(pilot, lambda: not small.is_streaming)
        await wait_until(pilot, lambda: large.turn.stats.output_tokens == 30)
        large.draw()
        app.clear_notifications()
        await pilot.pause()

    app = FrozenApp(chat_engine(), others=other)
    assert snap_compare(app, terminal_size=size, run_before=compare)


def test_theme_chooser(snap_compare: Compare) -> None:
    async def choose(pilot: Pilot[Any]) -> None:
        await busy(pilot)
        await pilot.press("f9", "home", "down", "down", "down", "down")
        await pilot.pause()

    app = FrozenApp(chat_engine(), start_screen="dashboard")
    assert snap_compare(app, terminal_size=(80, 24), run_before=choose)


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_help(snap_compare: Compare, size: tuple[int, int], theme: str) -> None:
    app = FrozenApp(chat_engine(), ui=UIConfig(theme=theme))
    assert snap_compare(app, terminal_size=size, run_before=help_shown)


async def tool_asked(pilot: Pilot[Any]) -> None:
    """A call that waits for approval, over the answer with it."""
    app = await begin(pilot)
    await ask(app, pilot, "What does it say?", wait=False)
    await wait_until(pilot, lambda: isinstance(app.screen, ApprovalPanel))
    await pilot.pause()


@pytest.mark.parametrize("theme", THEMES)
def test_approval(snap_compare: Compare, theme: str) -> None:
    call = "Let me see.\n" + hermes("s_echo", '{"text": "a\\u001b[31mb"}')
    engine = chat_engine(Script(pieces=pieces(call)), tool_format=KNOWS_TOOLS)
    app = FrozenApp(engine, ui=UIConfig(theme=theme), toolbox=box_of())
    assert snap_compare(app, terminal_size=(80, 24), run_before=tool_asked)


FULL_SUMMARY = (
    "The user plans a trip to Oslo in May with Ann and two dogs, has booked the night train, and "
    "asked what to pack. Open: whether the hotel takes dogs."
)


def full_app() -> FrozenApp:
    """A chat that has summaries made in a small context."""

    def script(call: Any) -> Script:
        is_order = call.prompt.messages[-1]["content"].startswith("Summarise the conversation")
        return Script(
            pieces=pieces(FULL_SUMMARY) if is_order else ("Take a warm coat along. ",) * 4
        )

    ui = UIConfig(system_prompt="Be brief.", max_tokens=64, context_policy="summarise")
    return FrozenApp(chat_engine(script, max_model_len=4096), ui=ui)


async def full(pilot: Pilot[Any]) -> None:
    app = await begin(pilot)
    for number in range(1, 30):
        words = "What else should be in the bags of each of us? " * 8
        await ask(app, pilot, f"{number}. {words}")
        if app.chat.conversation.cut.num_left_out:
            break
    await wait_until(pilot, lambda: app.chat.dialogue.fitting.meter is not None)
    await pilot.pause()


@pytest.mark.parametrize("size", SIZES[:2])
def test_chat_with_a_summary(snap_compare: Compare, size: tuple[int, int]) -> None:
    assert snap_compare(full_app(), terminal_size=size, run_before=full)


async def full_context(pilot: Pilot[Any]) -> None:
    await full(pilot)
    app = app_of(pilot)
    await pilot.press("alt+k")
    await wait_until(pilot, lambda: isinstance(app.screen, ContextPanel))
    meter = app.screen.query_one("#context-meter", Canvas)
    await wait_until(pilot, lambda: "history" in meter.text)
    await pilot.pause()


@pytest.mark.parametrize("size", SIZES[:2])
def test_context_panel(snap_compare: Compare, size: tuple[int, int]) -> None:
    assert snap_compare(full_app(), terminal_size=size, run_before=full_context)
