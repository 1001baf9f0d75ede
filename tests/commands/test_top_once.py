"""`termgen top --once`: what it prints of a server, and what it refuses."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from fake_engine import make_memory_ledger
from server_harness import serving
from tui_harness import busy_snapshot, chat_engine, step

from termgen.commands import cli, top_once
from termgen.commands.top_once import lines_of, run_once
from termgen.tui.feeds.attach import AttachError
from termgen.vocabulary.device.expert_load import ExpertLoad
from termgen.vocabulary.events import DraftChoice, DraftReason


async def watched(
    as_json: bool,
    capsys: pytest.CaptureFixture[str],
    *,
    drafts: DraftChoice | None = None,
    **snapshot: Any,
) -> str:
    """What is printed of a server whose engine makes a step every 20 ms. drafts: of each row there
    are two, and one stays."""
    engine = chat_engine(model_id="mine\x1b[2J", memory=make_memory_ledger())
    engine.scripted_snapshot = replace(busy_snapshot(), **snapshot)
    async with serving(engine) as server:
        printing = asyncio.create_task(
            asyncio.to_thread(run_once, [server.url], key=None, as_json=as_json)
        )
        index = 0
        while not printing.done():
            engine.bus.publish(
                step(
                    index,
                    end_ns=time.perf_counter_ns(),
                    num_running=4,
                    num_decode_rows=4,
                    num_sampled_tokens=4,
                    num_draft_tokens=8 * index if drafts is not None else 0,
                    num_accepted_tokens=4 * index if drafts is not None else 0,
                    draft_choice=drafts,
                )
            )
            index += 1
            await asyncio.sleep(0.02)
        assert await printing == 0
    return capsys.readouterr().out


async def test_figures_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    figures = json.loads(await watched(True, capsys))
    assert figures["healthy"] is True and figures["trouble"] is None
    assert figures["running"] == 4 and figures["max_num_seqs"] == 8
    assert 10 < figures["decode_tokens_per_s"] < 260, (
        "4 tokens every 20 ms, or later on a busy machine"
    )
    assert figures["latency_ms"]["step"]["p50"] == pytest.approx(20, rel=0.05)
    assert figures["latency_ms"]["ttft"] == {"p50": None, "p95": None, "p99": None}
    assert figures["limit"]["cause"] == "decodes" and "4 requests" in figures["limit"]["words"]
    assert sum(figures["kv_blocks"].values()) > 0 and 0 < figures["kv_usage"] < 1


async def test_the_load_of_experts(capsys: pytest.CaptureFixture[str]) -> None:
    assert json.loads(await watched(True, capsys))["experts"] is None
    load = ExpertLoad.of(np.array([[10, 10, 10, 10], [40, 0, 0, 0]], np.int64))
    assert json.loads(await watched(True, capsys, experts=load))["experts"] == {
        "experts": 4,
        "layers": 2,
        "imbalance": 2.5,
        "unused": 0.375,
        "busiest": [0, 0],
        "peaks": [1.0, 4.0],
    }
    lines = await watched(False, capsys, experts=load)
    assert "busiest expert 2.5 times an even share, 38% of them had no token" in lines


async def test_figures_in_lines(capsys: pytest.CaptureFixture[str]) -> None:
    text = await watched(False, capsys)
    assert "\x1b" not in text
    lines = text.splitlines()
    assert lines[0].startswith("mine") and "test GPU" in lines[0]
    assert lines[1].startswith("4 of 8 running, ")
    assert any(
        line.startswith("limited by decodes: a step of 4 requests takes 20") for line in lines
    )


CHOICE = DraftChoice(2, 4, DraftReason.BEST, 2, 162.0, 100.0, 0.5)


async def test_drafts_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    drafts = json.loads(await watched(True, capsys, drafts=CHOICE))["drafts"]
    assert drafts.pop("choice") == {
        "drafts": 2,
        "most": 4,
        "why": "best",
        "words": "drafts 2 of 4: 1.62x of none expected, at 50% kept",
        "compared": 2,
        "tokens_per_s": 162.0,
        "tokens_per_s_without": 100.0,
        "expected_kept_share": 0.5,
    }
    assert drafts["tokens_per_step"] == 2.0 and drafts["kept_share"] == 0.5
    assert drafts["drafted_per_s"] == pytest.approx(2 * drafts["kept_per_s"], abs=0.2)
    assert drafts["given_up_per_s"] == drafts["kept_per_s"] > 10


async def test_drafts_in_lines(capsys: pytest.CaptureFixture[str]) -> None:
    lines = (await watched(False, capsys, drafts=CHOICE)).splitlines()
    assert str(CHOICE) in lines
    assert any(
        line.startswith("2.00 tokens a step, ") and line.endswith(" given up a second")
        for line in lines
    )


async def test_drafts_that_were_not_compared(capsys: pytest.CaptureFixture[str]) -> None:
    drafts = json.loads(await watched(True, capsys, drafts=CHOICE.as_ran(1)))["drafts"]
    assert drafts["choice"]["words"] == "drafts 1 of 4: no more were found, or had room"
    assert drafts["choice"]["tokens_per_s"] is drafts["choice"]["compared"] is None


async def test_a_server_without_drafts(capsys: pytest.CaptureFixture[str]) -> None:
    figures = json.loads(await watched(True, capsys))
    assert figures["drafts"] is None
    assert not any("draft" in line or "a step," in line for line in lines_of(figures))


async def test_a_quiet_server_has_no_limit(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(top_once, "WATCHED_S", 0.2)
    async with serving(chat_engine()) as server:
        assert await asyncio.to_thread(run_once, [server.url], key=None, as_json=True) == 0
        figures = json.loads(capsys.readouterr().out)
        assert figures["limit"] is None and figures["running"] == 0
        assert not any(line.startswith("limited") for line in lines_of(figures))


def test_no_server_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(AttachError, match="no server at"):
        run_once(["http://127.0.0.1:9"], key=None, as_json=True, wait_s=0.0)
    assert cli.main(["top", "http://127.0.0.1:9", "--once", "--wait", "0"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--json"], "--json needs --once"),
        (["--once", "--record", "x"], "--once has no use for --record"),
        (["--once", "--replay", "x"], "--once has no use for --replay"),
    ],
)
def test_flags_that_do_not_go_together(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["top", *arguments]) == 2
    assert words in capsys.readouterr().err
