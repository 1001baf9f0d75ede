"""Limits that mark the dashboard's figures, by a sign and a colour, and ring."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from tui_harness import (
    MODEL,
    NOW_NS,
    SECOND,
    FrozenApp,
    chat_engine,
    feed_dashboard,
    ready,
    request_events,
    steps,
)

from termgen.config import UIConfig
from termgen.errors import ConfigError
from termgen.tui.dashboard.pages import overview
from termgen.tui.dashboard.pages.fleet_rows import ServerLine, fleet_rows
from termgen.tui.dashboard.state.store import DashboardStore, DashboardView
from termgen.tui.paint.frame import Frame
from termgen.tui.paint.spans import Row, row_text
from termgen.vocabulary.alerts import MOST, parse_alerts

ALL_BEYOND = ("ttft_p95_ms=100", "itl_p99_ms=30", "waiting=1", "kv_use=0.3", "preemptions_per_s=1")
NONE_BEYOND = ("ttft_p95_ms=9e3", "itl_p99_ms=900", "waiting=2", "kv_use=1", "preemptions_per_s=99")


def view(alerts: tuple[str, ...]) -> DashboardView:
    store = DashboardStore(started_ns=NOW_NS)
    run = [s._replace(num_preemptions=max(0, i - 290)) for i, s in enumerate(steps(300))]
    store.apply([*request_events(), *run])
    return replace(store.view(NOW_NS), alert_limits=parse_alerts(alerts))


def marked(rows: list[Row]) -> list[str]:
    """Words of the rows in the colour of faults."""
    return [text.strip() for row in rows for text, role in row if role == "bad/b" and text.strip()]


def test_each_limit_is_of_its_figure() -> None:
    assert view(ALL_BEYOND).beyond == set(MOST)
    assert not view(NONE_BEYOND).beyond and not view(()).beyond
    for entry in ALL_BEYOND:
        assert view((entry,)).beyond == {entry.partition("=")[0]}


def test_tiles_and_numbers_mark_what_is_beyond() -> None:
    bad, good = view(ALL_BEYOND), view(NONE_BEYOND)
    frame = Frame(60, 8, boxed=True)
    words = marked(overview.latency_tile(bad, frame))
    assert words[0] == "TTFT !" and words[2] == "ITL  !" and len(words) == 4
    assert "200 ms" in words[1]
    gauges = marked(overview.gauges_tile(bad, frame))
    assert [re.sub(" +", "", word) for word in gauges] == ["!2/2", "!36%", "!9/s"]
    small = marked(overview.numbers_lines(bad, 130, 3))
    assert {"!2", "!36%", "!9/s"} <= set(small) and len(small) == 5
    assert any(word.startswith("!") and "ms/" in word for word in small)
    assert marked(overview.numbers_lines(bad, 130, 1))[-1].startswith("!")
    for rows in (
        overview.latency_tile(good, frame),
        overview.gauges_tile(good, frame),
        overview.numbers_lines(good, 130, 3),
    ):
        assert not marked(rows) and not any("!" in row_text(row) for row in rows)


def test_the_list_of_servers_marks_it_too() -> None:
    for alerts, number in ((ALL_BEYOND, 3), (NONE_BEYOND, 0)):
        line = ServerLine("http://a", MODEL, view(alerts))
        row = row_text(fleet_rows([line], 100, 2, chosen=1, first=0)[1])
        assert len(re.findall("!", row)) == number, row


@pytest.mark.parametrize(
    ("entry", "why"),
    [
        ("ttft=5", "NAME=VALUE with a name of ttft_p95_ms, itl_p99_ms, waiting"),
        ("waiting", "NAME=VALUE"),
        ("waiting=many", "waiting must be a number, 0 or more"),
        ("waiting=-1", "waiting must be a number, 0 or more"),
        ("waiting=inf", "waiting must be a number, 0 or more"),
        ("kv_use=90", "kv_use must be a number, between 0 and 1"),
    ],
)
def test_wrong_limits_are_refused_in_a_line(entry: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why) as refusal:
        UIConfig(alert=("waiting=5", entry))
    assert refusal.value.param == "alert" and "\n" not in str(refusal.value)
    assert repr(entry) in str(refusal.value)


def test_the_last_of_several_holds() -> None:
    assert parse_alerts(("kv-use=0.5", "waiting=3", "kv_use = 0.9")) == (
        ("kv_use", 0.9),
        ("waiting", 3.0),
    )


@pytest.mark.parametrize(("bell", "rings"), [(True, 2), (False, 0)])
async def test_the_bell_rings_once_a_minute(
    bell: bool, rings: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ui = UIConfig(alert=("waiting=1",), alert_bell=bell)
    app = FrozenApp(chat_engine(), start_screen="dashboard", ui=ui)
    rung = list[Any]()
    monkeypatch.setattr(app, "bell", lambda: rung.append(app.now_ns))
    async with app.run_test(size=(120, 40)) as pilot:
        await ready(app, pilot)
        assert not rung, "nothing waits yet"
        await feed_dashboard(app, pilot)
        for _ in range(5):
            app.now_ns += 13 * SECOND
            await app.dashboard.refresh_view()
        assert len(rung) == rings
